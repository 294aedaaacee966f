"""cleanrl/ddpg_continuous_action_jax.py. test_ddpg_N guards detail N of docs/rl-algorithms/ddpg.md.

Compiling takes longer than everything else here. So most tests take a run that stops before it
learns, and call its functions one by one, which compiles nothing of their own. The JAX files of the
same family import the tests that hold for them too.
"""

import functools
import inspect
import math
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
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
from tests.test_ddpg_continuous_action import (  # noqa: F401  the imported tests run here too
    FAST_PENDULUM,
    LOSSES,
    rates,
    test_a_buffer_that_does_not_fit_in_memory_is_refused,
    test_ddpg_1_every_action_has_its_own_bounds,
    test_integer_actions_are_refused,
)
from tests.test_dqn import FUZZ, drawn_evenly
from tests.test_dqn_jax import (
    COLUMNS,
    compiled_quickly,
    edit,
    leaves,
    play,
    record,
    stopped,
    train,
    without,
    without_speed,
    write,
)

SMALL = "--num-envs 3 --batch-size 8 --buffer-size 50 --gamma 0.9 --learning-starts 1000000".split()
ENTROPY_LOSSES = {"actor_loss", "qf_loss", "qf_values", "alpha", "alpha_loss"}
LOSSES = LOSSES | dict.fromkeys(("tqc", "droq", "crossq", "simba"), ENTROPY_LOSSES)


def algorithm(file):
    return file.stem.split("_")[0]


def tiny(file):
    """Flags for Q-networks that are quick to compute, where there are any."""
    flags = {
        "tqc": "--num-critics 2 --num-quantiles 5 --drop-quantiles 2",
        "crossq": "--q-width 16",
        "simba": "--q-width 16",
    }
    return flags.get(algorithm(file), "").split()


def cells(function):
    """The cells of the variables that a nested function uses, and the functions among them."""
    function = inspect.unwrap(function)
    found = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for cell in tuple(found.values()):
        if inspect.isfunction(inspect.unwrap(cell.cell_contents)):
            found = cells(cell.cell_contents) | found
    return found


@functools.cache
def begin(file, *flags):
    """The names of a run that stops before it learns, those inside of its program among them.

    It has four actions in two rows; the run of the same file and flags is made only once.
    """
    folder = Path(tempfile.mkdtemp())
    flags = (*SMALL, "--total-timesteps", 30, *tiny(file), *flags)
    try:
        names = train(file, folder, "--env-id", "Probe/UnevenActions-v0", *flags)
    finally:
        shutil.rmtree(folder)
    programs = (names[name] for name in ("init", "act", "remember", "learn"))
    inner = {name: cell for program in programs for name, cell in cells(program).items()}
    return {name: cell.cell_contents for name, cell in inner.items()} | names | names["run"]


def shaken(names, seed=1):
    """The run's agent, with weights moved at random: no two networks are alike."""
    rng = np.random.default_rng(seed)

    def move(x):
        return jnp.asarray(x + 0.05 * rng.standard_normal(x.shape), x.dtype)

    fixed = ("_optimizer", "_moments")
    agent = names["agent"].items()
    return {name: x if name.endswith(fixed) else jax.tree.map(move, x) for name, x in agent}


def made_up(names, seed=1, rows=8):
    """A batch of transitions that nobody made, of which about half are the last."""
    rng, obs_dim, action_dim = np.random.default_rng(seed), names["obs_dim"], names["action_dim"]
    obs, next_obs = rng.standard_normal((2, rows, obs_dim))
    actions, rewards = rng.uniform(-1, 1, (rows, action_dim)), rng.standard_normal(rows)
    columns = (jnp.float32(x) for x in (obs, actions, rewards, next_obs))
    return dict(zip(COLUMNS, [*columns, jnp.array(rng.random(rows) < 0.5)], strict=True))


def table(columns):
    """A batch or a buffer as a single array, with all that belongs to a transition in its row."""
    columns = [np.asarray(columns[name], np.float32) for name in COLUMNS]
    return np.concatenate([x.reshape(len(x), -1) for x in columns], 1)


def eager(function, *inputs):
    """The result of a function of which each operation is compiled once for all tests."""
    return compiled_quickly(lambda: function(*inputs))


def critic(names):
    return "q_network" if "q_network" in names["agent"] else "q_networks"


