#!/bin/sh
# The runs behind the table of docs/rl-algorithms/sac.md: three environments, three seeds, every
# flag at its default.
exec python -m cleanrl_utils.benchmark \
    --env-ids HalfCheetah-v4 Walker2d-v4 Hopper-v4 \
    --command "python cleanrl/sac_continuous_action.py" \
    --num-seeds 3 "$@"
