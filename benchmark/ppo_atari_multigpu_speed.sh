#!/bin/sh
# Steps per second of ppo_atari.py and of ppo_atari_multigpu.py in 1, 2 and 4 processes, at the
# same number of environments in all, round by round, so that a machine that slows down slows them
# all. The first quarter of the 40 iterations does not count.
# benchmark/ppo_atari_multigpu_speed.sh [ROUNDS] [numbers of environments]: 2 rounds of 8 and 32
# take about 6 minutes on an H200.
set -e
rounds=${1:-2}
[ $# -gt 0 ] && shift
folder=$(mktemp -d)
here=$(pwd)
cd "$folder"
for round in $(seq "$rounds"); do
    for n in ${*:-8 32}; do
        flags="--total-timesteps $((n * 128 * ${ITERATIONS:-40})) --checkpoint-interval 1000"
        python "$here/cleanrl/ppo_atari.py" --num-envs "$n" $flags \
            --exp-name "single-$n-$round" > /dev/null 2>&1
        for processes in 1 2 4; do
            torchrun --standalone --nproc-per-node $processes \
                "$here/cleanrl/ppo_atari_multigpu.py" --local-num-envs $((n / processes)) $flags \
                --exp-name "$processes-processes-$n-$round" > log 2>&1 || cat log
        done
    done
done
python - << 'END'
from pathlib import Path
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

for run in sorted(Path("runs").iterdir(), key=lambda run: run.name.rsplit("__", 1)[1]):
    events = EventAccumulator(str(run)).Reload().Scalars("losses/value_loss")
    first, last = events[len(events) // 4 - 1], events[-1]
    rate = (last.step - first.step) / (last.wall_time - first.wall_time)
    print(f"{run.name.split('__')[1]:24} {rate:8.0f} steps/s")
END
