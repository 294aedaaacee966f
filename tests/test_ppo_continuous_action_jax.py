"""cleanrl/ppo_continuous_action_jax.py.

test_physics_N guards detail N of docs/rl-algorithms/ppo-continuous-action-jax.md, the others those
of ppo.md; tests/mutations shows that each test can fail. Compiling takes longer than everything
else here: so tests share a program, which is compiled once for each file.
"""

import functools
import os
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import brax.envs
import brax.spring.collisions
import brax.spring.joints
import gymnasium as gym
import jax
import numpy as np
import pytest
import torch

import tests.brax_probes  # noqa: F401  registers them
from tests.harness import FILES, about, only_run, read_checkpoint, same, scalars
from tests.test_dqn_jax import compiled_quickly, leaves, play, train, without_speed


def begin(file, *flags):
    """The flags, a run that has not begun, and a function that takes it an iteration further."""
    names = runpy.run_path(str(file))
    with mock.patch.object(sys, "argv", [str(file), *map(str, flags)]):
        args = names["parse_args"]()
    init, train = names["make_program"](args, *names["make_env"](args))
    run = compiled_quickly(lambda: jax.device_get(jax.jit(init)(jax.random.PRNGKey(args.seed))))
    program = jax.jit(lambda run: train(run, 1))

    def further(run):
        run, metrics, _, episodes = compiled_quickly(lambda: jax.device_get(program(run)))
        return run, (metrics, [x[0] for x in episodes])

    return args, run, further


TWIN = functools.cache(
    lambda: runpy.run_path(str(FILES["ppo_continuous_action"]))
)  # whose PyTorch is the reference here


def torch_agent(agent_state):
    """An agent of ppo_continuous_action.py with the weights and statistics of one of ours."""
    params, moments = agent_state["params"]["params"], agent_state["obs_moments"]
    spaces = [
        gym.spaces.Box(-1, 1, shape) for shape in (moments["mean"].shape, params["log_std"].shape)
    ]
    agent = TWIN()["Agent"](
        SimpleNamespace(single_observation_space=spaces[0], single_action_space=spaces[1])
    )
    state = {"log_std": params["log_std"]} | {
        f"obs_moments.{name}": x for name, x in moments.items()
    }
    for name in ("actor", "critic"):
        for place, layer in {0: "Dense_0", 2: "Dense_1", 4: "Dense_2"}.items():
            of_layer = params[name][layer]
            state |= {
                f"{name}.{place}.weight": of_layer["kernel"].T,
                f"{name}.{place}.bias": of_layer["bias"],
            }
    agent.load_state_dict({name: torch.tensor(np.array(x)) for name, x in state.items()})
    return agent


def normalize(agent, obs):
    return torch.from_numpy(agent.normalize(obs))


# an iteration as a reference: the agent, normalizers and losses are those of the PyTorch file


