#!/bin/sh
# The table and the plot of docs/rl-algorithms/ppo.md, from the runs of benchmark/ppo_atari_envpool.sh.
set -e
python results/export.py ppo_atari_envpool_128 runs
python results/report.py ppo_atari_envpool_128
