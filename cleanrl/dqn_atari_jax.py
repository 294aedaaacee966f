# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "ale-py>=0.11", "filelock>=3.20", "flax>=0.12", "gymnasium>=1.2.1,<2", "jax>=0.9",
#     "moviepy>=2", "numpy>=2", "optax>=0.2.6", "psutil>=7", "pydantic>=2.11",
#     "tensorboard>=2.20", "tqdm>=4.67", "tyro>=1.0", "wandb>=0.22",
# ]
# ///
"""Deep Q-Network (DQN) for Atari games, in JAX.

    uv run cleanrl/dqn_atari_jax.py                      # Breakout, 10M steps (40M frames)
    uv run cleanrl/dqn_atari_jax.py --env-id PongNoFrameskip-v4 --seed 2
    uv run cleanrl/dqn_atari_jax.py --sticky             # as in Machado et al. (2018)
    uv run cleanrl/dqn_atari_jax.py --resume runs/<run>  # continue an interrupted run
    tensorboard --logdir runs

Tags such as [dqn 3] refer to the details in docs/rl-algorithms/{dqn,dqn-atari,ppo-atari}.md.
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
import weakref
from contextlib import contextmanager, suppress
from contextvars import Context
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

if "deterministic" not in os.environ.setdefault("XLA_FLAGS", ""):  # XLA reads it only once
    os.environ["XLA_FLAGS"] += " --xla_gpu_deterministic_ops=true"  # the same bits on a GPU too
import ale_py
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

    env_id: str = "BreakoutNoFrameskip-v4"  # Gymnasium environment id, also ALE/Breakout-v5
    sticky: bool = False  # sticky actions (probability 0.25); loss of life does not end the episode
    total_timesteps: int = 10_000_000  # environment steps of the whole run
    learning_rate: float = 1e-4  # learning rate of Adam
    num_envs: int = 1  # parallel environments
    buffer_size: int = 1_000_000  # capacity of the replay buffer in environment steps
    gamma: float = 0.99  # discount factor
    tau: float = 1.0  # target network update rate
    target_network_frequency: int = 1_000  # environment steps between target network updates
    batch_size: int = 32  # transitions per update
    start_e: float = 1.0  # initial epsilon of epsilon-greedy exploration
    end_e: float = 0.01  # final epsilon
    exploration_fraction: float = 0.1  # fraction of the run over which epsilon is annealed
    learning_starts: int = 80_000  # environment steps before the first update
    train_frequency: int = 4  # environment steps between updates

    def check(self):
        """Reject invalid flags before anything is written."""
        require_positive(self, "num_envs", "batch_size", "train_frequency", "learning_rate")
        require_positive(self, "target_network_frequency", "checkpoint_interval")
        require_positive(self, "exploration_fraction")
        require_fraction(self, "gamma", "tau", "start_e", "end_e", "exploration_fraction")
        least = 4 * self.num_envs  # two of three steps may only reset
        require(self.learning_starts >= least, f"learning_starts must be at least {least}")
        require(self.buffer_size >= 2 * least, f"buffer_size must be at least {2 * least}")
        require(self.total_timesteps >= self.num_envs, "total_timesteps is less than num_envs")


class AtariLives(gym.vector.VectorWrapper):
    """Loss of life ends the episode [atari 3], not the game; the next step presses FIRE."""

    render_mode = "rgb_array"

    def __init__(self, envs, lives_count):
        super().__init__(envs)
        weakref.finalize(self, self.__dict__.clear)  # at exit, or ale_py reports a leak
        self.metadata = envs.metadata | {"render_modes": ["rgb_array"], "render_fps": 15}
        self.lives_count = lives_count
        self.fire = int(ale_py.Action.FIRE in self.unwrapped.ale.get_action_set())  # 0 is NOOP

    def reset(self, **kwargs):
        self.obs, infos = self.env.reset(**kwargs)
        self.lives = infos["lives"]
        self.lost = np.zeros(self.num_envs, dtype=bool)
        return self.obs, infos

    def step(self, actions):
        actions = np.where(self.lost, self.fire, actions)  # [atari 4]
        self.obs, rewards, terminated, truncated, infos = self.env.step(actions)
        lives = np.where(terminated | truncated, 0, infos["lives"])
        is_lost = (lives < self.lives) & (lives > 0)
        self.lost = self.lives_count & is_lost & ~self.lost  # a life lost to FIRE ends no episode
        self.lives = lives
        return self.obs, rewards, terminated | self.lost, truncated, infos

    def render(self):
        """The newest frame of each environment as an enlarged RGB image for videos."""
        frames = self.obs[:, -1, :, :, None]
        return list(frames.repeat(4, axis=1).repeat(4, axis=2).repeat(3, axis=3))


def make_envs(args, num_envs, render_mode=None):
    gym.register_envs(ale_py)
    env_id = args.env_id
    if env_id.endswith("NoFrameskip-v4"):  # the classic ids: their preprocessing is set below
        env_id = f"ALE/{env_id.removesuffix('NoFrameskip-v4')}-v5"
    start = dict(noop_max=30, use_fire_reset=True)  # [atari 1, 4]
    frames = dict(frameskip=4, maxpool=True, stack_num=4)  # [atari 2, 7]
    images = dict(grayscale=True, img_height=84, img_width=84)  # [atari 5]
    rules = dict(repeat_action_probability=0.25 if args.sticky else 0.0, reward_clipping=False)
    settings = start | frames | images | rules
    envs = gym.make_vec(env_id, num_envs, "vector_entry_point", **settings)
    envs = gym.wrappers.vector.RecordEpisodeStatistics(envs)  # of whole games
    return AtariLives(envs, lives_count=not args.sticky)


class QNetwork(nn.Module):
    num_actions: int

    @nn.compact
    def __call__(self, obs):
        features = jnp.moveaxis(obs, 1, -1) / 255  # [atari 9], JAX has the channels last
        features = nn.relu(nn.Conv(32, (8, 8), 4, padding="VALID")(features))  # [atari 8]
        features = nn.relu(nn.Conv(64, (4, 4), 2, padding="VALID")(features))
        features = nn.relu(nn.Conv(64, (3, 3), 1, padding="VALID")(features))
        hidden = nn.relu(nn.Dense(512)(features.reshape(len(obs), -1)))
        return nn.Dense(self.num_actions)(hidden)


class ReplayBuffer:
    """A ring buffer of the last steps of all environments [dqn 1].

    It keeps the newest frame of each stack [frames 1], and which of the four are not the black
    padding before a game. The stacks are rebuilt from these [frames 2].
    """

    def __init__(self, size, envs):
        self.num_envs = envs.num_envs
        self.size = size - size % envs.num_envs
        frame_shape = envs.single_observation_space.shape[1:]
        self.columns = dict(
            frames=np.zeros((self.size, *frame_shape), dtype=np.uint8),  # allocated as it fills
            is_shown=np.zeros((self.size, 4), dtype=bool),
            is_first=np.zeros(self.size, dtype=bool),  # after a reset
            actions=np.zeros(self.size, dtype=np.int32),
            rewards=np.zeros(self.size, dtype=np.float32),
            terminated=np.zeros(self.size, dtype=bool),
        )
        self.added = np.zeros(1, dtype=np.int64)  # steps added in total

    def add(self, **step):
        start = self.num_added % self.size
        for name, values in step.items():
            self.columns[name][start : start + self.num_envs] = values
        self.added += self.num_envs

    def load(self, columns, added):
        for name, values in columns.items():
            self.columns[name][:] = values
        self.added[:] = added

    @property
    def num_added(self):
        return int(self.added[0])

    def sample(self, batch_size, rng):
        """Sample transitions uniformly [dqn 2]; a step that only resets is not a transition."""
        rows = np.zeros(0, int)
        oldest = max(0, self.num_added - self.size + 3 * self.num_envs)  # with its full stack
        newest = self.num_added - self.num_envs  # its next observation is not stored yet
        while len(rows) < batch_size:
            drawn = rng.integers(oldest, newest, 2 * batch_size) % self.size
            is_transition = ~self.columns["is_first"][(drawn + self.num_envs) % self.size]
            rows = np.append(rows, drawn[is_transition])
        rows = rows[:batch_size]
        window = rows[:, None] + self.num_envs * np.arange(-3, 2)  # the stack and the next frame
        stacks = self.columns["frames"][window % self.size]
        stacks[:, :4][~self.columns["is_shown"][rows]] = 0  # frames of the previous game
        names = ("actions", "rewards", "terminated")
        return {name: self.columns[name][rows] for name in names} | {"stacks": stacks}


def count_due(every, global_step, num_envs):
    """How many multiples of `every` lie in the last num_envs environment steps."""
    return global_step // every - (global_step - num_envs) // every


def load_policy(checkpoint, envs):
    """The trained policy for evaluation: a function from observations to actions."""
    q_network = QNetwork(int(envs.single_action_space.n))

    @jax.jit
    def best_actions(obs):
        return q_network.apply(checkpoint["agent"]["params"], obs).argmax(1)

    def policy(obs, is_last):
        return np.asarray(best_actions(obs)) + envs.single_action_space.start

    return policy


def make_program(args, envs):
    """The functions init(key) -> agent, and act, learn and update_target, which are compiled."""
    q_network = QNetwork(int(envs.single_action_space.n))
    optimizer = optax.adam(args.learning_rate)

    def init(key):
        obs = np.zeros((1, *envs.single_observation_space.shape), dtype=np.uint8)
        params = q_network.init(key, obs)
        agent = dict(params=params, target_params=params, opt_state=optimizer.init(params))
        return jax.tree.map(jnp.copy, agent)  # no two arrays share memory: learn reuses it

    @jax.jit
    def act(params, obs):
        return q_network.apply(params, obs).argmax(1)

    @partial(jax.jit, donate_argnums=0)
    def learn(agent, b):
        """One update [dqn 4]; truncated episodes are bootstrapped, terminated ones are not."""
        obs, next_obs = b["stacks"][:, :4], b["stacks"][:, 1:]
        next_values = q_network.apply(agent["target_params"], next_obs).max(1)
        targets = b["rewards"] + args.gamma * next_values * ~b["terminated"]

        def td_loss(params):
            q_values = q_network.apply(params, obs)
            q_values = jnp.take_along_axis(q_values, b["actions"][:, None], 1).squeeze(1)
            return jnp.square(q_values - targets).mean(), q_values.mean()

        losses, grads = jax.value_and_grad(td_loss, has_aux=True)(agent["params"])
        updates, opt_state = optimizer.update(grads, agent["opt_state"])
        params = optax.apply_updates(agent["params"], updates)
        return agent | dict(params=params, opt_state=opt_state), losses

    @partial(jax.jit, donate_argnums=0)
    def update_target(agent):
        target_params = agent["target_params"]
        target_params = optax.incremental_update(agent["params"], target_params, args.tau)
        return agent | dict(target_params=target_params)

    return init, act, learn, update_target


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
        require(isinstance(action_space, gym.spaces.Discrete), "Discrete actions are needed")
        require_envs(args, envs)
        num_frames = min(args.buffer_size, args.total_timesteps)
        require_memory(num_frames * math.prod(obs_space.shape[1:]))

    if not args.cuda:
        jax.config.update("jax_platforms", "cpu")  # before JAX makes its first array
    key = seed_everything(args)
    device = jax.devices()[0]
    jax.config.update("jax_default_matmul_precision", "highest")  # acting and learning agree
    init, act, learn, update_target = make_program(args, envs)
    agent = init(key)
    buffer = ReplayBuffer(args.buffer_size, envs)
    state = {"agent": agent}
    if args.checkpoint_buffer:
        state |= {"buffer": buffer.columns, "added": buffer.added}
    saved, global_step = restore_checkpoint(args, state)
    agent = saved["agent"]
    if global_step and args.checkpoint_buffer:
        buffer.load(saved["buffer"], saved["added"])
    start_step = global_step
    run_folder, writer = open_run(args, device, global_step)
    if args.capture_video:
        envs = RecordVideo(envs, run_folder / "videos", global_step)

    N = args.num_envs
    num_iterations = args.total_timesteps // N
    exploration_steps = args.exploration_fraction * args.total_timesteps
    reset_seed = np.random.SeedSequence((args.seed, global_step)).generate_state(1)[0] >> 2
    obs, _ = envs.reset(seed=int(reset_seed))  # the emulators take 31 bits
    is_first = np.ones(N, dtype=bool)  # obs starts an episode
    is_last = np.zeros(N, dtype=bool)  # obs ends an episode: the next step only resets
    start_time = time.time()
    progress = tqdm(initial=global_step, total=num_iterations * N, unit="step", unit_scale=True)

    for iteration in range(global_step // N, num_iterations):
        # act epsilon-greedily [dqn 3]
        epsilon = np.interp(global_step, (0, exploration_steps), (args.start_e, args.end_e))
        rng = np.random.default_rng((args.seed, global_step))  # no state to save for --resume
        is_random = rng.random(N) < epsilon
        actions = rng.integers(action_space.n, size=N)
        if not is_random.all():
            best_actions = np.asarray(act(agent["params"], obs))
            actions = np.where(is_random, actions, best_actions)
        next_obs, rewards, terminated, truncated, infos = envs.step(actions + action_space.start)
        for i in np.flatnonzero(infos.get("_episode", ())):
            step, episode = global_step + i + 1, infos["episode"]
            scalars = {
                "charts/episodic_return": episode["r"][i],
                "charts/episodic_length": episode["l"][i],
            }
            writer.add_scalars(step, scalars)
            progress.set_postfix(episodic_return=f"{episode['r'][i]:.1f}", refresh=False)
        global_step += N
        check_finite(args, global_step, reward=rewards)
        progress.update(N)

        # remember
        buffer.add(
            frames=obs[:, -1],
            is_shown=obs.any((2, 3)),  # a game starts with black frames
            is_first=is_first,
            actions=actions,
            rewards=np.sign(rewards),  # [atari 6]
            terminated=terminated,
        )
        obs, is_first, is_last = next_obs, is_last, terminated | truncated

        # learn
        is_learning = buffer.num_added >= args.learning_starts
        num_updates = count_due(args.train_frequency, global_step, N) if is_learning else 0
        for _ in range(num_updates):  # [dqn 5]
            agent, (td_loss, q_values) = learn(agent, buffer.sample(args.batch_size, rng))
        if is_learning and count_due(args.target_network_frequency, global_step, N):  # [dqn 6]
            agent = update_target(agent)

        # log
        if is_learning and count_due(100 * args.train_frequency, global_step, N):
            check_finite(args, global_step, td_loss=td_loss)
            scalars = {
                "charts/epsilon": epsilon,
                "charts/SPS": int((global_step - start_step) / (time.time() - start_time)),
                "losses/td_loss": td_loss,
                "losses/q_values": q_values,
            }
            writer.add_scalars(global_step, scalars)
        is_due = count_due(args.checkpoint_interval, global_step, N)
        if is_due or iteration + 1 == num_iterations or interrupted.is_set():
            if args.track:
                writer.add_videos(run_folder, global_step)
            save_checkpoint(run_folder, state | {"agent": agent}, global_step)

    progress.close()
    envs.close()
    writer.close()
