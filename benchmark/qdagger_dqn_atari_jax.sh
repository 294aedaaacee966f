#!/bin/sh
# The published protocol of docs/rl-algorithms/qdagger-jax.md:
# three games, three seeds, 10M steps each, each with a teacher of its own, default flags.
set -e
for env_id in BreakoutNoFrameskip-v4 PongNoFrameskip-v4 BeamRiderNoFrameskip-v4; do
    for seed in 1 2 3; do
        python cleanrl/dqn_atari_jax.py --env-id $env_id --seed $seed
        teacher=$(ls -d runs/${env_id}__dqn_atari_jax__${seed}__* | tail -n 1)
        python cleanrl/qdagger_dqn_atari_jax.py --env-id $env_id --seed $seed \
            --teacher "$teacher" "$@"
    done
done
