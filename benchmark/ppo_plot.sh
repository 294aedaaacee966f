#!/bin/sh
# The table and the plot of docs/rl-algorithms/ppo.md, from the runs of benchmark/ppo.sh.
set -e
python results/export.py ppo runs
python results/report.py ppo
