# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "dm-control>=1.0.30; python_version < '3.13'", "filelock>=3.20",
#     "gymnasium[mujoco]>=1.2.1,<2", "moviepy>=2", "mujoco>=3.3,<4", "numpy>=2", "psutil>=7",
#     "pydantic>=2.11", "shimmy[dm-control]>=2.0.1; python_version < '3.13'", "tensorboard>=2.20",
#     "torch>=2.9", "tqdm>=4.67", "tyro>=1.0", "wandb>=0.22",
# ]
# ///
"""Deep Deterministic Policy Gradient (DDPG) for vector observations and continuous actions.

    uv run cleanrl/ddpg_continuous_action.py                        # Hopper-v4, 1M steps
    uv run cleanrl/ddpg_continuous_action.py --env-id dm_control/cartpole-balance-v0 --seed 2
    uv run cleanrl/ddpg_continuous_action.py --resume runs/<run>    # continue an interrupted run
    tensorboard --logdir runs

Tags such as [ddpg 3] refer to the implementation details in docs/rl-algorithms/ddpg.md.
"""

import atexit
import copy
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
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

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

    env_id: str = "Hopper-v4"  # Gymnasium environment id
    total_timesteps: int = 1_000_000  # environment steps of the whole run
    learning_rate: float = 3e-4  # learning rate of Adam
    num_envs: int = 1  # parallel environments
    compile: bool = True  # on a GPU, record acting and learning as CUDA graphs
    buffer_size: int = 1_000_000  # capacity of the replay buffer in environment steps
    gamma: float = 0.99  # discount factor
    tau: float = 0.005  # target network update rate
    batch_size: int = 256  # transitions per update
    utd: int = 1  # updates per environment step
    exploration_noise: float = 0.1  # standard deviation of the noise on actions between -1 and 1
    learning_starts: int = 25_000  # environment steps with random actions before the first update
    policy_frequency: int = 2  # Q-network updates per update of the actor and the target networks

    def check(self):
        """Reject invalid flags before anything is written."""
        require_positive(self, "num_envs", "batch_size", "utd", "policy_frequency", "learning_rate")
        require_positive(self, "learning_starts", "checkpoint_interval")
        require_fraction(self, "gamma", "tau")
        require(self.exploration_noise >= 0, "exploration_noise must not be negative")
        require(self.buffer_size >= self.num_envs, "buffer_size is less than num_envs")
        require(self.total_timesteps >= self.num_envs, "total_timesteps is less than num_envs")


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
    def __init__(self, envs):
        super().__init__()
        obs_dim = math.prod(envs.single_observation_space.shape)
        self.hidden1 = nn.Linear(obs_dim, 256)
        self.hidden2 = nn.Linear(256, 256)
        self.actions = nn.Linear(256, math.prod(envs.single_action_space.shape))

    def forward(self, obs):
        hidden = self.hidden1(obs).relu()
        hidden = self.hidden2(hidden).relu()
        return self.actions(hidden).tanh()


class QNetwork(nn.Module):
    def __init__(self, envs):
        super().__init__()
        obs_dim = math.prod(envs.single_observation_space.shape)
        action_dim = math.prod(envs.single_action_space.shape)
        self.hidden1 = nn.Linear(obs_dim + action_dim, 256)
        self.hidden2 = nn.Linear(256, 256)
        self.q_value = nn.Linear(256, 1)

    def forward(self, obs, actions):
        hidden = self.hidden1(torch.cat([obs, actions], 1)).relu()
        hidden = self.hidden2(hidden).relu()
        return self.q_value(hidden).squeeze(1)


