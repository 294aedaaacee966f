#!/bin/sh
# Three games, three seeds each, of both files on EnvPool's XLA interface, one after the other: each has all the cores.
set -e
for file in ppo_atari_envpool_xla_jax_scan ppo_atari_envpool_xla_jax; do
    python -m cleanrl_utils.benchmark --env-ids Pong-v5 BeamRider-v5 Breakout-v5 --command "python cleanrl/$file.py" --num-seeds 3 --workers 1 "$@"
done
