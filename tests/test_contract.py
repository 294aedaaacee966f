"""What every algorithm file promises around its algorithm: command line, run folder, metrics, checkpoints, tracking."""

import contextlib
import functools
import io
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tqdm import tqdm

from tests.harness import (
    FILES,
    PPO,
    about,
    has_pools,
    only_run,
    probe,
    read_checkpoint,
    same,
    scalars,
    sees_images,
    start,
    train,
    weights,
)

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
LOSSES = {
    "dqn": "losses/td_loss",
    "c51": "losses/loss",
    **dict.fromkeys(["ppo", "rpo", "ppg"], "losses/value_loss"),
}
LOSSES |= dict.fromkeys(["ddp", "td3", "sac"], "losses/qf1_loss") | {"rai": "losses/td_loss"}
SCHEDULES = {
    "dqn": "charts/epsilon",
    "c51": "charts/epsilon",
    **dict.fromkeys(["ppo", "rpo", "ppg"], "charts/learning_rate"),
}
SCHEDULES |= {"rai": "charts/beta"}
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
    """For what takes long: tests/test_siblings.py sees to it that the other files have the same code there."""
    others = [
        pytest.param(FILES[stem], marks=pytest.mark.slow, id=stem)
        for stem in slow
        if stem not in stems
    ]
    return pytest.mark.parametrize(
        "file", [*(pytest.param(FILES[stem], id=stem) for stem in stems), *others]
    )


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
    for stem in ("dqn_atari_jax", "sac_continuous_action_jax", "ppo_rnn_jax")
]


@pytest.fixture(params=[*TORCH, "dqn_jax", "ppo_jax", "ppo_atari_envpool_xla_jax_scan", *COMPILED])
def file(request):
    """The other JAX files take long to compile the same code."""
    return FILES[request.param]


def learns_values(file):
    """Of discrete actions, from a replay buffer."""
    return file.stem[:3] in ("dqn", "c51", "rai") or file.stem == "sac_atari"


def learns_control(file):
    """Continuous actions, from a replay buffer."""
    return "_continuous_action" in file.stem and file.stem[1:3] != "po"


def has_replay(file):
    return learns_values(file) or learns_control(file)


def iteration(file):
    """Environment steps between two checkpoints, with the flags below: few where there is a large network."""
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
        narrow = ("--q-width", 16) if "crossq" in file.stem else ()
        return (*SMALL_CONTROL, *narrow, "--checkpoint-interval", iteration(file), *flags)
    quick = (
        ("--env-id", "Pendulum-v1") if "_continuous" in file.stem else ()
    )  # MuJoCo's videos need OpenGL
    quick = ("--env-id", probe(file, "Pendulum")) if "isaacgym" in file.stem else quick
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
    """The same with losses that are logged soon: who has a replay buffer logs every hundredth update."""
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


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--num-envs", 0), "num_envs > 0 must hold"),
        (("--num-steps", -1), "num_steps"),
        (
            ("--num-steps", 10**13, "--total-timesteps", 10**15),
            "num_envs * num_steps < 2**31 must hold",
        ),
        (("--num-minibatches", 0), "num_minibatches > 0 must hold"),
        (("--num-minibatches", 257), "num_minibatches <= num_envs * (num_steps // 2) must hold"),
        (("--num-steps", 1), "num_minibatches <= num_envs * (num_steps // 2) must hold"),
        (("--update-epochs", 0), "update_epochs > 0 must hold"),
        (("--checkpoint-interval", 0), "checkpoint_interval > 0 must hold"),
        (("--total-timesteps", 511), "total_timesteps >= num_envs * num_steps must hold"),
        (("--gamma", 1.1), "gamma"),
        (("--gae-lambda", "nan"), "gae_lambda"),
        (("--learning-rate", "nan"), "learning_rate"),
        (("--learning-rate", "inf"), "learning_rate"),
        (("--ent-coef", "nan"), "ent_coef"),
        (("--vf-coef", "inf"), "vf_coef"),
        (("--clip-coef", -0.1), "clip_coef"),
        (("--max-grad-norm", 0), "max_grad_norm"),
        (("--seed", -1), "seed"),
        (("--seed", 2**64), "seed"),
        (("--env-id", "NoSuchEnv-v0"), "cannot make NoSuchEnv-v0"),
        (("--env-id", ""), "cannot make"),
        (("--env-id", "no_such_module:Env-v0"), "no_such_module"),
        (("--env-id", "CartPole-v99"), "v99"),
        (("--env-id", "Pendulum-v1"), "needs Discrete actions, which Pendulum-v1"),
        (("--env-id", "FrozenLake-v1"), "needs Box observations"),
        (("--env-id", "Probe/DictObs-v0"), "needs Box observations"),
        (("--env-id", "Probe/MultiDiscreteActions-v0"), "needs Discrete actions"),
        (("--env-id", "Pendulum-v1", "--capture-video"), "needs Discrete actions"),
        (("--env-id", "Probe/ConstantValue-v0", "--capture-video"), "rgb_array"),
        (("--exp-name", "x" * 300), "File name too long"),
        (("--resume", "nowhere"), "cannot resume nowhere"),
        (("--resume", ""), "cannot resume"),
        (("--resume", "nowhere", "--seed", 2), "give no others"),
    ],
)
def test_bad_commands_get_one_line(tmp_path, flags, words):
    if (
        "--exp-name" in flags
    ):  # only the attempt itself can tell: it may leave the empty folder runs
        (tmp_path / "runs").mkdir()
    assert words in refuse(PPO, tmp_path, *flags)


