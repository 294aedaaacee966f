"""cleanrl/sac_continuous_action_jax.py. test_sac_N guards detail N of docs/rl-algorithms/sac.md,
test_td3_N and test_ddpg_N, from the tests of those files, that of td3.md and ddpg.md."""

import math
import runpy
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from tests.harness import FILES, same
from tests.test_ddpg_continuous_action_jax import (  # noqa: F401  the imported tests run here too
    COUNTS,
    begin,
    check_actions,
    check_losses,
    check_schedule,
    check_targets,
    every_fifth,
    follow,
    follow_twin,
    learn_pendulum,
    learn_probe,
    made_up,
    rates,
    test_a_buffer_that_does_not_fit_in_memory_is_refused,
    test_ddpg_1_a_loaded_policy_rescales_its_actions,
    test_ddpg_1_bounds_as_large_as_numbers_get_and_actions_without_a_shape,
    test_ddpg_1_every_action_has_its_own_bounds,
    test_ddpg_2_a_ring_with_the_last_transitions,
    test_ddpg_2_every_transition_is_as_likely,
    test_ddpg_2_the_ring_holds_what_happened_and_every_episode_is_logged,
    test_ddpg_3_a_resumed_run_acts_at_random_until_it_learns,
    test_integer_actions_are_refused,
    test_matrix_products_are_those_of_the_twin,
    test_resume_is_the_uninterrupted_run,
    test_resume_restores_everything,
    test_same_seed_same_bits,
    update_actor,
    updates_of,
)
from tests.test_dqn_jax import leaves
from tests.test_td3_continuous_action_jax import (  # noqa: F401
    test_td3_1_two_networks_are_computed_as_one,
)

# the policy


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.5, -1.0), (-1.5, 0.5), (0.3, 1.0)])
def test_sac_1_densities_of_squashed_actions(file, tmp_path, mean, log_std):
    """They integrate to 1 between -1 and 1, and are those of the twin for the same noise."""
    twin = FILES["sac_continuous_action"]
    sample, their_sample = (runpy.run_path(str(path))["sample"] for path in (file, twin))
    noise = np.linspace(-4, 4, 4001, dtype=np.float32)[:, None]
    for columns in (1, 3):
        drawn = np.repeat(noise, columns, 1)
        means, log_stds = mean + 0 * drawn, log_std + 0 * drawn
        with mock.patch("jax.random.normal", return_value=jnp.asarray(drawn)):
            actions, log_probs = sample(means, log_stds, jax.random.key(1))
        with mock.patch("torch.randn_like", return_value=torch.tensor(drawn)):
            expected = their_sample(torch.tensor(means), torch.tensor(log_stds))
        np.testing.assert_allclose(actions, expected[0], atol=1e-6)
        np.testing.assert_allclose(log_probs, expected[1], atol=1e-4)
        if columns == 1:
            density = np.exp(log_probs, dtype=np.float64)
            area = np.trapezoid(density, np.asarray(actions[:, 0], np.float64))
            assert np.abs(actions).max() <= 1 and area == pytest.approx(1, abs=3e-3)


def test_sac_1_draws_are_gaussian(file, tmp_path):
    """Independent, new for another key; far out, densities and gradients are still numbers."""
    sample, rng = runpy.run_path(str(file))["sample"], np.random.default_rng(1)
    mean = rng.standard_normal((2000, 3)).astype(np.float32)
    log_std = mean[::-1] / 2
    actions = np.stack([sample(mean, log_std, jax.random.key(i))[0] for i in (1, 2)]).astype(float)
    is_exact = (np.abs(actions) < 0.9999).all((0, 2))
    noise = (np.arctanh(actions[:, is_exact]) - mean[is_exact]) / np.exp(log_std[is_exact])
    noise = np.concatenate(noise, 1)
    assert len(noise) > 1000 and np.abs(np.corrcoef(noise.T) - np.eye(6)).max() < 0.1
    far = jnp.array([[-1e4, -50, 50, 1e4]]).T

    def log_probs(mean):
        return sample(mean, jnp.full((4, 1), 2.0), jax.random.key(1))[1].sum()

    assert jnp.isfinite(log_probs(far)) and jnp.isfinite(jax.grad(log_probs)(far)).all()


