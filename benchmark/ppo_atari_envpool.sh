#!/bin/sh
# The runs behind the tables of docs/rl-algorithms/ppo-atari-envpool.md, on machines with a GPU. Pong was
# stopped after 3.0M steps, and the first Breakout, made in an earlier session with Pong beside
# it, after 1.55M; the last two ran at the same time.
set -e
python cleanrl/ppo_atari_envpool.py --num-pools 1 --checkpoint-interval 50
python cleanrl/ppo_atari_envpool.py --env-id Pong-v5 --checkpoint-interval 50 &
python cleanrl/ppo_atari_envpool.py --num-envs 128 --exp-name ppo_atari_envpool_128 \
    --checkpoint-interval 10
wait
