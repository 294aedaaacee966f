# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "filelock>=3.20", "flax>=0.12", "gymnasium>=1.2.1,<2", "jax>=0.9", "jaxtari>=0.2,<0.3",
#     "moviepy>=2", "numpy>=2", "optax>=0.2.6", "psutil>=7", "pydantic>=2.11", "tensorboard>=2.20",
#     "tqdm>=4.67", "tyro>=1.0", "wandb>=0.22",
# ]
# ///
"""Proximal Policy Optimization (PPO) on JAXtari's Atari games from pixels, one compiled program.

    python -m jaxtari.install_sprites                      # or scripts/draw_jaxtari_sprites.py
    uv run cleanrl/ppo_jaxtari_jax.py                      # Breakout, 10M steps (40M frames)
    uv run cleanrl/ppo_jaxtari_jax.py --env-id pong --num-envs 512
    uv run cleanrl/ppo_jaxtari_jax.py --num-seeds 4        # four runs side by side
    uv run cleanrl/ppo_jaxtari_jax.py --sticky             # sticky actions, full games
    uv run cleanrl/ppo_jaxtari_jax.py --resume runs/<run>  # and all runs trained alongside
    tensorboard --logdir runs

Tags such as [core 5] refer to the implementation details in
docs/rl-algorithms/{ppo,ppo-atari,ppo-jaxtari-jax}.md.
"""

import atexit
import hashlib
import importlib
import itertools
import json
import math
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import contextmanager, suppress
from contextvars import Context
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

if "deterministic" not in os.environ.setdefault("XLA_FLAGS", ""):  # XLA reads it only once
    os.environ["XLA_FLAGS"] += " --xla_gpu_deterministic_ops=true"  # the same bits on a GPU too
import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import jaxtari
import numpy as np
import optax
import psutil
import tyro
from filelock import FileLock, Timeout
from flax.linen.initializers import orthogonal
from flax.serialization import from_state_dict, msgpack_restore, msgpack_serialize, to_state_dict
from jaxtari.paths import ownership_or_alt_markers_present
from jaxtari.wrappers import AtariWrapper
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from tqdm import tqdm


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment
    seed: int = 1  # random seed of the weights, the environments and all sampling
    num_seeds: int = 1  # runs to train in parallel, with consecutive seeds starting at seed
    sweep: tuple[str, ...] = ()  # grid of values, such as learning_rate=1e-4,1e-3 gamma=0.9,0.99
    cuda: bool = True  # use a GPU if there is one
    track: bool = False  # log to Weights & Biases as well
    wandb_project_name: str = "cleanRL"  # W&B project
    wandb_entity: str | None = None  # W&B team
    capture_video: bool = False  # record an episode at each checkpoint to runs/<run>/videos
    resume: str | None = None  # folder of an interrupted run to continue with its own flags
    checkpoint_interval: int = 100  # iterations between checkpoints
    log_interval: int = 1  # maximum number of iterations per call of the compiled program

    env_id: str = "breakout"  # JAXtari game; module:Name is a class of your own
    sticky: bool = False  # sticky actions (probability 0.25); loss of life does not end the episode
    max_frames: int = 108_000  # frames after which a game is truncated: half an hour
    total_timesteps: int = 10_000_000  # environment steps of the whole run
    learning_rate: float = 2.5e-4  # initial learning rate of Adam
    num_envs: int = 8  # parallel environments
    num_steps: int = 128  # rollout length of each environment
    anneal_lr: bool = True  # anneal the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # epochs over each rollout
    norm_adv: bool = True  # normalize advantages per minibatch
    clip_coef: float = 0.1  # clipping range of the surrogate objective
    clip_vloss: bool = True  # clip the value loss by the same range
    ent_coef: float = 0.01  # entropy coefficient
    vf_coef: float = 0.5  # value loss coefficient
    max_grad_norm: float = 0.5  # maximum gradient norm

    def check(self):
        """Reject invalid flags before anything is written."""
        require_positive(self, "num_envs", "num_steps", "num_minibatches", "update_epochs")
        require_positive(self, "learning_rate", "clip_coef", "max_grad_norm", "checkpoint_interval")
        require_positive(self, "num_seeds", "log_interval", "max_frames")
        require_fraction(self, "gamma", "gae_lambda")
        batch_size = self.num_envs * self.num_steps
        require(self.total_timesteps >= batch_size, "total_timesteps is less than one rollout")
        require(self.total_timesteps < 2**31, "total_timesteps must be below 2**31")
        require(self.max_frames < 2**31, "max_frames must be below 2**31")
        require(batch_size % self.num_minibatches == 0, f"num_minibatches must divide {batch_size}")
        require(self.seed + self.num_seeds <= 2**32, "seed + num_seeds must be at most 2**32")


