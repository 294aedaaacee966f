"""cleanrl/ppo_jax.py. test_core_N guards detail N of docs/rl-algorithms/ppo.md.

tests/mutations shows that each test can fail. Compiling takes longer than everything else here: so
tests share programs and runs, which are made once for each file. The files of the same family
import what holds for them too.
"""

import functools
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
import numpy as np
import pytest
import torch
from tqdm import tqdm

import tests.gymnax_probes  # noqa: F401  registers them
from tests import harness
from tests.harness import FILES, about, only_run, read_checkpoint, same, scalars
from tests.test_dqn_jax import compiled_quickly, edit, leaves, play, tensors, train, without_speed


def begin(file, *flags, **form):
    """The arguments of a run, the run at its start, and a function that trains one iteration."""
    names = runpy.run_path(str(file))
    with mock.patch.object(sys, "argv", [str(file), *map(str, flags)]):
        args = names["tyro"].cli(names["Args"])
    init, train = names["make_program"](args, names["make_envs"](args, 1), **form)
    run = compiled_quickly(lambda: jax.device_get(jax.jit(init)(jax.random.PRNGKey(args.seed))))
    program = jax.jit(lambda run: train(run, 1))

    def iterate(run):
        answers = compiled_quickly(lambda: jax.device_get(program(run)))
        run, metrics, checked, episodes = answers
        assert all(map(np.isfinite, checked.values()))
        return run, (metrics, [x[0] for x in episodes])

    return args, run, iterate


# an iteration once more: environments and advantages step by step, PyTorch's autograd and Adam


LAYERS = ("Dense_0", "Dense_1", "Dense_2")


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
    """The rollout of a run's next iteration, the world after it, and the orders of the epochs.

    By gymnax's own step, with the random numbers that the program draws."""
    env, env_params = gymnax.make(args.env_id)
    _, noise_key, env_key, order_key = jax.random.split(run["key"], 4)
    rows, size = (args.num_steps, args.num_envs), args.num_steps * args.num_envs
    noise = np.asarray(jax.random.gumbel(noise_key, (*rows, env.num_actions)))
    step_keys, reset_keys = jax.random.split(env_key, (2, size))
    step_keys = step_keys.reshape(*rows, -1)
    fresh = jax.device_get(jax.jit(jax.vmap(env.reset_env, (0, None)))(reset_keys, env_params))
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
    return (
        [np.stack(column) for column in zip(*rollout, strict=True)],
        world,
        orders_of(args, order_key, size),
    )


def orders_of(args, key, size):
    """The order of rows in each epoch."""
    keys = jax.random.split(key, args.update_epochs)
    return np.stack([jax.random.permutation(key, size) for key in keys])


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
    """The metrics of an iteration in which Adam changes params as in ppo.py, and what clips did."""
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


WATCHED = "--env-id GymnaxProbe/RandomEnds-v0 --num-envs 3 --num-steps 32 --num-minibatches 4"
WATCHED += " --update-epochs 3 --total-timesteps 384 --learning-rate 0.004 --gamma 0.9"
WATCHED += " --gae-lambda 0.7 --clip-coef 0.05 --vf-coef 0.7 --ent-coef 0.3 --max-grad-norm 0.4"
WATCHED = WATCHED.split()


@functools.cache
def watch(file, *flags, **form):
    """The states of a run before, between and after two iterations, and what each logged."""
    args, run, program = begin(file, *WATCHED, *flags, **form)
    states, logs = [run], []
    for _ in range(2):
        run, log = program(run)
        states.append(run)
        logs.append(log)
    return args, states, logs