def update_critic(names, agent, b, *keys):
    """The agent after an update of its Q-networks, and the losses."""
    return eager(names[f"update_{critic(names)}"], agent, b, *keys)


def update_actor(names, agent, obs, *keys):
    """The agent after an update of its actor, and the losses, which some files add to others."""
    update = names["update_actor"]
    others = [{}] if "losses" in inspect.signature(update).parameters else []
    return eager(update, agent, *others, obs, *keys)


def updates_of(agent, name):
    """How often Adam was called; SimbaV2's learning rate has a count, too."""
    counts = optax.tree.get_all_with_path(agent[f"{name}_optimizer"], "count")
    return int(counts[0][1])


# actions


def test_ddpg_1_a_loaded_policy_rescales_its_actions(file, tmp_path):
    """And the networks and the buffer have them from -1 to 1."""
    names = begin(file)
    learned = np.abs(names["buffer"]["actions"][: int(names["buffer"]["added"])])
    assert learned.max() <= 1 and (learned.max(0) > 0.6).all() and learned.shape[1] == 4
    actor = jax.tree.map(np.array, names["agent"]["actor"])
    bias = np.float32([-99, 99, 0.5, -99])
    actor["params"]["Dense_2"] = {"kernel": np.zeros((256, 4), np.float32), "bias": bias}
    policy = names["load_policy"]({"agent": names["agent"] | {"actor": actor}}, names["envs"])
    actions = policy(np.zeros((2, 1)), np.zeros(2, bool))
    expected = [[0, 5], [10 + 0.5 * (1 + math.tanh(0.5)) / 2, -1]]
    np.testing.assert_allclose(actions, [expected] * 2, rtol=1e-6)
    assert all(names["action_space"].contains(action) for action in actions)


@pytest.mark.parametrize("name", ["HugeActions", "ScalarActions"])
def test_ddpg_1_bounds_as_large_as_numbers_get_and_actions_without_a_shape(file, tmp_path, name):
    """Random actions and those of the loaded policy are in the action space; no NaN, no inf."""
    flags = ("--env-id", f"Control/{name}-v0", *SMALL, *tiny(file), "--total-timesteps", 30)
    names = train(file, tmp_path, *flags)
    buffer = names["run"]["buffer"]
    space, obs = names["action_space"], np.random.default_rng(1).standard_normal((8, 1))
    policy = names["load_policy"](read_checkpoint(only_run(tmp_path)), names["envs"])
    drawn = names["rescale"](np.asarray(buffer["actions"][: int(buffer["added"])]), space)
    for actions in (drawn, policy(obs, np.zeros(8, bool))):
        assert all(space.contains(action) for action in actions)
        assert len(np.unique(actions)) == actions.size


# the ring