SWEEPABLE = [field.name for field in fields(Args) if field.type is float]  # one value for each run


def expand_sweep(args):
    """The flags of each run: all combinations of the values of --sweep, each with all seeds."""
    choices = {}
    for item in args.sweep:
        name, _, values = item.partition("=")
        require(name in SWEEPABLE, f"sweep takes {', '.join(SWEEPABLE)}, not {name}")
        require(name not in choices, f"sweep has {name} twice")
        choices[name] = [float(value) for value in values.split(",")]
        require(all(map(math.isfinite, choices[name])), f"sweep needs finite values, not {item}")
    all_args = []
    for combination in itertools.product(*choices.values()):
        values = dict(zip(choices, combination, strict=True))
        suffix = "".join(f"-{name}={value:g}" for name, value in values.items())
        for seed in range(args.seed, args.seed + args.num_seeds):
            alone = dict(seed=seed, num_seeds=1, sweep=(), exp_name=args.exp_name + suffix)
            all_args.append(replace(args, **alone, **values))
    return all_args


def gather_batch(args):
    """The flags of the run to resume and of all runs trained in parallel with it, in order.

    If the program died between two of their checkpoints, only of those at the same step."""
    folder = Path(args.resume).resolve()
    batch = json.loads((folder / "run.json").read_text())["batch"]
    step = last_step(folder)
    all_args = {}
    for path in folder.parent.glob("*/run.json"):
        run = json.loads(path.read_text())
        if run.get("batch") == batch and last_step(path.parent) == step:
            own = {name: run["args"][name] for name in ("seed", "exp_name", *SWEEPABLE)}
            all_args[run["start_time"]] = replace(args, resume=str(path.parent), **own)
    return [all_args[start_time] for start_time in sorted(all_args)]


def last_step(folder):
    """The step of a run's last checkpoint, or 0; -1 if it is damaged, which resuming it reports."""
    try:
        return int(msgpack_restore((folder / "checkpoint.msgpack").read_bytes())["global_step"])
    except FileNotFoundError:
        return 0
    except Exception:
        return -1


def make_game(args):
    """The functions of a game: start(key), step(state, obs, action), render(state); its actions."""
    *module, name = args.env_id.split(":")
    if module:
        env = getattr(importlib.import_module(module[0]), name)()
    else:
        sprites = "the sprites are missing: run python -m jaxtari.install_sprites"
        require(ownership_or_alt_markers_present(), sprites)
        env = jaxtari.make(name)
    game = AtariWrapper(
        env,
        sticky_actions=0.25 * args.sticky,
        episodic_life=not args.sticky,  # [atari 3]
        noop_max=30,  # [atari 1]
        first_fire=True,  # [atari 4]
        max_frames_per_episode=args.max_frames,
    )

    def look(states):
        """The pixel-wise maximum of some states' frames [atari 2], gray, 84 x 84 [atari 5]."""
        gray = jax.vmap(env.render)(states).max(0) @ jnp.float32([0.299, 0.587, 0.114])
        return jnp.round(jax.image.resize(gray, (84, 84), "linear")).astype(jnp.uint8)

    def start(key):
        _, state = game.reset(key)
        frame = look(jax.tree.map(lambda x: x[None], state.env_state))
        return state, jnp.stack([frame] * 4)

    def step(state, obs, action):
        """Repeat the action four times [atari 2]; after the end nothing happens [jaxtari 1]."""

        def repeat(before, _):
            state, reward, terminated, is_last = before
            _, state, gained, is_end, is_cut, infos = game.step(state, action)
            after = state, reward + gained, terminated | is_end, infos["env_done"] | is_cut
            after = jax.tree.map(partial(jnp.where, is_last), before, after)
            return after, after[0].env_state

        before = state, jnp.float32(0), jnp.array(False), jnp.array(False)
        (state, reward, terminated, is_last), states = jax.lax.scan(repeat, before, None, 4)
        frame = look(jax.tree.map(lambda x: x[-2:], states))
        obs = jnp.append(obs[1:], frame[None], 0)  # [atari 7]
        return state, obs, reward, terminated, is_last

    def render(state):
        return env.render(state.env_state)

    return start, step, render, int(env.action_space().n)


class Game(gym.Env):
    """A game with the settings of training, for evaluation and videos."""

    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)

    def __init__(self, start, step, render, num_actions, render_mode):
        self.compiled_start = start
        self.compiled_step = step
        self.compiled_render = render
        self.render_mode = render_mode
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 15}
        self.action_space = gym.spaces.Discrete(num_actions)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        key = jax.random.PRNGKey(self.np_random.integers(2**32))
        self.state, self.obs = self.compiled_start(key)
        return np.asarray(self.obs), {}

    def step(self, action):
        stepped = self.compiled_step(self.state, self.obs, action)
        self.state, self.obs, reward, terminated, is_last = stepped
        truncated = is_last & ~terminated
        return np.asarray(self.obs), float(reward), bool(is_last & terminated), bool(truncated), {}

    def render(self):
        return np.asarray(self.compiled_render(self.state))


