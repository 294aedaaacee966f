"""scripts/new_file.py, behind `make new`: a copy passes its own tests and those of all files."""

import re
import shutil
import subprocess
import sys

import pytest

from tests.harness import ROOT


def run(folder, *words):
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=folder, capture_output=True, text=True
    )


def copy_tree(folder):
    """The tracked and new files of the working tree."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = copy_tree(tmp_path_factory.mktemp("new") / "cleanrl")
    command = ["make", "--no-print-directory", "new", "NAME=my_ppo", "FROM=ppo"]
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert made.stdout.splitlines()[:6] == [
        "cleanrl/my_ppo.py",
        "tests/test_my_ppo.py",
        "docs/rl-algorithms/my-ppo.md",
        "benchmark/my_ppo.sh",
        "mkdocs.yml",
        "docs/results.md",
    ]
    return folder


def test_only_the_name_differs(tree):
    old, new = ((tree / "cleanrl" / f"{name}.py").read_text() for name in ("ppo", "my_ppo"))
    assert new.replace("my_ppo", "ppo") == old != new
    assert "uv run cleanrl/my_ppo.py" in new and "uv run cleanrl/ppo.py" not in new
    assert "      - my_ppo: rl-algorithms/my-ppo.md\n" in (tree / "mkdocs.yml").read_text()
    overview = (tree / "docs" / "results.md").read_text()
    stems = re.findall(r"^\| \[(\w+)\]\([\w/.-]+\) \|  \|  \| 0 \|", overview, re.M)
    assert "my_ppo" in stems and stems == sorted(stems)
    code = "from cleanrl_utils.check.parent import find_parent as find, Path\n"
    code += "print(*find(Path('cleanrl/my_ppo.py').read_text()))"
    assert run(tree, "-c", code).stdout.startswith("ppo "), "the parent is not the file itself"


def test_a_new_file_passes_the_tests(tree):
    """Its own, and those that look at every file."""
    modules = ["my_ppo", "siblings", "packaging", "docs", "benchmark"]
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    words += [f"tests/test_{module}.py" for module in modules]
    own = "test_my_ppo and (core_3 or core_7 or is_resumed)"
    others = "(my_ppo or my-ppo) and not test_my_ppo and not command_runs"
    done = run(tree, *words, "-k", f"({own}) or ({others})")
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 9, done.stdout


@pytest.mark.slow
def test_a_detail_that_is_taken_out_is_noticed(tree):
    source = (tree / "cleanrl" / "my_ppo.py").read_text()
    broken = source.replace("if args.norm_adv:  # [core 7]", "if False:  # [core 7]")
    assert broken != source
    (tree / "cleanrl" / "my_ppo.py").write_text(broken)
    done = run(tree, "-m", "pytest", "-q", "tests/test_my_ppo.py", "-k", "core_7")
    (tree / "cleanrl" / "my_ppo.py").write_text(source)
    assert done.returncode == 1 and "test_core_7" in done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("parent", ["ppo", "dqn", "sac_continuous_action", "ppo_atari", "dqn_jax"])
def test_all_tests_of_a_new_file(tmp_path, parent):
    folder = copy_tree(tmp_path / "cleanrl")
    name = f"new_{parent}" if parent.endswith("_jax") else "mine"
    assert run(folder, "scripts/new_file.py", name, parent).returncode == 0
    done = run(folder, "-m", "pytest", "-q", "-m", "not slow", f"tests/test_{name}.py")
    assert done.returncode == 0, done.stdout


def test_a_formula_of_two_lines(tree):
    assert run(tree, "scripts/new_file.py", "team_jax", "ippo_jax").returncode == 0
    page = (tree / "docs" / "rl-algorithms" / "team-jax.md").read_text()
    (formula,) = re.findall(r"^\$\$.*?\$\$$", page, re.M | re.S)
    assert formula in (ROOT / "docs" / "rl-algorithms" / "ippo-jax.md").read_text()


def test_a_parent_whose_tests_are_those_of_two_files(tree):
    """They run on the new file, which lacks here what they look for, and not on the two."""
    parent = "ppo_atari_envpool_xla_jax_scan"
    assert run(tree, "scripts/new_file.py", "scanned_jax", parent).returncode == 0
    file = tree / "cleanrl" / "scanned_jax.py"
    source = file.read_text()
    file.write_text(source.replace("class Agent(", "class Other("))
    done = run(tree, "-m", "pytest", "-q", "tests/test_scanned_jax.py", "-k", "core_2 or atari_8")
    file.write_text(source)
    assert done.returncode == 1 and done.stdout.count("KeyError: 'Agent'") >= 2, done.stdout
    assert "2 failed" in done.stdout and "passed" not in done.stdout, done.stdout


@pytest.mark.slow
def test_the_site_has_the_new_file(tree, tmp_path):
    done = run(tree, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "code" / "my_ppo" / "index.html").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "usage: make new NAME=my_ppo FROM=ppo"),
        (("my_ppo", ""), "usage: make new NAME=my_ppo FROM=ppo"),
        (("My-PPO", "ppo"), "My-PPO must be lowercase letters"),
        (("other", "nope"), "there is no cleanrl/nope.py"),
        (("ppo_atari", "ppo"), "cleanrl/ppo_atari.py exists already"),
        (("my_ppo", "ppo_jax"), "have _jax in them"),
    ],
)
def test_bad_words_get_one_line_and_write_nothing(tree, words, line):
    before = sorted(tree.rglob("*.py"))
    done = run(tree, "scripts/new_file.py", *words)
    assert done.returncode == 1 and line in done.stderr and len(done.stderr.splitlines()) == 1
    assert sorted(tree.rglob("*.py")) == before
