#!/bin/sh
# The runs of Taxi-v4 in docs/rl-algorithms/ppo.md: with and without masks, three seeds, every other flag at its default.
# What ran without them is in a folder of its own: results/ppo_multidiscrete_no_mask is exported from there.
set -e
mkdir -p no_mask
for seed in 1 2 3; do
    OMP_NUM_THREADS=1 python cleanrl/ppo_multidiscrete.py --seed $seed
    (cd no_mask && OMP_NUM_THREADS=1 python ../cleanrl/ppo_multidiscrete.py --no-mask --seed $seed)
done
