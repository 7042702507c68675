"""Text as lines of at most WIDTH characters."""

import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import Final

WIDTH: Final = 80
"""Characters of a line; words that are longer stand alone."""
LABEL: Final = 11
"""Characters of a label and the blanks behind it."""


def by_words(text: str, width: int, indent: str = "") -> list[str]:
    """Return a text as lines of at most `width` characters, one at least; later ones indented.

    A command in backquotes is never broken. One of more than half a line has a line of its own,
    without them, so that it can be copied.
    """
    lines: list[str] = []
    for part, is_command in _parts(text, width):
        if is_command:
            lines.append(f"{indent or '  '}{part}")
        elif not lines:
            lines += _filled(part, width, "", indent)
        else:
            lines += _filled(part.lstrip(" ,.;"), width, indent, indent)
    return lines or [""]


def _parts(text: str, width: int) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a text, and whether each is a command that has a line of its own."""
    rest = ""
    for part in re.split(r"(`[^`]+`)", text):
        if part[:1] != "`" or 2 * len(part) <= width:
            # As one word, whose blanks return below.
            rest += part.replace(" ", _GLUE) if part[:1] == "`" else part
            continue
        yield rest, False
        yield part.strip("`"), True
        rest = ""
    yield rest, False


_GLUE: Final = "\0"


def _filled(text: str, width: int, before: str, indent: str) -> list[str]:
    found = textwrap.wrap(
        text,
        max(1, width),
        initial_indent=before,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_GLUE, " ") for line in found]


def wrapped(text: str, indent: str = "") -> list[str]:
    """Return a text as lines, none of an empty one; those after the first begin with `indent`."""
    return by_words(text, WIDTH, indent) if text else []


def indented(texts: Iterable[str]) -> list[str]:
    """Return texts as lines, two blanks before each, two more where one goes on."""
    return [line for text in texts for line in wrapped(f"  {text}", indent="    ")]


def labelled(label: str, text: str, end: str = "") -> list[str]:
    """Return a text behind a label; `end` stands at lines that go on."""
    parts = by_words(text, WIDTH - LABEL - len(end))
    ends = [end] * (len(parts) - 1) + [""]
    heads = [label, *[""] * (len(parts) - 1)]
    return [
        f"{head:<{LABEL}}{part}{last}" for head, part, last in zip(heads, parts, ends, strict=True)
    ]