def follow(args, run):
    """The rollout of a run's next iteration, with the random numbers that the program draws.

    Also the world after it, the states that new episodes could start from, and the order of rows
    in each epoch."""
    env, agent = (
        brax.envs.get_environment(args.env_id.split("/")[1], backend=None),
        torch_agent(run["agent"]),
    )
    _, noise_key, place_key, reset_key, order_key = jax.random.split(run["key"], 5)
    rows, size = (args.num_steps, args.num_envs), args.num_steps * args.num_envs
    noise = np.asarray(jax.random.normal(noise_key, (*rows, env.action_size)))
    shifts = np.asarray(jax.random.randint(place_key, (args.num_steps, 1), 0, args.num_envs))
    places = np.add(range(args.num_envs), shifts) % args.num_envs
    pool = jax.device_get(jax.jit(jax.vmap(env.reset))(jax.random.split(reset_key, args.num_envs)))
    step, world, rollout = jax.jit(jax.vmap(env.step)), run["world"], []
    state = jax.tree.unflatten(jax.tree.structure(pool), world["env_state"])
    total, length, discounted = (
        world[name].copy() for name in ("episode_return", "episode_length", "discounted")
    )
    for t in range(args.num_steps):
        obs = state.obs["state"]
        with torch.no_grad():
            mean = agent.policy(normalize(agent, obs))
            actions = mean + agent.log_std.exp() * torch.tensor(noise[t])
            log_probs = TWIN()["log_prob"](mean, agent.log_std, actions).numpy()
        state = jax.device_get(step(state, actions.numpy().clip(-1, 1)))
        is_broken = np.isnan(state.obs["state"]).any(1)
        rewards, terminated = np.where(is_broken, 0, state.reward), is_broken | (state.done == 1)
        total, length, discounted = total + rewards, length + 1, rewards + args.gamma * discounted
        truncated = (length == args.episode_length) & ~terminated
        row = (
            obs,
            actions.numpy(),
            log_probs,
            rewards,
            discounted,
            terminated,
            truncated,
            state.obs["state"],
            total,
            length,
        )
        rollout.append(row)
        is_over = terminated | truncated
        state = jax.tree.map(np.array, state)  # the rollout keeps the last observation
        for e in np.flatnonzero(is_over):
            for mine, new in zip(jax.tree.leaves(state), jax.tree.leaves(pool), strict=True):
                mine[e] = new[places[t, e]]
        total, length, discounted = total * ~is_over, length * ~is_over, discounted * ~is_over
    world = dict(
        episode_return=total,
        episode_length=length,
        discounted=discounted,
        env_state=jax.tree.leaves(state),
    )
    bits = np.asarray(jax.random.bits(order_key, (args.update_epochs, size))).astype(np.uint64)
    orders = np.argsort(bits >> (size - 1).bit_length(), axis=1, kind="stable")
    return [np.stack(column) for column in zip(*rollout, strict=True)], world, pool, orders


def advantages_of(args, values, next_values, rewards, terminated, is_over):
    """By a slow reference that walks each episode by itself."""
    advantages = np.zeros_like(rewards)
    for e in range(args.num_envs):
        for t in range(args.num_steps):
            weight, k = 1.0, t
            while True:
                following = 0.0 if terminated[k, e] else next_values[k, e]
                advantages[t, e] += weight * (rewards[k, e] + args.gamma * following - values[k, e])
                if is_over[k, e] or k == args.num_steps - 1:
                    break
                weight, k = weight * args.gamma * args.gae_lambda, k + 1
    return advantages


