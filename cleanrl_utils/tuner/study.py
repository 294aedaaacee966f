"""An Optuna study shared by tuners: which are running, what is finished, what is queued again.

A running trial records which tuner runs it. A tuner sends a heartbeat for its trials, and holds a
lock as long as it lives, however it ends. A tuner on the same machine that is gone is known at once
by its lock, another one by its heartbeats. Its trials are marked as failed and queued again.
"""

import copy
import os
import platform
import time
from contextlib import contextmanager
from pathlib import Path

import optuna
from filelock import FileLock, Timeout
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import RetryHeartbeatStaleTrialCallback
from optuna.trial import TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from cleanrl_utils.errors import explain

HEARTBEAT = 5  # seconds between two heartbeats of a trial
GRACE = 30  # seconds without one until it counts as dead
RETRIES = 3  # how often a trial that died with its tuner is tried again
SCORED = (TrialState.COMPLETE, TrialState.PRUNED)


# -- open ------------------------------------------------------------------------------------------


def open_study(tuner, settings):
    """Create or resume a study. One that has scores of other settings is refused."""
    name, storage, place = tuner.study_name, tuner.storage, place_of(tuner.storage)
    with explain_database(f"open study {name} in {place}"):
        if isinstance(storage, str):
            storage = open_storage(storage)
        create = dict(study_name=name, storage=storage, direction=tuner.direction)
        create |= dict(sampler=tuner.sampler, pruner=tuner.pruner)
        study = optuna.create_study(**create, load_if_exists=True)
        put_back_lost_trials(study)
        before = study.user_attrs.get("settings", settings)
        for setting, now in settings.items():
            if before[setting] == now:
                continue
            if is_locked(study):
                raise SystemExit(
                    f"study {name} in {place} has {setting} {before[setting]}, not {now}: "
                    "give this one another study_name"
                )
            study = start_over(study, settings)
            break
        study.set_user_attr("settings", settings)
        if study.get_trials(deepcopy=False):
            study.sampler.reseed_rng()  # or a seeded sampler would repeat the first trials
    return study


def open_storage(url, attempts=5):
    """A database, created if it is not there, with heartbeats."""
    if url.startswith("sqlite"):
        Path(make_url(url).database or "").parent.mkdir(parents=True, exist_ok=True)
        engine = {"connect_args": {"timeout": 60}}
    else:
        engine = {"pool_pre_ping": True}
    settings = dict(heartbeat_interval=HEARTBEAT, grace_period=GRACE)
    settings["heartbeat_stale_trial_callback"] = queue_again
    try:
        return optuna.storages.RDBStorage(url, engine_kwargs=engine, **settings)
    except DBAPIError:  # two tuners may be creating the tables of a new database at once
        if attempts == 1:
            raise
        time.sleep(0.5)
        return open_storage(url, attempts - 1)


def start_over(study, settings):
    """An empty study in place of one that has no score; the folders of its runs stay."""
    names = dict(study_name=study.study_name, storage=study._storage)
    optuna.delete_study(**names)
    of_optuna = dict(sampler=study.sampler, pruner=study.pruner, direction=settings["direction"])
    new = optuna.create_study(**names, **of_optuna)
    new.set_user_attr("settings", settings)
    return new


@contextmanager
def explain_database(attempt):
    """As explain, but with the database's own words in place of Optuna's and SQLAlchemy's."""
    with explain(attempt):
        try:
            yield
        except (StorageInternalError, DBAPIError) as error:
            cause = error.__cause__ if isinstance(error, StorageInternalError) else error
            raise getattr(cause, "orig", error) from None


def url_of(storage):
    return storage if isinstance(storage, str) else str(getattr(storage, "url", "memory"))


def place_of(storage):
    """The database for a message, without its password."""
    url = url_of(storage)
    try:
        return make_url(url).render_as_string(hide_password=True)
    except Exception:
        return "its storage" if ":" in url else url


def folder_of(storage, study_name):
    """Where the runs and plots of a study are: next to its database, if that is a file."""
    url = url_of(storage)
    parent = Path(make_url(url).database).parent if url.startswith("sqlite:///") else Path()
    return (parent / "tuning" / safe(study_name)).absolute()


def safe(name):
    """A name as that of a folder."""
    return name.translate(str.maketrans("/\\:", "---"))


# -- count -----------------------------------------------------------------------------------------


def of_state(study, *states):
    return study.get_trials(deepcopy=False, states=states)


def is_locked(study, but=None):
    """Whether a trial, but this one, has a score or may get one."""
    return any(trial.number != but for trial in of_state(study, *SCORED) + at_work(study))


def at_work(study):
    """The trials that a tuner is at."""
    return [trial for trial in of_state(study, TrialState.RUNNING) if "tuner" in trial.user_attrs]


def count_finished(study):
    """Trials with a score or pruned, and those that failed by themselves, not with their tuner."""
    failed = [t for t in of_state(study, TrialState.FAIL) if "failed" in t.user_attrs]
    scored = of_state(study, *SCORED)
    return len(scored + failed) if scored else 0


# -- life and death --------------------------------------------------------------------------------


def sign_in(folder):
    """Hold a lock for as long as this process lives."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / f"tuner-{platform.node()}-{os.getpid()}-{time.time_ns():x}.lock")
    lock.acquire(timeout=0)
    return lock


def signature(lock):
    """What a trial says of the tuner that is at it."""
    return {"lock": lock.lock_file, "process": os.getpid(), "machine": platform.node()}


def sign_out(lock):
    lock.release()
    Path(lock.lock_file).unlink(missing_ok=True)


def is_gone(lock):
    """Whether this is the lock of a tuner on this machine that has ended."""
    if not Path(lock).exists():
        return False
    try:
        with FileLock(lock, timeout=0):
            return True
    except (OSError, Timeout):
        return False


def send_heartbeats(study, trials):
    interval = getattr(study._storage, "get_heartbeat_interval", None)  # some storages have none
    for trial in trials if interval and interval() else []:
        study._storage.record_heartbeat(trial._trial_id)


def put_back_lost_trials(study):
    """Queue again what tuners were at that are gone, on this machine or on another one."""
    optuna.storages.fail_stale_trials(study)
    locks = set()
    for trial in of_state(study, TrialState.RUNNING):
        if "tuner" in trial.user_attrs:
            lock = trial.user_attrs["tuner"]["lock"]
            if is_gone(lock):
                put_back(study, trial)
                locks.add(lock)
        elif time.time() - trial.datetime_start.timestamp() > 2 * GRACE:
            put_back(study, trial)  # its tuner died before it could record this
    for lock in locks:
        Path(lock).unlink(missing_ok=True)


def put_back(study, trial, has_died=True):
    """Mark a trial as failed and queue its flags again, with those of its runs that are done."""
    try:
        study._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
    except UpdateFinishedTrialError:
        return  # another tuner has done it
    queue_again(study, study._storage.get_trial(trial._trial_id), has_died)


def queue_again(study, trial, has_died=True):
    """Deaths are counted here: Optuna's retry_history has the trials that Ctrl+C ended, too."""
    trial = copy.deepcopy(trial)
    trial.user_attrs.pop("tuner", None)
    deaths = trial.user_attrs["deaths"] = trial.user_attrs.get("deaths", 0) + has_died
    if deaths <= RETRIES:
        RetryHeartbeatStaleTrialCallback()(study, trial)
