# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "envpool>=1.1; sys_platform == 'linux'", "gymnasium>=1.2.1,<2", "moviepy>=2", "numpy>=2",
#     "pyqt5-qt5>=5.15; sys_platform == 'linux' and python_version < '3.12'", "tensorboard>=2.20", "torch>=2.9", "tqdm>=4.67",
#     "tyro>=1.0", "wandb>=0.22",
# ]
# ///
"""Phasic Policy Gradient for Procgen's games: PPO, and now and then a phase that teaches the values to the policy's network.

    uv run cleanrl/ppg_procgen.py                                      # starpilot, easy levels, 25M steps
    uv run cleanrl/ppg_procgen.py --env-id bigfish --distribution-mode hard
    uv run cleanrl/ppg_procgen.py --num-levels 200                     # see only 200 of the levels
    uv run cleanrl/ppg_procgen.py --resume runs/<run>                  # go on after an interruption
    tensorboard --logdir runs

Numbers in brackets, such as [ppg 2], are the implementation details explained in docs/rl-algorithms/ppg.md, and those of
[core], [atari] and [continuous] in docs/rl-algorithms/ppo.md.
"""

import ctypes
import json
import os
import platform
import subprocess
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib import reload
from importlib.metadata import distributions
from importlib.util import find_spec
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
    checkpoint_interval: int = 1  # policy phases, each with its auxiliary phase, between two checkpoints

    env_id: str = "starpilot"  # Procgen's name of the game
    distribution_mode: str = "easy"  # which of its levels: easy, hard, extreme, memory or exploration
    num_levels: int = 0  # how many of them there are to play; 0 for all, which are some 2 billion
    total_timesteps: int = 25_000_000  # environment steps of the whole run
    learning_rate: float = 5e-4  # learning rate at the start
    num_envs: int = 64  # environments stepped side by side
    num_pools: int = 2  # groups of environments: while some are stepped, the network looks at the others
    compile: bool = True  # on a GPU, record acting once and replay it: the same sums, started faster
    num_steps: int = 256  # steps of each environment per iteration
    anneal_lr: bool = False  # lower the learning rate linearly to 0
    gamma: float = 0.999  # discount factor
    gae_lambda: float = 0.95  # bias-variance trade-off of the advantage estimate
    num_minibatches: int = 8  # minibatches per epoch
    adv_norm_fullbatch: bool = True  # normalize the advantages of each rollout
    clip_coef: float = 0.2  # how far the policy may move from the one that acted
    clip_vloss: bool = True  # clip the value's movement the same way
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # global norm the gradient is clipped to
    target_kl: float | None = None  # stop an iteration's epochs once the policy moved this far
    n_iteration: int = 32  # iterations of a policy phase
    e_policy: int = 1  # passes over the rollout per iteration, for the policy
    v_value: int = 1  # passes over the rollout per iteration, for the value
    e_auxiliary: int = 6  # passes over all rollouts of a policy phase in its auxiliary phase
    beta_clone: float = 1.0  # there, weight of keeping the policy as it was
    num_aux_rollouts: int = 4  # there, rollouts of one environment each per minibatch
    n_aux_grad_accum: int = 1  # there, minibatches per update


class ProcgenPool(gym.vector.VectorWrapper):
    """EnvPool's games with the scores of whole episodes."""

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
        is_over = terminated | truncated
        if is_over.any():
            infos |= {"episode": {"r": self.scores.copy(), "l": infos["elapsed_step"]}, "_episode": is_over}
            self.scores[is_over] = 0
        return self.obs, rewards, terminated, truncated, infos

    def step(self, actions):
        self.env.send(actions)
        return self.recv()

    def render(self):  # what the agents see, in a size that can be watched
        return [image.transpose(1, 2, 0).repeat(4, 0).repeat(4, 1) for image in self.obs]


def load_qt():
    """Procgen draws with Qt. From Python 3.12 on EnvPool has it inside; before, PyQt5-Qt5 has it, so that pip is enough."""
    if "ProcgenEnvSpec" not in vars(envpool.procgen) and (qt := find_spec("PyQt5")):
        for name in ("icudata.so.56", "icuuc.so.56", "icui18n.so.56", "Qt5Core.so.5", "Qt5Gui.so.5"):
            ctypes.CDLL(f"{qt.submodule_search_locations[0]}/Qt5/lib/lib{name}", ctypes.RTLD_GLOBAL)
        reload(envpool.procgen)  # which has looked for it in vain


