#!/bin/sh
# The runs behind the table of docs/rl-algorithms/simba-v2.md: Pendulum-v1 on a CPU, three
# seeds. Then, not run yet, three MuJoCo environments and four tasks of dm_control, where
# episodes never terminate and, as in the paper, one Q-network is enough.
set -e
python -m cleanrl_utils.benchmark \
    --env-ids Pendulum-v1 \
    --command "python cleanrl/simba_v2_sac_jax.py --total-timesteps 20000 --gamma 0.95 \
        --tau 0.02 --batch-size 64 --learning-starts 500 --buffer-size 20000 --q-width 64 \
        --learning-rate 0.001" \
    --num-seeds 3 "$@"
python -m cleanrl_utils.benchmark \
    --env-ids HalfCheetah-v4 Walker2d-v4 Hopper-v4 \
    --command "python cleanrl/simba_v2_sac_jax.py" \
    --num-seeds 3 "$@"
exec python -m cleanrl_utils.benchmark \
    --env-ids dm_control/cheetah-run-v0 dm_control/walker-run-v0 dm_control/hopper-hop-v0 \
        dm_control/humanoid-walk-v0 \
    --command "python cleanrl/simba_v2_sac_jax.py --num-critics 1" \
    --num-seeds 3 "$@"
