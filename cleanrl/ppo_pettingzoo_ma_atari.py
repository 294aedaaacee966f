# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "ale-py>=0.11", "gymnasium>=1.2.1,<2", "moviepy>=2", "numpy>=2", "opencv-python-headless>=4.10",
#     "pettingzoo[atari]>=1.27; sys_platform != 'win32'", "tensorboard>=2.20",
#     "torch>=2.9", "tqdm>=4.67", "tyro>=1.0", "wandb>=0.22",
# ]
# ///
"""Proximal Policy Optimization in self-play, for Atari games of two players and more: one agent has every seat.

    uv run cleanrl/ppo_pettingzoo_ma_atari.py                      # pong_v3, 20M steps of a player
    uv run cleanrl/ppo_pettingzoo_ma_atari.py --env-id tennis_v3 --seed 2
    uv run cleanrl/ppo_pettingzoo_ma_atari.py --resume runs/<run>  # go on after an interruption
    tensorboard --logdir runs

Numbers in brackets are the implementation details: [selfplay 5] and the like are explained in
docs/rl-algorithms/ppo-self-play.md, [core 5] and [atari 2] in docs/rl-algorithms/ppo.md.
"""

import json
import os
import platform
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path

import ale_py
import cv2
import gymnasium as gym
import numpy as np
import pettingzoo
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
    checkpoint_interval: int = 100  # iterations between two checkpoints

    env_id: str = "pong_v3"  # PettingZoo's name of the game
    total_timesteps: int = 20_000_000  # steps of the whole run, those of all players added up
    learning_rate: float = 2.5e-4  # learning rate at the start
    num_envs: int = 16  # players that play side by side: 16 are in 8 games of 2
    num_steps: int = 128  # steps of each environment per iteration
    anneal_lr: bool = True  # lower the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # bias-variance trade-off of the advantage estimate
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # passes over the rollout per iteration
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.1  # how far the policy may move from the one that acted
    clip_vloss: bool = True  # clip the value's movement the same way
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # global norm the gradient is clipped to
    target_kl: float | None = None  # stop an iteration's epochs once the policy moved this far

    elo_games: int = 24  # games that each checkpoint plays for its Elo rating; 0 for none
    elo_steps: int = 500  # steps after which such a game is won by who leads
    elo_players: int = 8  # checkpoints that are kept as opponents, beside a player that acts at random


