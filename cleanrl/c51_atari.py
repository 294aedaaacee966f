# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "ale-py>=0.11", "filelock>=3.20", "gymnasium>=1.2.1,<2", "moviepy>=2", "numpy>=2",
#     "psutil>=7", "pydantic>=2.11", "tensorboard>=2.20", "torch>=2.9", "tqdm>=4.67", "tyro>=1.0",
#     "wandb>=0.22",
# ]
# ///
"""Categorical DQN (C51), distributional Q-learning, for Atari games.

    uv run cleanrl/c51_atari.py                       # BreakoutNoFrameskip-v4, 40M frames
    uv run cleanrl/c51_atari.py --env-id PongNoFrameskip-v4 --seed 2
    uv run cleanrl/c51_atari.py --sticky              # the protocol of Machado et al. (2018)
    uv run cleanrl/c51_atari.py --resume runs/<run>   # continue an interrupted run
    tensorboard --logdir runs

Tags such as [c51 2] refer to the details in docs/rl-algorithms/{c51,dqn,dqn-atari,ppo-atari}.md.
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
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

import ale_py
import gymnasium as gym
import numpy as np
import psutil
import torch
import torch.nn as nn
import tyro
from filelock import FileLock, Timeout
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment
    seed: int = 1  # random seed of the weights, the environments and all sampling
    torch_deterministic: bool = True  # use deterministic PyTorch algorithms
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
    learning_rate: float = 2.5e-4  # learning rate of Adam
    num_envs: int = 1  # parallel environments
    compile: bool = True  # on a GPU, record acting and learning as CUDA graphs
    n_atoms: int = 51  # number of atoms of the return distribution
    v_min: float = -10.0  # smallest atom
    v_max: float = 10.0  # largest atom
    buffer_size: int = 1_000_000  # capacity of the replay buffer in environment steps
    gamma: float = 0.99  # discount factor
    target_network_frequency: int = 10_000  # environment steps between target network updates
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
        require_fraction(self, "gamma", "start_e", "end_e", "exploration_fraction")
        require(self.n_atoms > 1, "n_atoms must be at least 2")
        require(self.v_min < self.v_max, "v_min must be less than v_max")
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
    """The distribution of the return of each action, over the same atoms [c51 1]."""

    def __init__(self, envs, atoms):
        super().__init__()
        self.register_buffer("atoms", atoms)
        self.conv1 = nn.Conv2d(envs.single_observation_space.shape[0], 32, 8, stride=4)  # [atari 8]
        self.conv2 = nn.Conv2d(32, 64, 4, stride=2)
        self.conv3 = nn.Conv2d(64, 64, 3, stride=1)
        self.hidden = nn.Linear(64 * 7 * 7, 512)
        self.logits = nn.Linear(512, int(envs.single_action_space.n) * len(atoms))

    def forward(self, obs):
        """Log-probabilities of the atoms, for each action."""
        features = self.conv1(obs / 255).relu()  # [atari 9]
        features = self.conv2(features).relu()
        features = self.conv3(features).relu()
        hidden = self.hidden(features.flatten(1)).relu()
        return self.logits(hidden).unflatten(1, (-1, len(self.atoms))).log_softmax(-1)

    def q_values(self, obs):
        return (self(obs).exp() * self.atoms).sum(-1)


def project(pmfs, returns, atoms):
    """Split the probability of each return linearly between the two nearest atoms [c51 2]."""
    v_min, v_max = atoms[0], atoms[-1]
    positions = (returns.clamp(v_min, v_max) - v_min) / (v_max - v_min) * (len(atoms) - 1)
    below = positions.floor().long()
    above = (below + 1).clamp(max=len(atoms) - 1)
    share_above = positions - below
    projected = torch.zeros_like(pmfs)
    projected.scatter_add_(1, below, pmfs * (1 - share_above))
    projected.scatter_add_(1, above, pmfs * share_above)
    return projected


class ReplayBuffer(nn.Module):
    """A ring buffer of the last steps [dqn 1]; an nn.Module, so that checkpoints can include it.

    It keeps the newest frame of each stack [frames 1], and which of the four are not the black
    padding before a game. The stacks are rebuilt from these [frames 2].
    """

    def __init__(self, size, envs):
        super().__init__()
        self.num_envs = envs.num_envs
        self.size = size - size % envs.num_envs
        frame_shape = envs.single_observation_space.shape[1:]
        frames = np.zeros((self.size, *frame_shape), dtype=np.uint8)  # allocated as it fills
        self.register_buffer("frames", torch.from_numpy(frames))
        self.register_buffer("is_shown", torch.zeros(self.size, 4, dtype=torch.bool))
        self.register_buffer("is_first", torch.zeros(self.size, dtype=torch.bool))  # after a reset
        self.register_buffer("actions", torch.zeros(self.size, dtype=torch.int64))
        self.register_buffer("rewards", torch.zeros(self.size))
        self.register_buffer("terminated", torch.zeros(self.size, dtype=torch.bool))
        self.register_buffer("added", torch.zeros(1, dtype=torch.int64))  # steps added in total
        self.columns = {name: x.numpy() for name, x in self.named_buffers()}  # shares the memory

    def add(self, **step):
        start = self.num_added % self.size
        for name, values in step.items():
            self.columns[name][start : start + self.num_envs] = values
        self.columns["added"] += self.num_envs

    @property
    def num_added(self):
        return int(self.columns["added"][0])

    def transitions(self, rows):
        """The rows that are followed by a row of the same episode."""
        return rows[~self.columns["is_first"][(rows + self.num_envs) % self.size]]

    def sample(self, batch_size, device):
        """Sample transitions uniformly [dqn 2]; a step that only resets is not a transition."""
        oldest = max(0, self.num_added - self.size + 3 * self.num_envs)  # with its full stack
        newest = self.num_added - self.num_envs  # its next observation is not stored yet
        rows = torch.randint(oldest, newest, (2 * batch_size,)).numpy() % self.size
        rows = self.transitions(rows)
        if len(rows) < batch_size:  # by chance, or because there are few transitions
            rows = self.transitions(np.arange(oldest, newest) % self.size)
            if len(rows) == 0:
                raise SystemExit("no transition to learn from: increase --learning-starts")
            rows = rows[torch.randint(len(rows), (batch_size,)).numpy()]
        rows = rows[:batch_size]
        window = rows[:, None] + self.num_envs * np.arange(-3, 2)  # the stack and the next frame
        stacks = self.columns["frames"][window % self.size]
        stacks[:, :4][~self.columns["is_shown"][rows]] = 0  # frames of the previous game
        names = ("actions", "rewards", "terminated")
        batch = {name: self.columns[name][rows] for name in names}
        batch = {name: torch.from_numpy(x).to(device) for name, x in batch.items()}
        stacks = torch.from_numpy(stacks).to(device)
        return batch | {"obs": stacks[:, :4], "next_obs": stacks[:, 1:]}


class CUDAGraph:
    """Calls a function of tensors; from the second call on, its CUDA kernels are replayed.

    Launching them one by one takes longer than running them: an update of DQN takes 0.5 ms instead
    of 4.2 ms on an H200. Results are identical bit for bit.
    """

    def __init__(self, function):
        self.function = function
        self.graph = torch.cuda.CUDAGraph()
        self.inputs = None
        self.results = None

    def __call__(self, **inputs):
        if self.inputs is None:  # the first call warms up
            self.inputs = {name: x.clone() for name, x in inputs.items()}
            return self.function(**inputs)
        for name, x in inputs.items():
            self.inputs[name].copy_(x)
        if self.results is None:
            with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
                self.results = self.function(**self.inputs)
        self.graph.replay()
        return self.results  # the next call overwrites them


def count_due(every, global_step, num_envs):
    """How many multiples of `every` lie in the last num_envs environment steps."""
    return global_step // every - (global_step - num_envs) // every


def load_policy(checkpoint, envs):
    """The trained policy for evaluation: a function from observations to actions."""
    q_network = QNetwork(envs, checkpoint["q_network"]["atoms"]).eval()
    q_network.load_state_dict(checkpoint["q_network"])

    @torch.no_grad()
    def policy(obs, is_last):
        actions = q_network.q_values(torch.from_numpy(obs)).argmax(1)
        return actions.numpy() + envs.single_action_space.start

    return policy


# -- the same in every PyTorch file: flags, errors, run folder, checkpoints ------------------------


sys.path.append(os.getcwd())  # --env-id my_envs:MyEnv-v0 finds my_envs.py here
FILE_HASH = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
TRACKER = os.environ.get("CLEANRL_TRACKER", "wandb")  # or trackio, which has the same API
interrupted = threading.Event()  # set by the first Ctrl+C or SIGTERM
NUMPY = [np.ndarray, np.dtype, np._core.multiarray._reconstruct, np._core.multiarray.scalar]
NUMPY += [type(np.dtype(code)) for code in "?bBhHiIlLefd"]
torch.serialization.add_safe_globals(NUMPY)  # checkpoints may hold NumPy arrays and scalars


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
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(args.torch_deterministic)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs 10%


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
    """The run folder, with the flags and versions in run.json, and its TensorBoard writer."""
    folder = Path(args.resume or "runs")
    with explain(f"log to {folder}"):
        if args.track:
            tracker = importlib.import_module(TRACKER)
            if TRACKER == "wandb":
                tracker.login()  # a missing login is reported before anything is written
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
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                "python": platform.python_version(),
                "packages": {package.name: package.version for package in distributions()},
            } | more
            folder = make_run_folder(args)
            lock_run_folder(folder)
            shutil.copy(__file__, folder)  # the exact code of this run
        run["args"] = asdict(args) | {"resume": None}
        (folder / "run.tmp").write_text(json.dumps(run, indent=2, default=str))
        os.replace(folder / "run.tmp", folder / "run.json")
        if args.track:
            names = dict(project=args.wandb_project_name, name=folder.name, resume="allow")
            if TRACKER == "wandb":
                names |= dict(entity=args.wandb_entity, id=folder.name, sync_tensorboard=True)
            tracker.init(**names, config=asdict(args))
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    sys.excepthook = partial(report_crash, args, folder)
    print(f"run folder: {folder}")
    print(f"device: {device}, {torch.get_num_threads()} CPU threads", flush=True)
    writer = TrackioWriter if args.track and TRACKER == "trackio" else SummaryWriter
    return folder, writer(folder, purge_step=global_step + 1)  # hides steps that a resume repeats


class TrackioWriter(SummaryWriter):
    """Sends TensorBoard's scalars to Trackio, too; Weights & Biases reads them itself."""

    def add_scalar(self, name, value, step):
        super().add_scalar(name, value, step)
        scalar = torch.as_tensor(value).item()
        importlib.import_module("trackio").log({name: scalar}, step=int(step))


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


