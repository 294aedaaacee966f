#!/bin/sh
# The runs behind the results of docs/rl-algorithms/rpo.md: Pendulum-v1, 8M steps, three seeds,
# default flags. The others are not run yet; the dm_control tasks are further --env-ids, such as
# dm_control/cartpole-balance-v0.
exec python -m cleanrl_utils.benchmark \
    --env-ids Pendulum-v1 InvertedPendulum-v4 Walker2d-v4 Humanoid-v4 \
    --command "python cleanrl/rpo_continuous_action.py" \
    --num-seeds 3 "$@"
