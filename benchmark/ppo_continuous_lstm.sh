#!/bin/sh
# The published protocol of docs/rl-algorithms/ppo-continuous-lstm.md:
# the tasks of ppo_continuous_action.py, three seeds, 1M steps each, default flags.
exec python -m cleanrl_utils.benchmark \
    --env-ids HalfCheetah-v4 Hopper-v4 InvertedPendulum-v4 \
    --command "python cleanrl/ppo_continuous_lstm.py" \
    --num-seeds 3 "$@"
