"""cleanrl/ddpg_continuous_action_jax.py. test_ddpg_N guards detail N of docs/rl-algorithms/ddpg.md.

Compiling takes longer than everything else here. So most tests take a run that stops before it learns, and call its functions
one by one, which compiles nothing of their own. The JAX files of the same family import the tests that hold for them too.
"""

import functools
import math
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import harness
from tests.harness import FILES, only_run, probe, read_checkpoint, same, scalars
from tests.test_ddpg_continuous_action import FAST_PENDULUM, LOSSES, rates
from tests.test_dqn import FUZZ, drawn_evenly
from tests.test_dqn_jax import (
    compiled_quickly,
    edit,
    leaves,
    play,
    record,
    stopped,
    train,
    without_speed,
    write,
)

SMALL = (
    "--num-envs",
    3,
    "--batch-size",
    8,
    "--buffer-size",
    50,
    "--gamma",
    0.9,
    "--learning-starts",
    10**6,
)
ENTROPY_LOSSES = {"actor_loss", "qf_loss", "qf_values", "alpha", "alpha_loss"}
LOSSES = LOSSES | {"tqc": ENTROPY_LOSSES, "droq": ENTROPY_LOSSES, "crossq": ENTROPY_LOSSES}


@pytest.fixture
def file():
    return FILES["ddpg_continuous_action_jax"]


def algorithm(file):
    return file.stem.split("_")[0]


def tiny(file):
    """Flags for Q-networks that are quick to compute, where there are any."""
    return {"tqc": ("--num-critics", 2, "--num-quantiles", 5), "crossq": ("--q-width", 16)}.get(
        algorithm(file), ()
    )


@functools.cache
def begin(file, *flags):
    """The names of a run that stops before it learns, with four actions in two rows; those of a file are made only once."""
    folder = Path(tempfile.mkdtemp())
    try:
        return train(
            file,
            folder,
            "--env-id",
            "Probe/UnevenActions-v0",
            *SMALL,
            "--total-timesteps",
            30,
            *tiny(file),
            *flags,
        )
    finally:
        shutil.rmtree(folder)


def shaken(names, seed=1):
    """The run's agent, with weights that were moved at random: no two networks, and no target and its network, are alike."""
    rng = np.random.default_rng(seed)
    move = lambda x: jnp.asarray(x + 0.05 * rng.standard_normal(x.shape), x.dtype)  # noqa: E731
    return {
        name: x if name.endswith(("_optimizer", "_moments")) else jax.tree.map(move, x)
        for name, x in names["agent"].items()
    }


def made_up(names, seed=1, rows=8):
    """A batch of transitions that nobody made, of which about half are the last."""
    rng, (obs_dim, action_dim, *_) = np.random.default_rng(seed), names["columns"]
    obs, next_obs = rng.standard_normal((2, rows, obs_dim))
    actions, rewards = rng.uniform(-1, 1, (rows, action_dim)), rng.standard_normal((rows, 1))
    return [jnp.float32(x) for x in (obs, actions, rewards, next_obs, rng.random((rows, 1)) < 0.5)]


def eager(function, *inputs):
    """What a function returns whose operations are compiled one by one, each of them once for all tests."""
    return compiled_quickly(lambda: function(*inputs))


def critic(names):
    return "q_network" if "q_network" in names["agent"] else "q_networks"


def updates_of(agent, name):
    """How often Adam was called."""
    return int(optax.tree.get(agent[f"{name}_optimizer"], "count"))


# actions


def test_ddpg_1_whoever_loads_the_policy_gets_such_actions(file, tmp_path):
    """And the networks and the buffer have them from -1 to 1."""
    names = begin(file)
    learned = np.abs(
        np.split(names["buffer"]["rows"][: int(names["buffer"]["added"])], [1, 5], axis=1)[1]
    )
    assert learned.max() <= 1 and (learned.max(0) > 0.6).all() and learned.shape[1] == 4
    actor = jax.tree.map(np.array, names["agent"]["actor"])
    actor["params"]["Dense_2"] = {
        "kernel": np.zeros((256, 4), np.float32),
        "bias": np.float32([-99, 99, 0.5, -99]),
    }
    checkpoint = {"agent": names["agent"] | {"actor": actor}}
    actions = names["load_policy"](checkpoint, names["envs"])(np.zeros((2, 1)), np.zeros(2, bool))
    np.testing.assert_allclose(
        actions, [[[0, 5], [10 + 0.5 * (1 + math.tanh(0.5)) / 2, -1]]] * 2, rtol=1e-6
    )
    assert all(names["action_space"].contains(action) for action in actions)


