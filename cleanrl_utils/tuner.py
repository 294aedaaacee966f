"""Find flags with which an algorithm file does well on several environments at once, with Optuna.

    python -m cleanrl_utils.tuner scripts/tune_ppo.py
    python -m cleanrl_utils.tuner scripts/tune_ppo.py --workers 4 --storage postgresql+psycopg://...

Each trial samples flags with params_fn and trains with them on every environment and seed, each run
in a process of its own. The score of a trial is the aggregate of its runs' scores, each normalized
by the range of its environment. The same command resumes the study. See docs/tuner.md.
"""

import contextlib
import json
import math
import os
import runpy
import shlex
import signal
import statistics
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import tyro
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.util.tensor_util import make_ndarray
from tqdm import tqdm

try:
    import optuna
    from optuna.storages import RetryHeartbeatStaleTrialCallback
    from optuna.trial import TrialState
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import DBAPIError
except ImportError as error:
    raise SystemExit(f"the tuner needs the optuna extra of pyproject.toml: {error}") from None

REPORTS = 20  # how often a run tells the pruner its score
HEARTBEAT, GRACE = (
    5,
    30,
)  # seconds between two signs of life of a trial, and without one until it counts as dead
HOPELESS = 3  # a tuner stops when this many trials failed and none did not
POLL = 0.5  # seconds between two looks at the runs
AGGREGATIONS = {"average": statistics.fmean, "median": statistics.median, "max": max, "min": min}
RENAMED = {
    "suggest_loguniform": "suggest_float(name, low, high, log=True)",
    "suggest_uniform": "suggest_float(name, low, high)",
    "suggest_discrete_uniform": "suggest_float(name, low, high, step=q)",
}
WANDB = {
    "group": "WANDB_RUN_GROUP",
    "tags": "WANDB_TAGS",
    "mode": "WANDB_MODE",
}  # beside project and entity, which are flags
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
XLA_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
# reads the process groups that begin (+) and end (-), and kills the rest when the tuner is gone
WATCHDOG = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


def safe(name):
    return name.translate(str.maketrans("/\\:", "---"))


def one_line(error):
    if isinstance(
        error, optuna.exceptions.StorageInternalError
    ):  # which guesses at what its cause tells
        error = error.__cause__ or error
    return (f"{type(error).__name__}: {error}".strip().splitlines() or [""])[0]


def to_words(flags):
    """Flags on a command line: bools as --x or --no-x, lists as several words, None left out."""
    words = []
    for name, value in flags.items():
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list | tuple):
            words += [f"--{name}", *map(str, value)]
        elif str(value).startswith("-") and not isinstance(value, int | float):
            words.append(f"--{name}={value}")  # or it would be read as the next flag
        else:
            words += [f"--{name}", str(value)]
    return words


