#!/bin/sh
# JaxMARL's settings of IPPO without memory, three seeds each: 10M steps of MPE, which are the
# defaults, and 5M of Overcooked. One program a seed, which logs every episode. The runs of the
# table in docs/rl-algorithms/ippo-jax.md are those of MPE, with --total-timesteps 1000000.
set -e
for seed in 1 2 3; do
    python cleanrl/ippo_jax.py --seed $seed "$@"
    python cleanrl/ippo_jax.py --env-id overcooked-coord_ring --seed $seed \
        --total-timesteps 5000000 "$@"
done
