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

import optuna
import pytest
from optuna.trial import TrialState

from cleanrl_utils import tuner as tuner_module
from cleanrl_utils.tuner import Run, Tuner
from tests import toy
from tests.harness import PPO, ROOT, about, only_run

METRIC = "charts/episodic_return"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tuner_module, "POLL", 0.05)


def make(params_fn=lambda trial: {}, target_scores=None, script=toy.__file__, **settings):
    return Tuner(script, METRIC, target_scores or {"A": None}, params_fn, **settings)


def trials(study, *states):
    return [trial for trial in study.trials if not states or trial.state in states]


def wait_until(holds, seconds=120):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_every_sampled_flag_reaches_the_script():
    """All flags of ppo.py that can be tuned, of every type, compared with those of run.json."""
    choices = dict(
        total_timesteps=[64], num_envs=[2], num_steps=[16], num_minibatches=[1, 2],
        update_epochs=[2, 3], gamma=[0.9, 0.95], anneal_lr=[True, False], norm_adv=[True, False],
        clip_vloss=[True, False], target_kl=[None, 0.5], cuda=[True, False],
        torch_deterministic=[True, False], exp_name=["-a name", "b's $HOME"],
        checkpoint_interval=[3, 4],
    )  # fmt: skip
    ranges = dict(
        gae_lambda=(0.9, 0.99),
        clip_coef=(0.1, 0.3),
        ent_coef=(-0.1, -0.01),
        vf_coef=(0.1, 1),
        max_grad_norm=(0.1, 1),
    )

    def params_fn(trial):
        flags = {
            "learning-rate": trial.suggest_float("learning-rate", 1e-5, 1e-4, log=True)
        }  # first, with a dash
        flags |= {name: trial.suggest_categorical(name, values) for name, values in choices.items()}
        return flags | {name: trial.suggest_float(name, *bounds) for name, bounds in ranges.items()}

    study = make(params_fn, {"CartPole-v1": [0, 500]}, PPO, workers=2).tune(2, 1)
    assert len(trials(study, TrialState.COMPLETE)) == 2, [
        trial.user_attrs for trial in study.trials
    ]
    for trial in study.trials:
        args = about(only_run(Path(trial.user_attrs["folder"], "CartPole-v1__1")))["args"]
        assert len(trial.params) == 20
        for name, value in trial.params.items():
            assert args[name.replace("-", "_")] == value, name
        assert set(args) - {name.replace("-", "_") for name in trial.params} == {
            "env_id", "seed", "resume", "track", "wandb_project_name", "wandb_entity",
            "capture_video",
        }  # fmt: skip


@pytest.mark.parametrize(
    "aggregation",
    ["average", *(pytest.param(x, marks=pytest.mark.slow) for x in ("median", "max", "min"))],
)
def test_score(aggregation):
    """Two environments of different scale, two seeds; a window of 5 values, each normalized."""
    target_scores, window = {"A": [1, 11], "B": [0, 200]}, 5
    study = make(
        lambda trial: {"x": trial.suggest_float("x", 2, 2)},
        target_scores,
        aggregation_type=aggregation,
        metric_last_n_average_window=window,
        workers=2,
    ).tune(1, 2)
    scores = []
    for env_id, (low, high) in target_scores.items():
        for seed in (1, 2):
            last = [value for _, value in toy.returns(toy.Args(env_id, seed, x=2.0))][-window:]
            scores.append((sum(last) / window - low) / (high - low))
    known = {"average": statistics.mean, "median": statistics.median, "max": max, "min": min}[
        aggregation
    ](scores)
    assert study.best_value == pytest.approx(known, rel=1e-5)
    assert (
        len({round(f(scores), 3) for f in (statistics.mean, statistics.median, max, min)}) == 4
    ), "they could be told apart"


def test_bare_score_direction_and_the_end_of_a_grid(capsys):
    sampler = optuna.samplers.GridSampler({"x": [3.0, 1.0, 2.0]})
    params_fn = lambda trial: {"x": trial.suggest_float("x", 0, 5)}  # noqa: E731
    study = make(
        params_fn,
        sampler=sampler,
        direction="minimize",
        metric_last_n_average_window=1,
        pruner=optuna.pruners.NopPruner(),
    ).tune(9, 1)
    assert study.best_params == {"x": 1.0} and study.best_value == pytest.approx(11.0)
    assert (
        len(study.trials) == 3
        and "the sampler has nothing left to try\n" in capsys.readouterr().out
    )
    assert sorted(trial.value for trial in study.trials) == pytest.approx([11, 21, 31])


