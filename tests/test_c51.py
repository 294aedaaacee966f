"""cleanrl/c51.py. test_c51_N guards detail N of docs/rl-algorithms/c51.md.

test_dqn_N, from test_dqn.py, guards detail N of dqn.md.
"""

import copy
import math
import runpy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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


def means(pmfs, atoms):
    """The expected return under each distribution, added up atom by atom."""
    return [sum(p * atom for p, atom in zip(pmf, atoms, strict=True)) for pmf in pmfs]


def test_c51_1_a_distribution_over_the_atoms_for_each_action(file, tmp_path):
    """Evenly spaced from v_min to v_max; the action with the highest mean is the best one."""
    atoms = [-2, 0, 2, 4, 6]
    flags = "--train-frequency 3 --total-timesteps 180 --v-min -2 --v-max 6 --n-atoms 5".split()
    names = train(file, tmp_path, "--env-id", probe(file, "ActionAndObsMatter"), *SMALL, *flags)
    assert names["atoms"].tolist() == names["q_network"].atoms.tolist() == atoms
    envs = names["make_envs"](names["args"], 3)
    obs = np.concatenate([envs.reset(seed=seed)[0] for seed in range(20)])
    with torch.no_grad():
        pmfs = names["q_network"](torch.from_numpy(obs)).exp()
        q_values = names["q_network"].q_values(torch.from_numpy(obs))
    assert pmfs.shape == (60, 2, 5) and pmfs.min() >= 0
    torch.testing.assert_close(pmfs.sum(-1), torch.ones(60, 2))
    expected = torch.tensor([means(rows, atoms) for rows in pmfs.tolist()])
    torch.testing.assert_close(q_values, expected, atol=1e-5, rtol=0)
    checkpoint = torch.load(only_run(tmp_path) / "checkpoint.pt", weights_only=True)
    policy = names["load_policy"](checkpoint, envs)
    np.testing.assert_array_equal(policy(obs, np.zeros(60, bool)), expected.argmax(1))
    assert 0 < expected.argmax(1).sum() < 60, "each action must be the best one at times"


def projected(pmf, returns, atoms):
    """A distribution over returns, moved to the atoms one probability at a time."""
    result = [0.0] * len(atoms)
    for p, value in zip(pmf, returns, strict=True):
        value = min(max(value, atoms[0]), atoms[-1])
        above = next(i for i, atom in enumerate(atoms) if atom >= value)
        if atoms[above] == value:
            result[above] += p
        else:
            gap = atoms[above] - atoms[above - 1]
            result[above] += p * (value - atoms[above - 1]) / gap
            result[above - 1] += p * (atoms[above] - value) / gap
    return result


def test_c51_2_projection_matches_a_loop_over_the_atoms(file, tmp_path):
    """Between the atoms, on them, beyond both ends, and where a terminated step has one return."""
    project = runpy.run_path(str(file))["project"]

    @FUZZ
    @given(
        num_atoms=st.integers(2, 30),
        v_min=st.floats(-20, 20),
        width=st.floats(0.5, 40),
        gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
        reward=st.one_of(st.floats(-50, 50), st.integers(-30, 30)),
        seed=st.integers(0, 2**32 - 1),
    )
    def check(num_atoms, v_min, width, gamma, reward, seed):
        rng, atoms = np.random.default_rng(seed), np.linspace(v_min, v_min + width, num_atoms)
        pmfs = rng.dirichlet(np.full(num_atoms, 0.3), 5)
        gap = width / (num_atoms - 1)
        rewards = [reward, 0.0, gap, -2 * gap, 0.3 * gap]  # some on atoms if gamma is 1
        returns = np.array([[r + gamma * atom for atom in atoms] for r in rewards])
        returns[-1] = atoms[rng.integers(num_atoms)]  # a terminated step: gamma does not count
        got = project(*(torch.from_numpy(x) for x in (pmfs, returns, atoms))).numpy()
        rows = zip(pmfs.tolist(), returns.tolist(), strict=True)
        expected = [projected(*row, atoms.tolist()) for row in rows]
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
        np.testing.assert_allclose(got.sum(1), 1, rtol=0, atol=1e-9)  # no probability is lost
        inside = ((returns >= atoms[0]) & (returns <= atoms[-1])).all(1)
        assert inside[-1]
        kept, before = got @ atoms, (pmfs * returns).sum(1)  # the means
        np.testing.assert_allclose(kept[inside], before[inside], rtol=0, atol=1e-6)

    check()


