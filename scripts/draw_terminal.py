"""Draw what a command printed as a picture of a terminal, for the docs.

    FORCE_COLOR=1 COMMAND | python scripts/draw_terminal.py docs/idea-to-evidence/check.svg COMMAND

The second COMMAND is only shown, in the first line. The picture needs no fonts of other sites.
"""

import io
import re
import sys

from rich.console import Console
from rich.text import Text

FONTS = "ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace"
WIDTH = 110  # characters of a line, at most


def draw(command, output):
    """An SVG of a command and its output, with the colors that are in it."""
    text = Text.from_ansi(f"$ {command}\n{output.rstrip()}")
    text.stylize("bold", 0, len(command) + 2)
    width = min(WIDTH, max(len(line) for line in text.plain.splitlines()))
    console = Console(record=True, width=width, file=io.StringIO(), highlight=False)
    console.print(text, end="\n\n")  # the last line is cut at its foot
    svg = console.export_svg(title="", unique_id="terminal")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S)
    return svg.replace("Fira Code, monospace", FONTS)


def main():
    path, *command = sys.argv[1:]
    with open(path, "w", encoding="utf-8") as file:
        file.write(draw(" ".join(command), sys.stdin.read()))


if __name__ == "__main__":
    main()
