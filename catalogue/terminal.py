"""What the user sees: exit codes, errors, lines, tables as wide as their content."""

import sys
from collections.abc import Collection, Iterable, Sequence
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
    from rich.cells import cell_len, set_cell_size  # noqa: PLC0415  for tables alone

    widths = [max(map(cell_len, cells)) for cells in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (
            set_cell_size(cell, width) if index in left else " " * (width - cell_len(cell)) + cell
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append((_INDENT + "  ".join(cells)).rstrip())
    return lines
