"""cleanrl_utils.tuner: every sampled flag arrives, scores are right, and no study is ever lost."""

import csv
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import optuna
import pytest
import sqlalchemy
from optuna.trial import TrialState

from cleanrl_utils.tuner import Tuner, __main__, flags, results, scheduler, trials
from cleanrl_utils.tuner import study as shared
from tests import toy
from tests.harness import PPO, ROOT, about, only_run

METRIC = "charts/episodic_return"
SQLITE = "sqlite:///cleanrl_hpopt.db"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scheduler, "POLL", 0.05)


@pytest.fixture(autouse=True)
def quick(request, monkeypatch):
    """Without the plots, which test_results draws."""
    if "test_results" not in request.node.name:
        monkeypatch.setattr(results, "draw_plots", lambda study, folder: [])


def make(params_fn=lambda trial: {}, target_scores=None, script=toy.__file__, **settings):
    """A tuner of the toy, whose study is in memory: that is ten times as fast as SQLite."""
    settings.setdefault("storage", optuna.storages.InMemoryStorage())
    return Tuner(script, METRIC, target_scores or {"A": None}, params_fn, **settings)


def states(study):
    return [trial.state.name for trial in study.trials]


def folder_of(trial, run=""):
    return Path(trial.user_attrs["folder"], run)


def of_toy(window=50, **args):
    """The score of a run of the toy."""
    return statistics.mean(value for _, value in toy.returns(toy.Args(**args))[-window:])


def wait_until(holds, seconds=120, pause=0.05):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited too long"
        time.sleep(pause)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# -- what a trial is -------------------------------------------------------------------------------


def test_every_sampled_flag_reaches_the_script():
    """All flags of ppo.py that can be tuned, none at its default, compared with those of run.json;
    the announcement's names of suggestions are among them."""
    choices = dict(
        total_timesteps=64, num_envs=2, num_steps=16, num_minibatches=2, update_epochs=3,
        gamma=0.9, anneal_lr=False, norm_adv=False, clip_vloss=False, target_kl=0.5, cuda=False,
        torch_deterministic=False, exp_name="-a b's $HOME", checkpoint_interval=3,
    )  # fmt: skip

    def params_fn(trial):
        sampled = {
            "learning-rate": trial.suggest_float("learning-rate", 1e-5, 1e-4, log=True),
            "gae-lambda": trial.suggest_float("gae-lambda", 0.8, 0.9),
            "clip_coef": trial.suggest_loguniform("clip_coef", 0.3, 0.4),
            "ent_coef": trial.suggest_float("ent_coef", -0.1, -0.02),
            "vf_coef": trial.suggest_uniform("vf_coef", 0.6, 1),
            "max_grad_norm": trial.suggest_float("max_grad_norm", 0.6, 1),
        }
        for name, value in choices.items():
            sampled[name] = trial.suggest_categorical(name, [value])
        return sampled

    (trial,) = make(params_fn, {"CartPole-v1": [0, 500]}, PPO).tune(1, 1).trials
    assert trial.state == TrialState.COMPLETE, trial.user_attrs
    run = about(only_run(folder_of(trial, "CartPole-v1__1")))
    assert len(trial.params) == 20
    for name, value in trial.params.items():
        assert run["args"][name.replace("-", "_")] == value, name
    assert set(run["args"]) - {name.replace("-", "_") for name in trial.params} == {
        "env_id", "seed", "resume", "track", "wandb_project_name", "wandb_entity", "capture_video",
    }  # fmt: skip


def test_score():
    """Two environments of different scale, two seeds; a window of 5 values, each normalized."""
    target_scores = {"A": [1, 11], "B": [0, 200]}
    tuner = make(
        lambda trial: {"x": trial.suggest_float("x", 2, 2)},
        target_scores,
        metric_last_n_average_window=5,
        workers=2,
    )
    study = tuner.tune(1, 2)
    scores, runs = [], []
    for env_id, (low, high) in target_scores.items():
        for seed in (1, 2):
            scores.append((of_toy(5, env_id=env_id, seed=seed, x=2.0) - low) / (high - low))
            curve = study.best_trial.user_attrs[f"{env_id} seed {seed}"]
            runs.append(trials.Run(env_id, seed, Path(), [], curve=curve))
    assert study.best_value == pytest.approx(statistics.mean(scores), rel=1e-5)
    known = {"average": statistics.mean, "median": statistics.median, "max": max, "min": min}
    assert len({round(aggregate(scores), 3) for aggregate in known.values()}) == 4
    for name, aggregate in known.items():
        score = trials.Trial(None, runs, target_scores, name).final_score()
        assert score == pytest.approx(aggregate(scores), rel=1e-5), name