class Run:
    """One training run: its process, and what it has logged of the metric so far."""

    def __init__(self, env_id, seed, folder, command, metric, window):
        self.env_id, self.seed, self.folder, self.command = env_id, seed, folder, command
        self.metric, self.window = metric, window
        self.state, self.process, self.readers, self.values, self.total_timesteps = (
            "queued",
            None,
            {},
            [],
            None,
        )
        self.curve = []  # the score after each twentieth of the run so far; the last is the run's

    def start(self, environment, watchdog):
        self.folder.mkdir(parents=True)  # a new one, so that all event files in it are this run's
        with open(self.folder / "output.log", "wb") as output:
            self.process = subprocess.Popen(
                self.command,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its own group, with the environments' processes
                preexec_fn=lambda: os.write(
                    watchdog.fileno(), b"+%d\n" % os.getpid()
                ),  # known before anything can go wrong
            )
        self.state = "running"

    def end(self, watchdog):
        """End the process, if it is not at its end, and whatever it has started."""
        with contextlib.suppress(
            ProcessLookupError, PermissionError
        ):  # nobody is left (on macOS: nobody but the dead)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        watchdog.write(b"-%d\n" % self.process.pid)
        self.state = "ended"

    def read(self):
        """Read what was logged since the last call, up to a half-written record."""
        for path in sorted(self.folder.glob("runs/*/*tfevents*")):
            if path not in self.readers:
                self.readers[path] = LegacyEventFileLoader(str(path))
            for event in self.readers[path].Load():
                for value in event.summary.value:
                    if value.tag == self.metric:
                        number = (
                            value.simple_value
                            if value.HasField("simple_value")
                            else make_ndarray(value.tensor).item()
                        )
                        self.add(event.step, float(number))
        return next(
            (f"its {self.metric} is {value}" for value in self.values if not math.isfinite(value)),
            None,
        )

    def add(self, step, value):
        self.total_timesteps = self.total_timesteps or self.read_total_timesteps()
        while (
            len(self.curve) < REPORTS - 1
            and step * REPORTS > (len(self.curve) + 1) * self.total_timesteps
        ):
            self.curve.append(self.score())
        self.values.append(value)

    def read_total_timesteps(self):
        try:
            (path,) = self.folder.glob("runs/*/run.json")
            return int(json.loads(path.read_text())["args"]["total_timesteps"])
        except Exception:
            return math.inf  # not one of our files: it has one score, at its end

    def score(self):
        return statistics.fmean(self.values[-self.window :]) if self.values else None

    def finish(self):
        """Read to the end; return why the run has no score, if it has none."""
        wrong = self.read()
        if self.process.returncode < 0:
            return f"ended by {signal.Signals(-self.process.returncode).name}"
        if self.process.returncode:
            output = (
                (self.folder / "output.log")
                .read_bytes()[-10_000:]
                .decode(errors="replace")
                .split("\n")
            )
            said = [words for line in output if (words := line.split("\r")[-1].strip())]
            return said[-1] if said else f"exit code {self.process.returncode}"
        if wrong or not self.values:
            return wrong or f"it logged no {self.metric}"
        self.curve += [self.score()] * (REPORTS - len(self.curve))
        self.state = "done"
        return None


@dataclass
class TrialRuns:
    """A trial at work: its runs, seed by seed, and how many of its reports are made."""

    trial: optuna.Trial
    runs: list
    reported: int = 0