VALUE_REFUSALS = [
    (("--num-envs", 0), "num_envs > 0 must hold"),
    (("--batch-size", 0), "0 < batch_size < 2**24 must hold"),
    (("--batch-size", 2**24), "0 < batch_size < 2**24 must hold"),
    (("--train-frequency", 0), "train_frequency > 0 must hold"),
    (("--target-network-frequency", -1), "target_network_frequency > 0 must hold"),
    (("--checkpoint-interval", 0), "checkpoint_interval > 0 must hold"),
    (("--total-timesteps", 0), "total_timesteps >= num_envs must hold"),
    (("--num-envs", 8, "--total-timesteps", 7), "total_timesteps >= num_envs must hold"),
    (("--learning-starts", 3), "learning_starts >= 4 * num_envs must hold"),
    (("--num-envs", 8, "--learning-starts", 31), "learning_starts >= 4 * num_envs must hold"),
    (("--buffer-size", 3), "4 * num_envs <= buffer_size < 2**31 must hold"),
    (("--num-envs", 8, "--buffer-size", 31), "4 * num_envs <= buffer_size < 2**31 must hold"),
    (("--buffer-size", 2**31), "4 * num_envs <= buffer_size < 2**31 must hold"),
    (("--gamma", 1.1), "0 <= gamma <= 1 must hold"),
    (("--gamma", "nan"), "0 <= gamma <= 1 must hold"),
    (("--start-e", 1.1), "0 <= start_e <= 1 must hold"),
    (("--end-e", -0.1), "0 <= end_e <= 1 must hold"),
    (("--exploration-fraction", 0), "0 < exploration_fraction <= 1 must hold"),
    (("--exploration-fraction", 1.1), "0 < exploration_fraction <= 1 must hold"),
    (("--learning-rate", 0), "0 < learning_rate < 1e9 must hold"),
    (("--learning-rate", "inf"), "0 < learning_rate < 1e9 must hold"),
    (("--seed", -1), "0 <= seed < 2**32 must hold"),
    (("--seed", 2**32), "0 <= seed < 2**32 must hold"),
    (("--env-id", "NoSuchEnv-v0"), "cannot make NoSuchEnv-v0"),
    (("--env-id", "no_such_module:Env-v0"), "no_such_module"),
    (("--env-id", "Pendulum-v1"), "needs Discrete actions, which Pendulum-v1"),
    (("--env-id", "FrozenLake-v1"), "needs Box observations, which FrozenLake-v1"),
    (("--env-id", "Probe/DictObs-v0"), "needs Box observations"),
    (("--env-id", "Probe/MultiDiscreteActions-v0"), "needs Discrete actions"),
    (("--env-id", "Probe/SameStep-v0"), "cannot make Probe/SameStep-v0"),
    (("--env-id", "Probe/ConstantValue-v0", "--capture-video"), "rgb_array"),
    (("--resume", "nowhere"), "cannot resume nowhere"),
    (("--resume", "nowhere", "--no-checkpoint-buffer"), "give no others"),
]
DQN_REFUSALS = [
    (("--tau", -0.1), "0 <= tau <= 1 must hold"),
    (("--tau", "nan"), "0 <= tau <= 1 must hold"),
]
JAX_REFUSALS = [
    (
        ("--num-envs", 4),
        "train_frequency % num_envs == 0 or num_envs % train_frequency == 0 must hold",
    ),
    (
        ("--total-timesteps", 9),
        "max(num_envs, train_frequency) <= total_timesteps < 2**31 must hold",
    ),
    (
        ("--total-timesteps", 2**31),
        "max(num_envs, train_frequency) <= total_timesteps < 2**31 must hold",
    ),
    (("--num-envs", 20, "--buffer-size", 19), "num_envs <= buffer_size < 2**31 must hold"),
    (("--learning-starts", 0), "learning_starts > 0 must hold"),
]
JAX_REFUSALS += [
    refusal
    for refusal in VALUE_REFUSALS
    if not {*refusal[0]} & {"--total-timesteps", "--learning-starts", "--buffer-size"}
]
C51_REFUSALS = [
    (("--n-atoms", 1), "1 < n_atoms < 2**20 must hold"),
    (("--n-atoms", 2**20), "1 < n_atoms < 2**20 must hold"),
    (("--v-min", 100), "-1e9 < v_min < v_max < 1e9 must hold"),
    (("--v-max", "inf"), "-1e9 < v_min < v_max < 1e9 must hold"),
    (("--v-min", "nan"), "-1e9 < v_min < v_max < 1e9 must hold"),
]
RAINBOW_REFUSALS = [
    (("--n-step", 0), "n_step > 0 must hold"),
    (
        ("--num-envs", 2, "--learning-starts", 7),
        "learning_starts >= (n_step + 1) * num_envs must hold",
    ),
    (
        ("--num-envs", 2, "--buffer-size", 19),
        "(n_step + 7) * num_envs <= buffer_size < 2**31 must hold",
    ),
    (("--prioritized-replay-alpha", 1.1), "0 <= prioritized_replay_alpha <= 1 must hold"),
    (("--prioritized-replay-beta", "nan"), "0 <= prioritized_replay_beta <= 1 must hold"),
    (("--prioritized-replay-eps", 0), "0 < prioritized_replay_eps < 1e9 must hold"),
]


