"""cleanrl/c51_atari_jax.py: the tests of dqn_atari_jax.py around the network, and of c51_jax.py."""

import numpy as np
import torch

from tests.test_c51 import cross_entropy, means, projected
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
        errors.append(cross_entropy(target, log_pmf[action]))
    return sum(errors) / len(errors)


def test_c51_3_c51_5_and_dqn_2_to_dqn_6_every_update_is_by_the_book(file, tmp_path, monkeypatch):
    """And [c51 4], Adam's epsilon of 0.01 / batch_size.

    The steps are so large that some probabilities get close to 0.
    """
    pmfs = []

    def reference_loss_and_pmfs(names, params, target_params, b):
        rows = torch.arange(16), torch.from_numpy(np.array(b["actions"])).long()
        pmfs.append(outputs(names, params, b["stacks"][:, :4])[rows].exp().detach())
        return reference_loss(names, params, target_params, b)

    flags = ("--n-atoms", 7, "--v-min", -2, "--v-max", 2, "--learning-rate", 0.1)
    follow = file, tmp_path, monkeypatch, reference_loss_and_pmfs, 0.01 / 16, 1
    assert follow_updates(*follow, *flags) == list(range(60, 241, 6))
    assert (pmfs[0] > 1e-5).all() and (torch.cat(pmfs) < 1e-5).sum() > 20
