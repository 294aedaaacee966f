#!/bin/sh
# The table and the plot of docs/rl-algorithms/c51.md, from the runs of benchmark/c51.sh.
set -e
python results/export.py c51 runs
python results/report.py c51
