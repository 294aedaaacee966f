"""cleanrl/ppo_jax.py. test_core_N guards detail N of docs/rl-algorithms/ppo.md; tests/mutations shows that each test bites.

Compiling takes longer than everything else here: so tests share programs and runs, which are made once for each file.
"""

import functools
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.serialization import msgpack_serialize
from tensorboard.compat.proto.event_pb2 import Event

import tests.gymnax_probes  # noqa: F401  registers them
from cleanrl_utils.events import read_events
from tests import harness
from tests.harness import FILES, about, only_run, read_checkpoint, same, scalars
from tests.test_dqn_jax import compiled_quickly, edit, leaves, play, tensors, train, without_speed
from tests.test_events import shown


@pytest.fixture
def file():
    return FILES["ppo_jax"]


def begin(file, *flags, form=()):
    """The arguments of a run that has not begun, the run, and a function that takes it an iteration further."""
    names = runpy.run_path(str(file))
    with mock.patch.object(sys, "argv", [str(file), *map(str, flags)]):
        args = names["tyro"].cli(names["Args"])
    init, iterate = names["make_program"](args, *form)
    floats = {name: jnp.float32(getattr(args, name)) for name in names["FLOATS"]}
    run = compiled_quickly(lambda: jax.device_get(jax.jit(init)(jax.random.PRNGKey(args.seed))))
    program = jax.jit(lambda run: iterate(floats, run, None))
    return args, run, lambda run: compiled_quickly(lambda: jax.device_get(program(run)))


# an iteration, written anew: environments stepped one by one, advantages by walking each episode, PyTorch's autograd and Adam


LAYERS = (
    "Dense_1",
    "Dense_0",
    "Dense_2",
)  # from the observation on: flax numbers them in the order in which they are made


def network(params, obs):
    """What ppo.py's networks return of an observation."""
    x = torch.tensor(np.asarray(obs))
    for name in LAYERS:
        x = x @ params[name]["kernel"] + params[name]["bias"]
        x = x.tanh() if name != "Dense_2" else x
    return x


def policy_of(params, obs):
    return network(params["params"]["actor"], obs).log_softmax(-1)


def value_of(params, obs):
    return network(params["params"]["critic"], obs).squeeze(-1)


def follow(args, run):
    """The rollout of a run's next iteration, by gymnax's own step with the random numbers that the program draws, what the
    world is after it, and the order of rows in each epoch."""
    env, env_params = gymnax.make(args.env_id)
    _, noise_key, step_key, reset_key, order_key = jax.random.split(run["key"], 5)
    rows, size = (args.num_steps, args.num_envs), args.num_steps * args.num_envs
    noise = np.asarray(jax.random.gumbel(noise_key, (*rows, env.num_actions)))
    step_keys = jax.random.split(step_key, rows)
    fresh = jax.device_get(
        jax.jit(jax.vmap(env.reset_env, (0, None)))(jax.random.split(reset_key, size), env_params)
    )
    step, is_cut = jax.jit(env.step_env), jax.jit(env.is_truncated)
    params, world, rollout = tensors(run["agent"]["params"]), run["world"], []
    for t in range(args.num_steps):
        log_probs, row, new = policy_of(params, world["obs"]).detach().numpy(), [], []
        for e in range(args.num_envs):
            action, state = (
                int((log_probs[e] + noise[t, e]).argmax()),
                jax.tree.map(lambda x, e=e: x[e], world["env_state"]),
            )
            answers = jax.device_get(step(step_keys[t, e], state, action, env_params))
            next_obs, next_state, reward, terminated, _ = answers
            truncated = bool(is_cut(next_state, env_params))
            total, length = world["episode_return"][e] + reward, world["episode_length"][e] + 1
            columns = (
                world["obs"][e],
                action,
                log_probs[e, action],
                reward,
                bool(terminated),
                next_obs,
                truncated,
            )
            row.append((*columns, total, length))
            is_over = terminated or truncated
            begins = jax.tree.map(lambda x, at=t * args.num_envs + e: x[at], fresh)
            obs, next_state = begins if is_over else (next_obs, next_state)
            kept = np.float32([total, length]) * (not is_over)
            new.append(
                dict(env_state=next_state, obs=obs, episode_return=kept[0], episode_length=kept[1])
            )
        world = jax.tree.map(lambda *x: np.stack(x), *new)
        rollout.append([np.stack(column) for column in zip(*row, strict=True)])
    bits = np.asarray(jax.random.bits(order_key, (args.update_epochs, size))).astype(np.uint64)
    drawn = (
        bits >> (size - 1).bit_length()
    )  # what sorts: so few of the last bits are lost that hardly any two are alike
    orders = np.argsort(drawn, axis=1, kind="stable")
    return [np.stack(column) for column in zip(*rollout, strict=True)], world, orders


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


