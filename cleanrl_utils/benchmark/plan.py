"""The planned runs: flags or a YAML file, a grid of flags, environments and seeds."""

import itertools
import re
import shlex
import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
import yaml

from cleanrl_utils.benchmark.task import name_of
from cleanrl_utils.errors import explain
from cleanrl_utils.processes import flag_words


@dataclass
class Args:
    # what to run, without --env-id and --seed; several make a matrix
    command: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    env_ids: tuple[str, ...] = ()  # environments to run it on (its own default if none is given)
    num_seeds: int = 3  # number of seeds
    start_seed: int = 1  # the first seed
    grid: tuple[str, ...] = ()  # all combinations of flags: learning_rate=1e-4,3e-4 num_envs=4,8
    workers: int = 1  # runs at a time; 0 only lists them
    auto_tag: bool = True  # tag the runs with the output of git describe
    retries: int = 2  # how often a run that crashes is retried
    dry_run: bool = False  # list the runs, and check each command without training
    folder: Path = Path("runs/benchmark")  # journal and output of the runs; a new one starts over
    backend: Literal["local", "ray", "slurm", "aws-batch"] = "local"  # where to run
    wait: bool = True  # wait for the jobs (slurm, aws-batch); the same command shows their state
    config: Path | None = None  # YAML file with any of these flags; flags given here override it

    ray_address: str | None = None  # address of a Ray cluster; by default, started on this machine
    ray_cpus_per_run: float = 1  # CPUs that a run reserves
    ray_gpus_per_run: float = 0  # GPUs that a run reserves

    slurm_template_path: Path | None = None  # batch script with {{fields}}, not the built-in one
    slurm_gpus_per_task: int = 0  # GPUs of each run
    slurm_total_cpus: int = 1  # CPU cores of each run
    slurm_ntasks: int = 1  # tasks of each run
    slurm_nodes: int | None = None  # nodes of each run
    slurm_poll_interval: float = 10  # seconds between polls of Slurm's queue

    aws_job_queue: str | None = None  # AWS Batch queue to submit to
    aws_job_definition: str | None = None  # AWS Batch job definition with the Dockerfile's image
    aws_s3: str | None = None  # s3://bucket/prefix for logs and checkpoints
    aws_endpoint_url: str | None = None  # endpoint of another AWS-compatible service
    aws_sync_interval: float = 60  # seconds between uploads of logs and checkpoints


@dataclass(eq=False)
class Run:
    command: str  # with the flags of the grid
    label: str  # its file, and the flags that tell it from the other commands
    env_id: str | None
    seed: int
    folder: Path  # of the journal
    state: str = "queued"  # running, done, failed
    attempts: int = 0
    began: float = 0
    seconds: float | None = None  # the last attempt took
    why: str = ""  # it failed
    failed_by_itself: bool = False  # in this session, not by a signal or with its machine
    run_folder: Path | None = None  # of the last attempt
    job: str | None = None  # what a cluster calls it
    figures: tuple = (None, None, None)  # share of the steps, steps per second, return

    def __post_init__(self):
        env = ["--env-id", self.env_id] if self.env_id else []
        self.words = [*shlex.split(self.command), *env, "--seed", str(self.seed)]
        self.name = name_of(self.words)
        self.log = self.folder / f"{self.name}.log"
        self.title = " ".join(filter(None, [self.env_id, self.label, f"seed {self.seed}"]))


def parse_args(description):
    """The flags of the command line, in front of them those of --config."""
    given = sys.argv[1:]
    name = "python -m cleanrl_utils.benchmark"
    args = tyro.cli(Args, prog=name, description=description, args=given)
    if args.config:
        words = read_config(args.config)
        if args.command:  # several --command add up, but the file's are replaced
            words = [word for word in words if not word.startswith("--command=")]
        args = tyro.cli(Args, prog=name, description=description, args=[*words, *given])
    return args


def read_config(path):
    """The flags in a YAML file, as words of a command line."""
    with explain(f"read {path}"):
        flags = yaml.safe_load(path.read_text())
        if not isinstance(flags, dict):
            raise ValueError("it is not a list of `flag: value`")
        words = []
        for name, value in flags.items():
            name = str(name).replace("-", "_")
            if name == "command":
                commands = value if isinstance(value, list) else [value]
                words += [f"--command={command}" for command in commands]
            elif name == "grid" and isinstance(value, dict):
                words.append("--grid")
                for flag, choices in value.items():
                    choices = choices if isinstance(choices, list) else [choices]
                    words.append(f"{flag}={','.join(map(str, choices))}")
            else:
                words += flag_words({name: value})
    return words


