"""One attempt at one run: what every backend of cleanrl_utils.benchmark starts.

    python -m cleanrl_utils.benchmark.task [--lifeline] --in FOLDER COMMAND ...

The output goes to the run's log (see log.py). If an earlier attempt named a run folder that exists,
this one resumes it. Only one process can work on a run: the log stays locked as long as any of its
processes lives. With --lifeline, the attempt ends when its standard input is closed, which the
operating system does when the parent dies, however it dies.
"""

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import sys
import time
from hashlib import sha256
from pathlib import Path

from cleanrl_utils import processes
from cleanrl_utils.benchmark.log import run_folder

MODULE = "cleanrl_utils.benchmark.task"
START = [sys.executable, "-m", MODULE]
PATIENCE = 30  # seconds to wait for the end of an earlier attempt


def name_of(words):
    """The name of a run and of its log: same command, environment and seed, same run."""
    rest, given = list(words), {"--env-id": "default", "--seed": "1"}
    for flag in given:
        if flag in rest[:-1]:
            given[flag] = rest.pop(rest.index(flag) + 1)
            rest.remove(flag)
    script = next((Path(word).stem for word in rest if word.endswith(".py")), "run")
    digest = sha256(json.dumps([rest, *given.values()]).encode()).hexdigest()[:8]
    name = f"{given['--env-id']}__{script}__{given['--seed']}__{digest}"
    return name.translate(str.maketrans("/\\:", "---"))


def resuming(words, folder):
    """The command that resumes a run: the program, --resume, and --env-id, which it may need."""
    ends = [i for i, word in enumerate(words) if word.endswith(".py")]
    ends += [i + 1 for i, word in enumerate(words) if word == "-m"]  # counts if there is no file
    if not ends:
        return words
    env_id = words[words.index("--env-id") :][:2] if "--env-id" in words else []
    return [*words[: ends[0] + 1], "--resume", str(folder), *env_id]


def attempt(log, words, requests, has_lifeline):
    """Run or resume a command, output to the log; return the exit code (128 + n for signal n)."""
    start = time.time()
    with log.open("ab", buffering=0) as file:
        if code := wait_for_lock(file, requests, has_lifeline):
            return code
        folder = run_folder(log)
        words = resuming(words, folder) if folder else words
        file.write(f"$ {shlex.join(words)}\n".encode())
        try:
            output = dict(stdout=file, stderr=file)
            code = processes.watch(words, requests, has_lifeline, **output)
        except OSError as error:
            code = 127
            file.write(f"cannot start {words[0]}: {error.strerror}\n".encode())
        if code and shutil.disk_usage(log.parent).free < 2**20:
            raise SystemExit(f"no space left on the disk of {log}")
        file.write(f"\nexit code {code} after {time.time() - start:.1f} s\n".encode())
    return code


def wait_for_lock(file, requests, has_lifeline, patience=PATIENCE):
    """Lock the log, as soon as no process of an earlier attempt is left.

    The run inherits the lock with its standard output. Returns an exit code if no parent waits for
    this attempt any more."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if requests:
            return 128 + requests[0]
        if has_lifeline and processes.is_cut():
            return 128 + signal.SIGKILL
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
        kill_leftovers(Path(file.name).resolve())
        time.sleep(0.5)
    raise SystemExit(f"another process is still working on this run: {file.name}")


def kill_leftovers(log):
    """Kill what an earlier attempt left behind if its watcher was killed, but not who reads it."""
    import psutil

    def writes(file):
        return file.path == str(log) and getattr(file, "mode", "a") != "r"  # macOS tells no mode

    holders = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and any(map(writes, process.open_files())):
                holders.append(process)
    for process in holders:
        with contextlib.suppress(psutil.Error):
            if MODULE in process.cmdline():
                return  # a watcher is alive
    for process in holders:
        with contextlib.suppress(psutil.Error):
            process.kill()


def main():
    has_lifeline = sys.argv[1] == "--lifeline"
    _, folder, *words = sys.argv[1 + has_lifeline :]
    log = Path(folder, f"{name_of(words)}.log")
    requests = processes.collect_requests()
    try:
        sys.exit(attempt(log, words, requests, has_lifeline))
    except OSError as error:
        raise SystemExit(f"cannot write {log}: {error.strerror}") from None


if __name__ == "__main__":
    main()
