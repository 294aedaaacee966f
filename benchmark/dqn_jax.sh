#!/bin/sh
# The runs behind the table of docs/rl-algorithms/dqn.md: 9 runs of 500k steps, on gymnax's environments.
set -e
for seed in 1 2 3; do
    for env_id in CartPole-v1 Acrobot-v1 MountainCar-v0; do
        OMP_NUM_THREADS=1 python cleanrl/dqn_jax.py --env-id $env_id --seed $seed
    done
done
