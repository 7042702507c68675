"""AbConfig: two compositions that are compared. Imports no torch."""

import re
from dataclasses import dataclass, field
from typing import Final

from engine.errors import ConfigError
from engine.sealed import Sealed, check_number

SIDES: Final = ("a", "b")
_LIST: Final = re.compile(r"(\+{0,2}ab\.[ab])=\[(.*)\]", re.DOTALL)
_MOST_PAIRS: Final = 1000
"""Each is two runs in fresh processes."""


@dataclass(kw_only=True)
class AbConfig(Sealed):
    """Two sides that do the same work: what each overrides, and how often both run."""

    a: list[str] = field(default_factory=list)
    """Overrides of side a, which the ratios are over, such as [offload=none]."""
    b: list[str] = field(default_factory=list)
    """Overrides of side b."""
    pairs: int = 4
    """Runs of both sides, in the order A B, B A, A B, ..., each in fresh processes."""
    aa_pairs: int = 3
    """Runs of side a against itself before, which say what this machine can resolve; 0: none."""

    def check(self) -> None:
        """Raise ConfigError when there is nothing to compare."""
        check_number("ab.pairs", self.pairs, low=1, high=_MOST_PAIRS, integer=True)
        check_number("ab.aa_pairs", self.aa_pairs, low=0, high=_MOST_PAIRS, integer=True)
        if self.aa_pairs == 1:
            raise ConfigError(
                "ab.aa_pairs: expected 0 or at least 2, got 1: one pair has no deviation."
            )
        if sorted(self.a) == sorted(self.b):
            raise ConfigError(
                f"ab.b: expected other overrides than ab.a, got {self.b} for both. Set them, such "
                "as ab.a=[offload=none] ab.b=[offload=uva]."
            )

    def overrides(self, side: str) -> list[str]:
        """Return what a side overrides.

        Args:
            side: a or b.
        """
        return list(self.a if side == "a" else self.b)


def quote_sides(text: str) -> str:
    """Return an override with the items of `ab.a=[x=1,y=2]` in quotes, others as they are.

    Hydra's grammar takes no = within a list.
    """
    found = _LIST.fullmatch(text)
    if found is None or "'" in text or '"' in text:
        return text
    items = ",".join(f"'{item.strip()}'" for item in _split(found[2]) if item.strip())
    return f"{found[1]}=[{items}]"


def _split(text: str) -> list[str]:
    """Split at commas that are in no brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "[{(") - (char in "]})")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts
