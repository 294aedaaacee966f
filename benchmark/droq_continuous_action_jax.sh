#!/bin/sh
# The runs behind the results of docs/rl-algorithms/droq.md: Pendulum-v1 on a CPU, three seeds;
# then, not run yet, three environments, three seeds, every other flag at its default.
set -e
python -m cleanrl_utils.benchmark \
    --env-ids Pendulum-v1 \
    --command "python cleanrl/droq_continuous_action_jax.py --total-timesteps 10000 --gamma 0.95 \
        --tau 0.02 --batch-size 64 --learning-starts 500 --buffer-size 20000 \
        --learning-rate 0.001" \
    --num-seeds 3 "$@"
exec python -m cleanrl_utils.benchmark \
    --env-ids HalfCheetah-v4 Walker2d-v4 Hopper-v4 \
    --command "python cleanrl/droq_continuous_action_jax.py --total-timesteps 100_000" \
    --num-seeds 3 "$@"
