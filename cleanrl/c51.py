# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "gymnasium[classic-control]>=1.2.1,<2", "moviepy>=2", "numpy>=2", "tensorboard>=2.20",
#     "torch>=2.9", "tqdm>=4.67", "tyro>=1.0", "wandb>=0.22",
# ]
# ///
"""Categorical DQN (C51), which learns the distribution of returns, for Box observations and discrete actions.

    uv run cleanrl/c51.py                                # CartPole-v1 to a return near 500
    uv run cleanrl/c51.py --env-id Acrobot-v1 --seed 2
    uv run cleanrl/c51.py --resume runs/<run>            # go on after an interruption
    tensorboard --logdir runs

Numbers in brackets, such as [c51 2], are the implementation details explained in docs/rl-algorithms/{c51,dqn}.md.
"""

import json
import os
import platform
import subprocess
import time
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of this experiment
    seed: int = 1  # seed of the weights, the environments and every sampled number
    torch_deterministic: bool = True  # ask PyTorch for deterministic algorithms
    cuda: bool = True  # use the GPU if there is one and the networks have enough to do to gain from it
    track: bool = False  # also log to Weights & Biases
    wandb_project_name: str = "cleanRL"  # project to log to
    wandb_entity: str | None = None  # team to log to
    capture_video: bool = False  # record videos of the first environment into the run's folder
    resume: str | None = None  # folder of an interrupted run to go on with, its flags as they were
    checkpoint_interval: int = 50_000  # environment steps between two checkpoints
    checkpoint_buffer: bool = True  # keep the replay buffer with the checkpoint; without it, learning waits for a new one

    env_id: str = "CartPole-v1"  # Gymnasium id of the environment
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


def make_envs(args, num_envs, render_mode=None):
    statistics = [gym.wrappers.RecordEpisodeStatistics]
    return gym.make_vec(args.env_id, num_envs, "sync", wrappers=statistics, render_mode=render_mode)


class QNetwork(nn.Module):
    def __init__(self, envs, atoms):
        super().__init__()
        self.register_buffer("atoms", atoms)  # [c51 1] returns, whose probabilities are learned
        self.hidden1 = nn.Linear(int(np.prod(envs.single_observation_space.shape)), 120)
        self.hidden2 = nn.Linear(120, 84)
        self.logits = nn.Linear(84, int(envs.single_action_space.n) * len(atoms))

    def forward(self, obs):
        """The log-probabilities of the atoms, for each action."""
        hidden = self.hidden2(self.hidden1(obs.reshape(len(obs), -1)).relu()).relu()
        return self.logits(hidden).unflatten(1, (-1, len(self.atoms))).log_softmax(-1)

    def q_values(self, obs):
        return (self(obs).exp() * self.atoms).sum(-1)


def project(pmfs, returns, atoms):
    """Distributions over returns, moved to the atoms: each probability to the two beside it, most to the nearer [c51 2]."""
    positions = (returns.clamp(atoms[0], atoms[-1]) - atoms[0]) / (atoms[-1] - atoms[0]) * (len(atoms) - 1)
    below = positions.floor()
    shares, below = positions - below, below.long()
    above = (below + 1).clamp(max=len(atoms) - 1)
    return torch.zeros_like(pmfs).scatter_add_(1, below, pmfs * (1 - shares)).scatter_add_(1, above, pmfs * shares)


class ReplayBuffer(nn.Module):
    """A ring with the last steps of all environments [dqn 1]; as a module it fits into a checkpoint."""

    def __init__(self, size, envs):
        super().__init__()
        self.num_envs, self.size = envs.num_envs, size - size % envs.num_envs
        self.register_buffer("obs", torch.zeros(self.size, *envs.single_observation_space.shape))
        self.register_buffer("is_first", torch.zeros(self.size, dtype=torch.bool))  # obs does not follow from the step before
        self.register_buffer("actions", torch.zeros(self.size, dtype=torch.int64))
        self.register_buffer("rewards", torch.zeros(self.size))
        self.register_buffer("terminated", torch.zeros(self.size, dtype=torch.bool))
        self.register_buffer("added", torch.zeros(1, dtype=torch.int64))
        *self.columns, self.count = [x.numpy() for x in self.buffers()]  # the same memory: NumPy is quick at small things

    def add(self, *step):
        start = self.count[0] % self.size
        for column, values in zip(self.columns, step, strict=True):
            column[start : start + self.num_envs] = values
        self.count[0] += self.num_envs

    def sample(self, batch_size, device):
        """Transitions, drawn evenly [dqn 2]: steps that are followed by what they led to, not by the start of an episode."""
        (obs, is_first, actions, rewards, terminated), added, rows = self.columns, self.count[0], np.zeros(0, int)
        while len(rows) < batch_size:
            drawn = torch.randint(max(0, added - self.size), added - self.num_envs, (2 * batch_size,)).numpy() % self.size
            rows = np.append(rows, drawn[~is_first[(drawn + self.num_envs) % self.size]])
        rows, next_rows = rows[:batch_size], (rows[:batch_size] + self.num_envs) % self.size
        batch = obs[rows], actions[rows], rewards[rows], obs[next_rows], terminated[rows]
        return [torch.from_numpy(x).to(device) for x in batch]


