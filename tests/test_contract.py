"""What every file promises around its algorithm: command line, run folder, metrics, checkpoints.

The shared block is the same text in all PyTorch files and in all JAX files (test_siblings.py), so
what it does is tested on ppo.py and dqn_jax.py. What a file's own part can get wrong is tested on
every file.
"""

import ast
import contextlib
import functools
import hashlib
import io
import json
import os
import pickle
import random
import re
import runpy
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tqdm import tqdm

from tests import harness, probes
from tests.harness import (
    FILES,
    PPO,
    ROOT,
    about,
    compiled_quickly,
    has_pools,
    only_run,
    probe,
    read_checkpoint,
    same,
    scalars,
    sees_images,
    start,
    weights,
    with_teacher,
)

BLOCKS = ["ppo", "dqn_jax"]  # one file with each form of the shared block
TORCH = [
    stem for stem in FILES if "_jax" not in stem
]  # how the others resume is tested in their own files
LEADERS = [
    "ppo",
    "ppo_continuous_action",
    "ppo_atari_envpool",
    "dqn",
    "td3_continuous_action",
]  # one of each kind
LONG = [
    stem
    for stem in TORCH
    if stem
    not in (
        "ppo_rnd_envpool",
        "ppo_procgen",
        "ppo_atari_multigpu",
        "ppo_continuous_action_isaacgym",
    )
]  # what takes long, and is the same code in the others
PAYS = [stem for stem in TORCH if not any(x in stem for x in ("isaac", "pettingzoo", "multigpu"))]
LOSSES = {
    "dqn": "losses/td_loss",
    "pqn": "losses/td_loss",
    "c51": "losses/loss",
    "qrd": "losses/loss",
    **dict.fromkeys(["ppo", "rpo", "ppg"], "losses/value_loss"),
}
LOSSES |= dict.fromkeys(["ddp", "td3", "sac"], "losses/qf1_loss")
LOSSES |= dict.fromkeys(["rai", "qda"], "losses/td_loss")
SCHEDULES = {
    "dqn": "charts/epsilon",
    "pqn": "charts/epsilon",
    "c51": "charts/epsilon",
    "qrd": "charts/epsilon",
    **dict.fromkeys(["ppo", "rpo", "ppg"], "charts/learning_rate"),
}
SCHEDULES |= {"rai": "charts/beta", "qda": "charts/epsilon"}
SMALL = ("--num-envs", 2, "--num-minibatches", 2, "--update-epochs", 2, "--checkpoint-interval", 1)
SMALL_VALUE = (
    "--num-envs",
    2,
    "--learning-starts",
    10,
    "--train-frequency",
    4,
    "--batch-size",
    2,
    "--buffer-size",
    64,
)
SMALL_VALUE = (*SMALL_VALUE, "--target-network-frequency", 14, "--checkpoint-buffer")
SMALL_CONTROL = (
    "--env-id",
    "Pendulum-v1",
    "--num-envs",
    2,
    "--learning-starts",
    10,
    "--batch-size",
    2,
    "--buffer-size",
    64,
)
SMALL_CONTROL = (*SMALL_CONTROL, "--checkpoint-buffer")
needs_fork = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")


def files(*stems, slow=()):
    """For what takes long: tests/test_siblings.py sees to it that the other files have the same
    code there."""
    others = [
        pytest.param(FILES[stem], marks=pytest.mark.slow, id=stem)
        for stem in slow
        if stem not in stems
    ]
    return pytest.mark.parametrize(
        "file", [*(pytest.param(FILES[stem], id=stem) for stem in stems), *others]
    )


def train(file, folder, *flags, **hooks):
    """Run a file as tests.harness does, and compile programs of JAX quickly."""
    if "_jax" not in file.stem:
        return harness.train(file, folder, *flags, **hooks)
    return compiled_quickly(lambda: harness.train(file, folder, *flags, **hooks))


@functools.cache
def folder_of(file):
    """With a short run of the file in it; it goes when this process ends."""
    folder = tempfile.TemporaryDirectory()
    train(file, Path(folder.name), *small(file, "--total-timesteps", iteration(file)))
    return folder


def finished(file, folder):
    """A copy of that run in a folder."""
    run = only_run(Path(folder_of(file).name))
    return Path(shutil.copytree(run, folder / "runs" / run.name))


COMPILED = [
    pytest.param(stem, marks=pytest.mark.slow)
    for stem in ("dqn_atari_jax", "sac_continuous_action_jax")
]


@pytest.fixture(params=[*TORCH, "dqn_jax", "ppo_jax", "ppo_atari_envpool_xla_jax_scan", *COMPILED])
def file(request):
    """The other JAX files take long to compile the same code."""
    return FILES[request.param]


def learns_values(file):
    """Of discrete actions, from a replay buffer."""
    return file.stem[:3] in ("dqn", "c51", "qrd", "rai", "qda") or file.stem == "sac_atari"


def learns_control(file):
    """Continuous actions, from a replay buffer."""
    named = "_continuous_action" in file.stem or "simba" in file.stem
    return named and file.stem[1:3] != "po"


def has_replay(file):
    return learns_values(file) or learns_control(file)


def iteration(file):
    """Environment steps between two checkpoints, with the flags below: few where there is a large
    network."""
    return 16 if sees_images(file) or learns_control(file) else 64


