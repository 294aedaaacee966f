# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "envpool>=1.2.5", "filelock>=3.20", "flax>=0.12",
#     "gymnasium>=1.2.1,<2", "jax>=0.9", "moviepy>=2", "numpy>=2", "optax>=0.2.6", "psutil>=7",
#     "pydantic>=2.11", "tensorboard>=2.20", "tqdm>=4.67", "tyro>=1.0", "wandb>=0.22",
# ]
# ///
"""Proximal Policy Optimization (PPO) for Atari games: each iteration is one compiled program.

EnvPool's emulators are called from inside the program.

    uv run cleanrl/ppo_atari_envpool_xla_jax.py                      # Breakout-v5, 40M frames
    uv run cleanrl/ppo_atari_envpool_xla_jax.py --env-id Pong-v5 --num-envs 128
    uv run cleanrl/ppo_atari_envpool_xla_jax.py --sticky             # as in Machado et al. (2018)
    uv run cleanrl/ppo_atari_envpool_xla_jax.py --resume runs/<run>  # continue an interrupted run
    tensorboard --logdir runs

Tags such as [core 5] refer to the implementation details in
docs/rl-algorithms/{ppo,ppo-atari,ppo-envpool-xla}.md.
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
from collections import deque
from contextlib import contextmanager, suppress
from contextvars import Context
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

if "deterministic" not in os.environ.setdefault("XLA_FLAGS", ""):  # XLA reads it only once
    os.environ["XLA_FLAGS"] += " --xla_gpu_deterministic_ops=true"  # the same bits on a GPU too
import envpool
import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
import tyro
from filelock import FileLock, Timeout
from flax.linen.initializers import orthogonal
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
    checkpoint_interval: int = 100  # iterations between checkpoints

    env_id: str = "Breakout-v5"  # EnvPool environment id
    sticky: bool = False  # sticky actions (probability 0.25); loss of life does not end the episode
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
    clip_vloss: bool = False  # clip the value loss by the same range
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
        divides_batch = batch_size % self.num_minibatches == 0
        require(divides_batch, f"num_minibatches must divide a rollout of {batch_size} steps")
        require(not self.capture_video, "pools have no rgb_array rendering for --capture-video")


class AtariPool(gym.vector.VectorWrapper):
    """EnvPool's games with the scores of whole games; a lost life ends an episode [atari 3]."""

    render_mode = "rgb_array"

    def __init__(self, make_pool):
        super().__init__(make_pool(seed=0))
        self.make_pool = make_pool
        next_step = gym.vector.AutoresetMode.NEXT_STEP
        rendering = {"render_modes": ["rgb_array"], "render_fps": 15}
        self.metadata = {"autoreset_mode": next_step, **rendering}

    def reset(self, *, seed=None, options=None):
        if seed is not None:  # a pool can only be seeded when it is made
            self.env = self.make_pool(seed=seed)
        self.scores = np.zeros(self.num_envs)
        self.obs, infos = self.env.reset()
        return self.obs, infos

    def recv(self):
        self.obs, rewards, terminated, truncated, infos = self.env.recv()
        self.scores += rewards
        is_over = infos["terminated"].astype(bool) | truncated  # the game, not only a life
        if is_over.any():
            infos["episode"] = {"r": self.scores.copy(), "l": infos["elapsed_step"]}
            infos["_episode"] = is_over
            self.scores[is_over] = 0
        return self.obs, rewards, terminated, truncated, infos

    def step(self, actions):
        self.env.send(actions)
        return self.recv()

    def render(self):
        """The newest frame of each environment as an enlarged RGB image for videos."""
        frames = self.obs[:, -1, :, :, None]
        return list(frames.repeat(4, axis=1).repeat(4, axis=2).repeat(3, axis=3))


def make_envs(args, num_envs, render_mode=None):
    start = dict(noop_max=30, use_fire_reset=True)  # [atari 1, 4]
    frames = dict(frame_skip=4, stack_num=4)  # [atari 2, 7]
    images = dict(gray_scale=True, img_height=84, img_width=84)  # [atari 5]
    lives = dict(episodic_life=not args.sticky)  # [atari 3]
    rules = dict(repeat_action_probability=0.25 if args.sticky else 0.0, reward_clip=False)
    settings = start | frames | images | lives | rules | dict(task_id=args.env_id)
    return AtariPool(partial(envpool.make_gymnasium, num_envs=num_envs, **settings))  # [core 1]


