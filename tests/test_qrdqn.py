"""cleanrl/qrdqn.py. test_qrdqn_N guards detail N of docs/rl-algorithms/qrdqn.md.

test_dqn_N, from test_dqn.py, guards detail N of dqn.md.
"""

import copy
import runpy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import test_c51
from tests.harness import flat_grad, only_run, probe, scalars, train
from tests.test_dqn import (  # noqa: F401  the imported tests run here on this file
    FAST_CARTPOLE,
    FUZZ,
    SMALL,
    batch,
    test_actions_of_probes,
    test_dqn_2_few_transitions,
    test_dqn_2_only_what_happened_is_learned_from,
    test_dqn_3_other_actions_are_the_networks_best,
    test_dqn_5_updates_are_counted_in_environment_steps,
    test_dqn_6_the_target_network_is_a_frozen_copy,
    test_metrics,
    test_same_seed_same_bits,
    test_values_of_probes,
    transitions,
    watch,
)


def means(rows):
    """The mean of each row of quantiles, added up one by one."""
    return [sum(row) / len(row) for row in rows]


def midpoints(count):
    return [(2 * i + 1) / (2 * count) for i in range(count)]


def test_qrdqn_1_quantiles_for_each_action(file, tmp_path):
    """As many as asked for, without bounds; the action with the highest mean is the best one."""
    flags = "--train-frequency 3 --total-timesteps 180 --num-quantiles 5".split()
    names = train(file, tmp_path, "--env-id", probe(file, "ActionAndObsMatter"), *SMALL, *flags)
    envs = names["make_envs"](names["args"], 3)
    obs = np.concatenate([envs.reset(seed=seed)[0] for seed in range(20)])
    with torch.no_grad():
        quantiles = names["q_network"](torch.from_numpy(obs))
        q_values = names["q_network"].q_values(torch.from_numpy(obs))
    assert quantiles.shape == (60, 2, 5) and quantiles.min() < 0 < quantiles.max()
    expected = torch.tensor([means(rows) for rows in quantiles.tolist()])
    torch.testing.assert_close(q_values, expected, atol=1e-6, rtol=0)
    best = expected.argmax(1)
    checkpoint = torch.load(only_run(tmp_path) / "checkpoint.pt", weights_only=True)
    policy = names["load_policy"](checkpoint, envs)
    np.testing.assert_array_equal(policy(obs, np.zeros(60, bool)), best)
    assert 0 < best.sum() < 60, "each action must be the best one at times"


def test_qrdqn_1_the_mean_acts(file, tmp_path):
    """Not the median, the highest or the lowest quantile, each of which is another action's."""
    names = runpy.run_path(str(file))
    args = names["Args"](num_quantiles=3)
    envs = names["make_envs"](args, 2)
    network = names["QNetwork"](envs, torch.tensor(midpoints(3)))
    with torch.no_grad():
        network.quantiles.weight.zero_()
        network.quantiles.bias.copy_(torch.tensor([-9.0, 2, 8, 0, 1, 3]))
    obs, _ = envs.reset(seed=1)
    expected = torch.tensor([[1 / 3, 4 / 3]] * 2)
    torch.testing.assert_close(network.q_values(torch.from_numpy(obs)), expected)
    policy = names["load_policy"]({"q_network": network.state_dict()}, envs)
    assert policy(obs, np.zeros(2, bool)).tolist() == [1, 1]
    with torch.no_grad():
        network.quantiles.bias.copy_(torch.tensor([-1.0, 1, 9, 0, 2, 3]))
    policy = names["load_policy"]({"q_network": network.state_dict()}, envs)
    assert policy(obs, np.zeros(2, bool)).tolist() == [0, 0]


@pytest.mark.parametrize("num_quantiles", [1, 4, None])
def test_qrdqn_2_midpoints_of_equal_shares(file, tmp_path, num_quantiles):
    """Quantile i of N stands for the returns between the fractions i / N and (i + 1) / N."""
    flags = ("--total-timesteps", 66, "--env-id", probe(file, "ConstantValue"), *SMALL)
    flags = (*flags, "--num-quantiles", num_quantiles) if num_quantiles else flags
    names = train(file, tmp_path, *flags)
    expected = torch.tensor(midpoints(num_quantiles or 25))
    torch.testing.assert_close(names["taus"], expected, atol=1e-7, rtol=0)
    checkpoint = torch.load(only_run(tmp_path) / "checkpoint.pt", weights_only=True)
    for network in ("q_network", "target_network"):
        assert torch.equal(checkpoint[network]["taus"], names["taus"])


def textbook_loss(quantiles, targets, kappa):
    """The loss of one transition, one pair of a quantile and a target at a time."""
    loss = 0
    for tau, quantile in zip(midpoints(len(quantiles)), quantiles, strict=True):
        for target in targets:
            error = target - quantile
            size = abs(error)
            huber = size**2 / 2 if size <= kappa else kappa * (size - kappa / 2)
            loss += abs(tau - float(error < 0)) * huber / kappa / len(targets)
    return loss


