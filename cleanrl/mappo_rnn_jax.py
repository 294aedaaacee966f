# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "filelock>=3.20", "flax>=0.12", "gymnasium[classic-control]>=1.2.1,<2", "jax>=0.9",
#     "jaxmarl>=0.2,<0.3", "moviepy>=2", "numpy>=2", "optax>=0.2.6", "psutil>=7",
#     "pydantic>=2.11", "tensorboard>=2.20", "tqdm>=4.67", "tyro>=1.0", "wandb>=0.22",
# ]
# ///
"""Multi-Agent PPO (MAPPO) with recurrent networks (GRU) and a centralized critic, compiled.

    uv run cleanrl/mappo_rnn_jax.py                           # five units win battles (SMAX, 2s3z)
    uv run cleanrl/mappo_rnn_jax.py --num-seeds 4             # four runs side by side
    uv run cleanrl/mappo_rnn_jax.py --env-id MPE_simple_spread_v3 --num-envs 16
    uv run cleanrl/mappo_rnn_jax.py --env-id overcooked-coord_ring --num-envs 16
    uv run cleanrl/mappo_rnn_jax.py --resume runs/<run>       # and all runs trained alongside
    tensorboard --logdir runs

Tags such as [mappo 2] refer to the details in
docs/rl-algorithms/{mappo-rnn-jax,ippo-jax,ppo,ppo-atari-lstm,ppo-rnn-jax}.md.
"""

import atexit
import hashlib
import importlib
import io
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
from contextlib import contextmanager, redirect_stdout, suppress
from contextvars import Context
from dataclasses import asdict, dataclass, fields, replace
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
from flax.linen.initializers import orthogonal
from flax.serialization import from_state_dict, msgpack_restore, msgpack_serialize, to_state_dict
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from tqdm import tqdm

with redirect_stdout(io.StringIO()):  # it prints the environments that are not installed
    import jaxmarl
    from jaxmarl.environments import HeuristicEnemySMAX, MultiAgentEnv, Overcooked, SimpleMPE
    from jaxmarl.environments.overcooked import overcooked_layouts
    from jaxmarl.environments.smax.smax_env import MAP_NAME_TO_SCENARIO
    from jaxmarl.environments.spaces import Discrete
    from jaxmarl.viz.overcooked_visualizer import OvercookedVisualizer


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
    log_interval: int = 4  # maximum number of iterations per call of the compiled program

    env_id: str = "HeuristicEnemySMAX-2s3z"  # JaxMARL id, id-map, id-layout or module:Class
    rew_shaping_horizon: int = 2_500_000  # steps to anneal Overcooked's shaped rewards to 0
    total_timesteps: int = 10_000_000  # environment steps of the whole run
    learning_rate: float = 2e-3  # initial learning rate of Adam
    num_envs: int = 128  # parallel environments
    num_steps: int = 128  # rollout length of each environment
    anneal_lr: bool = True  # anneal the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 4  # minibatches per epoch; each has whole rollouts of some agents
    update_epochs: int = 4  # epochs over each rollout
    norm_adv: bool = True  # normalize advantages per minibatch
    clip_coef: float = 0.2  # clipping range of the surrogate objective
    clip_vloss: bool = True  # clip the value loss by the same range
    ent_coef: float = 0.0  # entropy coefficient
    vf_coef: float = 0.5  # value loss coefficient
    max_grad_norm: float = 0.25  # maximum gradient norm

    def check(self):
        """Reject invalid flags before anything is written."""
        require_positive(self, "num_envs", "num_steps", "num_minibatches", "update_epochs")
        require_positive(self, "learning_rate", "clip_coef", "max_grad_norm", "checkpoint_interval")
        require_positive(self, "num_seeds", "log_interval")
        require_fraction(self, "gamma", "gae_lambda")
        batch_size = self.num_envs * self.num_steps
        require(self.total_timesteps >= batch_size, "total_timesteps is less than one rollout")
        require(self.total_timesteps < 2**31, "total_timesteps must be below 2**31")
        require(self.rew_shaping_horizon >= 0, "rew_shaping_horizon must not be negative")
        require(self.num_envs % self.num_minibatches == 0, "num_minibatches must divide num_envs")
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