def log_videos(folder, logged, global_step):
    """Upload the videos that are not in logged yet to Weights & Biases or Trackio."""
    tracker = importlib.import_module(TRACKER)
    for path in sorted(set(folder.glob("videos/*.mp4")) - logged):
        tracker.log({"videos": tracker.Video(str(path)), "global_step": global_step})
        logged.add(path)


def save_checkpoint(folder, modules, global_step):
    """Write a new file, then rename it, so that none is incomplete. Stops if interrupted."""
    checkpoint = {name: module.state_dict() for name, module in modules.items()}
    checkpoint["args"] = json.loads((folder / "run.json").read_text())["args"]
    checkpoint["global_step"] = global_step
    checkpoint["rng"] = torch.get_rng_state()
    checkpoint["cuda_rng"] = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    path = folder / "checkpoint.tmp"
    with explain(f"save step {global_step} ({shutil.disk_usage(folder).free / 1e9:.1f} GB free)"):
        require_finite_weights(checkpoint)
        try:
            torch.save(checkpoint, path)
            types = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            require(not types, f"a checkpoint cannot hold {', '.join(types)}")
            os.replace(path, folder / "checkpoint.pt")
        finally:
            path.unlink(missing_ok=True)
    if interrupted.is_set():
        raise SystemExit(f"interrupted at step {global_step}, continue with --resume {folder}")


