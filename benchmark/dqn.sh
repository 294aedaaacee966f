#!/bin/sh
# The runs behind the table of docs/rl-algorithms/dqn.md: 9 runs of 500k steps, three minutes each
# on one core.
exec python -m cleanrl_utils.benchmark \
    --env-ids CartPole-v1 Acrobot-v1 MountainCar-v0 \
    --command "python cleanrl/dqn.py" \
    --num-seeds 3 "$@"
