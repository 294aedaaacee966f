"""cleanrl/crossq_continuous_action_jax.py. test_crossq_N guards detail N of
docs/rl-algorithms/crossq.md, test_sac_N and test_ddpg_N those of sac.md and ddpg.md."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.harness import only_run, same, scalars, train
from tests.test_ddpg_continuous_action_jax import (  # noqa: F401  the imported tests run here too
    COUNTS,
    actor_every_fifth,
    actor_of,
    begin,
    check_actions,
    check_losses,
    check_schedule,
    follow,
    learn_probe,
    made_up,
    shaken,
    test_a_buffer_that_does_not_fit_in_memory_is_refused,
    test_ddpg_1_a_loaded_policy_rescales_its_actions,
    test_ddpg_1_bounds_as_large_as_numbers_get_and_actions_without_a_shape,
    test_ddpg_1_every_action_has_its_own_bounds,
    test_ddpg_2_every_transition_is_as_likely,
    test_ddpg_2_the_ring_holds_what_happened_and_every_episode_is_logged,
    test_ddpg_3_a_resumed_run_acts_at_random_until_it_learns,
    test_integer_actions_are_refused,
    test_resume_restores_everything,
    test_same_seed_same_bits,
    update_actor,
    update_critic,
    updates_of,
)
from tests.test_dqn_jax import leaves
from tests.test_sac_continuous_action_jax import (
    batch_of,
    check_changes,
    check_step,
    dense,
    doubles,
    entropy_losses,
    squash,
)


def with_moments(names, count):
    """A shaken agent whose layers have seen so many batches, with moments that no batch has."""
    agent, rng = shaken(names), np.random.default_rng(5)
    for name in ("actor_moments", "q_networks_moments"):
        moments = jax.tree.map(np.array, agent[name]["moments"])
        for layer in moments.values():
            layer["run"]["mean"] += rng.normal(0, 0.5, layer["run"]["mean"].shape)
            layer["run"]["var"] *= rng.uniform(0.05, 4, layer["run"]["var"].shape)
            layer["run"]["count"] += count
        agent |= {name: {"moments": moments}}
    return agent


def network(params, moments, x, train, layers):
    """The output of the two hidden layers of these names, and what becomes of the moments."""
    after = {}
    for i in range(3):
        if i > 0:
            x = dense(params[layers[i - 1]], x).relu()
        norm, run = params[f"BatchRenorm_{i}"], moments["moments"][f"BatchRenorm_{i}"]["run"]
        mean, var, count = run["mean"].unsqueeze(-2), run["var"].unsqueeze(-2), run["count"]
        scale, shift, by_mean, by_var = 1, 0, mean, var
        if train:
            by_mean, by_var = x.mean(-2, keepdim=True), x.var(-2, correction=0, keepdim=True)
            if count.max() >= 100_000:
                scale = ((by_var + 1e-3) / (var + 1e-3)).sqrt().clamp(1 / 3, 3).detach()
                shift = ((by_mean - mean) / (var + 1e-3).sqrt()).clamp(-5, 5).detach()
            moved = {"mean": 0.99 * mean + 0.01 * by_mean, "var": 0.99 * var + 0.01 * by_var}
            after[f"BatchRenorm_{i}"] = moved | {"count": count + 1}
        x = (x - by_mean) / (by_var + 1e-3).sqrt() * scale + shift
        x = x * norm["weight"].unsqueeze(-2) + norm["bias"].unsqueeze(-2)
    return x, after


def policy(agent, params, obs, train):
    params, moments = params["params"], doubles(agent["actor_moments"])
    hidden, moments = network(params, moments, obs, train, ("Dense_0", "Dense_1"))
    mean, log_std = (dense(params[f"Dense_{i}"], hidden) for i in (2, 3))
    return (mean, -5 + 3.5 * (1 + log_std.tanh())), moments


def q_values(agent, params, obs, actions, train):
    moments, pairs = doubles(agent["q_networks_moments"]), torch.cat([obs, actions], 1)
    hidden, moments = network(params["params"], moments, pairs, train, ("Dense_0", "Dense_1"))
    return dense(params["params"]["Dense_2"], hidden).squeeze(-1), moments


def check_moments(got, expected):
    for name, layer in got["moments"].items():
        for moment, x in layer["run"].items():
            wanted = expected[name][moment].detach().reshape(x.shape)
            np.testing.assert_allclose(x, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [pytest.param(99_999, marks=pytest.mark.slow), 100_000])
def test_crossq_1_crossq_2_crossq_3_the_update_of_the_q_networks(file, tmp_path, count):
    """Values now and after in one joint pass, of which the moments are; loss and gradient.

    Before and after 100k batches, from when on it is corrected by the moments of the run.
    """
    names, key = begin(file), jax.random.key(1)
    agent, b = with_moments(names, count), made_up(names)
    after, losses = update_critic(names, agent, b, key)
    obs, actions, rewards, next_obs, terminated = batch_of(b)
    params, actor = doubles(agent["q_networks"]), doubles(agent["actor"])
    next_actions, next_log_probs = squash(*policy(agent, actor, next_obs, False)[0], key)
    pairs = torch.cat([obs, next_obs]), torch.cat([actions, next_actions.detach()])
    both, moments = q_values(agent, params, *pairs, True)
    alpha = np.exp(float(agent["log_alpha"]))
    next_values = both[:, 8:].min(0).values - alpha * next_log_probs
    targets = (rewards + 0.9 * next_values * (1 - terminated)).detach()
    loss = sum((both[i, :8] - targets).square().mean() for i in range(2))
    assert losses["qf_loss"] == pytest.approx(loss.item() / 2, rel=1e-3)
    assert losses["qf_values"] == pytest.approx(both[:, :8].mean().item(), abs=1e-4)
    check_moments(after["q_networks_moments"], moments)
    check_step(agent, after, "q_networks", params, loss, 1e-3, b1=0.5)
    check_changes(agent, after, "q_networks")
    assert not any("target" in name for name in agent)


@pytest.mark.parametrize("count", [pytest.param(99_999, marks=pytest.mark.slow), 100_000])
def test_crossq_2_crossq_3_the_update_of_the_actor(file, tmp_path, count):
    """It learns in training mode, from the lower value of Q-networks that are not.

    The temperature has an Adam of its own, which forgets more slowly than the actor's.
    """
    names, key = begin(file), jax.random.key(2)
    agent, obs = with_moments(names, count), made_up(names)["obs"]
    after, losses = update_actor(names, agent, obs, key)
    params, obs = doubles(agent["actor"]), torch.tensor(np.asarray(obs, float))
    log_alpha = doubles(agent["log_alpha"])
    outputs, moments = policy(agent, params, obs, True)
    actions, log_probs = squash(*outputs, key)
    values = q_values(agent, doubles(agent["q_networks"]), obs, actions, False)[0].min(0).values
    actor_loss, alpha_loss = entropy_losses(log_alpha, log_probs, values)
    assert losses["actor_loss"] == pytest.approx(actor_loss.item(), rel=1e-3)
    assert losses["alpha_loss"] == pytest.approx(alpha_loss.item(), rel=1e-3)
    check_moments(after["actor_moments"], moments)
    check_step(agent, after, "actor", params, actor_loss, 1e-3, b1=0.5)
    check_step(agent, after, "log_alpha", log_alpha, alpha_loss, 1e-3, b1=0.9)
    check_changes(agent, after, "actor", "log_alpha")


@pytest.mark.parametrize("value", [0.0, 50.0])
def test_crossq_3_corrections_are_bounded(file, tmp_path, value):
    """A batch far from those of the run, and one of almost no variance: 5 at most, and 3 or 1/3."""
    layer = begin(file)["BatchRenorm"]()
    x = np.float32([[value], [value + 10]] if value else [[-1e-3], [1e-3]])
    run = {"mean": jnp.zeros(1), "var": jnp.ones(1), "count": jnp.float32(1e6)}
    variables = layer.init(jax.random.key(1), x, False) | {"moments": {"run": run}}
    got, _ = layer.apply(variables, x, True, mutable="moments")
    scale, shift, std = (3, 5, 25**0.5) if value else (1 / 3, 0, 1e-3)
    std = (std**2 + 1e-3) ** 0.5
    np.testing.assert_allclose(got, (x - x.mean()) / std * scale + shift, rtol=1e-4)
    assert layer.apply(variables, x, False) == pytest.approx(x / 1.001**0.5, rel=1e-5)


def test_crossq_2_acting_and_the_loaded_policy_use_the_moments_of_the_run(file, tmp_path):
    """However few observations there are, and without a change of them."""
    names = begin(file)
    agent, obs = with_moments(names, 10), np.float32([[0.3]])
    checkpoint, their_obs = (
        {"agent": jax.tree.map(np.array, agent)},
        torch.tensor(obs.astype(float)),
    )
    (mean, log_std), _ = policy(agent, doubles(agent["actor"]), their_obs, False)
    low, high = names["action_space"].low, names["action_space"].high
    expected = low + (high - low) * (1 + mean.tanh().detach().numpy().reshape(2, 2)) / 2
    got = names["load_policy"](checkpoint, names["envs"])(obs, None)
    shares = [(x - low) / (high - low) for x in (got[0], expected)]
    np.testing.assert_allclose(*shares, atol=1e-5)
    noise = jax.random.normal(jax.random.fold_in(names["act_key"], 7), (1, 4))
    drawn = torch.tanh(mean + log_std.exp() * torch.tensor(np.asarray(noise, float))).detach()
    np.testing.assert_allclose(names["act"](actor_of(agent), obs, 7), drawn, atol=1e-5)
    assert same(leaves(checkpoint["agent"]), leaves(agent))


@pytest.mark.slow
def test_ddpg_5_updates_are_counted_in_environment_steps(file, tmp_path):
    """One in five is also the actor's."""
    names, updates = follow(file, tmp_path, *COUNTS, "--policy-frequency", 5)
    agent = names["run"]["agent"]
    check_schedule(updates, 2, 99, 102, actor_every_fifth)
    assert check_actions(names, updates) == (100, 1)
    counts = [updates_of(agent, name) for name in ("q_networks", "actor", "log_alpha")]
    assert counts == [12, 3, 3]
    for name, count in {"q_networks_moments": 12, "actor_moments": 3}.items():
        layers = agent[name]["moments"].values()
        assert len(layers) == 3 and all((layer["run"]["count"] == count).all() for layer in layers)
    check_losses(file, tmp_path, updates, 100)


@pytest.mark.slow
def test_values_of_probes(file, tmp_path):
    """Of the actions -0.5 and 0.5; load_policy takes the right ones (-0.07 with seed 2)."""
    flags = "--q-width 64 --utd 3 --batch-size 64".split()
    env_id = "Probe/ContinuousTargetFromObs-v0"
    learned, returns = learn_probe(file, tmp_path, env_id, 3, [-1, 1], *flags)
    np.testing.assert_allclose(learned, [[0, -1, -1, 0]] * 2, atol=0.2)
    assert np.mean(returns) > -0.15


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_pendulum(file, tmp_path, seed):
    """-187 with seed 1."""
    flags = "--env-id Pendulum-v1 --gamma 0.95 --learning-starts 300 --q-width 256".split()
    train(file, tmp_path, *flags, "--total-timesteps", 4000, "--seed", seed)
    returns = [value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]]
    assert np.mean(returns[-10:]) >= -250