def make_envs(args, num_envs, render_mode=None):
    """The games as Gymnasium environments, for evaluation and videos."""
    start, step, render, num_actions = make_game(args)
    functions = jax.jit(start), jax.jit(step), jax.jit(render)

    def make_env():
        game = Game(*functions, num_actions, render_mode)
        return gym.wrappers.RecordEpisodeStatistics(game)

    return gym.vector.SyncVectorEnv([make_env] * num_envs)


def convolve(images, kernel, strides, *_, **options):
    """A convolution; on a CPU a matrix product, since XLA is slow at others there [jaxtari 4]."""
    if jax.default_backend() != "cpu":
        layout = ("NHWC", "HWIO", "NHWC")
        dilated = jax.lax.conv_general_dilated
        return dilated(images, kernel, strides, "VALID", dimension_numbers=layout)
    stride, channels = strides[0], images.shape[-1]
    size, width = len(kernel) // stride, images.shape[1] // stride  # in squares of stride pixels
    squares = images.reshape(-1, width, stride, width, stride, channels).swapaxes(2, 3)
    squares = squares.reshape(len(images), width, width, -1)
    places = [slice(i, width - size + i + 1) for i in range(size)]
    patches = jnp.concatenate([squares[:, i, j] for i in places for j in places], -1)
    kernel = kernel.reshape(size, stride, size, stride, channels, -1).swapaxes(1, 2)
    return patches @ kernel.reshape(patches.shape[-1], -1)


class Agent(nn.Module):
    """One convolutional network shared by the policy and the value function [atari 8]."""

    num_actions: int

    @nn.compact
    def __call__(self, obs):
        """Log-probabilities of all actions, and the value."""
        gain = orthogonal(2**0.5)  # [core 2]
        features = jnp.moveaxis(obs, 1, -1) / 255  # [atari 9]; JAX has the channels last
        for channels, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            conv = partial(nn.Conv, padding="VALID", conv_general_dilated=convolve)
            features = nn.relu(conv(channels, (size, size), stride, kernel_init=gain)(features))
        hidden = nn.relu(nn.Dense(512, kernel_init=gain)(features.reshape(len(obs), -1)))
        log_probs = nn.log_softmax(nn.Dense(self.num_actions, kernel_init=orthogonal(0.01))(hidden))
        return log_probs, nn.Dense(1, kernel_init=orthogonal(1.0))(hidden).squeeze(-1)


def load_policy(checkpoint, envs, deterministic=False):
    """The trained policy for evaluation: samples its actions, or takes the most likely ones."""
    agent = Agent(int(envs.single_action_space.n))
    keys = map(jax.random.key, itertools.count())

    @jax.jit
    def act(key, obs):
        params = checkpoint["agent"]["params"]
        log_probs, _ = agent.apply(params, obs)
        return log_probs.argmax(-1) if deterministic else jax.random.categorical(key, log_probs)

    def policy(obs, is_last):
        return np.asarray(act(next(keys), obs)) + envs.single_action_space.start

    return policy


