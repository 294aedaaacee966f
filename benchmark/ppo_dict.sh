#!/bin/sh
# The runs for docs/rl-algorithms/ppo-dict.md: default flags with the mission, and without it.
set -e
python -m cleanrl_utils.benchmark --env-ids MiniGrid-GoToDoor-5x5-v0 --num-seeds 3 \
    --command "python cleanrl/ppo_dict.py" "$@"
mkdir -p no_mission
cd no_mission
without="--keys image direction --exp-name ppo_dict_no_mission"
PYTHONPATH=.. exec python -m cleanrl_utils.benchmark --env-ids MiniGrid-GoToDoor-5x5-v0 \
    --num-seeds 3 --command "python ../cleanrl/ppo_dict.py $without" "$@"
