"""cleanrl_utils.reproduce: its commands reproduce the run, and do nothing else on hostile runs."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cleanrl_utils import reproduce
from tests.harness import PPO, ROOT, about, only_run, read_checkpoint, same, scalars, train
from tests.test_packaging import needs_uv

FLAGS = [
    "--seed",
    3,
    "--total-timesteps",
    1024,
    "--num-envs",
    3,
    "--num-steps",
    64,
    "--no-anneal-lr",
    "--target-kl",
    0.02,
]
FLAGS += [
    "--exp-name",
    "it's $HOME; -x",
    "--learning-rate",
    0.0012345678901234567,
    "--no-cuda",
    "--ent-coef",
    -0.001,
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_TAGS", "v1-2-gabc,it's $HOME")
        train(PPO, folder, *FLAGS)
    return only_run(folder)


def printed(folder):
    done = subprocess.run(
        [sys.executable, "-m", "cleanrl_utils.reproduce", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.splitlines()


def write(folder, **entries):
    """A run folder with a run.json that says this, and beyond it what a proper one says."""
    proper = {
        "file": "ppo.py",
        "args": {"env_id": "CartPole-v1", "seed": 1, "exp_name": "ppo"},
        "tags": [],
        "commit": "0" * 40,
    }
    proper |= {
        "device": "x86_64",
        "python": "3.11.7",
        "packages": {"torch": "2.13.0+cpu", "numpy": "2.3.4"},
    }
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(proper | entries))
    return folder


def place(lines):
    """The folder that a script fills."""
    return re.search(r"\.reproduce/\w+", "\n".join(lines))[0]


def execute(lines, folder):
    """Run a script with git, uv and Python replaced by recorders of their words and WANDB_TAGS."""
    for name in ("bin/git", "bin/uv", f"{place(lines)}/.venv/bin/python"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(
            '#!/bin/bash\n{ printf "%s\\0" "${0##*/}" "$@" "$WANDB_TAGS"; '
            'printf "\\n\\0"; } >> words\n'
        )
        (folder / name).chmod(0o755)
    (folder / "words").unlink(missing_ok=True)
    environment = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin"}
    subprocess.run(["bash", "-e", "-c", "\n".join(lines)], cwd=folder, env=environment, check=True)
    return [
        command.split("\0")[:-1] for command in (folder / "words").read_text().split("\n\0")[:-1]
    ]


def test_printed_command_makes_the_same_run(run, tmp_path):
    """The last line, run for real: flags, tags, curves and weights are equal, bit for bit."""
    lines = printed(run)
    (tmp_path / place(lines)).mkdir(parents=True)
    (tmp_path / place(lines) / "code").symlink_to(ROOT)
    (tmp_path / place(lines) / ".venv").symlink_to(sys.prefix)
    command = lines[-1]
    assert (
        command.startswith("WANDB_TAGS=")
        and " --no-anneal-lr " in command
        and "--resume" not in command
    )
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    again = only_run(tmp_path)
    assert about(again)["args"] == about(run)["args"] and about(again)["tags"] == about(run)[
        "tags"
    ] == [
        "v1-2-gabc",
        "it's $HOME",
    ]
    first, second = scalars(run), scalars(again)
    assert (
        first.keys() == second.keys()
        and len(first["charts/episodic_return"]) > 10
        and len(first["losses/value_loss"]) == 5
    )
    assert [name for name in first if name != "charts/SPS" and first[name] != second[name]] == []
    assert same(read_checkpoint(run), read_checkpoint(again))


def test_commit_and_versions_are_those_of_the_run(run, tmp_path):
    lines = printed(run)
    told = about(run)
    folder = f".reproduce/{told['commit'][:12]}"
    assert f"uv venv --clear --python {told['python']} {folder}/.venv" in lines
    assert lines[0] == f"# CartPole-v1 with ppo.py, seed 3, on {told['device']}"
    versions = lines[lines.index(f"cat > {folder}/versions.txt << 'EOF'") + 1 : lines.index("EOF")]
    known = {f"{name}=={version.partition('+')[0]}" for name, version in told["packages"].items()}
    assert set(versions) == known and len(known) > 50
    venv, git, install, python = execute(lines, tmp_path)
    worktree = ["git", "worktree", "add", "--detach", f"{folder}/code", told["commit"]]
    assert git[:-1] == worktree and venv[:2] == ["uv", "venv"]
    file = f"{folder}/code/cleanrl/ppo.py"
    assert install[-3:-1] == ["--requirements", file] and "--constraints" in install
    assert (tmp_path / f"{folder}/versions.txt").read_text().splitlines() == versions
    assert (
        python[:4] == ["python", file, "--exp-name", "it's $HOME; -x"]
        and python[-1] == "v1-2-gabc,it's $HOME"
    )


@pytest.mark.parametrize("has_uv", [False, True])
def test_the_checkout_stays_where_it_was(tmp_path, has_uv):
    """With real git, on a branch with changes and a commit after the run's; also without uv."""

    def git(*words):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    file = tmp_path / "cleanrl" / "ppo.py"
    file.parent.mkdir()
    git("init", "-q", "-b", "mine")
    (tmp_path / ".gitignore").write_text((ROOT / ".gitignore").read_text() + "\nbin/\n")
    for version in ("old", "new"):
        file.write_text(f"print({version!r})\n")
        git("add", ".")
        git("commit", "-qm", version)
    file.write_text("print('changed')\n")
    commit, before = (
        git("rev-parse", "HEAD~1"),
        (git("rev-parse", "HEAD"), git("status", "--short")),
    )
    lines = list(reproduce.commands(write(tmp_path / "runs", commit=commit)))
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (binaries / "git").symlink_to(shutil.which("git"))
    if has_uv:  # it makes an environment of this Python; what it installs is tested below
        (binaries / "uv").write_text(
            f'#!/bin/bash\n[ "$1" = pip ] || {{ mkdir -p "${{@: -1}}/bin"\n'
            f'ln -s {sys.executable} "${{@: -1}}/bin/python"; }}\n'
        )
        (binaries / "uv").chmod(0o755)
    environment = {"PATH": f"{binaries}:/bin:/usr/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-e"],
        input="\n".join(lines),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    if has_uv:
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "old"), done.stderr
    else:
        assert done.returncode == 127 and "uv: " in done.stderr, done.stderr
        assert not (tmp_path / ".reproduce").exists()
    assert (git("rev-parse", "HEAD"), git("status", "--short")) == before
    assert git("branch", "--show-current") == "mine"