def learn(args, run, adam, agent, rollout, orders):
    """An iteration in which PyTorch's Adam changes the agent as ppo_continuous_action.py would.

    Returns its metrics, the moments of the returns after it, and how much the clips did."""
    obs, actions, log_probs, rewards, discounted, terminated, truncated, next_obs, _, _ = rollout
    return_moments = TWIN()["RunningMoments"](())
    return_moments.load_state_dict(
        {name: torch.tensor(np.array(x)) for name, x in run["return_moments"].items()}
    )
    return_moments.update(discounted.ravel().astype(np.float64))
    scaled = rewards / return_moments.var.add(1e-8).sqrt().item()
    did = dict(ratio=0, value=0, norm=0, reward=int((abs(scaled) > 10).sum()))
    flat = lambda x: x.reshape(-1, x.shape[-1])  # noqa: E731
    seen = normalize(agent, flat(obs))
    next_seen = normalize(agent, np.nan_to_num(flat(next_obs)))
    did["obs"] = int((seen.abs() == 10).sum())
    values, next_values = (
        agent.value(x).detach().numpy().reshape(rewards.shape) for x in (seen, next_seen)
    )
    advantages = advantages_of(
        args, values, next_values, scaled.clip(-10, 10), terminated, terminated | truncated
    )
    returns, size = advantages + values, advantages.size
    total = args.total_timesteps // size
    rate = (
        args.learning_rate * (1 - int(run["global_step"]) // size / total)
        if args.anneal_lr
        else args.learning_rate
    )
    adam.param_groups[0]["lr"] = rate
    columns = [
        seen,
        flat(actions),
        *(x.ravel().astype(np.float32) for x in (log_probs, values, advantages, returns)),
    ]
    clipfracs = []
    for order in orders:
        for mb in order.reshape(args.num_minibatches, -1):
            b_obs, b_actions, b_log_probs, b_values, b_advantages, b_returns = (
                torch.as_tensor(x)[mb] for x in columns
            )
            mean, value = agent.policy(b_obs), agent.value(b_obs)
            gaussian = torch.distributions.Normal(mean, agent.log_std.exp())
            ratio = (gaussian.log_prob(b_actions).sum(1) - b_log_probs).exp()
            if args.norm_adv:
                b_advantages = (b_advantages - b_advantages.mean()) / (
                    b_advantages.std(correction=0) + 1e-8
                )
            near = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
            gain = torch.minimum(ratio * b_advantages, near * b_advantages)
            error, near_value = (
                (value - b_returns) ** 2,
                b_values + (value - b_values).clamp(-args.clip_coef, args.clip_coef),
            )
            worse = (
                torch.maximum(error, (near_value - b_returns) ** 2) if args.clip_vloss else error
            )
            policy_loss, value_loss, entropy = (
                -gain.mean(),
                worse.mean() / 2,
                gaussian.entropy().sum(1).mean(),
            )
            adam.zero_grad()
            (policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy).backward()
            norm = torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            adam.step()
            clipfracs.append(float(((ratio - 1).abs() > args.clip_coef).float().mean()))
            did["ratio"] += int((gain < ratio * b_advantages).sum())
            did["value"] += int((worse > error).sum())
            did["norm"] += int(norm > args.max_grad_norm)
    metrics = {
        "value_loss": value_loss,
        "policy_loss": policy_loss,
        "entropy": entropy,
        "clipfrac": np.mean(clipfracs),
    }
    metrics |= {"old_approx_kl": -ratio.log().mean(), "approx_kl": (ratio - 1 - ratio.log()).mean()}
    metrics |= {"explained_variance": 1 - advantages.var() / returns.var()}
    metrics = {f"losses/{name}": float(torch.as_tensor(x).detach()) for name, x in metrics.items()}
    return metrics | {"charts/learning_rate": rate}, return_moments, did


WATCHED = (
    "--seed",
    17,
    "--env-id",
    "brax/RandomEnds",
    "--episode-length",
    7,
    "--num-envs",
    8,
    "--num-steps",
    32,
    "--num-minibatches",
    4,
)
WATCHED = (
    *WATCHED,
    "--update-epochs",
    3,
    "--total-timesteps",
    4 * 256,
    "--learning-rate",
    0.004,
    "--gamma",
    0.5,
)
WATCHED = (
    *WATCHED,
    "--gae-lambda",
    0.7,
    "--clip-coef",
    0.05,
    "--vf-coef",
    0.7,
    "--ent-coef",
    0.3,
    "--max-grad-norm",
    0.4,
)


@functools.cache
def watch(file, *flags):
    """A run before, between and after two iterations, their logs, and the reference's rollouts."""
    args, run, program = begin(file, *WATCHED, *flags)
    states, logs = [run], []
    for _ in range(2):
        run, log = program(run)
        states.append(run)
        logs.append(log)
    return args, states, logs, [follow(args, run) for run in states[:-1]]


def test_core_1_episodes_run_on_across_rollouts(file, tmp_path):
    """The world after an iteration and all ends in it are those of the environments."""
    _, states, logs, followed = watch(file)
    for after, (_, (is_over, returns, lengths)), (rollout, world, _, _) in zip(
        states[1:], logs, followed, strict=True
    ):
        terminated, truncated, total, length = (rollout[i] for i in (5, 6, 8, 9))
        np.testing.assert_array_equal(is_over, terminated | truncated)
        np.testing.assert_allclose(returns[is_over], total[is_over], rtol=1e-5, atol=1e-4)
        np.testing.assert_array_equal(lengths[is_over], length[is_over])
        for got, wanted in zip(leaves(after["world"]), leaves(world), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)
    assert after["world"]["episode_length"].max() > 0, "some are under way"
    assert (np.abs(rollout[1]) > 1).any(), "some actions are beyond the bounds"


def test_core_2_orthogonal_weights_and_zero_biases(file, tmp_path):
    _, states, _, _ = watch(file)
    params = states[0]["agent"]["params"]["params"]
    for name, gain in (("actor", 0.01), ("critic", 1.0)):
        for layer, std in (("Dense_0", 2**0.5), ("Dense_1", 2**0.5), ("Dense_2", gain)):
            weight = params[name][layer]["kernel"]
            weight = weight if np.subtract(*weight.shape) <= 0 else weight.T
            np.testing.assert_allclose(weight @ weight.T, std**2 * np.eye(len(weight)), atol=1e-5)
            assert np.abs(params[name][layer]["bias"]).max() == 0
    assert params["log_std"].tolist() == [0, 0]
    assert params["actor"]["Dense_1"]["kernel"].shape == (64, 64)


OTHER_FLAGS = pytest.param(
    ("--no-norm-adv", "--no-clip-vloss", "--no-anneal-lr"), marks=pytest.mark.slow
)


@pytest.mark.parametrize("flags", [(), OTHER_FLAGS])
def test_core_3_to_12_an_iteration_is_that_of_ppo_continuous_action(file, tmp_path, flags):
    """Normalizers, advantages, order of rows, losses and Adam's steps, in two iterations."""
    args, states, logs, followed = watch(file, *flags)
    agent, seen = torch_agent(states[0]["agent"]), dict(obs=0, reward=0)
    adam = torch.optim.Adam(agent.parameters(), eps=1e-5)
    for before, after, (metrics, _), (rollout, _, _, orders) in zip(
        states[:-1], states[1:], logs, followed, strict=True
    ):
        agent.load_state_dict(
            torch_agent(before["agent"]).state_dict()
        )  # so that rounding does not add up
        assert len({tuple(order) for order in [*orders, range(256)]}) == 4, (
            "a new order in each epoch"
        )
        expected, return_moments, did = learn(args, before, adam, agent, rollout, orders)
        assert did["ratio"] > 20 and did["norm"] > 2 and (did["value"] > 20) == args.clip_vloss, (
            "the clips must matter"
        )
        seen = {name: seen[name] + did[name] for name in seen}
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=2e-4, abs=2e-5), name
        wanted = torch_agent(after["agent"]).state_dict()
        for name, parameter in agent.named_parameters():
            np.testing.assert_allclose(parameter.detach().numpy(), wanted[name].numpy(), atol=1e-5)
        for name, value in return_moments.state_dict().items():
            assert float(after["return_moments"][name]) == pytest.approx(value.item(), rel=1e-5)
    assert expected["charts/learning_rate"] == pytest.approx(0.004 if flags else 0.003)
    assert min(seen.values()) > 0, "outliers of both kinds must be clipped"


