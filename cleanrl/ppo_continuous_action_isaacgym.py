# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "brax>=0.14.2", "filelock>=3.20", "gymnasium>=1.2.1,<2", "jax>=0.9", "mjlab>=1.6", "numpy>=2",
#     "psutil>=7", "pydantic>=2.11", "tensorboard>=2.20", "torch>=2.9", "tqdm>=4.67", "tyro>=1.0",
#     "wandb>=0.22",
# ]
# ///
"""Proximal Policy Optimization (PPO) for GPU-vectorized environments: Brax, mjlab and Isaac Lab.

    uv run cleanrl/ppo_continuous_action_isaacgym.py                          # 4,096 Brax Ants
    uv run cleanrl/ppo_continuous_action_isaacgym.py --env-id Mjlab-Cartpole-Balance
    python cleanrl/ppo_continuous_action_isaacgym.py --env-id Isaac-Ant-v0    # needs Isaac Lab
    uv run cleanrl/ppo_continuous_action_isaacgym.py --resume runs/<run>
    tensorboard --logdir runs

Tags such as [isaac 2] refer to the implementation details in
docs/rl-algorithms/{ppo-isaacgym,ppo,ppo-continuous-action}.md.
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
    cuda: bool = True  # use a GPU, if there is one, for the environments and the networks
    track: bool = False  # log to Weights & Biases as well
    wandb_project_name: str = "cleanRL"  # W&B project
    wandb_entity: str | None = None  # W&B team
    capture_video: bool = False  # record the first environment to runs/<run>/videos
    record_video_step_frequency: int = 1464  # steps between the starts of two videos
    resume: str | None = None  # folder of an interrupted run to continue with its own flags
    checkpoint_interval: int = 100  # iterations between checkpoints

    env_id: str = "brax/ant"  # brax/..., Mjlab-..., Isaac-..., or module:id
    total_timesteps: int = 30_000_000  # environment steps of the whole run
    learning_rate: float = 0.0026  # initial learning rate of Adam
    num_envs: int = 4096  # parallel environments
    num_steps: int = 16  # rollout length of each environment
    anneal_lr: bool = False  # anneal the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 2  # minibatches per epoch
    update_epochs: int = 4  # epochs over each rollout
    norm_adv: bool = True  # normalize advantages per minibatch
    clip_coef: float = 0.2  # clipping range of the surrogate objective
    clip_vloss: bool = False  # clip the value loss by the same range
    ent_coef: float = 0.0  # entropy coefficient
    vf_coef: float = 2.0  # value loss coefficient
    max_grad_norm: float = 1.0  # maximum gradient norm
    target_kl: float | None = None  # stop the update epochs early above this KL divergence
    reward_scaler: float = 1.0  # scale of the rewards for learning

    def check(self):
        """Reject invalid flags before anything is written."""
        require_positive(self, "num_envs", "num_steps", "num_minibatches", "update_epochs")
        require_positive(self, "learning_rate", "clip_coef", "max_grad_norm", "checkpoint_interval")
        require_fraction(self, "gamma", "gae_lambda")
        batch_size = self.num_envs * self.num_steps
        require(self.total_timesteps >= batch_size, "total_timesteps is less than one rollout")
        require(self.num_minibatches <= batch_size, f"num_minibatches must be at most {batch_size}")
        require_positive(self, "record_video_step_frequency")


class BraxEnvs:
    """Brax with Isaac Lab's API: stepped by JAX, shared with PyTorch by DLPack [isaac 5]."""

    def __init__(self, name, num_envs, device, episode_length=1000):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves GPU memory to us
        flags = os.environ.get("XLA_FLAGS", "")
        if "deterministic" not in flags:  # the same bits on a GPU, too; XLA reads its flags once
            os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true"
        import brax.envs
        import jax
        import jax.numpy as jnp
        from brax.spring import collisions, joints

        def segment_sum(x, links, num_links):
            """Sums the forces by link, in a fixed order also on a GPU."""
            is_link = (links == jnp.arange(num_links)[:, None]) * 1.0
            return jnp.tensordot(is_link, x, 1, precision="highest")

        collisions.segment_sum = segment_sum
        joints.segment_sum = segment_sum
        jax.config.update("jax_default_matmul_precision", "highest")  # physics needs full precision
        env = brax.envs.get_environment(name, backend="spring")

        def observe(state):
            """Observations, rewards and terminations; a diverged simulation terminates."""
            obs = (
                state.obs["state"] if isinstance(state.obs, dict) else state.obs
            )  # not the critic's
            is_sane = (jnp.abs(obs) < 1e4).all(-1)  # those of Brax's robots are below 200
            is_broken = ~(is_sane & jnp.isfinite(state.reward))
            return obs, jnp.where(is_broken, 0, state.reward), is_broken | (state.done > 0)

        def start(key, number):
            """New episodes: the world of all environments, and their first observations."""
            keys = jax.random.split(jax.random.fold_in(key, number), num_envs)
            state = jax.vmap(env.reset)(keys)
            return (state, jnp.zeros(num_envs, dtype=jnp.int32)), observe(state)[0]

        def advance(key, number, world, pool, actions):
            """One step; episodes that end are replaced by episodes of a pool, in random order."""
            state, lengths = world
            state, lengths = jax.vmap(env.step)(state, actions), lengths + 1
            final_obs, rewards, terminated = observe(state)
            is_over = terminated | (lengths >= episode_length)
            shift = jax.random.randint(jax.random.fold_in(key, number), (), 0, num_envs)
            order = jnp.roll(jnp.arange(num_envs), shift)

            def replace(new, old):
                return jnp.where(is_over.reshape(-1, *[1] * (old.ndim - 1)), new[order], old)

            world = jax.tree.map(replace, pool, (state, lengths))
            obs, _, _ = observe(world[0])
            return world, (obs, rewards, terminated, is_over & ~terminated, final_obs)

        self.jax = jax
        self.place = jax.devices(device.type)[0]
        self.from_dlpack = jax.dlpack.from_dlpack
        self.start = jax.jit(start)
        self.advance = jax.jit(advance)
        self.num_envs = num_envs
        self.device = device
        self.metadata = {"render_modes": []}
        _, obs = jax.eval_shape(start, jax.random.PRNGKey(0), 0)
        policy_space = gym.spaces.Box(-np.inf, np.inf, obs.shape[1:])
        self.single_observation_space = gym.spaces.Dict(policy=policy_space)
        self.single_action_space = gym.spaces.Box(-1, 1, (env.action_size,))

    def reset(self, seed=None):
        self.key = self.jax.device_put(self.jax.random.PRNGKey(seed or 0), self.place)
        self.number = 0
        self.world, obs = self.start(self.key, 0)
        return {"policy": torch.from_dlpack(obs)}, {}

    def step(self, actions):
        self.number += 1
        if (
            self.number % 16 == 1
        ):  # drawing new episodes at each step would take as long as the step
            self.pool, _ = self.start(self.key, self.number)
        actions = self.from_dlpack(actions)
        self.world, self.answers = self.advance(  # self keeps them while PyTorch reads them
            self.key, self.number, self.world, self.pool, actions
        )
        obs, rewards, terminated, truncated, final_obs = map(torch.from_dlpack, self.answers)
        infos = {"final_obs": {"policy": final_obs}}
        return {"policy": obs}, rewards, terminated, truncated, infos


