"""Did my change help? Train two versions of a file on the same seeds until the answer is clear.

    python -m cleanrl_utils.trial my_ppo.py --against cleanrl/ppo.py \
        --env-ids CartPole-v1 Acrobot-v1 --budget 20m

The same command continues an interrupted or undecided trial. What is measured is locked in
trials/<lock>/lock.json, and each call appends a line to trials.tsv. See docs/trial.md.

Exit status: 0 better, 1 worse, 2 no difference that matters, 3 undecided, 4 error.
"""

import ast
import csv
import hashlib
import itertools
import json
import os
import re
import shlex
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tyro
from filelock import FileLock, Timeout
from pydantic import TypeAdapter

from cleanrl_utils import processes
from cleanrl_utils.bands import find_band
from cleanrl_utils.errors import one_line
from cleanrl_utils.events import read_events
from cleanrl_utils.runs import count_episodes, mean_of_last, read_run, require

EXIT_CODES = {"better": 0, "worse": 1, "no difference that matters": 2, "undecided": 3}
ERROR = 4
MIN_SEEDS = 3  # of each environment before a verdict
BETS = {2.0: 0.8, 0.5: 0.2}  # how boldly a bettor bets: its share of the stake
WINDOW = 100  # episodes at the end of a run that its score is the mean of
SCORE = f"mean of the last {WINDOW} training episodes"
UNITS = {"s": 1, "m": 60, "h": 3600}
OWN_FLAGS = "env_id seed num_seeds total_timesteps resume sweep exp_name".split()  # set here
MACHINE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # not the file's doing


@dataclass
class Protocol:
    """What is measured: the content of lock.json. Its hash names the trial's folder."""

    env_ids: tuple[str, ...]
    ranges: dict[str, tuple[float, float]]  # the returns that count as 0 and 1
    total_timesteps: int | None  # None: the files' default
    flags: str
    score: str
    first_seed: int
    seeds_per_program: int
    delta: float
    alpha: float


@dataclass
class Args:
    file: tyro.conf.Positional[Path]  # the changed file
    against: Path  # the file it is compared with
    env_ids: tuple[str, ...] = ()  # environments to train on
    total_timesteps: int | None = None  # environment steps of each run; by default, the files' own
    flags: str = ""  # more flags for both files, as one string
    ranges: tuple[str, ...] = ()  # returns that count as 0 and 1, as in CartPole-v1=0,500
    delta: float = 0.05  # smallest difference of normalized scores that matters
    alpha: float = 0.05  # probability of a wrong verdict, however often the trial looks
    first_seed: int = 1  # the first seed
    seeds_per_program: int = 8  # seeds that train in one program, where both files have --num-seeds
    lock: Path | None = None  # continue the trial of this lock.json; pass none of the flags above
    budget: str = "20m"  # wall-clock time of this call, as in 90s, 20m or 2h
    workers: int = os.cpu_count() or 1  # runs at once
    trials: Path = Path("trials")  # folder of the locks and the runs


# -- the test: pairs of runs in, verdict out -------------------------------------------------------


def log_wealth(differences, centers, side):
    """The logarithm of a bettor's wealth after each pair, for each center: (centers, pairs).

    The bettor bets on the sign of (difference - center): side is 1 or -1. If the differences are
    symmetric about the center, each sign is a fair coin whatever its size, the wealth is a
    martingale that starts at 1, and the probability that it ever reaches w is at most 1 / w.
    """
    shifted = side * (differences - centers[:, None])
    sizes = np.sqrt((shifted**2).cumsum(1) / np.arange(1, len(differences) + 1))
    shifted = np.clip(shifted / np.maximum(sizes, 1e-12), -1, 1)  # large ones get larger bets
    wealth = [
        np.log(share) + np.log1p(np.tanh(bet * shifted)).cumsum(1) for bet, share in BETS.items()
    ]
    return np.logaddexp(*wealth)


def confidence_sequence(differences, delta, alpha, points=801):
    """Lower and upper ends for the center of the differences, after each pair.

    With probability 1 - alpha the center is inside all of these intervals at once. A center is
    refuted as soon as a bettor against it has turned 1 into 2 / alpha.
    """
    span = max(1, 2 * np.abs(differences).max())
    centers = np.sort(np.concatenate([np.linspace(-span, span, points), [0, -delta, delta]]))
    ends = []
    for side in (1, -1):
        wealth = log_wealth(differences, side * centers, side)
        refuted = np.maximum.accumulate(wealth, axis=1) >= np.log(2 / alpha)
        count = np.logical_and.accumulate(refuted, axis=0).sum(0)  # from the far end on
        ends.append(side * np.where(count > 0, centers[count - 1], -np.inf))
    return ends


