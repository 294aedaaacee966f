"""What the site has beyond its Markdown pages; MkDocs calls the on_... functions while it builds.

- Links out of docs/, such as ../../cleanrl/ppo.py#L42, lead to a page of that file.
- code/<file>: each algorithm file with the docs' explanations beside the lines they are about.
- diff/<file>: what it does differently from the file it grew out of.
- rl-algorithms/ppo-details: the details of the algorithm pages, with their code and ablations.
- tutorials/notebook: the notebook beside it, with the outputs that it was saved with.
"""

import ast
import base64
import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from functools import cache
from html import escape, unescape
from pathlib import Path, PurePosixPath

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, InclusionLevel
from pygments import token
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer, TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path += [str(ROOT), str(DOCS / "theme")]  # for the tools, from wherever mkdocs is run
import algorithm_pages  # noqa: E402
from latex2mathml.converter import convert  # noqa: E402

from cleanrl_utils.diff import compare, read_lines, render_rows  # noqa: E402
from cleanrl_utils.siblings import split  # noqa: E402

PARENTS = {  # what a file grew out of, where its name does not say so
    "rpo_continuous_action": "ppo_continuous_action",
    "dqn": "ppo",
    "pqn": "ppo",
    "pqn_jax": "ppo_jax",
    "pqn_atari_envpool": "ppo_atari_envpool",
    "c51": "dqn",
    "qrdqn": "c51",
    "c51_atari": "dqn_atari",
    "c51_jax": "dqn_jax",
    "c51_atari_jax": "dqn_atari_jax",
    "rainbow_atari": "c51_atari",
    "qdagger_dqn_atari": "dqn_atari",
    "qdagger_dqn_atari_jax": "dqn_atari_jax",
    "ddpg_continuous_action": "dqn",
    "td3_continuous_action": "ddpg_continuous_action",
    "td3_continuous_action_jax": "ddpg_continuous_action_jax",
    "sac_continuous_action": "td3_continuous_action",
    "sac_continuous_action_jax": "td3_continuous_action_jax",
    "sac_atari": "dqn_atari",
    "tqc_continuous_action_jax": "sac_continuous_action_jax",
    "droq_continuous_action_jax": "sac_continuous_action_jax",
    "crossq_continuous_action_jax": "sac_continuous_action_jax",
    "simba_v2_sac_jax": "sac_continuous_action_jax",
    "fast_td3_jax": "td3_continuous_action_jax",
    "fast_sac_jax": "fast_td3_jax",
    "ppo_continuous_lstm": "ppo_atari_lstm",
    "ppo_rnn_jax": "ppo_jax",
    "ppo_jaxtari_jax": "ppo_jax",
    "ippo_jax": "ppo_jax",
    "mappo_rnn_jax": "ippo_jax",
    "ppo_procgen": "ppo_atari_envpool",
    "ppo_rnd_envpool": "ppo_atari_envpool",
    "ppo_pettingzoo_ma_atari": "ppo_atari",
    "ppg_procgen": "ppo_procgen",
}
ROOT_PAGES = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}  # kept beside the README
LINK = re.compile(
    r'(?P<before>(?P<image>!?)\[(?P<label>[^\]]*)\]\()(?P<target>[^)\s]+)(?P<title> "[^"]*")?\)'
)
DETAIL = re.compile(
    r'\[line \d+\]\(\S+/(?P<file>\w+)\.py#L\d+ "(?P<family>[a-z][a-z0-9]*) (?P<number>\d+)"\)'
)
STILL = r'<p><a href="(?P<film>[^"]+\.mp4)">'
STILL += r'<img alt="(?P<alt>[^"]*)" src="(?P<still>[^"]+)" ?/?></a></p>'
FILM = re.compile(STILL + r"\s*<p><em>(?P<words>.*?)</em></p>", re.S)
PLOT = re.compile(
    r'(?P<link><a [^>]*>)?(?P<image><img [^>]*src="(?P<file>[^"]+\.(?:png|svg))"[^>]*>)'
)
FORMULA = re.compile(
    r'<(?P<tag>div|span) class="arithmatex">\\[\[(](?P<latex>.*?)\\[\])]</(?P=tag)>', re.S
)
TAG = re.compile(r"</?(?:a|br|code|div|em|h\d|li|ol|p|pre|span|strong|table|t[bdhr]\w*|ul)\b[^>]*>")
MARK = re.compile(r"\[([a-z][a-z0-9]*) (\d+(?:, \d+)*)\]")
SKIP = "---\nsearch: {exclude: true}\nhide: [navigation, toc]\n---\n"
BESIDE = "---\nhide: [navigation]\n---\n"  # the parts of the file in the sidebar


