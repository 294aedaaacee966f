"""cleanrl/c51_jax.py. test_c51_N and test_dqn_N guard detail N of docs/rl-algorithms/{c51,dqn}.md.

tests/mutations shows that each test can fail.
"""

import runpy

import jax
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.harness import FILES
from tests.test_c51 import means, projected
from tests.test_dqn import FUZZ
from tests.test_dqn_jax import follow_schedule, follow_updates, learn_cartpole, learn_probe, outputs


def test_c51_2_projection_matches_a_loop_over_the_atoms(file, tmp_path):
    """And PyTorch's: between the atoms, on them, beyond both ends, and where an episode ended."""
    sibling = FILES[file.stem.removesuffix("_jax")]
    project, torch_project = (runpy.run_path(str(path))["project"] for path in (file, sibling))
    project = jax.jit(project)

    @FUZZ
    @given(
        num_atoms=st.sampled_from([2, 7, 51]),  # each of another shape, and so another compilation
        v_min=st.integers(-20, 20),
        gap=st.sampled_from([0.125, 0.5, 2]),  # so that 32 bits tell exactly what falls on an atom
        gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
        reward=st.one_of(st.floats(-50, 50, width=32), st.integers(-30, 30)),
        seed=st.integers(0, 2**32 - 1),
    )
    def check(num_atoms, v_min, gap, gamma, reward, seed):
        rng, atoms = np.random.default_rng(seed), np.float32(v_min + gap * np.arange(num_atoms))
        pmfs = rng.dirichlet(np.full(num_atoms, 0.3), 5).astype(np.float32)
        rewards = np.float32([reward, 0.0, gap, -2 * gap, 0.3 * gap])  # some fall on atoms
        returns = rewards[:, None] + np.float32(gamma) * atoms
        returns[-1] = atoms[rng.integers(num_atoms)]  # a terminated step: gamma does not count
        got = np.asarray(project(pmfs, returns, atoms))
        rows = zip(pmfs.tolist(), returns.tolist(), strict=True)
        expected = [projected(*row, atoms.tolist()) for row in rows]
        # 32 bits have room for a 50th atom and 4e-6 of the next
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
        by_torch = torch_project(*map(torch.from_numpy, (pmfs, returns, atoms)))
        np.testing.assert_allclose(got, by_torch, rtol=0, atol=1e-5)
        np.testing.assert_allclose(got.sum(1), 1, rtol=0, atol=1e-6, err_msg="nothing is lost")

    check()


def reference_loss(names, params, target_params, batch):
    """The cross-entropy to the projected target, row by row, and the mean value of the actions."""
    args, terminated = names["args"], batch["terminated"]
    atoms = np.linspace(args.v_min, args.v_max, args.n_atoms).tolist()
    log_pmfs = outputs(names, params, batch["obs"])
    next_pmfs = outputs(names, target_params, batch["next_obs"]).exp().tolist()
    errors, values = [], []
    for row, action in enumerate(batch["actions"]):
        reward, log_pmf = float(batch["rewards"][row]), log_pmfs[row, action]
        returns = [reward + 0.9 * atom * (not terminated[row]) for atom in atoms]
        target = projected(next_pmfs[row][np.argmax(means(next_pmfs[row], atoms))], returns, atoms)
        errors.append(-sum(p * log_p for p, log_p in zip(target, log_pmf, strict=True)))
        values.append(sum(p * atom for p, atom in zip(log_pmf.exp(), atoms, strict=True)))
    return sum(errors) / len(errors), sum(values) / len(values)


def test_c51_3_cross_entropy_to_the_projected_target(file, tmp_path, monkeypatch):
    """Loss, gradient and Adam's step, with its epsilon [c51 4], against a loop over the rows."""
    flags = ("--n-atoms", 7, "--v-min", -2, "--v-max", 2)
    assert follow_updates(file, monkeypatch, reference_loss, 0.01 / 16, *flags) == 2


def test_dqn_3_dqn_5_dqn_6_updates_and_the_target_network(file, tmp_path):
    """With the actions of the highest means."""
    updates, moves, other_best = follow_schedule(file, 4, 2, 33, 30, 1)
    assert updates >= 20 and moves >= 3 and other_best > 0, "there was something to see"


@pytest.mark.parametrize(
    ("probe", "values"),
    [
        ("TwoEnds", {-1: [1, 1], 1: [2, 2]}),
        ("ActionAndObsMatter", {-1: [1, -1], 1: [-1, 1]}),
        pytest.param("Discounting", {0: [0.5, 0.5], 1: [1, 1]}, marks=pytest.mark.slow),
    ],
)
def test_values_of_probes(file, tmp_path, probe, values):
    learned, returns = learn_probe(file, tmp_path, probe, 3, values)
    np.testing.assert_allclose(learned, list(values.values()), atol=0.1)
    assert "Action" not in probe or returns == [1] * 40


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_cartpole(file, tmp_path, seed):
    """In half as many steps again as DQN."""
    assert learn_cartpole(file, tmp_path, seed, "--total-timesteps", 24_000) >= 150
