#!/bin/sh
# The runs behind the table of docs/rl-algorithms/pqn-jax.md: 500k steps each, default flags, on
# gymnax's environments. One program a seed, which logs every episode; --num-seeds 10 logs means.
exec python -m cleanrl_utils.benchmark \
    --env-ids CartPole-v1 Acrobot-v1 \
    --command "python cleanrl/pqn_jax.py" \
    --num-seeds 10 "$@"