# environments in the program


def test_physics_1_a_cut_is_no_end(file, tmp_path):
    """Episodes are truncated by the file, at --episode-length, and bootstrapped there."""
    _, _, logs, followed = watch(file)
    rollout, _, _, _ = followed[1]
    terminated, truncated, next_obs, length = (rollout[i] for i in (5, 6, 7, 9))
    is_over, _, lengths = logs[1][1]
    assert (
        truncated.sum() > 5
        and terminated.sum() > 5
        and lengths[is_over].max() == length[truncated].min() == 7
    )
    assert np.isfinite(next_obs[truncated]).all()
    names = train(file, tmp_path, "--env-id", "brax/TwoEnds", "--episode-length", 1, *PROBE_FLAGS)
    assert values_of(names, tmp_path, -1, 1) == pytest.approx([1, 2], abs=0.1)


def test_physics_2_episodes_start_from_states_that_were_drawn(file, tmp_path):
    """New ones in every iteration; each is a state that the environment itself begins with."""
    _, _, logs, followed = watch(file)
    pools = []
    for (_, (is_over, _, _)), (rollout, _, pool, _) in zip(logs, followed, strict=True):
        at = np.argwhere(is_over[:-1]) + np.array([1, 0])
        starts = rollout[0][tuple(at.T)]  # what is seen on the step after an end
        pools.append({tuple(obs) for obs in pool.obs["state"]})
        assert {tuple(obs) for obs in starts} <= pools[-1] and len(starts) > 20
        assert len({tuple(obs) for obs in starts}) >= 6, "many of the eight that there are"
        own = [
            (start == pool.obs["state"][e]).all() for start, (_, e) in zip(starts, at, strict=True)
        ]
        assert np.mean(own) < 0.5, "not always the same for one environment"
    assert not pools[0] & pools[1]


