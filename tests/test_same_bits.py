"""scripts/same_bits.py: what differs in a bit is told, and what does not is the same."""

import sys

import numpy as np
import pytest
import torch

from scripts import same_bits
from tests.harness import FILES

EQUAL = [
    {"agent": {"weight": torch.tensor([1.0, torch.nan, -0.0])}, "step": 3},
    {"rng": (3, [1, 2**100], None), "name": "x", "scale": np.float64(np.nan)},
]


@pytest.mark.parametrize("checkpoint", EQUAL)
def test_what_is_the_same(checkpoint):
    assert list(same_bits.differences(checkpoint, checkpoint)) == []
    assert list(same_bits.differences(checkpoint | {"args": 1}, checkpoint)) == ["args (missing)"]
    assert list(same_bits.differences(checkpoint, checkpoint | {"args": 1})) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (np.zeros(2, np.float32), np.zeros(2)),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (np.zeros((1, 2)), np.zeros((2, 1))),
        (1.0, np.nextafter(1.0, 2)),
        (2**100, 2**100 + 1),
        (None, 0.0),
        ([1, 2], [1, 2, 3]),
        ({"x": 1}, 1),
    ],
)
def test_what_differs(old, new):
    assert list(same_bits.differences({"x": {"y": old}}, {"x": {"y": new}})) == ["x.y"]


def test_training_is_on_the_cpu_with_flags_for_every_file(monkeypatch, tmp_path):
    assert same_bits.FLAGS.keys() >= FILES.keys()

    class Ended(Exception):
        pass

    def look(command, env, **_):
        assert (env["CUDA_VISIBLE_DEVICES"], env["JAX_PLATFORMS"]) == ("", "cpu")
        raise Ended

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(same_bits.subprocess, "run", look)
    with pytest.raises(Ended):
        same_bits.train(FILES["ppo"], "", tmp_path)


def test_names_without_flags_get_one_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["same_bits", "old", "new", "ppo", "my_ppo"])
    with pytest.raises(SystemExit, match=r"^no flags are known for my_ppo: pass --flags$"):
        same_bits.main()