def test_c51_2_by_hand(file, tmp_path):
    project = runpy.run_path(str(file))["project"]
    atoms, pmfs = torch.tensor([-1.0, 0, 1, 2]), torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    for returns, expected in {
        (-1.0, 0.0, 1.0, 2.0): [0.1, 0.2, 0.3, 0.4],
        (-9.0, -2.0, 2.5, 9.0): [0.3, 0, 0, 0.7],
        (-0.5, 0.0, 0.5, 1.0): [0.05, 0.05 + 0.2 + 0.15, 0.15 + 0.4, 0],
        (1.75, 1.75, 1.75, 1.75): [0, 0, 0.25, 0.75],
        (2.0, 2.0, 2.0, 2.0): [0, 0, 0, 1],
    }.items():
        got = project(pmfs, torch.tensor([returns]), atoms)
        torch.testing.assert_close(got, torch.tensor([expected]).float(), atol=1e-6, rtol=0)


def test_c51_3_cross_entropy_to_the_projected_target(file, tmp_path, monkeypatch):
    """The gradient at the optimizer is that of the textbook loss, row by row, by autograd."""
    happened, ends = watch(file, monkeypatch), []

    def look(names):
        network, target_network = copy.deepcopy(names["q_network"]), names["target_network"]
        atoms, (obs, actions, rewards, next_obs, _) = names["atoms"].tolist(), batch(names)
        errors = []
        for row, step in enumerate(transitions(names)):
            terminated, truncated = step[-1], happened[step]
            pmfs = target_network(next_obs[row, None])[0].exp().tolist()
            best = np.argmax(means(pmfs, atoms))
            returns = [rewards[row].item() + 0.9 * atom * (not terminated) for atom in atoms]
            target = projected(pmfs[best], returns, atoms)
            log_pmf = network(obs[row, None])[0, int(actions[row])]
            errors.append(-sum(p * log_p for p, log_p in zip(target, log_pmf, strict=True)))
            ends.append((terminated, truncated))
        loss = sum(errors) / len(errors)
        expected = torch.autograd.grad(loss, list(network.parameters()))
        expected = torch.cat([g.flatten() for g in expected])
        torch.testing.assert_close(flat_grad(names["q_network"]), expected, atol=1e-5, rtol=1e-3)
        assert names["loss"].item() == pytest.approx(loss.item(), rel=1e-4)

    flags = "--total-timesteps 180 --train-frequency 20 --n-atoms 7 --v-min -2 --v-max 2".split()
    env_id = probe(file, "RandomEnds")
    train(file, tmp_path, "--env-id", env_id, *SMALL, *flags, on_update=look)
    assert len(ends) == 7 * 16 and {(True, False), (False, True), (False, False)} <= set(ends)


@pytest.mark.parametrize("batch_size", [8, 64])
def test_c51_4_adam_epsilon(file, tmp_path, batch_size):
    """0.01 / batch_size: Adam's first step is lr * g / (|g| + eps), not lr * sign(g)."""
    seen = []

    def look(names):
        seen.append((copy.deepcopy(names["q_network"]), flat_grad(names["q_network"])))

    flags = (*SMALL, "--batch-size", batch_size, "--total-timesteps", 66)
    train(file, tmp_path, "--env-id", probe(file, "RandomEnds"), *flags, on_update=look)
    (before, grad), (after, _) = seen
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    step = torch.cat([(b - a).flatten() for b, a in pairs])
    expected = 0.001 * grad / (grad.abs() + 0.01 / batch_size)
    torch.testing.assert_close(step, expected, atol=2e-7, rtol=0)
    assert (grad.abs() < 0.01 / batch_size).float().mean() > 0.1, "it must matter"


def test_a_certain_return_is_learned_as_such(file, tmp_path):
    """A reward of 1 and the end: all probability is at atom 1, or half at each of 0 and 2."""
    flags = "--learning-rate 0.01 --total-timesteps 600 --v-min 0 --v-max 2".split()
    flags = ("--env-id", probe(file, "ConstantValue"), *SMALL, *flags)
    for num_atoms, expected in {3: [0, 1, 0], 2: [0.5, 0.5]}.items():
        names = train(file, tmp_path / str(num_atoms), *flags, "--n-atoms", num_atoms)
        with torch.no_grad():
            learned = names["q_network"](torch.zeros(1, 1)).exp()[0]
        expected = torch.tensor([expected, expected]).float()
        torch.testing.assert_close(learned, expected, atol=0.05, rtol=0)
        assert names["loss"].item() == pytest.approx(0 if num_atoms == 3 else math.log(2), abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_cartpole(file, tmp_path, seed):
    """In the default suite DQN does it; probes and details are this file's own."""
    train(file, tmp_path, *FAST_CARTPOLE, "--seed", seed)
    returns = [value for _, value in scalars(only_run(tmp_path))["charts/episodic_return"]]
    assert np.mean(returns[-20:]) >= 150