class Agent(nn.Module):
    """One network, the Nature CNN, for the policy and the value function [atari 8]."""

    num_actions: int

    @nn.compact
    def __call__(self, obs):
        """Log-probabilities of all actions, and values."""
        conv = partial(nn.Conv, padding="VALID", kernel_init=orthogonal(2**0.5))  # [core 2]
        features = jnp.moveaxis(obs, 1, -1) / 255  # [atari 9], JAX has the channels last
        features = nn.relu(conv(32, (8, 8), 4)(features))
        features = nn.relu(conv(64, (4, 4), 2)(features))
        features = nn.relu(conv(64, (3, 3), 1)(features)).reshape(len(obs), -1)
        hidden = nn.relu(nn.Dense(512, kernel_init=orthogonal(2**0.5))(features))
        logits = nn.Dense(self.num_actions, kernel_init=orthogonal(0.01))(hidden)
        values = nn.Dense(1, kernel_init=orthogonal(1.0))(hidden).squeeze(-1)
        return nn.log_softmax(logits), values


def load_policy(checkpoint, envs, deterministic=False):
    """The trained policy for evaluation: samples its actions, or takes the most likely ones."""
    agent = Agent(int(envs.single_action_space.n))
    keys = map(jax.random.key, itertools.count())

    @jax.jit
    def act(key, obs):
        log_probs, _ = agent.apply(checkpoint["agent"]["params"], obs)
        return log_probs.argmax(-1) if deterministic else jax.random.categorical(key, log_probs)

    def policy(obs, is_last):
        return np.asarray(act(next(keys), obs)) + envs.single_action_space.start

    return policy


