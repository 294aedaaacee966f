# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "envpool>=1.1; sys_platform == 'linux'", "flax>=0.12", "gymnasium>=1.2.1,<2", "jax>=0.9", "moviepy>=2", "numpy>=2",
#     "optax>=0.2.6", "tensorboard>=2.20", "tqdm>=4.67", "tyro>=1.0", "wandb>=0.22",
# ]
# ///
"""Proximal Policy Optimization for Atari games, an iteration as one compiled program, EnvPool's emulators included,
in which loops stay loops.

    uv run cleanrl/ppo_atari_envpool_xla_jax_scan.py                      # Breakout-v5, 10M steps (40M frames)
    uv run cleanrl/ppo_atari_envpool_xla_jax_scan.py --env-id Pong-v5 --num-envs 128
    uv run cleanrl/ppo_atari_envpool_xla_jax_scan.py --sticky             # sticky actions, full games (Machado et al., 2018)
    uv run cleanrl/ppo_atari_envpool_xla_jax_scan.py --resume runs/<run>  # go on after an interruption
    tensorboard --logdir runs

Numbers in brackets, such as [core 5], are the implementation details explained in docs/rl-algorithms/{ppo,ppo-envpool-xla}.md.
"""

import itertools
import json
import os
import platform
import subprocess
import time
from collections import deque
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

