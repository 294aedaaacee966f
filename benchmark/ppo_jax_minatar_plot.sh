#!/bin/sh
# The table and the plot of docs/rl-algorithms/ppo.md, from the runs of benchmark/ppo_jax_minatar.sh.
set -e
python results/export.py ppo_jax_minatar runs
python results/report.py ppo_jax_minatar