log = logging.getLogger("mkdocs.hooks")  # a warning is an error in a strict build


def algorithms():
    return sorted(path.stem for path in (ROOT / "cleanrl").glob("*.py"))


def parent(name):
    """The file that this one grew out of: by PARENTS, by name, or by similarity; None for ppo."""
    others = [other for other in algorithms() if other != name]
    if name == "ppo" or PARENTS.get(name) in others:
        return PARENTS.get(name)
    prefixes = [other for other in others if name.startswith(f"{other}_")]
    if prefixes:
        return max(prefixes, key=len)
    lines = set(read_lines(name))
    return max(others, key=lambda other: len(lines & set(read_lines(other))))


# ---- links ----


def base_of(uri):
    """The folder that the links of a page start from."""
    return ROOT if uri in ROOT_PAGES else (DOCS / uri).parent


def is_outside(path):
    return not path.is_relative_to(DOCS) and path.is_relative_to(ROOT)


def page_of(path, label="", fragment=""):
    """The page of the site for a file or folder outside docs/, and the place on it."""
    name = path.relative_to(ROOT).as_posix()
    for page, source in ROOT_PAGES.items():
        if name == source:
            return page, fragment
    if name == "README.md":
        return "index.md", ""
    if path.is_dir():
        return f"source/{name}/index.md", ""
    test = re.fullmatch(r"`(test_\w+)`", label)
    if test and not fragment:
        fragment = f"L{line_where(path, f'def {test[1]}(')}"
    if path.parent == ROOT / "cleanrl" and path.suffix == ".py":
        return f"code/{path.stem}.md", fragment
    return f"source/{name}.md", fragment


def line_where(path, text):
    return next((n for n, line in enumerate(path.read_text().splitlines(), 1) if text in line), 1)


def relink(text, base, uri):
    """Rewrite the links of Markdown in the folder base for the page uri of the site."""

    def link(match):
        target = match["target"]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        name, _, fragment = target.partition("#")
        path = Path(os.path.normpath(base / name))
        if is_outside(path):
            if not path.exists():
                log.warning(f"{uri} links to {target}, which does not exist")
                return match[0]
            page, fragment = page_of(path, match["label"], fragment)
        else:
            page = os.path.relpath(path, DOCS).replace(os.sep, "/")
            page = page.removesuffix(".ipynb") + ".md" if page.endswith(".ipynb") else page
        relative = os.path.relpath(page, PurePosixPath(uri).parent).replace(os.sep, "/")
        return f"{match['before']}{relative}{'#' * bool(fragment)}{fragment}{match['title'] or ''})"

    return LINK.sub(link, text)


def indent_lists(text):
    """Indent list items by four spaces for Python-Markdown; GitHub accepts two or three."""
    lines, fence = [], None  # the indentation of the code block that we are in
    for line in text.split("\n"):
        depth = len(line) - len(line.lstrip(" "))
        if fence is None and depth in (2, 3):
            fence = depth if line.lstrip().startswith("```") else None
            line = " " * (4 - depth) + line
        elif fence is not None:
            is_end = line.strip() == "```"
            line = " " * (4 - fence) * bool(fence) + line
            fence = None if is_end else fence
        elif line.startswith("```"):
            fence = 0
        lines.append(line)
    return "\n".join(lines)


