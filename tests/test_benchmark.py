"""cleanrl_utils.benchmark: every planned run ends once, whole, whatever is killed on the way."""

import contextlib
import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cleanrl_utils import benchmark, benchmark_task
from tests.harness import PPO, ROOT, about, scalars

WALK = '''
"""As an algorithm file does: a run folder, a bar, checkpoints, --resume. Each step leaves its process's number."""
import argparse, json, os, subprocess, sys, time
from pathlib import Path
from tqdm import tqdm

parser = argparse.ArgumentParser()
for name, default in dict(env_id="Walk-v0", seed=1, steps=8, delay=0.02, crash_at=0, resume="", helper=0).items():
    parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
args = parser.parse_args()
folder = Path(args.resume or f"runs/{args.env_id}__walk__{args.seed}__{time.time_ns()}")
if args.resume:
    args = argparse.Namespace(**json.loads((folder / "run.json").read_text())["args"])
else:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"args": vars(args), "env": dict(os.environ)}))
print(f"run folder: {folder}")
if args.helper:  # what outlives its parent unless the whole group is ended
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
done = int((folder / "checkpoint.pt").read_text()) if (folder / "checkpoint.pt").exists() else 0
bar = tqdm(range(done, args.steps), initial=done, total=args.steps, unit="step", unit_scale=True)
for step in bar:
    time.sleep(args.delay)
    with (folder / "steps.txt").open("a") as file:
        file.write(f"{os.getpid()} {step + 1}\\n")
    bar.set_postfix(episodic_return=f"{step + 1:.1f}")
    (folder / "checkpoint.tmp").write_text(str(step + 1))
    os.replace(folder / "checkpoint.tmp", folder / "checkpoint.pt")
    if args.crash_at == step + 1:
        raise ValueError("it went wrong")
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder with walk.py in it, where `python` is the one of the tests."""
    (tmp_path / "walk.py").write_text(WALK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for name in (*benchmark.ONE_THREAD, "CUDA_VISIBLE_DEVICES", "WANDB_TAGS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def words(command, *flags):
    commands = [command] if isinstance(command, str) else command
    return [
        sys.executable,
        "-m",
        "cleanrl_utils.benchmark",
        *(w for c in commands for w in ("--command", c)),
        *map(str, flags),
    ]


def bench(command, *flags):
    return subprocess.run(words(command, *flags), capture_output=True, text=True)


def events(folder="runs/benchmark"):
    return [json.loads(line) for line in Path(folder, "journal.jsonl").read_text().splitlines()]


def count(event):
    return sum(e["event"] == event for e in events())


def wait_for(condition, seconds=60):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "it did not happen"
        time.sleep(0.05)


def processes_here():
    """The processes that have this folder's walk.py or ppo.py on their command line and this folder as theirs."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.path.realpath(process / "cwd") == os.getcwd() and int(process.name) != os.getpid():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def check_steps(folder, steps):
    """All steps were made, and no two processes were at the run at the same time."""
    made = [tuple(map(int, line.split())) for line in (folder / "steps.txt").read_text().splitlines()]
    assert sorted({step for _, step in made}) == list(range(1, steps + 1))
    turns = [pid for i, (pid, _) in enumerate(made) if i == 0 or made[i - 1][0] != pid]
    assert len(turns) == len(set(turns)), f"{folder.name}: two processes took turns"
    return len(turns)


def test_plan_is_a_matrix_and_nothing_is_written(here):
    done = bench(
        ["python walk.py", "python walk.py --steps 3"],
        "--env-ids",
        "A-v0",
        "B-v0",
        "--num-seeds",
        2,
        "--start-seed",
        7,
        "--dry-run",
    )
    assert done.returncode == 0, done.stderr
    *planned, summary = done.stdout.splitlines()
    assert planned == [
        f"queued  python walk.py {flags}--env-id {env_id} --seed {seed}"
        for seed in (7, 8)
        for flags in ("", "--steps 3 ")
        for env_id in ("A-v0", "B-v0")
    ]
    assert summary == "8 runs, 0 of them finished" and not Path("runs").exists()
    listed = bench("python walk.py", "--workers", 0)
    assert listed.stdout.splitlines()[0] == "queued  python walk.py --seed 1" and not Path("runs").exists()


def test_log_of_a_whole_benchmark(here):
    done = bench("python walk.py", "--env-ids", "A-v0", "B-v0", "--num-seeds", 2, "--workers", 3)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "\x1b" not in done.stdout and lines[-1].endswith("4 of 4 done, 0 queued, 0 running, 0 failed")
    for env_id in ("A-v0", "B-v0"):
        for seed in (1, 2):
            (folder,) = Path("runs").glob(f"{env_id}__walk__{seed}__*")
            assert check_steps(folder, 8) == 1
            assert [line[10:] for line in lines if f"{env_id} walk seed {seed}" in line and "started" in line]
            (ended,) = [line for line in lines if f"{env_id} walk seed {seed}" in line and "done" in line]
            assert re.search(rf"return 8, [\d,]+ steps/s, 0:0\d, {folder}$", ended)
            (log,) = Path("runs/benchmark").glob(f"{env_id}__walk__{seed}__*.log")
            text = log.read_text()
            assert text.startswith(f"$ python walk.py --env-id {env_id} --seed {seed}\nrun folder: {folder}\n")
            assert re.search(r"\nexit code 0 after [\d.]+ s\n$", text) and "8.00/8.00" in text
    assert count("started") == count("done") == 4
    started = [line.split()[2:] for line in lines if "started" in line]
    assert [words[-1] for words in started] == ["1", "1", "2", "2"], "first seeds first"


def test_each_run_has_one_thread_a_gpu_and_a_tag(here, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setenv("MKL_NUM_THREADS", "2")  # who sets it, has it
    monkeypatch.setenv("WANDB_TAGS", "mine")
    for command in ("init -q", "add walk.py", "-c user.name=me -c user.email=me@here commit -qm first", "tag v9.1"):
        subprocess.run(["git", *command.split()], check=True)
    assert bench("python walk.py --delay 0.2", "--num-seeds", 4, "--workers", 2).returncode == 0
    environments = [json.loads(path.read_text())["env"] for path in Path("runs").glob("*/run.json")]
    assert len(environments) == 4
    assert {env["OMP_NUM_THREADS"] for env in environments} == {"1"} and {env["MKL_NUM_THREADS"] for env in environments} == {
        "2"
    }
    assert sorted(env["CUDA_VISIBLE_DEVICES"] for env in environments) == ["3", "3", "5", "5"]
    assert {env["WANDB_TAGS"] for env in environments} == {"mine,v9.1"}
    assert bench("python walk.py --steps 1", "--num-seeds", 1, "--no-auto-tag").returncode == 0
    newest = max(Path("runs").glob("*/run.json"), key=lambda path: path.stat().st_mtime_ns)
    assert json.loads(newest.read_text())["env"]["WANDB_TAGS"] == "mine"


def test_a_crash_is_resumed_and_does_not_stop_the_rest(here):
    done = bench(["python walk.py --crash-at 5", "python walk.py"], "--num-seeds", 2, "--workers", 2)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.count("retrying") == 2 and "retrying  walk --crash-at 5 seed 1: ValueError: it went wrong" in done.stdout
    )
    folders = [path.parent for path in Path("runs").glob("*/run.json")]
    assert len(folders) == 4, "a retry goes on in the same folder"
    assert sorted(check_steps(folder, 8) for folder in folders) == [1, 1, 2, 2]
    log = next(path.read_text() for path in Path("runs/benchmark").glob("*.log") if "went wrong" in path.read_text())
    assert re.search(r"^\$ python walk.py --resume runs/\S+$", log, re.M)


def test_what_fails_for_good_is_told(here):
    Path("broken.py").write_text("raise ValueError('no\\nway')")
    done = bench(["python broken.py", "python walk.py"], "--num-seeds", 1, "--retries", 1)
    assert done.returncode == 1
    assert [e["attempt"] for e in events() if e["event"] == "failed"] == [1, 2] and count("done") == 1
    assert done.stdout.splitlines()[-1].endswith("1 of 2 done, 0 queued, 0 running, 1 failed")
    (line,) = done.stderr.splitlines()
    assert line.startswith("failed: broken seed 1: ValueError: no (runs/benchmark/default__broken__1__")
    again = bench(["python broken.py", "python walk.py"], "--num-seeds", 1, "--dry-run").stdout.splitlines()
    assert again[0].startswith("failed") and again[1].startswith("done")


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("python walk.py --no-such-flag", "walk.py: error: unrecognized arguments: --no-such-flag"),
        ("python flags.py --no-such-flag", "Unrecognized options: --no-such-flag"),
        (f"python -I -S {PPO.with_stem('dqn_jax')}", "flax is missing: pip install -r requirements/requirements-jax.txt"),
        (f"python -I -S {PPO}", "gymnasium is missing: pip install -r requirements/requirements.txt"),
    ],
    ids=["flag", "flag-tyro", "extra", "base"],
)
def test_what_cannot_work_is_not_tried_again(here, command, why):
    Path("flags.py").write_text("import dataclasses, tyro\n@dataclasses.dataclass\nclass A:\n    seed: int = 1\ntyro.cli(A)")
    done = bench(command, "--num-seeds", 1)
    assert done.returncode == 1 and count("started") == 1
    (line,) = done.stderr.splitlines()
    assert f": {why} (" in line


@pytest.mark.parametrize(
    ("command", "flags", "why"),
    [
        ("python walk.py --seed 3", [], "the runner adds --seed"),
        ("python walk.py --env_id=A", [], "the runner adds --env-id"),
        ("python wolk.py", [], "there is no wolk.py"),
        ("pithon walk.py", [], "there is no program pithon"),
        ("python walk.py", ["--num-seeds", 0], "--num-seeds must be"),
        ("python walk.py", ["--env-ids", "A", "A"], "planned twice"),
        ("python 'walk.py", [], "No closing quotation"),
        ("python walk.py", ["--folder", "walk.py"], "cannot write walk.py"),
    ],
)
def test_a_wrong_command_is_one_line(here, command, flags, why):
    done = bench(command, *flags)
    assert done.returncode not in (0, None) and done.stdout == "" and not Path("runs").exists()
    assert why in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything_and_the_same_command_goes_on(here, number):
    command = words("python walk.py --steps 15 --delay 0.1 --helper 1", "--num-seeds", 3, "--workers", 2)
    runner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(list(Path("runs").glob("*/checkpoint.pt"))) == 2)
    runner.send_signal(number)
    _, said = runner.communicate(timeout=30)
    assert runner.returncode == 128 + number and f"stopped by {number.name}: the same command goes on" in said
    assert processes_here() == [], "children, and theirs, are gone"
    assert count("started") == count("cut") == 2 and count("done") == 0
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folders = [path.parent for path in Path("runs").glob("*/run.json")]
    assert sorted(check_steps(folder, 15) for folder in folders) == [1, 2, 2]
    assert processes_here() == [], "nothing is left behind by runs that ended well either"
    skipped = subprocess.run(command, capture_output=True, text=True)
    assert skipped.returncode == 0 and "3 of 3 runs are finished and skipped" in skipped.stdout and count("started") == 5


def test_whoever_asks_twice_does_not_wait(here):
    Path("deaf.py").write_text("import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('x')\ntime.sleep(99)")
    runner = subprocess.Popen(words("python deaf.py", "--num-seeds", 1), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: any("x\n" in path.read_text() for path in Path("runs").glob("benchmark/*.log")))
    start = time.time()
    runner.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert runner.poll() is None and len(processes_here()) >= 2, "it waits for the deaf one to end by itself"
    runner.send_signal(signal.SIGINT)
    assert runner.wait(timeout=30) == 128 + signal.SIGINT and time.time() - start < benchmark_task.GRACE
    assert processes_here() == []


def test_runner_killed_again_and_again(here):
    """kill -9 at any time: no run is lost, none is trained by two processes at a time, none starts over."""
    command, moments = (
        words("python walk.py --steps 20 --delay 0.1 --helper 1", "--num-seeds", 5, "--workers", 2),
        random.Random(1),
    )
    for _ in range(6):
        runner = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(0.4 + 1.5 * moments.random())
        runner.kill()
        runner.wait()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folders = [path.parent for path in Path("runs").glob("*/run.json")]
    assert len(folders) == 5 and sum(check_steps(folder, 20) for folder in folders) > 5, "some were resumed"
    assert processes_here() == []


def test_a_process_that_lives_on_is_never_joined(here):
    """If all that watches over a run is killed at once, its own process may live on; whoever comes next sees its lock."""
    log = here / "run.log"
    alive = "os.setsid(); print('alive', flush=True); time.sleep(4); print('over', flush=True)"
    Path("fork.py").write_text(f"import os, time\nif os.fork():\n    time.sleep(2)\nelse:\n    {alive}")
    assert subprocess.run([*benchmark.TASK, log, "python", "fork.py"]).returncode == 0
    assert "alive" in log.read_text() and "over" not in log.read_text()  # that process is in no group of ours
    assert subprocess.run([*benchmark.TASK, log, "echo", "second"]).returncode == 0
    lines = log.read_text().splitlines()
    assert lines.index("over") < lines.index("$ echo second") < lines.index("second")
    with log.open("ab") as file, pytest.raises(SystemExit, match="another process is still at this run"):
        benchmark_task.lock(file)
        with log.open("ab") as other:
            benchmark_task.lock(other, patience=1)


def test_journal_survives_a_line_cut_short(tmp_path):
    journal = benchmark.Journal(tmp_path)
    journal.write({"run": "a", "event": "done"}, {"run": "b", "event": "started"})
    whole = journal.path.read_bytes()
    for size in range(len(whole) + 1):  # as far as the disk got
        journal.path.write_bytes(whole[:size])
        journal.write({"run": "c", "event": "done"})
        last = journal.last_events()
        assert last["c"]["event"] == "done" and len(last) == 1 + whole[:size].count(b"}")
        assert all(last[run]["event"] == event for run, event in (("a", "done"), ("b", "started")) if run in last)


def test_full_disk_is_one_line(here):
    Path("small").mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", "small"], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.strip()}")
    try:
        flags = ("--num-seeds", 2, "--folder", "small/journal")
        with contextlib.suppress(OSError), open("small/filler", "wb", buffering=0) as filler:
            while filler.write(b"x" * 1024):
                pass
        full = bench("python walk.py", *flags)
        assert full.returncode == 1 and len(full.stderr.splitlines()) == 1
        assert full.stderr.startswith("cannot write small/journal") and "No space left on device" in full.stderr
        assert not Path("runs").exists() and processes_here() == []
        Path("small/filler").write_bytes(b"x" * 200 * 1024)  # enough for the journal, and then a run fills the rest
        chatty = "print('run folder: none')\nwhile True: print('x' * 1000)"
        Path("chatty.py").write_text(chatty)
        filled = bench("python chatty.py", *flags)
        assert filled.returncode == 1 and "o space left on " in filled.stderr and "Traceback" not in filled.stderr
        for path in Path("small").rglob("*chatty*"):
            path.unlink()
        Path("small/filler").unlink()
        assert bench("python walk.py", *flags).returncode == 0
    finally:
        subprocess.run(["umount", "small"], check=True)


def test_a_thousand_runs_are_listed_and_resumed_in_seconds(here):
    flags = ("--env-ids", *(f"Env{i}-v0" for i in range(10)), "--num-seeds", 100)
    start = time.time()
    assert bench("python walk.py", *flags, "--dry-run").stdout.splitlines()[-1] == "1000 runs, 0 of them finished"
    listed = time.time() - start
    args = benchmark.Args(("python walk.py",), flags[1:11], num_seeds=100)
    runs = benchmark.plan(args)
    args.folder.mkdir(parents=True)
    benchmark.Journal(args.folder).write(
        *({"run": run.name, "event": event} for run in runs[:-1] for event in ("started", "done"))
    )
    start = time.time()
    done = bench("python walk.py", *flags)
    resumed = time.time() - start
    assert done.returncode == 0 and "999 of 1000 runs are finished and skipped" in done.stdout
    assert len(list(Path("runs").glob("*/run.json"))) == 1 and count("started") == 1000
    assert listed < 5 and resumed < 10, (listed, resumed)


def test_table_on_a_terminal(here):
    """What a terminal of 12 lines shows at the end, and that it was drawn over and over before."""

    output, (ours, theirs) = b"", pty.openpty()
    command = words("python walk.py --steps 20 --delay 0.1 --crash-at 10", "--num-seeds", 12, "--workers", 4, "--retries", 0)
    runner = subprocess.Popen(
        command, stdout=theirs, stderr=subprocess.DEVNULL, env=os.environ | {"COLUMNS": "80", "LINES": "12"}
    )
    os.close(theirs)
    with contextlib.suppress(OSError):  # which is how a terminal ends
        while data := os.read(ours, 65536):
            output += data
    status = runner.wait()
    frames = [frame.replace("\r", "") for frame in output.decode().split("\x1b[J")]
    assert status == 1 and len(frames) > 3
    is_drawn = re.compile(r"running  walk seed \d+ +\d+% +\d+ +\d+  0:0\d$", re.M)
    middle, last = next(filter(is_drawn.search, frames)).splitlines(), frames[-1].splitlines()
    assert re.match(r"\d of 12 done, \d queued, 4 running, \d failed   0:0\d", middle[0])
    assert re.match(r"state +run +steps +return +steps/s +time", middle[1])
    assert last[0].startswith("0 of 12 done, 0 queued, 0 running, 12 failed")
    assert "ValueError: it went wrong" in last[2] and "... and 4 more" in last
    assert all(len(line) < 80 and len(frame.splitlines()) <= 12 for frame in frames[:-1] for line in frame.splitlines())


def test_figures_from_a_bar(tmp_path):
    log = tmp_path / "log"
    log.write_text("$ x\nrun folder: y\n 10%|# | 51.2k/500k [00:07<00:52, 8.24kstep/s, episodic_return=-12.5]\r")
    assert benchmark_task.progress(log) == (0.1024, 8240, -12.5)
    log.write_text("$ x\n 45%|# | 450/1.00k [07:00<00:52, 2.50s/step]\n")
    assert benchmark_task.progress(log) == (0.45, 0.4, None)
    log.write_text("$ x\n 45%|# | 450/1.00k [07:00<00:52, 2.50s/step]\nexit code 1 after 3 s\n$ x\n")
    assert benchmark_task.progress(log) == (None, None, None), "that was another attempt"


def test_ppo_is_cut_and_goes_on(here):
    """The real thing: two environments, stopped between two checkpoints, finished by the same command."""
    command = words(
        f"python {PPO} --total-timesteps 10240 --num-envs 4 --num-steps 64 --checkpoint-interval 2",
        *("--env-ids", "CartPole-v1", "Acrobot-v1", "--num-seeds", 1, "--workers", 2),
    )
    runner = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(list(Path("runs").glob("*/checkpoint.pt"))) == 2, 120)
    runner.kill()
    wait_for(lambda: processes_here() == [], 10)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folders = sorted(path.parent for path in Path("runs").glob("*/run.json"))
    assert [folder.name.split("__")[0] for folder in folders] == ["Acrobot-v1", "CartPole-v1"]
    for folder in folders:
        steps = [step for step, _ in scalars(folder)["charts/SPS"]]
        assert steps == list(range(256, 10241, 256)), "one curve, without a gap or a step twice"
        assert re.fullmatch(r"[\w.-]*[0-9a-f]{7}(-dirty)?", about(folder)["tags"][0])  # of CleanRL, not of where we are
        log = next(Path("runs/benchmark").glob(f"{folder.name.split('__')[0]}*.log")).read_text()
        assert f"$ python {PPO} --resume {folder} --env-id" in log and log.count("run folder: ") == 2