def test_core_1_episodes_run_on_across_rollouts(file, tmp_path):
    """The world after an iteration, and every end in it, are those of gymnax, step by step."""
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
    """Against env.step, which resets by itself, on CartPole, with falls and a truncation."""
    flags = "--num-envs 2 --num-steps 1 --num-minibatches 1 --update-epochs 1 --learning-rate 1e-5"
    flags = flags.split()
    _, run, program = begin(file, *flags, "--total-timesteps", 10**6)
    env, env_params = gymnax.make("CartPole-v1")
    run["world"]["env_state"] = run["world"]["env_state"].replace(time=np.int32([0, 499]))
    ends, cuts = 0, 0
    for _ in range(40):
        before, (run, (_, (is_over, returns, lengths))) = run, program(run)
        _, noise_key, env_key, _ = jax.random.split(before["key"], 4)
        log_probs = (
            policy_of(tensors(before["agent"]["params"]), before["world"]["obs"]).detach().numpy()
        )
        actions = (log_probs + np.asarray(jax.random.gumbel(noise_key, (1, 2, 2)))[0]).argmax(-1)
        step_keys, reset_keys = jax.random.split(env_key, (2, 2))
        fresh, _ = jax.vmap(env.reset, (0, None))(reset_keys, env_params)
        stepped = jax.vmap(env.step, (0, 0, 0, None))(
            step_keys, before["world"]["env_state"], actions, env_params
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
    """Order of rows, advantages, losses, gradients and Adam's steps in two iterations."""
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


@pytest.mark.slow
def test_gpu_form_equals_cpu_form(file, tmp_path):
    """Unrolled loops and sums of products where there are few rows."""
    _, states, logs = watch(file)
    _, gpu_states, gpu_logs = watch(file, few_rows=True)
    assert jax.tree.structure(states) == jax.tree.structure(gpu_states), (
        "a checkpoint of one is one of the other"
    )
    for got, wanted in zip(leaves((gpu_states, gpu_logs)), leaves((states, logs)), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5, rtol=1e-4)
    assert not same(states[-1]["agent"], gpu_states[-1]["agent"]), "not the same program"


# known answers

PROBE_FLAGS = "--total-timesteps 10240 --num-envs 8 --num-steps 16 --learning-rate 0.01 --gamma 0.5"
PROBE_FLAGS = (*PROBE_FLAGS.split(), "--ent-coef", 0, "--no-clip-vloss")


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


@pytest.mark.slow
def test_learns_cartpole_four_times_at_once(file, tmp_path):
    harness.train(file, tmp_path, *FAST_CARTPOLE, "--num-seeds", 4)
    means = [
        np.mean([value for _, value in scalars(run)["charts/episodic_return"]][-10:])
        for run in runs_of(tmp_path)
    ]
    assert len(means) == 4 and min(means) >= 400, means


FAST_CARTPOLE = "--total-timesteps 150000 --num-envs 8 --num-steps 64 --learning-rate 0.001"
FAST_CARTPOLE += " --gamma 0.98 --gae-lambda 0.8 --update-epochs 8 --num-minibatches 2 --ent-coef 0"
FAST_CARTPOLE = (*FAST_CARTPOLE.split(), "--no-clip-vloss")


@pytest.mark.parametrize("name", ["ppo_jax", "ppo_rnn_jax"])
def test_images_are_convolved(name):
    """The product of patches and matrix is what a convolution with the same weights computes."""
    names, rng = runpy.run_path(str(FILES[name])), np.random.default_rng(1)
    network = names["Network"](5, 1.0) if name == "ppo_jax" else names["Network"]()
    obs = rng.random((2, 10, 9, 4), np.float32)
    params = network.init(jax.random.key(1), obs)
    seen = network.apply(params, obs, capture_intermediates=True)[1]["intermediates"]["Dense_0"][
        "__call__"
    ][0]
    kernel, layout = (
        params["params"]["Dense_0"]["kernel"].reshape(3, 3, 4, 16),
        ("NHWC", "HWIO", "NHWC"),
    )
    convolved = jax.lax.conv_general_dilated(obs, kernel, (1, 1), "VALID", dimension_numbers=layout)
    assert seen.shape == (2, 8, 7, 16)
    np.testing.assert_allclose(seen, convolved, atol=1e-5)


@pytest.mark.slow
def test_learns_breakout(file, tmp_path):
    """In MinAtar, where random play returns about 0.5 and one that hits the same bricks 6."""
    flags = "--total-timesteps 1000000 --num-envs 64 --learning-rate 0.001 --ent-coef 0.05".split()
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


FEW = "--num-envs 2 --num-steps 32 --num-minibatches 2 --update-epochs 2 --total-timesteps 512"
FEW = (*FEW.split(), "--log-interval", 2, "--checkpoint-interval", 4)  # 8 iterations of 64 steps


def halfway(file, folder, *flags):
    """Two folders: of finished runs, and of copies of them when they had saved the middle step."""
    real = os.replace

    def replace(source, target):
        real(source, target)
        run = Path(target).parent
        if Path(target).name == "checkpoint.msgpack" and step_of(run) == 4 * 64:
            shutil.copytree(run, folder / "part" / "runs" / run.name)

    with mock.patch("os.replace", replace):
        train(file, folder / "whole", *flags)
    return folder / "whole", folder / "part"


def step_of(run):
    return int(read_checkpoint(run)["global_step"])


def test_runs_side_by_side(file, tmp_path):
    """Each has its seed, its values and its folder, and is the run that it would be alone.

    --resume of one of them continues all, bit for bit, and so it does with a run that was alone.
    """
    sweep = ("--sweep", "learning_rate=2.5e-4,1e-2", "ent_coef=0.01,0.5")
    whole, part = halfway(file, tmp_path / "many", *FEW, "--seed", 4, "--num-seeds", 2, *sweep)
    told = [about(run)["args"] for run in runs_of(whole)]
    assert sorted((x["learning_rate"], x["ent_coef"], x["seed"]) for x in told) == [
        (rate, bonus, seed) for rate in (2.5e-4, 1e-2) for bonus in (0.01, 0.5) for seed in (4, 5)
    ]
    for run, x in zip(runs_of(whole), told, strict=True):
        values = f"learning_rate={x['learning_rate']:g}-ent_coef={x['ent_coef']:g}"
        assert run.name.startswith(f"CartPole-v1__ppo_jax-{values}__{x['seed']}__")
        assert (x["num_seeds"], x["sweep"], x["gamma"]) == (1, [], 0.99)
        rates = [rate for _, rate in scalars(run)["charts/learning_rate"]]
        annealed = x["learning_rate"] * (1 - np.array([1, 3, 5, 7]) / 8)
        np.testing.assert_allclose(rates, annealed, rtol=1e-6)
    assert len({about(run)["batch"] for run in runs_of(whole)}) == 1
    final = [leaves(read_checkpoint(run)["agent"]["params"]) for run in runs_of(whole)]
    assert len({content[1].tobytes() for content in final}) == 8, "no two are alike"

    alone, alone_part = halfway(file, tmp_path / "alone", *FEW, "--seed", 5)
    run = only_run(alone)
    like = about(run)["args"] | {"exp_name": "ppo_jax-learning_rate=0.00025-ent_coef=0.01"}
    (twin,) = (run for run, x in zip(runs_of(whole), told, strict=True) if x == like)
    mine, its = read_checkpoint(run), read_checkpoint(twin)
    assert same(mine["key"], its["key"]) and step_of(run) == step_of(twin) == 8 * 64
    for got, wanted in zip(leaves(mine["agent"]), leaves(its["agent"]), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5)  # XLA adds up many in another order
    for metric in ("charts/episodic_return", "charts/episodic_length"):
        assert scalars(twin)[metric] == means_of_calls(scalars(run)[metric])

    for done, cut in ((whole, part), (alone, alone_part)):
        assert {step_of(run) for run in runs_of(cut)} == {4 * 64}
        for a, b in zip(runs_of(done), runs_of(cut), strict=True):
            shutil.copy(next(a.glob("events*")), b)  # curves beyond the checkpoint are hidden
        train(file, tmp_path, "--resume", runs_of(cut)[-1])
        for a, b in zip(runs_of(done), runs_of(cut), strict=True):
            assert a.name == b.name and same(read_checkpoint(a), read_checkpoint(b))
            assert without_speed(a) == without_speed(b) and without_speed(b)


def means_of_calls(episodes):
    """What many runs log, of the episodes that a run logs which is alone."""
    calls = {last: [x for step, x in episodes if last - 128 < step <= last] for last in LAST_STEPS}
    return [(last, pytest.approx(np.mean(values))) for last, values in calls.items() if values]


LAST_STEPS = (128, 256, 384, 512)


@pytest.mark.slow
def test_only_runs_of_one_program_at_one_step_are_resumed(file, tmp_path):
    """If the program died while it saved them, those at the same step as the given one.

    A run without a checkpoint starts over, and runs of other programs are left alone."""
    flags = (*FEW, "--total-timesteps", 128)
    train(file, tmp_path, *flags, "--seed", 7)
    other = only_run(tmp_path)
    train(file, tmp_path, *flags, "--num-seeds", 2)
    ahead, behind = (run for run in runs_of(tmp_path) if run != other)
    (behind / "checkpoint.msgpack").unlink()
    before = read_checkpoint(ahead), read_checkpoint(other)
    assert train(file, tmp_path, "--resume", ahead)["run_folders"] == (ahead,)
    assert train(file, tmp_path, "--resume", behind)["run_folders"] == (behind,)
    assert step_of(behind) == 128, "it starts over"
    assert train(file, tmp_path, "--resume", behind)["run_folders"] == (ahead, behind)
    assert train(file, tmp_path, "--resume", other)["run_folders"] == (other,)
    assert same(before, (read_checkpoint(ahead), read_checkpoint(other)))
    shutil.move(ahead, tmp_path / "moved")
    assert train(file, tmp_path, "--resume", behind)["run_folders"] == (behind,)


@pytest.mark.slow  # test_contract has the signal, test_runs_side_by_side the resume of all
def test_the_first_signal_saves_all_runs(file, tmp_path, monkeypatch):
    """Each of them; resumed, they are what they would have been."""
    flags = (*FEW, "--num-seeds", 2, "--checkpoint-interval", 100)
    train(file, tmp_path / "whole", *flags)
    update = tqdm.update

    def send(progress, steps):
        update(progress, steps)
        if progress.n == 256:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(tqdm, "update", send)
    with pytest.raises(SystemExit) as end:
        train(file, tmp_path / "cut", *flags)
    monkeypatch.undo()
    first, second = runs_of(tmp_path / "cut")
    where = Path("runs", second.name)
    assert end.value.code == f"interrupted at step 256, continue with --resume {where}"
    assert step_of(first) == step_of(second) == 256
    train(file, tmp_path / "cut", "--resume", where)
    for a, b in zip(runs_of(tmp_path / "whole"), (first, second), strict=True):
        assert same(read_checkpoint(a), read_checkpoint(b))
        assert without_speed(a) == without_speed(b)


def test_a_float_flag_of_ones_own_can_be_swept(file, tmp_path):
    """Without a list of such flags: its values reach the program, the folders and the run.json."""
    copy = tmp_path / "ppo_jax.py"
    old = "    max_grad_norm: float = 0.5  # maximum gradient norm\n"
    source = file.read_text().replace(old, f"{old}    bonus: float = 0.0  # added to each reward\n")
    copy.write_text(source.replace("deltas = rewards + ", "deltas = rewards + args.bonus + "))
    train(copy, tmp_path, *FEW, "--total-timesteps", 128, "--sweep", "bonus=0,0.5", "gamma=0,1e-9")
    runs = runs_of(tmp_path)
    assert [about(run)["args"]["bonus"] for run in runs] == [0, 0, 0.5, 0.5]
    assert [run.name.split("__")[1] for run in runs[:2]] == [
        "ppo_jax-bonus=0-gamma=0",
        "ppo_jax-bonus=0-gamma=1e-09",
    ]
    losses = [scalars(run)["losses/value_loss"][0][1] for run in runs]
    assert losses[0] == pytest.approx(losses[1]) and losses[2] > 1.3 * losses[0]


@pytest.mark.parametrize(
    ("total", "length"),
    [(10, 2), (7, 1), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((9, 3), (12, 4)))],
)  # each is a program to compile
def test_all_calls_have_one_length(file, tmp_path, total, length):
    """A shorter last call would be compiled anew, which takes longer than a short run."""
    tiny = ("--num-envs", 1, "--num-steps", 8, "--num-minibatches", 1, "--update-epochs", 1)
    flags = (*tiny, "--log-interval", 4, "--total-timesteps", 8 * total)
    names = train(file, tmp_path, *flags)
    run = only_run(tmp_path)
    steps = [step for step, _ in scalars(run)["charts/SPS"]]
    assert steps == list(range(8 * length, 8 * total + 1, 8 * length))
    assert names["train"]._cache_size() == 1 and step_of(run) == 8 * total