# ---- what the pages say ----


@cache
def pages():
    """The Markdown of every page, by its place on the site."""
    found = {
        path.relative_to(DOCS).as_posix(): path.read_text() for path in sorted(DOCS.rglob("*.md"))
    }
    return found | {page: (ROOT / source).read_text() for page, source in ROOT_PAGES.items()}


@cache
def details():
    """Two tables: the paragraph that explains a detail, and what is said of it in other files."""
    general, special = {}, {}
    for uri, text in pages().items():
        for block in re.split(r"\n\s*\n|\n(?=- |\d+\. )", text):
            is_number, is_bullet = re.match(r"\n*\d+\. ", block), re.match(r"\n*- ", block)
            for match in DETAIL.finditer(block) if is_number or is_bullet else ():
                key = match["family"], int(match["number"])
                body = re.sub(r"\s+", " ", re.sub(r"^\n*(\d+\.|-) ", "", block)).strip()
                if is_number and key not in general:
                    general[key] = {"uri": uri, "text": body, "file": match["file"]}
                elif is_bullet:
                    special.setdefault((match["file"], *key), {"uri": uri, "text": body})
    return general, special


def split_guard(text):
    """A detail's paragraph without its last bracket, and the link to its test in there."""
    match = re.search(r"\s*\(\[line \d+\]\([^)]*\), (\[`test_\w+`\]\([^)]*\))\)$", text)
    return (text[: match.start()], match[1]) if match else (text, None)


@cache
def about_file(name):
    """The page of an algorithm file, whose heading ends with its name, and the file's summary."""
    heading = re.compile(rf"^# .*\({name}\.py\)$", re.M)
    page = next((uri for uri in pages() if heading.search(pages()[uri])), None)
    if page is None:
        log.warning(f"no page of docs/rl-algorithms has a heading that ends with ({name}.py)")
        page = "files.md"
    docstring = ast.get_docstring(ast.parse((ROOT / "cleanrl" / f"{name}.py").read_text()))
    return page, re.split(r"\.?\n\n", docstring)[0].replace("\n", " ").rstrip(".")


@cache
def file_of(uri):
    """The algorithm file that a page is about, if any."""
    return next((name for name in algorithms() if about_file(name)[0] == uri), None)


@cache
def anatomy():
    """What docs/anatomy.md says of each step, by its heading."""
    sections = re.split(r"^## ", pages().get("anatomy.md", ""), flags=re.M)[1:]
    return {
        title.strip("` "): body.strip()
        for title, _, body in (section.partition("\n") for section in sections)
    }


# ---- the files as pages ----


def colored(source, lexer):
    """The lines of a source text as HTML."""
    lines, names = [""], HtmlFormatter()
    for kind, text in lexer.get_tokens(source):
        css = names._get_css_class(kind) if kind not in (token.Text, token.Whitespace) else ""
        for i, piece in enumerate(text.split("\n")):
            if i:
                lines.append("")
            if piece:
                lines[-1] += f'<span class="{css}">{escape(piece)}</span>' if css else escape(piece)
    return lines[:-1]


def code_html(lines, first, page=""):
    """Numbered lines that can be linked to, or that link to those of another page."""
    place = "" if page else 'id="L{}"'
    rows = "".join(
        f'<span class="line" {place.format(n)}><a href="{page}#L{n}" tabindex="-1">{n}</a>'
        f"<code>{line or ' '}</code></span>"
        for n, line in enumerate(lines, first)
    )
    return f'<div class="highlight source">{rows}</div>'


