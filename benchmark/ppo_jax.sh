#!/bin/sh
# Three environments, ten seeds each, every flag at its default: the ten runs of an environment
# are one program.
set -e
for env_id in CartPole-v1 Acrobot-v1 MountainCar-v0; do
    python cleanrl/ppo_jax.py --env-id $env_id --num-seeds 10 "$@"
done
