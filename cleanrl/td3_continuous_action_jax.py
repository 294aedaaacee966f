# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "dm-control>=1.0.30; python_version < '3.13'", "flax>=0.12", "gymnasium[mujoco]>=1.2.1,<2", "jax>=0.9", "moviepy>=2",
#     "mujoco>=3.3,<4", "numpy>=2", "optax>=0.2.6", "shimmy[dm-control]>=2.0.1; python_version < '3.13'", "tensorboard>=2.20",
#     "tqdm>=4.67", "tyro>=1.0", "wandb>=0.22",
# ]
# ///
"""Twin Delayed DDPG (TD3) for flat observations (or dictionaries, flattened) and continuous actions, in JAX.

    uv run cleanrl/td3_continuous_action_jax.py                                # Hopper-v4, 1M steps
    uv run cleanrl/td3_continuous_action_jax.py --env-id dm_control/cartpole-balance-v0 --seed 2
    uv run cleanrl/td3_continuous_action_jax.py --resume runs/<run>            # go on after an interruption
    tensorboard --logdir runs

Numbers in brackets, such as [td3 2], are the implementation details explained in docs/rl-algorithms/{td3,ddpg}.md.
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
    utd: int = 1  # updates per environment step
    policy_noise: float = 0.2  # standard deviation of what is added to the actions that the targets look at
    noise_clip: float = 0.5  # where that is cut off
    exploration_noise: float = 0.1  # standard deviation of what is added to the actions, which go from -1 to 1
    learning_starts: int = 25_000  # environment steps, with random actions, before the first update
    policy_frequency: int = 2  # updates of the Q-networks between two of the actor and the target networks


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
        return nn.tanh(nn.Dense(self.action_dim)(hidden))


class QNetwork(nn.Module):
    @nn.compact
    def __call__(self, obs, actions):
        hidden = nn.relu(nn.Dense(256)(nn.relu(nn.Dense(256)(jnp.concatenate([obs, actions], 1)))))
        return nn.Dense(1)(hidden)


QNetworks = nn.vmap(QNetwork, {"params": 0}, {"params": True}, in_axes=None, axis_size=2)  # two, computed as one [td3 1]


def load_policy(checkpoint, envs):
    """The trained policy: a function from observations, and which of them end an episode, to actions."""
    action_space, obs_shape = envs.single_action_space, envs.single_observation_space.shape
    policy = jax.jit(partial(Actor(math.prod(action_space.shape)).apply, checkpoint["agent"]["actor"]))
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
        "num_envs > 0; 0 < batch_size < 2**24; utd > 0; policy_frequency > 0; checkpoint_interval > 0; learning_starts > 0; "
        "num_envs <= total_timesteps; total_timesteps * utd < 2**31; num_envs <= buffer_size < 2**31; 0 <= gamma <= 1; "
        "0 <= tau <= 1; 0 <= policy_noise < 1e9; 0 <= noise_clip < 1e9; 0 <= exploration_noise < 1e9; "
        "0 < learning_rate < 1e9; 0 <= seed < 2**32"
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
    actor, q_networks = Actor(columns[1]), QNetworks()
    optimizers = {"actor": optax.adam(args.learning_rate), "q_networks": optax.adam(args.learning_rate)}
    actor_key, q_key, act_key, learn_key = jax.random.split(jax.random.key(args.seed), 4)
    no_obs, no_actions = jnp.zeros((1, columns[0])), jnp.zeros((1, columns[1]))
    params = {"actor": actor.init(actor_key, no_obs), "q_networks": q_networks.init(q_key, no_obs, no_actions)}
    agent = params | {f"target_{name}": x for name, x in params.items()}
    agent |= {f"{name}_optimizer": optimizer.init(params[name]) for name, optimizer in optimizers.items()}
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
        actions, noise_key = actor.apply(params, obs), jax.random.fold_in(act_key, global_step)
        return jnp.clip(actions + args.exploration_noise * jax.random.normal(noise_key, actions.shape), -1, 1)  # [ddpg 3]

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
        updates, optimizer = optimizers[name].update(grads, agent[f"{name}_optimizer"])
        return agent | {name: optax.apply_updates(agent[name], updates), f"{name}_optimizer": optimizer}, logs

    def learn_q(agent, batch, key):
        """An episode that was cut is bootstrapped from its last observation, one that ended is not [ddpg 4]."""
        b_obs, b_actions, b_rewards, b_next_obs, b_terminated = batch
        noise = jnp.clip(args.policy_noise * jax.random.normal(key, b_actions.shape), -args.noise_clip, args.noise_clip)
        next_actions = jnp.clip(actor.apply(agent["target_actor"], b_next_obs) + noise, -1, 1)  # [td3 3]
        next_q_values = q_networks.apply(agent["target_q_networks"], b_next_obs, next_actions).min(0)
        targets = b_rewards + args.gamma * next_q_values * (1 - b_terminated)

        def qf_loss(params):
            q_values = q_networks.apply(params, b_obs, b_actions)
            qf_losses = jnp.square(q_values - targets).mean((1, 2))
            return qf_losses.sum(), (qf_losses, q_values.mean((1, 2)))

        agent, (qf_losses, q_values) = descend("q_networks", qf_loss, agent)
        losses = {"qf1_loss": qf_losses[0], "qf2_loss": qf_losses[1], "qf_loss": qf_losses.mean()}
        return agent, losses | {"qf1_values": q_values[0], "qf2_values": q_values[1]}

    def learn_actor(agent, b_obs):
        q_network = jax.tree.map(lambda x: x[0], agent["q_networks"])  # the first of them

        def actor_loss(params):
            loss = -QNetwork().apply(q_network, b_obs, actor.apply(params, b_obs)).mean()  # [ddpg 5]
            return loss, {"actor_loss": loss}

        agent, losses = descend("actor", actor_loss, agent)
        for name in ("actor", "q_networks"):  # [ddpg 6]
            agent |= {f"target_{name}": optax.incremental_update(agent[name], agent[f"target_{name}"], args.tau)}
        return agent, losses

    @partial(jax.jit, donate_argnums=0)
    def learn(run, buffer, first_update):
        """All the updates of one step of the environments."""

        def update(run, number):
            agent, losses = run
            batch_key, noise_key = jax.random.split(jax.random.fold_in(learn_key, number))
            batch = draw(buffer, batch_key)
            agent, q_losses = learn_q(agent, batch, noise_key)

            def learn_policy(agent, losses):
                agent, actor_losses = learn_actor(agent, batch[0])
                return agent, losses | actor_losses

            is_due, keep = number % args.policy_frequency == 0, lambda agent, losses: (agent, losses)  # [td3 2]
            return jax.lax.cond(is_due, learn_policy, keep, agent, losses | q_losses), None

        return jax.lax.scan(update, run, first_update + jnp.arange(args.num_envs * args.utd))[0]

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
    names = ("qf1_loss", "qf2_loss", "qf_loss", "qf1_values", "qf2_values", "actor_loss")
    losses = dict.fromkeys(names, np.float32(0))
    first_step = 0 if int(buffer["added"]) else global_step  # at which the buffer was empty
    loop_start, start_step = time.time(), global_step
    progress = tqdm(initial=global_step, total=num_iterations * args.num_envs, unit="step", unit_scale=True)
    for iteration in range(global_step // args.num_envs, num_iterations):
        # act, at random at first [ddpg 3]
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
            agent, losses = learn((agent, losses), buffer, (global_step - args.num_envs) * args.utd)

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