def make_program(args, game):
    """The compiled functions of one run: init(key) -> run, its whole state; train(run, length).

    The float flags in args may be traced: each run has its own."""
    start, step, _, num_actions = game
    T, N = args.num_steps, args.num_envs
    num_iterations = args.total_timesteps // (T * N)
    agent = Agent(num_actions)

    def make_optimizer(learning_rate):
        clip = optax.clip_by_global_norm(args.max_grad_norm)  # [core 11]
        return optax.chain(clip, optax.adam(learning_rate, eps=1e-5))  # [core 3]

    def init(key):
        """The whole state of a run: agent and environments."""
        key, params_key, env_key = jax.random.split(key, 3)
        env_state, obs = jax.vmap(start)(jax.random.split(env_key, N))  # [core 1]
        params = agent.init(params_key, obs)
        opt_state = make_optimizer(args.learning_rate).init(params)
        zeros = jnp.zeros(N)
        world = dict(env_state=env_state, obs=obs, episode_return=zeros, episode_length=zeros)
        run = dict(agent=dict(params=params, opt_state=opt_state), world=world, key=key)
        return run | dict(global_step=jnp.zeros((), dtype=jnp.int32))

    def act(params, fresh, world, drawn):
        """One step of all environments; games that end are replaced by fresh ones."""
        noise, number = drawn
        log_probs, values = agent.apply(params, world["obs"])
        actions = (log_probs + noise).argmax(1)  # Gumbel-max sampling
        stepped = jax.vmap(step)(world["env_state"], world["obs"], actions)
        env_state, next_obs, rewards, terminated, is_last = stepped

        def last_values():
            return agent.apply(params, next_obs)[1]

        def no_values():
            return jnp.zeros(N)

        is_truncated = is_last & ~terminated
        row = dict(
            obs=world["obs"],
            actions=actions,
            log_probs=jnp.take_along_axis(log_probs, actions[:, None], 1).squeeze(1),
            values=values,
            last_values=jax.lax.cond(is_truncated.any(), last_values, no_values),
            rewards=jnp.sign(rewards),  # [atari 6]
            terminated=terminated,
            is_last=is_last,
            episode_return=world["episode_return"] + rewards,
            episode_length=world["episode_length"] + 1,
        )

        def choose(new, old):  # [jaxtari 2]
            new = jnp.roll(new, number, 0)
            return jnp.where(is_last.reshape(-1, *[1] * (old.ndim - 1)), new, old)

        env_state, obs = jax.tree.map(choose, fresh, (env_state, next_obs))
        world = dict(
            env_state=env_state,
            obs=obs,
            episode_return=row["episode_return"] * ~is_last,
            episode_length=row["episode_length"] * ~is_last,
        )
        return world, row

    def estimate(values, last_values, rewards, terminated, is_last):
        """Advantages [core 5]; truncated episodes are bootstrapped, terminated ones are not."""
        next_values = jnp.where(is_last, last_values, values[1:])
        deltas = rewards + args.gamma * next_values * ~terminated - values[:-1]

        def accumulate(advantage, row):
            delta, is_last = row
            advantage = delta + args.gamma * args.gae_lambda * advantage * ~is_last
            return advantage, advantage

        rows = deltas, terminated | is_last
        _, advantages = jax.lax.scan(accumulate, jnp.zeros(N), rows, reverse=True)
        return advantages

    def ppo_loss(params, mb):
        log_probs, value = agent.apply(params, mb["obs"])
        actions = mb["actions"][:, None]
        log_ratio = jnp.take_along_axis(log_probs, actions, 1).squeeze(1) - mb["log_probs"]
        ratio = jnp.exp(log_ratio)
        adv = mb["advantages"]
        if args.norm_adv:  # [core 7]
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)

        clipped_ratio = ratio.clip(1 - args.clip_coef, 1 + args.clip_coef)
        policy_loss = -jnp.minimum(adv * ratio, adv * clipped_ratio).mean()  # [core 8]
        value_error = (value - mb["returns"]) ** 2
        if args.clip_vloss:  # [core 9]
            change = (value - mb["values"]).clip(-args.clip_coef, args.clip_coef)
            clipped_error = (mb["values"] + change - mb["returns"]) ** 2
            value_error = jnp.maximum(value_error, clipped_error)
        value_loss = 0.5 * value_error.mean()
        p_log_p = jnp.exp(log_probs) * log_probs.clip(-1e9)  # 0 where an action is masked
        entropy = -p_log_p.sum(1).mean()
        loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy  # [core 10]
        return loss, {
            "loss": loss,
            "value_loss": value_loss,
            "policy_loss": policy_loss,
            "entropy": entropy,
            "old_approx_kl": -log_ratio.mean(),
            "approx_kl": (ratio - 1 - log_ratio).mean(),  # [core 12]
            "clipfrac": (jnp.abs(ratio - 1) > args.clip_coef).mean(),
        }

    def learn(optimizer, batch, agent_state, rows):
        mb = jax.tree.map(lambda x: x[rows], batch)  # images are gathered when needed [jaxtari 3]
        grads, losses = jax.grad(ppo_loss, has_aux=True)(agent_state["params"], mb)
        updates, opt_state = optimizer.update(grads, agent_state["opt_state"])
        params = optax.apply_updates(agent_state["params"], updates)
        return dict(params=params, opt_state=opt_state), losses

    def iterate(run, _):
        iteration = run["global_step"] // (T * N)
        learning_rate = args.learning_rate
        if args.anneal_lr:  # [core 4]
            learning_rate *= 1 - iteration / num_iterations
        agent_state = run["agent"]
        params = agent_state["params"]
        key, noise_key, reset_key, order_key = jax.random.split(run["key"], 4)

        # act
        fresh = jax.vmap(start)(jax.random.split(reset_key, N))
        drawn = jax.random.gumbel(noise_key, (T, N, num_actions)), jnp.arange(T)
        world, rollout = jax.lax.scan(partial(act, params, fresh), run["world"], drawn)

        # estimate advantages
        _, next_value = agent.apply(params, world["obs"])
        rewards, terminated = rollout["rewards"], rollout["terminated"]
        last_values, is_last = rollout["last_values"], rollout["is_last"]
        values = jnp.append(rollout["values"], next_value[None], 0)
        advantages = estimate(values, last_values, rewards, terminated, is_last)
        values = values[:-1]
        returns = advantages + values

        # learn
        rollout |= dict(advantages=advantages, returns=returns)
        batch = jax.tree.map(lambda x: x.reshape(T * N, *x.shape[2:]), rollout)
        order_keys = jax.random.split(order_key, args.update_epochs)
        orders = jax.vmap(jax.random.permutation, (0, None))(order_keys, T * N)  # [core 6]
        orders = orders.reshape(args.update_epochs * args.num_minibatches, -1)
        learn_from = partial(learn, make_optimizer(learning_rate), batch)
        agent_state, losses = jax.lax.scan(learn_from, agent_state, orders)
        checked = dict(reward=rewards, loss=losses.pop("loss"))
        checked = jax.tree.map(lambda x: jnp.abs(x).max(), checked)  # finite if all of it is
        metrics = {f"losses/{name}": x[-1] for name, x in losses.items()} | {
            "charts/learning_rate": learning_rate,
            "losses/clipfrac": losses["clipfrac"].mean(),
            "losses/explained_variance": 1 - (returns - values).var() / returns.var(),
        }
        run = dict(agent=agent_state, world=world, key=key, global_step=run["global_step"] + T * N)
        episodes = is_last, rollout["episode_return"], rollout["episode_length"]
        return run, (metrics, checked, episodes)

    def train(run, length):
        """Some iterations, with the metrics of the last one and all episodes."""
        run, (metrics, checked, episodes) = jax.lax.scan(iterate, run, None, length)
        metrics = jax.tree.map(lambda x: x[-1], metrics)
        return run, metrics, jax.tree.map(jnp.max, checked), episodes

    return init, train


