"""One attempt at one run: what every backend of cleanrl_utils.benchmark starts.

    python cleanrl_utils/benchmark/task.py [--lifeline] --in FOLDER COMMAND ...

The log holds the whole state of a run: each attempt's command, its output with the name of the run
folder, and its exit code. If an earlier attempt named a run folder that exists, this one resumes it
(--resume). Only one process can work on a run: the log stays locked as long as any of its processes
lives. With --lifeline, the attempt ends when its standard input is closed, which the operating
system does when the parent dies, however it dies.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from hashlib import sha256
from pathlib import Path

START = [sys.executable, "-I", "-S", __file__]  # as quick to start as Python can be
GRACE = 10  # seconds from a polite request to end until SIGKILL
BAR = re.compile(
    r"([\d.]+)([kMG]?)/([\d.]+)([kMG]?) \[[^]]*?, +([\d.]+)([kMG]?)(step/s|s/step)"
    r"(?:, episodic_return=([^\],\s]+))?"
)
SCALE = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}
EXTRAS = {  # which file of requirements/ has a module
    **dict.fromkeys("gymnasium moviepy numpy tensorboard torch tqdm tyro wandb".split(), ""),
    **dict.fromkeys("ale_py cv2".split(), "-atari"),
    **dict.fromkeys("flax gymnax jax optax".split(), "-jax"),
    **dict.fromkeys("dm_control shimmy".split(), "-dm_control"),
    **dict.fromkeys("multi_agent_ale_py pettingzoo".split(), "-pettingzoo"),
    **{name: f"-{name}" for name in ("envpool", "mujoco", "optuna")},
}


def name_of(words):
    """The name of a run and of its log: same command, environment and seed, same run."""
    rest, given = list(words), {"--env-id": "default", "--seed": "1"}
    for flag in given:
        if flag in rest[:-1]:
            given[flag] = rest.pop(rest.index(flag) + 1)
            rest.remove(flag)
    script = next((Path(word).stem for word in rest if word.endswith(".py")), "run")
    digest = sha256(json.dumps([rest, *given.values()]).encode()).hexdigest()[:8]
    return f"{given['--env-id']}__{script}__{given['--seed']}__{digest}".translate(
        str.maketrans("/\\:", "---")
    )


def run_folder(log):
    """The folder that the run's last attempt named, or None if there is none."""
    named = re.findall(rb"^run folder: (.+?)\r?$", log.read_bytes(), re.M) if log.exists() else []
    folder = Path(os.fsdecode(named[-1])) if named else None
    return folder if folder and (folder / "run.json").exists() else None


def resuming(words, folder):
    """The command that resumes a run: the program, --resume, and --env-id, which it may need."""
    ends = [i for i, word in enumerate(words) if word.endswith(".py") or words[i - 1 : i] == ["-m"]]
    if not ends:
        return words
    env_id = words[words.index("--env-id") :][:2] if "--env-id" in words else []
    return [*words[: ends[0] + 1], "--resume", str(folder), *env_id]


