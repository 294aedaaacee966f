"""rlops: runs in, verdicts out, nothing dropped; the page works, with hostile runs, too."""

import base64
import contextlib
import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import tyro
from moviepy import ImageSequenceClip
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from torch.utils.tensorboard import SummaryWriter

from cleanrl_utils.rlops.analysis import compare
from cleanrl_utils.rlops.compare import Args, main
from cleanrl_utils.rlops.report import escape_latex, sentences, summary
from cleanrl_utils.rlops.sides import Run
from tests.browser import Browser, needs_chromium
from tests.harness import PPO, ROOT

TOTAL = 20_000
HOSTILE = '<script>hacked=1</script>"><img src=x onerror="hacked=1">|`'
HOSTILE += "[a](javascript:hacked=1)\x1b[31m$\\{{data}}"


def make_run(
    folder,
    seed,
    returns,
    *,
    tags=(),
    env_id="CartPole-v1",
    exp_name="ppo",
    name=None,
    until=TOTAL,
    start=1e9,
    metric="charts/episodic_return",
    first=10,
    steps_per_second=1000,
    **flags,
):
    """A run as ppo.py leaves it, with episodes of these returns, evenly spread over the steps."""
    run = folder / (name or f"{env_id.replace('/', '-')}__{exp_name}__{seed}__{int(start)}")
    run.mkdir(parents=True)
    args = {
        "exp_name": exp_name,
        "seed": seed,
        "env_id": env_id,
        "total_timesteps": TOTAL,
        "learning_rate": 2.5e-4,
    } | flags
    about = {
        "file": "toy.py",  # of which there are no published runs
        "args": args,
        "tags": list(tags),
        "start_time": start,
        "commit": "c0ffee",
        "python": "3.11",
    }
    (run / "run.json").write_text(json.dumps(about | {"packages": {"torch": "2.13.0"}}))
    writer = EventFileWriter(str(run))
    writer.add_event(
        Event(wall_time=start, step=1, session_log=SessionLog(status=SessionLog.START))
    )
    scalars = [(step, "charts/SPS", 1000) for step in range(500, until + 1, 500)]
    steps = np.linspace(until, first, len(returns)).astype(int)[::-1]
    scalars += zip(steps, [metric] * len(returns), returns, strict=True)
    for step, tag, value in sorted(scalars, key=lambda x: x[0]):
        value = Summary.Value(tag=tag, simple_value=float(value))
        writer.add_event(
            Event(
                wall_time=start + step / steps_per_second,
                step=int(step),
                summary=Summary(value=[value]),
            )
        )
    writer.close()
    return run


def curve(final, episodes=300, rng=None):
    """Returns that rise to final, with which the last 100 are in the mean."""
    rise = np.linspace(0, 1, episodes - 100)
    noise = (rng or np.random.default_rng(0)).normal(0, 1, episodes)
    noise[-100:] -= noise[-100:].mean()
    return final * np.concatenate([rise, np.ones(100)]) + noise


def make_sides(folder, finals, **flags):
    """{tag: final returns of its seeds} as run folders."""
    for tag, returns in finals.items():
        for seed, final in enumerate(returns, start=1):
            before = len(list(folder.glob("*")))
            make_run(folder, seed, curve(final), tags=[tag], start=1e9 + 1 + before, **flags)


