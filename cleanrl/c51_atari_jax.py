# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "ale-py>=0.11", "flax>=0.12", "gymnasium>=1.2.1,<2", "jax>=0.9", "moviepy>=2", "numpy>=2", "optax>=0.2.6",
#     "tensorboard>=2.20", "tqdm>=4.67", "tyro>=1.0", "wandb>=0.22",
# ]
# ///
"""Categorical DQN (C51), which learns the distribution of returns, for Atari games, in JAX.

    uv run cleanrl/c51_atari_jax.py                                # Breakout, 10M steps (40M frames)
    uv run cleanrl/c51_atari_jax.py --env-id PongNoFrameskip-v4 --seed 2
    uv run cleanrl/c51_atari_jax.py --sticky                       # sticky actions and full games (Machado et al., 2018)
    uv run cleanrl/c51_atari_jax.py --resume runs/<run>            # go on after an interruption
    tensorboard --logdir runs

Numbers in brackets, such as [c51 2], are the implementation details explained in docs/rl-algorithms/{c51,dqn,ppo}.md.
"""

import json
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
import ale_py
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
    checkpoint_buffer: bool = False  # keep the replay buffer, of 7 GB, too; without it, learning waits for a new one

    env_id: str = "BreakoutNoFrameskip-v4"  # Gymnasium id of the game, also as in ALE/Breakout-v5
    sticky: bool = False  # repeat the last action with probability 0.25, and play on after a lost life
    total_timesteps: int = 10_000_000  # environment steps of the whole run
    learning_rate: float = 2.5e-4  # learning rate
    num_envs: int = 1  # environments stepped side by side
    n_atoms: int = 51  # returns, evenly spaced, over which a distribution is learned
    v_min: float = -10.0  # smallest of them
    v_max: float = 10.0  # largest of them
    buffer_size: int = 1_000_000  # steps that the replay buffer holds
    gamma: float = 0.99  # discount factor
    target_network_frequency: int = 10_000  # environment steps between two updates of the target network
    batch_size: int = 32  # transitions per update
    start_e: float = 1.0  # chance of a random action at the start
    end_e: float = 0.01  # chance of a random action in the end
    exploration_fraction: float = 0.1  # part of the run over which the chance falls from one to the other
    learning_starts: int = 80_000  # environment steps before the first update
    train_frequency: int = 4  # environment steps between two updates


class AtariLives(gym.vector.VectorWrapper):
    """A lost life ends the episode [atari 3], not the game: the step after it only presses FIRE [atari 4] and goes on."""

    render_mode = "rgb_array"

    def __init__(self, envs, lives_count):
        super().__init__(envs)
        self.metadata = {**envs.metadata, "render_modes": ["rgb_array"], "render_fps": 15}
        self.lives_count, self.fire = lives_count, int(ale_py.Action.FIRE in self.unwrapped.ale.get_action_set())

    def reset(self, **kwargs):
        self.obs, infos = self.env.reset(**kwargs)
        self.lives, self.lost = infos["lives"], np.zeros(self.num_envs, dtype=bool)
        return self.obs, infos

    def step(self, actions):
        self.obs, rewards, terminated, truncated, infos = self.env.step(np.where(self.lost, self.fire, actions))
        lives, self.lives = self.lives, np.where(terminated | truncated, 0, infos["lives"])
        self.lost = self.lives_count & (self.lives < lives) & (self.lives > 0)
        return self.obs, rewards, terminated | self.lost, truncated, infos

    def render(self):  # what the agents see, in the colors and the size that videos need
        return [frames[-1, :, :, None].repeat(3, 2).repeat(4, 0).repeat(4, 1) for frames in self.obs]