# the ring


def test_ddpg_2_a_ring_with_the_last_transitions(file, tmp_path):
    """Against a plain list, with rows that only reset among the others, and all that can be drawn are the last ones."""
    names = begin(file)

    @FUZZ
    @given(
        st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=40),
        st.integers(0, 2**32 - 1),
    )
    def check(steps, seed):
        rng, rows = np.random.default_rng(seed), []
        buffer = {"rows": jnp.zeros((50, sum(names["columns"]))), "added": jnp.zeros((), jnp.int32)}
        for is_real in steps:
            new = rng.standard_normal((3, sum(names["columns"]))).astype(np.float32)
            buffer = names["remember"](buffer, new, np.array(is_real))
            rows += [row.tolist() for row, real in zip(new, is_real, strict=True) if real]
        got = [np.asarray(buffer["rows"])[i].tolist() for i in range(min(len(rows), 50))]
        assert int(buffer["added"]) == len(rows) and got == [
            rows[(len(rows) - 1 - i) // 50 * 50 + i] for i in range(len(got))
        ]
        assert not np.asarray(buffer["rows"])[len(rows) :].any(), "the rest is as it was"

    check()


def test_ddpg_2_every_transition_is_as_likely(file, tmp_path):
    """Before the ring is full, of those that were added, and after that of all."""
    names, reward = begin(file), sum(begin(file)["columns"][:2])
    rows = np.zeros((50, sum(names["columns"])), np.float32)
    rows[:, reward] = np.arange(50)
    for added, numbers in {45: list(range(45)), 120: list(range(50))}.items():
        buffer, samples = {"rows": jnp.asarray(rows), "added": jnp.int32(added)}, []
        for number in range(300):
            batch = names["draw"](buffer, jax.random.key(number))
            assert [x.shape[1] for x in batch] == names["columns"]
            samples.append(torch.tensor(np.asarray(batch[2])[:, 0]))
        assert drawn_evenly(samples, numbers)


def test_ddpg_2_the_ring_holds_what_happened_and_every_episode_is_logged(
    file, tmp_path, monkeypatch
):
    """Bit for bit and in order: no step that only reset, a cut that is no end, and more steps than the buffer holds."""
    steps = record(monkeypatch)
    flags = (*SMALL, *tiny(file), "--total-timesteps", 330, "--buffer-size", 152)
    names = train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *flags)
    rows, is_last, ends, logged, episodes = [], np.zeros(3, bool), set(), [], [[], [], []]
    for t, (obs, actions, rewards, next_obs, terminated, truncated, *_) in enumerate(steps):
        for e in range(3):
            if is_last[e]:
                continue
            rows.append(np.float32([*obs[e], *actions[e], rewards[e], *next_obs[e], terminated[e]]))
            ends.add((bool(terminated[e]), bool(truncated[e])))
            episodes[e].append(rewards[e])
            if terminated[e] or truncated[e]:
                logged.append(
                    (3 * t + e + 1, pytest.approx(sum(episodes[e]), abs=1e-5), len(episodes[e]))
                )
                episodes[e] = []
        is_last = terminated | truncated
    assert len(steps) == 110 and ends == {(True, False), (False, True), (False, False)}
    assert int(names["buffer"]["added"]) == len(rows) and 200 < len(rows) < 300
    newest = [max(n for n in range(len(rows)) if n % 152 == i) for i in range(152)]
    np.testing.assert_array_equal(names["buffer"]["rows"], np.stack(rows)[newest])
    curves = scalars(only_run(tmp_path))
    lengths = [value for _, value in curves["charts/episodic_length"]]
    assert [
        (*episode, n) for episode, n in zip(curves["charts/episodic_return"], lengths, strict=True)
    ] == logged


# exploration


