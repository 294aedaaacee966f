#!/bin/sh
# The runs behind the results of docs/rl-algorithms/droq.md: three environments, three seeds,
# every other flag at its default.
exec python -m cleanrl_utils.benchmark \
    --env-ids HalfCheetah-v4 Walker2d-v4 Hopper-v4 \
    --command "python cleanrl/droq_continuous_action_jax.py --total-timesteps 100_000" \
    --num-seeds 3 "$@"