@needs_uv
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_printed_commands_in_a_clone(run, tmp_path):
    """A new environment, filled by uv: the recorded versions are in it, and the run is the same."""
    subprocess.run(["git", "clone", "--quiet", ROOT, tmp_path / "clone"], check=True)
    environment = os.environ | {
        "UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", ""),
        "PYTHONPATH": "",
    }
    environment["PATH"] = f"{ROOT / '.uv/bin'}{os.pathsep}{environment['PATH']}"
    script = "\n".join(printed(run))
    done = subprocess.run(
        ["bash", "-e"],
        input=script,
        cwd=tmp_path / "clone",
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    again = only_run(tmp_path / "clone")
    packages = about(again)["packages"]
    assert len(packages) > 20 and packages.items() <= about(run)["packages"].items()
    assert scalars(again)["charts/episodic_return"] == scalars(run)["charts/episodic_return"]


PLAIN = st.text(st.characters(exclude_categories=("C", "Z")) | st.just(" "), max_size=12)
NASTY = st.sampled_from(
    [
        "'; touch owned; '",
        "$(touch owned)",
        "`touch owned`",
        '"',
        "\\",
        "a\\'",
        "-x",
        "--seed=5",
        "!!",
        "#",
        "~",
        "",
    ]
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(texts=st.lists(PLAIN | NASTY, min_size=4, max_size=4))
def test_no_text_breaks_out_of_its_quotes(tmp_path, texts):
    """The shell hands over each text as it is, and to the flag that it belongs to."""
    name, project, entity, tag = texts
    args = {
        "exp_name": name,
        "env_id": "CartPole-v1",
        "seed": 2,
        "wandb_project_name": project,
        "wandb_entity": entity,
    }
    lines = list(reproduce.commands(write(tmp_path / "run", args=args, tags=[tag])))
    folder = tmp_path / "work"
    folder.mkdir(exist_ok=True)
    *_, words = execute(lines, folder)
    flags = " ".join(
        f"--{word}" for word in ("exp-name", "wandb-project-name", "wandb-entity")
    ).split()
    for flag, text in zip(flags, (name, project, entity), strict=True):
        assert (
            f"{flag}={text}" in words
            if text.startswith("-")
            else words[words.index(flag) + 1] == text
        )
    assert words[-1] == (tag if tag else "") and not list(tmp_path.rglob("owned"))


def test_flags_of_every_type(tmp_path):
    args = {
        "env_id": "x",
        "seed": 0,
        "a": True,
        "b_c": False,
        "d": None,
        "e": 1e-05,
        "f": -2,
        "g": [1, "x y"],
        "h": [],
        "resume": "z",
    }
    *_, words = execute(list(reproduce.commands(write(tmp_path / "run", args=args))), tmp_path)
    assert words[2:-1] == [
        *"--env-id x --seed 0 --a --no-b-c --e 1e-05 --f=-2 --g 1".split(),
        "x y",
        "--h",
    ]


def test_processes_that_learned_together_do_so_again(tmp_path):
    run = write(tmp_path / "run", file="ppo_atari_multigpu.py", world_size=3)
    assert printed(run)[-1].startswith(
        ".reproduce/000000000000/.venv/bin/torchrun --nproc-per-node 3 "
        ".reproduce/000000000000/code/cleanrl/ppo_atari_multigpu.py "
    )


def test_packages_are_only_names_and_versions(tmp_path):
    nasty = {
        "evil; touch owned": "1",
        "--target=elsewhere": "1",
        "a @ http://x": "1",
        "b": "1; touch owned",
        "c": "1\nEOF\ntouch owned",
    }
    nasty |= {
        "EOF\ntouch owned\n": "1",
        "d": None,
        "e": "-r x",
        "f": "$(touch owned)",
        "-r": "1",
        "g": {"x": 1},
    }
    lines = list(
        reproduce.commands(
            write(tmp_path / "run", packages={"torch": "2.13.0+cpu", **nasty, "ray": "2.60.0rc1"})
        )
    )
    execute(lines, tmp_path)
    assert (
        tmp_path / place(lines) / "versions.txt"
    ).read_text() == "ray==2.60.0rc1\ntorch==2.13.0\n"
    assert (
        "# left out: packages without a valid name or version: 11" in lines
        and not (tmp_path / "owned").exists()
    )


ARGS = {"env_id": "CartPole-v1", "seed": 1, "exp_name": "ppo"}


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (dict(args=[]), "run.json: "),
        (dict(args={}), "KeyError: 'env_id'"),
        (dict(args=ARGS | {"seed": "$(touch owned)"}), "invalid literal for int()"),
        (dict(args=ARGS | {"x; touch owned": 1}), "is not the name of a flag"),
        (dict(args=ARGS | {"-x": 1}), "is not the name of a flag"),
        (dict(args=ARGS | {"x": "a\nb"}), "x is not plain text"),
        (dict(args=ARGS | {"x": "\x1b[2J"}), "x is not plain text"),
        (dict(args=ARGS | {"x": "\u202e"}), "x is not plain text"),
        (dict(args=ARGS | {"x": {}}), "x has an unknown type"),
        (dict(tags=["a\ntouch owned"]), "a tag is not plain text"),
        (dict(tags=[1]), "a tag is not plain text"),
        (dict(tags=3), "TypeError"),
        (dict(commit="HEAD; touch owned"), "commit is not the name of a commit"),
        (dict(commit="--orphan"), "commit is not the name of a commit"),
        (dict(file="../evil.py"), "file is not the name of an algorithm file"),
        (dict(file="-c.py"), "file is not the name of an algorithm file"),
        (dict(file="a b.py"), "file is not the name of an algorithm file"),
        (dict(file="x.py\n"), "file is not the name of an algorithm file"),
        (dict(python="3.11; touch owned"), "python is not a version"),
        (dict(world_size=-1), "world_size is not a number of processes"),
        (dict(world_size="2; touch owned"), "invalid literal for int()"),
        (dict(device="x\ntouch owned"), "device is not plain text"),
        (dict(packages=[1]), "AttributeError"),
    ],
)  # fmt: skip
def test_damaged_or_hostile_runs_are_one_line(tmp_path, monkeypatch, capsys, entries, words):
    monkeypatch.setattr(sys, "argv", ["reproduce", str(write(tmp_path / "run", **entries))])
    with pytest.raises(SystemExit) as refusal:
        reproduce.main()
    problem = refusal.value.code
    assert problem.startswith(f"cannot read {tmp_path}/run/run.json: ") and words in problem
    assert problem.isprintable()
    assert capsys.readouterr().out == "", "nothing is printed that someone could run"


