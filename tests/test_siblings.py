"""The files of cleanrl/ repeat each other by design; a difference without a reason is the defect.

Two files share their parts of the same name:
- a function, class or constant at the top level, by its name, with the comments above it;
- a flag, by its name as Args.gamma: its type, default and comments;
- a step of the program under `if __name__ == "__main__":`, by the leading words of the comment that marks it.

The comment that marks a step is a line of its own, directly in the main block or directly in the training loop (the longest
loop of the main block), and the line before it is blank or indented less. Any other comment is an ordinary one: it stands
right under a line of code, or deeper inside. A step is named by its comment up to the first of : , [ and the full stop. It
goes on until the next step at its own or a lower indentation, or to the end of its block. A step inside another (the loop's
steps are inside the one that the loop belongs to) is a part of its own, and left out of the outer one.

The same part is the same text in both files, however far it is indented, and the parts they share come in the same order;
only the file's own name, such as ppo.py, may differ. What else differs is listed in siblings.toml, with the reason.
"""

import ast
import json
import re
import textwrap
import tomllib
from difflib import ndiff, unified_diff
from fnmatch import fnmatchcase
from itertools import combinations, pairwise, permutations
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = sorted(TESTS.parent.joinpath("cleanrl").glob("*.py"))
PPO = TESTS.parent / "cleanrl" / "ppo.py"
ORDER = ["docstring", "imports", "Args", "make_envs", "networks", "load_policy", "main"]


