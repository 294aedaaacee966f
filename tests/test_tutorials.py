"""docs/tutorials: each page is walked as its reader would, its files, edits and commands in order.

A block with a title is a file, or the edit of one. Commands are run with fewer steps, and every
line of a text block must be among what the commands before it print, whatever its numbers. The slow
tests run them as they stand, and compare the returns, too.
"""

import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cleanrl_utils import enjoy, export
from tests.harness import ROOT, compiled_quickly, train

PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(
    r'^(?P<indent> *)```(?P<kind>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^ *```$',
    re.M | re.S,
)
COPIED = ["cleanrl", "cleanrl_utils", "scripts", "tests", "benchmark", "mkdocs.yml", "Makefile"]
COPIED += ["pyproject.toml", "docs/results.md", "docs/rl-algorithms"]
SHORT = {  # enough for a few episodes
    "ppo_jax": "--total-timesteps 8192 --log-interval 4",
    "ppo_multidiscrete": "--total-timesteps 1024",
    "ppo_continuous_lstm": "--total-timesteps 480",
    "ppo_continuous_action": "--total-timesteps 480",
}
LATER = {  # what takes long is run by the slow tests, and by the module that is named
    "cleanrl_utils.check": "test_check",
    "cleanrl_utils.trial": "test_trial",
    "cleanrl_utils.benchmark": "test_benchmark",
    "--filters ppo ": "test_rlops",
    "--sweep": "test_ppo_jax",
    "pytest": "test_new_file",
}
ON_A_CLUSTER = "--backend"  # test_benchmark has its own


def shape(line):
    """A line without its numbers, and without the time and the folder that they are part of."""
    return re.sub(r"\s+", " ", re.sub(r"[-+]?\d[\d,]*(\.\d+)?%?", "0", line)).strip()


def returns(text):
    """The means and deviations that a text has."""
    return [tuple(map(float, found)) for found in re.findall(r"(-?[\d.]+) ± ([\d.]+)", text)]


