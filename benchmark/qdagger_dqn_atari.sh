#!/bin/sh
# The runs for the results of docs/rl-algorithms/qdagger.md, none of which has been made yet: the
# three games that are published, three seeds, each with a teacher of its own, every flag at its
# default. Once for PyTorch, once for JAX.
set -e
for suffix in "" _jax; do
    for env_id in BreakoutNoFrameskip-v4 PongNoFrameskip-v4 BeamRiderNoFrameskip-v4; do
        for seed in 1 2 3; do
            python cleanrl/dqn_atari$suffix.py --env-id $env_id --seed $seed
            teacher=$(ls -d runs/${env_id}__dqn_atari${suffix}__${seed}__* | tail -n 1)
            python cleanrl/qdagger_dqn_atari$suffix.py --env-id $env_id --seed $seed \
                --teacher "$teacher"
        done
    done
done
