#!/bin/sh
# CartpoleBalance on a CPU core with small networks, three seeds; as many steps and updates as in
# fast_td3_jax_cpu.sh.
exec python -m cleanrl_utils.benchmark --env-ids playground/CartpoleBalance \
    --command "python cleanrl/fast_sac_jax.py --exp-name fast_sac_jax_cpu --num-envs 64 \
        --batch-size 512 --buffer-size 512000 --learning-starts 640 --q-network-width 128 \
        --actor-width 64 --n-step 3 --gamma 0.99 --v-min 0 --v-max 100 --num-updates 2 \
        --policy-frequency 2 --total-timesteps 320000" \
    --num-seeds 3 "$@"
