#!/bin/sh
# The table and the plot of docs/rl-algorithms/ppg.md, from runs that were stopped before their end.
set -e
python results/export.py ppo_procgen runs --partial
python results/report.py ppo_procgen
