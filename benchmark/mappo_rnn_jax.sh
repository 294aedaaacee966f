#!/bin/sh
# JaxMARL's settings of MAPPO on SMAX 2s3z, 10M steps, three seeds: the defaults. One program a
# seed, which logs every episode.
set -e
for seed in 1 2 3; do
    python cleanrl/mappo_rnn_jax.py --seed $seed "$@"
done