def test_physics_3_a_simulation_that_blows_up_ends(file, tmp_path):
    """As a termination with a reward of 0, also where it is still finite; moments are spared it."""
    env_id = ("--env-id", "brax/Breaks", "--episode-length", 1000)
    sizes = "--num-envs 16 --num-steps 8 --num-minibatches 2 --total-timesteps 256".split()
    try:
        names = train(file, tmp_path, *env_id, *sizes, "--log-interval", 1)
    except SystemExit as end:
        pytest.fail(str(end))
    logged = scalars(only_run(tmp_path))
    ends = {((t - 1) * 16 + e + 1, 3.0) for t in range(3, 17, 3) for e in range(16)}
    assert set(logged.get("charts/episodic_length", ())) == ends
    assert {value for _, value in logged["charts/episodic_return"]} == {2.0}
    checkpoint = read_checkpoint(only_run(tmp_path))
    assert all(np.isfinite(x).all() for x in leaves(checkpoint["agent"]))
    assert checkpoint["agent"]["obs_moments"]["var"] < 1 and checkpoint["return_moments"]["var"] < 9
    assert play(names, only_run(tmp_path), 80) == [2.0] * 80, "and so it is in evaluation"


def test_physics_4_observations_are_normalized_by_what_earlier_rollouts_showed(file, tmp_path):
    """Mean and variance of all observations so far, those of the rollout once it is over."""
    _, states, _, followed = watch(file)
    rows = np.concatenate([rollout[0].reshape(256, -1) for rollout, _, _, _ in followed])
    for count, state in ((256, states[1]), (512, states[2])):
        moments = state["agent"]["obs_moments"]
        assert moments["count"] == count
        np.testing.assert_allclose(moments["mean"], rows[:count].mean(0), rtol=1e-4)
        np.testing.assert_allclose(moments["var"], rows[:count].var(0), rtol=1e-4)
    first = states[0]["agent"]["obs_moments"]
    assert first["mean"].tolist() == [0, 0] and first["var"].tolist() == [1, 1], (
        "nothing is known yet"
    )


# known answers

PROBE_FLAGS = (
    "--total-timesteps",
    10240,
    "--num-envs",
    8,
    "--num-steps",
    16,
    "--num-minibatches",
    4,
    "--learning-rate",
    0.01,
)
PROBE_FLAGS = (*PROBE_FLAGS, "--gamma", 0.5, "--no-clip-vloss")