def step_lines(source):
    """{line: name} of the parts of a file: its top-level definitions and the steps of main."""
    lines, starts = source.splitlines(), {1: "script header and docstring"}
    tree = ast.parse(source)
    for node in tree.body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        if isinstance(node, ast.Import | ast.ImportFrom) and "imports" not in starts.values():
            starts[first] = "imports"
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            starts[first] = node.name
        elif isinstance(node, ast.If):
            loops = sorted(
                (n for n in ast.walk(node) if isinstance(n, ast.For | ast.While)),
                key=lambda n: n.lineno - n.end_lineno,
            )
            for block in (node, *loops[:1]):
                indentation = " " * block.body[0].col_offset
                for n in range(block.lineno, block.end_lineno):
                    if lines[n].startswith(indentation + "# ") and not lines[n - 1].startswith(
                        indentation
                    ):
                        starts[n + 1] = re.split(r"[:;,.\[]", lines[n].lstrip(" #"))[0].strip()
    shared = shared_lines(source)
    if shared:
        starts |= {shared.start: "shared block", shared.stop: "main"}
    return {line: name for line, name in starts.items() if line not in shared[1:]}


def shared_lines(source):
    """The line numbers of the block that is the same in all PyTorch or all JAX files."""
    if "# -- the algorithm ---" not in source:  # a file in the old form
        return range(0)
    (before, block, _), _ = split(source, "the file")
    first = before.count("\n") + 1
    return range(first, first + block.count("\n"))


def detail_notes(name, line):
    """Markdown for the details that a line is marked with."""
    general, special = details()
    for family, numbers in MARK.findall(line):
        for number in map(int, numbers.split(", ")):
            told, here = general.get((family, number)), special.get((name, family, number))
            if not told:
                log.warning(
                    f"cleanrl/{name}.py is marked [{family} {number}], which no page explains"
                )
                continue
            text, guard = split_guard(told["text"])
            where = f"../{told['uri']}#{family}-{number}"
            note = f"[{family} {number}]({where}){{.mark}} " + relink(
                text, base_of(told["uri"]), f"code/{name}.md"
            )
            if here:
                note += "\n\nHere: " + relink(here["text"], base_of(here["uri"]), f"code/{name}.md")
            if guard:
                guard = relink(guard, base_of(told["uri"]), f"code/{name}.md")
                note += f"\n\n{guard}{{.guard}}"
            yield note


def annotated(name):
    """The Markdown of an annotated file: notes, each behind a comment with its line number."""
    source = (ROOT / "cleanrl" / f"{name}.py").read_text()
    lines, uri = source.splitlines(), f"code/{name}.md"
    page, words = about_file(name)
    grew = parent(name)
    links = [f"[usage, results, hyperparameters](../{page})"]
    links += [f"[diff against {grew}.py](../diff/{name}.md)"] if grew else []
    tests = ROOT / "tests" / f"test_{name}.py"
    links += [f"[tests](../{page_of(tests)[0]})"] if tests.exists() else []
    links += [f"[raw file](../raw/cleanrl/{name}.py)", "[all files](../files.md)"]
    told = [
        f"{BESIDE}# {name}.py\n",
        f"{words}.\n",
        " · ".join(links) + "\n{: .links }\n",
    ]
    starts, shared, seen, last = step_lines(source), shared_lines(source), set(), -4
    args = lines.index("class Args:")
    for n, line in enumerate(lines, 1):
        notes = []
        if n in starts:
            title = starts[n]
            body = anatomy().get(title) or anatomy().get(title.split()[0], "")
            heading = (
                f"## `{title}`"
                if re.fullmatch(r"\w+", title) and not lines[n - 1].lstrip().startswith("#")
                else f"## {title}"
            )
            notes.append(f"{heading}\n\n{relink(body, DOCS, uri)}")
        fresh = [mark for mark in MARK.findall(line) if n > args and (mark not in seen)]
        if fresh:
            seen.update(fresh)
            notes += detail_notes(name, line)
        if notes and n < last + 4 and not {n, last} & {shared.start, shared.stop}:
            told[-1] += "\n" + "\n\n".join(notes) + "\n"  # beside the lines just before
        elif notes:
            told.append(f"<!-- note {n} -->\n\n" + "\n\n".join(notes) + "\n")
            last = n
    return "\n".join(told)


