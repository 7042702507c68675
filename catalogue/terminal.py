"""What the user sees: exit codes, errors, lines, tables as wide as their content."""

import sys
from collections.abc import Collection, Iterable, Sequence
from io import StringIO
from typing import Any, Final

EXIT_OK: Final = 0
"""Every point has status ok."""
EXIT_BUG: Final = 1
"""An error that this code does not expect; Python prints its traceback."""
EXIT_BAD_CONFIG: Final = 2
"""The command line or a configuration file is wrong; nothing was loaded."""
EXIT_NOT_ALL_OK: Final = 3
"""At least one point has another status than ok."""
EXIT_INTERRUPTED: Final = 130
"""Ctrl-C."""


def version_line() -> str:
    """Return the line that names the installed version."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415  only here

    try:
        return f"tightfit {version('tightfit')}\n"
    except PackageNotFoundError:
        return "tightfit (not installed)\n"


ErrorFacts = dict[str, Any]
"""Keys type, message, phase, traceback, as in the record."""


def error_facts(
    kind: str, message: str, phase: str | None = None, traceback: str | None = None
) -> ErrorFacts:
    """Return an error as records have it; its traceback may be the end of a log."""
    return {"type": kind, "message": message, "phase": phase, "traceback": traceback}


_INDENT: Final = "  "
_WIDEST: Final = 10_000
"""Characters of a line; nothing is folded or cut below it."""


def say(text: str) -> None:
    """Write a line about what happens to stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def show(lines: Iterable[str]) -> None:
    """Write lines that were asked for to stdout."""
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def columns(rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> list[str]:
    """Return the rows as lines of text, their columns two blanks apart.

    A header is a row. Cells of the columns in `left` begin at one place; others end at one.
    """
    if not rows:
        return []
    from rich.console import Console  # noqa: PLC0415  takes a tenth of a second
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table.grid(padding=(0, 2))
    for index in range(len(rows[0])):
        table.add_column(justify="left" if index in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    text = StringIO()
    Console(file=text, width=_WIDEST, color_system=None, force_terminal=False).print(table)
    return [f"{_INDENT}{line}".rstrip() for line in text.getvalue().splitlines()]
