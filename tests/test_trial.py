"""cleanrl_utils.trial: its error rate is what it says, and nothing measured is lost or left out."""

import csv
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from cleanrl_utils import trial
from cleanrl_utils.trial import confidence_sequence, judge, log_wealth
from scripts import simulate_trial

ROOT = Path(__file__).resolve().parent.parent
PPO, PPO_JAX = ROOT / "cleanrl" / "ppo.py", ROOT / "cleanrl" / "ppo_jax.py"
SAME, BETTER = "no difference that matters", "better"
PROGRAM = '''
"""A program in the files' form whose runs take no time: their episodes are made beforehand."""
import json, shutil, sys, time
from pathlib import Path

flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "--resume" in flags:
    run = Path(flags["--resume"])
    about = json.loads((run / "run.json").read_text())
else:
    args = {"env_id": flags["--env-id"], "seed": int(flags["--seed"])}
    about = {"file": "program.py", "args": args}
    run = Path("runs", f"{flags['--env-id']}__program__{flags['--seed']}__{time.time_ns()}")
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps(about))
print(f"run folder: {run}", flush=True)
seed = about["args"]["seed"]
if seed == FAILS:
    raise SystemExit("cannot train: the loss is nan")
if seed == HANGS and "--resume" not in flags:
    time.sleep(600)
shutil.copy(f"EPISODES/{seed}", run / "events.out.tfevents.1.here")
'''
EPISODES = 200


def returns(mean, seed):
    return mean + np.random.default_rng(seed).normal(size=EPISODES)


def make_program(path, mean, fails=None, hangs=None):
    episodes = path.parent / f"mean {mean}"
    if not episodes.exists():
        episodes.mkdir()
        for seed in range(1, 12):
            writer = RecordWriter((episodes / str(seed)).open("wb"))
            for step, episodic_return in enumerate(returns(mean, seed)):
                value = Summary.Value(tag="charts/episodic_return", simple_value=episodic_return)
                event = Event(step=step, summary=Summary(value=[value]))
                writer.write(event.SerializeToString())
            writer.close()
    text = PROGRAM.replace("EPISODES", str(episodes)).replace("FAILS", str(fails))
    path.write_text(text.replace("HANGS", str(hangs)))


