#!/bin/sh
# The table and the plot of docs/rl-algorithms/ppo-continuous-action-jax.md, from runs that were stopped before their end.
set -e
python results/export.py ppo_continuous_action_jax runs --partial
python results/report.py ppo_continuous_action_jax