def small(file, *flags):
    if learns_values(file):
        flags = (*SMALL_VALUE, "--checkpoint-interval", iteration(file), *flags)
        return (
            [{"--train-frequency": "--update-frequency"}.get(flag, flag) for flag in flags]
            if "sac" in file.stem
            else flags
        )
    if learns_control(file):
        narrow = ("--q-width", 16) if re.match("crossq|simba", file.stem) else ()
        return (*SMALL_CONTROL, *narrow, "--checkpoint-interval", iteration(file), *flags)
    if file.stem.startswith("fast_"):
        narrow = ("--q-network-width", 16, "--actor-width", 16, "--env-id", "brax/ant")
        few = ("--num-envs", 2, "--learning-starts", 16, "--batch-size", 2, "--buffer-size", 64)
        return (*narrow, *few, "--checkpoint-interval", iteration(file), *flags)
    quick = (
        ("--env-id", "Pendulum-v1") if "_continuous" in file.stem else ()
    )  # MuJoCo's videos need OpenGL
    quick = ("--env-id", probe(file, "Pendulum")) if "isaacgym" in file.stem else quick
    narrow = ("--trxl-dim", 16, "--trxl-num-layers", 2, "--trxl-memory-length", 8)
    quick = ("--env-id", "CartPole-v1", *narrow) if "trxl" in file.stem else quick
    quick = (
        ("--env-id", "CartPole-v1") if file.stem == "ppo_rnn_jax" else quick
    )  # memory chains draw nothing
    often = (
        ("--log-interval", 1)
        if file.stem in ("ppo_jax", "ppo_rnn_jax", "ppo_continuous_action_jax")
        else ()
    )
    often = ("--num-iterations-obs-norm-init", 1) if "_rnd" in file.stem else often
    often = (
        ("--elo-games", 4, "--elo-steps", 2, "--elo-players", 2)
        if "pettingzoo" in file.stem
        else often
    )
    flags = (*quick, *SMALL, *often, "--num-steps", iteration(file) // 2, *flags)
    if "ppg" in file.stem:  # each iteration is a phase
        flags = [{"--update-epochs": "--e-policy"}.get(flag, flag) for flag in flags]
        return (
            *flags,
            "--n-iteration",
            1,
            "--num-aux-rollouts",
            1,
            "--e-auxiliary",
            1,
            "--anneal-lr",
        )
    return (
        [{"--num-envs": "--local-num-envs"}.get(flag, flag) for flag in flags]
        if "multigpu" in file.stem
        else flags
    )


def with_curves(file, *flags):
    """The same with losses that are logged soon: who has a replay buffer logs every hundredth
    update."""
    return small(file, *(("--train-frequency", 1) if learns_values(file) else ()), *flags)


def logged_steps(file, total):
    """The steps at which those are logged."""
    every = 100 if has_replay(file) else iteration(file)
    return list(range(every, total + 1, every))


def refuse(file, folder, *flags):
    """The one line with which the file refuses, having written nothing."""
    before = sorted(folder.rglob("*")) if folder.exists() else []
    with pytest.raises(SystemExit) as refusal:
        train(file, folder, *flags)
    message = refusal.value.code
    assert (
        isinstance(message, str) and message and "\n" not in message and "Traceback" not in message
    )
    assert sorted(folder.rglob("*")) == before, "a refused command must not write"
    return message


# the command line

BAD_VALUES = {
    **dict.fromkeys(
        ["num_envs", "local_num_envs", "num_steps", "num_minibatches", "batch_size"], 0
    ),
    **dict.fromkeys(["update_epochs", "checkpoint_interval", "train_frequency", "utd"], 0),
    **dict.fromkeys(["policy_frequency", "target_network_frequency", "update_frequency"], 0),
    **dict.fromkeys(["clip_coef", "max_grad_norm", "total_timesteps", "n_step", "log_interval"], 0),
    **dict.fromkeys(["num_critics", "q_width", "max_frames", "num_pools", "learning_starts"], 0),
    **dict.fromkeys(["n_iteration", "e_policy", "e_auxiliary", "num_aux_rollouts"], 0),
    **dict.fromkeys(["record_video_step_frequency", "num_iterations_obs_norm_init"], 0),
    **dict.fromkeys(["buffer_size", "num_seeds", "reset_ratio", "prioritized_replay_eps"], 0),
    **dict.fromkeys(["learning_rate", "policy_lr", "q_lr", "alpha", "init_lr"], 0),
    **dict.fromkeys(["trxl_num_layers", "trxl_num_heads", "trxl_dim", "trxl_memory_length"], 0),
    **{"anneal_steps": 0, "final_lr": "inf", "init_ent_coef": "nan", "final_ent_coef": "nan"},
    **dict.fromkeys(
        ["gamma", "int_gamma", "gae_lambda", "q_lambda", "tau", "start_e", "end_e"], 1.1
    ),
    **dict.fromkeys(["exploration_fraction", "update_proportion", "target_entropy_scale"], 1.1),
    **dict.fromkeys(["prioritized_replay_alpha", "prioritized_replay_beta", "dropout"], 1.1),
    **dict.fromkeys(["exploration_noise", "policy_noise", "noise_clip", "seed"], -1),
    **dict.fromkeys(["ent_coef", "vf_coef", "int_coef", "ext_coef", "target_kl"], "nan"),
    **dict.fromkeys(["reward_scaler", "beta_clone", "rpo_alpha", "v_max"], "inf"),
    **dict.fromkeys(["teacher_eval_episodes", "temperature"], 0),
    **dict.fromkeys(["teacher_steps", "offline_steps"], -1),
    **{"n_atoms": 1, "v_min": 1000, "drop_quantiles": 25, "max_episode_steps": 0},
    **{"num_quantiles": 0, "kappa": 0},
}


@pytest.mark.parametrize("stem", FILES)
def test_bad_values_get_one_line_that_names_the_flag(tmp_path, stem):
    """Every flag of the file that has a value which cannot work is tried with it."""
    names = runpy.run_path(str(FILES[stem]))
    flags = [name for name in names["Args"].__annotations__ if name in BAD_VALUES]
    assert len(flags) >= 8, flags
    for name in flags:
        flag = f"--{name.replace('_', '-')}"
        message = refusal_of(names, tmp_path, flag, BAD_VALUES[name])
        assert message.startswith("cannot ") and name in message.replace("-", "_"), (flag, message)
    assert refuse(FILES[stem], tmp_path, flag, BAD_VALUES[name]) == message, "main asks parse_args"


def refusal_of(names, folder, *flags):
    """The message of a file's parse_args alone, or of the whole file where its main refuses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [names["__file__"], *map(str, flags)])
        patch.chdir(folder)
        try:
            names["parse_args"]()
        except SystemExit as refusal:
            message = refusal.code
        else:
            return refuse(Path(names["__file__"]), folder, *flags)
    assert isinstance(message, str) and message and "\n" not in message
    assert list(folder.iterdir()) == [], "a refused command must not write"
    return message


@pytest.mark.parametrize("stem", FILES)
def test_unknown_environments_get_one_line(tmp_path, stem):
    probe(FILES[stem], "")  # registers what there is for the file
    for env_id in ("NoSuchEnv-v0", "no_such_module:Env-v0"):
        message = refuse(FILES[stem], tmp_path, "--env-id", env_id)
        assert message.startswith(f"cannot train on {env_id}: "), message
    assert "cannot resume nowhere: " in refuse(FILES[stem], tmp_path, "--resume", "nowhere")


@pytest.mark.parametrize(
    ("stem", "flags", "words"),
    [
        ("ppo", ("--num-minibatches", 257), "num_minibatches must be at most 256"),
        ("ppo", ("--num-steps", 1), "num_minibatches"),
        ("ppo", ("--total-timesteps", 511), "less than one rollout"),
        ("ppo", ("--learning-rate", "inf"), "learning_rate is inf"),
        ("ppo", ("--seed", 2**32), "seed must be between 0 and"),
        ("ppo", ("--num-steps", 10**9, "--total-timesteps", 10**11), "GB of memory needed"),
        ("ppo", ("--env-id", ""), "cannot train on"),
        ("ppo", ("--env-id", "CartPole-v99"), "v99"),
        ("ppo", ("--env-id", "Pendulum-v1"), "Discrete actions"),
        ("ppo", ("--env-id", "FrozenLake-v1"), "Box observations"),
        ("ppo", ("--env-id", "Probe/DictObs-v0"), "Box observations"),
        ("ppo", ("--env-id", "Probe/MultiDiscreteActions-v0"), "Discrete actions"),
        ("ppo", ("--env-id", "Probe/SameStep-v0"), "autoreset mode"),
        ("ppo", ("--env-id", "Probe/ConstantValue-v0", "--capture-video"), "rgb_array"),
        ("ppo", ("--exp-name", "x" * 300), "File name too long"),
        ("ppo", ("--resume", "nowhere", "--seed", 2), "cannot resume nowhere"),
        ("dqn", ("--learning-starts", 3), "learning_starts must be at least 4"),
        ("dqn", ("--num-envs", 8, "--buffer-size", 31), "buffer_size must be at least 32"),
        ("dqn", ("--buffer-size", 10**12), "GB of memory needed"),
        ("dqn", ("--env-id", "Pendulum-v1"), "Discrete actions"),
        ("dqn_jax", ("--num-envs", 4), "num_envs and train_frequency"),
        ("dqn_jax", ("--total-timesteps", 2**31), "total_timesteps"),
        ("dqn_jax", ("--env-id", "FrozenLake-v1"), "Box observations"),
        ("sac_continuous_action", ("--env-id", "CartPole-v1"), "Box actions"),
        ("sac_continuous_action", ("--env-id", "Probe/UnboundedActions-v0"), "Box actions"),
        ("sac_continuous_action", ("--buffer-size", 10**12, "--env-id", "Pendulum-v1"), "GB of"),
        ("sac_continuous_action_jax", ("--env-id", "CartPole-v1"), "Box actions"),
        ("ppo_jax", ("--sweep", "seed=1,2"), "sweep"),
        ("ppo_jax", ("--sweep", "gamma"), "could not convert"),
        ("ppo_jax", ("--sweep", "gamma=0.9,x"), "x"),
        ("ppo_jax", ("--sweep", "gamma=0.9,1.1"), "gamma must be between 0 and 1"),
        ("ppo_jax", ("--num-minibatches", 3), "num_minibatches"),
        ("ppo_jax", ("--env-id", "Pendulum-v1"), "Discrete actions"),
        ("ppo_atari_envpool_xla_jax", ("--num-minibatches", 3), "num_minibatches"),
        ("ppo_rnd_envpool", ("--num-envs", 2, "--capture-video"), "rgb_array"),
    ],
)
def test_bad_commands_get_one_line(tmp_path, stem, flags, words):
    if (
        "--exp-name" in flags
    ):  # only the attempt itself can tell: it may leave the empty folder runs
        (tmp_path / "runs").mkdir()
    message = refuse(FILES[stem], tmp_path, *flags)
    assert words in message, message


@files(*BLOCKS)
@pytest.mark.parametrize(
    "flags",
    [("--no-such-flag",), ("--seed", "one"), ("--seeed", 2), ("stray",), ("--gamma",)],
)
def test_unknown_flags_and_wrong_types_are_refused(file, tmp_path, capfd, flags):
    with pytest.raises(SystemExit) as refusal:
        train(file, tmp_path, *flags)
    complaint = capfd.readouterr().err
    assert refusal.value.code == 2 and "Traceback" not in complaint
    assert str(flags[0]).strip("-") in complaint
    assert list(tmp_path.iterdir()) == []


@files("ppo")
def test_refusal_as_the_shell_sees_it(file, tmp_path):
    command = [sys.executable, str(file), "--env-id", "NoSuchEnv-v0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if line]
    assert done.returncode == 1 and len(lines) == 1, done.stderr
    assert lines[0].startswith("cannot train on NoSuchEnv-v0: ")
    assert list(tmp_path.iterdir()) == []


@files(*BLOCKS)
def test_flags_take_true_and_false_as_in_v1(file, tmp_path):
    words = ("--cuda", "False", "--no-track", "--capture-video", "False", "--exp-name", "True")
    train(file, tmp_path, *small(file, "--total-timesteps", iteration(file), *words))
    flags = about(only_run(tmp_path))["args"]
    assert (flags["cuda"], flags["track"], flags["exp_name"]) == (False, False, "True")


@files("ppo")
def test_a_variable_shows_the_traceback(file, tmp_path, monkeypatch):
    monkeypatch.setenv("CLEANRL_TRACEBACK", "1")
    with pytest.raises(gym.error.NameNotFound):
        train(file, tmp_path, "--env-id", "NoSuchEnv-v0")


NUMBERS = [
    "0",
    "-1",
    "1",
    "2",
    "3",
    "7",
    "0.5",
    "1e-3",
    "1e30",
    "-0.0",
    "nan",
    "inf",
    "-inf",
    "None",
    "",
    "x",
    "1_0",
    "9" * 20,
]
TEXTS = [
    "",
    "None",
    "CartPole-v1",
    "Acrobot-v1",
    "Pendulum-v1",
    "no/such:thing",
    "../up",
    "a b",
    "~",
    "*",
    "--",
    "\N{SNOWMAN}",
]
FLAGS = {
    **dict.fromkeys(
        ["learning-rate", "gamma", "gae-lambda", "num-minibatches", "update-epochs", "clip-coef"],
        NUMBERS,
    ),
    **dict.fromkeys(
        ["ent-coef", "vf-coef", "max-grad-norm", "target-kl", "seed", "checkpoint-interval"],
        NUMBERS,
    ),
    **dict.fromkeys(["num-envs", "num-steps", "total-timesteps"], NUMBERS[:-1]),
    **dict.fromkeys(["env-id", "exp-name", "resume", "wandb-entity"], TEXTS),
    **{
        flag: [None, "1", "x"]
        for flag in ("cuda", "torch-deterministic", "anneal-lr", "norm-adv", "clip-vloss")
    },
}
VALUE_FLAGS = {
    **dict.fromkeys(
        ["learning-rate", "gamma", "tau", "batch-size", "start-e", "end-e", "exploration-fraction"],
        NUMBERS,
    ),
    **dict.fromkeys(
        ["target-network-frequency", "train-frequency", "seed", "checkpoint-interval"], NUMBERS
    ),
    **dict.fromkeys(["num-envs", "total-timesteps", "learning-starts", "buffer-size"], NUMBERS),
    **dict.fromkeys(["env-id", "exp-name", "resume", "wandb-entity"], TEXTS),
    **{
        flag: [None, "1", "x"]
        for flag in ("cuda", "torch-deterministic", "checkpoint-buffer", "no-checkpoint-buffer")
    },
}

CONTROL_FLAGS = {
    **dict.fromkeys(
        ["learning-rate", "gamma", "tau", "batch-size", "policy-frequency", "checkpoint-interval"],
        NUMBERS,
    ),
    **dict.fromkeys(
        [
            "exploration-noise",
            "policy-noise",
            "noise-clip",
            "learning-starts",
            "buffer-size",
            "seed",
        ],
        NUMBERS,
    ),
    **dict.fromkeys(["num-envs", "total-timesteps", "utd"], NUMBERS[:-1]),
    **dict.fromkeys(["env-id", "exp-name", "resume", "wandb-entity"], TEXTS),
    **{
        flag: [None, "1", "x"]
        for flag in ("cuda", "compile", "no-compile", "torch-deterministic", "no-checkpoint-buffer")
    },
}


def commands(flags):
    """Lists of flags, each with one of the values that are to be tried for it."""
    pair = st.sampled_from(sorted(flags)).flatmap(
        lambda f: st.tuples(st.just(f), st.sampled_from(flags[f]))
    )
    return st.lists(pair, min_size=1)


fuzz = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@files("ppo")
@fuzz
@given(commands(FLAGS))
def test_fuzzed_commands(file, tmp_path, pairs):
    assert is_finished_or_refused(
        file, tmp_path, ("--total-timesteps", 64, "--num-envs", 2, "--num-steps", 16), pairs
    )


@files("dqn")
@fuzz
@given(commands(VALUE_FLAGS))
def test_fuzzed_commands_of_value_learners(file, tmp_path, pairs):
    assert is_finished_or_refused(file, tmp_path, ("--total-timesteps", 64, *SMALL_VALUE), pairs)


@files("td3_continuous_action")
@fuzz
@given(commands(CONTROL_FLAGS))
def test_fuzzed_commands_of_continuous_control(file, tmp_path, pairs):
    assert is_finished_or_refused(file, tmp_path, ("--total-timesteps", 24, *SMALL_CONTROL), pairs)


def is_finished_or_refused(file, tmp_path, start, pairs):
    """Whatever is asked: whether it is a finished run, or a refusal that leaves nothing behind.
    Never a traceback."""
    shutil.rmtree(tmp_path)
    flags = [word for flag, value in pairs for word in (f"--{flag}", value) if word is not None]
    try:
        train(file, tmp_path, *start, *flags)
    except SystemExit as refusal:
        is_one_line = refusal.code == 2 or (
            isinstance(refusal.code, str) and "\n" not in refusal.code
        )
        return is_one_line and list(tmp_path.iterdir()) == []
    return (only_run(tmp_path) / "checkpoint.pt").exists()


@files(*BLOCKS)
def test_two_runs_of_one_second_do_not_mix(file, tmp_path, monkeypatch):
    ticks = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000 + next(ticks) * 1e-7)
    for _ in range(2):
        train(file, tmp_path, *small(file, "--total-timesteps", iteration(file)))
    names = sorted(run.name for run in (tmp_path / "runs").iterdir())
    assert [name.split("__")[-1] for name in names] == ["1800000000", "1800000001"]
    checkpoints = [read_checkpoint(run) for run in (tmp_path / "runs").iterdir()]
    assert same(*checkpoints), "the same seed, the same run"


# the run folder and the metrics


@files(*BLOCKS, slow=[*TORCH, "ppo_jax", "ppo_atari_envpool_xla_jax_scan"])
def test_run_folder(file, tmp_path, monkeypatch):
    """The shared block writes it: every other file's is looked at in test_no_episode_is_lost."""
    monkeypatch.setenv("WANDB_TAGS", "pr-7,fast")
    env_id = probe(file, "ConstantValue")
    total = ("--total-timesteps", 2 * iteration(file))
    names = train(file, tmp_path, *small(file, *total, "--seed", 7, "--env-id", env_id))
    run = only_run(tmp_path)
    assert re.fullmatch(rf"\w*Probe-ConstantValue-v0__{file.stem}__7__\d+", run.name)
    told = about(run)
    args = json.loads(json.dumps(vars(names["args"])))
    assert told["file"] == file.name and told["args"] == args and told["tags"] == ["pr-7", "fast"]
    assert told["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert (run / file.name).read_bytes() == file.read_bytes(), "the exact code of the run"
    assert isinstance(told["dirty"], bool) and re.fullmatch(r"[0-9a-f]{40}|", told["commit"])
    assert told["packages"]["numpy"] == np.__version__ and told["device"]
    assert told["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert abs(told["start_time"] - time.time()) < 600
    assert read_checkpoint(run)["args"] == args
    found = sorted(re.sub(r"tfevents.*", "tfevents", path.name) for path in run.iterdir())
    checkpoint = "checkpoint.msgpack" if "_jax" in file.stem else "checkpoint.pt"
    expected = [checkpoint, "events.out.tfevents", "lock", "pid", file.name, "run.json"]
    assert set(found) <= set(expected) and set(expected) - {"lock"} <= set(found)


LONG_TO_COMPILE = ["ppo_atari_envpool_xla_jax_scan", "dqn_atari_jax", "sac_continuous_action_jax"]


@files(*TORCH, "dqn_jax", "ppo_jax", slow=LONG_TO_COMPILE)
def test_no_episode_is_lost(file, tmp_path):
    """All environments of MarkedLast end together, each at a step of its own: after 3 steps, or 4
    with a reset. The bar shows the last return, and the speed."""
    envs = (
        4 if "pettingzoo" in file.stem else 5
    )  # of which two are the players of one game, reported by their names
    flags = (
        "--num-envs",
        envs,
        "--total-timesteps",
        20 * envs,
        "--env-id",
        probe(file, "MarkedLast"),
    )
    rollout = ("--num-steps", 10, "--num-minibatches", 1)
    rollout = ("--train-frequency", 5, "--learning-starts", 20) if learns_values(file) else rollout
    rollout = ("--learning-starts", 20) if learns_control(file) else rollout
    pools = ("--num-pools", 1) if has_pools(file) and "_jax" not in file.stem else ()
    with (
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        contextlib.redirect_stderr(io.StringIO()) as stderr,
    ):
        train(file, tmp_path, *small(file, *flags, *rollout, *pools))
    run = only_run(tmp_path)
    assert re.fullmatch(rf"\w*Probe-MarkedLast-v0__{file.stem}__1__\d+", run.name)
    assert about(run)["args"] == read_checkpoint(run)["args"]
    logged = scalars(run)
    same_step = ("dqn_jax", "c51_jax", "ppo_jax", "ppo_rnn_jax", "ppo_continuous_action_isaacgym")
    ends = (3, 6, 9, 12, 15, 18) if file.stem in same_step else (3, 7, 11, 15, 19)
    for metric in ("charts/episodic_return", "charts/episodic_length"):
        points = sorted(
            point for name in logged if name.startswith(metric) for point in logged[name]
        )
        assert points == [((t - 1) * envs + env + 1, 3.0) for t in ends for env in range(envs)]
    assert re.search(
        rf"{20 * envs}(\.0)?/{20 * envs}(\.0)? .*step/s, episodic_return=3\.0(, elo=-?\d+)?\]",
        stderr.getvalue(),
    )
    assert f"run folder: runs{os.sep}{run.name}\ndevice: " in stdout.getvalue()


@files("ppo", "ppo_atari", "dqn", "ppo_continuous_action", slow=PAYS)
def test_reported_returns_are_what_the_environment_paid(file, tmp_path):
    """Not clipped, not normalized: that is for learning only."""
    flags = ("--env-id", probe(file, "LargeRewards"), "--total-timesteps", 4 * iteration(file))
    train(file, tmp_path, *small(file, *flags))
    paid = 9
    reported = [value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]]
    assert reported and set(reported) == {paid}


# checkpoints and resume


def interrupted(file, folder, flags, after, interval=None, **hooks):
    """A run that was stopped half-way to the next after its first `after` checkpoints."""
    update, stop_at = tqdm.update, (after + 0.5) * (interval or iteration(file))

    def stop(progress, steps):
        update(progress, steps)
        if progress.n > stop_at:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tqdm, "update", stop)
        train(file, folder, *flags, **hooks)
    return only_run(folder)


@files(*TORCH)
def test_resume_changes_nothing_but_the_episodes(file, tmp_path):
    """Where there is nothing to an episode, and checkpoints fall between two, a resumed run is the
    uninterrupted one."""
    count, after = (4, 1) if sees_images(file) else (8, 3)  # large networks learn slowly
    total = ("--total-timesteps", count * iteration(file))
    flags = small(file, *total, "--env-id", probe(file, "TruncatedEveryStep"))
    train(file, tmp_path / "whole", *flags)
    run = interrupted(file, tmp_path / "cut", flags, after)
    assert step_of(run) == after * iteration(file)
    train(file, tmp_path / "cut", "--resume", run)
    whole, cut = map(read_checkpoint, (only_run(tmp_path / "whole"), run))
    for checkpoint in (
        whole,
        cut,
    ):  # a resumed run has seen one first observation more of each environment
        checkpoint.get("agent", {}).pop("obs_moments.count", None)
    assert whole.keys() == cut.keys() and step_of(run) == count * iteration(file)
    assert {name: same(whole[name], cut[name]) for name in whole} == dict.fromkeys(whole, True)


@files("ppo", "dqn", "td3_continuous_action", slow=LONG)
def test_curves_and_schedules_continue(file, tmp_path):
    flags = with_curves(
        file, "--total-timesteps", 8 * iteration(file), "--env-id", probe(file, "RandomEnds")
    )
    train(file, tmp_path / "whole", *flags)
    run = interrupted(file, tmp_path / "cut", flags, after=6)
    train(file, tmp_path / "cut", "--resume", run)
    whole, cut = scalars(only_run(tmp_path / "whole")), scalars(run)
    schedule, loss = SCHEDULES.get(file.stem[:3], "global_step"), LOSSES[file.stem[:3]]
    assert cut.get(schedule) == whole.get(schedule) and (schedule in cut) == (
        file.stem[:3] in SCHEDULES
    )
    assert [step for step, _ in cut[loss]] == logged_steps(file, 8 * iteration(file)), (
        "each step once"
    )
    reported = f"charts/episodic_return{'-player1' * ('pettingzoo' in file.stem)}"
    for name in (loss, reported):  # up to the checkpoint the very same
        before = len([step for step, _ in whole[name] if step <= 6 * iteration(file)])
        assert cut[name][:before] == whole[name][:before]
    returns = [step for step, _ in cut[reported]]
    assert before and returns == sorted(set(returns)) and max(returns) > 6 * iteration(file)


@files("ppo", "dqn", slow=TORCH)
def test_resume_before_the_first_checkpoint_starts_over(file, tmp_path):
    interval = 2 * iteration(file) if has_replay(file) else 2
    flags = with_curves(
        file, "--total-timesteps", 2 * iteration(file), "--checkpoint-interval", interval
    )
    train(file, tmp_path / "whole", *flags)
    run = interrupted(file, tmp_path / "cut", flags, after=0)
    assert step_of(run) == 0
    train(file, tmp_path / "cut", "--resume", run)
    assert same(weights(run), weights(only_run(tmp_path / "whole")))
    cut, whole = scalars(run), scalars(only_run(tmp_path / "whole"))
    assert {**cut, "charts/SPS": None} == {**whole, "charts/SPS": None}


@pytest.mark.parametrize("stem", FILES)
def test_every_flag_has_its_help(stem):
    """tyro takes it from the comment behind a flag, and finds none where a line was wrapped."""
    lines = FILES[stem].read_text().splitlines()
    tree = ast.parse("\n".join(lines))
    args = next(node for node in tree.body if getattr(node, "name", "") == "Args")
    flags = [node for node in args.body if isinstance(node, ast.AnnAssign)]
    assert len(flags) > 15
    for flag in flags:
        assert flag.lineno == flag.end_lineno and "  # " in lines[flag.lineno - 1], flag.target.id


@files("dqn", "dqn_atari", "rainbow_atari", "ddpg_continuous_action", slow=["sac_atari"])
@pytest.mark.parametrize("kept", [True, False])
def test_a_resumed_run_learns_when_it_has_a_buffer(file, tmp_path, kept):
    """At once where it was kept; if not, after as many steps as at the start, or it would learn a
    few transitions by heart."""
    keep = "--checkpoint-buffer" if kept else "--no-checkpoint-buffer"
    flags = small(file, "--total-timesteps", 4 * iteration(file), "--learning-starts", 20, keep)
    run = interrupted(file, tmp_path, flags, after=2)
    assert ("buffer" in read_checkpoint(run)) == kept and step_of(run) == 2 * iteration(file)
    updates, before = [], weights(run)
    names = train(
        file,
        tmp_path,
        "--resume",
        run,
        on_update=lambda names: updates.append(names["global_step"]),
    )
    first, every = 2 * iteration(file) + (2 if kept else 20), 2 if learns_control(file) else 4
    assert sorted(set(updates)) == [
        step for step in range(first, 4 * iteration(file) + 1) if step % every == 0
    ]
    assert names["buffer"].num_added == (4 if kept else 2) * iteration(file) and not same(
        weights(run), before
    )


REPLAY = [stem for stem in TORCH if has_replay(FILES[stem])]
SLOW_REPLAY = ["sac_atari", "c51_atari", "qdagger_dqn_atari"]  # whose buffer is that of dqn_atari


@files(*(stem for stem in REPLAY if stem not in SLOW_REPLAY), slow=SLOW_REPLAY)
def test_nothing_leads_across_a_resume(file, tmp_path):
    """It cuts MarkedLast's episodes in the middle; what came before must not lead to, nor be seen
    in, the next ones' start."""
    flags = ("--env-id", probe(file, "MarkedLast"), "--batch-size", 8, "--total-timesteps", 48)
    seen = set()

    def look(names):
        b = names["b"]
        if "_atari" in file.stem:  # a stack of four frames, and the one after it
            batch = torch.cat([b["obs"], b["next_obs"][:, -1:]], 1)[..., 0, 0]
        else:
            batch = torch.cat([b["obs"], b["next_obs"]], 1)
        seen.update(tuple(row) for row in batch.tolist())

    flags = (
        (*flags, "--n-step", 1) if "rainbow" in file.stem else flags
    )  # more of them are drawn from in its own file's tests
    flags = with_curves(
        file, *flags, "--checkpoint-interval", 20
    )  # after two episodes with their resets, and half of another
    run = interrupted(file, tmp_path, flags, after=1, interval=20, on_update=look)
    assert step_of(run) == 20
    train(file, tmp_path, "--resume", run, on_update=look)
    assert len(seen) == 3
    if "_atari" in file.stem:  # stacks of four images, and the one after them
        assert seen == {(0, 0, 0, 127, 170), (0, 0, 127, 170, 212), (0, 127, 170, 212, 255)}
    else:
        assert all(after - before == pytest.approx(1 / 3) for before, after in seen)


@files(*BLOCKS)
def test_resuming_a_finished_run_changes_nothing(file, tmp_path):
    run = finished(file, tmp_path)
    before = weights(run), scalars(run)
    train(file, tmp_path, "--resume", run)
    assert same(weights(run), before[0]) and scalars(run) == before[1]


@files("ppo", "dqn", slow=["ppo_atari", "ppo_atari_lstm"])  # the shared block records them
def test_videos_of_a_resumed_run_stand_beside_the_first(file, tmp_path):
    flags = ("--env-id", probe(file, "MarkedLast")) if "_atari" in file.stem else ()
    flags = small(file, "--total-timesteps", 4 * iteration(file), "--capture-video", *flags)
    run = interrupted(file, tmp_path, flags, after=2)
    train(file, tmp_path, "--resume", run)
    prefixes = {video.name.split("-episode")[0] for video in (run / "videos").glob("*.mp4")}
    assert prefixes == {"step-0", f"step-{2 * iteration(file)}"}


DRAWN_BY_MUJOCO = [
    stem
    for stem in FILES
    if stem.endswith(("_continuous_action", "_continuous_lstm")) or learns_control(FILES[stem])
]


@files(*DRAWN_BY_MUJOCO)
def test_a_machine_that_cannot_draw_says_so_before_anything_is_written(file, tmp_path, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "disabled")  # which MuJoCo accepts, and cannot draw with
    try:
        message = refuse(
            file, tmp_path, "--env-id", "Hopper-v4", "--capture-video", "--total-timesteps", 10_000
        )
    except RuntimeError as error:
        message = f"a traceback: {error}"
    assert (
        message.startswith("cannot train on Hopper-v4: ") and "MUJOCO_GL must be one of" in message
    )


@files(*BLOCKS)
def test_damaged_runs_get_one_line(file, tmp_path):
    run = finished(file, tmp_path)
    checkpoint = next(run.glob("checkpoint.*"))
    whole = {path: path.read_bytes() for path in (run / "run.json", checkpoint)}
    for damage, words in (
        (lambda: (run / "run.json").unlink(), "No such file"),
        (lambda: (run / "run.json").write_text("{"), "Expecting"),
        (lambda: edit(run, num_envs="x"), "num_envs"),
        (lambda: edit(run, env_id=None), "env_id"),
        (lambda: edit(run, learning_rate=[1]), "learning_rate"),
        (lambda: (run / "run.json").write_text('{"file": "x.py"}'), "it is a run of x.py"),
        (lambda: checkpoint.write_bytes(b""), f"{checkpoint.name} is damaged"),
        (lambda: checkpoint.write_bytes(whole[checkpoint][:5000]), f"{checkpoint.name} is damaged"),
    ):
        damage()
        message = refuse(file, tmp_path, "--resume", run)
        assert message.startswith(f"cannot resume {run}: ") and words in message, message
        for path, content in whole.items():
            path.write_bytes(content)


@files(*BLOCKS)
def test_a_run_of_another_environment_gets_one_line(file, tmp_path):
    run = finished(file, tmp_path)
    edit(run, env_id="Acrobot-v1")
    assert refuse(file, tmp_path, "--resume", run).startswith("cannot resume")


def edit(run, **args):
    told = about(run)
    told["args"] |= args
    (run / "run.json").write_text(json.dumps(told))


@files(*BLOCKS)
def test_resume_takes_no_other_flags_but_a_longer_run(file, tmp_path):
    run = finished(file, tmp_path)
    assert "do not pass seed with --resume" in refuse(file, tmp_path, "--resume", run, "--seed", 9)
    assert "can only grow" in refuse(file, tmp_path, "--resume", run, "--total-timesteps", 1)
    total = 2 * iteration(file)
    train(file, tmp_path, "--resume", run, "--total-timesteps", total)
    assert step_of(run) == about(run)["args"]["total_timesteps"] == total


@files(*BLOCKS)
def test_flags_that_came_and_went_do_not_stop_a_resume(file, tmp_path):
    run = finished(file, tmp_path)
    told = about(run)
    told["args"]["gone"] = told["args"].pop("gamma")
    (run / "run.json").write_text(json.dumps(told))
    train(file, tmp_path, "--resume", run)
    assert about(run)["args"]["gamma"] == 0.99


@files(*BLOCKS)
def test_a_failed_write_leaves_the_last_checkpoint(file, tmp_path, monkeypatch):
    """As when the disk is full: the third checkpoint cannot be written."""
    replace, saves = os.replace, []

    def fail(source, target):
        if Path(source).name == "checkpoint.tmp":
            saves.append(source)
            if len(saves) == 3:
                raise OSError("No space left on device")
        replace(source, target)

    interval = 64 if file == PPO else 400  # a hundred iterations are one call in dqn_jax
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(SystemExit) as error:
        train(file, tmp_path, *small(file, "--total-timesteps", 5 * interval))
    monkeypatch.undo()
    words = r"cannot save step \d+ \(.* GB free\): No space left on device"
    assert re.fullmatch(words, error.value.code)
    run = only_run(tmp_path)
    assert not (run / "checkpoint.tmp").exists() and step_of(run) == 2 * interval
    train(file, tmp_path, "--resume", run)
    assert step_of(run) == 5 * interval


# what a researcher changes


def changed_copy(file, folder, *changes):
    """A copy of a file with some of its text replaced."""
    source = file.read_text()
    for old, new in changes:
        assert source.count(old) == 1, (source.count(old), old)
        source = source.replace(old, new)
    folder.mkdir(exist_ok=True)
    copy = folder / f"my_{file.name}"
    copy.write_text(source)
    return copy


ADAM = "torch.optim.Adam(agent.parameters(), **adam)"


@files("ppo")
@pytest.mark.parametrize(
    "optimizer",
    [
        "torch.optim.RMSprop(agent.parameters(), lr=args.learning_rate)",
        "torch.optim.SGD(agent.parameters(), lr=args.learning_rate, momentum=0.9)",
        "torch.optim.Adam(agent.parameters(), lr=args.learning_rate, amsgrad=True)",
        "torch.optim.AdamW([{'params': x.parameters()} for x in (agent.actor, agent.critic)])",
    ],
)
def test_any_optimizer_trains_and_resumes(file, tmp_path, optimizer):
    file = changed_copy(file, tmp_path / "own", (ADAM, optimizer))
    flags = ("--env-id", probe(PPO, "TruncatedEveryStep"), "--total-timesteps", 8 * 64)
    flags = small(PPO, *flags)
    whole = train(file, tmp_path / "whole", *flags)
    run = interrupted(file, tmp_path / "cut", flags, after=3, interval=64)
    train(file, tmp_path / "cut", "--resume", run)
    assert same(weights(run), weights(only_run(tmp_path / "whole")))
    rates = {group["lr"] for group in whole["optimizer"].param_groups}
    assert rates == {2.5e-4 / 8}, "every group is annealed"


NEW_FLAGS = """    widths: list[int] = field(default_factory=lambda: [64, 64])
    names: tuple[str, ...] = ("a", "b")
    kind: Literal["x", "y"] = "x"
    where: Path = Path("here")
    factor: float = 1

    def check(self):"""


@files(*BLOCKS)
def test_flags_of_any_type_resume(file, tmp_path):
    file = changed_copy(
        file,
        tmp_path / "own",
        ("    def check(self):", NEW_FLAGS),
        ("import asdict, dataclass", "import asdict, dataclass, field"),
        ("from pathlib import Path\n", "from pathlib import Path\nfrom typing import Literal\n"),
        ('"""\n\nimport atexit', '"""\n\nfrom __future__ import annotations\n\nimport atexit'),
    )
    new = ("--widths", 8, 9, "--names", "c", "--kind", "y", "--where", "a/b", "--factor", 2)
    stem = FILES[file.stem.removeprefix("my_")]
    train(file, tmp_path, *small(stem, "--total-timesteps", iteration(stem)), *new)
    run = only_run(tmp_path)
    names = train(file, tmp_path, "--resume", run)
    args = names["args"]
    assert (args.widths, args.names, args.kind) == ([8, 9], ("c",), "y")
    assert args.where == Path("a/b") and args.factor == 2.0
    edit(run, kind="z")
    assert "kind" in refuse(file, tmp_path, "--resume", run)


@files("ppo")
def test_what_fits_into_a_checkpoint(file, tmp_path):
    """NumPy arrays and scalars do; of other things, their type is told at the first checkpoint."""
    extra = 'checkpoint["global_step"] = global_step'
    numpy = f'{extra}\n    checkpoint["more"] = [np.arange(3), np.float32(1), np.bool_(True)]'
    copy = changed_copy(file, tmp_path / "own", (extra, numpy))
    flags = small(PPO, "--total-timesteps", 128)
    train(copy, tmp_path / "numpy", *flags)
    run = only_run(tmp_path / "numpy")
    assert same(read_checkpoint(run)["more"], [np.arange(3), np.float32(1), np.bool_(True)])
    train(copy, tmp_path / "numpy", "--resume", run)
    path = f'{extra}\n    checkpoint["more"] = Path("x")'
    copy = changed_copy(file, tmp_path / "own", (extra, path))
    with pytest.raises(SystemExit, match=r"cannot save step 64 .* cannot hold pathlib\S*PosixPath"):
        train(copy, tmp_path / "path", *flags)


@files("ppo")
def test_dropout_and_masks(file, tmp_path):
    """Dropout is off while acting, and log-probabilities of -inf leave the entropy finite."""
    dropout = ("        nn.Tanh(),\n        layer_init(nn.Linear(64, out_dim), gain),",)
    new = dropout[0].replace("Tanh(),", "Tanh(),\n        nn.Dropout(0.5),")
    mask = "return self.actor(obs.reshape(len(obs), -1)).log_softmax(-1)"
    masked = (
        "logits = self.actor(obs.reshape(len(obs), -1))\n"
        "        allowed = torch.arange(logits.shape[1]) < 1\n"
        "        return logits.masked_fill(~allowed, -torch.inf).log_softmax(-1)"
    )
    copy = changed_copy(file, tmp_path / "own", (*dropout, new), (mask, masked))
    try:
        names = train(copy, tmp_path, *small(PPO, "--total-timesteps", 256))
    except SystemExit as end:
        pytest.fail(end.code)
    assert names["entropy"] == 0 and (names["actions"] == 0).all()
    assert not names["ratio"].isnan().any()
    names = train(file, tmp_path / "plain", *small(PPO, "--total-timesteps", 128))
    assert names["agent"].training, "the last thing it did was to learn"


@files("ppo")
def test_a_changed_file_is_told_at_resume(file, tmp_path, capfd):
    copy = changed_copy(file, tmp_path / "own")
    train(copy, tmp_path, *small(PPO, "--total-timesteps", 128))
    run = only_run(tmp_path)
    train(copy, tmp_path, "--resume", run)
    assert "warning" not in capfd.readouterr().err
    copy.write_text(copy.read_text() + "# a comment\n")
    train(copy, tmp_path, "--resume", run)
    assert f"warning: {copy.name} has changed since this run started" in capfd.readouterr().err


# NaN and infinity


class Broken(probes.ConstantValue):
    """Ten steps an episode; at the 25th step of all, something is not a number."""

    length = 10
    steps, what = 0, "reward"

    def step(self, action):
        obs, reward, *rest = super().step(action)
        Broken.steps += 1
        if Broken.steps == 25 and Broken.what == "reward":
            reward = np.nan
        if Broken.steps == 25 and Broken.what == "observation":
            obs = np.full(1, np.inf, np.float32)
        return obs, reward, *rest


gym.register("Probe/Broken-v0", entry_point=Broken)
gym.register(
    "ContinuousProbe/Broken-v0",
    entry_point=lambda **kwargs: probes.Continuous(Broken(**kwargs)),
)


@files("ppo", "ppo_continuous_action", "dqn", "sac_continuous_action")
@pytest.mark.parametrize("what", ["reward", "observation"])
def test_nan_from_an_environment_ends_the_run(file, tmp_path, monkeypatch, what):
    """One line that names environment, step and what was seen; the last good checkpoint stays."""
    monkeypatch.setattr(Broken, "steps", 0)
    monkeypatch.setattr(Broken, "what", what)
    env_id = "ContinuousProbe/Broken-v0" if "_continuous" in file.stem else "Probe/Broken-v0"
    flags = {
        "num_envs": 1,
        "total_timesteps": 256,
        "checkpoint_interval": 8 if has_replay(file) else 1,
    }
    flags |= {} if has_replay(file) else {"num_steps": 8, "num_minibatches": 1}
    words = [word for name, x in flags.items() for word in (f"--{name.replace('_', '-')}", x)]
    with pytest.raises(SystemExit) as end:
        train(file, tmp_path, *small(file, *words, "--env-id", env_id))
    bad = "nan" if what == "reward" else "inf"
    assert re.fullmatch(rf"{what} of {env_id} at step 2\d: {bad}", end.value.code), end.value.code
    assert step_of(only_run(tmp_path)) == 24


@files("ppo")
def test_an_exception_of_the_environment_keeps_its_traceback(file, tmp_path):
    """Below it: which environment, at which step, and how to resume."""
    (tmp_path / "my_envs.py").write_text(
        "import gymnasium as gym\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n\n\n"
        "class Leaky(CartPoleEnv):\n"
        "    steps = 0\n\n"
        "    def step(self, action):\n"
        "        Leaky.steps += 1\n"
        "        if Leaky.steps == 25:\n"
        "            raise RuntimeError('out of water')\n"
        "        return super().step(action)\n\n\n"
        "gym.register('Leaky-v0', Leaky)\n"
    )
    flags = "--env-id my_envs:Leaky-v0 --num-envs 1 --num-steps 8 --num-minibatches 1"
    done = subprocess.run(
        [sys.executable, file, *flags.split(), "--checkpoint-interval", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    (run,) = (tmp_path / "runs").iterdir()
    lines = done.stderr.splitlines()
    assert "RuntimeError: out of water" in lines and "Traceback" in done.stderr
    resume = f"continue with --resume {run.relative_to(tmp_path)}"
    said = rf"my_envs:Leaky-v0 failed at step 2\d, {resume}"  # resets are steps, too
    assert re.fullmatch(said, lines[-1])
    assert step_of(run) == 24


@files("ppo", "dqn", "td3_continuous_action", "dqn_jax")
def test_a_loss_that_is_not_finite_ends_the_run(file, tmp_path):
    flags = with_curves(file, "--learning-rate", 1e30, "--total-timesteps", 10 * iteration(file))
    with pytest.raises(SystemExit, match=r"of \S+ at step \d+: |is not finite"):
        train(file, tmp_path, *flags)
    run = only_run(tmp_path)
    if step_of(run):
        assert all(np.isfinite(x).all() for x in floats(read_checkpoint(run)))


def floats(tree):
    if isinstance(tree, dict):
        for value in tree.values():
            yield from floats(value)
    elif isinstance(tree, torch.Tensor | np.ndarray) and np.asarray(tree).dtype.kind == "f":
        yield np.asarray(tree)


@files("ppo")
def test_weights_that_are_not_finite_are_not_resumed(file, tmp_path):
    run = finished(file, tmp_path)
    checkpoint = read_checkpoint(run)
    checkpoint["agent"]["actor.0.bias"][3] = float("nan")
    torch.save(checkpoint, run / "checkpoint.pt")
    assert "agent.actor.0.bias is not finite" in refuse(file, tmp_path, "--resume", run)


# what may run code


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("owned"),))


@files("ppo")
@pytest.mark.parametrize("save", ["torch", "pickle"])
def test_a_pickle_bomb_does_not_go_off(file, tmp_path, save):
    path = finished(file, tmp_path) / "checkpoint.pt"
    bomb = dict.fromkeys(("agent", "actor", "q_network", "optimizer"), Bomb())
    torch.save(bomb, path) if save == "torch" else path.write_bytes(pickle.dumps(bomb))
    message = refuse(file, tmp_path, "--resume", only_run(tmp_path))
    assert "damaged, or holds more than weights" in message
    assert not (tmp_path / "owned").exists()


# interruptions


@files(*BLOCKS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_saves_a_checkpoint(file, tmp_path, monkeypatch, number):
    """The message names the flag that resumes; the resumed run is the uninterrupted one."""
    interval = 64 if file == PPO else 400  # a hundred iterations are one call in dqn_jax
    flags = ("--env-id", probe(file, "TruncatedEveryStep")) if file == PPO else ()
    flags = small(file, "--total-timesteps", 4 * interval, *flags, "--checkpoint-interval", 10**6)
    train(file, tmp_path / "whole", *flags)
    update = tqdm.update

    def send(progress, steps):
        update(progress, steps)
        if progress.n == 2 * interval:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(tqdm, "update", send)
    with pytest.raises(SystemExit) as end:
        train(file, tmp_path / "cut", *flags)
    monkeypatch.undo()
    run = only_run(tmp_path / "cut")
    where = Path("runs", run.name)
    message = f"interrupted at step {2 * interval}, continue with --resume {where}"
    assert end.value.code == message and step_of(run) == 2 * interval
    train(file, tmp_path / "cut", "--resume", where)
    assert same(weights(run), weights(only_run(tmp_path / "whole")))


@files("ppo")
@needs_fork
def test_the_second_signal_ends_at_once(file, tmp_path):
    process = start(harness.train, file, tmp_path, "--total-timesteps", 10**8, "--num-steps", 2**17)
    deadline = time.time() + 60
    while not list(tmp_path.glob("runs/*/events*")) and time.time() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.3)
    process.join(10)
    assert process.exitcode == -signal.SIGINT


@files(*BLOCKS)
def test_a_folder_that_another_process_writes_to_is_refused(file, tmp_path):
    run = finished(file, tmp_path)
    hold = """if True:
        import sys, filelock
        lock = filelock.FileLock(sys.argv[1])
        lock.acquire()
        print(1, flush=True)
        input()"""
    command = [sys.executable, "-c", hold, str(run / "lock")]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "1\n"
        (run / "pid").write_text(str(other.pid))
        with pytest.raises(SystemExit) as refusal:
            train(file, tmp_path, "--resume", run)
        assert f"process {other.pid} is writing to it" in refusal.value.code
    finally:
        other.communicate("\n")
    train(file, tmp_path, "--resume", run)


def step_of(run):
    return int(read_checkpoint(run)["global_step"]) if list(run.glob("checkpoint.[!t]*")) else 0


@files("ppo")
@needs_fork
def test_kill_at_any_moment_leaves_a_resumable_run(file, tmp_path):
    """Ten times: at random moments, and in the middle of writing a checkpoint of 60 MB."""
    dice, run, steps, mid_write = random.Random(0), None, [0], 0
    flags = (
        "--env-id",
        "Probe/WideObs-v0",
        *small(file, "--num-steps", 4, "--total-timesteps", 10**7),
    )
    for attempt in range(10):
        process = start(harness.train, file, tmp_path, *(("--resume", run) if run else flags))
        if attempt % 2 and run:
            deadline = time.time() + 60
            while not (run / "checkpoint.tmp").exists() and time.time() < deadline:
                time.sleep(0.0005)
        else:
            time.sleep(dice.uniform(0, 2))
        process.kill()
        process.join()
        runs = [path for path in (tmp_path / "runs").glob("*") if path.suffix != ".tmp"]
        assert len(runs) <= 1 + (run is None) * attempt
        runs = [path for path in runs if (path / "run.json").exists()]
        if runs:
            run = runs[0]
            assert about(run)["args"]["env_id"] == "Probe/WideObs-v0", "run.json is whole"
            steps.append(step_of(run))
            mid_write += (run / "checkpoint.tmp").exists()
            (run / "checkpoint.tmp").unlink(missing_ok=True)
    assert mid_write >= 3, "some kills must have hit the write itself"
    assert steps == sorted(steps) and steps[-1] > 0
    process = start(harness.train, file, tmp_path, "--resume", run)
    deadline = time.time() + 60
    while step_of(run) <= steps[-1] and process.is_alive() and time.time() < deadline:
        time.sleep(0.1)
    process.kill()
    process.join()
    assert step_of(run) > steps[-1]


# Weights & Biases


def wandb_records(path):
    """The records of an offline run: LevelDB's log format behind a header of 7 bytes, which wandb
    writes but does not read."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts = path.read_bytes(), 7, []
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        length, kind = (
            int.from_bytes(data[position + 4 : position + 6], "little"),
            data[position + 6],
        )
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(b"".join(parts))
            parts = []


@files("ppo", slow=["ppo_jax"])
def test_wandb_offline_really_logs(file, tmp_path):
    flags = [
        str(flag)
        for flag in with_curves(
            file, "--total-timesteps", 4 * iteration(file), "--track", "--capture-video"
        )
    ]
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_TAGS": "pr-7"}
    done = subprocess.run(
        [sys.executable, str(file), *flags],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    history, told = {}, None
    for record in wandb_records(log):
        if record.HasField("run"):
            told = record.run
        for item in record.history.item:
            history.setdefault(item.key or "/".join(item.nested_key), []).append(
                json.loads(item.value_json)
            )
    assert (told.run_id, told.project, list(told.tags)) == (run.name, "cleanRL", ["pr-7"])
    assert {"seed", "env_id"} <= {item.key or item.nested_key[0] for item in told.config.update}
    for name in ("charts/episodic_return", LOSSES[file.stem[:3]], SCHEDULES[file.stem[:3]]):
        assert history[name] == pytest.approx([value for _, value in scalars(run)[name]]), name
    assert set(history["videos/_type"]) == {"video-file"} and len(history["videos/path"]) >= 2
    assert all(
        (log.parent / "files" / path).stat().st_size > 1000 for path in history["videos/path"]
    )


def track_with_trackio(file, folder, *flags):
    settings = {"CLEANRL_TRACKER": "trackio", "TRACKIO_DIR": str(folder / "trackio")}
    done = subprocess.run(
        [sys.executable, str(file), *map(str, flags)],
        cwd=folder,
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def trackio_logs(folder, run):
    """{metric: [(step, value), ...]} of a run, its settings, and the ids that it has."""
    (path,) = (folder / "trackio").glob("*.db")
    database, history = sqlite3.connect(path), {}
    rows = "SELECT {} FROM {} WHERE run_name = ?"
    for step, metrics in database.execute(rows.format("step, metrics", "metrics"), [run.name]):
        for name, value in json.loads(metrics).items():
            history.setdefault(name, []).append((step, value))
    ((config,),) = database.execute(rows.format("config", "configs"), [run.name]).fetchall()
    ids = set(database.execute(rows.format("run_id", "metrics"), [run.name]))
    return history, json.loads(config), ids


@pytest.mark.slow
@files("ppo", slow=["ppo_jax"])
def test_trackio_offline_really_logs(file, tmp_path):
    """Every scalar at the step that TensorBoard has, and videos; a resumed run is continued."""
    steps = 4 * iteration(file)
    many = ("--num-seeds", 2) if "_jax" in file.stem else ("--capture-video",)
    track_with_trackio(
        file, tmp_path, *with_curves(file, "--total-timesteps", steps, "--track", *many)
    )
    runs = list((tmp_path / "runs").iterdir())
    for run in runs:
        history, config, _ = trackio_logs(tmp_path, run)
        assert config["env_id"] == about(run)["args"]["env_id"]
        curves = scalars(run)
        for name in curves.keys() - {"charts/SPS"}:
            assert np.allclose(sorted(history[name]), sorted(curves[name])), name
    assert not (tmp_path / "wandb").exists() and len(runs) == 1 + ("--num-seeds" in many)
    if "--num-seeds" not in many:
        assert {video["_type"] for _, video in history["videos"]} == {"trackio.video"}
        assert list((tmp_path / "trackio").rglob("*.mp4"))
        track_with_trackio(file, tmp_path, "--resume", run, "--total-timesteps", 2 * steps)
        history, _, ids = trackio_logs(tmp_path, run)
        assert len(ids) == 1 and max(history[LOSSES[file.stem[:3]]])[0] == 2 * steps


FORKS = """if True:
    import os, runpy, sys
    import filelock, gymnasium, jax, flax.linen, flax.serialization, numpy, optax, psutil, torch
    import tyro, torch.utils.tensorboard
    for file in sys.argv[1].split(os.pathsep):
        if not os.fork():
            folder, name = os.path.split(file)
            os.chdir(folder)
            told = os.open("stderr", os.O_WRONLY | os.O_CREAT)
            os.dup2(told, 2)
            with open("flags") as flags:
                sys.argv = [file, *flags.read().split()]
            runpy.run_path(file, run_name="__main__")
            os._exit(0)
        _, status = os.wait()
        print(os.path.basename(file), status)
"""
WITH_XLA = [path for stem, path in FILES.items() if "_jax" in stem or "isaacgym" in stem]


@needs_fork
def test_xla_gets_the_flag_for_the_same_bits_on_a_gpu(tmp_path, file=None):
    """XLA reads its flags once, when the first array is made, which some libraries of environments
    do as soon as they are imported: what is set later is ignored without a word. But it ends a
    program that has a flag which it does not know. One process imports what all files need and no
    environments, and is forked for each file."""
    flag, copies = "--xla_gpu_deterministic_ops=true", []
    for path in [file] if file else WITH_XLA:
        assert path.read_text().count(flag) == 1, path
        copies.append(tmp_path / path.stem / path.name)
        copies[-1].parent.mkdir()
        copies[-1].write_text(path.read_text().replace(flag, "--xla_of_the_file=true"))
        flags = small(path) if sees_images(path) else ("--num-envs", 32)
        flags += ("--env-id", "brax/ant") if "fast" in path.stem else ()  # its own is downloaded
        (copies[-1].parent / "flags").write_text(" ".join(with_teacher(path, flags)))
    done = subprocess.run(
        [sys.executable, "-c", FORKS, os.pathsep.join(map(str, copies))],
        env=os.environ | {"XLA_FLAGS": "--xla_of_the_user=true", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    told = "Unknown flags in XLA_FLAGS: --xla_of_the_user=true --xla_of_the_file=true"
    for line, copy in zip(done.stdout.splitlines(), copies, strict=True):
        stderr = (copy.parent / "stderr").read_text()
        assert line.startswith(f"{copy.name} ") and not line.endswith(" 0"), (line, stderr[-2000:])
        assert told in stderr and not (copy.parent / "runs").exists(), (line, stderr[-2000:])


@files("ppo")
def test_tracking_without_a_login_is_refused(file, tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | {
        "HOME": str(tmp_path),
        "NETRC": "none",
    }
    command = [sys.executable, str(file), "--track", "--total-timesteps", "512"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert (
        done.returncode == 1
        and "No API key" in done.stderr.splitlines()[-1]
        and "Traceback" not in done.stderr
    )
    assert not (tmp_path / "runs").exists()


# speed is chosen by measurement, not by what the machine has


@files(
    *(stem for stem in TORCH if not sees_images(FILES[stem]) and not learns_control(FILES[stem]))
)
def test_small_networks_stay_on_one_thread_of_the_cpu(file, tmp_path):
    torch.set_num_threads(2)
    names = train(file, tmp_path, *small(file, "--total-timesteps", iteration(file)))
    assert torch.get_num_threads() == 1 and names["device"].type == "cpu"


@files(*BLOCKS[:1])
def test_a_run_on_the_cpu_leaves_the_gpu_alone(file, tmp_path, monkeypatch):
    """As on a machine whose driver shows a GPU that PyTorch cannot use: nothing may try to wake
    it."""
    monkeypatch.setattr(torch.cuda.random, "device_count", lambda: 1)
    error = None
    try:
        train(file, tmp_path, *small(file, "--total-timesteps", iteration(file)))
    except (RuntimeError, AssertionError) as caught:
        error = caught
    assert error is None and step_of(only_run(tmp_path)) == iteration(file)
