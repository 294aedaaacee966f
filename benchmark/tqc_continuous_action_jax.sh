#!/bin/sh
# The runs behind the results of docs/rl-algorithms/tqc.md: three environments, three seeds, every flag at its default.
set -e
for env_id in HalfCheetah-v4 Walker2d-v4 Hopper-v4; do
    for seed in 1 2 3; do
        OMP_NUM_THREADS=1 python cleanrl/tqc_continuous_action_jax.py --env-id $env_id --seed $seed
    done
done