def weave(html, name):
    """The rendered notes and the code beside them."""
    source = (ROOT / "cleanrl" / f"{name}.py").read_text()
    lines, shared = colored(source, PythonLexer(stripnl=False)), shared_lines(source)
    head, *rest = re.split(r"<!-- note (\d+) -->", html)
    starts = [int(n) for n in rest[::2]]
    parts = []
    for n, end, note in zip(starts, [*starts[1:], len(lines) + 1], rest[1::2], strict=True):
        code = code_html(lines[n - 1 : end - 1], n)
        if shared and n == shared.start:  # whoever knows one file can skip it in all
            code = f"<details><summary>Show these {len(shared)} lines</summary>{code}</details>"
        note = fold_note(note, end - n)
        parts.append(f'<section><div class="note">{note}</div>{code}</section>')
    # the search finds the page by its title and summary, and the notes on the algorithm's page
    body = f'<article class="annotated" data-search-exclude>{"".join(parts)}</article>'
    return head + body, len(lines)


def fold_note(note, num_lines):
    """A note that is longer than its code would tear the code apart: its details open."""
    if len(re.sub(r"<.*?>", "", note)) < 34 * num_lines:
        return note
    head, *told = re.split(r'(?=<p><a class="mark")', note)
    for detail in told:
        mark = re.match(r"<p>(<a .*?</a>) (<strong>.*?</strong>)", detail, re.S)
        title = f"{mark[1]} {mark[2]}" if mark else "more"
        rest = f"<p>{detail[mark.end() :]}" if mark else detail
        head += f'<details class="more"><summary>{title}</summary>{rest}</details>'
    return head


def diff_page(name):
    rows, summary = compare(read_lines(parent(name)), read_lines(name))
    old = parent(name)
    head = f"{SKIP}# {old}.py → {name}.py\n\n{summary[0].upper()}{summary[1:]}.\n\n"
    links = [
        f"[{old}.py](../code/{old}.md)",
        f"[{name}.py](../code/{name}.md)",
        "[all files](../files.md)",
    ]
    return head + " · ".join(links) + "\n{: .links }\n\n<!-- diff -->", rows


