"""cleanrl/simba_v2_sac_jax.py. test_simba_N guards detail N of docs/rl-algorithms/simba-v2.md,
test_sac_N and test_ddpg_N those of sac.md and ddpg.md."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from tests.harness import only_run, probe
from tests.test_ddpg_continuous_action_jax import (  # noqa: F401  the imported tests run here too
    COUNTS,
    SMALL,
    always,
    begin,
    cells,
    check_actions,
    check_losses,
    check_schedule,
    check_targets,
    follow,
    learn_pendulum,
    made_up,
    shaken,
    table,
    test_a_buffer_that_does_not_fit_in_memory_is_refused,
    test_ddpg_1_bounds_as_large_as_numbers_get_and_actions_without_a_shape,
    test_ddpg_1_every_action_has_its_own_bounds,
    test_ddpg_2_every_transition_is_as_likely,
    test_ddpg_2_the_ring_holds_what_happened_and_every_episode_is_logged,
    test_ddpg_3_a_resumed_run_acts_at_random_until_it_learns,
    test_integer_actions_are_refused,
    test_resume_restores_everything,
    test_same_seed_same_bits,
    tiny,
    update_actor,
    update_critic,
    updates_of,
)
from tests.test_ddpg_continuous_action_jax import (
    test_resume_is_the_uninterrupted_run as check_resume,
)
from tests.test_dqn_jax import leaves, play, record, train
from tests.test_sac_continuous_action_jax import (
    batch_of,
    check_changes,
    dense,
    doubles,
    squash,
)

# the networks, in double precision


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def scaled(params, i, x, initial, scale):
    return x * params[f"Scaler_{i}"]["factors"].unsqueeze(-2) * initial / scale


def linear(params, i, x):
    return x @ params[f"Dense_{i}"]["kernel"]


def encode(params, x, width, num_blocks):
    scale = math.sqrt(2 / width)
    x = unit(torch.cat([x, 3 * torch.ones(len(x), 1)], 1))
    x = unit(scaled(params, 0, linear(params, 0, x), scale, scale))
    for i in range(1, 2 * num_blocks, 2):
        hidden = scaled(params, i, linear(params, i, x), scale / 2, scale / 2).relu()
        way = unit(linear(params, i + 1, hidden)) - x
        x = unit(x + scaled(params, i + 1, way, 1 / (num_blocks + 1), width**-0.5))
    return x


def head(params, i, j, x):
    """The layers i and i + 1, with the scaler j between them."""
    return dense(params[f"Dense_{i + 1}"], scaled(params, j, linear(params, i, x), 1, 1))


def policy(params, obs):
    params = params["params"]
    x = encode(params, obs, 128, 1)
    return head(params, 3, 3, x), -10 + 6 * (1 + head(params, 5, 4, x).tanh())


def log_pmfs(params, obs, actions):
    x = encode(params["params"], torch.cat([obs, actions], 1), 16, 2)
    return head(params["params"], 5, 5, x).log_softmax(-1)


def moved(names):
    """A shaken agent with moments that are not those of its start."""
    agent, rng = shaken(names), np.random.default_rng(5)
    obs = names["obs_dim"]
    mean, var = rng.normal(0, 1, obs), rng.uniform(0.1, 4, obs)
    obs_moments = {"count": 9.0, "mean": mean, "var": var}
    return_moments = {"count": 9.0, "mean": 1.5, "var": 2.25, "largest": 30.0}
    moments = {"obs_moments": obs_moments, "return_moments": return_moments}
    return agent | jax.tree.map(jnp.float32, moments)


def kernels(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [np.asarray(x) for path, x in leaves if "kernel" in jax.tree_util.keystr(path)]


def check_step(before, after, name, params, loss):
    """Whether an agent made Adam's first step down a loss, and back to where kernels may be."""
    grads = [x.numpy() for x in torch.autograd.grad(loss, jax.tree.leaves(params))]
    paths = [jax.tree_util.keystr(x) for x, _ in jax.tree_util.tree_leaves_with_path(params)]
    means = leaves(optax.tree.get(after[f"{name}_optimizer"], "mu"))
    for mean, grad in zip(means, grads, strict=True):
        atol = 1e-5 * max(1, np.abs(grad).max())
        np.testing.assert_allclose(mean, 0.1 * grad, rtol=2e-3, atol=atol)
    rows = zip(paths, leaves(before[name]), leaves(after[name]), means, strict=True)
    for path, old, new, mean in rows:
        grad = 10 * mean
        expected = old - 1e-4 * grad / (np.abs(grad) + 1e-8)
        if "kernel" in path:
            expected /= np.linalg.norm(expected, axis=-2, keepdims=True)
        np.testing.assert_allclose(new, expected, rtol=1e-4, atol=2e-6)


