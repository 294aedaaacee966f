#!/bin/sh
# The runs behind the results of docs/rl-algorithms/tqc.md: Pendulum-v1 on a CPU, three seeds,
# with two critics as SBX has; then, not run yet, three environments, three seeds, every flag at
# its default.
set -e
python -m cleanrl_utils.benchmark \
    --env-ids Pendulum-v1 \
    --command "python cleanrl/tqc_continuous_action_jax.py --total-timesteps 20000 --gamma 0.95 \
        --tau 0.02 --batch-size 64 --learning-starts 500 --buffer-size 20000 \
        --learning-rate 0.001 --num-critics 2 --drop-quantiles 2" \
    --num-seeds 3 "$@"
exec python -m cleanrl_utils.benchmark \
    --env-ids HalfCheetah-v4 Walker2d-v4 Hopper-v4 \
    --command "python cleanrl/tqc_continuous_action_jax.py" \
    --num-seeds 3 "$@"