CONTROL_REFUSALS = [
    (("--num-envs", 0), "num_envs > 0 must hold"),
    (("--batch-size", 0), "0 < batch_size < 2**24 must hold"),
    (("--batch-size", 2**24), "0 < batch_size < 2**24 must hold"),
    (("--utd", 0), "utd > 0 must hold"),
    (("--policy-frequency", 0), "policy_frequency > 0 must hold"),
    (("--checkpoint-interval", 0), "checkpoint_interval > 0 must hold"),
    (("--learning-starts", 0), "learning_starts > 0 must hold"),
    (("--num-envs", 8, "--total-timesteps", 7), "total_timesteps >= num_envs must hold"),
    (("--num-envs", 8, "--buffer-size", 7), "num_envs <= buffer_size < 2**31 must hold"),
    (("--buffer-size", 2**31), "num_envs <= buffer_size < 2**31 must hold"),
    (("--gamma", 1.1), "0 <= gamma <= 1 must hold"),
    (("--tau", "nan"), "0 <= tau <= 1 must hold"),
    (("--seed", -1), "0 <= seed < 2**32 must hold"),
    (("--seed", 2**32), "0 <= seed < 2**32 must hold"),
    (("--env-id", "NoSuchEnv-v0"), "cannot make NoSuchEnv-v0"),
    (("--env-id", "no_such_module:Env-v0"), "no_such_module"),
    (("--env-id", "CartPole-v1"), "needs bounded Box actions, which CartPole-v1 does not have"),
    (
        ("--env-id", "Probe/UnboundedActions-v0"),
        "needs bounded Box actions, which Probe/UnboundedActions-v0",
    ),
    (("--env-id", "Probe/SameStep-v0"), "cannot make Probe/SameStep-v0"),
    (("--env-id", "ContinuousProbe/ConstantValue-v0", "--capture-video"), "rgb_array"),
    (("--resume", "nowhere"), "cannot resume nowhere"),
    (("--resume", "nowhere", "--checkpoint-buffer"), "give no others"),
]
NOISE_REFUSALS = [
    (("--exploration-noise", -0.1), "0 <= exploration_noise < 1e9 must hold"),
    (("--exploration-noise", "nan"), "0 <= exploration_noise < 1e9 must hold"),
    (("--learning-rate", 0), "0 < learning_rate < 1e9 must hold"),
    (("--learning-rate", "inf"), "0 < learning_rate < 1e9 must hold"),
]
TD3_REFUSALS = [
    (("--policy-noise", "nan"), "0 <= policy_noise < 1e9 must hold"),
    (("--noise-clip", -0.5), "0 <= noise_clip < 1e9 must hold"),
]
SAC_REFUSALS = [
    (("--policy-lr", "nan"), "0 < policy_lr < 1e9 must hold"),
    (("--q-lr", 0), "0 < q_lr < 1e9 must hold"),
    (("--alpha", 0), "0 < alpha < 1e9 must hold"),
    (("--alpha", "inf"), "0 < alpha < 1e9 must hold"),
    (("--target-network-frequency", 0), "target_network_frequency > 0 must hold"),
]
SAC_ATARI_REFUSALS = [
    (("--update-frequency", 0), "update_frequency > 0 must hold"),
    (("--target-entropy-scale", 1.1), "0 <= target_entropy_scale <= 1 must hold"),
    (("--target-entropy-scale", "nan"), "0 <= target_entropy_scale <= 1 must hold"),
    (("--num-envs", 8, "--learning-starts", 31), "learning_starts >= 4 * num_envs must hold"),
    (("--num-envs", 8, "--buffer-size", 63), "8 * num_envs <= buffer_size < 2**31 must hold"),
]


JAX_CONTROL_REFUSALS = [
    refusal for refusal in CONTROL_REFUSALS if "--total-timesteps" not in refusal[0]
] + [
    (("--num-envs", 8, "--total-timesteps", 7), "num_envs <= total_timesteps must hold"),
    (("--utd", 2148), "total_timesteps * utd < 2**31 must hold"),
]
OTHER_CONTROL_REFUSALS = [
    ("tqc", ("--num-critics", 0), "num_critics > 0 must hold"),
    ("tqc", ("--drop-quantiles", 25), "0 <= drop_quantiles < num_quantiles must hold"),
    ("tqc", ("--utd", 2148), "total_timesteps * utd < 2**31 must hold"),
    ("droq", ("--dropout", 1), "0 <= dropout < 1 must hold"),
    ("droq", ("--total-timesteps", 2**31), "num_envs <= total_timesteps < 2**31 must hold"),
    ("crossq", ("--q-width", 0), "0 < q_width < 2**20 must hold"),
    ("crossq", ("--learning-rate", "nan"), "0 < learning_rate < 1e9 must hold"),
]


