"""cleanrl/td3_continuous_action.py. test_td3_N guards detail N of docs/rl-algorithms/td3.md, test_ddpg_N, from
test_ddpg_continuous_action.py, that of ddpg.md."""

import runpy
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from tests.harness import FILES, only_run, probe, scalars, train
from tests.test_ddpg_continuous_action import (  # noqa: F401  the imported tests run here on this file
    COUNTS,
    FAST_PENDULUM,
    SMALL,
    columns,
    count_updates,
    critic,
    follow_targets,
    learner,
    next_values,
    q_values,
    rates,
    test_actions_of_probes,
    test_ddpg_1_whoever_loads_the_policy_gets_such_actions,
    test_ddpg_2_only_what_happened_is_learned_from,
    test_ddpg_3_then_the_actors,
    test_ddpg_3_with_noise_that_is_clipped,
    test_ddpg_4_a_cut_is_bootstrapped_and_an_end_is_not,
    test_ddpg_5_the_actor_climbs_the_q_network,
    test_metrics,
    test_same_seed_same_bits,
    test_values_of_probes,
)


@pytest.fixture
def file():
    return FILES["td3_continuous_action"]


# two Q-networks


def test_td3_1_two_networks_are_computed_as_one(file, tmp_path):
    """Each as a plain network with its share of the weights, which are its own and drawn as those of a plain one."""
    spaces = [gym.spaces.Box(-1, 1, shape) for shape in ((5,), (3, 1))]
    envs = SimpleNamespace(single_observation_space=spaces[0], single_action_space=spaces[1])
    torch.manual_seed(1)
    networks, obs, actions = (
        runpy.run_path(str(file))["QNetworks"](envs),
        torch.randn(7, 5),
        torch.randn(7, 3),
    )
    assert [x.shape for x in networks.weights] == [(2, 8, 256), (2, 256, 256), (2, 256, 1)]
    for i in range(2):
        layers = []
        for weights, biases in zip(networks.weights, networks.biases, strict=True):
            drawn = nn.Linear(*weights.shape[1:])
            torch.testing.assert_close(
                weights[i].abs().max(), drawn.weight.abs().max(), atol=0, rtol=0.05
            )
            torch.testing.assert_close(weights[i].std(), drawn.weight.std(), atol=0, rtol=0.1)
            assert biases[i].abs().max() <= weights.shape[1] ** -0.5
            assert len(biases[i][0]) == 1 or biases[i].std().item() == pytest.approx(
                drawn.bias.std().item(), rel=0.2
            )
            drawn.load_state_dict({"weight": weights[i].T, "bias": biases[i, 0]})
            layers += [drawn, nn.ReLU()]
        expected = nn.Sequential(*layers[:-1])(torch.cat([obs, actions], 1))
        torch.testing.assert_close(networks(obs, actions)[i], expected, atol=1e-6, rtol=1e-5)
    assert not any(torch.isclose(x[0], x[1]).float().mean() > 0.01 for x in networks.parameters())


def test_td3_1_the_lower_value_is_the_target(file, tmp_path):
    lower = set()

    def look(names):
        if learner(names) == "q":
            _, _, rewards, next_obs, terminated = columns(names, names["batch"])
            values = q_values(critic(names, "target_"), next_obs, names["next_actions"])
            lower.update(values.argmin(0).tolist())
            expected = rewards[:, 0] + 0.9 * (1 - terminated[:, 0]) * next_values(names)
            torch.testing.assert_close(names["targets"][:, 0], expected)

    flags = (
        "--env-id",
        probe(file, "RandomEnds"),
        *SMALL,
        *rates(file, 0.01),
        "--tau",
        0.3,
        "--total-timesteps",
        72,
    )
    train(file, tmp_path, *flags, on_update=look)
    assert lower == {0, 1}, "each must be the lower one at times"


# what waits


@pytest.mark.parametrize(("num_envs", "utd", "policy_frequency", "learning_starts"), COUNTS)
def test_td3_2_the_actor_waits(file, tmp_path, num_envs, utd, policy_frequency, learning_starts):
    """One update in policy_frequency is also the actor's."""
    made, asked = count_updates(
        file, tmp_path, num_envs, utd, policy_frequency, learning_starts, ["actor"]
    )
    assert made == asked and len(made) > 20


@pytest.mark.parametrize("policy_frequency", [1, 3])
def test_td3_2_the_targets_wait_for_the_actor(file, tmp_path, policy_frequency):
    moves, targets = follow_targets(
        file, tmp_path, policy_frequency, "--policy-frequency", policy_frequency
    )
    assert moves == (23 if policy_frequency == 1 else 8) and targets == {
        "target_actor",
        "target_q_networks",
    }


# the actions that targets look at


def target_actions(file, folder, *flags):
    """Those of all updates, and what was added to the target actor's."""
    noise, actions = [], []

    def look(names):
        if learner(names) == "q":
            actions.append(names["next_actions"])
            noise.append(
                names["next_actions"] - names["target_actor"](columns(names, names["batch"])[3])
            )

    train(
        file,
        folder,
        "--env-id",
        "Probe/ContinuousTarget-v0",
        *SMALL,
        *rates(file, 1e-4),
        *flags,
        on_update=look,
    )
    return torch.cat(noise), torch.cat(actions)


def test_td3_3_target_actions_are_shaken(file, tmp_path):
    """By Gaussian noise, cut off on both sides, new for each row, component and update, and never out of bounds."""
    noise, _ = target_actions(file, tmp_path / "a", "--policy-noise", 0.2, "--noise-clip", 0.25)
    is_cut = (noise.abs() - 0.25).abs() < 1e-6
    assert noise.abs().max() < 0.25 + 1e-6 and is_cut.float().mean().item() == pytest.approx(
        0.211, abs=0.03
    )
    below = [(noise < x).float().mean().item() for x in (-0.2, -0.1, 0, 0.1, 0.2)]
    assert below == pytest.approx([0.159, 0.309, 0.5, 0.691, 0.841], abs=0.04), (
        "as often as a Gaussian's"
    )
    assert len(noise[~is_cut].unique()) > 0.95 * (~is_cut).sum()
    _, actions = target_actions(
        file, tmp_path / "b", "--policy-noise", 3, "--noise-clip", 2, "--total-timesteps", 72
    )
    assert actions.abs().max() == 1 and (actions == 1).any() and (actions == -1).any()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_pendulum(file, tmp_path, seed):
    """In the default suite DDPG does it; what was measured is said there."""
    train(
        file,
        tmp_path,
        *FAST_PENDULUM,
        *rates(file, 0.002),
        "--total-timesteps",
        7000,
        "--seed",
        seed,
    )
    assert (
        np.mean([value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]][-10:])
        >= -250
    )
