"""The settings of a study, as a Python file or notebook gives them, and the order of its events."""

import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import optuna

from cleanrl_utils.tuner import results
from cleanrl_utils.tuner import study as shared
from cleanrl_utils.tuner.scheduler import WANDB, Scheduler, say
from cleanrl_utils.tuner.trials import AGGREGATIONS, REPORTS

RESUME = "the same command resumes the study"


@dataclass
class Tuner:
    script: str  # algorithm file: it takes --env-id and --seed, and logs below runs/
    metric: str  # logged metric to optimize
    target_scores: dict  # {env_id: [value that counts as 0, as 1]}, or None for the value itself
    params_fn: Callable  # from a trial of Optuna to its flags
    direction: str = "maximize"  # or minimize
    aggregation_type: str = "average"  # of the scores of all runs; or median, max, min
    metric_last_n_average_window: int = 50  # last values of the metric whose mean is the score
    sampler: optuna.samplers.BaseSampler | None = None
    pruner: optuna.pruners.BasePruner | None = None
    storage: str | optuna.storages.BaseStorage = "sqlite:///cleanrl_hpopt.db"
    study_name: str = ""
    wandb_kwargs: dict | None = None  # project, entity, group, tags, mode
    workers: int = 1  # runs at once

    def __post_init__(self):
        self.script = Path(self.script).absolute()
        self.study_name = self.study_name or "__".join([self.script.stem, *self.target_scores])
        if self.pruner is None:
            half_a_run = REPORTS // 2
            self.pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=half_a_run)

    def tune(self, num_trials, num_seeds):
        """Run trials until the study has num_trials finished ones, here or on other machines."""
        check(self, num_trials, num_seeds)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            warnings.filterwarnings("ignore", message="Heartbeat of storage")  # we send it
            try:
                return self.tune_until_interrupted(num_trials, num_seeds)
            except KeyboardInterrupt:
                raise SystemExit(f"stopped: {RESUME}") from None

    def tune_until_interrupted(self, num_trials, num_seeds):
        study = shared.open_study(self, self.settings(num_seeds))
        folder = shared.folder_of(self.storage, self.study_name)
        finished, place = shared.count_finished(study), shared.place_of(self.storage)
        say(f"study {self.study_name} in {place}: {finished} of {num_trials} trials are finished")
        scheduler = Scheduler(self, study, folder, num_trials, num_seeds)
        with shared.explain_database(f"continue study {self.study_name} ({RESUME})"):
            try:
                scheduler.run()
            finally:
                if folder.is_dir():
                    results.write(scheduler.study, folder)
            results.print_best(scheduler.study, self)
        return scheduler.study

    def settings(self, num_seeds):
        """What must be the same in all trials of a study, or their scores do not compare."""
        ranges = {
            env_id: low_high and list(low_high) for env_id, low_high in self.target_scores.items()
        }
        return {
            "script": self.script.name,
            "metric": self.metric,
            "window": self.metric_last_n_average_window,
            "num_seeds": num_seeds,
            "target_scores": ranges,
            "direction": self.direction,
            "aggregation_type": self.aggregation_type,
        }


def is_range(low_high):
    """Whether this is a pair of numbers, the first below the second."""
    if not isinstance(low_high, list | tuple) or len(low_high) != 2:
        return False
    are_numbers = all(isinstance(x, int | float) for x in low_high)
    return are_numbers and -math.inf < low_high[0] < low_high[1] < math.inf


def check(tuner, num_trials, num_seeds):
    """Refuse bad settings before anything is written."""

    def require(holds, rule):
        if not holds:
            raise SystemExit(rule)

    require(isinstance(tuner.target_scores, dict), "target_scores must be a dictionary")
    ranges = tuner.target_scores.values()
    require(os.name == "posix", "the tuner needs process groups, which Windows does not have")
    require(tuner.script.is_file(), f"there is no {tuner.script}")
    require(ranges, "target_scores must name an environment")
    for low_high in ranges:
        rule = "target_scores must be None or [low, high] with low below high"
        require(low_high is None or is_range(low_high), rule)
    rule = "with several environments each needs its range in target_scores"
    require(len(ranges) == 1 or None not in ranges, rule)
    require(tuner.direction in ("maximize", "minimize"), "direction must be maximize or minimize")
    rule = f"aggregation_type must be one of {', '.join(AGGREGATIONS)}"
    require(tuner.aggregation_type in AGGREGATIONS, rule)
    counts = dict(num_trials=num_trials, num_seeds=num_seeds, workers=tuner.workers)
    counts["metric_last_n_average_window"] = tuner.metric_last_n_average_window
    for name, count in counts.items():
        require(isinstance(count, int) and count >= 1, f"{name} must be a whole number from 1 on")
    known = ("project", "entity", *WANDB)
    require(
        set(tuner.wandb_kwargs or {}) <= set(known), f"wandb_kwargs can have {', '.join(known)}"
    )