def start(folder, *words, **environment):
    """As from a shell."""
    command = [sys.executable, "-m", "cleanrl_utils.rlops", *map(str, words)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def rlops(folder, *words, out=None):
    """The same within this process, where what it imports is there already."""
    out, err, code = out or io.StringIO(), io.StringIO(), 0
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(tyro.cli(Args, args=list(map(str, words))))
        except SystemExit as error:
            code = 1
            print(error, file=sys.stderr)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sides")
    make_sides(
        folder,
        {
            "v1": [100, 102, 104, 101, 103],
            "v2": [50, 52, 54, 51, 53],
            "v3": [101, 103, 99, 104, 102],
        },
    )
    return folder


@pytest.fixture
def two_sides(sides, tmp_path):
    shutil.copytree(sides, tmp_path / "runs")
    return tmp_path


def test_a_worse_side_is_told_apart_and_the_same_is_not(two_sides):
    done = rlops(two_sides, "--exp-name", "ppo", "--tags", "v1", "v2", "v3")
    assert (done.returncode, done.stderr) == (0, "")
    table = (two_sides / "compare.md").read_text()
    assert "| CartPole-v1 | ppo v1 | 5 | 102.00 ± 1.58 |  |  |" in table
    assert (
        "| CartPole-v1 | ppo v2 | 5 | 52.00 ± 1.58 | -50.00 [-52.31, -47.69] | worse than ppo v1, "
        "outside the noise |" in table
    )
    assert (
        "CartPole-v1: ppo v2 - ppo v1 = -50.00 [-52.31, -47.69]: worse than ppo v1, outside the "
        "noise" in done.stdout
    )
    same = re.search(
        r"ppo v3 - ppo v1 = (\S+) \[(\S+), (\S+)\]: within the noise; if it is real, (.*)$",
        done.stdout,
        re.M,
    )
    assert (
        same and float(same[2]) < 0 < float(same[3]) and "seeds a side would settle it" in same[4]
    )
    assert (two_sides / "compare.png").read_bytes().startswith(b"\x89PNG") and not (
        two_sides / "compare.html"
    ).exists()
    row = read_csv(two_sides / "compare.csv")[1]
    assert (row["environment"], row["side"], row["seeds"]) == ("CartPole-v1", "ppo v2", "5")
    assert [
        float(row[name]) for name in ("mean", "std", "difference", "low", "high")
    ] == pytest.approx([52, 2.5**0.5, -50, -52.306, -47.694], abs=1e-3)
    assert row["in_words"] == "worse than ppo v1, outside the noise"
    rows = read_csv(two_sides / "compare-runs.csv")
    assert [(row["side"], row["seed"], row["counts"]) for row in rows[:2]] == [
        ("ppo v1", "1", "yes"),
        ("ppo v1", "2", "yes"),
    ]
    assert float(rows[0]["final"]) == pytest.approx(100) and len(rows) == 15


def test_the_known_command_and_the_later_form_say_the_same(two_sides):
    known = start(
        two_sides,
        *"--exp-name ppo --tags v1 v2 --env-ids CartPole-v1 Acrobot-v1".split(),
        *"--output-filename known.png".split(),
        *"--scan-history --metric-last-n-average-window 100 --report".split(),
    )  # fmt: skip
    later = rlops(
        two_sides, "--filters", "ppo?tag=v1", "ppo?tag=v2", "--output-filename", "later.png"
    )
    assert known.returncode == later.returncode == 0, known.stderr + later.stderr
    assert "note: no side has a run on Acrobot-v1\n" in known.stderr
    known_md, later_md = ((two_sides / f"{name}.md").read_text() for name in ("known", "later"))
    assert known_md == f"{later_md}\n- no side has a run on Acrobot-v1\n"
    assert known.stdout.endswith(
        "written: known.png, known.md, known.tex, known.csv, known-runs.csv, known-curves.csv, "
        "known.html\n"
    )
    assert (two_sides / "known.html").stat().st_size > 20_000


def test_filters_take_flags_captions_and_common_parts(tmp_path):
    make_sides(tmp_path / "runs", {"a": [10, 11]}, norm_adv=True)
    make_sides(tmp_path / "runs", {"b": [20, 21]}, norm_adv=False)
    sides = ["ppo?norm-adv=True&cl=on", "ppo?norm_adv=False"]
    done = rlops(tmp_path, "--filters", "?ceik=env_id&cen=exp_name&metric=charts/SPS", *sides)
    assert done.returncode == 0, done.stderr
    rows = {
        (row["side"], row["seed"]): row["final"] for row in read_csv(tmp_path / "compare-runs.csv")
    }
    assert set(rows) == {
        ("on", "1"),
        ("on", "2"),
        ("ppo norm_adv=False", "1"),
        ("ppo norm_adv=False", "2"),
    }
    assert set(rows.values()) == {"1000"}  # the metric that was asked for
    assert "| norm_adv | True | False |" in (tmp_path / "compare.md").read_text()


def test_without_sides_every_experiment_is_one(tmp_path):
    make_sides(tmp_path / "runs", {"x": [10, 12]})
    make_sides(tmp_path / "runs", {"x": [30, 32]}, exp_name="dqn")
    done = rlops(tmp_path)
    assert "CartPole-v1: ppo - dqn = -20.00" in done.stdout, done.stderr


def test_every_run_that_does_not_count_is_named(two_sides):
    runs = two_sides / "runs"
    make_run(runs, 6, curve(100), tags=["v1"], until=9000, name="short")
    make_run(runs, 7, [], tags=["v1"], name="empty")
    make_run(runs, 8, [*curve(100), np.inf, np.nan], tags=["v1"], name="diverged")
    make_run(runs, 1, curve(400), tags=["v1"], name="first-try", start=5e8)
    broken = make_run(runs, 9, curve(102), tags=["v1"], name="broken")
    (path,) = broken.glob("events*")
    path.write_bytes(path.read_bytes()[:-9])
    make_run(runs, 10, [102] * 40, tags=["v1"], name="few")
    (make_run(runs, 11, [1], tags=["v1"], name="unreadable") / "run.json").write_text("{")
    (runs / "no-run").mkdir()
    (runs / "no-run" / "events.out.tfevents.1").touch()
    (runs / "benchmark").mkdir()
    (runs / "benchmark" / "journal.jsonl").touch()
    done = rlops(two_sides, "--exp-name", "ppo", "--tags", "v1", "v2", "--report")
    notes = done.stderr
    assert (
        done.returncode == 0 and "| ppo v1 | 7 | 102.00" in (two_sides / "compare.md").read_text()
    )
    assert "note: ppo v1: short got to step 9,000 of 20,000" in notes
    assert "note: ppo v1: empty has no charts/episodic_return: left out\n" in notes
    assert (
        "note: ppo v1: diverged diverged: a return at step 19,933 is not a number: left out\n"
        in notes
    )
    assert (
        "note: ppo v1: first-try is an earlier run of the same seed as "
        "CartPole-v1__ppo__1__1000000001: left out\n" in notes
    )
    assert (
        f"note: ppo v1: broken: {path.name} breaks off in the middle of a record" in notes
    )  # but it got to the end: it counts
    assert "note: CartPole-v1: runs with fewer than 100 values: few (40)\n" in notes
    assert "note: unreadable was not read: run.json: Expecting property name" in notes
    assert "note: no-run was not read: it has no run.json\n" in notes and "benchmark" not in notes
    page, table = (two_sides / "compare.html").read_text(), (two_sides / "compare.md").read_text()
    for name in (
        "short",
        "empty",
        "diverged",
        "first-try",
        "broken",
        "few",
        "unreadable",
        "no-run",
    ):
        assert name in page and name in table, name
    rows = read_csv(two_sides / "compare-runs.csv")
    left_out = {row["run"] for row in rows if row["counts"] == "no"}
    assert left_out == {"short", "empty", "diverged", "first-try"}

    done = rlops(two_sides, "--exp-name", "ppo", "--tags", "v1", "v2", "--count-short")
    assert "short: counts, though it got to step 9,000 of 20,000" in done.stderr
    assert "| ppo v1 | 8 |" in (two_sides / "compare.md").read_text()


def test_means_of_many_runs_count_by_their_episodes(tmp_path):
    """The last 100 episodes of a program that logs a mean of 64 for each call are two calls."""
    for seed in (1, 2, 3):
        run = make_run(tmp_path / "runs", seed, [0] * 30 + [50] * 8 + [100, 100], first=500)
        writer = EventFileWriter(str(run))
        for step in range(500, TOTAL + 1, 500):
            value = Summary.Value(tag="charts/episodic_length", simple_value=500 / 64)
            event = Event(wall_time=1e9, step=step, summary=Summary(value=[value]))
            writer.add_event(event)
        writer.close()
    rlops(tmp_path)
    assert {row["mean"] for row in read_csv(tmp_path / "compare.csv")} == {"100"}
    assert {row["episodes"] for row in read_csv(tmp_path / "compare-runs.csv")} == {str(64 * 40)}


def test_runs_without_anything_get_one_line(tmp_path):
    make_run(tmp_path / "runs", 1, [], until=0)
    done = rlops(tmp_path)
    assert done.returncode == 1 and done.stderr == "no run has any charts/episodic_return yet\n"


def test_a_verdict_says_what_was_left_out(tmp_path):
    runs = tmp_path / "runs"
    make_sides(runs, {"v1": [100, 101], "v2": [140, 141]})
    make_run(runs, 3, [*curve(100), np.nan], tags=["v2"], name="diverged")
    done = rlops(tmp_path, "--exp-name", "ppo", "--tags", "v1", "v2")
    said = "better than ppo v1, outside the noise; left out: 1 of 3 runs of ppo v2"
    assert said in done.stdout
    assert read_csv(tmp_path / "compare.csv")[-1]["in_words"] == said


def test_runs_of_different_settings_are_compared_apart_and_named(tmp_path):
    """Three runs that differ in three flags; and two commands of one file, with the same seeds."""
    runs = tmp_path / "runs"
    for seed, steps, flags in (
        (1, 5000, {}),
        (2, 20_000, {"learning_rate": 2.5e-3}),
        (3, 10_000, {"num_envs": 8}),
    ):
        make_run(runs, seed, curve(100), until=steps, total_timesteps=steps, **flags)
    done = rlops(tmp_path, "--exp-name", "ppo")
    rows = {row["side"]: row["seeds"] for row in read_csv(tmp_path / "compare.csv")}
    assert rows == {f"ppo total_timesteps={steps}": "1" for steps in (5000, 20_000, 10_000)}
    assert (
        "note: ppo: its runs differ in total_timesteps (5000, 20000, 10000), learning_rate "
        "(0.00025, 0.0025), num_envs (none, 8): they are compared separately\n" in done.stderr
    )
    shutil.rmtree(runs)
    for norm_adv in (True, False):
        for seed in (1, 2, 3):
            start = 1e9 + seed + 10 * norm_adv
            make_run(runs, seed, curve(100 + norm_adv), norm_adv=norm_adv, start=start)
    rlops(tmp_path)
    rows = {row["side"]: row["seeds"] for row in read_csv(tmp_path / "compare.csv")}
    assert rows == {"ppo norm_adv=False": "3", "ppo norm_adv=True": "3"}
    done = rlops(tmp_path, "--ignore-settings", "norm_adv")
    assert [row["seeds"] for row in read_csv(tmp_path / "compare.csv")] == ["3"]
    assert done.stderr.count("is an earlier run of the same seed") == 3


def test_runs_of_several_versions_of_the_code_are_named(tmp_path):
    for seed in (1, 2):
        run = make_run(tmp_path / "runs", seed, curve(100))
        about = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(about | {"commit": f"{seed}" * 40}))
    done = rlops(tmp_path)
    assert done.stderr == f"note: ppo: its runs differ in commit: {'1' * 12}, {'2' * 12}\n"