def start(folder, *flags):
    command = [sys.executable, "-m", "cleanrl_utils.trial", *map(str, flags)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=folder, env=environment, **pipes)


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """A function that runs the tool here; it returns exit status, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*flags):
        monkeypatch.setattr("sys.argv", ["trial", *map(str, flags)])
        handler = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            trial.main()
        signal.signal(signal.SIGTERM, handler)
        return ended.value.code, *capsys.readouterr()

    return run


def lines(folder):
    return list(csv.DictReader((folder / "trials.tsv").open(), delimiter="\t"))


# -- the test --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [np.ones(10), np.arange(1, 11), 3.0 ** np.arange(10)])
def test_fair_signs_win_nothing(sizes):
    """All 1,024 ways in which ten fair signs can fall: the mean wealth is 1 after each pair, and
    at most one in 40 ever reaches 40."""
    signs = np.array(list(itertools.product((1, -1), repeat=10)))
    wealth = np.exp([log_wealth(row * sizes, np.zeros(1), 1)[0] for row in signs])
    np.testing.assert_allclose(wealth.mean(0), 1)
    assert 0 < (wealth.max(1) >= 40).mean() <= 1 / 40


def test_interval_holds_the_center_and_narrows():
    differences = 0.2 + 0.1 * np.random.default_rng(1).normal(size=60)
    low, high = confidence_sequence(differences, delta=0.05, alpha=0.05)
    assert np.isinf(low[:5]).all() and np.isinf(high[:5]).all()  # 2 ** 5 is less than 40
    assert (np.diff(low) >= 0).all() if np.isfinite(low[0]) else (low[6:] >= low[5:-1]).all()
    assert 0.1 < low[-1] < 0.2 < high[-1] < 0.3


@pytest.mark.parametrize(
    ("differences", "verdict", "seeds"),
    [
        (np.zeros((10, 1)), SAME, 6),
        (np.zeros((10, 2)), SAME, 3),  # each seed is two pairs
        (np.full((10, 1), 0.3), BETTER, 6),
        (np.full((10, 2), -0.3), "worse", 3),
        (np.full((10, 1), 0.03), SAME, 6),  # real, but it does not matter
        (np.full((10, 6), 0.3), BETTER, 3),  # not after the first seed
        (np.full((5, 1), 0.3), "undecided", 5),
        (np.tile([0.5, 0.5, 0.5, -0.2], (10, 1)), "undecided", 10),  # one environment suffers
        (np.zeros((0, 2)), "undecided", 0),
    ],
)
def test_verdicts(differences, verdict, seeds):
    told = judge(differences, delta=0.05, alpha=0.05)
    assert (told["verdict"], told["seeds"]) == (verdict, seeds)


@pytest.mark.parametrize("number", range(4))
def test_error_rate_on_published_scores(number):
    """As scripts/simulate_trial.py, with fewer trials: 300 are wrong 15 times on average at 5%."""
    name, scores = list(simulate_trial.published().items())[number]
    rng = np.random.default_rng(number)
    old, new = simulate_trial.draw(name, scores, (2, 300, 20, 1), rng)
    same = simulate_trial.verdicts(new - old)
    assert sum(verdict in (BETTER, "worse") for verdict, _ in same) <= 15
    assert simulate_trial.peeking(new - old)[-1] > 0.1  # what a t-test after each seed does
    better = simulate_trial.verdicts((new - old + 0.3)[:100])  # three standard deviations
    assert np.mean([verdict == BETTER for verdict, _ in better]) > 0.97
    assert np.mean([seeds for _, seeds in better]) < 8
    at_delta = simulate_trial.verdicts(new - old + simulate_trial.DELTA)
    assert sum(verdict == SAME for verdict, _ in at_delta) <= 15


# -- the program -----------------------------------------------------------------------------------


def test_better_with_a_failed_run(tmp_path, compare):
    make_program(tmp_path / "old.py", mean=3)
    make_program(tmp_path / "new.py", mean=6, fails=2)
    flags = ["new.py", "--against", "old.py", "--env-ids", "A", "B"]
    flags += ["--ranges", "A=0,10", "B=-10,10", "--workers", 4]
    code, out, errors = compare(*flags)
    assert code == 0, errors
    (line,) = lines(tmp_path)
    assert line["verdict"] == BETTER and int(line["failed"]) == 2
    assert "failed, counts as 0: new.py on A, seed 2: cannot train: the loss is nan" in errors
    assert f"sha256 {line['lock'][:8]}" in out
    seeds, effect = int(line["seeds"]), 0.0
    for low, high in ((0, 10), (-10, 10)):
        for seed in range(1, seeds + 1):
            new, old = (returns(mean, seed)[-100:].mean() for mean in (6, 3))
            new = low if seed == 2 else new
            effect += (new - old) / (high - low) / seeds / 2
    assert float(line["effect"]) == pytest.approx(effect, abs=1e-4)
    assert int(line["runs"]) == 4 * seeds

    # the verdict stands, without a run more; what was edited is refused
    runs = len(list(tmp_path.glob("trials/*/*/runs/*")))
    assert compare(*flags)[0] == 0
    assert len(list(tmp_path.glob("trials/*/*/runs/*"))) == runs
    (lock,) = tmp_path.glob("trials/*/lock.json")
    lock.write_text(lock.read_text().replace("0.05", "0.5"))
    code, _, errors = compare(*flags)
    assert code == 4 and "lock.json was edited" in errors
    code, _, errors = compare("new.py", "--against", "old.py", "--lock", lock)
    assert code == 4 and "lock.json was edited" in errors
    assert len(list(tmp_path.glob("trials/*/lock.json"))) == 1


def test_continues_after_kill_9(tmp_path, compare):
    make_program(tmp_path / "old.py", mean=3)
    make_program(tmp_path / "new.py", mean=3, hangs=2)
    flags = ["--env-ids", "A", "--ranges", "A=0,10", "--workers", 2]
    process = start(tmp_path, "new.py", "--against", "old.py", *flags)
    deadline, log = time.time() + 60, "trials/*/new-*/A__2.log"
    while not any("run folder" in path.read_text() for path in tmp_path.glob(log)):
        assert time.time() < deadline and process.poll() is None
        time.sleep(0.1)
    process.kill()
    process.communicate()
    (log,) = tmp_path.glob(log)
    (lock,) = tmp_path.glob("trials/*/lock.json")
    flags = ["--against", "old.py", "--lock", lock, "--workers", 2]
    code, out, errors = compare("new.py", *flags)
    assert code == 2, errors
    verdict = out.splitlines()[-1]
    assert verdict.startswith(f"{SAME}: new.py - old.py = +0.000") and verdict.endswith("6 seeds")
    named = [line for line in log.read_text().splitlines() if line.startswith("run folder: ")]
    assert len(named) == 2  # it was resumed in its folder
    assert len({line.split("__")[-1] for line in named}) == 1
    assert [int(line["seeds"]) for line in lines(tmp_path)] == [6]

    # so does a copy of the trial's folder, but no copy of its lock alone
    moved = shutil.copytree(lock.parent, tmp_path / "moved" / lock.parent.name) / "lock.json"
    compare_moved = partial(compare, "new.py", "--against", "old.py", "--lock")
    assert compare_moved(moved)[0] == 2
    code, _, errors = compare_moved(shutil.copy(lock, tmp_path / "moved"))
    assert code == 4 and "is not in the folder of its trial" in errors
    assert list(tmp_path.glob("trials/*/lock.json")) == [lock]
    (tmp_path / "trials.tsv").unlink()
    compare("new.py", *flags)

    # a version that was not compared yet finds the runs of the other
    make_program(tmp_path / "newer.py", mean=0)
    code, out, _ = compare("newer.py", *flags, "--budget", "0s")
    assert code == 3 and len(lines(tmp_path)) == 2
    assert "2 versions were compared with this lock" in out
    assert compare("newer.py", *flags)[0] == 1
    assert len(list(tmp_path.glob("trials/*/old-*/runs/*"))) <= 8


def test_bad_input_is_one_line(tmp_path, compare):
    make_program(tmp_path / "old.py", mean=3)
    make_program(tmp_path / "new.py", mean=3, fails="seed")
    on_a = ["--env-ids", "A", "--ranges", "A=0,10"]
    for flags, said in {
        ("new.py", *on_a, "--budget", "20"): "--budget 20 is not of the form",
        ("nope.py", *on_a): "there is no nope.py",
        ("new.py", "--env-ids", "A", "--ranges", "A=1,0"): "0 must be below 1",
        ("new.py", "--env-ids", "A"): "pass --ranges A=LOW,HIGH",
        ("new.py", *on_a, "--lock", "none.json"): "env_ids, ranges cannot be passed with --lock",
        ("new.py", "--lock", "none.json"): "none.json",
        ("new.py", *on_a, "--flags=--env-id B"): "--env-id cannot be in --flags",
        ("new.py", *on_a, "--flags=--gamma 1 --num_seeds=2"): "--num-seeds cannot be in",
        ("new.py", *on_a, "--flags=--exp-name 'x"): "No closing quotation",
        ("old.py", *on_a): "both files have the same",
        ("new.py", *on_a): "new.py fails on A: cannot train: the loss is nan",
    }.items():
        code, _, errors = compare(*flags, "--against", "old.py", "--workers", 1)
        assert code == 4 and said in errors, (flags, errors)
        assert len(errors.splitlines()) == 1, errors
    assert compare("--nonsense")[0] == 4
    assert not (tmp_path / "trials.tsv").exists()


def test_score_of_one_of_many_runs(tmp_path):
    """A row has the mean of 2, 4, ... episodes: the last hundred are weighted by their number."""
    writer = RecordWriter((tmp_path / "events.out.tfevents.1.here").open("wb"))
    episodes = []
    for call in range(1, 21):
        length = 512 / (2 * call)
        scalars = {"charts/episodic_return": call, "charts/episodic_length": length}
        scalars["charts/SPS"] = 1
        values = [Summary.Value(tag=tag, simple_value=x) for tag, x in scalars.items()]
        writer.write(Event(step=512 * call, summary=Summary(value=values)).SerializeToString())
        episodes += [call] * 2 * call
    writer.close()
    score, failed = trial.read_score(tmp_path)
    assert failed is None
    assert score == pytest.approx(np.mean(episodes[-(40 + 38 + 36) :]))  # whole calls


def test_ctrl_c_says_how_to_continue(tmp_path):
    make_program(tmp_path / "old.py", mean=3, hangs=1)
    make_program(tmp_path / "new.py", mean=4, hangs=1)
    flags = ["--env-ids", "A", "--ranges", "A=0,10", "--workers", 2]
    process = start(tmp_path, "new.py", "--against", "old.py", *flags)
    assert "lock.json" in process.stdout.readline()
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 4 and errors == "interrupted: the same command continues\n"


@pytest.mark.slow
def test_a_copy_of_ppo_makes_no_difference(tmp_path):
    shutil.copy(PPO, tmp_path / "my_ppo.py")
    flags = ["--env-ids", "CartPole-v1", "Acrobot-v1", "--total-timesteps", 4096]
    process = start(tmp_path, "my_ppo.py", "--against", PPO, *flags)
    out, errors = process.communicate()
    assert process.returncode == 2, errors
    assert "+0.000" in out.splitlines()[-1] and out.splitlines()[-1].endswith("after 3 seeds")


@pytest.mark.slow
def test_many_seeds_of_a_compiled_file_in_one_program(tmp_path):
    default = "learning_rate: float = 2.5e-4"
    changed = PPO_JAX.read_text().replace(default, "learning_rate: float = 1e-9")
    (tmp_path / "my_ppo_jax.py").write_text(changed)
    flags = ["--env-ids", "CartPole-v1", "--ranges", "CartPole-v1=20,500"]
    flags += ["--total-timesteps", 32768]
    process = start(tmp_path, "my_ppo_jax.py", "--against", PPO_JAX, *flags)
    out, errors = process.communicate()
    assert process.returncode == 1, out + errors
    assert len(list(tmp_path.glob("trials/*/*/CartPole-v1__1.log"))) == 2
    assert len(list(tmp_path.glob("trials/*/my_ppo_jax-*/runs/*"))) >= 8


def test_page_says_what_was_simulated():
    told = json.loads((simulate_trial.OUTPUT / "simulation.json").read_text())
    page = simulate_trial.PAGE.read_text()
    assert simulate_trial.error_table(told) in page and simulate_trial.cost_table(told) in page
    for of_name in told.values():
        for key, shares in of_name.items():
            if key != "effects" and "t-test" not in key:
                assert max(shares) <= simulate_trial.ALPHA


def test_page_shows_the_real_pairs():
    """docs/trial/pairs.tsv has the lines of trials.tsv that the table is made of."""
    page = simulate_trial.PAGE.read_text()
    with (simulate_trial.OUTPUT / "pairs.tsv").open() as file:
        pairs = list(csv.DictReader(file, delimiter="\t"))
    rows = [line.split(" | ") for line in page.splitlines() if line.endswith(" min |")]
    assert len(rows) == len(pairs)
    for pair, row in zip(pairs, rows, strict=True):
        told = [float(pair[name]) for name in ("effect", "low", "high")]
        minutes = f"{round(int(pair['training_seconds']) / 60)} min |"
        shown = [float(x) for x in re.findall(r"[-+]?[\d.]+", row[3])]
        assert shown == pytest.approx(told, abs=6e-4) and pair["file"] in page
        assert pair["verdict"].startswith(row[4]) and row[5:] == [pair["runs"], minutes]
