# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "gymnasium[classic-control]>=1.2,<2", "moviepy>=2", "numpy>=2", "tensorboard>=2.20",
#     "torch>=2.9", "tqdm>=4.67", "tyro>=1.0", "wandb>=0.22",
# ]
# ///
"""Proximal Policy Optimization for Box observations and discrete actions.

    uv run cleanrl/ppo.py                                # CartPole-v1 to a return near 500
    uv run cleanrl/ppo.py --env-id Acrobot-v1 --seed 2
    uv run cleanrl/ppo.py --resume runs/<run>            # go on after an interruption
    tensorboard --logdir runs

Numbers in brackets, such as [core 5], are the implementation details explained in docs/rl-algorithms/ppo.md.
"""

import json
import os
import platform
import re
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

    env_id: str = "CartPole-v1"  # Gymnasium id of the environment
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
    target_kl: float | None = None  # stop an iteration's epochs once the policy moved this far


def make_envs(args, num_envs, render_mode=None):
    envs = gym.make_vec(args.env_id, num_envs=num_envs, render_mode=render_mode)  # [core 1]
    return gym.wrappers.vector.RecordEpisodeStatistics(envs)


def layer_init(layer, std=2**0.5):
    nn.init.orthogonal_(layer.weight, std)  # [core 2]
    nn.init.zeros_(layer.bias)
    return layer


def mlp(in_dim, out_dim, std):
    return nn.Sequential(
        layer_init(nn.Linear(in_dim, 64)),
        nn.Tanh(),
        layer_init(nn.Linear(64, 64)),
        nn.Tanh(),
        layer_init(nn.Linear(64, out_dim), std),
    )


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        obs_dim = int(np.prod(envs.single_observation_space.shape))
        self.actor = mlp(obs_dim, int(envs.single_action_space.n), std=0.01)  # [core 13] two networks, nothing shared
        self.critic = mlp(obs_dim, 1, std=1.0)

    def policy(self, obs):
        return self.actor(obs.reshape(len(obs), -1)).log_softmax(-1)

    def value(self, obs):
        return self.critic(obs.reshape(len(obs), -1)).squeeze(-1)


def sample(log_probs):
    """An action from each row of log-probabilities: with Gumbel noise added, the largest is a sample (and costs little)."""
    return (log_probs - torch.empty_like(log_probs).exponential_().log()).argmax(-1)


def load_policy(checkpoint, envs):
    """The trained policy as a function from a batch of observations to a batch of actions."""
    agent, first_action = Agent(envs), envs.single_action_space.start
    agent.load_state_dict(checkpoint["agent"])
    return torch.no_grad()(lambda obs: sample(agent.policy(torch.as_tensor(obs, dtype=torch.float32))).numpy() + first_action)


