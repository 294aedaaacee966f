# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "filelock>=3.20", "flax>=0.12", "gymnasium[classic-control]>=1.2.1,<2", "gymnax>=1.0",
#     "jax>=0.9", "moviepy>=2", "numpy>=2", "optax>=0.2.6", "psutil>=7", "pydantic>=2.11", "six",
#     "tensorboard>=2.20", "tqdm>=4.67", "tyro>=1.0", "wandb>=0.22",
# ]
# ///
"""Categorical DQN (C51) as one compiled program, for vector observations and discrete actions.

    uv run cleanrl/c51_jax.py                                # CartPole-v1, to a return near 500
    uv run cleanrl/c51_jax.py --env-id Breakout-MinAtar      # gymnax environments are compiled too
    uv run cleanrl/c51_jax.py --no-gymnax                    # Gymnasium environments are called
    uv run cleanrl/c51_jax.py --resume runs/<run>            # continue an interrupted run
    tensorboard --logdir runs

Tags such as [c51 2] refer to the implementation details in docs/rl-algorithms/{c51,dqn}.md.
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
from contextlib import contextmanager, suppress
from contextvars import Context
from dataclasses import asdict, dataclass
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
from flax.serialization import from_state_dict, msgpack_restore, msgpack_serialize, to_state_dict
from gymnax.wrappers.gym import GymnaxToGymWrapper
from jax.experimental import io_callback
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from tqdm import tqdm


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment
    seed: int = 1  # random seed of the weights, the environments and all sampling
    cuda: bool = True  # use a GPU if the networks are large enough to benefit from it
    track: bool = False  # log to Weights & Biases as well
    wandb_project_name: str = "cleanRL"  # W&B project
    wandb_entity: str | None = None  # W&B team
    capture_video: bool = False  # record the first environment to runs/<run>/videos
    resume: str | None = None  # folder of an interrupted run to continue with its own flags
    checkpoint_interval: int = 50_000  # environment steps between checkpoints
    checkpoint_buffer: bool = True  # save the replay buffer; otherwise a resumed run refills it

    env_id: str = "CartPole-v1"  # gymnax or Gymnasium environment id
    gymnax: bool = True  # compile the gymnax environment of this id if there is one
    total_timesteps: int = 500_000  # environment steps of the whole run
    learning_rate: float = 2.5e-4  # learning rate of Adam
    num_envs: int = 1  # parallel environments
    n_atoms: int = 101  # number of atoms of the return distribution
    v_min: float = -100.0  # smallest atom
    v_max: float = 100.0  # largest atom
    buffer_size: int = 10_000  # capacity of the replay buffer in environment steps
    gamma: float = 0.99  # discount factor
    target_network_frequency: int = 500  # environment steps between target network updates
    batch_size: int = 128  # transitions per update
    start_e: float = 1.0  # initial epsilon of epsilon-greedy exploration
    end_e: float = 0.05  # final epsilon
    exploration_fraction: float = 0.5  # fraction of the run over which epsilon is annealed
    learning_starts: int = 10_000  # environment steps before the first update
    train_frequency: int = 10  # environment steps between updates

    def check(self):
        """Reject invalid flags before anything is written."""
        require_positive(self, "num_envs", "batch_size", "train_frequency", "learning_rate")
        require_positive(self, "target_network_frequency", "checkpoint_interval")
        require_positive(self, "exploration_fraction", "learning_starts")
        require_fraction(self, "gamma", "start_e", "end_e", "exploration_fraction")
        require(self.n_atoms > 1, "n_atoms must be at least 2")
        require(self.v_min < self.v_max, "v_min must be less than v_max")
        large, small = sorted([self.train_frequency, self.num_envs], reverse=True)
        require(large % small == 0, "one of num_envs and train_frequency must divide the other")
        require(large <= self.total_timesteps < 2**31, f"total_timesteps: {large} to 2**31 - 1")
        require(self.buffer_size >= self.num_envs, "buffer_size is less than num_envs")


def make_envs(args, num_envs, render_mode=None, autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP):
    if args.env_id in gymnax.registered_envs and args.env_id not in gym.registry:

        def make_env():
            env = GymnaxToGymWrapper(*gymnax.make(args.env_id))
            return gym.wrappers.RecordEpisodeStatistics(env)

        return gym.vector.SyncVectorEnv([make_env] * num_envs)
    return gym.make_vec(
        args.env_id,
        num_envs,
        "sync",
        vector_kwargs={"autoreset_mode": autoreset_mode},
        wrappers=[gym.wrappers.RecordEpisodeStatistics],
        render_mode=render_mode,
    )


def is_compiled(args):
    """Whether to compile gymnax's environment into the program; videos need Gymnasium's."""
    if args.env_id not in gymnax.registered_envs:
        return False
    return args.env_id not in gym.registry or (args.gymnax and not args.capture_video)


def make_gymnax_steps(args):
    """The environments inside the compiled program: functions to reset, draw and step."""
    env, env_params = gymnax.make(args.env_id)

    def reset(keys):
        return jax.vmap(env.reset_env, (0, None))(keys, env_params)

    def draw(key, shape):
        """Keys for steps, and the states that new episodes start from, all at once."""
        step_keys, reset_keys = jax.random.split(key, (2, math.prod(shape)))
        drawn = step_keys, reset(reset_keys)
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), drawn)

    def step(drawn, env_state, actions):
        """A finished episode is followed by a new one in the same step."""
        step_keys, fresh = drawn
        step_envs = jax.vmap(env.step_env, (0, 0, 0, None))
        next_obs, env_state, rewards, terminated, _ = step_envs(
            step_keys, env_state, actions, env_params
        )
        truncated = jax.vmap(env.is_truncated, (0, None))(env_state, env_params)
        choose = partial(jax.vmap(jnp.where), terminated | truncated)
        obs, env_state = jax.tree.map(choose, fresh, (next_obs, env_state))
        return obs, env_state, rewards, terminated, truncated, next_obs

    return reset, draw, step


def make_gymnasium_steps(args, envs):
    """The same functions for Gymnasium environments, which the compiled program calls."""

    def reset(keys):
        obs, _ = envs.reset(seed=int(keys[0, 0] >> 1))
        return jnp.asarray(obs, dtype=jnp.float32), ()

    def draw(key, shape):
        return ()

    def call_envs(actions):
        actions = np.asarray(actions) + envs.single_action_space.start
        next_obs, rewards, terminated, truncated, _ = envs.step(actions)
        obs, is_last = next_obs, terminated | truncated
        if is_last.any():
            obs, _ = envs.reset(options={"reset_mask": is_last})
        rewards = rewards.astype(np.float32)
        return obs.astype(np.float32), rewards, terminated, truncated, next_obs.astype(np.float32)

    def step(drawn, env_state, actions):
        obs = np.zeros((args.num_envs, *envs.single_observation_space.shape), dtype=np.float32)
        rewards = np.zeros(args.num_envs, dtype=np.float32)
        flags = np.zeros(args.num_envs, dtype=bool)
        results = obs, rewards, flags, flags, obs
        obs, *answers = io_callback(call_envs, results, actions, ordered=True)
        return obs, env_state, *answers

    return reset, draw, step


class QNetwork(nn.Module):
    """The distribution of the return of each action, over the same atoms [c51 1]."""

    num_actions: int
    n_atoms: int

    @nn.compact
    def __call__(self, obs):
        """Log-probabilities of the atoms, for each action."""
        hidden = nn.relu(nn.Dense(120)(obs.reshape(len(obs), -1)))
        hidden = nn.relu(nn.Dense(84)(hidden))
        logits = nn.Dense(self.num_actions * self.n_atoms)(hidden)
        return nn.log_softmax(logits.reshape(-1, self.num_actions, self.n_atoms))


def mean_returns(log_pmfs, atoms):
    """Q-values: the means of the distributions."""
    return (jnp.exp(log_pmfs) * atoms).sum(-1)


def project(pmfs, returns, atoms):
    """Split the probability of each return linearly between the two nearest atoms [c51 2]."""
    v_min, v_max = atoms[0], atoms[-1]
    positions = (returns.clip(v_min, v_max) - v_min) / (v_max - v_min) * (len(atoms) - 1)
    below = positions.astype(jnp.int32)
    above = (below + 1).clip(max=len(atoms) - 1)
    share_above = positions - below
    index = jnp.arange(len(pmfs))[:, None]
    projected = jnp.zeros_like(pmfs).at[index, below].add(pmfs * (1 - share_above))
    return projected.at[index, above].add(pmfs * share_above)


def load_policy(checkpoint, envs):
    """The trained policy for evaluation: a function from observations to actions."""
    params, atoms = checkpoint["agent"]["params"], checkpoint["agent"]["atoms"]
    q_network = QNetwork(int(envs.single_action_space.n), len(atoms))

    @jax.jit
    def best_actions(obs):
        log_pmfs = q_network.apply(params, obs.astype(jnp.float32))
        return mean_returns(log_pmfs, atoms).argmax(1)

    def policy(obs, is_last):
        return np.asarray(best_actions(obs)) + envs.single_action_space.start

    return policy


def make_program(args, envs):
    """The compiled functions: init(key, step) -> run, its whole state; train(run, length)."""
    num_actions = int(envs.single_action_space.n)
    N = args.num_envs
    num_rows = args.buffer_size // N
    num_steps = max(1, args.train_frequency // N)  # between updates [dqn 5]
    num_updates = max(1, N // args.train_frequency)  # between steps
    q_network = QNetwork(num_actions, args.n_atoms)
    optimizer = optax.adam(args.learning_rate, eps=0.01 / args.batch_size)  # [c51 4]
    atoms = jnp.linspace(args.v_min, args.v_max, args.n_atoms)
    steps = make_gymnax_steps(args) if is_compiled(args) else make_gymnasium_steps(args, envs)
    reset, draw, step = steps

    def init(key, global_step):
        """The whole state of a run: agent, environments and replay buffer [dqn 1]."""
        key, params_key, env_key = jax.random.split(key, 3)
        reset_keys = jax.random.split(jax.random.fold_in(env_key, global_step), N)
        obs, env_state = reset(reset_keys)
        params = q_network.init(params_key, obs)
        agent = dict(params=params, target_params=params, opt_state=optimizer.init(params))
        agent["atoms"] = atoms
        transition = dict(
            obs=obs,
            actions=jnp.zeros(N, dtype=jnp.int32),
            rewards=jnp.zeros(N),
            next_obs=obs,
            terminated=jnp.zeros(N, dtype=bool),
        )
        buffer = jax.tree.map(lambda x: jnp.zeros((num_rows, *x.shape), x.dtype), transition)
        zeros, zero = jnp.zeros(N), jnp.zeros((), dtype=jnp.int32)
        world = dict(env_state=env_state, obs=obs, episode_return=zeros, episode_length=zeros)
        run = dict(agent=agent, world=world, buffer=buffer, added=zero, global_step=zero, key=key)
        return jax.tree.map(jnp.copy, run)  # no two arrays share memory: train reuses it

    def act(run, drawn):
        """One step of all environments, epsilon-greedily [dqn 3], into the replay buffer."""
        world, agent = run["world"], run["agent"]
        chances, choices, env_drawn = drawn
        explored = run["global_step"] / (args.exploration_fraction * args.total_timesteps)
        epsilon = args.start_e + jnp.minimum(1, explored) * (args.end_e - args.start_e)
        q_values = mean_returns(q_network.apply(agent["params"], world["obs"]), atoms)
        actions = jnp.where(chances < epsilon, choices, q_values.argmax(1))
        stepped = step(env_drawn, world["env_state"], actions)
        obs, env_state, rewards, terminated, truncated, next_obs = stepped
        transition = dict(
            obs=world["obs"],
            actions=actions,
            rewards=rewards,
            next_obs=next_obs,
            terminated=terminated,
        )
        row = run["added"] // N % num_rows
        buffer = {name: run["buffer"][name].at[row].set(x) for name, x in transition.items()}
        is_last = terminated | truncated
        episode_return = world["episode_return"] + rewards
        episode_length = world["episode_length"] + 1
        world = dict(
            env_state=env_state,
            obs=obs,
            episode_return=episode_return * ~is_last,
            episode_length=episode_length * ~is_last,
        )
        run = run | dict(world=world, buffer=buffer, added=run["added"] + N)
        run = run | dict(global_step=run["global_step"] + N)
        return run, (is_last, episode_return, episode_length, next_obs)

    def learn(buffer, agent, rows):
        """One update [dqn 4]; truncated episodes are bootstrapped, terminated ones are not."""
        b = jax.tree.map(lambda column: column.reshape(-1, *column.shape[2:])[rows], buffer)
        index = jnp.arange(args.batch_size)
        next_pmfs = jnp.exp(q_network.apply(agent["target_params"], b["next_obs"]))
        next_actions = (next_pmfs * atoms).sum(-1).argmax(1)
        returns = b["rewards"][:, None] + args.gamma * atoms * ~b["terminated"][:, None]
        target_pmfs = project(next_pmfs[index, next_actions], returns, atoms)

        def cross_entropy(params):  # [c51 3]
            log_pmfs = q_network.apply(params, b["obs"])[index, b["actions"]]
            return -(target_pmfs * log_pmfs).sum(-1).mean(), mean_returns(log_pmfs, atoms).mean()

        losses, grads = jax.value_and_grad(cross_entropy, has_aux=True)(agent["params"])
        updates, opt_state = optimizer.update(grads, agent["opt_state"])
        params = optax.apply_updates(agent["params"], updates)
        return agent | dict(params=params, opt_state=opt_state), losses

    def skip(agent, rows):
        return agent, (jnp.zeros(num_updates), jnp.zeros(num_updates))

    def iterate(run, drawn):
        """A few environment steps, the updates that are due, perhaps one of the target network."""
        act_drawn, row_bits = drawn
        run, episodes = jax.lax.scan(act, run, act_drawn)

        num_filled = jnp.minimum(run["added"], num_rows * N).astype(jnp.uint32)
        rows = row_bits % num_filled  # drawn uniformly [dqn 2]
        is_learning = run["added"] >= args.learning_starts
        learn_all = partial(jax.lax.scan, partial(learn, run["buffer"]))
        agent, losses = jax.lax.cond(is_learning, learn_all, skip, run["agent"], rows)

        is_due = run["global_step"] % args.target_network_frequency < num_steps * N
        choose = partial(jnp.where, is_learning & is_due)
        target_params = jax.tree.map(choose, agent["params"], agent["target_params"])
        agent = agent | dict(target_params=target_params)  # [dqn 6]
        return run | dict(agent=agent), (episodes, losses)

    def train(run, length):
        """Some iterations. All random numbers are drawn at once, which is 10% faster."""
        key, chance_key, choice_key, env_key, batch_key = jax.random.split(run["key"], 5)
        shape = (length, num_steps, N)
        chances = jax.random.uniform(chance_key, shape)
        choices = jax.random.randint(choice_key, shape, 0, num_actions)
        act_drawn = chances, choices, draw(env_key, shape)
        row_bits = jax.random.bits(batch_key, (length, num_updates, args.batch_size))
        return jax.lax.scan(iterate, run | dict(key=key), (act_drawn, row_bits))

    return init, train


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
    with explain(f"train on {args.env_id}"):
        disabled = gym.vector.AutoresetMode.DISABLED  # the program resets
        render_mode = "rgb_array" if args.capture_video else None
        envs = make_envs(args, args.num_envs, render_mode, disabled)
        obs_space, action_space = envs.single_observation_space, envs.single_action_space
        require(isinstance(obs_space, gym.spaces.Box), "Box observations are needed")
        require(isinstance(action_space, gym.spaces.Discrete), "Discrete actions are needed")
        require_envs(args, envs, envs.metadata["autoreset_mode"])
        require_memory(8 * args.buffer_size * math.prod(obs_space.shape))

    key = seed_everything(args)
    inputs = args.batch_size * np.prod(obs_space.shape)  # numbers read at an update
    use_gpu = args.cuda and inputs >= 2**19  # small networks are faster on a CPU
    device = jax.devices()[0] if use_gpu else jax.devices("cpu")[0]
    jax.config.update("jax_default_device", device)
    iteration_steps = max(args.num_envs, args.train_frequency)
    num_iterations = args.total_timesteps // iteration_steps
    init, train = make_program(args, envs)
    run = init(key, 0)
    saved_names = ["agent", "global_step", "key"]
    if args.checkpoint_buffer:
        saved_names += ["buffer", "added"]
    if is_compiled(args):  # the state of Gymnasium's environments cannot be saved
        saved_names += ["world"]
    saved = {name: run[name] for name in saved_names}
    saved, global_step = restore_checkpoint(args, saved)
    if global_step:
        run = init(key, global_step) | saved
    start_step = global_step
    run_folder, writer = open_run(args, device, global_step)
    if args.capture_video:
        envs = RecordVideo(envs, run_folder / "videos", global_step)
        _, train = make_program(args, envs)
    train = jax.jit(train, static_argnames="length", donate_argnums=0)
    iteration = global_step // iteration_steps
    total = num_iterations * iteration_steps
    start_time = time.time()
    progress = tqdm(initial=global_step, total=total, unit="step", unit_scale=True)

    while iteration < num_iterations:
        # act and learn, a hundred iterations in one call of the program
        length = min(100, num_iterations - iteration)
        run, logs = train(run, length=length)
        iteration += length
        episodes, updates = jax.tree.map(np.ravel, logs)
        is_last, returns, lengths, next_obs = episodes
        losses, q_values = updates
        for i in np.flatnonzero(is_last):
            episode = {"charts/episodic_return": returns[i], "charts/episodic_length": lengths[i]}
            writer.add_scalars(global_step + i + 1, episode)
            progress.set_postfix(episodic_return=f"{returns[i]:.1f}", refresh=False)
        global_step += length * iteration_steps
        check_finite(args, global_step, observation=next_obs, reward=returns)
        progress.update(length * iteration_steps)

        # log
        if int(run["added"]) >= args.learning_starts:
            check_finite(args, global_step, loss=losses[-1])
            exploration_steps = args.exploration_fraction * args.total_timesteps
            epsilon = np.interp(global_step, (0, exploration_steps), (args.start_e, args.end_e))
            scalars = {
                "charts/epsilon": epsilon,
                "charts/SPS": int((global_step - start_step) / (time.time() - start_time)),
                "losses/loss": losses[-1],
                "losses/q_values": q_values[-1],
            }
            writer.add_scalars(global_step, scalars)
        is_due = global_step % args.checkpoint_interval < length * iteration_steps
        if is_due or iteration == num_iterations or interrupted.is_set():
            if args.track:
                writer.add_videos(run_folder, global_step)
            saved = {name: run[name] for name in saved_names}
            save_checkpoint(run_folder, saved, global_step)

    progress.close()
    envs.close()
    writer.close()
