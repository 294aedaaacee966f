#!/bin/sh
# Brax's inverted pendulum on a CPU, three seeds. Then, on a GPU, Brax's Ant and two tasks of
# MuJoCo Playground, three seeds each, one after another: each fills it alone.
set -e
python -m cleanrl_utils.benchmark --env-ids brax/inverted_pendulum \
    --command "python cleanrl/ppo_continuous_action_jax.py --num-envs 256 --num-minibatches 8 \
        --total-timesteps 1_000_000" --num-seeds 3 "$@"
python -m cleanrl_utils.benchmark --env-ids brax/ant \
    --command "python cleanrl/ppo_continuous_action_jax.py" --num-seeds 3 "$@"
exec python -m cleanrl_utils.benchmark \
    --env-ids playground/CheetahRun playground/WalkerWalk \
    --command "python cleanrl/ppo_continuous_action_jax.py --gamma 0.99" \
    --num-seeds 3 "$@"