def test_ddpg_2_a_ring_with_the_last_transitions(file, tmp_path):
    """Against a plain list, with steps that only reset among the others."""
    names = begin(file)

    @FUZZ
    @given(
        st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=40),
        st.integers(0, 2**32 - 1),
    )
    def check(steps, seed):
        rows, buffer = [], jax.tree.map(jnp.zeros_like, names["buffer"])
        for number, is_real in enumerate(steps):
            new = made_up(names, (seed, number), rows=3)
            buffer = names["remember"](buffer, new, np.array(is_real))
            rows += [row for row, real in zip(table(new).tolist(), is_real, strict=True) if real]
        added, got = len(rows), table(buffer)
        assert int(buffer["added"]) == added
        for i in range(min(added, 50)):
            assert got[i].tolist() == rows[(added - 1 - i) // 50 * 50 + i]
        assert not got[added:].any(), "the rest is as it was"

    check()


def test_ddpg_2_every_transition_is_as_likely(file, tmp_path):
    """Before the ring is full, of those that were added, and after that of all."""
    names = begin(file)
    buffer = names["buffer"] | {"rewards": jnp.arange(50.0)}
    for added, numbers in {45: list(range(45)), 120: list(range(50))}.items():
        samples = []
        for number in range(300):
            b = names["sample_batch"](buffer | {"added": jnp.int32(added)}, jax.random.key(number))
            assert b.keys() == set(COLUMNS) and b["actions"].shape == (8, 4)
            samples.append(torch.tensor(np.asarray(b["rewards"])))
        assert drawn_evenly(samples, numbers)


def test_ddpg_2_the_ring_holds_what_happened_and_every_episode_is_logged(
    file, tmp_path, monkeypatch
):
    """Bit for bit and in order, with ends of both kinds, but without steps that only reset."""
    steps = record(monkeypatch)
    flags = (*SMALL, *tiny(file), "--total-timesteps", 330, "--buffer-size", 152)
    names = train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *flags)
    rows, is_last, ends, logged, episodes = [], np.zeros(3, bool), set(), [], [[], [], []]
    for t, (obs, actions, rewards, next_obs, terminated, truncated, *_) in enumerate(steps):
        for e in np.flatnonzero(~is_last):
            rows.append(np.float32([*obs[e], *actions[e], rewards[e], *next_obs[e], terminated[e]]))
            ends.add((bool(terminated[e]), bool(truncated[e])))
            episodes[e].append(rewards[e])
            if terminated[e] or truncated[e]:
                total = pytest.approx(sum(episodes[e]), abs=1e-5)
                logged.append((3 * t + e + 1, total, len(episodes[e])))
                episodes[e] = []
        is_last = terminated | truncated
    buffer = names["run"]["buffer"]
    assert len(steps) == 110 and ends == {(True, False), (False, True), (False, False)}
    assert int(buffer["added"]) == len(rows) and 200 < len(rows) < 300
    newest = [max(n for n in range(len(rows)) if n % 152 == i) for i in range(152)]
    np.testing.assert_array_equal(table(buffer), np.stack(rows)[newest])
    curves = scalars(only_run(tmp_path))
    lengths = [value for _, value in curves["charts/episodic_length"]]
    returns = curves["charts/episodic_return"]
    assert [(*episode, n) for episode, n in zip(returns, lengths, strict=True)] == logged


@pytest.mark.parametrize("what", ["reward", "observation"])
def test_what_is_not_finite_ends_the_run(file, tmp_path, monkeypatch, what):
    """One line at the step at which it came; the last checkpoint is of before."""
    make_vec = gym.make_vec

    class Broken(gym.vector.VectorWrapper):
        steps = 0

        def step(self, actions):
            obs, rewards, *ends, infos = self.env.step(actions)
            self.steps += 1
            if what == "reward" and self.steps == 12:
                rewards = rewards + np.array([0, np.inf, 0])
            if what == "observation" and self.steps == 12:
                obs = obs + np.float32(np.nan)
            return obs, rewards, *ends, infos

    monkeypatch.setattr(gym, "make_vec", lambda *args, **kwargs: Broken(make_vec(*args, **kwargs)))
    bad = "inf" if what == "reward" else "nan"
    env_id = probe(file, "RandomEnds")
    flags = (*SMALL, *tiny(file), "--total-timesteps", 60, "--checkpoint-interval", 15)
    with pytest.raises(SystemExit, match=f"{what} of {env_id} at step 36: {bad}"):
        train(file, tmp_path, "--env-id", env_id, *flags)
    assert read_checkpoint(only_run(tmp_path))["global_step"] == 30


# exploration


def test_ddpg_3_noise_that_is_clipped(file, tmp_path):
    """New for each step, environment and component, and the same when a step is made again."""
    names = begin(file, "--exploration-noise", 0.25)
    obs = np.random.default_rng(1).standard_normal((500, 1))
    act, params = names["act"], shaken(names)["actor"]
    means = names["actor"].apply(params, obs)
    is_free = np.abs(means).max(1) < 0.2
    assert is_free.sum() > 50
    noise = np.stack([act(params, obs, step) - means for step in (7, 8)])[:, is_free].reshape(-1)
    assert abs(noise.mean()) < 0.05 and noise.std() == pytest.approx(0.25, abs=0.02)
    assert (np.abs(noise) < 0.25).mean() == pytest.approx(0.683, abs=0.06)
    assert np.abs(noise).max() > 0.55 and len(np.unique(noise)) > 0.99 * len(noise)
    assert same(act(params, obs, 7), act(params, obs, 7))
    actions = np.asarray(act(jax.tree.map(lambda x: 10 * x, params), obs, 9))
    assert actions.max() == 1 and actions.min() == -1


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("resumed", [16, 40])
def test_ddpg_3_a_resumed_run_acts_at_random_until_it_learns(
    file, tmp_path, monkeypatch, resumed, kept
):
    """Before learning starts, and again where the buffer was not kept."""
    acted, learned, real = [], [], jax.jit

    def jit(function, **flags):
        compiled, names = real(function, **flags), function.__globals__

        def act(*inputs):
            acted.append(names["global_step"])
            return compiled(*inputs)

        def learn(agent, *inputs):
            learned.append(names["global_step"])
            return agent, {}

        return {"act": act, "learn": learn}.get(function.__name__, compiled)

    monkeypatch.setattr("jax.jit", jit)
    flags = f"--num-envs 2 --learning-starts 20 --total-timesteps {resumed}".split()
    flags = (*SMALL, *tiny(file), *flags)
    flags = (*flags, "--checkpoint-buffer" if kept else "--no-checkpoint-buffer")
    train(file, tmp_path, "--env-id", probe(file, "ConstantValue"), *flags)
    acted.clear()
    learned.clear()
    train(file, tmp_path, "--resume", only_run(tmp_path), "--total-timesteps", 70)
    start = 20 if kept else resumed + 20
    assert acted == list(range(max(start, resumed), 70, 2))
    assert learned == list(range(max(start, resumed + 2), 71, 2))


