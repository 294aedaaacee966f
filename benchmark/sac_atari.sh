#!/bin/sh
# The runs behind the results of docs/rl-algorithms/sac.md: three games, three seeds, every flag at its default.
set -e
for env_id in BeamRiderNoFrameskip-v4 PongNoFrameskip-v4 BreakoutNoFrameskip-v4; do
    for seed in 1 2 3; do
        python cleanrl/sac_atari.py --env-id $env_id --seed $seed
    done
done