def test_bare_score_direction_and_the_end_of_a_grid(capsys):
    study = make(
        lambda trial: {"x": trial.suggest_float("x", 0, 5)},
        sampler=optuna.samplers.GridSampler({"x": [3.0, 1.0, 2.0]}),
        direction="minimize",
        metric_last_n_average_window=1,
        pruner=optuna.pruners.NopPruner(),
    ).tune(9, 1)
    assert study.best_params == {"x": 1.0} and study.best_value == pytest.approx(11.0)
    assert sorted(trial.value for trial in study.trials) == pytest.approx([11, 21, 31])
    assert "the sampler has nothing left to try\n" in capsys.readouterr().out


def test_reports_do_not_depend_on_the_workers():
    """Report 20 (s - 1) + k: the scores of earlier seeds, and of seed s at k twentieths."""
    values, window = [], 10
    for workers in (1, 3):
        study = make(
            lambda trial: {"seconds": 0.1},
            {"A": [0, 10], "B": [0, 100]},
            pruner=optuna.pruners.NopPruner(),
            metric_last_n_average_window=window,
            study_name=f"with {workers}",
            workers=workers,
        ).tune(1, 3)
        values.append(study.trials[0].intermediate_values)
    assert values[0] == values[1] and list(values[0]) == list(range(1, 61))

    def at(seed, k):
        returns = toy.returns(toy.Args("A", seed))
        return [value for step, value in returns if step <= 5 * k][-window:]

    for s, k in [(1, 1), (1, 7), (2, 1), (3, 19), (3, 20)]:
        known = [statistics.mean(at(seed, 20 if seed < s else k)) / 10 for seed in range(1, s + 1)]
        report = values[0][20 * (s - 1) + k]
        assert report == pytest.approx(statistics.mean(known), rel=1e-5), (s, k)


def test_no_episode_is_lost(tmp_path):
    """An event file that grows in arbitrary pieces has the values that were written so far."""
    written = [(step, {METRIC: float(step % 7)}) for step in range(1, 41)]
    data = b"".join(toy.record(step, scalars) for step, scalars in written)
    folder = tmp_path / "runs/run"
    folder.mkdir(parents=True)
    with open(folder / "events.out.tfevents.1", "wb", buffering=0) as torn:
        for start in range(0, len(data), 13):
            torn.write(data[start : start + 13])
            scalars, total_timesteps = trials.read_run(tmp_path)
            steps = scalars[METRIC][:, 0] if scalars else []
            assert list(steps) == list(range(1, len(steps) + 1)) and total_timesteps == np.inf
    assert scalars[METRIC][:, 1].tolist() == [scalars[METRIC] for _, scalars in written]


def test_bad_trials_are_pruned_while_they_run(capsys):
    """The process, and the one that it started, are killed at once; what is pruned is no score."""

    def params_fn(trial):
        bad = trial.number == 2
        return {"x": 0 if bad else 1, "seconds": 60 if bad else 0, "total-timesteps": 400}

    pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0)
    study = make(params_fn, pruner=pruner, workers=2).tune(3, 2)
    assert states(study) == ["COMPLETE", "COMPLETE", "PRUNED"]
    pids = []
    for path in Path().glob("tuning/*/trial-2/*/pids"):
        pids += map(int, path.read_text().split())
    assert len(pids) == 4
    wait_until(lambda: not any(map(is_alive, pids)), 5)
    assert "the end" in folder_of(study.trials[0], "A__1/output.log").read_text()
    assert "the end" not in folder_of(study.trials[2], "A__1/output.log").read_text()
    assert re.search(r"^trial 2: pruned after \d+ of 40 reports", capsys.readouterr().out, re.M)


