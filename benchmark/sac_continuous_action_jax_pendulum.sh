#!/bin/sh
# SAC on Pendulum-v1, beside which docs/rl-algorithms/simba-v2.md shows SimbaV2: three seeds.
set -e
for seed in 1 2 3; do
    python cleanrl/sac_continuous_action_jax.py --env-id Pendulum-v1 --seed $seed \
        --exp-name sac_continuous_action_jax_pendulum --total-timesteps 20000 \
        --gamma 0.95 --tau 0.02 --batch-size 64 --learning-starts 500 --buffer-size 20000 \
        --policy-lr 0.001 --q-lr 0.001 "$@"
done
