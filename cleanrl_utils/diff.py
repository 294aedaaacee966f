"""Show two variants side by side: only what differs between them.

    python -m cleanrl_utils.diff ppo ppo_atari
    python -m cleanrl_utils.diff ppo path/to/my_ppo.py --html diff.html

Paired lines count as changed; the header (script header, docstring, Args) is counted separately.
"""

import ast
import os
import re
import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches, ndiff
from html import escape
from itertools import groupby, zip_longest
from pathlib import Path

import tyro

from cleanrl_utils.errors import explain, printable

CLEANRL = Path(__file__).parent.parent / "cleanrl"
CONTEXT = 3  # lines shown around a change
MARKS = {"same": " ", "changed": "|", "removed": "<", "added": ">"}
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --page: #fff; --text: #1f2328; --faint: #656d76; --bar: #f1f3f5;
  --old: #ffebe9; --new: #e0f7e6; --old-word: #ffb8b3; --new-word: #97e2ab }}
@media (prefers-color-scheme: dark) {{
  :root {{ --page: #0f1216; --text: #dde3ea; --faint: #8d96a0; --bar: #1b2027;
  --old: #3c1a1d; --new: #12301c; --old-word: #852d32; --new-word: #1f6a36 }} }}
body {{ margin: 1rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif }}
h1 {{ font-size: 1.3rem; margin: 0; overflow-wrap: anywhere }}
table {{ width: 100%; table-layout: fixed; border-collapse: collapse;
  font: 12.5px/1.5 ui-monospace, monospace }}
td {{ vertical-align: top; padding: 0 .4rem; white-space: pre-wrap; overflow-wrap: anywhere }}
td:nth-child(odd) {{ width: 2.2rem; text-align: right; color: var(--faint); user-select: none }}
td:nth-child(even) {{ padding-left: 2.4ch; text-indent: -2ch }} /* a long line goes on further in */
.removed td:nth-child(-n+2), .changed td:nth-child(-n+2) {{ background: var(--old) }}
.added td:nth-child(n+3), .changed td:nth-child(n+3) {{ background: var(--new) }}
del, ins {{ text-decoration: none; border-radius: 2px; background: var(--old-word) }}
ins {{ background: var(--new-word) }}
summary {{ background: var(--bar); color: var(--faint); padding: .1rem .8rem;
  font-size: .85rem; cursor: pointer }}
@media (max-width: 800px) {{ /* one column: old line above new line, unchanged lines once */
  body {{ margin: .5rem }}
  tr {{ display: grid; grid-template-columns: 2.9rem 1fr }}
  td:nth-child(odd) {{ width: auto }}
  .same td:nth-child(n+3), .removed td:nth-child(n+3), .added td:nth-child(-n+2) {{ display: none }}
  .removed td:nth-child(1)::before, .changed td:nth-child(1)::before {{ content: "-"; float: left }}
  .added td:nth-child(3)::before, .changed td:nth-child(3)::before {{ content: "+"; float: left }}
}}
</style>
<h1>{title}</h1>
<p>{summary}</p>
{body}
</html>
"""


@dataclass
class Args:
    old: tyro.conf.Positional[str]  # name of a file in cleanrl/, such as ppo, or any path
    new: tyro.conf.Positional[str]  # the file to compare it with
    all: bool = False  # show the whole files instead of the changes only
    html: str | None = None  # write a web page into this file instead


def read_lines(name):
    names = sorted(path.stem for path in CLEANRL.glob("*.py"))
    path = CLEANRL / f"{name}.py" if name in names else Path(name)
    if not path.is_file():
        nearest = get_close_matches(path.stem, names, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"choose from {', '.join(names)}"
        raise SystemExit(f"no file called {name}, neither in cleanrl/ nor as a path: {hint}")
    with explain(f"read {name}"):
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def find_header(lines):
    """Numbers of the lines of the script header, the docstring and Args."""
    try:
        body = ast.parse("\n".join(lines)).body
    except (SyntaxError, ValueError):  # not Python, or not yet
        return set()
    header = set()
    if body:
        is_docstring = isinstance(body[0], ast.Expr)
        header |= set(range(1, body[0].end_lineno + 1 if is_docstring else body[0].lineno))
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            first = min(n.lineno for n in (node, *node.decorator_list))
            header |= set(range(first, node.end_lineno + 1))
    return header


def align(old, new):
    """Pairs of line numbers, one pair a row; 0 where the other side has no such line."""
    pairs = []
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        i, j = iter(range(i1 + 1, i2 + 1)), iter(range(j1 + 1, j2 + 1))
        if tag == "equal":
            pairs += zip(i, j, strict=True)
            continue
        # ndiff marks similar lines with a ? line: they are paired; what lies between stays in order
        left, right, codes = [], [], "".join(line[0] for line in ndiff(old[i1:i2], new[j1:j2]))
        for code in re.findall(r"-\?\+\??|-\+\?|-|\+", codes):
            if code == "-":
                left.append(next(i))
            elif code == "+":
                right.append(next(j))
            else:
                pairs += [*zip_longest(left, right, fillvalue=0), (next(i), next(j))]
                left, right = [], []
        pairs += zip_longest(left, right, fillvalue=0)
    return pairs


def split_words(old, new):
    """Two lines cut into (text, is_changed) pieces; lines with little in common are left whole."""
    a, b = (re.findall(r"\w+|\W", line) for line in (old, new))
    words = SequenceMatcher(None, a, b, autojunk=False)
    if words.ratio() < 0.5:
        return [(old, False)], [(new, False)]
    left, right = [], []
    for tag, i1, i2, j1, j2 in words.get_opcodes():
        left.append(("".join(a[i1:i2]), tag != "equal"))
        right.append(("".join(b[j1:j2]), tag != "equal"))
    return left, right


def compare(old, new):
    """Rows of kind, number and pieces of the old and of the new line; and a summary sentence."""
    old_header, new_header = find_header(old), find_header(new)
    rows, counts = [], Counter()
    for i, j in align(old, new):
        x, y = old[i - 1] if i else "", new[j - 1] if j else ""
        kind = "added" if not i else "removed" if not j else "same" if x == y else "changed"
        left, right = split_words(x, y)
        rows.append((kind, i or "", left, j or "", right))
        counts[kind, i in old_header or j in new_header] += 1
    code, header = (
        [counts[kind, in_header] for kind in ("removed", "added", "changed")]
        for in_header in (False, True)
    )
    summary = "{} lines removed, {} added, {} changed".format(*code)
    return rows, summary + "; in flags and header {} removed, {} added, {} changed".format(*header)


def cut(rows, whole):
    """Stretches of rows as (is_shown, rows): shown are the changes and the lines around them."""
    changed = [row[0] != "same" for row in rows]
    shown = [whole or any(changed[max(0, k - CONTEXT) : k + CONTEXT + 1]) for k in range(len(rows))]
    for is_shown, stretch in groupby(zip(shown, rows, strict=True), key=lambda x: x[0]):
        yield is_shown, [row for _, row in stretch]


def render_terminal(rows, width, colour, whole):
    column = (width - 13) // 2

    def wrap(pieces, code):
        """The lines of one cell, each as wide as its column."""
        cell = [(c, changed) for text, changed in pieces for c in printable(text.expandtabs(4))]
        for k in range(0, max(len(cell), 1), column):
            line = cell[k : k + column]
            text = ""
            for changed, run in groupby(line, key=lambda x: x[1]):
                run = "".join(c for c, _ in run)
                emphasis = ";7" if changed else ""
                text += f"\033[{code}{emphasis}m{run}\033[0m" if colour and code else run
            yield text + " " * (column - len(line))

    lines = []
    for is_shown, stretch in cut(rows, whole):
        if not is_shown:
            lines.append(f" ... unchanged lines: {len(stretch)}")
            continue
        for kind, i, left, j, right in stretch:
            cells = wrap(left, kind != "same" and "31"), wrap(right, kind != "same" and "32")
            for k, (x, y) in enumerate(zip_longest(*cells, fillvalue=" " * column)):
                number_i, number_j = ("", "") if k else (i, j)
                lines.append(f"{number_i:>4} {x} {MARKS[kind]} {number_j:>4} {y}".rstrip())
    return "\n".join(lines)


def render_rows(rows, whole):
    """The rows as tables of a web page, unchanged stretches folded away."""

    def cell(pieces, tag):
        marked = ""
        for text, changed in pieces:
            marked += f"<{tag}>{escape(text)}</{tag}>" if changed and text else escape(text)
        return marked

    body = []
    for is_shown, stretch in cut(rows, whole):
        lines = ["<table>"]
        for kind, i, left, j, right in stretch:
            old, new = cell(left, "del"), cell(right, "ins")
            cells = f"<td>{i}</td><td>{old}</td><td>{j}</td><td>{new}</td>"
            lines.append(f'<tr class="{kind}">{cells}</tr>')
        table = "\n".join([*lines, "</table>"])
        summary = f"<summary>unchanged lines: {len(stretch)}</summary>"
        body.append(table if is_shown else f"<details>{summary}\n{table}</details>")
    return "\n".join(body)


def render_html(rows, title, summary, whole):
    return PAGE.format(title=escape(title), summary=escape(summary), body=render_rows(rows, whole))


if __name__ == "__main__":
    args = tyro.cli(Args, prog="python -m cleanrl_utils.diff", description=__doc__)
    old, new = read_lines(args.old), read_lines(args.new)
    rows, summary = compare(old, new)
    heading = f"{args.old} -> {args.new}: {summary}"
    if old == new:
        heading = f"{args.old} and {args.new} are identical"
    if args.html:
        page = render_html(rows, f"{args.old} → {args.new}", summary, args.all)
        with explain(f"write {args.html}"):
            Path(args.html).parent.mkdir(parents=True, exist_ok=True)
            Path(args.html).write_text(page, encoding="utf-8")
    elif old != new:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        width = max(80, shutil.get_terminal_size().columns)
        heading += "\n" + render_terminal(rows, width, colour, args.all)
    try:
        print(heading, flush=True)
    except BrokenPipeError:  # head or less has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