def test_runs_of_different_lengths_are_compared_at_the_common_step(tmp_path):
    for seed in (1, 2, 3):
        rise = np.arange(400) + seed
        make_run(tmp_path / "runs", seed, rise[:100], tags=["v1"], until=5000, total_timesteps=5000)
        make_run(tmp_path / "runs", seed, rise, tags=["v2"], start=2e9)
    done = rlops(tmp_path, "--exp-name", "ppo", "--tags", "v1", "v2")
    rows = {row["side"]: row for row in read_csv(tmp_path / "compare.csv")}
    assert float(rows["ppo v1"]["mean"]) == pytest.approx(51.5)
    assert float(rows["ppo v2"]["mean"]) == pytest.approx(51.5)
    assert "= 0.00 [-2.27, 2.27]: the same as ppo v1" in done.stdout
    said = (
        "CartPole-v1: all runs are compared at step 5,000, where CartPole-v1__ppo__1__1000000000 "
    )
    assert done.stderr == f"note: {said}ends; others reach step 20,000\n"


def test_a_lower_loss_is_better_and_has_its_name(tmp_path):
    for tag, final in (("v1", 4.0), ("v2", 1.0)):
        for seed in (1, 2, 3):
            losses = curve(0) / 100 + final + seed / 100
            flags = dict(tags=[tag], start=1e9 + seed + final, metric="losses/value_loss")
            make_run(tmp_path / "runs", seed, losses, **flags)
    sides = "--exp-name ppo --tags v1 v2 --metric".split()
    done = rlops(tmp_path, *sides, "losses/value_loss", "--report")
    assert "ppo v2 - ppo v1 = -3.00" in done.stdout and "worse" not in done.stdout
    assert "Scores are 0 for the most and 1 for the least" in done.stdout
    v1, v2 = re.search(r"^mean  +(\S+) \[.*?\]  +(\S+) \[", done.stdout, re.M).groups()
    assert float(v1) < 0.05 and float(v2) > 0.98
    table, page = ((tmp_path / f"compare.{kind}").read_text() for kind in ("md", "html"))
    assert "| final value loss |" in table and "<h2>Final value loss</h2>" in page
    done = rlops(tmp_path, *sides, "charts/SPS")
    assert "ppo v2 - ppo v1 = 0.00" in done.stdout
    make_run(tmp_path / "more", 1, curve(1), metric="charts/episodic_length")
    words = "--runs more --metric charts/episodic_length".split()
    done = rlops(tmp_path, *words)
    said = "charts/episodic_length: pass --direction higher or lower\n"
    assert done.stderr == said
    assert rlops(tmp_path, *words, "--direction", "lower").returncode == 0


def test_differences_that_were_not_compared_are_not_counted():
    def say(finals_of_env):
        sides = {"v1": [], "v2": []}
        for i, finals in enumerate(finals_of_env):
            for label, values in zip(sides, finals, strict=True):
                for seed, value in enumerate(values):
                    known = dict(exp_name="ppo", flags={}, versions={}, tags=(), source=None)
                    steps = dict(total=TOTAL, step=TOTAL, rows=np.array([[TOTAL, value, 1.0]]))
                    run = Run(f"{i} {seed}", f"Env{i}-v0", seed=str(seed), **known, **steps)
                    sides[label].append(run)
        return sentences(compare(sides))

    noisy, single = ([10.0, 12.0], [10.0, 13.0]), ([10.0], [12.0])
    said = say([noisy] * 2 + [single] * 10)
    assert sum("a single seed gives no interval" in line for line in said) == 11
    assert len(said) == 13 and "by chance alone" not in said[-1]
    expected = "of 13 differences, about 1 would be outside the noise by chance alone"
    assert say([noisy] * 12)[-1] == expected


def test_the_curve_over_all_environments_needs_no_common_time(tmp_path):
    for env_id, speed in (("A-v0", 1e6), ("B-v0", 1)):  # A is over before B's first episode
        flags = dict(env_id=env_id, first=600, steps_per_second=speed)
        for tag in ("v1", "v2"):
            make_run(tmp_path / "runs", 1, curve(9), tags=[tag], name=env_id + tag, **flags)
    done = rlops(tmp_path, "--exp-name", "ppo", "--tags", "v1", "v2", "--report")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "compare.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    titles = {chart["title"]: list(chart["axes"]) for chart in data["charts"]}
    assert titles["2 environments: interquartile mean score"] == ["steps"]
    assert titles["A-v0"] == ["steps", "time"]


