# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "dm-control>=1.0.30; python_version < '3.13'", "gymnasium[mujoco]>=1.2.1,<2", "moviepy>=2", "mujoco>=3.3,<4", "numpy>=2",
#     "shimmy[dm-control]>=2.0.1; python_version < '3.13'", "tensorboard>=2.20", "torch>=2.9", "tqdm>=4.67", "tyro>=1.0",
#     "wandb>=0.22",
# ]
# ///
"""Robust Policy Optimization for flat observations (dictionaries too, which it flattens) and continuous actions.

    uv run cleanrl/rpo_continuous_action.py                                # HalfCheetah-v4, 8M steps
    uv run cleanrl/rpo_continuous_action.py --env-id dm_control/walker-walk-v0 --seed 2
    uv run cleanrl/rpo_continuous_action.py --env-id Ant-v4 --rpo-alpha 0.01
    uv run cleanrl/rpo_continuous_action.py --resume runs/<run>            # go on after an interruption
    tensorboard --logdir runs

Numbers in brackets, such as [core 5], are the implementation details explained in docs/rl-algorithms/ppo.md and rpo.md.
"""

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
    cuda: bool = True  # use the GPU if there is one and the networks have enough to do to gain from it
    track: bool = False  # also log to Weights & Biases
    wandb_project_name: str = "cleanRL"  # project to log to
    wandb_entity: str | None = None  # team to log to
    capture_video: bool = False  # record videos of the first environment into the run's folder
    resume: str | None = None  # folder of an interrupted run to go on with, its flags as they were
    checkpoint_interval: int = 100  # iterations between two checkpoints

    env_id: str = "HalfCheetah-v4"  # Gymnasium id of the environment
    total_timesteps: int = 8_000_000  # environment steps of the whole run
    learning_rate: float = 3e-4  # learning rate at the start
    num_envs: int = 1  # environments stepped side by side
    num_steps: int = 2048  # steps of each environment per iteration
    anneal_lr: bool = True  # lower the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # bias-variance trade-off of the advantage estimate
    num_minibatches: int = 32  # minibatches per epoch
    update_epochs: int = 10  # passes over the rollout per iteration
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.2  # how far the policy may move from the one that acted
    clip_vloss: bool = True  # clip the value's movement the same way
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # global norm the gradient is clipped to
    target_kl: float | None = None  # stop an iteration's epochs once the policy moved this far
    rpo_alpha: float = 0.5  # how far the mean is shaken in learning; 0.01 for Ant, InvertedDoublePendulum, Reacher, Pusher


def make_envs(args, num_envs, render_mode=None):
    env_id = f"shimmy:{args.env_id}" if args.env_id.startswith("dm_control/") else args.env_id  # imports shimmy first
    wrappers = [
        gym.wrappers.FlattenObservation,
        lambda env: gym.wrappers.ClipAction(env) if isinstance(env.action_space, gym.spaces.Box) else env,  # [continuous 5]
    ]
    envs = gym.make_vec(env_id, num_envs, "sync", render_mode=render_mode, wrappers=wrappers)  # [core 1]
    return gym.wrappers.vector.RecordEpisodeStatistics(envs)


def layer_init(layer, gain=2**0.5):
    nn.init.orthogonal_(layer.weight, gain)  # [core 2]
    nn.init.zeros_(layer.bias)
    return layer


def mlp(in_dim, out_dim, gain):
    return nn.Sequential(
        layer_init(nn.Linear(in_dim, 64)),
        nn.Tanh(),
        layer_init(nn.Linear(64, 64)),
        nn.Tanh(),
        layer_init(nn.Linear(64, out_dim), gain),
    )


