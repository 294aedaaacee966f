#!/bin/sh
# The table and the plot of docs/rl-algorithms/ddpg.md, from the runs of benchmark/ddpg_continuous_action.sh.
set -e
python results/export.py ddpg_continuous_action runs --partial
python results/report.py ddpg_continuous_action
