#!/bin/sh
# The run that docs/rl-algorithms/ppo-rnd.md asks for, every flag at its default: days on a
# machine with a GPU.
exec python -m cleanrl_utils.benchmark \
    --env-ids MontezumaRevenge-v5 \
    --command "python cleanrl/ppo_rnd_envpool.py" \
    --num-seeds 1 "$@"