class ReplayBuffer(nn.Module):
    """A ring buffer of transitions [ddpg 2]; an nn.Module, so that checkpoints can include it."""

    def __init__(self, size, envs):
        super().__init__()
        self.size = size
        obs_dim = math.prod(envs.single_observation_space.shape)
        action_dim = math.prod(envs.single_action_space.shape)
        self.register_buffer("obs", torch.zeros(self.size, obs_dim))
        self.register_buffer("actions", torch.zeros(self.size, action_dim))
        self.register_buffer("rewards", torch.zeros(self.size))
        self.register_buffer("next_obs", torch.zeros(self.size, obs_dim))
        self.register_buffer("terminated", torch.zeros(self.size, dtype=torch.bool))
        self.register_buffer("added", torch.zeros(1, dtype=torch.int64))  # added in total
        self.columns = {name: x.numpy() for name, x in self.named_buffers()}  # shares the memory

    def add(self, **transitions):
        rows = self.num_added + np.arange(len(transitions["rewards"]))
        for name, values in transitions.items():
            self.columns[name][rows % self.size] = values
        self.columns["added"] += len(rows)

    @property
    def num_added(self):
        return int(self.columns["added"][0])

    def sample(self, batch_size, device):
        """Uniformly drawn transitions."""
        rows = torch.randint(min(self.num_added, self.size), (batch_size,)).numpy()
        names = ("obs", "actions", "rewards", "next_obs", "terminated")
        batch = {name: self.columns[name][rows] for name in names}
        return {name: torch.from_numpy(x).to(device) for name, x in batch.items()}


