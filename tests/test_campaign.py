"""scripts/campaign.py: what one session keeps, the next one resumes."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cleanrl_utils.runs import find_runs
from tests.harness import PPO, ROOT, scalars

CAMPAIGN = [sys.executable, ROOT / "scripts" / "campaign.py"]


def call(folder, command, *flags):
    folder.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [*CAMPAIGN, command, "--out", "out", *map(str, flags)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def stop(folder):
    os.killpg(int((folder / "runs" / "campaign.pid").read_text()), signal.SIGKILL)


@pytest.mark.slow
def test_the_next_session_resumes_what_the_last_one_kept(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    train = f"{sys.executable} {PPO} --total-timesteps 100_000 --checkpoint-interval 1"
    command = f"{sys.executable} -m cleanrl_utils.benchmark --command {shlex.quote(train)}"
    command += " --num-seeds 2 --workers 2"

    while "0 steps" in (told := call(first, command, "--minutes", 0.1)) or "steps" not in told:
        assert "still at work" in told  # each call finds it running, and waits for longer
    assert (first / "runs" / "campaign.log").read_text().count("started") == 2
    stop(first)

    kept = {run.name for run in find_runs(first / "runs")}
    told = call(second, command, "--minutes", 5, "--unpack", first / "out", "--part-size", 0.25)
    assert "ended" in told and told.count("finished") == 2
    runs = find_runs(second / "runs")
    assert {run.name for run in runs} == kept and len(runs) == 2
    for run in runs:
        steps = [step for step, _ in scalars(run)["charts/SPS"]]
        assert steps == list(range(512, 99_841, 512))  # each iteration once, in both sessions
    assert "checkpoint" not in listed(second)  # of finished runs, curves are enough
    assert "checkpoint.pt" in listed(first) and "journal.jsonl" in listed(first)


def listed(folder):
    data = b"".join(path.read_bytes() for path in sorted((folder / "out").iterdir()))
    done = subprocess.run(["tar", "t"], input=data, capture_output=True, check=True)
    return done.stdout.decode()


def test_parts_are_no_larger_than_asked_and_curves_come_first(tmp_path, monkeypatch):
    """One checkpoint of two fits: that of the run that came further."""
    sys.path.append(str(ROOT / "scripts"))
    import campaign

    monkeypatch.chdir(tmp_path)
    for seed, steps in ((1, 1024), (2, 512)):
        words = [sys.executable, PPO, "--seed", str(seed), "--total-timesteps", str(steps)]
        subprocess.run(words, check=True, capture_output=True)
    folders = find_runs("runs")
    for folder in folders:
        (folder / "checkpoint.pt").write_bytes(os.urandom(400_000))
        text = (folder / "run.json").read_text()
        for steps in (1024, 512):
            text = text.replace(f'"total_timesteps": {steps}', '"total_timesteps": 99999')
        (folder / "run.json").write_text(text)
    campaign.pack(Path("runs"), Path("out"), part_size=2**18, num_parts=5)
    names = listed(tmp_path)
    assert f"{folders[0]}/checkpoint.pt" in names and f"{folders[1]}/checkpoint.pt" not in names
    assert names.count("run.json") == 2 and names.count("tfevents") == 2
    parts = list(Path("out").iterdir())
    assert 1 < len(parts) <= 5 and max(part.stat().st_size for part in parts) <= 2**18
