"""The pytest plugin behind check: the parent's tests on the user's copy, a line of JSON for each.

The copy, given with --file, has its parent's name. What a test saw is put into words here, where
the variables of the failing test are still there (explain.py)."""

import json
import re
import sys
from pathlib import Path

import pytest

from cleanrl_utils.check import explain
from cleanrl_utils.check.explain import CONTRACT


def pytest_addoption(parser):
    parser.addoption("--check-report", help="file for the lines of JSON")
    parser.addoption("--check-folder", help="of the user's file, with what it may import")
    parser.addoption("--check-only", default="", help="part of the names of the tests")
    parser.addoption("--check-part", default="1/1", help="which of how many parts of the tests")


def pytest_configure(config):
    from tests import harness

    sys.path.append(config.getoption("--check-folder"))
    file = Path(config.getoption("file")).resolve()
    harness.FILES[file.stem] = file
    harness.PPO = harness.FILES["ppo"]


def is_ours(item, stem):
    module, name = item.module.__name__.rpartition(".")[2], item.originalname
    if module == "test_contract":
        return name in CONTRACT and stem in re.split(r"[\[\]-]", item.name)
    is_long = item.get_closest_marker("slow") or "learns" in name or "_gpu" in name
    return not is_long and "file" in item.fixturenames and is_run_on(item, stem)


def is_run_on(item, stem):
    """A module that two files share has each test for both."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return Path(parameters.get("file", stem)).stem == stem


def pytest_collection_modifyitems(config, items):
    stem = Path(config.getoption("file")).stem
    part, parts = map(int, config.getoption("--check-part").split("/"))
    only = config.getoption("--check-only")
    ours = [item for item in items if is_ours(item, stem) and only in item.name]
    kept = ours[part - 1 :: parts]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
    write(config, {"total": len(items)})


def write(config, record):
    with open(config.getoption("--check-report"), "a") as file:
        file.write(json.dumps(record) + "\n")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.when == "call" or report.outcome != "passed":
        file = Path(item.config.getoption("file")).resolve()
        record = {"test": item.originalname, "id": item.name, "module": item.module.__name__}
        record |= {"seconds": round(report.duration, 1), "outcome": "ok", "seen": ""}
        if report.skipped:
            record |= {"outcome": "skipped", "seen": str(report.longrepr[-1])}
        elif report.failed:
            outcome, seen = explain.explain(item, call.excinfo, file, report.capstderr)
            record |= {"outcome": outcome, "seen": seen}
        write(item.config, record)
