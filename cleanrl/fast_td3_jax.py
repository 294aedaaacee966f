# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "brax>=0.14.2", "filelock>=3.20", "flax>=0.12", "gymnasium>=1.2.1,<2", "jax>=0.9",
#     "moviepy>=2", "mujoco>=3.3,<4", "numpy>=2", "optax>=0.2.6", "playground>=0.2", "psutil>=7",
#     "pydantic>=2.11", "six", "tensorboard>=2.20", "tqdm>=4.67", "tyro>=1.0", "wandb>=0.22",
# ]
# ///
"""FastTD3: TD3 on thousands of parallel robots, all in one compiled program, in JAX.

    uv run cleanrl/fast_td3_jax.py                              # T1, a humanoid robot, on a GPU
    uv run cleanrl/fast_td3_jax.py --env-id playground/G1JoystickFlatTerrain --no-pushes
    uv run cleanrl/fast_td3_jax.py --resume runs/<run>          # continue an interrupted run
    tensorboard --logdir runs

Tags such as [fasttd3 2] refer to the implementation details in
docs/rl-algorithms/{fast-td3,td3,ddpg,c51,ppo-continuous-action-jax}.md.
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
    capture_video: bool = False  # record an episode at each checkpoint to runs/<run>/videos
    resume: str | None = None  # folder of an interrupted run to continue with its own flags
    checkpoint_interval: int = 5_000_000  # environment steps between checkpoints
    checkpoint_buffer: bool = False  # save the replay buffer; otherwise a resumed run refills it
    log_interval: int = 100  # maximum number of iterations per call of the compiled program

    env_id: str = "playground/T1JoystickFlatTerrain"  # brax/... or playground/...
    physics: str | None = None  # Brax: spring, positional, generalized, mjx; Playground: jax, warp
    pushes: bool = True  # random pushes in Playground's locomotion tasks
    episode_length: int | None = None  # maximum episode length; by default, the environment's own
    total_timesteps: int = 102_400_000  # environment steps of the whole run
    learning_rate: float = 3e-4  # learning rate of AdamW
    weight_decay: float = 0.1  # weight decay of AdamW
    num_envs: int = 1024  # parallel environments
    buffer_size: int = 10_485_760  # capacity of the replay buffer in environment steps
    gamma: float = 0.97  # discount factor
    tau: float = 0.1  # target network update rate
    batch_size: int = 32_768  # transitions per update
    num_updates: int = 2  # updates per step of all environments
    n_step: int = 1  # steps of n-step returns
    n_atoms: int = 101  # number of atoms of the return distribution
    v_min: float = -10.0  # smallest atom
    v_max: float = 10.0  # largest atom
    q_network_width: int = 1024  # width of the Q-networks' first layer, halved with each layer
    actor_width: int = 512  # width of the actor's first layer, halved with each layer
    policy_noise: float = 0.001  # standard deviation of the noise on the actor's next actions
    noise_clip: float = 0.5  # clipping range of the policy noise
    std_min: float = 0.001  # smallest standard deviation of the exploration noise
    std_max: float = 0.4  # largest standard deviation of the exploration noise
    learning_starts: int = 10_240  # environment steps with random actions before the first update
    policy_frequency: int = 2  # Q-network updates per update of the actor

    def check(self):
        """Reject invalid flags before anything is written."""
        require_positive(self, "num_envs", "batch_size", "num_updates", "policy_frequency")
        require_positive(self, "learning_rate", "learning_starts", "checkpoint_interval")
        require_positive(self, "n_step", "log_interval")
        if self.episode_length is not None:
            require_positive(self, "episode_length")
        require_fraction(self, "gamma", "tau")
        for name in ("policy_noise", "noise_clip", "std_min", "weight_decay"):
            require(getattr(self, name) >= 0, f"{name} must not be negative")
        require(self.std_min <= self.std_max, "std_min must be at most std_max")
        require(self.n_atoms > 1, "n_atoms must be at least 2")
        require(self.v_min < self.v_max, "v_min must be less than v_max")
        for name in ("q_network_width", "actor_width"):
            require(getattr(self, name) >= 4, f"{name} must be at least 4")
        least = self.num_envs * self.n_step
        for name in ("buffer_size", "learning_starts"):
            require(getattr(self, name) >= least, f"{name} is less than num_envs * n_step")
        require(self.total_timesteps >= self.num_envs, "total_timesteps is less than num_envs")
        num_updates = self.total_timesteps // self.num_envs * self.num_updates
        require(self.total_timesteps < 2**31, "total_timesteps must be below 2**31")
        require(num_updates < 2**31, "there must be fewer than 2**31 updates")


def add_up(forces, links, num_links):
    """The sum of the forces on each link, in an order that is fixed on a GPU, too [physics 5]."""
    is_on_link = (links == jnp.arange(num_links)[:, None]) * 1.0
    return jnp.tensordot(is_on_link, forces, 1, precision="highest")


def make_env(args):
    """An environment with the API that Brax and Playground share, and its time limit."""
    *modules, env_id = args.env_id.split(":")
    for module in modules:
        importlib.import_module(module)
    library, _, name = env_id.partition("/")
    require(library in ("brax", "playground"), "env_id must start with brax/ or playground/")
    if library == "brax":
        flags = os.environ.setdefault("XLA_FLAGS", "")  # [physics 5] the same bits on a GPU, too
        if args.physics != "positional" and "deterministic" not in flags:
            os.environ["XLA_FLAGS"] += " --xla_gpu_deterministic_ops=true"
        import brax.envs
        from brax.spring import collisions, joints

        collisions.segment_sum = add_up
        joints.segment_sum = add_up
        env = brax.envs.get_environment(name, backend=args.physics or "spring")
        max_episode_steps = 1000
    else:
        from mujoco_playground import registry

        config = registry.get_default_config(name)
        overrides = {"impl": args.physics or "jax"}
        if not args.pushes and "push_config" in config:
            overrides["push_config.enable"] = False
        env = registry.load(name, config_overrides=overrides)
        max_episode_steps = config.episode_length
    return env, args.episode_length or max_episode_steps


LARGEST = 1e5  # observation or reward of a robot; a single 1e6 would dominate the moments


def look(state):
    """Observation, reward and termination of environments in this state.

    If the simulation diverges, the episode terminates with a reward of 0 [physics 3]."""
    obs = state.obs
    if isinstance(obs, dict):
        obs = obs["state"]  # the rest is privileged information for a critic
    is_sane = (jnp.abs(obs) < LARGEST).all(-1) & (jnp.abs(state.reward) < LARGEST)  # False for NaN
    reward = jnp.where(is_sane, state.reward, 0)
    return obs, reward, ~is_sane | (state.done > 0)


def observe(state):
    """The actor's observation, then the critics' if there is a privileged one [fasttd3 9]."""
    obs = state.obs
    if isinstance(obs, dict):
        views = [obs[name] for name in ("state", "privileged_state") if name in obs]
        obs = jnp.concatenate(views, -1)
    return jnp.where(jnp.abs(obs) < LARGEST, obs, 0)  # of a diverged simulation [fasttd3 10]


class GymEnv(gym.Env):
    """The environment with Gymnasium's API."""

    def __init__(self, env, render_mode):
        self.reset_state = jax.jit(env.reset)
        self.step_state = jax.jit(env.step)
        self.render_mode = render_mode
        state = jax.eval_shape(env.reset, jax.random.PRNGKey(0))
        obs, _, _ = jax.eval_shape(look, state)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, obs.shape)
        self.action_space = gym.spaces.Box(-1, 1, (env.action_size,))
        self.model = getattr(getattr(env, "sys", env), "mj_model", None)  # which MuJoCo can render
        if self.model is not None:
            fps = round(1 / float(env.dt))
            self.metadata = {"render_modes": ["rgb_array"], "render_fps": fps}
        if self.model is not None and render_mode:
            import mujoco

            self.data = mujoco.MjData(self.model)
            self.renderer = mujoco.Renderer(self.model, 480, 640)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = self.reset_state(jax.random.PRNGKey(self.np_random.integers(2**31)))
        obs, _, _ = look(self.state)
        return np.asarray(obs), {}

    def step(self, action):
        self.state = self.step_state(self.state, action)
        obs, reward, terminated = look(self.state)
        return np.asarray(obs), float(reward), bool(terminated), False, {}

    def render(self):
        import mujoco

        is_brax = hasattr(self.state, "pipeline_state")
        self.data.qpos = self.state.pipeline_state.q if is_brax else self.state.data.qpos
        mujoco.mj_forward(self.model, self.data)
        camera = 0 if self.model.ncam else -1  # the first one often follows the robot
        self.renderer.update_scene(self.data, camera)
        return self.renderer.render()


