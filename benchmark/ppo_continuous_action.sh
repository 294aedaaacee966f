#!/bin/sh
# The runs behind the table of docs/rl-algorithms/ppo-continuous-action.md: seven environments,
# three seeds, every flag at its default; and two seeds more of Humanoid.
set -e
python -m cleanrl_utils.benchmark \
    --env-ids HalfCheetah-v4 Walker2d-v4 Hopper-v4 InvertedPendulum-v4 Humanoid-v4 Swimmer-v4 \
    Reacher-v4 \
    --command "python cleanrl/ppo_continuous_action.py" \
    --num-seeds 3 "$@"
exec python -m cleanrl_utils.benchmark \
    --env-ids Humanoid-v4 \
    --command "python cleanrl/ppo_continuous_action.py" \
    --start-seed 4 --num-seeds 2 "$@"