class CUDAGraph:
    """Calls a function of tensors; from the second call on, its CUDA kernels are replayed.

    Launching them one by one takes longer than running them: replayed, DDPG, TD3 and SAC run 5.7
    to 9.6 times as many steps per second on an H200. Results are identical bit for bit.
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
    actor = Actor(envs).eval()
    actor.load_state_dict(checkpoint["actor"])

    @torch.no_grad()
    def policy(obs, is_last):
        actions = actor(torch.from_numpy(obs).float())
        return rescale(actions.numpy(), envs.single_action_space)

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
        is_continuous = isinstance(action_space, gym.spaces.Box) and action_space.dtype.kind == "f"
        is_bounded = is_continuous and action_space.is_bounded()
        require(is_bounded, "continuous and bounded Box actions are needed")
        require_envs(args, envs)
        row_bytes = 4 * (2 * math.prod(obs_space.shape) + math.prod(action_space.shape) + 1) + 1
        require_memory((args.buffer_size + args.batch_size) * row_bytes)

    seed_everything(args)
    use_cuda = args.cuda and torch.cuda.is_available()  # it learns at every step
    device = torch.device("cuda" if use_cuda else "cpu")
    if use_cuda:
        torch.set_num_threads(1)  # idle threads would slow down the simulators
        torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot record CUDA graphs
    actor = Actor(envs).to(device).eval()
    q_network = QNetwork(envs).to(device)
    target_actor = copy.deepcopy(actor).requires_grad_(False).eval()
    target_q_network = copy.deepcopy(q_network).requires_grad_(False).eval()
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.learning_rate, fused=True)
    q_optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate, fused=True)
    buffer = ReplayBuffer(args.buffer_size, envs)
    modules = {
        "actor": actor,
        "q_network": q_network,
        "target_actor": target_actor,
        "target_q_network": target_q_network,
        "actor_optimizer": actor_optimizer,
        "q_optimizer": q_optimizer,
    }
    if args.checkpoint_buffer:
        modules["buffer"] = buffer
    global_step = start_step = restore_checkpoint(args, modules)
    for group in actor_optimizer.param_groups + q_optimizer.param_groups:
        group["capturable"] = use_cuda  # a CUDA graph can contain its steps
    run_folder, writer = open_run(args, device, global_step)
    logged_videos = set(run_folder.glob("videos/*.mp4"))
    if args.capture_video:
        envs = RecordVideo(envs, run_folder / "videos", global_step)

    N = args.num_envs
    num_iterations = args.total_timesteps // N
    learning_start = args.learning_starts
    if not buffer.num_added:  # a run that is resumed without its buffer starts with a new one
        learning_start += global_step
    reset_seed = np.random.SeedSequence((args.seed, global_step)).generate_state(1)[0]
    obs, _ = envs.reset(seed=int(reset_seed))
    is_last = np.zeros(N, dtype=bool)  # obs ends an episode: the next step only resets
    losses = {}

    @torch.no_grad()
    def act(obs):
        """The actor's actions with Gaussian noise [ddpg 3]."""
        actions = actor(obs)
        noise = args.exploration_noise * torch.randn_like(actions)
        return (actions + noise).clamp(-1, 1)

    def update_q_network(obs, actions, rewards, next_obs, terminated):
        """Truncated episodes are bootstrapped, terminated ones are not [ddpg 4]."""
        with torch.no_grad():
            next_q_values = target_q_network(next_obs, target_actor(next_obs))
            targets = rewards + args.gamma * next_q_values * ~terminated
        q_values = q_network(obs, actions)
        qf_loss = (q_values - targets).square().mean()
        q_optimizer.zero_grad()
        qf_loss.backward()
        q_optimizer.step()
        return {"qf1_loss": qf_loss.detach(), "qf1_values": q_values.detach().mean()}

    def update_actor(obs):
        """Gradient ascent on the Q-value of the actor's actions."""
        actor_loss = -q_network(obs, actor(obs)).mean()  # [ddpg 5]
        actor_optimizer.zero_grad()
        actor_loss.backward(inputs=list(actor.parameters()))  # not the Q-network's
        actor_optimizer.step()
        return {"actor_loss": actor_loss.detach()}

    @torch.no_grad()
    def update_targets():
        """Soft update of the target networks with rate tau [ddpg 6]."""
        for network, target_network in ((actor, target_actor), (q_network, target_q_network)):
            pairs = zip(target_network.parameters(), network.parameters(), strict=True)
            for target, param in pairs:
                target.lerp_(param, args.tau)

    if args.compile and use_cuda:
        act = CUDAGraph(act)
        update_q_network = CUDAGraph(update_q_network)
        update_actor = CUDAGraph(update_actor)
        update_targets = CUDAGraph(update_targets)
    start_time = time.time()
    progress = tqdm(initial=global_step, total=num_iterations * N, unit="step", unit_scale=True)

    for iteration in range(global_step // N, num_iterations):
        # act, at random at first [ddpg 3]
        if global_step < learning_start:
            actions = 2 * torch.rand(N, math.prod(action_space.shape)).numpy() - 1
        else:
            actions = act(obs=torch.from_numpy(obs).float().to(device)).cpu().numpy()
        next_obs, rewards, terminated, truncated, infos = envs.step(rescale(actions, action_space))
        for i in np.flatnonzero(infos.get("_episode", ())):
            step, episode = global_step + i + 1, infos["episode"]
            writer.add_scalar("charts/episodic_return", episode["r"][i], step)
            writer.add_scalar("charts/episodic_length", episode["l"][i], step)
            progress.set_postfix(episodic_return=f"{episode['r'][i]:.1f}", refresh=False)
        global_step += N
        check_finite(args, global_step, observation=next_obs, reward=rewards)
        progress.update(N)

        # remember all steps except those that only reset an environment
        buffer.add(
            obs=obs[~is_last],
            actions=actions[~is_last],
            rewards=rewards[~is_last],
            next_obs=next_obs[~is_last],
            terminated=terminated[~is_last],
        )
        obs, is_last = next_obs, terminated | truncated

        # learn
        is_learning = global_step >= learning_start
        first_update = (global_step - N) * args.utd
        num_updates = N * args.utd if is_learning else 0
        actor.train()
        for update in range(first_update, first_update + num_updates):
            b = buffer.sample(args.batch_size, device)
            losses |= update_q_network(**b)
            if update % args.policy_frequency == 0:
                losses |= update_actor(obs=b["obs"])
                update_targets()
        actor.eval()

        # log
        if is_learning and count_due(100, global_step, N):
            check_finite(args, global_step, **{name: loss.item() for name, loss in losses.items()})
            sps = int((global_step - start_step) / (time.time() - start_time))
            writer.add_scalar("charts/SPS", sps, global_step)
            for name, loss in losses.items():
                writer.add_scalar(f"losses/{name}", loss, global_step)
        is_due = count_due(args.checkpoint_interval, global_step, N)
        if is_due or iteration + 1 == num_iterations or interrupted.is_set():
            writer.flush()
            if args.track:
                log_videos(run_folder, logged_videos, global_step)
            save_checkpoint(run_folder, modules, global_step)

    progress.close()
    envs.close()
    writer.close()
