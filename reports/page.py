"""What a page shows, free of any markup: sections of tables and figures, and a verdict."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["good", "warn", "bad", "plain", "better", "worse"]


@dataclass(frozen=True, kw_only=True)
class Card:
    """One summary number."""

    label: str
    value: str
    unit: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Text cells in rows; `numeric` columns are aligned right, `wide` ones hold sentences."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    caption: str = ""
    numeric: frozenset[int] = frozenset()
    wide: frozenset[int] = frozenset()
    links: dict[int, str] = field(default_factory=dict)
    """Row number -> address that the row's first cell leads to."""
    kinds: dict[int, Kind] = field(default_factory=dict)
    """Row number -> how the row is marked."""
    is_folded: bool = False
    """Whether the table opens only on request."""

    @property
    def is_list(self) -> bool:
        """Whether rows are a name, a value and a sentence, shown as a list on a narrow screen."""
        return len(self.columns) == 3 and self.wide == {2}


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with text, figures by name, and tables below them."""

    title: str
    text: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How the run ended, whether its figures may be used, and what to change."""

    kind: Kind
    label: str
    lines: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    traceback: str | None = None


@dataclass(frozen=True, kw_only=True)
class Page:
    """A whole report."""

    title: str
    subtitle: str
    details: str
    banners: tuple[str, ...]
    cards: tuple[Card, ...]
    verdict: Verdict
    sections: tuple[Section, ...]
    alt: dict[str, str]
    """Figure name -> text for who cannot see it."""
