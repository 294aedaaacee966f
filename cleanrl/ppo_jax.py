# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "flax>=0.12", "gymnasium[classic-control]>=1.2.1,<2", "gymnax>=1.0", "jax>=0.9", "moviepy>=2", "numpy>=2",
#     "optax>=0.2.6", "six", "tensorboard>=2.20", "tqdm>=4.67", "tyro>=1.0", "wandb>=0.22",
# ]
# ///
"""Proximal Policy Optimization as one compiled program, its environments included, for many runs at once.

    uv run cleanrl/ppo_jax.py                                # CartPole-v1 to a return near 500, in seconds
    uv run cleanrl/ppo_jax.py --num-seeds 16                 # sixteen runs side by side
    uv run cleanrl/ppo_jax.py --sweep learning_rate=1e-4,3e-4,1e-3 ent_coef=0,0.01
    uv run cleanrl/ppo_jax.py --env-id Breakout-MinAtar --num-envs 64 --total-timesteps 10000000
    uv run cleanrl/ppo_jax.py --resume runs/<run>            # go on after an interruption, bit for bit
    tensorboard --logdir runs

Numbers in brackets, such as [core 5], are the implementation details explained in docs/rl-algorithms/ppo.md.
"""

import importlib.util
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.metadata import distributions
from pathlib import Path

