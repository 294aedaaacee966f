#!/bin/sh
# The plot of docs/rl-algorithms/ppo-self-play.md, from the ratings in results/ppo_pettingzoo_ma_atari/elo.json.
exec python results/elo.py
