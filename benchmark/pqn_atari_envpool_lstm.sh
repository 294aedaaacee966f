#!/bin/sh
# The runs for the results of docs/rl-algorithms/pqn-atari-envpool-lstm.md, of which none has been
# made: the five games that are published, three seeds, every flag at its default.
exec python -m cleanrl_utils.benchmark \
    --env-ids Breakout-v5 Pong-v5 SpaceInvaders-v5 BeamRider-v5 MsPacman-v5 \
    --command "python cleanrl/pqn_atari_envpool_lstm.py" \
    --num-seeds 3 "$@"
