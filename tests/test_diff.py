"""The side-by-side view, run on ppo.py and an edited copy of it."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleanrl_utils.diff import align, compare, render_html, render_terminal

ROOT = Path(__file__).parent.parent
PPO = ROOT / "cleanrl" / "ppo.py"
LAST = '    print("<b>closed</b> & done")'  # what the copy ends with: all that HTML must escape
SUMMARY = "1 lines removed, 1 added, 1 changed; in flags and header 0 removed, 0 added, 1 changed"


def run(*args, **environment):
    command = [sys.executable, "-m", "cleanrl_utils.diff", *map(str, args)]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )


@pytest.fixture
def copy(tmp_path):
    """ppo.py with a flag's default and a line of code changed, one line removed and one added."""
    source = PPO.read_text()
    for old, new in (
        ("import time\n", ""),
        ("gamma: float = 0.99", "gamma: float = 0.9"),
        ("gain=2**0.5", "gain=1.0"),
    ):
        assert source.count(old) == 1
        source = source.replace(old, new)
    path = tmp_path / "copy.py"
    path.write_text(source + LAST + "\n")
    return path


def read_rows(lines, width):
    """(old number, old text, mark, new number, new text) of each row, with wrapped lines joined."""
    rows, column = [], (width - 13) // 2
    for line in lines:
        i, left, rest = (
            line[:4].strip(),
            line[5 : 5 + column].ljust(column),
            line[6 + column :].ljust(7 + column),
        )
        mark, j, right = rest[0].strip(), rest[2:6].strip(), rest[7:]
        if i or j:
            rows.append([int(i or 0), left, mark, int(j or 0), right])
        else:
            rows[-1][1], rows[-1][4] = rows[-1][1] + left, rows[-1][4] + right
    return [(i, left.rstrip(), mark, j, right.rstrip()) for i, left, mark, j, right in rows]


def test_terminal_shows_the_changed_places(copy):
    result = run("ppo", copy, COLUMNS="300")
    heading, *lines = result.stdout.splitlines()
    assert (result.returncode, result.stderr) == (0, "")
    assert heading == f"ppo -> {copy}: {SUMMARY}"
    assert "\033" not in result.stdout  # no terminal, no colours
    rows = read_rows([line for line in lines if not line.startswith(" ... ")], 300)
    removed, flag, code, added = (
        (left.strip(), mark, right.strip()) for _, left, mark, _, right in rows if mark
    )
    assert removed == ("import time", "<", "")
    assert added == ("", ">", LAST.strip())
    assert flag[0].startswith("gamma") and flag[1:] == ("|", flag[0].replace("0.99", "0.9"))
    assert code[0].startswith("def layer_init") and code[1:] == (
        "|",
        code[0].replace("2**0.5", "1.0"),
    )
    assert len(rows) == 3 * 7 + 4  # three lines before and after, none after the last
    hidden = sum(
        map(int, re.findall(r"^ \.\.\. unchanged lines: (\d+)$", result.stdout, re.MULTILINE))
    )
    assert hidden + len(rows) == len(PPO.read_text().splitlines()) + 1


@pytest.mark.parametrize("columns, width", [(20, 80), (133, 133), (300, 300)])
def test_all_shows_both_files_whole(copy, columns, width):
    _, *lines = run("ppo", copy, "--all", COLUMNS=str(columns)).stdout.splitlines()
    assert max(map(len, lines)) <= width
    rows = read_rows(lines, width)
    for path, numbered in ((PPO, [row[:2] for row in rows]), (copy, [row[3:] for row in rows])):
        assert [text for number, text in numbered if number] == path.read_text().splitlines()
        numbers = [number for number, _ in numbered if number]
        assert numbers == list(range(1, len(numbers) + 1))