# learning: as the twin does


@functools.cache
def twin(file, *flags):
    """The names of a run of the PyTorch file that has learned a little: Adam has moments."""
    folder, path = Path(tempfile.mkdtemp()), FILES[file.stem.removesuffix("_jax")]
    flags = (*SMALL, "--learning-starts", 20, "--total-timesteps", 30, "--no-cuda", *flags)
    flags = ("--env-id", "Probe/UnevenActions-v0", *rates(file, 0.001), "--tau", 0.3, *flags)
    try:
        return harness.train(path, folder, *flags)
    finally:
        shutil.rmtree(folder)


def itself(param):
    return param


def tree(network, look=itself):
    """The weights of a PyTorch network, or what look finds for each of them, as Flax has them."""
    if isinstance(network, torch.nn.ModuleList):
        return jax.tree.map(lambda *x: jnp.stack(x), *(tree(part, look) for part in network))
    layers = [(look(layer.weight).T, look(layer.bias)) for layer in network.children()]
    layers = [(jnp.array(x.detach().numpy()), jnp.array(y.detach().numpy())) for x, y in layers]
    return {"params": {f"Dense_{i}": {"kernel": x, "bias": y} for i, (x, y) in enumerate(layers)}}


def adam_of(optimizer, network):
    """Adam's moments, and how often it was called, as Optax has them."""
    mu, nu = (
        tree(network, lambda param, name=name: optimizer.state[param][name])
        for name in ("exp_avg", "exp_avg_sq")
    )
    count = max(entry["step"] for entry in optimizer.state.values())
    return {"mu": mu, "nu": nu, "count": jnp.int32(count)}


def agent_of(theirs, agent):
    """The PyTorch run's weights and optimizers as the agent of a JAX run."""
    optimizers = {"actor": "actor_optimizer", "q_network": "q_optimizer"}
    optimizers["q_networks"] = "q_optimizer"
    for name in [name for name in agent if name.removeprefix("target_") in optimizers]:
        agent = agent | {name: tree(theirs[name])}
    for name in optimizers.keys() & agent.keys():
        adam = adam_of(theirs[optimizers[name]], theirs[name])
        state = optax.tree.set(agent[f"{name}_optimizer"], **adam)
        agent = agent | {f"{name}_optimizer": state}
    if "log_alpha" not in agent:
        return agent
    log_alpha = theirs["temperature"]["log_alpha"]
    entry = theirs["alpha_optimizer"].state[log_alpha]
    mu, nu = (jnp.array(entry[name].numpy()) for name in ("exp_avg", "exp_avg_sq"))
    adam = {"mu": mu, "nu": nu, "count": jnp.int32(entry["step"])}
    state = optax.tree.set(agent["log_alpha_optimizer"], **adam)
    log_alpha = jnp.array(log_alpha.detach().numpy())
    return agent | {"log_alpha": log_alpha, "log_alpha_optimizer": state}


def closest(got, expected):
    """How far the numbers in two trees of arrays are apart at most."""
    got, expected = (jax.tree_util.tree_leaves_with_path(x) for x in (got, expected))
    assert [path for path, _ in got] == [path for path, _ in expected]
    return max(float(jnp.abs(x - y).max()) for (_, x), (_, y) in zip(got, expected, strict=True))


