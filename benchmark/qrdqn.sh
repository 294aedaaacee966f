#!/bin/sh
# The runs behind the results of docs/rl-algorithms/qrdqn.md: three environments, three seeds,
# every flag at its default.
exec python -m cleanrl_utils.benchmark \
    --env-ids CartPole-v1 Acrobot-v1 MountainCar-v0 \
    --command "python cleanrl/qrdqn.py" \
    --num-seeds 3 "$@"
