"""cleanrl_utils.speed for real: our file, a peer, the bare environments, and the table of them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cleanrl_utils.speed import measure as speed

ROOT = Path(__file__).parents[1]
needs_uv = pytest.mark.skipif(
    not (shutil.which("uv") or shutil.which(ROOT / ".uv/bin/uv")), reason="uv is not installed"
)


def run(*flags):
    command = [sys.executable, "-m", "cleanrl_utils.speed", *map(str, flags)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_warm_up_is_left_out():
    slow_start = [(0, 0.0), (100, 50.0), (200, 60.0), (600, 62.0), (1000, 64.0)]
    assert speed.measure(slow_start) == {"steps": 800, "seconds": 4.0}
    cut_between_marks = [
        (512, 3.0),
        (1024, 4.0),
        (1536, 5.0),
        (5120, 12.0),
    ]  # 20% are 1024 steps: the second mark
    assert speed.measure(cut_between_marks) == {"steps": 4096, "seconds": 8.0}


def test_nothing_left_after_the_warm_up():
    with pytest.raises(SystemExit, match="too small"):
        speed.measure([(512, 3.0)])


def test_side_by_side_only_the_time_of_both_counts():
    """Past the warm-up of both, and before the first is done."""
    ours, theirs = (
        [(10 * i, 100.0 + i) for i in range(11)],
        [(10 * i, 104.0 + 2 * i) for i in range(11)],
    )
    assert speed.measure(ours, theirs) == {"steps": 20, "seconds": 2.0}, (
        "from 108, where they are past 20%, to 110"
    )
    assert speed.measure(theirs, ours) == {"steps": 10, "seconds": 2.0}
    with pytest.raises(SystemExit, match="too small"):
        speed.measure(ours, [(step, when + 7) for step, when in theirs])


def test_packages_come_from_the_constraints():
    assert list(speed.with_packages("stable-baselines3==2.9.2")) == [
        "--with",
        "stable-baselines3==2.9.2",
    ]
    (torch_line,) = (
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("torch==")
    )
    assert list(speed.with_packages("torch")) == ["--with", torch_line]
    for peers in speed.PEERS.values():
        for _, _, packages in peers.values():
            assert len(list(speed.with_packages(packages))) >= 2 * len(packages.split()), (
                "a package is not in constraints.txt"
            )


@pytest.mark.slow
@needs_uv
def test_table_and_raw_figures(tmp_path):
    before = set(ROOT.glob("runs/*"))
    done = run(
        "ppo",
        "--rounds",
        1,
        "--total-timesteps",
        5120,
        "--peers",
        "sb3",
        "--json",
        tmp_path / "speed.json",
    )
    assert done.returncode == 0, done.stderr
    assert set(ROOT.glob("runs/*")) == before

    raw = json.loads((tmp_path / "speed.json").read_text())
    (figures,) = raw["rounds"]
    assert figures.keys() == {"ours", "sb3", "bare"}
    assert figures["bare"]["steps"] == figures["ours"]["steps"] == figures["sb3"]["steps"] == 4096
    rates = {program: figure["steps"] / figure["seconds"] for program, figure in figures.items()}
    assert 0 < rates["ours"] < rates["bare"] and 0 < rates["sb3"] < rates["bare"]
    assert (
        raw["versions"]["sb3"]["torch"].split("+")[0]
        == raw["versions"]["ours"]["torch"].split("+")[0]
    )
    assert raw["settings"]["env_id"] == "CartPole-v1" and raw["settings"]["total_timesteps"] == 5120

    rows = {
        row[0]: row[1:] for row in (re.split(r"\s{2,}", line) for line in done.stdout.splitlines())
    }
    for name, program in {
        "cleanrl/ppo.py": "ours",
        "Stable-Baselines3": "sb3",
        "bare environments": "bare",
    }.items():
        shown = f"{rates[program]:,.0f}"
        assert rows[name][:2] == [shown, f"{shown} - {shown}"]
        assert rows[name][-1] == f"{rates[program] / rates['bare']:.1%}"
    assert rows["Stable-Baselines3"][2] == f"{rates['ours'] / rates['sb3']:.2f} times as fast"
    assert "SBX" not in done.stdout


@pytest.mark.slow
@needs_uv
@pytest.mark.skipif(
    not shutil.which("taskset") or len(os.sched_getaffinity(0)) < 2,
    reason="needs Linux and two cores",
)
def test_side_by_side(monkeypatch, capsys, tmp_path):
    """Both at once, each on a core of its own, and on the other's in the next round."""
    commands, subprocess_run = [], subprocess.run

    def record(command, **settings):
        commands.append(command)
        return subprocess_run(command, **settings)

    monkeypatch.setattr(speed.subprocess, "run", record)
    flags = dict(
        rounds=2,
        total_timesteps=163_840,
        peers=("sb3",),
        side_by_side=True,
        json=tmp_path / "speed.json",
    )
    speed.main(speed.Args("ppo", **flags))
    first, second = map(str, sorted(os.sched_getaffinity(0))[:2])
    assert [command[2] for command in commands if command[0] == "taskset"] == [
        second,
        first,
        first,
        second,
    ]
    for figures in json.loads((tmp_path / "speed.json").read_text())["rounds"]:
        assert 0 < figures["sb3"]["steps"] < 0.8 * 163_840, (
            "it was begun later, and was not done when ours was"
        )
        assert figures["ours"]["seconds"] == pytest.approx(figures["sb3"]["seconds"], rel=0.3), (
            "the same seconds"
        )
    assert "one CPU thread each, at the same time" in capsys.readouterr().out


