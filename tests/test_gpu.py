"""What only a GPU can show, in minutes, where there is one: `python -m pytest tests/test_gpu.py -m
slow -n 4`.

Runs are programs of their own, as users start them: what XLA is asked for, and what CUDA has
recorded, is theirs alone."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.harness import FILES, ROOT, read_checkpoint, same, with_teacher

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PONG = (
    "--env-id",
    "PongNoFrameskip-v4",
    "--buffer-size",
    10_000,
    "--learning-starts",
    1000,
    "--total-timesteps",
    2000,
)
FROM_TEACHER = ("--teacher-steps", 500, "--offline-steps", 100)
HALF_CHEETAH = ("--env-id", "HalfCheetah-v4", "--learning-starts", 500, "--total-timesteps", 1500)
POOL = ("--env-id", "Breakout-v5", "--num-envs", 16, "--total-timesteps", 3 * 16 * 128)
RECORDED = {
    **dict.fromkeys(["dqn_atari", "c51_atari", "rainbow_atari", "sac_atari"], PONG),
    **{f"{name}_continuous_action": HALF_CHEETAH for name in ("ddpg", "td3", "sac")},
    "qdagger_dqn_atari": (*PONG, *FROM_TEACHER),
    "ppo_atari_envpool": POOL,
    "pqn_atari_envpool": POOL,
    "ppo_rnd_envpool": (*POOL, "--num-iterations-obs-norm-init", 1),
}
LARGE_BATCH = (
    "--batch-size",
    2**17,
    "--learning-starts",
    1000,
    "--total-timesteps",
    1500,
)  # smaller ones are for the CPU
COMPILED = {
    "ppo_jax": (
        "--env-id",
        "Breakout-MinAtar",
        "--num-seeds",
        4,
        "--num-envs",
        64,
        "--total-timesteps",
        1_000_000,
    ),
    "ppo_rnn_jax": ("--num-envs", 64, "--total-timesteps", 200_000),
    "pqn_jax": ("--num-envs", 64, "--total-timesteps", 200_000),
    "ppo_continuous_action_jax": ("--total-timesteps", 4_000_000),
    "ppo_continuous_action_isaacgym": ("--total-timesteps", 2_000_000),
    "ppo_atari_envpool_xla_jax_scan": POOL,
    **dict.fromkeys(["dqn_jax", "c51_jax"], LARGE_BATCH),
    **dict.fromkeys(["dqn_atari_jax", "c51_atari_jax"], PONG),
    "qdagger_dqn_atari_jax": (*PONG, *FROM_TEACHER),
    **{
        f"{name}_continuous_action_jax": HALF_CHEETAH
        for name in ("ddpg", "td3", "sac", "tqc", "droq", "crossq")
    },
    "simba_v2_sac_jax": HALF_CHEETAH,
    "fast_td3_jax": (
        *("--env-id", "brax/ant", "--v-min", -100, "--v-max", 300),
        *("--buffer-size", 1_024_000, "--total-timesteps", 204_800),
    ),
    "fast_sac_jax": (
        *("--env-id", "brax/ant", "--v-min", -100, "--v-max", 300),
        *("--buffer-size", 1_024_000, "--total-timesteps", 409_600),
    ),
}


def run(file, folder, *flags):
    """The checkpoints that a run, or several side by side, leave in a new folder."""
    folder.mkdir()
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false"
    }  # for there are other tests beside this one
    command = [sys.executable, str(FILES[file]), *with_teacher(FILES[file], flags)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [read_checkpoint(path) for path in sorted((folder / "runs").iterdir())]


@pytest.mark.parametrize("file", RECORDED)
def test_recorded_as_plain(file, tmp_path):
    """And recorded again: the same bits three times."""
    forms = {"recorded": "--compile", "again": "--compile", "plain": "--no-compile"}
    (recorded,), (again,), (plain,) = (
        run(file, tmp_path / name, *RECORDED[file], form) for name, form in forms.items()
    )
    assert same(recorded, again) and same(recorded, plain)


@pytest.mark.parametrize("file", COMPILED)
def test_the_same_bits_again(file, tmp_path):
    runs = [run(file, tmp_path / name, *COMPILED[file]) for name in ("first", "second")]
    assert len(runs[0]) > 0 and same(*runs)


@pytest.mark.parametrize(
    ("file", "flags"),
    [
        ("dqn_atari_jax", PONG),
        ("c51_atari_jax", PONG),
        ("qdagger_dqn_atari_jax", (*PONG, *FROM_TEACHER)),
        ("ppo_atari_envpool_xla_jax", POOL),
        ("ppo_atari_envpool_xla_jax_scan", POOL),
        ("td3_continuous_action_jax", HALF_CHEETAH),
    ],
)
def test_without_cuda_a_run_is_on_the_cpu(file, flags, tmp_path):
    """JAX takes its platforms once, when it makes its first array."""
    run(file, tmp_path / "run", *flags, "--no-cuda")
    (path,) = (tmp_path / "run").glob("runs/*/run.json")
    assert json.loads(path.read_text())["device"].startswith("cpu")


ON_BOTH = """
import runpy, sys
names = runpy.run_path(sys.argv[1])
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_default_matmul_precision", "highest")
if "/" in sys.argv[2]:
    env, _ = names["make_env"](names["Args"](env_id=sys.argv[2]))
    reset = env.reset
    draw = lambda key: jax.random.uniform(key, (env.action_size,), minval=-1.0)
    step = lambda key, state: env.step(state, draw(key))