class RunningMoments(nn.Module):
    """Mean and variance of all rows seen so far: in buffers, so that checkpoints hold them, which NumPy updates in place."""

    def __init__(self, shape):
        super().__init__()
        for name, value in {"count": torch.zeros(()), "mean": torch.zeros(shape), "var": torch.ones(shape)}.items():
            self.register_buffer(name, value.double())

    def update(self, rows):
        count, mean, var = self.count.numpy(), self.mean.numpy(), self.var.numpy()
        count += len(rows)
        share, delta = len(rows) / count, rows.mean(0) - mean
        mean += share * delta
        var += share * (rows.var(0) - var + (1 - share) * delta**2)


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        obs_dim, action_shape = envs.single_observation_space.shape[0], envs.single_action_space.shape
        self.obs_moments = RunningMoments(obs_dim)
        self.actor = mlp(obs_dim, math.prod(action_shape), gain=0.01)  # [core 13] two networks, nothing shared [continuous 4]
        self.logstd = nn.Parameter(torch.zeros(action_shape))  # [continuous 2] the same in every state
        self.critic = mlp(obs_dim, 1, gain=1.0)

    def normalize(self, obs, learn=False):
        obs = obs.astype(np.float64)
        if learn:  # only in training, and from all environments
            self.obs_moments.update(obs)
        normalized = (obs - self.obs_moments.mean.numpy()) / np.sqrt(self.obs_moments.var.numpy() + 1e-8)  # [continuous 6]
        return torch.from_numpy(normalized.clip(-10, 10).astype(np.float32))  # [continuous 7]

    def policy(self, obs):
        return self.actor(obs).view(-1, *self.logstd.shape)

    def value(self, obs):
        return self.critic(obs).squeeze(-1)


def sample(mean, logstd):
    """An action for each row, from Gaussians with these means [continuous 1]."""
    return mean + logstd.exp() * torch.randn_like(mean)


def log_prob(mean, logstd, actions):
    """The logarithm of each action's density: the sum over its components, which are independent [continuous 3]."""
    return (-0.5 * ((actions - mean) / logstd.exp()) ** 2 - logstd - 0.5 * math.log(2 * math.pi)).flatten(1).sum(1)


