"""cleanrl/ppo_atari_envpool_xla_jax.py and its twin with scans. test_xla_N guards detail N of ppo-envpool-xla.md in
docs/rl-algorithms, the others those of ppo.md; tests/mutations shows that each test bites.

The pools are those of ppo_atari_envpool.py, where they are tested; tests/test_siblings.py sees to it that they stay the same.
Compiling a convolutional network takes seconds: where the network does not matter, the programs have a small one.
"""

import functools
import runpy
import shutil
import sys
import time
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.serialization import msgpack_serialize

from tests import harness
from tests.harness import FILES, only_run, probe, read_checkpoint, same, scalars
from tests.test_dqn_jax import compiled_quickly, leaves, play, tensors, train
from tests.test_ppo_atari import ACTION_FLAGS, PROBE_FLAGS, images_of

pytest.importorskip("envpool")
LOOPS, SCAN = FILES["ppo_atari_envpool_xla_jax"], FILES["ppo_atari_envpool_xla_jax_scan"]


@pytest.fixture(params=[LOOPS, SCAN], ids=["loops", "scan"])
def file(request):
    return request.param


# where both do the same: the loops take long to compile
mostly_scan = pytest.mark.parametrize(
    "file", [pytest.param(LOOPS, marks=pytest.mark.slow), SCAN], ids=["loops", "scan"]
)


class Tiny(nn.Module):
    """A network that compiles quickly and sees a few of the pixels."""

    num_actions: int

    @nn.compact
    def __call__(self, obs):
        hidden = nn.tanh(nn.Dense(16)(obs[:, :, ::42, 0].reshape(len(obs), -1) / 255))
        return nn.log_softmax(nn.Dense(self.num_actions)(hidden)), nn.Dense(1)(hidden).squeeze(-1)


def parse(file, *flags):
    names = runpy.run_path(str(file))
    with mock.patch.object(sys, "argv", [str(file), *map(str, flags)]):
        return names, names["tyro"].cli(names["Args"])


def begin(file, *flags, tiny=True):
    """The arguments, the pool, an agent and a world that have not begun, and a function that goes an iteration further."""
    names, args = parse(file, *flags)
    pool = harness.make_pool(args.env_id, num_envs=args.num_envs, seed=5)
    (obs, _), (handle, _, _, step) = pool.reset(), pool.xla()
    init, iterate = names["make_program"](args, (Tiny if tiny else names["Agent"])(2))
    agent = compiled_quickly(lambda: jax.device_get(jax.jit(init)(jax.random.key(args.seed), obs)))
    no = np.zeros(args.num_envs, bool)
    program = jax.jit(functools.partial(iterate, step))
    world = dict(handle=handle, obs=obs.copy(), is_last=no, scores=no.astype(np.float32))
    return (
        args,
        pool,
        agent,
        world,
        lambda *run: compiled_quickly(lambda: jax.device_get(program(*run))),
    )


# an iteration, written anew in PyTorch: reset rows left out, advantages by walking each episode, autograd and Adam


def tiny_torch(params):
    """Tiny's parameters in PyTorch, what it makes of observations, and a function that takes in other parameters."""
    params = tensors(params)

    def forward(obs):
        layers = params["params"]
        x = torch.as_tensor(obs)[:, :, ::42, 0].flatten(1) / 255
        x = (x @ layers["Dense_0"]["kernel"] + layers["Dense_0"]["bias"]).tanh()
        log_probs, value = (
            x @ layers[name]["kernel"] + layers[name]["bias"] for name in ("Dense_1", "Dense_2")
        )
        return log_probs.log_softmax(-1), value.squeeze(-1)

    return jax.tree.leaves(params), forward, leaves


