# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "filelock>=3.20", "flax>=0.12", "gymnasium[classic-control]>=1.2.1,<2", "gymnax>=1.0",
#     "jax>=0.9", "moviepy>=2", "numpy>=2", "optax>=0.2.6", "psutil>=7", "pydantic>=2.11", "six",
#     "tensorboard>=2.20", "tqdm>=4.67", "tyro>=1.0", "wandb>=0.22",
# ]
# ///
"""Parallelized Q-Network (PQN) as one compiled program that trains many runs at once.

    uv run cleanrl/pqn_jax.py                                # CartPole-v1, to a return near 500
    uv run cleanrl/pqn_jax.py --num-seeds 16                 # sixteen runs side by side
    uv run cleanrl/pqn_jax.py --sweep learning_rate=1e-4,3e-4,1e-3 q_lambda=0.65,0.95
    uv run cleanrl/pqn_jax.py --env-id Breakout-MinAtar --num-envs 128 --total-timesteps 10000000
    uv run cleanrl/pqn_jax.py --resume runs/<run>            # and all runs trained alongside
    tensorboard --logdir runs

Tags such as [pqn 5] refer to the implementation details in docs/rl-algorithms/pqn.md.
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
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
import tyro
from filelock import FileLock, Timeout
from flax.linen.initializers import orthogonal
from flax.serialization import from_state_dict, msgpack_restore, msgpack_serialize, to_state_dict
from gymnax.environments.environment import Environment
from gymnax.environments.spaces import Box, Discrete
from gymnax.wrappers.gym import GymnaxToGymWrapper
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
    cuda: bool = True  # use a GPU if the networks are large enough to benefit from it
    track: bool = False  # log to Weights & Biases as well
    wandb_project_name: str = "cleanRL"  # W&B project
    wandb_entity: str | None = None  # W&B team
    capture_video: bool = False  # record an episode at each checkpoint to runs/<run>/videos
    resume: str | None = None  # folder of an interrupted run to continue with its own flags
    checkpoint_interval: int = 100  # iterations between checkpoints
    log_interval: int = 16  # maximum number of iterations per call of the compiled program

    env_id: str = "CartPole-v1"  # gymnax environment id; module:id imports the module first
    total_timesteps: int = 500_000  # environment steps of the whole run
    learning_rate: float = 2.5e-4  # initial learning rate of RAdam
    num_envs: int = 4  # parallel environments
    reset_ratio: int = 1  # environments per world generated for resets in each step; 16 for Craftax
    num_steps: int = 128  # rollout length of each environment
    anneal_lr: bool = True  # anneal the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    q_lambda: float = 0.65  # lambda of the Q(lambda) targets
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # epochs over each rollout
    start_e: float = 1.0  # initial epsilon of epsilon-greedy exploration
    end_e: float = 0.05  # final epsilon
    exploration_fraction: float = 0.5  # fraction of the run over which epsilon is annealed
    max_grad_norm: float = 10.0  # maximum gradient norm

    def check(self):
        """Reject invalid flags before anything is written."""
        require_positive(self, "num_envs", "num_steps", "num_minibatches", "update_epochs")
        require_positive(self, "learning_rate", "max_grad_norm", "checkpoint_interval")
        require_positive(self, "num_seeds", "reset_ratio", "log_interval", "exploration_fraction")
        require_fraction(self, "gamma", "q_lambda", "start_e", "end_e", "exploration_fraction")
        batch_size = self.num_envs * self.num_steps
        require(self.total_timesteps >= batch_size, "total_timesteps is less than one rollout")
        require(self.num_envs % self.reset_ratio == 0, "reset_ratio must divide num_envs")
        require(self.total_timesteps < 2**31, "total_timesteps must be below 2**31")
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


class Craftax(Environment):
    """Craftax with gymnax's interface; its time limit truncates an episode."""

    def __init__(self, env_id):
        craftax = importlib.import_module("craftax.craftax_env")  # not needed by most runs
        self.env = craftax.make_craftax_env_from_name(env_id, auto_reset=False)

    @property
    def default_params(self):
        return self.env.default_params

    def reset_env(self, key, params):
        return self.env.reset_env(key, params)

    def step_env(self, key, state, action, params):
        obs, state, reward, _, info = self.env.step_env(key, state, action, params)
        no_limit = params.replace(max_timesteps=2**30)
        return obs, state, reward, self.env.is_terminal(state, no_limit), info

    def is_truncated(self, state, params):
        return state.timestep >= params.max_timesteps

    def action_space(self, params):
        return Discrete(self.env.num_actions)

    def observation_space(self, params):
        return Box(0.0, 1.0, self.env.observation_space(params).shape)


