"""cleanrl/ppo_atari_envpool_xla_jax.py and its twin with scans.

test_xla_N guards detail N of docs/rl-algorithms/ppo-envpool-xla.md, the others those of ppo.md;
tests/mutations shows that each test can fail. The pools are those of ppo_atari_envpool.py, where
they are tested; tests/test_siblings.py sees to it that they stay the same. Compiling a
convolutional network takes seconds: where the network does not matter, the programs have a small
one.
"""

import functools
import itertools
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
from tqdm import tqdm

from tests import harness, probes
from tests.harness import FILES, only_run, probe, read_checkpoint, same, scalars
from tests.test_dqn_jax import compiled_quickly, leaves, play, tensors, train, write
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


class Masked(nn.Module):
    """The same, but its first action is ruled out."""

    num_actions: int

    @nn.compact
    def __call__(self, obs):
        log_probs, values = Tiny(self.num_actions)(obs)
        return nn.log_softmax(log_probs.at[:, 0].set(-jnp.inf)), values


def parse(file, *flags):
    names = runpy.run_path(str(file))
    with mock.patch.object(sys, "argv", [str(file), *map(str, flags)]):
        return names, names["tyro"].cli(names["Args"])


def world_of(handle, obs):
    """Where the environments stand at the start."""
    no = np.zeros(len(obs), bool)
    return dict(handle=handle, obs=obs, is_last=no, scores=no.astype(np.float32))


def begin(file, *flags, network=Tiny):
    """The arguments, the pool, an agent and a world at the start, and a compiled iteration."""
    names, args = parse(file, *flags)
    pool = harness.make_pool(args.env_id, num_envs=args.num_envs, seed=5)
    (obs, _), (handle, _, _, step) = pool.reset(), pool.xla()
    init, iterate = names["make_program"](args, (network or names["Agent"])(2))
    agent = compiled_quickly(lambda: jax.device_get(jax.jit(init)(jax.random.key(args.seed), obs)))
    program = jax.jit(functools.partial(iterate, step))

    def further(*run):
        if network is None:  # compiled quickly, loops of the Atari network are 3e-4 off
            return jax.device_get(program(*run))
        return compiled_quickly(lambda: jax.device_get(program(*run)))

    return args, pool, agent, world_of(handle, obs.copy()), further


# an iteration, written anew in PyTorch: reset rows left out, advantages by walking each episode,
# autograd and Adam


def tiny_torch(params):
    """Tiny in PyTorch: parameters, what it makes of observations, and other parameters' arrays."""
    params = tensors(params)

    def dense(x, name):
        layer = params["params"][name]
        return x @ layer["kernel"] + layer["bias"]

    def forward(obs):
        x = torch.as_tensor(obs)[:, :, ::42, 0].flatten(1) / 255
        x = dense(x, "Dense_0").tanh()
        return dense(x, "Dense_1").log_softmax(-1), dense(x, "Dense_2").squeeze(-1)

    return jax.tree.leaves(params), forward, leaves


PLACES = {
    "Conv_0": "network.0",
    "Conv_1": "network.2",
    "Conv_2": "network.4",
    "Dense_0": "network.7",
    "Dense_1": "actor",
    "Dense_2": "critic",
}


def state_of(params):
    """The parameters as those of ppo_atari_envpool.py's agent, where channels come first."""
    state = {}
    for name, place in PLACES.items():
        kernel = np.asarray(params["params"][name]["kernel"])
        if name == "Dense_0":
            kernel = kernel.reshape(7, 7, 64, 512).transpose(2, 0, 1, 3).reshape(-1, 512)
        kernel = kernel.transpose(3, 2, 0, 1) if kernel.ndim == 4 else kernel.T
        state[f"{place}.weight"] = torch.tensor(np.ascontiguousarray(kernel))
        state[f"{place}.bias"] = torch.tensor(np.asarray(params["params"][name]["bias"]))
    return state


