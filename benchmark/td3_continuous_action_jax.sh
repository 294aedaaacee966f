#!/bin/sh
# The runs behind the results of docs/rl-algorithms/td3-jax.md: three environments, three seeds,
# every flag at its default.
exec python -m cleanrl_utils.benchmark \
    --env-ids HalfCheetah-v4 Walker2d-v4 Hopper-v4 \
    --command "python cleanrl/td3_continuous_action_jax.py" \
    --num-seeds 3 "$@"