@pytest.mark.slow
def test_reports_do_not_depend_on_the_workers():
    """Report 20 (s - 1) + k: the scores of earlier seeds, and of seed s at k twentieths."""
    values = []
    for workers in (1, 3):
        pruner, window = optuna.pruners.NopPruner(), 10
        settings = dict(
            pruner=pruner,
            metric_last_n_average_window=window,
            study_name=f"with {workers}",
            workers=workers,
        )
        study = make(
            lambda trial: {"seconds": 0.5}, {"A": [0, 10], "B": [0, 100]}, **settings
        ).tune(1, 3)
        values.append(study.trials[0].intermediate_values)
    assert values[0] == values[1] and list(values[0]) == list(range(1, 61))

    def at(seed, k):
        returns = toy.returns(toy.Args("A", seed))
        return [value for step, value in returns if step <= 5 * k][-window:]

    for s, k in [(1, 1), (1, 7), (2, 1), (3, 19), (3, 20)]:
        known = [statistics.mean(at(seed, 20 if seed < s else k)) / 10 for seed in range(1, s + 1)]
        assert values[0][20 * (s - 1) + k] == pytest.approx(statistics.mean(known), rel=1e-5), (
            s,
            k,
        )


def test_no_episode_is_lost(tmp_path):
    """An event file that grows in arbitrary pieces gives the values of the whole file."""
    make(lambda trial: {"total_timesteps": 40}).tune(1, 1)
    (whole,) = Path().glob("tuning/*/trial-0/A__1/runs/*/*tfevents*")
    data, run = whole.read_bytes(), Run("A", 1, tmp_path / "torn", [], METRIC, 50)
    (tmp_path / "torn/runs/run").mkdir(parents=True)
    with open(tmp_path / "torn/runs/run/events.out.tfevents.1", "wb", buffering=0) as torn:
        for start in range(0, len(data), 13):
            torn.write(data[start : start + 13])
            assert run.read() is None
    assert run.values == pytest.approx(
        [value for _, value in toy.returns(toy.Args(total_timesteps=40))], rel=1e-6
    )


def test_bad_trials_are_pruned_while_they_run(capsys):
    """The process, and the one that it started, are killed at once; what is pruned is no score."""

    def params_fn(trial):
        bad = trial.number == 2
        return {"x": 0 if bad else 1, "seconds": 60 if bad else 0, "total-timesteps": 400}

    pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0)
    study = make(params_fn, pruner=pruner, workers=2).tune(3, 2)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "COMPLETE", "PRUNED"]
    pids = [
        int(pid)
        for path in Path().glob("tuning/*/trial-2/*/pids")
        for pid in path.read_text().split()
    ]
    assert len(pids) == 4
    wait_until(lambda: not any(map(is_alive, pids)), 5)
    assert "the end" in Path(study.trials[0].user_attrs["folder"], "A__1/output.log").read_text()
    assert (
        "the end" not in Path(study.trials[2].user_attrs["folder"], "A__1/output.log").read_text()
    )
    assert re.search(r"^trial 2: pruned after \d+ of 40 reports", capsys.readouterr().out, re.M)


def test_failed_trials_are_no_scores(capsys):
    modes = ["good", "crash", "nan", "nan at the end", "silent"]
    study = make(lambda trial: {"mode": modes[trial.number]}, workers=2).tune(5, 2)
    by_mode = dict(zip(modes, study.trials, strict=True))
    assert {mode: trial.state.name for mode, trial in by_mode.items()} == dict.fromkeys(
        modes, "FAIL"
    ) | {"good": "COMPLETE"}
    assert all(by_mode[mode].value is None for mode in modes if mode != "good")
    reasons = {"crash": "x must be smaller", "silent": f"it logged no {METRIC}"}
    reasons |= dict.fromkeys(("nan", "nan at the end"), f"its {METRIC} is nan")
    printed = capsys.readouterr().out
    for mode, reason in reasons.items():
        told = by_mode[mode].user_attrs["failed"]
        assert (
            re.match(rf"A seed [12]: {re.escape(reason)}, see ", told)
            and f"trial {by_mode[mode].number}: failed: {told}" in printed
        )
        assert Path(told.rpartition("see ")[2]).is_file()
    assert study.best_trial.number == 0
    seed = by_mode["nan at the end"].user_attrs["failed"][
        len("A seed ")
    ]  # the same again, seen only after the end
    run = Run(
        "A",
        int(seed),
        Path(by_mode["nan at the end"].user_attrs["folder"], f"A__{seed}"),
        [],
        METRIC,
        50,
    )
    run.process = subprocess.Popen(["true"])
    run.process.wait()
    assert run.finish() == f"its {METRIC} is nan" and run.state != "done" and len(run.values) == 100


