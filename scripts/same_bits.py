"""Do two versions of an algorithm file compute the same bits?

    python scripts/same_bits.py OLD_FOLDER NEW_FOLDER ppo dqn     # or no names for all files

Trains each file of both folders on the CPU with the same small flags, and compares the last
checkpoints entry by entry: weights, optimizers, normalizers, replay buffers and random state.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.harness import only_run, read_checkpoint, with_teacher  # noqa: E402

ON_POLICY = "--num-envs 4 --num-steps 32 --total-timesteps 1024 --checkpoint-interval 2"
DISCRETE = (
    "--num-envs 2 --learning-starts 64 --buffer-size 256 --total-timesteps 1000 --batch-size 8"
)
CONTROL = "--env-id Pendulum-v1 --learning-starts 64 --total-timesteps 200 --batch-size 8"
PIXELS = "--num-envs 2 --num-steps 16 --total-timesteps 128 --num-minibatches 2 --update-epochs 2"
PIXEL_REPLAY = "--learning-starts 32 --buffer-size 128 --total-timesteps 128 --batch-size 4"
FROM_TEACHER = "--teacher-steps 64 --offline-steps 8"
FLAGS = {
    "ppo": f"{ON_POLICY} --capture-video",
    "ppo_multidiscrete": ON_POLICY,
    "ppo_continuous_action": f"{ON_POLICY} --env-id Pendulum-v1",
    "rpo_continuous_action": f"{ON_POLICY} --env-id Pendulum-v1",
    "ppo_continuous_lstm": f"{ON_POLICY} --env-id Pendulum-v1 --num-minibatches 2",
    "ppo_trxl": f"{ON_POLICY} --env-id CartPole-v1",
    "ppo_dict": ON_POLICY,
    "ppo_atari": PIXELS,
    "ppo_atari_lstm": PIXELS,
    "ppo_atari_envpool": PIXELS,
    "ppo_atari_multigpu": PIXELS.replace("--num-envs", "--local-num-envs"),
    "ppo_procgen": PIXELS,
    "ppg_procgen": "--num-envs 2 --num-steps 16 --total-timesteps 128 --num-minibatches 2"
    " --n-iteration 2 --num-aux-rollouts 2 --e-auxiliary 2",
    "ppo_rnd_envpool": f"{PIXELS} --num-iterations-obs-norm-init 1 --env-id Breakout-v5",
    "ppo_pettingzoo_ma_atari": f"{PIXELS} --elo-games 4 --elo-steps 2 --elo-players 2",
    "ppo_continuous_action_isaacgym": f"{PIXELS} --env-id Mjlab-Cartpole-Balance",
    "pqn": f"{ON_POLICY} --capture-video",
    "pqn_atari_envpool": PIXELS,
    "pqn_atari_envpool_lstm": PIXELS,
    "dqn": DISCRETE,
    "c51": DISCRETE,
    "qrdqn": DISCRETE,
    "dqn_jax": DISCRETE,
    "c51_jax": DISCRETE,
    "dqn_atari": PIXEL_REPLAY,
    "c51_atari": PIXEL_REPLAY,
    "dqn_atari_jax": PIXEL_REPLAY,
    "c51_atari_jax": PIXEL_REPLAY,
    "qdagger_dqn_atari": f"{PIXEL_REPLAY} {FROM_TEACHER}",
    "qdagger_dqn_atari_jax": f"{PIXEL_REPLAY} {FROM_TEACHER}",
    "rainbow_atari": PIXEL_REPLAY,
    "sac_atari": PIXEL_REPLAY,
    "ddpg_continuous_action": CONTROL,
    "td3_continuous_action": CONTROL,
    "sac_continuous_action": CONTROL,
    "ddpg_continuous_action_jax": CONTROL,
    "td3_continuous_action_jax": CONTROL,
    "sac_continuous_action_jax": CONTROL,
    "tqc_continuous_action_jax": CONTROL,
    "droq_continuous_action_jax": CONTROL,
    "crossq_continuous_action_jax": f"{CONTROL} --q-width 64",
    "simba_v2_sac_jax": f"{CONTROL} --q-width 64",
    "ppo_jax": "--total-timesteps 8192",
    "ppo_rnn_jax": "--total-timesteps 8192",
    "pqn_jax": "--total-timesteps 8192",
    "ppo_jaxtari_jax": f"{PIXELS}",
    "ippo_jax": "--num-steps 32 --total-timesteps 1024",
    "mappo_rnn_jax": "--num-envs 8 --num-steps 16 --total-timesteps 512",
    "ppo_continuous_action_jax": f"{PIXELS} --env-id brax/inverted_pendulum",
    "fast_td3_jax": "--env-id brax/inverted_pendulum --num-envs 8 --batch-size 64 "
    "--learning-starts 64 --buffer-size 8000 --q-network-width 64 --total-timesteps 1600",
    "fast_sac_jax": "--env-id brax/inverted_pendulum --num-envs 8 --batch-size 64 "
    "--learning-starts 64 --buffer-size 8000 --q-network-width 64 --total-timesteps 1600",
    "ppo_atari_envpool_xla_jax": PIXELS,
    "ppo_atari_envpool_xla_jax_scan": PIXELS,
}
NEW = {"args", "cuda_rng"}  # entries that not all older checkpoints have
NESTED = dict | list | tuple
ON_THE_CPU = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}


def train(file, flags, folder):
    environment = os.environ | ON_THE_CPU | {"WANDB_MODE": "offline"}
    command = [sys.executable, str(file), *with_teacher(file, flags.split())]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{file} {flags}\n{done.stderr[-3000:]}")
    return read_checkpoint(only_run(Path(folder)))


def bits(value):
    """Type, shape and bytes: -0.0 is not 0.0, and NaN is NaN."""
    import numpy as np

    array = np.asarray(value)
    content = value if array.dtype == object else array.tobytes()  # None, or a very large int
    return array.dtype, array.shape, content


def differences(old, new, path=""):
    """The names of the entries that differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys(), key=str):
            if name in NEW and name not in old:
                continue
            if name not in old or name not in new:
                yield f"{path}{name} (missing)"
            else:
                yield from differences(old[name], new[name], f"{path}{name}.")
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        for number, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from differences(a, b, f"{path}{number}.")
    elif isinstance(old, NESTED) or isinstance(new, NESTED) or bits(old) != bits(new):
        yield path.rstrip(".")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--flags", help="instead of the small ones above, for a single file")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in FLAGS and not args.flags]
    if unknown:
        raise SystemExit(f"no flags are known for {', '.join(unknown)}: pass --flags")
    failed = False
    for name in args.names or sorted(FLAGS):
        flags = args.flags or FLAGS[name]
        with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
            old = train((args.old / f"{name}.py").resolve(), flags, a)
            new = train((args.new / f"{name}.py").resolve(), flags, b)
        found = list(differences(old, new))
        failed |= bool(found)
        print(f"{name}: {'same bits' if not found else 'DIFFERENT: ' + ', '.join(found[:30])}")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