def test_simba_1_simba_2_sac_2_the_networks(file, tmp_path):
    """Their outputs for random weights, against the equations; obs of another length are others."""
    names = begin(file)
    agent, b = shaken(names), made_up(names)
    obs, actions, *_ = batch_of(b)
    got = names["actor"].apply(agent["actor"], b["obs"])
    expected = policy(doubles(agent["actor"]), obs)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y.detach(), rtol=1e-4, atol=1e-4)
    got = names["q_networks"].apply(agent["q_networks"], b["obs"], b["actions"])
    expected = log_pmfs(doubles(agent["q_networks"]), obs, actions)
    assert got.shape == (2, 8, 101)
    np.testing.assert_allclose(got, expected.detach(), rtol=1e-4, atol=1e-4)
    longer = names["actor"].apply(agent["actor"], 3 * b["obs"])[0]
    assert np.abs(longer - names["actor"].apply(agent["actor"], b["obs"])[0]).min() > 1e-4
    _, log_std = names["actor"].apply(jax.tree.map(lambda x: 100 * x, agent["actor"]), b["obs"])
    assert log_std.min() == -10 and log_std.max() == 2


def test_simba_3_weights_start_and_stay_on_the_sphere(file, tmp_path):
    """The kernels' columns, of actor and Q-networks; orthogonal at first; targets are averages."""
    names = begin(file)
    agent = names["agent"]
    for name in ("actor", "q_networks", "target_q_networks"):
        for x in kernels(agent[name]):
            np.testing.assert_allclose(np.linalg.norm(x, axis=-2), 1, atol=1e-5)
    square = np.asarray(agent["q_networks"]["params"]["Dense_5"]["kernel"])
    np.testing.assert_allclose(square[0].T @ square[0], np.eye(16), atol=1e-5)
    assert np.abs(square[0] - square[1]).min() < 1 and np.abs(square[0] - square[1]).max() > 0.1
    key, b = jax.random.key(1), made_up(names)
    agent, _ = update_critic(names, shaken(names), b, key)
    agent, _ = update_actor(names, agent, b["obs"], key)
    for name in ("actor", "q_networks"):
        for x in kernels(agent[name]):
            np.testing.assert_allclose(np.linalg.norm(x, axis=-2), 1, atol=1e-5)
    after = names["update_targets"](agent)["target_q_networks"]
    average = jax.tree.map(
        lambda x, y: 0.005 * x + 0.995 * y, agent["q_networks"], agent["target_q_networks"]
    )
    for x, y in zip(leaves(after), leaves(average), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


def test_simba_4_scalers_start_at_their_units(file, tmp_path):
    """What is learned is the scale, what multiplies is as asked for: alpha is 1 / (blocks + 1)."""
    names = begin(file)
    scale = math.sqrt(2 / 16)
    starts = [scale, scale / 2, 1 / 4, scale / 2, 1 / 4, 1]
    params = names["agent"]["q_networks"]["params"]
    for i, start in enumerate(starts):
        np.testing.assert_allclose(params[f"Scaler_{i}"]["factors"], start, rtol=1e-6)
    layer = names["Scaler"](1 / 3, 1 / 4)
    variables = layer.init(jax.random.key(1), jnp.ones(5))
    np.testing.assert_allclose(layer.apply(variables, jnp.ones(5)), 1 / 3, rtol=1e-6)
    moved = jax.tree.map(lambda x: x + 0.01, variables)
    np.testing.assert_allclose(layer.apply(moved, jnp.ones(5)), 1 / 3 + 0.01 * 4 / 3, rtol=1e-5)


# what it sees


def test_simba_5_simba_6_moments_of_the_run(file, tmp_path, monkeypatch):
    """Of all observations that were acted on, and of the discounted returns of each episode.

    Against NumPy; steps that only reset are in neither, and episodes do not run into another.
    """
    steps = record(monkeypatch)
    flags = (*SMALL, *tiny(file), "--total-timesteps", 330)
    names = train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *flags)
    is_last, returns, seen, found = np.zeros(3, bool), np.zeros(3), [], []
    for obs, _, rewards, _, terminated, truncated, *_ in steps:
        returns = 0.9 * returns + rewards
        seen += list(obs[~is_last])
        found += list(returns[~is_last])
        is_last = terminated | truncated
        returns = returns * ~is_last
    assert 200 < len(found) < 300 and len(set(found)) > 5
    for moments, rows in {"obs_moments": seen, "return_moments": found}.items():
        got = names["run"]["agent"][moments]
        assert int(got["count"]) == len(rows)
        np.testing.assert_allclose(got["mean"], np.mean(rows, 0), rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(got["var"], np.var(rows, 0), rtol=1e-3, atol=1e-5)
    assert got["largest"] == pytest.approx(np.abs(found).max(), rel=1e-5)
    returns, is_real = np.array([-100, 5, 900]), np.array([True, True, False])
    got = names["observe"](names["run"]["agent"], obs, returns, is_real)["return_moments"]
    assert got["largest"] == 100, "a magnitude, and of a step that does not only reset"


def test_simba_5_moments_of_large_numbers(file, tmp_path):
    """In float32, and with rows that do not exist."""
    names, rng = begin(file), np.random.default_rng(1)
    rows = 1000 + rng.standard_normal((40, 3, 2))
    moments, real = names["init_moments"](2), rng.random((40, 3)) < 0.7
    real[0] = [False, True, False]
    for x, is_real in zip(rows, real, strict=True):
        moments = names["update_moments"](moments, jnp.float32(x), jnp.array(is_real))
    np.testing.assert_allclose(moments["mean"], rows[real].mean(0), rtol=1e-5)
    np.testing.assert_allclose(moments["var"], rows[real].var(0), rtol=1e-3)


@pytest.mark.parametrize(("largest", "divisor"), [(30.0, 6), (5.0, 1.5)])
def test_simba_6_simba_5_batches_are_normalized_when_they_are_sampled(
    file, tmp_path, largest, divisor
):
    """Rewards by the deviation of the returns, and such that the largest return is 5 at most."""
    names = begin(file)
    agent, b = moved(names), made_up(names)
    agent["return_moments"] |= {"largest": jnp.float32(largest)}
    got, moments = names["normalize_batch"](agent, b), agent["obs_moments"]
    np.testing.assert_allclose(got["rewards"], b["rewards"] / divisor, rtol=1e-5)
    for name in ("obs", "next_obs"):
        expected = (b[name] - moments["mean"]) / np.sqrt(moments["var"])
        np.testing.assert_allclose(got[name], expected, rtol=1e-4, atol=1e-5)
    assert got["actions"] is b["actions"] and got["terminated"] is b["terminated"]


def test_simba_5_acting_and_the_loaded_policy_normalize(file, tmp_path):
    names = begin(file)
    agent, obs = moved(names), np.float32([[0.3], [-2.0]])
    moments, actor = agent["obs_moments"], doubles(agent["actor"])
    seen = torch.tensor(np.asarray((obs - moments["mean"]) / np.sqrt(moments["var"]), float))
    mean, log_std = (x.detach() for x in policy(actor, seen))
    low, high = names["action_space"].low, names["action_space"].high
    expected = (1 + mean.tanh().numpy().reshape(2, 2, 2)) / 2
    checkpoint = {"agent": jax.tree.map(np.array, agent)}
    got = names["load_policy"](checkpoint, names["envs"])(obs, None)
    np.testing.assert_allclose((got - low) / (high - low), expected, atol=1e-5)
    noise = jax.random.normal(jax.random.fold_in(names["act_key"], 7), (2, 4))
    drawn = (mean + log_std.exp() * torch.tensor(np.asarray(noise, float))).tanh()
    np.testing.assert_allclose(names["act"](agent, obs, 7), drawn, atol=1e-5)


# learning


def test_simba_7_the_learning_rate_falls_to_a_half(file, tmp_path):
    """Over all updates of a run, linearly: 30 steps of two updates are 60."""
    names = begin(file, "--utd", 2)
    param, optimizer = jnp.zeros(()), names["optimizer"]
    adam, schedule = optimizer.init(param)
    rates = []
    for count in (0, 30, 60, 90):
        state = adam, schedule._replace(count=jnp.int32(count))
        rates.append(float(-optimizer.update(jnp.ones(()), state)[0]))
    np.testing.assert_allclose(rates, [1e-4, 0.75e-4, 0.5e-4, 0.5e-4], rtol=1e-4)


@pytest.mark.parametrize("num_critics", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_simba_8_the_update_of_the_q_networks(file, tmp_path, num_critics):
    """Cross-entropy with the distribution of the network of the lower mean, moved atom by atom.

    The targets hold an entropy, and nothing after a termination. The gradient is checked, too.
    """
    names, key = begin(file, "--num-critics", num_critics), jax.random.key(1)
    agent, b = shaken(names), made_up(names)
    b["rewards"] = b["rewards"] * 3
    agent["log_alpha"] = jnp.float32(-1)
    after, losses = update_critic(names, agent, b, key)
    obs, actions, rewards, next_obs, terminated = batch_of(b)
    params, atoms = doubles(agent["q_networks"]), np.linspace(-5, 5, 101)
    next_actions, next_log_probs = squash(*policy(doubles(agent["actor"]), next_obs), key)
    next_pmfs = log_pmfs(doubles(agent["target_q_networks"]), next_obs, next_actions).exp()
    next_pmfs = next_pmfs.detach().numpy()
    targets, chosen = np.zeros((8, 101)), set()
    for row in range(8):
        lowest = (next_pmfs[:, row] @ atoms).argmin()
        chosen.add(lowest)
        for atom, share in zip(atoms, next_pmfs[lowest, row], strict=True):
            soft = atom - math.exp(-1) * next_log_probs[row].item()
            value = rewards[row].item() + (0 if terminated[row] else 0.9 * soft)
            place = (np.clip(value, -5, 5) + 5) / 0.1
            below = min(math.floor(place), 99)
            targets[row, below] += share * (below + 1 - place)
            targets[row, below + 1] += share * (place - below)
    assert len(chosen) == num_critics and targets.sum() == pytest.approx(8)
    got = log_pmfs(params, obs, actions)
    loss = -(torch.tensor(targets) * got).sum(-1).mean(1).sum()
    assert losses["qf_loss"] == pytest.approx(loss.item() / num_critics, rel=1e-4)
    mean = (got.exp() * torch.tensor(atoms)).sum(-1).mean().item()
    assert losses["qf_values"] == pytest.approx(mean, abs=1e-4)
    check_step(agent, after, "q_networks", params, loss)
    check_changes(agent, after, "q_networks")


def test_sac_5_the_actor_climbs_the_lower_value(file, tmp_path):
    """And half as much entropy as in SAC is aimed at; the temperature starts at 0.01."""
    names, key = begin(file), jax.random.key(2)
    assert names["agent"]["log_alpha"] == pytest.approx(math.log(0.01))
    agent, obs = shaken(names), made_up(names)["obs"]
    last = agent["q_networks"]["params"]["Dense_6"]
    last |= {"kernel": 20 * last["kernel"], "bias": 0 * last["bias"]}
    after, losses = update_actor(names, agent, obs, key)
    params, obs = doubles(agent["actor"]), torch.tensor(np.asarray(obs, float))
    actions, log_probs = squash(*policy(params, obs), key)
    values = log_pmfs(doubles(agent["q_networks"]), obs, actions).exp()
    values = (values * torch.linspace(-5, 5, 101, dtype=float)).sum(-1)
    assert (values[0] - values[1]).abs().max() > 1
    log_alpha = doubles(agent["log_alpha"])
    actor_loss = (log_alpha.detach().exp() * log_probs - values.min(0).values).mean()
    alpha_loss = -(log_alpha.exp() * (log_probs.detach() - 2)).mean()
    assert losses["actor_loss"] == pytest.approx(actor_loss.item(), rel=1e-3, abs=1e-5)
    assert losses["alpha_loss"] == pytest.approx(alpha_loss.item(), rel=1e-3)
    assert losses["alpha"] == pytest.approx(np.exp(float(agent["log_alpha"])))
    check_step(agent, after, "actor", params, actor_loss)
    check_changes(agent, after, "actor", "log_alpha")


def test_simba_2_dead_units_have_a_direction(file, tmp_path):
    """Where no unit of a block is active, features and gradients are still numbers."""
    names = begin(file)
    params = jax.tree.map(jnp.array, names["agent"]["actor"])
    factors = params["params"]["Scaler_1"]
    params["params"]["Dense_1"]["kernel"] = jnp.abs(params["params"]["Dense_1"]["kernel"])
    params["params"]["Dense_0"]["kernel"] = jnp.abs(params["params"]["Dense_0"]["kernel"])
    factors["factors"] = -jnp.abs(factors["factors"])

    def total(params):
        return sum(x.sum() for x in names["actor"].apply(params, jnp.ones((4, 1))))

    assert all(np.isfinite(x).all() for x in leaves(jax.grad(total)(params)))


@pytest.mark.slow
def test_ddpg_6_updates_are_counted_in_environment_steps(file, tmp_path):
    """After each of which the actor learns and the targets move by tau."""
    names, updates = follow(file, tmp_path, *COUNTS)
    normalize_batch = cells(names["learn"])["normalize_batch"].cell_contents
    buffer = {name: x for name, x in names["run"]["buffer"].items() if name != "added"}
    for update in (update for update in updates if update.part == "q"):  # back to what was stored
        rows, seen = (table(b) for b in (normalize_batch(update.agent, buffer), update.batch))
        apart = np.abs(seen[:, None] - rows).max(-1)
        assert apart.min(1).max() < 1e-4
        update.batch = {name: np.asarray(x)[apart.argmin(1)] for name, x in buffer.items()}
    check_schedule(updates, 2, 99, 102, lambda step: ["q", "actor"] * 3)
    assert check_targets(names, updates, always, "q_networks") == [0, 12]
    assert check_actions(names, updates) == (100, 1)
    assert [
        updates_of(names["run"]["agent"], name) for name in ("q_networks", "actor", "log_alpha")
    ] == [12] * 3
    check_losses(file, tmp_path, updates, 100)


@pytest.mark.slow
def test_resume_is_the_uninterrupted_run_with_its_moments(file, tmp_path):
    """The learning rate included."""
    check_resume(file, tmp_path)


# known answers


def learn_probe(file, folder, env_id, observations, *flags):
    """The learned values of the actions -0.5 and 0.5 at observations, and some returns.

    One row of values for each network, in the rewards' own units.
    """
    flags = (*flags, "--num-envs", 3, "--batch-size", 32, "--buffer-size", 1000, "--gamma", 0.5)
    flags = (*flags, "--learning-starts", 90, "--tau", 0.1, "--n-atoms", 21, *tiny(file))
    names = train(file, folder, "--env-id", env_id, "--learning-rate", 0.02, *flags)
    agent, inner = names["run"]["agent"], cells(names["learn"])
    obs = np.repeat(np.float32(observations), 2)[:, None]
    actions = np.tile(np.float32([[-0.5], [0.5]]), (len(observations), 1))
    b = dict(obs=obs, next_obs=obs, rewards=np.ones(len(obs)))
    b = inner["normalize_batch"].cell_contents(agent, b)
    got = inner["q_networks"].cell_contents.apply(agent["q_networks"], b["obs"], actions)
    values = names["mean_returns"](got, inner["atoms"].cell_contents) / b["rewards"]
    return values, play(names, only_run(folder))


@pytest.mark.parametrize(
    ("env_id", "values"),
    [
        ("ContinuousProbe/Discounting-v0", {0: [0.5, 0.5], 1: [1, 1]}),
        pytest.param(
            "ContinuousProbe/MarkedLast-v0",
            {0: [1.75, 1.75], 1 / 3: [1.5, 1.5]},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "Probe/ContinuousTargetFromObs-v0",
            {-1: [0, -1], 1: [-1, 0]},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_values_of_probes(file, tmp_path, env_id, values):
    """And, where actions matter, that load_policy takes the right ones in fresh environments."""
    flags = ("--total-timesteps", 900 if "Target" in env_id else 450)
    learned, returns = learn_probe(file, tmp_path, env_id, [*values], *flags)
    np.testing.assert_allclose(learned, [np.ravel([*values.values()])] * 2, atol=0.15)
    assert "Target" not in env_id or np.mean(returns) > -0.1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_pendulum(file, tmp_path, seed):
    """-222, -182 and -157 with seeds 1, 2 and 3."""
    flags = ("--q-width", 64, "--total-timesteps", 5000, "--buffer-size", 10000, "--seed", seed)
    assert learn_pendulum(file, tmp_path, "--learning-rate", 0.001, *flags) >= -250
