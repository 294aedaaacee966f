"""Plan the runs, hand them to a backend, keep the journal and show how far they are."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from cleanrl_utils.benchmark import task
from cleanrl_utils.benchmark.local import Local, visible_gpus

ONE_THREAD = {
    **dict.fromkeys(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
    ),
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "PYTHONUNBUFFERED": "1",  # the name of the run folder is in the log at once
    "TQDM_MININTERVAL": "1",  # a bar a second is enough for a log
}


@dataclass
class Args:
    # what to run, without --env-id and --seed; several make a matrix
    command: tyro.conf.UseAppendAction[tuple[str, ...]]
    env_ids: tuple[str, ...] = ()  # environments to run it on (its own default if none is given)
    num_seeds: int = 3  # how many seeds of each
    start_seed: int = 1  # the first of them
    workers: int = 1  # runs at a time; 0 only lists them
    auto_tag: bool = True  # tag the runs with the state of the code as git describes it
    retries: int = 2  # how often a run that crashes is tried again
    dry_run: bool = False  # only list the runs, and which of them are finished
    folder: Path = Path("runs/benchmark")  # journal and output of the runs; a new one starts anew
    backend: Literal["local", "ray", "slurm", "aws-batch"] = "local"  # where to run
    wait: bool = True  # wait for the jobs (slurm, aws-batch); the same command shows their state

    ray_address: str | None = None  # of a Ray cluster; without one, Ray is started on this machine
    ray_cpus_per_run: float = 1  # what a run takes of a Ray node
    ray_gpus_per_run: float = 0  # the same for GPUs

    slurm_template_path: Path | None = None  # batch script with {{fields}}, in place of our own
    slurm_gpus_per_task: int = 0  # GPUs of each run
    slurm_total_cpus: int = 1  # CPU cores of each run
    slurm_ntasks: int = 1  # tasks of each run
    slurm_nodes: int | None = None  # nodes of each run
    slurm_poll_interval: float = 10  # seconds between two looks at Slurm's queue

    aws_job_queue: str | None = None  # AWS Batch queue to submit to
    aws_job_definition: str | None = None  # AWS Batch job definition with the Dockerfile's image
    aws_s3: str | None = None  # s3://bucket/prefix for logs and checkpoints
    aws_endpoint_url: str | None = None  # of another service with AWS's interface
    aws_sync_interval: float = 60  # seconds between two uploads of logs and checkpoints


@dataclass(eq=False)
class Run:
    command: str  # one of --command
    env_id: str | None
    seed: int
    folder: Path  # of the journal
    flags: str = ""  # what tells the command from the others
    state: str = "queued"  # running, done, failed
    attempts: int = 0
    began: float = 0
    seconds: float | None = None  # the last attempt took
    why: str = ""  # it failed
    job: str | None = None  # what a cluster calls it
    figures: tuple = (None, None, None)  # share of the steps, steps per second, return

    def __post_init__(self):
        env = ["--env-id", self.env_id] if self.env_id else []
        self.words = [*shlex.split(self.command), *env, "--seed", str(self.seed)]
        self.name = task.name_of(self.words)
        self.log = self.folder / f"{self.name}.log"
        script = next(
            (Path(word).stem for word in self.words if word.endswith(".py")), self.words[0]
        )
        self.title = " ".join(filter(None, [self.env_id, script, self.flags, f"seed {self.seed}"]))

    def told(self):
        _, rate, episodic_return = self.figures
        yield from [f"return {episodic_return:g}"] if episodic_return is not None else []
        yield from [f"{rate:,.0f} steps/s"] if rate is not None else []


def plan(args):
    """All runs: the first seed of everything, then the second."""
    seeds, several = range(args.start_seed, args.start_seed + args.num_seeds), len(args.command) > 1
    return [
        Run(
            command,
            env_id,
            seed,
            args.folder,
            flags=command.split(".py", 1)[-1].strip() if several else "",
        )
        for seed in seeds
        for command in args.command
        for env_id in args.env_ids or (None,)
    ]


class Journal:
    """The events of each run, one per line, append-only: a kill only cuts the last line short."""

    def __init__(self, folder):
        self.path = folder / "journal.jsonl"

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
        lines = "".join(
            json.dumps({"time": round(time.time(), 3), **event}) + "\n" for event in events
        )
        with self.path.open("a+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            if file.read(1) not in (b"", b"\n"):  # the last line was cut short
                lines = "\n" + lines
            file.write(lines.encode())
            os.fsync(file.fileno())


def child_environment(args):
    """What each run finds in its environment, beside what is there: one thread, and the tag."""
    added = {
        name: os.environ.get(name, value) for name, value in ONE_THREAD.items()
    }  # who sets one has it
    if args.auto_tag:
        git = ["git", "describe", "--tags", "--always", "--dirty"]
        here = next(
            (Path(word).parent for word in shlex.split(args.command[0]) if word.endswith(".py")),
            ".",
        )
        tag = (
            subprocess.run(git, cwd=here, capture_output=True, text=True).stdout.strip()
            if shutil.which("git")
            else ""
        )
        added |= (
            {"WANDB_TAGS": ",".join(filter(None, [os.environ.get("WANDB_TAGS"), tag]))}
            if tag
            else {}
        )
    if args.backend == "local" and args.workers > max(1, len(visible_gpus())):
        added["XLA_PYTHON_CLIENT_PREALLOCATE"] = os.environ.get(
            "XLA_PYTHON_CLIENT_PREALLOCATE", "false"
        )  # they share a GPU
    return added


def clock(seconds):
    minutes, seconds = divmod(int(seconds), 60)
    return (
        f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
        if minutes >= 60
        else f"{minutes}:{seconds:02}"
    )


class Screen:
    """A table redrawn every second; without a terminal, a line per change and per minute."""

    def __init__(self, runs):
        self.runs, self.is_live, self.height, self.start = runs, sys.stdout.isatty(), 0, time.time()
        self.drawn = self.start

    def tell(self, word, run, rest=""):
        if not self.is_live:
            print(
                f"{time.strftime('%H:%M:%S')}  {word:<8}  {run.title}{rest and ': '}{rest}",
                flush=True,
            )

    def counts(self):
        counts = Counter(run.state for run in self.runs)
        states = ", ".join(f"{counts[state]} {state}" for state in ("queued", "running", "failed"))
        return f"{counts['done']} of {len(self.runs)} done, {states}"

    def rows(self, runs):
        rows = [("state", "run", "steps", "return", "steps/s", "time", "")]
        for run in runs:
            share, rate, episodic_return = run.figures
            cells = (
                f"{share:.0%}" if share is not None else "",
                f"{episodic_return:g}" if episodic_return is not None else "",
            )
            again = f"attempt {run.attempts}" if run.attempts > 1 and run.state == "running" else ""
            seconds = time.time() - run.began if run.state == "running" else run.seconds
            passed = clock(seconds) if seconds is not None else ""
            rate = f"{rate:,.0f}" if rate is not None else ""
            rows.append((run.state, run.title, *cells, rate, passed, run.why or again))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (
                c.ljust(w) if i in (0, 1, 6) else c.rjust(w)
                for i, (c, w) in enumerate(zip(row, widths, strict=True))
            )
            yield "  ".join(cells).rstrip()

    def show(self, now=False):
        seconds = 1 if self.is_live else 60
        if not now and time.time() < self.drawn + seconds:
            return
        self.drawn = time.time()
        running = [run for run in self.runs if run.state == "running"]
        for run in running:
            run.figures = task.progress(run.log)
        if not self.is_live:
            for run in running:
                self.tell("running", run, ", ".join([f"{run.figures[0] or 0:.0%}", *run.told()]))
            print(f"{time.strftime('%H:%M:%S')}  {self.counts()}", flush=True)
            return
        size, order = shutil.get_terminal_size(), ("running", "failed", "queued", "done")
        shown = sorted(self.runs, key=lambda run: order.index(run.state))[: max(1, size.lines - 4)]
        lines = [f"{self.counts()}   {clock(time.time() - self.start)}", *self.rows(shown)]
        lines += (
            [f"... and {len(self.runs) - len(shown)} more"] if len(shown) < len(self.runs) else []
        )
        back = f"\x1b[{self.height}F\x1b[J" if self.height else ""  # over what was drawn before
        print(back + "\n".join(line[: size.columns - 1] for line in lines), flush=True)
        self.height = len(lines)


def run_all(args, runs, backend, journal, screen, signals):
    """Until every run is done or has failed too often, or a signal came."""
    wake = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup and shell scripts want it
            signal.signal(number, lambda number, _: (signals.append(number), wake.set()))
    backend.submit([run for run in runs if run.state == "queued"])
    while not signals and any(run.state in ("queued", "running") for run in runs):
        again = []
        for run, code, why in backend.poll():
            if code is None:
                run.state, run.attempts, run.began, run.why = (
                    "running",
                    run.attempts + 1,
                    time.time(),
                    "",
                )
                facts = {
                    "run": run.name,
                    "command": shlex.join(run.words),
                    "attempt": run.attempts,
                    "job": run.job,
                }
                journal.write({**facts, "event": "started"})
                screen.tell("started", run, f"attempt {run.attempts}" if run.attempts > 1 else "")
                continue
            run.figures, run.seconds = task.progress(run.log), round(time.time() - run.began, 1)
            folder = task.run_folder(run.log)
            facts = {
                "run": run.name,
                "folder": folder and str(folder),
                "seconds": run.seconds,
                "attempt": run.attempts,
            }
            if code == 0:
                run.state = "done"
                journal.write({**facts, "event": "done", "return": run.figures[2]})
                screen.tell(
                    "done",
                    run,
                    ", ".join([*run.told(), clock(run.seconds), str(folder or run.log)]),
                )
                continue
            run.why = why or task.reason(run.log, code)
            journal.write({**facts, "event": "failed", "exit_code": code, "why": run.why})
            final = (" is missing", "No module named", "o space left")
            hopeless = code in (2, 127) or any(words in run.why for words in final)
            if run.attempts > args.retries or hopeless:
                run.state = "failed"
                screen.tell("failed", run, run.why)
            else:
                run.state = "queued"
                again.append(run)
                screen.tell("retrying", run, run.why)
        backend.submit(again)
        screen.show()
        if not args.wait:
            return
        wake.wait(backend.pause)


def check(args):
    for rule, is_kept in {
        "--num-seeds must be at least 1": args.num_seeds >= 1,
        "--start-seed, --workers and --retries must not be negative": min(
            args.start_seed, args.workers, args.retries
        )
        >= 0,
        "--command must be given": bool(args.command),
        "--no-wait is for slurm and aws-batch": args.wait or args.backend in ("slurm", "aws-batch"),
        "this runner needs Linux or macOS": os.name == "posix",
    }.items():
        if not is_kept:
            raise SystemExit(rule)
    for command in args.command:
        try:
            words = shlex.split(command)
            assert words, "it is empty"
        except (ValueError, AssertionError) as error:
            raise SystemExit(f"cannot read --command {command!r}: {error}") from None
        if given := {"--env-id", "--seed", "--resume"} & {
            word.split("=")[0].replace("_", "-") for word in words
        }:
            raise SystemExit(
                f"the runner adds {', '.join(sorted(given))}: leave it out of --command"
            )
        scripts = [word for word in words if word.endswith(".py")][:1]
        if args.backend != "aws-batch" and scripts and not Path(scripts[0]).is_file():
            raise SystemExit(f"there is no {scripts[0]}")
        if args.backend == "local" and not shutil.which(words[0]):
            raise SystemExit(f"there is no program {words[0]}")


def make_backend(args, journal):
    added = child_environment(args)
    if args.backend == "aws-batch":
        from cleanrl_utils.benchmark.aws import AwsBatch

        return AwsBatch(args, added, journal)
    environment = os.environ | added
    if args.backend == "slurm":
        from cleanrl_utils.benchmark.slurm import Slurm

        return Slurm(args, environment, journal)
    if args.backend == "ray":
        from cleanrl_utils.benchmark.ray import Ray

        return Ray(args, environment)
    return Local(args, environment)


def main(args):
    check(args)
    runs, journal = plan(args), Journal(args.folder)
    twice = [run for run, count in Counter(run.name for run in runs).items() if count > 1]
    if twice:
        raise SystemExit(f"the same run is planned twice: {twice[0]}")
    history = journal.last_events()
    for run in runs:
        last = history.get(run.name, {})
        if last.get("event") == "done":
            run.state, run.figures, run.seconds = (
                "done",
                (1, None, last.get("return")),
                last.get("seconds"),
            )
        run.job = last.get("job") if last.get("event") in ("submitted", "started") else None
    finished = sum(run.state == "done" for run in runs)
    if args.dry_run or args.workers == 0:
        for run in runs:
            last = history.get(run.name, {}).get("event")
            state = {"done": "done", "failed": "failed", None: "queued"}.get(last, "cut")
            print(f"{state:<6}  {shlex.join(run.words)}")
        print(f"{len(runs)} runs, {finished} of them finished")
        return 0
    if finished:
        print(
            f"{finished} of {len(runs)} runs are finished and skipped; "
            "another --folder runs them again"
        )
    screen, signals = Screen(runs), []
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
        backend = make_backend(args, journal)
        try:
            run_all(args, runs, backend, journal, screen, signals)
        finally:
            if args.wait or signals:
                backend.stop(in_a_hurry=lambda: len(signals) > 1)
                journal.write(
                    *(
                        {"run": run.name, "event": "cut"}
                        for run in runs
                        if run.state == "running" or run.job
                    )
                )
    except BrokenPipeError:
        raise SystemExit(
            "nobody reads the output any more: stopped; the same command goes on"
        ) from None
    except OSError as error:
        raise SystemExit(
            f"cannot write {error.filename or journal.path}: {error.strerror}; "
            "the same command goes on"
        ) from None
    screen.show(now=True)
    for run in runs:
        if run.state == "failed":
            print(f"failed: {run.title}: {run.why} ({run.log})", file=sys.stderr)
    if not args.wait and any(run.state in ("queued", "running") for run in runs):
        print("the runs go on by themselves: the same command shows how they are")
        return 3
    if signals:
        print(
            f"stopped by {signal.Signals(signals[0]).name}: the same command goes on",
            file=sys.stderr,
        )
        return 128 + signals[0]
    return 0 if all(run.state == "done" for run in runs) else 1
