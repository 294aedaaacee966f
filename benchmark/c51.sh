#!/bin/sh
# The runs behind the table of docs/rl-algorithms/c51.md: 30 runs of 500k steps, 90 seconds each
# on an idle core.
exec python -m cleanrl_utils.benchmark \
    --env-ids CartPole-v1 Acrobot-v1 MountainCar-v0 \
    --command "python cleanrl/c51.py" \
    --num-seeds 10 "$@"
