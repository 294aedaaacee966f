# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "dm-control>=1.0.30; python_version < '3.13'", "flax>=0.12", "gymnasium[mujoco]>=1.2.1,<2", "jax>=0.9", "moviepy>=2",
#     "mujoco>=3.3,<4", "numpy>=2", "optax>=0.2.6", "shimmy[dm-control]>=2.0.1; python_version < '3.13'", "tensorboard>=2.20",
#     "tqdm>=4.67", "tyro>=1.0", "wandb>=0.22",
# ]
# ///
"""DroQ (SAC with dropout and many updates) for flat observations (or dictionaries, flattened) and continuous actions, in JAX.

    uv run cleanrl/droq_continuous_action_jax.py                                # Hopper-v4, 1M steps
    uv run cleanrl/droq_continuous_action_jax.py --env-id dm_control/cartpole-balance-v0 --seed 2
    uv run cleanrl/droq_continuous_action_jax.py --resume runs/<run>            # go on after an interruption
    tensorboard --logdir runs

Numbers in brackets, such as [droq 2], are the implementation details explained in docs/rl-algorithms/{droq,sac,td3,ddpg}.md.
"""

import json
import math
import os
import platform
import subprocess
import time
from dataclasses import asdict, dataclass
from functools import partial
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
from flax.serialization import from_state_dict, msgpack_restore, msgpack_serialize, to_state_dict
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer import event_file_writer
from tqdm import tqdm


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of this experiment
    seed: int = 1  # seed of the weights, the environments and every sampled number
    cuda: bool = True  # use the GPU if there is one
    track: bool = False  # also log to Weights & Biases
    wandb_project_name: str = "cleanRL"  # project to log to
    wandb_entity: str | None = None  # team to log to
    capture_video: bool = False  # record videos of the first environment into the run's folder
    resume: str | None = None  # folder of an interrupted run to go on with, its flags as they were
    checkpoint_interval: int = 50_000  # environment steps between two checkpoints
    checkpoint_buffer: bool = False  # keep the replay buffer, of 0.1 GB or more, too; without it, learning waits for a new one

    env_id: str = "Hopper-v4"  # Gymnasium id of the environment
    total_timesteps: int = 1_000_000  # environment steps of the whole run
    learning_rate: float = 3e-4  # learning rate
    num_envs: int = 1  # environments stepped side by side
    buffer_size: int = 1_000_000  # transitions that the replay buffer holds
    gamma: float = 0.99  # discount factor
    tau: float = 0.005  # how far the target networks move to the networks when they are updated
    batch_size: int = 256  # transitions per update
    utd: int = 20  # updates of the Q-networks per environment step
    dropout: float = 0.01  # chance that the Q-networks leave out a number
    learning_starts: int = 5_000  # environment steps, with random actions, before the first update


def make_envs(args, num_envs, render_mode=None):
    env_id = f"shimmy:{args.env_id}" if args.env_id.startswith("dm_control/") else args.env_id  # imports shimmy first
    envs = gym.make_vec(env_id, num_envs, "sync", render_mode=render_mode, wrappers=[gym.wrappers.FlattenObservation])
    return gym.wrappers.vector.RecordEpisodeStatistics(envs)


def rescale(actions, space):
    """From -1 to 1, where the networks and the replay buffer have them, to each action's own bounds [ddpg 1]."""
    actions = actions.reshape(-1, *space.shape)
    return (space.low + (space.high - space.low) * (actions + 1) / 2).clip(space.low, space.high)


class Actor(nn.Module):
    action_dim: int

    @nn.compact
    def __call__(self, obs):
        hidden = nn.relu(nn.Dense(256)(nn.relu(nn.Dense(256)(obs))))
        mean, log_std = nn.Dense(self.action_dim)(hidden), nn.Dense(self.action_dim)(hidden)
        self.param("log_alpha", nn.initializers.zeros, ())  # the temperature's logarithm, which is learned with the policy
        return mean, -5 + 3.5 * (1 + nn.tanh(log_std))  # between -5 and 2 [sac 2]


