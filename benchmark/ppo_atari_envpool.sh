#!/bin/sh
# The published protocol of docs/rl-algorithms/ppo-atari-envpool.md:
# three games, three seeds, 10M steps each, default flags, on a machine with a GPU.
exec python -m cleanrl_utils.benchmark \
    --env-ids Breakout-v5 Pong-v5 BeamRider-v5 \
    --command "python cleanrl/ppo_atari_envpool.py --checkpoint-interval 50" \
    --num-seeds 3 "$@"
