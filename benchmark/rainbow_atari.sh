#!/bin/sh
# The runs for the results of docs/rl-algorithms/rainbow.md, of which the start of one was made:
# Pong and the six games that are published, three seeds, every flag at its default.
exec python -m cleanrl_utils.benchmark \
    --env-ids PongNoFrameskip-v4 AlienNoFrameskip-v4 AssaultNoFrameskip-v4 \
    GopherNoFrameskip-v4 YarsRevengeNoFrameskip-v4 \
    SpaceInvadersNoFrameskip-v4 MsPacmanNoFrameskip-v4 \
    --command "python cleanrl/rainbow_atari.py" \
    --num-seeds 3 "$@"
