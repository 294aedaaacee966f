"""Run commands up to their run folder, without making it: what --dry-run does with our files.

Flags, environments, networks and the W&B login are checked there before anything is written, so
a command that gets that far works. One process imports the libraries, and forks a child for
each command, which stops where it would create the folder.

    echo '[["--env-id", "Acrobot-v1"], ["--num-envs", "0"]]' | python check.py cleanrl/ppo.py

prints one line of JSON for each: its exit code and its output.
"""

import ast
import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path

MARK = "def make_run_folder("  # what files of ours have
TIMEOUT = 120  # seconds for one command
WORKS = 0


def try_out_all(runs):
    """{(command, environment): why it cannot work}, as far as the commands are files of ours."""
    from cleanrl_utils import processes  # here, and not in what --dry-run starts

    flags = {}  # (program, file): {(command, environment): flags}
    for run in runs:
        program, file, *rest = [*run.words, ""]
        is_ours = file.endswith(".py") and MARK in Path(file).read_text(errors="replace")
        if is_ours and Path(program).name.startswith("python"):
            flags.setdefault((program, file), {})[run.command, run.env_id] = rest[:-1]
    refused = {}
    for (program, file), jobs in flags.items():
        done = subprocess.run(
            [program, __file__, file],
            input=json.dumps(list(jobs.values())),
            env=os.environ | processes.thread_settings(),
            capture_output=True,
            text=True,
        )
        died = json.dumps([done.returncode or 1, done.stderr])  # before it came to an answer
        for job, line in zip_longest(jobs, done.stdout.splitlines(), fillvalue=died):
            code, output = json.loads(line)
            if code != WORKS:
                code = 128 - code if code < 0 else code
                refused[job] = processes.why(output, code, file)
    return refused


def import_libraries(file):
    """Import what the file imports, once for all children. What fails is theirs to report.

    JAX starts threads, which a fork does not survive: its files are imported by each child."""
    try:
        nodes = ast.parse(Path(file).read_text()).body
    except (SyntaxError, ValueError):
        return
    if any("import jax" in ast.unparse(node) for node in nodes):
        return
    for node in nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        for name in names:
            try:
                importlib.import_module(name)
            except (Exception, SystemExit):
                return


def stop_at_run_folder(event, details):
    if event == "os.mkdir" and Path(os.fsdecode(details[0])).parts[:1] == ("runs",):
        os._exit(WORKS)


def try_out(file, flags, output):
    """Run the file in a child with its output to a file; return its exit code."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        signal.alarm(TIMEOUT)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.argv = [file, *flags]
        sys.addaudithook(stop_at_run_folder)
        runpy.run_path(file, run_name="__main__")
        sys.exit(WORKS)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return WORKS if code == -signal.SIGALRM else code  # still running: nothing is wrong


def main():
    file = sys.argv[1]
    sys.path[0] = str(Path(file).resolve().parent)  # as if Python had started the file
    with contextlib.redirect_stdout(sys.stderr):  # what a library prints is no answer
        import_libraries(file)
    for flags in json.load(sys.stdin):
        with tempfile.TemporaryFile() as output:
            code = try_out(file, flags, output)
            output.seek(0)
            text = output.read().decode(errors="replace")
        print(json.dumps([code, text]), flush=True)


if __name__ == "__main__":
    main()
