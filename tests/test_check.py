"""python -m cleanrl_utils.check: the ten mistakes are named, a copy is clean, runs are placed."""

import importlib
import inspect
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cleanrl_utils import bands
from cleanrl_utils.check import __main__ as check
from cleanrl_utils.check import explain, parent, race, sampler
from tests.harness import FILES, ROOT, only_run, train

MISTAKES = tomllib.loads((ROOT / "tests" / "mistakes.toml").read_text())["mistake"]
ARGUMENTS = "args", "probe", "values"


def with_mistake(mistake, path):
    source = FILES[mistake["file"]].read_text()
    assert source.count(mistake["old"]) == 1, "the mistake is out of date"
    path.write_text(source.replace(mistake["old"], mistake["new"]))
    return path


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake["name"])
def test_mistakes_are_named(mistake, tmp_path, monkeypatch):
    """By the test that notices it, in this process."""
    file = with_mistake(mistake, tmp_path / f"{mistake['file']}.py")
    module, function = mistake["test"].split(".")
    test = getattr(importlib.import_module(f"tests.{module}"), function)
    arguments = {"file": file, "tmp_path": tmp_path / "run"} | mistake.get("arguments", {})
    arguments |= (
        {"monkeypatch": monkeypatch} if "monkeypatch" in inspect.signature(test).parameters else {}
    )
    with pytest.raises(BaseException) as error:
        test(**arguments)
    item = SimpleNamespace(originalname=function)
    outcome, seen = explain.explain(item, error, file, "")
    assert outcome == "broken" and mistake["seen"] in seen, seen
