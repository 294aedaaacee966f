"""Keep the workers busy: begin trials, start and follow their runs, tell the study how they end."""

import json
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import optuna
from optuna.trial import TrialState
from tqdm import tqdm

from cleanrl_utils import processes
from cleanrl_utils.tuner import study as shared
from cleanrl_utils.tuner.flags import OtherChoices, sample_flags
from cleanrl_utils.tuner.trials import REPORTS, Run, Trial

HOPELESS = 3  # a tuner stops when this many trials failed and none did not
POLL = 0.5  # seconds between two looks at the runs
WANDB = {  # what runs are told by a variable; project and entity are flags
    "group": "WANDB_RUN_GROUP",
    "tags": "WANDB_TAGS",
    "mode": "WANDB_MODE",
}


def say(line):
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()


def short(path):
    """A path as a user in this folder would write it."""
    return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else str(path)


@contextmanager
def collected_requests():
    """Collect Ctrl+C and SIGTERM: in the middle of a transaction they would lock the database."""
    if threading.current_thread() is not threading.main_thread():  # it gets none
        yield []
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield processes.collect_requests()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Scheduler:
    def __init__(self, tuner, study, folder, num_trials, num_seeds):
        self.tuner = tuner
        self.folder = folder
        self.num_trials = num_trials
        self.num_seeds = num_seeds
        self.active = []  # trials at work
        self.num_ended = 0  # trials that ended here
        self.failures = []  # why trials failed here
        self.said = set()  # what is said only once
        self.lock = None  # held from the first trial on
        self.last_beat = -shared.HEARTBEAT
        self.bar = tqdm(total=num_trials, unit="trial", disable=None)
        self.use(study)

    def use(self, study):
        self.study = study
        self.is_exhausted = False
        study.stop = self.on_exhausted  # which a sampler calls at the end of a grid

    def on_exhausted(self):
        self.is_exhausted = True

    # -- the loop ----------------------------------------------------------------------------------

    def run(self):
        with collected_requests() as requests:
            try:
                self.loop(requests)
            finally:
                self.stop()

    def loop(self, requests):
        while (finished := shared.count_finished(self.study)) < self.num_trials:
            self.bar.n = finished
            self.bar.set_postfix_str(self.progress())
            self.look_after_trials()
            self.start_runs()
            if not self.active and self.is_exhausted:
                return say("the sampler has nothing left to try")
            if not self.active:
                self.say_who_is_waited_for()
            for trial in list(self.active):
                self.follow(trial)
            if len(self.failures) == self.num_ended >= min(HOPELESS, self.num_trials):
                number = f"{self.num_ended} trials" if self.num_ended > 1 else "trial"
                raise SystemExit(f"the first {number} failed, because: {self.failures[-1]}")
            time.sleep(POLL)
            if requests:
                raise KeyboardInterrupt
        self.bar.n = finished

    def progress(self):
        runs = self.all_runs()
        done = sum(len(run.curve) for run in runs) / max(1, len(runs) * REPORTS)
        numbers = ", ".join(str(trial.number) for trial in self.active)
        return f"trial {numbers}: {done:.0%}" if runs else ""

    def look_after_trials(self):
        """Say that we are alive, and look who else is."""
        if time.monotonic() - self.last_beat >= shared.HEARTBEAT:
            self.last_beat = time.monotonic()
            shared.send_heartbeats(self.study, [trial.optuna for trial in self.active])
            shared.put_back_lost_trials(self.study)

    def start_runs(self):
        workers = set(range(self.tuner.workers))
        while free := workers - {run.worker for run in self.all_runs("running")}:
            if queue := self.all_runs("queued"):
                worker = min(free)
                queue[0].start(worker, self.environment(worker))
            elif self.is_exhausted or self.num_begun() >= self.num_trials:
                break
            else:
                self.active.append(self.new_trial())

    def all_runs(self, *states):
        runs = [run for trial in self.active for run in trial.runs]
        return [run for run in runs if not states or run.state in states]

    def num_begun(self):
        return shared.count_finished(self.study) + len(shared.at_work(self.study))

    def say_who_is_waited_for(self):
        for trial in shared.at_work(self.study):
            other = trial.user_attrs["tuner"]
            where = f"process {other['process']} on {other['machine']}"
            self.say_once(f"waiting for trial {trial.number} of another tuner, {where}")

    def say_once(self, line):
        if line not in self.said:
            self.said.add(line)
            say(line)

    # -- a trial begins ----------------------------------------------------------------------------

    def new_trial(self):
        trial = self.study.ask()
        try:
            shared.send_heartbeats(self.study, [trial])
            flags = self.sample(trial)
            before = trial.user_attrs  # what it had finished if it was interrupted
            finished = before if before.get("flags") == json.loads(json.dumps(flags)) else {}
            folder = self.new_folder(trial)
            runs = self.make_runs(folder, flags, finished)
            self.lock = self.lock or shared.sign_in(self.folder)
            trial.set_user_attr("tuner", shared.signature(self.lock))
            trial.set_user_attr("flags", flags)
            trial.set_user_attr("folder", str(folder))
        except OtherChoices:
            self.study.tell(trial, state=TrialState.FAIL)
            self.forget_choices(trial)
            return self.new_trial()
        except BaseException:
            self.study.tell(trial, state=TrialState.FAIL)
            raise
        return Trial(trial, runs, self.tuner.target_scores, self.tuner.aggregation_type)

    def make_runs(self, folder, flags, finished):
        """A run for each seed and environment; those that were finished have their curves."""
        runs = []
        for seed in range(1, self.num_seeds + 1):
            for env_id in self.tuner.target_scores:
                command = self.command(env_id, seed, flags)
                run = Run(env_id, seed, folder / f"{shared.safe(env_id)}__{seed}", command)
                if curve := finished.get(run.name):
                    run.curve = curve
                    run.state = "done"
                runs.append(run)
        return runs

    def sample(self, trial):
        flags, hints = sample_flags(self.tuner.params_fn, trial)
        for hint in hints:
            self.say_once(hint)
        steps = "total-timesteps"
        if steps in flags and not {steps, "total_timesteps"} & set(trial.params):
            before = self.study.user_attrs.get(steps)
            if before != flags[steps] and shared.is_locked(self.study, but=trial.number):
                self.refuse(f"has {steps} {before}")
            self.study.set_user_attr(steps, flags[steps])
        return flags

    def forget_choices(self, trial):
        """Other choices than before: the study starts over if it has no score."""
        is_first = len(self.study.get_trials(deepcopy=False)) == 1
        if is_first or shared.is_locked(self.study, but=trial.number):
            self.refuse("has other choices for a name that params_fn samples")
        self.use(shared.start_over(self.study, self.study.user_attrs["settings"]))

    def refuse(self, why):
        name = self.tuner.study_name
        raise SystemExit(f"study {name} {why}: give this one another study_name")

    def new_folder(self, trial):
        folder, again = self.folder / f"trial-{trial.number}", 0
        while folder.exists():  # left by a study of this name that is gone
            again += 1
            folder = self.folder / f"trial-{trial.number}-{again}"
        return folder

    def command(self, env_id, seed, flags):
        words = {"env-id": env_id, "seed": seed, **flags}
        if wandb := self.tuner.wandb_kwargs:
            words["track"] = True
            words["wandb-project-name"] = wandb.get("project")
            words["wandb-entity"] = wandb.get("entity")
        return [sys.executable, str(self.tuner.script), *processes.flag_words(words)]

    def environment(self, worker):
        """The variables of a run: its threads, its GPU, and where it is logged."""
        variables = os.environ | processes.thread_settings()
        variables |= processes.gpu_settings(worker, self.tuner.workers)
        if paths := [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]:
            variables["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths))
        if wandb := self.tuner.wandb_kwargs:
            variables["WANDB_RUN_GROUP"] = self.tuner.study_name
            for name, value in wandb.items():
                if name in WANDB and value:
                    variables[WANDB[name]] = value if isinstance(value, str) else ",".join(value)
        return variables

    # -- a trial ends ------------------------------------------------------------------------------

    def follow(self, trial):
        """Read what the trial's runs have logged, report it, and end the trial when it is due."""
        try:
            if why := self.follow_runs(trial):
                trial.optuna.set_user_attr("failed", why)
                self.failures.append(why)
                self.end(trial, TrialState.FAIL, f"failed: {why}")
            elif trial.report():
                why = f"pruned after {trial.num_reported} of {trial.num_reports} reports"
                self.end(trial, TrialState.PRUNED, why)
            elif trial.is_done:
                score = trial.final_score()
                self.end(trial, TrialState.COMPLETE, f"{score:.4f}", score)
        except optuna.exceptions.UpdateFinishedTrialError:
            trial.stop()
            self.active.remove(trial)
            say(f"trial {trial.number} was given up by another tuner: it got no heartbeat")

    def follow_runs(self, trial):
        """Return why the trial has failed, if it has."""
        for run in trial.runs:
            if run.state != "running":
                continue
            why = run.follow(self.tuner.metric, self.tuner.metric_last_n_average_window)
            if why:
                return f"{run.name}: {why}, see {short(run.log)}"
            if run.state == "done":
                trial.optuna.set_user_attr(run.name, run.curve)
        return None

    def end(self, trial, state, words, score=None):
        trial.stop()
        self.study.tell(trial.optuna, score, state, skip_if_finished=True)
        self.active.remove(trial)
        self.num_ended += 1
        if score is not None and self.study.best_trial.number == trial.number:
            words += ", the best so far"
        sampled = []
        for name, value in trial.optuna.params.items():
            sampled.append(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}")
        say(f"trial {trial.number}: {words} ({' '.join(sampled)})")

    def stop(self):
        """The tuner ends before its trials: they are put back, with the runs that are finished."""
        self.bar.close()
        for trial in self.active:
            trial.stop()
        for trial in self.active:
            shared.put_back(self.study, trial.optuna, has_died=False)
        if self.lock:
            shared.sign_out(self.lock)