def test_ddpg_3_noise_that_is_clipped(file, tmp_path):
    """New for each step, environment and component, and the same when a step is made again."""
    names, obs = (
        begin(file, "--exploration-noise", 0.25),
        np.random.default_rng(1).standard_normal((500, 1)),
    )
    act, actor = names["act"], shaken(names)["actor"]
    noise = np.stack([act(actor, obs, step) - names["actor"].apply(actor, obs) for step in (7, 8)])
    is_free = np.abs(names["actor"].apply(actor, obs)).max(1) < 0.2
    assert is_free.sum() > 50
    noise = noise[:, is_free].reshape(-1)
    assert abs(noise.mean()) < 0.05 and noise.std() == pytest.approx(0.25, abs=0.02)
    assert (np.abs(noise) < 0.25).mean() == pytest.approx(0.683, abs=0.06) and np.abs(
        noise
    ).max() > 0.55
    assert len(np.unique(noise)) > 0.99 * len(noise) and same(
        act(actor, obs, 7), act(actor, obs, 7)
    )
    actions = np.asarray(act(jax.tree.map(lambda x: 10 * x, actor), obs, 9))
    assert actions.max() == 1 and actions.min() == -1


# learning: as the twin does


@functools.cache
def twin(file, *flags):
    """The names of a run of the PyTorch file that has learned a little, so that Adam has moments."""
    folder = Path(tempfile.mkdtemp())
    flags = (
        *SMALL,
        "--learning-starts",
        20,
        "--total-timesteps",
        30,
        *rates(file, 0.001),
        "--tau",
        0.3,
        *flags,
    )
    try:
        return harness.train(
            FILES[file.stem.removesuffix("_jax")],
            folder,
            "--env-id",
            "Probe/UnevenActions-v0",
            *flags,
            "--no-cuda",
        )
    finally:
        shutil.rmtree(folder)


def tree(network, look=lambda param: param):
    """The weights of a PyTorch network, or what look finds for each of them, as Flax has them."""
    if hasattr(network, "weights"):
        layers = [
            (look(x), look(y)[:, 0]) for x, y in zip(network.weights, network.biases, strict=True)
        ]
    else:
        layers = [(look(layer.weight).T, look(layer.bias)) for layer in network.children()]
    layers = [(jnp.array(x.detach().numpy()), jnp.array(y.detach().numpy())) for x, y in layers]
    names = ("Dense_1", "Dense_0", "Dense_2", "Dense_3")[
        : len(layers)
    ]  # the second layer is made before the first
    return {
        "params": {
            name: {"kernel": x, "bias": y} for name, (x, y) in zip(names, layers, strict=True)
        }
    }


def adam_of(optimizer, network):
    """Adam's moments, and how often it was called, as Optax has them."""
    moment = lambda name: tree(network, lambda param: optimizer.state[param][name])  # noqa: E731
    count = jnp.int32(max(entry["step"] for entry in optimizer.state.values()))
    return {"mu": moment("exp_avg"), "nu": moment("exp_avg_sq"), "count": count}


def agent_of(theirs, agent):
    """The PyTorch run's weights and optimizers as the agent of a JAX run."""
    optimizers = {
        "actor": "actor_optimizer",
        "q_network": "q_optimizer",
        "q_networks": "q_optimizer",
    }
    agent = agent | {
        name: tree(theirs[name]) for name in agent if name.removeprefix("target_") in optimizers
    }
    for name in optimizers.keys() & agent.keys():
        adam = adam_of(theirs[optimizers[name]], theirs[name])
        agent |= {f"{name}_optimizer": optax.tree.set(agent[f"{name}_optimizer"], **adam)}
    if "log_alpha" in agent:
        log_alpha = theirs["temperature"]["log_alpha"]
        entry = {
            name: jnp.array(x.numpy())
            for name, x in theirs["alpha_optimizer"].state[log_alpha].items()
        }
        adam = {
            "mu": entry["exp_avg"],
            "nu": entry["exp_avg_sq"],
            "count": jnp.int32(entry["step"]),
        }
        agent |= {"log_alpha": jnp.array(log_alpha.detach().numpy())}
        agent |= {"log_alpha_optimizer": optax.tree.set(agent["log_alpha_optimizer"], **adam)}
    return agent


def closest(got, expected):
    """How far the numbers in two trees of arrays are apart at most."""
    got, expected = (jax.tree_util.tree_leaves_with_path(x) for x in (got, expected))
    assert [path for path, _ in got] == [path for path, _ in expected]
    return max(float(jnp.abs(x - y).max()) for (_, x), (_, y) in zip(got, expected, strict=True))


