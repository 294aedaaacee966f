"""The files of cleanrl/ repeat each other by design; a difference without a reason is the defect.

- Every file holds the shared block, the same text as in ppo.py (PyTorch) or dqn_jax.py (JAX).
- Every file has the same order and keeps the same few rules of style.
- A flag of one name has the same help in all files, and within a family of
  cleanrl_utils/siblings.py a function, class or flag of one name is the same. What differs on
  purpose is listed in siblings.toml, with the reason.

A file that belongs to no family, such as your own, needs no entry.
"""

import ast
import subprocess
import sys
import tomllib
from itertools import pairwise

import pytest

from cleanrl_utils import siblings
from tests.harness import EVERY_FILE as FILES
from tests.harness import ROOT

ORDER = ["docstring", "imports", "Args", "networks", "load_policy", "shared block", "main"]
ENTRIES = tomllib.loads((ROOT / "tests" / "siblings.toml").read_text())


def is_main(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def places(tree, shared):
    """The places of ORDER as they come in a file; shared are the line numbers of its block."""
    for node in tree.body:
        bases = [ast.unparse(base) for base in getattr(node, "bases", [])]
        if node is tree.body[0] and isinstance(node, ast.Expr):
            yield "docstring"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield "imports"
        elif node.lineno in shared:
            yield "shared block"
        elif getattr(node, "name", None) in ORDER:
            yield node.name
        elif any(base.startswith("nn.") for base in bases):
            yield "networks"
        elif is_main(node):
            yield "main"


def style_complaints(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            modules = (
                names if isinstance(node, ast.Import) else ["." * node.level + str(node.module)]
            )
            if {module.split(".")[0] for module in modules} & {
                "",
                "cleanrl",
                "cleanrl_utils",
                *FILES,
            }:
                yield node, "a single file imports nothing of ours"
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            yield node, "a lambda with a name: use def"
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) in ("eval", "exec"):
                yield node, f"{ast.unparse(node.func)} of a string"
            if isinstance(node.func, ast.Call) and isinstance(node.func.func, ast.Call):
                yield node, "f()()(): name what is called"
        if isinstance(node, ast.Expr) and not isinstance(
            node.value, ast.Call | ast.Yield | ast.Constant
        ):
            yield node, "an expression as a statement"
        if isinstance(node, ast.For) and isinstance(node.iter, ast.IfExp):
            yield node, "a conditional in a for: use if"
        if isinstance(node, ast.Assert):
            yield node, "an assert, which python -O leaves out"


def check_file(path):
    """What is wrong with the layout and the style of one file."""
    source = path.read_text()
    lines, tree = source.splitlines(), ast.parse(source)
    (before, block, _), _ = siblings.split(source, path.name)
    first = before.count("\n") + 1
    shared = range(first, first + block.count("\n"))
    complaints = [f"line {node.lineno}: {what}" for node, what in style_complaints(tree)]
    complaints += [f"line {n}: {len(x)} columns" for n, x in enumerate(lines, 1) if len(x) > 100]
    found = [place for place in places(tree, shared) if place in ORDER]
    if missing := [place for place in ORDER if place not in [*found, "networks"]]:
        complaints.append(f"there is no {' and no '.join(missing)}")
    for one, other in pairwise(found):
        if ORDER.index(one) > ORDER.index(other):
            complaints.append(f"{other} comes after {one}")
    if not source.startswith("# /// script\n"):
        complaints.append("the script header comes first")
    if not is_main(tree.body[-1]):
        complaints.append("the main block comes last")
    rest = [line for n, line in enumerate(lines, 1) if n not in shared and line]
    if len(rest) <= len([line for line in block.splitlines() if line]):
        complaints.append("the shared block is more than half of the file")
    return complaints


@pytest.mark.parametrize("stem", FILES)
def test_shared_block(stem):
    difference = siblings.block_difference(FILES[stem])
    assert not difference, "\n".join([*difference, "python -m cleanrl_utils.siblings --fix"])


@pytest.mark.parametrize("stem", FILES)
def test_layout_and_style(stem):
    assert check_file(FILES[stem]) == []


def test_a_flag_has_the_same_help_everywhere():
    helps = {}
    for stem, path in FILES.items():
        for name, lines in siblings.named_parts(path).items():
            if name.startswith("Args.") and "  # " in lines[0]:
                text = lines[0].split("  # ", 1)[1]
                helps.setdefault(name, {}).setdefault(text, []).append(stem)
    allowed = ENTRIES["help"]
    wrong = {
        name: texts for name, texts in helps.items() if len(texts) > 1 and name[5:] not in allowed
    }
    assert wrong == {}
    stale = [name for name in allowed if len(helps.get(f"Args.{name}", ())) < 2]
    assert stale == [], "these have one help only: remove them from siblings.toml"


@pytest.mark.parametrize("family", siblings.FAMILIES)
def test_family_differs_only_where_listed(family):
    paths = [FILES[stem] for stem in siblings.FAMILIES[family]]
    found = {}
    for name, a, b, difference in siblings.family_differences(paths):
        found.setdefault(name, []).append("\n".join([f"{a.name} {b.name}", *difference]))
    listed = ENTRIES["differences"].get(family, {})
    for name in found.keys() - listed.keys() - {"load_policy"}:
        if not name.startswith("Args."):
            pytest.fail(f"{name}: {found[name][0]}\nmake them the same, or give a reason")
    assert listed.keys() <= found.keys(), "siblings.toml lists what is the same"
    assert all(reason.strip() for reason in listed.values())


# the tool


def run_tool(*words):
    command = [sys.executable, "-m", "cleanrl_utils.siblings", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_fix_copies_the_block(tmp_path):
    copy = tmp_path / "my_ppo.py"
    changed = FILES["ppo"].read_text().replace("def require(condition", "def need(condition")
    copy.write_text(
        changed.replace("class Agent(nn.Module):", "class Agent(nn.Module):\n    x = 1")
    )
    done = run_tool(copy)
    assert done.returncode == 1 and "-def require(condition, message):" in done.stdout
    assert run_tool("--fix", copy).stdout == "my_ppo.py: shared block copied\n"
    assert run_tool(copy).returncode == 0 and "x = 1" in copy.read_text()
    assert "## Agent (the files named: my_ppo, ppo)" in run_tool(copy, "ppo").stdout


def test_a_file_without_a_block_gets_one_line(tmp_path):
    (tmp_path / "x.py").write_text("print(1)\n")
    done = run_tool("--fix", tmp_path / "x.py")
    assert (
        done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "x.py has no" in done.stderr
    )
    assert "no algorithm file nope" in run_tool("nope").stderr


def test_a_file_that_is_not_python_gets_one_line(tmp_path):
    path = tmp_path / "x.py"
    path.write_text(FILES["ppo"].read_text().replace("import tyro", "import tyro as", 1))
    done = run_tool(path, "ppo")
    assert done.returncode == 1 and done.stderr.startswith("cannot read x.py: invalid syntax")
    assert len(done.stderr.splitlines()) == 1


def test_a_reader_who_has_seen_enough():
    """As head -3: what comes later goes nowhere."""
    command = [sys.executable, "-m", "cleanrl_utils.siblings"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, cwd=ROOT, **pipes)
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == 1


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("import tyro\n", "import tyro\nimport cleanrl_utils.enjoy\n", "imports nothing of ours"),
        (
            "import tyro\n",
            "import tyro\nfrom cleanrl.ppo import Agent\n",
            "imports nothing of ours",
        ),
        ("import tyro\n", "import tyro\nfrom . import ppo\n", "imports nothing of ours"),
        ("import tyro\n", "import tyro\nimport ppo\n", "imports nothing of ours"),
        ("# /// script", "#", "the script header comes first"),
        ("# ///\n", "# ///\nimport json\n", "there is no docstring"),
        ("def load_policy", "def policy", "there is no load_policy"),
        ("def layer_init", "import copy\n\n\ndef layer_init", "imports comes after Args"),
        ("        # act\n", "        # act\n        args.track and print()\n", "as a statement"),
        ("        # act\n", "        # act\n        double = lambda x: 2 * x\n", "a lambda"),
        ("        # act\n", "        # act\n        eval('1')\n", "eval of a string"),
        ("        # act\n", "        # act\n        torch.no_grad()(agent)(obs)\n", "f()()()"),
        ("        # act\n", "        # act\n        assert obs\n", "an assert"),
        ("        # act\n", "        # act" + "t" * 90 + "\n", "columns"),
        (
            'if __name__ == "__main__":\n',
            'if __name__ == "__main__":\n    pass\nif True:\n',
            "last",
        ),
    ],
)
def test_what_is_wrong_is_told(tmp_path, old, new, complaint):
    path = tmp_path / "ppo.py"
    source = FILES["ppo"].read_text()
    assert old in source
    path.write_text(source.replace(old, new, 1))
    assert any(complaint in found for found in check_file(path)), check_file(path)