def make_env(args):
    """JaxMARL's environment; the map of SMAX or layout of Overcooked follows a hyphen in the id."""
    *module, name = args.env_id.split(":")
    if module:
        env = getattr(importlib.import_module(module[0]), name)()
    else:
        name, _, place = name.partition("-")
        options = {}
        if place:
            is_smax = name == "HeuristicEnemySMAX"
            places = MAP_NAME_TO_SCENARIO if is_smax else overcooked_layouts
            require(is_smax or name == "overcooked", f"{name} has no maps")
            require(place in places, f"choose from {', '.join(places)}")
            options["scenario" if is_smax else "layout"] = places[place]
        env = jaxmarl.make(name, **options)
    spaces = [(env.observation_space(agent), env.action_space(agent)) for agent in env.agents]
    are_arrays = [isinstance(getattr(obs, "shape", None), tuple) for obs, _ in spaces]
    require(all(are_arrays), "Box observations are needed")
    are_discrete = [isinstance(actions, Discrete) for _, actions in spaces]
    require(all(are_discrete), "Discrete actions are needed")
    kinds = {(obs.shape, actions.n) for obs, actions in spaces}
    require(len(kinds) == 1, "its agents differ in their spaces: they cannot share a network")
    return env


def would_go_on(env, env_state):
    """Whether only the time limit ended an episode, which JaxMARL does not report [team 4]."""
    if isinstance(env, SimpleMPE):
        return True
    if not hasattr(env, "is_terminal"):
        return False

    def forget_time(path, x):
        return jnp.zeros_like(x) if getattr(path[-1], "name", "") in ("step", "done") else x

    return ~env.is_terminal(jax.tree.map_with_path(forget_time, env_state))


def make_game(env):
    """A game with an axis for its agents: functions to start, step and find available actions."""
    num_actions = env.action_space(env.agents[0]).n
    has_masks = type(env).get_avail_actions is not MultiAgentEnv.get_avail_actions

    def stack(answers):
        return jnp.stack([answers[agent] for agent in env.agents])

    def look(obs, is_dead):
        """The agents' observations, and the critic's for each agent: world state and agent id."""
        rows = stack(obs).reshape(len(env.agents), -1).astype(jnp.float32)
        world = obs.get("world_state", rows.ravel()).astype(jnp.float32)  # [mappo 1]
        worlds = world * ~is_dead[:, None]  # [mappo 3]
        return rows, jnp.concatenate([worlds, jnp.eye(len(env.agents))], 1)  # [mappo 2]

    def start(key):
        obs, env_state = env.reset(key)
        return look(obs, jnp.zeros(len(env.agents), dtype=bool)), env_state

    def step(key, env_state, actions):
        """Without JaxMARL's autoreset, which drops the last observation [team 4]."""
        actions = dict(zip(env.agents, actions, strict=True))
        obs, env_state, rewards, dones, infos = env.step_env(key, env_state, actions)
        is_last, is_dead = dones["__all__"], stack(dones)
        is_dead &= ~(is_last & is_dead.all())  # all done: the episode ends, the agents do not die
        next_obs, next_views = look(obs, is_dead)
        truncated = is_last & would_go_on(env, env_state)
        rewards = stack(rewards).astype(jnp.float32)  # [team 5]
        shaped = stack(infos["shaped_reward"]) if "shaped_reward" in infos else 0 * rewards
        answers = dict(
            next_obs=next_obs,
            next_views=next_views,
            rewards=rewards,
            shaped_rewards=shaped.astype(jnp.float32),
            is_dead=is_dead,
            terminated=is_last & ~truncated,
            is_last=is_last,
        )
        if hasattr(env, "won_battle_bonus"):  # SMAX's bonus for winning
            answers["won"] = rewards[0] >= env.won_battle_bonus
        return env_state, answers

    def find_actions(env_state):
        """Which actions are available to each agent [team 2]."""
        if has_masks:
            return stack(env.get_avail_actions(env_state)) > 0
        return jnp.ones((len(env.agents), num_actions), dtype=bool)

    return start, step, find_actions


