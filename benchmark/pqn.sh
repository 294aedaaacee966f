#!/bin/sh
# The runs behind the table of docs/rl-algorithms/pqn.md: 500k steps each, default flags.
exec python -m cleanrl_utils.benchmark \
    --env-ids CartPole-v1 Acrobot-v1 \
    --command "python cleanrl/pqn.py" \
    --num-seeds 10 "$@"
