#!/bin/sh
# The table and the plot of docs/rl-algorithms/dqn.md, from the runs of benchmark/dqn.sh.
set -e
python results/export.py dqn runs
python results/report.py dqn
