"""Hand the planned runs to a backend, keep the journal, retry crashed runs, and print a summary."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from cleanrl_utils import processes
from cleanrl_utils.benchmark import check, log, plan, summary
from cleanrl_utils.benchmark.local import Local
from cleanrl_utils.benchmark.screen import Screen, clock, figures

ALIKE = 3  # stop when this many runs fail with the same error and none does better
HOPELESS = re.compile(  # errors that a retry would hit again
    r"cannot train on |cannot run with these flags|.* is not installed|there is no module "
    r"|.*No API key configured|.*o space left"
)


class Journal:
    """The events of each run, one per line, append-only: a kill only cuts the last line short."""

    def __init__(self, folder, backend="local"):
        self.path, self.backend = folder / "journal.jsonl", backend

    def last_events(self):
        events = {}
        for line in self.path.read_bytes().splitlines() if self.path.exists() else ():
            try:
                event = json.loads(line)
                events[event["run"]] = event
            except (ValueError, TypeError, KeyError):
                continue  # a line that was cut short
        return events

    def write(self, *events):
        common = {"time": round(time.time(), 3), "backend": self.backend}
        lines = [json.dumps(common | event) + "\n" for event in events]
        with self.path.open("a+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            if file.read(1) not in (b"", b"\n"):  # the last line was cut short
                lines.insert(0, "\n")
            file.write("".join(lines).encode())
            os.fsync(file.fileno())


def recall(runs, journal):
    """Restore the runs' states from the journal; return their last events, in words."""
    history, words = journal.last_events(), {}
    for run in runs:
        last = history.get(run.name, {})
        event = last.get("event")
        words[run] = {None: "queued", "done": "done", "failed": "failed"}.get(event, "cut")
        if event == "done" and last.get("folder") and not Path(last["folder"]).is_dir():
            words[run] = "gone"  # its folder was deleted or moved: it runs again
        elif event == "done":
            run.state, run.seconds = "done", last.get("seconds")
            run.run_folder = Path(last["folder"]) if last.get("folder") else None
            run.figures = (1, None, last.get("return"))
        elif event in ("submitted", "started") and outlives_the_runner(last, journal.backend):
            run.job = last.get("job")
    return words


def outlives_the_runner(event, backend):
    """Whether an event is of a job that this backend, and no other, may still have."""
    return backend in ("slurm", "aws-batch") and event.get("backend", backend) == backend


def child_environment(args):
    """What each run finds in its environment, beside what is there: one thread, and the tag."""
    added = processes.thread_settings()
    if args.auto_tag and shutil.which("git"):
        script = plan.find_script(shlex.split(args.command[0])) or "."
        folder = Path(script).parent  # with aws-batch, it may be only in the image
        git = ["git", "describe", "--tags", "--always", "--dirty"]
        settings = dict(cwd=folder if folder.is_dir() else ".", capture_output=True, text=True)
        described = subprocess.run(git, **settings)
        tags = [os.environ.get("WANDB_TAGS", ""), described.stdout.strip()]
        added["WANDB_TAGS"] = ",".join(filter(None, tags))
    return added


def make_backend(args, journal):
    added = child_environment(args)
    environment = os.environ | added
    if args.backend == "aws-batch":
        from cleanrl_utils.benchmark.aws import AwsBatch

        return AwsBatch(args, added, journal)
    if args.backend == "slurm":
        from cleanrl_utils.benchmark.slurm import Slurm

        return Slurm(args, environment, journal)
    if args.backend == "ray":
        from cleanrl_utils.benchmark.ray import Ray

        return Ray(args, environment)
    return Local(args, environment)


# -- the loop --------------------------------------------------------------------------------------


def run_all(args, runs, backend, journal, screen, requests):
    """Until every run is done or has failed too often, a signal came, or all fail alike."""
    backend.submit([run for run in runs if run.state == "queued"])
    while not requests and any(run.state in ("queued", "running") for run in runs):
        again = []
        for run, code, why in backend.poll():
            if code is None:
                note_start(run, journal, screen)
            elif code == 0:
                note_done(run, journal, screen)
            else:
                note_failure(run, code, why, args.retries, journal, screen)
                again += [run] if run.state == "queued" else []
        if why := failing_alike(runs):
            return f"stopped: the first {count_failed(runs)} runs failed with the same error: {why}"
        backend.submit(again)
        screen.show()
        if not args.wait:
            break
        rest(backend.pause, requests)
    return None


def note_start(run, journal, screen):
    run.state, run.began, run.why = "running", time.time(), ""
    run.attempts += 1
    command = shlex.join(run.words)
    event = {"run": run.name, "command": command, "attempt": run.attempts, "job": run.job}
    journal.write(event | {"event": "started"})
    screen.tell("started", run, f"attempt {run.attempts}" if run.attempts > 1 else "")