def test_failed_trials_are_no_scores(capsys):
    modes = ["good", "crash", "nan", "nan at the end", "silent"]
    study = make(lambda trial: {"mode": modes[trial.number]}, workers=2).tune(5, 2)
    assert states(study) == ["COMPLETE", *4 * ["FAIL"]]
    assert study.best_trial.number == 0
    printed = capsys.readouterr().out
    reasons = ["x must be smaller", *2 * [f"its {METRIC} is nan"]]
    reasons += [f"it logged no {METRIC} in 100 steps"]
    for trial, reason in zip(study.trials[1:], reasons, strict=True):
        assert trial.value is None
        told = trial.user_attrs["failed"]
        assert re.match(rf"A seed [12]: {re.escape(reason)}, see ", told)
        assert f"trial {trial.number}: failed: {told}" in printed
        assert Path(told.rpartition("see ")[2]).is_file()


# -- what params_fn returns ------------------------------------------------------------------------


def hints(params_fn):
    """Of a trial, and of the warnings that Optuna gives only once in a process."""
    return flags.sample_flags(params_fn, optuna.create_study().ask())[1]


def test_old_suggestions_get_a_hint():
    def old(trial):
        return {"x": trial.suggest_uniform("x", 1, 2), "y": trial.suggest_loguniform("y", 1, 2)}

    to_write = {"suggest_uniform": "low, high", "suggest_loguniform": "low, high, log=True"}
    for name, bounds in to_write.items():
        new = f"trial.suggest_float(name, {bounds})"
        assert f"hint: {name} in params_fn will be removed from Optuna: use {new}" in hints(old)

    def gone(trial):  # in the Optuna after this one
        raise AttributeError("'Trial' object has no attribute 'suggest_loguniform'")

    new = r"'suggest_loguniform': it is now suggest_float\(name, low, high, log=True\)$"
    with pytest.raises(
        SystemExit, match=f"^params_fn failed: AttributeError: 'Trial' object has .*{new}"
    ):
        hints(gone)


def test_sampled_but_not_used_is_noted():
    """What is used under another name is used."""

    def params_fn(trial):
        layers = trial.suggest_int("num_layers", 1, 3)
        return {
            "num-steps": 2 ** trial.suggest_int("log2-num-steps", 5, 10),
            "gamma": 1 - trial.suggest_float("1-gamma", 1e-3, 1e-1, log=True),
            "widths": [trial.suggest_int(f"width {i}", 1, 9) for i in range(layers)],
            "anneal-lr": trial.suggest_categorical("schedule", ["linear", "none"]) == "linear",
            "clip-coef": trial.suggest_float("clip_coef", 0, 1),
            "only-one": str(trial.suggest_categorical("one", [1])),
            "vf-coef": 0.5 + 0 * trial.suggest_float("unused", 0, 1),
        }

    for _ in range(3):
        assert hints(params_fn) == ["note: unused is sampled, but changes none of the flags"]


# -- what a study leaves ---------------------------------------------------------------------------


def test_results(tmp_path, capsys):
    """All plots, and a table that has each trial as it was."""
    study = optuna.create_study(direction="maximize")
    distributions = {
        "rate": optuna.distributions.FloatDistribution(1e-4, 1, log=True),
        "kind": optuna.distributions.CategoricalDistribution(["a", "b"]),
        "width": optuna.distributions.IntDistribution(1, 64),
    }
    curve = [None, *19 * [7.0]]
    for i in range(6):
        params = {"rate": 10.0 ** (-1 - i % 3), "kind": "ab"[i % 2], "width": 10 * i + 1}
        attrs = {"A seed 1": [*curve[:-1], 8.0 + i], "flags": params}
        trial = optuna.create_trial(
            params=params, distributions=distributions, value=i / 10, user_attrs=attrs,
            intermediate_values={1: 0.0, 20: i / 10},
        )  # fmt: skip
        study.add_trial(trial)
    failed = optuna.create_trial(state=TrialState.FAIL, user_attrs={"failed": "why, exactly"})
    study.add_trial(failed)
    study.add_trial(optuna.create_trial(state=TrialState.FAIL))
    results.write(study, tmp_path)
    names = ["history", "importance", "slice", "contour", "parallel_coordinate"]
    written = ["trials.csv", *(f"{name}.png" for name in names)]
    assert capsys.readouterr().out == f"trials and plots in .: {', '.join(written)}\n"
    for name in names:
        png = (tmp_path / f"{name}.png").read_bytes()
        assert png.startswith(b"\x89PNG") and len(png) > 5000, name
    with open("trials.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        "trial", "state", "score", "reports", "seconds", "rate", "kind", "width", "A seed 1",
        "failed",
    ]  # fmt: skip
    assert [float(row["score"]) for row in rows[:-2]] == [i / 10 for i in range(6)]
    assert (rows[5]["rate"], rows[5]["kind"], rows[5]["width"]) == ("0.001", "b", "51")
    assert (rows[5]["A seed 1"], rows[5]["reports"], rows[5]["failed"]) == ("13.0", "20", "")
    assert (rows[6]["state"], rows[6]["score"], rows[6]["failed"]) == ("FAIL", "", "why, exactly")
    assert rows[7]["failed"] == "its tuner was stopped"