def state_of(params):
    """The parameters as those of ppo_atari_envpool.py's agent."""
    layers, state = params["params"], {}
    for name, place in (("Conv_0", "network.0"), ("Conv_1", "network.2"), ("Conv_2", "network.4")):
        state[f"{place}.weight"] = np.asarray(layers[name]["kernel"]).transpose(3, 2, 0, 1)
    hidden = np.asarray(layers["Dense_0"]["kernel"]).reshape(
        7, 7, 64, 512
    )  # PyTorch has the channels first
    state["network.7.weight"] = hidden.transpose(3, 2, 0, 1).reshape(512, -1)
    state |= {
        f"{place}.weight": np.asarray(layers[name]["kernel"]).T
        for name, place in (("Dense_1", "actor"), ("Dense_2", "critic"))
    }
    places = dict(
        Conv_0="network.0",
        Conv_1="network.2",
        Conv_2="network.4",
        Dense_0="network.7",
        Dense_1="actor",
        Dense_2="critic",
    )
    state |= {f"{place}.bias": np.asarray(layers[name]["bias"]) for name, place in places.items()}
    return {name: torch.tensor(np.ascontiguousarray(x)) for name, x in state.items()}


def envpool_torch(params):
    """The same for the agent of ppo_atari_envpool.py itself."""
    space = mock.Mock(
        single_observation_space=mock.Mock(shape=(4, 84, 84)),
        single_action_space=mock.Mock(n=params["params"]["Dense_1"]["bias"].size),
    )
    agent = runpy.run_path(str(FILES["ppo_atari_envpool"]))["Agent"](space)
    agent.load_state_dict(state_of(params))
    order = [name for name, _ in agent.named_parameters()]
    as_arrays = lambda params: [state_of(params)[name].numpy() for name in order]  # noqa: E731
    return list(agent.parameters()), lambda obs: agent(torch.as_tensor(obs)), as_arrays


def advantages_of(args, values, rewards, terminated, is_last):
    """By a slow reference that walks each episode by itself, for the rows that are steps."""
    advantages = np.zeros_like(rewards)
    for t, e in np.argwhere(~is_last[:-1]):
        weight, k = 1.0, t
        while True:
            following = 0.0 if terminated[k, e] else values[k + 1, e]
            advantages[t, e] += weight * (rewards[k, e] + args.gamma * following - values[k, e])
            if is_last[k + 1, e] or k == args.num_steps - 1:
                break
            weight, k = weight * args.gamma * args.gae_lambda, k + 1
    return advantages