def follow_twin(file, *flags):
    """How far a JAX file's agent and losses are from those of its PyTorch twin, after the same updates with the same noise."""
    names, theirs = begin(file, *rates(file, 0.001), "--tau", 0.3, *flags), twin(file, *flags)
    agent, turns = (
        agent_of(theirs, names["agent"]),
        names["args"].policy_frequency if "sac" in file.stem else 1,
    )
    start, apart = agent, []
    for number in range(3):
        batch, keys = made_up(names, number), jax.random.split(jax.random.key(number), 1 + turns)
        noises = [torch.tensor(np.asarray(jax.random.normal(key, (8, 4)))) for key in keys]
        keys = [
            (key,) if i < {"ddpg": 0, "td3": 1, "sac": 9}[algorithm(file)] else ()
            for i, key in enumerate(keys)
        ]
        theirs["batch"].copy_(torch.tensor(np.concatenate(batch, 1)))
        with mock.patch("torch.randn_like", side_effect=noises):
            expected = theirs["learn_q"]() | theirs["learn_actor"]()
        agent, losses = eager(names["learn_q"], agent, batch, *keys[0])
        for key in keys[1:]:
            agent, more = eager(names["learn_actor"], agent, batch[0], *key)
        if "sac" in file.stem:
            theirs["move_targets"]()
            moved = optax.incremental_update(agent["q_networks"], agent["target_q_networks"], 0.3)
            agent |= {"target_q_networks": moved}
        losses |= more
        assert (
            losses.keys()
            == expected.keys()
            == LOSSES[algorithm(file)] - ({"alpha_loss"} - losses.keys())
        )
        apart.append(max(abs(float(losses[name]) - float(expected[name])) for name in losses))
        apart.append(closest(agent, agent_of(theirs, agent)))
    obs = np.random.default_rng(1).standard_normal((5, 1)).astype(np.float32)
    ours = names["load_policy"]({"agent": agent}, names["envs"])(obs, None)
    expected = theirs["load_policy"]({"actor": theirs["actor"].state_dict()}, theirs["envs"])(
        obs, None
    )
    apart.append(
        (np.abs(ours - expected) / (names["action_space"].high - names["action_space"].low)).max()
    )
    moved = {name: closest(agent[name], start[name]) for name in agent}
    return max(apart), {name for name, distance in moved.items() if distance > 1e-4}


def test_ddpg_4_ddpg_5_ddpg_6_updates_are_those_of_the_twin(file, tmp_path):
    """Weights, targets, Adam's moments and losses, after three updates of each; also what the loaded policies do."""
    apart, moved = follow_twin(file)
    assert apart < 2e-5 and moved == {*begin(file)["agent"]}


# learning: when, and from what


def scan(step, carry, xs):
    """jax.lax.scan, in plain Python."""
    results = []
    for x in xs:
        carry, result = step(carry, x)
        results.append(result)
    return carry, None if results[0] is None else jax.tree.map(lambda *x: jnp.stack(x), *results)


def follow(file, folder, *flags):
    """A run's names, and its updates, one by one: of what ("q" or "actor"), at which step, from which batch and agent; after
    the last of each step another one of nothing. Not compiled, and on the pendulum, whose first episode takes 200 steps."""
    updates, real = [], jax.jit

    def jit(function, **flags):
        if function.__name__ != "learn":
            return real(function, **flags)
        names = function.__globals__

        def note(part, update):
            def noted(agent, batch, *keys):
                batch = [np.asarray(x) for x in (batch if part == "q" else [batch])]
                updates.append(
                    SimpleNamespace(
                        part=part, step=names["global_step"], agent=agent, batch=batch, keys=keys
                    )
                )
                return update(agent, batch if part == "q" else batch[0], *keys)

            return noted

        def learn(run, buffer, first):
            with mock.patch.dict(
                names,
                learn_q=note("q", names["learn_q"]),
                learn_actor=note("actor", names["learn_actor"]),
            ):
                agent, losses = function(run, buffer, jnp.int32(first))
            rows = np.asarray(buffer["rows"])[: int(buffer["added"])]
            updates.append(
                SimpleNamespace(
                    part=None, step=names["global_step"], agent=agent, losses=losses, rows=rows
                )
            )
            return agent, losses

        return learn

    cond = lambda is_true, yes, no, *inputs: yes(*inputs) if is_true else no(*inputs)  # noqa: E731
    flags = (
        *SMALL,
        *rates(file, 0.001),
        *tiny(file),
        "--env-id",
        "Pendulum-v1",
        "--buffer-size",
        150,
        *flags,
    )
    flags = (*flags, *(() if "crossq" in file.stem else ("--tau", 0.3)))
    with (
        mock.patch("jax.jit", jit),
        mock.patch("jax.lax.scan", scan),
        mock.patch("jax.lax.cond", cond),
    ):
        return train(file, folder, *flags), updates


