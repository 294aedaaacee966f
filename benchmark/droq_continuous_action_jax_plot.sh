#!/bin/sh
# The table and the plot of docs/rl-algorithms/droq.md, from the runs of benchmark/droq_continuous_action_jax.sh.
set -e
python results/export.py droq_continuous_action_jax runs --partial
python results/report.py droq_continuous_action_jax