class Tuner:
    def __init__(
        self,
        script,
        metric,
        target_scores,
        params_fn,
        direction="maximize",
        aggregation_type="average",
        metric_last_n_average_window=50,
        sampler=None,
        pruner=None,
        storage="sqlite:///cleanrl_hpopt.db",
        study_name="",
        wandb_kwargs=None,
        workers=1,
    ):
        """target_scores: {env_id: [return that counts as 0, return that counts as 1]}, or
        {env_id: None} for the return itself, with one environment. params_fn(trial) returns the
        flags of a trial. sampler, pruner and storage are Optuna's."""
        self.script, self.metric, self.target_scores = (
            Path(script).absolute(),
            metric,
            target_scores,
        )
        self.params_fn, self.sampler, self.storage, self.workers = (
            params_fn,
            sampler,
            storage,
            workers,
        )
        self.direction, self.aggregation_type, self.window = (
            direction,
            aggregation_type,
            metric_last_n_average_window,
        )
        self.wandb = dict(wandb_kwargs or {})
        self.pruner = pruner or optuna.pruners.MedianPruner(
            n_startup_trials=5, n_warmup_steps=REPORTS // 2
        )
        self.study_name = study_name or "__".join([self.script.stem, *target_scores])
        self.study, self.active, self.told = None, [], set()

    def check(self, num_trials, num_seeds):
        ranges = self.target_scores.values()
        for rule, holds in {
            f"there is no {self.script}": self.script.is_file(),
            "target_scores must name an environment": len(self.target_scores) > 0,
            "target_scores must be None or [low, high] with low below high": all(
                r is None or (len(r) == 2 and -math.inf < r[0] < r[1] < math.inf) for r in ranges
            ),
            "with several environments each needs its range in target_scores": len(ranges) == 1
            or None not in ranges,
            "direction must be maximize or minimize": self.direction in ("maximize", "minimize"),
            f"aggregation_type must be one of {', '.join(AGGREGATIONS)}": self.aggregation_type
            in AGGREGATIONS,
            "num_trials, num_seeds, workers and metric_last_n_average_window "
            "must be whole numbers from 1 on": all(
                isinstance(n, int) and n >= 1
                for n in (num_trials, num_seeds, self.workers, self.window)
            ),
            f"wandb_kwargs can have project, entity, {', '.join(WANDB)}": set(self.wandb)
            <= {"project", "entity", *WANDB},
            "the tuner needs process groups, which Windows does not have": os.name == "posix",
        }.items():
            if not holds:
                raise SystemExit(rule)

    def load_or_create(self, url):
        if isinstance(self.storage, str):
            self.storage = optuna.storages.RDBStorage(
                url,
                engine_kwargs={"connect_args": {"timeout": 60}}
                if url.startswith("sqlite")
                else {"pool_pre_ping": True},
                heartbeat_interval=HEARTBEAT,
                grace_period=GRACE,
                heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(max_retry=3),
            )
        names = dict(study_name=self.study_name, storage=self.storage, load_if_exists=True)
        return optuna.create_study(
            **names, sampler=self.sampler, pruner=self.pruner, direction=self.direction
        )

    def open_study(self, num_seeds):
        """Create or resume the study of this name; refuse other settings, whose scores differ."""
        url = (
            self.storage
            if isinstance(self.storage, str)
            else str(getattr(self.storage, "url", "memory"))
        )
        name, place, folder, tries = (
            self.study_name,
            "its storage" if ":" in url else url,
            Path(),
            5,
        )
        while tries:
            try:
                if ":" in url:
                    place = make_url(url).render_as_string(hide_password=True)
                if url.startswith("sqlite:///"):
                    folder = Path(make_url(url).database).parent
                study = self.load_or_create(url)
                break
            except Exception as error:
                tries -= 1
                if tries == 0 or not isinstance(error, DBAPIError):
                    raise SystemExit(
                        f"cannot open study {name} in {place}: {one_line(error)}"
                    ) from None
                # two tuners may be creating the tables of a new database at the same time
                time.sleep(0.5)
        settings = {
            "script": self.script.name,
            "metric": self.metric,
            "window": self.window,
            "num_seeds": num_seeds,
        }
        settings |= {
            "target_scores": {env_id: r and list(r) for env_id, r in self.target_scores.items()}
        }
        settings |= {"direction": self.direction, "aggregation_type": self.aggregation_type}
        for setting, was in study.user_attrs.get("settings", settings).items():
            if settings[setting] != was:
                raise SystemExit(
                    f"study {name} in {place} has {setting} {was}, not {settings[setting]}: "
                    "give this one another study_name"
                )
        study.set_user_attr("settings", settings)
        self.folder = (folder / "tuning" / safe(name)).absolute()
        if study.get_trials(deepcopy=False):
            study.sampler.reseed_rng()  # or a seeded sampler would repeat the first trials
        return study, place

    def tune(self, num_trials, num_seeds):
        """Run trials until the study has num_trials finished ones, here or on other machines."""
        self.check(num_trials, num_seeds)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            warnings.filterwarnings(
                "ignore", message="Heartbeat of storage"
            )  # the loop below records it
            self.study, place = self.open_study(num_seeds)
            self.study.stop = lambda: setattr(
                self, "exhausted", True
            )  # what samplers of a grid call at its end
            self.bar = tqdm(total=num_trials, unit="trial", disable=None)
            self.say(
                f"study {self.study_name} in {place}: "
                f"{self.count()} of {num_trials} trials are finished"
            )
            dog = [sys.executable, "-S", "-c", WATCHDOG]
            dog = subprocess.Popen(dog, stdin=subprocess.PIPE, start_new_session=True, bufsize=0)
            self.watchdog = dog.stdin
            try:
                self.loop(num_trials, num_seeds)
            finally:
                self.abandon()
                self.watchdog.close()
                dog.wait()
                self.bar.close()
                self.plot()
        self.conclude()
        return self.study

    def loop(self, num_trials, num_seeds):
        self.outcomes, self.exhausted, beat, waiting = [], False, 0.0, False
        while (finished := self.count()) < num_trials:
            self.bar.n = finished
            self.bar.set_postfix_str(self.progress())
            if time.monotonic() - beat > HEARTBEAT:
                beat = time.monotonic()
                self.look_after_trials()
            while len(self.runs("running")) < self.workers:
                if queue := self.runs("queued"):
                    queue[0].start(self.environment, self.watchdog)
                elif self.count(TrialState.RUNNING) < num_trials and not self.exhausted:
                    self.active.append(self.new_trial(num_seeds))
                else:
                    break
            if self.exhausted and not self.active:
                return self.say("the sampler has nothing left to try")
            if not self.active and not waiting:
                waiting = True
                self.say("the last trials are those of other tuners: waiting for them")
            for work in list(self.active):
                self.follow(work)
            if self.outcomes.count("failed") >= HOPELESS and set(self.outcomes) == {"failed"}:
                raise SystemExit(
                    f"the first {len(self.outcomes)} trials failed, "
                    f"the last one because: {self.reason}"
                )
            time.sleep(POLL if self.active else HEARTBEAT / 5)
        self.bar.n = finished

    def runs(self, state):
        return [run for work in self.active for run in work.runs if run.state == state]

    def count(self, *unfinished):
        """The trials that count: complete, pruned, or failed by themselves, not with the tuner."""
        states = (TrialState.COMPLETE, TrialState.PRUNED, *unfinished)
        trials = self.study.get_trials(deepcopy=False)
        return sum(
            t.state in states or (t.state == TrialState.FAIL and "failed" in t.user_attrs)
            for t in trials
        )

    def look_after_trials(self):
        """Send heartbeats for our trials; those without one are marked as failed and run again."""
        if getattr(self.storage, "heartbeat_interval", None) is not None:
            for work in self.active:
                self.storage.record_heartbeat(work.trial._trial_id)
            optuna.storages.fail_stale_trials(self.study)
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            age = time.time() - trial.datetime_start.timestamp()
            if (
                "flags" not in trial.user_attrs and age > 2 * GRACE
            ):  # died before its first sign of life
                self.study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    def new_trial(self, num_seeds):
        trial = self.study.ask()
        try:
            if getattr(self.storage, "heartbeat_interval", None) is not None:
                self.storage.record_heartbeat(trial._trial_id)
            flags = self.sample(trial)
            known = (
                trial.user_attrs
                if trial.user_attrs.get("flags") == json.loads(json.dumps(flags))
                else {}
            )
            folder, again = self.folder / f"trial-{trial.number}", 1
            while folder.exists():  # left by a study of this name that is gone
                folder, again = self.folder / f"trial-{trial.number}-{again}", again + 1
            trial.set_user_attr("flags", flags)
            trial.set_user_attr("folder", str(folder))
        except BaseException:
            self.study.tell(trial, state=TrialState.FAIL)
            raise
        runs = []
        for seed in range(1, num_seeds + 1):
            for env_id in self.target_scores:
                command = [
                    sys.executable,
                    str(self.script),
                    "--env-id",
                    env_id,
                    "--seed",
                    str(seed),
                    *to_words(flags),
                ]
                place = folder / f"{safe(env_id)}__{seed}"
                run = Run(env_id, seed, place, command + self.track(), self.metric, self.window)
                if curve := known.get(f"{env_id} seed {seed}"):  # finished before the trial was cut
                    run.curve, run.state = curve, "done"
                runs.append(run)
        return TrialRuns(trial, runs)

    def sample(self, trial):
        """What params_fn returns, checked."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                flags = {
                    str(name).lstrip("-").replace("_", "-"): value
                    for name, value in self.params_fn(trial).items()
                }
                json.dumps(flags)
            except Exception as error:
                hint = next(
                    (
                        f": it is now {new}"
                        for old, new in RENAMED.items()
                        if f"'{old}'" in str(error)
                    ),
                    "",
                )
                raise SystemExit(f"params_fn failed: {one_line(error)}{hint}") from None
        for warning in caught:
            for old, new in RENAMED.items():
                if str(warning.message).startswith(old):
                    self.say_once(f"hint: {old} in params_fn will leave Optuna: write trial.{new}")
        if taken := {"env-id", "seed"} & set(flags):
            raise SystemExit(
                f"params_fn must not set {' and '.join(sorted(taken))}: the tuner does"
            )
        for name in trial.params:
            if name.lstrip("-").replace("_", "-") not in flags:
                self.say_once(
                    f"note: {name} is sampled, but no flag that params_fn returns has this name"
                )
        was = self.study.user_attrs.get("total-timesteps", flags.get("total-timesteps"))
        if "total-timesteps" in flags and not {"total-timesteps", "total_timesteps"} & set(
            trial.params
        ):
            if was != flags["total-timesteps"]:
                raise SystemExit(
                    f"study {self.study_name} has total-timesteps {was}: "
                    "give this one another study_name"
                )
            self.study.set_user_attr("total-timesteps", was)
        return flags

    def track(self):
        """The flags that log the runs to Weights & Biases, if that was asked for."""
        names = {
            "track": True,
            "wandb-project-name": self.wandb.get("project"),
            "wandb-entity": self.wandb.get("entity"),
        }
        return to_words(names) if self.wandb else []

    @property
    def environment(self):
        paths = [
            str(Path(path).absolute())
            for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
            if path
        ]
        variables = os.environ | ONE_THREAD | {"PYTHONPATH": os.pathsep.join(paths)}
        variables.setdefault("XLA_FLAGS", XLA_ONE_THREAD)
        if self.wandb:
            told = {"group": self.study_name} | self.wandb
            told["tags"] = ",".join(
                [told["tags"]] if isinstance(told.get("tags"), str) else told.get("tags", [])
            )
            variables |= {
                variable: str(told[key]) for key, variable in WANDB.items() if told.get(key)
            }
        return variables

    def follow(self, work):
        """Read what the trial's runs have logged, report it, and end the trial when it is due."""
        for run in [run for run in work.runs if run.state == "running"]:
            if ended := run.process.poll() is not None:
                run.end(self.watchdog)
            if why := run.finish() if ended else run.read():
                self.reason = (
                    f"{run.env_id} seed {run.seed}: {why}, see {self.short(run.folder)}/output.log"
                )
                return self.close(work, TrialState.FAIL)
            if ended:
                work.trial.set_user_attr(f"{run.env_id} seed {run.seed}", run.curve)
        try:
            self.report(work)
        except optuna.TrialPruned:
            self.close(work, TrialState.PRUNED)
        except optuna.exceptions.UpdateFinishedTrialError:
            self.say(
                f"trial {work.trial.number} was given up by another tuner, "
                "since it showed no sign of life"
            )
            self.stop(work)
        else:
            if all(run.state == "done" for run in work.runs):
                self.close(work, TrialState.COMPLETE)

    def report(self, work):
        """Report k + 1 of seed s aggregates the scores of all earlier seeds and of seed s after
        k + 1 twentieths of its steps, for any number of workers: reports of trials compare."""
        while work.reported < len(work.runs) // len(self.target_scores) * REPORTS:
            s, k = divmod(work.reported, REPORTS)
            scores = []
            for run in work.runs[: (s + 1) * len(self.target_scores)]:
                at = k if run.seed == s + 1 else REPORTS - 1
                if len(run.curve) <= at:
                    return
                scores.append(self.normalize(run.env_id, run.curve[at]))
            work.reported += 1
            if None in scores:
                continue  # an environment in which no episode has ended yet
            work.trial.report(self.aggregate(scores), work.reported)
            if not all(run.state == "done" for run in work.runs) and work.trial.should_prune():
                raise optuna.TrialPruned

    def normalize(self, env_id, score):
        low, high = self.target_scores[env_id] or (0, 1)
        return None if score is None else (score - low) / (high - low)

    def aggregate(self, scores):
        return AGGREGATIONS[self.aggregation_type](scores)

    def close(self, work, state):
        """Stop what still runs, then tell the study how the trial ended."""
        self.stop(work)
        number, value, best = work.trial.number, None, ""
        if state == TrialState.COMPLETE:
            value = self.aggregate([self.normalize(run.env_id, run.curve[-1]) for run in work.runs])
            said = f"{value:.4f}"
        elif state == TrialState.PRUNED:
            reports = len(work.runs) // len(self.target_scores) * REPORTS
            said = f"pruned after {work.reported} of {reports} reports"
        else:
            said = f"failed: {self.reason}"
            work.trial.set_user_attr("failed", self.reason)
        self.study.tell(work.trial, value, state, skip_if_finished=True)
        if value is not None and self.study.best_trial.number == number:
            best = ", the best so far"
        self.outcomes.append("failed" if state == TrialState.FAIL else "finished")
        sampled = " ".join(
            f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}"
            for k, v in work.trial.params.items()
        )
        self.say(f"trial {number}: {said}{best} ({sampled})")

    def stop(self, work):
        for run in work.runs:
            if run.state == "running":
                run.end(self.watchdog)
        self.active.remove(work)

    def abandon(self):
        """The tuner ends before its trials: they are put back, with the runs that are finished."""
        for work in list(self.active):
            self.stop(work)
            try:
                trial = self.study.tell(work.trial, state=TrialState.FAIL, skip_if_finished=True)
                if trial.state == TrialState.FAIL:
                    RetryHeartbeatStaleTrialCallback()(self.study, trial)
            except (
                Exception
            ) as error:  # without its signs of life the trial will be run again all the same
                self.say(f"trial {work.trial.number} could not be put back: {one_line(error)}")

    def progress(self):
        runs = [run for work in self.active for run in work.runs]
        done = sum(len(run.curve) for run in runs) / max(1, len(runs) * REPORTS)
        return (
            f"trial {', '.join(str(work.trial.number) for work in self.active)}: {done:.0%}"
            if runs
            else ""
        )

    def plot(self):
        """The history of the study, and which flags mattered, as pictures in its folder."""
        completed = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if len(completed) < 2:
            return
        try:
            import matplotlib.pyplot as plt
            from optuna.visualization import matplotlib as plots
        except ImportError as error:
            return self.say(f"there are no plots without the optuna extra: {error}")
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, draw in {
            "history": lambda: plots.plot_optimization_history(self.study, target_name="score"),
            "importance": lambda: plots.plot_param_importances(
                self.study, evaluator=evaluator, target_name="score"
            ),
        }.items():
            try:
                with warnings.catch_warnings(
                    action="ignore"
                ):  # about few trials, which the picture shows too
                    draw().figure.savefig(self.folder / f"{name}.png", dpi=100, bbox_inches="tight")
                self.say(f"plot: {self.short(self.folder)}/{name}.png")
            except Exception as error:  # such as no flag that differs
                self.say(f"there is no {name} plot: {one_line(error)}")
            finally:
                plt.close("all")

    def conclude(self):
        if not self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            raise SystemExit(f"study {self.study_name} has no trial with a score")
        best = self.study.best_trial
        print(f"best trial {best.number} of {self.count()}: {best.value:.4f}")
        for env_id in self.target_scores:
            scores = [
                curve[-1]
                for name, curve in best.user_attrs.items()
                if name.startswith(f"{env_id} seed ")
            ]
            print(
                f"{env_id}: {self.metric} {statistics.fmean(scores):.2f} over {len(scores)} seeds"
            )
            words = [
                "python",
                self.short(self.script),
                "--env-id",
                env_id,
                *to_words(best.user_attrs["flags"]),
            ]
            print(" ", shlex.join(words))

    def short(self, path):
        return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else str(path)

    def say(self, line):
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()

    def say_once(self, line):
        if line not in self.told:
            self.told.add(line)
            self.say(line)