def make_envs(args, num_envs, render_mode=None):
    gym.register_envs(ale_py)
    env_id = f"ALE/{args.env_id[:-14]}-v5" if args.env_id.endswith("NoFrameskip-v4") else args.env_id  # the flags set the rest
    play = dict(noop_max=30, use_fire_reset=True, repeat_action_probability=0.25 if args.sticky else 0.0)  # [atari 1, 4]
    look = dict(frameskip=4, maxpool=True, grayscale=True, img_height=84, img_width=84, stack_num=4)  # [atari 2, 5, 7]
    envs = gym.make_vec(env_id, num_envs, "vector_entry_point", **play, **look, reward_clipping=False)
    return AtariLives(gym.wrappers.vector.RecordEpisodeStatistics(envs), lives_count=not args.sticky)


class QNetwork(nn.Module):
    num_actions: int
    n_atoms: int

    @nn.compact
    def __call__(self, obs):
        """The log-probabilities of the atoms, for each action."""
        features = jnp.moveaxis(obs, 1, -1) / 255  # [atari 9] JAX has the channels last
        for channels, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):  # [atari 8]
            features = nn.relu(nn.Conv(channels, (size, size), stride, padding="VALID")(features))
        hidden = nn.relu(nn.Dense(512)(features.reshape(len(obs), -1)))
        logits = nn.Dense(self.num_actions * self.n_atoms)(hidden)
        return nn.log_softmax(logits.reshape(-1, self.num_actions, self.n_atoms))


def project(pmfs, returns, atoms):
    """Distributions over returns, moved to the atoms: each probability to the two beside it, most to the nearer [c51 2]."""
    positions = (returns.clip(atoms[0], atoms[-1]) - atoms[0]) / (atoms[-1] - atoms[0]) * (len(atoms) - 1)
    below = positions.astype(jnp.int32)
    shares, above, index = positions - below, (below + 1).clip(max=len(atoms) - 1), jnp.arange(len(pmfs))[:, None]
    return jnp.zeros_like(pmfs).at[index, below].add(pmfs * (1 - shares)).at[index, above].add(pmfs * shares)


class ReplayBuffer:
    """A ring with the last steps of all environments [dqn 1]."""

    def __init__(self, size, envs):
        self.num_envs, self.size = envs.num_envs, size - size % envs.num_envs
        frame_shape = envs.single_observation_space.shape[1:]
        self.columns = {
            "frames": np.zeros((self.size, *frame_shape), dtype=np.uint8),  # each is kept once [frames 1]
            "is_shown": np.zeros((self.size, 4), dtype=bool),  # not the black before a game [frames 2]
            "is_first": np.zeros(self.size, dtype=bool),  # obs does not follow from the step before
            "actions": np.zeros(self.size, dtype=np.int32),
            "rewards": np.zeros(self.size, dtype=np.float32),
            "terminated": np.zeros(self.size, dtype=bool),
        }
        self.count = np.zeros(1, dtype=np.int64)

    def add(self, *step):
        start = self.count[0] % self.size
        for column, values in zip(self.columns.values(), step, strict=True):
            column[start : start + self.num_envs] = values
        self.count[0] += self.num_envs

    def sample(self, batch_size, rng):
        """Transitions, drawn evenly [dqn 2]: steps that are followed by what they led to, not by the start of an episode."""
        (frames, is_shown, is_first, actions, rewards, terminated), added = self.columns.values(), self.count[0]
        rows, oldest = np.zeros(0, int), max(0, added - self.size + 3 * self.num_envs)  # the first with all of its stack
        while len(rows) < batch_size:
            drawn = rng.integers(oldest, added - self.num_envs, 2 * batch_size) % self.size
            rows = np.append(rows, drawn[~is_first[(drawn + self.num_envs) % self.size]])
        rows = rows[:batch_size]
        stacks = frames[(rows[:, None] + self.num_envs * np.arange(-3, 2)) % self.size]  # and the frame after
        stacks[:, :4][~is_shown[rows]] = 0
        return stacks, actions[rows], rewards[rows], terminated[rows]


