"""cleanrl/c51_atari_jax.py: the tests of dqn_atari_jax.py around the network, and of c51_jax.py."""

import numpy as np

from tests.test_c51 import means, projected
from tests.test_dqn_atari_jax import (  # noqa: F401  the imported tests run here on this file
    follow_updates,
    outputs,
    test_actions_of_probes,
    test_atari_8_the_nature_cnn,
    test_frames_2_stacks_are_rebuilt,
)


def reference_loss(names, params, target_params, b):
    """The cross-entropy to the projected target, row by row."""
    args = names["args"]
    atoms = np.linspace(args.v_min, args.v_max, args.n_atoms).tolist()
    log_pmfs = outputs(names, params, b["stacks"][:, :4])
    next_pmfs = outputs(names, target_params, b["stacks"][:, 1:]).exp().tolist()
    errors = []
    for row, action in enumerate(b["actions"]):
        reward, is_end, log_pmf = float(b["rewards"][row]), b["terminated"][row], log_pmfs[row]
        returns = [reward + 0.9 * atom * (not is_end) for atom in atoms]
        target = projected(next_pmfs[row][np.argmax(means(next_pmfs[row], atoms))], returns, atoms)
        errors.append(-sum(p * log_p for p, log_p in zip(target, log_pmf[action], strict=True)))
    return sum(errors) / len(errors)


def test_c51_3_and_dqn_2_to_dqn_6_every_update_is_by_the_book(file, tmp_path, monkeypatch):
    """And [c51 4], Adam's epsilon of 0.01 / batch_size."""
    flags = ("--n-atoms", 7, "--v-min", -2, "--v-max", 2)
    steps = follow_updates(file, tmp_path, monkeypatch, reference_loss, 0.01 / 16, 1, *flags)
    assert steps == list(range(60, 241, 6))