# interruptions and what cannot work


@pytest.mark.slow
def test_killed_runs_are_resumed(file, tmp_path):
    """After a SIGKILL, from the last checkpoints that are whole."""
    flags = ("--num-envs", 2, "--num-steps", 32, "--log-interval", 1, "--checkpoint-interval", 1)
    command = [sys.executable, file, *flags, "--num-seeds", 2, "--total-timesteps", 10**7]
    silent = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = subprocess.Popen(list(map(str, command)), cwd=tmp_path, **silent)
    deadline = time.time() + 120
    while len(list(tmp_path.glob("runs/*/checkpoint.msgpack"))) < 2 and time.time() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    last = runs_of(tmp_path)[-1]
    reached = step_of(last)
    assert 0 < reached < 10**6 and reached % 64 == 0
    for run in runs_of(tmp_path):
        edit(run, total_timesteps=reached + 128)
    for run in runs_of(tmp_path):
        train(file, tmp_path, "--resume", run)
    assert {step_of(run) for run in runs_of(tmp_path)} == {reached + 128}


def test_a_run_that_diverges_is_named(file, tmp_path):
    """The line on stderr says which of many runs it was, and the last good checkpoint stays."""
    sweep = ("--sweep", "learning_rate=1e-3,1e30")
    with pytest.raises(SystemExit) as end:
        train(file, tmp_path, *FEW, *sweep, "--checkpoint-interval", 1)
    _, run = runs_of(tmp_path)
    assert "learning_rate=1e+30" in run.name
    assert end.value.code == f"loss of {run.name} at step 128: nan", end.value.code
    assert not (run / "checkpoint.msgpack").exists()


@pytest.mark.slow
def test_videos_are_gymnasiums(file, tmp_path):
    train(file, tmp_path, *FEW, "--capture-video")
    videos = sorted((only_run(tmp_path) / "videos").glob("step-*-episode-0.mp4"))
    assert [video.name.split("-")[1] for video in videos] == ["256", "512"]
    assert all(video.stat().st_size > 1000 for video in videos)
