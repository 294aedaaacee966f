#!/bin/sh
# The runs behind the results of docs/rl-algorithms/fast-sac.md, on a GPU, three seeds each, one
# after another: two humanoids that learn to walk without being pushed, as in fast_td3_jax.sh.
exec python -m cleanrl_utils.benchmark \
    --env-ids playground/T1JoystickFlatTerrain playground/G1JoystickFlatTerrain \
    --command "python cleanrl/fast_sac_jax.py --no-pushes" \
    --num-seeds 3 "$@"