def test_physics_5_forces_are_added_up_in_a_fixed_order(file, tmp_path, monkeypatch):
    """By no scatter, whose order is not fixed on a GPU, but with the same sums.

    A contact with the ground, which is no link, counts for none. The one scatter that is left has
    an actuator for each place."""
    names, modules = runpy.run_path(str(file)), (brax.spring.collisions, brax.spring.joints)
    for module in modules:  # as if nobody had made an environment yet
        monkeypatch.setattr(module, "segment_sum", jax.ops.segment_sum)
    monkeypatch.setenv("XLA_FLAGS", "")
    names["make_env"](names["Args"](env_id="brax/ant", physics="positional"))
    assert os.environ["XLA_FLAGS"] == "", "its Ants were 70 away in XLA's fixed order"
    for physics in ("generalized", "mjx", None):
        monkeypatch.setenv("XLA_FLAGS", "")
        env, _ = names["make_env"](names["Args"](env_id="brax/ant", physics=physics))
        assert "--xla_gpu_deterministic_ops=true" in os.environ["XLA_FLAGS"]
    rng = np.random.default_rng(1)
    forces, links = rng.normal(size=(40, 3)).astype(np.float32), rng.integers(-1, 9, 40)
    for x in (forces, forces[:, 0]):
        wanted = jax.ops.segment_sum(x, links, 9)
        for module in modules:
            np.testing.assert_allclose(module.segment_sum(x, links, 9), wanted, atol=1e-5)
    state = jax.eval_shape(jax.vmap(env.reset), jax.random.split(jax.random.PRNGKey(1), 4))
    step = (
        jax.jit(jax.vmap(env.step))
        .lower(state, np.zeros((4, env.action_size), np.float32))
        .as_text()
    )
    assert (
        step.count('"stablehlo.scatter"(') == 1
        and len(set(env.sys.actuator.qd_id.tolist())) == env.sys.act_size()
    )


def values_of(names, folder, *observations):
    """The learned values of observations, in units of the environment's rewards."""
    checkpoint = read_checkpoint(only_run(folder))
    agent = torch_agent(checkpoint["agent"])
    scale = max(
        float(checkpoint["return_moments"]["var"] + 1e-8) ** 0.5, 0.1
    )  # a reward of 1 counts at most 10
    obs = np.float32(observations)[:, None]
    return (agent.value(normalize(agent, obs)) * scale).tolist()


@pytest.mark.parametrize(
    ("probe", "cut", "values"),
    [
        pytest.param("ConstantValue", 9, {0: 1}, marks=pytest.mark.slow),
        ("Discounting", 9, {0: 0.5, 1: 1}),
        pytest.param("Endless", 1, {0: 2}, marks=pytest.mark.slow),
    ],
)
def test_values_of_probes(file, tmp_path, probe, cut, values):
    names = train(
        file,
        tmp_path,
        "--env-id",
        f"tests.brax_probes:brax/{probe}",
        "--episode-length",
        cut,
        *PROBE_FLAGS,
    )
    assert values_of(names, tmp_path, *values) == pytest.approx(list(values.values()), abs=0.1)


@pytest.mark.parametrize(
    "probe",
    [
        pytest.param("ActionMatters", marks=pytest.mark.slow),
        pytest.param("ActionAndObsMatter", marks=pytest.mark.slow),
        "FarOff",
    ],
)
def test_actions_of_probes(file, tmp_path, probe):
    """Acting through load_policy in new environments, with the statistics of training."""
    names = train(file, tmp_path, "--env-id", f"tests.brax_probes:brax/{probe}", *PROBE_FLAGS)
    checkpoint = read_checkpoint(only_run(tmp_path))
    assert np.mean(play(names, only_run(tmp_path), 80)) > 0.9
    assert same(checkpoint, read_checkpoint(only_run(tmp_path))), "which stay as they were"


# many runs at once, and interruptions

FEW = (
    "--env-id",
    "brax/RandomEnds",
    "--episode-length",
    7,
    "--num-envs",
    2,
    "--num-steps",
    32,
    "--num-minibatches",
    2,
)
FEW = (
    *FEW,
    "--update-epochs",
    2,
    "--total-timesteps",
    8 * 64,
    "--log-interval",
    2,
    "--checkpoint-interval",
    4,
)


def runs_of(folder):
    """The folders of all runs, by the name of the experiment and the seed."""
    return sorted((folder / "runs").iterdir(), key=lambda run: run.name.split("__")[1:3])


