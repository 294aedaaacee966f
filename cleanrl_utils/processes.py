"""Child processes of the tools: their threads and GPUs, their end, and why they failed.

    process = start(["python", "cleanrl/ppo.py"], output=open("output.log", "ab"))
    process.wait()    # the exit code of the command, 128 + n for signal n
    ask_to_end(process)    # as Ctrl+C; SIGKILL after GRACE seconds
    kill(process)    # at once
    why(Path("output.log").read_text(), process.returncode)

The command runs in a process group of its own, so that nothing that it started outlives it. It
ends when the process that started it is gone, also after kill -9: a watcher,

    python -m cleanrl_utils.processes FOLDER COMMAND ...

runs the command in FOLDER and kills its group when its own standard input is closed.
"""

import contextlib
import math
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from cleanrl_utils.errors import install_command, missing, shorten

ROOT = Path(__file__).resolve().parent.parent
GRACE = 10  # seconds from a request to end until SIGKILL
PAUSE = 0.1  # seconds between two looks of a watcher
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}
SETTINGS = ONE_THREAD | {  # environment variables of a child, unless the user has set them
    "PYTHONUNBUFFERED": "1",  # the name of the run folder is in the output at once
    "TQDM_MININTERVAL": "1",  # one progress bar a second is enough for a file
}
BAR = re.compile(r"[^|\r\n]*\d+%\|[^|\r\n]*\|[^\[\r\n]*\[[^\]\r\n]*\]|\S+step \[[^\]\r\n]*\]")
NOISE = re.compile(  # lines of an output that are no reason
    r"wandb: (?!ERROR)"
    r"|torch\.distributed\.elastic"  # torchrun, about a process whose own error is above
    r"|exit code \d+ after "
    r"|For full helptext"
    r"|\W*$"  # the frame of a box
)
ERROR = re.compile(r"([A-Za-z_][\w.]*(Error|Exception|NotInstalled|NotFound)\b|cannot )")
AFTER_THE_ERROR = re.compile(
    r"Traceback |Exception ignored |During handling |The above exc"
    r"|\S+ failed at step \S+ continue with --resume "  # the last word of a file of ours
)


def thread_settings():
    """Environment variables for one thread; those that the user has set keep their values."""
    return {name: os.environ.get(name, value) for name, value in SETTINGS.items()}


def gpu_settings(worker, num_workers):
    """Environment variables that divide the GPUs among the workers, counted from 0."""
    settings, gpus = {}, visible_gpus()
    if gpus:
        settings["CUDA_VISIBLE_DEVICES"] = gpus[worker % len(gpus)]
    if num_workers > max(1, len(gpus)):  # they share a GPU: JAX must not take all of its memory
        name = "XLA_PYTHON_CLIENT_PREALLOCATE"
        settings[name] = os.environ.get(name, "false")
    return settings


def visible_gpus():
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True)
    return done.stdout.split() if done.returncode == 0 else []


def flag_words(flags):
    """Flags as words of a command line: --x or --no-x for bools, nothing for None."""
    from cleanrl_utils.runs import to_words  # a watcher does without NumPy

    words = []
    for name, value in flags.items():
        value = list(value) if isinstance(value, tuple) else value
        words += to_words(name.lstrip("-").replace("-", "_"), value)
    return words


# -- start and end ---------------------------------------------------------------------------------


def start(command, output=None, cwd=".", env=None):
    """Start a command that ends with this process. What is returned is its watcher."""
    watcher = [sys.executable, "-m", "cleanrl_utils.processes", os.path.abspath(cwd), *command]
    pipes = dict(stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT)
    if output is None:
        pipes["stderr"] = None
    return subprocess.Popen(watcher, cwd=ROOT, env=env, start_new_session=True, **pipes)


def ask_to_end(process):
    """Ask a process of start() to end; a second request kills it."""
    if process.poll() is None:
        process.terminate()


def kill(process):
    """Kill a process of start() with its group, and wait until it is gone."""
    process.stdin.close()  # the lifeline
    return process.wait()