def learn(args, run, adam, params, rollout, orders):
    """The metrics of an iteration in which PyTorch's Adam changes params as ppo.py would; how much the clips did."""
    obs, actions, logprobs, rewards, terminated, next_obs, truncated, _, _ = rollout
    values, next_values = (value_of(params, x).detach().numpy() for x in (obs, next_obs))
    advantages = advantages_of(
        args, values, next_values, rewards, terminated, terminated | truncated
    )
    returns = advantages + values
    total = args.total_timesteps // advantages.size
    rate = (
        args.learning_rate * (1 - int(run["global_step"]) // advantages.size / total)
        if args.anneal_lr
        else args.learning_rate
    )
    adam.param_groups[0]["lr"] = rate
    columns = [
        x.reshape(advantages.size, *x.shape[2:])
        for x in (obs, actions, logprobs, values, advantages, returns)
    ]
    clipfracs, did = [], dict(ratio=0, value=0, norm=0)
    for order in orders:
        for mb in order.reshape(args.num_minibatches, -1):
            b_obs, b_actions, b_logprobs, b_values, b_advantages, b_returns = (
                torch.tensor(x[mb]) for x in columns
            )
            log_probs, value = policy_of(params, b_obs), value_of(params, b_obs)
            ratio = (log_probs[range(len(mb)), b_actions] - b_logprobs).exp()
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
            entropy = torch.distributions.Categorical(logits=log_probs).entropy().mean()
            policy_loss, value_loss = -gain.mean(), worse.mean() / 2
            adam.zero_grad()
            (policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy).backward()
            norm = torch.nn.utils.clip_grad_norm_(jax.tree.leaves(params), args.max_grad_norm)
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
    return {f"losses/{name}": float(torch.as_tensor(x).detach()) for name, x in metrics.items()} | {
        "charts/learning_rate": rate
    }, did


WATCHED = (
    "--env-id",
    "GymnaxProbe/RandomEnds-v0",
    "--num-envs",
    3,
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
    4 * 96,
    "--learning-rate",
    0.004,
    "--gamma",
    0.9,
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
def watch(file, *flags, form=()):
    """The states of a run before, between and after two iterations, with what each iteration logged."""
    args, run, program = begin(file, *WATCHED, *flags, form=form)
    states, logs = [run], []
    for _ in range(2):
        run, log = program(run)
        states.append(run)
        logs.append(log)
    return args, states, logs


def test_core_1_episodes_run_on_across_rollouts(file, tmp_path):
    """The world after an iteration, and every end in it, are those of gymnax, stepped one by one from the world before."""
    args, states, logs = watch(file)
    for before, after, (_, (is_over, returns, lengths)) in zip(
        states[:-1], states[1:], logs, strict=True
    ):
        rollout, world, _ = follow(args, before)
        terminated, truncated, total, length = (rollout[i] for i in (4, 6, 7, 8))
        assert (terminated & ~truncated).sum() > 5 and (truncated & ~terminated).sum() > 5, (
            "both ends"
        )
        np.testing.assert_array_equal(is_over, terminated | truncated)
        np.testing.assert_allclose(returns[is_over], total[is_over], atol=1e-5)
        np.testing.assert_array_equal(lengths[is_over], length[is_over])
        for got, wanted in zip(leaves(after["world"]), leaves(world), strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert after["world"]["episode_length"].max() > 0, "some are under way"


def test_core_1_steps_are_those_of_gymnax(file, tmp_path):
    """Against env.step, which resets by itself, on CartPole, one step at a time: with falls, and with a cut."""
    flags = (
        "--num-envs",
        2,
        "--num-steps",
        1,
        "--num-minibatches",
        1,
        "--update-epochs",
        1,
        "--learning-rate",
        1e-5,
    )
    _, run, program = begin(file, *flags, "--total-timesteps", 10**6)
    env, env_params = gymnax.make("CartPole-v1")
    run["world"]["env_state"] = run["world"]["env_state"].replace(time=np.int32([0, 499]))
    ends, cuts = 0, 0
    for _ in range(40):
        before, (run, (_, (is_over, returns, lengths))) = run, program(run)
        _, noise_key, _, reset_key, _ = jax.random.split(before["key"], 5)
        log_probs = (
            policy_of(tensors(before["agent"]["params"]), before["world"]["obs"]).detach().numpy()
        )
        actions = (log_probs + np.asarray(jax.random.gumbel(noise_key, (1, 2, 2)))[0]).argmax(-1)
        fresh, _ = jax.vmap(env.reset, (0, None))(jax.random.split(reset_key, 2), env_params)
        stepped = jax.vmap(env.step, (0, 0, 0, None))(
            jax.random.split(reset_key, 2), before["world"]["env_state"], actions, env_params
        )
        _, state, rewards, terminated, truncated, infos = jax.device_get(stepped)
        np.testing.assert_array_equal(is_over[0], terminated | truncated)
        np.testing.assert_array_equal(run["world"]["env_state"].time, state.time)
        wanted = np.where(is_over[0][:, None], fresh, infos["final_observation"])
        np.testing.assert_allclose(run["world"]["obs"], wanted, atol=1e-5)
        np.testing.assert_array_equal(lengths[0], before["world"]["episode_length"] + 1)
        np.testing.assert_array_equal(returns[0], before["world"]["episode_return"] + rewards)
        np.testing.assert_array_equal(run["world"]["episode_return"], returns[0] * ~is_over[0])
        ends, cuts = ends + terminated.sum(), cuts + truncated.sum()
    assert ends >= 2 and cuts == 1


def test_core_2_orthogonal_weights_and_zero_biases(file, tmp_path):
    _, (run, *_), _ = watch(file)
    assert {*run["agent"]["params"]["params"]} == {"actor", "critic"}, "[core 13] nothing is shared"
    for name, head_std in (("actor", 0.01), ("critic", 1.0)):
        layers = run["agent"]["params"]["params"][name]
        for layer, std in zip(LAYERS, (2**0.5, 2**0.5, head_std), strict=True):
            weight = (
                layers[layer]["kernel"]
                if np.subtract(*layers[layer]["kernel"].shape) <= 0
                else layers[layer]["kernel"].T
            )
            np.testing.assert_allclose(weight @ weight.T, std**2 * np.eye(len(weight)), atol=1e-5)
            assert np.abs(layers[layer]["bias"]).max() == 0


@pytest.mark.parametrize("flags", [(), ("--no-norm-adv", "--no-clip-vloss", "--no-anneal-lr")])
def test_core_3_to_12_an_iteration_is_that_of_ppo(file, tmp_path, flags):
    """Order of rows, advantages, losses, gradients and Adam's steps, in two iterations, of which the second is annealed."""
    args, states, logs = watch(file, *flags)
    params = tensors(states[0]["agent"]["params"])
    adam = torch.optim.Adam(jax.tree.leaves(params), eps=1e-5)
    for before, after, (metrics, _) in zip(states[:-1], states[1:], logs, strict=True):
        with (
            torch.no_grad()
        ):  # each iteration from where the program was, so that rounding does not add up
            for mine, its in zip(
                jax.tree.leaves(params), leaves(before["agent"]["params"]), strict=True
            ):
                mine.copy_(torch.tensor(its))
        rollout, _, orders = follow(args, before)
        assert len({tuple(order) for order in [*orders, range(96)]}) == 4, (
            "a new order in each epoch"
        )
        expected, did = learn(args, before, adam, params, rollout, orders)
        assert did["ratio"] > 20 and did["norm"] > 2 and (did["value"] > 20) == args.clip_vloss, (
            "the clips must matter"
        )
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=2e-4, abs=2e-5), name
        for got, wanted in zip(
            leaves(after["agent"]["params"]), jax.tree.leaves(params), strict=True
        ):
            np.testing.assert_allclose(got, wanted.detach().numpy(), atol=1e-5)
    assert expected["charts/learning_rate"] == pytest.approx(0.004 if flags else 0.003)


@pytest.mark.parametrize("num_runs", [1, 1000], ids=["few rows", "many rows"])
def test_what_a_gpu_runs_comes_to_the_same(file, tmp_path, num_runs):
    """Unrolled loops and sums of products where there are few rows, Adam on the tree of weights where there are many."""
    _, states, logs = watch(file)
    _, gpu_states, gpu_logs = watch(file, form=(num_runs, True))
    assert jax.tree.structure(states) == jax.tree.structure(gpu_states), (
        "a checkpoint of one is one of the other"
    )
    for got, wanted in zip(leaves((gpu_states, gpu_logs)), leaves((states, logs)), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5, rtol=1e-4)
    assert not same(states[-1]["agent"], gpu_states[-1]["agent"]), "not the same program"


# known answers

PROBE_FLAGS = (
    "--total-timesteps",
    10240,
    "--num-envs",
    8,
    "--num-steps",
    16,
    "--learning-rate",
    0.01,
    "--gamma",
    0.5,
)
PROBE_FLAGS = (*PROBE_FLAGS, "--ent-coef", 0, "--no-clip-vloss")


@pytest.mark.parametrize(
    ("probe", "values"),
    [
        pytest.param("ConstantValue", {0: 1}, marks=pytest.mark.slow),
        ("Discounting", {0: 0.5, 1: 1}),
        pytest.param("TruncatedEveryStep", {0: 2}, marks=pytest.mark.slow),
        ("TwoEnds", {-1: 1, 1: 2}),
    ],
)
def test_values_of_probes(file, tmp_path, probe, values):
    names = train(
        file, tmp_path, "--env-id", f"tests.gymnax_probes:GymnaxProbe/{probe}-v0", *PROBE_FLAGS
    )
    params = tensors(jax.tree.map(lambda x: x[0], jax.device_get(names["runs"]["agent"]["params"])))
    learned = value_of(params, np.float32([[float(obs)] for obs in values])).tolist()
    assert learned == pytest.approx(list(values.values()), abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("probe", ["ActionMatters", "ActionAndObsMatter"])
def test_actions_of_probes(file, tmp_path, probe):
    """Acting through load_policy in fresh environments, as every evaluation does."""
    names = train(
        file, tmp_path, "--env-id", f"tests.gymnax_probes:GymnaxProbe/{probe}-v0", *PROBE_FLAGS
    )
    assert np.mean(play(names, only_run(tmp_path), 80)) > 0.9


def test_learns_cartpole_four_times_at_once(file, tmp_path):
    harness.train(file, tmp_path, *FAST_CARTPOLE, "--num-seeds", 4)
    means = [
        np.mean([value for _, value in scalars(run)["charts/episodic_return"]][-50:])
        for run in runs_of(tmp_path)
    ]
    assert len(means) == 4 and min(means) >= 400, means


FAST_CARTPOLE = (
    "--total-timesteps",
    150_000,
    "--num-envs",
    8,
    "--num-steps",
    64,
    "--learning-rate",
    0.001,
    "--gamma",
    0.98,
)
FAST_CARTPOLE = (
    *FAST_CARTPOLE,
    "--gae-lambda",
    0.8,
    "--update-epochs",
    8,
    "--num-minibatches",
    2,
    "--ent-coef",
    0,
)
FAST_CARTPOLE = (*FAST_CARTPOLE, "--no-clip-vloss")


@pytest.mark.parametrize("name", ["ppo_jax", "ppo_rnn_jax"])
def test_images_are_convolved(name):
    """The product of patches and matrix is what a convolution with the same weights computes."""
    names, rng = runpy.run_path(str(FILES[name])), np.random.default_rng(1)
    network = names["Network"](5, 1.0) if name == "ppo_jax" else names["Network"]()
    obs = rng.random((2, 10, 9, 4), np.float32)
    params = network.init(jax.random.key(1), obs)
    seen = network.apply(params, obs, capture_intermediates=True)[1]["intermediates"]["Dense_1"][
        "__call__"
    ][0]
    kernel, layout = (
        params["params"]["Dense_1"]["kernel"].reshape(3, 3, 4, 16),
        ("NHWC", "HWIO", "NHWC"),
    )
    convolved = jax.lax.conv_general_dilated(obs, kernel, (1, 1), "VALID", dimension_numbers=layout)
    assert seen.shape == (2, 8, 7, 16)
    np.testing.assert_allclose(seen, convolved, atol=1e-5)


@pytest.mark.slow
def test_learns_breakout(file, tmp_path):
    """In MinAtar, where a random player gets about 0.5, and who always plays for the same bricks 6."""
    flags = (
        "--total-timesteps",
        1_000_000,
        "--num-envs",
        64,
        "--learning-rate",
        0.001,
        "--ent-coef",
        0.05,
    )
    harness.train(file, tmp_path, "--env-id", "Breakout-MinAtar", *flags)
    assert (
        np.mean(
            [value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]][-200:]
        )
        >= 8
    )


# many runs at once


def runs_of(folder):
    """The folders of all runs, by the name of the experiment and the seed."""
    return sorted((folder / "runs").iterdir(), key=lambda run: run.name.split("__")[1:3])


FEW = (
    "--num-envs",
    2,
    "--num-steps",
    32,
    "--num-minibatches",
    2,
    "--update-epochs",
    2,
    "--total-timesteps",
    8 * 64,
)
FEW = (*FEW, "--log-interval", 2, "--checkpoint-interval", 4)


def halfway(file, folder, *flags):
    """A folder with runs that went to their end, and one with copies of how they were at the checkpoint in the middle."""
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


def test_runs_side_by_side(file, tmp_path):
    """Each has its seed, its numbers and its own folder, and is the run that it would be alone. To go on with all of them, or
    with one that was alone, after an interruption, changes not a bit."""
    flags = (
        "--seed",
        4,
        "--num-seeds",
        2,
        "--sweep",
        "learning_rate=2.5e-4,1e-2",
        "ent_coef=0.01,0.5",
    )
    whole, part = halfway(file, tmp_path / "many", *FEW, *flags)
    told = [about(run)["args"] for run in runs_of(whole)]
    assert sorted((x["learning_rate"], x["ent_coef"], x["seed"]) for x in told) == [
        (rate, bonus, seed) for rate in (2.5e-4, 1e-2) for bonus in (0.01, 0.5) for seed in (4, 5)
    ]
    for run, x in zip(runs_of(whole), told, strict=True):
        name = f"CartPole-v1__ppo_jax-learning_rate={x['learning_rate']:g}-ent_coef={x['ent_coef']:g}__{x['seed']}__"
        assert run.name.startswith(name) and (x["num_seeds"], x["sweep"], x["gamma"]) == (
            1,
            [],
            0.99,
        )
        np.testing.assert_allclose(
            [rate for _, rate in scalars(run)["charts/learning_rate"]],
            x["learning_rate"] * (1 - np.arange(8) / 8),
            rtol=1e-6,
        )
    final = [leaves(read_checkpoint(run)["agent"]["params"]) for run in runs_of(whole)]
    assert len({content[1].tobytes() for content in final}) == 8, "no two are alike"

    alone, alone_part = halfway(file, tmp_path / "alone", *FEW, "--seed", 5)
    (twin,) = (
        run
        for run, x in zip(runs_of(whole), told, strict=True)
        if list(x.values()) == alone_values(alone, x)
    )
    mine, its = read_checkpoint(only_run(alone)), read_checkpoint(twin)
    assert (
        same(mine["key"], its["key"])
        and int(mine["global_step"]) == int(its["global_step"]) == 8 * 64
    )
    for got, wanted in zip(
        leaves(mine["agent"]["params"]), leaves(its["agent"]["params"]), strict=True
    ):
        np.testing.assert_allclose(
            got, wanted, atol=1e-5
        )  # XLA adds up in another order where there are many
    assert (
        scalars(only_run(alone))["charts/episodic_return"]
        == scalars(twin)["charts/episodic_return"]
    )

    for done, cut in ((whole, part), (alone, alone_part)):
        assert {int(read_checkpoint(run)["global_step"]) for run in runs_of(cut)} == {4 * 64}
        for a, b in zip(
            runs_of(done), runs_of(cut), strict=True
        ):  # the curves had gone on, which is to be forgotten
            shutil.copy(next(a.glob("events*")), b)
        train(file, tmp_path, "--resume", *runs_of(cut))
        for a, b in zip(runs_of(done), runs_of(cut), strict=True):
            assert a.name == b.name and same(read_checkpoint(a), read_checkpoint(b))
            assert without_speed(a) == without_speed(b) and without_speed(b)


def alone_values(folder, like):
    """The flags of a run that was alone, with the name that it would have in a sweep."""
    return list((about(only_run(folder))["args"] | {"exp_name": like["exp_name"]}).values())


@pytest.mark.slow
def test_of_many_runs_means_are_logged(file, tmp_path):
    """Of 65 runs, for each call of the program; the first three are those of three runs that log every episode."""
    train(file, tmp_path / "few", *FEW, "--total-timesteps", 4 * 64, "--num-seeds", 3)
    train(file, tmp_path / "many", *FEW, "--total-timesteps", 4 * 64, "--num-seeds", 65)
    many = sorted(runs_of(tmp_path / "many"), key=lambda run: about(run)["args"]["seed"])
    assert [about(run)["args"]["seed"] for run in many] == list(range(1, 66))
    for a, b in zip(runs_of(tmp_path / "few"), many, strict=False):
        every, mean = scalars(a), scalars(b)
        assert [step for step, _ in mean["losses/value_loss"]] == [64, 128, 192, 256]
        for name in ("charts/episodic_return", "charts/episodic_length"):
            calls = {
                last: [value for step, value in every[name] if last - 128 < step <= last]
                for last in (128, 256)
            }
            assert mean[name] == [
                (last, pytest.approx(np.mean(values))) for last, values in calls.items() if values
            ]
            assert len(mean[name]) == 2


# what is written


def test_events_are_read_as_tensorboard_reads_them(file, tmp_path):
    """By TensorBoard's own reader, which checks the checksums, and by ours; with every kind of number."""
    names, rng = runpy.run_path(str(file)), np.random.default_rng(1)
    steps = np.sort(np.unique([1, 127, 128, 16383, 16384, 2**31 - 1, *rng.integers(1, 2**31, 300)]))
    columns = {
        f"charts/{'x' * n}": rng.standard_normal(len(steps)).astype(np.float32) * 10.0 ** (n % 30)
        for n in (1, 50, 100)
    }
    columns["losses/odd"] = np.resize(
        np.float32([0, -0.0, np.inf, -np.inf, 1e-45, 3e38, 7]), len(steps)
    )
    header = Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString()
    content = names["frame"](np.frombuffer(header, np.uint8)[None]).tobytes()
    content += names["frame"](names["scalar_events"](steps, columns)).tobytes()
    content += names["frame"](
        names["scalar_events"](steps[:0], {"charts/none": np.zeros(0)})
    ).tobytes()
    (tmp_path / "events.out.tfevents.1.here").write_bytes(content)
    expected = {
        name: list(zip(steps.tolist(), np.float32(column).tolist(), strict=True))
        for name, column in columns.items()
    }
    assert scalars(tmp_path) == expected and shown(tmp_path) == expected
    assert read_events(tmp_path, cache=False)[1] == []
    event = Event.FromString(names["scalar_events"](steps, columns)[5].tobytes())
    assert event.step == steps[5] and abs(event.wall_time - time.time()) < 60
    assert [value.tag for value in event.summary.value] == list(columns)


# interruptions, and strangers' files


def refusal_of(file, folder, *flags):
    """The one line with which the file refuses, having written nothing."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(SystemExit) as refusal:
        train(file, folder, *flags)
    message = refusal.value.code
    assert isinstance(message, str) and message and "\n" not in message
    assert sorted(folder.rglob("*")) == before, "a refused command must not write"
    return message


@pytest.mark.slow
def test_kill_and_bad_folders(file, tmp_path):
    """Killed after a checkpoint, a run can be resumed. What was damaged since, or made to do harm, is refused in one line."""
    flags = ("--num-envs", 2, "--num-steps", 32, "--log-interval", 1, "--checkpoint-interval", 1)
    command = [sys.executable, str(file), *map(str, flags), "--total-timesteps", str(10**7)]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.time() + 120
    while (
        not list(tmp_path.glob("runs/*/checkpoint.msgpack"))
        and process.poll() is None
        and time.time() < deadline
    ):
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    run = only_run(tmp_path)
    (run / "checkpoint.tmp").unlink(missing_ok=True)
    checkpoint, told = read_checkpoint(run), about(run)
    reached = int(checkpoint["global_step"])
    assert 0 < reached < 10**6 and reached % 64 == 0
    edit(run, total_timesteps=reached + 128)

    good, (agent, world) = about(run), (checkpoint[name] for name in ("agent", "world"))
    less = lambda tree, name: {key: value for key, value in tree.items() if key != name}  # noqa: E731
    damages = [checkpoint | {"global_step": np.int32(step)} for step in (-64, reached + 1)]
    damages += [less(checkpoint, "agent")]
    damages += [
        checkpoint | {"agent": agent | {"params": jax.tree.map(np.transpose, agent["params"])}}
    ]
    damages += [checkpoint | {"world": world | {"obs": world["obs"][:1]}}]
    data = msgpack_serialize(checkpoint)
    damaged = [*map(msgpack_serialize, damages), data[:-1], np.random.default_rng(1).bytes(9999)]
    for number, content in enumerate(damaged):
        (run / "checkpoint.msgpack").write_bytes(content)
        assert refusal_of(file, tmp_path, "--resume", run).startswith(f"cannot resume {run}: "), (
            number
        )
    (run / "checkpoint.msgpack").write_bytes(data)

    lies = [
        ({"file": "x.py"}, "it is a run of x.py"),
        ({"args": told["args"] | {"no_such_flag": 1}}, "no_such_flag"),
    ]
    lies += [
        ({"args": good["args"] | {name: x}}, "wrong types")
        for name, x in (("num_envs", "2"), ("seed", 1.5), ("gamma", [1]))
    ]
    lies += [
        ({"args": good["args"] | {"num_envs": 0}}, "num_envs > 0 must hold"),
        ({"args": 1}, "TypeError"),
    ]
    lies += [
        (
            {"args": good["args"] | {"env_id": "evil:CartPole-v1"}},
            "is a run on 'evil:CartPole-v1': add --env-id",
        )
    ]
    lies += [({"args": good["args"] | {"env_id": "Acrobot-v1"}}, "cannot resume")]
    for lie, words in lies:
        (run / "run.json").write_text(json.dumps(good | lie))
        assert words in refusal_of(file, tmp_path, "--resume", run)
    for content in ("{", "[]", "[" * 100_000):
        (run / "run.json").write_text(content)
        assert refusal_of(file, tmp_path, "--resume", run).startswith(f"cannot --resume {run}: ")
    (run / "run.json").write_text(json.dumps(good))
    assert "runs side by side differ" in refusal_of(file, tmp_path, "--resume", run, run)
    other = shutil.copytree(run, tmp_path / "other")
    edit(other, seed=9)
    (other / "checkpoint.msgpack").write_bytes(
        msgpack_serialize(checkpoint | {"global_step": np.int32(reached - 64)})
    )
    assert "resume them one by one" in refusal_of(file, tmp_path, "--resume", run, other)

    (tmp_path / "precious").write_text("mine")
    (run / "checkpoint.tmp").symlink_to(tmp_path / "precious")
    train(file, tmp_path, "--resume", run)
    assert int(read_checkpoint(run)["global_step"]) == reached + 128
    assert (tmp_path / "precious").read_text() == "mine", "a link is not written through"


@pytest.mark.slow
def test_videos_are_gymnasiums(file, tmp_path):
    train(file, tmp_path, *FEW, "--capture-video")
    videos = sorted((only_run(tmp_path) / "videos").glob("step-*-episode-0.mp4"))
    assert [video.name.split("-")[1] for video in videos] == ["256", "512"]
    assert all(video.stat().st_size > 1000 for video in videos)
