#!/bin/sh
# The published protocol of docs/rl-algorithms/dqn-atari.md:
# three games, three seeds, 10M steps each, default flags, on a machine with a GPU.
exec python -m cleanrl_utils.benchmark \
    --env-ids PongNoFrameskip-v4 BeamRiderNoFrameskip-v4 BreakoutNoFrameskip-v4 \
    --command "python cleanrl/dqn_atari.py" \
    --num-seeds 3 "$@"