def test_colours_are_only_for_terminals(tmp_path):
    rows, _ = compare(["a", "x = old(1, 2)"], ["a", "x = new(1, 2)", "b\x1b[31m"])
    plain, coloured = (render_terminal(rows, 80, colour, whole=False) for colour in (False, True))
    assert "\033" not in plain
    assert re.sub(r"\033\[[\d;]*m", "", coloured).split() == plain.split()
    assert "\033[31mx = \033[0m\033[31;7mold\033[0m\033[31m(1, 2)\033[0m" in coloured
    assert "\033[32mx = \033[0m\033[32;7mnew\033[0m\033[32m(1, 2)\033[0m" in coloured
    assert (
        "\033[32mb?[31m\033[0m" in coloured
    )  # what a file says cannot reach the terminal's controls

    pty = pytest.importorskip("pty")  # not on Windows
    for name, text in (("a.py", "x = 1\n"), ("b.py", "x = 2\n")):
        tmp_path.joinpath(name).write_text(text)
    for no_color in ("", "1"):
        terminal, end = pty.openpty()
        command = [sys.executable, "-m", "cleanrl_utils.diff", tmp_path / "a.py", tmp_path / "b.py"]
        subprocess.run(
            command, cwd=ROOT, env=os.environ | {"NO_COLOR": no_color}, stdout=end, check=True
        )
        os.close(end)
        assert (b"\033[31" in os.read(terminal, 10_000)) == (no_color == "")
        os.close(terminal)


class Page(HTMLParser):
    """Collects the tags, and of each row its class, if it is folded, cells and marked words."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.rows, self.style = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)
        if tag == "tr":
            self.rows.append((dict(attributes)["class"], "details" in self.open, [], []))
        elif tag == "td":
            self.rows[-1][2].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open:
            self.rows[-1][2][-1] += data
        if self.open[-1:] in (["del"], ["ins"]):
            self.rows[-1][3].append((self.open[-1], data))
        if "style" in self.open:
            self.style += data


def test_page_folds_what_is_unchanged(copy, tmp_path):
    tmp_path = tmp_path / "a" / "folder"  # which is made
    result = run("ppo", copy, "--html", tmp_path / "page.html")
    assert (result.returncode, result.stdout, result.stderr) == (
        0,
        f"ppo -> {copy}: {SUMMARY}\n",
        "",
    )
    text = tmp_path.joinpath("page.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert SUMMARY in text
    for path, cells in (
        (PPO, [row[2][:2] for row in page.rows]),
        (copy, [row[2][2:] for row in page.rows]),
    ):
        numbered = [(str(n), line) for n, line in enumerate(path.read_text().splitlines(), 1)]
        assert [
            (number, line) for number, line in cells if number
        ] == numbered  # nothing lost, everything unescaped again
    assert [row[0] for row in page.rows if row[0] != "same"] == [
        "removed",
        "changed",
        "changed",
        "added",
    ]
    assert [row[0] for row in page.rows if not row[1]].count("same") == 3 * 6 + 3
    assert {row[0] for row in page.rows if row[1]} == {"same"}
    assert next(row[3] for row in page.rows if row[0] == "changed") == [("del", "99"), ("ins", "9")]
    assert page.rows[-1][2] == ["", "", str(len(PPO.read_text().splitlines())), LAST]

    # it stands alone, and follows the reader's screen and colours
    names = {tag for tag, _ in page.tags}
    assert names == {
        "html",
        "meta",
        "title",
        "style",
        "h1",
        "p",
        "details",
        "summary",
        "table",
        "tr",
        "td",
        "del",
        "ins",
    }
    assert {key for _, attributes in page.tags for key in attributes} == {
        "lang",
        "charset",
        "name",
        "content",
        "class",
    }
    assert "url(" not in page.style and "@import" not in page.style
    assert "prefers-color-scheme: dark" in page.style and "max-width" in page.style

    run("ppo", copy, "--html", tmp_path / "page.html", "--all")
    whole = Page(tmp_path.joinpath("page.html").read_text(encoding="utf-8"))
    assert len(whole.rows) == len(page.rows) and not any(row[1] for row in whole.rows)


def test_page_escapes_names_and_marked_words():
    rows, summary = compare(["if a < b and c: d()"], ["if a > b and c: d()"])
    text = render_html(rows, "<script>alert(1)</script>", summary, whole=False)
    assert "<script" not in text and "&lt;script&gt;" in text
    assert Page(text).rows == [
        (
            "changed",
            False,
            ["1", "if a < b and c: d()", "1", "if a > b and c: d()"],
            [("del", "<"), ("ins", ">")],
        )
    ]


def test_counts_flags_and_header_apart():
    old = PPO.read_text()
    for edit, expected in {
        (
            "# /// script\n",
            "# /// script\n# new = 1\n",
        ): "0 lines removed, 0 added, 0 changed; in flags and header 0 removed, 1 added",
        (
            '"""Proximal',
            '"""proximal',
        ): "0 changed; in flags and header 0 removed, 0 added, 1 changed",
        (
            "@dataclass\n",
            "@dataclass()\n",
        ): "0 changed; in flags and header 0 removed, 0 added, 1 changed",
        (
            "import tyro\n",
            "import tyro as t\n",
        ): "0 added, 1 changed; in flags and header 0 removed, 0 added, 0 changed",
        (
            "def make_envs(",
            "def make_environments(",
        ): "0 added, 1 changed; in flags and header 0 removed, 0 added, 0 changed",
    }.items():
        assert edit[0] in old
        assert expected in compare(old.split("\n"), old.replace(*edit, 1).split("\n"))[1]
    assert compare(["def"], ["def", "x"])[1].startswith(
        "0 lines removed, 1 added, 0 changed;"
    )  # not Python
    assert compare(['"""a', "b", 'c"""', "x = 1"], ["x = 1"])[1].endswith(
        "in flags and header 3 removed, 0 added, 0 changed"
    )