def mean_episode(is_last, returns, lengths):
    """Means over the episodes that ended during a call, NaN if there is none."""
    count = is_last.sum()
    return {
        "charts/episodic_return": (returns * is_last).sum() / count,
        "charts/episodic_length": (lengths * is_last).sum() / count,
    }


def take(runs, number):
    """One of the runs, whose arrays are stacked."""
    return jax.tree.map(lambda x: x[number], runs)


def side_by_side(train_run, num_runs):
    """Train all runs at once; a single run is faster without an axis for runs."""

    def train_alone(*stacked):
        results = train_run(*take(stacked, 0))
        return jax.tree.map(lambda x: x[None], results)

    return jax.vmap(train_run) if num_runs > 1 else train_alone


def restore_runs(all_args, runs):
    """All runs at their last checkpoint and its step; the given runs and 0 if there is none yet."""
    restored = []
    for number, run_args in enumerate(all_args):
        run, global_step = restore_checkpoint(run_args, take(runs, number))
        restored.append(run)
    return jax.tree.map(lambda *x: jnp.stack(x), *restored), global_step


def save_runs(run_folders, runs, global_step):
    """A checkpoint of each run, even if an interrupt or another run's weights stop the program."""
    runs = jax.device_get(runs)
    stop = None
    for number, run_folder in enumerate(run_folders):
        try:
            save_checkpoint(run_folder, take(runs, number), global_step)
        except SystemExit as error:
            stop = error
    if stop:
        raise stop


def record_episode(envs, policy, seed, run_folder, global_step):
    """A video of one episode, or of its first 1,000 frames."""
    envs = RecordVideo(envs, run_folder / "videos", global_step)
    obs, _ = envs.reset(seed=seed)
    is_last = np.zeros(1, dtype=bool)
    while envs.recording and not is_last[0]:
        obs, _, terminated, truncated, _ = envs.step(policy(obs, is_last))
        is_last = terminated | truncated
    if envs.recording:
        envs.stop_recording()


# -- the same in every JAX file: flags, errors, run folder, checkpoints ----------------------------


sys.path.append(os.getcwd())  # --env-id my_envs:MyEnv-v0 finds my_envs.py here
FILE_HASH = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
TRACKER = os.environ.get("CLEANRL_TRACKER", "wandb")  # or trackio, which has the same API
interrupted = threading.Event()  # set by the first Ctrl+C or SIGTERM


def require(condition, message):
    if not condition:
        raise ValueError(message)


def require_positive(args, *names):
    for name in names:
        require(getattr(args, name) > 0, f"{name} must be positive, not {getattr(args, name)}")


def require_fraction(args, *names):
    for name in names:
        value = getattr(args, name)
        require(0 <= value <= 1, f"{name} must be between 0 and 1, not {value}")


