"""scripts/campaign.py: what one session keeps, the next one resumes."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from cleanrl_utils.runs import find_runs
from tests.harness import PPO, ROOT, scalars

sys.path.append(str(ROOT / "scripts"))
import campaign

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

    packed = ""
    while packed.count("checkpoint.pt") < 2:
        told = call(first, command, "--minutes", 0.1)
        assert "still at work" in told  # each call finds it running, and waits for longer
        packed = listed(first)
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
    assert "journal.jsonl" in packed


def listed(folder):
    data = b"".join(path.read_bytes() for path in sorted((folder / "out").iterdir()))
    done = subprocess.run(["tar", "t"], input=data, capture_output=True, check=True)
    return done.stdout.decode()


def test_parts_are_no_larger_than_asked_and_curves_come_first(tmp_path, monkeypatch):
    """One checkpoint of two fits: that of the run that came further."""
    monkeypatch.chdir(tmp_path)
    for seed, steps in ((1, 1024), (2, 512)):
        words = [sys.executable, PPO, "--seed", str(seed), "--total-timesteps", str(steps)]
        subprocess.run(words, check=True, capture_output=True)
    folders = find_runs("runs")
    for folder in folders:
        (folder / "checkpoint.pt").write_bytes(os.urandom(400_000))
    campaign.pack(Path("runs"), Path("out"), part_size=2**18, num_parts=5)
    names = listed(tmp_path)
    assert f"{folders[0]}/checkpoint.pt" in names and f"{folders[1]}/checkpoint.pt" not in names
    assert names.count("run.json") == 2 and names.count("tfevents") == 2
    parts = list(Path("out").iterdir())
    assert 1 < len(parts) <= 5 and max(part.stat().st_size for part in parts) <= 2**18


def make_run(name):
    """A run folder of 512 steps, with a checkpoint, in runs/."""
    folder = Path("runs", name)
    with SummaryWriter(folder) as writer:
        writer.add_scalar("charts/SPS", 1, 512)
    (folder / "run.json").write_text('{"args": {"exp_name": "ppo", "total_timesteps": 600}}')
    (folder / "checkpoint.pt").write_bytes(b"before")
    return folder


def pack(num_parts=4):
    campaign.pack(Path("runs"), Path("out"), 2**18, num_parts)
    return listed(Path())


def test_only_runs_that_the_journal_calls_done_go_without_checkpoint(tmp_path, monkeypatch):
    """One logging interval before its end, a run still needs it."""
    monkeypatch.chdir(tmp_path)
    cut, done = make_run("cut"), make_run("done")
    journal = Path("runs", "benchmark", "journal.jsonl")
    journal.parent.mkdir()
    events = [{"run": "a", "event": "done", "folder": str(done)}, {"run": "b", "event": "started"}]
    journal.write_text("".join(json.dumps(event) + "\n" for event in events) + '{"run": "b", "ev')
    names = pack()
    assert f"{cut}/checkpoint.pt" in names and f"{done}/checkpoint.pt" not in names
    assert f"{done}/run.json" in names and str(journal) in names


def test_a_pack_that_fails_leaves_the_last_one(tmp_path, monkeypatch, capsys):
    """A run without run.json is none: it is packed, and so are curves beyond the last part."""
    monkeypatch.chdir(tmp_path)
    run = make_run("run")
    names = pack()
    with monkeypatch.context() as broken, pytest.raises(OSError, match="disk"):
        broken.setattr(campaign.tarfile.TarFile, "add", fail)
        pack()
    assert listed(tmp_path) == names and len(list(Path("out").iterdir())) == 1

    (run / "run.json").unlink()
    assert "run/checkpoint.pt" in pack()
    assert "alone need more" not in capsys.readouterr().out
    names = pack(num_parts=0)
    assert "checkpoint" not in names and "run/events" in names
    assert "curves and journals alone need more than --num-parts" in capsys.readouterr().out
    assert [path.name for path in Path("runs").iterdir()] == ["run"]


def fail(*_):
    raise OSError("the disk is full")


def test_a_checkpoint_is_not_newer_than_its_curves(tmp_path, monkeypatch):
    """The run replaces its checkpoint while its curves are read."""
    monkeypatch.chdir(tmp_path)
    run, read_events = make_run("run"), campaign.read_events

    def read_slowly(*args, **settings):
        (run / "checkpoint.tmp").write_bytes(b"after")
        (run / "checkpoint.tmp").replace(run / "checkpoint.pt")
        return read_events(*args, **settings)

    monkeypatch.setattr(campaign, "read_events", read_slowly)
    pack()
    Path("second").mkdir()
    monkeypatch.chdir("second")
    campaign.unpack("../out")
    assert (run / "checkpoint.pt").read_bytes() == b"before"


@pytest.mark.parametrize(
    ("command", "problem"),
    [("no-such-program --x", "No such file or directory: no-such-program"), ("'", "No closing")],
)
def test_a_command_that_cannot_start_is_one_line(command, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    with pytest.raises(SystemExit) as stopped:
        campaign.start(command, Path("runs", "campaign.pid"))
    assert stopped.value.code.startswith(f"cannot start {command}: {problem}")
    assert not Path("runs", "campaign.pid").exists()