def check_schedule(updates, num_envs, learning_starts, total, schedule):
    """Whether there are as many updates as asked for, at the right steps, each from a batch of its own that was drawn from
    the buffer, and with a key of its own; schedule(step): the parts that learn at one environment step."""
    expected = []
    for now in range(num_envs, total + 1, num_envs):
        if now >= learning_starts:
            expected += [
                (now, part) for step in range(now - num_envs, now) for part in schedule(step)
            ] + [(now, None)]
    assert [(update.step, update.part) for update in updates] == expected and len(expected) > 10
    rows = {row.tobytes() for row in updates[-1].rows}
    batches = [np.concatenate(update.batch, 1) for update in updates if update.part == "q"]
    assert all({row.tobytes() for row in batch} <= rows for batch in batches)
    assert len({batch.tobytes() for batch in batches}) == len(batches)
    keys = [
        jax.random.key_data(key).tobytes()
        for update in updates
        if update.part
        for key in update.keys
    ]
    assert len(set(keys)) == len(keys)


def check_actions(names, updates, actors=lambda agent: agent["actor"]):
    """Whether actions are even draws at first, and then those of the newest actor; how many of each were seen."""
    rows, first, num_envs = updates[-1].rows, updates[0].step, names["args"].num_envs
    obs, actions = rows[:, :3], rows[:, 3:4]
    even = np.linspace(-1, 1, first)[:, None]
    assert np.abs(np.sort(actions[:first], 0) - even).max() < 0.2
    ends = [update for update in updates if update.part is None and update.step < len(rows)]
    for update in ends:
        new = slice(update.step, update.step + num_envs)
        expected = names["act"](actors(update.agent), obs[new], update.step)
        np.testing.assert_allclose(actions[new], expected, atol=1e-6)
    return first, len(ends)


def check_targets(names, updates, is_due, *networks):
    """Whether targets start as copies, move to their networks by tau after updates that are due, and rest after the others;
    how many there were of the others and of the due ones."""
    args, counts = names["args"], [0, 0]
    first = (updates[0].step - args.num_envs) * args.utd
    earlier = [i for i, update in enumerate(updates) if update.part == "q"]
    for name in networks:
        assert closest(updates[0].agent[f"target_{name}"], updates[0].agent[name]) == 0
    for number, i in enumerate(earlier, first):
        before, after = (
            updates[i].agent,
            next(later.agent for later in updates[i + 1 :] if later.part != "actor"),
        )
        counts[is_due(number)] += 1
        for name in networks:
            expected = before[f"target_{name}"]
            if is_due(number):
                expected = jax.tree.map(lambda x, y: 0.3 * x + 0.7 * y, after[name], expected)
            assert closest(after[f"target_{name}"], expected) <= (1e-6 if is_due(number) else 0)
    return counts


def check_losses(file, folder, updates, step):
    """Whether the curves are those of reference/defaults.md, and show the losses of a step."""
    logged, losses = (
        scalars(only_run(folder)),
        next(u.losses for u in updates if u.part is None and u.step == step),
    )
    assert logged.keys() == {"charts/SPS"} | {f"losses/{name}" for name in LOSSES[algorithm(file)]}
    for name, value in losses.items():
        assert logged[f"losses/{name}"] == [(step, pytest.approx(float(value), rel=1e-5))], name


COUNTS = ("--num-envs", 2, "--utd", 3, "--learning-starts", 99, "--total-timesteps", 102)


def test_ddpg_3_ddpg_5_ddpg_6_updates_are_counted_in_environment_steps(file, tmp_path):
    """Six for each step of two environments; one in five is also the actor's, and the targets', which move by tau."""
    names, updates = follow(file, tmp_path, *COUNTS, "--policy-frequency", 5)
    is_due = lambda number: number % 5 == 0  # noqa: E731
    turns = lambda step: [x for n in range(3) for x in ("q", *["actor"] * is_due(3 * step + n))]  # noqa: E731
    check_schedule(updates, 2, 99, 102, turns)
    assert check_targets(names, updates, is_due, "actor", critic(names)) == [9, 3]
    assert check_actions(names, updates) == (100, 1)
    assert (updates_of(names["agent"], critic(names)), updates_of(names["agent"], "actor")) == (
        12,
        3,
    )
    check_losses(file, tmp_path, updates, 100)


