#!/bin/sh
# The table and the plot of docs/rl-algorithms/ppo.md, from the runs of benchmark/ppo_continuous_action.sh.
set -e
python results/export.py ppo_continuous_action runs
python results/report.py ppo_continuous_action