def judge(differences, delta, alpha, points=801):
    """The verdict on normalized differences (seeds, environments), looking after each seed.

    It is that of the first look that decides, or of the last one. An environment on which the
    mean difference matters and points the other way keeps a trial undecided.
    """
    differences = np.asarray(differences, dtype=float)
    num_seeds, num_envs = differences.shape
    if num_seeds == 0:
        nothing = {"effect": np.nan, "low": -np.inf, "high": np.inf, "effects": [np.nan] * num_envs}
        return nothing | {"verdict": "undecided", "seeds": 0}
    ends = confidence_sequence(differences.ravel(), delta, alpha, points)
    low, high = (end[num_envs - 1 :: num_envs] for end in ends)
    seeds = np.arange(1, num_seeds + 1)
    effects = differences.cumsum(0) / seeds[:, None]
    effect = effects.mean(1)
    verdicts = {
        "no difference that matters": (low >= -delta)
        & (high <= delta)
        & (np.abs(effects).max(1) < delta),
        "better": (low >= 0) & (effect >= delta) & (effects.min(1) > -delta),
        "worse": (high <= 0) & (effect <= -delta) & (effects.max(1) < delta),
    }
    decided = np.any(list(verdicts.values()), axis=0) & (seeds >= MIN_SEEDS)
    look = decided.argmax() if decided.any() else -1
    verdict = next((name for name, holds in verdicts.items() if holds[look]), "undecided")
    return {
        "verdict": verdict if decided[look] else "undecided",
        "effect": float(effect[look]),
        "low": float(low[look]),
        "high": float(high[look]),
        "effects": effects[look].tolist(),
        "seeds": int(seeds[look]),
    }


# -- the protocol ----------------------------------------------------------------------------------


def make_protocol(args):
    """What the flags say, or what --lock says."""
    defaults = {field.name: field.default for field in Args.__dataclass_fields__.values()}
    measured = set(Protocol.__dataclass_fields__) & set(defaults)
    if args.lock:
        given = [name for name in sorted(measured) if getattr(args, name) != defaults[name]]
        require(not given, f"{', '.join(given)} cannot be passed with --lock: they are in it")
        content = args.lock.read_bytes()
        is_named = args.lock.absolute().parent.name == hash_of(content)[:8]
        require(is_named, f"{args.lock} was edited, or is not in the folder of its trial")
        locked = TypeAdapter(Protocol).validate_json(content)
        require(locked.score == SCORE, f"the score of {args.lock} is {locked.score}, not {SCORE}")
        one_seed = not (has_num_seeds(args.file) and has_num_seeds(args.against))
        require(locked.seeds_per_program == 1 or not one_seed, "both files need --num-seeds")
        return locked
    require(args.env_ids, "which environments? pass --env-ids")
    require(len(set(args.env_ids)) == len(args.env_ids), "an environment is named twice")
    require(args.delta > 0, "--delta must be positive")
    require(0 < args.alpha < 1, "--alpha must be between 0 and 1")
    require(args.seeds_per_program > 0, "--seeds-per-program must be positive")
    check_flags(args.flags)
    given = dict(map(parse_range, args.ranges))
    unknown = set(given) - set(args.env_ids)
    require(not unknown, f"--ranges names {', '.join(unknown)}, which --env-ids does not")
    trains_many = has_num_seeds(args.file) and has_num_seeds(args.against)
    return Protocol(
        env_ids=args.env_ids,
        ranges={env_id: given.get(env_id) or find_range(env_id, args) for env_id in args.env_ids},
        total_timesteps=args.total_timesteps,
        flags=args.flags,
        score=SCORE,
        first_seed=args.first_seed,
        seeds_per_program=args.seeds_per_program if trains_many else 1,
        delta=args.delta,
        alpha=args.alpha,
    )


def check_flags(text):
    """Refuse flags that the trial passes itself: one of another value would replace its own."""
    words = [word.partition("=")[0].replace("_", "-") for word in shlex.split(text)]
    own = [flag for name in OWN_FLAGS if (flag := f"--{name.replace('_', '-')}") in words]
    require(not own, f"{', '.join(own)} cannot be in --flags: the trial sets it itself")


