"""cleanrl/fast_td3_jax.py. test_fasttd3_N guards detail N of docs/rl-algorithms/fast-td3.md, the
others those of td3.md, ddpg.md, c51.md and ppo-continuous-action-jax.md. test_fast_sac_jax.py runs
those of what fast_sac_jax.py has in common with it.

tests/mutations shows that each test can fail. Environments, networks and updates are compared with
references: Brax itself, equations in double precision, loops in plain Python.
"""

import functools
import runpy
import shutil
import sys
from types import SimpleNamespace
from unittest import mock

import brax.envs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tests.brax_probes  # noqa: F401  registers them
from tests import harness
from tests.harness import compiled_quickly, only_run, read_checkpoint, same, scalars
from tests.test_c51 import projected
from tests.test_ddpg_continuous_action_jax import cells
from tests.test_dqn import FUZZ, drawn_evenly
from tests.test_dqn_jax import edit, leaves, play, stopped, train, without, without_speed, write
from tests.test_ppo_continuous_action_jax import has_opengl
from tests.test_sac_continuous_action_jax import dense, doubles

NARROW = "--q-network-width 16 --actor-width 12 --n-atoms 11 --v-min -5 --v-max 5".split()
SMALL = (
    "--seed 17 --env-id brax/RandomEnds --episode-length 7 --num-envs 4 --batch-size 8 --gamma 0.9 "
    "--buffer-size 60 --learning-starts 40 --learning-rate 0.003 --weight-decay 0.1 "
    "--num-updates 2 --policy-frequency 2"
).split()
SMALL = (*SMALL, *NARROW)
NOISE = "--std-min 0.1 --std-max 0.9 --policy-noise 0.4 --noise-clip 0.5".split()


def small(file):
    """The flags of a small run; FastSAC has no noise but its policy's."""
    return (*SMALL, *NOISE) if "policy_noise" in file.read_text() else SMALL


@functools.cache
def begin(file, *flags):
    """The names of a file, those inside of its program among them, and a run that has not begun.

    Also a function that takes the run some iterations further, in one call."""
    names = runpy.run_path(str(file))
    with mock.patch.object(sys, "argv", [str(file), *map(str, (*small(file), *flags))]):
        args = names["parse_args"]()
    init, train = names["make_program"](args, *names["make_env"](args))
    key = jax.random.PRNGKey(args.seed)
    run = compiled_quickly(lambda: jax.device_get(jax.jit(init)(key)))
    program = jax.jit(train, static_argnames="length")

    def further(run, length=1):
        return compiled_quickly(lambda: jax.device_get(program(run, length=length)))

    inner = {name: cell.cell_contents for name, cell in cells(train).items()}
    return inner | names | {"args": args, "train": train}, run, further


def shaken(agent, seed=1):
    """The agent with weights and moments that are not those of its start."""
    rng = np.random.default_rng(seed)

    def move(x):
        return jnp.asarray(x + 0.2 * rng.standard_normal(x.shape), x.dtype)

    networks = ("actor", "q_networks", "target_q_networks")
    agent = {
        name: jax.tree.map(move if name in networks else jnp.array, agent[name]) for name in agent
    }
    mean, var = rng.normal(0, 1, 4), rng.uniform(0.5, 2, 4)
    moments = {"count": 9.0, "mean": mean, "var": var}
    return agent | {"obs_moments": jax.tree.map(jnp.float32, moments)}


def made_up(seed=1, rows=8):
    """A batch of transitions that nobody made, half of which terminate."""
    rng = np.random.default_rng(seed)
    return {
        "obs": jnp.float32(rng.standard_normal((rows, 4))),
        "actions": jnp.float32(rng.uniform(-1, 1, (rows, 2))),
        "rewards": jnp.float32(2 * rng.standard_normal(rows)),
        "next_obs": jnp.float32(rng.standard_normal((rows, 4))),
        "terminated": jnp.arange(rows) % 2 == 0,
        "discounts": jnp.float32(rng.choice([0.9, 0.81], rows)),
    }


# the networks, in double precision


def hidden(params, x):
    for name in ("Dense_0", "Dense_1", "Dense_2"):
        x = dense(params[name], x).relu()
    return dense(params["Dense_3"], x)


def act(params, obs):
    """The actor's actions, who sees the first two columns."""
    return hidden(params["params"], torch.as_tensor(np.asarray(obs, float))[:, :2]).tanh()


def log_pmfs(params, obs, actions):
    """Of both Q-networks, which see the last two columns."""
    obs = torch.as_tensor(np.asarray(obs, float))[:, 2:]
    return hidden(params["params"], torch.cat([obs, actions], 1)).log_softmax(-1)