# known answers


def probe_flags(file):
    flags = (
        "--learning-starts",
        90,
        "--total-timesteps",
        330,
        "--batch-size",
        32,
        "--buffer-size",
        1000,
        "--gamma",
        0.5,
    )
    flags = (*flags, *rates(file, 0.001), *(() if "crossq" in file.stem else ("--tau", 0.1)))
    if algorithm(file) in ("ddpg", "td3"):
        return (*flags, "--exploration-noise", 0.3)
    return (*flags, "--no-autotune", "--alpha", 0.001) if "sac" in file.stem else flags


def learn_probe(file, folder, env_id, num_envs, observations, *flags):
    """The values of the actions -0.5 and 0.5 that are learned at observations, one row for each network, and some returns."""
    run = (
        harness.train if "tqc" in file.stem else train
    )  # its wide networks are too slow where they are compiled quickly
    names = run(
        file,
        folder,
        "--env-id",
        env_id,
        *probe_flags(file),
        *tiny(file),
        "--num-envs",
        num_envs,
        *flags,
    )
    obs = np.repeat(np.float32(observations), 2)[:, None]
    actions = np.tile(np.float32([[-0.5], [0.5]]), (len(observations), 1))
    agent, network = names["agent"], names[critic(names)]
    variables = agent[critic(names)] | agent.get(f"{critic(names)}_moments", {})
    values = network.apply(
        variables,
        obs,
        actions,
        rngs={"dropout": jax.random.key(1)} if "droq" in file.stem else None,
    )
    return values.reshape(-1, *values.shape[-2:]).mean(-1), play(names, only_run(folder))


@pytest.mark.parametrize(
    ("env_id", "num_envs", "values"),
    [
        pytest.param(
            "ContinuousProbe/Discounting-v0", 3, {0: [0.5, 0.5], 1: [1, 1]}, marks=pytest.mark.slow
        ),
        ("ContinuousProbe/TwoEnds-v0", 1, {-1: [1, 1], 1: [2, 2]}),
        pytest.param(
            "ContinuousProbe/MarkedLast-v0",
            1,
            {0: [1.75, 1.75], 1 / 3: [1.5, 1.5]},
            marks=pytest.mark.slow,
        ),
        ("Probe/ContinuousTargetFromObs-v0", 3, {-1: [0, -1], 1: [-1, 0]}),
    ],
)
def test_values_of_probes(file, tmp_path, env_id, num_envs, values):
    """And, where actions matter, that load_policy takes the right ones in fresh environments, as every evaluation does."""
    learned, returns = learn_probe(file, tmp_path, env_id, num_envs, [*values])
    np.testing.assert_allclose(learned, [np.ravel([*values.values()])] * len(learned), atol=0.1)
    assert "Target" not in env_id or np.mean(returns) > -0.02


# the same seed, the same run


def test_same_seed_same_bits(file, tmp_path):
    """Before learning starts: that learning repeats itself too, a resume shows."""
    flags = (
        "--env-id",
        probe(file, "RandomEnds"),
        *SMALL,
        *tiny(file),
        "--total-timesteps",
        57,
        "--checkpoint-buffer",
    )
    for name, seed in {"a": 1, "b": 1, "c": 2}.items():
        train(file, tmp_path / name, *flags, "--seed", seed)
    a, b, c = (only_run(tmp_path / name) for name in "abc")
    assert same(read_checkpoint(a), read_checkpoint(b)) and without_speed(a) == without_speed(b)
    a, c = read_checkpoint(a), read_checkpoint(c)
    assert (a["buffer"]["rows"][:20, :-1] != c["buffer"]["rows"][:20, :-1]).all()
    kernels = [[x for x in leaves(run["agent"]) if x.ndim > 1 and x.std() > 0] for run in (a, c)]
    assert len(kernels[0]) > 6 and all(
        (x != y).mean() > 0.99 for x, y in zip(*kernels, strict=True)
    )