class Game(gym.vector.VectorEnv):
    """One game with a row for each of its agents, for evaluation and videos."""

    def __init__(self, env, render_mode):
        start, step, find_actions = make_game(env)
        self.env = env
        self.compiled_start = jax.jit(start)
        self.compiled_step = jax.jit(step)
        self.find_actions = jax.jit(find_actions)
        self.num_envs = len(env.agents)
        obs_size = math.prod(env.observation_space(env.agents[0]).shape)
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, (obs_size,), np.float32)
        self.single_action_space = gym.spaces.Discrete(int(env.action_space(env.agents[0]).n))
        self.render_mode = render_mode
        self.metadata = {
            "autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP,
            "render_modes": ["rgb_array"] if isinstance(env, CAN_DRAW) else [],
            "render_fps": 10,
        }

    def next_key(self):
        return jax.random.PRNGKey(self.np_random.integers(2**32))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        (obs, _), self.env_state = self.compiled_start(self.next_key())
        self.available = self.find_actions(self.env_state)
        self.returns = np.zeros(self.num_envs)
        self.length = 0
        self.is_over = False
        return np.asarray(obs), {}

    def step(self, actions):
        rows = np.zeros(self.num_envs)
        if self.is_over:  # the step after an end only resets
            return self.reset()[0], rows, rows > 0, rows > 0, {}
        stepped = self.compiled_step(self.next_key(), self.env_state, jnp.asarray(actions))
        self.env_state, answers = jax.device_get(stepped)
        self.available = self.find_actions(self.env_state)
        self.returns += answers["rewards"]
        self.length += 1
        self.is_over = bool(answers["is_last"])
        infos = {}
        if self.is_over:
            episode = {"r": self.returns, "l": np.full(self.num_envs, self.length)}
            infos = {"episode": episode, "_episode": rows == 0}
        terminated = (rows == 0) & answers["terminated"]
        truncated = (rows == 0) & (self.is_over and not answers["terminated"])
        return answers["next_obs"], answers["rewards"], terminated, truncated, infos

    def render(self):
        return [draw_game(self.env, self.env_state)] * self.num_envs


CAN_DRAW = SimpleMPE | Overcooked | HeuristicEnemySMAX


def draw_game(env, env_state):
    """An image of the game: agents and landmarks, the kitchen, or the two armies."""
    if isinstance(env, Overcooked):
        edge = (len(env_state.maze_map) - env.height) // 2
        grid = np.asarray(env_state.maze_map)[edge:-edge, edge:-edge]
        cook = dict(agent_dir_idx=env_state.agent_dir_idx, agent_inv=env_state.agent_inv)
        return OvercookedVisualizer._render_grid(grid, tile_size=64, **cook)
    if isinstance(env, SimpleMPE):
        order = np.arange(env.num_entities)[::-1]  # agents in front of landmarks
        return draw_disks(env_state.p_pos[order], env.rad[order], np.array(env.colour)[order], 1.5)
    units = env_state.state
    colors = np.where(units.unit_teams[:, None] == 0, (30, 90, 220), (220, 60, 40))
    health = units.unit_health / env.unit_type_health[units.unit_types]
    colors = 255 - (255 - colors) * (0.3 + 0.7 * health)[:, None]  # paler at low health
    positions = units.unit_positions - np.array([env.map_width, env.map_height]) / 2
    radii = env.unit_type_radiuses[units.unit_types] * units.unit_alive
    return draw_disks(positions, radii, colors, env.map_width / 2)


