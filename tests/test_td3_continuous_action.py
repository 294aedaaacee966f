"""cleanrl/td3_continuous_action.py. test_td3_N guards detail N of docs/rl-algorithms/td3.md.

test_ddpg_N, from test_ddpg_continuous_action.py, guards detail N of ddpg.md.
"""

import runpy
from types import SimpleNamespace

import gymnasium as gym
import pytest
import torch
from torch import nn

from tests.harness import probe, train
from tests.test_ddpg_continuous_action import (  # noqa: F401  the imported tests run here too
    COUNTS,
    SMALL,
    batch,
    count_updates,
    critic,
    follow_targets,
    learner,
    next_values,
    q_values,
    rates,
    test_a_buffer_that_does_not_fit_in_memory_is_refused,
    test_acting_in_evaluation_mode_learning_in_training_mode,
    test_actions_of_probes,
    test_ddpg_1_a_loaded_policy_rescales_its_actions,
    test_ddpg_1_bounds_as_large_as_numbers_get,
    test_ddpg_2_only_what_happened_is_learned_from,
    test_ddpg_3_a_resumed_run_acts_at_random_until_it_learns,
    test_ddpg_3_then_the_actors,
    test_ddpg_3_with_noise_that_is_clipped,
    test_ddpg_4_a_cut_is_bootstrapped_and_an_end_is_not,
    test_ddpg_5_the_actor_climbs_the_q_network,
    test_integer_actions_are_refused,
    test_metrics,
    test_same_seed_same_bits,
    test_values_of_probes,
)
from tests.test_ddpg_continuous_action import test_learns_pendulum as learn_pendulum

# two Q-networks


def test_td3_1_two_networks_are_computed_as_one(file, tmp_path):
    """Each as a plain network with weights of its own; their values are the rows of the result."""
    spaces = [gym.spaces.Box(-1, 1, shape) for shape in ((5,), (3, 1))]
    envs = SimpleNamespace(single_observation_space=spaces[0], single_action_space=spaces[1])
    torch.manual_seed(1)
    networks = runpy.run_path(str(file))["QNetworks"](envs)
    obs, actions = torch.randn(7, 5), torch.randn(7, 3)
    values = networks(obs, actions)
    assert len(networks) == 2 and values.shape == (2, 7)
    for network, value in zip(networks, values, strict=True):
        layers = list(network.children())
        assert [tuple(x.weight.shape) for x in layers] == [(256, 8), (256, 256), (1, 256)]
        expected = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
        expected = expected(torch.cat([obs, actions], 1))[:, 0]
        torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-5)
    for x, y in zip(networks[0].parameters(), networks[1].parameters(), strict=True):
        assert torch.isclose(x, y).float().mean() < 0.01


def test_td3_1_the_lower_value_is_the_target(file, tmp_path):
    lower = set()

    def look(names):
        if learner(names) == "q":
            _, _, rewards, next_obs, terminated = batch(names)
            values = q_values(critic(names, "target_"), next_obs, names["next_actions"])
            lower.update(values.argmin(0).tolist())
            expected = rewards + 0.9 * ~terminated * next_values(names)
            torch.testing.assert_close(names["targets"], expected)

    flags = (*SMALL, *rates(file, 0.01), "--tau", 0.3, "--total-timesteps", 72)
    train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *flags, on_update=look)
    assert lower == {0, 1}, "each must be the lower one at times"


# delayed updates


@pytest.mark.parametrize(("num_envs", "utd", "policy_frequency", "learning_starts"), COUNTS)
def test_td3_2_the_actor_waits(file, tmp_path, num_envs, utd, policy_frequency, learning_starts):
    """One update in policy_frequency is also the actor's."""
    counts = num_envs, utd, policy_frequency, learning_starts
    made, asked = count_updates(file, tmp_path, *counts, ["actor"])
    assert made == asked and len(made) > 20


@pytest.mark.parametrize("policy_frequency", [1, 3])
def test_td3_2_the_targets_wait_for_the_actor(file, tmp_path, policy_frequency):
    flags = ("--policy-frequency", policy_frequency)
    moves, targets = follow_targets(file, tmp_path, policy_frequency, *flags)
    assert moves == (23 if policy_frequency == 1 else 8)
    assert targets == {"target_actor", "target_q_networks"}


# target policy smoothing


def target_actions(file, folder, *flags):
    """The noise on the target actor's actions in all updates, and the sums."""
    noise, actions = [], []

    def look(names):
        if learner(names) == "q":
            actions.append(names["next_actions"])
            noise.append(names["next_actions"] - names["target_actor"](batch(names)[3]))

    flags = ("--env-id", "Probe/ContinuousTarget-v0", *SMALL, *rates(file, 1e-4), *flags)
    train(file, folder, *flags, on_update=look)
    return torch.cat(noise), torch.cat(actions)


def test_td3_3_target_actions_are_shaken(file, tmp_path):
    """Clipped Gaussian noise, new for each row, component and update, never out of bounds."""
    flags = ("--policy-noise", 0.2, "--noise-clip", 0.25)
    noise, _ = target_actions(file, tmp_path / "a", *flags)
    is_cut = (noise.abs() - 0.25).abs() < 1e-6
    assert noise.abs().max() < 0.25 + 1e-6
    assert is_cut.float().mean().item() == pytest.approx(0.211, abs=0.03)
    below = [(noise < x).float().mean().item() for x in (-0.2, -0.1, 0, 0.1, 0.2)]
    gaussian = [0.159, 0.309, 0.5, 0.691, 0.841]
    assert below == pytest.approx(gaussian, abs=0.04)
    assert len(noise[~is_cut].unique()) > 0.95 * (~is_cut).sum()
    flags = ("--policy-noise", 3, "--noise-clip", 2, "--total-timesteps", 72)
    _, actions = target_actions(file, tmp_path / "b", *flags)
    assert actions.abs().max() == 1 and (actions == 1).any() and (actions == -1).any()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_pendulum(file, tmp_path, seed):
    """In the default suite DDPG does it, whose test tells the returns."""
    learn_pendulum(file, tmp_path, seed)
