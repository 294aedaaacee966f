"""Take one detail out of an algorithm file, and the test that guards it must fail: a test that
cannot fail is none.

All mutations run in this process, by calling the test functions themselves on the rewritten file.
"""

import importlib
import inspect
import tomllib
from pathlib import Path

import pytest

from tests.harness import ROOT

MUTATIONS = [
    pytest.param(
        path.stem,
        mutation,
        id=f"{path.stem}: {mutation['name']}",
        marks=[pytest.mark.slow] * is_slow,
    )
    for path in sorted(Path(__file__).parent.glob("*.toml"))
    for number, mutation in enumerate(tomllib.loads(path.read_text())["mutation"])
    for is_slow in [
        mutation.get("slow") or ("_jax" in path.stem and (number > 0 or path.stem != "dqn_jax"))
    ]  # each is a program to compile
]


@pytest.mark.parametrize(("algorithm", "mutation"), MUTATIONS)
def test_mutation_is_noticed(algorithm, mutation, tmp_path, monkeypatch):
    source = (ROOT / "cleanrl" / f"{algorithm}.py").read_text()
    assert source.count(mutation["old"]) == 1, (
        f"{mutation['old']!r} must occur once: the mutation is out of date"
    )
    mutant = tmp_path / f"{algorithm}.py"
    mutant.write_text(source.replace(mutation["old"], mutation["new"]))

    module, function = mutation["test"].split(".")
    test = getattr(importlib.import_module(f"tests.{module}"), function)
    arguments = {"file": mutant, "tmp_path": tmp_path / "test", **mutation.get("arguments", {})}
    if "monkeypatch" in inspect.signature(test).parameters:
        arguments["monkeypatch"] = monkeypatch
    (tmp_path / "test").mkdir()
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(**arguments)


def test_all_mutations_are_up_to_date():
    """Also those that are slow: what they replace occurs once."""
    stale = []
    for path in sorted(Path(__file__).parent.glob("*.toml")):
        source = (ROOT / "cleanrl" / f"{path.stem}.py").read_text()
        for mutation in tomllib.loads(path.read_text())["mutation"]:
            if source.count(mutation["old"]) != 1:
                stale.append(f"{path.stem}: {mutation['name']}")
    assert stale == []
