#!/bin/sh
# The table and the plot of docs/rl-algorithms/c51.md, from the runs of benchmark/c51_jax.sh.
set -e
python results/export.py c51_jax runs
python results/report.py c51_jax
