#!/bin/sh
# The runs for the results of docs/rl-algorithms/pqn-atari-envpool.md, of which none has been
# made: the five games that are published, three seeds, every flag at its default. The settings of
# the paper: --num-envs 128 --num-steps 32 --num-minibatches 32 --update-epochs 2 --end-e 0.001
# --no-anneal-lr --total-timesteps 50000000
exec python -m cleanrl_utils.benchmark \
    --env-ids Breakout-v5 Pong-v5 SpaceInvaders-v5 BeamRider-v5 MsPacman-v5 \
    --command "python cleanrl/pqn_atari_envpool.py" \
    --num-seeds 3 "$@"