def test_tables_fit_the_terminal(tmp_path, monkeypatch):
    """Cells fold where the terminal is too narrow, and none is lost."""
    for env_id in ("MountainCarContinuous-v0", "Acrobot-v1"):
        make_sides(tmp_path / "runs", {"with-a-long-name": [100, 104]}, env_id=env_id)
        make_sides(tmp_path / "runs", {"x": [50, 52, 54]}, env_id=env_id)
    words = "--exp-name ppo --tags with-a-long-name x".split()
    wide = rlops(tmp_path, *words).stdout
    assert max(map(len, wide.splitlines())) > 80
    monkeypatch.setenv("COLUMNS", "80")
    narrow = rlops(tmp_path, *words, out=Terminal()).stdout
    final, scores = narrow.split("\n\n")[:2]
    assert max(map(len, final.splitlines() + scores.splitlines()[1:])) <= 80
    values = re.findall(r"\d+\.\d+", wide)
    assert len(values) > 30 and set(values) <= set(re.findall(r"\d+\.\d+", narrow))


def test_one_side_is_compared_with_nothing(tmp_path):
    make_sides(tmp_path / "runs", {"v1": [100, 104]})
    done = rlops(tmp_path, "--report")
    assert "interquartile mean" in done.stdout
    pages = [(tmp_path / name).read_text() for name in ("compare.md", "compare.html")]
    for text in (done.stdout, *pages):
        assert "improvement" not in text and "difference" not in text and "in words" not in text


def test_bands_are_of_returns(tmp_path):
    """Of a published file and environment: where the runs lie is said of nothing but returns."""
    for seed in (1, 2):
        run = make_run(tmp_path / "runs", seed, curve(100))
        about = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(about | {"file": "ppo.py"}))
    assert "runs inside the band of the published ones" in rlops(tmp_path).stderr
    assert "band" not in rlops(tmp_path, "--metric", "charts/SPS").stderr


def test_environments_have_the_order_of_the_command_line(tmp_path):
    for env_id in ("A-v0", "B-v0", "C-v0"):
        make_sides(tmp_path / "runs", {"v1": [100, 104]}, env_id=env_id)
    rlops(tmp_path, "--exp-name", "ppo", "--env-ids", "C-v0", "A-v0", "B-v0")
    rows = read_csv(tmp_path / "compare.csv")
    assert [row["environment"] for row in rows] == ["C-v0", "A-v0", "B-v0"]


def test_published_data_is_a_side(tmp_path):
    make_sides(tmp_path / "runs", {"mine": [100, 102, 104]})
    done = rlops(tmp_path, "--filters", "ppo?cl=my PPO", "results:ppo", "--env-ids", "CartPole-v1")
    assert done.returncode == 0, done.stderr
    rows = read_csv(tmp_path / "compare-runs.csv")
    assert [(row["side"], row["run"]) for row in rows[3:]] == [
        ("results:ppo", f"CartPole-v1__{seed}") for seed in range(1, 11)
    ]
    for row in rows[3:]:  # at the common step, from the data itself
        data = np.loadtxt(ROOT / "results/ppo" / f"{row['run']}.csv", delimiter=",", skiprows=1)
        expected = data[data[:, 0] <= TOTAL][-100:, 1].mean()
        assert float(row["final"]) == pytest.approx(expected, rel=1e-5)
    assert "all runs are compared at step 20,000, where CartPole-v1__ppo__1" in done.stderr
    alone = rlops(tmp_path, "--filters", "results:ppo?seed=1", "--env-ids", "Acrobot-v1")
    assert alone.returncode == 0 and "results:ppo seed=1" in alone.stdout


def test_values_are_compared_as_numbers(tmp_path):
    make_sides(tmp_path / "runs", {"a": [10, 12]}, learning_rate=0.0025)
    make_sides(tmp_path / "runs", {"a": [20, 22]}, learning_rate=0.1)
    done = rlops(tmp_path, "--filters", "ppo?learning_rate=2.5e-3", "ppo?learning-rate=1e-1")
    assert done.returncode == 0, done.stderr
    assert [row["mean"] for row in read_csv(tmp_path / "compare.csv")] == ["11", "21"]


def test_other_files_are_written_into_a_new_folder(two_sides):
    words = ["--exp-name", "ppo", "--tags", "v1", "v2", "--output-filename"]
    done = rlops(two_sides, *words, "new/folder/plot.png", "--smoothing-window", 1)
    assert done.returncode == 0, done.stderr
    rlops(two_sides, *words, "plain.png", "--no-table")
    folder = two_sides / "new" / "folder"
    latex = (folder / "plot.tex").read_text()
    cells = r"CartPole-v1 & 102.00 $\pm$ 1.58 & 52.00 $\pm$ 1.58 \\"
    assert cells in latex and "environment & ppo v1 & ppo v2" in latex
    assert latex.count("sample standard deviation over seeds") == 1
    assert (folder / "plot.csv").read_text() == (two_sides / "plain.csv").read_text()
    rough, smooth = read_csv(folder / "plot-curves.csv"), read_csv(two_sides / "plain-curves.csv")
    last = {(row["side"], row["axis"]): row for row in smooth}
    assert float(last["ppo v1", "steps"]["x"]) == TOTAL and len(last) == 4
    assert float(last["ppo v1", "steps"]["mean"]) == pytest.approx(102)
    assert float(last["ppo v1", "time"]["std"]) == pytest.approx(2.5**0.5, abs=1e-3)
    jumps = [
        np.std(np.diff([float(row["mean"]) for row in rows[50:190]])) for rows in (rough, smooth)
    ]
    assert jumps[0] > 5 * jumps[1]
    with Image.open(folder / "plot.png") as tall, Image.open(two_sides / "plain.png") as flat:
        assert tall.height > flat.height


def test_latex_of_any_name_is_text():
    hard = "a_b & 100% {x} $1 #2 ~^\\"
    assert escape_latex(hard) == (
        r"a\_b \& 100\% \{x\} \$1 \#2 \textasciitilde{}\textasciicircum{}\textbackslash{}"
    )


def test_summary_of_run_folders_is_a_table_by_environment_and_settings(tmp_path):
    make_sides(tmp_path / "runs", {"x": [10, 12]}, norm_adv=True)
    make_sides(tmp_path / "runs", {"x": [30]}, norm_adv=False)
    make_run(tmp_path / "runs", 3, curve(9), env_id="Acrobot-v1", until=900)
    lines = summary((tmp_path / "runs").iterdir()).splitlines()
    assert sorted(re.sub(" +", " ", line) for line in lines[1:4]) == [
        "Acrobot-v1 ppo norm_adv=True 0 none",
        "CartPole-v1 ppo norm_adv=False 1 30.00",
        "CartPole-v1 ppo norm_adv=True 2 11.00 ± 1.41",
    ]
    assert lines[0].split()[:3] == ["environment", "experiment", "seeds"] and len(lines) == 5
    assert "got to step 900 of 20,000" in lines[4] and lines[4].endswith("left out")