def import_env_id(args):
    """The environment's own id; module:id imports the module first, which registers it."""
    *modules, env_id = args.env_id.split(":")
    for module in modules:
        importlib.import_module(module)
    if env_id.startswith("Craftax-") and env_id not in gymnax.registered_envs:
        gymnax.register(env_id, partial(Craftax, env_id))
    return env_id


def make_envs(args, num_envs, render_mode=None):
    """Environments for evaluation and videos: Gymnasium's, or gymnax's where it has none."""
    env_id = import_env_id(args)
    if env_id in gymnax.registered_envs and env_id not in gym.registry:

        def make_env():
            env = GymnaxToGymWrapper(*gymnax.make(env_id))
            return gym.wrappers.RecordEpisodeStatistics(env)

        return gym.vector.SyncVectorEnv([make_env] * num_envs)
    return gym.make_vec(
        env_id,
        num_envs,
        "sync",
        wrappers=[gym.wrappers.RecordEpisodeStatistics],
        render_mode=render_mode,
    )


def make_gymnax_steps(args):
    """The environments inside the compiled program: functions to reset, draw and step."""
    env, env_params = gymnax.make(import_env_id(args))

    def reset(keys):
        return jax.vmap(env.reset_env, (0, None))(keys, env_params)

    def draw(key, shape):
        """Keys for steps, and the states that new episodes start from, all at once."""
        step_keys, reset_keys = jax.random.split(key, (2, math.prod(shape)))
        drawn = step_keys, reset(reset_keys[:: args.reset_ratio])
        return jax.tree.map(lambda x: x.reshape(shape[0], -1, *x.shape[1:]), drawn)

    def step(drawn, env_state, actions):
        """A finished episode is followed by a new one in the same step."""
        step_keys, fresh = drawn
        step_envs = jax.vmap(env.step_env, (0, 0, 0, None))
        next_obs, env_state, rewards, terminated, infos = step_envs(
            step_keys, env_state, actions, env_params
        )
        truncated = jax.vmap(env.is_truncated, (0, None))(env_state, env_params)
        is_last = terminated | truncated
        if args.reset_ratio > 1:  # the n-th episode to end takes the n-th new world
            number = (jnp.cumsum(is_last) - 1) % (len(is_last) // args.reset_ratio)
            fresh = jax.tree.map(lambda x: x[number], fresh)
        choose = partial(jax.vmap(jnp.where), is_last)
        obs, env_state = jax.tree.map(choose, fresh, (next_obs, env_state))
        achieved = {name: x for name, x in infos.items() if name.startswith("Achievements/")}
        return obs, env_state, rewards, terminated, truncated, next_obs, achieved

    return reset, draw, step


def take_patches(images):
    """All 3x3 patches: a convolution as a matrix product of them trains 20 times as fast."""
    rows = [images[:, i : i - 2 or None] for i in range(3)]
    return jnp.concatenate([row[:, :, j : j - 2 or None] for row in rows for j in range(3)], -1)


class QNetwork(nn.Module):
    """Layer normalization replaces the target network [pqn 2]."""

    num_actions: int

    @nn.compact
    def __call__(self, obs):
        dense = partial(nn.Dense, kernel_init=orthogonal(2**0.5))  # [pqn 3]
        norm = partial(nn.LayerNorm, epsilon=1e-5)
        if obs.ndim == 4:  # images
            hidden = nn.relu(norm()(dense(16)(take_patches(obs))))
            hidden = nn.relu(norm()(dense(128)(hidden.reshape(len(obs), -1))))
        else:
            widths = (512, 512) if obs[0].size > 1000 else (120, 84)  # Craftax: 1,345 or 8,268
            hidden = nn.relu(norm()(dense(widths[0])(obs.reshape(len(obs), -1))))
            hidden = nn.relu(norm()(dense(widths[1])(hidden)))
        return dense(self.num_actions)(hidden)


def load_policy(checkpoint, envs):
    """The trained policy for evaluation: a function from observations to actions."""
    q_network = QNetwork(int(envs.single_action_space.n))

    @jax.jit
    def act(obs):
        return q_network.apply(checkpoint["agent"]["params"], obs.astype(jnp.float32)).argmax(1)

    def policy(obs, is_last):
        return np.asarray(act(obs)) + envs.single_action_space.start

    return policy


def make_program(args, envs):
    """The compiled functions of one run: init(key) -> run, its whole state; train(run, length).

    args may hold traced values of the float flags, which differ from run to run."""
    num_actions = int(envs.single_action_space.n)
    T, N = args.num_steps, args.num_envs
    num_iterations = args.total_timesteps // (T * N)
    exploration_steps = args.exploration_fraction * args.total_timesteps
    q_network = QNetwork(num_actions)
    reset, draw, step = make_gymnax_steps(args)

    def make_optimizer(learning_rate):
        clip = optax.clip_by_global_norm(args.max_grad_norm)  # [pqn 9]
        return optax.chain(clip, optax.radam(learning_rate))  # [pqn 7]

    def init(key):
        """The whole state of a run: agent and environments."""
        key, params_key, env_key = jax.random.split(key, 3)
        obs, env_state = reset(jax.random.split(env_key, N))  # [pqn 1]
        params = q_network.init(params_key, obs)
        opt_state = make_optimizer(args.learning_rate).init(params)
        zeros = jnp.zeros(N)
        world = dict(env_state=env_state, obs=obs, episode_return=zeros, episode_length=zeros)
        run = dict(agent=dict(params=params, opt_state=opt_state), world=world, key=key)
        return run | dict(global_step=jnp.zeros((), dtype=jnp.int32))

    def act(params, world, drawn):
        """One step of all environments; finished episodes are followed by new ones."""
        is_random, choices, env_drawn = drawn
        best_actions = q_network.apply(params, world["obs"]).argmax(1)
        actions = jnp.where(is_random, choices, best_actions)
        stepped = step(env_drawn, world["env_state"], actions)
        obs, env_state, rewards, terminated, truncated, next_obs, achieved = stepped
        is_last = terminated | truncated
        episode_return = world["episode_return"] + rewards
        episode_length = world["episode_length"] + 1
        rows = dict(
            obs=world["obs"],
            next_obs=next_obs,
            actions=actions,
            rewards=rewards,
            terminated=terminated,
            is_last=is_last,
            episode_return=episode_return,
            episode_length=episode_length,
            achieved=achieved,
        )
        world = dict(
            env_state=env_state,
            obs=obs,
            episode_return=episode_return * ~is_last,
            episode_length=episode_length * ~is_last,
        )
        return world, rows

    def value(params, obs):
        flat_obs = obs.reshape(T * N, *obs.shape[2:])
        return q_network.apply(params, flat_obs).max(1).reshape(T, N)

    def estimate(next_values, rewards, terminated, is_last):
        """Targets [pqn 5]; truncated episodes are bootstrapped, terminated ones are not."""

        def accumulate(target, row):
            next_value, reward, terminated, is_last = row
            mixed = args.q_lambda * target + (1 - args.q_lambda) * next_value
            next_value = jnp.where(is_last, next_value, mixed)
            target = reward + args.gamma * next_value * ~terminated
            return target, target

        rows = next_values, rewards, terminated, is_last
        _, targets = jax.lax.scan(accumulate, next_values[-1], rows, reverse=True)
        return targets

    def q_loss(params, mb):
        q_values = q_network.apply(params, mb["obs"])
        q_values = jnp.take_along_axis(q_values, mb["actions"][:, None], 1).squeeze(1)
        td_loss = jnp.square(q_values - mb["targets"]).mean()
        return td_loss, {"td_loss": td_loss, "q_values": q_values.mean()}

    def learn(optimizer, agent_state, mb):
        grads, losses = jax.grad(q_loss, has_aux=True)(agent_state["params"], mb)
        updates, opt_state = optimizer.update(grads, agent_state["opt_state"])
        params = optax.apply_updates(agent_state["params"], updates)
        return dict(params=params, opt_state=opt_state), losses

    def iterate(run, _):
        iteration = run["global_step"] // (T * N)
        learning_rate = args.learning_rate
        if args.anneal_lr:  # [pqn 8]
            learning_rate *= 1 - iteration / num_iterations
        agent_state = run["agent"]
        params = agent_state["params"]
        key, chance_key, choice_key, env_key, order_key = jax.random.split(run["key"], 5)

        # act epsilon-greedily [pqn 4]; all random numbers of a rollout are drawn at once
        explored = (run["global_step"] + N * jnp.arange(T)) / exploration_steps
        epsilon = args.start_e + jnp.minimum(1, explored) * (args.end_e - args.start_e)
        is_random = jax.random.uniform(chance_key, (T, N)) < epsilon[:, None]
        choices = jax.random.randint(choice_key, (T, N), 0, num_actions)
        drawn = is_random, choices, draw(env_key, (T, N))
        world, rows = jax.lax.scan(partial(act, params), run["world"], drawn)

        # estimate targets
        next_values = value(params, rows["next_obs"])
        targets = estimate(next_values, rows["rewards"], rows["terminated"], rows["is_last"])

        # learn
        rollout = dict(obs=rows["obs"], actions=rows["actions"], targets=targets)
        batch = jax.tree.map(lambda x: x.reshape(T * N, *x.shape[2:]), rollout)
        order_keys = jax.random.split(order_key, args.update_epochs)
        orders = jax.vmap(jax.random.permutation, (0, None))(order_keys, T * N)  # [pqn 6]
        orders = orders.reshape(args.update_epochs * args.num_minibatches, -1)
        minibatches = jax.tree.map(lambda x: x[orders], batch)
        optimizer = make_optimizer(learning_rate)
        agent_state, losses = jax.lax.scan(partial(learn, optimizer), agent_state, minibatches)
        checked = dict(
            observation=rows["next_obs"], reward=rows["rewards"], td_loss=losses["td_loss"]
        )
        checked = jax.tree.map(lambda x: jnp.abs(x).max(), checked)  # finite if all of it is
        metrics = {f"losses/{name}": x[-1] for name, x in losses.items()} | {
            "charts/learning_rate": learning_rate,
            "charts/epsilon": epsilon[-1],
        }
        run = dict(agent=agent_state, world=world, key=key, global_step=run["global_step"] + T * N)
        episodes = rows["is_last"], rows["episode_return"], rows["episode_length"]
        return run, (metrics, checked, episodes, jax.tree.map(jnp.sum, rows["achieved"]))

    def train(run, length):
        """Some iterations, with the metrics of the last one and all episodes."""
        run, (metrics, checked, episodes, achieved) = jax.lax.scan(iterate, run, None, length)
        metrics = jax.tree.map(lambda x: x[-1], metrics)
        metrics |= {name: x.sum() / episodes[0].sum() for name, x in achieved.items()}
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
        obs_space, action_space = envs.single_observation_space, envs.single_action_space
        require(isinstance(action_space, gym.spaces.Discrete), "Discrete actions are needed")
        require_envs(args, envs)
        init, _ = make_program(args, envs)
        num_rows = num_runs * T * N * (2 + args.update_epochs)
        require_memory(4 * num_rows * math.prod(obs_space.shape))

    keys = jnp.stack([seed_everything(run_args) for run_args in all_args])
    params = jax.eval_shape(init, keys[0])["agent"]["params"]
    work = num_runs * N * sum(x.size for x in jax.tree.leaves(params))  # multiplications per step
    use_gpu = args.cuda and work >= 2**17
    device = jax.devices()[0] if use_gpu else jax.devices("cpu")[0]
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
        _, train = make_program(replace(args, **values), envs)
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
        # act, estimate targets and learn, in one call of the program
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