def parse_range(text):
    found = re.fullmatch(r"(.+)=([^,]+),([^,]+)", text)
    require(found, f"--ranges {text} is not of the form CartPole-v1=0,500")
    low, high = float(found[2]), float(found[3])
    require(np.isfinite([low, high]).all() and low < high, f"--ranges {text}: 0 must be below 1")
    return found[1], (low, high)


def find_range(env_id, args):
    """The returns of the random policy and of the published runs at their best."""
    band = find_band(args.against.stem, env_id, {})
    how = f"pass --ranges {env_id}=LOW,HIGH, the returns that count as 0 and 1"
    require(band, f"there are no published runs of {args.against.stem} on {env_id}: {how}")
    low, high = band["random"]["mean"], max(band["mean"])
    require(low < high, f"the published runs on {env_id} are no better than random: {how}")
    return low, high


def has_num_seeds(file):
    """Whether a file trains many seeds in one program."""
    tree = ast.parse(file.read_text())
    fields = [node.target.id for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
    return "num_seeds" in fields


def hash_of(content):
    return hashlib.sha256(content).hexdigest()


def lock_protocol(protocol, trials):
    """The trial's folder, in which lock.json is this protocol, and the hash of lock.json."""
    content = json.dumps(asdict(protocol), indent=1, sort_keys=True).encode() + b"\n"
    folder = trials / hash_of(content)[:8]
    path = folder / "lock.json"
    if path.exists():
        require(path.read_bytes() == content, f"{path} was edited after runs were made with it")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder, hash_of(content)


# -- the runs --------------------------------------------------------------------------------------


class Side:
    """One of the two files: a copy of it, its runs and their scores, in a folder of its own.

    Another trial with the same lock finds them there again and does not repeat them.
    """

    def __init__(self, file, trial):
        content = file.read_bytes()
        self.sha256 = hash_of(content)
        self.folder = trial / f"{file.stem}-{self.sha256[:8]}"
        self.folder.mkdir(exist_ok=True)
        self.file = self.folder / file.name
        self.path = [str(file.resolve().parent), os.getcwd(), os.environ.get("PYTHONPATH", "")]
        self.file.write_bytes(content)  # what may be edited meanwhile is the user's
        self.scores = self.folder / "scores.json"
        saved = json.loads(self.scores.read_text()) if self.scores.exists() else []
        self.records = {(r["env_id"], r["seed"]): r for r in saved}  # a score, or why it failed

    def add(self, record):
        """Save the record of a run, a failed one as soon as another has worked on its environment.

        If the first two fail there, the file or the machine has to be repaired first."""
        env_id = record["env_id"]
        self.records[env_id, record["seed"]] = record
        worked = {r["env_id"] for r in self.records.values() if not r["failed"]}
        to_save = [r for r in self.records.values() if r["env_id"] in worked]
        aside = self.scores.with_suffix(".tmp")
        aside.write_text(json.dumps(to_save, indent=1))
        os.replace(aside, self.scores)
        there = [r for r in self.records.values() if r["env_id"] == env_id]
        hopeless = env_id not in worked and len(there) > 1
        require(not hopeless, f"{self.file.name} fails on {env_id}: {record['failed']}")


class Program:
    """One call of a file: an environment, and one seed or several."""

    def __init__(self, side, protocol, env_id, seeds, settings):
        self.side, self.env_id, self.seeds = side, env_id, seeds
        name = re.sub(r"[/\\:]", "-", f"{env_id}__{seeds[0]}")
        self.log = side.folder / f"{name}.log"
        words = [sys.executable, str(side.file.resolve()), "--env-id", env_id]
        words += ["--seed", str(seeds[0]), *shlex.split(protocol.flags)]
        words += ["--num-seeds", str(len(seeds))] if len(seeds) > 1 else []
        if protocol.total_timesteps is not None:
            words += ["--total-timesteps", str(protocol.total_timesteps)]
        if folders := self.run_folders():  # it was interrupted
            words = [*words[:2], "--resume", str(folders[-1].resolve())]
        environment = os.environ | processes.thread_settings() | settings
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, side.path))
        self.started = time.time()
        with self.log.open("ab") as output:
            self.process = processes.start(words, output, cwd=side.folder, env=environment)

    def run_folders(self):
        """The folders that the output names, if they are still there."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        named = dict.fromkeys(re.findall(r"^run folder: (.+?)\r?$", text, re.M))
        folders = [self.side.folder / name for name in named]
        return [folder for folder in folders if (folder / "run.json").exists()]

    def finish(self):
        """Record the score of each seed, or why it failed."""
        processes.kill(self.process)
        code = self.process.returncode
        reason = processes.why(self.log.read_text(errors="replace"), code) if code else None
        require(code - 128 not in MACHINE, f"{self}: {reason}; the same command continues")
        folders = {read_run(folder)["args"]["seed"]: folder for folder in self.run_folders()}
        for seed in self.seeds:
            record = {"env_id": self.env_id, "seed": seed, "score": None, "failed": reason}
            if not reason and seed not in folders:
                record["failed"] = "it printed no run folder of this seed"
            elif not reason:
                record["score"], record["failed"] = read_score(folders[seed])
            record["run_folder"] = folders[seed].name if seed in folders else None
            record["seconds"] = round((time.time() - self.started) / len(self.seeds), 1)
            self.side.add(record)

    def __str__(self):
        seeds = f"seed {self.seeds[0]}" if len(self.seeds) == 1 else f"seeds {self.seeds}"
        return f"{self.side.file.name} on {self.env_id}, {seeds}"


def read_score(folder):
    """The mean of a run's last episodes, and why there is none."""
    scalars, _ = read_events(folder)
    if "charts/episodic_return" not in scalars:
        return None, "no episode ended"
    returns = scalars["charts/episodic_return"][:, 1]
    score = float(mean_of_last(returns, count_episodes(scalars), WINDOW))
    return (score, None) if np.isfinite(score) else (None, f"its score is {score}")