@pytest.mark.parametrize("text", [None, "[]", "{}", "no", "[" * 100_000])
def test_no_run_is_one_line(tmp_path, text):
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "cleanrl_utils.reproduce", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"cannot read .*/run\.json: .*\n", done.stderr)


def test_what_to_know_is_said(tmp_path):
    lines = list(
        reproduce.commands(
            write(tmp_path, file="mine.py", commit="", args=ARGS | {"env_id": "my_module:Env-v0"})
        )
    )
    assert "# this checkout has no cleanrl/mine.py: the commit must contain it, or copy it" in lines
    beware = "# warning: the part of the environment's id before the colon "
    assert f"{beware}is a module that the run imports" in lines
    assert "# the run was not made in a git checkout, so that its code is not known" in lines
    assert not [line for line in lines if "git " in line and line[0] != "#"]
    assert lines[-1].startswith(".reproduce/unknown/.venv/bin/python cleanrl/mine.py ")
    assert Path(tmp_path, "run.json").exists()


def test_uncommitted_changes_are_said(tmp_path):
    clean = list(reproduce.commands(write(tmp_path, sha256="0" * 64, dirty=False)))
    dirty = list(reproduce.commands(write(tmp_path, sha256="0" * 64, dirty=True)))
    (warning,) = set(dirty) - set(clean)
    assert warning.startswith("# warning: ppo.py may differ from that commit")