def load_policy(checkpoint, envs):
    """The trained policy: a function from observations, and which of them end an episode, to actions."""
    q_network, first_action = QNetwork(envs, checkpoint["q_network"]["atoms"]), envs.single_action_space.start
    q_network.load_state_dict(checkpoint["q_network"])
    return torch.no_grad()(
        lambda obs, is_last: q_network.q_values(torch.from_numpy(obs).float()).argmax(1).numpy() + first_action
    )


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
        "total_timesteps >= num_envs; learning_starts >= 4 * num_envs; 4 * num_envs <= buffer_size < 2**31; 0 <= gamma <= 1; "
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
        "rgb_array rendering for a video": not args.capture_video or "rgb_array" in envs.metadata.get("render_modes", ()),
    }.items():
        if not is_met:
            raise SystemExit(f"{Path(__file__).name} needs {need}, which {args.env_id} does not have")

    # seed, build, restore
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic matrix products need on a GPU
    torch.use_deterministic_algorithms(args.torch_deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # or all new memory is written twice
    torch.manual_seed(args.seed)
    num_iterations = args.total_timesteps // args.num_envs
    inputs = args.batch_size * np.prod(obs_space.shape)  # numbers read at an update; threads and a GPU pay only from many on
    torch.set_num_threads(torch.get_num_threads() if inputs >= 2**13 else 1)
    device = torch.device("cuda" if inputs >= 2**19 and args.cuda and torch.cuda.is_available() else "cpu")
    atoms = torch.linspace(args.v_min, args.v_max, args.n_atoms, device=device)
    q_network, target_network = QNetwork(envs, atoms).to(device), QNetwork(envs, atoms).to(device).requires_grad_(False)
    target_network.load_state_dict(q_network.state_dict())
    adam = dict(lr=args.learning_rate, eps=0.01 / args.batch_size, fused=True)  # [c51 4]
    optimizer = torch.optim.Adam(q_network.parameters(), **adam)
    buffer = ReplayBuffer(args.buffer_size, envs)
    parts, global_step = {"q_network": q_network, "target_network": target_network, "optimizer": optimizer}, 0
    parts |= {"buffer": buffer} if args.checkpoint_buffer else {}
    if resume is not None and (run_folder / "checkpoint.pt").exists():
        try:
            checkpoint = torch.load(run_folder / "checkpoint.pt", map_location="cpu", weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(checkpoint[name])
            for p, state in optimizer.state.items():  # fused Adam writes to them without a look at their shapes
                shapes = {name: x.shape for name, x in state.items() if x.is_contiguous()}
                if shapes != {"step": (), "exp_avg": p.shape, "exp_avg_sq": p.shape}:
                    raise ValueError("an optimizer of other shapes")
            torch.set_rng_state(checkpoint["rng"])
            global_step = int(checkpoint["global_step"])
            assert global_step in range(0, args.total_timesteps + 1, args.num_envs), f"step {global_step} of another run"
            assert int(buffer.count[0]) in range(0, global_step + 1, args.num_envs), "a replay buffer of another run"
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
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
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
    writer = SummaryWriter(run_folder, purge_step=global_step + 1)  # hides what was logged after the checkpoint
    videos, logged_videos = run_folder / "videos", set(run_folder.glob("videos/*.mp4"))
    if args.capture_video:
        envs = gym.wrappers.vector.RecordVideo(envs, str(videos), name_prefix=f"step-{global_step}", record_first_only=True)

    # train, from new episodes also after a resume
    obs, _ = envs.reset(seed=int(np.random.SeedSequence((args.seed, global_step)).generate_state(1)[0]))
    is_first, is_last = np.array([[True], [False]]).repeat(args.num_envs, 1)  # whether obs starts, or ends, an episode
    due = lambda every: global_step // every - (global_step - args.num_envs) // every  # noqa: E731  times in the last step
    loop_start, start_step = time.time(), global_step
    progress = tqdm(initial=global_step, total=num_iterations * args.num_envs, unit="step", unit_scale=True)
    for iteration in range(global_step // args.num_envs, num_iterations):
        # act, at random with a chance that falls [dqn 3]
        epsilon = np.interp(global_step, (0, args.exploration_fraction * args.total_timesteps), (args.start_e, args.end_e))
        chance, choice = torch.rand(2, args.num_envs).numpy()
        is_random, actions = chance < epsilon, (choice * action_space.n).astype(np.int64)
        if not is_random.all():
            with torch.no_grad():
                best_actions = q_network.q_values(torch.from_numpy(obs).float().to(device)).argmax(1).cpu().numpy()
            actions = np.where(is_random, actions, best_actions)
        next_obs, rewards, terminated, truncated, infos = envs.step(actions + action_space.start)
        global_step += args.num_envs
        progress.update(args.num_envs)
        for i in np.flatnonzero(infos.get("_episode", ())):
            episodic_return, episodic_length = infos["episode"]["r"][i], infos["episode"]["l"][i]
            writer.add_scalar("charts/episodic_return", episodic_return, global_step - args.num_envs + i + 1)
            writer.add_scalar("charts/episodic_length", episodic_length, global_step - args.num_envs + i + 1)
            progress.set_postfix(episodic_return=f"{episodic_return:.1f}", refresh=False)

        # remember
        buffer.add(obs, is_first, actions, rewards, terminated)
        obs, is_first, is_last = next_obs, is_last, terminated | truncated  # after an end, a step only resets

        # learn [dqn 4]: a truncated episode is bootstrapped from its last observation, a terminated one is not
        is_learning = buffer.count[0] >= args.learning_starts  # a buffer that was not kept fills up again first
        for _ in range(due(args.train_frequency) if is_learning else 0):  # [dqn 5]
            b_obs, b_actions, b_rewards, b_next_obs, b_terminated = buffer.sample(args.batch_size, device)
            next_pmfs, index = target_network(b_next_obs).exp(), torch.arange(args.batch_size, device=device)
            best_pmfs = next_pmfs[index, (next_pmfs * atoms).sum(-1).argmax(1)]
            returns = b_rewards[:, None] + args.gamma * atoms * ~b_terminated[:, None]
            target_pmfs = project(best_pmfs, returns, atoms)
            log_pmfs = q_network(b_obs)[index, b_actions]
            loss = -(target_pmfs * log_pmfs).sum(-1).mean()  # [c51 3]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if is_learning and due(args.target_network_frequency):  # [dqn 6]
            target_network.load_state_dict(q_network.state_dict())

        # log
        if is_learning and due(100 * args.train_frequency):
            writer.add_scalar("charts/epsilon", epsilon, global_step)
            writer.add_scalar("charts/SPS", int((global_step - start_step) / (time.time() - loop_start)), global_step)
            writer.add_scalar("losses/loss", loss, global_step)
            writer.add_scalar("losses/q_values", (log_pmfs.exp() * atoms).sum(-1).mean(), global_step)

        # checkpoint
        if due(args.checkpoint_interval) or iteration + 1 == num_iterations:
            checkpoint = {name: part.state_dict() for name, part in parts.items()}
            checkpoint |= {"rng": torch.get_rng_state(), "global_step": global_step}  # nothing is drawn on a GPU
            writer.flush()  # the curves reach as far as the checkpoint
            (run_folder / "checkpoint.tmp").unlink(missing_ok=True)  # never write through a stranger's link
            torch.save(checkpoint, run_folder / "checkpoint.tmp")
            os.replace(run_folder / "checkpoint.tmp", run_folder / "checkpoint.pt")  # whole, or not at all
            for video in set(videos.glob("*.mp4")) - logged_videos if args.track else ():
                wandb.log({"videos": wandb.Video(str(video)), "global_step": global_step})
                logged_videos.add(video)

    progress.close()
    envs.close()
    writer.close()
