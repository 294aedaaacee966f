#!/bin/sh
# The table and the plot of docs/rl-algorithms/ppo.md, from the runs of benchmark/ppo_multidiscrete.sh.
set -e
python results/export.py ppo_multidiscrete runs
python results/report.py ppo_multidiscrete
