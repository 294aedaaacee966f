# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "dm-control>=1.0.30; python_version < '3.13'", "filelock>=3.20", "flax>=0.12",
#     "gymnasium[mujoco]>=1.2.1,<2", "jax>=0.9", "moviepy>=2", "mujoco>=3.3,<4", "numpy>=2",
#     "optax>=0.2.6", "psutil>=7", "pydantic>=2.11",
#     "shimmy[dm-control]>=2.0.1; python_version < '3.13'", "tensorboard>=2.20", "tqdm>=4.67",
#     "tyro>=1.0", "wandb>=0.22",
# ]
# ///
"""Truncated Quantile Critics (TQC) for vector observations and continuous actions, in JAX.

    uv run cleanrl/tqc_continuous_action_jax.py                      # Hopper-v4, 1M steps
    uv run cleanrl/tqc_continuous_action_jax.py --env-id dm_control/cartpole-balance-v0 --seed 2
    uv run cleanrl/tqc_continuous_action_jax.py --resume runs/<run>  # continue an interrupted run
    tensorboard --logdir runs

Tags such as [tqc 2] refer to the details in docs/rl-algorithms/{tqc,sac,td3,ddpg}.md.
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
import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
import tyro
from filelock import FileLock, Timeout
from flax.serialization import from_state_dict, msgpack_restore, msgpack_serialize, to_state_dict
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from tqdm import tqdm


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment
    seed: int = 1  # random seed of the weights, the environments and all sampling
    cuda: bool = True  # use a GPU if there is one
    track: bool = False  # log to Weights & Biases as well
    wandb_project_name: str = "cleanRL"  # W&B project
    wandb_entity: str | None = None  # W&B team
    capture_video: bool = False  # record the first environment to runs/<run>/videos
    resume: str | None = None  # folder of an interrupted run to continue with its own flags
    checkpoint_interval: int = 50_000  # environment steps between checkpoints
    checkpoint_buffer: bool = False  # save the replay buffer; otherwise a resumed run refills it

    env_id: str = "Hopper-v4"  # Gymnasium environment id
    total_timesteps: int = 1_000_000  # environment steps of the whole run
    learning_rate: float = 3e-4  # learning rate of Adam
    num_envs: int = 1  # parallel environments
    buffer_size: int = 1_000_000  # capacity of the replay buffer in environment steps
    gamma: float = 0.99  # discount factor
    tau: float = 0.005  # target network update rate
    batch_size: int = 256  # transitions per update
    utd: int = 1  # updates per environment step
    learning_starts: int = 5_000  # environment steps with random actions before the first update
    num_critics: int = 5  # number of Q-networks
    num_quantiles: int = 25  # quantiles of the return per Q-network
    drop_quantiles: int = 5  # highest dropped per critic; paper: Hopper 5, HalfCheetah 0, others 2

    def check(self):
        """Reject invalid flags before anything is written."""
        require_positive(self, "num_envs", "batch_size", "utd", "num_critics", "learning_rate")
        require_positive(self, "learning_starts", "checkpoint_interval", "num_quantiles")
        require_fraction(self, "gamma", "tau")
        some = 0 <= self.drop_quantiles < self.num_quantiles
        require(some, f"drop_quantiles must be between 0 and {self.num_quantiles - 1}")
        require(self.buffer_size >= self.num_envs, "buffer_size is less than num_envs")
        require(self.total_timesteps >= self.num_envs, "total_timesteps is less than num_envs")
        num_updates = self.total_timesteps * self.utd
        require(num_updates < 2**31, "total_timesteps times utd must be less than 2**31")


def make_envs(args, num_envs, render_mode=None):
    env_id = re.sub("^dm_control/", "shimmy:dm_control/", args.env_id)  # shimmy registers them
    wrappers = [gym.wrappers.FlattenObservation, gym.wrappers.RecordEpisodeStatistics]
    return gym.make_vec(env_id, num_envs, "sync", wrappers=wrappers, render_mode=render_mode)


def rescale(actions, space):
    """Rescale actions from [-1, 1], as in networks and replay buffer, to their bounds [ddpg 1]."""
    share = (actions.reshape(-1, *space.shape) + 1) / 2
    scaled = space.low * (1 - share) + space.high * share  # high - low may overflow
    return scaled.clip(space.low, space.high)  # rounding may exceed them


class Actor(nn.Module):
    action_dim: int

    @nn.compact
    def __call__(self, obs):
        hidden = nn.relu(nn.Dense(256)(obs))
        hidden = nn.relu(nn.Dense(256)(hidden))
        mean = nn.Dense(self.action_dim)(hidden)
        log_std = nn.Dense(self.action_dim)(hidden)
        return mean, -5 + 3.5 * (1 + nn.tanh(log_std))  # between -5 and 2 [sac 2]


def sample(mean, log_std, key):
    """Actions from a tanh-squashed Gaussian [sac 1], and their log-densities."""
    noise = jax.random.normal(key, mean.shape)
    unsquashed = mean + jnp.exp(log_std) * noise
    # the slope of tanh is 1 - tanh^2; this form of its logarithm does not underflow
    log_slopes = 2 * (math.log(2) - unsquashed - nn.softplus(-2 * unsquashed))
    log_probs = -(jnp.square(noise) + math.log(2 * math.pi)) / 2 - log_std - log_slopes
    return jnp.tanh(unsquashed), log_probs.sum(1)


class QNetwork(nn.Module):
    """Quantiles of the return instead of its mean."""

    num_quantiles: int

    @nn.compact
    def __call__(self, obs, actions):
        hidden = jnp.concatenate([obs, actions], 1)
        for _ in range(3):
            hidden = nn.relu(nn.Dense(512)(hidden))
        return nn.Dense(self.num_quantiles)(hidden)  # [tqc 1]


def make_q_networks(args):
    """Several Q-networks that are computed as one, with a stack of matrices per layer."""
    stacked = dict(variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None)
    QNetworks = nn.vmap(QNetwork, **stacked, axis_size=args.num_critics)
    return QNetworks(args.num_quantiles)


def count_due(every, global_step, num_envs):
    """How many multiples of `every` lie in the last num_envs environment steps."""
    return global_step // every - (global_step - num_envs) // every


def load_policy(checkpoint, envs):
    """The trained policy for evaluation: a function from observations to actions."""
    action_space = envs.single_action_space
    actor = Actor(math.prod(action_space.shape))

    @jax.jit
    def best_actions(obs):
        mean, _ = actor.apply(checkpoint["agent"]["actor"], obs)
        return jnp.tanh(mean)

    def policy(obs, is_last):
        return rescale(np.asarray(best_actions(obs)), action_space)

    return policy


def make_program(args, envs, key):
    """The functions of a run: init() -> agent and replay buffer; act, remember, learn."""
    obs_dim = math.prod(envs.single_observation_space.shape)
    action_dim = math.prod(envs.single_action_space.shape)
    num_updates = args.num_envs * args.utd  # per step of all environments
    actor_key, q_key, act_key, learn_key = jax.random.split(key, 4)
    actor = Actor(action_dim)
    q_networks = make_q_networks(args)
    num_kept = args.num_critics * (args.num_quantiles - args.drop_quantiles)
    target_entropy = -action_dim  # [sac 5]
    optimizer = optax.adam(args.learning_rate)

    def init():
        obs, actions = jnp.zeros((1, obs_dim)), jnp.zeros((1, action_dim))
        actor_params = actor.init(actor_key, obs)
        q_params = q_networks.init(q_key, obs, actions)
        log_alpha = jnp.array(0.0)
        agent = dict(
            actor=actor_params,
            q_networks=q_params,
            target_q_networks=q_params,
            log_alpha=log_alpha,
            actor_optimizer=optimizer.init(actor_params),
            q_networks_optimizer=optimizer.init(q_params),
            log_alpha_optimizer=optimizer.init(log_alpha),
        )
        buffer = dict(  # a ring buffer of the last transitions [ddpg 2]
            obs=jnp.zeros((args.buffer_size, obs_dim)),
            actions=jnp.zeros((args.buffer_size, action_dim)),
            rewards=jnp.zeros(args.buffer_size),
            next_obs=jnp.zeros((args.buffer_size, obs_dim)),
            terminated=jnp.zeros(args.buffer_size, dtype=bool),
            added=jnp.zeros((), dtype=jnp.int32),  # added in total
        )
        agent = jax.tree.map(jnp.copy, agent)  # no two arrays share memory: learn reuses it
        return dict(agent=agent, buffer=buffer)

    @jax.jit
    def act(params, obs, global_step):
        """Actions from the stochastic policy."""
        key = jax.random.fold_in(act_key, global_step)
        actions, _ = sample(*actor.apply(params, obs), key)
        return actions

    @partial(jax.jit, donate_argnums=0)  # in place
    def remember(buffer, transitions, is_real):
        """Add the real transitions; the others get a row out of range, which JAX drops."""
        rows = (buffer["added"] + jnp.cumsum(is_real) - 1) % args.buffer_size
        rows = jnp.where(is_real, rows, args.buffer_size)
        columns = {
            name: buffer[name].at[rows].set(values, mode="drop")
            for name, values in transitions.items()
        }
        return columns | dict(added=buffer["added"] + is_real.sum())

    def sample_batch(buffer, key):
        """Uniformly drawn transitions."""
        num_filled = jnp.minimum(buffer["added"], args.buffer_size)
        rows = jax.random.randint(key, (args.batch_size,), 0, num_filled)
        return {name: column[rows] for name, column in buffer.items() if name != "added"}

    def minimize(loss, agent, name):
        """One step of Adam on agent[name]; loss returns its value and the metrics to log."""
        (_, logs), grads = jax.value_and_grad(loss, has_aux=True)(agent[name])
        updates, opt_state = optimizer.update(grads, agent[f"{name}_optimizer"])
        params = optax.apply_updates(agent[name], updates)
        return agent | {name: params, f"{name}_optimizer": opt_state}, logs

    def update_q_networks(agent, b, key):
        """Truncated episodes are bootstrapped, terminated ones are not [ddpg 4]."""
        next_actions, next_log_probs = sample(*actor.apply(agent["actor"], b["next_obs"]), key)
        quantiles = q_networks.apply(agent["target_q_networks"], b["next_obs"], next_actions)
        quantiles = jnp.moveaxis(quantiles, 0, 1).reshape(args.batch_size, -1)
        next_quantiles = jnp.sort(quantiles)[:, :num_kept]  # of all Q-networks together [tqc 2]
        alpha = jnp.exp(agent["log_alpha"])
        next_values = next_quantiles - alpha * next_log_probs[:, None]  # [sac 3]
        targets = b["rewards"][:, None] + args.gamma * next_values * ~b["terminated"][:, None]

        def qf_loss(params):
            quantiles = q_networks.apply(params, b["obs"], b["actions"])
            taus = (jnp.arange(args.num_quantiles) + 0.5) / args.num_quantiles
            errors = targets[:, None, :] - quantiles[..., None]  # Q-network, row, quantile, target
            weights = jnp.abs(taus[:, None] - (errors < 0))
            hubers = weights * optax.losses.huber_loss(errors)  # [tqc 3]
            loss = hubers.mean((1, 2, 3)).sum()
            return loss, {"qf_loss": loss / args.num_critics, "qf_values": quantiles.mean()}

        return minimize(qf_loss, agent, "q_networks")

    def update_actor(agent, obs, key):
        """One update of the actor and the temperature."""
        alpha = jnp.exp(agent["log_alpha"])

        def actor_loss(params):
            actions, log_probs = sample(*actor.apply(params, obs), key)
            q_values = q_networks.apply(agent["q_networks"], obs, actions)
            loss = (alpha * log_probs).mean() - q_values.mean()
            return loss, (loss, log_probs)

        def alpha_loss(log_alpha):
            loss = -(jnp.exp(log_alpha) * (log_probs + target_entropy)).mean()
            return loss, loss

        agent, (loss, log_probs) = minimize(actor_loss, agent, "actor")
        losses = {"actor_loss": loss, "alpha": alpha}
        agent, losses["alpha_loss"] = minimize(alpha_loss, agent, "log_alpha")
        return agent, losses

    def update_targets(agent):
        """Soft update of the target networks with rate tau [ddpg 6]."""
        networks, targets = agent["q_networks"], agent["target_q_networks"]
        targets = optax.incremental_update(networks, targets, args.tau)
        return agent | dict(target_q_networks=targets)

    @partial(jax.jit, donate_argnums=0)  # in place
    def learn(agent, buffer, first_update):
        """The updates after one step of all environments."""

        def update(agent, number):
            keys = jax.random.split(jax.random.fold_in(learn_key, number), 3)
            batch_key, next_key, actor_key = keys
            b = sample_batch(buffer, batch_key)
            agent, q_losses = update_q_networks(agent, b, next_key)
            agent, actor_losses = update_actor(agent, b["obs"], actor_key)
            agent = update_targets(agent)
            return agent, q_losses | actor_losses

        agent, losses = jax.lax.scan(update, agent, first_update + jnp.arange(num_updates))
        return agent, jax.tree.map(lambda x: x[-1], losses)

    return init, act, remember, learn


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
        envs = make_envs(args, args.num_envs, "rgb_array" if args.capture_video else None)
        obs_space, action_space = envs.single_observation_space, envs.single_action_space
        require(isinstance(obs_space, gym.spaces.Box), "Box observations are needed")
        is_continuous = isinstance(action_space, gym.spaces.Box) and action_space.dtype.kind == "f"
        is_bounded = is_continuous and action_space.is_bounded()
        require(is_bounded, "continuous and bounded Box actions are needed")
        require_envs(args, envs)
        row_bytes = 4 * (2 * math.prod(obs_space.shape) + math.prod(action_space.shape) + 1) + 1
        require_memory((args.buffer_size + args.batch_size) * row_bytes)

    key = seed_everything(args)
    device = jax.devices()[0] if args.cuda else jax.devices("cpu")[0]
    jax.config.update("jax_default_device", device)
    jax.config.update("jax_default_matmul_precision", "float32")  # a GPU would use TF32
    init, act, remember, learn = make_program(args, envs, key)
    run = init()
    saved_names = ["agent"]
    if args.checkpoint_buffer:
        saved_names += ["buffer"]
    saved = {name: run[name] for name in saved_names}
    saved, global_step = restore_checkpoint(args, saved)
    run |= saved
    start_step = global_step
    run_folder, writer = open_run(args, device, global_step)
    if args.capture_video:
        envs = RecordVideo(envs, run_folder / "videos", global_step)

    N = args.num_envs
    num_iterations = args.total_timesteps // N
    learning_start = args.learning_starts
    if not run["buffer"]["added"]:  # a run that is resumed without its buffer starts with a new one
        learning_start += global_step
    reset_seed = np.random.SeedSequence((args.seed, global_step)).generate_state(1)[0]
    obs, _ = envs.reset(seed=int(reset_seed))
    is_last = np.zeros(N, dtype=bool)  # obs ends an episode: the next step only resets
    start_time = time.time()
    progress = tqdm(initial=global_step, total=num_iterations * N, unit="step", unit_scale=True)

    for iteration in range(global_step // N, num_iterations):
        # act, at random at first
        if global_step < learning_start:
            rng = np.random.default_rng((args.seed, global_step))
            actions = 2 * rng.random((N, math.prod(action_space.shape)), np.float32) - 1
        else:
            actions = np.asarray(act(run["agent"]["actor"], obs, global_step))
        next_obs, rewards, terminated, truncated, infos = envs.step(rescale(actions, action_space))
        for i in np.flatnonzero(infos.get("_episode", ())):
            step, episode = global_step + i + 1, infos["episode"]
            scalars = {
                "charts/episodic_return": episode["r"][i],
                "charts/episodic_length": episode["l"][i],
            }
            writer.add_scalars(step, scalars)
            progress.set_postfix(episodic_return=f"{episode['r'][i]:.1f}", refresh=False)
        global_step += N
        check_finite(args, global_step, observation=next_obs, reward=rewards)
        progress.update(N)

        # remember all steps except those that only reset an environment
        transitions = dict(
            obs=obs, actions=actions, rewards=rewards, next_obs=next_obs, terminated=terminated
        )
        run["buffer"] = remember(run["buffer"], transitions, ~is_last)
        obs, is_last = next_obs, terminated | truncated

        # learn
        is_learning = global_step >= learning_start
        if is_learning:
            first_update = (global_step - N) * args.utd
            run["agent"], losses = learn(run["agent"], run["buffer"], first_update)

        # log
        if is_learning and count_due(100, global_step, N):
            check_finite(args, global_step, **losses)
            sps = int((global_step - start_step) / (time.time() - start_time))
            scalars = {f"losses/{name}": loss for name, loss in losses.items()}
            writer.add_scalars(global_step, {"charts/SPS": sps} | scalars)
        is_due = count_due(args.checkpoint_interval, global_step, N)
        if is_due or iteration + 1 == num_iterations or interrupted.is_set():
            if args.track:
                writer.add_videos(run_folder, global_step)
            saved = {name: run[name] for name in saved_names}
            save_checkpoint(run_folder, saved, global_step)

    progress.close()
    envs.close()
    writer.close()
