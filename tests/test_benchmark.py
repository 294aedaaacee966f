"""cleanrl_utils.benchmark: every planned run ends once, whole, whatever is killed on the way."""

import contextlib
import io
import json
import os
import pty
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import types
import urllib.request
from pathlib import Path

import pytest
import tyro

from cleanrl_utils import processes
from cleanrl_utils.benchmark import aws as on_aws
from cleanrl_utils.benchmark import log as run_log
from cleanrl_utils.benchmark import plan, runner, summary, task
from cleanrl_utils.benchmark import ray as on_ray
from cleanrl_utils.benchmark.screen import Screen
from tests.harness import PPO, ROOT, about, scalars

WALK = '''
"""Like an algorithm file: run folder, bar, checkpoints, --resume. Each step logs its process."""
import argparse, json, os, subprocess, sys, time
from pathlib import Path
from tqdm import tqdm

parser = argparse.ArgumentParser()
flags = dict(env_id="Walk-v0", seed=1, steps=8, delay=0.02, crash_at=0, resume="", helper=0)
for name, default in flags.items():
    parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
args = parser.parse_args()
folder = Path(args.resume or f"runs/{args.env_id}__walk__{args.seed}__{time.time_ns()}")
if args.resume:
    args = argparse.Namespace(**json.loads((folder / "run.json").read_text())["args"])
else:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"args": vars(args), "env": dict(os.environ)}))
(folder / "lock").touch()
(folder / "pid").write_text(str(os.getpid()))
print(f"run folder: {folder}")
if args.helper:  # what outlives its parent unless the whole group is ended
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
done = int((folder / "checkpoint.pt").read_text()) if (folder / "checkpoint.pt").exists() else 0
bar = tqdm(range(done, args.steps), initial=done, total=args.steps, unit="step", unit_scale=True)
for step in bar:
    time.sleep(args.delay)
    with (folder / "steps.txt").open("a") as file:
        file.write(f"{os.getpid()} {step + 1}\\n")
    bar.set_postfix(episodic_return=f"{step + 1:.1f}")
    (folder / "checkpoint.tmp").write_text(str(step + 1))
    os.replace(folder / "checkpoint.tmp", folder / "checkpoint.pt")
    if args.crash_at == step + 1:
        raise ValueError("it went wrong")
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder with walk.py in it, where `python` is the one of the tests."""
    (tmp_path / "walk.py").write_text(WALK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for number in (
        signal.SIGINT,
        signal.SIGHUP,
    ):  # a shell in the background may have them ignored, and children take that over
        signal.signal(number, signal.default_int_handler)
    for name in (*processes.SETTINGS, "CUDA_VISIBLE_DEVICES", "WANDB_TAGS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def words(command, *flags):
    commands = [command] if isinstance(command, str) else command
    return [
        sys.executable,
        "-m",
        "cleanrl_utils.benchmark",
        *(w for c in commands for w in ("--command", c)),
        *map(str, flags),
    ]


def bench(command, *flags):
    return subprocess.run(words(command, *flags), capture_output=True, text=True)


def events(folder="runs/benchmark"):
    return [json.loads(line) for line in Path(folder, "journal.jsonl").read_text().splitlines()]


def count(event):
    return sum(e["event"] == event for e in events())


def wait_for(condition, seconds=60):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "it did not happen"
        time.sleep(0.05)


def processes_here():
    """The command lines of the processes whose working directory is this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (
                os.path.realpath(process / "cwd") == os.getcwd()
                and int(process.name) != os.getpid()
            ):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def check_steps(folder, steps):
    """All steps were made, and no two processes were at the run at the same time."""
    made = [
        tuple(map(int, line.split())) for line in (folder / "steps.txt").read_text().splitlines()
    ]
    assert sorted({step for _, step in made}) == list(range(1, steps + 1))
    turns = [pid for i, (pid, _) in enumerate(made) if i == 0 or made[i - 1][0] != pid]
    assert len(turns) == len(set(turns)), f"{folder.name}: two processes took turns"
    return len(turns)


def test_plan_is_a_matrix_and_nothing_is_written(here):
    done = bench(
        ["python walk.py", "python walk.py --steps 3"],
        "--env-ids",
        "A-v0",
        "B-v0",
        "--num-seeds",
        2,
        "--start-seed",
        7,
        "--dry-run",
    )
    assert done.returncode == 0, done.stderr
    *planned, summary = done.stdout.splitlines()
    assert planned == [
        f"queued  python walk.py {flags}--env-id {env_id} --seed {seed}"
        for seed in (7, 8)
        for flags in ("", "--steps 3 ")
        for env_id in ("A-v0", "B-v0")
    ]
    assert summary == "8 runs, 0 of them finished" and not Path("runs").exists()
    listed = bench("python walk.py", "--workers", 0)
    assert (
        listed.stdout.splitlines()[0] == "queued  python walk.py --seed 1"
        and not Path("runs").exists()
    )


def test_log_of_a_whole_benchmark(here):
    done = bench("python walk.py", "--env-ids", "A-v0", "B-v0", "--num-seeds", 2, "--workers", 3)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "\x1b" not in done.stdout and lines[-1].endswith(
        "4 of 4 done, 0 queued, 0 running, 0 failed"
    )
    for env_id in ("A-v0", "B-v0"):
        for seed in (1, 2):
            (folder,) = Path("runs").glob(f"{env_id}__walk__{seed}__*")
            assert check_steps(folder, 8) == 1
            assert [
                line[10:]
                for line in lines
                if f"{env_id} walk seed {seed}" in line and "started" in line
            ]
            (ended,) = [
                line for line in lines if f"{env_id} walk seed {seed}" in line and "done" in line
            ]
            assert re.search(rf"return 8, [\d,]+ steps/s, 0:0\d, {folder}$", ended)
            (log,) = Path("runs/benchmark").glob(f"{env_id}__walk__{seed}__*.log")
            text = log.read_text()
            assert text.startswith(
                f"$ python walk.py --env-id {env_id} --seed {seed}\nrun folder: {folder}\n"
            )
            assert re.search(r"\nexit code 0 after [\d.]+ s\n$", text) and "8.00/8.00" in text
    assert count("started") == count("done") == 4
    started = [line.split()[2:] for line in lines if "started" in line]
    assert [words[-1] for words in started] == ["1", "1", "2", "2"], "first seeds first"


def test_each_run_has_one_thread_a_gpu_and_a_tag(here, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setenv("MKL_NUM_THREADS", "2")  # who sets it, has it
    monkeypatch.setenv("WANDB_TAGS", "mine")
    for command in (
        "init -q",
        "add walk.py",
        "-c user.name=me -c user.email=me@here commit -qm first",
        "tag v9.1",
    ):
        subprocess.run(["git", *command.split()], check=True)
    assert bench("python walk.py --delay 0.2", "--num-seeds", 4, "--workers", 2).returncode == 0
    environments = [json.loads(path.read_text())["env"] for path in Path("runs").glob("*/run.json")]
    assert len(environments) == 4
    assert {env["OMP_NUM_THREADS"] for env in environments} == {"1"} and {
        env["MKL_NUM_THREADS"] for env in environments
    } == {"2"}
    assert sorted(env["CUDA_VISIBLE_DEVICES"] for env in environments) == ["3", "3", "5", "5"]
    assert {env["WANDB_TAGS"] for env in environments} == {"mine,v9.1"}
    assert bench("python walk.py --steps 1", "--num-seeds", 1, "--no-auto-tag").returncode == 0
    newest = max(Path("runs").glob("*/run.json"), key=lambda path: path.stat().st_mtime_ns)
    assert json.loads(newest.read_text())["env"]["WANDB_TAGS"] == "mine"


def test_a_crash_is_resumed_and_does_not_stop_the_rest(here):
    done = bench(
        ["python walk.py --crash-at 5", "python walk.py"], "--num-seeds", 2, "--workers", 2
    )
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.count("retrying") == 2
        and "retrying  walk --crash-at 5 seed 1: ValueError: it went wrong" in done.stdout
    )
    folders = [path.parent for path in Path("runs").glob("*/run.json")]
    assert len(folders) == 4, "a retry goes on in the same folder"
    assert sorted(check_steps(folder, 8) for folder in folders) == [1, 1, 2, 2]
    log = next(
        path.read_text()
        for path in Path("runs/benchmark").glob("*.log")
        if "went wrong" in path.read_text()
    )
    assert re.search(r"^\$ python walk.py --resume runs/\S+$", log, re.M)


def test_what_fails_for_good_is_told(here):
    Path("broken.py").write_text("raise ValueError('no\\nway')")
    done = bench(["python broken.py", "python walk.py"], "--num-seeds", 1, "--retries", 1)
    assert done.returncode == 1
    assert [e["attempt"] for e in events() if e["event"] == "failed"] == [1, 2] and count(
        "done"
    ) == 1
    assert done.stdout.splitlines()[-1].endswith("1 of 2 done, 0 queued, 0 running, 1 failed")
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "failed: broken seed 1: ValueError: no way (runs/benchmark/default__broken__1__"
    )
    again = bench(
        ["python broken.py", "python walk.py"], "--num-seeds", 1, "--dry-run"
    ).stdout.splitlines()
    assert again[0].startswith("failed") and again[1].startswith("done")


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("python walk.py --no-such-flag", "walk.py: error: unrecognized arguments: --no-such-flag"),
        ("python flags.py --no-such-flag", "Unrecognized options: --no-such-flag"),
        (
            f"python -I -S {PPO.with_stem('dqn_jax')}",
            "flax is not installed: pip install -r requirements/requirements-jax.txt",
        ),
        (
            f"python -I -S {PPO}",
            "gymnasium is not installed: pip install -r requirements/requirements.txt",
        ),
        ("python refuses.py env", "cannot train on Nope-v1: Environment `Nope` doesn't exist."),
        ("python refuses.py login", "cannot log to runs: No API key configured. Use `wandb login`"),
    ],
    ids=["flag", "flag-tyro", "extra", "base", "env", "login"],
)
def test_what_cannot_work_is_not_tried_again(here, command, why):
    Path("flags.py").write_text(
        "import dataclasses, tyro\n@dataclasses.dataclass\nclass A:\n    seed: int = 1\ntyro.cli(A)"
    )
    Path("refuses.py").write_text(
        "import sys\n"
        "if sys.argv[1] == 'env':\n"
        "    sys.exit('cannot train on Nope-v1: Environment `Nope` doesn\\'t exist.')\n"
        "sys.exit('cannot log to runs: No API key configured. Use `wandb login`')"
    )
    done = bench(command, "--num-seeds", 1)
    assert done.returncode == 1 and count("started") == 1
    (line,) = done.stderr.splitlines()
    assert f": {why} (" in line


def test_runs_that_fail_alike_end_the_benchmark(here):
    Path("broken.py").write_text("raise ValueError('seed 3')")
    done = bench("python broken.py", "--num-seeds", 20)
    assert done.returncode == 1 and count("started") in (3, 4)
    line = "stopped: the first 3 runs failed with the same error: ValueError: seed 3"
    assert done.stderr.splitlines() == [line]
    assert done.stdout.splitlines()[-1].endswith("0 of 20 done, 20 queued, 0 running, 0 failed")


def test_runs_that_fail_alike_beside_one_that_works_do_not(here):
    Path("broken.py").write_text("raise ValueError('no way')")
    commands = ["python walk.py --steps 30 --delay 0.1", "python broken.py"]
    done = bench(commands, "--num-seeds", 3, "--workers", 2, "--retries", 0)
    assert "3 of 6 done, 0 queued, 0 running, 3 failed" in done.stdout.splitlines()[-1]
    assert done.returncode == 1 and "alike" not in done.stderr


def test_a_finished_run_whose_folder_is_gone_runs_again(here):
    assert bench("python walk.py", "--num-seeds", 2).returncode == 0
    (first,) = Path("runs").glob("*__walk__1__*")
    shutil.rmtree(first)
    listed = bench("python walk.py", "--num-seeds", 2, "--workers", 0).stdout.splitlines()
    assert [line.split()[0] for line in listed[:2]] == ["gone", "done"]
    again = bench("python walk.py", "--num-seeds", 2)
    assert "the folders of 1 finished runs are gone: they run again" in again.stdout
    assert again.returncode == 0 and count("started") == 3
    assert len(list(Path("runs").glob("*__walk__1__*"))) == 1


def test_the_end_is_a_table_and_a_command_that_compares(here):
    """Mean and sample standard deviation of the last 100 episodes, and each command as a side."""
    from torch.utils.tensorboard import SummaryWriter

    commands = ["python walk.py --lr 1e-4", "python walk.py --lr 3e-4"]
    runs = plan.make_plan(plan.Args(tuple(commands), ("A-v0",), num_seeds=2))
    returns = {("1e-4", 1): 10.0, ("1e-4", 2): 20.0, ("3e-4", 1): 30.0, ("3e-4", 2): 50.0}
    for run in runs:
        lr = run.words[run.words.index("--lr") + 1]
        run.state = "done"
        run.run_folder = Path(f"runs/A-v0__walk__{run.seed}__{lr}")
        with SummaryWriter(run.run_folder) as writer:
            for step in range(1, 151):
                value = returns[lr, run.seed] if step > 50 else -999
                writer.add_scalar("charts/episodic_return", value, step)
        flags = {"exp_name": "walk", "env_id": "A-v0", "seed": run.seed, "lr": float(lr)}
        flags["capture_video"] = lr == "1e-4"  # which is no setting
        about = {"file": "walk.py", "args": flags | {"total_timesteps": 150}}
        (run.run_folder / "run.json").write_text(json.dumps(about))
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        summary.print_summary(runs, ("A-v0",))
    text = output.getvalue()
    assert re.search(r"A-v0 .*lr=0.0001.* 2 +15.00 ± 7.07", text), text
    assert re.search(r"A-v0 .*lr=0.0003.* 2 +40.00 ± 14.14", text), text
    command = "rlops --filters 'walk?lr=0.0001' 'walk?lr=0.0003' --env-ids A-v0 --report"
    assert text.splitlines()[-1] == f"python -m cleanrl_utils.{command}"


def test_runs_that_rlops_cannot_read_are_in_no_table(here, capsys):
    """A program that keeps the contract of the page may have other flags."""
    (run,) = plan.make_plan(plan.Args(("python walk.py",), num_seeds=1))
    run.state, run.run_folder = "done", Path("runs/mine")
    run.run_folder.mkdir(parents=True)
    (run.run_folder / "events.out.tfevents.1").touch()
    for text in ('{"args": {"seed": 1}}', '{"args": {"exp_name": "walk"}}', "{", None):
        (run.run_folder / "run.json").unlink(missing_ok=True)
        if text:
            (run.run_folder / "run.json").write_text(text)
        summary.print_summary([run], ())
    assert capsys.readouterr().out == ""


def test_dry_run_sees_what_cannot_work(here, monkeypatch):
    """Unknown environments, flags that do not fit and a missing login, without a run."""
    monkeypatch.setenv("HOME", str(here))  # nobody is logged in
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    done = bench(
        [f"python {PPO}", f"python {PPO} --num-envs 0", f"python {PPO} --track", "python walk.py"],
        *("--env-ids", "CartPole-v1", "Nope-v1", "--num-seeds", 1, "--dry-run"),
    )
    assert done.returncode == 1, done.stderr
    told = [(line.split()[0], line.partition("--seed 1")[2]) for line in done.stdout.splitlines()]
    flags = ("refused", ": cannot run with these flags: num_envs must be positive, not 0")
    nope = ("refused", ": cannot train on Nope-v1: Environment `Nope` doesn't exist.")
    login = ("refused", ": cannot log to runs: No API key configured.")
    works = ("queued", "")
    expected = [works, nope, flags, flags, login, nope, works, works]
    for (word, why), (expected_word, expected_why) in zip(told[:8], expected, strict=True):
        assert (
            word == expected_word
            and why.startswith(expected_why)
            and bool(why) == bool(expected_why)
        )
    assert told[-1][0] == "8" and not Path("runs").exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = = 1", "SyntaxError: invalid syntax"),
        ("import odd", "RuntimeError: it is odd"),
        ("import chatty", "ValueError: no way"),
        ("import deadly", "killed by SIGKILL (out of memory?)"),
    ],
)
def test_dry_run_counts_no_answer_as_works(here, text, why):
    """Also if what the file imports fails, prints, or ends the process that tries it out."""
    Path("odd.py").write_text("raise RuntimeError('it is odd')")
    Path("chatty.py").write_text("print('hello from the community')")
    Path("deadly.py").write_text("import os\nos.kill(os.getpid(), 9)")
    Path("mine.py").write_text(f"{text}\nraise ValueError('no way')\ndef make_run_folder(): 0\n")
    done = bench("python mine.py", "--env-ids", "A-v0", "B-v0", "--num-seeds", 1, "--dry-run")
    lines = [f"refused python mine.py --env-id {name} --seed 1: {why}" for name in ("A-v0", "B-v0")]
    assert done.returncode == 1 and done.stdout.splitlines()[:2] == lines, done.stderr


def test_yaml_and_grid(here):
    """A file has the flags of the command line; those given beside it win."""
    Path("mine.yaml").write_text(
        "command: python walk.py\nenv_ids: [A-v0, B-v0]\nnum-seeds: 2\nauto_tag: false\n"
        "grid:\n  steps: [3, 5]\n  norm_adv: [true, false]\n"
    )
    listed = bench([], "--config", "mine.yaml", "--env-ids", "C-v0", "--dry-run").stdout
    flags = [f"--steps {n} --{norm}" for n in (3, 5) for norm in ("norm-adv", "no-norm-adv")]
    assert listed.splitlines() == [
        *(
            f"queued  python walk.py {words} --env-id C-v0 --seed {seed}"
            for seed in (1, 2)
            for words in flags
        ),
        "8 runs, 0 of them finished",
    ]
    grid = ["--grid", "steps=3,5", "norm_adv=True,False", "--env-ids", "C-v0", "--num-seeds", 2]
    assert bench("python walk.py", *grid, "--dry-run").stdout == listed
    instead = bench("python walk.py --delay 0", "--config", "mine.yaml", "--workers", 0).stdout
    assert instead.count("python walk.py --delay 0 ") == 16, "not added to the file's command"


def test_yaml_of_the_docs(here):
    text = (ROOT / "docs" / "benchmark.md").read_text().split("```yaml\n")[1].split("```")[0]
    Path("mine.yaml").write_text(text.replace("cleanrl/ppo.py", str(PPO)))
    listed = bench([], "--config", "mine.yaml", "--workers", 0)
    assert listed.stdout.splitlines()[-1] == "12 runs, 0 of them finished", listed.stderr


@pytest.mark.parametrize(
    ("text", "flags", "why"),
    [
        ("command: [", [], "cannot read mine.yaml: while parsing a flow node"),
        ("- x", [], "cannot read mine.yaml: it is not a list of `flag: value`"),
        ("seeds: 3", [], "Unrecognized options: --seeds=3|Unrecognized options: --seeds"),
        ("num_seeds: ten", [], "Error parsing --num-seeds: invalid literal"),
        ("command: python walk.py", ["--grid", "steps"], "--grid steps: write NAME=VALUE,VALUE"),
        ("command: python walk.py", ["--grid", "a b=1"], "cannot use --grid a b=1: 'a b' is not"),
    ],
)
def test_yaml_and_grid_that_cannot_be_read(here, text, flags, why):
    Path("mine.yaml").write_text(text)
    done = bench([], "--config", "mine.yaml", *flags)
    assert done.returncode != 0 and done.stdout == "" and "Traceback" not in done.stderr
    assert re.search(why, done.stderr) and not Path("runs").exists()


def test_runs_of_several_commands_are_told_apart():
    commands = [
        "python a/ppo.py --learning-rate 1e-4 --num-envs 4",
        "python a/ppo.py --learning-rate 3e-4 --num-envs 4 --no-norm-adv",
        "python b/ppo.py",
        "python dqn.py --start-e -0.5",
    ]
    assert plan.make_labels(commands) == [
        "a/ppo.py --learning-rate 1e-4",
        "a/ppo.py --learning-rate 3e-4 --no-norm-adv",
        "b/ppo.py",
        "dqn",
    ]


def test_rows_differ_at_80_columns(monkeypatch):
    """Flags fold instead of being cut, at any length."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "40")
    common = "python cleanrl/ppo_continuous_action.py --total-timesteps 1000000 --learning-rate"
    rates = ("0.00010000000001", "0.00010000000002")
    args = plan.Args(tuple(f"{common} {rate}" for rate in rates), ("HalfCheetah-v4", "Humanoid-v4"))
    page = Screen(plan.make_plan(args))
    with page.console.capture() as captured:
        page.console.print(page.page())
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    text = "".join("".join(line[8:56].split()) for line in lines)
    for env_id in args.env_ids:
        for rate in rates:
            for seed in (1, 2, 3):
                title = f"{env_id}ppo_continuous_action--learning-rate{rate}seed{seed}"
                assert text.count(title) == 1, captured.get()
    assert "total" not in captured.get(), "only what differs is shown"


@pytest.mark.parametrize(
    ("flags", "is_refused"),
    [
        (("", ""), True),
        (("", "--exp-name changed"), False),
        (("--exp_name=mine", "--exp-name mine"), True),
        (("", "--exp-name walk"), True),
    ],
)
def test_two_files_need_two_names(here, flags, is_refused):
    """The summary would count one as earlier runs of the other."""
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Path(folder, "walk.py").write_text("exp_name = 'walk'\n" + WALK)
    done = bench([f"python a/walk.py {flags[0]}", f"python b/walk.py {flags[1]}"], "--workers", 0)
    told = re.fullmatch(r"a/walk.py and b/walk.py have the same name, \w+: .*\n", done.stderr)
    assert done.returncode == is_refused and bool(told) == is_refused, done.stderr
    for folder in ("a", "b"):  # without such a flag, they are in no summary either
        Path(folder, "walk.py").write_text(WALK)
    assert bench(["python a/walk.py", "python b/walk.py"], "--workers", 0).returncode == 0


@pytest.mark.parametrize(
    ("command", "resumed"),
    [
        ("python a.py --env-id A --x 1", "python a.py --resume runs/x --env-id A"),
        ("python -m my.train --x 1", "python -m my.train --resume runs/x"),
        (
            "python -m torch.distributed.run --nproc-per-node 2 a.py --x 1 --env-id A",
            "python -m torch.distributed.run --nproc-per-node 2 a.py --resume runs/x --env-id A",
        ),
        ("./train --x 1", "./train --x 1"),
    ],
)
def test_what_resumes_a_run(command, resumed):
    assert task.resuming(command.split(), Path("runs/x")) == resumed.split()


def test_jobs_of_another_backend_are_forgotten(here):
    """After Slurm with --no-wait, a run on this machine is done, and stays done."""
    (run,) = plan.make_plan(plan.Args(("python walk.py",), num_seeds=1))
    run.folder.mkdir(parents=True)
    sent = {"run": run.name, "event": "submitted", "job": "123_0"}
    runner.Journal(run.folder, "slurm").write(sent)
    for backend, job in (("slurm", "123_0"), ("aws-batch", None), ("local", None)):
        run.job = None
        runner.recall([run], runner.Journal(run.folder, backend))
        assert run.job == job, backend
    runner.Journal(run.folder).path.write_text(json.dumps(sent))  # by an older runner
    done = bench("python walk.py", "--num-seeds", 1)
    assert done.returncode == 0 and count("cut") == 0 and events()[-1]["event"] == "done"


@pytest.mark.parametrize(
    ("command", "flags", "why"),
    [
        ("python walk.py --seed 3", [], "the runner adds --seed"),
        ("python walk.py --env_id=A", [], "the runner adds --env-id"),
        ("python wolk.py", [], "there is no wolk.py"),
        ("no-such walk.py", [], "there is no program no-such"),
        ("python walk.py", ["--num-seeds", 0], "--num-seeds must be"),
        ("python walk.py", ["--env-ids", "A", "A"], "planned twice"),
        ("python 'walk.py", [], "No closing quotation"),
        ("python walk.py", ["--folder", "walk.py"], "cannot write walk.py"),
    ],
)
def test_a_wrong_command_is_one_line(here, command, flags, why):
    done = bench(command, *flags)
    assert done.returncode not in (0, None) and done.stdout == "" and not Path("runs").exists()
    assert why in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "number",  # all three go one way: the names differ
    [
        signal.SIGINT,
        *(pytest.param(x, marks=pytest.mark.slow) for x in (signal.SIGTERM, signal.SIGHUP)),
    ],
)
def test_a_signal_ends_everything_and_the_same_command_goes_on(here, number):
    command = words(
        "python walk.py --steps 15 --delay 0.1 --helper 1", "--num-seeds", 3, "--workers", 2
    )
    runner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(list(Path("runs").glob("*/checkpoint.pt"))) == 2)
    runner.send_signal(number)
    _, said = runner.communicate(timeout=30)
    assert (
        runner.returncode == 128 + number
        and f"stopped by {number.name}: repeat the command to continue" in said
    )
    assert processes_here() == [], "children, and theirs, are gone"
    assert count("started") == count("cut") == 2 and count("done") == 0
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folders = [path.parent for path in Path("runs").glob("*/run.json")]
    assert sorted(check_steps(folder, 15) for folder in folders) == [1, 2, 2]
    assert processes_here() == [], "nothing is left behind by runs that ended well either"
    skipped = subprocess.run(command, capture_output=True, text=True)
    assert (
        skipped.returncode == 0
        and "3 of 3 runs are finished and skipped" in skipped.stdout
        and count("started") == 5
    )


def test_nohup_is_heeded_and_a_killed_watcher_costs_an_attempt(here):
    command = [
        "nohup",
        *words("python walk.py --steps 15 --delay 0.1 --helper 1", "--num-seeds", 1),
    ]
    runner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    wait_for(lambda: list(Path("runs").glob("*/checkpoint.pt")))
    runner.send_signal(signal.SIGHUP)
    (watcher,) = Path(f"/proc/{runner.pid}/task/{runner.pid}/children").read_text().split()
    os.kill(int(watcher), signal.SIGKILL)
    said, _ = runner.communicate(timeout=60)
    assert runner.returncode == 0 and "retrying  walk seed 1: killed by SIGKILL" in said
    (folder,) = (path.parent for path in Path("runs").glob("*/run.json"))
    assert check_steps(folder, 15) == 2 and processes_here() == []


def test_whoever_asks_twice_does_not_wait(here):
    Path("deaf.py").write_text(
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "print('x')\ntime.sleep(99)"
    )
    runner = subprocess.Popen(
        words("python deaf.py", "--num-seeds", 1),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(
        lambda: any("x\n" in path.read_text() for path in Path("runs").glob("benchmark/*.log"))
    )
    start = time.time()
    runner.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert runner.poll() is None and len(processes_here()) >= 2, (
        "it waits for the deaf one to end by itself"
    )
    runner.send_signal(signal.SIGINT)
    assert runner.wait(timeout=30) == 128 + signal.SIGINT and time.time() - start < processes.GRACE
    assert processes_here() == []


def steps_made():
    return sum(path.read_text().count("\n") for path in Path("runs").glob("*/steps.txt"))


def test_runner_killed_again_and_again(here):
    """kill -9 at any time: no run is lost, starts over, or has two processes at the same time."""
    command, moments = (
        words("python walk.py --steps 20 --delay 0.1 --helper 1", "--num-seeds", 5, "--workers", 2),
        random.Random(1),
    )
    for _ in range(4):
        made = steps_made()
        runner = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_for(lambda made=made: steps_made() > made + 3)
        time.sleep(0.5 * moments.random())
        runner.kill()
        runner.wait()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folders = [path.parent for path in Path("runs").glob("*/run.json")]
    assert len(folders) == 5 and sum(check_steps(folder, 20) for folder in folders) > 5, (
        "some were resumed"
    )
    assert processes_here() == []


def test_what_lives_on_without_a_watcher_is_ended_first(here):
    """If a run's watchers are killed at once, its processes may live on; the next one waits."""
    log, command = (
        here / f"{task.name_of(['python', 'fork.py'])}.log",
        ["--in", here, "python", "fork.py"],
    )
    alive = "os.setsid(); print('alive', flush=True); time.sleep(60); print('over', flush=True)"
    Path("fork.py").write_text(
        f"import os, time\nif os.fork():\n    time.sleep(2)\nelse:\n    {alive}"
    )
    assert subprocess.run([*task.START, *command]).returncode == 0
    assert (
        "alive" in log.read_text() and len(processes_here()) == 1
    )  # that process is in no group of ours
    Path("fork.py").write_text("import time; print('second', flush=True); time.sleep(3)")
    second = subprocess.Popen([*task.START, *command])
    wait_for(lambda: "second" in log.read_text())
    assert "over" not in log.read_text() and len(processes_here()) == 2, (
        "the second, and its watcher"
    )
    with (
        pytest.raises(SystemExit, match="another process is still working on this run"),
        log.open("ab") as file,
    ):
        task.wait_for_lock(file, [], False, patience=1)
    assert second.wait() == 0, "what is watched over is left alone"
    with log.open("ab") as file:
        assert task.wait_for_lock(file, [], False, patience=1) is None


def test_who_reads_a_log_is_not_killed(tmp_path):
    log = tmp_path / "log"
    log.touch()
    wait = "sys.stdout.write('x\\n'); sys.stdout.flush(); time.sleep(60)"
    held = {}
    for mode in ("r", "a"):
        code = f"import sys, time; file = open({str(log)!r}, {mode!r}); {wait}"
        held[mode] = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        held[mode].stdout.readline()
    try:
        task.kill_leftovers(log)
        assert held["a"].wait(timeout=30) == -signal.SIGKILL and held["r"].poll() is None
    finally:
        for process in held.values():
            process.kill()
            process.communicate()


def test_journal_survives_a_line_cut_short(tmp_path):
    journal = runner.Journal(tmp_path)
    journal.write({"run": "a", "event": "done"}, {"run": "b", "event": "started"})
    whole = journal.path.read_bytes()
    for size in range(len(whole) + 1):  # as far as the disk got
        journal.path.write_bytes(whole[:size])
        journal.write({"run": "c", "event": "done"})
        last = journal.last_events()
        assert last["c"]["event"] == "done" and len(last) == 1 + whole[:size].count(b"}")
        assert all(
            last[run]["event"] == event
            for run, event in (("a", "done"), ("b", "started"))
            if run in last
        )


def test_full_disk_is_one_line(here):
    Path("small").mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", "small"], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.strip()}")
    try:
        flags = ("--num-seeds", 2, "--folder", "small/journal")
        with contextlib.suppress(OSError), open("small/filler", "wb", buffering=0) as filler:
            while filler.write(b"x" * 1024):
                pass
        full = bench("python walk.py", *flags)
        assert full.returncode == 1 and len(full.stderr.splitlines()) == 1
        assert (
            full.stderr.startswith("cannot write small/journal")
            and "No space left on device" in full.stderr
        )
        assert not Path("runs").exists() and processes_here() == []
        Path("small/filler").write_bytes(
            b"x" * 200 * 1024
        )  # enough for the journal, and then a run fills the rest
        chatty = "print('run folder: none')\nwhile True: print('x' * 1000)"
        Path("chatty.py").write_text(chatty)
        filled = bench("python chatty.py", *flags)
        assert (
            filled.returncode == 1
            and "o space left on " in filled.stderr
            and "Traceback" not in filled.stderr
        )
        for path in Path("small").rglob("*chatty*"):
            path.unlink()
        Path("small/filler").unlink()
        assert bench("python walk.py", *flags).returncode == 0
    finally:
        subprocess.run(["umount", "small"], check=True)


def test_a_thousand_runs_are_listed_and_resumed_in_seconds(here):
    flags = ("--env-ids", *(f"Env{i}-v0" for i in range(10)), "--num-seeds", 100)
    start = time.time()
    assert (
        bench("python walk.py", *flags, "--dry-run").stdout.splitlines()[-1]
        == "1000 runs, 0 of them finished"
    )
    listed = time.time() - start
    args = plan.Args(("python walk.py",), flags[1:11], num_seeds=100)
    runs = plan.make_plan(args)
    args.folder.mkdir(parents=True)
    runner.Journal(args.folder).write(
        *({"run": run.name, "event": event} for run in runs[:-1] for event in ("started", "done"))
    )
    start = time.time()
    done = bench("python walk.py", *flags)
    resumed = time.time() - start
    assert done.returncode == 0 and "999 of 1000 runs are finished and skipped" in done.stdout
    assert len(list(Path("runs").glob("*/run.json"))) == 1 and count("started") == 1000
    assert listed < 5 and resumed < 10, (listed, resumed)


def test_table_on_a_terminal(here):
    """What a terminal of 12 lines shows: what fits, again and again, and all of it at the end."""
    output, (ours, theirs) = b"", pty.openpty()
    command = words(
        ["python walk.py --steps 20 --delay 0.1 --crash-at 15", "python walk.py --delay 0.6"],
        *("--num-seeds", 6, "--workers", 6, "--retries", 0),
    )
    size = {"COLUMNS": "80", "LINES": "12", "TERM": "xterm"}
    runner = subprocess.Popen(
        command, stdout=theirs, stderr=subprocess.DEVNULL, env=os.environ | size
    )
    os.close(theirs)
    with contextlib.suppress(OSError):  # which is how a terminal ends
        while data := os.read(ours, 65536):
            output += data
    assert runner.wait() == 1
    plain = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]|\r", "", output.decode())
    frames = re.split(r"(?<!\d)(?=\d+ of 12 done)", plain)[1:]
    is_drawn = re.compile(r"^running  walk --delay 0.6 seed \d +\d+% +\d+ +\d+  0:\d\d", re.M)
    middle, last = next(filter(is_drawn.search, frames)).splitlines(), frames[-1].splitlines()
    assert len(frames) > 3
    assert re.match(r"\d of 12 done, \d queued, \d running, \d failed   0:\d\d", middle[0])
    header = r"state +run +steps +return +steps/s +time"
    assert any(re.match(header, line) for line in middle[1:3])
    assert last[0].startswith("6 of 12 done, 0 queued, 0 running, 6 failed")
    assert last[1] == "6 x ValueError: it went wrong" and re.match(header, last[2])
    rows = [line for line in last if re.match("(failed|done) +walk --", line)]
    assert len(rows) == 12 and rows[0].startswith("failed")
    for frame in frames:
        lines = frame.splitlines()
        assert len(lines) <= 12 or frame == frames[-1]
        assert max(map(len, lines)) <= 80
    assert any(frame.rstrip().endswith("...") for frame in frames[:-1])


def test_figures_from_a_bar(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "$ x\nrun folder: y\n"
        " 10%|# | 51.2k/500k [00:07<00:52, 8.24kstep/s, episodic_return=-12.5]\r"
    )
    assert run_log.progress(log) == (0.1024, 8240, -12.5)
    log.write_text("$ x\n 45%|# | 450/1.00k [07:00<00:52, 2.50s/step]\n")
    assert run_log.progress(log) == (0.45, 0.4, None)
    log.write_text(
        "$ x\n 45%|# | 450/1.00k [07:00<00:52, 2.50s/step]\nexit code 1 after 3 s\n$ x\n"
    )
    assert run_log.progress(log) == (None, None, None), "that was another attempt"


@pytest.mark.parametrize(
    "file", sorted((ROOT / "benchmark").glob("*.sh")), ids=lambda file: file.stem
)
def test_published_commands(file):
    """What the runner is asked for are the runs in results/."""
    text, algorithm = file.read_text(), file.stem
    if "cleanrl_utils.benchmark" not in text:
        assert "cleanrl/" in text and "python" in text, "side by side on a GPU, by hand"
        return
    planned = set()
    for part in text.split("cleanrl_utils.benchmark")[1:]:
        flags = part.split('"$@"')[0].replace("\\\n", " ")
        if "$" in flags or "../" in flags:  # a part that the shell completes, or in a folder
            continue
        args = tyro.cli(plan.Args, args=shlex.split(flags))
        plan.check(args)
        runs = {
            f"{(run.env_id or 'Taxi-v4').split(':')[-1].replace('/', '-')}__{run.seed}"
            for run in plan.make_plan(args)
        }
        assert len(runs) == args.num_seeds * max(1, len(args.env_ids))
        (stem,) = re.findall(r"^python .*\bcleanrl/(\w+)\.py", args.command[0])
        assert algorithm.startswith(stem)
        planned |= runs
    if (published := ROOT / "results" / algorithm / "runs.json").exists():
        assert set(json.loads(published.read_text())) <= planned


def test_every_plot_has_its_commands():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "rl-algorithms").glob("*.md"))
    shown = set(re.findall(r"\((\w+)\.png\)", pages))
    assert {"ppo", "dqn"} <= shown
    plan = tomllib.loads((ROOT / "scripts" / "results.toml").read_text())
    drawn = {
        name for name, about in plan.items() if about.get("plot") or about.get("kind") == "elo"
    }
    assert shown == drawn


@pytest.mark.slow
def test_ppo_is_cut_and_goes_on(here):
    """ppo.py on two environments, killed between two checkpoints, finished by the same command."""
    command = words(
        f"python {PPO} --total-timesteps 10240 --num-envs 4 --num-steps 64 --checkpoint-interval 2",
        *("--env-ids", "CartPole-v1", "Acrobot-v1", "--num-seeds", 1, "--workers", 2),
    )
    runner = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(list(Path("runs").glob("*/checkpoint.pt"))) == 2, 120)
    runner.kill()
    wait_for(lambda: processes_here() == [], 10)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folders = sorted(path.parent for path in Path("runs").glob("*/run.json"))
    assert [folder.name.split("__")[0] for folder in folders] == ["Acrobot-v1", "CartPole-v1"]
    for folder in folders:
        steps = [step for step, _ in scalars(folder)["charts/SPS"]]
        assert steps == list(range(256, 10241, 256)), "one curve, without a gap or a step twice"
        assert re.fullmatch(
            r"[\w.-]*[0-9a-f]{7}(-dirty)?", about(folder)["tags"][0]
        )  # of CleanRL, not of where we are
        log = next(Path("runs/benchmark").glob(f"{folder.name.split('__')[0]}*.log")).read_text()
        assert (
            f"$ python {PPO} --resume {folder} --env-id" in log and log.count("run folder: ") == 2
        )


SLURM_CONF = """
ClusterName=cleanrl
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.fixture(scope="module")
def slurm_conf(tmp_path_factory):
    """A real Slurm of one node, on ports and in a folder of its own."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    programs = {
        name: shutil.which(name, path=path) for name in ("munged", "slurmctld", "slurmd", "sbatch")
    }
    if missing := [name for name, found in programs.items() if not found]:
        pytest.skip(f"needs Debian's slurm-wlm and munge: there is no {', '.join(missing)}")
    if os.getuid() != 0:
        pytest.skip("needs root, to start Slurm")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "munge.key").write_bytes(os.urandom(64))
    (folder / "munge.key").chmod(0o400)
    names = {
        "key-file": "munge.key",
        "socket": "munge.socket",
        "pid-file": "munged.pid",
        "log-file": "munged.log",
    }
    files = [
        f"--{flag}={folder / name}" for flag, name in (names | {"seed-file": "munge.seed"}).items()
    ]
    host, env = (
        socket.gethostname().split(".")[0],
        os.environ | {"SLURM_CONF": str(folder / "slurm.conf")},
    )
    conf = SLURM_CONF.format(folder=folder, host=host, port=free_port(), node_port=free_port())
    (folder / "slurm.conf").write_text(conf)
    started = [
        subprocess.Popen(
            [programs["munged"], "--foreground", "--force", *files], stderr=subprocess.DEVNULL
        )
    ]
    try:
        wait_for((folder / "munge.socket").exists)
        for name in ("slurmctld", "slurmd"):
            started.append(
                subprocess.Popen(
                    [programs[name], "-D"],
                    env=env,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        asking = ["sinfo", "--noheader", "--format=%T"]
        wait_for(
            lambda: (
                subprocess.run(asking, env=env, capture_output=True, text=True).stdout.strip()
                == "idle"
            )
        )
        yield folder / "slurm.conf"
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(timeout=30)


@pytest.fixture
def slurm(slurm_conf, here, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", str(slurm_conf))
    return ("--backend", "slurm", "--slurm-poll-interval", 0.5, "--workers", 2)


def queue():
    asking = [
        "squeue",
        "--noheader",
        "--array",
        "--states=PENDING,RUNNING,COMPLETING",
        "--format=%i",
    ]
    return subprocess.run(asking, capture_output=True, text=True, check=True).stdout.split()


def test_slurm_job_killed_in_mid_run_is_resumed(slurm):
    ppo = f"python {PPO} --env-id CartPole-v1 --total-timesteps 10240 --num-envs 4 --num-steps 64"
    ppo += " --checkpoint-interval 2"
    command = words(
        [ppo.replace(" --env-id CartPole-v1", ""), "python walk.py"], "--num-seeds", 1, *slurm
    )
    runner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: list(Path("runs").glob("CartPole-v1__ppo__1__*/checkpoint.pt")), 120)
    job = next(e["job"] for e in events() if e["event"] == "submitted" and "ppo" in e["run"])
    subprocess.run(["scancel", "--signal=KILL", job], check=True)
    said, complaints = runner.communicate(timeout=200)
    assert runner.returncode == 0, complaints
    assert re.search(rf"retrying  ppo .*Slurm: (FAILED|CANCELLED).*job {job}", said)
    (folder,) = Path("runs").glob("CartPole-v1__ppo__1__*")
    assert [step for step, _ in scalars(folder)["charts/SPS"]] == list(range(256, 10241, 256))
    assert about(folder)["tags"] and count("done") == 2 and queue() == []
    log = next(Path("runs/benchmark").glob("*ppo*.log")).read_text()
    assert f"$ python {PPO} --resume {folder}\n" in log
    resumed_at = log.split("--resume")[1].split("/10.2k [")[0].split()[-1]
    assert resumed_at != "0.00", "from the checkpoint, not from the start"


@pytest.mark.slow  # a Slurm job that is killed and goes on is tested above
def test_slurm_keeps_the_runs_of_a_dead_runner(slurm):
    command = words(
        "python walk.py --steps 60 --delay 0.1",
        "--env-ids",
        "A-v0",
        "B-v0",
        "--num-seeds",
        2,
        *slurm,
    )
    runner = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wait_for(lambda: len(list(Path("runs").glob("*/checkpoint.pt"))) >= 1)
    runner.kill()
    assert runner.wait() == -signal.SIGKILL and len(queue()) == 4
    later = subprocess.run([*command, "--no-wait"], capture_output=True, text=True)
    assert (
        later.returncode == 3
        and re.search("[12] running", later.stdout)
        and count("submitted") == 4
    )
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert count("submitted") == 4, "no run was sent twice"
    folders = [path.parent for path in Path("runs").glob("*/run.json")]
    assert [check_steps(folder, 60) for folder in folders] == [1, 1, 1, 1]


@pytest.mark.slow  # by default, Ctrl+C ends runs of this machine, and Slurm's killed jobs resume
def test_slurm_jobs_end_with_ctrl_c_and_go_on(slurm):
    command = words("python walk.py --steps 30 --delay 0.1 --helper 1", "--num-seeds", 3, *slurm)
    runner = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(list(Path("runs").glob("*/checkpoint.pt"))) >= 1)
    runner.send_signal(signal.SIGINT)
    assert (
        runner.wait(timeout=60) == 128 + signal.SIGINT and queue() == [] and processes_here() == []
    )
    assert subprocess.run(command, capture_output=True).returncode == 0
    folders = [path.parent for path in Path("runs").glob("*/run.json")]
    assert len(folders) == 3 and sum(check_steps(folder, 30) for folder in folders) > 3


def test_slurm_template_with_the_known_fields(slurm):
    Path("mine.slurm").write_text(
        "#!/bin/bash\n#SBATCH --job-name=mine\n#SBATCH --array={{array}}\n"
        "#SBATCH --ntasks={{ntasks}}\n{{nodes}}\n"
        "env_ids={{env_ids}}\nseeds={{seeds}}\n"
        "env_id=${env_ids[$SLURM_ARRAY_TASK_ID / {{len_seeds}}]}\n"
        "seed=${seeds[$SLURM_ARRAY_TASK_ID % {{len_seeds}}]}\n"
        "echo {{exp_name}} {{gpus_per_task}} {{cpus_per_gpu}} > fields.txt\n"
        "srun {{command}} --seed $seed --env-id $env_id\n"
    )
    flags = [
        "--slurm-template-path",
        "mine.slurm",
        "--slurm-total-cpus",
        1,
        "--slurm-ntasks",
        1,
        "--slurm-nodes",
        1,
    ]
    done = bench(
        "python walk.py",
        "--env-ids",
        "A-v0",
        "B-v0",
        "--num-seeds",
        2,
        "--start-seed",
        4,
        *flags,
        *slurm,
    )
    assert done.returncode == 0, done.stderr
    assert Path("fields.txt").read_text() == "walk 0 1\n"
    folders = sorted(
        path.parent.name.rsplit("__", 1)[0] for path in Path("runs").glob("*/run.json")
    )
    assert folders == ["A-v0__walk__4", "A-v0__walk__5", "B-v0__walk__4", "B-v0__walk__5"]
    script = next(Path("runs/benchmark").glob("slurm-*.sh")).read_text()
    assert (
        "{{" not in script
        and "#SBATCH --array=0-3%2\n" in script
        and "#SBATCH --nodes=1\n" in script
    )


def test_slurm_that_refuses_is_one_line(slurm):
    Path("odd.slurm").write_text("#!/bin/bash\n#SBATCH --partition={{partition}}\n{{command}}\n")
    odd = bench("python walk.py", "--slurm-template-path", "odd.slurm", *slurm)
    assert odd.returncode == 1 and odd.stderr == "odd.slurm has unknown fields: partition\n"
    done = bench("python walk.py", "--num-seeds", 1, "--slurm-gpus-per-task", 1, *slurm)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("Slurm rejected the job: ") and not list(
        Path("runs").glob("*/run.json")
    )


@pytest.fixture
def ray_cluster(here):
    """A real cluster on this machine: a head without CPUs and two nodes with one each."""
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="needs the extra cluster")
    cluster = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    try:
        yield cluster, [cluster.add_node(num_cpus=1) for _ in range(2)]
    finally:
        cluster.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("program", ["walk", "ppo"])
def test_ray_node_killed_in_mid_run(ray_cluster, program):
    """Its run is resumed on the other node from its checkpoint, with no process left behind."""
    cluster, (first, _) = ray_cluster
    ppo = (
        f"python {PPO} --total-timesteps 20480 --num-envs 4 --num-steps 64 --checkpoint-interval 2"
    )
    command = "python walk.py --steps 80 --delay 0.1 --helper 1" if program == "walk" else ppo
    flags = ("--num-seeds", 2, "--workers", 2, "--backend", "ray", "--ray-address", cluster.address)
    runner = subprocess.Popen(
        words(command, *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: len(list(Path("runs").glob("*/checkpoint.pt"))) == 2, 120)
    cluster.remove_node(first, allow_graceful=False)
    said, complaints = runner.communicate(timeout=200)
    assert runner.returncode == 0, complaints
    assert len(re.findall(r"retrying .*: Ray: ", said)) == 1 and "2 of 2 done" in said
    folders = [path.parent for path in Path("runs").glob("*/run.json")]
    assert len(folders) == 2 and not [
        line for line in processes_here() if "walk.py" in line or "sleep(300)" in line
    ]
    resumed = [
        log
        for path in Path("runs/benchmark").glob("*.log")
        if "--resume" in (log := path.read_text())
    ]
    assert len(resumed) == 1
    if program == "walk":
        assert sorted(check_steps(folder, 80) for folder in folders) == [1, 2]
    else:
        for folder in folders:
            assert [step for step, _ in scalars(folder)["charts/SPS"]] == list(
                range(256, 20481, 256)
            )
        assert not re.search(r"0.00/20.5k", resumed[0].split("--resume")[1]), (
            "from the checkpoint, not from the start"
        )


@pytest.mark.slow
def test_ray_of_its_own_and_ctrl_c(here):
    pytest.importorskip("ray", reason="needs the extra cluster")
    flags = ("--num-seeds", 3, "--workers", 2, "--backend", "ray", "--ray-cpus-per-run", 0.5)
    command = words("python walk.py --steps 30 --delay 0.1 --helper 1", *flags)
    runner = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(list(Path("runs").glob("*/checkpoint.pt"))) == 2)
    wait_for(
        lambda: Path("runs/benchmark/journal.jsonl").exists() and count("started") == 2
    )  # it looks twice a second
    runner.send_signal(signal.SIGINT)
    _, said = runner.communicate(timeout=60)
    assert runner.returncode == 128 + signal.SIGINT and said.splitlines()[-1].startswith(
        "stopped by SIGINT"
    )
    assert (
        not [line for line in processes_here() if "walk.py" in line or "sleep(300)" in line]
        and count("cut") == 2
    )
    assert subprocess.run(command, capture_output=True).returncode == 0
    folders = [path.parent for path in Path("runs").glob("*/run.json")]
    assert sorted(check_steps(folder, 30) for folder in folders) == [1, 2, 2]


def test_ray_that_is_not_there_is_one_line(here):
    pytest.importorskip("ray", reason="needs the extra cluster")
    done = bench("python walk.py", "--backend", "ray", "--ray-address", "127.0.0.1:1")
    assert (
        done.returncode == 1
        and "cannot reach Ray at 127.0.0.1:1" in done.stderr
        and "Traceback" not in done.stderr
    )


@pytest.mark.parametrize(("gpus", "preallocate"), [(0.5, "false"), (1, None)])
def test_ray_task_and_its_environment(here, monkeypatch, gpus, preallocate):
    """A killed watcher is 128 + 9, and runs that share a GPU leave its memory to each other."""
    fake = types.SimpleNamespace(init=lambda **_: None, remote=lambda **_: lambda attempt: attempt)
    monkeypatch.setitem(sys.modules, "ray", fake)
    args = plan.Args(("python walk.py",), backend="ray", ray_gpus_per_run=gpus)
    backend = on_ray.Ray(args, {"PATH": os.environ["PATH"]})
    assert backend.environment.get("XLA_PYTHON_CLIENT_PREALLOCATE") == preallocate
    ends = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    assert backend.attempt(ends, ".", {}) == (128 + signal.SIGKILL, "")


class Cloud:
    """AWS as far as the tests without moto need it: a bucket in memory, and jobs that run."""

    def __init__(self):
        self.files, self.is_reachable, self.when_uploaded = {}, True, lambda: None

    def head_bucket(self, **_):
        pass

    def put_object(self, Bucket, Key, Body):
        self.files[Key] = Body

    def upload_file(self, file, bucket, key):
        self.files[key] = Path(file).read_bytes()
        self.when_uploaded()

    def submit_job(self, **_):
        return {"jobId": "job"}

    def terminate_job(self, **_):
        if not self.is_reachable:
            raise RuntimeError("Could not connect to the endpoint URL")


@pytest.fixture
def cloud(here, monkeypatch):
    cloud = Cloud()
    monkeypatch.setattr(on_aws, "connect", lambda *_: cloud)
    return cloud


def test_aws_uploads_a_checkpoint_that_the_curves_reach(cloud):
    folder, log = Path("runs/x"), Path("x.log")
    folder.mkdir(parents=True)
    (folder / "run.json").touch()
    log.write_text("run folder: runs/x\n")

    def go_on():
        """The run logs another step and replaces its checkpoint, whenever a file was uploaded."""
        with (folder / "steps.txt").open("a") as file:
            file.write("x")
        (folder / "checkpoint.tmp").write_text(str((folder / "steps.txt").stat().st_size))
        os.replace(folder / "checkpoint.tmp", folder / "checkpoint.pt")

    go_on()
    cloud.when_uploaded = go_on
    store = on_aws.Store("s3://bucket/mine")
    for _ in range(3):
        store.send_run(log, "logs/x.log")
        steps = len(cloud.files["mine/runs/x/steps.txt"])
        assert int(cloud.files["mine/runs/x/checkpoint.pt"]) <= steps
    assert len(cloud.files) == 4 and not list(folder.glob("*.tmp"))


def aws_args(**more):
    names = dict(aws_job_queue="queue", aws_job_definition="cleanrl", aws_s3="s3://bucket/mine")
    return plan.Args(("python walk.py",), num_seeds=2, backend="aws-batch", **names, **more)


def test_aws_jobs_that_may_go_on_are_not_given_up(cloud, monkeypatch, capsys):
    """Without a network, Ctrl+C cannot end them: the same command finds them again."""
    args = aws_args()
    runs, journal = plan.make_plan(args), runner.Journal(args.folder, args.backend)
    args.folder.mkdir(parents=True)
    cloud.is_reachable = False
    assert runner.run_with_backend(args, runs, journal, [signal.SIGINT]) is None
    assert "jobs may continue: Could not connect to the endpoint URL" in capsys.readouterr().err
    again = plan.make_plan(args)
    runner.recall(again, journal)
    assert [run.job for run in again] == ["job:0", "job:1"] and count("cut") == 0


def test_aws_logs_of_another_folder_are_others(cloud):
    """A new --folder starts all runs from scratch, on S3 too."""
    keys = set()
    for folder in (Path("runs/benchmark"), Path("runs/another"), Path("/runs/another")):
        args = aws_args(folder=folder)
        runs = plan.make_plan(args)
        backend = on_aws.AwsBatch(args, {}, types.SimpleNamespace(write=lambda *_: None))
        backend.submit(runs)
        sent = json.loads(cloud.files.popitem()[1])
        assert sent["folder"] == str(folder)
        keys.add(on_aws.log_key(sent["folder"], runs[0].log))
        assert on_aws.log_key(runs[0].folder, runs[0].log) in keys, "the runner looks there"
    assert len(keys) == 3


def test_aws_script_may_be_only_in_the_image(here):
    args = plan.Args(("python /app/none/ppo.py",), backend="aws-batch")
    assert "OMP_NUM_THREADS" in runner.child_environment(args)


def test_what_aws_passes_on_is_on_the_page():
    page = (ROOT / "docs" / "benchmark.md").read_text()
    section = page.split("## AWS Batch")[1].split("\n## ")[0]
    assert [name for name in on_aws.PASSED_ON if f"`{name}`" not in section] == []
    assert "thread variables" in section


@pytest.fixture
def aws(here, monkeypatch):
    """moto's server with a bucket, a job queue and a job definition. It runs no jobs."""
    boto3 = pytest.importorskip("boto3", reason="needs the extra cluster")
    pytest.importorskip("moto", reason="needs the extra dev")
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "moto.server", "-p", url.rsplit(":")[-1]]
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/"
    )
    names = dict(
        AWS_DEFAULT_REGION="us-east-1",
        AWS_ACCESS_KEY_ID="x",
        AWS_SECRET_ACCESS_KEY="x",
        AWS_ENDPOINT_URL=url,
    )
    for name, value in names.items():
        monkeypatch.setenv(name, value)

    def ask(path, **settings):
        headers = {"Content-Type": "application/json"}
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(
                urllib.request.Request(url + path, headers=headers, **settings)
            ).read()

    try:
        wait_for(lambda: ask("/moto-api/"))
        ask(
            "/moto-api/config",
            method="POST",
            data=json.dumps({"batch": {"use_docker": False}}).encode(),
        )
        role = boto3.client("iam").create_role(RoleName="role", AssumeRolePolicyDocument="{}")[
            "Role"
        ]["Arn"]
        batch, s3 = boto3.client("batch"), boto3.client("s3")
        s3.create_bucket(Bucket="bucket")
        where = dict(
            computeEnvironmentName="machines", type="UNMANAGED", state="ENABLED", serviceRole=role
        )
        machines = batch.create_compute_environment(**where)["computeEnvironmentArn"]
        order = [{"order": 1, "computeEnvironment": machines}]
        batch.create_job_queue(
            jobQueueName="queue", state="ENABLED", priority=1, computeEnvironmentOrder=order
        )
        container = {"image": "cleanrl", "vcpus": 1, "memory": 1024}
        batch.register_job_definition(
            jobDefinitionName="cleanrl", type="container", containerProperties=container
        )
        yield batch, s3
    finally:
        server.terminate()
        server.wait(timeout=30)


def container(batch, job, index, folder, program="walk.py"):
    """A container of an array job: its command and environment, in a folder of its own."""
    (told,) = batch.describe_jobs(jobs=[job])["jobs"]
    environment = {item["name"]: item["value"] for item in told["container"]["environment"]}
    folder.mkdir()
    shutil.copy(program, folder)
    environment |= {"AWS_BATCH_JOB_ARRAY_INDEX": str(index)}
    return subprocess.Popen(told["container"]["command"], cwd=folder, env=os.environ | environment)


@pytest.mark.slow
def test_aws_array_job_with_logs_and_checkpoints_on_s3(aws):
    """Submitted jobs run for real; one machine is reclaimed, one dies; both runs are resumed."""
    batch, s3 = aws
    names = (
        "--aws-job-queue",
        "queue",
        "--aws-job-definition",
        "cleanrl",
        "--aws-s3",
        "s3://bucket/mine",
    )
    flags = (
        "--env-ids",
        "A-v0",
        "--num-seeds",
        3,
        "--backend",
        "aws-batch",
        *names,
        "--aws-sync-interval",
        0.5,
    )
    command = words("python walk.py --steps 40 --delay 0.1", *flags)
    sent = subprocess.run([*command, "--no-wait"], capture_output=True, text=True)
    assert sent.returncode == 3, sent.stderr
    assert "AWS Batch: SUCCEEDED" in sent.stdout, (
        "moto says so of all jobs and runs none: S3 knows better"
    )
    jobs = [e["job"] for e in events() if e["event"] == "submitted"][:3]
    array = jobs[0].split(":")[0]
    assert jobs == [f"{array}:{index}" for index in range(3)]
    (told,) = batch.describe_jobs(jobs=[array])["jobs"]
    assert told["arrayProperties"]["size"] == 3 and told["container"]["command"][:3] == [
        "python",
        "-m",
        "cleanrl_utils.benchmark.aws",
    ]
    environment = {item["name"]: item["value"] for item in told["container"]["environment"]}
    assert environment["OMP_NUM_THREADS"] == "1" and environment["AWS_ENDPOINT_URL"].startswith(
        "http://127.0.0.1:"
    )

    def keys():
        return {found["Key"] for found in s3.list_objects_v2(Bucket="bucket")["Contents"]}

    first = [container(batch, array, index, Path(f"machine-{index}")) for index in range(3)]
    wait_for(lambda: sum(key.endswith("/checkpoint.pt") for key in keys()) == 3)
    first[0].send_signal(signal.SIGTERM)  # AWS wants its machine back
    subprocess.run(
        ["kill", "-9", *children_of(first[1].pid)], check=True
    )  # and this one is just gone
    first[1].kill()
    assert (
        first[0].wait(timeout=30) != 0
        and first[1].wait() == -signal.SIGKILL
        and first[2].wait(timeout=60) == 0
    )
    for index in (0, 1):
        again = container(batch, array, index, Path(f"another-{index}"))
        assert again.wait(timeout=60) == 0
        made = next(Path(f"another-{index}").glob("runs/*/steps.txt")).read_text().splitlines()
        assert int(made[-1].split()[1]) == 40 and len({line.split()[0] for line in made}) == 2, (
            "resumed from S3"
        )
    assert not [key for key in keys() if key.endswith((".tmp", "/lock", "/pid"))]

    Path("runs/benchmark/journal.jsonl").write_text(  # as it is with an AWS that runs what it takes
        "".join(
            json.dumps({"run": e["run"], "event": "submitted", "job": e["job"]}) + "\n"
            for e in events()[:3]
        )
    )
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "3 of 3 done" in done.stdout and count("done") == 3 and count("submitted") == 3
    for seed in (1, 2, 3):
        (folder,) = Path("runs").glob(f"A-v0__walk__{seed}__*")
        assert (folder / "checkpoint.pt").read_text() == "40" and (folder / "steps.txt").exists()
        (log,) = Path("runs/benchmark").glob(f"A-v0__walk__{seed}__*.log")
        assert re.search(r"exit code 0 after [\d.]+ s\n$", log.read_text())


def children_of(pid):
    """All processes below one, as words for kill."""
    below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return below + [word for child in below for word in children_of(child)]


def test_aws_mistakes_are_one_line(aws):
    given = ["--aws-job-queue", "queue", "--aws-job-definition", "cleanrl"]
    for flags, why in (
        (given, "--backend aws-batch needs --aws-s3"),
        ([*given, "--aws-s3", "bucket"], "--aws-s3 must look like s3://bucket/prefix"),
        ([*given, "--aws-s3", "s3://none/x"], "cannot use s3://none/x: "),
        (
            [*given, "--aws-s3", "s3://bucket", "--aws-job-queue", "no"],
            "Job queue no does not exist",
        ),
    ):
        done = bench("python walk.py", "--backend", "aws-batch", *flags)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and why in done.stderr