def learn(args, forward, parameters, adam, world, answers, iteration):
    """The metrics of an iteration on what the environments answered, and how often the clips did something."""
    obs = np.stack([world["obs"], *[answer[0] for answer in answers]])
    scores, terminated, truncated = (np.stack([answer[i] for answer in answers]) for i in (1, 2, 3))
    actions = np.stack([answer[4]["actions"] for answer in answers])
    is_last, rewards = (
        np.concatenate([world["is_last"][None], terminated | truncated]),
        np.sign(scores),
    )
    with torch.no_grad():
        log_probs, values = (x.numpy() for x in forward(obs.reshape(-1, *obs.shape[2:])))
    log_probs, values = log_probs.reshape(*is_last.shape, 2), values.reshape(is_last.shape)
    noise_key, order_key = jax.random.split(
        jax.random.fold_in(jax.random.key(args.seed), iteration)
    )
    noise = jax.random.gumbel(noise_key, (*actions.shape, 2))
    np.testing.assert_array_equal(
        actions, (log_probs[:-1] + noise).argmax(-1), "samples of the policy"
    )
    advantages = advantages_of(args, values, rewards, terminated, is_last)
    returns, is_real = advantages + values[:-1], ~is_last[:-1].reshape(-1)
    logprobs = np.take_along_axis(log_probs[:-1], actions[..., None], 2)[..., 0]
    columns = [
        x.reshape(-1, *x.shape[2:])
        for x in (obs[:-1], actions, logprobs, values[:-1], advantages, returns)
    ]
    rate = args.learning_rate * (
        1 - iteration / (args.total_timesteps // is_real.size) if args.anneal_lr else 1
    )
    adam.param_groups[0]["lr"] = rate
    clipfracs, did = [], dict(ratio=0, value=0, norm=0, left_out=int((~is_real).sum()), epochs=0)
    for key in jax.random.split(order_key, args.update_epochs):
        for mb in np.asarray(jax.random.permutation(key, is_real.size)).reshape(
            args.num_minibatches, -1
        ):
            mb = mb[is_real[mb]]
            b_obs, b_actions, b_logprobs, b_values, b_advantages, b_returns = (
                torch.tensor(x[mb]) for x in columns
            )
            log_probs, value = forward(b_obs)
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
            loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
            adam.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
            adam.step()
            clipfracs.append(float(((ratio - 1).abs() > args.clip_coef).float().mean()))
            did["ratio"] += int((gain < ratio * b_advantages).sum())
            did["value"] += int((worse > error).sum())
            did["norm"] += int(norm > args.max_grad_norm)
        did["epochs"] += 1
        approx_kl = (ratio - 1 - ratio.log()).mean()
        if args.target_kl is not None and approx_kl > args.target_kl:
            break
    metrics = {
        "loss": loss,
        "value_loss": value_loss,
        "policy_loss": policy_loss,
        "entropy": entropy,
        "approx_kl": approx_kl,
    }
    metrics |= {"old_approx_kl": -ratio.log().mean(), "clipfrac": np.mean(clipfracs)}
    real = is_real.reshape(rewards.shape)
    metrics |= {"explained_variance": 1 - advantages[real].var() / returns[real].var()}
    metrics = {f"losses/{name}": float(torch.as_tensor(x).detach()) for name, x in metrics.items()}
    return metrics | {"charts/learning_rate": rate}, did


WATCHED = (
    "--env-id",
    "ImageProbe/RandomEnds-v0",
    "--num-envs",
    3,
    "--num-steps",
    16,
    "--num-minibatches",
    4,
)
WATCHED = (
    *WATCHED,
    "--update-epochs",
    3,
    "--total-timesteps",
    4 * 48,
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
def watch(file, *flags, tiny=True):
    """The states of a run before, between and after two iterations, with what each iteration logged, and the pool."""
    args, pool, agent, world, program = begin(file, *WATCHED, *flags, tiny=tiny)
    states, logs = [(agent, world)], []
    for iteration in range(2):
        agent, world, log = program(agent, world, iteration)
        states.append((agent, world))
        logs.append(log)
    return args, pool, states, logs


def check_iterations(file, *flags, tiny=True):
    """That two iterations, of which the second is annealed, are those of the reference; what the clips and epochs did."""
    args, pool, states, logs = watch(file, *flags, tiny=tiny)
    parameters, forward, as_arrays = (tiny_torch if tiny else envpool_torch)(states[0][0]["params"])
    adam, done = torch.optim.Adam(parameters, eps=1e-5), []
    for iteration, (metrics, _) in enumerate(logs):
        (before, world), (after, _) = states[iteration : iteration + 2]
        with (
            torch.no_grad()
        ):  # each iteration from where the program was, so that rounding does not add up
            for mine, its in zip(parameters, as_arrays(before["params"]), strict=True):
                mine.copy_(torch.tensor(its))
        answers = pool.answers[16 * iteration : 16 * iteration + 16]
        expected, did = learn(args, forward, parameters, adam, world, answers, iteration)
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=5e-4, abs=2e-5), name
        for got, wanted in zip(as_arrays(after["params"]), parameters, strict=True):
            np.testing.assert_allclose(got, wanted.detach().numpy(), atol=1e-5)
        done.append(did)
    assert (
        sum(did["left_out"] for did in done) > 5 and len({did["left_out"] for did in done}) == 2
    ), "some rows only reset"
    return args, expected, done


OTHERS = pytest.param(
    ("--no-norm-adv", "--clip-vloss", "--no-anneal-lr"), marks=pytest.mark.slow, id="others"
)


@pytest.mark.parametrize("flags", [pytest.param((), id="default"), OTHERS])
def test_xla_4_rows_of_no_weight_are_as_good_as_left_out(file, tmp_path, flags):
    """And core 3 to 12: advantages, order of rows, losses, gradients and Adam's steps are those of the textbook in PyTorch."""
    args, expected, done = check_iterations(file, *flags)
    ratio, value, norm = (sum(did[name] for did in done) for name in ("ratio", "value", "norm"))
    assert ratio > 5 and norm > 5 and (value > 5) == args.clip_vloss, "the clips must matter"
    assert expected["charts/learning_rate"] == pytest.approx(0.004 if flags else 0.003)


@pytest.mark.slow
def test_an_iteration_is_that_of_ppo_atari_envpool(file, tmp_path):
    """The same with the Atari network, against the agent of ppo_atari_envpool.py."""
    _, _, done = check_iterations(file, "--learning-rate", 0.0005, tiny=False)
    assert all(did["norm"] > 2 for did in done)


@mostly_scan
def test_xla_5_a_policy_that_moved_too_far_learns_no_more(file, tmp_path):
    """It stops after the epoch in which it did, and its metrics are those of the epochs that there were."""
    _, _, done = check_iterations(file, "--target-kl", 0.0003)
    assert 0 < min(did["epochs"] for did in done) < 3, "it must have stopped"
    never, without = (leaves(watch(file, *flags)[3][1][0]) for flags in (("--target-kl", 1e9), ()))
    np.testing.assert_allclose(never, without, rtol=1e-4, atol=1e-6)


def test_xla_2_loops_and_scans_come_to_the_same(file, tmp_path):
    """Weights, world and logs after two iterations."""
    other = SCAN if file.stem == LOOPS.stem else LOOPS
    (_, _, mine, my_logs), (_, _, its, its_logs) = watch(file), watch(other)
    for x, y in zip(leaves([mine, my_logs]), leaves([its, its_logs]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-6)


def compile_seconds(file, *flags):
    """CPU time, which others at work on the machine do not change much."""
    names, args = parse(file, *flags)
    pool = harness.make_pool("ImageProbe/ConstantValue-v0", num_envs=args.num_envs, seed=5)
    (obs, _), (handle, _, _, step) = pool.reset(), pool.xla()
    init, iterate = names["make_program"](args, names["Agent"](2))
    agent, no = jax.eval_shape(init, jax.random.key(1), obs), np.zeros(args.num_envs, bool)
    world = dict(handle=handle, obs=obs, is_last=no, scores=no.astype(np.float32))
    jax.config.update("jax_enable_compilation_cache", False)  # of what was compiled before
    try:
        start = time.process_time()
        jax.jit(functools.partial(iterate, step)).lower(agent, world, 0).compile()
        return time.process_time() - start
    finally:
        jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_xla_2_scans_compile_in_a_third_of_the_time(tmp_path):
    """Also with an eighth of the steps. With all 128, loops had not ended after 100 s of CPU time when scans took 7."""
    flags = ("--num-steps", 16)
    assert compile_seconds(SCAN, *flags) < compile_seconds(LOOPS, *flags) / 3


# the environments


def test_xla_1_steps_come_in_order(file, tmp_path):
    """The handle of each step is the one that the step before returned, also from one iteration to the next."""
    _, pool, states, _ = watch(file)
    assert pool.handles == list(range(32)) and states[-1][1]["handle"] == 32
    np.testing.assert_array_equal(states[-1][1]["obs"], pool.answers[-1][0])


def test_xla_1_real_games_are_those_that_python_steps(tmp_path):
    """Breakout until games end: what the compiled program was told of them, and where it stands, is what another pool of the
    same seed says to the same actions, lost lives, resets and scores included."""
    names, args = parse(
        SCAN, "--num-envs", 2, "--num-steps", 110, "--num-minibatches", 1, "--update-epochs", 1
    )
    (mine, obs), (its, _) = (
        (envs, envs.reset(seed=7)[0]) for envs in (names["make_envs"](args, 2) for _ in range(2))
    )
    handle, _, _, step = mine.env.xla()
    init, iterate = names["make_program"](args, Tiny(4))
    agent, no = jax.jit(init)(jax.random.key(1), obs), np.zeros(2, bool)
    world = dict(handle=handle, obs=jnp.array(obs), is_last=no, scores=no.astype(np.float32))
    program, policy = (
        jax.jit(functools.partial(iterate, step)),
        jax.jit(lambda params, obs: Tiny(4).apply(params, obs)[0]),
    )
    games, lives_lost, now = 0, 0, obs.copy()
    for iteration in range(3):
        params, (agent, world, (_, (is_over, scores, lengths))) = (
            agent["params"],
            program(agent, world, iteration),
        )
        key, _ = jax.random.split(jax.random.fold_in(jax.random.key(1), iteration))
        for t, noise in enumerate(jax.random.gumbel(key, (110, 2, 4))):
            now, _, terminated, truncated, infos = its.step(
                np.asarray((policy(params, now) + noise).argmax(-1))
            )
            np.testing.assert_array_equal(is_over[t], infos.get("_episode", no))
            for i in np.flatnonzero(is_over[t]):
                assert (scores[t, i], lengths[t, i]) == (
                    infos["episode"]["r"][i],
                    infos["episode"]["l"][i],
                )
                games += 1
            lives_lost += (terminated & ~np.asarray(is_over[t])).sum()
        np.testing.assert_array_equal(world["obs"], now)
        np.testing.assert_array_equal(world["is_last"], terminated | truncated)
        np.testing.assert_array_equal(world["scores"], its.scores)
    assert games >= 1 and lives_lost >= 6


def test_xla_3_every_game_is_reported_where_it_ends(file, tmp_path):
    """At its step and with its whole score, also the first ones; averages are over the last 20, none before a game."""
    flags = (
        "--num-envs",
        4,
        "--num-steps",
        8,
        "--num-minibatches",
        1,
        "--update-epochs",
        1,
        "--total-timesteps",
        128,
    )
    names = train_tiny(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *flags)
    score, expected = np.zeros(4), {}
    for t, (_, rewards, terminated, truncated, infos) in enumerate(names["envs"].env.answers):
        score += rewards
        for i in np.flatnonzero(terminated | truncated):
            expected[4 * t + i + 1] = score[i], infos["elapsed_step"][i]
            score[i] = 0
    logged, (scores, lengths) = scalars(only_run(tmp_path)), zip(*expected.values(), strict=True)
    assert len(expected) > 24 and len({step % 4 for step in expected}) == 4
    for name, values in (("return", scores), ("length", lengths)):
        steps, found = zip(*logged[f"charts/episodic_{name}"], strict=True)
        assert steps == tuple(expected) and found == pytest.approx(values, abs=1e-5)
        averages = [np.mean(values[max(0, i - 19) : i + 1]) for i in range(len(values))]
        steps, found = zip(*logged[f"charts/avg_episodic_{name}"], strict=True)
        assert steps == tuple(expected) and found == pytest.approx(averages, abs=1e-5)
    assert all(value != round(value) for value in scores), "what is reported is not clipped"
    wanted = "loss value_loss policy_loss entropy old_approx_kl approx_kl clipfrac explained_variance".split()
    wanted = {f"losses/{name}" for name in wanted} | {
        "charts/learning_rate",
        "charts/SPS",
        "charts/SPS_update",
    }
    assert wanted == {
        name for name, values in logged.items() if [step for step, _ in values] == [32, 64, 96, 128]
    }


def train_tiny(file, folder, *flags):
    """Run a copy of a file that has the small network, in which the rest is the same."""
    source = file.read_text()
    tiny = "init, iterate = make_program(args, Agent(int(action_space.n)))"
    assert source.count(tiny) == 1
    copy = folder / "copy" / file.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(
        source.replace(
            tiny,
            "from tests.test_ppo_atari_envpool_xla_jax import Tiny\n    "
            + tiny.replace("Agent(", "Tiny("),
        )
    )
    return train(copy, folder, *flags)


def test_xla_6_compiling_is_not_in_the_speed(file, tmp_path, monkeypatch):
    real, ends = jax.stages.Lowered.compile, []

    def compile_slowly(lowered, *flags, **options):
        compiled = real(lowered, *flags, **options)
        time.sleep(1)
        ends.append(time.time())
        return compiled

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_slowly)
    flags = (
        "--num-envs",
        4,
        "--num-steps",
        8,
        "--num-minibatches",
        1,
        "--update-epochs",
        1,
        "--total-timesteps",
        64,
    )
    names = train_tiny(file, tmp_path, "--env-id", probe(file, "ConstantValue"), *flags)
    assert len(ends) == 1 and names["loop_start"] > ends[0], (
        "the clock starts when the program is there"
    )
    speed = [value for _, value in scalars(only_run(tmp_path))["charts/SPS"]]
    assert len(speed) == 2 and speed[0] > 32 / (1 + time.time() - ends[0])


# the network


def test_core_2_orthogonal_weights_and_zero_biases(file, tmp_path):
    params = jax.jit(runpy.run_path(str(file))["Agent"](6).init)(
        jax.random.key(1), np.zeros((1, 4, 84, 84), np.uint8)
    )
    gains = dict.fromkeys(("Conv_0", "Conv_1", "Conv_2", "Dense_0"), 2**0.5) | {
        "Dense_1": 0.01,
        "Dense_2": 1,
    }
    assert params["params"].keys() == gains.keys()
    for name, gain in gains.items():
        weight = np.asarray(params["params"][name]["kernel"]).reshape(
            -1, params["params"][name]["bias"].size
        )
        weight = weight if len(weight) <= weight.shape[1] else weight.T
        np.testing.assert_allclose(weight @ weight.T, gain**2 * np.eye(len(weight)), atol=2e-5)
        assert np.abs(params["params"][name]["bias"]).max() == 0


@mostly_scan
def test_atari_8_the_network_is_that_of_ppo_atari_envpool(file, tmp_path):
    """And [atari 9]: what it says of the same bytes with the same weights, and its gradient [xla 7]."""
    network, obs = (
        runpy.run_path(str(file))["Agent"](6),
        np.random.default_rng(1).integers(0, 256, (5, 4, 84, 84), np.uint8),
    )
    params = network.init(jax.random.key(1), obs)
    params["params"]["Dense_1"]["kernel"] *= 50  # or its gradient would hardly be seen behind
    weights = np.random.default_rng(2).normal(size=(5, 7)).astype(np.float32)

    def loss(params):
        log_probs, values = network.apply(params, obs)
        return (weights * jnp.append(log_probs, values[:, None], 1)).sum(), (log_probs, values)

    grads, (log_probs, values) = compiled_quickly(
        lambda: jax.jit(jax.grad(loss, has_aux=True))(params)
    )
    parameters, forward, as_arrays = envpool_torch(params)
    its_log_probs, its_values = forward(obs)
    np.testing.assert_allclose(log_probs, its_log_probs.detach(), atol=1e-5)
    np.testing.assert_allclose(values, its_values.detach(), atol=1e-5)
    (torch.tensor(weights) * torch.cat([its_log_probs, its_values[:, None]], 1)).sum().backward()
    for mine, its in zip(as_arrays(grads), parameters, strict=True):
        np.testing.assert_allclose(
            mine, its.grad, rtol=1e-3, atol=1e-4 * float(its.grad.abs().max())
        )


def test_xla_7_gradients_of_convolutions_are_fast_in_a_loop(tmp_path):
    """On a CPU, as against what flax would do by itself: 20 times as fast when it was written."""
    convolve = runpy.run_path(str(SCAN))["convolve"]
    images, kernel = jnp.ones((16, 20, 20, 32)), jnp.ones((4, 4, 32, 64))
    flax = functools.partial(
        jax.lax.conv_general_dilated, padding="VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )

    def seconds(function):
        move = lambda kernel, _: (
            kernel - 1e-9 * jax.grad(lambda k: function(images, k, (2, 2)).sum())(kernel),
            None,
        )  # noqa: E731
        program = (
            jax.jit(lambda kernel: jax.lax.scan(move, kernel, None, 8)[0]).lower(kernel).compile()
        )
        start = time.process_time()
        program(kernel).block_until_ready()
        return time.process_time() - start

    assert seconds(convolve) < seconds(flax) / 3


# known answers


@pytest.mark.parametrize(
    ("name", "values"),
    [
        pytest.param("ConstantValue", {0: 1}, marks=pytest.mark.slow),
        pytest.param("TruncatedEveryStep", {0: 2}, marks=pytest.mark.slow),
        ("TwoEnds", {-1: 1, 1: 2}),
    ],
)
def test_values_of_probes(name, values, tmp_path):
    names = harness.train(
        SCAN, tmp_path, "--env-id", probe(SCAN, name), *PROBE_FLAGS, "--total-timesteps", 320
    )
    images = images_of([[number] * 4 for number in values]).numpy()
    learned = names["Agent"](2).apply(names["agent"]["params"], images)[1].tolist()
    assert learned == pytest.approx(list(values.values()), abs=0.25)


@pytest.mark.slow
def test_actions_of_probes(tmp_path):
    """Acting through load_policy in fresh environments, as every evaluation does."""
    names = harness.train(
        SCAN, tmp_path, "--env-id", probe(SCAN, "ActionAndObsMatter"), *ACTION_FLAGS
    )
    assert np.mean(play(names, only_run(tmp_path), games=80)) > 0.5


# the same seed, the same run

SMALL = (
    "--num-envs",
    2,
    "--num-steps",
    8,
    "--num-minibatches",
    2,
    "--update-epochs",
    2,
    "--checkpoint-interval",
    1,
)


def without_speed(run):
    """As text, in which a nan is like another: where all returns are alike, they have no variance to explain."""
    return {
        name: str(values)
        for name, values in scalars(run).items()
        if not name.startswith("charts/SPS")
    }


@mostly_scan
def test_same_seed_same_bits_and_a_resume_restarts_episodes_only(file, tmp_path, monkeypatch):
    """Bit for bit where all episodes are alike."""
    flags = ("--env-id", probe(file, "TruncatedEveryStep"), *SMALL, "--total-timesteps", 64)
    train_tiny(file, tmp_path / "whole", *flags)
    train_tiny(file, tmp_path / "again", *flags)
    train_tiny(file, tmp_path / "other", *flags, "--seed", 2)
    whole, again, other = (only_run(tmp_path / name) for name in ("whole", "again", "other"))
    assert same(read_checkpoint(whole), read_checkpoint(again)) and without_speed(
        whole
    ) == without_speed(again)
    assert not same(
        read_checkpoint(whole)["agent"]["params"], read_checkpoint(other)["agent"]["params"]
    )

    from tqdm import tqdm

    update = tqdm.update

    def stop(progress, steps):
        update(progress, steps)
        if progress.n == 48:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tqdm, "update", stop)
        train_tiny(file, tmp_path / "cut", *flags)
    run = only_run(tmp_path / "cut")
    assert read_checkpoint(run)["global_step"] == 32
    damaged, checkpoint = shutil.copytree(run, tmp_path / "damaged"), read_checkpoint(run)
    train_tiny(file, tmp_path / "cut", "--resume", run)
    assert same(read_checkpoint(whole), read_checkpoint(run)) and without_speed(
        whole
    ) == without_speed(run)

    bias = checkpoint["agent"]["params"]["params"]["Dense_0"]["bias"]
    for damage, words in (
        ({"global_step": 33}, "step 33 of another run"),
        ({"global_step": "x"}, "ValueError"),
        ({"agent": {}}, "cannot resume"),
        (
            {
                "agent": checkpoint["agent"]
                | {"opt_state": {"0": {}, "1": {"count": bias, "mu": bias, "nu": bias}}}
            },
            "other shapes",
        ),
    ):
        (damaged / "checkpoint.msgpack").write_bytes(msgpack_serialize(checkpoint | damage))
        with pytest.raises(SystemExit, match=words) as refusal:
            train_tiny(file, tmp_path / "cut", "--resume", damaged)
        assert refusal.value.code.startswith("cannot resume") and "\n" not in refusal.value.code


# learning


@pytest.mark.slow
@pytest.mark.timeout(14400)
def test_learns_pong(tmp_path):
    """With the flags and the bound of ppo_atari_envpool.py's test, where random play loses with -20.7."""
    batch = ("--num-envs", 16, "--num-steps", 32, "--num-minibatches", 8, "--update-epochs", 4)
    flags = (*batch, "--learning-rate", 0.0007, "--no-anneal-lr", "--gae-lambda", 0.9)
    harness.train(SCAN, tmp_path, "--env-id", "Pong-v5", *flags, "--total-timesteps", 400_000)
    returns = [value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]]
    assert np.mean(returns[-20:]) > -18