def note_end(run):
    """What the journal says of a run that has ended."""
    run.job = None
    run.figures, run.seconds = log.progress(run.log), round(time.time() - run.began, 1)
    run.run_folder = log.run_folder(run.log)
    event = {"run": run.name, "folder": run.run_folder and str(run.run_folder)}
    return event | {"seconds": run.seconds, "attempt": run.attempts}


def note_done(run, journal, screen):
    event = note_end(run)
    run.state = "done"
    journal.write(event | {"event": "done", "return": run.figures[2]})
    place = event["folder"] or str(run.log)
    screen.tell("done", run, ", ".join([*figures(run), clock(run.seconds), place]))


def note_failure(run, code, why, retries, journal, screen):
    event = note_end(run)
    run.why = why or log.reason(run.log, code, run.words)
    run.failed_by_itself = not why and code < 128
    journal.write(event | {"event": "failed", "exit_code": code, "why": run.why})
    is_hopeless = code in (2, 127) or HOPELESS.match(run.why)
    run.state = "failed" if is_hopeless or run.attempts > retries else "queued"
    screen.tell("failed" if run.state == "failed" else "retrying", run, run.why)


def count_failed(runs):
    return sum(run.failed_by_itself for run in runs)


def failing_alike(runs):
    """The reason for which all runs so far failed, if they are enough and nothing speaks against
    it: no run was finished, none has been running for longer than those that failed, and no command
    was started that has not failed yet."""
    tried = [run for run in runs if run.attempts]
    failed = [run for run in tried if run.failed_by_itself]
    if len(failed) < ALIKE or any(run.state == "done" for run in tried):
        return None
    if {run.command for run in tried} > {run.command for run in failed}:
        return None
    longest = max(run.seconds for run in failed)
    if any(run.state == "running" and time.time() - run.began > longest for run in tried):
        return None
    reasons = {re.sub(r"[\d.]+", "", run.why.replace(run.env_id or "", "")) for run in failed}
    return failed[-1].why if len(reasons) == 1 else None


def rest(seconds, requests):
    end = time.monotonic() + seconds
    while not requests and time.monotonic() < end:
        time.sleep(min(0.1, seconds))


# -- the whole -------------------------------------------------------------------------------------


def main(args):
    plan.check(args)
    runs, journal = plan.make_plan(args), Journal(args.folder, args.backend)
    words = recall(runs, journal)
    finished = sum(run.state == "done" for run in runs)
    if args.dry_run or args.workers == 0:
        return list_runs(args, runs, words, finished)
    if finished:
        print(f"{finished} of {len(runs)} runs are finished and skipped;", end=" ")
        print("another --folder runs them again")
    if gone := list(words.values()).count("gone"):
        print(f"the folders of {gone} finished runs are gone: they run again")
    requests = processes.collect_requests(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
        stopped = run_with_backend(args, runs, journal, requests)
    except BrokenPipeError:
        stopped = "the output is closed: stopped; repeat the command to continue"
        raise SystemExit(stopped) from None
    except OSError as error:
        place = error.filename or journal.path
        problem = f"cannot write {place}: {error.strerror}; repeat the command to continue"
        raise SystemExit(problem) from None
    return sum_up(args, runs, requests, stopped)


def run_with_backend(args, runs, journal, requests):
    screen, backend = Screen(runs), make_backend(args, journal)
    try:
        return run_all(args, runs, backend, journal, screen, requests)
    finally:
        if args.wait or requests:
            going_on = backend.stop(in_a_hurry=lambda: len(requests) > 1) or ()
            cut = [run for run in runs if run.state == "running" or run.job]
            cut = [run for run in cut if run not in going_on]
            journal.write(*({"run": run.name, "event": "cut"} for run in cut))
            for run in cut:
                run.state = "queued"
        screen.show(now=True)
        screen.close()


def list_runs(args, runs, words, finished):
    """List the runs; with --dry-run, say which commands cannot work."""
    refused = check.try_out_all(runs) if args.dry_run and args.backend == "local" else {}
    for run in runs:
        why = refused.get((run.command, run.env_id), "")
        word = "refused" if why else words[run]
        print(f"{word:<7} {shlex.join(run.words)}{why and ': '}{why}")
    print(f"{len(runs)} runs, {finished} of them finished")
    return 1 if refused else 0


def sum_up(args, runs, requests, stopped):
    """The messages at the end, and the exit code."""
    failed = [run for run in runs if run.state == "failed"]
    for run in failed:
        print(f"failed: {run.title}: {run.why} ({run.log})", file=sys.stderr)
    if requests:
        name = signal.Signals(requests[0]).name
        stopped = f"stopped by {name}: repeat the command to continue"
    if stopped:
        print(stopped, file=sys.stderr)
        return 128 + requests[0] if requests else 1
    summary.print_summary(runs, args.env_ids)
    if any(run.state in ("queued", "running") for run in runs):
        print("the runs continue without the runner: the same command shows their state")
        return 3
    return 1 if failed else 0