def sample(mean, log_std, key):
    """Actions from a Gaussian, squashed to between -1 and 1 [sac 1], and the logarithms of their probability densities."""
    noise = jax.random.normal(key, mean.shape)
    unsquashed = mean + jnp.exp(log_std) * noise
    log_slopes = 2 * (math.log(2) - unsquashed - nn.softplus(-2 * unsquashed))  # of tanh, without its overflows
    log_probs = -(jnp.square(noise) + math.log(2 * math.pi)) / 2 - log_std - log_slopes
    return jnp.tanh(unsquashed), log_probs.sum(1, keepdims=True)


class QNetwork(nn.Module):
    dropout: float

    @nn.compact
    def __call__(self, obs, actions):
        hidden = jnp.concatenate([obs, actions], 1)
        for _ in range(2):
            hidden = nn.Dropout(self.dropout, deterministic=False)(nn.Dense(256)(hidden))  # [droq 1] in the targets too
            hidden = nn.relu(nn.LayerNorm()(hidden))  # [droq 2]
        return nn.Dense(1)(hidden)


QNetworks = nn.vmap(QNetwork, {"params": 0}, {"params": True, "dropout": True}, in_axes=None, axis_size=2)  # [td3 1]


def load_policy(checkpoint, envs):
    """The trained policy: a function from observations, and which of them end an episode, to actions."""
    action_space, obs_shape = envs.single_action_space, envs.single_observation_space.shape
    actor = Actor(math.prod(action_space.shape))
    policy = jax.jit(lambda obs: jnp.tanh(actor.apply(checkpoint["agent"]["actor"], obs)[0]))
    jax.eval_shape(policy, np.zeros((1, *obs_shape)))  # complains of weights that do not fit
    return lambda obs, is_last: rescale(np.asarray(policy(obs)), action_space)