class TensorEnvs(gym.vector.VectorEnv):
    """Environments with Isaac Lab's API, whose tensors stay on their device [isaac 1].

    A step that ends an episode returns the first observation of the next one.
    """

    def __init__(self, env, render_mode):
        self.env = env
        self.num_envs = env.num_envs
        self.device = torch.device(env.device)
        self.render_mode = render_mode
        self.is_finite = getattr(getattr(env, "cfg", None), "is_finite_horizon", False)
        groups = getattr(env.single_observation_space, "spaces", {})
        self.group = "policy" if "policy" in groups else "actor"  # others may be for a critic only
        obs_shape = getattr(groups.get(self.group), "shape", None) or ()
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, obs_shape)
        self.single_action_space = env.single_action_space
        if hasattr(env.single_action_space, "low"):  # mjlab has its own Box class
            shape = env.single_action_space.shape
            low = np.broadcast_to(np.float32(env.single_action_space.low), shape)
            high = np.broadcast_to(np.float32(env.single_action_space.high), shape)
            self.single_action_space = gym.spaces.Box(low, high)
            self.low = torch.tensor(low, device=self.device)
            self.high = torch.tensor(high, device=self.device)
        fps = round(env.metadata.get("render_fps", 30))
        same_step = gym.vector.AutoresetMode.SAME_STEP
        self.metadata = env.metadata | {"render_fps": fps, "autoreset_mode": same_step}

    def reset(self, *, seed=None, options=None):
        self.returns = torch.zeros(self.num_envs, device=self.device)
        self.lengths = torch.zeros(self.num_envs, device=self.device)
        obs, infos = self.env.reset(seed=seed)
        return obs[self.group], infos

    def step(self, actions):
        self.sent = actions.clamp(self.low, self.high)  # [continuous 5]; kept while JAX reads it
        obs, rewards, terminated, truncated, infos = self.env.step(self.sent)
        is_over = terminated | truncated
        episode = {"r": self.returns + rewards, "l": self.lengths + 1}
        self.returns = episode["r"].masked_fill(is_over, 0)
        self.lengths = episode["l"].masked_fill(is_over, 0)
        infos = infos | {"episode": episode, "_episode": is_over}
        if "final_obs" in infos:
            infos["final_obs"] = infos["final_obs"][self.group]
        if self.is_finite:  # the time limit is a part of the task [isaac 6]
            terminated = is_over
        return obs[self.group], rewards, terminated, truncated, infos

    def render(self):
        return [self.env.render()] * self.num_envs  # one image shows the first or all of them

    def close_extras(self, **kwargs):
        if hasattr(self.env, "close"):
            self.env.close()


