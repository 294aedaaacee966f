#!/bin/sh
# The runs of Taxi-v4 in docs/rl-algorithms/ppo.md: with and without the masks, three seeds, every other flag at its default.
set -e
for seed in 1 2 3; do
    OMP_NUM_THREADS=1 python cleanrl/ppo_multidiscrete.py --seed $seed
    OMP_NUM_THREADS=1 python cleanrl/ppo_multidiscrete.py --exp-name ppo_multidiscrete_no_mask --no-mask --seed $seed
done