def is_main(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def find_steps(lines, main):
    """(name, text) of every step in the main block."""
    loops = [node for node in ast.walk(main) if isinstance(node, ast.For | ast.While)]
    loops.sort(key=lambda node: node.lineno - node.end_lineno)
    names, owners = {}, {}  # the step that starts at a line, and the step that a line belongs to
    for block in (main, *loops[:1]):  # the loop's steps take their lines from the main block's
        indentation, step = " " * block.body[0].col_offset, None
        for n in range(block.lineno, block.end_lineno):
            if lines[n].startswith(indentation + "# ") and not lines[n - 1].startswith(indentation):
                step, names[n] = n, re.split(r"[:,.\[]", lines[n].lstrip(" #"))[0].strip()
            if step is not None:
                owners[n] = step
    for step in sorted(names):
        yield names[step], "\n".join(lines[n] for n in sorted(owners) if owners[n] == step)


def find_parts(path):
    """The text of every named part of a file, in the file's order."""
    source = re.sub(rf"\b{re.escape(path.name)}\b", "THIS_FILE.py", path.read_text())
    lines, parts = source.split("\n"), []

    def add(nodes, prefix, end):
        for node in nodes:
            start, end = (
                end,
                node.end_lineno,
            )  # from the end of what came before, so with the comments above it
            if is_main(node):
                parts.extend(find_steps(lines, node))
            elif isinstance(node, ast.ClassDef) and node.name == "Args":
                add(node.body, "Args.", node.lineno)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                parts.append((prefix + node.name, "\n".join(lines[start:end])))
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                parts.append((prefix + ast.unparse(target), "\n".join(lines[start:end])))

    add(ast.parse(source).body, "", 0)
    names = [name for name, _ in parts]
    twice = sorted({name for name in names if names.count(name) > 1})
    assert not twice, (
        f"{path.name}: more than one part is called {' or '.join(twice)}: give each a name of its own"
    )
    return {name: textwrap.dedent(text).strip() for name, text in parts}


def find_differences(paths):
    """The two texts of every part, and the two orders, that differ, by (name, file, other file)."""
    parts, found = {path.stem: find_parts(path) for path in sorted(paths)}, {}
    for a, b in combinations(parts, 2):
        shared = {
            name: (text, parts[b][name]) for name, text in parts[a].items() if name in parts[b]
        }
        orders = "\n".join(shared), "\n".join(name for name in parts[b] if name in shared)
        found |= {
            (name, a, b): texts
            for name, texts in [*shared.items(), ("order", orders)]
            if texts[0] != texts[1]
        }
    return found


def check_differences(paths, entries):
    """Complaints about the differences that are not listed, and the entries that list none."""
    differences, listed, complaints = find_differences(paths), set(), []
    for entry in entries:
        if (
            set(entry) != {"name", "files", "reason"}
            or len(entry["files"]) < 2
            or not entry["reason"].strip()
        ):
            complaints.append(
                f"siblings.toml: an entry has a name, two files or more, and a reason, unlike {entry}"
            )
            continue
        used = set()
        for name, a, b in differences:
            for p, q in (
                permutations(range(len(entry["files"])), 2) if name == entry["name"] else ()
            ):
                if fnmatchcase(a, entry["files"][p]) and fnmatchcase(b, entry["files"][q]):
                    listed.add((name, a, b))
                    used |= {p, q}
        for p, pattern in enumerate(entry["files"]):
            if p not in used:
                complaints.append(
                    f'siblings.toml: stale, "{entry["name"]}" is no difference of "{pattern}" in {entry["files"]}'
                )
    groups = {}  # the same two texts in many pairs of files are shown once
    for (name, a, b), texts in differences.items():
        if (name, a, b) not in listed:
            groups.setdefault((name, *texts), []).append([a, b])
    for (name, x, y), pairs in groups.items():
        diff = unified_diff(
            x.splitlines(),
            y.splitlines(),
            *(f"{stem}.py: {name}" for stem in pairs[0]),
            lineterm="",
        )
        wanted = [
            f'[[difference]]\nname = {json.dumps(name)}\nfiles = {json.dumps(pair)}\nreason = ""'
            for pair in pairs
        ]
        text = [
            "\n".join(diff),
            "Make them the same, or give the reason in tests/siblings.toml:",
            *wanted,
        ]
        complaints.append("\n\n".join(text))
    return complaints


def check_layout(path, stems):
    """Complaints about the imports and the order of one file."""
    source, complaints = path.read_text(), []
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = ["." * node.level + (node.module or "")]
        else:
            continue
        if {module.split(".")[0] for module in modules} & {
            "",
            "cleanrl",
            "cleanrl_utils",
            *stems,
        }:  # "" is a relative import
            complaints.append(
                f"line {node.lineno}, {ast.unparse(node)}: a single file imports nothing of ours"
            )

    found = []  # the places of ORDER as they come in the file
    for node in tree.body:
        name, bases = (
            getattr(node, "name", None),
            [ast.unparse(base) for base in getattr(node, "bases", [])],
        )
        if isinstance(node, ast.Expr) and node is tree.body[0]:
            found.append("docstring")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.append("imports")
        elif name in ORDER:
            found.append(name)
        elif any(base.startswith("nn.") for base in bases):
            found.append("networks")
        elif is_main(node):
            found.append("main")
            if not source.split("\n")[node.lineno].startswith("    # "):
                complaints.append(
                    "the main block starts with the comment that marks its first step"
                )
        elif name and "Args" not in found:
            complaints.append(f"{name} comes before Args")
    if not source.startswith("# /// script\n"):
        complaints.append("the script header comes first")
    if missing := [place for place in ORDER if place not in [*found, "make_envs", "networks"]]:
        complaints.append(f"there is no {' and no '.join(missing)}")
    for before, after in pairwise(found):
        if ORDER.index(before) > ORDER.index(after):
            complaints.append(f"{after} comes after {before}")
    if not is_main(tree.body[-1]):
        complaints.append("the main block comes last")
    return [f"{path.name}: {complaint}" for complaint in complaints]


def test_files_differ_only_where_listed():
    entries = tomllib.loads(TESTS.joinpath("siblings.toml").read_text()).get("difference", [])
    if complaints := check_differences(FILES, entries):
        pytest.fail("\n\n\n".join(complaints), pytrace=False)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_layout(path):
    if complaints := check_layout(path, [path.stem for path in FILES]):
        pytest.fail("\n".join(complaints), pytrace=False)


# From here on the checker itself is tested, on ppo.py and changed copies of it.


def write_copy(folder, old="", new="", stem="ppo_copy"):
    """ppo.py and a copy of it under another name with one change, both in folder."""
    source = PPO.read_text()
    copy = source.replace("ppo.py", f"{stem}.py")
    assert old in copy
    folder.joinpath("ppo.py").write_text(source)
    folder.joinpath(f"{stem}.py").write_text(copy.replace(old, new, 1) if old else copy)
    return sorted(folder.glob("*.py"))


def swap_steps(path):
    head, act, estimate, rest = re.split(
        r"(?=^ {8}# (?:act|estimate|learn)\b)", path.read_text(), flags=re.MULTILINE
    )
    path.write_text(head + estimate + act + rest)


def find_names(paths):
    return [name for name, _, _ in find_differences(paths)]


def test_identical_copy_passes(tmp_path):
    paths = write_copy(tmp_path)
    assert check_differences(paths, []) == []
    assert [check_layout(path, ["ppo", "ppo_copy"]) for path in paths] == [[], []]


@pytest.mark.parametrize(
    "old, new, name",
    [
        ("gain=2**0.5", "gain=1.0", "layer_init"),
        ("gamma: float = 0.99", "gamma: float = 0.9", "Args.gamma"),
        ("gamma: float", "gamma: float | None", "Args.gamma"),
        ("# discount factor", "# the discount", "Args.gamma"),
        ("# act\n", "# act: on one's own\n", "act"),
        ("# [core 8]", "# [core 80]", "learn"),
        ("    # act\n", "    # act\n        # an ordinary comment\n", "act"),
    ],
)
def test_difference_is_reported_until_it_is_listed(tmp_path, old, new, name):
    paths = write_copy(tmp_path, old, new)
    assert find_names(paths) == [name]
    (complaint,) = check_differences(paths, [])
    assert complaint.startswith(f"--- ppo.py: {name}\n+++ ppo_copy.py: {name}\n@@")
    one, other = (
        path.read_text().replace(path.name, "THIS_FILE.py").splitlines() for path in paths
    )
    changes = [line[:2] + line[2:].strip() for line in ndiff(one, other) if line[0] in "-+"]
    assert all(f"\n{change[0]}" in complaint and change[2:] in complaint for change in changes)

    # the entry it prints fails for want of a reason, and passes with one
    entry = complaint[complaint.index("[[difference]]") :]
    assert any(
        "a reason" in other
        for other in check_differences(paths, tomllib.loads(entry)["difference"])
    )
    entry = entry.replace('reason = ""', 'reason = "a test"')
    assert check_differences(paths, tomllib.loads(entry)["difference"]) == []


def test_swapped_steps_are_reported(tmp_path):
    paths = write_copy(tmp_path)
    swap_steps(paths[1])
    assert find_names(paths) == ["order"]
    (complaint,) = check_differences(paths, [])
    assert "+estimate advantages\n act\n-estimate advantages\n" in complaint
    assert (
        check_differences(paths, [dict(name="order", files=["ppo", "ppo_copy"], reason="a test")])
        == []
    )


def test_stale_entries_are_reported(tmp_path):
    paths = write_copy(tmp_path, "gain=2**0.5", "gain=1.0")
    entry = dict(name="layer_init", files=["ppo", "ppo_copy"], reason="a test")
    assert check_differences(paths, [entry]) == []
    for stale in (
        entry | dict(name="mlp"),
        entry | dict(name="gone"),
        entry | dict(files=["ppo", "ppo_c"]),
    ):
        assert any("stale" in complaint for complaint in check_differences(paths, [entry, stale]))
    (complaint,) = check_differences(paths, [entry | dict(files=["ppo", "dqn*", "ppo_copy"])])
    assert 'stale, "layer_init" is no difference of "dqn*"' in complaint
    paths = write_copy(tmp_path)
    assert all("stale" in complaint for complaint in check_differences(paths, [entry]))


def test_patterns_are_groups_that_differ_from_each_other(tmp_path):
    write_copy(tmp_path, "gain=2**0.5", "gain=1.0", stem="ppo_atari")
    write_copy(tmp_path, "gain=2**0.5", "gain=1.0", stem="dqn_atari")
    paths = write_copy(tmp_path, "gain=2**0.5", "gain=2.0", stem="c51_atari")
    entry = dict(name="layer_init", files=["ppo", "*_atari"], reason="a test")
    complaints = check_differences(paths, [entry])
    assert (
        len(complaints) == 1
    )  # c51_atari against the other two, shown once, with an entry for each
    assert (
        'files = ["c51_atari", "dqn_atari"]' in complaints[0]
        and 'files = ["c51_atari", "ppo_atari"]' in complaints[0]
    )
    assert check_differences(paths, [entry, entry | dict(files=["c51*", "dqn*", "ppo_*"])]) == []
    assert check_differences(paths, [entry | dict(files=["*", "*"])]) == []


def test_only_the_own_name_may_differ(tmp_path):
    for stem in ("one", "two"):
        tmp_path.joinpath(f"{stem}.py").write_text(f'def f():\n    return "{stem}.py needs"\n')
    assert find_names(tmp_path.glob("*.py")) == []
    tmp_path.joinpath("two.py").write_text('def f():\n    return "one.py needs"\n')
    assert find_names(tmp_path.glob("*.py")) == ["f"]


def test_every_line_of_ppo_belongs_to_one_step():
    source = PPO.read_text().replace("ppo.py", "THIS_FILE.py")
    main = source[source.index("if __name__") :].splitlines()[1:]
    steps = [
        line
        for name, text in find_parts(PPO).items()
        if text.startswith(f"# {name}")
        for line in text.splitlines()
    ]
    assert sorted(line.strip() for line in steps if line) == sorted(
        line.strip() for line in main if line
    )


def test_which_comments_mark_a_step(tmp_path):
    path = tmp_path / "small.py"
    path.write_text("""
# above
def f():
    # no step

    # no step
    return 1

if __name__ == "__main__":
    # first, with more words
    a = 1
    # ordinary
    for b in range(2):
        # too short a loop for steps
        print(b)

    # second [core 1]: more
    while a < 5:
        # third
        if a:

            # too deep
            a += 1
        # ordinary

        # fourth. More
        a += 1

    print(a)
""")
    parts = find_parts(path)
    assert list(parts) == ["f", "first", "second", "third", "fourth"]
    assert parts["f"].startswith("# above\ndef f():")
    assert " ".join(parts["second"].split()) == "# second [core 1]: more while a < 5: print(a)"
    assert parts["third"].endswith("# ordinary") and parts["fourth"] == "# fourth. More\na += 1"
    path.write_text(path.read_text().replace("# fourth", "# third"))
    with pytest.raises(AssertionError, match="more than one part is called third"):
        find_parts(path)


@pytest.mark.parametrize(
    "old, new, complaint",
    [
        ("import tyro\n", "import tyro\nimport cleanrl_utils.enjoy\n", "imports nothing of ours"),
        (
            "import tyro\n",
            "import tyro\nfrom cleanrl.ppo import Agent\n",
            "imports nothing of ours",
        ),
        ("import tyro\n", "import tyro\nfrom . import ppo\n", "imports nothing of ours"),
        (
            "import tyro\n",
            "import tyro\nimport ppo\n",
            "imports nothing of ours",
        ),  # works when cleanrl/ is the script's folder
        (
            "    # act\n",
            "    # act\n        from cleanrl_utils import enjoy\n",
            "imports nothing of ours",
        ),
        ("# /// script", "#", "the script header comes first"),
        ("# ///\n", "# ///\nimport json\n", "there is no docstring"),
        ("def load_policy", "def policy", "there is no load_policy"),
        (
            "class Agent(nn.Module)",
            "def load_policy():\n    pass\n\n\nclass Agent(nn.Module)",
            "networks comes after load_policy",
        ),
        ("@dataclass", "def layer():\n    pass\n\n\n@dataclass", "layer comes before Args"),
        (
            "@dataclass",
            "class Net(nn.Module):\n    pass\n\n\n@dataclass",
            "Args comes after networks",
        ),
        ("def layer_init", "import copy\n\n\ndef layer_init", "imports comes after make_envs"),
        (
            'if __name__ == "__main__":\n',
            'if __name__ == "__main__":\n    x = 1\n',
            "comment that marks its first step",
        ),
        (
            'if __name__ == "__main__":\n',
            'if __name__ == "__main__":\n    pass\nif True:\n',
            "the main block comes last",
        ),
    ],
)
def test_layout_is_reported(tmp_path, old, new, complaint):
    path = next(path for path in write_copy(tmp_path, old, new) if path.stem == "ppo_copy")
    complaints = check_layout(path, ["ppo", "ppo_copy"])
    assert any(complaint in other for other in complaints), complaints
