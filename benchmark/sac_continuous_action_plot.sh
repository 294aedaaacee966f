#!/bin/sh
# The table and the plot of docs/rl-algorithms/sac.md, from the runs of benchmark/sac_continuous_action.sh.
set -e
python results/export.py sac_continuous_action runs --partial
python results/report.py sac_continuous_action