def draw_disks(positions, radii, colors, limit, size=400):
    axis = limit * np.linspace(-1, 1, size)
    frame = np.full((size, size, 3), 255, np.uint8)
    for (x, y), radius, color in zip(positions, radii, np.asarray(colors), strict=True):
        frame[(axis - x) ** 2 + (axis[::-1, None] - y) ** 2 < radius**2] = color
    return frame


def make_envs(args, num_envs, render_mode=None):
    """A game for evaluation and videos; num_envs is 1."""
    return Game(make_env(args), render_mode)


def make_team_steps(env):
    """The games inside the compiled program: functions to reset, draw, step and find actions."""
    start, play, find_actions = make_game(env)
    reset = jax.vmap(start)

    def draw(key, shape):
        """Keys for steps, and the states that new episodes start from, all at once."""
        step_keys, reset_keys = jax.random.split(key, (2, math.prod(shape)))
        drawn = step_keys, reset(reset_keys)
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), drawn)

    def step(drawn, env_state, actions):
        """A finished episode is followed by a new one in the same step."""
        step_keys, fresh = drawn
        env_state, answers = jax.vmap(play)(step_keys, env_state, actions)
        choose = partial(jax.vmap(jnp.where), answers["is_last"])
        next_seen = answers["next_obs"], answers["next_views"]
        seen, env_state = jax.tree.map(choose, fresh, (next_seen, env_state))
        return seen, env_state, answers

    return reset, draw, step, jax.vmap(find_actions)


class Recurrent(nn.Module):
    """A GRU between layers; policy and value function have one each [mappo 4]."""

    out_dim: int
    gain: float
    state_size: int = 128

    def setup(self):
        layer = partial(nn.Dense, kernel_init=orthogonal(2**0.5))  # [core 2]
        self.encoder = layer(self.state_size)
        self.gru = nn.GRUCell(self.state_size, kernel_init=orthogonal(1.0))  # [lstm 1]
        self.decoder = layer(self.state_size)
        self.head = nn.Dense(self.out_dim, kernel_init=orthogonal(self.gain))

    def __call__(self, inputs, is_last, state):
        """The outputs at T steps of some rows, from the state before them."""
        features = nn.relu(self.encoder(inputs))

        def run_gru(gru, state, row):
            features, is_last = row
            hidden, _ = gru(state, features)
            return hidden * ~is_last[:, None], hidden  # [lstm 3]

        scan = nn.scan(run_gru, variable_broadcast="params", split_rngs={"params": False})
        _, hidden = scan(self.gru, state, (features, is_last))
        return self.head(nn.relu(self.decoder(hidden)))

    def step(self, inputs, state):
        """The outputs and the next state at one step."""
        state, _ = self.gru(state, nn.relu(self.encoder(inputs)))
        return self.head(nn.relu(self.decoder(state))), state


def find_log_probs(logits, available):
    """Log-probabilities of all actions; unavailable actions are masked [team 2]."""
    return nn.log_softmax(jnp.where(available, logits, -1e8))


def load_policy(checkpoint, envs, deterministic=False):
    """The trained policy for evaluation: samples its actions, or takes the most likely ones."""
    actor = Recurrent(int(envs.single_action_space.n), gain=0.01)
    keys = map(jax.random.key, itertools.count())
    state = jnp.zeros((envs.num_envs, actor.state_size))  # [lstm 2]

    @jax.jit
    def act(key, obs, available, is_last, state):
        params = checkpoint["agent"]["params"]["actor"]  # it acts without the critic
        logits, state = actor.apply(params, obs, state, method="step")
        log_probs = find_log_probs(logits, available)
        actions = log_probs.argmax(-1) if deterministic else jax.random.categorical(key, log_probs)
        return actions, state * ~is_last[:, None]

    def policy(obs, is_last):
        nonlocal state
        actions, state = act(next(keys), obs, envs.available, is_last, state)
        return np.asarray(actions)

    return policy


