#!/bin/sh
# The runs behind the results of docs/rl-algorithms/crossq.md: Pendulum-v1 on a CPU, three
# seeds, with narrow Q-networks; then, not run yet, three environments, three seeds, every flag at
# its default.
set -e
python -m cleanrl_utils.benchmark \
    --env-ids Pendulum-v1 \
    --command "python cleanrl/crossq_continuous_action_jax.py --total-timesteps 20000 --gamma 0.95 \
        --batch-size 64 --learning-starts 500 --buffer-size 20000 \
        --learning-rate 0.001 --q-width 256" \
    --num-seeds 3 "$@"
exec python -m cleanrl_utils.benchmark \
    --env-ids HalfCheetah-v4 Walker2d-v4 Hopper-v4 \
    --command "python cleanrl/crossq_continuous_action_jax.py" \
    --num-seeds 3 "$@"