def check_step(before, after, name, params, loss, decay=0.1):
    """Whether an agent made AdamW's first step down a loss."""
    grads = [x.numpy() for x in torch.autograd.grad(loss, jax.tree.leaves(params))]
    rows = zip(leaves(before[name]), leaves(after[name]), grads, strict=True)
    for old, new, grad in rows:
        expected = old - 0.003 * (grad / (np.abs(grad) + 1e-8) + decay * old)
        is_clear = np.abs(grad) > 1e-5  # the sign of a gradient of almost 0 is that of a rounding
        assert is_clear.any()
        np.testing.assert_allclose(new[is_clear], expected[is_clear], rtol=1e-4, atol=2e-6)


def changed(before, after):
    """The names of the parts of an agent that an update changed."""
    return {name for name in before if not same(leaves(before[name]), leaves(after[name]))}


def test_fasttd3_8_networks(file, tmp_path):
    """Outputs for random weights, of layers that are half as wide each; actions start near 0."""
    names, run, _ = begin(file)
    agent, b = shaken(run["agent"]), made_up()
    got = names["actor"].apply(agent["actor"], b["obs"][:, :2])
    np.testing.assert_allclose(got, act(doubles(agent["actor"]), b["obs"]).detach(), atol=1e-5)
    got = names["q_networks"].apply(agent["q_networks"], b["obs"][:, 2:], b["actions"])
    actions = torch.as_tensor(np.asarray(b["actions"], float))
    expected = log_pmfs(doubles(agent["q_networks"]), b["obs"], actions).detach()
    assert got.shape == (2, 8, 11)
    np.testing.assert_allclose(got, expected, atol=1e-4)
    for name, first, width in (("actor", 2, 12), ("q_networks", 4, 16)):
        layers = run["agent"][name]["params"]
        shapes = [layers[f"Dense_{i}"]["kernel"].shape[-2:] for i in range(4)]
        out = {"actor": 2, "q_networks": 11}[name]
        assert shapes == [
            (first, width),
            (width, width // 2),
            (width // 2, width // 4),
            (width // 4, out),
        ]
    last = run["agent"]["actor"]["params"]["Dense_3"]
    assert 0.001 < last["kernel"].std() < 0.02 and not last["bias"].any()


def test_td3_1_two_networks_are_computed_as_one(file, tmp_path):
    """Each as a plain network with its share of the weights, which are its own."""
    names, run, _ = begin(file)
    b, params = made_up(), run["agent"]["q_networks"]
    got = names["q_networks"].apply(params, b["obs"][:, 2:], b["actions"])
    for i in range(2):
        own = jax.tree.map(lambda x, i=i: x[i], params)
        expected = names["QNetwork"](16, 11).apply(own, b["obs"][:, 2:], b["actions"])
        np.testing.assert_allclose(got[i], expected, atol=1e-5)
    kernels = [x for x in jax.tree.leaves(params) if x.ndim == 3]
    assert len(kernels) == 4 and all((x[0] != x[1]).mean() > 0.99 for x in kernels)


# what it sees


def test_fasttd3_6_normalization(file, tmp_path):
    """With 0.01 added to the deviation; of the first columns alone, too; and in load_policy."""
    names, run, _ = begin(file)
    agent, obs = shaken(run["agent"]), np.float32(np.random.default_rng(2).normal(size=(3, 4)))
    moments = agent["obs_moments"] | {"var": jnp.float32([1e-12, 4, 1, 2])}
    expected = (obs - moments["mean"]) / (np.sqrt(moments["var"]) + 0.01)
    for columns in (4, 2):
        got = names["normalize"](moments, obs[:, :columns])
        np.testing.assert_allclose(got, expected[:, :columns], rtol=1e-5)
    envs = names["make_envs"](names["args"], 1)
    checkpoint = {"agent": jax.tree.map(np.array, agent | {"obs_moments": moments})}
    got = names["load_policy"](checkpoint, envs)(obs[:, :2], None)
    np.testing.assert_allclose(got, act(doubles(agent["actor"]), expected).detach(), atol=1e-5)


def test_fasttd3_6_moments_of_all_that_was_seen(file, tmp_path):
    """Against NumPy, from the first step on; the replay buffer has them as they came."""
    _, run, further = begin(file)
    rows = []
    for _ in range(14):
        run, *_ = further(run)
        newest = (int(run["added"]) // 4 - 1) % 15
        rows += list(run["buffer"]["obs"][newest])
    moments = run["agent"]["obs_moments"]
    assert moments["count"] == len(rows) == 56 and np.abs(rows).max() > 2
    np.testing.assert_allclose(moments["mean"], np.mean(rows, 0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(moments["var"], np.var(rows, 0), rtol=1e-4)


def test_fasttd3_6_batches_are_normalized_when_they_are_sampled(file, tmp_path):
    """By the moments of that moment: actor and Q-networks learn from the same, new units."""
    names, run, _ = begin(file)
    agent, b, seen = shaken(run["agent"]), made_up(), []

    def note(agent, *inputs):
        seen.append(next(x for x in inputs if isinstance(x, dict) and "obs" in x))
        return agent, {}

    cell = cells(names["train"])
    patches = {"sample_batch": lambda *_: dict(b), "update_q_networks": note}
    old = {name: cell[name].cell_contents for name in patches}
    try:
        for name, patch in patches.items():
            cell[name].cell_contents = patch
        state = agent, {"actor_loss": jnp.float32(0)}
        drawn = jnp.int32(1), jax.random.key(1)
        names["learn"](run["buffer"], run["added"], state, drawn)
    finally:
        for name in patches:
            cell[name].cell_contents = old[name]
    for name in ("obs", "next_obs"):
        np.testing.assert_allclose(seen[0][name], names["normalize"](agent["obs_moments"], b[name]))
    assert seen[0]["rewards"] is b["rewards"] and seen[0]["actions"] is b["actions"]


def test_fasttd3_9_the_critics_see_more(file, tmp_path):
    """Privileged observations are stored beside the actor's, who does not see them."""
    names, run, further = begin(file)
    run, *_ = further(run)
    env = brax.envs.get_environment("RandomEnds", backend=None)
    state = jax.tree.unflatten(
        jax.tree.structure(jax.eval_shape(env.reset, jax.random.PRNGKey(0))),
        begin(file)[1]["world"]["env_state"],
    )
    stored = run["buffer"]["obs"][0]
    np.testing.assert_array_equal(stored[:, :2], state.obs["state"])
    np.testing.assert_array_equal(stored[:, 2:], state.obs["privileged_state"])
    assert run["agent"]["actor"]["params"]["Dense_0"]["kernel"].shape == (2, 12)
    both = {"state": jnp.ones((3, 2)), "privileged_state": jnp.full((3, 4), 2.0)}
    got = names["observe"](SimpleNamespace(obs=both))
    np.testing.assert_array_equal(got, [[1, 1, 2, 2, 2, 2]] * 3)
    plain = names["Args"](env_id="brax/ActionMatters", num_envs=4)
    init, _ = names["make_program"](plain, *names["make_env"](plain))
    shapes = jax.eval_shape(init, jax.random.PRNGKey(0))
    assert shapes["buffer"]["obs"].shape[-1] == 1, "nothing is stored twice"
    assert shapes["agent"]["q_networks"]["params"]["Dense_0"]["kernel"].shape == (
        2,
        2,
        plain.q_network_width,
    )


# acting, and the ring


def follow_brax(file, choose):
    """Actions, ends of both kinds, episodes and the ring, against Brax itself, in 40 iterations.

    choose(params, world, seen, act_key) returns the policy's actions and the keys of the random
    ones and of the new episodes. Returns the ends and what the world had before and after each."""
    names, run, further = begin(file)
    env = brax.envs.get_environment("RandomEnds", backend=None)
    structure = jax.tree.structure(jax.eval_shape(env.reset, jax.random.PRNGKey(0)))
    step, reset = jax.jit(jax.vmap(env.step)), jax.jit(jax.vmap(env.reset))
    ends, pools, seen_ends, worlds = set(), [], [], []
    for t in range(40):
        before, (run, _, (is_last, returns, lengths)) = run, further(run)
        world, row = before["world"], {name: x[t % 15] for name, x in run["buffer"].items()}
        _, pool_key, step_key = jax.random.split(before["key"], 3)
        pool = jax.device_get(reset(jax.random.split(pool_key, 4)))
        act_key, _ = jax.random.split(jax.random.split(step_key, 1)[0])
        state = jax.tree.unflatten(structure, world["env_state"])
        obs = np.concatenate([state.obs["state"], state.obs["privileged_state"]], 1)
        np.testing.assert_array_equal(row["obs"], obs)
        seen = names["normalize"](run["agent"]["obs_moments"], obs)
        params = doubles(before["agent"]["actor"])
        expected, random_key, place_key = choose(params, world, seen, act_key)
        if t < 10:  # 40 environment steps at random
            expected = jax.random.uniform(random_key, (4, 2), minval=-1)
        np.testing.assert_allclose(row["actions"], expected, atol=1e-5)
        state = jax.device_get(step(state, row["actions"]))
        is_broken = np.isnan(state.obs["state"]).any(1)
        terminated = is_broken | (state.done == 1)
        rewards = np.where(is_broken, 0, state.reward)
        length, total = world["episode_length"] + 1, world["episode_return"] + rewards
        truncated = (length == 7) & ~terminated
        next_obs = np.concatenate([state.obs["state"], state.obs["privileged_state"]], 1)
        np.testing.assert_allclose(row["next_obs"], np.nan_to_num(next_obs), atol=1e-5)
        np.testing.assert_allclose(row["rewards"], rewards, atol=1e-4, rtol=1e-5)
        np.testing.assert_array_equal(row["terminated"], terminated)
        np.testing.assert_array_equal(row["is_last"], terminated | truncated)
        np.testing.assert_array_equal(is_last[0], terminated | truncated)
        np.testing.assert_allclose(returns[0], total, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(lengths[0], length)
        ends |= set(zip(terminated.tolist(), truncated.tolist(), strict=True))
        places = (np.arange(4) + int(jax.random.randint(place_key, (), 0, 4))) % 4
        after = jax.tree.unflatten(structure, run["world"]["env_state"])
        for e in range(4):
            is_over = terminated[e] or truncated[e]
            source, index = (pool, places[e]) if is_over else (state, e)
            for got, wanted in zip(leaves(after), leaves(source), strict=True):
                np.testing.assert_allclose(got[e], wanted[index], rtol=1e-5, atol=1e-5)
        pools.append({tuple(x) for x in pool.obs["state"]})
        np.testing.assert_array_equal(run["world"]["episode_length"], length * ~is_last[0])
        seen_ends.append(is_last[0])
        worlds.append((world, run["world"]))
    assert ends == {(True, False), (False, True), (False, False)}
    assert not set.intersection(*pools), "new states in every call"
    assert int(run["added"]) == int(run["global_step"]) == 160
    return seen_ends, worlds


def test_fasttd3_3_physics_1_physics_2_what_happens_is_what_is_stored(file, tmp_path):
    """Each environment has its own noise, with a deviation that is another one in each episode."""

    def choose(params, world, seen, act_key):
        noise_key, random_key, _, place_key = jax.random.split(act_key, 4)
        noise = world["std"][:, None] * np.asarray(jax.random.normal(noise_key, (4, 2)))
        means = act(params, seen).detach().numpy()
        return (means + noise).clip(-1, 1), random_key, place_key

    kept = []
    for is_last, (before, after) in zip(*follow_brax(file, choose), strict=True):
        np.testing.assert_array_equal(after["std"] != before["std"], is_last)
        assert (after["std"] >= 0.1).all() and (after["std"] <= 0.9).all()
        kept += after["std"].tolist()
    assert len(set(kept)) > 20 and np.min(kept) < 0.3 and np.max(kept) > 0.7


def test_fasttd3_10_physics_3_a_simulation_that_blows_up(file, tmp_path):
    """It terminates with a reward of 0, and what it showed at last spoils no batch."""
    flags = "--env-id brax/Breaks --num-envs 16 --total-timesteps 640 --learning-starts 160".split()
    flags = (*small(file), "--episode-length", 1000, *flags, "--buffer-size", 640)
    try:
        names = train(file, tmp_path, *flags)
    except SystemExit as end:
        pytest.fail(str(end))
    logged, buffer = scalars(only_run(tmp_path)), names["run"]["buffer"]
    assert {value for _, value in logged["charts/episodic_length"]} == {3.0}
    assert {value for _, value in logged["charts/episodic_return"]} == {2.0}
    assert buffer["terminated"].sum() == 13 * 16 and np.abs(buffer["next_obs"]).max() == 0
    agent = read_checkpoint(only_run(tmp_path))["agent"]
    assert all(np.isfinite(x).all() for x in leaves(agent))
    assert play(names, only_run(tmp_path), 80) == [2.0] * 80


def ring(added, n_rows=15, n_envs=4, seed=3):
    """A buffer whose observations number the rows that are in it, by age of the step."""
    rng, steps = np.random.default_rng(seed), np.arange(n_rows)
    newest = added // n_envs - 1
    ages = (newest - steps) % n_rows  # of the step in each row
    number = (newest - ages)[:, None] * n_envs + np.arange(n_envs)
    is_last = rng.random((n_rows, n_envs)) < 0.3
    return {
        "obs": jnp.float32(number)[..., None],
        "actions": jnp.float32(-number)[..., None],
        "rewards": jnp.float32(rng.normal(size=number.shape)),
        "next_obs": jnp.float32(number + 0.5)[..., None],
        "terminated": jnp.array(is_last & (rng.random(is_last.shape) < 0.5)),
        "is_last": jnp.array(is_last),
    }


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("added", [48, 60, 100])
def test_fasttd3_2_ddpg_2_transitions_of_n_steps(file, tmp_path, n_step, added):
    """Against a loop: up to the end of an episode, never across the ring's newest step.

    All starts are as likely, before the ring is full and after it went round."""
    names, *_ = begin(file, "--n-step", n_step, "--batch-size", 4096)
    buffer = ring(added)
    rows = {int(x): at for at, x in np.ndenumerate(buffer["obs"][..., 0])}
    sample = jax.jit(names["sample_batch"])
    b = jax.device_get(sample(buffer, jnp.int32(added), jax.random.key(1)))
    for i in range(300):
        number, reward, steps = int(b["obs"][i, 0]), 0.0, 0
        while True:
            assert number + 4 * steps in rows, "beyond the newest step"
            at = rows[number + 4 * steps]
            reward += 0.9**steps * float(buffer["rewards"][at])
            steps += 1
            if buffer["is_last"][at] or steps == n_step:
                break
        assert b["actions"][i, 0] == -number
        assert b["rewards"][i] == pytest.approx(reward, abs=1e-5)
        assert b["next_obs"][i, 0] == number + 4 * (steps - 1) + 0.5
        assert b["terminated"][i] == buffer["terminated"][at]
        assert b["discounts"][i] == pytest.approx(0.9**steps)
    oldest = max(0, added - 60)
    starts = list(range(oldest, added - 4 * (n_step - 1)))
    samples = [torch.tensor(np.array(b["obs"][:, 0])) - oldest]
    numbers = [x - oldest for x in starts]
    if len(numbers) > 41:
        assert drawn_evenly(samples, numbers)
    assert {int(x) for x in b["obs"][:, 0]} == set(starts)


# learning


def test_fasttd3_5_c51_2_projection_matches_a_loop_over_the_atoms(file, tmp_path):
    """Between the atoms, on them, beyond both ends; and without a scatter."""
    project = jax.jit(runpy.run_path(str(file))["project"])

    @FUZZ
    @given(
        num_atoms=st.sampled_from([2, 7, 51]),
        v_min=st.integers(-20, 20),
        gap=st.sampled_from([0.125, 0.5, 2]),
        gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
        reward=st.one_of(st.floats(-50, 50, width=32), st.integers(-30, 30)),
        seed=st.integers(0, 2**32 - 1),
    )
    def check(num_atoms, v_min, gap, gamma, reward, seed):
        rng, atoms = np.random.default_rng(seed), np.float32(v_min + gap * np.arange(num_atoms))
        pmfs = rng.dirichlet(np.full(num_atoms, 0.3), 5).astype(np.float32)
        rewards = np.float32([reward, 0.0, gap, -2 * gap, 0.3 * gap])  # some fall on atoms
        returns = rewards[:, None] + np.float32(gamma) * atoms
        returns[-1] = atoms[rng.integers(num_atoms)]
        got = np.asarray(project(pmfs, returns, atoms))
        rows = zip(pmfs.tolist(), returns.tolist(), strict=True)
        expected = [projected(*row, atoms.tolist()) for row in rows]
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
        np.testing.assert_allclose(got.sum(1), 1, rtol=0, atol=1e-5, err_msg="nothing is lost")

    check()
    rows = np.ones((5, 7), np.float32)
    assert "scatter" not in project.lower(rows, rows, np.arange(7.0)).as_text()


def test_fasttd3_4_td3_3_the_update_of_the_q_networks(file, tmp_path):
    """Cross-entropy with the distribution of the network of the lower mean, moved atom by atom.

    No value follows a termination; the actor itself, with clipped noise, says what does. AdamW
    shrinks all weights."""
    names, run, _ = begin(file, "--policy-noise", 5)
    agent, b, key = shaken(run["agent"]), made_up(), jax.random.key(1)
    for name, scale in (("actor", 60), ("target_q_networks", 30)):
        last = agent[name]["params"]["Dense_3"]
        last |= {"kernel": scale * last["kernel"], "bias": 0 * last["bias"]}
    after, losses = compiled_quickly(lambda: names["update_q_networks"](agent, b, key))
    noise = 5 * torch.as_tensor(np.array(jax.random.normal(key, (8, 2)), float))
    assert (noise.abs() > 0.5).any(), "the noise must be clipped"
    next_actions = act(doubles(agent["actor"]), b["next_obs"]).detach() + noise.clamp(-0.5, 0.5)
    is_beyond = next_actions.abs() > 1
    assert is_beyond.any() and ((noise.abs() > 0.5) & ~is_beyond).any(), "and so must the actions"
    atoms, params = np.linspace(-5, 5, 11), doubles(agent["q_networks"])
    next_pmfs = log_pmfs(
        doubles(agent["target_q_networks"]), b["next_obs"], next_actions.clamp(-1, 1)
    )
    next_pmfs = next_pmfs.exp().detach().numpy()
    targets, chosen = [], set()
    for row in range(8):
        lowest = (next_pmfs[:, row] @ atoms).argmin()
        chosen.add(lowest)
        discount = 0 if b["terminated"][row] else float(b["discounts"][row])
        returns = float(b["rewards"][row]) + discount * atoms
        targets.append(projected(next_pmfs[lowest, row].tolist(), returns.tolist(), atoms.tolist()))
    assert len(chosen) == 2, "each of both networks"
    got = log_pmfs(params, b["obs"], torch.as_tensor(np.asarray(b["actions"], float)))
    loss = -(torch.tensor(targets) * got).sum(-1).mean(1).sum()
    assert losses["qf_loss"] == pytest.approx(loss.item() / 2, rel=1e-4)
    mean = (got.exp() * torch.tensor(atoms)).sum(-1).mean().item()
    assert losses["qf_values"] == pytest.approx(mean, abs=1e-4)
    check_step(agent, after, "q_networks", params, loss)
    assert changed(agent, after) == {"q_networks", "q_networks_optimizer"}


def test_fasttd3_7_weights_decay(file, tmp_path):
    """By the learning rate times 0.1, where there is no gradient."""
    names, run, _ = begin(file)
    agent = shaken(run["agent"])
    zeros = jax.tree.map(jnp.zeros_like, agent["actor"])
    updates, _ = names["optimizer"].update(zeros, agent["actor_optimizer"], agent["actor"])
    for update, x in zip(leaves(updates), leaves(agent["actor"]), strict=True):
        np.testing.assert_allclose(update, -0.003 * 0.1 * x, rtol=1e-5)


def test_fasttd3_4_the_actor_climbs_the_lower_value(file, tmp_path):
    names, run, _ = begin(file)
    agent, b = shaken(run["agent"]), made_up()
    last = agent["q_networks"]["params"]["Dense_3"]
    last |= {"kernel": 20 * last["kernel"], "bias": 0 * last["bias"]}
    after, losses = compiled_quickly(lambda: names["update_actor"](agent, {"x": 1}, b["obs"]))
    params = doubles(agent["actor"])
    values = log_pmfs(doubles(agent["q_networks"]), b["obs"], act(params, b["obs"])).exp()
    values = (values * torch.linspace(-5, 5, 11, dtype=float)).sum(-1)
    lower = values.argmin(0)
    assert 0 < lower.sum() < 8
    loss = -values.min(0).values.mean()
    assert losses == {"x": 1, "actor_loss": pytest.approx(loss.item(), rel=1e-4, abs=1e-5)}
    check_step(agent, after, "actor", params, loss)
    assert changed(agent, after) == {"actor", "actor_optimizer"}


@pytest.mark.parametrize(("num_updates", "policy_frequency"), [(1, 3), (3, 2)])
def test_fasttd3_1_td3_2_updates_after_each_step(file, tmp_path, num_updates, policy_frequency):
    """None before learning starts; the targets move by tau at each, the actor learns at few."""
    flags = ("--num-updates", num_updates, "--policy-frequency", policy_frequency, "--tau", 0.3)
    _, run, further = begin(file, *flags)
    seen = set()
    for now in range(1, 22):
        before, (run, losses, _) = run, further(run)
        new, old = run["agent"], before["agent"]
        first = 9 * num_updates  # the tenth step is the first that has 40 transitions before it
        numbers = range(first, now * num_updates) if now >= 10 else ()
        counts = [int(new[f"{x}_optimizer"][0].count) for x in ("q_networks", "actor")]
        assert counts == [len(numbers), sum(n % policy_frequency == 0 for n in numbers)]
        assert (now < 10) == same(leaves(new["q_networks"]), leaves(old["q_networks"]))
        if num_updates == 1 and now >= 10:
            rows = new["target_q_networks"], new["q_networks"], old["target_q_networks"]
            for target, network, was in zip(*map(leaves, rows), strict=True):
                np.testing.assert_allclose(target, 0.3 * network + 0.7 * was, atol=1e-6)
        seen.add(float(losses["qf_loss"]))
    assert len(seen) == 13


def test_compiled_and_plain_compute_the_same(file, tmp_path):
    """Two iterations in one compiled call, and as plain operations, one after the other."""
    names, run, further = begin(file, "--learning-starts", 8)
    compiled = further(run, 2)
    plain = jax.tree.map(jnp.array, run)
    with jax.disable_jit():
        plain = names["train"](plain, 2)
    counts = [x[0]["agent"]["q_networks_optimizer"][0].count for x in (compiled, plain)]
    assert counts == [2, 2]
    for got, wanted in zip(leaves(compiled), leaves(plain), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


# environments


def test_pushes_can_be_switched_off(file, monkeypatch):
    """For robots that are pushed; the others have no such setting."""
    from mujoco_playground import registry

    names, asked = runpy.run_path(str(file)), []
    monkeypatch.setattr(
        registry, "load", lambda name, config_overrides: asked.append(config_overrides)
    )
    for name in ("T1JoystickFlatTerrain", "CartpoleBalance"):
        for pushes in (True, False):
            _, limit = names["make_env"](names["Args"](env_id=f"playground/{name}", pushes=pushes))
            assert limit == 1000
    impl = {"impl": "jax"}
    assert asked == [impl, impl | {"push_config.enable": False}, impl, impl]
    config = registry.get_default_config("T1JoystickFlatTerrain")
    assert config.push_config.enable and config.reward_config


# known answers

PROBE_FLAGS = (
    "--num-envs 8 --batch-size 64 --buffer-size 8000 --learning-starts 80 --q-network-width 32 "
    "--actor-width 32 --n-atoms 21 --v-min -3 --v-max 3 --gamma 0.5 --learning-rate 0.003 "
    "--total-timesteps 2400 --weight-decay 0 --num-updates 2 --policy-frequency 2"
).split()


def probe_flags(file):
    noise = ("--policy-noise", 0.2) if "policy_noise" in file.read_text() else ()
    return (*PROBE_FLAGS, *noise)


def values_of(names, observations):
    """The values that both networks give the actions -0.5 and 0.5 at observations."""
    agent, args = names["run"]["agent"], names["args"]
    obs = np.repeat(np.float32(observations), 2)[:, None]
    actions = np.tile(np.float32([[-0.5], [0.5]]), (len(observations), 1))
    q_networks = names["QNetworks"](args.q_network_width, args.n_atoms)
    seen = names["normalize"](agent["obs_moments"], obs)
    got = q_networks.apply(agent["q_networks"], seen, actions)
    return names["mean_returns"](got, np.linspace(args.v_min, args.v_max, args.n_atoms))


@pytest.mark.parametrize(
    ("probe", "cut", "flags", "obs", "values"),
    [
        pytest.param("ConstantValue", 9, (), [0], [1], marks=pytest.mark.slow),
        pytest.param("Discounting", 9, (), [0, 1], [0.5, 1], marks=pytest.mark.slow),
        pytest.param("Discounting", 9, ("--n-step", 3), [0, 1], [0.5, 1]),
        pytest.param("Endless", 1, (), [0], [2], marks=pytest.mark.slow),
        pytest.param(
            "MarkedLast", 9, ("--n-step", 2), [0, 2 / 3], [1.75, 1], marks=pytest.mark.slow
        ),
        ("TwoEnds", 1, (), [-1, 1], [1, 2]),
    ],
)
def test_values_of_probes(file, tmp_path, probe, cut, flags, obs, values):
    flags = ("--env-id", f"tests.brax_probes:brax/{probe}", "--episode-length", cut, *flags)
    names = train(file, tmp_path, *probe_flags(file), *flags)
    np.testing.assert_allclose(values_of(names, obs), [np.repeat(values, 2)] * 2, atol=0.1)


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
    flags = ("--env-id", f"tests.brax_probes:brax/{probe}")
    names = train(file, tmp_path, *probe_flags(file), *flags)
    checkpoint = read_checkpoint(only_run(tmp_path))
    assert np.mean(play(names, only_run(tmp_path), 80)) > 0.9
    assert same(checkpoint, read_checkpoint(only_run(tmp_path))), "which stay as they were"


# the same seed, the same run

CALLS = "--log-interval 5 --total-timesteps 120 --checkpoint-interval 60".split()  # 6 calls


def test_resume_is_the_uninterrupted_run(file, tmp_path):
    """Bit for bit, curves included; without its buffer it acts at random until it has a new one."""
    flags = (*small(file), *CALLS, "--checkpoint-buffer")
    whole, part = stopped(file, tmp_path, 60, *flags)
    forgetful, checkpoint = shutil.copytree(part, tmp_path / "forgetful"), read_checkpoint(part)
    assert checkpoint["world"]["episode_length"].max() > 0, "some are under way"
    train(file, tmp_path, "--resume", part)
    assert same(read_checkpoint(whole), read_checkpoint(part))
    assert without_speed(whole) == without_speed(part)
    count = read_checkpoint(part)["agent"]["q_networks_optimizer"]["0"]["count"]
    assert count == 2 * (30 - 9)

    edit(forgetful, checkpoint_buffer=False)
    write(forgetful, without(without(checkpoint, "buffer"), "added"))
    run = train(file, tmp_path, "--resume", forgetful)["run"]
    now = read_checkpoint(forgetful)
    assert (int(run["global_step"]), int(run["added"])) == (120, 60)
    assert now["agent"]["q_networks_optimizer"]["0"]["count"] == 2 * (15 - 9) + 2 * (15 - 9)
    assert now.keys() == {"agent", "world", "global_step", "key", "args"}
    assert same(now["world"]["episode_length"].shape, (4,))


def test_same_seed_same_bits(file, tmp_path):
    flags = (*small(file), *CALLS, "--total-timesteps", 60)
    for name, seed in {"a": 1, "b": 1, "c": 2}.items():
        train(file, tmp_path / name, *flags, "--seed", seed)
    a, b, c = (only_run(tmp_path / name) for name in "abc")
    assert same(read_checkpoint(a), read_checkpoint(b)) and without_speed(a) == without_speed(b)
    kernels = [
        [
            x
            for name in ("actor", "q_networks")
            for x in leaves(agent[name])
            if x.ndim > 1 and x.any()
        ]
        for agent in (read_checkpoint(run)["agent"] for run in (a, c))
    ]
    assert len(kernels[0]) >= 12
    assert all((x != y).mean() > 0.99 for x, y in zip(*kernels, strict=True))


def test_every_episode_is_logged_at_its_step(file, tmp_path):
    """Environments that end together end at steps of their own."""
    flags = "--env-id brax/MarkedLast --num-envs 5 --total-timesteps 60 --log-interval 7".split()
    train(file, tmp_path, *small(file), *flags)
    logged = scalars(only_run(tmp_path))
    for name in ("charts/episodic_return", "charts/episodic_length"):
        steps = [(t - 1) * 5 + e + 1 for t in (3, 6, 9, 12) for e in range(5)]
        assert logged[name] == [(step, 3.0) for step in steps]


def test_a_buffer_that_does_not_fit_in_memory_is_refused(file, tmp_path):
    with pytest.raises(SystemExit, match="GB of memory needed"):
        train(file, tmp_path, *small(file), "--buffer-size", 10**12)
    assert list(tmp_path.iterdir()) == []


# learning


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_cartpole_balance(file, tmp_path, seed):
    """984 of 1000 with seed 1, with exploration noise; random actions bring about 270."""
    flags = (
        "--env-id playground/CartpoleBalance --num-envs 64 --batch-size 512 --buffer-size 512000 "
        "--learning-starts 640 --q-network-width 128 --actor-width 64 --n-step 3 --gamma 0.99 "
        "--v-min 0 --v-max 100 --num-updates 2 --policy-frequency 2 --total-timesteps 320000"
    ).split()
    names = harness.train(file, tmp_path, *flags, "--seed", seed)
    returns = [value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]]
    assert np.mean(returns[-64:]) >= 800 and np.mean(returns[:64]) < 400
    assert np.mean(play(names, only_run(tmp_path), 8)) >= 800


@pytest.mark.slow
def test_videos(file, tmp_path):
    if not has_opengl():
        pytest.skip("needs OpenGL, such as MUJOCO_GL=osmesa with Debian's libosmesa6")
    flags = ("--env-id", "brax/inverted_pendulum", "--episode-length", 20, "--total-timesteps", 80)
    train(file, tmp_path, *small(file), *flags, "--capture-video")
    (video,) = (only_run(tmp_path) / "videos").glob("step-80-episode-0.mp4")
    assert video.stat().st_size > 1000