PPO_JAX_REFUSALS = [
    (("--num-envs", 0), "num_envs > 0 must hold"),
    (("--num-steps", 0), "num_steps > 0 must hold"),
    (
        ("--num-steps", 2**23, "--total-timesteps", 2**30),
        "num_envs * num_steps <= min(total_timesteps, 2**24) must hold",
    ),
    (("--num-minibatches", 0), "num_minibatches > 0 must hold"),
    (("--num-minibatches", 3), "num_envs * num_steps % num_minibatches == 0 must hold"),
    (("--update-epochs", 0), "update_epochs > 0 must hold"),
    (("--checkpoint-interval", 0), "checkpoint_interval > 0 must hold"),
    (("--log-interval", 0), "log_interval > 0 must hold"),
    (("--total-timesteps", 511), "num_envs * num_steps <= min(total_timesteps, 2**24) must hold"),
    (("--total-timesteps", 2**31), "total_timesteps < 2**31 must hold"),
    (("--gamma", 1.1), "0 <= gamma <= 1 must hold"),
    (("--gae-lambda", "nan"), "0 <= gae_lambda <= 1 must hold"),
    (("--learning-rate", "inf"), "0 < learning_rate < 1e9 must hold"),
    (("--ent-coef", "nan"), "abs(ent_coef) < 1e9 must hold"),
    (("--vf-coef", "inf"), "abs(vf_coef) < 1e9 must hold"),
    (("--clip-coef", -0.1), "clip_coef > 0 must hold"),
    (("--max-grad-norm", 0), "max_grad_norm > 0 must hold"),
    (("--seed", -1), "0 <= seed < 2**32 must hold"),
    (("--seed", 2**32), "0 <= seed < 2**32 must hold"),
    (("--num-seeds", 0), "at least one"),
    (("--num-seeds", -1), "at least one"),
    (("--num-seeds", 2**40), "at least one and below 65536"),
    (("--resume",), "cannot --resume: AssertionError: which folders?"),
    (
        ("--sweep", "seed=1,2"),
        "cannot --sweep seed=1,2: AssertionError: takes learning_rate, gamma",
    ),
    (("--sweep", "gamma"), "cannot --sweep gamma: ValueError"),
    (("--sweep", "gamma=0.9,x"), "cannot --sweep gamma=0.9,x: ValueError"),
    (("--sweep", "gamma=0.9,1.1"), "0 <= gamma <= 1 must hold"),
    (("--sweep", "gamma=0.9,0.9"), "runs side by side differ in their seeds"),
    (("--env-id", "NoSuchEnv-v0"), "cannot make NoSuchEnv-v0"),
    (("--env-id", ""), "cannot make"),
    (("--env-id", "LunarLander-v3"), "cannot make LunarLander-v3"),
    (("--env-id", "no_such_module:Env-v0"), "no_such_module"),
    (("--env-id", "Pendulum-v1"), "needs Discrete actions, which Pendulum-v1"),
    (("--env-id", "GymnaxProbe/ConstantValue-v0", "--capture-video"), "rgb_array"),
    (("--resume", "nowhere"), "cannot --resume nowhere: FileNotFoundError"),
    (("--resume", ""), "cannot --resume"),
    (("--resume", "nowhere", "--seed", 2), "give no others"),
]

PPO_RNN_REFUSALS = [
    (("--num-envs", 6), "num_envs % num_minibatches == 0 must hold"),
    (("--seed", 2**32), "0 <= seed < 2**32 must hold"),
    (("--env-id", "Pendulum-v1"), "needs Discrete actions, which Pendulum-v1"),
    (("--capture-video",), "needs rgb_array rendering for a video, which MemoryChain-bsuite"),
]

JAXTARI_REFUSALS = [
    (("--num-minibatches", 3), "num_envs * num_steps % num_minibatches == 0 must hold"),
    (("--max-frames", 0), "0 < max_frames < 2**31 must hold"),
    (("--env-id", "no_such_module:Game"), "no_such_module"),
    (
        ("--env-id", "tests.jaxtari_probes:NoSuchGame"),
        "cannot make tests.jaxtari_probes:NoSuchGame: AttributeError",
    ),
    (("--resume", "nowhere"), "cannot --resume nowhere: FileNotFoundError"),
]

PHYSICS_REFUSALS = [
    (("--num-minibatches", 3), "num_envs * num_steps % num_minibatches == 0 must hold"),
    (("--episode-length", 0), "episode_length is None or episode_length > 0 must hold"),
    (("--sweep", "clip_coef=0.1,0"), "clip_coef > 0 must hold"),
    (
        ("--env-id", "HalfCheetah-v4"),
        "cannot make HalfCheetah-v4: ValueError: an id is brax/ or playground/ and the name",
    ),
    (("--env-id", "brax/no_such"), "cannot make brax/no_such: KeyError"),
    (
        ("--env-id", "brax/inverted_pendulum", "--physics", "warp"),
        "cannot make brax/inverted_pendulum: ValueError: backend",
    ),
    (("--env-id", "playground/NoSuch"), "cannot make playground/NoSuch: ValueError"),
    (("--env-id", "no_such_module:brax/ant"), "no_such_module"),
    (
        ("--env-id", "brax/ConstantValue", "--capture-video"),
        "needs rgb_array rendering for a video, which brax/ConstantValue",
    ),
    (("--resume", "nowhere"), "cannot --resume nowhere: FileNotFoundError"),
]

RND_REFUSALS = [
    (
        ("--num-minibatches", 8192),
        "update_proportion * num_envs * num_steps >= num_minibatches must hold",
    ),
    (
        ("--update-proportion", 0),
        "update_proportion * num_envs * num_steps >= num_minibatches must hold",
    ),
    (("--update-proportion", 1.1), "update_proportion <= 1 must hold"),
    (("--update-proportion", "nan"), "update_proportion <= 1 must hold"),
    (("--int-gamma", 1.1), "0 <= int_gamma <= 1 must hold"),
    (("--int-coef", "inf"), "abs(int_coef) < 1e9 must hold"),
    (("--ext-coef", "nan"), "abs(ext_coef) < 1e9 must hold"),
    (("--num-iterations-obs-norm-init", 0), "num_iterations_obs_norm_init > 0 must hold"),
    (("--env-id", "NoSuchGame-v5"), "cannot make NoSuchGame-v5"),
    (("--env-id", "CartPole-v1"), "cannot make CartPole-v1"),
    (("--num-envs", 2, "--capture-video"), "rgb_array"),
]

