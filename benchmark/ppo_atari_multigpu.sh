#!/bin/sh
# The runs that docs/rl-algorithms/ppo-multigpu.md asks for: three games, three seeds, two
# processes with half of the published 8 environments each. Every run has torchrun choose a port
# of its own.
exec python -m cleanrl_utils.benchmark \
    --env-ids BeamRiderNoFrameskip-v4 PongNoFrameskip-v4 BreakoutNoFrameskip-v4 \
    --command "python -m torch.distributed.run --standalone --nproc-per-node 2 \
        cleanrl/ppo_atari_multigpu.py --local-num-envs 4" \
    --num-seeds 3 "$@"
