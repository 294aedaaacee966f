#!/bin/sh
# The runs behind the results of docs/rl-algorithms/fast-td3.md, on a GPU, three seeds each, one
# after another, with the authors' settings: two humanoids that learn to walk without being pushed,
# and CartpoleBalance with those for dm_control, with atoms for returns of rewards from 0 to 1.
set -e
python -m cleanrl_utils.benchmark \
    --env-ids playground/T1JoystickFlatTerrain playground/G1JoystickFlatTerrain \
    --command "python cleanrl/fast_td3_jax.py --no-pushes" \
    --num-seeds 3 "$@"
exec python -m cleanrl_utils.benchmark --env-ids playground/CartpoleBalance \
    --command "python cleanrl/fast_td3_jax.py --n-step 3 --std-min 0.1 --policy-noise 0.1 \
        --v-min 0 --v-max 34 --total-timesteps 5_120_000" \
    --num-seeds 3 "$@"