def test_hopeless_studies_stop():
    with pytest.raises(
        SystemExit,
        match=r"^the first 3 trials failed, the last one because: "
        r"A seed 1: x must be smaller, see .*log$",
    ):
        make(lambda trial: {"mode": "crash"}).tune(50, 1)
    assert len(list(Path().glob("tuning/*/trial-*"))) == 3


def test_old_suggestions_get_a_hint(capsys):
    def params_fn(trial):
        return {
            "x": trial.suggest_uniform("x", 1, 2),
            "seconds": trial.suggest_loguniform("seconds", 1e-5, 1e-4),
        }

    make(params_fn).tune(2, 1)
    out = capsys.readouterr().out
    assert (
        out.count(
            "hint: suggest_loguniform in params_fn will leave Optuna: "
            "write trial.suggest_float(name, low, high, log=True)\n"
        )
        == 1
    )
    assert (
        out.count(
            "hint: suggest_uniform in params_fn will leave Optuna: "
            "write trial.suggest_float(name, low, high)\n"
        )
        == 1
    )


def test_suggestions_that_are_gone_get_a_hint():
    def params_fn(trial):
        raise AttributeError(
            "'Trial' object has no attribute 'suggest_loguniform'"
        )  # as in the Optuna after this one

    with pytest.raises(
        SystemExit,
        match=r"^params_fn failed: .*'suggest_loguniform': it is now suggest_float\(.*log=True\)$",
    ):
        make(params_fn).tune(1, 1)


def test_sampled_but_not_returned_is_noted(capsys):
    make(lambda trial: {"x": 2.0 ** trial.suggest_int("log2-x", 1, 1)}).tune(1, 1)
    assert (
        "note: log2-x is sampled, but no flag that params_fn returns has this name\n"
        in capsys.readouterr().out
    )


@pytest.mark.slow
def test_same_command_goes_on_with_new_samples():
    """num_trials counts finished trials; a seeded sampler does not start over; old runs stay."""
    sample = lambda trial: {"x": trial.suggest_float("x", 0, 1)}  # noqa: E731
    settings = dict(pruner=optuna.pruners.NopPruner(), study_name="s/1")
    make(sample, **settings, sampler=optuna.samplers.RandomSampler(seed=3)).tune(2, 1)
    study = make(sample, **settings, sampler=optuna.samplers.RandomSampler(seed=3)).tune(4, 1)
    assert len(study.trials) == 4 and len({trial.params["x"] for trial in study.trials}) == 4
    assert len(make(sample, **settings).tune(4, 1).trials) == 4, "nothing is left to do"
    os.unlink("cleanrl_hpopt.db")
    study = make(sample, **settings).tune(1, 1)
    assert Path(study.trials[0].user_attrs["folder"]).name == "trial-0-1"
    assert study.trials[0].value == pytest.approx(
        statistics.mean(v for _, v in toy.returns(toy.Args(x=study.trials[0].params["x"]))[-50:]),
        rel=1e-4,
    )


def test_plots_lie_next_to_the_study(tmp_path, capsys):
    (tmp_path / "there").mkdir()

    def sample(trial):
        x, seconds = trial.suggest_float("x", 0, 1), trial.suggest_float("seconds", 0, 1e-3)
        return {"x": x, "seconds": seconds}

    make(sample, storage="sqlite:///there/study.db", study_name="s").tune(3, 1)
    assert Path("there/study.db").is_file()
    for name in ("history", "importance"):
        png = Path(f"there/tuning/s/{name}.png").read_bytes()
        assert png.startswith(b"\x89PNG") and len(png) > 5000
        assert (
            f"plot: there/tuning/s/{name}.png\n" in capsys.readouterr().out or name == "importance"
        )


