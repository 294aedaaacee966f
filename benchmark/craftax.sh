#!/bin/sh
# Craftax on a GPU with the settings of its authors (PPO) and of PQN's authors, not run yet. Two
# to the power of 30 steps, so that calls of the program have one length. The networks are those
# of the files.
set -e
env="--env-id ${ENV_ID:-Craftax-Symbolic-v1} --total-timesteps 1073741824"
env="$env --num-envs 1024 --reset-ratio 16"
ppo="--num-steps 64 --num-minibatches 8 --update-epochs 4 --learning-rate 2e-4 --gamma 0.99"
ppo="$ppo --gae-lambda 0.8 --clip-coef 0.2 --ent-coef 0.01 --vf-coef 0.5 --max-grad-norm 1"
python cleanrl/ppo_jax.py $env $ppo --checkpoint-interval 1024 "$@"
python cleanrl/ppo_rnn_jax.py $env $ppo --checkpoint-interval 1024 "$@"
python cleanrl/pqn_jax.py $env --num-steps 1 --num-minibatches 1 --update-epochs 1 \
    --learning-rate 1e-4 --q-lambda 0 --start-e 0.1 --end-e 0.005 --exploration-fraction 0.2 \
    --max-grad-norm 1 --log-interval 1024 --checkpoint-interval 65536 "$@"