def load_policy(checkpoint, envs):
    """The trained policy: a function from observations, and which of them end an episode, to actions."""
    agent = Agent(envs)
    agent.load_state_dict(checkpoint["agent"])
    return torch.no_grad()(lambda obs, is_last: sample(agent.policy(agent.normalize(obs)), agent.logstd).numpy())


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
        "num_minibatches <= num_envs * (num_steps // 2); "  # every other step may be a reset, which is not learned from
        "total_timesteps >= num_envs * num_steps; 0 <= gamma <= 1; 0 <= gae_lambda <= 1; clip_coef > 0; max_grad_norm > 0; "
        "0 < learning_rate < 1e9; abs(ent_coef) < 1e9; abs(vf_coef) < 1e9; 0 <= seed < 2**32; 0 <= rpo_alpha < 1e9"
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
        "continuous actions": isinstance(action_space, gym.spaces.Box) and np.issubdtype(action_space.dtype, np.floating),
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
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    inputs = args.num_envs * np.prod(obs_space.shape)  # numbers read at a step; threads and a GPU pay only from many on
    torch.set_num_threads(torch.get_num_threads() if inputs >= 2**13 else 1)
    device = torch.device("cuda" if inputs >= 2**19 and args.cuda and torch.cuda.is_available() else "cpu")
    agent, return_moments = Agent(envs).to(device), RunningMoments(())
    agent.obs_moments.cpu()  # where NumPy finds them
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)  # [core 3]
    parts, global_step = {"agent": agent, "return_moments": return_moments, "optimizer": optimizer}, 0
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
    obs = np.zeros((args.num_steps + 1, args.num_envs, *obs_space.shape), dtype=np.float32)  # normalized
    is_last = np.zeros((args.num_steps + 1, args.num_envs), dtype=bool)  # obs[t] ends an episode: step t will only reset
    actions = np.zeros((args.num_steps, args.num_envs, *action_space.shape), dtype=np.float32)
    rewards = np.zeros((args.num_steps, args.num_envs), dtype=np.float32)
    discounted = np.zeros((args.num_steps + 1, args.num_envs), dtype=np.float32)  # sum of the episode's rewards so far
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
    raw_obs, _ = envs.reset(seed=int(np.random.SeedSequence((args.seed, global_step)).generate_state(1)[0]))
    obs[-1] = agent.normalize(raw_obs, learn=True)
    loop_start, start_step = time.time(), global_step
    progress = tqdm(initial=global_step, total=num_iterations * batch_size, unit="step", unit_scale=True)
    for iteration in range(global_step // batch_size, num_iterations):
        if args.anneal_lr:  # [core 4]
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # act
        obs[0], is_last[0] = obs[-1], is_last[-1]
        for t in range(args.num_steps):
            with torch.no_grad():
                actions[t] = sample(agent.policy(torch.from_numpy(obs[t]).to(device)), agent.logstd).cpu().numpy()
            raw_obs, rewards[t], terminated[t], truncated, infos = envs.step(actions[t])
            obs[t + 1] = agent.normalize(raw_obs, learn=True)
            is_last[t + 1] = terminated[t] | truncated
            global_step += args.num_envs
            for i in np.flatnonzero(infos.get("_episode", ())):
                episodic_return, episodic_length = infos["episode"]["r"][i], infos["episode"]["l"][i]
                writer.add_scalar("charts/episodic_return", episodic_return, global_step - args.num_envs + i + 1)
                writer.add_scalar("charts/episodic_length", episodic_length, global_step - args.num_envs + i + 1)
                progress.set_postfix(episodic_return=f"{episodic_return:.1f}", refresh=False)
        progress.update(batch_size)

        # scale rewards [continuous 8, 9]: by the spread of the discounted sums, which start anew with each episode
        discounted[0] = discounted[-1]
        for t in range(args.num_steps):
            discounted[t + 1] = (rewards[t] + args.gamma * discounted[t]) * ~is_last[t]
        return_moments.update(discounted[1:][~is_last[:-1]])
        scaled_rewards = (rewards / return_moments.var.add(1e-8).sqrt().item()).clip(-10, 10)

        # estimate advantages [core 5]: a truncated episode is bootstrapped from its last observation, a terminated one is not
        values = torch.no_grad()(agent.value)(torch.from_numpy(obs).to(device).flatten(0, 1)).view(is_last.shape).cpu().numpy()
        deltas = scaled_rewards + args.gamma * values[1:] * ~terminated - values[:-1]
        advantages, advantage = np.zeros_like(rewards), np.float32(0)
        for t in reversed(range(args.num_steps)):
            advantages[t] = advantage = deltas[t] + args.gamma * args.gae_lambda * advantage * ~is_last[t + 1]
        returns = advantages + values[:-1]

        # learn, but not from the steps that only reset an environment
        b_obs, b_actions, b_values, b_advantages, b_returns = (
            torch.from_numpy(x[~is_last[:-1]]).to(device) for x in (obs[:-1], actions, values[:-1], advantages, returns)
        )
        b_logprobs = log_prob(agent.policy(b_obs), agent.logstd, b_actions).detach()
        clipfracs = []
        for _epoch in range(args.update_epochs):
            for mb in torch.randperm(len(b_obs), device=device).tensor_split(args.num_minibatches):  # [core 6]
                mean, value = agent.policy(b_obs[mb]), agent.value(b_obs[mb])
                shaken_mean = mean + torch.empty_like(mean).uniform_(-args.rpo_alpha, args.rpo_alpha)  # [rpo 1]
                logratio = log_prob(shaken_mean, agent.logstd, b_actions[mb]) - b_logprobs[mb]
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
                entropy = (agent.logstd + 0.5 * math.log(2 * math.pi * math.e)).sum()  # [continuous 3]
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
    writer.close()