def follow_twin(file, *flags):
    """How far agent and losses are from the PyTorch twin's after the same updates, and what moved.

    Both get the same batches and the same noise.
    """
    names, theirs = begin(file, *rates(file, 0.001), "--tau", 0.3, *flags), twin(file, *flags)
    kind, agent, apart = algorithm(file), agent_of(theirs, names["agent"]), []
    turns = names["args"].policy_frequency if kind == "sac" else 1
    start = agent
    for number in range(3):
        b, keys = made_up(names, number), jax.random.split(jax.random.key(number), 1 + turns)
        noises = [torch.tensor(np.asarray(jax.random.normal(key, (8, 4)))) for key in keys]
        their_b = {name: torch.tensor(np.asarray(x)) for name, x in b.items()}
        with mock.patch("torch.randn_like", side_effect=noises):
            expected = theirs[f"update_{critic(names)}"](**their_b)
            for _ in range(turns):
                expected |= theirs["update_actor"](obs=their_b["obs"])
        theirs["update_targets"]()
        agent, losses = update_critic(names, agent, b, *([] if kind == "ddpg" else keys[:1]))
        for key in keys[1:]:
            agent, more = update_actor(names, agent, b["obs"], *([key] if kind == "sac" else []))
            losses |= more
        if kind == "sac":
            agent = names["update_targets"](agent, 0.3)
        assert losses.keys() == expected.keys() == LOSSES[kind]
        apart.append(max(abs(float(losses[name]) - float(expected[name])) for name in losses))
        apart.append(closest(agent, agent_of(theirs, agent)))
    obs = np.random.default_rng(1).standard_normal((5, 1)).astype(np.float32)
    space, actor = names["action_space"], {"actor": theirs["actor"].state_dict()}
    ours = names["load_policy"]({"agent": agent}, names["envs"])(obs, None)
    expected = theirs["load_policy"](actor, theirs["envs"])(obs, None)
    apart.append((np.abs(ours - expected) / (space.high - space.low)).max())
    moved = {name for name in agent if closest(agent[name], start[name]) > 1e-4}
    return max(apart), moved


def test_ddpg_4_ddpg_5_ddpg_6_updates_are_those_of_the_twin(file, tmp_path):
    """Weights, targets, Adam's moments and losses; also what the loaded policies do."""
    apart, moved = follow_twin(file)
    assert apart < 2e-5 and moved == {*begin(file)["agent"]}


def test_matrix_products_are_those_of_the_twin(file, tmp_path):
    """In float32, where a GPU would multiply in TF32 by default."""
    jax.config.update("jax_default_matmul_precision", None)
    try:
        flags = (*SMALL, *tiny(file), "--total-timesteps", 3)
        names = train(file, tmp_path, "--env-id", probe(file, "ConstantValue"), *flags)
        losses = [names["losses"]] if "losses" in names else []
        inputs = names["run"]["agent"], *losses, names["run"]["buffer"], 0
        program = names["learn"].lower(*inputs).as_text().splitlines()
    finally:
        jax.config.update("jax_default_matmul_precision", None)
    products = [line for line in program if "dot_general" in line]
    assert len(products) > 10 and all("HIGHEST, HIGHEST" in line for line in products)


# learning: when, and from what


def scan(step, carry, xs):
    """jax.lax.scan, in plain Python."""
    results = []
    for x in xs:
        carry, result = step(carry, x)
        results.append(result)
    return carry, None if results[0] is None else jax.tree.map(lambda *x: jnp.stack(x), *results)


def cond(is_true, yes, no, *inputs):
    """jax.lax.cond, in plain Python."""
    return yes(*inputs) if is_true else no(*inputs)