TENSOR_REFUSALS = [
    (("--num-steps", 0), "num_steps > 0 must hold"),
    (("--num-minibatches", 2**17), "num_minibatches <= num_envs * num_steps must hold"),
    (("--reward-scaler", "nan"), "abs(reward_scaler) < 1e9 must hold"),
    (("--record-video-step-frequency", 0), "record_video_step_frequency > 0 must hold"),
    (("--env-id", "NoSuchEnv-v0"), "cannot make NoSuchEnv-v0"),
    (("--env-id", "no_such_module:Env-v0"), "no_such_module"),
    (
        ("--env-id", "Pendulum-v1"),
        "cannot make Pendulum-v1: AssertionError: it is not registered as Isaac Lab's are",
    ),
    (
        ("--num-envs", 2, "--env-id", "IsaacProbe/Choices-v0"),
        "needs continuous actions, which IsaacProbe/Choices-v0",
    ),
    (
        ("--num-envs", 2, "--env-id", "IsaacProbe/OtherGroups-v0"),
        "needs flat observations in a group called policy or actor",
    ),
    (
        ("--num-envs", 2, "--env-id", "IsaacProbe/Pictures-v0"),
        "needs flat observations in a group called policy or actor",
    ),
    (
        ("--num-envs", 2, "--env-id", "IsaacProbe/PointMass-v0", "--capture-video"),
        "needs rgb_array rendering for a video",
    ),
    (("--resume", "nowhere"), "cannot resume nowhere"),
]


XLA_REFUSALS = [
    (("--num-steps", 0), "num_steps > 0 must hold"),
    (("--num-minibatches", 3), "num_envs * num_steps % num_minibatches == 0 must hold"),
    (("--total-timesteps", 1023), "total_timesteps >= num_envs * num_steps must hold"),
    (("--max-grad-norm", "nan"), "max_grad_norm > 0 must hold"),
    (("--env-id", "NoSuchGame-v5"), "cannot make NoSuchGame-v5"),
    (("--num-envs", 2, "--env-id", "CartPole-v1"), "cannot make CartPole-v1"),
    (("--num-envs", 2, "--capture-video"), "rgb_array"),
    (("--resume", "nowhere"), "cannot resume nowhere"),
    (("--resume", "nowhere", "--target-kl", 1), "give no others"),
]


@pytest.mark.parametrize(
    ("stem", "flags", "words"),
    [("ppo_atari_envpool_xla_jax", *refusal) for refusal in XLA_REFUSALS]
    + [("ppo_jax", *refusal) for refusal in PPO_JAX_REFUSALS]
    + [("ppo_rnn_jax", *refusal) for refusal in PPO_RNN_REFUSALS]
    + [("ppo_jaxtari_jax", *refusal) for refusal in JAXTARI_REFUSALS]
    + [("ppo_continuous_action_jax", *refusal) for refusal in PHYSICS_REFUSALS]
    + [("ppo_rnd_envpool", *refusal) for refusal in RND_REFUSALS]
    + [("ppo_continuous_action_isaacgym", *refusal) for refusal in TENSOR_REFUSALS]
    + [("dqn", *refusal) for refusal in VALUE_REFUSALS + DQN_REFUSALS]
    + [("c51", *refusal) for refusal in VALUE_REFUSALS + C51_REFUSALS]
    + [("rainbow_atari", *refusal) for refusal in RAINBOW_REFUSALS + DQN_REFUSALS + C51_REFUSALS]
    + [("dqn_jax", *refusal) for refusal in JAX_REFUSALS + DQN_REFUSALS]
    + [("c51_jax", *refusal) for refusal in C51_REFUSALS]
    + [("ddpg_continuous_action", *refusal) for refusal in CONTROL_REFUSALS + NOISE_REFUSALS]
    + [("td3_continuous_action", *refusal) for refusal in TD3_REFUSALS]
    + [("sac_continuous_action", *refusal) for refusal in CONTROL_REFUSALS + SAC_REFUSALS]
    + [
        ("ddpg_continuous_action_jax", *refusal)
        for refusal in JAX_CONTROL_REFUSALS + NOISE_REFUSALS
    ]
    + [("td3_continuous_action_jax", *refusal) for refusal in TD3_REFUSALS]
    + [("sac_continuous_action_jax", *refusal) for refusal in SAC_REFUSALS]
    + [(f"{stem}_continuous_action_jax", *refusal) for stem, *refusal in OTHER_CONTROL_REFUSALS]
    + [("sac_atari", *refusal) for refusal in SAC_REFUSALS + SAC_ATARI_REFUSALS],
)
def test_bad_commands_of_other_files_get_one_line(tmp_path, stem, flags, words):
    probe(FILES[stem], "")  # registers what there is for the file
    assert words in refuse(FILES[stem], tmp_path, *flags)


@pytest.mark.parametrize(
    "flags",
    [
        ("--no-such-flag",),
        ("--seed", "one"),
        ("--seeed", 2),
        ("stray",),
        ("--gamma",),
        ("3", "--cuda"),
    ],
)
def test_unknown_flags_and_wrong_types_are_refused(file, tmp_path, capfd, flags):
    with pytest.raises(SystemExit) as refusal:
        train(file, tmp_path, *flags)
    complaint = capfd.readouterr().err
    assert (
        refusal.value.code == 2
        and str(flags[0]).strip("-") in complaint
        and "Traceback" not in complaint
    )
    assert list(tmp_path.iterdir()) == []


@files("ppo")
def test_refusal_as_the_shell_sees_it(file, tmp_path):
    command = [sys.executable, str(file), "--env-id", "NoSuchEnv-v0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if line]
    assert (
        done.returncode == 1 and len(lines) == 1 and lines[0].startswith("cannot make NoSuchEnv-v0")
    ), done.stderr
    assert list(tmp_path.iterdir()) == []


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


@files("ppo", "ppo_continuous_lstm")
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
    """Whatever is asked: whether it is a finished run, or a refusal that leaves nothing behind. Never a traceback."""
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


@files("ppo")
def test_two_runs_of_one_second_do_not_mix(file, tmp_path, monkeypatch):
    ticks = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000 + next(ticks) * 1e-7)
    train(file, tmp_path, *small(file, "--total-timesteps", iteration(file)))
    before = {path: path.read_bytes() for path in only_run(tmp_path).iterdir()}
    assert "there is such a run already" in refuse(
        file, tmp_path, *small(file, "--total-timesteps", iteration(file))
    )
    assert before == {path: path.read_bytes() for path in only_run(tmp_path).iterdir()}


