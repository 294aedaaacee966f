#!/bin/sh
# The table and the plot of docs/rl-algorithms/td3.md, from the runs of benchmark/td3_continuous_action.sh.
set -e
python results/export.py td3_continuous_action runs --partial
python results/report.py td3_continuous_action
