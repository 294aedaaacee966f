# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "ale-py>=0.11", "gymnasium>=1.2.1,<2", "moviepy>=2", "numpy>=2", "tensorboard>=2.20",
#     "torch>=2.9", "tqdm>=4.67", "tyro>=1.0", "wandb>=0.22",
# ]
# ///
"""Rainbow, C51 with double Q-learning, prioritized n-step replay, and a dueling network with noise, for Atari games.

    uv run cleanrl/rainbow_atari.py                             # Breakout, 10M steps (40M frames)
    uv run cleanrl/rainbow_atari.py --env-id PongNoFrameskip-v4 --seed 2
    uv run cleanrl/rainbow_atari.py --sticky                    # sticky actions and full games (Machado et al., 2018)
    uv run cleanrl/rainbow_atari.py --resume runs/<run>         # go on after an interruption
    tensorboard --logdir runs

Numbers in brackets, such as [rainbow 3], are the implementation details of docs/rl-algorithms/{rainbow,c51,dqn,ppo}.md.
"""

import json
import os
import platform
import subprocess
import time
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path

import ale_py
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
    learning_rate: float = 6.25e-5  # learning rate
    num_envs: int = 1  # environments stepped side by side
    n_atoms: int = 51  # returns, evenly spaced, over which a distribution is learned
    v_min: float = -10.0  # smallest of them
    v_max: float = 10.0  # largest of them
    compile: bool = True  # on a GPU, record acting and learning once and replay them: the same sums, started faster
    buffer_size: int = 1_000_000  # steps that the replay buffer holds
    gamma: float = 0.99  # discount factor
    tau: float = 1.0  # how far the target network moves to the network when it is updated: all the way
    target_network_frequency: int = 8_000  # environment steps between two updates of the target network
    batch_size: int = 32  # transitions per update
    start_e: float = 0.0  # chance of a random action at the start: none, the noise explores
    end_e: float = 0.0  # chance of a random action in the end
    exploration_fraction: float = 0.1  # part of the run over which the chance falls from one to the other
    learning_starts: int = 80_000  # environment steps before the first update
    train_frequency: int = 4  # environment steps between two updates
    n_step: int = 3  # steps whose rewards are added up before the value of what follows
    prioritized_replay_alpha: float = 0.5  # how much priorities count: at 0 all transitions are drawn alike
    prioritized_replay_beta: float = 0.4  # how far weights make up for that at the start; in the end they do so fully
    prioritized_replay_eps: float = 1e-6  # added to errors, so that everything can be drawn


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


