#!/bin/sh
# The runs so far behind the results of docs/rl-algorithms/{ddpg,td3,sac,tqc,droq,crossq}.md, side
# by side on a machine with a GPU and 16 cores; they were cut off after 1,410 seconds. Beside them
# it ran ppo_atari_envpool.py twice, once without the GPU.
set -e
export OMP_NUM_THREADS=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
nvidia-cuda-mps-control -d # lets the processes use the GPU at the same time
for env_id in HalfCheetah-v4 Walker2d-v4 Hopper-v4; do
    for file in sac td3 ddpg; do
        python cleanrl/${file}_continuous_action.py --env-id $env_id &
    done
done
for seed in 1 2; do
    python cleanrl/droq_continuous_action_jax.py --env-id HalfCheetah-v4 \
        --total-timesteps 150_000 --seed $seed &
done
for file in tqc crossq; do
    python cleanrl/${file}_continuous_action_jax.py --env-id HalfCheetah-v4 &
done
wait
