"""What the user sees: exit codes, errors, lines, tables as wide as their content."""

import argparse
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Final, NoReturn, TextIO

from engine.errors import ConfigError, did_you_mean
from engine.lines import WIDTH, by_words

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


class UsageError(ConfigError):
    """A command line has an argument that there is not, or lacks one."""


class CommandParser(argparse.ArgumentParser):
    """A parser that raises UsageError, which names the closest choice or option."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError for what argparse says."""
        choice = re.fullmatch(r"argument \S+: invalid choice: '(.*)' \(choose from (.*)\)", message)
        unknown = re.fullmatch(r"unrecognized arguments: (\S+).*", message, re.DOTALL)
        value = re.fullmatch(r"argument (\S+): invalid int value: ('.*')", message)
        text = f"{message}."
        if value is not None:
            text = f"{value[1]}: expected an integer, got {value[2]}."
        elif choice is not None:
            names = choice[2].replace("'", "").split(", ")
            hint = did_you_mean(choice[1], names)
            text = f"expected one of {', '.join(names)}, got {choice[1]!r}.{hint}"
        elif unknown is not None:
            hint = did_you_mean(unknown[1].partition("=")[0], self._option_string_actions)
            text = f"unknown argument {unknown[1]}.{hint}"
        raise UsageError(f"{self.prog}: {text} See `{self.prog} --help`.")


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
    """Write what happens to stderr, in lines as wide as it."""
    sys.stderr.write("\n".join(screen_lines(text, sys.stderr)) + "\n")
    sys.stderr.flush()


def say_error(
    error: BaseException | str,
    arguments: Collection[str],
    code: int,
    found: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Write the error that ends a command to stderr; return the command's exit code.

    With --json, which programs read, it is a document on stdout too, beside what was `found`
    before, and its lines are not wrapped.
    """
    if "--json" not in arguments:
        say(f"error: {error}")
        return code
    show_document({**found, **error_document(str(error), code)})
    sys.stderr.write(f"error: {error}\n")
    sys.stderr.flush()
    return code


def error_document(message: str, code: int) -> dict[str, Any]:
    """Return what --json prints of an error that ends a command."""
    return {"kind": "error", "exit_code": code, "message": message}


def show_document(document: Mapping[str, Any]) -> None:
    """Write the document of a command with --json to stdout."""
    show([json.dumps(document, indent=2)])


def screen_lines(text: str, stream: TextIO) -> list[str]:
    """Return a text in lines as wide as a stream (COLUMNS where it is set), wrapped by words.

    Lines that begin with two blanks stay, as do commands in backquotes (`by_words`).
    """
    asked = os.environ.get("COLUMNS", "")
    width = int(asked) if asked.isdecimal() and int(asked) else _screen_width(stream)
    lines: list[str] = []
    for line in text.split("\n"):
        lines += [line] if len(line) <= width or line.startswith("  ") else by_words(line, width)
    return lines


def _screen_width(stream: TextIO) -> int:
    """Return the width of a terminal; WIDTH where there is none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or WIDTH
    except (OSError, ValueError):  # a file, or none
        return WIDTH


def show(lines: Iterable[str]) -> None:
    """Write lines that were asked for to stdout."""
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def columns(
    rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,), has_paths: bool = False
) -> list[str]:
    """Return the rows as lines of text as wide as the terminal, their columns two blanks apart.

    A header is a row. Cells of the columns in `left` begin at one place, and are wrapped by words
    where lines would be too long; others end at one place. Columns for which that is not enough
    follow as another table, behind the first column. With `has_paths`, or a word that is too long
    for any of that, lines are as wide as their content.
    """
    if not rows:
        return []
    from rich.cells import cell_len  # noqa: PLC0415  for tables alone

    by_column = list(enumerate(zip(*rows, strict=True)))
    most = [max(map(cell_len, cells)) for _, cells in by_column]
    least = [
        max(cell_len(part) for cell in cells for part in _wrapped(cell, 1, index))
        if index in left
        else most[index]
        for index, cells in by_column
    ]
    room = max(WIDTH, _screen_width(sys.stdout)) - len(_INDENT)
    if has_paths or any(least[0] + len(_GAP) + each > room for each in least[1:]):
        room = sum(most) + len(_GAP) * len(most)
    lines: list[str] = []
    for shown in _tables(least, room):
        wide = _narrowed({index: most[index] for index in shown}, least, room)
        lines += [""] if lines else []
        lines += [line for row in rows for line in _row_lines(row, wide, left)]
    return lines


_GAP: Final = "  "


def _tables(least: Sequence[int], room: int) -> list[list[int]]:
    """Return which columns each table has: all in one, or as many as fit behind the first."""
    first, *others = range(len(least))
    tables = [[first]]
    for index in others:
        if sum(least[each] + len(_GAP) for each in tables[-1]) + least[index] > room:
            tables.append([first])
        tables[-1].append(index)
    return tables


def _narrowed(wide: dict[int, int], least: Sequence[int], room: int) -> dict[int, int]:
    """Return widths by column with the widest that can be wrapped narrowed until lines fit."""
    wide = dict(wide)
    excess = sum(wide.values()) + len(_GAP) * (len(wide) - 1) - room
    for _ in range(excess):
        index = max(wide, key=lambda each: wide[each] * (wide[each] > least[each]))
        wide[index] -= wide[index] > least[index]
    return wide


def _wrapped(cell: str, width: int, index: int) -> list[str]:
    """Return a cell as lines; in the first column, which has names, later ones are indented."""
    return by_words(cell, width, _INDENT if index == 0 else "")


def _row_lines(row: Sequence[str], wide: dict[int, int], left: Collection[int]) -> Iterator[str]:
    """Yield the lines of a row."""
    from rich.cells import cell_len, set_cell_size  # noqa: PLC0415  for tables alone

    cells = [
        _wrapped(row[index], width, index) if index in left else [row[index]]
        for index, width in wide.items()
    ]
    for parts in zip_longest(*cells, fillvalue=""):
        texts = [
            set_cell_size(part, width) if index in left else " " * (width - cell_len(part)) + part
            for part, (index, width) in zip(parts, wide.items(), strict=True)
        ]
        yield (_INDENT + _GAP.join(texts)).rstrip()
