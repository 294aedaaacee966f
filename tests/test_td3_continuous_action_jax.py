"""cleanrl/td3_continuous_action_jax.py. test_td3_N guards detail N of docs/rl-algorithms/td3.md,
test_ddpg_N, from test_ddpg_continuous_action_jax.py, that of ddpg.md."""

import jax
import numpy as np
import pytest

from tests.test_ddpg_continuous_action_jax import (  # noqa: F401  the imported tests run here too
    COUNTS,
    actor_every_fifth,
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
    test_ddpg_3_noise_that_is_clipped,
    test_integer_actions_are_refused,
    test_matrix_products_are_those_of_the_twin,
    test_resume_restores_everything,
    test_same_seed_same_bits,
    updates_of,
)


def test_td3_1_two_networks_are_computed_as_one(file, tmp_path):
    """Each as a plain network with its share of the weights, which are its own."""
    names = begin(file)
    b, params = made_up(names), names["agent"]["q_networks"]
    values = names["q_networks"].apply(params, b["obs"], b["actions"])
    for i in range(2):
        own = jax.tree.map(lambda x, i=i: x[i], params)
        expected = names["QNetwork"]().apply(own, b["obs"], b["actions"])
        np.testing.assert_allclose(values[i], expected, atol=1e-6)
    kernels = [x for x in jax.tree.leaves(params) if x.ndim == 3]
    assert values.shape == (2, 8) and len(kernels) == 3
    assert all((x[0] != x[1]).mean() > 0.99 for x in kernels)


def test_td3_1_td3_3_updates_are_those_of_the_twin(file, tmp_path):
    """Weights, targets from the lower values, Adam's moments and losses, with clipped noise."""
    apart, moved = follow_twin(file, "--policy-noise", 0.8)
    assert apart < 2e-5 and moved == {*begin(file)["agent"]}


def test_td3_2_updates_are_counted_in_environment_steps(file, tmp_path):
    """One in five is also the actor's, and the targets', which move by tau."""
    names, updates = follow(file, tmp_path, *COUNTS, "--policy-frequency", 5)
    agent = names["run"]["agent"]
    check_schedule(updates, 2, 99, 102, actor_every_fifth)
    assert check_targets(names, updates, every_fifth, "actor", "q_networks") == [9, 3]
    assert check_actions(names, updates) == (100, 1)
    assert (updates_of(agent, "q_networks"), updates_of(agent, "actor")) == (12, 3)
    check_losses(file, tmp_path, updates, 100)


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
    learned, returns = learn_probe(file, tmp_path, env_id, num_envs, [*values])
    np.testing.assert_allclose(learned, [np.ravel([*values.values()])] * 2, atol=0.1)
    assert "Target" not in env_id or np.mean(returns) > -0.02


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_pendulum(file, tmp_path, seed):
    """-137 with seed 1."""
    flags = (*rates(file, 0.002), "--total-timesteps", 7000, "--seed", seed)
    assert learn_pendulum(file, tmp_path, *flags) >= -250
