#!/bin/sh
# The published protocol of docs/rl-algorithms/rpo.md:
# MuJoCo, 8M steps each, default flags; the dm_control tasks are further --env-ids, such as
# dm_control/cartpole-balance-v0.
exec python -m cleanrl_utils.benchmark \
    --env-ids InvertedPendulum-v4 Walker2d-v4 Humanoid-v4 \
    --command "python cleanrl/rpo_continuous_action.py" \
    --num-seeds 3 "$@"