def require_memory(num_bytes):
    free = psutil.virtual_memory().available
    require(num_bytes < free, f"{num_bytes / 1e9:.1f} GB of memory needed, {free / 1e9:.1f} free")


def require_envs(args, envs, mode=gym.vector.AutoresetMode.NEXT_STEP):
    """Check the autoreset mode and, for videos, that the environment renders frames."""
    require(envs.metadata.get("autoreset_mode") == mode, f"its autoreset mode is not {mode.name}")
    if args.capture_video:
        require("rgb_array" in envs.metadata.get("render_modes", ()), "no rgb_array render mode")
        envs.reset()
        envs.render()  # MuJoCo needs OpenGL, which a server may not have


@contextmanager
def explain(attempt):
    """Report an exception as a one-line error; CLEANRL_TRACEBACK=1 shows the traceback."""
    try:
        yield
    except Exception as error:
        if os.environ.get("CLEANRL_TRACEBACK"):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SystemExit(f"cannot {attempt}: {reason[:500]}") from None


def command_line():
    """The arguments for tyro; "--cuda False", as in CleanRL v1, becomes --no-cuda."""
    words = sys.argv[1:]
    for i in reversed(range(len(words) - 1)):
        name = words[i].removeprefix("--").replace("-", "_")
        if words[i + 1] in ("True", "False") and isinstance(getattr(Args, name, None), bool):
            words[i : i + 2] = [f"--{name}" if words[i + 1] == "True" else f"--no-{name}"]
    return words


def parse_args():
    """The flags of the command line, or with --resume those of the interrupted run."""
    args = tyro.cli(Args, args=command_line())
    if args.resume:
        with explain(f"resume {args.resume}"):
            args = load_args(args.resume)
    with explain("run with these flags"):
        for name, value in vars(args).items():
            require(not isinstance(value, float) or math.isfinite(value), f"{name} is {value}")
        require(0 <= args.seed < 2**32, "seed must be between 0 and 2**32 - 1")
        args.check()
    return args


def load_args(folder):
    """The flags of a run; with --resume, only a larger --total-timesteps may be passed."""
    from pydantic import TypeAdapter

    run = json.loads(Path(folder, "run.json").read_text())
    require(run["file"] == Path(__file__).name, f"it is a run of {run['file']}")
    if run.get("sha256", FILE_HASH) != FILE_HASH:
        print(f"warning: {run['file']} has changed since this run started", file=sys.stderr)
    recorded = TypeAdapter(Args).validate_python(run["args"] | {"resume": folder})
    args = tyro.cli(Args, args=command_line(), default=recorded)
    changed = [name for name, value in vars(args).items() if value != getattr(recorded, name)]
    require(set(changed) <= {"total_timesteps"}, f"do not pass {', '.join(changed)} with --resume")
    require(args.total_timesteps >= recorded.total_timesteps, "total_timesteps can only grow")
    return args


def seed_everything(args):
    random.seed(args.seed)
    np.random.seed(args.seed)
    return jax.random.PRNGKey(args.seed)


def make_run_folder(args):
    """runs/{env_id}__{exp_name}__{seed}__{unix time}, with a unique time."""
    for second in itertools.count(int(time.time())):
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{second}"
        folder = Path("runs", re.sub(r"[/\\:]", "-", name))
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


def lock_run_folder(folder):
    """Refuse a folder that another process is writing to."""
    lock = FileLock(folder / "lock", timeout=0, is_singleton=True)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"process {(folder / 'pid').read_text()} is writing to it") from None
    atexit.register(lock.release)
    (folder / "pid").write_text(str(os.getpid()))


def open_run(args, device, global_step, **more):
    """The run folder, with the flags and versions in run.json, and the writer of its metrics."""
    folder = Path(args.resume or "runs")
    with explain(f"log to {folder}"):
        if args.track:
            module = importlib.import_module(TRACKER)
            if TRACKER == "wandb":
                module.login()  # a missing login is reported before anything is written
        if args.resume:
            lock_run_folder(folder)
            run = json.loads((folder / "run.json").read_text())
        else:
            describe = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
            here = Path(__file__).parent
            git = subprocess.run(describe, cwd=here, capture_output=True, text=True)
            run = {
                "file": Path(__file__).name,
                "sha256": FILE_HASH,
                "tags": [tag for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag],
                "start_time": time.time(),
                "commit": git.stdout.strip().removesuffix("-dirty"),
                "dirty": git.stdout.strip().endswith("-dirty"),
                "device": device.device_kind,
                "python": platform.python_version(),
                "packages": {package.name: package.version for package in distributions()},
            } | more
            folder = make_run_folder(args)
            lock_run_folder(folder)
            shutil.copy(__file__, folder)  # the exact code of this run
        run["args"] = asdict(args) | {"resume": None}
        (folder / "run.tmp").write_text(json.dumps(run, indent=2, default=str))
        os.replace(folder / "run.tmp", folder / "run.json")
        tracker = None
        if args.track:
            names = dict(project=args.wandb_project_name, name=folder.name, resume="allow")
            if TRACKER == "wandb":
                names |= dict(entity=args.wandb_entity, id=folder.name, reinit="create_new")
            # in its own context, since a process may track many runs
            tracker = Context().run(module.init, **names, config=asdict(args))
            atexit.register(tracker.finish)
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    sys.excepthook = partial(report_crash, args, folder)
    print(f"run folder: {folder}")
    print(f"device: {device.device_kind}", flush=True)
    return folder, Writer(folder, tracker, global_step)