@contextmanager
def installed_with(instructions):
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}: {instructions}") from None


def make_mjlab(env_id, num_envs, seed, device, render_mode):
    import mjlab.tasks  # noqa: F401  registers them
    from mjlab.envs import ManagerBasedRlEnv
    from mjlab.tasks.registry import load_env_cfg

    cfg = load_env_cfg(env_id)
    cfg.scene.num_envs = num_envs
    cfg.seed = seed
    return ManagerBasedRlEnv(cfg=cfg, device=str(device), render_mode=render_mode)


def make_isaac_lab(env_id, num_envs, seed, device, render_mode):
    if env_id.startswith("Isaac-") and env_id not in gym.registry:
        launcher = importlib.import_module("isaaclab.app").AppLauncher
        app = launcher(headless=True, enable_cameras=render_mode is not None).app
        atexit.register(app.close)
        importlib.import_module("isaaclab_tasks")  # only where the app runs
    make_cfg = gym.spec(env_id).kwargs.get("env_cfg_entry_point")
    require(make_cfg, "it is not registered with an env_cfg_entry_point, as Isaac Lab's tasks are")
    if isinstance(make_cfg, str):
        make_cfg = gym.envs.registration.load_env_creator(make_cfg)
    cfg = make_cfg()
    cfg.scene.num_envs = num_envs
    cfg.seed = seed
    cfg.sim.device = str(device)
    cfg.compute_final_obs = True  # [isaac 2] old versions ignore it
    return gym.make(env_id, cfg=cfg, render_mode=render_mode)


