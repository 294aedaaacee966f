#!/bin/sh
# The runs behind the tables of docs/rl-algorithms/ppo-rnd.md: the first on a machine with a GPU,
# the second on one core of a CPU, where it was stopped after 0.43M steps. (Their names were put
# into the data afterwards.)
set -e
python cleanrl/ppo_rnd_envpool.py --env-id Breakout-v5 --total-timesteps 3_000_000 \
    --exp-name ppo_rnd_envpool_128
python cleanrl/ppo_rnd_envpool.py --env-id Breakout-v5 --total-timesteps 1_000_000 \
    --exp-name ppo_rnd_envpool_8 \
    --num-envs 8 --learning-rate 2.5e-4 --ent-coef 0.01 --num-iterations-obs-norm-init 2
