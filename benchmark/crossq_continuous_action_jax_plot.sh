#!/bin/sh
# The table and the plot of docs/rl-algorithms/crossq.md, from the runs of benchmark/crossq_continuous_action_jax.sh.
set -e
python results/export.py crossq_continuous_action_jax runs --partial
python results/report.py crossq_continuous_action_jax
