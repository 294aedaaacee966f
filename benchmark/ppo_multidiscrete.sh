#!/bin/sh
# The runs of Taxi-v4 in docs/rl-algorithms/ppo-multidiscrete.md: with and without masks, three
# seeds, every other flag at its default. What ran without them is in a folder of its own:
# results/ppo_multidiscrete_no_mask is exported from there.
set -e
python -m cleanrl_utils.benchmark --command "python cleanrl/ppo_multidiscrete.py" --num-seeds 3 "$@"
mkdir -p no_mask
cd no_mask
PYTHONPATH=.. exec python -m cleanrl_utils.benchmark \
    --command "python ../cleanrl/ppo_multidiscrete.py --no-mask" --num-seeds 3 "$@"