class AtariGames(gym.vector.VectorEnv):
    """PettingZoo's games side by side: a row for each player of each game [selfplay 1]."""

    def __init__(self, games, render_mode):
        self.games, self.players, self.render_mode = games, games[0].possible_agents, render_mode
        shape = (len(games), len(self.players))
        self.num_envs = len(games) * len(self.players)
        self.single_observation_space = gym.spaces.Box(0, 255, (4 + len(self.players), 84, 84), np.uint8)
        self.single_action_space = games[0].action_space(self.players[0])
        self.metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP, "render_fps": 15}
        self.metadata["render_modes"] = games[0].metadata["render_modes"]
        self.emulators, self.threads = [game.ale for game in games], ThreadPoolExecutor()
        self.obs = np.zeros((*shape, *self.single_observation_space.shape), np.uint8)
        self.obs[:, :, 4:] = np.eye(len(self.players))[:, :, None, None]  # [selfplay 2] the plane of the one who looks is 1
        self.terminated, self.truncated = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
        self.rewards, self.scores, self.lengths = np.zeros(shape), np.zeros(shape), np.zeros(shape, dtype=np.int64)

    def look(self, g, frames):
        blue = np.max([frame[:, :, 2] for frame in frames[-2:]], axis=0)  # [atari 2], [selfplay 3]
        self.obs[g, :, :3] = self.obs[g, :, 1:4]  # [atari 7]
        self.obs[g, :, 3] = cv2.resize(blue, (84, 84), interpolation=cv2.INTER_AREA)  # [atari 5]

    def start(self, g, seed=None):
        self.games[g].reset(seed=seed)  # a seed changes nothing in an emulator, and takes 0.1 s
        for _ in range(self.rngs[g].integers(31)):  # [atari 1]
            self.emulators[g].act(np.zeros(len(self.players), np.int32))
        self.terminated[g], self.truncated[g], self.rewards[g], self.scores[g], self.lengths[g] = False, False, 0, 0, 0
        self.obs[g, :, :4] = 0
        self.look(g, [self.emulators[g].getScreenRGB()])

    def play(self, g, actions):
        game, frames, self.rewards[g] = self.games[g], [], 0
        if (self.terminated[g] | self.truncated[g]).all():
            return self.start(g)
        while len(frames) < 4 and not (self.terminated[g] | self.truncated[g]).all():  # [atari 2]
            moves = {player: action for player, action in zip(self.players, actions, strict=True) if player in game.agents}
            obs, *answers, _ = game.step(moves)
            frames.append(next(iter(obs.values())))  # all look at one screen
            rewards, terminated, truncated = ([answer.get(player, 0) for player in self.players] for answer in answers)
            self.rewards[g] += rewards
            self.terminated[g] |= np.array(terminated, dtype=bool)  # [selfplay 4] who is out stays out until the game is over
            self.truncated[g] |= np.array(truncated, dtype=bool)
        self.scores[g] += self.rewards[g]
        self.lengths[g] += 1
        self.look(g, frames)

    def reset(self, *, seed=None, options=None):
        seeds = [None if seed is None else seed + g for g in range(len(self.games))]
        if seed is not None:
            self.rngs = [np.random.default_rng(seed) for seed in seeds]
        list(self.threads.map(self.start, range(len(self.games)), seeds))
        return self.obs.reshape(self.num_envs, *self.single_observation_space.shape).copy(), {}

    def step(self, actions):
        list(map(self.play, range(len(self.games)), np.reshape(actions, self.scores.shape)))  # threads would get in the way
        answers = (self.obs, self.rewards, self.terminated, self.truncated, self.scores, self.lengths)
        *answers, scores, lengths = (x.reshape(self.num_envs, *x.shape[2:]).copy() for x in answers)
        is_over = (self.terminated | self.truncated).all(1).repeat(len(self.players))  # all its players' episodes end together
        return *answers, {"episode": {"r": scores, "l": lengths}, "_episode": is_over} if is_over.any() else {}

    def render(self):
        screens = np.stack([game.render() for game in self.games]).repeat(len(self.players), 0)
        return list(screens.repeat(2, 1).repeat(2, 2))

    def close_extras(self, **kwargs):
        self.threads.shutdown()
        for game in self.games:
            game.close()


