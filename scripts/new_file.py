"""Start a new algorithm file as a copy of another, with its tests, docs page and benchmark script.

    make new NAME=my_ppo FROM=ppo
    python scripts/new_file.py my_ppo ppo    # the same, without make

Writes cleanrl/my_ppo.py, tests/test_my_ppo.py (which runs the tests of ppo.py on it),
docs/rl-algorithms/my-ppo.md and benchmark/my_ppo.sh, and adds the page to mkdocs.yml and the file
to the table of docs/results.md.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cleanrl_utils.check.parent import find_tests  # noqa: E402

TEST = '''"""cleanrl/{name}.py: the tests of its parent, {parent}.py, run on it.

A test that is defined below replaces the one of the same name.
"""

from cleanrl_utils import enjoy
from tests.harness import only_run, read_checkpoint, train
from tests.test_contract import iteration, small
from tests.{tests} import *  # noqa: F403

PARENT = "{parent}"


def test_a_run_is_resumed_and_evaluated(file, tmp_path):
    steps = iteration(file)
    train(file, tmp_path, *small(file, "--total-timesteps", steps))
    run = only_run(tmp_path)
    train(file, tmp_path, "--resume", run, "--total-timesteps", 2 * steps)
    assert int(read_checkpoint(run)["global_step"]) == 2 * steps
    evaluation = enjoy.evaluate(run, enjoy.load_checkpoint(run), episodes=2, file=file)
    assert len(evaluation["returns"]) == 2
'''
PAGE = """# {name} ({name}.py)

[`{name}.py`](../../cleanrl/{name}.py) grew out of
[`{parent}.py`](../../cleanrl/{parent}.py), whose objective it has:

{formula}

## Run

```bash
python cleanrl/{name}.py
python -m cleanrl_utils.diff {parent} {name}
```

## Results

No results, and no video yet. The commands of the runs are in
[`benchmark/{name}.sh`](../../benchmark/{name}.sh).

## Implementation details

Nothing differs yet.

## Hyperparameters

<!-- hyperparameters -->

## Logged metrics

[Metrics of `{parent}.py`](../metrics.md).

## Limitations

- No results yet.
"""
SCRIPT = """#!/bin/sh
# The runs behind the table of docs/rl-algorithms/{page}.md: three seeds, every flag at its default.
exec python -m cleanrl_utils.benchmark \\
    --env-ids {env_id} \\
    --command "python cleanrl/{name}.py" \\
    --num-seeds 3 "$@"
"""


def copy_source(parent, name):
    """The parent's source with the new name in the commands of its docstring."""
    source = (ROOT / "cleanrl" / f"{parent}.py").read_text(encoding="utf-8")
    before, docstring, after = source.split('"""', 2)
    lines = docstring.replace(f"cleanrl/{parent}.py", f"cleanrl/{name}.py").split("\n")
    lines = [re.sub(r" {2,}#", "  #", line) if len(line) > 100 else line for line in lines]
    return '"""'.join([before, "\n".join(lines), after])


def find_page(parent):
    """The page of a file, whose heading ends with the file's name."""
    pages = sorted((ROOT / "docs" / "rl-algorithms").glob("*.md"))
    return next(path for path in pages if f"({parent}.py)\n" in path.read_text(encoding="utf-8"))


def add_to_navigation(name, page, parent):
    """After the page of the parent in mkdocs.yml; returns the new text."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    told = re.escape(find_page(parent).stem)
    place = re.search(rf"^( +)- .*: rl-algorithms/{told}\.md\n", text, re.M)
    new = f"{place[1]}- {name}: rl-algorithms/{page}.md\n"
    return text[: place.end()] + new + text[place.end() :]


def add_to_overview(name):
    """A row of docs/results.md, where scripts/build_results.py would put it."""
    lines = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").split("\n")
    row = re.compile(r"\| \[(\w+)\]\([\w/.-]+\) \|  \|  \| 0 \|")
    without_runs = {i: found[1] for i, line in enumerate(lines) if (found := row.match(line))}
    later = [i for i, other in without_runs.items() if other > name]
    link = f"[{name}](rl-algorithms/{name.replace('_', '-')}.md)"
    lines.insert(
        later[0] if later else max(without_runs) + 1,
        f"| {link} |  |  | 0 |  |  |  |  | not run |  |  |",
    )
    return "\n".join(lines)


def main():
    if len(sys.argv) != 3 or not all(sys.argv[1:]):
        raise SystemExit("usage: make new NAME=my_ppo FROM=ppo")
    name, parent = sys.argv[1:]
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise SystemExit(f"{name} must be lowercase letters, digits and single underscores")
    if not (ROOT / "cleanrl" / f"{parent}.py").is_file():
        raise SystemExit(f"there is no cleanrl/{parent}.py")
    if ("_jax" in name) != ("_jax" in parent):
        raise SystemExit("the names of JAX files, and only theirs, have _jax in them")
    page = name.replace("_", "-")
    source = copy_source(parent, name)
    env_id = re.search(r'^    env_id: str = "(.*?)"', source, re.M)[1]
    text = find_page(parent).read_text(encoding="utf-8")
    formula = re.search(r"^\$\$.*?\$\$$", text, re.M | re.S)[0]
    words = dict(name=name, parent=parent, page=page, env_id=env_id, formula=formula)
    words["tests"] = find_tests(parent).stem
    new = {
        f"cleanrl/{name}.py": source,
        f"tests/test_{name}.py": TEST.format(**words),
        f"docs/rl-algorithms/{page}.md": PAGE.format(**words),
        f"benchmark/{name}.sh": SCRIPT.format(**words),
    }
    for path in new:
        if (ROOT / path).exists():
            raise SystemExit(f"{path} exists already")
    changed = {
        "mkdocs.yml": add_to_navigation(name, page, parent),
        "docs/results.md": add_to_overview(name),
    }
    for path, text in (new | changed).items():
        (ROOT / path).write_text(text, encoding="utf-8")
        print(path)
    (ROOT / f"benchmark/{name}.sh").chmod(0o755)
    print()
    print(f"run it:   python cleanrl/{name}.py")
    print(f"test it:  pytest tests/test_{name}.py -m 'not slow'")
    print(f"compare:  python -m cleanrl_utils.diff {parent} {name}")


if __name__ == "__main__":
    main()