class NoisyLinear(nn.Linear):
    """A linear layer that, while it trains, has noise of learned strength in its weights, new at each call [rainbow 1]."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)  # even within 1 / inputs**0.5
        self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), 0.5 / inputs**0.5))
        self.bias_sigma = nn.Parameter(torch.full((outputs,), 0.5 / inputs**0.5))

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        noise = torch.randn(self.in_features + self.out_features, device=x.device)
        ins, outs = (noise.sign() * noise.abs().sqrt()).split([self.in_features, self.out_features])  # a weight's is a product
        return super().forward(x) + nn.functional.linear(x * ins, self.weight_sigma, self.bias_sigma) * outs


class QNetwork(nn.Module):
    def __init__(self, envs, atoms):
        super().__init__()
        self.register_buffer("atoms", atoms)  # [c51 1] returns, whose probabilities are learned
        self.conv1 = nn.Conv2d(envs.single_observation_space.shape[0], 32, 8, stride=4)  # [atari 8]
        self.conv2 = nn.Conv2d(32, 64, 4, stride=2)
        self.conv3 = nn.Conv2d(64, 64, 3, stride=1)
        self.value_hidden, self.advantage_hidden = NoisyLinear(64 * 7 * 7, 512), NoisyLinear(64 * 7 * 7, 512)
        self.values = NoisyLinear(512, len(atoms))
        self.advantages = NoisyLinear(512, int(envs.single_action_space.n) * len(atoms))

    def forward(self, obs):
        """The log-probabilities of the atoms, for each action."""
        features = self.conv3(self.conv2(self.conv1(obs / 255).relu()).relu()).relu().flatten(1)  # [atari 9]
        values = self.values(self.value_hidden(features).relu())
        advantages = self.advantages(self.advantage_hidden(features).relu()).unflatten(1, (-1, len(self.atoms)))
        return (values[:, None] + advantages - advantages.mean(1, keepdim=True)).log_softmax(-1)  # [rainbow 2]

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

    def __init__(self, size, envs, n_step, gamma):
        super().__init__()
        self.num_envs, self.size = envs.num_envs, size - size % envs.num_envs
        self.n_step, self.discounts = n_step, np.float32(gamma ** np.arange(n_step + 1.0))
        frames = np.zeros((self.size, *envs.single_observation_space.shape[1:]), dtype=np.uint8)  # takes memory as it fills
        self.register_buffer("frames", torch.from_numpy(frames))  # the newest of each stack: each is kept once [frames 1]
        self.register_buffer("is_shown", torch.zeros(self.size, 4, dtype=torch.bool))  # not the black before a game [frames 2]
        self.register_buffer("is_first", torch.ones(self.size, dtype=torch.bool))  # obs does not follow from the step before
        self.register_buffer("actions", torch.zeros(self.size, dtype=torch.int64))
        self.register_buffer("rewards", torch.zeros(self.size))
        self.register_buffer("terminated", torch.zeros(self.size, dtype=torch.bool))
        self.register_buffer("added", torch.zeros(1, dtype=torch.int64))
        leaves = next(32**depth for depth in range(1, 8) if 32**depth >= self.size)
        self.first_leaf = (leaves - 1) // 31  # the sums, that of all first, then the priorities; each sum has 32 children
        self.register_buffer("priorities", torch.zeros(self.first_leaf + leaves, dtype=torch.float64))
        self.register_buffer("max_priority", torch.ones(1, dtype=torch.float64))
        *self.columns, self.count, self.tree, self.largest = [x.numpy() for x in self.buffers()]  # the same memory, for NumPy
        self.children = self.tree[1:].reshape(-1, 32)

    def add(self, *step):
        start = self.count[0] % self.size
        for column, values in zip(self.columns, step, strict=True):
            column[start : start + self.num_envs] = values
        self.count[0] += self.num_envs
        rows, is_first = start + np.arange(self.num_envs), self.columns[2]
        known = (rows - self.n_step * self.num_envs) % self.size  # now that n steps are there, it is known what they led to
        is_start = ~is_first[(known + self.num_envs) % self.size]  # [dqn 2]
        cut = (rows + 3 * self.num_envs) % self.size  # of whose stacks a frame was just overwritten [frames 2]
        self.prioritize(np.append(cut, known), np.append(0 * cut, is_start * self.largest))  # new ones come first [rainbow 4]

    def prioritize(self, rows, priorities):
        """Sets the priorities of rows, and makes anew the sums that they are in."""
        nodes = rows + self.first_leaf
        self.tree[nodes] = priorities
        self.largest[0] = max(self.largest[0], np.max(priorities))
        while nodes[0] > 0:
            nodes = (nodes - 1) // 32
            self.tree[nodes] = self.children[nodes].sum(1)

    def draw(self, count):
        """Rows in proportion to their priorities [rainbow 4], one from each of so many equal parts of the sum of all."""
        parts = np.arange(count) + torch.rand(count, dtype=torch.float64).numpy()
        nodes, shares = np.zeros(count, int), parts / count * self.tree[0]
        while nodes[0] < self.first_leaf:
            sums = self.children[nodes].cumsum(1)
            shares = np.minimum(shares, np.nextafter(sums[:, -1], 0))  # however sums are rounded, none of priority 0
            is_past = sums <= shares[:, None]
            nodes, shares = 32 * nodes + 1 + is_past.sum(1), shares - (sums * is_past).max(1)
        return nodes - self.first_leaf

    def sample(self, batch_size, beta):
        """Rows, and what started there: n steps, or as many as led to the last observation of an episode [rainbow 3]."""
        (frames, is_shown, is_first, actions, rewards, terminated), index = self.columns, np.arange(batch_size)
        rows = self.draw(batch_size)
        priorities = self.tree[self.first_leaf + rows]
        weights = (priorities.min() / priorities) ** beta  # as if all were as likely; the largest is 1 [rainbow 5]
        ahead = (rows[:, None] + self.num_envs * np.arange(self.n_step + 1)) % self.size
        is_step = ~np.logical_or.accumulate(is_first[ahead[:, 1:]], 1)  # of the same episode
        num_steps = is_step.sum(1)
        returns = (self.discounts[:-1] * rewards[ahead[:, :-1]] * is_step).sum(1)
        is_end, ends = terminated[ahead[index, num_steps - 1]], np.stack([rows, ahead[index, num_steps]])
        stacks = frames[(ends[:, :, None] + self.num_envs * np.arange(-3, 1)) % self.size]
        stacks[~is_shown[ends]] = 0
        drawn = stacks[0], actions[rows], returns, stacks[1], is_end, self.discounts[num_steps], np.float32(weights)
        return rows, [torch.from_numpy(x) for x in drawn]


def load_policy(checkpoint, envs):
    """The trained policy: a function from observations, and which of them end an episode, to actions."""
    q_network, first_action = QNetwork(envs, checkpoint["q_network"]["atoms"]).eval(), envs.single_action_space.start
    q_network.load_state_dict(checkpoint["q_network"])
    return torch.no_grad()(lambda obs, is_last: q_network.q_values(torch.from_numpy(obs)).argmax(1).numpy() + first_action)


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
        "total_timesteps >= num_envs; n_step > 0; learning_starts >= (n_step + 1) * num_envs; 0 <= gamma <= 1; "
        "(n_step + 7) * num_envs <= buffer_size < 2**31; 0 <= prioritized_replay_alpha <= 1; "
        "0 <= prioritized_replay_beta <= 1; 0 < prioritized_replay_eps < 1e9; "
        "0 <= tau <= 1; 0 <= start_e <= 1; 0 <= end_e <= 1; 0 < exploration_fraction <= 1; 0 < learning_rate < 1e9; "
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
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic matrix products need on a GPU
    torch.use_deterministic_algorithms(args.torch_deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # or all new memory is written twice
    torch.manual_seed(args.seed)
    num_iterations = args.total_timesteps // args.num_envs
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1 if device.type == "cuda" else torch.get_num_threads())  # idle ones would be in the emulators' way
    stream = torch.cuda.Stream() if device.type == "cuda" else None  # what is recorded must not be on the default stream
    torch.cuda.set_stream(stream)
    atoms = torch.linspace(args.v_min, args.v_max, args.n_atoms, device=device)
    q_network, target_network = QNetwork(envs, atoms).to(device), QNetwork(envs, atoms).to(device).requires_grad_(False)
    target_network.load_state_dict(q_network.state_dict())
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate, eps=1.5e-4, fused=True)  # [rainbow 7]
    buffer = ReplayBuffer(args.buffer_size, envs, args.n_step, args.gamma)
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
            torch.cuda.set_rng_state_all(checkpoint["cuda_rng"][: torch.cuda.device_count()])
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
    obs, _ = envs.reset(seed=int(np.random.SeedSequence((args.seed, global_step)).generate_state(1)[0] >> 2))  # 30 bits
    is_first, is_last = np.array([[True], [False]]).repeat(args.num_envs, 1)  # whether obs starts, or ends, an episode
    due = lambda every: global_step // every - (global_step - args.num_envs) // every  # noqa: E731  times in the last step
    optimizer.param_groups[0]["capturable"] = device.type == "cuda"  # also after a restore
    seen, batch, losses = torch.zeros(obs.shape, dtype=torch.uint8, device=device), None, {}

    def recorded(function):
        """On a GPU: a function's work there, recorded after a first call that warms up, and replayed: started faster."""
        if device.type != "cuda" or not args.compile:
            return function
        graph, results = torch.cuda.CUDAGraph(), []

        def replay():
            if len(results) == 1:
                with torch.cuda.graph(graph, stream=stream):
                    results.append(function())
            graph.replay() if results else results.append(function())
            return results[-1]

        return replay

    @recorded
    @torch.no_grad()
    def act():
        return q_network.q_values(seen).argmax(1)

    @recorded
    def learn():
        """An episode that was cut is bootstrapped from its last observation, one that ended is not [dqn 4]."""
        b_obs, b_actions, b_rewards, b_next_obs, b_terminated, b_discounts, b_weights = batch
        index = torch.arange(args.batch_size, device=device)
        with torch.no_grad():  # one network chooses the next action, the other tells what it is worth [rainbow 6]
            next_actions = q_network.q_values(b_next_obs).argmax(1)
            next_pmfs = target_network(b_next_obs)[index, next_actions].exp()
            returns = b_rewards[:, None] + b_discounts[:, None] * atoms * ~b_terminated[:, None]
            target_pmfs = project(next_pmfs, returns, atoms)
        log_pmfs = q_network(b_obs)[index, b_actions]
        cross_entropies = -(target_pmfs * log_pmfs).sum(-1)  # [c51 3]
        td_loss = (b_weights * cross_entropies).mean()
        optimizer.zero_grad()
        td_loss.backward()
        optimizer.step()
        divergences = cross_entropies.detach() + torch.special.xlogy(target_pmfs, target_pmfs).sum(-1)  # [rainbow 4]
        q_values = (log_pmfs.detach().exp() * atoms).sum(-1).mean()
        return divergences.clamp(min=0), {"td_loss": td_loss.detach(), "q_values": q_values}

    loop_start, start_step = time.time(), global_step
    progress = tqdm(initial=global_step, total=num_iterations * args.num_envs, unit="step", unit_scale=True)
    for iteration in range(global_step // args.num_envs, num_iterations):
        # act, at random with a chance that falls [dqn 3]
        epsilon = np.interp(global_step, (0, args.exploration_fraction * args.total_timesteps), (args.start_e, args.end_e))
        chance, choice = torch.rand(2, args.num_envs).numpy()
        is_random, actions = chance < epsilon, (choice * action_space.n).astype(np.int64)
        if not is_random.all():
            seen.copy_(torch.from_numpy(obs))
            actions = np.where(is_random, actions, act().cpu().numpy())
        next_obs, rewards, terminated, truncated, infos = envs.step(actions + action_space.start)
        global_step += args.num_envs
        progress.update(args.num_envs)
        for i in np.flatnonzero(infos.get("_episode", ())):
            episodic_return, episodic_length = infos["episode"]["r"][i], infos["episode"]["l"][i]
            writer.add_scalar("charts/episodic_return", episodic_return, global_step - args.num_envs + i + 1)
            writer.add_scalar("charts/episodic_length", episodic_length, global_step - args.num_envs + i + 1)
            progress.set_postfix(episodic_return=f"{episodic_return:.1f}", refresh=False)

        # remember
        buffer.add(obs[:, -1], obs.any((2, 3)), is_first, actions, np.sign(rewards), terminated)  # [atari 6]
        obs, is_first, is_last = next_obs, is_last, terminated | truncated  # after an end, a step only resets

        # learn
        beta = np.interp(global_step, (0, args.total_timesteps), (args.prioritized_replay_beta, 1))  # [rainbow 5]
        is_learning = buffer.count[0] >= args.learning_starts  # a buffer that was not kept fills up again first
        for _ in range(due(args.train_frequency) if is_learning else 0):  # [dqn 5]
            rows, drawn = buffer.sample(args.batch_size, beta)
            batch = [x.to(device) for x in drawn] if batch is None else [b.copy_(x) for b, x in zip(batch, drawn, strict=True)]
            errors, losses = learn()
            errors = errors.cpu().double().numpy() + args.prioritized_replay_eps
            buffer.prioritize(rows, errors**args.prioritized_replay_alpha)
        if is_learning and due(args.target_network_frequency):  # [dqn 6]
            for target, param in zip(target_network.parameters(), q_network.parameters(), strict=True):
                target.lerp_(param.detach(), args.tau)

        # log
        if is_learning and due(100 * args.train_frequency):
            writer.add_scalar("charts/beta", beta, global_step)
            writer.add_scalar("charts/SPS", int((global_step - start_step) / (time.time() - loop_start)), global_step)
            for name, value in losses.items():
                writer.add_scalar(f"losses/{name}", value, global_step)

        # checkpoint
        if due(args.checkpoint_interval) or iteration + 1 == num_iterations:
            checkpoint = {name: part.state_dict() for name, part in parts.items()}
            cuda_rng = torch.cuda.get_rng_state_all() if device.type == "cuda" else []
            checkpoint |= {"rng": torch.get_rng_state(), "cuda_rng": cuda_rng, "global_step": global_step}
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