def envpool_torch(params):
    """The same as tiny_torch for the agent of ppo_atari_envpool.py itself."""
    space = mock.Mock(
        single_observation_space=mock.Mock(shape=(4, 84, 84)),
        single_action_space=mock.Mock(n=params["params"]["Dense_1"]["bias"].size),
    )
    agent = runpy.run_path(str(FILES["ppo_atari_envpool"]))["Agent"](space)
    agent.load_state_dict(state_of(params))
    order = [name for name, _ in agent.named_parameters()]

    def forward(obs):
        return agent(torch.as_tensor(obs))

    def as_arrays(params):
        state = state_of(params)
        return [state[name].numpy() for name in order]

    return list(agent.parameters()), forward, as_arrays


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
    """The metrics of an iteration on what the environments answered, and how often clips acted."""
    obs = np.stack([world["obs"], *[answer[0] for answer in answers]])
    scores, terminated, truncated = (np.stack([answer[i] for answer in answers]) for i in (1, 2, 3))
    actions = np.stack([answer[4]["actions"] for answer in answers])
    is_last = np.concatenate([world["is_last"][None], terminated | truncated])
    rewards = np.sign(scores)
    with torch.no_grad():
        log_probs, values = (x.numpy() for x in forward(obs.reshape(-1, *obs.shape[2:])))
    log_probs, values = log_probs.reshape(*is_last.shape, 2), values.reshape(is_last.shape)
    key = jax.random.fold_in(jax.random.key(args.seed), iteration)
    noise_key, order_key = jax.random.split(key)
    noise = jax.random.gumbel(noise_key, (*actions.shape, 2))
    samples = (log_probs[:-1] + noise).argmax(-1)
    np.testing.assert_array_equal(actions, samples, "samples of the policy")
    advantages = advantages_of(args, values, rewards, terminated, is_last)
    returns, is_real = advantages + values[:-1], ~is_last[:-1].reshape(-1)
    old_log_probs = np.take_along_axis(log_probs[:-1], actions[..., None], 2)[..., 0]
    columns = obs[:-1], actions, old_log_probs, values[:-1], advantages, returns
    columns = [x.reshape(-1, *x.shape[2:]) for x in columns]
    num_iterations = args.total_timesteps // is_real.size
    rate = args.learning_rate * (1 - iteration / num_iterations if args.anneal_lr else 1)
    adam.param_groups[0]["lr"] = rate
    clipfracs, did = [], dict(ratio=0, value=0, norm=0, left_out=int((~is_real).sum()), epochs=0)
    for key in jax.random.split(order_key, args.update_epochs):
        order = np.asarray(jax.random.permutation(key, is_real.size))
        for mb in order.reshape(args.num_minibatches, -1):
            mb = mb[is_real[mb]]
            b_obs, b_actions, b_log_probs, b_values, b_advantages, b_returns = (
                torch.tensor(x[mb]) for x in columns
            )
            log_probs, value = forward(b_obs)
            ratio = (log_probs[range(len(mb)), b_actions] - b_log_probs).exp()
            if args.norm_adv:
                centered = b_advantages - b_advantages.mean()
                b_advantages = centered / (b_advantages.std(correction=0) + 1e-8)
            near = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
            gain = torch.minimum(ratio * b_advantages, near * b_advantages)
            error = (value - b_returns) ** 2
            near_value = b_values + (value - b_values).clamp(-args.clip_coef, args.clip_coef)
            worse = torch.maximum(error, (near_value - b_returns) ** 2)
            worse = worse if args.clip_vloss else error
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
    real = is_real.reshape(rewards.shape)
    metrics = {
        "loss": loss,
        "value_loss": value_loss,
        "policy_loss": policy_loss,
        "entropy": entropy,
        "approx_kl": approx_kl,
        "old_approx_kl": -ratio.log().mean(),
        "clipfrac": np.mean(clipfracs),
        "explained_variance": 1 - advantages[real].var() / returns[real].var(),
    }
    metrics = {f"losses/{name}": float(torch.as_tensor(x).detach()) for name, x in metrics.items()}
    return metrics | {"charts/learning_rate": rate}, did