else:
    env, params = names["gymnax"].make(sys.argv[2])
    reset = lambda key: env.reset(key, params)[1]
    step = lambda key, state: env.step(key, state, env.action_space(params).sample(key), params)[1]
def roll(key):
    def look(state, key):
        state = step(key, state)
        seen = jax.tree.leaves(getattr(state, "obs", state))
        return state, jnp.concatenate([jnp.ravel(x).astype(jnp.float32) for x in seen])
    return jax.lax.scan(look, reset(key), jax.random.split(key, int(sys.argv[3])))[1]
keys = jax.random.split(jax.random.PRNGKey(3), 64)
def roll_on(kind):
    return np.asarray(jax.jit(jax.vmap(roll))(jax.device_put(keys, jax.devices(kind)[0])))
on = [roll_on(kind) for kind in ("cuda", "cpu")]
print(np.abs(on[0] - on[1]).max(), np.abs(on[1]).max())
"""
GAMES = [
    "CartPole-v1",
    "Acrobot-v1",
    *(f"{name}-MinAtar" for name in ("Asterix", "Breakout", "Freeway", "SpaceInvaders")),
]


@pytest.mark.parametrize(
    ("file", "env_id", "steps"),
    [("ppo_continuous_action_jax", f"brax/{name}", 10) for name in ("ant", "humanoid", "hopper")]
    + [
        ("ppo_continuous_action_jax", "brax/halfcheetah", 5)
    ]  # where roundings grow faster: 2e-3, and 0.12 after ten steps
    + [("ppo_jax", env_id, 100) for env_id in GAMES],
)
def test_worlds_on_a_gpu_are_those_on_a_cpu(file, env_id, steps):
    """XLA's own way to add up in a fixed order is far off with Brax's forces: Ants were 14.6 away
    after these ten steps."""
    command = [sys.executable, "-c", ON_BOTH, str(FILES[file]), env_id, str(steps)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cuda,cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    difference, largest = map(
        float, done.stdout.splitlines()[-1].split()
    )  # before it Brax may tell of what it did not find
    assert difference < 0.01 and largest > 1


PROJECT_ON_BOTH = """
import os, sys
sys.argv = sys.argv[1:]
import runpy
names = runpy.run_path(sys.argv[0], run_name="loaded")
import jax, jax.numpy as jnp, numpy as np
atoms = jnp.linspace(-5, 5, 51)
keys = jax.random.split(jax.random.key(3))
pmfs = jax.nn.softmax(jax.random.normal(keys[0], (4096, 51)))
returns = 0.9 * atoms + 4 * jax.random.normal(keys[1], (4096, 1))  # many beyond the ends
data = pmfs, returns, atoms
def project_on(kind):
    return np.asarray(jax.jit(names["project"])(*jax.device_put(data, jax.devices(kind)[0])))
on = [project_on(kind) for kind in sys.argv[1:]]
print(np.abs(on[0] - on[1]).max(), on[1].sum(1).min())
"""


@pytest.mark.parametrize("file", ["c51_jax", "c51_atari_jax", "simba_v2_sac_jax", "fast_td3_jax"])
def test_projection_on_a_gpu_is_that_on_a_cpu(file):
    """XLA adds up in a fixed order here, which it did wrongly with Brax's forces."""
    command = [sys.executable, "-c", PROJECT_ON_BOTH, str(FILES[file]), "cuda", "cpu"]
    environment = os.environ | {"JAX_PLATFORMS": "cuda,cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    difference, least = map(float, done.stdout.splitlines()[-1].split())
    assert difference < 1e-5 and abs(least - 1) < 1e-4
