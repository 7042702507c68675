"""Text as lines of at most WIDTH characters."""

import textwrap
from collections.abc import Iterable
from typing import Final

WIDTH: Final = 80
"""Characters of a line; words that are longer stand alone."""
LABEL: Final = 11
"""Characters of a label and the blanks behind it."""


def by_words(text: str, width: int, indent: str = "") -> list[str]:
    """Return a text as lines of at most `width` characters, one at least; later ones indented."""
    return textwrap.wrap(
        text,
        max(1, width),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


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