def plan(protocol):
    """(side's number, environment, seeds) of all programs, without end. The sides alternate, so
    that a machine that gets slower or fails hits both."""
    size = protocol.seeds_per_program
    for number in itertools.count():
        first = protocol.first_seed + number * size
        for env_id in protocol.env_ids:
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                yield side, env_id, tuple(range(first, first + size))


def find_differences(protocol, sides):
    """Normalized new minus old score, (seeds, environments), of the seeds that are complete."""
    rows = []
    for seed in itertools.count(protocol.first_seed):
        keys = [(env_id, seed) for env_id in protocol.env_ids]
        if not all(key in side.records for key in keys for side in sides):
            return np.array(rows).reshape(-1, len(protocol.env_ids))
        old, new = ([normalize(side.records[key], protocol) for key in keys] for side in sides)
        rows.append(np.subtract(new, old))


def normalize(record, protocol):
    """0 for the low end of the environment's range, and for a failed run; 1 for the high end."""
    low, high = protocol.ranges[record["env_id"]]
    return 0.0 if record["failed"] else (record["score"] - low) / (high - low)


def run_trial(protocol, sides, workers, deadline):
    """Train pair after pair, look after each, until there is a verdict or no time left."""
    planned, busy = plan(protocol), {}
    told = judge(find_differences(protocol, sides), protocol.delta, protocol.alpha)
    try:
        while told["verdict"] == "undecided" and time.time() < deadline:
            while len(busy) < workers:
                number, env_id, seeds = next(planned)
                side = sides[number]
                if not all((env_id, seed) in side.records for seed in seeds):
                    worker = min(set(range(workers)) - set(busy))
                    gpu = processes.gpu_settings(worker, workers)
                    busy[worker] = Program(side, protocol, env_id, seeds, gpu)
            time.sleep(0.2)
            for worker, program in list(busy.items()):
                if program.process.poll() is not None:
                    program.finish()
                    del busy[worker]
                    now = judge(find_differences(protocol, sides), protocol.delta, protocol.alpha)
                    if now["seeds"] > told["seeds"]:
                        print(describe(now), flush=True)
                    told = now
    finally:
        for program in busy.values():
            processes.ask_to_end(program.process)  # it saves a checkpoint
        for program in busy.values():
            program.process.wait()
    return told


# -- the result ------------------------------------------------------------------------------------


def describe(told):
    seeds = "1 seed" if told["seeds"] == 1 else f"{told['seeds']} seeds"
    return f"{told['effect']:+.3f} [{told['low']:.3f}, {told['high']:.3f}] after {seeds}"