if "deterministic" not in os.environ.setdefault("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] += " --xla_gpu_deterministic_ops=true"  # the same bits on a GPU too; XLA reads it once
import envpool
import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax.linen.initializers import orthogonal
from flax.serialization import from_state_dict, msgpack_restore, msgpack_serialize, to_state_dict
from jax.flatten_util import ravel_pytree
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer import event_file_writer
from tqdm import tqdm


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of this experiment
    seed: int = 1  # seed of the weights, the environments and every sampled number
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
    num_steps: int = 128  # steps of each environment per iteration
    anneal_lr: bool = True  # lower the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # bias-variance trade-off of the advantage estimate
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # passes over the rollout per iteration
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.1  # how far the policy may move from the one that acted
    clip_vloss: bool = False  # clip the value's movement the same way
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


plain = partial(jax.lax.conv_general_dilated, padding="VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def convolve_fast(images, kernel, strides):
    """A convolution with a gradient of the one form that XLA has fast code for in a loop on a CPU [xla 7]."""
    return plain(images, kernel, strides)


def pull_back(strides, inputs, grads):
    images, kernel = inputs
    _, plain_pull_back = jax.vjp(partial(plain, window_strides=strides), images, kernel)
    image_grads, kernel_grads = plain_pull_back(grads)
    if jax.default_backend() == "cpu":  # channels take the place of images, and images that of channels
        swapped = plain(images.transpose(3, 1, 2, 0), grads.transpose(1, 2, 0, 3), (1, 1), rhs_dilation=strides)
        kernel_grads = swapped[:, : len(kernel), : len(kernel)].transpose(1, 2, 0, 3)
    return image_grads, kernel_grads


convolve_fast.defvjp(lambda images, kernel, strides: (plain(images, kernel, strides), (images, kernel)), pull_back)


def convolve(images, kernel, strides, *_, **options):  # as flax calls it
    return convolve_fast(images, kernel, strides)


class Agent(nn.Module):
    num_actions: int

    @nn.compact
    def __call__(self, obs):
        features = jnp.moveaxis(obs, 1, -1) / 255  # [atari 9] JAX has the channels last
        for channels, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):  # [atari 8] shared by policy and value
            conv = partial(nn.Conv, kernel_init=orthogonal(2**0.5), conv_general_dilated=convolve)  # [core 2]
            features = nn.relu(conv(channels, (size, size), stride, padding="VALID")(features))
        hidden = nn.relu(nn.Dense(512, kernel_init=orthogonal(2**0.5))(features.reshape(len(obs), -1)))
        log_probs = nn.log_softmax(nn.Dense(self.num_actions, kernel_init=orthogonal(0.01))(hidden))
        return log_probs, nn.Dense(1, kernel_init=orthogonal(1.0))(hidden).squeeze(-1)


def load_policy(checkpoint, envs):
    """The trained policy: a function from observations, and which of them end an episode, to actions."""
    agent, first_action = Agent(int(envs.single_action_space.n)), envs.single_action_space.start
    policy = jax.jit(lambda obs: agent.apply(checkpoint["agent"]["params"], obs)[0])
    jax.eval_shape(policy, np.zeros((1, *envs.single_observation_space.shape)))  # complains of weights that do not fit
    keys = map(jax.random.key, itertools.count())
    return lambda obs, is_last: np.asarray(jax.random.categorical(next(keys), policy(obs))) + first_action


def make_program(args, network):
    """The functions of a run: init(key, obs) -> agent, all that learns; iterate(step, agent, world, iteration) -> agent,
    world, logs, with EnvPool's step inside."""
    optimizer = optax.chain(optax.clip_by_global_norm(args.max_grad_norm), optax.scale_by_adam(eps=1e-5))  # [core 3, 11]
    batch_size, names = args.num_envs * args.num_steps, ("loss", "value_loss", "policy_loss", "entropy")
    num_iterations, names = args.total_timesteps // batch_size, (*names, "old_approx_kl", "approx_kl", "clipfrac", "updates")

    def init(key, obs):
        params = network.init(key, obs)
        return dict(params=params, opt_state=optimizer.init(ravel_pytree(params)[0]))

    def act(step, params, world, noise):
        """One step of all environments, whose handle leads from each to the next and so keeps them in order [xla 1]."""
        log_probs, values = network.apply(params, world["obs"])
        actions = (log_probs + noise).argmax(-1)  # a sample, since the noise is Gumbel's
        logprobs = jnp.take_along_axis(log_probs, actions[:, None], 1).squeeze(1)
        handle, (obs, rewards, terminated, truncated, infos) = step(world["handle"], actions)
        scores, is_over = world["scores"] + rewards, infos["terminated"].astype(bool) | truncated  # the game, not only a life
        row = world["obs"], actions, logprobs, values, jnp.sign(rewards), terminated, world["is_last"]  # [atari 6]
        world = dict(handle=handle, obs=obs, is_last=terminated | truncated, scores=scores * ~is_over)
        return world, (row, (is_over, scores, infos["elapsed_step"]))  # [xla 3]

    def estimate(values, rewards, terminated, is_last):
        """Advantages [core 5]: a truncated episode is bootstrapped from its last observation, a terminated one is not."""
        deltas = rewards + args.gamma * values[1:] * ~terminated - values[:-1]

        def accumulate(advantage, row):
            delta, is_end = row
            advantage = delta + args.gamma * args.gae_lambda * advantage * ~is_end
            return advantage, advantage

        return jax.lax.scan(accumulate, jnp.zeros(args.num_envs), (deltas, is_last[1:]), reverse=True)[1]

    def loss(params, minibatch):
        """Steps that only reset an environment are among the rows and weigh nothing [xla 4]."""
        obs, actions, logprobs, values, advantages, returns, is_real = minibatch
        weights = is_real / jnp.maximum(is_real.sum(), 1)
        log_probs, value = network.apply(params, obs)
        logratio = jnp.take_along_axis(log_probs, actions[:, None], 1).squeeze(1) - logprobs
        ratio = jnp.exp(logratio)
        if args.norm_adv:  # [core 7]
            advantages = advantages - (weights * advantages).sum()
            advantages = advantages / (jnp.sqrt((weights * advantages**2).sum()) + 1e-8)
        clipped_ratio = ratio.clip(1 - args.clip_coef, 1 + args.clip_coef)
        policy_loss = -(weights * jnp.minimum(advantages * ratio, advantages * clipped_ratio)).sum()  # [core 8]
        value_error = jnp.square(value - returns)
        if args.clip_vloss:  # [core 9]
            clipped_value = values + (value - values).clip(-args.clip_coef, args.clip_coef)
            value_error = jnp.maximum(value_error, jnp.square(clipped_value - returns))
        value_loss = 0.5 * (weights * value_error).sum()
        entropy = -(weights * (jnp.exp(log_probs) * log_probs).sum(1)).sum()
        total = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy  # [core 10]
        losses = {"loss": total, "value_loss": value_loss, "policy_loss": policy_loss, "entropy": entropy}
        losses |= {"old_approx_kl": -(weights * logratio).sum()}  # [core 12]
        losses |= {"approx_kl": (weights * (ratio - 1 - logratio)).sum()}
        return total, losses | {"clipfrac": (weights * (jnp.abs(ratio - 1) > args.clip_coef)).sum()}

    def iterate(step, agent, world, iteration):
        # act
        noise_key, order_key = jax.random.split(jax.random.fold_in(jax.random.key(args.seed), iteration))
        noise = jax.random.gumbel(noise_key, (args.num_steps, args.num_envs, network.num_actions))
        step_all = partial(act, step, agent["params"])
        world, (rollout, games) = jax.lax.scan(step_all, world, noise)  # this and the other loops stay loops [xla 2]
        obs, actions, logprobs, values, rewards, terminated, is_last = rollout
        last_value, is_real = network.apply(agent["params"], world["obs"])[1], ~is_last
        values, is_last = jnp.append(values, last_value[None], 0), jnp.append(is_last, world["is_last"][None], 0)
        advantages = estimate(values, rewards, terminated, is_last)

        # learn from minibatches of rows in a new order each epoch [core 6]
        returns, values = advantages + values[:-1], values[:-1]
        batch = obs, actions, logprobs, values, advantages, returns, is_real
        batch = jax.tree.map(lambda x: x.reshape(batch_size, *x.shape[2:]), batch)
        orders = jax.vmap(lambda key: jax.random.permutation(key, batch_size))(jax.random.split(order_key, args.update_epochs))
        learning_rate = args.learning_rate * (1 - args.anneal_lr * iteration / num_iterations)  # [core 4]
        flat, unravel = ravel_pytree(agent["params"])  # Adam is faster on one long vector

        def update(state, rows):
            flat, opt_state, losses, is_near = state
            minibatch = jax.tree.map(lambda x: x[rows], batch)
            grads, new = jax.grad(lambda flat: loss(unravel(flat), minibatch), has_aux=True)(flat)
            updates, opt_state = optimizer.update(grads, opt_state)
            new |= {"clipfrac": losses["clipfrac"] + new["clipfrac"], "updates": losses["updates"] + 1}
            return flat - learning_rate * updates, opt_state, new, is_near

        def learn(state, rows):
            if args.target_kl is None:
                return update(state, rows)
            return jax.lax.cond(state[3], update, lambda state, rows: state, state, rows)  # once too far, no more [xla 5]

        def end_epoch(state):
            flat, opt_state, losses, is_near = state
            is_far = losses["approx_kl"] > (jnp.inf if args.target_kl is None else args.target_kl)
            return flat, opt_state, losses, is_near & ~is_far

        state = flat, agent["opt_state"], dict.fromkeys(names, jnp.zeros(())), jnp.array(True)
        minibatches = lambda state, rows: (learn(state, rows), None)  # noqa: E731
        epochs = lambda state, rows: (end_epoch(jax.lax.scan(minibatches, state, rows)[0]), None)  # noqa: E731
        state, _ = jax.lax.scan(epochs, state, orders.reshape(args.update_epochs, args.num_minibatches, -1))
        flat, opt_state, losses, _ = state
        losses |= {"clipfrac": losses["clipfrac"] / losses.pop("updates")}
        weights = is_real / jnp.maximum(is_real.sum(), 1)
        variance = lambda x: (weights * jnp.square(x - (weights * x).sum())).sum()  # noqa: E731
        losses |= {"explained_variance": 1 - variance(advantages) / variance(returns)}
        metrics = {"charts/learning_rate": learning_rate} | {f"losses/{name}": x for name, x in losses.items()}
        return dict(params=unravel(flat), opt_state=opt_state), world, (metrics, games)

    return init, iterate


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
        "num_steps > 0; num_envs * num_steps % num_minibatches == 0; total_timesteps >= num_envs * num_steps; "
        "0 <= gamma <= 1; 0 <= gae_lambda <= 1; clip_coef > 0; max_grad_norm > 0; 0 < learning_rate < 1e9; "
        "abs(ent_coef) < 1e9; abs(vf_coef) < 1e9; 0 <= seed < 2**32"
    ).split("; "):
        if not eval(rule, {}, vars(args)):
            raise SystemExit(f"these flags do not fit: {rule} must hold")
    try:
        envs = make_envs(args, args.num_envs)
    except Exception as error:
        raise SystemExit(f"cannot make {args.env_id}: {type(error).__name__}: {error}".splitlines()[0]) from None
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    for need, is_met in {
        "Box observations": isinstance(obs_space, gym.spaces.Box),
        "Discrete actions": isinstance(action_space, gym.spaces.Discrete),
        "rgb_array rendering for a video": not args.capture_video,  # pools cannot be wrapped: enjoy makes videos
    }.items():
        if not is_met:
            raise SystemExit(f"{Path(__file__).name} needs {need}, which {args.env_id} does not have")

    # seed, build, restore
    jax.config.update("jax_platforms", None if args.cuda else "cpu")
    batch_size, global_step = args.num_envs * args.num_steps, 0
    num_iterations = args.total_timesteps // batch_size
    init, iterate = make_program(args, Agent(int(action_space.n)))
    init = jax.jit(init, compiler_options={"xla_backend_optimization_level": 0})  # quick to compile
    agent = init(jax.random.key(args.seed), np.zeros((1, *obs_space.shape), dtype=np.uint8))
    if resume is not None and (run_folder / "checkpoint.msgpack").exists():
        try:
            checkpoint = msgpack_restore((run_folder / "checkpoint.msgpack").read_bytes())
            restored = from_state_dict(agent, checkpoint["agent"])
            for old, new in zip(jax.tree.leaves(agent), jax.tree.leaves(restored), strict=True):
                assert (old.shape, old.dtype) == (new.shape, new.dtype), "arrays of other shapes"
            agent, global_step = jax.tree.map(jnp.array, restored), int(checkpoint["global_step"])
            assert global_step in range(0, num_iterations * batch_size + 1, batch_size), f"step {global_step} of another run"
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
        "device": jax.devices()[0].device_kind if jax.default_backend() == "gpu" else platform.machine(),
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
    writer = event_file_writer.EventFileWriter(str(run_folder))
    start = SessionLog(status=SessionLog.START)  # hides what was logged after the checkpoint
    writer.add_event(Event(wall_time=time.time(), step=global_step + 1, session_log=start))

    def log(step, scalars):  # one event for all of them
        values = [Summary.Value(tag=name, simple_value=float(scalar)) for name, scalar in scalars.items()]
        writer.add_event(Event(wall_time=time.time(), step=int(step), summary=Summary(value=values)))

    # train, from new episodes also after a resume
    seed = np.random.SeedSequence((args.seed, global_step)).generate_state(1)[0] // 2  # EnvPool takes 31 bits
    obs, _ = envs.reset(seed=int(seed))  # [core 1]
    handle, _, _, step = envs.env.xla()
    world = dict(handle=handle, obs=obs, is_last=np.zeros(args.num_envs, bool), scores=np.zeros(args.num_envs, np.float32))
    world, first_iteration = jax.tree.map(jnp.array, world), global_step // batch_size
    program = jax.jit(partial(iterate, step), donate_argnums=0)
    program = program.lower(agent, world, first_iteration).compile()  # before the clock starts [xla 6]
    last_games = deque(maxlen=20)
    loop_start, start_step = time.time(), global_step
    progress = tqdm(initial=global_step, total=num_iterations * batch_size, unit="step", unit_scale=True)
    for iteration in range(first_iteration, num_iterations):
        # act, estimate advantages and learn, in one call of the program
        iteration_start = time.time()
        agent, world, logs = program(agent, world, iteration)
        metrics, (is_over, returns, lengths) = jax.device_get(logs)
        global_step += batch_size
        progress.update(batch_size)

        # log
        for t, i in np.argwhere(is_over):
            last_games.append((returns[t, i], lengths[t, i]))
            (episodic_return, episodic_length), averages = last_games[-1], np.mean(last_games, 0)
            episode = {"charts/episodic_return": episodic_return, "charts/episodic_length": episodic_length}
            episode |= {"charts/avg_episodic_return": averages[0], "charts/avg_episodic_length": averages[1]}
            log(global_step - batch_size + t * args.num_envs + i + 1, episode)
            progress.set_postfix(episodic_return=f"{episodic_return:.1f}", refresh=False)
        metrics["charts/SPS"] = int((global_step - start_step) / (time.time() - loop_start))
        metrics["charts/SPS_update"] = int(batch_size / (time.time() - iteration_start))  # of this iteration alone
        log(global_step, metrics)

        # checkpoint
        if (iteration + 1) % args.checkpoint_interval == 0 or iteration + 1 == num_iterations:
            checkpoint = to_state_dict({"agent": jax.device_get(agent), "global_step": global_step})
            writer.flush()  # the curves reach as far as the checkpoint
            (run_folder / "checkpoint.tmp").unlink(missing_ok=True)  # never write through a stranger's link
            (run_folder / "checkpoint.tmp").write_bytes(msgpack_serialize(checkpoint))
            os.replace(run_folder / "checkpoint.tmp", run_folder / "checkpoint.msgpack")  # whole, or not at all

    progress.close()
    envs.close()
    writer.close()