def make_envs(args, num_envs, render_mode=None):
    def make_game(_):
        roms = str(Path(ale_py.__file__).parent / "roms")
        env_id = args.env_id if "/" in args.env_id else f"atari/{args.env_id}"
        game = pettingzoo.make("parallel", env_id, auto_rom_install_path=roms, render_mode=render_mode)
        return game.unwrapped  # without a detour over players that take turns, which costs a third of the speed

    first = make_game(0)
    with ThreadPoolExecutor() as threads:  # each takes a while
        others = list(threads.map(make_game, range(1, num_envs // first.max_num_agents)))
    return AtariGames([first, *others], render_mode)


def layer_init(layer, gain=2**0.5):
    nn.init.orthogonal_(layer.weight, gain)  # [core 2]
    nn.init.zeros_(layer.bias)
    return layer


def cnn(channels):
    return nn.Sequential(
        layer_init(nn.Conv2d(channels, 32, 8, stride=4)),
        nn.ReLU(),
        layer_init(nn.Conv2d(32, 64, 4, stride=2)),
        nn.ReLU(),
        layer_init(nn.Conv2d(64, 64, 3, stride=1)),
        nn.ReLU(),
        nn.Flatten(),
        layer_init(nn.Linear(64 * 7 * 7, 512)),
        nn.ReLU(),
    )


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        self.network = cnn(envs.single_observation_space.shape[0])  # [atari 8] shared by policy and value
        self.actor = layer_init(nn.Linear(512, int(envs.single_action_space.n)), gain=0.01)
        self.critic = layer_init(nn.Linear(512, 1), gain=1.0)

    def forward(self, obs):
        hidden = self.network(torch.cat([obs[:, :4] / 255, obs[:, 4:]], 1))  # [atari 9], but not for the planes [selfplay 2]
        return self.actor(hidden).log_softmax(-1), self.critic(hidden).squeeze(-1)


def sample(log_probs):
    """An action for each row: where log-probabilities plus Gumbel noise (-log of exponential noise) peak is a sample."""
    return (log_probs - torch.empty_like(log_probs).exponential_().log()).argmax(-1)


def elo(points, ratings):
    """The most likely rating of who made these points, 1 a win and 0.5 a draw, in a game with a player of each rating."""
    low, high = min(ratings) - 4000, max(ratings) + 4000
    while high - low > 1e-6:  # it is the rating at which these points are to be expected
        middle = (low + high) / 2
        expected = sum(1 / (1 + 10 ** ((rating - middle) / 400)) for rating in ratings)
        low, high = (middle, high) if expected < points else (low, middle)
    return low


class League:
    """The weights of earlier checkpoints, and their ratings; before them one who acts at random, None, always rated 0."""

    def __init__(self, agent, size):
        self.agent, self.size, self.players, self.ratings = agent, size, [None], [0.0]  # [selfplay 5]

    def state_dict(self):
        return {"players": self.players, "ratings": self.ratings}

    def load_state_dict(self, state):
        weights, ratings = self.agent.state_dict(), [float(rating) for rating in state["ratings"]]
        players = [{name: player[name].to(weights[name]) for name in weights} for player in state["players"][1:]]
        is_ours = all(player[name].shape == weights[name].shape for player in players for name in weights)
        assert is_ours and len(players) + 1 == len(ratings) <= self.size + 1 and ratings[0] == 0, "a league of another run"
        assert all(abs(rating) < 1e5 for rating in ratings), "ratings that nobody can have"
        self.players, self.ratings = [None, *players], ratings

    @torch.no_grad()
    def play(self, arena, seats, max_steps):
        """The scores of games that are over, or cut, after so many steps, with the players that the seats name."""
        (obs, _), scores, is_playing = arena.reset(), np.zeros(len(seats)), np.ones(len(seats), dtype=bool)
        log_probs = torch.zeros(len(seats), int(arena.single_action_space.n))
        for _ in range(max_steps):
            for i in np.unique(seats[seats > 0]):
                seen = torch.from_numpy(obs[seats == i]).to(next(self.agent.parameters()).device)
                log_probs[seats == i] = torch.func.functional_call(self.agent, self.players[i], seen)[0].cpu()
            obs, rewards, _, _, infos = arena.step(sample(log_probs).numpy() + arena.single_action_space.start)
            scores += rewards * is_playing
            is_playing &= ~infos.get("_episode", np.False_)
            if not is_playing.any():
                break
        return scores

    def rate(self, arena, max_steps):
        """Take in the agent as it is now, with the rating that its games give it; that, and its points against random."""
        self.players.append({name: weights.clone() for name, weights in self.agent.state_dict().items()})
        num_players, rivals = len(arena.players), [0, *range(len(self.players) - 2, 0, -1)]  # random, then the newest
        games = np.arange(arena.num_envs // num_players)
        own_seat, rivals = games % num_players, np.array(rivals)[games // num_players % len(rivals)]
        seats = rivals.repeat(num_players).reshape(-1, num_players)
        seats[games, own_seat] = len(self.players) - 1  # [selfplay 6] all seats in turn, against each rival
        scores = self.play(arena, seats.flatten(), max_steps).reshape(seats.shape)
        own = scores[games, own_seat, None]
        points = ((own > scores).sum(1) + 0.5 * (own == scores).sum(1) - 0.5) / (num_players - 1)  # less a draw with itself
        # [selfplay 7] a draw with the last checkpoint is added, or who wins all would have no rating
        self.ratings.append(elo(points.sum() + 0.5, [*(self.ratings[i] for i in rivals), self.ratings[-1]]))
        if len(self.players) > self.size + 1:  # [selfplay 8] who fills the smallest gap is missed the least
            gaps = [after - before for before, after in zip(self.ratings, self.ratings[2:], strict=False)]
            del self.players[1 + np.argmin(np.abs(gaps))], self.ratings[1 + np.argmin(np.abs(gaps))]
        return self.ratings[-1], points[rivals == 0].mean()


def load_policy(checkpoint, envs):
    """The trained policy: a function from observations, and which of them end an episode, to actions."""
    agent, first_action = Agent(envs), envs.single_action_space.start
    agent.load_state_dict(checkpoint["agent"])
    return torch.no_grad()(lambda obs, is_last: sample(agent(torch.from_numpy(obs))[0]).numpy() + first_action)


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
        "num_envs > 0; num_minibatches > 0; update_epochs > 0; checkpoint_interval > 0; num_envs * num_steps < 2**31; "
        "num_minibatches <= num_steps // 2; "  # the fewest rows of a game: one player left, and every other step a reset
        "total_timesteps >= num_envs * num_steps; 0 <= gamma <= 1; 0 <= gae_lambda <= 1; clip_coef > 0; max_grad_norm > 0; "
        "0 < learning_rate < 1e9; abs(ent_coef) < 1e9; abs(vf_coef) < 1e9; 0 <= seed < 2**32; "
        "0 <= elo_games < 2**16; 0 < elo_steps < 2**31; 0 < elo_players < 2**10"
    ).split("; "):
        if not eval(rule, {}, vars(args)):
            raise SystemExit(f"these flags do not fit: {rule} must hold")
    try:
        envs = make_envs(args, args.num_envs, "rgb_array" if args.capture_video else None)
    except Exception as error:
        raise SystemExit(f"cannot make {args.env_id}: {type(error).__name__}: {error}".splitlines()[0]) from None
    obs_space, action_space, num_players = envs.single_observation_space, envs.single_action_space, len(envs.players)
    for need, is_met in {
        "two players or more": num_players > 1,
        "a number of players that divides --num-envs": args.num_envs % num_players == 0,
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
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1 if device.type == "cuda" else torch.get_num_threads())  # idle ones would be in the emulators' way
    agent = Agent(envs).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)  # [core 3]
    league, arena = League(agent, args.elo_players), make_envs(args, args.elo_games * num_players)
    parts, global_step = {"agent": agent, "optimizer": optimizer, "league": league}, 0
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
            assert global_step in range(0, num_iterations * batch_size + 1, batch_size), f"step {global_step} of another run"
        except Exception as error:
            raise SystemExit(f"cannot resume {resume}: {type(error).__name__}: {error}".splitlines()[0]) from None

    # the rollout: row t is what the agent saw and did at step t, and what the environments answered
    obs = np.zeros((args.num_steps + 1, args.num_envs, *obs_space.shape), dtype=np.uint8)
    is_last = np.zeros((args.num_steps + 1, args.num_envs), dtype=bool)  # obs[t] ends an episode: step t will only reset
    values = np.zeros((args.num_steps + 1, args.num_envs), dtype=np.float32)  # one pass of the network gives policy and value
    logprobs = np.zeros((args.num_steps, args.num_envs), dtype=np.float32)
    actions = np.zeros((args.num_steps, args.num_envs), dtype=np.int64)
    rewards = np.zeros((args.num_steps, args.num_envs), dtype=np.float32)
    terminated = np.zeros((args.num_steps, args.num_envs), dtype=bool)

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
    obs[-1], _ = envs.reset(seed=int(np.random.SeedSequence((args.seed, global_step)).generate_state(1)[0] >> 2))  # 30 bits
    arena.reset(seed=int(np.random.SeedSequence((args.seed, global_step, 1)).generate_state(1)[0] >> 2))
    loop_start, start_step = time.time(), global_step
    progress = tqdm(initial=global_step, total=num_iterations * batch_size, unit="step", unit_scale=True)
    for iteration in range(global_step // batch_size, num_iterations):
        if args.anneal_lr:  # [core 4]
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # act
        obs[0], is_last[0] = obs[-1], is_last[-1]
        for t in range(args.num_steps):
            with torch.no_grad():
                log_probs, value = agent(torch.from_numpy(obs[t]).to(device))
                action = sample(log_probs)
            actions[t], values[t] = action.cpu(), value.cpu()
            logprobs[t] = log_probs.gather(1, action[:, None]).squeeze(1).cpu()
            obs[t + 1], scores, terminated[t], truncated, infos = envs.step(actions[t] + action_space.start)
            rewards[t] = np.sign(scores)  # [atari 6]
            is_last[t + 1] = terminated[t] | truncated
            global_step += args.num_envs
            for i in np.flatnonzero(infos.get("_episode", ())):
                episodic_return, episodic_length = infos["episode"]["r"][i], infos["episode"]["l"][i]
                player, step = f"player{i % num_players}", global_step - args.num_envs + i + 1
                writer.add_scalar(f"charts/episodic_return-{player}", episodic_return, step)
                writer.add_scalar(f"charts/episodic_length-{player}", episodic_length, step)
                shown = {"episodic_return": f"{episodic_return:.1f}", "elo": f"{league.ratings[-1]:.0f}"}
                progress.set_postfix(shown, refresh=False)
        progress.update(batch_size)

        # estimate advantages [core 5]: a truncated episode is bootstrapped from its last observation, a terminated one is not
        values[-1] = torch.no_grad()(agent)(torch.from_numpy(obs[-1]).to(device))[1].cpu()
        deltas = rewards + args.gamma * values[1:] * ~terminated - values[:-1]
        advantages, advantage = np.zeros_like(rewards), np.float32(0)
        for t in reversed(range(args.num_steps)):
            advantages[t] = advantage = deltas[t] + args.gamma * args.gae_lambda * advantage * ~is_last[t + 1]
        returns = advantages + values[:-1]

        # learn, but not from the steps that only reset an environment
        b_obs, b_actions, b_logprobs, b_values, b_advantages, b_returns = (
            torch.from_numpy(x[~is_last[:-1]]).to(device)
            for x in (obs[:-1], actions, logprobs, values[:-1], advantages, returns)
        )
        clipfracs = []
        for _epoch in range(args.update_epochs):
            for mb in torch.randperm(len(b_obs), device=device).tensor_split(args.num_minibatches):  # [core 6]
                log_probs, value = agent(b_obs[mb])
                logratio = log_probs.gather(1, b_actions[mb, None]).squeeze(1) - b_logprobs[mb]
                ratio = logratio.exp()
                mb_advantages = b_advantages[mb]
                if args.norm_adv:  # [core 7]
                    mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std(correction=0) + 1e-8)

                clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                policy_loss = -torch.min(mb_advantages * ratio, mb_advantages * clipped_ratio).mean()  # [core 8]
                value_error = (value - b_returns[mb]) ** 2
                if args.clip_vloss:  # [core 9]
                    clipped_value = b_values[mb] + (value - b_values[mb]).clamp(-args.clip_coef, args.clip_coef)
                    value_error = torch.max(value_error, (clipped_value - b_returns[mb]) ** 2)
                value_loss = 0.5 * value_error.mean()
                entropy = -(log_probs.exp() * log_probs).sum(1).mean()
                loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy  # [core 10]

                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)  # [core 11]
                optimizer.step()
                approx_kl, old_approx_kl = (ratio - 1 - logratio).mean(), -logratio.mean()  # [core 12]
                clipfracs.append(((ratio - 1).abs() > args.clip_coef).float().mean())
            if args.target_kl is not None and approx_kl > args.target_kl:
                break

        # log
        for name, scalar in {
            "charts/learning_rate": optimizer.param_groups[0]["lr"],
            "charts/SPS": int((global_step - start_step) / (time.time() - loop_start)),
            "losses/value_loss": value_loss,
            "losses/policy_loss": policy_loss,
            "losses/entropy": entropy,
            "losses/old_approx_kl": old_approx_kl,
            "losses/approx_kl": approx_kl,
            "losses/clipfrac": torch.stack(clipfracs).mean(),
            "losses/explained_variance": 1 - (b_returns - b_values).var() / b_returns.var(),
        }.items():
            writer.add_scalar(name, scalar, global_step)
        for video in set(videos.glob("*.mp4")) - logged_videos if args.track else ():
            wandb.log({"videos": wandb.Video(str(video)), "global_step": global_step})
            logged_videos.add(video)

        # rate
        is_due = (iteration + 1) % args.checkpoint_interval == 0 or iteration + 1 == num_iterations
        if is_due and args.elo_games > 0:
            rating, points_against_random = league.rate(arena, args.elo_steps)
            writer.add_scalar("charts/elo", rating, global_step)
            writer.add_scalar("charts/points_against_random", points_against_random, global_step)

        # checkpoint
        if (iteration + 1) % args.checkpoint_interval == 0 or iteration + 1 == num_iterations:
            checkpoint = {name: part.state_dict() for name, part in parts.items()} | {
                "rng": torch.get_rng_state(),
                "cuda_rng": torch.cuda.get_rng_state_all() if device.type == "cuda" else [],
                "global_step": global_step,
            }
            writer.flush()  # the curves reach as far as the checkpoint
            (run_folder / "checkpoint.tmp").unlink(missing_ok=True)  # never write through a stranger's link
            torch.save(checkpoint, run_folder / "checkpoint.tmp")
            os.replace(run_folder / "checkpoint.tmp", run_folder / "checkpoint.pt")  # whole, or not at all

    progress.close()
    envs.close()
    arena.close()
    writer.close()
