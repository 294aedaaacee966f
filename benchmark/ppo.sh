#!/bin/sh
# The runs behind the table of docs/rl-algorithms/ppo.md: 30 runs of 500k steps, default flags.
exec python -m cleanrl_utils.benchmark \
    --env-ids CartPole-v1 Acrobot-v1 MountainCar-v0 \
    --command "python cleanrl/ppo.py" \
    --num-seeds 10 "$@"