def test_best_flags_are_printed_as_a_command(capsys):
    make(lambda trial: {"x": 0.5, "mode": "it's good", "track": False}, {"A": [0, 10]}).tune(1, 2)
    out = capsys.readouterr().out.splitlines()
    assert out[-3] == "best trial 0 of 1: 0.5275" and out[-2] == f"A: {METRIC} 5.28 over 2 seeds"
    assert out[-1].endswith("""toy.py --env-id A --x 0.5 --mode 'it'"'"'s good' --no-track""")


# -- what runs are told ----------------------------------------------------------------------------


def test_environment_of_the_runs(monkeypatch):
    """One GPU for each worker, the user's number of threads, and Weights & Biases."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.delenv("MKL_NUM_THREADS")
    monkeypatch.setenv("PYTHONPATH", "lib")
    wandb = dict(project="p", entity="e", tags=["a", "b"], mode="offline")
    tuner = make(lambda trial: {"seconds": 0.2}, wandb_kwargs=wandb, study_name="s", workers=2)
    (trial,) = tuner.tune(1, 2).trials
    runs = [about(only_run(folder_of(trial, f"A__{seed}"))) for seed in (1, 2)]
    assert sorted(run["variables"]["CUDA_VISIBLE_DEVICES"] for run in runs) == ["3", "5"]
    args, variables = runs[0]["args"], runs[0]["variables"]
    assert (args["track"], args["wandb_project_name"], args["wandb_entity"]) == (True, "p", "e")
    assert (variables["OMP_NUM_THREADS"], variables["MKL_NUM_THREADS"]) == ("4", "1")
    assert variables["PYTHONPATH"] == os.path.abspath("lib")
    wanted = {"WANDB_TAGS": "a,b", "WANDB_MODE": "offline", "WANDB_RUN_GROUP": "s"}
    assert wanted.items() <= variables.items()


# -- what is refused -------------------------------------------------------------------------------


POSTGRESQL = "postgresql+psycopg://"
new_choices = lambda trial: {"x": trial.suggest_categorical("x", [trial.number])}  # noqa: E731


@pytest.mark.parametrize(
    ("settings", "counts", "words"),
    [
        (dict(script="no_such.py"), (1, 1), "there is no .*no_such.py"),
        (dict(target_scores={"A": [1, 1]}), (1, 1), "low below high"),
        (dict(target_scores={"A": 500}), (1, 1), "low below high"),
        (dict(target_scores={"A": ["0", "1"]}), (1, 1), "low below high"),
        (dict(target_scores=["A"]), (1, 1), "target_scores must be a dictionary"),
        (dict(target_scores={"A": [0, 1], "B": None}), (1, 1), "each needs its range"),
        (dict(direction="up"), (1, 1), "direction must be"),
        (dict(aggregation_type="sum"), (1, 1), "must be one of average, median, max, min"),
        (dict(workers=0), (1, 1), "workers must be a whole number from 1 on"),
        (dict(), (1, 0), "num_seeds must be a whole number from 1 on"),
        (dict(), (1.5, 1), "num_trials must be a whole number from 1 on"),
        (dict(wandb_kwargs={"colour": 1}), (1, 1), "have project, entity, group, tags, mode"),
        (dict(storage="sqlite:////dev/null/x"), (1, 1), "cannot open study .* in .*null/x: ."),
        (dict(storage="nonsense"), (1, 1), "cannot open study .* in nonsense"),
        (dict(storage=f"{POSTGRESQL}me:secret@[::1]:1/x"), (1, 1), r"g://me:\*\*\*@.*: .*refused"),
        (dict(params_fn=lambda trial: {"seed": 1}), (1, 1), "params_fn must not set seed"),
        (dict(params_fn=lambda trial: {"x": object()}), (1, 1), "params_fn failed: TypeError: "),
        (dict(params_fn=lambda trial: {"Rate": 1}), (1, 1), "'Rate' is not the name of a flag"),
        (dict(params_fn=lambda trial: 1 / 0), (1, 1), "params_fn failed: division by zero"),
        (dict(params_fn=new_choices), (2, 1), "study .* has other choices .* another study_name"),
    ],
)  # fmt: skip
def test_bad_settings_are_one_line(settings, counts, words):
    with pytest.raises(SystemExit, match=words) as refusal:
        make(**settings).tune(*counts)
    assert "\n" not in refusal.value.code and "secret" not in refusal.value.code
    assert "SQL:" not in refusal.value.code
    assert not Path("tuning").exists() or counts == (2, 1)


def test_what_is_no_flag_fails_its_trial():
    settings = dict(study_name="s", storage=optuna.storages.InMemoryStorage())
    with pytest.raises(SystemExit, match="'Rate' is not the name of a flag"):
        make(lambda trial: {"Rate": 1}, **settings).tune(1, 1)
    assert states(optuna.load_study(**settings)) == ["FAIL"]


def test_scores_of_other_settings_are_refused():
    sample = lambda trial: {"total-timesteps": 100}  # noqa: E731
    settings = dict(study_name="s", storage=optuna.storages.InMemoryStorage())
    make(sample, **settings).tune(1, 1)
    with pytest.raises(SystemExit, match=r"study s in .* has num_seeds 1, not 2: give this one an"):
        make(sample, **settings).tune(2, 2)
    with pytest.raises(SystemExit, match=r"has target_scores \{'A': None\}"):
        make(sample, {"A": [0, 1]}, **settings).tune(2, 1)
    with pytest.raises(SystemExit, match="study s has total-timesteps 100: give"):
        make(lambda trial: {"total-timesteps": 50}, **settings).tune(2, 1)
    study = make(sample, **settings).tune(2, 1)
    assert states(study).count("COMPLETE") == 2, "what was refused does not count"


TYRO = f"""
import sys
import tyro
sys.path.insert(0, {str(ROOT)!r})
from tests import toy
toy.parse = lambda: tyro.cli(toy.Args)
toy.main()
"""


def test_study_without_scores_is_not_locked():
    """A mistyped flag, then other choices, another metric, other seeds and another direction, all
    under one name; and a trial that was interrupted does not stand in the way."""
    Path("script.py").write_text(TYRO)
    storage = optuna.storages.InMemoryStorage()
    settings = dict(study_name="s", storage=storage)

    def mistyped(trial):
        return {"xx": trial.suggest_categorical("x", ["a", "b"])}

    with pytest.raises(SystemExit) as refusal:
        make(mistyped, script="script.py", **settings).tune(2, 2)
    reason = (
        r"the first 2 trials failed, because: A seed 1: Unrecognized options: --xx, [ab], see .*"
    )
    assert re.fullmatch(reason, refusal.value.code), refusal.value.code

    def params_fn(trial):
        return {"x": trial.suggest_categorical("x", [1, 2]), "total-timesteps": steps}

    steps = 50
    tuner = make(params_fn, **settings)
    tuner.metric = "charts/episodic_retrun"
    why = r"the first trial failed, because: .* no charts/episodic_retrun, but charts/episodic_ret"
    with pytest.raises(SystemExit, match=why):
        tuner.tune(1, 2)

    steps = 100
    with pytest.raises(SystemExit, match="the first trial failed"):
        make(lambda trial: {**params_fn(trial), "mode": "crash"}, **settings).tune(1, 1)
    optuna.load_study(**settings).enqueue_trial({"x": 1})  # as if it had been interrupted
    study = make(params_fn, **settings, direction="minimize").tune(2, 1)
    assert states(study) == ["COMPLETE", "COMPLETE"] and study.direction.name == "MINIMIZE"
    assert study.user_attrs["total-timesteps"] == 100
    with pytest.raises(SystemExit, match="has direction minimize, not maximize"):
        make(params_fn, **settings).tune(2, 1)
    with pytest.raises(SystemExit, match=r"study s has other choices .* give this one another"):
        make(mistyped, **settings, direction="minimize").tune(3, 1)


@pytest.mark.parametrize("name", ["optuna", "sqlalchemy"])
def test_missing_extra_is_one_line(name):
    code = f"import sys; sys.modules[{name!r}] = None; import cleanrl_utils.tuner"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    install = "pip install -r requirements/requirements-optuna.txt"
    assert done.stderr == f"cannot start the tuner: {name} is not installed: {install}\n"
    assert done.returncode == 1


# -- what goes on ----------------------------------------------------------------------------------


def test_same_command_goes_on_with_new_samples():
    """num_trials counts finished trials; a seeded sampler does not start over; old runs stay. The
    folder of the database is created, and has the runs."""
    sample = lambda trial: {"x": trial.suggest_float("x", 0, 1)}  # noqa: E731
    settings = dict(pruner=optuna.pruners.NopPruner(), study_name="s/1")
    settings["storage"] = "sqlite:///new/there/study.db"
    make(sample, **settings, sampler=optuna.samplers.RandomSampler(seed=3)).tune(2, 1)
    study = make(sample, **settings, sampler=optuna.samplers.RandomSampler(seed=3)).tune(4, 1)
    assert len(study.trials) == 4 and len({trial.params["x"] for trial in study.trials}) == 4
    assert len(make(sample, **settings).tune(4, 1).trials) == 4, "nothing is left to do"
    os.unlink("new/there/study.db")
    (trial,) = make(sample, **settings).tune(1, 1).trials
    assert folder_of(trial) == Path("new/there/tuning/s-1/trial-0-1").absolute()
    assert trial.value == pytest.approx(of_toy(x=trial.params["x"]), rel=1e-4)
    assert Path("new/there/tuning/s-1/trials.csv").is_file()


CONFIG = f"""
from cleanrl_utils.tuner import Tuner, results, scheduler, study
scheduler.POLL, study.HEARTBEAT, study.GRACE = 0.05, 1, 3
results.draw_plots = lambda study, folder: []
num_trials, num_seeds, hang = 3, 2, "nowhere"
params_fn = lambda trial: {{"x": trial.suggest_float("x", 0, 1), "hang": hang}}
tuner = Tuner({toy.__file__!r}, {METRIC!r}, {{"A": None}}, params_fn, study_name="s", workers=2)
if __name__ == "__main__":
    tuner.tune(num_trials, num_seeds)
