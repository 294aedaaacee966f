#!/bin/sh
# The runs behind the Atari tables of docs/rl-algorithms/{dqn,c51}-atari.md, side by side on a machine
# with a GPU; the JAX files were stopped after 700 seconds, the others, in a later session, after
# 1,640.
set -e
for file in dqn_atari c51_atari dqn_atari_jax c51_atari_jax; do
    XLA_PYTHON_CLIENT_PREALLOCATE=false python cleanrl/$file.py --env-id PongNoFrameskip-v4 &
done
wait
