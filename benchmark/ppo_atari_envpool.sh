#!/bin/sh
# The runs behind the table of docs/rl-algorithms/ppo.md, at the same time on a machine with a GPU; stopped there after 8 minutes.
set -e
for env_id in Pong-v5 Breakout-v5; do
    python cleanrl/ppo_atari_envpool.py --env-id $env_id --num-pools 1 --checkpoint-interval 50 &
done
wait
