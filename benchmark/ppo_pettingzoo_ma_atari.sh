#!/bin/sh
# Three games, three seeds, every flag at its default, as in the published table;
# docs/rl-algorithms/ppo-self-play.md says what was run.
exec python -m cleanrl_utils.benchmark \
    --env-ids pong_v3 surround_v2 tennis_v3 \
    --command "python cleanrl/ppo_pettingzoo_ma_atari.py" \
    --num-seeds 3 "$@"