def halfway(file, folder, *flags):
    """Folders with finished runs and with copies of them at the checkpoint in the middle."""
    real = os.replace

    def replace(source, target):
        real(source, target)
        if (
            Path(target).name == "checkpoint.msgpack"
            and read_checkpoint(Path(target).parent)["global_step"] == 4 * 64
        ):
            shutil.copytree(
                Path(target).parent, folder / "part" / "runs" / Path(target).parent.name
            )

    with mock.patch("os.replace", replace):
        train(file, folder / "whole", *flags)
    return folder / "whole", folder / "part"


@pytest.mark.slow
def test_runs_side_by_side_go_on_bit_for_bit(file, tmp_path):
    """Each has its seed, values and folder; to resume all of them changes not a bit."""
    flags = (*FEW, "--num-seeds", 2, "--sweep", "learning_rate=3e-4,1e-2")
    whole, part = compiled_quickly(lambda: halfway(file, tmp_path, *flags))
    told = [about(run)["args"] for run in runs_of(whole)]
    assert sorted((x["learning_rate"], x["seed"]) for x in told) == [
        (3e-4, 1),
        (3e-4, 2),
        (1e-2, 1),
        (1e-2, 2),
    ]
    ends = [read_checkpoint(run) for run in runs_of(whole)]
    assert len({x["agent"]["params"]["params"]["log_std"].tobytes() for x in ends}) == 4, (
        "no two are alike"
    )
    assert {int(read_checkpoint(run)["global_step"]) for run in runs_of(part)} == {4 * 64}
    for a, b in zip(
        runs_of(whole), runs_of(part), strict=True
    ):  # the curves had gone on, which is to be forgotten
        shutil.copy(next(a.glob("events*")), b)
    train(file, tmp_path, "--resume", runs_of(part)[0])
    for a, b in zip(runs_of(whole), runs_of(part), strict=True):
        assert a.name == b.name and same(read_checkpoint(a), read_checkpoint(b))
        assert without_speed(a) == without_speed(b) and without_speed(b)


@pytest.mark.slow
def test_a_run_among_others_is_the_run_it_would_be_alone(file, tmp_path):
    train(file, tmp_path / "many", *FEW, "--num-seeds", 3)
    train(file, tmp_path / "alone", *FEW, "--seed", 3)
    mine, its = (
        read_checkpoint(only_run(tmp_path / "alone")),
        read_checkpoint(runs_of(tmp_path / "many")[2]),
    )
    for got, wanted in zip(
        leaves(mine["agent"]["params"]), leaves(its["agent"]["params"]), strict=True
    ):
        np.testing.assert_allclose(
            got, wanted, atol=1e-4
        )  # XLA adds up in another order where there are many
    assert same(mine["key"], its["key"]) and same(
        mine["world"]["episode_length"], its["world"]["episode_length"]
    )


# real environments


@pytest.mark.slow
def test_brax_and_gymnasium_forms_agree(file, tmp_path):
    """The environments of make_envs do what Brax does; the limit is 1000 steps."""
    names = runpy.run_path(str(file))
    envs = names["make_envs"](names["Args"](env_id="brax/inverted_pendulum", episode_length=20), 2)
    bare, rng = (
        brax.envs.get_environment("inverted_pendulum", backend="spring"),
        np.random.default_rng(1),
    )
    (obs, _), step, is_last = envs.reset(seed=3), jax.jit(bare.step), np.zeros(2, bool)
    assert names["make_env"](names["Args"](env_id="brax/inverted_pendulum"))[1] == 1000
    env, ends = envs.unwrapped.envs[0].unwrapped, set()
    for _ in range(100):
        before, actions = env.state, rng.uniform(-1.3, 1.3, (2, 1)).astype(np.float32)
        was_last, (obs, rewards, terminated, truncated, _) = is_last, envs.step(actions)
        is_last = terminated | truncated
        if was_last[0]:
            assert rewards[0] == 0 and not is_last[0] and np.abs(obs[0]).max() < 0.1, "only a reset"
            continue
        after = step(before, actions[0].clip(-1, 1))
        np.testing.assert_allclose(obs[0], after.obs, atol=1e-6)
        assert rewards[0] == after.reward and terminated[0] == bool(after.done)
        ends |= {"terminated"} if terminated[0] else {"truncated"} if truncated[0] else set()
    assert "terminated" in ends


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_id", "flags", "least"),
    [
        ("brax/inverted_pendulum", ("--total-timesteps", 400_000, "--physics", "positional"), 900),
        ("playground/CartpoleBalance", ("--total-timesteps", 3_000_000, "--gamma", 0.99), 800),
    ],
)
def test_learns(file, tmp_path, env_id, flags, least):
    """A random player's return: about 5 of 1000 in the first, and 350 of 1000 in the second."""
    few = ("--num-envs", 256, "--num-minibatches", 8)
    names = train(file, tmp_path, "--env-id", env_id, *few, *flags)
    returns = [value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]]
    assert np.mean(returns[-100:]) >= least and np.mean(returns[:100]) < least / 2
    assert np.mean(play(names, only_run(tmp_path), 8)) >= least