def test_best_flags_are_printed_as_a_command(capsys):
    make(lambda trial: {"x": 0.5, "mode": "it's good", "track": False}, {"A": [0, 10]}).tune(1, 2)
    out = capsys.readouterr().out.splitlines()
    assert out[-3] == "best trial 0 of 1: 0.5275" and out[-2] == f"A: {METRIC} 5.28 over 2 seeds"
    assert out[-1].endswith("""toy.py --env-id A --x 0.5 --mode 'it'"'"'s good' --no-track""")


def test_wandb_kwargs_reach_the_runs():
    wandb = dict(project="p", entity="e", tags=["a", "b"], mode="offline")
    study = make(wandb_kwargs=wandb, study_name="s").tune(1, 1)
    run = about(only_run(Path(study.trials[0].user_attrs["folder"], "A__1")))
    assert (
        run["args"]["track"]
        and run["args"]["wandb_project_name"] == "p"
        and run["args"]["wandb_entity"] == "e"
    )
    wanted = {
        "WANDB_TAGS": "a,b",
        "WANDB_MODE": "offline",
        "WANDB_RUN_GROUP": "s",
        "OMP_NUM_THREADS": "1",
    }
    assert wanted.items() <= run["variables"].items()


@pytest.mark.parametrize(
    ("settings", "counts", "words"),
    [
        (dict(script="no_such.py"), (1, 1), "there is no .*no_such.py"),
        (dict(target_scores={"A": [1, 1]}), (1, 1), "low below high"),
        (dict(target_scores={"A": [0, 1], "B": None}), (1, 1), "each needs its range"),
        (dict(direction="up"), (1, 1), "direction must be"),
        (
            dict(aggregation_type="sum"),
            (1, 1),
            "aggregation_type must be one of average, median, max, min",
        ),
        (dict(workers=0), (1, 1), "whole numbers from 1 on"),
        (dict(), (1, 0), "whole numbers from 1 on"),
        (dict(), (1.5, 1), "whole numbers from 1 on"),
        (
            dict(wandb_kwargs={"colour": 1}),
            (1, 1),
            "wandb_kwargs can have project, entity, group, tags, mode",
        ),
        (dict(storage="sqlite:///no/such/folder/x.db"), (1, 1), "cannot open study .* in sqlite:///no/such/folder/x.db"),
        (dict(storage="nonsense"), (1, 1), "cannot open study .* in nonsense"),
        (dict(storage="postgresql+psycopg://me:secret@127.0.0.1:1/x"), (1, 1), r"in postgresql\+psycopg://me:\*\*\*@127.0.0.1:1/x"),
        (dict(params_fn=lambda trial: {"seed": 1}), (1, 1), "params_fn must not set seed"),
        (dict(params_fn=lambda trial: {"x": object()}), (1, 1), "params_fn failed: TypeError"),
        (dict(params_fn=lambda trial: 1 / 0), (1, 1), "params_fn failed: ZeroDivisionError"),
    ],
)  # fmt: skip
def test_bad_settings_are_one_line(settings, counts, words):
    with pytest.raises(SystemExit, match=words) as refusal:
        make(**settings).tune(*counts)
    assert "\n" not in refusal.value.code and "secret" not in refusal.value.code
    assert not Path("tuning").exists()


def test_scores_of_other_settings_are_refused():
    sample = lambda trial: {"total-timesteps": 100}  # noqa: E731
    make(sample, study_name="s").tune(1, 1)
    with pytest.raises(
        SystemExit,
        match=r"study s in .*cleanrl_hpopt.db has num_seeds 1, not 2: "
        "give this one another study_name",
    ):
        make(sample, study_name="s").tune(2, 2)
    with pytest.raises(SystemExit, match=r"has target_scores \{'A': None\}"):
        make(sample, {"A": [0, 1]}, study_name="s").tune(2, 1)
    with pytest.raises(SystemExit, match="study s has total-timesteps 100: give"):
        make(lambda trial: {"total-timesteps": 50}, study_name="s").tune(2, 1)
    study = make(sample, study_name="s").tune(2, 1)
    assert len(trials(study, TrialState.COMPLETE)) == 2, "what was refused does not count"