# the run folder and the metrics


def test_run_folder(file, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_TAGS", "pr-7,fast")
    names = train(
        file,
        tmp_path,
        *small(
            file,
            "--total-timesteps",
            2 * iteration(file),
            "--seed",
            7,
            "--env-id",
            probe(file, "ConstantValue"),
        ),
    )
    run = only_run(tmp_path)
    assert re.fullmatch(rf"\w*Probe-ConstantValue-v0__{file.stem}__7__\d+", run.name)
    told = about(run)
    args = json.loads(json.dumps(vars(names["args"])))
    assert told["file"] == file.name and told["args"] == args and told["tags"] == ["pr-7", "fast"]
    assert (
        told["packages"]["torch"] == torch.__version__.split("+")[0]
        or told["packages"]["torch"] == torch.__version__
    )
    assert (
        told["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")
        and told["device"]
    )
    assert abs(told["start_time"] - time.time()) < 600 and re.fullmatch(
        r"[0-9a-f]{40}|", told["commit"]
    )
    assert sorted(re.sub(r"tfevents.*", "tfevents", path.name) for path in run.iterdir()) == [
        "checkpoint.msgpack" if "_jax" in file.stem else "checkpoint.pt",
        "events.out.tfevents",
        "run.json",
    ]


def test_no_episode_is_lost(file, tmp_path):
    """All environments of MarkedLast end together, each at a step of its own: after 3 steps, or 4 with a reset.
    The bar shows the last return, and the speed."""
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
    logged = scalars(only_run(tmp_path))
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
    assert stdout.getvalue() == f"run folder: runs{os.sep}{only_run(tmp_path).name}\n"


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
    """Where there is nothing to an episode, and checkpoints fall between two, a resumed run is the uninterrupted one."""
    flags = small(
        file,
        "--total-timesteps",
        8 * iteration(file),
        "--env-id",
        probe(file, "TruncatedEveryStep"),
    )
    train(file, tmp_path / "whole", *flags)
    run = interrupted(file, tmp_path / "cut", flags, after=3)
    assert step_of(run) == 3 * iteration(file)
    train(file, tmp_path / "cut", "--resume", run)
    whole, cut = map(read_checkpoint, (only_run(tmp_path / "whole"), run))
    for checkpoint in (
        whole,
        cut,
    ):  # a resumed run has seen one first observation more of each environment
        checkpoint.get("agent", {}).pop("obs_moments.count", None)
    assert whole.keys() == cut.keys() and step_of(run) == 8 * iteration(file)
    assert {name: same(whole[name], cut[name]) for name in whole} == dict.fromkeys(whole, True)


@files(*LEADERS, slow=LONG)
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


@files(*LEADERS, slow=TORCH)
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


@files("dqn", "dqn_atari", "rainbow_atari", "sac_atari", "ddpg_continuous_action")
@pytest.mark.parametrize("kept", [True, False])
def test_a_resumed_run_learns_when_it_has_a_buffer(file, tmp_path, kept):
    """At once where it was kept; if not, after as many steps as at the start, or it would learn a few transitions by heart."""
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
    assert names["buffer"].count[0] == (4 if kept else 2) * iteration(file) and not same(
        weights(run), before
    )


@files(*(stem for stem in TORCH if has_replay(FILES[stem])))
def test_nothing_leads_across_a_resume(file, tmp_path):
    """It cuts MarkedLast's episodes in the middle; what came before must not lead to, nor be seen in, the next ones' start."""
    flags = ("--env-id", probe(file, "MarkedLast"), "--batch-size", 8, "--total-timesteps", 48)
    seen = set()

    def look(names):
        if learns_control(file):
            batch = names["batch"][
                :, [0, 3]
            ]  # before the next observation come the action and the reward
        elif "rainbow" in file.stem:
            batch = torch.cat([names["b_obs"], names["b_next_obs"][:, -1:]], 1)[..., 0, 0]
        elif "_atari" in file.stem:
            batch = names["b_stacks"][..., 0, 0]
        else:
            batch = torch.cat([names["b_obs"], names["b_next_obs"]], 1)
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


@files(*LEADERS)
def test_resuming_a_finished_run_changes_nothing(file, tmp_path):
    run = finished(file, tmp_path)
    before = weights(run), scalars(run)
    train(file, tmp_path, "--resume", run)
    assert same(weights(run), before[0]) and scalars(run) == before[1]


@files("ppo", "ppo_atari", "ppo_atari_lstm", "dqn")
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
    assert message.startswith("cannot make Hopper-v4: ") and "MUJOCO_GL must be one of" in message


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: (run / "run.json").unlink(), "FileNotFoundError"),
        (lambda run: (run / "run.json").write_text("{"), "JSONDecodeError"),
        (lambda run: (run / "run.json").write_text("[]"), "TypeError"),
        (lambda run: edit(run, no_such_flag=1), "no_such_flag"),
        (lambda run: edit(run, num_envs="2"), "wrong types"),
        (lambda run: edit(run, env_id=None), "wrong types"),
        (lambda run: edit(run, seed=1.5), "wrong types"),
        (lambda run: edit(run, learning_rate=[1]), "wrong types"),
        (
            lambda run: (run / "run.json").write_text(json.dumps(about(run) | {"file": "x.py"})),
            "it is a run of x.py",
        ),
        (lambda run: (run / "run.json").write_text("[" * 100_000), "RecursionError"),
        (lambda run: change(run, global_step=-64), "step -64 of another run"),
        (lambda run: change(run, global_step=2**62), "of another run"),
        (lambda run: change(run, global_step="x"), "ValueError"),
        (lambda run: change(run, rng=torch.zeros(3)), "cannot resume"),
        (lambda run: (run / "checkpoint.pt").write_bytes(b""), "cannot resume"),
        (
            lambda run: (run / "checkpoint.pt").write_bytes(
                (run / "checkpoint.pt").read_bytes()[:5000]
            ),
            "cannot resume",
        ),
        (lambda run: torch.save({}, run / "checkpoint.pt"), "KeyError: '"),
        (lambda run: torch.save([1, 2], run / "checkpoint.pt"), "TypeError"),
    ],
)
@files(*LEADERS)
def test_damaged_runs_get_one_line(file, tmp_path, damage, words):
    run = finished(file, tmp_path)
    damage(run)
    message = refuse(file, tmp_path, "--resume", run)
    assert message.startswith("cannot resume") and words in message


