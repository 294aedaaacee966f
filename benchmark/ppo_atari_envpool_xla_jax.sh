#!/bin/sh
# Three games, three seeds each, of both files on EnvPool's XLA interface, one after the other:
# each has all the cores.
set -e
python -m cleanrl_utils.benchmark \
    --env-ids Pong-v5 BeamRider-v5 Breakout-v5 \
    --command "python cleanrl/ppo_atari_envpool_xla_jax.py" \
    --num-seeds 3 "$@"
exec python -m cleanrl_utils.benchmark \
    --env-ids Pong-v5 BeamRider-v5 Breakout-v5 \
    --command "python cleanrl/ppo_atari_envpool_xla_jax_scan.py" \
    --num-seeds 3 "$@"
