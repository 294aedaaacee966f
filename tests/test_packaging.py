"""Set-up: headers, bounds, pins and exports agree; the linters pass; the bare file runs."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.harness import PPO, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
MJLAB = (ROOT / "requirements" / "mjlab.in").read_text().splitlines()
MJLAB = [line for line in MJLAB if not line.startswith("#")]
MEMORY_GYM = (ROOT / "requirements" / "memory_gym.in").read_text().splitlines()[-1:]
OWN = [MJLAB, MEMORY_GYM]  # in environments of their own, or without their dependencies
ALGORITHMS = sorted((ROOT / "cleanrl").glob("*.py"))
UV = shutil.which("uv") or shutil.which("uv", path=ROOT / ".uv" / "bin")
needs_uv = pytest.mark.skipif(not UV, reason="needs uv")


def name_of(requirement):
    return re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower().replace("_", "-")


def header(file):
    block = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", file.read_text(), re.M)[1]
    return tomllib.loads("".join(line[2:] or "\n" for line in block.splitlines(keepends=True)))


@pytest.mark.parametrize("file", ALGORITHMS, ids=lambda file: file.stem)
def test_header_is_in_step_with_pyproject(file):
    told = header(file)
    assert told["requires-python"] == PROJECT["project"]["requires-python"].split(",")[0]
    bounds = {
        r for group in [PROJECT["project"]["dependencies"], *EXTRAS.values(), *OWN] for r in group
    }
    assert set(told["dependencies"]) <= bounds, "not the bounds of pyproject.toml"
    assert told["dependencies"] == sorted(told["dependencies"])


@pytest.mark.parametrize("file", ALGORITHMS, ids=lambda file: file.stem)
def test_header_names_what_is_imported(file):
    modules = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module.split(".")[0])
    other_names = {"mujoco_playground": "playground", "cv2": "opencv_python_headless"}
    third_party = {
        other_names.get(name, name.lower()) for name in modules - {*sys.stdlib_module_names}
    }
    named = {name_of(r).replace("-", "_") for r in header(file)["dependencies"]}
    assert third_party <= named
    unseen = {
        "moviepy",
        "tensorboard",
        "mujoco",
        "dm_control",
        "shimmy",
        "six",
        "minigrid",
        "memory_gym",
    }  # behind Gymnasium, torch.utils and gymnax
    unseen.add("pyqt5_qt5")  # what EnvPool draws Procgen with
    unseen |= {"wandb", "safetensors"}  # imported by name, where they are needed
    assert named - third_party <= unseen


@pytest.mark.parametrize("file", ALGORITHMS, ids=lambda file: file.stem)
def test_protocol_is_a_script(file):
    """benchmark/ has the commands of each file's published protocol."""
    script = ROOT / "benchmark" / f"{file.stem}.sh"
    text = script.read_text()
    assert f"cleanrl/{file.stem}.py" in text
    assert max(map(len, text.splitlines())) <= 100 and '"$@"' in text
    subprocess.run(["sh", "-n", script], check=True)


