#!/bin/sh
# Brax's Ant on a GPU, three seeds, one after another: each fills it alone.
exec python -m cleanrl_utils.benchmark \
    --env-ids brax/ant \
    --command "python cleanrl/ppo_continuous_action_isaacgym.py" \
    --num-seeds 3 "$@"