WATCHED = (
    "--env-id ImageProbe/RandomEnds-v0 --num-envs 3 --num-steps 16 --num-minibatches 4 "
    "--update-epochs 3 --total-timesteps 192 --learning-rate 0.004 --gamma 0.9 --gae-lambda 0.7 "
    "--clip-coef 0.05 --vf-coef 0.7 --ent-coef 0.3 --max-grad-norm 0.4"
).split()


@functools.cache
def watch(file, *flags, tiny=True):
    """Arguments, pool, the states before, between and after two iterations, and their logs."""
    network = Tiny if tiny else None
    args, pool, agent, world, program = begin(file, *WATCHED, *flags, network=network)
    states, logs = [(agent, world)], []
    for iteration in range(2):
        agent, world, log = program(agent, world, iteration)
        states.append((agent, world))
        logs.append(log)
    return args, pool, states, logs


def check_iterations(file, *flags, tiny=True):
    """That two iterations, the second annealed, are the reference's; what clips and epochs did."""
    args, pool, states, logs = watch(file, *flags, tiny=tiny)
    parameters, forward, as_arrays = (tiny_torch if tiny else envpool_torch)(states[0][0]["params"])
    adam, done = torch.optim.Adam(parameters, eps=1e-5), []
    for iteration, (metrics, _) in enumerate(logs):
        (before, world), (after, _) = states[iteration : iteration + 2]
        with torch.no_grad():  # from where the program was, so that rounding does not add up
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
    left_out = [did["left_out"] for did in done]
    assert sum(left_out) > 5 and len(set(left_out)) == 2, "some rows only reset"
    return args, expected, done


OTHERS = pytest.param(
    ("--no-norm-adv", "--clip-vloss", "--no-anneal-lr"), marks=pytest.mark.slow, id="others"
)


@pytest.mark.parametrize("flags", [pytest.param((), id="default"), OTHERS])
def test_xla_4_rows_of_no_weight_are_as_good_as_left_out(file, tmp_path, flags):
    """And core 3 to 12: all is as in the textbook, which is in PyTorch here."""
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
    """It stops after the epoch in which it did; its metrics are those of the epochs before."""
    _, _, done = check_iterations(file, "--target-kl", 0.0003)
    assert 0 < min(did["epochs"] for did in done) < 3, "it must have stopped"
    never, without = (leaves(watch(file, *flags)[3][1][0]) for flags in (("--target-kl", 1e9), ()))
    np.testing.assert_allclose(never, without, rtol=1e-4, atol=1e-6)


@mostly_scan
def test_actions_that_are_ruled_out_leave_all_finite(file, tmp_path):
    """Their log-probability is -inf; of three actions, the two others are taken."""
    _, pool, agent, world, program = begin(file, *WATCHED, network=lambda n: Masked(n + 1))
    agent, _, (metrics, _) = program(agent, world, 0)
    assert {int(action) for answer in pool.answers for action in answer[4]["actions"]} == {1, 2}
    assert all(np.isfinite(x).all() for x in leaves([agent, metrics]))
    assert metrics["losses/entropy"] > 0.1


def test_xla_2_loops_and_scans_are_equal(file, tmp_path):
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
    agent, world = jax.eval_shape(init, jax.random.key(1), obs), world_of(handle, obs)
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
    """With an eighth of the steps. With all 128, loops had not ended after 100 s, scans took 7."""
    flags = ("--num-steps", 16)
    assert compile_seconds(SCAN, *flags) < compile_seconds(LOOPS, *flags) / 3


# the environments


def test_xla_1_steps_come_in_order(file, tmp_path):
    """The handle of each step is the one that the step before returned, across iterations too."""
    _, pool, states, _ = watch(file)
    assert pool.handles == list(range(32)) and states[-1][1]["handle"] == 32
    np.testing.assert_array_equal(states[-1][1]["obs"], pool.answers[-1][0])


