# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "dm-control>=1.0.30; python_version < '3.13'", "gymnasium[mujoco]>=1.2.1,<2", "moviepy>=2", "mujoco>=3.3,<4", "numpy>=2",
#     "shimmy[dm-control]>=2.0.1; python_version < '3.13'", "tensorboard>=2.20", "torch>=2.9", "tqdm>=4.67", "tyro>=1.0",
#     "wandb>=0.22",
# ]
# ///
"""Deep Deterministic Policy Gradient for flat observations (dictionaries too, which it flattens) and continuous actions.

    uv run cleanrl/ddpg_continuous_action.py                                # Hopper-v4, 1M steps
    uv run cleanrl/ddpg_continuous_action.py --env-id dm_control/cartpole-balance-v0 --seed 2
    uv run cleanrl/ddpg_continuous_action.py --resume runs/<run>            # go on after an interruption
    tensorboard --logdir runs

Numbers in brackets, such as [ddpg 3], are the implementation details explained in docs/rl-algorithms/ddpg.md.
"""

import copy
import json
import math
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
    compile: bool = True  # on a GPU, record acting and learning once and replay them: the same sums, started faster
    buffer_size: int = 1_000_000  # transitions that the replay buffer holds
    gamma: float = 0.99  # discount factor
    tau: float = 0.005  # how far the target networks move to the networks when they are updated
    batch_size: int = 256  # transitions per update
    utd: int = 1  # updates per environment step
    exploration_noise: float = 0.1  # standard deviation of what is added to the actions, which go from -1 to 1
    learning_starts: int = 25_000  # environment steps, with random actions, before the first update
    policy_frequency: int = 2  # updates of the Q-network between two of the actor and the target networks


def make_envs(args, num_envs, render_mode=None):
    env_id = f"shimmy:{args.env_id}" if args.env_id.startswith("dm_control/") else args.env_id  # imports shimmy first
    envs = gym.make_vec(env_id, num_envs, "sync", render_mode=render_mode, wrappers=[gym.wrappers.FlattenObservation])
    return gym.wrappers.vector.RecordEpisodeStatistics(envs)


def rescale(actions, space):
    """From -1 to 1, where the networks and the replay buffer have them, to each action's own bounds [ddpg 1]."""
    actions = actions.reshape(-1, *space.shape)
    return (space.low + (space.high - space.low) * (actions + 1) / 2).clip(space.low, space.high)


class Actor(nn.Module):
    def __init__(self, envs):
        super().__init__()
        self.hidden1 = nn.Linear(math.prod(envs.single_observation_space.shape), 256)
        self.hidden2 = nn.Linear(256, 256)
        self.actions = nn.Linear(256, math.prod(envs.single_action_space.shape))

    def forward(self, obs):
        hidden = self.hidden2(self.hidden1(obs).relu()).relu()
        return self.actions(hidden).tanh()


class QNetwork(nn.Module):
    def __init__(self, envs):
        super().__init__()
        shapes = envs.single_observation_space.shape, envs.single_action_space.shape
        self.hidden1 = nn.Linear(sum(map(math.prod, shapes)), 256)
        self.hidden2 = nn.Linear(256, 256)
        self.q_value = nn.Linear(256, 1)

    def forward(self, obs, actions):
        hidden = self.hidden2(self.hidden1(torch.cat([obs, actions], 1)).relu()).relu()
        return self.q_value(hidden)


class ReplayBuffer(nn.Module):
    """A ring with the last transitions [ddpg 2], where the networks are; as a module it fits into a checkpoint."""

    def __init__(self, size, envs, device):
        super().__init__()
        obs_dim, action_dim = map(math.prod, (envs.single_observation_space.shape, envs.single_action_space.shape))
        self.columns = obs_dim, action_dim, 1, obs_dim, 1  # observation, action, reward, next observation, terminated
        self.register_buffer("rows", torch.zeros(size, sum(self.columns), device=device))
        self.register_buffer("added", torch.zeros(1, dtype=torch.int64))
        self.count = self.added.numpy()  # the same memory

    def add(self, *columns):
        rows = np.column_stack(columns).astype(np.float32)
        places = (self.count[0] + np.arange(len(rows))) % len(self.rows)
        self.rows[torch.from_numpy(places)] = torch.from_numpy(rows).to(self.rows.device)
        self.count[0] += len(rows)

    def sample(self, batch):
        """Fill the batch with transitions, drawn evenly."""
        drawn = torch.randint(min(self.count[0], len(self.rows)), (len(batch),)).to(batch.device)
        torch.index_select(self.rows, 0, drawn, out=batch)


