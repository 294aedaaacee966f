# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "ale-py>=0.11", "gymnasium>=1.2.1,<2", "moviepy>=2", "numpy>=2", "tensorboard>=2.20",
#     "torch>=2.9", "tqdm>=4.67", "tyro>=1.0", "wandb>=0.22",
# ]
# ///
"""Proximal Policy Optimization for Atari games.

    uv run cleanrl/ppo_atari.py                                # BreakoutNoFrameskip-v4, 10M steps (40M frames)
    uv run cleanrl/ppo_atari.py --env-id PongNoFrameskip-v4 --seed 2
    uv run cleanrl/ppo_atari.py --sticky                       # sticky actions and full games (Machado et al., 2018)
    uv run cleanrl/ppo_atari.py --resume runs/<run>            # go on after an interruption
    tensorboard --logdir runs

Numbers in brackets, such as [core 5], are the implementation details explained in docs/rl-algorithms/ppo.md.
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
    checkpoint_interval: int = 100  # iterations between two checkpoints

    env_id: str = "BreakoutNoFrameskip-v4"  # Gymnasium id of the game, also as in ALE/Breakout-v5
    sticky: bool = False  # repeat the last action with probability 0.25, and play on after a lost life
    total_timesteps: int = 10_000_000  # environment steps of the whole run
    learning_rate: float = 2.5e-4  # learning rate at the start
    num_envs: int = 8  # environments stepped side by side
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
    envs = gym.make_vec(env_id, num_envs, "vector_entry_point", **play, **look, reward_clipping=False)  # [core 1]
    return AtariLives(gym.wrappers.vector.RecordEpisodeStatistics(envs), lives_count=not args.sticky)


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
        hidden = self.network(obs / 255)  # [atari 9]
        return self.actor(hidden).log_softmax(-1), self.critic(hidden).squeeze(-1)


def sample(log_probs):
    """An action for each row: where log-probabilities plus Gumbel noise (-log of exponential noise) peak is a sample."""
    return (log_probs - torch.empty_like(log_probs).exponential_().log()).argmax(-1)


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
        "num_minibatches <= num_envs * (num_steps // 2); "  # every other step may be a reset, which is not learned from
        "total_timesteps >= num_envs * num_steps; 0 <= gamma <= 1; 0 <= gae_lambda <= 1; clip_coef > 0; max_grad_norm > 0; "
        "0 < learning_rate < 1e9; abs(ent_coef) < 1e9; abs(vf_coef) < 1e9; 0 <= seed < 2**32"
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
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1 if device.type == "cuda" else torch.get_num_threads())  # idle ones would be in the emulators' way
    agent = Agent(envs).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)  # [core 3]
    parts, global_step = {"agent": agent, "optimizer": optimizer}, 0
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
                writer.add_scalar("charts/episodic_return", episodic_return, global_step - args.num_envs + i + 1)
                writer.add_scalar("charts/episodic_length", episodic_length, global_step - args.num_envs + i + 1)
                progress.set_postfix(episodic_return=f"{episodic_return:.1f}", refresh=False)
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
