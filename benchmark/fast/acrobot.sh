#!/bin/sh
# Acrobot-v1 to a return of -100 within seconds on two CPU cores, with the flags of cartpole.sh and
# twice the steps.
exec python cleanrl/ppo_jax.py --env-id Acrobot-v1 --total-timesteps 98_304 \
    --num-envs 4 --num-steps 64 --num-minibatches 4 --update-epochs 7 --learning-rate 0.005 \
    --gamma 0.98 --gae-lambda 0.87 --clip-coef 0.11 --ent-coef 0.0015 "$@"
