# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "ale-py>=0.11", "filelock>=3.20", "gymnasium>=1.2.1,<2", "moviepy>=2", "numpy>=2",
#     "psutil>=7", "pydantic>=2.11", "tensorboard>=2.20", "torch>=2.9", "tqdm>=4.67", "tyro>=1.0",
#     "wandb>=0.22",
# ]
# ///
"""Recurrent Proximal Policy Optimization (PPO with an LSTM) for Atari games.

    uv run cleanrl/ppo_atari_lstm.py                       # BreakoutNoFrameskip-v4, 40M frames
    uv run cleanrl/ppo_atari_lstm.py --env-id PongNoFrameskip-v4 --seed 2
    uv run cleanrl/ppo_atari_lstm.py --sticky              # the protocol of Machado et al. (2018)
    uv run cleanrl/ppo_atari_lstm.py --resume runs/<run>   # continue an interrupted run
    tensorboard --logdir runs

Tags such as [core 5] refer to the details in docs/rl-algorithms/{ppo,ppo-atari,ppo-atari-lstm}.md.
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
from itertools import pairwise
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
    checkpoint_interval: int = 100  # iterations between checkpoints

    env_id: str = "BreakoutNoFrameskip-v4"  # Gymnasium environment id, also ALE/Breakout-v5
    sticky: bool = False  # sticky actions (probability 0.25); loss of life does not end the episode
    total_timesteps: int = 10_000_000  # environment steps of the whole run
    learning_rate: float = 2.5e-4  # initial learning rate of Adam
    num_envs: int = 8  # parallel environments
    num_steps: int = 128  # rollout length of each environment
    anneal_lr: bool = True  # anneal the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 4  # minibatches per epoch; each has whole rollouts of some environments
    update_epochs: int = 4  # epochs over each rollout
    norm_adv: bool = True  # normalize advantages per minibatch
    clip_coef: float = 0.1  # clipping range of the surrogate objective
    clip_vloss: bool = True  # clip the value loss by the same range
    ent_coef: float = 0.01  # entropy coefficient
    vf_coef: float = 0.5  # value loss coefficient
    max_grad_norm: float = 0.5  # maximum gradient norm
    target_kl: float | None = None  # stop the update epochs early above this KL divergence

    def check(self):
        """Reject invalid flags before anything is written."""
        require_positive(self, "num_envs", "num_steps", "num_minibatches", "update_epochs")
        require_positive(self, "learning_rate", "clip_coef", "max_grad_norm", "checkpoint_interval")
        require_fraction(self, "gamma", "gae_lambda")
        batch_size = self.num_envs * self.num_steps
        require(self.total_timesteps >= batch_size, "total_timesteps is less than one rollout")
        require(self.num_minibatches <= self.num_envs, "num_minibatches must be at most num_envs")
        require(self.num_steps > 2, "num_steps must be more than 2")  # two of them may only reset


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
    frames = dict(frameskip=4, maxpool=True, stack_num=1)  # [atari 2], no stack of frames
    images = dict(grayscale=True, img_height=84, img_width=84)  # [atari 5]
    rules = dict(repeat_action_probability=0.25 if args.sticky else 0.0, reward_clipping=False)
    settings = start | frames | images | rules
    envs = gym.make_vec(env_id, num_envs, "vector_entry_point", **settings)  # [core 1]
    envs = gym.wrappers.vector.RecordEpisodeStatistics(envs)  # of whole games
    return AtariLives(envs, lives_count=not args.sticky)


def layer_init(layer, gain=2**0.5):
    nn.init.orthogonal_(layer.weight, gain)  # [core 2]
    nn.init.zeros_(layer.bias)
    return layer


def cnn(channels):
    return nn.Sequential(
        layer_init(nn.Conv2d(channels, 32, 8, stride=4)),
        nn.ReLU(),
        layer_init(nn.Conv2d(32, 64, 4, stride=2)),
        nn.ReLU(),
        layer_init(nn.Conv2d(64, 64, 3, stride=1)),
        nn.ReLU(),
        nn.Flatten(),
        layer_init(nn.Linear(64 * 7 * 7, 512)),
        nn.ReLU(),
    )


class Agent(nn.Module):
    """The Nature CNN and an LSTM, shared by the policy and the value function [atari 8]."""

    def __init__(self, envs):
        super().__init__()
        self.network = cnn(envs.single_observation_space.shape[0])
        self.lstm = nn.LSTM(512, 128)
        for name, parameter in self.lstm.named_parameters():  # [lstm 1]
            if "bias" in name:
                nn.init.zeros_(parameter)
            else:
                nn.init.orthogonal_(parameter, 1.0)
        self.actor = layer_init(nn.Linear(128, int(envs.single_action_space.n)), gain=0.01)
        self.critic = layer_init(nn.Linear(128, 1), gain=1.0)

    def forward(self, obs, is_last, state):
        """Log-probabilities and values at each step (row) of each environment (column).

        state is the LSTM's before the first row, or None for zeros; also returns the last one.
        """
        features = self.network(obs.flatten(0, 1) / 255)  # [atari 9]
        hidden, state = self.run_lstm(features.unflatten(0, is_last.shape), is_last, state)
        return self.actor(hidden).log_softmax(-1), self.critic(hidden).squeeze(-1), state

    def run_lstm(self, features, is_last, state):
        """All steps up to the next episode end at once: learning is 1.5 times as fast."""
        ends = {*(np.flatnonzero(is_last.any(1)) + 1).tolist(), len(is_last)}
        hidden = []
        for start, end in pairwise([0, *sorted(ends)]):
            outputs, state = self.lstm(features[start:end], state)
            hidden.append(outputs)
            is_running = torch.from_numpy(~is_last[end - 1]).to(outputs.device)[:, None]
            state = tuple(x * is_running for x in state)  # [lstm 3]
        return torch.cat(hidden), state


def sample(log_probs):
    """Gumbel-max sampling, twice as fast as torch.distributions.Categorical."""
    exponential_noise = torch.empty_like(log_probs).exponential_()
    return (log_probs - exponential_noise.log()).argmax(-1)  # -log of it is Gumbel noise


def load_policy(checkpoint, envs, deterministic=False):
    """The trained policy for evaluation: samples its actions, or takes the most likely ones."""
    agent = Agent(envs).eval()
    agent.load_state_dict(checkpoint["agent"])
    state = None

    @torch.no_grad()
    def policy(obs, is_last):
        nonlocal state
        log_probs, _, state = agent(torch.from_numpy(obs[None]), is_last[None], state)
        actions = log_probs[0].argmax(-1) if deterministic else sample(log_probs[0])
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
        require_memory(args.num_envs * args.num_steps * math.prod(obs_space.shape))

    seed_everything(args)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the initial weights do not depend on the number of cores
    agent = Agent(envs)
    use_cuda = args.cuda and torch.cuda.is_available()
    device = torch.device("cuda" if use_cuda else "cpu")
    torch.set_num_threads(1 if use_cuda else num_threads)  # more would slow the emulators
    agent.to(device)
    adam = dict(lr=args.learning_rate, eps=1e-5, fused=True)  # [core 3]
    optimizer = torch.optim.Adam(agent.parameters(), **adam)
    modules = {"agent": agent, "optimizer": optimizer}
    global_step = start_step = restore_checkpoint(args, modules)
    run_folder, writer = open_run(args, device, global_step)
    logged_videos = set(run_folder.glob("videos/*.mp4"))
    if args.capture_video:
        envs = RecordVideo(envs, run_folder / "videos", global_step)

    # the rollout; obs[t] with is_last[t] ends an episode, and step t only resets that environment
    T, N = args.num_steps, args.num_envs
    obs = np.zeros((T + 1, N, *obs_space.shape), dtype=np.uint8)
    is_last = np.zeros((T + 1, N), dtype=bool)
    actions = np.zeros((T, N), dtype=np.int64)
    old_log_probs = np.zeros((T, N), dtype=np.float32)
    values = np.zeros((T + 1, N), dtype=np.float32)  # from the same forward pass as actions
    rewards = np.zeros((T, N), dtype=np.float32)
    terminated = np.zeros((T, N), dtype=bool)
    state = tuple(torch.zeros(2, 1, N, agent.lstm.hidden_size, device=device))  # [lstm 2]
    num_iterations = args.total_timesteps // (T * N)
    reset_seed = np.random.SeedSequence((args.seed, global_step)).generate_state(1)[0] >> 2
    obs[-1], _ = envs.reset(seed=int(reset_seed))  # the emulators take 31 bits
    start_time = time.time()
    progress = tqdm(initial=global_step, total=num_iterations * T * N, unit="step", unit_scale=True)

    for iteration in range(global_step // (T * N), num_iterations):
        if args.anneal_lr:  # [core 4]
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # act
        agent.eval()
        obs[0], is_last[0] = obs[-1], is_last[-1]
        first_state = state
        for t in range(T):
            with torch.no_grad():
                sequence = torch.from_numpy(obs[t, None]).to(device)  # of one step
                log_probs, value, state = agent(sequence, is_last[t, None], state)
            action = sample(log_probs[0])
            actions[t] = action.cpu().numpy()
            old_log_probs[t] = log_probs[0].gather(1, action[:, None]).squeeze(1).cpu().numpy()
            values[t] = value[0].cpu().numpy()
            next_step = envs.step(actions[t] + action_space.start)
            obs[t + 1], rewards[t], terminated[t], truncated, infos = next_step
            is_last[t + 1] = terminated[t] | truncated
            for i in np.flatnonzero(infos.get("_episode", ())):
                step, episode = global_step + i + 1, infos["episode"]
                writer.add_scalar("charts/episodic_return", episode["r"][i], step)
                writer.add_scalar("charts/episodic_length", episode["l"][i], step)
                progress.set_postfix(episodic_return=f"{episode['r'][i]:.1f}", refresh=False)
            global_step += N
            check_finite(args, global_step, reward=rewards[t])
            rewards[t] = np.sign(rewards[t])  # [atari 6]
        progress.update(T * N)

        # estimate advantages [core 5]; truncated episodes are bootstrapped, terminated ones are not
        with torch.no_grad():
            _, value, _ = agent(torch.from_numpy(obs[-1:]).to(device), is_last[-1:], state)
        values[-1] = value[0].cpu().numpy()
        deltas = rewards + args.gamma * values[1:] * ~terminated - values[:-1]
        advantages, advantage = np.zeros_like(rewards), np.float32(0)
        for t in reversed(range(T)):
            advantage = deltas[t] + args.gamma * args.gae_lambda * advantage * ~is_last[t + 1]
            advantages[t] = advantage
        returns = advantages + values[:-1]

        # learn, but not from the steps that only reset an environment
        b_actions, b_log_probs, b_values, b_advantages, b_returns = (
            torch.from_numpy(x[~is_last[:-1]]).to(device)
            for x in (actions, old_log_probs, values[:-1], advantages, returns)
        )
        sequences = torch.from_numpy(obs[:-1]).to(device)
        is_real = torch.from_numpy(~is_last[:-1]).to(device)
        row_numbers = is_real.flatten().cumsum(0).view(T, N) - 1  # of the real steps in the batch
        agent.train()
        clipfracs = []
        for _ in range(args.update_epochs):
            order = torch.randperm(N).numpy()
            for columns in np.array_split(order, args.num_minibatches):  # [core 6] [lstm 4]
                mb_state = tuple(x[:, columns] for x in first_state)  # [lstm 5]
                mb_is_last, mb_is_real = is_last[:-1, columns], is_real[:, columns]
                log_probs, value, _ = agent(sequences[:, columns], mb_is_last, mb_state)
                log_probs, value = log_probs[mb_is_real], value[mb_is_real]
                mb = row_numbers[:, columns][mb_is_real]
                log_ratio = log_probs.gather(1, b_actions[mb, None]).squeeze(1) - b_log_probs[mb]
                ratio = log_ratio.exp()
                adv = b_advantages[mb]
                if args.norm_adv:  # [core 7]
                    adv = (adv - adv.mean()) / (adv.std(correction=0) + 1e-8)

                clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                policy_loss = -torch.min(adv * ratio, adv * clipped_ratio).mean()  # [core 8]
                value_error = (value - b_returns[mb]) ** 2
                if args.clip_vloss:  # [core 9]
                    change = (value - b_values[mb]).clamp(-args.clip_coef, args.clip_coef)
                    clipped_error = (b_values[mb] + change - b_returns[mb]) ** 2
                    value_error = torch.max(value_error, clipped_error)
                value_loss = 0.5 * value_error.mean()
                p_log_p = log_probs.exp() * log_probs.clamp(min=-1e9)  # 0 where an action is masked
                entropy = -p_log_p.sum(1).mean()
                loss = (
                    policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
                )  # [core 10]

                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)  # [core 11]
                optimizer.step()
                clipfracs.append(((ratio - 1).abs() > args.clip_coef).float().mean())
            approx_kl = (ratio - 1 - log_ratio).mean()  # [core 12]
            old_approx_kl = -log_ratio.mean()
            if args.target_kl is not None and approx_kl > args.target_kl:
                break

        # log
        check_finite(args, global_step, loss=loss.item())
        for name, scalar in {
            "charts/learning_rate": optimizer.param_groups[0]["lr"],
            "charts/SPS": int((global_step - start_step) / (time.time() - start_time)),
            "losses/value_loss": value_loss,
            "losses/policy_loss": policy_loss,
            "losses/entropy": entropy,
            "losses/old_approx_kl": old_approx_kl,
            "losses/approx_kl": approx_kl,
            "losses/clipfrac": torch.stack(clipfracs).mean(),
            "losses/explained_variance": 1 - (b_returns - b_values).var() / b_returns.var(),
        }.items():
            writer.add_scalar(name, scalar, global_step)
        is_due = (iteration + 1) % args.checkpoint_interval == 0 or iteration + 1 == num_iterations
        if is_due or interrupted.is_set():
            writer.flush()
            if args.track:
                log_videos(run_folder, logged_videos, global_step)
            save_checkpoint(run_folder, modules, global_step)

    progress.close()
    envs.close()
    writer.close()