@pytest.mark.slow
def test_one_of_our_own_files_can_be_a_peer(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(speed.PEERS["ppo"], "dqn", ("cleanrl/dqn.py", "dqn", ""))
    speed.main(
        speed.Args(
            "ppo", rounds=1, total_timesteps=15_360, peers=("dqn",), json=tmp_path / "speed.json"
        )
    )
    (figures,) = json.loads((tmp_path / "speed.json").read_text())["rounds"]
    assert (
        figures.keys() == {"ours", "dqn", "bare"} and figures["dqn"]["steps"] == 5000
    )  # from 10,000 on
    assert re.search(r"^cleanrl/dqn.py .* times as fast", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("algorithm", ["ppo_jax", "pqn_jax"])
def test_the_clock_of_ppo_jax_is_read_when_its_logs_are_not_late(algorithm):
    """A checkpoint, where logs are on time, ends the warm-up; all calls are of the same length."""
    (_, interval), timesteps = speed.FLAGS[algorithm], speed.TIMESTEPS[algorithm]
    assert timesteps % (16 * 512) == 0 and interval % 16 == 0
    assert round(speed.WARM_UP * timesteps) % (interval * 512) == 0


@pytest.mark.slow
@needs_uv
@pytest.mark.parametrize("algorithm", ["ppo_jax", "pqn_jax"])
def test_programs_of_one_call(monkeypatch, capsys, tmp_path, algorithm):
    """It logs 16 iterations per call: only the last of them tells what was done by then."""
    monkeypatch.setitem(speed.TIMESTEPS, algorithm, 10 * 16 * 512)
    monkeypatch.setitem(speed.FLAGS, algorithm, ["--checkpoint-interval", 32])
    speed.main(speed.Args(algorithm, rounds=1, peers=("rejax",), json=tmp_path / "speed.json"))
    raw = json.loads((tmp_path / "speed.json").read_text())
    (figures,) = raw["rounds"]
    assert (
        figures["ours"]["steps"] == 8 * 16 * 512 and figures["rejax"]["steps"] == 10 * 16 * 512
    )  # of its second call
    assert raw["versions"]["rejax"]["jax"] == raw["versions"]["ours"]["jax"]
    assert figures["ours"]["seconds"] < 3 * figures["rejax"]["seconds"] < 60, (
        "compilation was measured"
    )
    assert re.search(
        r"^81,920 steps a run.*^rejax .* times as fast", capsys.readouterr().out, re.M | re.S
    )


def test_medians_of_the_ratios_round_by_round(capsys):
    """A machine that is slow for one whole round changes no ratio."""
    seconds = [
        {"ours": 1, "sb3": 2, "bare": 0.5},
        {"ours": 10, "sb3": 20, "bare": 5},
        {"ours": 1, "sb3": 3, "bare": 0.5},
    ]
    rounds = [
        {program: {"steps": 1000, "seconds": s} for program, s in figures.items()}
        for figures in seconds
    ]
    speed.print_table({"ours": "Ours", "sb3": "Theirs", "bare": "Bare"}, rounds)
    rows = [re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines()]
    assert rows[1] == ["Ours", "1,000", "100 - 1,000", "50.0%"]
    assert rows[2] == ["Theirs", "333", "50 - 500", "2.00 times as fast", "25.0%"]
    assert rows[3] == ["Bare", "2,000", "200 - 2,000", "100.0%"]


def test_unknown_algorithm_is_one_line():
    done = run("pppo")
    assert done.returncode != 0
    assert done.stderr == f"unknown algorithm pppo: choose from {', '.join(speed.PEERS)}\n"


@pytest.mark.parametrize(
    "flags, line",
    [
        (dict(peers=("sb3", "sb4")), "unknown peer sb4: ppo has sb3, sbx"),
        (
            dict(side_by_side=True),
            "--side-by-side is for one peer: add --peers with one of sb3, sbx",
        ),
        (dict(rounds=0), "rounds must be at least 1"),
        (dict(json=Path("/dev/null/speed.json")), "cannot write --json: .*: /dev/null"),
        (
            dict(peers=(), total_timesteps=3, json=Path("new/folder/speed.json")),
            "ours failed: .*total_timesteps.*",
        ),  # what our own file says
        (
            dict(
                algorithm="dqn",
                peers=(),
                total_timesteps=50,
                json=Path("new/folder/speed.json"),
            ),
            "total_timesteps is too small: .*",
        ),  # it has not logged its speed
    ],
)
def test_bad_input_is_one_line(flags, line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        speed.main(speed.Args(**{"algorithm": "ppo"} | flags))
    assert re.fullmatch(
        line, stopped.value.code
    )  # Python prints it on stderr, without a traceback, and exits with 1
    assert capsys.readouterr() == ("", "")
    if "total_timesteps" in flags:
        assert Path("new/folder").is_dir(), "made before anything is measured"


def test_without_uv(monkeypatch):
    monkeypatch.setattr(speed.shutil, "which", lambda _: None)
    with pytest.raises(SystemExit, match="uv is needed"):
        speed.main(speed.Args("ppo"))
    speed.check(speed.Args("dqn_jax"))  # its only peer is dqn.py


@needs_uv
def test_a_peer_that_fails(tmp_path, monkeypatch):
    monkeypatch.setitem(speed.PEERS["ppo"], "broken", ("Broken", "broken_ppo.py", "six"))
    (tmp_path / "broken_ppo.py").write_text("import no_such_module")
    monkeypatch.setattr(speed, "PROGRAMS", tmp_path)
    with pytest.raises(SystemExit) as stopped:
        speed.main(speed.Args("ppo", total_timesteps=1024, peers=("broken",)))
    assert stopped.value.code == "broken failed: there is no module no_such_module"