@files("ppo")
def test_a_run_of_another_environment_gets_one_line(file, tmp_path):
    train(file, tmp_path, *small(file, "--total-timesteps", iteration(file)))
    edit(only_run(tmp_path), env_id="Acrobot-v1")
    assert refuse(file, tmp_path, "--resume", only_run(tmp_path)).startswith("cannot resume")


def change(run, **entries):
    torch.save(read_checkpoint(run) | entries, run / "checkpoint.pt")


def edit(run, **args):
    told = about(run)
    told["args"] |= args
    (run / "run.json").write_text(json.dumps(told))


@files(*LEADERS)
def test_a_failed_write_leaves_the_last_checkpoint(file, tmp_path, monkeypatch):
    """As when the disk is full: half of the bytes arrive, then the error."""
    real_save, saves = torch.save, []

    def save(checkpoint, path):
        real_save(checkpoint, path)
        saves.append(path)
        if len(saves) == 3:
            Path(path).write_bytes(Path(path).read_bytes()[:999])
            raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(OSError, match="No space"):
        train(file, tmp_path, *with_curves(file, "--total-timesteps", 7 * iteration(file)))
    monkeypatch.undo()
    assert not refused(file, tmp_path, "--resume", only_run(tmp_path))
    assert step_of(only_run(tmp_path)) == 7 * iteration(file)
    logged = [step for step, _ in scalars(only_run(tmp_path))[LOSSES[file.stem[:3]]]]
    assert logged == logged_steps(file, 7 * iteration(file))


def refused(file, folder, *flags):
    try:
        train(file, folder, *flags)
    except SystemExit as refusal:
        return refusal.code


# strangers' files


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("owned"),))


@files(*LEADERS)
@pytest.mark.parametrize("save", ["torch", "pickle"])
def test_a_pickle_bomb_does_not_go_off(file, tmp_path, save):
    path = finished(file, tmp_path) / "checkpoint.pt"
    bomb = dict.fromkeys(("agent", "actor", "q_network", "optimizer"), Bomb())
    torch.save(bomb, path) if save == "torch" else path.write_bytes(pickle.dumps(bomb))
    assert "UnpicklingError" in refuse(file, tmp_path, "--resume", only_run(tmp_path))
    assert not (tmp_path / "owned").exists()