def check(args):
    needs = {
        "--command must be given": args.command,
        "--num-seeds must be at least 1": args.num_seeds >= 1,
        "--start-seed must not be negative": args.start_seed >= 0,
        "--workers must not be negative": args.workers >= 0,
        "--retries must not be negative": args.retries >= 0,
        "--no-wait is for slurm and aws-batch": args.wait or args.backend in ("slurm", "aws-batch"),
        "this runner needs Linux or macOS": sys.platform != "win32",
    }
    for rule, holds in needs.items():
        if not holds:
            raise SystemExit(rule)
    for command in args.command:
        check_command(args, command)


def check_command(args, command):
    with explain(f"read --command {command!r}"):
        words = shlex.split(command)
        if not words:
            raise ValueError("it is empty")
    flags = {word.split("=")[0].replace("_", "-") for word in words}
    if given := {"--env-id", "--seed", "--resume"} & flags:
        names = ", ".join(sorted(given))
        raise SystemExit(f"the runner adds {names}: leave it out of --command")
    script = find_script(words)
    if args.backend != "aws-batch" and script and not Path(script).is_file():
        raise SystemExit(f"there is no {script}")
    if args.backend == "local" and not shutil.which(words[0]):
        raise SystemExit(f"there is no program {words[0]}")


def check_names(commands):
    """Refuse two files with one exp_name: the summary and RLops would merge them."""
    files = {}  # {exp_name: the file that has it}
    for command in commands:
        file = find_script(shlex.split(command))
        if not file or not has_exp_name(Path(file)):
            continue
        flags = [re.match(r"--exp[-_]name[ =](.+)", flag) for flag in split_flags(command)]
        name = next((flag[1] for flag in flags if flag), Path(file).stem)
        if files.setdefault(name, file) != file:
            both = f"{files[name]} and {file}"
            raise SystemExit(f"{both} have the same name, {name}: give one --exp-name")


def has_exp_name(file):  # which, with aws-batch, may be only in the image
    return not file.is_file() or "exp_name" in file.read_text(errors="replace")


def find_script(words):
    return next((word for word in words if word.endswith(".py")), None)


def make_plan(args):
    """All runs: the first seed of everything, then the second."""
    commands = [full for command in args.command for full in with_grid(command, args.grid)]
    check_names(commands)
    labels = make_labels(commands)
    runs = [
        Run(command, label, env_id, seed, args.folder)
        for seed in range(args.start_seed, args.start_seed + args.num_seeds)
        for command, label in zip(commands, labels, strict=True)
        for env_id in args.env_ids or (None,)
    ]
    for name, count in Counter(run.name for run in runs).items():
        if count > 1:
            raise SystemExit(f"the same run is planned twice: {name}")
    return runs


def with_grid(command, grid):
    """A command with each combination of the flags in a grid such as ["num_envs=4,8"]."""
    if not grid:
        return [command]
    choices = []
    for item in grid:
        name, _, values = item.partition("=")
        if not name or not all(values.split(",")):
            raise SystemExit(f"--grid {item}: write NAME=VALUE,VALUE")
        with explain(f"use --grid {item}"):
            choices.append([flag_words({name: to_value(text)}) for text in values.split(",")])
    words = shlex.split(command)
    combinations = itertools.product(*choices)
    return [shlex.join([*words, *itertools.chain(*added)]) for added in combinations]


def to_value(text):
    return {"true": True, "false": False}.get(text.lower(), text)


def make_labels(commands):
    """The file of each command, with the flags that tell it from other commands of this file."""
    flags = [split_flags(command) for command in commands]
    scripts = [find_script(shlex.split(command)) or command.split()[0] for command in commands]
    stems = {script: Path(script).stem for script in scripts}
    labels = []
    for script, mine in zip(scripts, flags, strict=True):
        same = [theirs for theirs, other in zip(flags, scripts, strict=True) if other == script]
        differing = [flag for flag in mine if not all(flag in theirs for theirs in same)]
        is_unique = list(stems.values()).count(stems[script]) == 1
        labels.append(" ".join([stems[script] if is_unique else script, *differing]))
    return labels


def split_flags(command):
    """The flags of a command, each with its values."""
    flags = [""]
    for word in shlex.split(command):
        if word.startswith("--"):
            flags.append(word)
        else:
            flags[-1] += f" {word}"
    return flags
