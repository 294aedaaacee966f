# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "envpool>=1.1; sys_platform == 'linux'", "gymnasium>=1.2.1,<2", "moviepy>=2", "numpy>=2", "tensorboard>=2.20",
#     "torch>=2.9", "tqdm>=4.67", "tyro>=1.0", "wandb>=0.22",
# ]
# ///
"""Proximal Policy Optimization for Atari games, at nearly the speed of EnvPool's emulators.

    uv run cleanrl/ppo_atari_envpool.py                                # Breakout-v5, 10M steps (40M frames)
    uv run cleanrl/ppo_atari_envpool.py --env-id Pong-v5 --num-envs 128
    uv run cleanrl/ppo_atari_envpool.py --sticky                       # sticky actions and full games (Machado et al., 2018)
    uv run cleanrl/ppo_atari_envpool.py --resume runs/<run>            # go on after an interruption
    tensorboard --logdir runs

Numbers in brackets, such as [core 5], are the implementation details explained in docs/rl-algorithms/ppo.md.
"""

import json
import os
import platform
import subprocess
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

import envpool
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

    env_id: str = "Breakout-v5"  # EnvPool's id of the game
    sticky: bool = False  # repeat the last action with probability 0.25, and play on after a lost life
    total_timesteps: int = 10_000_000  # environment steps of the whole run
    learning_rate: float = 2.5e-4  # learning rate at the start
    num_envs: int = 8  # environments stepped side by side
    num_pools: int = 2  # groups of environments: while some are stepped, the network looks at the others
    compile: bool = True  # on a GPU, record acting and learning once and replay them: the same sums, started faster
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


class AtariPool(gym.vector.VectorWrapper):
    """EnvPool's games with the scores of whole games: a lost life ends only the episode [atari 3]."""

    render_mode = "rgb_array"

    def __init__(self, make_pool):
        super().__init__(make_pool(seed=0))
        self.make_pool, next_step = make_pool, gym.vector.AutoresetMode.NEXT_STEP
        self.metadata = {"autoreset_mode": next_step, "render_modes": ["rgb_array"], "render_fps": 15}

    def reset(self, *, seed=None, options=None):
        if seed is not None:  # a pool takes it only when it is made
            self.env = self.make_pool(seed=seed)
        self.scores, (self.obs, infos) = np.zeros(self.num_envs), self.env.reset()
        return self.obs, infos

    def recv(self):
        self.obs, rewards, terminated, truncated, infos = self.env.recv()
        self.scores += rewards
        is_over = infos["terminated"].astype(bool) | truncated  # the game, not only a life
        if is_over.any():
            infos |= {"episode": {"r": self.scores.copy(), "l": infos["elapsed_step"]}, "_episode": is_over}
            self.scores[is_over] = 0
        return self.obs, rewards, terminated, truncated, infos

    def step(self, actions):
        self.env.send(actions)
        return self.recv()

    def render(self):  # what the agents see, in the colors and the size that videos need
        return [frames[-1, :, :, None].repeat(3, 2).repeat(4, 0).repeat(4, 1) for frames in self.obs]