def load_policy(checkpoint, envs):
    """The trained policy: a function from observations, and which of them end an episode, to actions."""
    actor, action_space = Actor(envs), envs.single_action_space
    actor.load_state_dict(checkpoint["actor"])
    return torch.no_grad()(lambda obs, is_last: rescale(actor(torch.from_numpy(obs).float()).numpy(), action_space))


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
        "total_timesteps >= num_envs; num_envs <= buffer_size < 2**31; 0 <= gamma <= 1; 0 <= tau <= 1; "
        "0 <= exploration_noise < 1e9; 0 < learning_rate < 1e9; 0 <= seed < 2**32"
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
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic matrix products need on a GPU
    torch.use_deterministic_algorithms(args.torch_deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # or all new memory is written twice
    torch.manual_seed(args.seed)
    num_iterations = args.total_timesteps // args.num_envs
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1 if device.type == "cuda" else torch.get_num_threads())  # idle ones would be in the simulators' way
    stream = torch.cuda.Stream() if device.type == "cuda" else None  # what is recorded must not be on the default stream
    torch.cuda.set_stream(stream)
    actor, q_network = Actor(envs).to(device), QNetwork(envs).to(device)
    target_actor, target_q_network = (copy.deepcopy(network).requires_grad_(False) for network in (actor, q_network))
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.learning_rate, fused=True)
    q_optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate, fused=True)
    buffer = ReplayBuffer(args.buffer_size, envs, device)
    networks = {"actor": actor, "q_network": q_network, "target_actor": target_actor, "target_q_network": target_q_network}
    optimizers = {"actor_optimizer": actor_optimizer, "q_optimizer": q_optimizer}
    parts, global_step = networks | optimizers | ({"buffer": buffer} if args.checkpoint_buffer else {}), 0
    if resume is not None and (run_folder / "checkpoint.pt").exists():
        try:
            checkpoint = torch.load(run_folder / "checkpoint.pt", map_location="cpu", weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(checkpoint[name])
            states = [item for optimizer in optimizers.values() for item in optimizer.state.items()]
            for p, state in states:  # fused Adam writes to them without a look at their shapes
                shapes = {name: x.shape for name, x in state.items() if x.is_contiguous()}
                if shapes != {"step": (), "exp_avg": p.shape, "exp_avg_sq": p.shape}:
                    raise ValueError("an optimizer of other shapes")
            torch.set_rng_state(checkpoint["rng"])
            torch.cuda.set_rng_state_all(checkpoint["cuda_rng"][: torch.cuda.device_count()])
            global_step = int(checkpoint["global_step"])
            assert global_step in range(0, args.total_timesteps + 1, args.num_envs), f"step {global_step} of another run"
            assert int(buffer.count[0]) in range(global_step + 1), "a replay buffer of another run"
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
    is_last = np.zeros(args.num_envs, dtype=bool)  # whether obs ends an episode
    due = lambda every: global_step // every - (global_step - args.num_envs) // every  # noqa: E731  times in the last step
    seen = torch.zeros(obs.shape, device=device)
    batch, losses = torch.zeros(args.batch_size, sum(buffer.columns), device=device), {}
    for optimizer in optimizers.values():
        optimizer.param_groups[0]["capturable"] = device.type == "cuda"  # also after a restore

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
        actions = actor(seen)
        return (actions + args.exploration_noise * torch.randn_like(actions)).clamp(-1, 1)  # [ddpg 3]

    @recorded
    def learn_q():
        """An episode that was cut is bootstrapped from its last observation, one that ended is not [ddpg 4]."""
        b_obs, b_actions, b_rewards, b_next_obs, b_terminated = batch.split(buffer.columns, 1)
        next_q_values = target_q_network(b_next_obs, target_actor(b_next_obs))
        targets = b_rewards + args.gamma * next_q_values * (1 - b_terminated)
        q_values = q_network(b_obs, b_actions)
        qf_loss = (q_values - targets).square().mean()
        q_optimizer.zero_grad()
        qf_loss.backward()
        q_optimizer.step()
        return {"qf1_loss": qf_loss.detach(), "qf1_values": q_values.detach().mean()}

    @recorded
    def learn_actor():
        b_obs, *_ = batch.split(buffer.columns, 1)
        actor_loss = -q_network(b_obs, actor(b_obs)).mean()  # [ddpg 5]
        actor_optimizer.zero_grad()
        actor_loss.backward(inputs=list(actor.parameters()))
        actor_optimizer.step()
        for network, target_network in ((actor, target_actor), (q_network, target_q_network)):  # [ddpg 6]
            for target, param in zip(target_network.parameters(), network.parameters(), strict=True):
                target.lerp_(param.detach(), args.tau)
        return {"actor_loss": actor_loss.detach()}

    loop_start, start_step = time.time(), global_step
    first_step = 0 if buffer.count[0] else global_step  # at which the buffer was empty
    progress = tqdm(initial=global_step, total=num_iterations * args.num_envs, unit="step", unit_scale=True)
    for iteration in range(global_step // args.num_envs, num_iterations):
        # act, at random at first [ddpg 3]
        if global_step < args.learning_starts:
            actions = 2 * torch.rand(args.num_envs, buffer.columns[1]).numpy() - 1
        else:
            seen.copy_(torch.from_numpy(obs))
            actions = act().cpu().numpy()
        next_obs, rewards, terminated, truncated, infos = envs.step(rescale(actions, action_space))
        global_step += args.num_envs
        progress.update(args.num_envs)
        for i in np.flatnonzero(infos.get("_episode", ())):
            episodic_return, episodic_length = infos["episode"]["r"][i], infos["episode"]["l"][i]
            writer.add_scalar("charts/episodic_return", episodic_return, global_step - args.num_envs + i + 1)
            writer.add_scalar("charts/episodic_length", episodic_length, global_step - args.num_envs + i + 1)
            progress.set_postfix(episodic_return=f"{episodic_return:.1f}", refresh=False)

        # remember all but the steps after an end, which only reset
        buffer.add(*(x[~is_last] for x in (obs, actions, rewards, next_obs, terminated)))
        obs, is_last = next_obs, terminated | truncated

        # learn
        is_learning = global_step - first_step >= args.learning_starts  # a buffer that was not kept fills up again first
        for update in range((global_step - args.num_envs) * args.utd, global_step * args.utd) if is_learning else ():
            buffer.sample(batch)
            losses |= learn_q()
            if update % args.policy_frequency == 0:
                losses |= learn_actor()

        # log
        if is_learning and due(100):
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