@files("ppo")
def test_a_strangers_run_cannot_import_a_module(file, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("evil", None)
    (tmp_path / "evil.py").write_text("from pathlib import Path\nPath('owned').touch()\n")
    train(file, tmp_path, *small(file, "--total-timesteps", iteration(file)))
    edit(only_run(tmp_path), env_id="evil:CartPole-v1")
    assert "is a run on 'evil:CartPole-v1': add --env-id" in refuse(
        file, tmp_path, "--resume", only_run(tmp_path)
    )
    assert "is a run on 'evil:CartPole-v1'" in refuse(
        file, tmp_path, "--resume", only_run(tmp_path), "--env-id", "Acrobot-v1"
    )
    assert not (tmp_path / "owned").exists()
    train(file, tmp_path, "--resume", only_run(tmp_path), "--env-id", "evil:CartPole-v1")
    assert (tmp_path / "owned").exists(), "with the user's word it is imported"


MOMENTS = {"short": lambda shape: torch.zeros(1), "bare": lambda shape: torch.zeros(())}
MOMENTS["thin"] = lambda shape: torch.zeros(1).expand(
    shape
)  # of the right shape, in the memory of one number


@files(*LEADERS, "sac_continuous_action")
@pytest.mark.parametrize("moment", list(MOMENTS))
def test_a_strangers_optimizer_is_refused(file, tmp_path, moment):
    """Fused Adam writes as many numbers as the weights have, however few its state has room for."""
    checkpoint = read_checkpoint(finished(file, tmp_path))
    names = [name for name in checkpoint if re.fullmatch("(actor_|q_)?optimizer", name)]
    assert len(names) == (2 if learns_control(file) else 1)
    for name in names:
        state = read_checkpoint(only_run(tmp_path))[name]
        entry = max(state["state"].values(), key=lambda entry: entry["exp_avg"].numel())
        entry["exp_avg"] = MOMENTS[moment](entry["exp_avg"].shape)
        torch.save(checkpoint | {name: state}, only_run(tmp_path) / "checkpoint.pt")
        assert "an optimizer of other shapes" in refuse(
            file, tmp_path, "--resume", only_run(tmp_path)
        )
        torch.save(checkpoint, only_run(tmp_path) / "checkpoint.pt")


@files("dqn", "td3_continuous_action")
def test_a_strangers_buffer_is_refused(file, tmp_path):
    """Who believed it would learn from steps that nobody made, or read beyond its end."""
    train(file, tmp_path, *small(file, "--total-timesteps", iteration(file)))
    run, told = only_run(tmp_path), lambda: refuse(file, tmp_path, "--resume", only_run(tmp_path))
    buffer = read_checkpoint(run)["buffer"]
    assert buffer["added"].item() == iteration(file)
    odd = (
        () if learns_control(file) else (3,)
    )  # two environments are stepped, and here also remembered, side by side
    for added in (-2, *odd, iteration(file) + 2):
        change(run, buffer=buffer | {"added": torch.tensor([added])})
        assert told().startswith(
            f"cannot resume {run}: AssertionError: a replay buffer of another run"
        ), added
    column = "rows" if learns_control(file) else "rewards"
    rows, others = buffer[column], [{name: values[1:]} for name, values in buffer.items()]
    others += [
        {column: other} for other in (torch.cat([rows, rows]), rows[:, None], rows[0], "x", None)
    ]
    for other in others:
        change(run, buffer=buffer | other)
        assert told().startswith(
            f"cannot resume {run}: RuntimeError: Error(s) in loading state_dict"
        ), other
    for other in ({}, {**buffer, "more": rows}, [], None):
        change(run, buffer=other)
        assert told().startswith(f"cannot resume {run}: "), other
    checkpoint = read_checkpoint(run)
    del checkpoint["buffer"]
    torch.save(checkpoint, run / "checkpoint.pt")
    assert "KeyError: 'buffer'" in told()


@files("ppo")
def test_a_link_is_not_written_through(file, tmp_path):
    run = interrupted(
        file, tmp_path, small(file, "--total-timesteps", 3 * iteration(file)), after=1
    )
    (tmp_path / "precious").write_text("mine")
    (run / "checkpoint.tmp").symlink_to(tmp_path / "precious")
    train(file, tmp_path, "--resume", run)
    assert (tmp_path / "precious").read_bytes() == b"mine" and step_of(run) == 3 * iteration(file)


# interruptions


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
        process = start(train, file, tmp_path, *(("--resume", run) if run else flags))
        if attempt % 2 and run:
            deadline = time.time() + 60
            while not (run / "checkpoint.tmp").exists() and time.time() < deadline:
                time.sleep(0.0005)
        else:
            time.sleep(dice.uniform(0, 2))
        process.kill()
        process.join()
        runs = [path for path in (tmp_path / "runs").glob("*") if path.suffix != ".tmp"]
        assert len(runs) <= 1
        if runs:
            run = runs[0]
            assert about(run)["args"]["env_id"] == "Probe/WideObs-v0", "run.json is whole"
            steps.append(step_of(run))
            mid_write += (run / "checkpoint.tmp").exists()
            (run / "checkpoint.tmp").unlink(missing_ok=True)
    assert mid_write >= 3, "some kills must have hit the write itself"
    assert steps == sorted(steps) and steps[-1] > 0
    process = start(train, file, tmp_path, "--resume", run)
    deadline = time.time() + 60
    while step_of(run) <= steps[-1] and process.is_alive() and time.time() < deadline:
        time.sleep(0.1)
    process.kill()
    process.join()
    assert step_of(run) > steps[-1]


@files("ppo")
@needs_fork
def test_interactive_python_after_ctrl_c(file, tmp_path):
    flags = [str(flag) for flag in small(file, "--total-timesteps", 10**7)]
    command = [sys.executable, "-i", str(file), *flags]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    listen = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731  which a shell's background jobs do not
    process = subprocess.Popen(command, cwd=tmp_path, preexec_fn=listen, **pipes)
    while not list(tmp_path.glob("runs/*/checkpoint.pt")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(
        "print('looked', advantages.shape, global_step, agent.value)\n", timeout=60
    )
    assert re.search(r"looked \(32, 2\) \d+ <bound method Agent.value", output)
    run = only_run(tmp_path)
    step = step_of(run)
    edit(run, total_timesteps=step + 2 * iteration(file))
    train(file, tmp_path, "--resume", run)
    assert step_of(run) == step + 2 * iteration(file)


# Weights & Biases


def wandb_records(path):
    """The records of an offline run: LevelDB's log format behind a header of 7 bytes, which wandb writes but does not read."""
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


@files(*(stem for stem in FILES if "_jax" in stem), "ppo_continuous_action_isaacgym")
def test_xla_gets_the_flag_for_the_same_bits_on_a_gpu(file, tmp_path):
    """XLA reads its flags once, when the first array is made, which some libraries of environments do as soon as they are
    imported: what is set later is ignored without a word. But it ends a program that has a flag which it does not know."""
    source, flag = file.read_text(), "--xla_gpu_deterministic_ops=true"
    (tmp_path / file.name).write_text(source.replace(flag, "--xla_of_the_file=true"))
    environment = os.environ | {"XLA_FLAGS": "--xla_of_the_user=true"}
    command = [sys.executable, str(tmp_path / file.name), "--num-envs", "32"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert source.count(flag) == 1 and done.returncode != 0 and not (tmp_path / "runs").exists(), (
        done.stderr[-2000:]
    )
    assert (
        "Unknown flags in XLA_FLAGS: --xla_of_the_user=true --xla_of_the_file=true" in done.stderr
    )


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


@files(*LONG)
def test_a_run_on_the_cpu_leaves_the_gpu_alone(file, tmp_path, monkeypatch):
    """As on a machine whose driver shows a GPU that PyTorch cannot use: nothing may try to wake it."""
    monkeypatch.setattr(torch.cuda.random, "device_count", lambda: 1)
    error = None
    try:
        train(file, tmp_path, *small(file, "--total-timesteps", iteration(file)))
    except (RuntimeError, AssertionError) as caught:
        error = caught
    assert error is None and step_of(only_run(tmp_path)) == iteration(file)