def make_envs(args, num_envs, render_mode=None):
    load_qt()
    task_id = f"{args.env_id.capitalize()}{args.distribution_mode.capitalize()}-v0"  # such as StarpilotEasy-v0
    settings = dict(task_id=task_id, num_envs=num_envs, num_levels=args.num_levels)  # [core 1] [procgen 1]
    return ProcgenPool(partial(envpool.make_gymnasium, **settings))


@torch.no_grad()
def layer_init(layer, scale=1.0):
    rows = layer.weight.flatten(1)  # one for each output
    rows *= scale / rows.norm(dim=1, keepdim=True)  # [procgen 3]
    nn.init.zeros_(layer.bias)
    return layer


class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        scale = 6**-0.25  # six blocks of two layers each: together they add as much as they are given
        self.conv0 = layer_init(nn.Conv2d(channels, channels, 3, padding=1), scale)
        self.conv1 = layer_init(nn.Conv2d(channels, channels, 3, padding=1), scale)

    def forward(self, x):
        return x + self.conv1(self.conv0(x.relu()).relu())


def impala_cnn(channels):
    layers = []
    for width in (16, 32, 32):  # [procgen 2]
        layers += [layer_init(nn.Conv2d(channels, width, 3, padding=1)), nn.MaxPool2d(3, stride=2, padding=1)]
        layers += [ResidualBlock(width), ResidualBlock(width)]
        channels = width
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), layer_init(nn.Linear(32 * 8 * 8, 256), 1.4), nn.ReLU())


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
        self.network = impala_cnn(envs.single_observation_space.shape[0])
        self.actor = layer_init(nn.Linear(256, int(envs.single_action_space.n)), 0.1)
        self.critic = layer_init(nn.Linear(256, 1), 0.1)
        self.aux_critic = layer_init(nn.Linear(256, 1), 0.1)  # [ppg 2]

    def forward(self, obs):
        hidden = self.network(obs / 255)  # [atari 9]
        values = self.critic(hidden.detach()), self.aux_critic(hidden)  # [ppg 1]
        return self.actor(hidden).log_softmax(-1), *(value.squeeze(-1) for value in values)


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
        "num_envs > 0; num_minibatches > 0; e_policy > 0; v_value > 0; checkpoint_interval > 0; num_envs * num_steps < 2**31; "
        "num_pools > 0; num_envs % num_pools == 0; num_steps > 0; num_envs * num_steps % num_minibatches == 0; "
        "total_timesteps >= num_envs * num_steps; 0 <= gamma <= 1; 0 <= gae_lambda <= 1; clip_coef > 0; max_grad_norm > 0; "
        "0 < learning_rate < 1e9; abs(ent_coef) < 1e9; abs(vf_coef) < 1e9; 0 <= seed < 2**32; 0 <= num_levels < 2**31; "
        "distribution_mode in ('easy', 'hard', 'extreme', 'memory', 'exploration'); n_iteration > 0; e_auxiliary > 0; "
        "0 <= beta_clone < 1e9; num_aux_rollouts > 0; n_aux_grad_accum > 0; "
        "n_iteration * num_envs % (num_aux_rollouts * n_aux_grad_accum) == 0"
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
    aux_bytes = args.n_iteration * args.num_steps * args.num_envs * int(np.prod(obs_space.shape))
    if aux_bytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise SystemExit(f"the images of {args.n_iteration} iterations take {aux_bytes / 1e9:.1f} GB, more than there is here")

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
    agent, return_moments = Agent(pools[0]).to(device), RunningMoments(())
    learning_rate = torch.tensor(args.learning_rate, device=device)  # what is recorded sees a tensor change, not a number
    optimizer = torch.optim.Adam(agent.parameters(), lr=learning_rate, eps=1e-8, fused=True)  # [ppg 3]
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
            is_end = global_step == num_iterations * batch_size or global_step % (args.n_iteration * batch_size) == 0
            assert is_end and 0 <= global_step <= num_iterations * batch_size, f"step {global_step} of another run"
        except Exception as error:
            raise SystemExit(f"cannot resume {resume}: {type(error).__name__}: {error}".splitlines()[0]) from None

    # the rollout: row t is what the agent saw and did at step t, and what the environments answered
    obs = torch.zeros((args.num_steps + 1, args.num_envs, *obs_space.shape), dtype=torch.uint8, device=device)
    values = torch.zeros((args.num_steps + 1, args.num_envs), device=device)  # one pass of the network gives policy and value
    logprobs = torch.zeros((args.num_steps, args.num_envs), device=device)
    actions = torch.zeros((args.num_steps, args.num_envs), dtype=torch.int64, device=device)
    is_last = np.zeros((args.num_steps + 1, args.num_envs), dtype=bool)  # obs[t] ends an episode: step t will only reset
    rewards = np.zeros((args.num_steps, args.num_envs), dtype=np.float32)
    discounted = np.zeros((args.num_steps + 1, args.num_envs), dtype=np.float32)  # sum of the episode's rewards so far
    terminated = np.zeros((args.num_steps, args.num_envs), dtype=bool)
    seen = torch.zeros((pools[0].num_envs, *obs_space.shape), dtype=torch.uint8, device=device)  # what the network looks at
    b_advantages, b_returns, b_is_real = torch.zeros((3, batch_size), device=device)
    slices = [slice(i, i + pools[0].num_envs) for i in range(0, args.num_envs, pools[0].num_envs)]  # which rows are whose

    # what a policy phase leaves for its auxiliary phase: a row for each rollout of one environment, images as bytes [ppg 9]
    num_rollouts, gpu_bytes = args.n_iteration * args.num_envs, torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0
    aux_device = device if 2 * aux_bytes < gpu_bytes else "cpu"  # in reach of the network if there is room
    aux_obs = torch.zeros((num_rollouts, args.num_steps, *obs_space.shape), dtype=torch.uint8, device=aux_device)
    aux_returns, aux_is_real = torch.zeros((2, num_rollouts, args.num_steps), device=device)
    aux_log_probs = torch.zeros((num_rollouts, args.num_steps, int(action_space.n)), device=device)

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
    act_graph = None
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
                    next_obs, rewards[t - 1, part], terminated[t - 1, part], truncated, infos = pool.recv()
                    obs[t, part] = torch.from_numpy(next_obs)
                    is_last[t, part] = terminated[t - 1, part] | truncated
                    for i in np.flatnonzero(infos.get("_episode", ())):
                        episodic_return, episodic_length = infos["episode"]["r"][i], infos["episode"]["l"][i]
                        step = global_step + (t - 1) * args.num_envs + part.start + i + 1
                        writer.add_scalar("charts/episodic_return", episodic_return, step)
                        writer.add_scalar("charts/episodic_length", episodic_length, step)
                        progress.set_postfix(episodic_return=f"{episodic_return:.1f}", refresh=False)
                seen.copy_(obs[t, part])
                if act_graph is None:
                    act_graph = torch.cuda.CUDAGraph() if record else None
                    with torch.no_grad(), torch.cuda.graph(act_graph, stream=stream) if record else nullcontext():
                        act_log_probs, act_value, _ = agent(seen)
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

        # scale rewards [continuous 8, 9]: by the spread of the discounted sums, which start anew with each episode
        discounted[0] = discounted[-1]
        for t in range(args.num_steps):
            discounted[t + 1] = (rewards[t] + args.gamma * discounted[t]) * ~is_last[t]
        return_moments.update(discounted[1:][~is_last[:-1]])
        scaled_rewards = (rewards / return_moments.var.add(1e-8).sqrt().item()).clip(-10, 10)

        # estimate advantages [core 5]: a truncated episode is bootstrapped from its last observation, a terminated one is not
        old_values = values.cpu().numpy()
        deltas = scaled_rewards + args.gamma * old_values[1:] * ~terminated - old_values[:-1]
        advantages, advantage = np.zeros_like(rewards), np.float32(0)
        for t in reversed(range(args.num_steps)):
            advantages[t] = advantage = deltas[t] + args.gamma * args.gae_lambda * advantage * ~is_last[t + 1]
        returns = advantages + old_values[:-1]

        # learn, but not from the steps that only reset an environment: their rows weigh nothing
        b_obs, b_actions, b_logprobs, b_values = (x.flatten(0, 1) for x in (obs[:-1], actions, logprobs, values[:-1]))
        for b_x, x in ((b_advantages, advantages), (b_returns, returns), (b_is_real, ~is_last[:-1])):
            b_x.copy_(torch.from_numpy(x).flatten())
        if args.adv_norm_fullbatch:  # [ppg 4]
            b_advantages -= b_advantages[b_is_real > 0].mean()
            b_advantages /= b_advantages[b_is_real > 0].std(correction=0) + 1e-8
        clipfracs = []
        for epoch in range(max(args.e_policy, args.v_value)):
            for mb in torch.randperm(batch_size, device=device).view(args.num_minibatches, -1):  # [core 6]
                weights = b_is_real[mb] / b_is_real[mb].sum().clamp(min=1)
                log_probs, value, _ = agent(b_obs[mb])
                logratio = log_probs.gather(1, b_actions[mb, None]).squeeze(1) - b_logprobs[mb]
                ratio = logratio.exp()
                mb_advantages = b_advantages[mb]

                clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                policy_gain = torch.min(mb_advantages * ratio, mb_advantages * clipped_ratio)
                policy_loss = -(weights * policy_gain).sum()  # [core 8]
                value_error = (value - b_returns[mb]) ** 2
                if args.clip_vloss:  # [core 9]
                    clipped_value = b_values[mb] + (value - b_values[mb]).clamp(-args.clip_coef, args.clip_coef)
                    value_error = torch.max(value_error, (clipped_value - b_returns[mb]) ** 2)
                value_loss = 0.5 * (weights * value_error).sum()
                entropy = -(weights * (log_probs.exp() * log_probs).sum(1)).sum()
                loss = 0  # [ppg 5]
                if epoch < args.e_policy:
                    loss = loss + policy_loss - args.ent_coef * entropy
                if epoch < args.v_value:
                    loss = loss + args.vf_coef * value_loss

                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)  # [core 11]
                optimizer.step()
                old_approx_kl = -(weights * logratio).sum()  # [core 12]
                approx_kl = (weights * (ratio - 1 - logratio)).sum()
                clipfrac = (weights * ((ratio - 1).abs() > args.clip_coef)).sum()
                clipfracs.append(clipfrac)
            if args.target_kl is not None and approx_kl > args.target_kl:
                break

        # keep the rollouts of this iteration
        kept = slice(iteration % args.n_iteration * args.num_envs, (iteration % args.n_iteration + 1) * args.num_envs)
        for aux_x, x in ((aux_obs, obs[:-1]), (aux_returns, b_returns), (aux_is_real, b_is_real)):
            aux_x[kept] = x.view(args.num_steps, args.num_envs, *aux_x.shape[2:]).transpose(0, 1)

        # distill [ppg 6]: the network learns the values of all rollouts of the policy phase, and keeps its policy
        aux_losses = {}
        if (iteration + 1) % args.n_iteration == 0:
            for rows in torch.arange(num_rollouts).split(args.num_aux_rollouts):
                with torch.no_grad():
                    aux_log_probs[rows] = agent(aux_obs[rows].to(device).flatten(0, 1))[0].unflatten(0, (len(rows), -1))
            for _epoch in range(args.e_auxiliary):
                for i, rows in enumerate(torch.randperm(num_rollouts).split(args.num_aux_rollouts)):  # [ppg 8] whole rollouts
                    weights = aux_is_real[rows].flatten() / aux_is_real[rows].sum().clamp(min=1)
                    log_probs, value, aux_value = agent(aux_obs[rows].to(device).flatten(0, 1))
                    old_log_probs, targets = aux_log_probs[rows].flatten(0, 1), aux_returns[rows].flatten()
                    aux_value_loss = 0.5 * (weights * (aux_value - targets) ** 2).sum()
                    real_value_loss = 0.5 * (weights * (value - targets) ** 2).sum()
                    kl_loss = (weights * (old_log_probs.exp() * (old_log_probs - log_probs)).sum(1)).sum()  # [ppg 7]
                    loss = aux_value_loss + real_value_loss + args.beta_clone * kl_loss

                    if i % args.n_aux_grad_accum == 0:
                        optimizer.zero_grad()
                    (loss / args.n_aux_grad_accum).backward()
                    if (i + 1) % args.n_aux_grad_accum == 0:
                        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                        optimizer.step()
            aux_losses = {"aux_value_loss": aux_value_loss, "real_value_loss": real_value_loss, "kl_loss": kl_loss}

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
            **{f"losses/aux/{name}": aux_loss for name, aux_loss in aux_losses.items()},
        }.items():
            writer.add_scalar(name, scalar, global_step)

        # checkpoint, only where nothing of a policy phase waits for its auxiliary phase
        if (iteration + 1) % (args.checkpoint_interval * args.n_iteration) == 0 or iteration + 1 == num_iterations:
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