if __name__ == "__main__":
    # check what was asked for before anything is written
    args, start_time = tyro.cli(Args), time.time()
    resume, asked_id = args.resume, args.env_id
    if resume is not None:
        if args != Args(resume=resume, env_id=asked_id):
            raise SystemExit("--resume goes on with the run's own flags: give no others")
        try:  # the folder may be a stranger's: it is only believed in what cannot do harm
            about = json.loads(Path(resume, "run.json").read_text())
            args = Args(**about["args"])
            assert about["file"] == Path(__file__).name, f"it is a run of {about['file']}"
            assert all(isinstance(value, Args.__annotations__[name]) for name, value in vars(args).items()), "wrong types"
        except Exception as error:
            raise SystemExit(f"cannot resume {resume}: {type(error).__name__}: {error}".splitlines()[0]) from None
        if args.env_id != asked_id and (":" in args.env_id or asked_id != Args.env_id):  # an id may name a module to import
            raise SystemExit(f"{resume} is a run on {args.env_id!r}: add --env-id with that id if you trust what it imports")
    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(start_time)}".translate(str.maketrans("/\\:", "---"))
    run_folder = Path("runs", run_name) if resume is None else Path(resume).absolute()

    # check that the numbers fit together and the file fits the environment
    for rule in (
        "num_envs > 0; 0 < batch_size < 2**24; utd > 0; checkpoint_interval > 0; learning_starts > 0; "
        "num_envs <= total_timesteps < 2**31; num_envs <= buffer_size < 2**31; 0 <= gamma <= 1; "
        "0 <= tau <= 1; 0 <= dropout < 1; 0 < learning_rate < 1e9; 0 <= seed < 2**32"
    ).split("; "):
        if not eval(rule, {}, vars(args)):
            raise SystemExit(f"these flags do not fit: {rule} must hold")
    try:
        envs = make_envs(args, args.num_envs, "rgb_array" if args.capture_video else None)
        args.capture_video and envs.reset() and envs.render()  # MuJoCo draws with OpenGL, which a server may not have
    except Exception as error:
        raise SystemExit(f"cannot make {args.env_id}: {type(error).__name__}: {error}".splitlines()[0]) from None
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    for need, is_met in {
        "Box observations": isinstance(obs_space, gym.spaces.Box),
        "bounded Box actions": isinstance(action_space, gym.spaces.Box) and action_space.is_bounded(),
        "rgb_array rendering for a video": not args.capture_video or "rgb_array" in envs.metadata.get("render_modes", ()),
    }.items():
        if not is_met:
            raise SystemExit(f"{Path(__file__).name} needs {need}, which {args.env_id} does not have")

    # seed, build, restore
    jax.config.update("jax_platforms", None if args.cuda else "cpu")
    num_iterations, global_step = args.total_timesteps // args.num_envs, 0
    columns = [math.prod(obs_space.shape), math.prod(action_space.shape), 1, math.prod(obs_space.shape), 1]
    actor, q_networks, optimizer = Actor(columns[1]), QNetworks(args.dropout), optax.adam(args.learning_rate)
    actor_key, q_key, act_key, learn_key = jax.random.split(jax.random.key(args.seed), 4)
    no_obs, no_actions = jnp.zeros((1, columns[0])), jnp.zeros((1, columns[1]))
    params = {"actor": actor.init(actor_key, no_obs), "q_networks": q_networks.init(q_key, no_obs, no_actions)}
    agent = params | {"target_q_networks": params["q_networks"]}
    agent |= {f"{name}_optimizer": optimizer.init(x) for name, x in params.items()}
    agent = jax.tree.map(jnp.copy, agent)  # each array has its own memory, which learning can reuse
    buffer = {"rows": jnp.zeros((args.buffer_size, sum(columns))), "added": jnp.zeros((), dtype=jnp.int32)}  # [ddpg 2]
    if resume is not None and (run_folder / "checkpoint.msgpack").exists():
        try:
            checkpoint = msgpack_restore((run_folder / "checkpoint.msgpack").read_bytes())
            parts = {"agent": agent} | ({"buffer": buffer} if args.checkpoint_buffer else {})
            restored = from_state_dict(parts, {name: checkpoint[name] for name in parts})
            for old, new in zip(jax.tree.leaves(parts), jax.tree.leaves(restored), strict=True):
                assert (old.shape, old.dtype) == (new.shape, new.dtype), "arrays of other shapes"
            agent, buffer = jax.tree.map(jnp.array, (restored["agent"], restored.get("buffer", buffer)))
            global_step = int(checkpoint["global_step"])
            assert global_step in range(0, args.total_timesteps + 1, args.num_envs), f"step {global_step} of another run"
            assert int(buffer["added"]) in range(global_step + 1), "a replay buffer of another run"
        except Exception as error:
            raise SystemExit(f"cannot resume {resume}: {type(error).__name__}: {error}".splitlines()[0]) from None

    @jax.jit
    def act(params, obs, global_step):
        return sample(*actor.apply(params, obs), jax.random.fold_in(act_key, global_step))[0]

    @partial(jax.jit, donate_argnums=0)
    def remember(buffer, rows, is_real):
        """Steps after an end only reset: they are no transitions, and their place is outside the buffer."""
        places = (buffer["added"] + jnp.cumsum(is_real) - 1) % args.buffer_size
        rows = buffer["rows"].at[jnp.where(is_real, places, args.buffer_size)].set(rows, mode="drop")
        return {"rows": rows, "added": buffer["added"] + is_real.sum()}

    def draw(buffer, key):
        """A batch of transitions, drawn evenly."""
        rows = jax.random.randint(key, (args.batch_size,), 0, jnp.minimum(buffer["added"], args.buffer_size))
        return jnp.split(buffer["rows"][rows], np.cumsum(columns)[:-1], axis=1)

    def descend(name, loss, agent):
        """One step of Adam down a loss of agent[name]; also returns what the loss returned beside its value."""
        (_, logs), grads = jax.value_and_grad(loss, has_aux=True)(agent[name])
        updates, moments = optimizer.update(grads, agent[f"{name}_optimizer"])
        return agent | {name: optax.apply_updates(agent[name], updates), f"{name}_optimizer": moments}, logs

    def learn_q(agent, batch, key, next_key):
        """An episode that was cut is bootstrapped from its last observation, one that ended is not [ddpg 4]."""
        b_obs, b_actions, b_rewards, b_next_obs, b_terminated = batch
        next_actions, next_log_probs = sample(*actor.apply(agent["actor"], b_next_obs), next_key)
        next_q_values = q_networks.apply(agent["target_q_networks"], b_next_obs, next_actions, rngs={"dropout": next_key})
        next_values = next_q_values.min(0) - jnp.exp(agent["actor"]["params"]["log_alpha"]) * next_log_probs  # [sac 3]
        targets = b_rewards + args.gamma * next_values * (1 - b_terminated)

        def qf_loss(params):
            q_values = q_networks.apply(params, b_obs, b_actions, rngs={"dropout": key})
            loss = jnp.square(q_values - targets).mean((1, 2)).sum()
            return loss, {"qf_loss": loss / 2, "qf_values": q_values.mean()}

        return descend("q_networks", qf_loss, agent)

    def learn_actor(agent, b_obs, key):
        def losses(params):
            (actions, log_probs), alpha = sample(*actor.apply(params, b_obs), key), jnp.exp(params["params"]["log_alpha"])
            fixed, target_entropy = jax.lax.stop_gradient, -columns[1]
            q_values = q_networks.apply(agent["q_networks"], b_obs, actions, rngs={"dropout": key})
            actor_loss = (fixed(alpha) * log_probs - q_values.mean(0)).mean()  # [droq 3]
            alpha_loss = -(alpha * (fixed(log_probs) + target_entropy)).mean()  # [sac 5]
            return actor_loss + alpha_loss, {"actor_loss": actor_loss, "alpha": alpha, "alpha_loss": alpha_loss}

        return descend("actor", losses, agent)

    @partial(jax.jit, donate_argnums=0)
    def learn(agent, buffer, first_step):
        """All the updates of one step of the environments: many of the Q-networks, one of the actor [droq 4]."""

        def update_q(agent, key):
            batch_key, *dropout_keys = jax.random.split(key, 3)
            agent, losses = learn_q(agent, draw(buffer, batch_key), *dropout_keys)
            target = optax.incremental_update(agent["q_networks"], agent["target_q_networks"], args.tau)  # [ddpg 6]
            return agent | {"target_q_networks": target}, losses

        def update(agent, step):
            key, batch_key, actor_key = jax.random.split(jax.random.fold_in(learn_key, step), 3)
            agent, q_losses = jax.lax.scan(update_q, agent, jax.random.split(key, args.utd))
            agent, actor_losses = learn_actor(agent, draw(buffer, batch_key)[0], actor_key)
            return agent, q_losses | actor_losses

        agent, losses = jax.lax.scan(update, agent, first_step + jnp.arange(args.num_envs))
        return agent, jax.tree.map(lambda x: x.ravel()[-1], losses)

    # open the logs
    git = subprocess.run("git rev-parse HEAD", shell=True, cwd=Path(__file__).parent, capture_output=True, text=True)
    about = {
        "file": Path(__file__).name,
        "args": asdict(args),
        "tags": list(filter(None, os.environ.get("WANDB_TAGS", "").split(","))),
        "start_time": start_time,
        "commit": git.stdout.strip(),
        "device": jax.devices()[0].device_kind if jax.default_backend() == "gpu" else platform.machine(),
        "python": platform.python_version(),
        "packages": {d.name: d.version for d in distributions()},
    }
    try:
        if args.track:
            import wandb

            names = dict(project=args.wandb_project_name, entity=args.wandb_entity, name=run_folder.name, id=run_folder.name)
            wandb.init(**names, config=asdict(args), resume="allow", sync_tensorboard=True, save_code=True)
        if resume is None:  # the folder appears with run.json in it, or not at all
            assert not run_folder.exists(), "there is such a run already"
            os.makedirs(f"{run_folder}.tmp")
            Path(f"{run_folder}.tmp", "run.json").write_text(json.dumps(about, indent=2))
            os.rename(f"{run_folder}.tmp", run_folder)
    except Exception as error:
        raise SystemExit(f"cannot log to {run_folder}: {type(error).__name__}: {error}".splitlines()[0]) from None
    print(f"run folder: {run_folder}")
    writer = event_file_writer.EventFileWriter(str(run_folder))
    start = SessionLog(status=SessionLog.START)  # hides what was logged after the checkpoint
    writer.add_event(Event(wall_time=time.time(), step=global_step + 1, session_log=start))

    def log(step, scalars):  # one event for all of them
        values = [Summary.Value(tag=name, simple_value=float(scalar)) for name, scalar in scalars.items()]
        writer.add_event(Event(wall_time=time.time(), step=int(step), summary=Summary(value=values)))

    videos, logged_videos = run_folder / "videos", set(run_folder.glob("videos/*.mp4"))
    if args.capture_video:
        envs = gym.wrappers.vector.RecordVideo(envs, str(videos), name_prefix=f"step-{global_step}", record_first_only=True)

    # train, from new episodes also after a resume
    obs, _ = envs.reset(seed=int(np.random.SeedSequence((args.seed, global_step)).generate_state(1)[0]))
    is_last = np.zeros(args.num_envs, dtype=bool)  # whether obs ends an episode
    due = lambda every: global_step // every - (global_step - args.num_envs) // every  # noqa: E731  times in the last step
    first_step = 0 if int(buffer["added"]) else global_step  # at which the buffer was empty
    loop_start, start_step = time.time(), global_step
    progress = tqdm(initial=global_step, total=num_iterations * args.num_envs, unit="step", unit_scale=True)
    for iteration in range(global_step // args.num_envs, num_iterations):
        # act, at random at first
        if global_step < args.learning_starts:
            actions = 2 * np.random.default_rng((args.seed, global_step)).random((args.num_envs, columns[1]), np.float32) - 1
        else:
            actions = np.asarray(act(agent["actor"], obs, global_step))
        next_obs, rewards, terminated, truncated, infos = envs.step(rescale(actions, action_space))
        global_step += args.num_envs
        progress.update(args.num_envs)
        for i in np.flatnonzero(infos.get("_episode", ())):
            episode = {"charts/episodic_return": infos["episode"]["r"][i], "charts/episodic_length": infos["episode"]["l"][i]}
            log(global_step - args.num_envs + i + 1, episode)
            progress.set_postfix(episodic_return=f"{infos['episode']['r'][i]:.1f}", refresh=False)

        # remember all but the steps after an end
        rows = np.column_stack([obs, actions, rewards, next_obs, terminated]).astype(np.float32)
        buffer = remember(buffer, rows, ~is_last)
        obs, is_last = next_obs, terminated | truncated

        # learn
        is_learning = global_step - first_step >= args.learning_starts  # a buffer that was not kept fills up again first
        if is_learning:
            agent, losses = learn(agent, buffer, global_step - args.num_envs)

        # log
        if is_learning and due(100):
            log(global_step, {"charts/SPS": int((global_step - start_step) / (time.time() - loop_start))})
            log(global_step, {f"losses/{name}": value for name, value in losses.items()})

        # checkpoint
        if due(args.checkpoint_interval) or iteration + 1 == num_iterations:
            checkpoint = {"agent": agent, "global_step": global_step} | ({"buffer": buffer} if args.checkpoint_buffer else {})
            writer.flush()  # the curves reach as far as the checkpoint
            (run_folder / "checkpoint.tmp").unlink(missing_ok=True)  # never write through a stranger's link
            (run_folder / "checkpoint.tmp").write_bytes(msgpack_serialize(to_state_dict(jax.device_get(checkpoint))))
            os.replace(run_folder / "checkpoint.tmp", run_folder / "checkpoint.msgpack")  # whole, or not at all
            for video in set(videos.glob("*.mp4")) - logged_videos if args.track else ():
                wandb.log({"videos": wandb.Video(str(video)), "global_step": global_step})
                logged_videos.add(video)

    progress.close()
    envs.close()
    writer.close()