@dataclass
class Args:
    config: tyro.conf.Positional[
        Path
    ]  # Python file that makes a Tuner called tuner, and may set num_trials and num_seeds
    num_trials: int | None = None  # finished trials that the study is to have, if not the config's
    num_seeds: int | None = None  # seeds of each environment in a trial, if not the config's
    workers: int | None = None  # runs at once, if not the config's
    storage: str | None = None  # database of the study, if not the config's
    study_name: str | None = None  # name of the study, if not the config's


def main():
    args = tyro.cli(Args)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl+C
    if not args.config.is_file():
        raise SystemExit(f"there is no {args.config}")
    try:
        names = runpy.run_path(str(args.config))
    except Exception as error:
        raise SystemExit(f"{args.config}: {one_line(error)}") from None
    tuner = names.get("tuner")
    counts = {name: getattr(args, name) or names.get(name) for name in ("num_trials", "num_seeds")}
    if not hasattr(tuner, "tune"):
        raise SystemExit(f"{args.config} must make a Tuner called tuner")
    if None in counts.values():
        raise SystemExit(
            f"{args.config} sets no num_trials and num_seeds: give --num-trials and --num-seeds"
        )
    for name in ("workers", "storage", "study_name"):
        if getattr(args, name) is not None:
            setattr(tuner, name, getattr(args, name))
    try:
        tuner.tune(**counts)
    except KeyboardInterrupt:
        raise SystemExit("stopped: the same command goes on where the study was") from None
    except (OSError, DBAPIError, optuna.exceptions.OptunaError) as error:
        raise SystemExit(
            f"the study stopped, and goes on with the same command: {one_line(error)}"
        ) from None


if __name__ == "__main__":
    main()
