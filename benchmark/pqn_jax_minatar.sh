#!/bin/sh
# MinAtar's games with the settings of PQN's authors, ten seeds each, on CPU cores: 10 minutes a
# run. One program a seed, which logs every episode; --num-seeds 10 logs means.
exec python -m cleanrl_utils.benchmark \
    --env-ids Asterix-MinAtar Breakout-MinAtar Freeway-MinAtar SpaceInvaders-MinAtar \
    --command "python cleanrl/pqn_jax.py --exp-name pqn_jax_minatar --total-timesteps 10000000 \
        --num-envs 128 --num-steps 32 --num-minibatches 32 --update-epochs 2 \
        --learning-rate 5e-4 --exploration-fraction 0.1" \
    --num-seeds 10 "$@"