def make_envs(args, num_envs, render_mode=None):
    device = torch.device("cuda:0" if args.cuda and torch.cuda.is_available() else "cpu")
    *modules, env_id = args.env_id.split(":")
    for module in modules:  # which register it
        importlib.import_module(module)
    if render_mode:
        importlib.import_module("moviepy")  # may not be installed with mjlab
    settings = num_envs, args.seed % 2**31, device, render_mode
    if env_id.startswith("brax/"):
        with installed_with("pip install -r requirements/requirements-brax.txt"):
            env = BraxEnvs(env_id.removeprefix("brax/"), num_envs, device)  # [core 1]
    elif env_id.startswith("Mjlab-"):
        with installed_with("pip install -r requirements/mjlab.in"):
            env = make_mjlab(env_id, *settings).unwrapped
    else:
        with installed_with("install Isaac Lab as NVIDIA's instructions say"):
            env = make_isaac_lab(env_id, *settings).unwrapped
    return TensorEnvs(env, render_mode)


def layer_init(layer, gain=2**0.5):
    nn.init.orthogonal_(layer.weight, gain)  # [core 2]
    nn.init.zeros_(layer.bias)
    return layer


def mlp(in_dim, out_dim, gain):
    return nn.Sequential(  # [isaac 4]
        layer_init(nn.Linear(in_dim, 256)),
        nn.Tanh(),
        layer_init(nn.Linear(256, 256)),
        nn.Tanh(),
        layer_init(nn.Linear(256, out_dim), gain),
    )


class RunningMoments(nn.Module):
    """Mean and variance of all rows so far, in buffers, which checkpoints include."""

    def __init__(self, shape):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))

    def update(self, rows):
        self.count += len(rows)
        share = len(rows) / self.count
        delta = rows.mean(0) - self.mean
        self.mean += share * delta
        self.var += share * (rows.var(0, correction=0) - self.var + (1 - share) * delta**2)


class Agent(nn.Module):
    """Separate networks for the policy and the value function [core 13]."""

    def __init__(self, envs):
        super().__init__()
        obs_dim = int(np.prod(envs.single_observation_space.shape))
        self.obs_moments = RunningMoments(obs_dim)
        self.log_std = nn.Parameter(torch.zeros(envs.single_action_space.shape))  # [continuous 2]
        self.actor = mlp(obs_dim, self.log_std.numel(), gain=0.01)  # [continuous 4]
        self.critic = mlp(obs_dim, 1, gain=1.0)

    def normalize(self, obs, update=False):
        """Observations with mean 0 and variance 1; training updates the moments, too."""
        obs = obs.double()
        if update:
            self.obs_moments.update(obs)
        mean, var = self.obs_moments.mean, self.obs_moments.var
        normalized = (obs - mean) / (var + 1e-8).sqrt()  # [continuous 6]
        return normalized.clamp(-10, 10).float()  # [continuous 7]

    def policy(self, obs):
        """Mean of the Gaussian policy."""
        return self.actor(obs).view(-1, *self.log_std.shape)

    def value(self, obs):
        return self.critic(obs).squeeze(-1)


def sample(mean, log_std):
    return mean + log_std.exp() * torch.randn_like(mean)  # [continuous 1]


def log_prob(mean, log_std, actions):
    """Log-density of each action: the sum over its independent components [continuous 3]."""
    z = (actions - mean) / log_std.exp()
    log_densities = -0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi)
    return log_densities.reshape(len(mean), -1).sum(1)