def test_a_single_seed_is_no_proof(tmp_path):
    make_sides(tmp_path / "runs", {"v1": [100], "v2": [50, 51]})
    done = rlops(tmp_path, "--exp-name", "ppo", "--tags", "v1", "v2")
    assert "ppo v2 - ppo v1 = -49.50: a single seed gives no interval: add 2 or more" in done.stdout


def test_runs_of_a_single_episode_are_enough(tmp_path):
    for env_id, step in (("CartPole-v1", TOTAL), ("Acrobot-v1", 10)):
        for tag in ("v1", "v2"):
            run = make_run(
                tmp_path / "runs",
                1,
                [7],
                tags=[tag],
                env_id=env_id,
                name=f"{env_id} {tag}",
                until=step,
            )
            text = (
                (run / "run.json")
                .read_text()
                .replace(f'"total_timesteps": {TOTAL}', f'"total_timesteps": {step}')
            )
            (run / "run.json").write_text(text)
    done = rlops(tmp_path, "--exp-name", "ppo", "--tags", "v1", "v2", "--report")
    assert done.returncode == 0 and done.stdout.count("a single seed gives no interval") == 3, (
        done.stderr
    )
    assert done.stderr.splitlines() == [
        f"note: {env_id}: runs with fewer than 100 values: {env_id} v1 (1), {env_id} v2 (1)"
        for env_id in ("Acrobot-v1", "CartPole-v1")
    ]


def test_sides_without_a_run_that_counts_are_said_so(tmp_path):
    make_sides(tmp_path / "runs", {"v1": [100, 101]})
    make_run(tmp_path / "runs", 1, curve(10), tags=["v2"], until=3000)
    done = rlops(tmp_path, "--exp-name", "ppo", "--tags", "v1", "v2", "--report")
    assert done.returncode == 0 and "nothing to compare" in done.stdout
    assert "No environment has runs of every side that count." in done.stdout


def test_atari_is_measured_by_random_play_and_humans(tmp_path):
    for env_id in ("BreakoutNoFrameskip-v4", "ALE/Pong-v5"):
        make_sides(
            tmp_path / "runs",
            {"v1": [1.7, 1.7]} if "Breakout" in env_id else {"v1": [-20.7, -20.7]},
            env_id=env_id,
        )
        make_sides(
            tmp_path / "runs",
            {"v2": [30.5, 30.5]} if "Breakout" in env_id else {"v2": [14.6, 14.6]},
            env_id=env_id,
        )
    done = rlops(tmp_path, "--exp-name", "ppo", "--tags", "v1", "v2")
    assert (
        "Scores are 0 for random play and 1 for a human, as published: ALE/Pong-v5, "
        "BreakoutNoFrameskip-v4." in done.stdout
    )
    v1, v2 = re.search(r"^mean  +(\S+)  +(\S+)$", done.stdout, re.M).groups()
    assert (abs(float(v1)), float(v2)) == (0, 1)
    assert "mean score of 2 environments: ppo v2 - ppo v1 = 1.00" in done.stdout


@pytest.mark.parametrize(
    "words, said",
    [
        (
            "--exp-name ppo --tags v1 nope",
            "no run of ppo nope in runs: found ppo v1, ppo v2, ppo v3",
        ),
        ("--exp-name ppo --filters ppo", "give --filters, or --exp-name and --tags, not both"),
        ("--tags v1", "--tags needs --exp-name"),
        (
            "--filters ppo?tag=v1 ppo?tag=v1",
            "two sides are called ppo v1: tell them apart with cl=",
        ),
        (
            "--filters ppo?ceik=gym_id",
            "no run of ppo in runs with the flag gym_id",
        ),
        ("--runs nowhere", "there is no folder nowhere"),
        (
            "--env-ids Nope-v1",
            "no run of ppo on Nope-v1 in runs: found CartPole-v1",
        ),
        (
            "--filters ppo?tag=v1 --env-ids Nope-v1",
            "no run of ppo v1 on Nope-v1 in runs: found CartPole-v1",
        ),
        (
            "--filters ppo?lr=1",
            "ppo lr=1: its runs have no flag lr: learning_rate?",
        ),
        (
            "--filters ppo?learning_rate=1&tag=v1",
            "no run of ppo v1 learning_rate=1 in runs: learning_rate is 0.00025",
        ),
        ("--filters results:nope", "there is no results/nope: found c51, "),
        ("--metric charts/episodic_retrun", "no run of ppo has charts/episodic_retrun: found "),
        ("--metric charts/SPS --direction up", "--direction must be higher or lower, not up"),
        ("--smoothing-window 0", "--smoothing-window must be at least 1"),
        (
            "--filters ppo?tag=v1 --filters ppo?tag=v2 --env-ids A B --env-ids C",
            "each --env-ids must name as many environments as the first",
        ),
        ("--output-filename x.docx", "cannot write x.docx: it must be"),
        ("--metric-last-n-average-window 0", "--metric-last-n-average-window must be at least 1"),
    ],
)
def test_bad_command_lines_are_one_clear_line(two_sides, words, said):
    done = rlops(two_sides, *words.split())
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(said) and done.stderr.count("\n") == 1
    assert not list(two_sides.glob("compare.*"))


def test_what_cannot_be_written_is_one_clear_line(two_sides):
    (two_sides / "compare.md").mkdir()
    done = rlops(two_sides, "--exp-name", "ppo", "--tags", "v1", "v2")
    assert (done.returncode, done.stdout, done.stderr) == (
        1,
        "",
        "cannot write compare.md: Is a directory\n",
    )


def test_without_matplotlib_it_says_what_to_install():
    hide = "import importlib.util, runpy, sys; find = importlib.util.find_spec; "
    hide += "importlib.util.find_spec = lambda name, *rest: "
    hide += "None if name == 'matplotlib' else find(name, *rest); "
    hide += "sys.argv = ['rlops']; runpy.run_module('cleanrl_utils.rlops', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", hide], cwd=ROOT, capture_output=True, text=True)
    said = "matplotlib is not installed: pip install -r requirements/requirements-docs.txt"
    assert done.stderr == f"{said}\n"


def test_weights_and_biases_out_of_reach_is_one_clear_line(tmp_path):
    words = "--exp-name ppo --tags a b --wandb-project-name cleanrl --wandb-entity openrlbenchmark"
    away = {
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_API_KEY": "0" * 40,
        "WANDB_HTTP_TIMEOUT": "2",
    }
    done = start(tmp_path, *words.split(), **away)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("cannot read ppo a from Weights & Biases: ")


PROJECTS = {"cleanrl": "1", "sb3": "2"}  # of the server


