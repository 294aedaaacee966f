"""cleanrl_utils.processes: a child ends when it must, and says why it failed."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cleanrl_utils import processes
from tests.harness import FILES, ROOT

BAR = " 50%|█████     | 256/512 [00:01<00:01, 250step/s, episodic_return=23.0]"
BOX = """╭─ Invalid choice ─────────────────────────────────────────────────────────────╮
│ invalid choice                                                               │
│ 'gammagammagammagammagammagammagammagammagammagammagammagamma' for argument  │
│ '--mode'. Expected one of ('alpha', 'beta').                                 │
│ ──────────────────────────────────────────────────────────────────────────── │
│ For full helptext, run f.py --help                                           │
╰──────────────────────────────────────────────────────────────────────────────╯
"""
TRACEBACK = "Traceback (most recent call last):\n  File x, line 1\n    raise ValueError(\n"


@pytest.mark.parametrize(
    ("output", "code", "reason"),
    [
        (BOX, 2, "invalid choice 'gamma.*gamma' for argument '--mode'. Expected one of .*'beta'.."),
        (f"{BAR}\r{BAR}", 1, "exit code 1"),
        (f"{BAR}reward of CartPole-v1 at step 5: nan\n", 1, "reward of CartPole-v1 at step 5: nan"),
        (f"{BAR}cannot save step 5 (0.0 GB free): x\n", 1, "cannot save step 5 .*: x"),
        (f"{BAR}{TRACEBACK}ValueError: shapes differ:\n  (3,)\n\n  (4,)", 1, ".*: .3,. .4,."),
        (f"{TRACEBACK}ValueError: it went wrong\nwandb: View run at x\n", 1, ".*: it went wrong"),
        (
            f"{TRACEBACK}ValueError: it went wrong\nA failed at step 5, continue with --resume y",
            1,
            "ValueError: it went wrong",
        ),
        (f"{TRACEBACK}a.b.MyError: {'x' * 999} got 'ten'", 1, "a.b.MyError: x.* got 'ten'"),
        (f"{TRACEBACK}KeyError: 'a'\n\nDuring handling\n\n{TRACEBACK}OSError: b", 1, "OSError: b"),
        ("x.py: error: unrecognized arguments: --y", 2, ".*unrecognized arguments: --y"),
        ("ValueError: of a worker, long ago\n", 137, r"killed by SIGKILL \(out of memory.\)"),
        ("Fatal Python error: Segmentation fault", 139, "killed by SIGSEGV"),
        ("", 3, "exit code 3"),
        (
            'cannot train on Ant: MuJoCo is not installed, run `pip install "gymnasium[mujoco]"`',
            1,
            "cannot train on Ant: MuJoCo is not installed: "
            "pip install -r requirements/requirements-mujoco.txt",
        ),
    ],
)
def test_reason(output, code, reason):
    told = processes.why(output, code)
    assert re.fullmatch(reason, told) and "\n" not in told, told


def test_reason_names_the_extra_of_the_file():
    output = f"{TRACEBACK}ModuleNotFoundError: No module named 'envpool'\n"
    told = processes.why(output, 1, FILES["ppo_procgen"])
    procgen = "requirements/requirements-procgen.txt"
    assert told == f"envpool is not installed: pip install -r {procgen}"


def test_flags_to_words():
    flags = {"norm_adv": False, "anneal-lr": True, "--x": -1.5, "name": "-a", "none": None}
    words = processes.flag_words(flags | {"sizes": [1, 2]})
    assert words == "--no-norm-adv --anneal-lr --x=-1.5 --name=-a --sizes 1 2".split()


def test_who_sets_threads_and_gpus_has_them(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    assert processes.thread_settings()["OMP_NUM_THREADS"] == "4"
    assert processes.thread_settings()["MKL_NUM_THREADS"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    assert processes.gpu_settings(1, 2) == {"CUDA_VISIBLE_DEVICES": "5"}
    shared = {"CUDA_VISIBLE_DEVICES": "3", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    assert processes.gpu_settings(2, 3) == shared
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert processes.gpu_settings(0, 1) == {}


CHILD = """
import signal, subprocess, sys, time
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(2, signal.SIG_IGN);"
                                        "print('helper', flush=True); time.sleep(60)"])
time.sleep(0 if sys.argv[1] == "quick" else 60)
"""


def start(kind, folder):
    with open(folder / "output.log", "wb") as output:
        process = processes.start([sys.executable, "-c", CHILD, kind], output, cwd=folder)
    return process, folder / "output.log"


def in_folder(folder):
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found += [process] if process.cwd() == str(folder) else []
    return found


def wait_for(condition):
    end = time.time() + 30
    while not condition():
        assert time.time() < end, "it did not happen"
        time.sleep(0.05)


def test_exit_code_and_nothing_left_behind(tmp_path):
    process, _ = start("quick", tmp_path)
    assert process.wait() == 0 and in_folder(tmp_path) == []
    process = processes.start([sys.executable, "-c", "raise SystemExit(7)"], cwd=tmp_path)
    assert process.wait() == 7
    kill_itself = "import os; os.kill(os.getpid(), 9)"
    assert processes.start([sys.executable, "-c", kill_itself]).wait() == 128 + signal.SIGKILL
    with open(tmp_path / "output.log", "wb") as output:
        assert processes.start(["no-such-program"], output).wait() == 127
    text = (tmp_path / "output.log").read_text()
    assert text == "cannot start no-such-program: No such file or directory\n"


def test_ends_when_asked_twice_when_killed_and_with_its_starter(tmp_path):
    process, log = start("obedient", tmp_path)
    wait_for(lambda: "helper" in log.read_text())
    processes.ask_to_end(process)
    assert process.wait(timeout=8) == 128 + signal.SIGINT and "KeyboardInterrupt" in log.read_text()

    process, log = start("deaf", tmp_path)
    wait_for(lambda: "helper" in log.read_text())
    processes.ask_to_end(process)
    time.sleep(0.5)
    assert process.poll() is None, "it is given time"
    processes.ask_to_end(process)
    assert process.wait(timeout=8) == 128 + signal.SIGKILL

    process, log = start("deaf", tmp_path)
    wait_for(lambda: "helper" in log.read_text())
    assert processes.kill(process) == 128 + signal.SIGKILL and in_folder(tmp_path) == []

    starter = (
        "from cleanrl_utils import processes\n"
        f"command = [{sys.executable!r}, '-c', {CHILD!r}, 'deaf']\n"
        f"processes.start(command, cwd={str(tmp_path)!r}).wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", starter], cwd=ROOT)
    wait_for(lambda: len(in_folder(tmp_path)) == 2)
    process.kill()
    process.wait()
    wait_for(lambda: in_folder(tmp_path) == [])
    watcher = processes.start([sys.executable, "-c", CHILD, "deaf"], cwd=tmp_path)
    wait_for(lambda: len(in_folder(tmp_path)) == 2)
    os.kill(watcher.pid, signal.SIGKILL)  # its child dies with it, where the system supports that
    watcher.wait()
    wait_for(lambda: len(in_folder(tmp_path)) == 1)
    for process in in_folder(tmp_path):
        process.kill()
    assert Path(processes.ROOT) == ROOT