def make_program(args, network):
    """The functions init(key, obs) -> agent, and iterate: one rollout, and the updates on it.

    iterate(step, agent, world, iteration) -> agent, world, logs has EnvPool's step inside.
    """
    T, N = args.num_steps, args.num_envs
    num_iterations = args.total_timesteps // (T * N)
    clip = optax.clip_by_global_norm(args.max_grad_norm)  # [core 11]
    optimizer = optax.chain(clip, optax.scale_by_adam(eps=1e-5))  # [core 3]

    def init(key, obs):
        params = network.init(key, obs)
        return dict(params=params, opt_state=optimizer.init(params))

    def act(step, params, world, noise):
        """One step of all environments; each takes the handle of the one before [xla 1]."""
        log_probs, values = network.apply(params, world["obs"])
        actions = (log_probs + noise).argmax(-1)  # Gumbel-max sampling
        handle, results = step(world["handle"], actions)
        obs, rewards, terminated, truncated, infos = results
        row = dict(
            obs=world["obs"],
            actions=actions,
            log_probs=jnp.take_along_axis(log_probs, actions[:, None], 1).squeeze(1),
            values=values,
            rewards=jnp.sign(rewards),  # [atari 6]
            terminated=terminated,
            is_last=world["is_last"],
        )
        scores = world["scores"] + rewards
        is_over = infos["terminated"].astype(bool) | truncated  # the game, not only a life
        is_last = terminated | truncated
        world = dict(handle=handle, obs=obs, is_last=is_last, scores=scores * ~is_over)
        return world, (row, (is_over, scores, infos["elapsed_step"]))  # [xla 3]

    def estimate(values, rewards, terminated, is_last):
        """Advantages [core 5]; truncated episodes are bootstrapped, terminated ones are not."""
        deltas = rewards + args.gamma * values[1:] * ~terminated - values[:-1]
        advantages, advantage = [], jnp.zeros(N)
        for t in reversed(range(T)):
            advantage = deltas[t] + args.gamma * args.gae_lambda * advantage * ~is_last[t + 1]
            advantages.append(advantage)
        return jnp.stack(advantages[::-1])

    def minibatch_loss(params, mb):
        """The rows of steps that only reset an environment have zero weight [xla 4]."""
        weights = mb["is_real"] / jnp.maximum(mb["is_real"].sum(), 1)
        log_probs, value = network.apply(params, mb["obs"])
        log_prob = jnp.take_along_axis(log_probs, mb["actions"][:, None], 1).squeeze(1)
        log_ratio = log_prob - mb["log_probs"]
        ratio = jnp.exp(log_ratio)
        adv = mb["advantages"]
        if args.norm_adv:  # [core 7]
            adv = adv - (weights * adv).sum()
            adv = adv / (jnp.sqrt((weights * adv**2).sum()) + 1e-8)

        clipped_ratio = ratio.clip(1 - args.clip_coef, 1 + args.clip_coef)
        policy_gain = jnp.minimum(adv * ratio, adv * clipped_ratio)
        policy_loss = -(weights * policy_gain).sum()  # [core 8]
        value_error = jnp.square(value - mb["returns"])
        if args.clip_vloss:  # [core 9]
            change = (value - mb["values"]).clip(-args.clip_coef, args.clip_coef)
            clipped_error = jnp.square(mb["values"] + change - mb["returns"])
            value_error = jnp.maximum(value_error, clipped_error)
        value_loss = 0.5 * (weights * value_error).sum()
        p_log_p = jnp.exp(log_probs) * log_probs.clip(-1e9)  # 0 where an action is masked
        entropy = -(weights * p_log_p.sum(1)).sum()
        loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy  # [core 10]
        return loss, {
            "loss": loss,
            "value_loss": value_loss,
            "policy_loss": policy_loss,
            "entropy": entropy,
            "old_approx_kl": -(weights * log_ratio).sum(),  # [core 12]
            "approx_kl": (weights * (ratio - 1 - log_ratio)).sum(),
            "clipfrac": (weights * (jnp.abs(ratio - 1) > args.clip_coef)).sum(),
        }

    def shuffle(key):
        """The rows of each minibatch of an epoch [core 6]."""
        return jax.random.permutation(key, T * N).reshape(args.num_minibatches, -1)

    def iterate(step, agent, world, iteration):
        # act
        key = jax.random.fold_in(jax.random.key(args.seed), iteration)
        noise_key, order_key = jax.random.split(key)
        noise = jax.random.gumbel(noise_key, (T, N, network.num_actions))
        steps = []
        for t in range(T):  # this and the other loops are unrolled by the compiler [xla 2]
            world, row = act(step, agent["params"], world, noise[t])
            steps.append(row)
        rollout, games = jax.tree.map(lambda *rows: jnp.stack(rows), *steps)

        # estimate advantages
        _, last_values = network.apply(agent["params"], world["obs"])
        values = jnp.append(rollout["values"], last_values[None], 0)
        is_last = jnp.append(rollout["is_last"], world["is_last"][None], 0)
        advantages = estimate(values, rollout["rewards"], rollout["terminated"], is_last)
        returns = advantages + values[:-1]
        is_real = ~is_last[:-1]

        # learn
        rollout |= dict(advantages=advantages, returns=returns, is_real=is_real)
        batch = {name: x.reshape(T * N, *x.shape[2:]) for name, x in rollout.items()}
        learning_rate = args.learning_rate
        if args.anneal_lr:  # [core 4]
            learning_rate = args.learning_rate * (1 - iteration / num_iterations)

        def update(learner, rows):
            mb = {name: x[rows] for name, x in batch.items()}
            grads, losses = jax.grad(minibatch_loss, has_aux=True)(learner["params"], mb)
            updates, opt_state = optimizer.update(grads, learner["opt_state"])
            updates = optax.tree.scale(-learning_rate, updates)
            return learner | dict(
                params=optax.apply_updates(learner["params"], updates),
                opt_state=opt_state,
                losses=losses,
                clipfracs=learner["clipfracs"] + losses["clipfrac"],
                num_updates=learner["num_updates"] + 1,
            )

        def skip(learner, rows):
            return learner

        def learn(learner, rows):
            if args.target_kl is None:
                return update(learner, rows)
            return jax.lax.cond(learner["is_far"], skip, update, learner, rows)  # [xla 5]

        def learn_epoch(learner, order):
            for rows in order:
                learner = learn(learner, rows)
            if args.target_kl is not None:
                is_far = learner["losses"]["approx_kl"] > args.target_kl
                learner |= dict(is_far=learner["is_far"] | is_far)
            return learner

        names = ("loss", "value_loss", "policy_loss", "entropy")
        names += ("old_approx_kl", "approx_kl", "clipfrac")
        learner = dict(
            params=agent["params"],
            opt_state=agent["opt_state"],
            losses=dict.fromkeys(names, jnp.zeros(())),
            clipfracs=jnp.zeros(()),
            num_updates=jnp.zeros(()),
            is_far=jnp.array(False),
        )
        orders = jax.vmap(shuffle)(jax.random.split(order_key, args.update_epochs))
        for order in orders:
            learner = learn_epoch(learner, order)
        agent = dict(params=learner["params"], opt_state=learner["opt_state"])

        # log
        def variance(x):
            weights = is_real / jnp.maximum(is_real.sum(), 1)
            return (weights * jnp.square(x - (weights * x).sum())).sum()

        losses = learner["losses"] | {
            "clipfrac": learner["clipfracs"] / learner["num_updates"],
            "explained_variance": 1 - variance(advantages) / variance(returns),
        }
        scalars = {f"losses/{name}": loss for name, loss in losses.items()}
        return agent, world, (scalars | {"charts/learning_rate": learning_rate}, games)

    return init, iterate


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
        envs = make_envs(args, args.num_envs)
        obs_space, action_space = envs.single_observation_space, envs.single_action_space
        require(isinstance(obs_space, gym.spaces.Box), "Box observations are needed")
        require(isinstance(action_space, gym.spaces.Discrete), "Discrete actions are needed")
        require_envs(args, envs)
        require_memory(args.num_envs * args.num_steps * math.prod(obs_space.shape))

    if not args.cuda:
        jax.config.update("jax_platforms", "cpu")  # before JAX makes its first array
    key = seed_everything(args)
    device = jax.devices()[0]
    jax.config.update("jax_default_matmul_precision", "highest")  # acting and learning agree
    init, iterate = make_program(args, Agent(int(action_space.n)))
    init = jax.jit(init, compiler_options={"xla_backend_optimization_level": 0})  # compiles quickly
    agent = init(key, np.zeros((1, *obs_space.shape), dtype=np.uint8))
    saved, global_step = restore_checkpoint(args, {"agent": agent})
    agent = saved["agent"]
    start_step = global_step
    run_folder, writer = open_run(args, device, global_step)

    T, N = args.num_steps, args.num_envs
    num_iterations = args.total_timesteps // (T * N)
    reset_seed = np.random.SeedSequence((args.seed, global_step)).generate_state(1)[0]
    obs, _ = envs.reset(seed=int(reset_seed // 2))  # EnvPool takes 31 bits
    handle, _, _, step = envs.env.xla()
    is_last, scores = np.zeros(N, dtype=bool), np.zeros(N, dtype=np.float32)
    world = dict(handle=handle, obs=obs, is_last=is_last, scores=scores)
    world = jax.tree.map(jnp.array, world)
    program = jax.jit(partial(iterate, step), donate_argnums=0)
    program = program.lower(agent, world, global_step // (T * N)).compile()
    last_games = deque(maxlen=20)
    start_time = time.time()  # after compilation [xla 6]
    progress = tqdm(initial=global_step, total=num_iterations * T * N, unit="step", unit_scale=True)

    for iteration in range(global_step // (T * N), num_iterations):
        # act, estimate advantages and learn in one call of the program
        iteration_start = time.time()
        agent, world, logs = program(agent, world, iteration)
        scalars, (is_over, returns, lengths) = jax.device_get(logs)
        for t, i in np.argwhere(is_over):
            last_games.append((returns[t, i], lengths[t, i]))
            average_return, average_length = np.mean(last_games, axis=0)
            episode = {
                "charts/episodic_return": returns[t, i],
                "charts/episodic_length": lengths[t, i],
                "charts/avg_episodic_return": average_return,
                "charts/avg_episodic_length": average_length,
            }
            writer.add_scalars(global_step + t * N + i + 1, episode)
            progress.set_postfix(episodic_return=f"{returns[t, i]:.1f}", refresh=False)
        global_step += T * N
        check_finite(args, global_step, reward=returns)
        progress.update(T * N)

        # log
        check_finite(args, global_step, loss=scalars["losses/loss"])
        speeds = {
            "charts/SPS": int((global_step - start_step) / (time.time() - start_time)),
            "charts/SPS_update": int(T * N / (time.time() - iteration_start)),  # this iteration
        }
        writer.add_scalars(global_step, scalars | speeds)
        is_due = (iteration + 1) % args.checkpoint_interval == 0 or iteration + 1 == num_iterations
        if is_due or interrupted.is_set():
            save_checkpoint(run_folder, {"agent": agent}, global_step)

    progress.close()
    envs.close()
    writer.close()
