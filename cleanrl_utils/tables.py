"""Tables as text, for terminals and files."""

import shutil
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

UNLIMITED = 10_000  # columns


def terminal_width():
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else UNLIMITED


def text_table(header, rows, width=UNLIMITED, numbers="left"):
    """The lines of a table. Cells fold where it is wider than width.

    numbers says to which side all columns but the first are aligned."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for i, name in enumerate(header):
        table.add_column(Text(name), overflow="fold", justify=numbers if i else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]
