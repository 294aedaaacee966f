# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "brax>=0.14.2", "gymnasium>=1.2.1,<2", "jax>=0.9", "mjlab>=1.6", "numpy>=2", "tensorboard>=2.20", "torch>=2.9",
#     "tqdm>=4.67", "tyro>=1.0", "wandb>=0.22",
# ]
# ///
"""Proximal Policy Optimization for environments that live on the GPU and speak tensors, as Isaac Lab's do.

    uv run cleanrl/ppo_continuous_action_isaacgym.py                                    # Brax's Ant, 4096 of them
    uv run cleanrl/ppo_continuous_action_isaacgym.py --env-id Mjlab-Cartpole-Balance    # mjlab: MuJoCo Warp
    python cleanrl/ppo_continuous_action_isaacgym.py --env-id Isaac-Ant-v0              # where Isaac Lab is installed
    uv run cleanrl/ppo_continuous_action_isaacgym.py --resume runs/<run>                # go on after an interruption
    tensorboard --logdir runs

Numbers in brackets, such as [core 5], are the implementation details explained in docs/rl-algorithms/ppo.md, those of
[isaac] in docs/rl-algorithms/ppo-isaacgym.md.
"""

import atexit
import importlib
import json
import math
import os
import platform
import subprocess
import time
from dataclasses import asdict, dataclass
from functools import partial
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
    cuda: bool = True  # use the GPU if there is one, for the environments and for the networks
    track: bool = False  # also log to Weights & Biases
    wandb_project_name: str = "cleanRL"  # project to log to
    wandb_entity: str | None = None  # team to log to
    capture_video: bool = False  # record videos of the first environment into the run's folder
    record_video_step_frequency: int = 1464  # steps of all environments from the start of one video to that of the next
    resume: str | None = None  # folder of an interrupted run to go on with, its flags as they were
    checkpoint_interval: int = 100  # iterations between two checkpoints

    env_id: str = "brax/ant"  # of Brax, mjlab (Mjlab-...), Isaac Lab (Isaac-...), or registered in its way by module:id
    total_timesteps: int = 30_000_000  # environment steps of the whole run
    learning_rate: float = 0.0026  # learning rate at the start
    num_envs: int = 4096  # environments stepped side by side
    num_steps: int = 16  # steps of each environment per iteration
    anneal_lr: bool = False  # lower the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # bias-variance trade-off of the advantage estimate
    num_minibatches: int = 2  # minibatches per epoch
    update_epochs: int = 4  # passes over the rollout per iteration
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.2  # how far the policy may move from the one that acted
    clip_vloss: bool = False  # clip the value's movement the same way
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 2.0  # weight of the value loss
    max_grad_norm: float = 1.0  # global norm the gradient is clipped to
    target_kl: float | None = None  # stop an iteration's epochs once the policy moved this far
    reward_scaler: float = 1.0  # what rewards are multiplied with before anything is learned from them