def tail(log, size=4096):
    """The last lines of a log, those that tqdm wrote over each other too."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return re.split(r"[\r\n]+", file.read().decode(errors="replace"))
    except FileNotFoundError:
        return []


def progress(log):
    """Fraction of steps done, steps per second and last return, or None, from the last bar."""
    for line in reversed(tail(log)):
        if line.startswith("$ "):  # what is above belongs to an earlier attempt
            break
        if found := BAR.search(line):
            done, done_scale, total, total_scale, rate, rate_scale, unit, episodic_return = (
                found.groups()
            )
            share = float(done) * SCALE[done_scale] / max(float(total) * SCALE[total_scale], 1)
            rate = float(rate) * SCALE[rate_scale]
            return (
                share,
                rate if unit == "step/s" else 1 / max(rate, 1e-9),
                episodic_return and float(episodic_return),
            )
    return None, None, None


def exit_code(log):
    """The exit code of the last attempt, or None if it runs or was killed with its watcher."""
    found = re.fullmatch(
        r"exit code (\d+) after .*", ([""] + [line for line in tail(log, 512) if line])[-1]
    )
    return int(found[1]) if found else None


def reason(log, code):
    """One line on why an attempt failed."""
    lines = []
    for line in tail(log):
        lines = [] if line.startswith("$ ") else [*lines, line.strip("│╭╰─╮╯ ")]
    said = [
        line
        for line in lines
        if line and not BAR.search(line) and not re.match(r"exit code \d+ after ", line)
    ]
    errors = [
        line
        for line in said
        if re.match(
            r"([\w.]*(Error|Exception|NotInstalled|NotFound)|Unrecognized .*|cannot .*):? ", line
        )
    ]
    missing = (
        re.match(r"ModuleNotFoundError: No module named '(\w+)", errors[-1]) if errors else None
    )
    if missing and missing[1] in EXTRAS:
        file = f"requirements/requirements{EXTRAS[missing[1]]}.txt"
        return f"{missing[1]} is missing: pip install -r {file}"
    killed = (
        f"killed by {signal.Signals(code - 128).name}"
        if code - 128 in set(signal.Signals)
        else f"exit code {code}"
    )
    return (errors or ([] if code > 128 else said) or [killed])[-1]


def dying_with_parent():
    """A function that makes its process die with the parent, where the system supports that."""
    if sys.platform != "linux":
        return None
    import ctypes

    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def tie():
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # which died before that
            os._exit(128 + signal.SIGKILL)

    return tie


def end_leftovers(log):
    """Kill what an attempt left behind if its watcher was killed (Linux only, through /proc)."""
    holders = {}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == str(log):
                holders[int(link.parts[2])] = (
                    (link.parents[1] / "cmdline").read_bytes().split(b"\0")
                )
    holders.pop(os.getpid(), None)
    if not any(os.fsencode(__file__) in words for words in holders.values()):  # nobody watches
        for pid in holders:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def lock(file, patience=30):
    """Wait until no process of an earlier attempt is left; child processes inherit the lock."""
    import fcntl

    for wait in range(10 * patience):
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if wait % 10 == 0:
                end_leftovers(Path(file.name).resolve())
            time.sleep(0.1)
    raise SystemExit(f"another process is still at this run: {file.name}")


def attempt(log, words, lifeline=False):
    """Run or resume a command, output to the log; return the exit code (128 + n for signal n)."""
    child, start, is_starting, is_asked, starting = (
        None,
        time.time(),
        False,
        False,
        threading.Lock(),
    )

    def kill(*_):
        if child is None:
            os._exit(128 + signal.SIGKILL)  # nothing was started yet
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it is gone
            os.killpg(child.pid, signal.SIGKILL)

    def end(*_):
        nonlocal is_asked
        if is_asked and not is_starting:
            kill()  # whoever asks twice is in a hurry
        is_asked = True
        if child is not None:
            os.killpg(child.pid, signal.SIGINT)  # as Ctrl+C would
            timer = threading.Timer(GRACE, kill)
            timer.daemon = True
            timer.start()
        elif not is_starting:
            raise SystemExit(128 + signal.SIGTERM)

    def hold_on():
        os.read(0, 1)
        with starting:  # not in the moment in which there is a child of no name
            kill()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM)
    )  # Ray blocks the first
    if lifeline:
        threading.Thread(target=hold_on, daemon=True).start()
    with open(log, "ab", buffering=0) as file:
        lock(file)
        folder = run_folder(Path(log))
        words = resuming(words, folder) if folder else words
        file.write(f"$ {shlex.join(words)}\n".encode())
        settings = dict(
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            with starting:
                is_starting = True
                child = subprocess.Popen(words, **settings, preexec_fn=dying_with_parent())
                is_starting = False
        except OSError as error:
            code = 127
            file.write(f"cannot start {words[0]}: {error.strerror}\n".encode())
        else:
            if is_asked:  # in that moment
                end()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            kill()  # what it left behind, while no other process can have its number
            code = child.wait()
        code = 128 - code if code < 0 else code
        if code and shutil.disk_usage(Path(log).parent).free < 2**20:
            raise SystemExit(f"no space left on the disk of {log}")
        file.write(f"\nexit code {code} after {time.time() - start:.1f} s\n".encode())
    return code


if __name__ == "__main__":
    lifeline = sys.argv[1] == "--lifeline"
    _, folder, *words = sys.argv[1 + lifeline :]
    log = Path(folder, f"{name_of(words)}.log")
    try:
        sys.exit(attempt(log, words, lifeline))
    except OSError as error:
        raise SystemExit(f"cannot write {log}: {error.strerror}") from None