def test_xla_1_real_games_are_those_that_python_steps(tmp_path):
    """Breakout until games end: another pool of the same seed says the same to the same actions.

    Lost lives, resets and scores included.
    """
    flags = "--num-envs 2 --num-steps 110 --num-minibatches 1 --update-epochs 1".split()
    names, args = parse(SCAN, *flags)
    mine, its = (names["make_envs"](args, 2) for _ in range(2))
    obs, _ = mine.reset(seed=7)
    its.reset(seed=7)
    handle, _, _, step = mine.env.xla()
    init, iterate = names["make_program"](args, Tiny(4))
    agent, world = jax.jit(init)(jax.random.key(1), obs), world_of(handle, jnp.array(obs))
    program = jax.jit(functools.partial(iterate, step))
    policy = jax.jit(lambda params, obs: Tiny(4).apply(params, obs)[0])
    games, lives_lost, now, none = 0, 0, obs.copy(), np.zeros(2, bool)
    for iteration in range(3):
        params = agent["params"]
        agent, world, (_, (is_over, scores, lengths)) = program(agent, world, iteration)
        key, _ = jax.random.split(jax.random.fold_in(jax.random.key(1), iteration))
        for t, noise in enumerate(jax.random.gumbel(key, (110, 2, 4))):
            actions = np.asarray((policy(params, now) + noise).argmax(-1))
            now, _, terminated, truncated, infos = its.step(actions)
            np.testing.assert_array_equal(is_over[t], infos.get("_episode", none))
            for i in np.flatnonzero(is_over[t]):
                episode = infos["episode"]
                assert (scores[t, i], lengths[t, i]) == (episode["r"][i], episode["l"][i])
                games += 1
            lives_lost += (terminated & ~np.asarray(is_over[t])).sum()
        np.testing.assert_array_equal(world["obs"], now)
        np.testing.assert_array_equal(world["is_last"], terminated | truncated)
        np.testing.assert_array_equal(world["scores"], its.scores)
    assert games >= 1 and lives_lost >= 6


FEW = "--num-envs 4 --num-steps 8 --num-minibatches 1 --update-epochs 1".split()


def test_xla_3_every_game_is_reported_where_it_ends(file, tmp_path):
    """At its step and with its whole score, also the first ones; averages are over the last 20."""
    flags = ("--env-id", probe(file, "RandomEnds"), *FEW, "--total-timesteps", 128)
    names = train_tiny(file, tmp_path, *flags)
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
    losses = ("loss", "value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl")
    wanted = {f"losses/{name}" for name in (*losses, "clipfrac", "explained_variance")}
    wanted |= {f"charts/{name}" for name in ("learning_rate", "SPS", "SPS_update")}
    each = [32, 64, 96, 128]
    assert wanted == {name for name, values in logged.items() if [x for x, _ in values] == each}


def train_tiny(file, folder, *flags):
    """Run a copy of a file that has the small network, in which the rest is the same."""
    source = file.read_text()
    program = "init, iterate = make_program(args, Agent(int(action_space.n)))"
    assert source.count(program) == 1
    copy = folder / "copy" / file.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    tiny = "from tests.test_ppo_atari_envpool_xla_jax import Tiny\n    "
    tiny += program.replace("Agent(", "Tiny(")
    copy.write_text(source.replace(program, tiny))
    return train(copy, folder, *flags)


def test_xla_6_compiling_is_not_in_the_speed(file, tmp_path, monkeypatch):
    real, ends = jax.stages.Lowered.compile, []

    def compile_slowly(lowered, *flags, **options):
        compiled = real(lowered, *flags, **options)
        time.sleep(1)
        ends.append(time.time())
        return compiled

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_slowly)
    flags = ("--env-id", probe(file, "ConstantValue"), *FEW, "--total-timesteps", 64)
    names = train_tiny(file, tmp_path, *flags)
    assert len(ends) == 1
    assert names["start_time"] > ends[0], "the clock starts when the program is there"
    speed = [value for _, value in scalars(only_run(tmp_path))["charts/SPS"]]
    assert len(speed) == 2 and speed[0] > 32 / (1 + time.time() - ends[0])