class Writer:
    """Logs the metrics of one run to TensorBoard and, with --track, to a tracker."""

    def __init__(self, folder, tracker, global_step):
        name = f"events.out.tfevents.{time.time():.6f}.{platform.node()}"
        self.records = RecordWriter((folder / name).open("ab", buffering=0))
        self.tracker = tracker
        self.logged_videos = set(folder.glob("videos/*.mp4"))
        self.add_event(file_version="brain.Event:2")
        start = SessionLog(status=SessionLog.START)
        self.add_event(step=global_step + 1, session_log=start)  # hides steps that a resume repeats

    def add_event(self, **event):
        self.records.write(Event(wall_time=time.time(), **event).SerializeToString())

    def add_scalars(self, step, scalars):
        values = [Summary.Value(tag=name, simple_value=float(x)) for name, x in scalars.items()]
        self.add_event(step=int(step), summary=Summary(value=values))
        if self.tracker:
            scalars = {name: float(x) for name, x in scalars.items()}
            options = {} if TRACKER == "wandb" else {"step": int(step)}
            self.tracker.log(scalars | {"global_step": step}, **options)

    def add_videos(self, folder, step):
        """Upload the videos that the tracker does not have yet."""
        module = importlib.import_module(TRACKER)
        for path in sorted(set(folder.glob("videos/*.mp4")) - self.logged_videos):
            self.tracker.log({"videos": module.Video(str(path)), "global_step": step})
            self.logged_videos.add(path)

    def close(self):
        self.records.close()


def interrupt(number, frame):
    """The first signal lets the loop save a checkpoint and stop, the second ends the program."""
    interrupted.set()
    signal.signal(number, signal.SIG_DFL)


def report_crash(args, folder, kind, error, traceback):
    """Below the traceback, say where the run failed and how to resume it."""
    error.add_note(f"{args.env_id} failed at step {global_step}, continue with --resume {folder}")
    sys.__excepthook__(kind, error, traceback)


def check_finite(args, step, **values):
    """End the run at the first NaN or infinity, before it reaches a checkpoint."""
    for name, value in values.items():
        finite = np.isfinite(value)
        if not finite.all():
            bad = np.asarray(value)[~finite][0]
            raise SystemExit(f"{name} of {args.env_id} at step {step}: {bad}")


class RecordVideo(gym.wrappers.vector.RecordVideo):
    """Episodes of the first environment, at most 1,000 frames each, kept in memory."""

    def __init__(self, envs, folder, step):
        super().__init__(envs, folder, name_prefix=f"step-{step}", record_first_only=True)

    def _capture_frame(self):
        super()._capture_frame()
        if len(self.recorded_frames) >= 1000:
            self.stop_recording()


def save_checkpoint(folder, state, global_step):
    """Write a new file, then rename it, so that none is incomplete. Stops if interrupted."""
    checkpoint = {"global_step": global_step} | to_state_dict(jax.device_get(state))
    checkpoint["args"] = json.loads((folder / "run.json").read_text())["args"]
    path = folder / "checkpoint.tmp"
    with explain(f"save step {global_step} ({shutil.disk_usage(folder).free / 1e9:.1f} GB free)"):
        require_finite_weights(checkpoint)
        try:
            path.write_bytes(msgpack_serialize(checkpoint))
            os.replace(path, folder / "checkpoint.msgpack")
        finally:
            path.unlink(missing_ok=True)
    if interrupted.is_set():
        raise SystemExit(f"interrupted at step {global_step}, continue with --resume {folder}")


def require_finite_weights(checkpoint):
    for path, value in jax.tree.leaves_with_path(checkpoint.get("agent", {})):
        is_float = np.issubdtype(np.asarray(value).dtype, np.floating)
        finite = not is_float or np.isfinite(value).all()
        require(finite, f"agent{jax.tree_util.keystr(path)} is not finite")


