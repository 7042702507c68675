"""Tables of text: as wide as their content, whatever the terminal."""

from collections.abc import Collection, Sequence
from io import StringIO
from typing import Final

_INDENT: Final = "  "
_WIDEST: Final = 10_000
"""Characters of a line; nothing is folded or cut below it."""


def columns(rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> list[str]:
    """Return the rows as lines of text, their columns two blanks apart.

    Args:
        rows: cells of each, as many in every row; a header is a row.
        left: columns whose cells begin at one place; those of the others end at one.
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
