#!/bin/sh
# The runs behind the results of docs/rl-algorithms/simba-v2.md: three MuJoCo environments and four
# tasks of dm_control, three seeds. As in the paper, one Q-network where episodes never terminate.
python -m cleanrl_utils.benchmark \
    --env-ids HalfCheetah-v4 Walker2d-v4 Hopper-v4 \
    --command "python cleanrl/simba_v2_sac_jax.py" \
    --num-seeds 3 "$@"
exec python -m cleanrl_utils.benchmark \
    --env-ids dm_control/cheetah-run-v0 dm_control/walker-run-v0 dm_control/hopper-hop-v0 \
        dm_control/humanoid-walk-v0 \
    --command "python cleanrl/simba_v2_sac_jax.py --num-critics 1" \
    --num-seeds 3 "$@"