def collect_requests(*numbers):
    """A list that gets each of these signals from now on, instead of this process being ended.

    Signals that are ignored, as nohup does, stay ignored."""
    requests = []
    for number in numbers or (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: requests.append(number))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])  # Ray blocks SIGINT
    return requests


def watch(command, requests, has_lifeline, **settings):
    """Run a command to its end in a process group of its own; return its exit code.

    The first of the requests interrupts it, the second kills it; so does the end of standard
    input where that is the lifeline."""
    settings = dict(stdin=subprocess.DEVNULL, start_new_session=True) | settings
    child = subprocess.Popen(command, preexec_fn=dying_with_parent(), **settings)
    deadline = math.inf
    while not has_ended(child):
        if requests and deadline == math.inf:
            end_group(child, signal.SIGINT)
            deadline = time.monotonic() + GRACE
        if len(requests) > 1 or time.monotonic() > deadline or (has_lifeline and is_cut()):
            end_group(child, signal.SIGKILL)
        wait(has_lifeline)
    end_group(child, signal.SIGKILL)  # what it left behind
    code = child.wait()
    return 128 - code if code < 0 else code


def has_ended(child):
    """Whether a child has ended. Its number stays its own until child.wait()."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, child.pid, options) is not None


def end_group(child, number):
    with contextlib.suppress(ProcessLookupError, PermissionError):  # on macOS: only the dead left
        os.killpg(child.pid, number)


def is_cut():
    """Whether standard input, the lifeline, is at its end."""
    return bool(select.select([0], [], [], 0)[0])


def wait(has_lifeline):
    """Wait for the lifeline's end, but only for a moment."""
    if has_lifeline and not is_cut():
        select.select([0], [], [], PAUSE)
    else:
        time.sleep(PAUSE)


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


# -- reasons ---------------------------------------------------------------------------------------


def why(output, code, file=None):
    """One line on why a program failed, from the end of its output and its exit code."""
    if code - 128 in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        hint = " (out of memory?)" if code - 128 == signal.SIGKILL else ""
        return f"killed by {signal.Signals(code - 128).name}{hint}"
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", BAR.sub("\n", output))]
    return from_box(lines) or from_error(lines, file) or from_last_line(lines, code)


def from_box(lines):
    """The first paragraph in the last of the boxes in which tyro prints its errors."""
    tops = [i for i, line in enumerate(lines) if line.startswith("╭─")]
    if not tops or not any(line.startswith("╰─") for line in lines[tops[-1] :]):
        return None
    paragraph = []
    for line in lines[tops[-1] + 1 :]:
        if re.match(r"│ ─+ │|╰─", line):
            break
        paragraph.append(line.strip("│ "))
    return shorten(" ".join(paragraph))


def from_error(lines, file=None):
    """The last error, with the lines that its message goes on for."""
    lines = [line for line in lines if not NOISE.match(line)]
    starts = [i for i, line in enumerate(lines) if ERROR.match(line)]
    if not starts:
        return None
    message = [lines[starts[-1]]]
    for line in lines[starts[-1] + 1 :]:
        if AFTER_THE_ERROR.match(line):
            break
        message.append(line)
    text = shorten(" ".join(message))
    if module := re.match(r"ModuleNotFoundError: No module named '([\w.]+)'$", text):
        return missing(module[1], file)
    return with_our_hint(text)


def with_our_hint(text):
    """The reason with our install command in place of Gymnasium's."""
    hint = re.search(r",? *(?:run|try) [`']pip install \S*\[(\w+)\]\S*", text)
    command = install_command(hint[1]) if hint else ""
    return f"{text[: hint.start()]}: {command}" if command else text


def from_last_line(lines, code):
    said = [line.strip("│ ") for line in lines if not NOISE.match(line)]
    if said and code < 128:
        return shorten(said[-1])
    if code - 128 in set(signal.Signals):
        return f"killed by {signal.Signals(code - 128).name}"
    return f"exit code {code}"


def main():
    folder, *command = sys.argv[1:]
    try:
        sys.exit(watch(command, collect_requests(), has_lifeline=True, cwd=folder))
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
