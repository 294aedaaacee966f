#!/bin/sh
# JAXtari's Pong and Breakout, three seeds each, on one GPU. Where there are no pictures for them
# yet, plain ones are drawn first.
set -e
has_sprites="import sys, jaxtari.paths as p; sys.exit(not p.ownership_or_alt_markers_present())"
python -c "$has_sprites" || python scripts/draw_jaxtari_sprites.py
# eight environments would leave a GPU idle
many="--num-envs 512 --num-steps 32 --num-minibatches 8 --learning-rate 5e-4"
for seed in 1 2 3; do
  python cleanrl/ppo_jaxtari_jax.py --env-id pong --seed $seed $many "$@"
  python cleanrl/ppo_jaxtari_jax.py --env-id breakout --seed $seed $many "$@"
done
