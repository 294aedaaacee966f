#!/bin/sh
# The table and the plot of docs/rl-algorithms/dqn.md, from the runs of benchmark/dqn_jax.sh.
set -e
python results/export.py dqn_jax runs
python results/report.py dqn_jax