@mostly_scan
def test_a_reward_that_is_not_finite_ends_the_run(file, tmp_path, monkeypatch):
    """In one line, after the iteration in which it came; the checkpoint before stays."""
    rewards = itertools.chain([1.0] * 20, itertools.repeat(np.nan))  # eight in an iteration
    monkeypatch.setattr(probes.Probe, "reward", lambda env, action: next(rewards))
    env_id = probe(file, "ConstantValue")
    with pytest.raises(SystemExit, match=f"reward of {env_id} at step 48: nan"):
        train_tiny(file, tmp_path, "--env-id", env_id, *SMALL, "--total-timesteps", 64)
    assert read_checkpoint(only_run(tmp_path))["global_step"] == 32


# the network


def test_core_2_orthogonal_weights_and_zero_biases(file, tmp_path):
    init = jax.jit(runpy.run_path(str(file))["Agent"](6).init)
    layers = init(jax.random.key(1), np.zeros((1, 4, 84, 84), np.uint8))["params"]
    gains = dict.fromkeys(("Conv_0", "Conv_1", "Conv_2", "Dense_0"), 2**0.5)
    gains |= {"Dense_1": 0.01, "Dense_2": 1}
    assert layers.keys() == gains.keys()
    for name, gain in gains.items():
        weight = np.asarray(layers[name]["kernel"]).reshape(-1, layers[name]["bias"].size)
        weight = weight if len(weight) <= weight.shape[1] else weight.T
        np.testing.assert_allclose(weight @ weight.T, gain**2 * np.eye(len(weight)), atol=2e-5)
        assert np.abs(layers[name]["bias"]).max() == 0


@pytest.mark.slow
@mostly_scan
def test_atari_8_the_network_is_that_of_ppo_atari_envpool(file, tmp_path):
    """And [atari 9]: outputs for the same bytes and weights, and gradients [xla 7]."""
    network = runpy.run_path(str(file))["Agent"](6)
    obs = np.random.default_rng(1).integers(0, 256, (5, 4, 84, 84), np.uint8)
    params = network.init(jax.random.key(1), obs)
    params["params"]["Dense_1"]["kernel"] *= 50  # or its gradient would hardly be seen behind
    weights = np.random.default_rng(2).normal(size=(5, 7)).astype(np.float32)

    def loss(params):
        log_probs, values = network.apply(params, obs)
        return (weights * jnp.append(log_probs, values[:, None], 1)).sum(), (log_probs, values)

    program = jax.jit(jax.grad(loss, has_aux=True))
    grads, (log_probs, values) = compiled_quickly(lambda: program(params))
    parameters, forward, as_arrays = envpool_torch(params)
    its_log_probs, its_values = forward(obs)
    np.testing.assert_allclose(log_probs, its_log_probs.detach(), atol=1e-5)
    np.testing.assert_allclose(values, its_values.detach(), atol=1e-5)
    (torch.tensor(weights) * torch.cat([its_log_probs, its_values[:, None]], 1)).sum().backward()
    for mine, its in zip(as_arrays(grads), parameters, strict=True):
        tolerance = 1e-4 * float(its.grad.abs().max())
        np.testing.assert_allclose(mine, its.grad, rtol=1e-3, atol=tolerance)


