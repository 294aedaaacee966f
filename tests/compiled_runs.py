"""What the tests of ppo_rnn_jax.py need as long as it is in the old form: begin and resume runs."""

import os
import runpy
import shutil
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from tests.harness import read_checkpoint
from tests.test_dqn_jax import compiled_quickly, train


def begin(file, *flags, form=()):
    """The flags of a new run, the run, and a function that takes it one iteration further."""
    names = runpy.run_path(str(file))
    with mock.patch.object(sys, "argv", [str(file), *map(str, flags)]):
        args = names["tyro"].cli(names["Args"])
    init, iterate = names["make_program"](args, *form)
    floats = {name: jnp.float32(getattr(args, name)) for name in names["FLOATS"]}
    run = compiled_quickly(lambda: jax.device_get(jax.jit(init)(jax.random.PRNGKey(args.seed))))
    program = jax.jit(lambda run: iterate(floats, run, None))
    return args, run, lambda run: compiled_quickly(lambda: jax.device_get(program(run)))


def advantages_of(args, values, next_values, rewards, terminated, is_over):
    """By a slow reference that walks each episode by itself."""
    advantages = np.zeros_like(rewards)
    for e in range(args.num_envs):
        for t in range(args.num_steps):
            weight, k = 1.0, t
            while True:
                following = 0.0 if terminated[k, e] else next_values[k, e]
                advantages[t, e] += weight * (rewards[k, e] + args.gamma * following - values[k, e])
                if is_over[k, e] or k == args.num_steps - 1:
                    break
                weight, k = weight * args.gamma * args.gae_lambda, k + 1
    return advantages


def runs_of(folder):
    """The folders of all runs, by the name of the experiment and the seed."""
    return sorted((folder / "runs").iterdir(), key=lambda run: run.name.split("__")[1:3])


FEW = (
    "--num-envs",
    2,
    "--num-steps",
    32,
    "--num-minibatches",
    2,
    "--update-epochs",
    2,
    "--total-timesteps",
    8 * 64,
)


FEW = (*FEW, "--log-interval", 2, "--checkpoint-interval", 4)


def halfway(file, folder, *flags):
    """A folder with finished runs, and one with copies of them at the checkpoint in the middle."""
    real = os.replace

    def replace(source, target):
        real(source, target)
        if (
            Path(target).name == "checkpoint.msgpack"
            and read_checkpoint(Path(target).parent)["global_step"] == 4 * 64
        ):
            shutil.copytree(
                Path(target).parent, folder / "part" / "runs" / Path(target).parent.name
            )

    with mock.patch("os.replace", replace):
        train(file, folder / "whole", *flags)
    return folder / "whole", folder / "part"
