"""Run folders: which there are, what run.json says, how far a run got, whose evaluation it has."""

import json
import os

import numpy as np
import pytest

from cleanrl_utils import errors, runs
from cleanrl_utils.events import read_events
from tests.harness import PPO, only_run, train


@pytest.fixture(scope="module")
def ppo_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppo")
    train(PPO, folder, "--total-timesteps", 1024)
    return only_run(folder)


def test_a_run_of_ppo_is_read_and_finished(ppo_run):
    run, (scalars, problems) = runs.read_run(ppo_run), read_events(ppo_run)
    assert run["file"] == "ppo.py" and run["args"]["total_timesteps"] == 1024 and not problems
    assert runs.last_step(scalars) == 1024 and runs.is_finished(run, scalars)
    run["args"]["total_timesteps"] = 1535  # less than another iteration
    assert runs.is_finished(run, scalars)
    run["args"]["total_timesteps"] = 1536
    assert not runs.is_finished(run, scalars)


def test_run_folders_are_found_and_a_journal_is_none(ppo_run, tmp_path):
    parent = ppo_run.parent
    (parent / "benchmark").mkdir()
    (parent / "benchmark" / "journal.jsonl").touch()
    old = parent / "A-v0__old__1__1"  # of CleanRL v1: events, but no run.json
    old.mkdir()
    (old / "events.out.tfevents.1").touch()
    assert runs.find_runs(parent) == [old, ppo_run] and runs.find_runs(ppo_run) == [ppo_run]
    later = parent / "A-v0__later__1__1"
    later.mkdir()
    (later / "run.json").write_text("{}")
    os.utime(later / "run.json", (3e9, 3e9))
    assert runs.newest_run(parent) == later
    for missing, problem in ((tmp_path / "nowhere", "no folder"), (tmp_path, "there is no run in")):
        with pytest.raises(ValueError, match=problem):
            runs.newest_run(missing)


@pytest.mark.parametrize("text", [None, "[]", "{}", "no", "[" * 100_000, " " * (2**24 + 1)])
def test_what_is_no_run_is_one_line(tmp_path, text):
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(SystemExit) as refusal, errors.explain(f"read {tmp_path}\x1b"):
        runs.read_run(tmp_path)
    problem = refusal.value.code
    assert problem.startswith(f"cannot read {tmp_path}?: ") and problem.isprintable()


def test_an_evaluation_counts_only_for_its_environment_checkpoint_and_episodes(tmp_path):
    evaluation = {"env_id": "CartPole-v1", "global_step": 500, "returns": [1.0, 2.0]}
    assert runs.read_evaluation(tmp_path, "CartPole-v1", 500, 2) is None
    (tmp_path / "eval.json").write_text(json.dumps(evaluation))
    assert runs.read_evaluation(tmp_path, "CartPole-v1", 500, 2) == evaluation
    for other in (("CartPole-v0", 500, 2), ("CartPole-v1", 501, 2), ("CartPole-v1", 500, 1)):
        assert runs.read_evaluation(tmp_path, *other) is None
    (tmp_path / "eval.json").write_text("[1]")
    assert runs.read_evaluation(tmp_path, "CartPole-v1", 500, 2) is None


def test_a_run_without_logged_speed_may_lack_a_twentieth():
    rows = {"charts/episodic_return": np.array([[950.0, 1, 1], [951.0, 1, 1]])}
    assert runs.is_finished({"args": {"total_timesteps": 1000}}, rows)
    assert not runs.is_finished({"args": {"total_timesteps": 1010}}, rows)