def test_xla_7_gradients_of_convolutions_are_fast_in_a_loop(tmp_path):
    """On a CPU, as against what flax does by itself: 20 times as fast when it was written."""
    convolve = runpy.run_path(str(SCAN))["convolve"]
    images, kernel = jnp.ones((16, 20, 20, 32)), jnp.ones((4, 4, 32, 64))
    layout = dict(padding="VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    flax = functools.partial(jax.lax.conv_general_dilated, **layout)

    def seconds(function):
        def loss(kernel):
            return function(images, kernel, (2, 2)).sum()

        def move(kernel, _):
            return kernel - 1e-9 * jax.grad(loss)(kernel), None

        moves = jax.jit(lambda kernel: jax.lax.scan(move, kernel, None, 8)[0])
        program = moves.lower(kernel).compile()
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
    flags = ("--env-id", probe(SCAN, name), *PROBE_FLAGS, "--total-timesteps", 320)
    names = harness.train(SCAN, tmp_path, *flags)
    images = images_of([[number] * 4 for number in values]).numpy()
    _, learned = names["Agent"](2).apply(names["agent"]["params"], images)
    assert learned.tolist() == pytest.approx(list(values.values()), abs=0.25)


@pytest.mark.slow
def test_actions_of_probes(tmp_path):
    """Acting through load_policy in fresh environments, as every evaluation does."""
    env_id = probe(SCAN, "ActionAndObsMatter")
    names = harness.train(SCAN, tmp_path, "--env-id", env_id, *ACTION_FLAGS)
    assert np.mean(play(names, only_run(tmp_path), games=80)) > 0.5


# the same seed, the same run

SMALL = (
    "--num-envs 2 --num-steps 8 --num-minibatches 2 --update-epochs 2 --checkpoint-interval 1"
).split()


def without_speed(run):
    """As text, where a nan is like another: returns that are all alike have no variance."""
    speeds = ("charts/SPS", "charts/SPS_update")
    return {name: str(values) for name, values in scalars(run).items() if name not in speeds}


@mostly_scan
def test_same_seed_same_bits_and_a_resume_restarts_episodes_only(file, tmp_path, monkeypatch):
    """Bit for bit where all episodes are alike."""
    flags = ("--env-id", probe(file, "TruncatedEveryStep"), *SMALL, "--total-timesteps", 64)
    train_tiny(file, tmp_path / "whole", *flags)
    train_tiny(file, tmp_path / "again", *flags)
    train_tiny(file, tmp_path / "other", *flags, "--seed", 2)
    runs = [only_run(tmp_path / name) for name in ("whole", "again", "other")]
    whole, again, other = map(read_checkpoint, runs)
    assert same(whole, again) and without_speed(runs[0]) == without_speed(runs[1])
    assert not same(whole["agent"]["params"], other["agent"]["params"])

    update = tqdm.update

    def stop(progress, steps):
        update(progress, steps)
        if progress.n == 48:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tqdm, "update", stop)
        train_tiny(file, tmp_path / "cut", *flags)
    run = only_run(tmp_path / "cut")
    checkpoint = read_checkpoint(run)
    assert checkpoint["global_step"] == 32
    damaged = shutil.copytree(run, tmp_path / "damaged")
    train_tiny(file, tmp_path / "cut", "--resume", run)
    assert same(whole, read_checkpoint(run)) and without_speed(runs[0]) == without_speed(run)

    agent = checkpoint["agent"]
    transposed = jax.tree.map(np.transpose, agent["params"])
    for damage, words in (
        ({"global_step": "x"}, "invalid literal"),
        ({"agent": {}}, "cannot resume"),
        ({"agent": agent | {"params": transposed}}, "different shapes"),
    ):
        write(damaged, checkpoint | damage)
        with pytest.raises(SystemExit, match=words) as refusal:
            train_tiny(file, tmp_path / "cut", "--resume", damaged)
        assert refusal.value.code.startswith("cannot resume") and "\n" not in refusal.value.code


# learning


@pytest.mark.slow
@pytest.mark.timeout(14400)
def test_learns_pong(tmp_path):
    """With the flags and bound of ppo_atari_envpool.py's test; random play loses with -20.7."""
    flags = (
        "--env-id Pong-v5 --num-envs 16 --num-steps 32 --num-minibatches 8 --update-epochs 4 "
        "--learning-rate 0.0007 --no-anneal-lr --gae-lambda 0.9 --total-timesteps 400000"
    ).split()
    harness.train(SCAN, tmp_path, *flags)
    returns = [value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]]
    assert np.mean(returns[-20:]) > -18