def load_policy(checkpoint, envs, deterministic=False):
    """The trained policy for evaluation: samples its actions, or takes the most likely ones."""
    agent = Agent(envs).to(envs.device).eval()
    agent.load_state_dict(checkpoint["agent"])

    @torch.no_grad()
    def policy(obs, is_last):
        mean = agent.policy(agent.normalize(obs))
        return mean if deterministic else sample(mean, agent.log_std)

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
        require(len(obs_space.shape) == 1, "flat observations called policy or actor are needed")
        is_continuous = isinstance(action_space, gym.spaces.Box) and action_space.dtype.kind == "f"
        require(is_continuous, "continuous actions are needed")
        require_envs(args, envs, mode=gym.vector.AutoresetMode.SAME_STEP)
        require_memory(8 * args.num_envs * args.num_steps * math.prod(obs_space.shape))

    seed_everything(args)
    torch.use_deterministic_algorithms(args.torch_deterministic, warn_only=True)  # for simulators
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the initial weights do not depend on the number of cores
    agent = Agent(envs)
    minibatch_size = args.num_envs * args.num_steps // args.num_minibatches
    work = minibatch_size * sum(p.numel() for p in agent.parameters())  # multiplications
    device = envs.device
    torch.set_num_threads(1 if device.type == "cuda" or work < 2**24 else num_threads)
    agent.to(device)
    adam = dict(lr=args.learning_rate, eps=1e-5, fused=True)  # [core 3]
    optimizer = torch.optim.Adam(agent.parameters(), **adam)
    modules = {"agent": agent, "optimizer": optimizer}
    global_step = start_step = restore_checkpoint(args, modules)
    run_folder, writer = open_run(args, device, global_step)
    logged_videos = set(run_folder.glob("videos/*.mp4"))
    if args.capture_video:
        envs = gym.wrappers.vector.RecordVideo(
            envs,
            f"{run_folder}/videos",
            name_prefix=f"step-{global_step}",
            record_first_only=True,
            step_trigger=lambda step: step % args.record_video_step_frequency == 0,
            video_length=200,
        )

    # the rollout, on the device; step t with is_over[t] ends an episode, obs[t + 1] starts the next
    T, N = args.num_steps, args.num_envs
    obs = torch.zeros((T + 1, N, *obs_space.shape), device=device)
    last_obs = torch.zeros((T, N, *obs_space.shape), device=device)  # of the episodes that end
    actions = torch.zeros((T, N, *action_space.shape), device=device)
    rewards = torch.zeros((T, N), device=device)
    terminated = torch.zeros((T, N), dtype=torch.bool, device=device)
    is_over = torch.zeros((T, N), dtype=torch.bool, device=device)
    episodic_returns = torch.zeros((T, N), device=device)
    episodic_lengths = torch.zeros((T, N), device=device)
    num_iterations = args.total_timesteps // (T * N)
    reset_seed = np.random.SeedSequence((args.seed, global_step)).generate_state(1)[0] // 2
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        raw_obs, _ = envs.reset(seed=int(reset_seed))  # simulators seed all of PyTorch
    obs[-1] = agent.normalize(raw_obs, update=True)
    start_time = time.time()
    progress = tqdm(initial=global_step, total=num_iterations * T * N, unit="step", unit_scale=True)

    for iteration in range(global_step // (T * N), num_iterations):
        if args.anneal_lr:  # [core 4]
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # act
        agent.eval()
        obs[0] = obs[-1]
        largest_obs = torch.zeros((), device=device)
        for t in range(T):
            with torch.no_grad():
                actions[t] = sample(agent.policy(obs[t]), agent.log_std)
            raw_obs, raw_rewards, terminated[t], _, infos = envs.step(actions[t])
            obs[t + 1] = agent.normalize(raw_obs, update=True)
            last_obs[t] = obs[t]
            if "final_obs" in infos:  # otherwise the previous observation is used [isaac 2]
                last_obs[t] = agent.normalize(infos["final_obs"])
            rewards[t] = raw_rewards * args.reward_scaler  # [isaac 3]
            is_over[t] = infos["_episode"]
            episodic_returns[t] = infos["episode"]["r"]
            episodic_lengths[t] = infos["episode"]["l"]
            largest_obs = torch.maximum(largest_obs, raw_obs.abs().max().float())
        global_step += T * N
        progress.update(T * N)

        # estimate advantages [core 5]; truncated episodes are bootstrapped, terminated ones are not
        with torch.no_grad():
            values = agent.value(obs)
            last_values = agent.value(last_obs)
        next_values = torch.where(is_over, last_values, values[1:]).masked_fill(terminated, 0)
        deltas = rewards + args.gamma * next_values - values[:-1]
        advantages, advantage = torch.zeros_like(rewards), 0
        for t in reversed(range(T)):
            advantage = deltas[t] + args.gamma * args.gae_lambda * advantage * ~is_over[t]
            advantages[t] = advantage
        returns = advantages + values[:-1]

        # learn
        b_obs, b_actions, b_values, b_advantages, b_returns = (
            x.flatten(0, 1) for x in (obs[:-1], actions, values[:-1], advantages, returns)
        )
        with torch.no_grad():
            b_log_probs = log_prob(agent.policy(b_obs), agent.log_std, b_actions)
        agent.train()
        clipfracs = []
        for _ in range(args.update_epochs):
            order = torch.randperm(len(b_obs), device=device)
            for mb in order.tensor_split(args.num_minibatches):  # [core 6]
                mean, value = agent.policy(b_obs[mb]), agent.value(b_obs[mb])
                log_ratio = log_prob(mean, agent.log_std, b_actions[mb]) - b_log_probs[mb]
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
                entropies = agent.log_std + 0.5 * math.log(2 * math.pi * math.e)
                entropy = entropies.sum()  # [continuous 3]
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

        # log; only here does an iteration wait for the device [isaac 1]
        tensors = {
            "observation": largest_obs,
            "reward": rewards.sum(),
            "loss": loss,
            "losses/value_loss": value_loss,
            "losses/policy_loss": policy_loss,
            "losses/entropy": entropy,
            "losses/old_approx_kl": old_approx_kl,
            "losses/approx_kl": approx_kl,
            "losses/clipfrac": torch.stack(clipfracs).mean(),
            "losses/explained_variance": 1 - (b_returns - b_values).var() / b_returns.var(),
        }
        successes = infos.get("log", {}).get("consecutive_successes")  # of hands that turn objects
        if successes is not None:
            successes = torch.as_tensor(successes, dtype=torch.float32, device=device)
            tensors["charts/consecutive_successes"] = successes
        scalars = dict(zip(tensors, torch.stack(list(tensors.values())).tolist(), strict=True))
        checked = {name: scalars.pop(name) for name in ("observation", "reward", "loss")}
        check_finite(args, global_step, **checked)
        if checked["observation"] > 1e6:  # a single one would ruin the moments permanently
            largest = f"{checked['observation']:g}, more than 1e6"
            raise SystemExit(f"observation of {args.env_id} at step {global_step}: {largest}")
        scalars["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
        scalars["charts/SPS"] = int((global_step - start_step) / (time.time() - start_time))
        for name, scalar in scalars.items():
            writer.add_scalar(name, scalar, global_step)
        episodes = torch.stack([is_over, episodic_returns, episodic_lengths]).flatten(1)
        ended, episodic_return, episodic_length = episodes.cpu().numpy()
        for i in np.flatnonzero(ended):
            step = global_step - T * N + i + 1
            writer.add_scalar("charts/episodic_return", episodic_return[i], step)
            writer.add_scalar("charts/episodic_length", episodic_length[i], step)
            progress.set_postfix(episodic_return=f"{episodic_return[i]:.1f}", refresh=False)
        is_due = (iteration + 1) % args.checkpoint_interval == 0 or iteration + 1 == num_iterations
        if is_due or interrupted.is_set():
            writer.flush()
            if args.track:
                log_videos(run_folder, logged_videos, global_step)
            save_checkpoint(run_folder, modules, global_step)

    progress.close()
    envs.close()
    writer.close()