class WandbServer(BaseHTTPRequestHandler):
    """As much of W&B's server as its client needs to list runs and read their history."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        kind = re.search(r"query (\w+)", asked.get("query", ""))
        variables, runs = asked.get("variables") or {}, self.server.runs
        if not kind:
            data = {}
        elif kind[1] in ("Viewer", "GetDefaultEntity"):
            teams = {"edges": []}
            data = {
                "viewer": {
                    "id": "1",
                    "entity": "me",
                    "username": "me",
                    "email": "",
                    "flags": "{}",
                    "teams": teams,
                }
            }
        elif kind[1] == "Runs":
            self.server.asked.append(
                (variables["entity"], variables["project"], json.loads(variables["filters"]))
            )
            conditions = json.loads(variables["filters"])["$and"]
            edges = [
                {"cursor": name, "node": node}
                for name, (node, _) in runs.items()
                if node["projectId"] == PROJECTS[variables["project"]]
                and all(fits(node, *next(iter(part.items()))) for part in conditions)
            ]
            page = {"endCursor": None, "hasNextPage": False}
            listed = {
                "internalId": "1",
                "runCount": len(edges),
                "readOnly": False,
                "runs": {"edges": edges, "pageInfo": page},
            }
            data = {"project": listed}
        else:
            history = runs[variables.get("name") or variables.get("run") or variables["runName"]][1]
            keys = {"lastStep": len(history) - 1, "keys": {key: {} for key in history[0]}}
            live = {"parquetUrls": [], "liveData": history}
            sample = history if kind[1] == "SampledHistoryPage" else history[::10]
            data = {
                "project": {
                    "run": {"historyKeys": keys, "parquetHistory": live, "sampledHistory": [sample]}
                }
            }
        answer = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):  # the client's own statistics do not wait
            self.wfile.write(answer)

    def log_message(self, *_):
        pass


def fits(node, key, wanted):
    """Whether a run meets one condition of a filter, as W&B's server understands it."""
    if key == "tags":
        return wanted in node["tags"]
    value = json.loads(node["config"]).get(key.split(".")[1], {}).get("value")
    return value in wanted["$in"] if isinstance(wanted, dict) else value == wanted


def make_wandb_run(tag, seed, final, state="finished", project="cleanrl", flags=None):
    foreign = flags is not None
    metric = "rollout/ep_rew_mean" if foreign else "charts/episodic_return"
    flags = flags or {"exp_name": "ppo", "env_id": "CartPole-v1", "total_timesteps": TOTAL}
    flags = flags | {"seed": seed}
    name, summary = (
        f"{tag}{seed}",
        {"global_step": TOTAL if state == "finished" else 9000, "_timestamp": 1e9},
    )
    node = dict.fromkeys("sweepName group jobType description notes systemMetrics".split())
    node |= {
        "id": name,
        "internalId": name,
        "projectId": PROJECTS[project],
        "tags": [tag],
        "name": name,
        "displayName": f"run {name}",
    }
    node |= {
        "state": state,
        "config": json.dumps({key: {"value": value} for key, value in flags.items()}),
        "commit": "c0ffee",
    }
    node |= {
        "readOnly": False,
        "createdAt": "2026-01-01T00:00:00Z",
        "heartbeatAt": "2026-01-01T00:00:00Z",
    }
    node |= {
        "summaryMetrics": json.dumps(summary),
        "historyLineCount": 300,
        "user": {"name": "me", "username": "me"},
    }
    steps = np.linspace(10, summary["global_step"], 300).astype(int).tolist()
    rows = zip(steps, curve(final).tolist(), strict=True)
    history = [
        {"_step": i, "global_step": s, metric: r, "_runtime": s / 1000}
        for i, (s, r) in enumerate(rows)
    ]
    return name, (node, history)


FOREIGN = [
    *("--filters", "?we=us&wpn=cleanrl", "ppo?tag=v1&seed=0&seed=1", "--filters"),
    *("?we=them&wpn=sb3&ceik=env&cen=algo&metric=rollout/ep_rew_mean", "a2c?cl=A2C"),
    *"--env-ids CartPole-v1 --env-ids CartPole-v0".split(),
]


def test_weights_and_biases_through_its_own_client(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), WandbServer)
    finals = {"v1": [100, 102, 104], "v2": [50, 52, 54]}
    server.asked, server.runs = (
        [],
        dict(make_wandb_run(tag, i, x) for tag in finals for i, x in enumerate(finals[tag])),
    )
    server.runs |= dict([make_wandb_run("v2", 9, 400, state="crashed")])
    foreign = dict(project="sb3", flags={"algo": "a2c", "env": "CartPole-v0"})
    server.runs |= dict(make_wandb_run("v3", i, 80 + 2 * i, **foreign) for i in range(3))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = {"WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}", "WANDB_API_KEY": "0" * 40}
    words = "--exp-name ppo --tags v1 v2 --wandb-project-name cleanrl --wandb-entity us"
    words = f"{words} --env-ids CartPole-v1 --report".split()
    try:
        whole = start(tmp_path, *words, "--scan-history", **here)
        assert whole.returncode == 0, whole.stderr
        rows = read_csv(tmp_path / "compare-runs.csv")
        sampled = start(tmp_path, *FOREIGN, "--output-filename", "sampled.png", **here)
    finally:
        server.shutdown()
        server.server_close()
    assert sampled.returncode == 0, sampled.stderr
    conditions = [
        {"config.exp_name.value": "ppo"},
        {"tags": "v1"},
        {"config.env_id.value": {"$in": ["CartPole-v1"]}},
    ]
    assert server.asked[0] == ("us", "cleanrl", {"$and": conditions}) and len(server.asked) == 4
    assert (
        "ppo v2 - ppo v1 = -50.00" in whole.stdout
        and "worse than ppo v1, outside the noise" in whole.stdout
    )
    assert "note: ppo v2: run v29 is crashed, at step 9,000 of 20,000: left out" in whole.stderr
    assert [row["episodes"] for row in rows] == ["300"] * 7 and rows[0]["final"] == "100"
    sampled_rows = read_csv(tmp_path / "sampled-runs.csv")
    assert {row["episodes"] for row in sampled_rows} == {"30"}
    assert [row["side"] for row in sampled_rows] == ["ppo v1 seed=0,1"] * 2 + ["A2C"] * 3
    assert {row["environment"] for row in sampled_rows} == {"CartPole-v1"}
    assert server.asked[-1][:2] == ("them", "sb3") and "CartPole-v1: A2C - ppo v1" in sampled.stdout
    assert "note: A2C: the metric is rollout/ep_rew_mean\n" in sampled.stderr
    assert "run v30: CartPole-v0 is paired with CartPole-v1\n" in sampled.stderr
    links = [
        attrs["href"]
        for tag, attrs in Tags((tmp_path / "compare.html").read_text()).found
        if tag == "a"
    ]
    assert (
        links[0] == f"http://127.0.0.1:{server.server_port}/us/cleanrl/runs/v10" and len(links) == 7
    )