def follow(file, folder, *flags):
    """A run's names, and its updates, one by one: of what, at which step, from which batch, agent.

    After the last update of each step comes another one of nothing. Not compiled, and on the
    pendulum, whose first episode takes 200 steps.
    """
    updates, real = [], jax.jit

    def note(part, update, names):
        signature = inspect.signature(update)

        def noted(*inputs):
            told = signature.bind(*inputs).arguments
            keys = [x for name, x in told.items() if name.endswith("key")]
            batch = told["b"] if part == "q" else {"obs": told["obs"]}
            batch = jax.tree.map(np.asarray, batch)
            about = dict(part=part, step=names["global_step"], agent=told["agent"])
            updates.append(SimpleNamespace(**about, batch=batch, keys=keys))
            return update(*inputs)

        return noted

    def jit(function, **flags):
        if function.__name__ != "learn":
            return real(function, **flags)
        names = function.__globals__

        def learn(*inputs):
            inner = cells(function)
            for part, name in {"q": "update_q_network", "actor": "update_actor"}.items():
                cell = inner.get(name) or inner[f"{name}s"]
                if cell.cell_contents.__name__ != "noted":
                    cell.cell_contents = note(part, cell.cell_contents, names)
            *inputs, buffer, first = inputs
            agent, losses = function(*inputs, buffer, jnp.int32(first))
            rows = table(buffer)[: int(buffer["added"])]
            about = dict(part=None, step=names["global_step"], agent=agent)
            updates.append(SimpleNamespace(**about, losses=losses, rows=rows))
            return agent, losses

        return learn

    tau = () if "crossq" in file.stem else ("--tau", 0.3)
    flags = (*rates(file, 0.001), *tiny(file), "--buffer-size", 150, *tau, *flags)
    with mock.patch("jax.jit", jit), mock.patch.multiple("jax.lax", scan=scan, cond=cond):
        return train(file, folder, "--env-id", "Pendulum-v1", *SMALL, *flags), updates


def check_schedule(updates, num_envs, learning_starts, total, schedule):
    """Whether the right updates were made, each from a batch of its own and with a key of its own.

    schedule(step): the parts that learn at one environment step.
    """
    expected = []
    for now in range(num_envs, total + 1, num_envs):
        if now >= learning_starts:
            parts = [part for step in range(now - num_envs, now) for part in schedule(step)]
            expected += [(now, part) for part in (*parts, None)]
    assert [(update.step, update.part) for update in updates] == expected and len(expected) > 10
    rows = {row.tobytes() for row in updates[-1].rows}
    batches = [table(update.batch) for update in updates if update.part == "q"]
    assert all({row.tobytes() for row in batch} <= rows for batch in batches)
    assert len({batch.tobytes() for batch in batches}) == len(batches)
    keys = [key for update in updates if update.part for key in update.keys]
    assert len({jax.random.key_data(key).tobytes() for key in keys}) == len(keys)


def actor_of(agent):
    """What the actor computes with; CrossQ's has moments, too, and so has all of SimbaV2."""
    return agent if "obs_moments" in agent else agent["actor"] | agent.get("actor_moments", {})


def check_actions(names, updates):
    """How many actions were random, and steps of the newest actor: all actions are one of both."""
    rows, first, num_envs = updates[-1].rows, updates[0].step, names["args"].num_envs
    obs, actions = rows[:, :3], rows[:, 3:4]
    even = np.linspace(-1, 1, first)[:, None]
    assert np.abs(np.sort(actions[:first], 0) - even).max() < 0.2
    ends = [update for update in updates if update.part is None and update.step < len(rows)]
    for update in ends:
        new = slice(update.step, update.step + num_envs)
        expected = names["act"](actor_of(update.agent), obs[new], update.step)
        np.testing.assert_allclose(actions[new], expected, atol=1e-6)
    return first, len(ends)


def check_targets(names, updates, is_due, *networks):
    """How many updates left the targets alone, and after how many they moved: by tau, if due."""
    args, counts = names["args"], [0, 0]
    first = (updates[0].step - args.num_envs) * args.utd
    earlier = [i for i, update in enumerate(updates) if update.part == "q"]
    for name in networks:
        assert closest(updates[0].agent[f"target_{name}"], updates[0].agent[name]) == 0
    for number, i in enumerate(earlier, first):
        before = updates[i].agent
        after = next(later.agent for later in updates[i + 1 :] if later.part != "actor")
        counts[is_due(number)] += 1
        for name in networks:
            expected = before[f"target_{name}"]
            if is_due(number):
                expected = jax.tree.map(lambda x, y: 0.3 * x + 0.7 * y, after[name], expected)
            assert closest(after[f"target_{name}"], expected) <= (1e-6 if is_due(number) else 0)
    return counts


