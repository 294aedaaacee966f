#!/bin/sh
# The runs behind the tables of docs/rl-algorithms/ppo-trxl.md, three seeds each: a hint is recalled
# after 39 steps, by a memory of 40 steps and of one step. More flags are passed on.
set -e
flags="--env-id tests.probes:Probe/LongRecall-v0 --total-timesteps 122880 --num-envs 16
    --num-steps 128 --init-lr 0.003 --gamma 0.99 --num-minibatches 2
    --update-epochs 4 --norm-adv --clip-coef 0.2 --no-clip-vloss --max-grad-norm 1 --trxl-dim 16
    --trxl-num-layers 1"
for seed in 1 2 3; do
    python cleanrl/ppo_trxl.py $flags --trxl-memory-length 40 --seed $seed "$@"
    python cleanrl/ppo_trxl.py $flags --trxl-memory-length 1 --seed $seed \
        --exp-name ppo_trxl_one_step "$@"
done
