#!/bin/sh
# The runs behind the results of docs/rl-algorithms/ppo-procgen.md: three games, three seeds,
# every flag at its default. They want a GPU.
exec python -m cleanrl_utils.benchmark \
    --env-ids starpilot bossfight bigfish \
    --command "python cleanrl/ppo_procgen.py" \
    --num-seeds 3 "$@"
