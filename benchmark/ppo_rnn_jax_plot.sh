#!/bin/sh
# The tables and the plot of docs/rl-algorithms/ppo-rnn-jax.md, from the runs of benchmark/ppo_rnn_jax.sh.
set -e
python results/export.py ppo_rnn_jax runs
python results/export.py ppo_jax_memory runs
python results/report.py ppo_rnn_jax
python results/report.py ppo_jax_memory