def test_extras():
    promised = re.search(r"^EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
    assert list(EXTRAS) == promised and len(promised) == 20
    assert EXTRAS["all"] == [f"cleanrl[{','.join(promised[:-1])}]"]


@pytest.mark.parametrize(
    ("file", "groups"),
    [
        ("constraints.txt", [PROJECT["project"]["dependencies"], *EXTRAS.values()]),
        ("requirements/constraints-mjlab.txt", [MJLAB]),
    ],
)
def test_constraints_are_names_and_versions_only(file, groups):
    lines = (ROOT / file).read_text().splitlines()
    assert len(lines) > 100 and all(
        re.fullmatch(r"[a-z0-9.-]+==[\w.]+( ; .*)?", line) for line in lines
    )
    pinned = {name_of(line) for line in lines}
    wanted = {name_of(r) for group in groups for r in group} - {"cleanrl"}
    assert wanted <= pinned
    assert not (ROOT / "uv.lock").exists()


def test_tested_versions_are_the_installed_ones():
    """What this very process runs on is what constraints.txt calls tested."""
    import gymnasium
    import numpy
    import torch

    pins = (ROOT / "constraints.txt").read_text()
    for module in (gymnasium, numpy, torch):
        assert re.search(
            rf"^{module.__name__}=={re.escape(module.__version__.split('+')[0])}( |$)", pins, re.M
        ), module.__name__


@needs_uv
def test_requirements_are_in_step(tmp_path):
    for name in ("pyproject.toml", "constraints.txt", "Makefile"):
        shutil.copy(ROOT / name, tmp_path)
    environment = os.environ | {"PATH": f"{Path(UV).parent}{os.pathsep}{os.environ['PATH']}"}

    def make(*words, **settings):
        command = ["make", "requirements", *words]
        settings = environment | settings
        return subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True)

    make("EXTRAS=all")  # asks the index for all packages once; uv remembers the answers
    done = make(UV_OFFLINE="1")
    done = make() if done.returncode else done
    assert done.returncode == 0, done.stderr
    exported = {path.name: path.read_text() for path in (tmp_path / "requirements").iterdir()}
    assert exported == {
        path.name: path.read_text() for path in (ROOT / "requirements").glob("requirements*.txt")
    }, "run: make requirements"
    assert len(exported) == len(EXTRAS) + 1
    assert not re.search(r"://|--", "".join(exported.values())), "names and versions only"


@pytest.mark.parametrize("command", ["ruff check", "ruff format --check", "codespell"])
def test_linters(command):
    program, *flags = command.split()
    program = shutil.which(program, path=Path(sys.executable).parent)
    if program.endswith("codespell"):
        flags = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()
    done = subprocess.run([program, *flags], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pre_commit_runs_the_same_linters(tmp_path):
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    }

    def run(*words):
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)

    run("git", "init", "-q")
    run("git", "add", "-A")
    good = run(sys.executable, "-m", "pre_commit", "run", "--all-files")
    assert good.returncode == 0 and good.stdout.count("Passed") == 3, good.stdout + good.stderr
    (tmp_path / "cleanrl" / "ppo.py").write_text("import  os\nx = 'recieve'\n")  # codespell:ignore
    bad = run(sys.executable, "-m", "pre_commit", "run", "--all-files")
    assert bad.returncode != 0 and bad.stdout.count("Failed") == 3, bad.stdout


def test_workflow_keeps_our_promises():
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    assert (
        'python: ["3.11", "3.12", "3.13"]' in workflow
        and "os: [ubuntu-latest, macos-latest, windows-latest]" in workflow
    )
    assert (
        PROJECT["project"]["requires-python"] == ">=3.11,<3.14"
        and "run: make test PYTHON=${{ matrix.python }}" in workflow
    )
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "exec make test"


def uv_run(folder, torch_version, *flags):
    """uv run on a copy of ppo.py in an empty folder, PyTorch held at a version if there is one."""
    source = PPO.read_text()
    if torch_version:
        held = f'# [tool.uv]\n# constraint-dependencies = ["torch=={torch_version}"]\n# ///\n"""'
        source = source.replace('# ///\n"""', held, 1)
    (folder / "ppo.py").write_text(source)
    environment = {
        k: v
        for k, v in os.environ.items()
        if k not in ("PYTHONPATH", "VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT")
    }
    environment["UV_FIND_LINKS"] = os.environ.get("PIP_FIND_LINKS", "")
    command = [UV, "run", "ppo.py", "--total-timesteps", "2048", *flags]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


@needs_uv
def test_bare_file_runs_in_an_empty_folder(tmp_path):
    """With the tested version of PyTorch: a CPU build, where pip finds one, saves gigabytes."""
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)[1]
    assert "2.05k/2.05k" in uv_run(tmp_path, pinned)
    assert len(list(tmp_path.glob("runs/*/checkpoint.pt"))) == 1


@needs_uv
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_bare_file_runs_with_the_newest_versions(tmp_path):
    assert "2.05k/2.05k" in uv_run(tmp_path, None)
