#!/bin/sh
# The runs behind the results of docs/rl-algorithms/sac-atari.md: three games, three seeds, every
# flag at its default.
exec python -m cleanrl_utils.benchmark \
    --env-ids BeamRiderNoFrameskip-v4 PongNoFrameskip-v4 BreakoutNoFrameskip-v4 \
    --command "python cleanrl/sac_atari.py" \
    --num-seeds 3 "$@"
