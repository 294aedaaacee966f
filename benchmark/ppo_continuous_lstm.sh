#!/bin/sh
# The runs behind the results of docs/rl-algorithms/ppo-continuous-lstm.md: a pendulum whose
# velocity is hidden, three seeds; then, not run yet, three tasks of ppo_continuous_action.py with
# default flags.
set -e
export PYTHONPATH=scripts # for hidden_velocity.py
python -m cleanrl_utils.benchmark \
    --env-ids hidden_velocity:PendulumWithoutVelocity-v0 \
    --command "python cleanrl/ppo_continuous_lstm.py --total-timesteps 300000 --num-envs 16 \
        --num-steps 64 --learning-rate 0.001 --gamma 0.9" \
    --num-seeds 3 "$@"
exec python -m cleanrl_utils.benchmark \
    --env-ids HalfCheetah-v4 Hopper-v4 InvertedPendulum-v4 \
    --command "python cleanrl/ppo_continuous_lstm.py" \
    --num-seeds 3 "$@"
