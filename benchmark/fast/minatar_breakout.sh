#!/bin/sh
# MinAtar's Breakout to a return of 15 within a minute on two CPU cores: small minibatches, and a
# learning rate twice that of PQN's authors. The best of six settings, one seed each.
exec python cleanrl/pqn_jax.py --env-id Breakout-MinAtar --total-timesteps 600_000 \
    --num-envs 32 --num-steps 32 --num-minibatches 32 --update-epochs 2 --learning-rate 1e-3 \
    --exploration-fraction 0.1 "$@"