def make_program(args, env):
    """The compiled functions of one run: init(key) -> run, its whole state; train(run, length).

    args may hold traced values of the float flags, which differ from run to run."""
    num_actions = int(env.action_space(env.agents[0]).n)
    T, N, A = args.num_steps, args.num_envs, len(env.agents)
    num_iterations = args.total_timesteps // (T * N)
    actor = Recurrent(num_actions, gain=0.01)
    critic = Recurrent(1, gain=1.0)
    reset, draw, step, find_actions = make_team_steps(env)

    def make_optimizer(learning_rate):
        clip = optax.clip_by_global_norm(args.max_grad_norm)  # [core 11]
        return optax.chain(clip, optax.adam(learning_rate, eps=1e-5))  # [core 3]

    def init(key):
        """The whole state of a run: agent and environments."""
        key, actor_key, critic_key, env_key = jax.random.split(key, 4)
        (obs, views), env_state = reset(jax.random.split(env_key, N))  # [core 1]
        state = jnp.zeros((N, A, actor.state_size))  # [lstm 2]
        params = dict(
            actor=actor.init(actor_key, obs, state, method="step"),
            critic=critic.init(critic_key, views, state, method="step"),
        )
        optimizer = make_optimizer(args.learning_rate)
        opt_state = {name: optimizer.init(params[name]) for name in params}  # [mappo 4]
        world = dict(
            env_state=env_state,
            obs=obs,
            views=views,
            actor_state=state,
            critic_state=state,
            is_dead=jnp.zeros((N, A), dtype=bool),
            episode_return=jnp.zeros((N, A)),
            episode_length=jnp.zeros(N),
        )
        run = dict(agent=dict(params=params, opt_state=opt_state), world=world, key=key)
        return run | dict(global_step=jnp.zeros((), dtype=jnp.int32))

    def to_rows(x, axis):
        """A row for each agent of each game, which are two axes [team 1]."""
        return x.reshape(*x.shape[:axis], N * A, *x.shape[axis + 2 :])

    def act(params, world, drawn):
        """One step of all games; finished episodes are followed by new ones."""
        noise, env_drawn = drawn
        inputs = world["obs"], world["actor_state"]
        logits, actor_state = actor.apply(params["actor"], *inputs, method="step")
        inputs = world["views"], world["critic_state"]
        values, critic_state = critic.apply(params["critic"], *inputs, method="step")
        available = find_actions(world["env_state"])
        log_probs = find_log_probs(logits, available)
        actions = (log_probs + noise).argmax(2)  # Gumbel-max sampling
        log_probs = jnp.take_along_axis(log_probs, actions[..., None], 2).squeeze(2)
        seen, env_state, answers = step(env_drawn, world["env_state"], actions)
        goes_on = ~answers["is_last"][:, None]
        episode_return = world["episode_return"] + answers["rewards"]
        episode_length = world["episode_length"] + 1
        row = answers | dict(
            obs=world["obs"],
            views=world["views"],
            available=available,
            actions=actions,
            log_probs=log_probs,
            values=values.squeeze(2),
            next_state=critic_state,
            is_alive=~world["is_dead"],
            episode_return=episode_return,
            episode_length=episode_length,
        )
        world = dict(
            env_state=env_state,
            obs=seen[0],
            views=seen[1],
            actor_state=actor_state * goes_on[..., None],  # [lstm 3]
            critic_state=critic_state * goes_on[..., None],
            is_dead=answers["is_dead"] & goes_on,
            episode_return=episode_return * goes_on,
            episode_length=episode_length * goes_on[:, 0],
        )
        return world, row

    def estimate(params, rollout, rewards):
        """Advantages [core 5]; truncated episodes are bootstrapped, terminated ones are not.

        They end with the team's episode: dead agents still get the team's reward [team 5]."""
        inputs = rollout["next_views"], rollout["next_state"]
        next_values, _ = critic.apply(params["critic"], *inputs, method="step")  # [rnn 2]
        next_values = next_values.squeeze(3) * ~rollout["terminated"][..., None]
        deltas = rewards + args.gamma * next_values - rollout["values"]

        def accumulate(advantage, row):
            delta, is_last = row
            advantage = delta + args.gamma * args.gae_lambda * advantage * ~is_last[:, None]
            return advantage, advantage

        rows = deltas, rollout["is_last"]
        _, advantages = jax.lax.scan(accumulate, jnp.zeros((N, A)), rows, reverse=True)
        return advantages

    def ppo_loss(params, mb):
        is_alive = mb["is_alive"]

        def mean(x):
            """Over the agents that were alive; dead agents do not act [team 3]."""
            return (x * is_alive).sum() / jnp.maximum(is_alive.sum(), 1)

        inputs = mb["obs"], mb["is_last"], mb["actor_state"]
        log_probs = find_log_probs(actor.apply(params["actor"], *inputs), mb["available"])
        inputs = mb["views"], mb["is_last"], mb["critic_state"]
        value = critic.apply(params["critic"], *inputs).squeeze(2)  # [lstm 5]
        actions = mb["actions"][..., None]
        log_ratio = jnp.take_along_axis(log_probs, actions, 2).squeeze(2) - mb["log_probs"]
        ratio = jnp.exp(log_ratio)
        adv = mb["advantages"]
        if args.norm_adv:  # [core 7]
            adv = adv - mean(adv)
            adv = adv / (jnp.sqrt(mean(adv**2)) + 1e-8)

        clipped_ratio = ratio.clip(1 - args.clip_coef, 1 + args.clip_coef)
        policy_loss = -mean(jnp.minimum(adv * ratio, adv * clipped_ratio))  # [core 8]
        value_error = (value - mb["returns"]) ** 2
        if args.clip_vloss:  # [core 9]
            change = (value - mb["values"]).clip(-args.clip_coef, args.clip_coef)
            clipped_error = (mb["values"] + change - mb["returns"]) ** 2
            value_error = jnp.maximum(value_error, clipped_error)
        value_loss = 0.5 * value_error.mean()  # dead agents, too: others are bootstrapped from it
        p_log_p = jnp.exp(log_probs) * log_probs.clip(-1e9)  # 0 where an action is masked
        entropy = -mean(p_log_p.sum(2))
        loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy  # [core 10]
        return loss, {
            "loss": loss,
            "value_loss": value_loss,
            "policy_loss": policy_loss,
            "entropy": entropy,
            "old_approx_kl": -mean(log_ratio),
            "approx_kl": mean(ratio - 1 - log_ratio),  # [core 12]
            "clipfrac": mean(jnp.abs(ratio - 1) > args.clip_coef),
        }

    def learn(optimizer, agent_state, mb):
        params, opt_state = agent_state["params"], agent_state["opt_state"]
        grads, losses = jax.grad(ppo_loss, has_aux=True)(params, mb)
        new = dict(params={}, opt_state={})
        for name in params:  # each network with its own gradient norm [mappo 4]
            updates, new["opt_state"][name] = optimizer.update(grads[name], opt_state[name])
            new["params"][name] = optax.apply_updates(params[name], updates)
        return new, losses

    def iterate(run, _):
        iteration = run["global_step"] // (T * N)
        learning_rate = args.learning_rate
        if args.anneal_lr:  # [core 4]
            learning_rate *= 1 - iteration / num_iterations
        agent_state = run["agent"]
        params = agent_state["params"]
        key, noise_key, env_key, order_key = jax.random.split(run["key"], 4)

        # act; all random numbers of a rollout are drawn at once, which is 10% faster
        noise = jax.random.gumbel(noise_key, (T, N, A, num_actions))
        drawn = noise, draw(env_key, (T, N))
        world, rollout = jax.lax.scan(partial(act, params), run["world"], drawn)

        # estimate advantages
        rewards = rollout["rewards"]
        if args.rew_shaping_horizon:  # [team 6]
            shaping = jnp.maximum(0, 1 - run["global_step"] / args.rew_shaping_horizon)
            rewards += shaping * rollout["shaped_rewards"]
        advantages = estimate(params, rollout, rewards)
        values = rollout["values"]
        returns = advantages + values

        # learn
        is_last = jnp.broadcast_to(rollout["is_last"][..., None], (T, N, A))
        batch = rollout | dict(advantages=advantages, returns=returns, is_last=is_last)
        names = ("obs", "views", "available", "actions", "log_probs", "values", "is_alive")
        names += ("advantages", "returns", "is_last")
        batch = {name: to_rows(batch[name], 1) for name in names}
        order_keys = jax.random.split(order_key, args.update_epochs)
        orders = jax.vmap(jax.random.permutation, (0, None))(order_keys, N * A)  # [core 6]
        orders = orders.reshape(args.update_epochs * args.num_minibatches, -1)
        minibatches = jax.tree.map(lambda x: x[:, orders].swapaxes(0, 1), batch)  # [lstm 4]
        for name in ("actor_state", "critic_state"):
            minibatches[name] = to_rows(run["world"][name], 0)[orders]
        learn_from = partial(learn, make_optimizer(learning_rate))
        agent_state, losses = jax.lax.scan(learn_from, agent_state, minibatches)
        checked = dict(observation=rollout["next_obs"], reward=rewards, loss=losses.pop("loss"))
        checked = jax.tree.map(lambda x: jnp.abs(x).max(), checked)  # finite if all of it is
        metrics = {f"losses/{name}": x[-1] for name, x in losses.items()} | {
            "charts/learning_rate": learning_rate,
            "losses/clipfrac": losses["clipfrac"].mean(),
            "losses/explained_variance": 1 - (returns - values).var() / returns.var(),
        }
        run = dict(agent=agent_state, world=world, key=key, global_step=run["global_step"] + T * N)
        return run, (metrics, checked, (rollout["is_last"], tell_episodes(rollout)))

    def tell_episodes(rollout):
        """The metrics of an episode: of the team [team 5], and of each agent."""
        returns = rollout["episode_return"]
        told = {
            "charts/episodic_return": returns.mean(2),
            "charts/episodic_length": rollout["episode_length"],
        }
        if "won" in rollout:
            told["charts/win_rate"] = rollout["won"]
        return told | {
            f"charts/episodic_return-{a}": returns[..., i] for i, a in enumerate(env.agents)
        }

    def train(run, length):
        """Some iterations, with the metrics of the last one and all episodes."""
        run, (metrics, checked, episodes) = jax.lax.scan(iterate, run, None, length)
        metrics = jax.tree.map(lambda x: x[-1], metrics)
        return run, metrics, jax.tree.map(jnp.max, checked), episodes

    return init, train