def test_resume_restores_everything(file, tmp_path):
    """Every number of the agent and of the buffer, which is then added to; what does not fit is refused in one line."""
    flags = (
        "--env-id",
        probe(file, "RandomEnds"),
        *SMALL,
        *tiny(file),
        "--total-timesteps",
        30,
        "--checkpoint-buffer",
    )
    train(file, tmp_path, *flags)
    run, rng = only_run(tmp_path), np.random.default_rng(1)
    checkpoint = read_checkpoint(run)
    other = lambda x: (x + rng.integers(1, 9, x.shape)).astype(x.dtype)  # noqa: E731
    changed = checkpoint | {"agent": jax.tree.map(other, checkpoint["agent"])}
    edit(run, total_timesteps=45)
    write(run, changed)
    names, now = train(file, tmp_path, "--resume", run), read_checkpoint(run)
    before, after = (int(x["buffer"]["added"]) for x in (checkpoint, now))
    assert (
        same(now["agent"], changed["agent"])
        and now["global_step"] == names["global_step"] == 45
        and 2 < before < after
    )
    assert same(now["buffer"]["rows"][:before], checkpoint["buffer"]["rows"][:before])

    less = lambda tree, name: {key: value for key, value in tree.items() if key != name}  # noqa: E731
    agent, buffer = checkpoint["agent"], checkpoint["buffer"]
    damages = [{"global_step": step} for step in (-3, 31, 48)]
    damages += [
        {"buffer": buffer | {"added": added}}
        for added in (np.int32(-2), np.int32(31), np.float32(2))
    ]
    damages += [
        {"buffer": bad} for bad in (buffer | {"rows": buffer["rows"][1:]}, less(buffer, "added"), 1)
    ]
    damages += [
        {"agent": agent | {"actor": jax.tree.map(np.transpose, agent["actor"])}},
        {"agent": less(agent, "actor")},
    ]
    for damage in [*damages, "agent", "buffer", "global_step"]:
        write(run, less(checkpoint, damage) if isinstance(damage, str) else checkpoint | damage)
        with pytest.raises(SystemExit) as refusal:
            train(file, tmp_path, "--resume", run)
        assert (
            refusal.value.code.startswith(f"cannot resume {run}: ")
            and "\n" not in refusal.value.code
        ), damage


def test_resume_is_the_uninterrupted_run(file, tmp_path):
    """Bit for bit where all episodes are alike. Without the buffer, learning waits for learning_starts further steps."""
    flags = (
        "--env-id",
        probe(file, "TruncatedEveryStep"),
        *SMALL,
        *tiny(file),
        "--num-envs",
        2,
        "--learning-starts",
        10,
    )
    flags = (
        *flags,
        "--utd",
        2,
        "--total-timesteps",
        48,
        "--checkpoint-interval",
        24,
        "--checkpoint-buffer",
    )
    whole, part = stopped(file, tmp_path, 24, *flags)
    forgetful, checkpoint = shutil.copytree(part, tmp_path / "forgetful"), read_checkpoint(part)
    train(file, tmp_path, "--resume", part)
    assert same(read_checkpoint(whole), read_checkpoint(part)) and without_speed(
        whole
    ) == without_speed(part)
    name = next(name for name in checkpoint["agent"] if name.startswith("q_network")).removesuffix(
        "_optimizer"
    )
    assert updates_of(read_checkpoint(part)["agent"], name) == 2 * 40
    edit(forgetful, checkpoint_buffer=False)
    write(forgetful, {name: x for name, x in checkpoint.items() if name != "buffer"})
    names = train(file, tmp_path, "--resume", forgetful)
    assert (names["global_step"], int(names["buffer"]["added"])) == (48, 12)
    assert updates_of(names["agent"], name) == 2 * (16 + 16)
    assert read_checkpoint(forgetful).keys() == {"agent", "global_step"}


# learning


def learn_pendulum(file, folder, *flags):
    """The mean return of the last ten episodes."""
    harness.train(file, folder, *FAST_PENDULUM, *flags)
    return np.mean(
        [value for _, value in scalars(only_run(folder))["charts/episodic_return"]][-10:]
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_pendulum(file, tmp_path, seed):
    """-138 with seed 1."""
    assert (
        learn_pendulum(
            file, tmp_path, *rates(file, 0.002), "--total-timesteps", 7000, "--seed", seed
        )
        >= -250
    )
