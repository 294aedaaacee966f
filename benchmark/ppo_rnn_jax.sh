#!/bin/sh
# Memory chains of two lengths, ten seeds each, the ten as one program; and the same without a
# memory, three seeds.
set -e
export PYTHONPATH=scripts # for memory_chains.py
python cleanrl/ppo_rnn_jax.py --num-seeds 10 --total-timesteps 65536 "$@"
python cleanrl/ppo_rnn_jax.py --env-id memory_chains:MemoryChain-15 --num-seeds 10 \
    --total-timesteps 163840 "$@"
without="--exp-name ppo_jax_memory --num-envs 64 --num-steps 32 --log-interval 4 --num-seeds 3"
python cleanrl/ppo_jax.py --env-id MemoryChain-bsuite $without --total-timesteps 65536 "$@"
python cleanrl/ppo_jax.py --env-id memory_chains:MemoryChain-15 $without \
    --total-timesteps 163840 "$@"