def check_losses(file, folder, updates, step):
    """Whether the curves are those of reference/defaults.md, and show the losses of a step."""
    logged = scalars(only_run(folder))
    losses = next(u.losses for u in updates if u.part is None and u.step == step)
    assert logged.keys() == {"charts/SPS"} | {f"losses/{name}" for name in LOSSES[algorithm(file)]}
    for name, value in losses.items():
        assert logged[f"losses/{name}"] == [(step, pytest.approx(float(value), rel=1e-5))], name


COUNTS = "--num-envs 2 --utd 3 --learning-starts 99 --total-timesteps 102".split()


def always(number):
    return True


def every_fifth(number):
    return number % 5 == 0


def actor_every_fifth(step):
    """What is updated at an environment step, of which each has three updates."""
    numbers = range(3 * step, 3 * step + 3)
    return [part for n in numbers for part in ("q", *["actor"] * every_fifth(n))]


def test_ddpg_3_ddpg_5_ddpg_6_updates_are_counted_in_environment_steps(file, tmp_path):
    """One in five is also the actor's, and the targets', which move by tau."""
    names, updates = follow(file, tmp_path, *COUNTS, "--policy-frequency", 5)
    agent, name = names["run"]["agent"], critic(names["run"])
    check_schedule(updates, 2, 99, 102, actor_every_fifth)
    assert check_targets(names, updates, every_fifth, "actor", name) == [9, 3]
    assert check_actions(names, updates) == (100, 1)
    assert (updates_of(agent, name), updates_of(agent, "actor")) == (12, 3)
    check_losses(file, tmp_path, updates, 100)


# known answers


def probe_flags(file):
    flags = (
        "--learning-starts 90 --total-timesteps 330 --batch-size 32 --buffer-size 1000 --gamma 0.5"
    ).split()
    flags += rates(file, 0.001) + ([] if "crossq" in file.stem else ["--tau", 0.1])
    own = {"sac": "--no-autotune --alpha 0.001"}
    own |= dict.fromkeys(("ddpg", "td3"), "--exploration-noise 0.3")
    return flags + own.get(algorithm(file), "").split()


def learn_probe(file, folder, env_id, num_envs, observations, *flags):
    """The learned values of the actions -0.5 and 0.5 at observations, and some returns.

    One row of values for each network.
    """
    run = train
    if "tqc" in file.stem:  # its wide networks are too slow where they are compiled quickly
        run = harness.train
    flags = (*probe_flags(file), *tiny(file), "--num-envs", num_envs, *flags)
    names = run(file, folder, "--env-id", env_id, *flags)
    obs = np.repeat(np.float32(observations), 2)[:, None]
    actions = np.tile(np.float32([[-0.5], [0.5]]), (len(observations), 1))
    agent, name = names["run"]["agent"], critic(names["run"])
    network = cells(names["learn"])[name].cell_contents
    variables = agent[name] | agent.get(f"{name}_moments", {})
    rngs = {"dropout": jax.random.key(1)} if "droq" in file.stem else None
    values = network.apply(variables, obs, actions, rngs=rngs)
    if "tqc" in file.stem:  # these are quantiles
        values = values.mean(-1)
    return np.atleast_2d(values), play(names, only_run(folder))


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
    """And, where actions matter, that load_policy takes the right ones in fresh environments."""
    learned, returns = learn_probe(file, tmp_path, env_id, num_envs, [*values])
    np.testing.assert_allclose(learned, [np.ravel([*values.values()])] * len(learned), atol=0.1)
    assert "Target" not in env_id or np.mean(returns) > -0.02


# the same seed, the same run


def test_same_seed_same_bits(file, tmp_path):
    """Before learning starts: that learning repeats itself too, a resume shows."""
    flags = (*SMALL, *tiny(file), "--total-timesteps", 57, "--checkpoint-buffer")
    flags = ("--env-id", probe(file, "RandomEnds"), *flags)
    for name, seed in {"a": 1, "b": 1, "c": 2}.items():
        train(file, tmp_path / name, *flags, "--seed", seed)
    a, b, c = (only_run(tmp_path / name) for name in "abc")
    assert same(read_checkpoint(a), read_checkpoint(b)) and without_speed(a) == without_speed(b)
    a, c = read_checkpoint(a), read_checkpoint(c)
    rows = [table(run["buffer"])[:20, :-1] for run in (a, c)]
    assert (rows[0] != rows[1]).all()
    kernels = [[x for x in leaves(run["agent"]) if x.ndim > 1 and x.std() > 1e-6] for run in (a, c)]
    assert len(kernels[0]) > 6
    assert all((x != y).mean() > 0.99 for x, y in zip(*kernels, strict=True))