@pytest.mark.slow  # its subject is time
def test_60_runs_of_a_million_steps(tmp_path):
    """Read and reported in 30 seconds and 2 GB, with as many events as ppo.py writes, or more."""
    pytest.importorskip("resource")  # not on Windows
    losses = (
        "value_loss policy_loss entropy old_approx_kl approx_kl clipfrac explained_variance".split()
    )
    per_iteration = ["charts/learning_rate", "charts/SPS", *(f"losses/{name}" for name in losses)]
    with SummaryWriter(tmp_path / "one", purge_step=1) as writer:
        for iteration in range(1, 1954):
            for i in range(3):  # CartPole-v1 has 2437 episodes in a million steps
                writer.add_scalar(
                    "charts/episodic_return", min(iteration, 500), 512 * iteration - 500 + i
                )
                writer.add_scalar(
                    "charts/episodic_length", min(iteration, 500), 512 * iteration - 500 + i
                )
            for name in per_iteration:
                writer.add_scalar(name, iteration, 512 * iteration)
    (events,) = (tmp_path / "one").iterdir()
    for k in range(60):
        env_id, tag = (
            ("CartPole-v1", "Acrobot-v1", "MountainCar-v0")[k % 3],
            ("v1", "v2")[k // 3 % 2],
        )
        run = make_run(
            tmp_path / "runs",
            k // 6,
            [],
            tags=[tag],
            env_id=env_id,
            start=1e9 + k,
            total_timesteps=1_000_000,
        )
        for path in run.glob("events*"):
            path.unlink()
        shutil.copy(events, run)
    command = [
        sys.executable,
        "-m",
        "cleanrl_utils.rlops",
        "--exp-name",
        "ppo",
        "--tags",
        "v1",
        "v2",
        "--report",
    ]
    measured = "import resource as r, subprocess as s, sys; s.run(sys.argv[1:]); "
    measured += "print(*r.getrusage(r.RUSAGE_CHILDREN)[:3])"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", measured, *command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    user_time, system_time, most_memory = map(float, done.stdout.split()[-3:])
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.count("ppo v2 - ppo v1 = 0.00 [0.00, 0.00]: the same as ppo v1") == 4
    assert read_csv(tmp_path / "compare-runs.csv")[0]["episodes"] == str(3 * 1953)
    assert user_time + system_time < 30  # of one core: others may be busy here
    assert most_memory < 1e6  # KB, of each of its processes


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_bug_put_in_on_purpose_is_told_apart(tmp_path):
    """ppo.py without normalized advantages on small rewards; and against itself, other seeds."""
    source, line = PPO.read_text(), "if args.norm_adv:  # [core 7]"
    assert source.count(line) == 1
    (tmp_path / "bug").mkdir()
    (tmp_path / "bug" / "ppo.py").write_text(source.replace(line, "if False:"))
    flags = "--env-id small_rewards:SmallRewards-v1 --total-timesteps 50000 --seed".split()
    for tag, file, first in (
        ("v1", PPO, 1),
        ("v2", tmp_path / "bug" / "ppo.py", 1),
        ("v1-again", PPO, 6),
    ):
        environment = os.environ | {"WANDB_TAGS": tag, "PYTHONPATH": str(ROOT / "docs" / "rlops")}
        for seed in range(first, first + 5):
            subprocess.run(
                [sys.executable, file, *flags, str(seed)], cwd=tmp_path, env=environment, check=True
            )
    done = rlops(tmp_path, "--exp-name", "ppo", "--tags", "v1", "v2", "v1-again")
    assert re.search(r"ppo v2 - ppo v1 = .*: worse than ppo v1, outside the noise", done.stdout)
    assert re.search(r"ppo v1-again - ppo v1 = .*: within the noise", done.stdout)


class Tags(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def make_hostile(folder):
    """Runs of a stranger: all that they can name is an attack."""
    hostile = HOSTILE.replace("/", "\u2215")
    for side, final in ((["v1", HOSTILE], 10), (["v2", HOSTILE], 20)):
        for seed in (1, 2):
            name = f"{hostile[:80]} {side[0]} {seed}"
            flags = {"learning_rate": HOSTILE + side[0], HOSTILE + side[0]: 1}
            run = make_run(
                folder, seed, curve(final), tags=side, env_id=HOSTILE, name=name, **flags
            )
            (run / "videos").mkdir()
            (run / "videos" / f"{hostile[:60]}.mp4").write_bytes(b"no video")
    (folder.parent / "secret").write_text("what lies elsewhere stays there")
    os.utime(folder.parent / "secret", (2e9, 2e9))  # newer than any video
    (run / "videos" / "secret.mp4").symlink_to(folder.parent / "secret")
    (folder / hostile).mkdir()


def test_hostile_runs_bring_no_tags_and_no_control_characters(tmp_path):
    make_hostile(tmp_path / "runs")
    done = rlops(
        tmp_path, "--filters", "ppo?tag=v1", f"ppo?tag=v2&cl={HOSTILE.replace('&', '')}", "--report"
    )
    assert done.returncode == 0, done.stderr
    page, table, rows = (
        (tmp_path / f"compare{kind}").read_text() for kind in (".html", ".md", "-runs.csv")
    )
    assert "\x1b" not in done.stdout + done.stderr + page + table + rows
    tags = Tags(page).found
    assert [attrs.get("type") for tag, attrs in tags if tag == "script"] == [
        "application/json",
        None,
    ]
    assert not [
        tag for tag, attrs in tags if tag == "img" or any(name.startswith("on") for name in attrs)
    ]
    assert all(re.match(r"[\w%.~/-]+$", attrs["href"]) for tag, attrs in tags if tag == "a")
    assert not re.search(r"(?<!\\)<script|(?<!\\)\]\(javascript", table)
    videos = [
        base64.b64decode(attrs["src"].partition(",")[2]) for tag, attrs in tags if tag == "video"
    ]
    assert videos == [b"no video", b"no video"]  # and not what the link leads to


@needs_chromium
def test_hostile_runs_do_nothing_in_a_browser(tmp_path):
    make_hostile(tmp_path / "runs")
    rlops(tmp_path, "--filters", "ppo?tag=v1", "ppo?tag=v2", "--report")
    with Browser((tmp_path / "compare.html").as_uri(), width=375) as page:
        page.wait_for("document.querySelectorAll('path.mean').length == 4")
        assert page.evaluate("typeof hacked") == "undefined"
        assert page.evaluate("document.querySelector('figcaption').textContent").startswith(
            "<script>hacked=1</script>"
        )
        assert page.evaluate("document.documentElement.scrollWidth") == 375
        page.evaluate(
            "const s = document.createElement('script'); s.textContent = 'hacked = 1'; "
            "document.body.append(s)"
        )
        assert (
            page.evaluate("typeof hacked") == "undefined"
        )  # the policy stops even what would get in


@pytest.fixture(scope="module")
def page_of_two_sides(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    for env_id in ("CartPole-v1", "Acrobot-v1"):
        make_sides(folder / "runs", {"v1": [100, 102, 104], "v2": [50, 52, 54]}, env_id=env_id)
    make_run(folder / "runs", 9, curve(100), tags=["v2"], until=9000, env_id="Acrobot-v1")
    video = folder / "runs" / "CartPole-v1__ppo__1__1000000001" / "videos" / "step-0-episode-0.mp4"
    video.parent.mkdir()
    frames = [np.full((64, 64, 3), 25 * i, dtype=np.uint8) for i in range(10)]
    ImageSequenceClip(frames, fps=10).write_videofile(str(video), logger=None)
    (folder / "runs" / "Acrobot-v1__ppo__9__1000000000" / "videos").mkdir()
    short = folder / "runs" / "Acrobot-v1__ppo__9__1000000000" / "videos" / "of-a-short-run.mp4"
    shutil.copy(video, short)  # the newest, of a run that does not count
    done = rlops(folder, "--exp-name", "ppo", "--tags", "v1", "v2", "--report")
    assert done.returncode == 0, done.stderr
    return folder / "compare.html"


@needs_chromium
def test_page_is_drawn_and_answers(page_of_two_sides):
    with Browser(page_of_two_sides.as_uri()) as page:
        page.wait_for(
            "document.querySelectorAll('path.mean').length == 8"
        )  # 2 environments, both, profile: 2 sides each
        assert page.evaluate("document.title") == "ppo v1 against ppo v2"
        buttons = page.evaluate(
            "[...document.querySelectorAll('button')].map(b => b.textContent + "
            "b.getAttribute('aria-pressed'))"
        )
        assert buttons == [
            "over stepstrue",
            "over timefalse",
            "ppo v1true",
            "ppo v2true",
            "seedstrue",
        ]
        first = "document.querySelector('svg')"
        assert page.evaluate(f"{first}.lastChild.tagName") == "path"
        assert (
            page.evaluate(f"{first}.querySelectorAll('path[stroke-dasharray]').length") == 1
        )  # the short run
        assert "20k" in page.evaluate(f"{first}.textContent")

        page.evaluate("document.querySelectorAll('button')[1].click()")
        assert "15 s" in page.evaluate(f"{first}.textContent") and "20k" not in page.evaluate(
            f"{first}.textContent"
        )
        page.evaluate("document.querySelectorAll('button')[2].click()")
        assert page.evaluate("document.querySelectorAll('path.mean').length") == 4
        page.evaluate(
            "document.querySelectorAll('button')[2].click(); "
            "document.querySelectorAll('button')[0].click()"
        )
        lines = page.evaluate(f"{first}.querySelectorAll('path').length")
        page.evaluate("document.querySelectorAll('button')[4].click()")
        assert page.evaluate(f"{first}.querySelectorAll('path').length") == 2 < lines

        box = page.evaluate(
            f"(b => [b.left, b.top, b.width, b.height])({first}.getBoundingClientRect())"
        )
        page.move_to(box[0] + box[2] - 8, box[1] + box[3] / 2)
        tip = page.evaluate("document.querySelector('.tip').innerText")
        assert (
            tip.startswith("20k\n")
            and re.search(r"ppo v1: 10\d", tip)
            and re.search(r"ppo v2: 5\d", tip)
        )
        page.move_to(2, 2)
        assert page.evaluate("document.querySelector('.tip').hidden")
        page.evaluate(f"{first}.focus()")
        for _ in range(3):
            page("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight", code="ArrowRight")
        assert page.evaluate("document.querySelector('.tip').innerText").startswith("301.5\n")

        page.wait_for("document.querySelector('video').readyState >= 1")
        assert page.evaluate("document.querySelectorAll('video').length") == 1
        assert "of-a-short-run" not in page.evaluate("document.body.innerText")
        assert page.evaluate("document.querySelector('video').videoWidth") == 64
        links = page.evaluate(
            "[...document.querySelectorAll('a')].map(a => a.getAttribute('href'))"
        )
        assert len(links) == 13 and all(
            (page_of_two_sides.parent / link / "run.json").exists() for link in links
        )
        assert page.requests[0] == page_of_two_sides.as_uri()
        assert all(url.startswith("data:") for url in page.requests[1:]) and page.errors == []


@needs_chromium
@pytest.mark.parametrize("width", [320, 375, 1200])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_fits_the_screen_and_can_be_read(page_of_two_sides, width, dark):
    with Browser(page_of_two_sides.as_uri(), width=width, dark=dark) as page:
        page.wait_for("document.querySelectorAll('path.mean').length == 8")
        assert (
            page.evaluate("document.documentElement.scrollWidth") <= width
        )  # nothing to scroll sideways
        wide = "[...document.querySelectorAll('body *')]"
        wide += ".filter(e => e.getBoundingClientRect().right > innerWidth + 1).length"
        assert page.evaluate(wide) == 0
        cells = "[...document.querySelectorAll('td')]"
        cells += ".filter(td => td.textContent).map(td => td.clientWidth)"
        assert (
            width > 700 or min(page.evaluate(cells)) > 250
        )  # on a phone a cell has a line of its own
        colours = "(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))"
        text, paper = (luminance(colour) for colour in page.evaluate(colours))
        assert (text > paper) == dark and (max(text, paper) + 0.05) / (min(text, paper) + 0.05) > 7
        lines = page.evaluate(
            "[...document.querySelectorAll('path.mean')].map(p => getComputedStyle(p).stroke)"
        )
        assert (
            min((max(x, paper) + 0.05) / (min(x, paper) + 0.05) for x in map(luminance, lines)) > 3
        )
        shown = page.evaluate("document.body.innerText")
        assert (
            "worse than ppo v1, outside the noise" in shown
            and "got to step 9,000 of 20,000" in shown
        )


def luminance(colour):
    parts = np.array([int(x) for x in re.findall(r"\d+", colour)[:3]]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4) @ [
        0.2126,
        0.7152,
        0.0722,
    ]
