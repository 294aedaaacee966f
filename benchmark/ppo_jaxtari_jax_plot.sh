#!/bin/sh
# The table and the plot of docs/rl-algorithms/ppo-jaxtari-jax.md, from the runs of benchmark/ppo_jaxtari_jax.sh.
set -e
python results/export.py ppo_jaxtari_jax runs
python results/report.py ppo_jaxtari_jax