def mean_episode(is_last, told):
    """Means over the episodes that ended during a call, NaN if there is none."""
    return {name: (x * is_last).sum() / is_last.sum() for name, x in told.items()}


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
        require_envs(args, envs)
        init, _ = make_program(args, envs.env)
        num_agents, obs_shape = envs.num_envs, envs.single_observation_space.shape
        num_rows = num_runs * T * N * num_agents * (2 + args.update_epochs)
        require_memory(4 * num_rows * math.prod(obs_shape) * (1 + num_agents))

    keys = jnp.stack([seed_everything(run_args) for run_args in all_args])
    params = jax.eval_shape(init, keys[0])["agent"]["params"]
    weights = sum(x.size for x in jax.tree.leaves(params))
    use_gpu = args.cuda and num_runs * N * num_agents * weights >= 2**17  # multiplications per step
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
        _, train = make_program(replace(args, **values), envs.env)
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
        # act, estimate advantages and learn, in one call of the program
        runs, *logs = train(values, runs)
        iteration += length
        metrics, checked, episodes = jax.device_get(logs)
        if num_runs == 1:
            is_last, told = jax.tree.map(np.ravel, episodes)
            for i in np.flatnonzero(is_last):
                episode = take(told, i)
                writers[0].add_scalars(global_step + i + 1, episode)
                episode_return = episode["charts/episodic_return"]
                progress.set_postfix(episodic_return=f"{episode_return:.1f}", refresh=False)
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
