#!/bin/sh
# The table and the plot of docs/rl-algorithms/tqc.md, from the runs of benchmark/tqc_continuous_action_jax.sh.
set -e
python results/export.py tqc_continuous_action_jax runs --partial
python results/report.py tqc_continuous_action_jax
