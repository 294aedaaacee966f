"""The file that a user's copy grew out of, and what differs between the two."""

import ast
import re
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def is_new(path):
    """Whether `make new` made it: then it has no tests of its own yet, but those of its parent."""
    tests = ROOT / "tests" / f"test_{path.stem}.py"
    return tests.exists() and "\nPARENT = " in tests.read_text()


FILES = sorted((ROOT / "cleanrl").glob("*.py"))
FILES = {path.stem: path for path in FILES if not is_new(path)}
TAG = re.compile(r"\[([a-z][a-z0-9]*) (\d+(?:, \d+)*)( changed)?\]")
LEAST = 0.2  # share of the lines that a copy has in common with its parent, at least


@dataclass
class Detail:
    tag: str  # such as "core 7"
    title: str  # from the docs
    lines: list  # of the parent, without the comment
    is_marked: bool = False  # in the user's file
    is_changed: bool = False  # on purpose


def find_tests(stem):
    """The test module of a file: that of ..._jax is that of ..._jax_scan, too."""
    names = [stem, stem.rpartition("_")[0]]
    modules = [ROOT / "tests" / f"test_{name}.py" for name in names]
    return next((module for module in modules if module.exists()), None)


def read_source(path):
    try:
        source = Path(path).read_text(encoding="utf-8")
        ast.parse(source)
    except OSError as error:
        raise SystemExit(f"cannot read {path}: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        raise SystemExit(f"cannot check {path}: it is not Python: {error}") from None
    return source


def code_lines(source):
    """Lines without indentation, comments and what is empty."""
    stripped = (re.sub(r"\s+# .*$", "", line).strip() for line in source.splitlines())
    return [line for line in stripped if line and not line.startswith("#")]


def similarity(source, other):
    """The share of lines that two sources have in common, wherever they are."""
    a, b = set(code_lines(source)), set(code_lines(other))
    return len(a & b) / max(1, len(a | b))


def find_parent(source, against=None):
    """The stem of the file that a source grew out of, and how much of it is the same."""
    if against:
        stem = Path(against).stem
        if stem not in FILES:
            raise SystemExit(f"--against: there is no cleanrl/{stem}.py: {', '.join(FILES)}")
        return stem, similarity(source, FILES[stem].read_text())
    shares = {stem: similarity(source, path.read_text()) for stem, path in FILES.items()}
    nearest = sorted(shares, key=shares.get, reverse=True)[:3]
    own = code_lines(source)

    def in_order(stem):
        other = code_lines(FILES[stem].read_text())
        return SequenceMatcher(None, own, other, autojunk=False).ratio()

    parent = max(nearest, key=in_order)
    if shares[parent] < LEAST:
        raise SystemExit(
            f"no file of cleanrl/ is like this one (the nearest is {parent}.py, "
            f"{shares[parent]:.0%} of its lines): name its parent with --against"
        )
    return parent, shares[parent]


def marks(source):
    """{tag: [numbers of its lines]} and the tags that are marked as changed on purpose."""
    found, changed = {}, set()
    for number, line in enumerate(source.splitlines()):
        for family, numbers, is_changed in TAG.findall(line):
            for n in numbers.split(", "):
                found.setdefault(f"{family} {n}", []).append(number)
                changed |= {f"{family} {n}"} if is_changed else set()
    return found, changed


def read_titles():
    """{tag: title} of the details that the docs explain: the words in bold before the test."""
    titles = {}
    for page in sorted((ROOT / "docs" / "rl-algorithms").glob("*.md")):
        for entry in re.split(r"(?m)^(?=\d+\. \*\*)", page.read_text(encoding="utf-8")):
            bold = re.match(r"\d+\. \*\*(.+?)\*\*", entry, re.DOTALL)
            if bold:
                for tag in re.findall(r'\.py#L\d+ "([a-z0-9]+ \d+)"\)', entry)[:1]:
                    titles.setdefault(tag, " ".join(bold[1].split()).rstrip("."))
    return titles


def list_details(parent, source, changed=()):
    """The marked details of the parent, in their order, and whether the source has their marks."""
    known, _ = marks(FILES[parent].read_text().split("class Args")[1])
    own, on_purpose = marks(source)
    on_purpose |= set(changed)
    if unknown := set(changed) - set(known):
        raise SystemExit(f"--changed: {parent}.py has no detail {', '.join(sorted(unknown))}")
    titles, lines = read_titles(), FILES[parent].read_text().split("class Args")[1].splitlines()
    details = []
    for tag in sorted(known, key=lambda tag: (tag.split()[0], int(tag.split()[1]))):
        code = [text for n in known[tag] for text in code_lines(lines[n])]
        title = titles.get(tag, "")
        details.append(Detail(tag, title, code, tag in own, tag in on_purpose))
    return details


def read_defaults(source):
    """{flag: (default, its place in the source)} of the class Args."""
    defaults = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            for flag in node.body:
                if isinstance(flag, ast.AnnAssign) and flag.value is not None:
                    text = ast.get_source_segment(source, flag.value)
                    defaults[flag.target.id] = text, flag.value
    return defaults


def compare_flags(source, parent_source):
    """{flag: (default, the parent's)} of what differs, and flags that came and went."""
    own, theirs = read_defaults(source), read_defaults(parent_source)
    differ = {
        name: (own[name][0], theirs[name][0])
        for name in own.keys() & theirs.keys()
        if own[name][0] != theirs[name][0]
    }
    return differ, sorted(own.keys() - theirs.keys()), sorted(theirs.keys() - own.keys())


def with_defaults_of(source, parent_source):
    """The source with its parent's defaults, which the tests of the parent expect."""
    own, theirs = read_defaults(source), read_defaults(parent_source)
    lines = source.splitlines(keepends=True)
    for name, (text, node) in own.items():
        is_one_line = node.lineno == node.end_lineno
        if name in theirs and theirs[name][0] != text and is_one_line:
            raw = lines[node.lineno - 1].encode()
            new = raw[: node.col_offset] + theirs[name][0].encode() + raw[node.end_col_offset :]
            lines[node.lineno - 1] = new.decode()
    return "".join(lines)