def require_finite_weights(checkpoint):
    for name in [name for name, state in checkpoint.items() if isinstance(state, dict)]:
        for key, value in checkpoint[name].items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                require(value.isfinite().all(), f"{name}.{key} is not finite")


def restore_checkpoint(args, modules):
    """Load the run's last checkpoint into the modules; returns its step, 0 if there is none yet."""
    path = Path(args.resume or "", "checkpoint.pt")
    if not args.resume or not path.exists():
        return 0
    with explain(f"resume {args.resume}"):
        try:
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        except Exception:
            raise ValueError("checkpoint.pt is damaged, or holds more than weights") from None
        require_finite_weights(checkpoint)
        for name, module in modules.items():
            require(name in checkpoint, f"its checkpoint has no {name}")
            module.load_state_dict(checkpoint[name])
        torch.set_rng_state(checkpoint["rng"])
        torch.cuda.set_rng_state_all(checkpoint["cuda_rng"][: torch.cuda.device_count()])
        return checkpoint["global_step"]


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

    seed_everything(args)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the initial weights do not depend on the number of cores
    atoms = torch.linspace(args.v_min, args.v_max, args.n_atoms)
    q_network = QNetwork(envs, atoms)
    target_network = QNetwork(envs, atoms).requires_grad_(False).eval()
    target_network.load_state_dict(q_network.state_dict())
    use_cuda = args.cuda and torch.cuda.is_available()
    device = torch.device("cuda" if use_cuda else "cpu")
    torch.set_num_threads(1 if use_cuda else num_threads)  # more would slow the emulators
    if use_cuda:
        torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot record CUDA graphs
    q_network.to(device).eval()
    target_network.to(device)
    atoms = atoms.to(device)
    adam = dict(lr=args.learning_rate, eps=0.01 / args.batch_size, fused=True)  # [c51 4]
    optimizer = torch.optim.Adam(q_network.parameters(), **adam)
    buffer = ReplayBuffer(args.buffer_size, envs)
    modules = {"q_network": q_network, "target_network": target_network, "optimizer": optimizer}
    if args.checkpoint_buffer:
        modules["buffer"] = buffer
    global_step = start_step = restore_checkpoint(args, modules)
    for group in optimizer.param_groups:
        group["capturable"] = use_cuda  # a CUDA graph can contain its steps
    run_folder, writer = open_run(args, device, global_step)
    logged_videos = set(run_folder.glob("videos/*.mp4"))
    if args.capture_video:
        envs = RecordVideo(envs, run_folder / "videos", global_step)

    N = args.num_envs
    num_iterations = args.total_timesteps // N
    exploration_steps = args.exploration_fraction * args.total_timesteps
    reset_seed = np.random.SeedSequence((args.seed, global_step)).generate_state(1)[0] >> 2
    obs, _ = envs.reset(seed=int(reset_seed))  # the emulators take 31 bits
    is_first = np.ones(N, dtype=bool)  # obs starts an episode
    is_last = np.zeros(N, dtype=bool)  # obs ends an episode: the next step only resets
    index = torch.arange(args.batch_size, device=device)

    @torch.no_grad()
    def act(obs):
        return q_network.q_values(obs).argmax(1)

    def learn(**b):
        """One update [dqn 4]; truncated episodes are bootstrapped, terminated ones are not."""
        with torch.no_grad():
            next_pmfs = target_network(b["next_obs"]).exp()
            next_actions = (next_pmfs * atoms).sum(-1).argmax(1)
            returns = b["rewards"][:, None] + args.gamma * atoms * ~b["terminated"][:, None]
            target_pmfs = project(next_pmfs[index, next_actions], returns, atoms)
        log_pmfs = q_network(b["obs"])[index, b["actions"]]
        loss = -(target_pmfs * log_pmfs).sum(-1).mean()  # [c51 3]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        q_values = (log_pmfs.detach().exp() * atoms).sum(-1)
        return {"loss": loss.detach(), "q_values": q_values.mean()}

    if args.compile and use_cuda:
        act = CUDAGraph(act)
        learn = CUDAGraph(learn)
    start_time = time.time()
    progress = tqdm(initial=global_step, total=num_iterations * N, unit="step", unit_scale=True)

    for iteration in range(global_step // N, num_iterations):
        # act epsilon-greedily [dqn 3]
        epsilon = np.interp(global_step, (0, exploration_steps), (args.start_e, args.end_e))
        chance, choice = torch.rand(2, N).numpy()
        is_random = chance < epsilon
        actions = (choice * action_space.n).astype(np.int64)
        if not is_random.all():
            best_actions = act(obs=torch.from_numpy(obs).to(device))
            actions = np.where(is_random, actions, best_actions.cpu().numpy())
        next_obs, rewards, terminated, truncated, infos = envs.step(actions + action_space.start)
        for i in np.flatnonzero(infos.get("_episode", ())):
            step, episode = global_step + i + 1, infos["episode"]
            writer.add_scalar("charts/episodic_return", episode["r"][i], step)
            writer.add_scalar("charts/episodic_length", episode["l"][i], step)
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
            q_network.train()
            losses = learn(**buffer.sample(args.batch_size, device))
            q_network.eval()
        if is_learning and count_due(args.target_network_frequency, global_step, N):  # [dqn 6]
            target_network.load_state_dict(q_network.state_dict())

        # log
        if is_learning and count_due(100 * args.train_frequency, global_step, N):
            check_finite(args, global_step, loss=losses["loss"].item())
            for name, scalar in {
                "charts/epsilon": epsilon,
                "charts/SPS": int((global_step - start_step) / (time.time() - start_time)),
                "losses/loss": losses["loss"],
                "losses/q_values": losses["q_values"],
            }.items():
                writer.add_scalar(name, scalar, global_step)
        is_due = count_due(args.checkpoint_interval, global_step, N)
        if is_due or iteration + 1 == num_iterations or interrupted.is_set():
            writer.flush()
            if args.track:
                log_videos(run_folder, logged_videos, global_step)
            save_checkpoint(run_folder, modules, global_step)

    progress.close()
    envs.close()
    writer.close()
