"""scripts/time_to_score.py: the fast scripts reach their scores, and the page has the data."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT

sys.path.append(str(ROOT / "scripts"))
import time_to_score

SCRIPTS = sorted((ROOT / "benchmark" / "fast").glob("*.sh"))


def test_the_page_has_the_data():
    measured = json.loads(time_to_score.DATA.read_text())
    assert sorted(measured) == [script.name for script in SCRIPTS], "each script is measured"
    assert time_to_score.table(measured) in time_to_score.PAGE.read_text()
    for told in measured.values():
        assert len(told["runs"]) >= 3 and not told["dirty"]
        assert all(run["score"] >= told["asked"] for run in told["runs"])
        assert all(0 < run["training"] < run["seconds"] for run in told["runs"])


def test_the_script_has_the_flags_of_the_best_trial():
    """Those of PPO are the study's, rounded, and no other flag differs."""
    study = (ROOT / "scripts" / "tune_fast_cartpole.py").read_text()
    tuned = set(re.findall(r'suggest_\w+\("([\w-]+)"', study))
    of_the_study = [script for script in SCRIPTS if "ppo_jax.py" in script.read_text()]
    assert len(of_the_study) == 2
    for script in of_the_study:
        flags = set(re.findall(r"--([\w-]+)", script.read_text()))
        assert flags == tuned | {"env-id", "total-timesteps"}, script


@pytest.mark.parametrize("script", ["no_such.sh", None])
def test_a_script_that_is_missing_gets_one_line(script):
    args = time_to_score.Args(script=script and Path(script))
    with pytest.raises(SystemExit, match=r"cannot measure .*: name a script of benchmark/fast"):
        time_to_score.main(args)


def test_a_script_that_fails_is_shown(tmp_path):
    (tmp_path / "broken.sh").write_text("echo no such flag >&2; exit 3\n")
    before = time_to_score.DATA.read_bytes()
    with pytest.raises(SystemExit, match=r"broken.sh .* failed:\nno such flag"):
        time_to_score.main(time_to_score.Args(script=tmp_path / "broken.sh"))
    assert time_to_score.DATA.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_score_is_reached(script):
    """With a seed that is neither of the study nor of the page."""
    asked = json.loads(time_to_score.DATA.read_text())[script.name]["asked"]
    _, figures = time_to_score.measure(script, seed=7)
    assert figures["score"] >= asked