"""


TUNER = ["-m", "cleanrl_utils.tuner"]


def start(*words, cwd="."):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def heard():  # also where pytest's own parent ignores it
        signal.signal(signal.SIGINT, signal.default_int_handler)

    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=heard)
    return subprocess.Popen([sys.executable, *words], cwd=cwd, env=environment, **pipes)


def start_tuner(*words, cwd="."):
    return start(*TUNER, "config.py", *words, cwd=cwd)


def running_pids(folder="."):
    """Of the toys at work below a folder, and of their children."""
    pids = []
    for path in Path(folder).glob("tuning/*/*/*/pids"):
        pids += map(int, path.read_text().split())
    return [pid for pid in pids if is_alive(pid)]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (signal.SIGKILL, [*TUNER, "config.py", "--num-trials", "2"]),
        (signal.SIGINT, ["config.py"]),
        pytest.param(signal.SIGTERM, [*TUNER, "config.py"], marks=[pytest.mark.slow]),
    ],
)
def test_killed_study_goes_on(how, words):
    """In the second trial, after one seed: runs die with the tuner, the next one finishes it, and
    does not wait for a tuner that is gone."""
    config = CONFIG.replace("nowhere", "trial-1/A__2").replace("0.05, 1, 3", "0.05, 1, 300")
    Path("config.py").write_text(config.replace("hang = 3", "hang = 2"))
    first = start(*words)
    open_study = lambda: optuna.load_study(study_name="s", storage=SQLITE)  # noqa: E731
    wait_until(lambda: len(running_pids()) == 2)
    wait_until(lambda: "A seed 1" in open_study().trials[1].user_attrs, pause=0.5)
    pids = running_pids()
    first.send_signal(how)
    out = first.communicate(timeout=120)[0]
    wait_until(lambda: not any(map(is_alive, pids)), 10)
    assert "Traceback" not in out and first.returncode == (-9 if how == signal.SIGKILL else 1)
    assert how == signal.SIGKILL or out.endswith("stopped: the same command resumes the study\n")
    cut = open_study().trials[1]
    assert cut.state.name == ("RUNNING" if how == signal.SIGKILL else "FAIL")

    second = start_tuner("--num-trials", "2")  # so that it has nothing else to do
    out = second.communicate(timeout=120)[0]
    assert second.returncode == 0 and "1 of 2 trials are finished\n" in out, out
    assert "waiting" not in out
    study = open_study()
    assert states(study) == ["COMPLETE", "FAIL", "COMPLETE"] and study.trials[1].value is None
    again = study.trials[2]
    assert again.params == cut.params
    names = [path.name for path in folder_of(again).iterdir()]
    assert names == ["A__2"], "the finished seed was not run again"
    known = [of_toy(seed=seed, x=cut.params["x"]) for seed in (1, 2)]
    assert again.value == pytest.approx(statistics.mean(known), rel=1e-4)
    assert not list(Path().glob("tuning/s/*.lock"))


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_ctrl_c_in_a_transaction_loses_nothing(request):
    """Nor does the second one, which comes while the trial is put back."""
    storage = shared.open_storage(SQLITE)

    def press_ctrl_c(connection):
        if pressed or running_pids():
            os.kill(os.getpid(), signal.SIGINT)
            pressed.append(True)

    pressed = []
    sqlalchemy.event.listen(storage.engine, "commit", press_ctrl_c)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, handler))
    shape = {"seconds": 60, "total-timesteps": 2000}
    with pytest.raises(SystemExit, match="stopped: the same command resumes the study"):
        make(lambda trial: shape, study_name="s", storage=storage).tune(1, 1)
    study = optuna.load_study(study_name="s", storage=SQLITE)
    assert pressed and states(study) == ["FAIL", "WAITING"] and not running_pids()
    assert not list(Path().glob("tuning/s/*.lock"))


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_trial_that_died_before_its_first_sign_of_life(monkeypatch):
    study = optuna.create_study()
    study.ask()
    shared.put_back_lost_trials(study)
    assert states(study) == ["RUNNING"], "its tuner may be about to say so"
    monkeypatch.setattr(shared, "GRACE", 0)
    shared.put_back_lost_trials(study)
    assert states(study) == ["FAIL", "WAITING"]


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_only_deaths_of_the_tuner_use_up_the_retries():
    """After Ctrl+C four times, a trial may still die three times."""
    study = optuna.create_study()
    study.add_trial(optuna.create_trial(state=TrialState.WAITING, user_attrs={"A seed 1": [1.0]}))
    for has_died in [False] * 4 + [True] * 3:
        shared.put_back(study, study.ask(), has_died)
        assert study.trials[-1].state.name == "WAITING"
        assert study.trials[-1].user_attrs["A seed 1"] == [1.0]
    shared.put_back(study, study.ask())
    assert states(study) == ["FAIL"] * 8


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        ("", [], "must make a Tuner called tuner"),
        ("1 / 0", [], "cannot read config.py: division by zero"),
        (CONFIG.replace("num_trials,", "other,"), [], "sets no num_trials: give --num-trials"),
        (CONFIG, ["--storage", "sqlite:////dev/null/x"], "cannot open study s in sqlite:////dev"),
        (CONFIG, ["--num-trials", "0"], "num_trials must be a whole number"),
        (None, [], "there is no config.py"),
    ],
)  # fmt: skip
def test_bad_configs_are_one_line(text, flags, words, monkeypatch):
    if text is not None:
        Path("config.py").write_text(text)
    with pytest.raises(SystemExit) as refusal:
        run_main(monkeypatch, *flags)
    assert words in refusal.value.code and "\n" not in refusal.value.code


def run_main(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["tuner", "config.py", *flags])
    for module, name in [(scheduler, "POLL"), (shared, "HEARTBEAT"), (shared, "GRACE")]:
        monkeypatch.setattr(module, name, getattr(module, name))  # which the config sets
    handler = signal.getsignal(signal.SIGTERM)
    try:
        __main__.main()
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_flags_override_the_config(monkeypatch, capsys):
    Path("config.py").write_text(CONFIG)
    flags = "--num-trials 1 --num-seeds 1 --workers 2 --study-name other --storage"
    run_main(monkeypatch, *flags.split(), "sqlite:///other.db")
    said = "study other in sqlite:///other.db: 0 of 1 trials are finished"
    assert said in capsys.readouterr().out
    study = optuna.load_study(study_name="other", storage="sqlite:///other.db")
    assert len(study.trials) == 1 and study.user_attrs["settings"]["num_seeds"] == 1


POSTGRES = next(
    (str(path) for path in sorted(Path("/usr/lib/postgresql").glob("*/bin"))[::-1]), None
) or (os.path.dirname(shutil.which("initdb") or "") or None)


@pytest.fixture
def postgres():
    """The address of a real PostgreSQL server on a socket of its own, run by nobody."""
    if not POSTGRES:
        pytest.skip("needs PostgreSQL: Debian's postgresql")
    with tempfile.TemporaryDirectory() as folder:  # not pytest's, which only its user may enter
        user = "nobody" if os.getuid() == 0 else None
        if user:
            shutil.chown(folder, user)

        def run(*words):
            settings = dict(capture_output=True, text=True, check=True)
            return subprocess.run(words, user=user, cwd=folder, **settings)

        data, control = f"{folder}/data", [f"{POSTGRES}/pg_ctl", "-D", f"{folder}/data"]
        run(f"{POSTGRES}/initdb", "-D", data, "-U", "me", "--auth=trust", "--no-sync")
        options = f"-k {folder} -c listen_addresses='' -c fsync=off"
        run(*control, "-w", "-l", f"{folder}/log", "-o", options, "start")
        yield f"postgresql+psycopg://me@/postgres?host={folder}"
        run(*control, "-m", "immediate", "stop")


def test_machines_share_a_study_through_postgresql(postgres):
    """Two tuners with folders of their own; after kill -9, and out of reach of its lock, one takes
    over the other's trial, and says whom it waits for."""
    tuners = []
    for name in ("one", "two"):
        Path(name).mkdir()
        Path(name, "config.py").write_text(CONFIG.replace("nowhere", "/two/"))
        tuners.append(start_tuner("--num-trials", "3", "--storage", postgres, cwd=name))
    one, two = tuners
    wait_until(lambda: running_pids("two"))
    pids = running_pids("two")
    two.kill()
    two.communicate()
    (lock,) = Path("two/tuning/s").glob("*.lock")
    lock.unlink()  # as if it were on another machine
    out = one.communicate(timeout=120)[0]
    assert one.returncode == 0, out
    wait_until(lambda: not any(map(is_alive, pids)), 10)
    study = optuna.load_study(study_name="s", storage=postgres)
    ended = [trial for trial in study.trials if trial.state.name in ("COMPLETE", "PRUNED")]
    assert len(ended) == 3
    (cut,) = [trial for trial in study.trials if trial not in ended]
    assert cut.state == TrialState.FAIL and "/two/" in cut.user_attrs["folder"]
    (again,) = [trial for trial in ended if trial.params == cut.params]
    assert "/one/" in again.user_attrs["folder"]
    waiting = f"waiting for trial {cut.number} of another tuner, process {two.pid} on "
    assert out.count(waiting) <= 1