def report(protocol, sides, told):
    """What the verdict rests on: scores of both files on each environment, and failed runs."""
    old, new = sides
    seeds = range(protocol.first_seed, protocol.first_seed + told["seeds"])
    for number, env_id in enumerate(protocol.env_ids):
        means = []
        for side in sides:
            scores = [side.records[env_id, seed]["score"] for seed in seeds]
            scores = [score for score in scores if score is not None]
            means.append(f"{side.file.name} {np.mean(scores):.2f}" if scores else "no score")
        print(f"{env_id}: {means[1]}, {means[0]}, difference {told['effects'][number]:+.3f}")
    for key, side in itertools.product(itertools.product(protocol.env_ids, seeds), sides):
        record = side.records[key]
        if record["failed"]:
            where = f"{side.file.name} on {record['env_id']}, seed {record['seed']}"
            print(f"failed, counts as 0: {where}: {record['failed']}", file=sys.stderr)
    print(f"{told['verdict']}: {new.file.name} - {old.file.name} = {describe(told)}")


def append_line(path, protocol, sides, told, lock_hash, wall_seconds):
    """Add the result to trials.tsv."""
    old, new = sides
    seeds = range(protocol.first_seed, protocol.first_seed + told["seeds"])
    used = [side.records[e, s] for side in sides for e in protocol.env_ids for s in seeds]
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "file": new.file.name,
        "sha256": new.sha256,
        "against": old.file.name,
        "against_sha256": old.sha256,
        "lock": lock_hash,
        "env_ids": " ".join(protocol.env_ids),
        "verdict": told["verdict"],
        "effect": f"{told['effect']:.4f}",
        "low": f"{told['low']:.4f}",
        "high": f"{told['high']:.4f}",
        "seeds": told["seeds"],
        "runs": len(used),
        "failed": sum(record["failed"] is not None for record in used),
        "training_seconds": round(sum(record["seconds"] for record in used)),
        "wall_seconds": round(wall_seconds),
    }
    header = "" if path.exists() else "\t".join(line) + "\n"
    with path.open("a") as file:
        file.write(header + "\t".join(map(str, line.values())) + "\n")


def count_versions(path, lock_hash):
    """How many versions of files were compared with this lock."""
    with path.open() as file:
        lines = csv.DictReader(file, delimiter="\t")
        return len({line["sha256"] for line in lines if line["lock"] == lock_hash})


def parse_budget(text):
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    require(found, f"--budget {text} is not of the form 90s, 20m or 2h")
    return float(found[1]) * UNITS[found[2]]


def trial(args):
    start, budget = time.time(), parse_budget(args.budget)
    require(args.workers > 0, "--workers must be positive")
    for file in (args.file, args.against):
        require(file.is_file(), f"there is no {file}")
    protocol = make_protocol(args)
    if args.lock:
        folder, lock_hash = args.lock.parent, hash_of(args.lock.read_bytes())
    else:
        folder, lock_hash = lock_protocol(protocol, args.trials)
    try:
        with FileLock(folder / "trial.lock", timeout=0):
            sides = [Side(args.against, folder), Side(args.file, folder)]
            require(sides[0].folder != sides[1].folder, "both files have the same name and content")
            print(f"lock: {folder / 'lock.json'}, sha256 {lock_hash[:8]}", flush=True)
            told = run_trial(protocol, sides, args.workers, start + budget)
            report(protocol, sides, told)
            path = args.trials.parent / "trials.tsv"
            append_line(path, protocol, sides, told, lock_hash, time.time() - start)
            versions = count_versions(path, lock_hash)
            if versions > 1:
                print(
                    f"{versions} versions were compared with this lock, each with an error rate "
                    f"of {protocol.alpha}: confirm a winner with another --first-seed"
                )
    except Timeout:
        raise ValueError(f"another trial is running in {folder}") from None
    return EXIT_CODES[told["verdict"]]


def main():
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl+C
    try:
        args = tyro.cli(Args, prog="python -m cleanrl_utils.trial", description=__doc__)
    except SystemExit as error:
        sys.exit(ERROR if error.code else 0)
    try:
        sys.exit(trial(args))
    except KeyboardInterrupt:
        print("interrupted: the same command continues", file=sys.stderr)
    except Exception as error:
        if os.environ.get("CLEANRL_TRACEBACK"):
            raise
        print(f"cannot compare {args.file} with {args.against}: {one_line(error)}", file=sys.stderr)
    sys.exit(ERROR)


if __name__ == "__main__":
    main()