if "deterministic" not in os.environ.setdefault("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] += " --xla_gpu_deterministic_ops=true"  # the same bits on a GPU too; XLA reads it once
import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax.linen.initializers import orthogonal
from flax.serialization import from_state_dict, msgpack_restore, msgpack_serialize, to_state_dict
from jax.flatten_util import ravel_pytree
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tqdm import tqdm

for name in {"matplotlib.pyplot", "seaborn"} - set(sys.modules):  # gymnax only plots with them: not imported before that
    spec = importlib.util.find_spec(name)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
import gymnax  # noqa: E402
from gymnax.wrappers.gym import GymnaxToGymWrapper  # noqa: E402


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of this experiment
    seed: int = 1  # seed of the weights, the environments and every sampled number
    num_seeds: int = 1  # runs to train side by side, with seeds from seed on
    sweep: tuple[str, ...] = ()  # train with each of these values too: learning_rate=1e-4,1e-3 and other FLOATS; all pairs
    cuda: bool = True  # use the GPU if there is one and the networks have enough to do to gain from it
    track: bool = False  # also log to Weights & Biases
    wandb_project_name: str = "cleanRL"  # project to log to
    wandb_entity: str | None = None  # team to log to
    capture_video: bool = False  # record an episode at each checkpoint into the run's folder, in Gymnasium's environment
    resume: tuple[str, ...] = ()  # folders of interrupted runs to go on with, their flags as they were
    checkpoint_interval: int = 100  # iterations between two checkpoints
    log_interval: int = 16  # iterations in one call of the program

    env_id: str = "CartPole-v1"  # gymnax id of the environment; module:id imports the module first
    total_timesteps: int = 500_000  # environment steps of the whole run
    learning_rate: float = 2.5e-4  # learning rate at the start
    num_envs: int = 4  # environments stepped side by side
    num_steps: int = 128  # steps of each environment per iteration
    anneal_lr: bool = True  # lower the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # bias-variance trade-off of the advantage estimate
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # passes over the rollout per iteration
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.2  # how far the policy may move from the one that acted
    clip_vloss: bool = True  # clip the value's movement the same way
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # global norm the gradient is clipped to


FLOATS = ("learning_rate", "gamma", "gae_lambda", "clip_coef", "ent_coef", "vf_coef", "max_grad_norm")  # one a run


def make_envs(args, num_envs, render_mode=None):
    """Gymnasium's environments, for evaluation and videos; gymnax's own where Gymnasium has none of that id."""
    *module, env_id = args.env_id.split(":")
    list(map(importlib.import_module, module))
    statistics = [gym.wrappers.RecordEpisodeStatistics]
    if env_id in gymnax.registered_envs and env_id not in gym.registry:
        return gym.vector.SyncVectorEnv([lambda: statistics[0](GymnaxToGymWrapper(*gymnax.make(env_id)))] * num_envs)
    return gym.make_vec(env_id, num_envs, "sync", wrappers=statistics, render_mode=render_mode)


def sum_of_products(x, kernel, *_, **__):
    """A matrix product, written out: of few rows, a GPU does it and what is around it in one kernel."""
    return (x[..., None] * kernel).sum(-2)


class Network(nn.Module):
    out_dim: int
    gain: float
    product: Callable = jax.lax.dot_general

    @nn.compact
    def __call__(self, obs):
        dense = partial(nn.Dense, kernel_init=orthogonal(2**0.5), dot_general=self.product)  # [core 2]
        if obs.ndim == 4:  # images: a 3x3 convolution, as the matrix product that it is: many times as fast on a CPU
            obs = jnp.concatenate([obs[:, i : i - 2 or None, j : j - 2 or None] for i in range(3) for j in range(3)], -1)
            hidden = nn.relu(dense(128)(nn.relu(dense(16)(obs)).reshape(len(obs), -1)))
        else:
            hidden = nn.tanh(dense(64)(nn.tanh(dense(64)(obs.reshape(len(obs), -1)))))
        return nn.Dense(self.out_dim, kernel_init=orthogonal(self.gain), dot_general=self.product)(hidden)


class Agent(nn.Module):
    num_actions: int
    product: Callable = jax.lax.dot_general

    def setup(self):
        self.actor = Network(self.num_actions, gain=0.01, product=self.product)  # [core 13] two networks, nothing shared
        self.critic = Network(1, gain=1.0, product=self.product)

    def __call__(self, obs):
        return nn.log_softmax(self.policy(obs)), self.value(obs)

    def policy(self, obs):
        return self.actor(obs)  # logits

    def value(self, obs):
        return self.critic(obs).squeeze(-1)


def load_policy(checkpoint, envs):
    """The trained policy: a function from observations, and which of them end an episode, to actions."""
    agent, first_action = Agent(int(envs.single_action_space.n)), envs.single_action_space.start
    policy = jax.jit(lambda obs: agent.apply(checkpoint["agent"]["params"], obs.astype(jnp.float32), method="policy"))
    jax.eval_shape(policy, np.zeros((1, *envs.single_observation_space.shape)))  # complains of weights that do not fit
    keys = map(jax.random.key, itertools.count())
    return lambda obs, is_last: np.asarray(jax.random.categorical(next(keys), policy(obs))) + first_action


def make_program(args, num_runs=1, on_gpu=False):
    """The functions of a run: init(key) -> run, all that changes while it goes on; iterate(floats, run, _) -> run, logs.

    A GPU waits for the start of every kernel, so they are made few there, where it can be done without another result.
    """
    env, env_params = gymnax.make(args.env_id.split(":")[-1])
    agent, num_actions = Agent(env.num_actions), env.num_actions
    is_small = on_gpu and num_runs * args.num_envs <= 2**10 and len(env.observation_space(env_params).shape) < 3
    acting = Agent(num_actions, sum_of_products) if is_small else agent
    batch_size, num_updates = args.num_envs * args.num_steps, args.update_epochs * args.num_minibatches
    num_iterations = args.total_timesteps // batch_size

    def make_optimizer(floats, iteration):
        learning_rate = floats["learning_rate"] * (1 - args.anneal_lr * iteration / num_iterations)  # [core 4]
        clip = optax.clip_by_global_norm(floats["max_grad_norm"])  # [core 11]
        return optax.chain(clip, optax.adam(learning_rate, eps=1e-5)), learning_rate  # [core 3]

    def init(key):
        key, params_key, env_key = jax.random.split(key, 3)
        obs, env_state = jax.vmap(env.reset_env, (0, None))(jax.random.split(env_key, args.num_envs), env_params)  # [core 1]
        params, zeros = agent.init(params_key, obs), jnp.zeros(args.num_envs)
        optimizer, _ = make_optimizer(dict.fromkeys(FLOATS, 0.0), 0)
        world = dict(env_state=env_state, obs=obs, episode_return=zeros, episode_length=zeros)
        agent_state = dict(params=params, opt_state=optimizer.init(ravel_pytree(params)[0]))
        return dict(agent=agent_state, world=world, key=key, global_step=jnp.zeros((), dtype=jnp.int32))

    def choose(is_over, new, old):
        return jnp.where(is_over.reshape(*is_over.shape, *[1] * (old.ndim - is_over.ndim)), new, old)

    def act(params, world, drawn):
        """One step of all environments. Those that end start anew from the state that was drawn for that case."""
        noise, env_keys, fresh = drawn
        logits = acting.apply(params, world["obs"], method="policy")
        actions = (logits + noise).argmax(-1)  # a sample, since the noise is Gumbel's
        stepped = jax.vmap(env.step_env, (0, 0, 0, None))(env_keys, world["env_state"], actions, env_params)
        next_obs, env_state, rewards, terminated, _ = stepped
        is_over = terminated | jax.vmap(env.is_truncated, (0, None))(env_state, env_params)
        obs, env_state = jax.tree.map(partial(choose, is_over), fresh, (next_obs, env_state))
        total, length = world["episode_return"] + rewards, world["episode_length"] + 1
        small = jnp.stack([actions, rewards, terminated, is_over, total, length], dtype=jnp.float32)  # one array to store
        world = dict(env_state=env_state, obs=obs, episode_return=total * ~is_over, episode_length=length * ~is_over)
        return world, (logits, next_obs, small)

    def estimate(floats, params, obs, next_obs, rewards, terminated, is_over):
        """Advantages [core 5]: a truncated episode is bootstrapped from its last observation, a terminated one is not."""
        both = jnp.stack([obs, next_obs])
        values, next_values = agent.apply(params, both.reshape(-1, *obs.shape[2:]), method="value").reshape(both.shape[:3])
        deltas = rewards + floats["gamma"] * next_values * ~terminated - values
        weights = floats["gamma"] * floats["gae_lambda"] * ~is_over

        def accumulate(advantages, row):
            advantages = row[0] + row[1] * advantages
            return advantages, advantages

        return values, jax.lax.scan(accumulate, jnp.zeros(args.num_envs), (deltas, weights), reverse=True, unroll=16)[1]

    def loss(params, floats, minibatch):
        obs, actions, logprobs, values, advantages, returns = minibatch
        log_probs, value = agent.apply(params, obs)
        logratio = (log_probs * nn.one_hot(actions, num_actions)).sum(1) - logprobs
        ratio, clip_coef = jnp.exp(logratio), floats["clip_coef"]
        if args.norm_adv:  # [core 7]
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        clipped_ratio = ratio.clip(1 - clip_coef, 1 + clip_coef)
        policy_loss = -jnp.minimum(advantages * ratio, advantages * clipped_ratio).mean()  # [core 8]
        value_error = jnp.square(value - returns)
        if args.clip_vloss:  # [core 9]
            clipped_value = values + (value - values).clip(-clip_coef, clip_coef)
            value_error = jnp.maximum(value_error, jnp.square(clipped_value - returns))
        value_loss = 0.5 * value_error.mean()
        entropy = -(jnp.exp(log_probs) * log_probs).sum(1).mean()
        losses = {"value_loss": value_loss, "policy_loss": policy_loss, "entropy": entropy}
        losses |= {"old_approx_kl": -logratio.mean(), "approx_kl": (ratio - 1 - logratio).mean()}  # [core 12]
        losses |= {"clipfrac": (jnp.abs(ratio - 1) > clip_coef).mean()}
        return policy_loss + floats["vf_coef"] * value_loss - floats["ent_coef"] * entropy, losses  # [core 10]

    def iterate(floats, run, _):
        # act: what has to be drawn is drawn before, all at once
        params, rows = run["agent"]["params"], (args.num_steps, args.num_envs)
        key, noise_key, step_key, reset_key, order_key = jax.random.split(run["key"], 5)
        fresh = jax.vmap(env.reset_env, (0, None))(jax.random.split(reset_key, batch_size), env_params)
        fresh = jax.tree.map(lambda x: x.reshape(*rows, *x.shape[1:]), fresh)
        drawn = jax.random.gumbel(noise_key, (*rows, num_actions)), jax.random.split(step_key, rows), fresh
        act_once, unroll = partial(act, params), 16 if is_small else 1
        world, (logits, next_obs, small) = jax.lax.scan(act_once, run["world"], drawn, unroll=unroll)
        actions, rewards, terminated, is_over, *totals = jnp.moveaxis(small, 1, 0)
        actions, terminated, is_over = actions.astype(jnp.int32), terminated > 0, is_over > 0
        obs = jnp.concatenate([run["world"]["obs"][None], choose(is_over, fresh[0], next_obs)[:-1]])
        logprobs = (nn.log_softmax(logits) * nn.one_hot(actions, num_actions)).sum(-1)
        values, advantages = estimate(floats, params, obs, next_obs, rewards, terminated, is_over)

        # learn from minibatches of rows in a new order each epoch [core 6]: random numbers are sorted, the last bits say whose
        returns, row_bits = advantages + values, (batch_size - 1).bit_length()
        drawn = jax.random.bits(order_key, (args.update_epochs, batch_size)) >> row_bits << row_bits
        orders = jnp.sort(drawn | jnp.arange(batch_size, dtype=jnp.uint32)) & 2**row_bits - 1
        batch = obs, actions, logprobs, values, advantages, returns
        batch = jax.tree.map(lambda x: x.reshape(batch_size, *x.shape[2:])[orders.reshape(num_updates, -1)], batch)
        optimizer, learning_rate = make_optimizer(floats, run["global_step"] // batch_size)
        flat, unravel = ravel_pytree(params)  # Adam is faster on one long vector
        state, as_params = (flat, run["agent"]["opt_state"]), unravel
        if on_gpu and not is_small:  # where it is slower
            state, as_params = jax.tree.map(lambda x: unravel(x) if x.ndim else x, state), lambda x: x

        def learn(state, minibatch):
            grads, losses = jax.grad(lambda x: loss(as_params(x), floats, minibatch), has_aux=True)(state[0])
            updates, opt_state = optimizer.update(grads, state[1])
            return (optax.apply_updates(state[0], updates), opt_state), losses

        state, losses = jax.lax.scan(learn, state, batch, unroll=4 if is_small else 1)
        is_tree = lambda x: isinstance(x, dict)  # noqa: E731
        flat, opt_state = jax.tree.map(lambda x: ravel_pytree(x)[0] if is_tree(x) else x, state, is_leaf=is_tree)
        agent_state = dict(params=unravel(flat), opt_state=opt_state)
        metrics = {f"losses/{name}": x[-1] for name, x in losses.items()} | {"losses/clipfrac": losses["clipfrac"].mean()}
        metrics |= {"losses/explained_variance": 1 - advantages.var() / returns.var(), "charts/learning_rate": learning_rate}
        logs = metrics, (is_over, *totals)
        return dict(agent=agent_state, world=world, key=key, global_step=run["global_step"] + batch_size), logs

    return init, iterate


@cache
def crc_tables(length):
    """What a byte adds to the checksum (CRC-32C) of so many bytes, by its place and its value."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = table >> 1 ^ np.uint32(0x82F63B78) * (table & 1)
    step = lambda x, _: table[x & 255] ^ x >> 8  # noqa: E731  one byte more behind it
    return np.array(list(itertools.accumulate(range(length - 1), step, initial=table))[::-1])


def frame(rows):
    """TensorBoard's records of events, each a row of bytes: length, checksum, event, checksum."""

    def checksum(rows):
        places = np.arange(rows.shape[1])
        rows = rows ^ np.uint8(255) * (places < 4)  # it starts with all bits set
        crc = ~np.bitwise_xor.reduce(crc_tables(len(places))[places, rows], axis=1)
        return ((crc >> 15 | crc << 17) + np.uint32(0xA282EAD8)).astype("<u4")[:, None].view(np.uint8)

    lengths = np.full((len(rows), 1), rows.shape[1], dtype="<u8").view(np.uint8)
    return np.hstack([lengths, checksum(lengths), rows, checksum(rows)])


def scalar_events(steps, scalars):
    """Events with scalars at many steps, as rows of bytes: made one by one, they would take longer than the training."""
    text = lambda *parts: np.frombuffer(b"".join(parts), dtype=np.uint8)  # noqa: E731
    varint = lambda x, size: x[:, None] >> 7 * np.arange(size) & 127 | [128] * (size - 1) + [0]  # noqa: E731
    values = []
    for name, column in scalars.items():  # the fields of Summary.Value: 1 is the tag, 2 the simple_value
        values.append(text(b"\x0a", bytes([len(name) + 7]), b"\x0a", bytes([len(name)]), name.encode(), b"\x15"))
        values.append(np.asarray(column, dtype="<f4")[:, None].view(np.uint8))
    size = sum(x.shape[-1] for x in values)
    wall_time, size = np.array([time.time()], dtype="<f8").view(np.uint8), varint(np.array([size]), 2)[0]
    fields = [text(b"\x09"), wall_time, text(b"\x10"), varint(np.asarray(steps, dtype=np.int64), 5), text(b"\x2a"), size]
    return np.hstack([np.broadcast_to(x, (len(steps), x.shape[-1])).astype(np.uint8) for x in fields + values])


if __name__ == "__main__":
    # check what was asked for before anything is written
    args, start_time = tyro.cli(Args), time.time()
    resume, asked_id = args.resume, args.env_id
    try:
        if resume:
            assert args == Args(resume=resume, env_id=asked_id), "it goes on with the runs' own flags: give no others"
            all_args = []
            for folder in resume:  # which may be a stranger's: it is only believed in what cannot do harm
                about = json.loads(Path(folder, "run.json").read_text())
                args = Args(**about["args"] | {"sweep": (), "resume": ()})
                assert about["file"] == Path(__file__).name, f"it is a run of {about['file']}"
                kinds = Args.__annotations__ | {"sweep": tuple, "resume": tuple}
                assert all(isinstance(value, kinds[name]) for name, value in vars(args).items()), "wrong types"
                all_args.append(args)
        else:
            assert "--resume" not in sys.argv, "which folders?"
            assert 0 < args.num_seeds < 2**16, "the seeds are at least one and below 65536"
            grid = [[(name, float(x)) for x in xs.split(",")] for name, _, xs in (item.partition("=") for item in args.sweep)]
            assert all(name in FLOATS for choices in grid for name, _ in choices), f"takes {', '.join(FLOATS)}"
            all_args = [
                replace(args, seed=seed, num_seeds=1, sweep=(), **dict(choice), exp_name=args.exp_name + suffix)
                for choice in itertools.product(*grid)
                for suffix in ["".join(f"-{name}={x:g}" for name, x in choice)]
                for seed in range(args.seed, args.seed + args.num_seeds)
            ]
    except Exception as error:
        raise SystemExit(f"cannot {' '.join(sys.argv[1:])}: {type(error).__name__}: {error}".splitlines()[0]) from None
    args = all_args[0]
    if args.env_id != asked_id and (":" in args.env_id or asked_id != Args.env_id):  # an id may name a module to import
        raise SystemExit(f"{resume[0]} is a run on {args.env_id!r}: add --env-id with that id if you trust what it imports")
    run_names = [f"{run.env_id}__{run.exp_name}__{run.seed}__{int(start_time)}" for run in all_args]
    run_folders = [Path("runs", name.translate(str.maketrans("/\\:", "---"))) for name in run_names]
    run_folders = [Path(folder).absolute() for folder in resume] or run_folders

    # check that the numbers fit together and the file fits the environment
    alike = [replace(run, seed=0, exp_name="", **dict.fromkeys(FLOATS, 0.0)) for run in all_args]
    if any(run != alike[0] for run in alike) or len(set(run_folders)) < len(all_args):
        raise SystemExit("runs side by side differ in their seeds and in what --sweep takes; the rest is alike")
    for rule in (
        "num_envs > 0; num_minibatches > 0; update_epochs > 0; checkpoint_interval > 0; log_interval > 0; num_steps > 0; "
        "num_envs * num_steps % num_minibatches == 0; num_envs * num_steps <= min(total_timesteps, 2**24); 0 <= gamma <= 1; "
        "0 <= gae_lambda <= 1; clip_coef > 0; max_grad_norm > 0; 0 < learning_rate < 1e9; abs(ent_coef) < 1e9; "
        "abs(vf_coef) < 1e9; total_timesteps < 2**31; 0 <= seed < 2**32"
    ).split("; "):
        if not all(eval(rule, {}, vars(run)) for run in all_args):
            raise SystemExit(f"these flags do not fit: {rule} must hold")
    try:
        envs = make_envs(args, 1, "rgb_array" if args.capture_video else None)
        env, env_params = gymnax.make(args.env_id.split(":")[-1])
    except Exception as error:
        raise SystemExit(f"cannot make {args.env_id}: {type(error).__name__}: {error}".splitlines()[0]) from None
    obs_shape = env.observation_space(env_params).shape
    for need, is_met in {
        "Discrete actions": isinstance(env.action_space(env_params), gymnax.environments.spaces.Discrete),
        "rgb_array rendering for a video": not args.capture_video or "rgb_array" in envs.metadata.get("render_modes", ()),
    }.items():
        if not is_met:
            raise SystemExit(f"{Path(__file__).name} needs {need}, which {args.env_id} does not have")

    # seed, build, restore
    inputs = len(all_args) * args.num_envs * np.prod(obs_shape)  # numbers read at a step; a GPU pays only from many on
    device = jax.devices()[0] if args.cuda and inputs >= 2**6 else jax.devices("cpu")[0]
    jax.config.update("jax_default_device", device)
    batch_size, iteration = args.num_envs * args.num_steps, 0
    num_iterations = args.total_timesteps // batch_size
    init, iterate = make_program(args, len(all_args), device.platform == "gpu")
    floats = {name: jnp.array([getattr(run, name) for run in all_args]) for name in FLOATS}
    keys = jnp.stack([jax.random.PRNGKey(run.seed) for run in all_args])
    init_all = partial(jax.lax.map, init)  # one after the other: on few cores, XLA's QR of a batch of matrices may never end
    runs = jax.jit(init_all, compiler_options={"xla_backend_optimization_level": 0})(keys)  # quick to compile
    if resume and any((folder / "checkpoint.msgpack").exists() for folder in run_folders):
        try:
            checkpoints = [msgpack_restore((folder / "checkpoint.msgpack").read_bytes()) for folder in run_folders]
            restored = from_state_dict(runs, jax.tree.map(lambda *x: np.stack(x), *checkpoints))
            for old, new in zip(*map(jax.tree.leaves, (runs, restored)), strict=True):
                assert (old.shape, old.dtype) == (new.shape, new.dtype), "arrays of other shapes"
            runs, global_step = jax.tree.map(jnp.array, restored), int(restored["global_step"][0])
            assert global_step in range(0, num_iterations * batch_size + 1, batch_size), f"step {global_step} of another run"
            assert (restored["global_step"] == global_step).all(), "not all have come as far: resume them one by one"
            iteration = global_step // batch_size
        except Exception as error:
            raise SystemExit(f"cannot resume {' '.join(resume)}: {type(error).__name__}: {error}".splitlines()[0]) from None

    # open the logs: each run has its own, as if it had been trained alone
    git = subprocess.run("git rev-parse HEAD", shell=True, cwd=Path(__file__).parent, capture_output=True, text=True)
    about = {
        "file": Path(__file__).name,
        "args": asdict(args),
        "tags": list(filter(None, os.environ.get("WANDB_TAGS", "").split(","))),
        "start_time": start_time,
        "commit": git.stdout.strip(),
        "device": device.device_kind if device.platform == "gpu" else platform.machine(),
        "python": platform.python_version(),
        "packages": {d.name: d.version for d in distributions()},
    }
    tracked = []
    for run, run_folder in zip(all_args, run_folders, strict=True):
        try:
            if args.track:
                import wandb

                names = dict(project=args.wandb_project_name, entity=args.wandb_entity, name=run_folder.name)
                names |= dict(id=run_folder.name, config=asdict(run), resume="allow", reinit="create_new", save_code=True)
                tracked.append(wandb.init(**names))
            if not resume:  # the folder appears with run.json in it, or not at all
                assert not run_folder.exists(), "there is such a run already"
                os.makedirs(f"{run_folder}.tmp")
                Path(f"{run_folder}.tmp", "run.json").write_text(json.dumps(about | {"args": asdict(run)}, indent=2))
                os.rename(f"{run_folder}.tmp", run_folder)
        except Exception as error:
            raise SystemExit(f"cannot log to {run_folder}: {type(error).__name__}: {error}".splitlines()[0]) from None
        print(f"run folder: {run_folder}")
    start = SessionLog(status=SessionLog.START)  # hides what was logged after the checkpoint
    start = Event(wall_time=time.time(), step=iteration * batch_size + 1, session_log=start)
    events = [folder / f"events.out.tfevents.{time.time():.6f}.{platform.node()}" for folder in run_folders]
    for event in (Event(wall_time=time.time(), file_version="brain.Event:2"), start):
        for path in events:
            with path.open("ab") as file:
                file.write(frame(np.frombuffer(event.SerializeToString(), dtype=np.uint8)[None]))

    def log(run_numbers, steps, scalars):
        """Scalars of many runs, sorted by run, at many steps."""
        rows, starts = frame(scalar_events(steps, scalars)), np.searchsorted(run_numbers, np.arange(len(events) + 1))
        for number, path in enumerate(events):
            with path.open("ab") as file:
                file.write(rows[starts[number] : starts[number + 1]].tobytes())
        for i in range(len(steps)) if tracked else ():
            values = {name: float(column[i]) for name, column in scalars.items()}
            tracked[run_numbers[i]].log(values | {"global_step": int(steps[i])})

    # train
    is_summary = len(all_args) > 64  # of more runs than that, what is logged of the episodes of a call is their mean

    def side_by_side(function):  # a run that is alone is faster without an axis of its own
        alone = lambda *runs: jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], runs)))  # noqa: E731
        return jax.vmap(function) if len(all_args) > 1 else alone

    @partial(jax.jit, static_argnums=1, donate_argnums=0)
    def train(runs, length):
        of_one_run = lambda x, run: jax.lax.scan(partial(iterate, x), run, None, length)  # noqa: E731
        runs, (metrics, episodes) = side_by_side(of_one_run)(floats, runs)
        is_over, returns, lengths = episodes
        count = is_over.sum((1, 2, 3))
        if is_summary:
            episodes = count > 0, (returns * is_over).sum((1, 2, 3)) / count, (lengths * is_over).sum((1, 2, 3)) / count
        return runs, (metrics, episodes)

    pending, clock = [], None
    progress = tqdm(initial=iteration * batch_size, total=num_iterations * batch_size, unit="step", unit_scale=True)
    while iteration < num_iterations:
        # act, estimate advantages and learn, in one call of the program
        length = min(args.log_interval, num_iterations - iteration)
        runs, logs = train(runs, length)
        iteration += length
        global_step = iteration * batch_size
        pending.append((global_step - length * batch_size, length, logs))
        is_due = iteration // args.checkpoint_interval > (iteration - length) // args.checkpoint_interval
        is_due |= iteration == num_iterations

        # log what the call before did, while this one is at work
        while len(pending) > (not is_due):
            first_step, length, logs = pending.pop(0)
            metrics, (is_over, returns, lengths) = jax.device_get(logs)
            last_step, (numbers, places) = first_step + length * batch_size, np.nonzero(is_over.reshape(len(all_args), -1))
            episodes = {"charts/episodic_return": returns[is_over], "charts/episodic_length": lengths[is_over]}
            log(numbers, np.full_like(places, last_step) if is_summary else first_step + places + 1, episodes)
            if clock is None:  # what compiled does not count
                clock = last_step, time.time()
            else:
                steps_per_second = int(len(all_args) * (last_step - clock[0]) / (time.time() - clock[1]))  # of all runs
                metrics["charts/SPS"] = np.full((len(all_args), length), steps_per_second)
            numbers, iterations = np.divmod(np.arange(len(all_args) * length), length)
            log(numbers, first_step + (iterations + 1) * batch_size, {name: x.ravel() for name, x in metrics.items()})
            progress.update(length * batch_size)
            if is_over.any():
                progress.set_postfix(episodic_return=f"{returns[is_over].mean():.1f}", refresh=False)

        # checkpoint
        if is_due:
            checkpoint = to_state_dict(jax.device_get(runs))
            for number, run_folder in enumerate(run_folders):
                of_run = jax.tree.map(lambda x, number=number: x[number], checkpoint)
                (run_folder / "checkpoint.tmp").unlink(missing_ok=True)  # never write through a stranger's link
                (run_folder / "checkpoint.tmp").write_bytes(msgpack_serialize(of_run))
                os.replace(run_folder / "checkpoint.tmp", run_folder / "checkpoint.msgpack")  # whole, or not at all
                if args.capture_video:
                    videos = dict(video_folder=str(run_folder / "videos"), name_prefix=f"step-{global_step}")
                    recorded, policy = gym.wrappers.vector.RecordVideo(envs, **videos), load_policy(of_run, envs)
                    (obs, _), is_last = recorded.reset(seed=args.seed % 2**31), np.zeros(1, dtype=bool)
                    while not is_last:
                        obs, _, terminated, truncated, _ = recorded.step(policy(obs, is_last))
                        is_last = terminated | truncated
                    recorded.stop_recording()
                    for video in (run_folder / "videos").glob(f"step-{global_step}-*.mp4") if tracked else ():
                        tracked[number].log({"videos": wandb.Video(str(video)), "global_step": global_step})

    progress.close()
    envs.close()
    for run in tracked:
        run.finish()