def test_sac_1_acting_draws_from_the_policy(file, tmp_path):
    """As many standard deviations away from the mean as a Gaussian number; new for each step."""
    names = begin(file)
    params, obs = names["agent"]["actor"], np.full((1000, 1), 0.5, np.float32)
    mean, log_std = names["actor"].apply(params, obs)
    actions = [np.asarray(names["act"](params, obs, t), float) for t in (3, 4)]
    noise = np.concatenate([(np.arctanh(x) - mean) / np.exp(log_std) for x in actions], 1)
    assert np.abs(noise.mean(0)).max() < 0.15 and np.abs(noise.std(0) - 1).max() < 0.1
    assert np.abs(np.corrcoef(noise.T) - np.eye(8)).max() < 0.15


def test_sac_2_the_standard_deviation_is_bounded(file, tmp_path):
    """Between exp(-5) and exp(2), softly; it depends on the observation, as the mean does."""
    names, obs = begin(file), np.random.default_rng(1).standard_normal((200, 1)).astype(np.float32)
    actor = jax.tree.map(np.array, names["agent"]["actor"])
    mean, log_std = names["actor"].apply(actor, 1e4 * obs)
    assert np.abs(mean).max() > 10 and log_std.min() == -5 and log_std.max() == 2
    layer = actor["params"]["Dense_3"]
    layer["kernel"][:] = 0
    for bias, expected in {-99: -5, 99: 2, 0: -1.5, 0.5: -1.5 + 3.5 * math.tanh(0.5)}.items():
        layer["bias"][:] = bias
        _, log_std = names["actor"].apply(actor, obs)
        np.testing.assert_allclose(log_std, np.full((200, 4), expected), atol=1e-5)


# learning


def test_sac_3_sac_4_sac_5_updates_are_those_of_the_twin(file, tmp_path):
    """Weights, targets, temperature, Adam's moments and losses; twice as many of the actor."""
    apart, moved = follow_twin(file)
    assert apart < 5e-5 and moved == {*begin(file)["agent"]}


def test_sac_5_without_tuning_the_temperature_stays(file, tmp_path):
    names = begin(file, "--no-autotune", "--alpha", 0.3)
    obs = made_up(names)["obs"]
    agent, losses = update_actor(names, names["agent"], obs, jax.random.key(1))
    assert losses.keys() == {"actor_loss", "alpha"} and losses["alpha"] == pytest.approx(0.3)
    assert agent["log_alpha"] == pytest.approx(math.log(0.3))
    assert updates_of(agent, "log_alpha") == 0
    assert "alpha_loss" not in names["losses"] and "alpha_loss" in begin(file)["losses"]


def test_sac_4_ddpg_6_updates_are_counted_in_environment_steps(file, tmp_path):
    """Once in four the actor makes as many, and the targets move every fifth time."""
    flags = ("--policy-frequency", 4, "--target-network-frequency", 5)
    names, updates = follow(file, tmp_path, *COUNTS, *flags)

    def turns(step):
        numbers = range(3 * step, 3 * step + 3)
        return [part for n in numbers for part in ("q", *["actor"] * 4 * (n % 4 == 0))]

    agent = names["run"]["agent"]
    check_schedule(updates, 2, 99, 102, turns)
    assert check_targets(names, updates, every_fifth, "q_networks") == [9, 3]
    assert check_actions(names, updates) == (100, 1)
    counts = [updates_of(agent, name) for name in ("q_networks", "actor", "log_alpha")]
    assert counts == [12, 12, 12] and "target_actor" not in agent
    check_losses(file, tmp_path, updates, 100)


