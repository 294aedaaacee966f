#!/bin/sh
# The runs behind the table of docs/rl-algorithms/ppo.md: three environments, three seeds, every flag at its default.
set -e
for env_id in CartPole-v1 Acrobot-v1 MountainCar-v0; do
    for seed in 1 2 3; do
        OMP_NUM_THREADS=1 python cleanrl/ppo.py --env-id $env_id --seed $seed
    done
done