def make_envs(args, num_envs, render_mode=None):
    """Environments for evaluation and videos; those of training are compiled with it."""
    env, max_episode_steps = make_env(args)

    def make():
        clipped = gym.wrappers.ClipAction(GymEnv(env, render_mode))
        return gym.wrappers.TimeLimit(clipped, max_episode_steps)

    envs = gym.vector.SyncVectorEnv([make] * num_envs)
    return gym.wrappers.vector.RecordEpisodeStatistics(envs)


class Actor(nn.Module):
    action_dim: int
    width: int

    @nn.compact
    def __call__(self, obs):
        hidden = nn.relu(nn.Dense(self.width)(obs))  # [fasttd3 8]
        hidden = nn.relu(nn.Dense(self.width // 2)(hidden))
        hidden = nn.relu(nn.Dense(self.width // 4)(hidden))
        near_zero = nn.initializers.normal(0.01)
        return nn.tanh(nn.Dense(self.action_dim, kernel_init=near_zero)(hidden))


class QNetwork(nn.Module):
    """The distribution of the return, over the same atoms for all actions [c51 1]."""

    width: int
    n_atoms: int

    @nn.compact
    def __call__(self, obs, actions):
        """Log-probabilities of the atoms."""
        hidden = nn.relu(nn.Dense(self.width)(jnp.concatenate([obs, actions], 1)))
        hidden = nn.relu(nn.Dense(self.width // 2)(hidden))
        hidden = nn.relu(nn.Dense(self.width // 4)(hidden))
        return nn.log_softmax(nn.Dense(self.n_atoms)(hidden))


stacked = dict(variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=2)
QNetworks = nn.vmap(QNetwork, **stacked)  # two Q-networks that are computed as one [td3 1]


def mean_returns(log_pmfs, atoms):
    """Q-values: the means of the distributions."""
    return (jnp.exp(log_pmfs) * atoms).sum(-1)


def project(pmfs, returns, atoms):
    """Split the probability of each return linearly between the two nearest atoms [c51 2].

    Sums over all pairs of atoms, as a scatter is not deterministic on a GPU [fasttd3 5]."""
    returns = returns.clip(atoms[0], atoms[-1])
    distances = jnp.abs(returns[:, None] - atoms[:, None]) / (atoms[1] - atoms[0])
    shares = (1 - distances).clip(0)  # of each return at each atom
    return (shares * pmfs[:, None]).sum(-1)


def init_moments(shape):
    return dict(count=jnp.zeros(()), mean=jnp.zeros(shape), var=jnp.ones(shape))


def update_moments(moments, rows):
    """Mean and variance of all rows so far, with these merged in (Chan et al.)."""
    count = moments["count"] + len(rows)
    share = len(rows) / count
    delta = rows.mean(0) - moments["mean"]
    mean = moments["mean"] + share * delta
    var = moments["var"] + share * (rows.var(0) - moments["var"] + (1 - share) * delta**2)
    return dict(count=count, mean=mean, var=var)


def normalize(moments, obs):
    """Observations with mean 0 and variance 1: all columns, or the first ones, the actor's."""
    mean, var = (moments[name][: obs.shape[-1]] for name in ("mean", "var"))
    return (obs - mean) / (jnp.sqrt(var) + 0.01)  # nearly constant columns stay small [fasttd3 6]


def load_policy(checkpoint, envs):
    """The trained policy for evaluation: a function from observations to actions."""
    agent = checkpoint["agent"]
    width = len(agent["actor"]["params"]["Dense_0"]["bias"])
    actor = Actor(envs.single_action_space.shape[0], width)

    @jax.jit
    def best_actions(obs):
        return actor.apply(agent["actor"], normalize(agent["obs_moments"], obs))

    def policy(obs, is_last):
        return np.asarray(best_actions(obs))

    return policy


def make_program(args, env, max_episode_steps):
    """The compiled functions of a run: init(key) -> run, its whole state; train(run, length)."""
    N = args.num_envs
    num_rows = args.buffer_size // N  # steps of all environments that the replay buffer holds
    state = jax.eval_shape(env.reset, jax.random.PRNGKey(0))
    structure = jax.tree.structure(state)  # checkpoints hold lists of arrays
    obs_dim = jax.eval_shape(look, state)[0].shape[-1]
    privileged = state.obs.get("privileged_state") if isinstance(state.obs, dict) else None
    critic_dim = obs_dim if privileged is None else privileged.shape[-1]
    actor = Actor(env.action_size, args.actor_width)
    q_networks = QNetworks(args.q_network_width, args.n_atoms)
    atoms = jnp.linspace(args.v_min, args.v_max, args.n_atoms)
    optimizer = optax.adamw(args.learning_rate, weight_decay=args.weight_decay)  # [fasttd3 7]

    def init(key):
        """The whole state of a run: agent, environments and replay buffer."""
        key, actor_key, q_key, env_key, std_key = jax.random.split(key, 5)
        env_state = jax.vmap(env.reset)(jax.random.split(env_key, N))
        obs = observe(env_state)
        actions = jnp.zeros((N, env.action_size))
        zeros = jnp.zeros(N)
        zero = jnp.zeros((), dtype=jnp.int32)
        actor_params = actor.init(actor_key, obs[:, :obs_dim])
        q_params = q_networks.init(q_key, obs[:, -critic_dim:], actions)
        agent = dict(
            actor=actor_params,
            q_networks=q_params,
            target_q_networks=q_params,
            actor_optimizer=optimizer.init(actor_params),
            q_networks_optimizer=optimizer.init(q_params),
            obs_moments=init_moments(obs.shape[1:]),
        )
        world = dict(
            env_state=jax.tree.leaves(env_state),
            episode_return=zeros,
            episode_length=zeros,
            std=draw_stds(std_key),
        )
        transition = dict(
            obs=obs,
            actions=actions,
            rewards=zeros,
            next_obs=obs,
            terminated=zeros > 0,
            is_last=zeros > 0,
        )
        buffer = jax.tree.map(lambda x: jnp.zeros((num_rows, *x.shape), x.dtype), transition)
        state = dict(agent=agent, world=world, buffer=buffer)
        return state | dict(added=zero, global_step=zero, key=key)

    def draw_stds(key):
        """A standard deviation of the exploration noise for each environment [fasttd3 3]."""
        return jax.random.uniform(key, (N,), minval=args.std_min, maxval=args.std_max)

    def act(run, pool, key):
        """One step of all environments into the replay buffer, random at first [ddpg 3]."""
        noise_key, random_key, std_key, place_key = jax.random.split(key, 4)
        agent, world = run["agent"], run["world"]
        env_state = jax.tree.unflatten(structure, world["env_state"])
        obs = observe(env_state)
        obs_moments = update_moments(agent["obs_moments"], obs)
        actions = actor.apply(agent["actor"], normalize(obs_moments, obs[:, :obs_dim]))
        noise = world["std"][:, None] * jax.random.normal(noise_key, actions.shape)
        random_actions = jax.random.uniform(random_key, actions.shape, minval=-1)
        is_random = run["added"] < args.learning_starts
        actions = jnp.where(is_random, random_actions, (actions + noise).clip(-1, 1))
        env_state = jax.vmap(env.step)(env_state, actions)
        _, rewards, terminated = look(env_state)
        episode_return = world["episode_return"] + rewards
        episode_length = world["episode_length"] + 1
        is_last = terminated | (episode_length >= max_episode_steps)  # [physics 1]
        transition = dict(
            obs=obs,
            actions=actions,
            rewards=rewards,
            next_obs=observe(env_state),
            terminated=terminated,
            is_last=is_last,
        )
        row = run["added"] // N % num_rows
        buffer = {name: run["buffer"][name].at[row].set(x) for name, x in transition.items()}

        # where an episode ended, start a new one from the pool
        places = (jnp.arange(N) + jax.random.randint(place_key, (), 0, N)) % N
        fresh = [x[places] for x in pool]
        choose = partial(jax.vmap(jnp.where), is_last)
        world = dict(
            env_state=jax.tree.map(choose, fresh, jax.tree.leaves(env_state)),
            episode_return=episode_return * ~is_last,
            episode_length=episode_length * ~is_last,
            std=choose(draw_stds(std_key), world["std"]),
        )
        run = run | dict(agent=agent | dict(obs_moments=obs_moments), world=world, buffer=buffer)
        run |= dict(added=run["added"] + N, global_step=run["global_step"] + N)
        return run, (is_last, episode_return, episode_length)

    def sample_batch(buffer, added, key):
        """Uniformly drawn transitions of n steps, fewer where an episode ends [fasttd3 2]."""
        step_key, env_key = jax.random.split(key)
        num_filled = jnp.minimum(added // N, num_rows)
        shape = (args.batch_size, 1)
        ages = jax.random.randint(step_key, shape, args.n_step, num_filled + 1)
        rows = (added // N - ages + jnp.arange(args.n_step)) % num_rows
        envs = jax.random.randint(env_key, shape, 0, N)
        goes_on = jnp.cumprod(~buffer["is_last"][rows, envs], 1)
        counts = jnp.concatenate([jnp.ones(shape, dtype=int), goes_on[:, :-1]], 1)
        discounts = args.gamma ** jnp.arange(args.n_step)
        num_steps = counts.sum(1, keepdims=True)
        last_rows = jnp.take_along_axis(rows, num_steps - 1, 1)
        first, last = (rows[:, 0], envs[:, 0]), (last_rows[:, 0], envs[:, 0])
        return dict(
            obs=buffer["obs"][first],
            actions=buffer["actions"][first],
            rewards=(buffer["rewards"][rows, envs] * counts * discounts).sum(1),
            next_obs=buffer["next_obs"][last],
            terminated=buffer["terminated"][last],
            discounts=args.gamma ** num_steps[:, 0],
        )

    def minimize(loss, agent, name):
        """One step of AdamW on agent[name]; loss returns its value and the metrics to log."""
        (_, logs), grads = jax.value_and_grad(loss, has_aux=True)(agent[name])
        updates, opt_state = optimizer.update(grads, agent[f"{name}_optimizer"], agent[name])
        params = optax.apply_updates(agent[name], updates)
        return agent | {name: params, f"{name}_optimizer": opt_state}, logs

    def update_q_networks(agent, b, key):
        """Truncated episodes are bootstrapped, terminated ones are not [ddpg 4]."""
        noise = args.policy_noise * jax.random.normal(key, b["actions"].shape)
        noise = jnp.clip(noise, -args.noise_clip, args.noise_clip)
        next_actions = actor.apply(agent["actor"], b["next_obs"][:, :obs_dim])  # no target actor
        next_actions = jnp.clip(next_actions + noise, -1, 1)  # [td3 3]
        next_obs = b["next_obs"][:, -critic_dim:]
        log_pmfs = q_networks.apply(agent["target_q_networks"], next_obs, next_actions)
        lowest = mean_returns(log_pmfs, atoms).argmin(0)  # in place of the minimum [fasttd3 4]
        next_pmfs = jnp.exp(log_pmfs[lowest, jnp.arange(args.batch_size)])
        discounts = b["discounts"] * ~b["terminated"]
        returns = b["rewards"][:, None] + discounts[:, None] * atoms
        target_pmfs = project(next_pmfs, returns, atoms)

        def qf_loss(params):
            log_pmfs = q_networks.apply(params, b["obs"][:, -critic_dim:], b["actions"])
            loss = -(target_pmfs * log_pmfs).sum(-1).mean(1).sum()  # [c51 3]
            q_values = mean_returns(log_pmfs, atoms)
            return loss, {"qf_loss": loss / 2, "qf_values": q_values.mean()}

        return minimize(qf_loss, agent, "q_networks")

    def update_actor(agent, losses, obs):
        """Gradient ascent on the lower of the two Q-values of the actor's actions."""

        def actor_loss(params):
            actions = actor.apply(params, obs[:, :obs_dim])
            log_pmfs = q_networks.apply(agent["q_networks"], obs[:, -critic_dim:], actions)
            loss = -mean_returns(log_pmfs, atoms).min(0).mean()
            return loss, {"actor_loss": loss}

        agent, actor_losses = minimize(actor_loss, agent, "actor")
        return agent, losses | actor_losses

    def skip(agent, losses, obs):
        return agent, losses

    def learn(buffer, added, state, drawn):
        """One update of the Q-networks and their targets, and the actor's if it is due."""
        agent, losses = state
        number, key = drawn
        batch_key, noise_key = jax.random.split(key)
        b = sample_batch(buffer, added, batch_key)
        for name in ("obs", "next_obs"):  # with the current statistics
            b[name] = normalize(agent["obs_moments"], b[name])
        agent, q_losses = update_q_networks(agent, b, noise_key)
        losses = losses | q_losses
        is_due = number % args.policy_frequency == 0  # [td3 2]
        agent, losses = jax.lax.cond(is_due, update_actor, skip, agent, losses, b["obs"])
        targets = agent["q_networks"], agent["target_q_networks"]
        targets = optax.incremental_update(*targets, args.tau)  # [ddpg 6]
        return (agent | dict(target_q_networks=targets), losses), None

    def iterate(pool, state, key):
        """One step of all environments and, once learning has started, a few updates."""
        run, losses = state
        act_key, learn_key = jax.random.split(key)
        first_update = run["global_step"] // N * args.num_updates
        run, episodes = act(run, pool, act_key)
        numbers = first_update + jnp.arange(args.num_updates)  # [fasttd3 1]
        drawn = numbers, jax.random.split(learn_key, args.num_updates)

        def learn_all(state):
            state, _ = jax.lax.scan(partial(learn, run["buffer"], run["added"]), state, drawn)
            return state

        def wait(state):
            return state

        is_learning = run["added"] >= args.learning_starts
        agent, losses = jax.lax.cond(is_learning, learn_all, wait, (run["agent"], losses))
        return (run | dict(agent=agent), losses), episodes

    def train(run, length):
        """Some iterations. New episodes start from a pool of states, drawn once [physics 2]."""
        key, pool_key, step_key = jax.random.split(run["key"], 3)
        pool = jax.tree.leaves(jax.vmap(env.reset)(jax.random.split(pool_key, N)))
        losses = dict.fromkeys(("qf_loss", "qf_values", "actor_loss"), jnp.float32(0))
        state = run | dict(key=key), losses
        keys = jax.random.split(step_key, length)
        (run, losses), episodes = jax.lax.scan(partial(iterate, pool), state, keys)
        return run, losses, episodes

    return init, train


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
    N = args.num_envs
    with explain(f"train on {args.env_id}"):
        envs = make_envs(args, 1, "rgb_array" if args.capture_video else None)
        require(len(envs.single_observation_space.shape) == 1, "flat observations are needed")
        require_envs(args, envs)
        env, max_episode_steps = make_env(args)
        init, train = make_program(args, env, max_episode_steps)
        buffer = jax.eval_shape(init, jax.random.PRNGKey(0))["buffer"]
        require_memory(sum(x.size * x.dtype.itemsize for x in buffer.values()))

    key = seed_everything(args)
    device = jax.devices()[0] if args.cuda else jax.devices("cpu")[0]
    jax.config.update("jax_default_device", device)
    jax.config.update("jax_default_matmul_precision", "highest")  # physics needs full precision
    quickly = {"xla_backend_optimization_level": 0}  # compiled, as it runs only once
    run = jax.jit(init, compiler_options=quickly)(key)
    saved_names = ["agent", "world", "global_step", "key"]
    if args.checkpoint_buffer:
        saved_names += ["buffer", "added"]
    saved = {name: run[name] for name in saved_names}
    saved, global_step = restore_checkpoint(args, saved)
    run |= saved  # a run that is resumed without its replay buffer refills it first
    start_step = global_step
    run_folder, writer = open_run(args, device, global_step)
    train = jax.jit(train, static_argnames="length", donate_argnums=0)
    num_iterations = args.total_timesteps // N
    iteration = global_step // N
    start_time = time.time()
    progress = tqdm(initial=global_step, total=num_iterations * N, unit="step", unit_scale=True)

    while iteration < num_iterations:
        # act and learn, many iterations in one call of the program
        length = min(args.log_interval, num_iterations - iteration)
        run, *logs = train(run, length=length)
        iteration += length
        losses, episodes = jax.device_get(logs)
        is_last, returns, lengths = map(np.ravel, episodes)
        for i in np.flatnonzero(is_last):
            episode = {"charts/episodic_return": returns[i], "charts/episodic_length": lengths[i]}
            writer.add_scalars(global_step + i + 1, episode)
            progress.set_postfix(episodic_return=f"{returns[i]:.1f}", refresh=False)
        global_step += length * N
        progress.update(length * N)

        # log
        if int(run["added"]) >= args.learning_starts:
            check_finite(args, global_step, **losses)
            sps = int((global_step - start_step) / (time.time() - start_time))
            scalars = {f"losses/{name}": loss for name, loss in losses.items()}
            writer.add_scalars(global_step, {"charts/SPS": sps} | scalars)
        is_due = global_step % args.checkpoint_interval < length * N
        if is_due or iteration == num_iterations or interrupted.is_set():
            saved = {name: run[name] for name in saved_names}
            if args.capture_video:
                policy = load_policy(saved, envs)
                record_episode(envs, policy, args.seed, run_folder, global_step)
            if args.track:
                writer.add_videos(run_folder, global_step)
            save_checkpoint(run_folder, saved, global_step)

    progress.close()
    envs.close()
    writer.close()