def make_envs(args, num_envs, render_mode=None):
    play = dict(noop_max=30, use_fire_reset=True, repeat_action_probability=0.25 if args.sticky else 0.0)  # [atari 1, 4]
    look = dict(frame_skip=4, gray_scale=True, img_height=84, img_width=84, stack_num=4)  # [atari 2, 5, 7]
    score = dict(episodic_life=not args.sticky, reward_clip=False)  # [atari 3]
    settings = dict(task_id=args.env_id, num_envs=num_envs, **play, **look, **score)  # [core 1]
    return AtariPool(partial(envpool.make_gymnasium, **settings))


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
        "num_pools > 0; num_envs % num_pools == 0; num_steps > 0; num_envs * num_steps % num_minibatches == 0; "
        "total_timesteps >= num_envs * num_steps; 0 <= gamma <= 1; 0 <= gae_lambda <= 1; clip_coef > 0; max_grad_norm > 0; "
        "0 < learning_rate < 1e9; abs(ent_coef) < 1e9; abs(vf_coef) < 1e9; 0 <= seed < 2**32"
    ).split("; "):
        if not eval(rule, {}, vars(args)):
            raise SystemExit(f"these flags do not fit: {rule} must hold")
    try:
        pools = [make_envs(args, args.num_envs // args.num_pools) for _ in range(args.num_pools)]
    except Exception as error:
        raise SystemExit(f"cannot make {args.env_id}: {type(error).__name__}: {error}".splitlines()[0]) from None
    obs_space, action_space = pools[0].single_observation_space, pools[0].single_action_space
    for need, is_met in {
        "Box observations": isinstance(obs_space, gym.spaces.Box),
        "Discrete actions": isinstance(action_space, gym.spaces.Discrete),
        "rgb_array rendering for a video": not args.capture_video,  # pools cannot be wrapped: enjoy makes videos
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
    stream = torch.cuda.Stream() if device.type == "cuda" else None  # what is recorded must not be on the default stream
    torch.cuda.set_stream(stream)
    agent = Agent(pools[0]).to(device)
    learning_rate = torch.tensor(args.learning_rate, device=device)  # what is recorded sees a tensor change, not a number
    optimizer = torch.optim.Adam(agent.parameters(), lr=learning_rate, eps=1e-5, fused=True)  # [core 3]
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
    obs = torch.zeros((args.num_steps + 1, args.num_envs, *obs_space.shape), dtype=torch.uint8, device=device)
    values = torch.zeros((args.num_steps + 1, args.num_envs), device=device)  # one pass of the network gives policy and value
    logprobs = torch.zeros((args.num_steps, args.num_envs), device=device)
    actions = torch.zeros((args.num_steps, args.num_envs), dtype=torch.int64, device=device)
    is_last = np.zeros((args.num_steps + 1, args.num_envs), dtype=bool)  # obs[t] ends an episode: step t will only reset
    rewards = np.zeros((args.num_steps, args.num_envs), dtype=np.float32)
    terminated = np.zeros((args.num_steps, args.num_envs), dtype=bool)
    seen = torch.zeros((pools[0].num_envs, *obs_space.shape), dtype=torch.uint8, device=device)  # what the network looks at
    mb = torch.zeros(batch_size // args.num_minibatches, dtype=torch.int64, device=device)  # rows that are learned from
    b_advantages, b_returns, b_is_real = torch.zeros((3, batch_size), device=device)
    slices = [slice(i, i + pools[0].num_envs) for i in range(0, args.num_envs, pools[0].num_envs)]  # which rows are whose

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

    # train, from new episodes also after a resume
    seeds = np.random.SeedSequence((args.seed, global_step)).generate_state(args.num_pools) // 2  # EnvPool takes 31 bits
    for part, pool, seed in zip(slices, pools, seeds, strict=True):
        obs[-1, part] = torch.from_numpy(pool.reset(seed=int(seed))[0])
    optimizer.param_groups[0].update(lr=learning_rate, capturable=device.type == "cuda")  # also after a restore
    last_returns, act_graph, learn_graph = deque(maxlen=20), None, None
    loop_start, start_step = time.time(), global_step
    progress = tqdm(initial=global_step, total=num_iterations * batch_size, unit="step", unit_scale=True)
    for iteration in range(global_step // batch_size, num_iterations):
        if args.anneal_lr:  # [core 4]
            learning_rate.fill_(args.learning_rate * (1 - iteration / num_iterations))
        record = args.compile and device.type == "cuda" and iteration > start_step // batch_size  # the first one warms up

        # act: for one pool after the other, while the rest are being stepped
        obs[0], is_last[0] = obs[-1], is_last[-1]
        for t in range(args.num_steps + 1):
            for part, pool in zip(slices, pools, strict=True):
                if t > 0:
                    next_obs, scores, terminated[t - 1, part], truncated, infos = pool.recv()
                    obs[t, part] = torch.from_numpy(next_obs)
                    rewards[t - 1, part] = np.sign(scores)  # [atari 6]
                    is_last[t, part] = terminated[t - 1, part] | truncated
                    for i in np.flatnonzero(infos.get("_episode", ())):
                        episodic_return, episodic_length = infos["episode"]["r"][i], infos["episode"]["l"][i]
                        last_returns.append(episodic_return)
                        step = global_step + (t - 1) * args.num_envs + part.start + i + 1
                        writer.add_scalar("charts/episodic_return", episodic_return, step)
                        writer.add_scalar("charts/episodic_length", episodic_length, step)
                        writer.add_scalar("charts/avg_episodic_return", np.mean(last_returns), step)
                        progress.set_postfix(episodic_return=f"{episodic_return:.1f}", refresh=False)
                seen.copy_(obs[t, part])
                if act_graph is None:
                    act_graph = torch.cuda.CUDAGraph() if record else None
                    with torch.no_grad(), torch.cuda.graph(act_graph, stream=stream) if record else nullcontext():
                        act_log_probs, act_value = agent(seen)
                        action = sample(act_log_probs)
                        logprob = act_log_probs.gather(1, action[:, None]).squeeze(1)
                if act_graph is not None:
                    act_graph.replay()
                values[t, part] = act_value
                if t < args.num_steps:
                    actions[t, part], logprobs[t, part] = action, logprob
                    pool.env.send(action.cpu().numpy())
        global_step += batch_size
        progress.update(batch_size)

        # estimate advantages [core 5]: a truncated episode is bootstrapped from its last observation, a terminated one is not
        old_values = values.cpu().numpy()
        deltas = rewards + args.gamma * old_values[1:] * ~terminated - old_values[:-1]
        advantages, advantage = np.zeros_like(rewards), np.float32(0)
        for t in reversed(range(args.num_steps)):
            advantages[t] = advantage = deltas[t] + args.gamma * args.gae_lambda * advantage * ~is_last[t + 1]
        returns = advantages + old_values[:-1]

        # learn, but not from the steps that only reset an environment: their rows weigh nothing
        b_obs, b_actions, b_logprobs, b_values = (x.flatten(0, 1) for x in (obs[:-1], actions, logprobs, values[:-1]))
        for b_x, x in ((b_advantages, advantages), (b_returns, returns), (b_is_real, ~is_last[:-1])):
            b_x.copy_(torch.from_numpy(x).flatten())
        clipfracs = []
        for _epoch in range(args.update_epochs):
            for rows in torch.randperm(batch_size, device=device).view(args.num_minibatches, -1):  # [core 6]
                mb.copy_(rows)
                if learn_graph is None:
                    learn_graph = torch.cuda.CUDAGraph() if record else None
                    with torch.cuda.graph(learn_graph, stream=stream) if record else nullcontext():
                        weights = b_is_real[mb] / b_is_real[mb].sum().clamp(min=1)
                        log_probs, value = agent(b_obs[mb])
                        logratio = log_probs.gather(1, b_actions[mb, None]).squeeze(1) - b_logprobs[mb]
                        ratio = logratio.exp()
                        mb_advantages = b_advantages[mb]
                        if args.norm_adv:  # [core 7]
                            mb_advantages = mb_advantages - (weights * mb_advantages).sum()
                            mb_advantages = mb_advantages / ((weights * mb_advantages**2).sum().sqrt() + 1e-8)

                        clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                        policy_gain = torch.min(mb_advantages * ratio, mb_advantages * clipped_ratio)
                        policy_loss = -(weights * policy_gain).sum()  # [core 8]
                        value_error = (value - b_returns[mb]) ** 2
                        if args.clip_vloss:  # [core 9]
                            clipped_value = b_values[mb] + (value - b_values[mb]).clamp(-args.clip_coef, args.clip_coef)
                            value_error = torch.max(value_error, (clipped_value - b_returns[mb]) ** 2)
                        value_loss = 0.5 * (weights * value_error).sum()
                        entropy = -(weights * (log_probs.exp() * log_probs).sum(1)).sum()
                        loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy  # [core 10]

                        optimizer.zero_grad()
                        loss.backward()
                        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)  # [core 11]
                        optimizer.step()
                        old_approx_kl = -(weights * logratio).sum()  # [core 12]
                        approx_kl = (weights * (ratio - 1 - logratio)).sum()
                        clipfrac = (weights * ((ratio - 1).abs() > args.clip_coef)).sum()
                if learn_graph is not None:
                    learn_graph.replay()
                clipfracs.append(clipfrac.clone())
            if args.target_kl is not None and approx_kl > args.target_kl:
                break

        # log
        for name, scalar in {
            "charts/learning_rate": learning_rate,
            "charts/SPS": int((global_step - start_step) / (time.time() - loop_start)),
            "losses/value_loss": value_loss,
            "losses/policy_loss": policy_loss,
            "losses/entropy": entropy,
            "losses/old_approx_kl": old_approx_kl,
            "losses/approx_kl": approx_kl,
            "losses/clipfrac": torch.stack(clipfracs).mean(),
            "losses/explained_variance": 1 - (b_returns - b_values)[b_is_real > 0].var() / b_returns[b_is_real > 0].var(),
        }.items():
            writer.add_scalar(name, scalar, global_step)

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
    for pool in pools:
        pool.close()
    writer.close()
