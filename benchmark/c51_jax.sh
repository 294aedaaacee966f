#!/bin/sh
# The runs behind the table of docs/rl-algorithms/c51-jax.md: 30 runs of 500k steps, default
# flags, on gymnax's environments.
exec python -m cleanrl_utils.benchmark \
    --env-ids CartPole-v1 Acrobot-v1 MountainCar-v0 \
    --command "python cleanrl/c51_jax.py" \
    --num-seeds 10 "$@"
