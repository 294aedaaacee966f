#!/bin/sh
# The runs behind the tables of docs/rl-algorithms/ppo-rnd.md. The first two on a CPU core each,
# with the number of environments, learning rate and entropy coefficient of
# ppo_atari_envpool.py: the file and a copy with CleanRL v1's policy layer. The last on a GPU:
# default flags except for the length.
set -e
flags="--env-id Breakout-v5 --total-timesteps 500_000 --num-envs 8 --learning-rate 2.5e-4"
flags="$flags --ent-coef 0.01 --num-iterations-obs-norm-init 2"
python cleanrl/ppo_rnd_envpool.py $flags --exp-name ppo_rnd_envpool_8 "$@"

copy=$(mktemp -d)/ppo_rnd_envpool.py
sed -e '/self.actor_layer = /s/gain=0.1/gain=0.01/' \
    -e 's/policy_hidden = hidden + /policy_hidden = /' cleanrl/ppo_rnd_envpool.py > "$copy"
python "$copy" $flags --exp-name ppo_rnd_envpool_8_before "$@"

python cleanrl/ppo_rnd_envpool.py --env-id Breakout-v5 --total-timesteps 3_000_000 \
    --exp-name ppo_rnd_envpool_128 "$@"
