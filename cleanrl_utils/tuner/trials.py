"""A running trial: one process for each environment and seed, their scores, and its reports."""

import contextlib
import difflib
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen

import numpy as np
import optuna

from cleanrl_utils import processes, runs
from cleanrl_utils.events import read_events

REPORTS = 20  # how many times a run reports its score to the pruner
GROWTH = 1.02  # the events of a run are read again when their files have grown by this factor
AGGREGATIONS = {"average": statistics.fmean, "median": statistics.median, "max": max, "min": min}
LOG_END = 10_000  # bytes of an output that the reason of a failure is looked for in


@dataclass
class Run:
    env_id: str
    seed: int
    folder: Path
    command: list
    state: str = "queued"  # running, done
    curve: list = field(default_factory=list)  # the score after each twentieth of the steps so far
    process: Popen | None = None
    worker: int | None = None
    size: int = 0  # of the event files when they were last read

    @property
    def name(self):
        return f"{self.env_id} seed {self.seed}"

    @property
    def log(self):
        return self.folder / "output.log"

    def start(self, worker, environment):
        self.folder.mkdir(parents=True)  # a new one, so that all event files in it are this run's
        self.worker = worker
        with open(self.log, "wb") as output:
            self.process = processes.start(self.command, output, self.folder, environment)
        self.state = "running"

    def stop(self):
        """End the process and whatever it has started."""
        processes.kill(self.process)
        self.state = "stopped"

    def follow(self, metric, window):
        """Read what has been logged; return why the run has no score, if it will have none."""
        code = self.process.poll()  # before it is read, so that nothing is missed
        if code is None and not self.has_grown():
            return None
        if code is not None:
            self.stop()
        if code:
            output = self.log.read_bytes()[-LOG_END:].decode(errors="replace")
            return processes.why(output, code, self.command[1])
        scalars, total_timesteps = read_run(self.folder)
        if metric not in scalars:
            return None if code is None else why_not_logged(metric, scalars, total_timesteps)
        steps, values, _ = scalars[metric].T
        if not np.isfinite(values).all():
            return f"its {metric} is {values[~np.isfinite(values)][0]}"
        self.curve = score_curve(steps, values, total_timesteps, window)
        if code == 0:
            self.curve += [mean_of_last(values, window)] * (REPORTS - len(self.curve))
            self.state = "done"
        return None

    def has_grown(self):
        size = sum(path.stat().st_size for path in self.folder.glob("runs/*/*tfevents*"))
        if size <= self.size * GROWTH:
            return False
        self.size = size
        return True


def read_run(folder):
    """What the run in a folder has logged, and its number of steps, infinite if that is unknown."""
    scalars, total_timesteps = {}, math.inf
    with contextlib.suppress(ValueError, IndexError):  # there is no run folder yet
        run_folder = runs.find_runs(folder / "runs")[0]
        scalars, _ = read_events(run_folder, cache=False)
        with contextlib.suppress(Exception):  # not one of our files: it has one score, at its end
            total_timesteps = int(runs.read_run(run_folder)["args"]["total_timesteps"])
    return scalars, total_timesteps


def score_curve(steps, values, total_timesteps, window):
    """The score after each twentieth of the steps that is over; the last is known at the end."""
    curve = []
    for k in range(1, REPORTS):
        beyond = steps * REPORTS > k * total_timesteps
        if not beyond.any():
            break
        curve.append(mean_of_last(values[: beyond.argmax()], window))
    return curve


def mean_of_last(values, window):
    return float(values[-window:].mean()) if len(values) else None


def why_not_logged(metric, scalars, total_timesteps):
    if similar := difflib.get_close_matches(metric, scalars, n=1, cutoff=0.8):
        return f"it logged no {metric}, but {similar[0]}"
    steps = "" if total_timesteps == math.inf else f" in {total_timesteps:,} steps"
    return f"it logged no {metric}{steps}"


@dataclass
class Trial:
    optuna: optuna.Trial
    runs: list  # seed by seed
    target_scores: dict
    aggregation_type: str
    num_reported: int = 0

    @property
    def number(self):
        return self.optuna.number

    @property
    def num_reports(self):
        return max(run.seed for run in self.runs) * REPORTS

    @property
    def is_done(self):
        return all(run.state == "done" for run in self.runs)

    def stop(self):
        for run in self.runs:
            if run.state == "running":
                run.stop()

    def score(self, means):
        """The score of some runs, from the mean of the metric that each of them has."""
        scores = []
        for run, mean in means:
            low, high = self.target_scores[run.env_id] or (0, 1)
            scores.append((mean - low) / (high - low))
        return AGGREGATIONS[self.aggregation_type](scores)

    def final_score(self):
        return self.score([(run, run.curve[-1]) for run in self.runs])

    def report(self):
        """Report new scores to the pruner; return whether to prune the trial.

        Report k + 1 of seed s is the score of all earlier seeds, and of seed s after k + 1
        twentieths of its steps. The number of workers does not matter: reports of trials compare.
        """
        while self.num_reported < self.num_reports:
            earlier_seeds, k = divmod(self.num_reported, REPORTS)
            means = []
            for run in self.runs:
                if run.seed > earlier_seeds + 1:
                    continue
                position = k if run.seed == earlier_seeds + 1 else REPORTS - 1
                if len(run.curve) <= position:
                    return False
                means.append((run, run.curve[position]))
            self.num_reported += 1
            if any(mean is None for _, mean in means):
                continue  # an environment in which no episode has ended yet
            self.optuna.report(self.score(means), self.num_reported)
            if not self.is_done and self.optuna.should_prune():
                return True
        return False