@functools.cache  # a second try may crash
def has_opengl():
    import mujoco

    try:
        mujoco.Renderer(mujoco.MjModel.from_xml_string("<mujoco/>"), 8, 8).close()
    except Exception:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["brax/inverted_pendulum", "playground/CartpoleBalance"])
def test_videos(file, tmp_path, env_id):
    if not has_opengl():
        pytest.skip("needs OpenGL, such as MUJOCO_GL=osmesa with Debian's libosmesa6")
    few = (
        "--num-envs",
        2,
        "--num-steps",
        32,
        "--num-minibatches",
        2,
        "--total-timesteps",
        64,
        "--episode-length",
        20,
    )
    names = train(file, tmp_path, "--env-id", env_id, *few, "--capture-video")
    (video,) = (only_run(tmp_path) / "videos").glob("step-64-episode-0.mp4")
    assert video.stat().st_size > 1000
    envs = names["make_envs"](names["args"], 1, "rgb_array")
    envs.reset(seed=1)
    (first,) = envs.render()
    for _ in range(15):
        envs.step(np.ones((1, 1), np.float32))
    (later,) = envs.render()
    assert first.shape == (480, 640, 3) and first.std() > 10 and (first != later).mean() > 0.001, (
        "it moves"
    )


@pytest.mark.slow
def test_by_default_no_ant_is_thrown_into_the_air(file):
    """As --physics positional does with a third of those that do nothing."""
    names = runpy.run_path(str(file))
    env, _ = names["make_env"](names["Args"](env_id="brax/ant"))
    state = jax.vmap(env.reset)(jax.random.split(jax.random.PRNGKey(1), 128))
    stay, heights = (
        jax.jit(jax.vmap(lambda state: env.step(state, np.zeros(env.action_size, np.float32)))),
        [],
    )
    for _ in range(10):
        state = stay(state)
        heights.append(np.asarray(state.pipeline_state.x.pos[:, 0, 2]))
    assert np.max(heights) < 1, "an Ant that stands has its middle at 0.5"


@pytest.mark.slow
def test_the_camera_follows(file):
    if not has_opengl():
        pytest.skip("needs OpenGL, such as MUJOCO_GL=osmesa with Debian's libosmesa6")
    names = runpy.run_path(str(file))
    envs = names["make_envs"](names["Args"](env_id="brax/ant"), 1, "rgb_array")
    envs.reset(seed=1)
    env, brown = envs.unwrapped.envs[0].unwrapped, []
    for _ in range(2):
        (picture,) = envs.render()
        brown.append((picture[..., 0] > picture[..., 2] + 20.0).sum())  # of the floor, nothing is
        where = env.state.pipeline_state
        env.state = env.state.replace(
            pipeline_state=where.replace(q=where.q.at[0].add(30.0))
        )  # far away
    assert min(brown) > 3000, brown