def restore_checkpoint(args, state):
    """The state of the last checkpoint and its step; the given state and 0 if there is none yet."""
    path = Path(args.resume or "", "checkpoint.msgpack")
    if not args.resume or not path.exists():
        return state, 0
    with explain(f"resume {args.resume}"):
        try:
            checkpoint = msgpack_restore(path.read_bytes())
        except Exception:
            raise ValueError("checkpoint.msgpack is damaged") from None
        require_finite_weights(checkpoint)
        restored = from_state_dict(state, {name: checkpoint[name] for name in state})
        shapes = jax.tree.map(lambda x: (np.shape(x), np.asarray(x).dtype), [state, restored])
        require(shapes[0] == shapes[1], "its checkpoint has arrays of different shapes")
        return jax.tree.map(jnp.array, restored), int(checkpoint["global_step"])


# -- the algorithm ---------------------------------------------------------------------------------


if __name__ == "__main__":
    args = parse_args()
    with explain(f"resume {args.resume}" if args.resume else "run with these flags"):
        all_args = gather_batch(args) if args.resume else expand_sweep(args)
        for run_args in all_args:
            run_args.check()
    num_runs, T, N = len(all_args), args.num_steps, args.num_envs
    with explain(f"train on {args.env_id}"):
        envs = make_envs(args, 1, "rgb_array" if args.capture_video else None)
        require_envs(args, envs)
        game = make_game(args)
        init, _ = make_program(args, game)
        require_memory(num_runs * T * N * math.prod(envs.single_observation_space.shape))

    keys = jnp.stack([seed_everything(run_args) for run_args in all_args])
    device = jax.devices()[0] if args.cuda else jax.devices("cpu")[0]
    jax.config.update("jax_default_device", device)
    runs = jax.jit(partial(jax.lax.map, init))(keys)  # vectorized, QR may hang on few cores
    runs, global_step = restore_runs(all_args, runs)
    start_step = global_step
    batch = uuid.uuid4().hex  # --resume finds the runs of this program by it
    opened = [open_run(run_args, device, global_step, batch=batch) for run_args in all_args]
    run_folders, writers = zip(*opened, strict=True)

    num_iterations = args.total_timesteps // (T * N)
    iteration = global_step // (T * N)
    lengths = range(1, args.log_interval + 1)
    length = max(n for n in lengths if num_iterations % n == 0 and iteration % n == 0)

    def train_run(values, run):
        """A call for one run. All calls have the same length, to be compiled only once."""
        _, train = make_program(replace(args, **values), game)
        run, metrics, checked, episodes = train(run, length)
        if num_runs > 1:  # logging each episode of many runs would take too long
            metrics |= mean_episode(*episodes)
            episodes = ()
        return run, metrics, checked, episodes

    train = jax.jit(side_by_side(train_run, num_runs), donate_argnums=1)
    values = {name: jnp.float32([getattr(x, name) for x in all_args]) for name in SWEEPABLE}
    start_time = time.time()
    total = num_iterations * T * N
    progress = tqdm(initial=global_step, total=total, unit="step", unit_scale=True)

    while iteration < num_iterations:
        # act, estimate advantages and learn, in one call of the program
        runs, *logs = train(values, runs)
        iteration += length
        metrics, checked, episodes = jax.device_get(logs)
        if num_runs == 1:
            is_last, returns, lengths = map(np.ravel, episodes)
            for i in np.flatnonzero(is_last):
                episode = {
                    "charts/episodic_return": returns[i],
                    "charts/episodic_length": lengths[i],
                }
                writers[0].add_scalars(global_step + i + 1, episode)
                progress.set_postfix(episodic_return=f"{returns[i]:.1f}", refresh=False)
        global_step += length * T * N
        progress.update(length * T * N)

        # log
        sps = num_runs * (global_step - start_step) / (time.time() - start_time)  # of all runs
        for number, (run_folder, writer) in enumerate(opened):
            named = replace(args, env_id=run_folder.name)  # so that errors name the run
            check_finite(named, global_step, **take(checked, number))
            scalars = take(metrics, number) | {"charts/SPS": int(sps)}
            known = {name: x for name, x in scalars.items() if not np.isnan(x)}
            writer.add_scalars(global_step, known)
            if "charts/episodic_return" in known:
                episode_return = known["charts/episodic_return"]
                progress.set_postfix(episodic_return=f"{episode_return:.1f}", refresh=False)
        is_due = iteration % args.checkpoint_interval < length or iteration == num_iterations
        if is_due or interrupted.is_set():
            for number, (run_folder, writer) in enumerate(opened):
                if args.capture_video:
                    policy = load_policy(take(runs, number), envs)
                    record_episode(envs, policy, all_args[number].seed, run_folder, global_step)
                if args.track:
                    writer.add_videos(run_folder, global_step)
            save_runs(run_folders, runs, global_step)

    progress.close()
    envs.close()
    for writer in writers:
        writer.close()