class BraxEnvs:
    """Brax's environments in Isaac Lab's form: JAX steps them, DLPack hands their arrays over where they are [isaac 5]."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, name, num_envs, device, episode_length=1000):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of the GPU's memory for itself
        if "deterministic" not in os.environ.setdefault("XLA_FLAGS", ""):
            os.environ["XLA_FLAGS"] += " --xla_gpu_deterministic_ops=true"  # the same bits on a GPU too; XLA reads it once
        import brax.envs
        import jax
        import jax.numpy as jnp
        from brax.spring import collisions, joints

        add_up = lambda x, links, n: jnp.tensordot((links == jnp.arange(n)[:, None]) * 1.0, x, 1, precision="highest")  # noqa: E731
        collisions.segment_sum = joints.segment_sum = add_up  # forces by links, in an order that is fixed on a GPU too
        jax.config.update("jax_default_matmul_precision", "highest")  # physics does not bear the few bits that GPUs take
        env, place = brax.envs.get_environment(name, backend="spring"), jax.devices(device.type)[0]
        self.num_envs, self.device, self.from_dlpack = num_envs, device, jax.dlpack.from_dlpack
        self.make_key = lambda seed: jax.device_put(jax.random.PRNGKey(seed), place)

        def look(state):
            obs = state.obs["state"] if isinstance(state.obs, dict) else state.obs  # not what some tell the critic alone
            is_broken = ~(jnp.isfinite(obs).all(-1) & jnp.isfinite(state.reward))  # the simulation has blown up
            return obs, jnp.where(is_broken, 0, state.reward), is_broken | (state.done > 0)

        def start(key, number):
            state = jax.vmap(env.reset)(jax.random.split(jax.random.fold_in(key, number), num_envs))
            return (state, jnp.zeros(num_envs, dtype=jnp.int32)), look(state)[0]

        def step(key, number, world, pool, actions):
            state, lengths = jax.vmap(env.step)(world[0], actions), world[1] + 1
            final_obs, rewards, terminated = look(state)
            is_over = terminated | (lengths >= episode_length)
            places = jnp.roll(jnp.arange(num_envs), jax.random.randint(jax.random.fold_in(key, number), (), 0, num_envs))
            choose = lambda new, old: jnp.where(is_over.reshape(-1, *[1] * (old.ndim - 1)), new[places], old)  # noqa: E731
            world = jax.tree.map(choose, pool, (state, lengths))
            return world, (look(world[0])[0], rewards, terminated, is_over & ~terminated, final_obs)

        self.start, self.advance = jax.jit(start), jax.jit(step)
        obs = jax.eval_shape(start, jax.random.PRNGKey(0), 0)[1]
        self.single_observation_space = gym.spaces.Dict(policy=gym.spaces.Box(-np.inf, np.inf, obs.shape[1:]))
        self.single_action_space = gym.spaces.Box(-1, 1, (env.action_size,))

    def reset(self, seed):
        self.key, self.number = self.make_key(seed), 0
        self.world, obs = self.start(self.key, 0)
        return {"policy": torch.from_dlpack(obs)}, {}

    def step(self, actions):
        self.number += 1
        if self.number % 16 == 1:  # states for episodes to start from: to draw them at every step would cost as much as a step
            self.pool, _ = self.start(self.key, self.number)
        self.world, self.answers = self.advance(self.key, self.number, self.world, self.pool, self.from_dlpack(actions))
        obs, rewards, terminated, truncated, final_obs = map(torch.from_dlpack, self.answers)  # kept while they may be read
        return {"policy": obs}, rewards, terminated, truncated, {"final_obs": {"policy": final_obs}}


class TensorEnvs(gym.vector.VectorEnv):
    """Environments in Isaac Lab's form, whose tensors stay on their device: nothing here waits for them [isaac 1]. A step that
    ends an episode begins the next one, and what it returns is the first observation of that."""

    def __init__(self, env, render_mode):
        self.env, self.num_envs, self.device, self.render_mode = env, env.num_envs, torch.device(env.device), render_mode
        groups, actions = getattr(env.single_observation_space, "spaces", {}), env.single_action_space
        self.group = next((name for name in ("policy", "actor") if name in groups), None)  # not what only a critic may see
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, getattr(groups.get(self.group), "shape", None) or ())
        self.single_action_space, self.low, self.high = actions, None, None
        if hasattr(actions, "low"):
            low, high = (np.broadcast_to(np.float32(bound), actions.shape) for bound in (actions.low, actions.high))
            self.single_action_space = gym.spaces.Box(low, high)
            self.low, self.high = (torch.tensor(bound, device=self.device) for bound in (low, high))
        self.is_finite = getattr(getattr(env, "cfg", None), "is_finite_horizon", False)  # [isaac 6]
        fps, mode = round(env.metadata.get("render_fps", 30)), gym.vector.AutoresetMode.SAME_STEP
        self.metadata = env.metadata | {"render_fps": fps, "autoreset_mode": mode}

    def reset(self, *, seed=None, options=None):
        self.returns, self.lengths = torch.zeros((2, self.num_envs), device=self.device)
        obs, infos = self.env.reset(seed=seed)
        return obs[self.group], infos

    def step(self, actions):
        self.sent = actions.clamp(self.low, self.high)  # [continuous 5]; kept for as long as someone may read it
        obs, rewards, terminated, truncated, infos = self.env.step(self.sent)
        is_over = terminated | truncated
        episode = {"r": self.returns + rewards, "l": self.lengths + 1}
        self.returns, self.lengths = (x.masked_fill(is_over, 0) for x in episode.values())
        infos = {**infos, "episode": episode, "_episode": is_over}
        if "final_obs" in infos:
            infos["final_obs"] = infos["final_obs"][self.group]
        return obs[self.group], rewards, is_over if self.is_finite else terminated, truncated, infos

    def render(self):
        return [self.env.render()] * self.num_envs  # one picture shows them all, or the first

    def close_extras(self, **kwargs):
        getattr(self.env, "close", lambda: None)()


def make_envs(args, num_envs, render_mode=None):
    device = torch.device("cuda:0" if args.cuda and torch.cuda.is_available() else "cpu")
    *modules, env_id = args.env_id.split(":")
    list(map(importlib.import_module, [*modules, "moviepy"] if render_mode else modules))  # beside mjlab that may be missing
    try:
        if env_id.startswith("brax/"):
            return TensorEnvs(BraxEnvs(env_id.removeprefix("brax/"), num_envs, device), render_mode)  # [core 1]
        if env_id.startswith("Mjlab-"):
            import mjlab.tasks  # noqa: F401  which registers them
            from mjlab.envs import ManagerBasedRlEnv
            from mjlab.tasks.registry import load_env_cfg

            make, cfg = partial(ManagerBasedRlEnv, device=str(device)), load_env_cfg(env_id)
        else:
            if env_id.startswith("Isaac-") and env_id not in gym.registry:  # NVIDIA's, which has to run before it is imported
                launcher = importlib.import_module("isaaclab.app").AppLauncher
                atexit.register(launcher(headless=True, enable_cameras=render_mode is not None).app.close)
                importlib.import_module("isaaclab_tasks")
            make, cfg = partial(gym.make, env_id), gym.spec(env_id).kwargs.get("env_cfg_entry_point")
            assert cfg is not None, "it is not registered as Isaac Lab's are, with an env_cfg_entry_point"
            cfg = (gym.envs.registration.load_env_creator(cfg) if isinstance(cfg, str) else cfg)()
            cfg.sim.device, cfg.compute_final_obs = str(device), True  # [isaac 2] which old versions ignore
    except ModuleNotFoundError as error:
        extra = {"brax/": "the extra brax", "Mjlab": "what mjlab.in asks for"}.get(env_id[:5], "Isaac Lab, as NVIDIA tells")
        raise ModuleNotFoundError(f"{error}: install {extra}") from None
    cfg.scene.num_envs, cfg.seed = num_envs, args.seed % 2**31
    return TensorEnvs(make(cfg=cfg, render_mode=render_mode).unwrapped, render_mode)


def layer_init(layer, gain=2**0.5):
    nn.init.orthogonal_(layer.weight, gain)  # [core 2]
    nn.init.zeros_(layer.bias)
    return layer


def mlp(in_dim, out_dim, gain):  # [isaac 4]
    return nn.Sequential(
        layer_init(nn.Linear(in_dim, 256)),
        nn.Tanh(),
        layer_init(nn.Linear(256, 256)),
        nn.Tanh(),
        layer_init(nn.Linear(256, out_dim), gain),
    )


class RunningMoments(nn.Module):
    """Mean and variance of all rows seen so far: in buffers, so that checkpoints hold them."""

    def __init__(self, shape):
        super().__init__()
        for name, value in {"count": torch.zeros(()), "mean": torch.zeros(shape), "var": torch.ones(shape)}.items():
            self.register_buffer(name, value.double())

    def update(self, rows):
        self.count += len(rows)
        share, delta = len(rows) / self.count, rows.mean(0) - self.mean
        self.mean += share * delta
        self.var += share * (rows.var(0, correction=0) - self.var + (1 - share) * delta**2)


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        obs_dim, action_shape = envs.single_observation_space.shape[0], envs.single_action_space.shape
        self.obs_moments = RunningMoments(obs_dim)
        self.actor = mlp(obs_dim, math.prod(action_shape), gain=0.01)  # [core 13] two networks, nothing shared [continuous 4]
        self.logstd = nn.Parameter(torch.zeros(action_shape))  # [continuous 2] the same in every state
        self.critic = mlp(obs_dim, 1, gain=1.0)

    def normalize(self, obs, learn=False):
        obs = obs.double()
        if learn:  # only in training, and from all environments
            self.obs_moments.update(obs)
        normalized = (obs - self.obs_moments.mean) / (self.obs_moments.var + 1e-8).sqrt()  # [continuous 6]
        return normalized.clamp(-10, 10).float()  # [continuous 7]

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
    agent = Agent(envs).to(envs.device)
    agent.load_state_dict(checkpoint["agent"])
    return torch.no_grad()(lambda obs, is_last: sample(agent.policy(agent.normalize(obs)), agent.logstd))


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
        "num_steps > 0; num_minibatches <= num_envs * num_steps; record_video_step_frequency > 0; abs(reward_scaler) < 1e9; "
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
        "flat observations in a group called policy or actor": len(obs_space.shape) == 1,
        "continuous actions": isinstance(action_space, gym.spaces.Box) and np.issubdtype(action_space.dtype, np.floating),
        "rgb_array rendering for a video": not args.capture_video or "rgb_array" in envs.metadata.get("render_modes", ()),
    }.items():
        if not is_met:
            raise SystemExit(f"{Path(__file__).name} needs {need}, which {args.env_id} does not have")

    # seed, build, restore
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic matrix products need on a GPU
    torch.use_deterministic_algorithms(args.torch_deterministic, warn_only=True)  # a simulator may know no other
    torch.utils.deterministic.fill_uninitialized_memory = False  # or all new memory is written twice
    torch.manual_seed(args.seed)
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    inputs = args.num_envs * np.prod(obs_space.shape)  # numbers read at a step; threads pay only from many on
    torch.set_num_threads(torch.get_num_threads() if inputs >= 2**13 else 1)
    device = envs.device
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
    obs = torch.zeros((args.num_steps + 1, args.num_envs, *obs_space.shape), device=device)  # normalized
    last_obs = torch.zeros_like(obs[1:])  # if step t ended an episode, its last observation
    actions = torch.zeros((args.num_steps, args.num_envs, *action_space.shape), device=device)
    rewards, episodic_returns, episodic_lengths = torch.zeros((3, args.num_steps, args.num_envs), device=device)
    terminated, is_over = torch.zeros((2, args.num_steps, args.num_envs), dtype=torch.bool, device=device)

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
        when = dict(step_trigger=lambda step: step % args.record_video_step_frequency == 0, video_length=200)
        names = dict(name_prefix=f"step-{global_step}", record_first_only=True)
        envs = gym.wrappers.vector.RecordVideo(envs, str(videos), **names, **when)

    # train, from new episodes also after a resume
    seed = int(np.random.SeedSequence((args.seed, global_step)).generate_state(1)[0]) // 2
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # simulators seed PyTorch as a whole
        raw_obs, _ = envs.reset(seed=seed)
    obs[-1] = agent.normalize(raw_obs, learn=True)
    loop_start, start_step = time.time(), global_step
    progress = tqdm(initial=global_step, total=num_iterations * batch_size, unit="step", unit_scale=True)
    for iteration in range(global_step // batch_size, num_iterations):
        if args.anneal_lr:  # [core 4]
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # act
        obs[0] = obs[-1]
        for t in range(args.num_steps):
            with torch.no_grad():
                actions[t] = sample(agent.policy(obs[t]), agent.logstd)
            raw_obs, raw_rewards, terminated[t], _, infos = envs.step(actions[t])
            obs[t + 1], rewards[t] = agent.normalize(raw_obs, learn=True), raw_rewards * args.reward_scaler  # [isaac 3]
            is_over[t], episodic_returns[t], episodic_lengths[t] = infos["_episode"], *infos["episode"].values()
            last_obs[t] = agent.normalize(infos["final_obs"]) if "final_obs" in infos else obs[t]  # [isaac 2]
        global_step += batch_size
        progress.update(batch_size)

        # estimate advantages [core 5]: a truncated episode is bootstrapped from its last observation, a terminated one is not
        with torch.no_grad():
            values, last_values = agent.value(obs), agent.value(last_obs)
        next_values = torch.where(is_over, last_values, values[1:]).masked_fill(terminated, 0)
        deltas = rewards + args.gamma * next_values - values[:-1]
        advantages, advantage = torch.zeros_like(rewards), 0
        for t in reversed(range(args.num_steps)):
            advantages[t] = advantage = deltas[t] + args.gamma * args.gae_lambda * advantage * ~is_over[t]
        returns = advantages + values[:-1]

        # learn
        b_obs, b_actions, b_values, b_advantages, b_returns = (
            x.flatten(0, 1) for x in (obs[:-1], actions, values[:-1], advantages, returns)
        )
        b_logprobs = log_prob(agent.policy(b_obs), agent.logstd, b_actions).detach()
        clipfracs = []
        for _epoch in range(args.update_epochs):
            for mb in torch.randperm(len(b_obs), device=device).tensor_split(args.num_minibatches):  # [core 6]
                mean, value = agent.policy(b_obs[mb]), agent.value(b_obs[mb])
                logratio = log_prob(mean, agent.logstd, b_actions[mb]) - b_logprobs[mb]
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

        # log: the only time that an iteration waits for the device [isaac 1]
        losses = {
            "losses/value_loss": value_loss,
            "losses/policy_loss": policy_loss,
            "losses/entropy": entropy,
            "losses/old_approx_kl": old_approx_kl,
            "losses/approx_kl": approx_kl,
            "losses/clipfrac": torch.stack(clipfracs).mean(),
            "losses/explained_variance": 1 - (b_returns - b_values).var() / b_returns.var(),
        }
        successes = infos.get("log", {}).get("consecutive_successes")  # of tasks in which a hand turns things
        if successes is not None:
            losses["charts/consecutive_successes"] = torch.as_tensor(successes, dtype=torch.float32, device=device)
        scalars = dict(zip(losses, torch.stack(list(losses.values())).tolist(), strict=True))
        scalars["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
        scalars["charts/SPS"] = int((global_step - start_step) / (time.time() - loop_start))
        for name, scalar in scalars.items():
            writer.add_scalar(name, scalar, global_step)
        ended, *episodes = torch.stack([is_over, episodic_returns, episodic_lengths]).flatten(1).cpu().numpy()
        for i in np.flatnonzero(ended):
            episodic_return, episodic_length = episodes[0][i], episodes[1][i]
            writer.add_scalar("charts/episodic_return", episodic_return, global_step - batch_size + i + 1)
            writer.add_scalar("charts/episodic_length", episodic_length, global_step - batch_size + i + 1)
            progress.set_postfix(episodic_return=f"{episodic_return:.1f}", refresh=False)
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