class Reader:
    """Someone in a clone of the repository, at ~/cleanrl, with its environment."""

    def __init__(self, home, monkeypatch, is_short):
        self.home, self.monkeypatch, self.is_short = home, monkeypatch, is_short
        self.clone = self.folder = home / "cleanrl"
        self.output, self.whole = "", True
        (self.clone / "docs").mkdir(parents=True)
        ignore = shutil.ignore_patterns("__pycache__", "videos", "ablations", "*.png")
        for path, copy in ((ROOT / name, self.clone / name) for name in COPIED):
            if path.is_dir():
                shutil.copytree(path, copy, ignore=ignore)
            else:
                shutil.copy(path, copy)
        (self.clone / "docs" / "theme").symlink_to(ROOT / "docs" / "theme")
        (self.clone / "results").symlink_to(ROOT / "results")
        monkeypatch.setattr(enjoy, "ALGORITHMS", self.clone / "cleanrl")
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("PYTHONPATH", "")
        for name in [name for name in sys.modules if name.startswith("my_")]:  # of another page
            monkeypatch.delitem(sys.modules, name)

    def read(self, page):
        for block in BLOCK.finditer(page):
            text = re.sub(f"^{block['indent']}", "", block["text"], flags=re.M)
            if block["kind"] == "diff":
                self.edit(self.folder / block["title"], text)
            elif block["title"]:
                (self.folder / block["title"]).write_text(text)
            elif block["kind"] == "bash":
                self.output, self.whole = "", True
                for command in text.splitlines():
                    self.run(command)
            elif block["kind"] == "python":
                (self.folder / "script.py").write_text(text)
                self.output, self.whole = "", True
                self.inside(lambda: runpy.run_path("script.py", run_name="__main__"))
            elif self.whole:
                self.compare(text)

    def edit(self, path, text):
        """Apply the hunks of a diff, each of which must fit at one place."""
        source = path.read_text()
        for hunk in re.split(r"^@@.*\n", text, flags=re.M):
            old, new = (
                "".join(line[1:] + "\n" for line in hunk.splitlines() if line[:1] in f" {sign}")
                for sign in "-+"
            )
            assert source.count(old) == 1 or not hunk, f"{path.name} does not have once:\n{old}"
            source = source.replace(old, new) if hunk else source
        path.write_text(source)

    def run(self, command):
        words = shlex.split(command.replace("~", str(self.home)), comments=True)
        is_late = any(later in command for later in LATER) and "--dry-run" not in command
        if ON_A_CLUSTER in command or (is_late and self.is_short):
            self.whole = False
        elif words[0] == "cd":
            self.folder = self.folder / words[1]
        elif words[0] == "export":
            self.monkeypatch.setenv(*words[1].split("=", 1))
        else:
            if "<run>" in command:
                newest = max((self.folder / "runs").glob("*__*"), key=os.path.getmtime)
                words = [word.replace("<run>", newest.name) for word in words]
            self.start(words)
            if "cleanrl_utils.trial" in command:  # how far it gets depends on the machine
                self.whole = False

    def start(self, words):
        file = re.search(r"(\w+)\.py$", words[1]) if words[0] == "python" else None
        module = words[2].removeprefix("cleanrl_utils.") if words[1:2] == ["-m"] else None
        if file and (self.folder / words[1]).parent.name == "cleanrl":
            short = SHORT.get(file[1], "--total-timesteps 1024")
            short = "--total-timesteps 2048" if "--resume" in words else short
            flags = [*words[2:], *(short.split() if self.is_short else ())]
            call = lambda: train((self.folder / words[1]).resolve(), self.folder, *flags)  # noqa: E731
            self.inside((lambda: compiled_quickly(call)) if "_jax" in file[1] else call)
        elif module in ("enjoy", "export"):
            self.monkeypatch.setattr(sys, "argv", words[2:])
            self.inside({"enjoy": enjoy, "export": export}[module].main)
        else:
            done = subprocess.run(
                words, cwd=self.folder, capture_output=True, text=True, stdin=subprocess.DEVNULL
            )
            self.output += done.stdout + done.stderr
            verdicts = {"check": (0, 1), "trial": (0, 1, 2, 3)}  # their exit status says which
            verdicts |= {"pytest": (1,)}  # on the test of what was changed on purpose
            assert done.returncode in verdicts.get(module or words[0], (0,)), (
                f"{shlex.join(words)}\n{self.output}"
            )

    def inside(self, call):
        """In this process, where the imports are done already."""
        said = io.StringIO()
        self.monkeypatch.syspath_prepend(self.folder)
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(said):
            call()
        self.output += said.getvalue()

    def compare(self, text):
        printed = {shape(line) for line in self.output.splitlines()}
        for line in filter(str.strip, text.splitlines()):
            if "..." not in line:
                assert shape(line) in printed, f"not printed: {line}\n{self.output}"
        if not self.is_short:
            for (mean, std), (told, spread) in zip(
                returns(self.output), returns(text), strict=False
            ):
                assert abs(mean - told) <= 3 * max(std, spread, abs(told) / 20), self.output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_walk(page, tmp_path, monkeypatch):
    Reader(tmp_path, monkeypatch, is_short=True).read(page.read_text())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_walk_to_the_end(page, tmp_path, monkeypatch):
    Reader(tmp_path, monkeypatch, is_short=False).read(page.read_text())


NOTEBOOK = ROOT / "docs" / "tutorials" / "notebook.ipynb"


def kinds(cell):
    """What a cell has shown: the kinds of its outputs, and the shape of its text."""
    outputs = [output for output in cell.get("outputs", ()) if output.get("name") != "stderr"]
    texts = [output.get("text", "") for output in outputs]
    return [*map(shape, "".join(map("".join, texts)).splitlines())], [
        sorted(output.get("data", ())) for output in outputs if "data" in output
    ]


def test_notebook_runs(tmp_path, monkeypatch):
    """With fewer steps, in a kernel of its own; it shows what the saved one shows."""
    nbclient = pytest.importorskip("nbclient", reason="needs the extra dev")
    nbformat = pytest.importorskip("nbformat")
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # another test's: a kernel shows plots inline
    for name in ("cleanrl", "cleanrl_utils"):
        (tmp_path / name).symlink_to(ROOT / name)
    saved = nbformat.read(NOTEBOOK, as_version=4)
    again = nbformat.read(NOTEBOOK, as_version=4)
    for cell in again.cells:
        cell.source = cell.source.replace("100000", "2048")
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(again, timeout=300, resources=resources).execute()
    for cell, told in zip(again.cells, saved.cells, strict=True):
        assert kinds(cell) == kinds(told), cell.source
        assert cell.cell_type == "markdown" or told.execution_count, "saved without its outputs"
    assert NOTEBOOK.stat().st_size < 1_000_000
