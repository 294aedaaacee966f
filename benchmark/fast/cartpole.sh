#!/bin/sh
# CartPole-v1 to a return of 475 within seconds on two CPU cores. The flags are rounded from the
# best of 36 trials of scripts/tune_fast_cartpole.py.
exec python cleanrl/ppo_jax.py --env-id CartPole-v1 --total-timesteps 49_152 \
    --num-envs 4 --num-steps 64 --num-minibatches 4 --update-epochs 7 --learning-rate 0.005 \
    --gamma 0.98 --gae-lambda 0.87 --clip-coef 0.11 --ent-coef 0.0015 "$@"