def test_qrdqn_3_gradient_of_the_quantile_huber_loss(file, tmp_path, monkeypatch):
    """The gradient at the optimizer is that of the textbook loss, row by row, by autograd."""
    happened, ends, sizes = watch(file, monkeypatch), [], []

    def look(names):
        network, target_network = copy.deepcopy(names["q_network"]), names["target_network"]
        obs, actions, rewards, next_obs, _ = batch(names)
        losses = []
        for row, step in enumerate(transitions(names)):
            terminated, truncated = step[-1], happened[step]
            next_quantiles = target_network(next_obs[row, None])[0].tolist()
            best = np.argmax(means(next_quantiles))
            targets = [
                rewards[row].item() + 0.9 * quantile * (not terminated)
                for quantile in next_quantiles[best]
            ]
            quantiles = network(obs[row, None])[0, int(actions[row])]
            losses.append(textbook_loss(list(quantiles), targets, 0.5))
            ends.append((terminated, truncated))
            sizes.extend(abs(x - y) for x in quantiles.tolist() for y in targets)
        loss = sum(losses) / len(losses)
        expected = torch.autograd.grad(loss, list(network.parameters()))
        expected = torch.cat([g.flatten() for g in expected])
        torch.testing.assert_close(flat_grad(names["q_network"]), expected, atol=1e-5, rtol=1e-3)
        assert names["loss"].item() == pytest.approx(loss.item(), rel=1e-4)

    flags = "--total-timesteps 180 --train-frequency 20 --num-quantiles 7 --kappa 0.5".split()
    env_id = probe(file, "RandomEnds")
    train(file, tmp_path, "--env-id", env_id, *SMALL, *flags, on_update=look)
    assert len(ends) == 7 * 16 and {(True, False), (False, True), (False, False)} <= set(ends)
    assert 0.2 < np.mean(np.array(sizes) < 0.5) < 0.8, "both parts of the loss must matter"


def test_qrdqn_3_loss_matches_a_loop_over_the_pairs(file, tmp_path):
    loss_of = runpy.run_path(str(file))["quantile_huber_loss"]

    @FUZZ
    @given(
        num_quantiles=st.integers(1, 9),
        num_targets=st.integers(1, 9),
        rows=st.integers(1, 4),
        kappa=st.sampled_from([0.01, 0.5, 1.0, 3.0]),
        seed=st.integers(0, 2**32 - 1),
    )
    def check(num_quantiles, num_targets, rows, kappa, seed):
        rng = np.random.default_rng(seed)
        quantiles, targets = rng.normal(size=(rows, num_quantiles)), np.empty((rows, num_targets))
        targets[:] = rng.normal(0, 2, targets.shape)
        targets[0, 0] = quantiles[0, 0]
        taus = torch.tensor(midpoints(num_quantiles), dtype=torch.float64)
        data = torch.from_numpy(quantiles), torch.from_numpy(targets), taus
        expected = [textbook_loss(*row, kappa) for row in zip(quantiles, targets, strict=True)]
        assert loss_of(*data, kappa).item() == pytest.approx(np.mean(expected), rel=1e-6)

    check()


def test_qrdqn_3_by_hand(file, tmp_path):
    """The taus are 1/4 and 3/4; errors are 0.5, 3, -0.5 and 2."""
    loss_of = runpy.run_path(str(file))["quantile_huber_loss"]
    quantiles, targets = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 3.0]])
    taus = torch.tensor([0.25, 0.75])
    for kappa, expected in {
        1.0: (0.25 * (0.125 + 2.5) + 0.25 * 0.125 + 0.75 * 1.5) / 2,
        2.0: (0.25 * (0.0625 + 2) + 0.25 * 0.0625 + 0.75 * 1) / 2,
    }.items():
        assert loss_of(quantiles, targets, taus, kappa).item() == pytest.approx(expected)
        twice = loss_of(quantiles.repeat(2, 1), targets.repeat(2, 1), taus, kappa)
        assert twice.item() == pytest.approx(expected)


@pytest.mark.parametrize("batch_size", [8, 64])
def test_qrdqn_4_adam_epsilon(file, tmp_path, batch_size):
    test_c51.test_c51_4_adam_epsilon(file, tmp_path, batch_size)


@pytest.mark.parametrize(
    ("kappa", "expected"),
    [(0.05, [-1, -1, 0, 0, 1, 1]), (1, [-5 / 6, -1 / 2, -1 / 6, 1 / 6, 1 / 2, 5 / 6])],
)
def test_quantiles_of_a_random_return(file, tmp_path, kappa, expected):
    """Of -1, 0 and 1, a third each. With a small kappa they are the quantiles; where the loss is
    quadratic as far as the next return, they are 2 tau - 1, as its derivative shows."""
    flags = "--learning-rate 0.005 --total-timesteps 6000 --buffer-size 6000 --batch-size 256"
    flags = (*flags.split(), "--num-quantiles", 6, "--kappa", kappa)
    names = train(file, tmp_path, "--env-id", probe(file, "RandomReward"), *SMALL, *flags)
    with torch.no_grad():
        learned = names["q_network"](torch.zeros(1, 1))[0]
    torch.testing.assert_close(learned, torch.tensor([expected] * 2).float(), atol=0.15, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_cartpole(file, tmp_path, seed):
    """In the default suite DQN does it; probes and details are this file's own."""
    train(file, tmp_path, *FAST_CARTPOLE, "--seed", seed)
    returns = [value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]]
    assert np.mean(returns[-20:]) >= 150
