#!/bin/sh
# The published protocol of docs/rl-algorithms/ppo-envpool-xla.md:
# three games, three seeds, 10M steps each, default flags, on a machine with a GPU.
exec python -m cleanrl_utils.benchmark \
    --env-ids Pong-v5 BeamRider-v5 Breakout-v5 \
    --command "python cleanrl/ppo_atari_envpool_xla_jax.py" \
    --num-seeds 3 "$@"