def test_resume_restores_everything(file, tmp_path):
    """All of agent and buffer, which is then added to; what does not fit is refused in a line."""
    flags = (*SMALL, *tiny(file), "--total-timesteps", 30, "--checkpoint-buffer")
    train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *flags)
    run, rng = only_run(tmp_path), np.random.default_rng(1)
    checkpoint = read_checkpoint(run)

    def other(x):
        return (x + rng.integers(1, 9, x.shape)).astype(x.dtype)

    changed = checkpoint | {"agent": jax.tree.map(other, checkpoint["agent"])}
    write(run, changed)
    names = train(file, tmp_path, "--resume", run, "--total-timesteps", 45)
    now = read_checkpoint(run)
    before, after = (int(x["buffer"]["added"]) for x in (checkpoint, now))
    assert 2 < before < after
    for name, part in changed["agent"].items():
        if name in ("obs_moments", "return_moments"):  # SimbaV2's count every step
            assert now["agent"][name]["count"] == part["count"] + after - before
        else:
            assert same(now["agent"][name], part), name
    assert now["global_step"] == names["global_step"] == 45
    assert same(table(now["buffer"])[:before], table(checkpoint["buffer"])[:before])

    agent, buffer = checkpoint["agent"], checkpoint["buffer"]
    damages = [
        {"buffer": buffer | {"added": np.float32(2)}},
        {"buffer": buffer | {"obs": buffer["obs"][1:]}},
        {"buffer": without(buffer, "rewards")},
        {"agent": agent | {"actor": jax.tree.map(np.transpose, agent["actor"])}},
        {"agent": without(agent, "actor")},
    ]
    damaged = [checkpoint | damage for damage in damages]
    damaged += [without(checkpoint, name) for name in ("agent", "buffer", "global_step")]
    for number, content in enumerate(damaged):
        write(run, content)
        with pytest.raises(SystemExit) as refusal:
            train(file, tmp_path, "--resume", run)
        message = refusal.value.code
        assert message.startswith(f"cannot resume {run}: ") and "\n" not in message, number


def test_resume_is_the_uninterrupted_run(file, tmp_path):
    """Bit for bit where all episodes are alike; without its buffer, learning waits for one."""
    flags = (
        "--num-envs 2 --learning-starts 10 --utd 2 --total-timesteps 48 --checkpoint-interval 24 "
        "--checkpoint-buffer"
    ).split()
    flags = ("--env-id", probe(file, "TruncatedEveryStep"), *SMALL, *tiny(file), *flags)
    whole, part = stopped(file, tmp_path, 24, *flags)
    forgetful, checkpoint = shutil.copytree(part, tmp_path / "forgetful"), read_checkpoint(part)
    train(file, tmp_path, "--resume", part)
    assert same(read_checkpoint(whole), read_checkpoint(part))
    assert without_speed(whole) == without_speed(part)
    name = critic(checkpoint)
    assert updates_of(read_checkpoint(part)["agent"], name) == 2 * 40
    edit(forgetful, checkpoint_buffer=False)
    write(forgetful, without(checkpoint, "buffer"))
    names = train(file, tmp_path, "--resume", forgetful)
    assert (names["global_step"], int(names["run"]["buffer"]["added"])) == (48, 12)
    assert updates_of(names["run"]["agent"], name) == 2 * (16 + 16)
    assert read_checkpoint(forgetful).keys() == {"agent", "global_step", "args"}


# learning


def learn_pendulum(file, folder, *flags):
    """The mean return of the last ten episodes."""
    harness.train(file, folder, *FAST_PENDULUM, *flags)
    returns = [value for _, value in scalars(only_run(folder))["charts/episodic_return"]]
    return np.mean(returns[-10:])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_pendulum(file, tmp_path, seed):
    """-138 with seed 1."""
    flags = (*rates(file, 0.002), "--total-timesteps", 7000, "--seed", seed)
    assert learn_pendulum(file, tmp_path, *flags) >= -250