# -- the page --------------------------------------------------------------------------------------


def test_page_shows_the_data():
    """docs/tuner.md: its table has every fresh seed and right means; its best trial is the best."""
    page = (ROOT / "docs" / "tuner.md").read_text()
    read = lambda name: list(csv.DictReader((ROOT / "docs" / "tuner" / name).open()))  # noqa: E731
    seeds, trials = read("fresh_seeds.csv"), read("trials.csv")
    assert len(seeds) == 8 and all(float(row["tuned"]) > float(row["defaults"]) for row in seeds)
    for row in seeds:
        cells = [row["seed"], row["defaults"], row["tuned"], f"{int(row['tuned_400_at']):,}"]
        assert f"| {' | '.join(cells)} |" in page
    means = [statistics.mean(float(row[name]) for row in seeds) for name in ("defaults", "tuned")]
    assert "| mean | {:.1f} | {:.1f} | |".format(*means) in page
    complete = [row for row in trials if row["state"] == "COMPLETE"]
    best = max(complete, key=lambda row: float(row["score"]))
    assert f"best trial {best['trial']} of {len(trials)}: {best['score']}" in page
    pruned = len(trials) - len(complete)
    counts = f"{len(complete)} trials were trained to the end, {pruned} were pruned, none failed"
    assert counts in page