def source_page(path):
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        names = sorted(p.name for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
        raw = "../" * (name.count("/") + 2) + f"raw/{name}"
        links = [f"- [{n}]({f'{n}.md' if n.endswith('.md') else f'{raw}/{n}'})" for n in names]
        return f"{SKIP}# {name}\n\n" + "\n".join(links) + "\n"
    if path.suffix == ".md":
        return SKIP + relink(path.read_text(), path.parent, f"source/{name}.md")
    return f"{SKIP}# {name}\n\n<!-- source -->"


def source_html(path):
    try:
        lexer = get_lexer_for_filename(path.name, stripnl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False)
    lines = colored(path.read_text(), lexer)
    return f'<div class="annotated">{code_html(lines, 1)}</div>', len(lines)


def files_table():
    """The table of files.md."""
    rows = ["| file | what it is | grew out of | results and usage |", "|---|---|---|---|"]
    for name in algorithms():
        page, words = about_file(name)
        grew = f"[`{parent(name)}.py`: what changed](diff/{name}.md)" if parent(name) else ""
        title = re.search(r"^# (.*) \(\w+\.py\)$", pages()[page], re.M)[1]
        rows.append(f"| [`{name}.py`](code/{name}.md) | {words} | {grew} | [{title}]({page}) |")
    return '<div class="stacked" data-search-exclude markdown>\n\n' + "\n".join(rows) + "\n\n</div>"


def systems_table():
    """Which files do not run everywhere, by what the header of each says of its dependencies."""
    limits = {"sys_platform != 'win32'": "not on Windows"}
    limits |= {"python_version < '3.13'": "Python 3.11 and 3.12 for `dm_control/...`"}
    rows = ["| file | where |", "|---|---|"]
    for name in algorithms():
        header = (ROOT / "cleanrl" / f"{name}.py").read_text().partition("# ///\n")[0]
        told = [words for marker, words in limits.items() if marker in header]
        rows += [f"| [`{name}.py`](code/{name}.md) | {'; '.join(told)} |"] if told else []
    return "\n".join(rows) if len(rows) > 2 else ""


def excerpt(file, family, number):
    """The marked line of a file and what belongs to it, as HTML."""
    lines = (ROOT / "cleanrl" / f"{file}.py").read_text().splitlines()
    args = lines.index("class Args:")
    for n in range(args, len(lines)):
        if any(
            f == family and number in map(int, numbers.split(", "))
            for f, numbers in MARK.findall(lines[n])
        ):
            break
    end, line = n + 1, lines[n]
    depth = len(line) - len(line.lstrip())
    is_head = line.lstrip().startswith("#") or line.split("  #")[0].rstrip().endswith(
        (":", "(", "[", "{")
    )
    while is_head and end < min(len(lines), n + 8) and lines[end].strip():
        if len(lines[end]) - len(lines[end].lstrip()) < depth:
            break
        end += 1
    code = colored(textwrap.dedent("\n".join(lines[n:end])), PythonLexer(stripnl=False))
    return n + 1, code_html(code, n + 1, f"../../code/{file}/")


def detail_sections(family):
    """The details of one family for ppo-details.md: paragraph, code, test and ablation."""
    uri, parts = "rl-algorithms/ppo-details.md", []
    for (_, number), told in sorted(item for item in details()[0].items() if item[0][0] == family):
        text, guard = split_guard(told["text"])
        title, rest = re.match(r"\*\*(.+?)\*\*(.*)$", text).groups()
        line, code = excerpt(told["file"], family, number)
        body = (
            rest.strip() if title.endswith(".") and rest.strip() else f"**{title}**{rest}"
        )  # the heading has said it
        text = relink(body, base_of(told["uri"]), uri)
        links = f"[`{told['file']}.py`, line {line}](../code/{told['file']}.md#L{line})"
        links += f" · {relink(guard, base_of(told['uri']), uri)}" if guard else ""
        plot = f"ablations/{family}_{number}.svg"
        if (DOCS / "rl-algorithms" / plot).exists():
            code += (
                f"\n\n![Learning curves with and without {family} {number}]({plot}){{ .curves }}"
            )
        parts.append(
            f"### {family} {number}: {title.rstrip('.')}\n\n{text}\n\n{code}\n\n"
            f"{links}\n{{: .links }}"
        )
    return "\n\n".join(parts)


def linked_files():
    """What pages link to outside docs/, including what generated links lead to."""
    linked = {*(ROOT / "benchmark").glob("*.sh"), *(ROOT / "results").glob("*/NOTES.md")}
    linked |= {ROOT / "tests" / f"test_{name}.py" for name in algorithms()}
    linked |= {path.parent for path in (ROOT / "results").glob("*/runs.json")}
    texts = [(base_of(uri), text) for uri, text in pages().items()]
    texts += [(path.parent, path.read_text()) for path in linked if path.suffix == ".md"]
    for base, text in texts:
        targets = [match["target"].partition("#")[0] for match in LINK.finditer(text)]
        linked |= {Path(os.path.normpath(base / target)) for target in targets}
    return sorted(path for path in linked if is_outside(path) and path.exists())


# ---- the notebook ----


def notebook_page(path, address):
    """The Markdown of a notebook, and its pictures and films by their names."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    heading, _, rest = "".join(cells[0]["source"]).partition("\n")
    name = path.relative_to(DOCS).as_posix()
    links = [f'<a href="../{path.name}" download>Download the notebook</a>']
    if address and address.startswith("https://github.com/"):
        there = address.removeprefix("https://github.com/")
        colab = f"https://colab.research.google.com/github/{there}/blob/main/docs/{name}"
        links.insert(0, f"[Open in Colab]({colab})")
    told, media = [heading, " · ".join(links) + "\n{: .links }", rest.strip()], {}
    for cell in cells[1:]:
        source = "".join(cell["source"])
        told.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                continue
            data = output.get("data", {"text/plain": output.get("text", "")})
            film = re.search(r"base64,([^\"]+)", "".join(data.get("text/html", "")))
            if "image/png" in data or film:
                kind = "mp4" if film else "png"
                file = f"{path.stem}-{len(media) + 1}.{kind}"
                media[file] = base64.b64decode(film[1] if film else "".join(data["image/png"]))
                video = f'<video controls muted loop playsinline preload="none" src="../{file}">'
                told.append(f"{video}</video>" if film else f"![A plot of the notebook]({file})")
            else:
                told.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    return "\n\n".join(told) + "\n", media


def address_of_repository():
    command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    origin = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return repository(os.environ, origin)


# ---- what MkDocs calls ----


def repository(environment, origin):
    """The address of the repository that the site is built from, or None."""
    if "GITHUB_REPOSITORY" in environment:
        return f"{environment['GITHUB_SERVER_URL']}/{environment['GITHUB_REPOSITORY']}"
    match = re.fullmatch(r"(?:https?://(?:[^@/]+@)?|git@)([\w.-]+)[:/](.+?)(?:\.git)?/?", origin)
    return f"https://{match[1]}/{match[2]}" if match else None


def on_config(config):
    """A link to the repository in the footer; the theme's own would ask its host for stars."""
    address = address_of_repository()
    if address:
        icon = "fontawesome/brands/git-alt"
        config.extra["social"] = [{"icon": icon, "link": address, "name": "Repository"}]
    return config


def on_files(files, config):
    for cached in (pages, details, about_file, file_of, anatomy):
        cached.cache_clear()  # mkdocs serve builds again and again

    def add(uri, **content):
        files.append(File.generated(config, uri, inclusion=InclusionLevel.NOT_IN_NAV, **content))

    for page, source in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for name in algorithms():
        add(f"code/{name}.md", content=annotated(name))
        add(f"raw/cleanrl/{name}.py", abs_src_path=str(ROOT / "cleanrl" / f"{name}.py"))
        if parent(name):
            add(f"diff/{name}.md", content=diff_page(name)[0])
    for path in DOCS.rglob("*.ipynb"):
        uri = path.relative_to(DOCS).with_suffix(".md").as_posix()
        text, media = notebook_page(path, address_of_repository())
        files.append(File.generated(config, uri, content=text))
        for name, content in media.items():
            add(str(PurePosixPath(uri).parent / name), content=content)
    told = json.loads((DOCS / "try-it" / "cartpole.json").read_text())
    told["checkpoints"] = [told["checkpoints"][0], told["checkpoints"][-1]]
    text = json.dumps(told, separators=(",", ":"))
    add("try-it/home.json", content=re.sub(r"(\.\d{3})\d+", r"\1", text))  # home stays light
    for path in linked_files():
        uri = page_of(path)[0]
        if uri.startswith("source/"):
            add(uri, content=source_page(path))
            for file in path.iterdir() if path.is_dir() else ():
                if file.is_file() and not file.name.startswith(".") and file.suffix != ".md":
                    add(f"raw/{file.relative_to(ROOT).as_posix()}", abs_src_path=str(file))
    return files


def on_page_markdown(markdown, page, config, files):
    uri = page.file.src_uri
    if uri.startswith(("code/", "diff/", "source/")):
        return markdown
    if uri in ("index.md", "files.md", "results.md"):  # wider
        page.meta["hide"] = ["toc"] if uri == "files.md" else ["navigation", "toc"]
    name = file_of(uri)
    if name:
        markdown = algorithm_pages.summary(name, parent(name), markdown)
        markdown = algorithm_pages.fold_details(markdown)
        table = algorithm_pages.hyperparameters(name)
        markdown = markdown.replace("<!-- hyperparameters -->", table)
    markdown = relink(indent_lists(markdown), base_of(uri), uri)
    markdown = re.sub(
        r"^\| (core|continuous) (?=\d+ \|)", r"| \1&nbsp;", markdown, flags=re.M
    )  # names stay on one line
    markdown = re.sub(
        r"^<!-- details (\w+) -->$", lambda match: detail_sections(match[1]), markdown, flags=re.M
    )
    tables = {"<!-- files -->": files_table, "<!-- systems -->": systems_table}
    tables |= {
        "<!-- status -->": algorithm_pages.status_table,
        "<!-- count mutations -->": algorithm_pages.count_mutations,
        "<!-- tiles -->": algorithm_pages.tiles,
        "<!-- cards -->": algorithm_pages.cards,
    }
    for mark, table in tables.items():
        markdown = markdown.replace(mark, table()) if mark in markdown else markdown
    return markdown


def film(match):
    """Replace a still that links to a video by a player that loads nothing before it is used."""
    player = '<video controls muted loop playsinline preload="none" '
    player += f'poster="{match["still"]}" aria-label="{match["alt"]}">'
    player += f'<source src="{match["film"]}" type="video/mp4">'
    player += f'<a href="{match["film"]}">{match["alt"]}</a></video>'
    return f'<figure class="film">{player}<figcaption>{match["words"]}</figcaption></figure>'


def formula(match):
    """A formula as MathML, which browsers draw without fonts or scripts of ours."""
    tag, latex = match["tag"], unescape(match["latex"])
    display = "block" if tag == "div" else "inline"
    told = convert(latex, display=display)
    if "\\" in told:
        log.warning(f"the converter does not know all of this formula: {latex}")
    return f'<{tag} class="formula">{told}</{tag}>'


def on_page_content(html, page, config, files):
    uri, count = page.file.src_uri, 0
    if uri.startswith("code/"):
        html, count = weave(html, PurePosixPath(uri).stem)
    elif uri.startswith("diff/"):
        rows = render_rows(diff_page(PurePosixPath(uri).stem)[1], whole=False)
        rows = rows.replace(
            "<table>", '<table class="rows">'
        )  # Material draws lines in tables without a class
        html = html.replace("<!-- diff -->", f'<div class="diff">{rows}</div>')
    elif "<!-- source -->" in html:
        body, count = source_html(ROOT / uri.removeprefix("source/").removesuffix(".md"))
        html = html.replace("<!-- source -->", body)
    html = FILM.sub(film, html)
    html = FORMULA.sub(formula, html)
    html = re.sub(r"<code>(--[^<\s]{1,30})</code>", r'<code class="flag">\1</code>', html)
    html = PLOT.sub(
        lambda match: (
            match[0] if match["link"] else f'<a href="{match["file"]}">{match["image"]}</a>'
        ),
        html,
    )
    page.present_anchor_ids |= {f"L{n}" for n in range(1, count + 1)}
    return html


@event_priority(-100)  # after the search has written its index
def on_post_build(config):
    """The index is loaded with every page: without repetitions and tags it stays small."""
    path = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    repeated = ("code/", "changelog/", "rl-algorithms/ppo-details/")
    index["docs"] = [
        entry
        for entry in index["docs"]
        if not (entry["location"].startswith(repeated) and "#" in entry["location"])
        and not re.match("rl-algorithms/.*#run$", entry["location"])  # commands
    ]
    for entry in index["docs"]:
        entry["text"] = re.sub(r"\s+", " ", TAG.sub(" ", entry["text"])).strip()
    text = json.dumps(index, ensure_ascii=False, separators=(",", ":"))
    path.write_text(text, encoding="utf-8")