CONFIG = f"""
import cleanrl_utils.tuner
from cleanrl_utils.tuner import Tuner
cleanrl_utils.tuner.HEARTBEAT, cleanrl_utils.tuner.GRACE = 1, 3
num_trials, num_seeds, hang = 3, 2, "nowhere"
params_fn = lambda trial: {{"x": trial.suggest_float("x", 0, 1), "hang": hang}}
tuner = Tuner({toy.__file__!r}, {METRIC!r}, {{"A": None}}, params_fn, study_name="s", workers=2)
"""


def start(config, *flags, cwd="."):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "cleanrl_utils.tuner", str(config), *map(str, flags)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    heard = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731  # also where pytest ignores it
    return subprocess.Popen(command, cwd=cwd, env=environment, preexec_fn=heard, **pipes)


def running_pids(folder="."):
    """Of the toys at work below a folder, and of their children."""
    pids = [
        int(pid)
        for path in Path(folder).glob("tuning/*/*/*/pids")
        for pid in path.read_text().split()
    ]
    return [pid for pid in pids if is_alive(pid)]


@pytest.mark.parametrize(
    "how",
    [
        signal.SIGKILL,
        *(pytest.param(x, marks=pytest.mark.slow) for x in (signal.SIGINT, signal.SIGTERM)),
    ],
)
def test_killed_study_goes_on(how):
    """In the second trial, after one seed: runs die with the tuner, the next one finishes it."""
    Path("config.py").write_text(CONFIG.replace("nowhere", "trial-1/A__2"))
    first = start("config.py", "--num-trials", 2)  # so that no third trial begins meanwhile
    open_study = lambda: optuna.load_study(study_name="s", storage="sqlite:///cleanrl_hpopt.db")  # noqa: E731
    wait_until(lambda: len(running_pids()) == 2)
    wait_until(lambda: "A seed 1" in open_study().trials[1].user_attrs)
    pids = running_pids()
    first.send_signal(how)
    out = first.communicate(timeout=120)[0]
    wait_until(lambda: not any(map(is_alive, pids)), 10)
    assert (
        first.returncode == -9
        if how == signal.SIGKILL
        else out.endswith("stopped: the same command goes on where the study was\n")
    )
    assert "Traceback" not in out and first.returncode != 0
    cut = open_study().trials[1]
    assert cut.state.name == ("RUNNING" if how == signal.SIGKILL else "FAIL")

    second = start("config.py")
    out = second.communicate(timeout=120)[0]
    assert second.returncode == 0 and "1 of 3 trials are finished\n" in out, out
    study = open_study()
    assert not trials(study, TrialState.RUNNING, TrialState.WAITING)
    assert (
        len(trials(study, TrialState.COMPLETE, TrialState.PRUNED)) == 3
        and len(trials(study, TrialState.FAIL)) == 1
    )
    (again,) = [trial for trial in study.trials if trial.number != 1 and trial.params == cut.params]
    assert (
        again.state == TrialState.COMPLETE
        and study.trials[1].state == TrialState.FAIL
        and study.trials[1].value is None
    )
    folder = Path(again.user_attrs["folder"])
    assert [path.name for path in folder.iterdir()] == ["A__2"], (
        "the finished seed was not run again"
    )
    known = [
        statistics.mean(v for _, v in toy.returns(toy.Args(seed=seed, x=cut.params["x"]))[-50:])
        for seed in (1, 2)
    ]
    assert again.value == pytest.approx(statistics.mean(known), rel=1e-4)


def test_trial_that_died_before_its_first_sign_of_life(monkeypatch):
    monkeypatch.setattr(tuner_module, "GRACE", 1)
    monkeypatch.setattr(tuner_module, "HEARTBEAT", 1)
    optuna.create_study(
        study_name="s", storage="sqlite:///cleanrl_hpopt.db", direction="maximize"
    ).ask()
    study = make(study_name="s").tune(2, 1)
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE", "COMPLETE"]


