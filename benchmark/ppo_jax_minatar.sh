#!/bin/sh
# MinAtar's games, ten seeds each, on a GPU. The flags that differ from the defaults keep Breakout
# from being sure of itself too early.
set -e
flags="--num-envs 64 --total-timesteps 10_000_000 --learning-rate 1e-3 --ent-coef 0.05"
flags="$flags --exp-name ppo_jax_minatar"
for game in Asterix Breakout Freeway SpaceInvaders; do
    python cleanrl/ppo_jax.py --env-id $game-MinAtar --num-seeds 10 $flags "$@"
done
