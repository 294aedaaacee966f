#!/bin/sh
# The table and the plot of docs/rl-algorithms/ppo-rnd.md, from the runs of benchmark/ppo_rnd_envpool_breakout.sh.
set -e
python results/export.py ppo_rnd_envpool_8 runs --partial
python results/report.py ppo_rnd_envpool_8