# what the files that have no twin are compared with, in double precision


def doubles(tree):
    """Arrays as PyTorch's tensors, which remember how they are used."""
    return jax.tree.map(lambda x: torch.tensor(np.asarray(x, float), requires_grad=True), tree)


def batch_of(b):
    """Observations, actions, rewards, next observations and ends."""
    return [torch.tensor(np.asarray(x, float)) for x in b.values()]


def dense(layer, x):
    """Also for a stack of networks, whose layers are stacks."""
    return x @ layer["kernel"] + layer["bias"].unsqueeze(-2)


def policy(params, obs):
    hidden = dense(params["Dense_1"], dense(params["Dense_0"], obs).relu()).relu()
    log_std = -5 + 3.5 * (1 + dense(params["Dense_3"], hidden).tanh())
    return dense(params["Dense_2"], hidden), log_std


def squash(mean, log_std, key):
    """Actions with the noise of a key, and their log-probabilities."""
    normal = torch.distributions.Normal(mean, log_std.exp())
    noise = torch.tensor(np.asarray(jax.random.normal(key, mean.shape), float))
    unsquashed = mean + log_std.exp() * noise
    log_probs = normal.log_prob(unsquashed) - (1 - unsquashed.tanh().square()).log()
    return unsquashed.tanh(), log_probs.sum(1)


def entropy_losses(log_alpha, log_probs, values):
    """The actor's loss, which leaves the temperature alone, and the temperature's."""
    actor_loss = (log_alpha.detach().exp() * log_probs - values).mean()
    return actor_loss, -(log_alpha.exp() * (log_probs.detach() - 4)).mean()


def check_step(before, after, name, params, loss, rate, b1=0.9):
    """Whether an agent made Adam's first step down a loss, of these params."""
    grads = [x.numpy() for x in torch.autograd.grad(loss, jax.tree.leaves(params))]
    means = leaves(optax.tree.get(after[f"{name}_optimizer"], "mu"))
    for mean, grad in zip(means, grads, strict=True):
        atol = 1e-5 * max(1, np.abs(grad).max())
        np.testing.assert_allclose(mean, (1 - b1) * grad, rtol=1e-3, atol=atol)
    for old, new, mean in zip(leaves(before[name]), leaves(after[name]), means, strict=True):
        grad = mean / (1 - b1)
        expected = old - rate * grad / (np.abs(grad) + 1e-8)
        np.testing.assert_allclose(new, expected, rtol=1e-4, atol=1e-6)


def check_changes(before, after, *names):
    """Whether all of these parts of an agent have changed, with their optimizers, and no others."""
    changed = {part for part in after if not same(leaves(before[part]), leaves(after[part]))}
    optimizers = {f"{name}_optimizer" for name in names}
    moments = {f"{name}_moments" for name in names} & before.keys()
    assert changed == {*names, *optimizers, *moments}


# known answers


@pytest.mark.parametrize(
    ("env_id", "num_envs", "values"),
    [
        ("ContinuousProbe/TwoEnds-v0", 3, {-1: [1, 1], 1: [2, 2]}),
        pytest.param(
            "Probe/ContinuousTargetFromObs-v0", 3, {-1: [0, -1], 1: [-1, 0]}, marks=pytest.mark.slow
        ),
    ],
)
def test_values_of_probes(file, tmp_path, env_id, num_envs, values):
    """With next to no entropy in them."""
    learned, returns = learn_probe(file, tmp_path, env_id, num_envs, [*values])
    np.testing.assert_allclose(learned, [np.ravel([*values.values()])] * 2, atol=0.1)
    assert "Target" not in env_id or np.mean(returns) > -0.02


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_pendulum(file, tmp_path, seed):
    """-136 with seed 1."""
    flags = (*rates(file, 0.002), "--total-timesteps", 7000, "--seed", seed)
    assert learn_pendulum(file, tmp_path, *flags) >= -250