def load_policy(checkpoint, envs):
    """The trained policy: a function from observations, and which of them end an episode, to actions."""
    atoms, first_action = checkpoint["agent"]["atoms"], envs.single_action_space.start
    log_pmfs = partial(QNetwork(int(envs.single_action_space.n), len(atoms)).apply, checkpoint["agent"]["params"])
    best_actions = jax.jit(lambda obs: (jnp.exp(log_pmfs(obs)) * atoms).sum(-1).argmax(1))
    jax.eval_shape(best_actions, np.zeros((1, *envs.single_observation_space.shape)))  # complains of weights that do not fit
    return lambda obs, is_last: np.asarray(best_actions(obs)) + first_action


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
        "total_timesteps >= num_envs; learning_starts >= 4 * num_envs; 8 * num_envs <= buffer_size < 2**31; 0 <= gamma <= 1; "
        "0 <= start_e <= 1; 0 <= end_e <= 1; 0 < exploration_fraction <= 1; 0 < learning_rate < 1e9; "
        "1 < n_atoms < 2**20; -1e9 < v_min < v_max < 1e9; 0 <= seed < 2**32"
    ).split("; "):
        if not eval(rule, {}, vars(args)):
            raise SystemExit(f"these flags do not fit: {rule} must hold")
    try:
        envs = make_envs(args, args.num_envs, "rgb_array" if args.capture_video else None)
    except Exception as error:
        raise SystemExit(f"cannot make {args.env_id}: {type(error).__name__}: {error}".splitlines()[0]) from None
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    for need, is_met in {
        "Box observations": isinstance(obs_space, gym.spaces.Box),
        "Discrete actions": isinstance(action_space, gym.spaces.Discrete),
        "resets on the step after an end": envs.metadata.get("autoreset_mode") == gym.vector.AutoresetMode.NEXT_STEP,
        "rgb_array rendering for a video": not args.capture_video or "rgb_array" in envs.metadata.get("render_modes", ()),
    }.items():
        if not is_met:
            raise SystemExit(f"{Path(__file__).name} needs {need}, which {args.env_id} does not have")

    # seed, build, restore
    jax.config.update("jax_platforms", None if args.cuda else "cpu")
    num_iterations, global_step = args.total_timesteps // args.num_envs, 0
    atoms = jnp.linspace(args.v_min, args.v_max, args.n_atoms)  # [c51 1] returns, whose probabilities are learned
    q_network = QNetwork(int(action_space.n), args.n_atoms)
    optimizer = optax.adam(args.learning_rate, eps=0.01 / args.batch_size)  # [c51 4]
    params = q_network.init(jax.random.key(args.seed), np.zeros((1, *obs_space.shape), dtype=np.uint8))
    agent = dict(params=params, target_params=params, opt_state=optimizer.init(params), atoms=atoms)
    agent = jax.tree.map(jnp.copy, agent)  # each array has its own memory, which learning can reuse
    buffer = ReplayBuffer(args.buffer_size, envs)
    kept = {"buffer": buffer.columns, "added": buffer.count} if args.checkpoint_buffer else {}  # by the checkpoint
    if resume is not None and (run_folder / "checkpoint.msgpack").exists():
        try:
            checkpoint = msgpack_restore((run_folder / "checkpoint.msgpack").read_bytes())
            parts = kept | {"agent": agent}
            restored = from_state_dict(parts, {name: checkpoint[name] for name in parts})
            for old, new in zip(jax.tree.leaves(parts), jax.tree.leaves(restored), strict=True):
                assert (old.shape, old.dtype) == (new.shape, new.dtype), "arrays of other shapes"
            agent = jax.tree.map(jnp.array, restored.pop("agent"))
            jax.tree.map(np.copyto, kept, restored)
            global_step = int(checkpoint["global_step"])
            assert global_step in range(0, args.total_timesteps + 1, args.num_envs), f"step {global_step} of another run"
            assert int(buffer.count[0]) in range(0, global_step + 1, args.num_envs), "a replay buffer of another run"
        except Exception as error:
            raise SystemExit(f"cannot resume {resume}: {type(error).__name__}: {error}".splitlines()[0]) from None

    @jax.jit
    def best_actions(params, obs):
        return (jnp.exp(q_network.apply(params, obs)) * atoms).sum(-1).argmax(1)

    @partial(jax.jit, donate_argnums=0)
    def learn(agent, b_stacks, b_actions, b_rewards, b_terminated):
        """A truncated episode is bootstrapped from its last observation, a terminated one is not [dqn 4]."""
        next_pmfs, index = jnp.exp(q_network.apply(agent["target_params"], b_stacks[:, 1:])), jnp.arange(args.batch_size)
        best_pmfs = next_pmfs[index, (next_pmfs * atoms).sum(-1).argmax(1)]
        returns = b_rewards[:, None] + args.gamma * atoms * ~b_terminated[:, None]
        target_pmfs = project(best_pmfs, returns, atoms)

        def cross_entropy(params):  # [c51 3]
            log_pmfs = q_network.apply(params, b_stacks[:, :4])[index, b_actions]
            return -(target_pmfs * log_pmfs).sum(-1).mean(), (jnp.exp(log_pmfs) * atoms).sum(-1).mean()

        losses, grads = jax.value_and_grad(cross_entropy, has_aux=True)(agent["params"])
        updates, opt_state = optimizer.update(grads, agent["opt_state"])
        return agent | dict(params=optax.apply_updates(agent["params"], updates), opt_state=opt_state), losses

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
    obs, _ = envs.reset(seed=int(np.random.SeedSequence((args.seed, global_step)).generate_state(1)[0] >> 2))  # 30 bits
    is_first, is_last = np.array([[True], [False]]).repeat(args.num_envs, 1)  # whether obs starts, or ends, an episode
    due = lambda every: global_step // every - (global_step - args.num_envs) // every  # noqa: E731  times in the last step
    loop_start, start_step = time.time(), global_step
    progress = tqdm(initial=global_step, total=num_iterations * args.num_envs, unit="step", unit_scale=True)
    for iteration in range(global_step // args.num_envs, num_iterations):
        # act, at random with a chance that falls [dqn 3]
        epsilon = np.interp(global_step, (0, args.exploration_fraction * args.total_timesteps), (args.start_e, args.end_e))
        rng = np.random.default_rng((args.seed, global_step))  # a new one each step, so that a resume has nothing to restore
        is_random, actions = rng.random(args.num_envs) < epsilon, rng.integers(action_space.n, size=args.num_envs)
        if not is_random.all():
            actions = np.where(is_random, actions, np.asarray(best_actions(agent["params"], obs)))
        next_obs, rewards, terminated, truncated, infos = envs.step(actions + action_space.start)
        global_step += args.num_envs
        progress.update(args.num_envs)
        for i in np.flatnonzero(infos.get("_episode", ())):
            episode = {"charts/episodic_return": infos["episode"]["r"][i], "charts/episodic_length": infos["episode"]["l"][i]}
            log(global_step - args.num_envs + i + 1, episode)
            progress.set_postfix(episodic_return=f"{infos['episode']['r'][i]:.1f}", refresh=False)

        # remember
        buffer.add(obs[:, -1], obs.any((2, 3)), is_first, actions, np.sign(rewards), terminated)  # [atari 6]
        obs, is_first, is_last = next_obs, is_last, terminated | truncated  # after an end, a step only resets

        # learn
        is_learning = buffer.count[0] >= args.learning_starts  # a buffer that was not kept fills up again first
        for _ in range(due(args.train_frequency) if is_learning else 0):  # [dqn 5]
            agent, (loss, q_values) = learn(agent, *buffer.sample(args.batch_size, rng))
        if is_learning and due(args.target_network_frequency):  # [dqn 6]
            agent |= dict(target_params=jax.tree.map(jnp.copy, agent["params"]))

        # log
        if is_learning and due(100 * args.train_frequency):
            steps_per_second = int((global_step - start_step) / (time.time() - loop_start))
            log(global_step, {"charts/epsilon": epsilon, "charts/SPS": steps_per_second})
            log(global_step, {"losses/loss": loss, "losses/q_values": q_values})

        # checkpoint
        if due(args.checkpoint_interval) or iteration + 1 == num_iterations:
            checkpoint = to_state_dict(kept | {"agent": jax.device_get(agent), "global_step": global_step})
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