@pytest.mark.parametrize("name", ["optuna", "sqlalchemy"])
def test_missing_extra_is_one_line(name):
    code = f"import sys; sys.modules[{name!r}] = None; import cleanrl_utils.tuner"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and re.fullmatch(
        r"the tuner needs the optuna extra of pyproject.toml: .*\n", done.stderr
    )


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        ("", [], "must make a Tuner called tuner"),
        ("1 / 0", [], "config.py: ZeroDivisionError: division by zero"),
        (
            CONFIG.replace("num_trials, num_seeds, hang = 3, 2, ", "hang = "),
            [],
            "give --num-trials and --num-seeds",
        ),
        (CONFIG, ["--storage", "sqlite:///no/folder/x.db"], "cannot open study s in sqlite:///no/folder"),
        (None, [], "there is no config.py"),
    ],
)  # fmt: skip
def test_bad_configs_are_one_line(text, flags, words, monkeypatch):
    if text is not None:
        Path("config.py").write_text(text)
    monkeypatch.setattr(sys, "argv", ["tuner", "config.py", *flags])
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as refusal:
        tuner_module.main()
    signal.signal(signal.SIGTERM, handler)
    assert words in refusal.value.code and "\n" not in refusal.value.code


def test_flags_override_the_config():
    Path("config.py").write_text(CONFIG)
    flags = [
        "--num-trials",
        1,
        "--num-seeds",
        1,
        "--workers",
        2,
        "--study-name",
        "other",
        "--storage",
        "sqlite:///other.db",
    ]
    done = start("config.py", *flags)
    out = done.communicate()[0]
    assert (
        done.returncode == 0
        and "study other in sqlite:///other.db: 0 of 1 trials are finished" in out
    ), out
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

        run(f"{POSTGRES}/initdb", "-D", f"{folder}/data", "-U", "me", "--auth=trust", "--no-sync")
        options = f"-k {folder} -c listen_addresses='' -c fsync=off"
        run(
            f"{POSTGRES}/pg_ctl",
            "-D",
            f"{folder}/data",
            "-w",
            "-l",
            f"{folder}/log",
            "-o",
            options,
            "start",
        )
        yield f"postgresql+psycopg://me@/postgres?host={folder}"
        run(f"{POSTGRES}/pg_ctl", "-D", f"{folder}/data", "-m", "immediate", "stop")


def test_machines_share_a_study_through_postgresql(postgres):
    """Two tuners with folders of their own; after kill -9, one takes over the other's trial."""
    tuners = []
    for name in ("one", "two"):
        Path(name).mkdir()
        Path(name, "config.py").write_text(CONFIG.replace("nowhere", "/two/"))
        tuners.append(start("config.py", "--num-trials", 5, "--storage", postgres, cwd=name))
    one, two = tuners
    wait_until(lambda: running_pids("two"))
    pids = running_pids("two")
    two.kill()
    two.communicate()
    out = one.communicate(timeout=120)[0]
    assert one.returncode == 0, out
    wait_until(lambda: not any(map(is_alive, pids)), 10)
    study = optuna.load_study(study_name="s", storage=postgres)
    assert not trials(study, TrialState.RUNNING, TrialState.WAITING)
    assert len(trials(study, TrialState.COMPLETE, TrialState.PRUNED)) == 5
    (cut,) = trials(study, TrialState.FAIL)
    assert "/two/" in cut.user_attrs["folder"]
    (again,) = [
        trial for trial in study.trials if trial.params == cut.params and trial.number != cut.number
    ]
    assert (
        again.state in (TrialState.COMPLETE, TrialState.PRUNED)
        and "/one/" in again.user_attrs["folder"]
    )


def test_page_shows_the_data():
    """docs/tuner.md: its table has every fresh seed and right means; its best trial is the best."""
    page = (ROOT / "docs" / "tuner.md").read_text()
    read = lambda name: list(csv.DictReader((ROOT / "docs" / "tuner" / name).open()))  # noqa: E731
    seeds, trials = read("fresh_seeds.csv"), read("trials.csv")
    assert len(seeds) == 8 and all(float(row["tuned"]) > float(row["defaults"]) for row in seeds)
    for row in seeds:
        assert (
            f"| {row['seed']} | {row['defaults']} | {row['tuned']} | {int(row['tuned_400_at']):,} |"
            in page
        )
    means = [statistics.mean(float(row[name]) for row in seeds) for name in ("defaults", "tuned")]
    assert "| mean | {:.1f} | {:.1f} | |".format(*means) in page
    best = max(
        (row for row in trials if row["state"] == "COMPLETE"), key=lambda row: float(row["score"])
    )
    assert f"best trial {best['trial']} of {len(trials)}: {best['score']}" in page
    states = [row["state"] for row in trials]
    assert (
        f"{states.count('COMPLETE')} trials were trained to the end, "
        f"{states.count('PRUNED')} were pruned, none failed" in page
    )
