# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "flax>=0.12", "gymnasium[classic-control]>=1.2.1,<2", "gymnax>=1.0", "jax>=0.9", "moviepy>=2", "numpy>=2",
#     "optax>=0.2.6", "six", "tensorboard>=2.20", "tqdm>=4.67", "tyro>=1.0", "wandb>=0.22",
# ]
# ///
"""Categorical DQN (C51) as one compiled program, for Box observations and discrete actions.

    uv run cleanrl/c51_jax.py                                # CartPole-v1 to a return near 500
    uv run cleanrl/c51_jax.py --env-id Breakout-MinAtar      # gymnax's environments are part of the program
    uv run cleanrl/c51_jax.py --no-gymnax                    # Gymnasium's are called by it
    uv run cleanrl/c51_jax.py --resume runs/<run>            # go on after an interruption
    tensorboard --logdir runs

Numbers in brackets, such as [c51 2], are the implementation details explained in docs/rl-algorithms/{c51,dqn}.md.
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
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax.serialization import from_state_dict, msgpack_restore, msgpack_serialize, to_state_dict
from gymnax.wrappers.gym import GymnaxToGymWrapper
from jax.experimental import io_callback
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer import event_file_writer
from tqdm import tqdm


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of this experiment
    seed: int = 1  # seed of the weights, the environments and every sampled number
    cuda: bool = True  # use the GPU if there is one and the networks have enough to do to gain from it
    track: bool = False  # also log to Weights & Biases
    wandb_project_name: str = "cleanRL"  # project to log to
    wandb_entity: str | None = None  # team to log to
    capture_video: bool = False  # record videos of the first environment into the run's folder
    resume: str | None = None  # folder of an interrupted run to go on with, its flags as they were
    checkpoint_interval: int = 50_000  # environment steps between two checkpoints
    checkpoint_buffer: bool = True  # keep the replay buffer with the checkpoint; without it, learning waits for a new one

    env_id: str = "CartPole-v1"  # gymnax or Gymnasium id of the environment
    gymnax: bool = True  # take gymnax's environment if it has one of that id, and no video is wanted: it can be compiled
    total_timesteps: int = 500_000  # environment steps of the whole run
    learning_rate: float = 2.5e-4  # learning rate
    num_envs: int = 1  # environments stepped side by side
    n_atoms: int = 101  # returns, evenly spaced, over which a distribution is learned
    v_min: float = -100.0  # smallest of them
    v_max: float = 100.0  # largest of them
    buffer_size: int = 10_000  # steps that the replay buffer holds
    gamma: float = 0.99  # discount factor
    target_network_frequency: int = 500  # environment steps between two updates of the target network
    batch_size: int = 128  # transitions per update
    start_e: float = 1.0  # chance of a random action at the start
    end_e: float = 0.05  # chance of a random action in the end
    exploration_fraction: float = 0.5  # part of the run over which the chance falls from one to the other
    learning_starts: int = 10_000  # environment steps before the first update
    train_frequency: int = 10  # environment steps between two updates


def make_envs(args, num_envs, render_mode=None, autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP):
    statistics = [gym.wrappers.RecordEpisodeStatistics]
    if args.env_id in gymnax.registered_envs and args.env_id not in gym.registry:
        return gym.vector.SyncVectorEnv([lambda: statistics[0](GymnaxToGymWrapper(*gymnax.make(args.env_id)))] * num_envs)
    mode = {"autoreset_mode": autoreset_mode}
    return gym.make_vec(args.env_id, num_envs, "sync", mode, statistics, render_mode=render_mode)


def make_steps(args, envs):
    """How it resets and steps: reset(keys) -> obs, state; step(drawn, state, actions) -> obs, state, rewards, ..."""
    if args.gymnax:  # inside of the program
        env, params = gymnax.make(args.env_id)
        reset = jax.vmap(lambda key: env.reset_env(key, params))

        def draw(key, shape):
            step_keys, reset_keys = jax.random.split(key, (2, math.prod(shape)))
            return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), (step_keys, reset(reset_keys)))

        def step(drawn, state, actions):  # those that end start anew from the state that was drawn for that case
            keys, fresh = drawn
            next_obs, state, rewards, terminated, _ = jax.vmap(env.step_env, (0, 0, 0, None))(keys, state, actions, params)
            truncated = jax.vmap(env.is_truncated, (0, None))(state, params)
            obs, state = jax.tree.map(partial(jax.vmap(jnp.where), terminated | truncated), fresh, (next_obs, state))
            return obs, state, rewards, terminated, truncated, next_obs

        return reset, draw, step

    def reset(keys):
        return jnp.asarray(envs.reset(seed=int(keys[0, 0] >> 1))[0], dtype=jnp.float32), ()

    def step_outside(actions):
        next_obs, rewards, terminated, truncated, _ = envs.step(np.asarray(actions) + envs.single_action_space.start)
        is_over = terminated | truncated
        obs = envs.reset(options={"reset_mask": is_over})[0] if is_over.any() else next_obs
        return obs.astype(np.float32), rewards.astype(np.float32), terminated, truncated, next_obs.astype(np.float32)

    def step(drawn, state, actions):
        flags, rewards = np.zeros((2, args.num_envs), dtype=bool), np.zeros(args.num_envs, dtype=np.float32)
        obs = np.zeros((args.num_envs, *envs.single_observation_space.shape), dtype=np.float32)
        obs, *answers = io_callback(step_outside, (obs, rewards, *flags, obs), actions, ordered=True)
        return obs, state, *answers

    return reset, lambda key, shape: (), step


class QNetwork(nn.Module):
    num_actions: int
    n_atoms: int

    @nn.compact
    def __call__(self, obs):
        """The log-probabilities of the atoms, for each action."""
        hidden = nn.relu(nn.Dense(120)(obs.reshape(len(obs), -1)))
        hidden = nn.relu(nn.Dense(84)(hidden))
        logits = nn.Dense(self.num_actions * self.n_atoms)(hidden)
        return nn.log_softmax(logits.reshape(-1, self.num_actions, self.n_atoms))


def project(pmfs, returns, atoms):
    """Distributions over returns, moved to the atoms: each probability to the two beside it, most to the nearer [c51 2]."""
    positions = (returns.clip(atoms[0], atoms[-1]) - atoms[0]) / (atoms[-1] - atoms[0]) * (len(atoms) - 1)
    below = positions.astype(jnp.int32)
    shares, above, index = positions - below, (below + 1).clip(max=len(atoms) - 1), jnp.arange(len(pmfs))[:, None]
    return jnp.zeros_like(pmfs).at[index, below].add(pmfs * (1 - shares)).at[index, above].add(pmfs * shares)


def load_policy(checkpoint, envs):
    """The trained policy: a function from observations, and which of them end an episode, to actions."""
    atoms, first_action = checkpoint["agent"]["atoms"], envs.single_action_space.start
    log_pmfs = partial(QNetwork(int(envs.single_action_space.n), len(atoms)).apply, checkpoint["agent"]["params"])
    best_actions = jax.jit(lambda obs: (jnp.exp(log_pmfs(obs.astype(jnp.float32))) * atoms).sum(-1).argmax(1))
    jax.eval_shape(best_actions, np.zeros((1, *envs.single_observation_space.shape)))  # complains of weights that do not fit
    return lambda obs, is_last: np.asarray(best_actions(obs)) + first_action


def make_program(args, envs):
    """The functions of a run: init(key, step) -> run, all that changes while it goes on; train(run, length) -> run, logs."""
    num_actions, rows, num_envs = int(envs.single_action_space.n), args.buffer_size // args.num_envs, args.num_envs
    num_steps, num_updates = max(1, args.train_frequency // num_envs), max(1, num_envs // args.train_frequency)  # [dqn 5]
    (reset, draw, step), q_network = make_steps(args, envs), QNetwork(num_actions, args.n_atoms)
    optimizer = optax.adam(args.learning_rate, eps=0.01 / args.batch_size)  # [c51 4]
    atoms = jnp.linspace(args.v_min, args.v_max, args.n_atoms)  # [c51 1] returns, whose probabilities are learned

    def init(key, global_step):
        key, params_key, env_key = jax.random.split(key, 3)
        obs, env_state = reset(jax.random.split(jax.random.fold_in(env_key, global_step), num_envs))
        params, zeros, none = q_network.init(params_key, obs), jnp.zeros(num_envs), jnp.zeros((), dtype=jnp.int32)
        agent = dict(params=params, target_params=params, opt_state=optimizer.init(params), atoms=atoms)
        transition = (obs, zeros.astype(jnp.int32), zeros, obs, zeros.astype(bool))
        buffer = jax.tree.map(lambda x: jnp.zeros((rows, *x.shape), dtype=x.dtype), transition)  # [dqn 1]
        world = dict(env_state=env_state, obs=obs, episode_return=zeros, episode_length=zeros)
        run = dict(agent=agent, world=world, buffer=buffer, added=none, global_step=none, key=key)
        return jax.tree.map(jnp.copy, run)  # each array has its own memory, which the program can reuse

    def act(params, state, drawn):
        (world, buffer, added, global_step), (chances, choices, env_drawn) = state, drawn
        explored = jnp.minimum(1, global_step / (args.exploration_fraction * args.total_timesteps))
        epsilon = args.start_e + explored * (args.end_e - args.start_e)  # [dqn 3]
        q_values = (jnp.exp(q_network.apply(params, world["obs"])) * atoms).sum(-1)
        actions = jnp.where(chances < epsilon, choices, q_values.argmax(1))
        obs, env_state, rewards, terminated, truncated, next_obs = step(env_drawn, world["env_state"], actions)
        row, transition = added // num_envs % rows, (world["obs"], actions, rewards, next_obs, terminated)
        buffer = jax.tree.map(lambda column, x: column.at[row].set(x), buffer, transition)
        is_over, total, length = terminated | truncated, world["episode_return"] + rewards, world["episode_length"] + 1
        world = dict(env_state=env_state, obs=obs, episode_return=total * ~is_over, episode_length=length * ~is_over)
        return (world, buffer, added + num_envs, global_step + num_envs), (is_over, total, length)

    def learn(buffer, agent, drawn):  # [dqn 4] bootstrapped from the last observation where truncated, not where terminated
        batch = jax.tree.map(lambda column: column.reshape(-1, *column.shape[2:])[drawn], buffer)
        b_obs, b_actions, b_rewards, b_next_obs, b_terminated = batch
        next_pmfs, index = jnp.exp(q_network.apply(agent["target_params"], b_next_obs)), jnp.arange(args.batch_size)
        best_pmfs = next_pmfs[index, (next_pmfs * atoms).sum(-1).argmax(1)]
        returns = b_rewards[:, None] + args.gamma * atoms * ~b_terminated[:, None]
        target_pmfs = project(best_pmfs, returns, atoms)

        def cross_entropy(params):  # [c51 3]
            log_pmfs = q_network.apply(params, b_obs)[index, b_actions]
            return -(target_pmfs * log_pmfs).sum(-1).mean(), (jnp.exp(log_pmfs) * atoms).sum(-1).mean()

        losses, grads = jax.value_and_grad(cross_entropy, has_aux=True)(agent["params"])
        updates, opt_state = optimizer.update(grads, agent["opt_state"])
        return agent | dict(params=optax.apply_updates(agent["params"], updates), opt_state=opt_state), losses

    def iterate(run, drawn):
        (act_drawn, numbers), agent = drawn, run["agent"]
        state = run["world"], run["buffer"], run["added"], run["global_step"]
        (world, buffer, added, global_step), episodes = jax.lax.scan(partial(act, agent["params"]), state, act_drawn)
        batches = numbers % jnp.minimum(added, rows * num_envs).astype(jnp.uint32)  # [dqn 2]
        is_learning = added >= args.learning_starts  # a buffer that was not kept fills up again first
        skip = lambda agent, batches: (agent, (jnp.zeros(num_updates), jnp.zeros(num_updates)))  # noqa: E731
        agent, losses = jax.lax.cond(is_learning, partial(jax.lax.scan, partial(learn, buffer)), skip, agent, batches)
        is_due = is_learning & (global_step % args.target_network_frequency < num_steps * num_envs)
        target_params = optax.incremental_update(agent["params"], agent["target_params"], 1.0 * is_due)  # [dqn 6]
        run |= dict(world=world, buffer=buffer, added=added, global_step=global_step)
        return run | dict(agent=agent | dict(target_params=target_params)), (episodes, losses)

    def train(run, length):
        """Some iterations. What they draw is drawn before, all at once, which takes hardly longer than for one of them."""
        key, chance_key, choice_key, env_key, batch_key = jax.random.split(run["key"], 5)
        steps, numbers = (length, num_steps, num_envs), (length, num_updates, args.batch_size)
        chances, choices = jax.random.uniform(chance_key, steps), jax.random.randint(choice_key, steps, 0, num_actions)
        drawn = (chances, choices, draw(env_key, steps)), jax.random.bits(batch_key, numbers)
        return jax.lax.scan(iterate, run | dict(key=key), drawn)

    return init, train


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
        "num_envs > 0; 0 < batch_size < 2**24; train_frequency > 0; target_network_frequency > 0; checkpoint_interval > 0; "
        "train_frequency % num_envs == 0 or num_envs % train_frequency == 0; learning_starts > 0; 0 <= gamma <= 1; "
        "max(num_envs, train_frequency) <= total_timesteps < 2**31; num_envs <= buffer_size < 2**31; 0 < learning_rate < 1e9; "
        "0 <= start_e <= 1; 0 <= end_e <= 1; 0 < exploration_fraction <= 1; 0 <= seed < 2**32; 1 < n_atoms < 2**20; "
        "-1e9 < v_min < v_max < 1e9"
    ).split("; "):
        if not eval(rule, {}, vars(args)):
            raise SystemExit(f"these flags do not fit: {rule} must hold")
    try:
        args.gymnax = args.env_id in gymnax.registered_envs and (
            args.env_id not in gym.registry or (args.gymnax and not args.capture_video)
        )
        disabled = gym.vector.AutoresetMode.DISABLED  # the program resets
        envs = make_envs(args, args.num_envs, "rgb_array" if args.capture_video else None, disabled)
    except Exception as error:
        raise SystemExit(f"cannot make {args.env_id}: {type(error).__name__}: {error}".splitlines()[0]) from None
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    for need, is_met in {
        "Box observations": isinstance(obs_space, gym.spaces.Box),
        "Discrete actions": isinstance(action_space, gym.spaces.Discrete),
        "rgb_array rendering for a video": not args.capture_video or "rgb_array" in envs.metadata.get("render_modes", ()),
    }.items():
        if not is_met:
            raise SystemExit(f"{Path(__file__).name} needs {need}, which {args.env_id} does not have")

    # seed, build, restore
    inputs = args.batch_size * np.prod(obs_space.shape)  # numbers read at an update; a GPU pays only from many on
    device = jax.devices()[0] if args.cuda and inputs >= 2**19 else jax.devices("cpu")[0]
    jax.config.update("jax_default_device", device)
    num_iterations = args.total_timesteps // max(args.num_envs, args.train_frequency)
    log_interval = max(n for n in range(1, 101) if num_iterations % n == 0)  # iterations in one call of the program
    call_steps, global_step = log_interval * max(args.num_envs, args.train_frequency), 0
    init, _ = make_program(args, envs)
    run = init(jax.random.PRNGKey(args.seed), 0)
    parts = set(run) - (set() if args.gymnax else {"world"}) - (set() if args.checkpoint_buffer else {"buffer", "added"})
    if resume is not None and (run_folder / "checkpoint.msgpack").exists():
        try:
            checkpoint = msgpack_restore((run_folder / "checkpoint.msgpack").read_bytes())
            global_step = int(checkpoint["global_step"])
            assert global_step in range(0, args.total_timesteps + 1, call_steps), f"step {global_step} of another run"
            run = init(jax.random.PRNGKey(args.seed), global_step)
            restored = from_state_dict({name: run[name] for name in parts}, {name: checkpoint[name] for name in parts})
            for old, new in zip(*map(jax.tree.leaves, ({name: run[name] for name in parts}, restored)), strict=True):
                assert (old.shape, old.dtype) == (new.shape, new.dtype), "arrays of other shapes"
            run |= jax.tree.map(jnp.array, restored)
            assert int(run["added"]) in range(0, global_step + 1, args.num_envs), "a replay buffer of another run"
        except Exception as error:
            raise SystemExit(f"cannot resume {resume}: {type(error).__name__}: {error}".splitlines()[0]) from None

    # open the logs
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

    # train, from new episodes also after a resume, unless gymnax's state was restored
    _, train = make_program(args, envs)  # which may be recorded now
    train = jax.jit(partial(train, length=log_interval), donate_argnums=0)
    loop_start, start_step = time.time(), global_step
    progress = tqdm(initial=global_step, total=num_iterations // log_interval * call_steps, unit="step", unit_scale=True)
    for iteration in range(global_step // call_steps, num_iterations // log_interval):
        # act and learn, in one call of the program
        run, logs = train(run)
        (is_over, returns, lengths), (losses, q_values) = jax.tree.map(np.ravel, jax.device_get(logs))
        for i in np.flatnonzero(is_over):
            log(global_step + i + 1, {"charts/episodic_return": returns[i], "charts/episodic_length": lengths[i]})
            progress.set_postfix(episodic_return=f"{returns[i]:.1f}", refresh=False)
        global_step += call_steps
        progress.update(call_steps)

        # log
        if int(run["added"]) >= args.learning_starts:
            epsilon = np.interp(global_step, (0, args.exploration_fraction * args.total_timesteps), (args.start_e, args.end_e))
            steps_per_second = int((global_step - start_step) / (time.time() - loop_start))
            log(global_step, {"charts/epsilon": epsilon, "charts/SPS": steps_per_second})
            log(global_step, {"losses/loss": losses[-1], "losses/q_values": q_values[-1]})

        # checkpoint
        if global_step % args.checkpoint_interval < call_steps or iteration + 1 == num_iterations // log_interval:
            checkpoint = jax.device_get(to_state_dict({name: run[name] for name in parts}))
            writer.flush()  # the curves reach as far as the checkpoint
            (run_folder / "checkpoint.tmp").unlink(missing_ok=True)  # never write through a stranger's link
            (run_folder / "checkpoint.tmp").write_bytes(msgpack_serialize(checkpoint))
            os.replace(run_folder / "checkpoint.tmp", run_folder / "checkpoint.msgpack")  # whole, or not at all
            for video in set(videos.glob("*.mp4")) - logged_videos if args.track else ():
                wandb.log({"videos": wandb.Video(str(video)), "global_step": global_step})
                logged_videos.add(video)

    progress.close()
    envs.close()
    writer.close()