def test_lines_that_are_alike_stand_across_from_each_other():
    short, long = ["call(a, b, c)"], ["call(a, b, c, d)"]
    assert align(["something = else"] * 2 + short, long) == [(1, 0), (2, 0), (3, 1)]
    assert align(long, ["something = else"] * 2 + short) == [(0, 1), (0, 2), (1, 3)]
    assert align(["gone"], ["here", "too"]) == [
        (1, 1),
        (0, 2),
    ]  # and where none are, all stand side by side


lines = st.lists(
    st.sampled_from(
        ["", "x = 1", "x = 12", "x = 1, y", "def f(x, y):", "def f(x):", "? +", "- a", "+ a"]
    )
)


@settings(deadline=None)  # other tests may run beside it
@given(lines, lines)
def test_every_line_is_in_one_row_and_in_order(old, new):
    pairs = align(old, new)
    assert [i for i, _ in pairs if i] == list(range(1, len(old) + 1))
    assert [j for _, j in pairs if j] == list(range(1, len(new) + 1))
    for kind, i, left, j, right in compare(old, new)[0]:
        assert "".join(text for text, _ in left) == (old[i - 1] if i else "")
        assert "".join(text for text, _ in right) == (new[j - 1] if j else "")
        assert (kind == "same") == (bool(i and j) and old[i - 1] == new[j - 1])
        assert kind != "same" or not any(changed for _, changed in left + right)


def test_identical_files(tmp_path):
    tmp_path.joinpath("copy.py").write_text(PPO.read_text())
    result = run("ppo", tmp_path / "copy.py")
    assert (result.returncode, result.stdout) == (
        0,
        f"ppo and {tmp_path / 'copy.py'} are identical\n",
    )


@pytest.mark.parametrize(
    "args, message",
    [
        (
            ["ppo", "ppoo"],
            "no file called ppoo, neither in cleanrl/ nor as a path: did you mean ppo?",
        ),
        (
            ["cleanrl/poo.py", "ppo"],
            "no file called cleanrl/poo.py, neither in cleanrl/ nor as a path: did you mean ppo?",
        ),
        (
            ["ppo", "zzzzzz"],
            "no file called zzzzzz, neither in cleanrl/ nor as a path: choose from ",
        ),
        (["ppo", "cleanrl"], "no file called cleanrl, neither"),
        (
            ["ppo", "ppo", "--html", "Makefile/page.html"],
            "cannot write Makefile/page.html: File exists",
        ),
    ],
)
def test_wrong_arguments_get_one_clear_line(args, message):
    result = run(*args)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith(message) and result.stderr.count("\n") == 1


def test_reader_that_stops_early_is_no_error(copy):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "cleanrl_utils.diff", "ppo", copy]
    result = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, b"")