if __name__ == "__main__":
    # check what was asked for before anything is written
    args, start_time = tyro.cli(Args), time.time()
    resume, env_id = args.resume, args.env_id
    if resume:
        if args != Args(resume=resume, env_id=env_id):
            raise SystemExit("--resume goes on with the run's own flags: give no others")
        try:
            args = Args(**json.loads(Path(resume, "run.json").read_text())["args"])
        except Exception as error:
            raise SystemExit(f"cannot resume {resume}: {type(error).__name__}: {error}".splitlines()[0]) from None
        if args.env_id != env_id and (":" in args.env_id or env_id != Args.env_id):  # an id may name a module to import
            raise SystemExit(f"{resume} is a run on {args.env_id}: add --env-id {args.env_id} if you trust what it may import")
    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(start_time)}"
    run_folder = Path(resume or "runs/" + re.sub(r"[/\\:]", "-", run_name))

    # check that the numbers fit together and the file fits the environment
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // max(batch_size, 1)
    counts = (args.num_envs, args.num_steps, args.num_minibatches, args.update_epochs, args.checkpoint_interval)
    sizes = (args.learning_rate, args.clip_coef, args.max_grad_norm)
    for rule, kept in {
        "num_envs, num_steps, num_minibatches, update_epochs, checkpoint_interval: at least 1": min(counts) >= 1,
        f"total_timesteps: at least num_envs * num_steps, here {batch_size}": num_iterations >= 1,
        "num_minibatches: at most num_envs * num_steps / 2": args.num_minibatches <= args.num_envs * (args.num_steps // 2),
        "gamma, gae_lambda: from 0 to 1": 0 <= args.gamma <= 1 and 0 <= args.gae_lambda <= 1,
        "learning_rate, clip_coef, max_grad_norm: above 0": np.min(sizes) > 0,
        "seed: from 0 to 2**63 - 1": 0 <= args.seed < 2**63,
    }.items():
        if not kept:
            raise SystemExit(f"out of range: {rule}")
    try:
        envs = make_envs(args, args.num_envs, "rgb_array" if args.capture_video else None)
    except Exception as error:
        raise SystemExit(f"cannot make {args.env_id}: {type(error).__name__}: {error}".splitlines()[0]) from None
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    spaces = f"{type(obs_space).__name__} observations and {type(action_space).__name__} actions"
    if spaces != "Box observations and Discrete actions":
        raise SystemExit(f"{Path(__file__).name} needs Box observations and Discrete actions; {args.env_id} has {spaces}")
    if args.capture_video and "rgb_array" not in envs.metadata.get("render_modes", ()):
        raise SystemExit(f"cannot record {args.env_id}: it has no render mode rgb_array")

    # seed, build, restore
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic matrix products need on a GPU
    torch.use_deterministic_algorithms(args.torch_deterministic)
    torch.manual_seed(args.seed)
    work = args.num_envs * np.prod(obs_space.shape)  # how many numbers the networks read at a step
    if work < 2**13:  # too few for several threads to pay, by measurement
        torch.set_num_threads(1)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() and work >= 2**19 else "cpu")  # for a GPU to pay
    agent = Agent(envs).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)  # [core 3]
    parts = {"agent": agent, "optimizer": optimizer}
    global_step = 0
    if resume and (run_folder / "checkpoint.pt").exists():
        try:
            checkpoint = torch.load(run_folder / "checkpoint.pt", map_location="cpu", weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(checkpoint[name])
            torch.set_rng_state(checkpoint["rng"])
            torch.cuda.set_rng_state_all(checkpoint["cuda_rng"][: torch.cuda.device_count()])
            global_step = int(checkpoint["global_step"])
        except Exception as error:
            raise SystemExit(f"cannot resume {resume}: {type(error).__name__}: {error}".splitlines()[0]) from None

    # open the logs
    if args.track:
        try:
            import wandb

            names = dict(project=args.wandb_project_name, entity=args.wandb_entity, name=run_folder.name, id=run_folder.name)
            wandb.init(**names, config=asdict(args), resume="allow", sync_tensorboard=True, save_code=True)
        except Exception as error:
            raise SystemExit(f"cannot track: {type(error).__name__}: {error}".splitlines()[0]) from None
    if not resume:
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
            os.makedirs(f"{run_folder}.tmp")
            Path(f"{run_folder}.tmp", "run.json").write_text(json.dumps(about, indent=2))
            os.rename(f"{run_folder}.tmp", run_folder)  # the folder appears with run.json in it, or not at all
        except OSError as error:
            raise SystemExit(f"cannot write {run_folder}: {error.strerror}") from None
    print(f"run folder: {run_folder}")
    writer = SummaryWriter(run_folder, purge_step=global_step + 1)
    videos = run_folder / "videos"
    logged_videos = set(videos.glob("*.mp4"))
    if args.capture_video:
        envs = gym.wrappers.vector.RecordVideo(envs, str(videos), name_prefix=f"step-{global_step}", record_first_only=True)

    # the rollout: row t is what the agent saw and did at step t, and what the environments answered
    obs = np.zeros((args.num_steps + 1, args.num_envs, *obs_space.shape), dtype=np.float32)
    is_last = np.zeros((args.num_steps + 1, args.num_envs), dtype=bool)  # obs[t] ends an episode: step t will only reset
    actions = np.zeros((args.num_steps, args.num_envs), dtype=np.int64)
    rewards = np.zeros((args.num_steps, args.num_envs), dtype=np.float32)
    terminated = np.zeros((args.num_steps, args.num_envs), dtype=bool)

    # train
    obs[-1], _ = envs.reset(seed=int(np.random.SeedSequence((args.seed, global_step)).generate_state(1)[0]))
    start_time, start_step = time.time(), global_step
    progress = tqdm(initial=global_step, total=num_iterations * batch_size, unit="step", unit_scale=True)
    for iteration in range(global_step // batch_size, num_iterations):
        if args.anneal_lr:  # [core 4]
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # act
        obs[0], is_last[0] = obs[-1], is_last[-1]
        for t in range(args.num_steps):
            with torch.no_grad():
                actions[t] = sample(agent.policy(torch.from_numpy(obs[t]).to(device))).cpu()
            obs[t + 1], rewards[t], terminated[t], truncated, infos = envs.step(actions[t] + action_space.start)
            is_last[t + 1] = terminated[t] | truncated
            global_step += args.num_envs
            for i in np.flatnonzero(infos.get("_episode", ())):
                episodic_return, episodic_length = infos["episode"]["r"][i], infos["episode"]["l"][i]
                writer.add_scalar("charts/episodic_return", episodic_return, global_step - args.num_envs + i + 1)
                writer.add_scalar("charts/episodic_length", episodic_length, global_step - args.num_envs + i + 1)
                progress.set_postfix(episodic_return=f"{episodic_return:.1f}", refresh=False)
        progress.update(batch_size)

        # estimate advantages [core 5]: a truncated episode is bootstrapped from its last observation, a terminated one is not
        with torch.no_grad():
            values = agent.value(torch.from_numpy(obs).to(device).flatten(0, 1)).view(is_last.shape).cpu().numpy()
        deltas = rewards + args.gamma * ~terminated * values[1:] - values[:-1]
        advantages, advantage = np.zeros_like(rewards), 0
        for t in reversed(range(args.num_steps)):
            advantages[t] = advantage = deltas[t] + args.gamma * args.gae_lambda * ~is_last[t + 1] * advantage
        returns = advantages + values[:-1]

        # learn, but not from the steps that only reset an environment
        b_obs, b_actions, b_values, b_advantages, b_returns = (
            torch.from_numpy(x[~is_last[:-1]]).to(device) for x in (obs[:-1], actions, values[:-1], advantages, returns)
        )
        b_logprobs = agent.policy(b_obs).gather(1, b_actions[:, None]).squeeze(1).detach()
        clipfracs = []
        for _epoch in range(args.update_epochs):
            for mb in torch.randperm(len(b_obs), device=device).tensor_split(args.num_minibatches):  # [core 6]
                log_probs, value = agent.policy(b_obs[mb]), agent.value(b_obs[mb])
                logratio = log_probs.gather(1, b_actions[mb, None]).squeeze(1) - b_logprobs[mb]
                ratio = logratio.exp()
                advantage = b_advantages[mb]
                if args.norm_adv:  # [core 7]
                    advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)

                clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                policy_loss = -torch.min(advantage * ratio, advantage * clipped_ratio).mean()  # [core 8]
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
                with torch.no_grad():  # [core 12]
                    approx_kl, old_approx_kl = (ratio - 1 - logratio).mean(), -logratio.mean()
                    clipfracs.append(((ratio - 1).abs() > args.clip_coef).float().mean())
            if args.target_kl is not None and approx_kl > args.target_kl:
                break

        # log
        for name, scalar in {
            "charts/learning_rate": optimizer.param_groups[0]["lr"],
            "charts/SPS": int((global_step - start_step) / (time.time() - start_time)),
            "losses/value_loss": value_loss,
            "losses/policy_loss": policy_loss,
            "losses/entropy": entropy,
            "losses/old_approx_kl": old_approx_kl,
            "losses/approx_kl": approx_kl,
            "losses/clipfrac": torch.stack(clipfracs).mean(),
            "losses/explained_variance": 1 - b_advantages.var() / b_returns.var(),
        }.items():
            writer.add_scalar(name, scalar, global_step)

        # checkpoint
        if (iteration + 1) % args.checkpoint_interval == 0 or iteration + 1 == num_iterations:
            checkpoint = {name: part.state_dict() for name, part in parts.items()} | {
                "rng": torch.get_rng_state(),
                "cuda_rng": torch.cuda.get_rng_state_all(),
                "global_step": global_step,
            }
            writer.flush()
            torch.save(checkpoint, run_folder / "checkpoint.tmp")
            os.replace(run_folder / "checkpoint.tmp", run_folder / "checkpoint.pt")  # whole, or not at all
            if args.track:
                for video in set(videos.glob("*.mp4")) - logged_videos:
                    wandb.log({"videos": wandb.Video(str(video)), "global_step": global_step})
                    logged_videos.add(video)

    progress.close()
    envs.close()
    writer.close()
