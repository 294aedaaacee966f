"""Keep the line numbers in the docs true: python scripts/number_lines.py

A link such as [line 42](../../cleanrl/ppo.py#L42 "core 5") is set to the first line of that file
which is marked [core 5]. Run it after an edit of an algorithm file.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(
    r"\[line \d+\]\((?P<path>\S+/(?P<name>\w+\.py))#L\d+ "
    r'"(?P<family>[a-z][a-z0-9]*) (?P<number>\d+)"\)'
)


def line_of(name, family, number):
    """The first line marked with the detail, alone, [core 5], or among others, [core 3, 11]."""
    lines = (ROOT / "cleanrl" / name).read_text().splitlines()
    start = lines.index("class Args:")  # the docstring before it only mentions such marks
    for i in range(start, len(lines)):
        for numbers in re.findall(rf"\[{family} ([\d, ]+)\]", lines[i]):
            if number in numbers.split(", "):
                return i + 1
    raise SystemExit(f"cleanrl/{name} has no [{family} {number}]")


def renumber(text):
    def link(match):
        line = line_of(match["name"], match["family"], match["number"])
        return f'[line {line}]({match["path"]}#L{line} "{match["family"]} {match["number"]}")'

    return LINK.sub(link, text)


if __name__ == "__main__":
    for page in (ROOT / "docs").rglob("*.md"):
        page.write_text(renumber(page.read_text()))
