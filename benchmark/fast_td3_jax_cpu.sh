#!/bin/sh
# CartpoleBalance on a CPU core with small networks, three seeds; and PPO for as many steps.
set -e
for seed in 1 2 3; do
    python cleanrl/fast_td3_jax.py --exp-name fast_td3_jax_cpu --seed $seed \
        --env-id playground/CartpoleBalance --num-envs 64 --batch-size 512 --buffer-size 512000 \
        --learning-starts 640 --q-network-width 128 --actor-width 64 --n-step 3 --gamma 0.99 \
        --v-min 0 --v-max 100 --total-timesteps 320000 "$@"
    python cleanrl/ppo_continuous_action_jax.py --exp-name fast_td3_jax_ppo \
        --seed $seed --env-id playground/CartpoleBalance --num-envs 64 --num-minibatches 8 \
        --gamma 0.99 --total-timesteps 327680 "$@"
done
