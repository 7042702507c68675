"""What a comparison of two sides says in a sentence, from its ratios."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from reports.record.metrics import Metric, shown
from reports.record.text import number

UNRESOLVED: Final = "no difference resolved"
"""Verdict of a ratio whose interval holds 1, or that noise alone could give."""
_MOST: Final = 3
"""Quantities that a sentence names."""


def main_metrics() -> list[Metric]:
    """Return what is compared and on top of a run's page."""
    return [metric.mean for metric in shown("ab") if "card" in metric.shown]


def is_resolved(row: Mapping[str, Any]) -> bool:
    """Return whether a ratio differs from 1 by more than noise."""
    return str(row["verdict"]).startswith("b is")


def answer_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return which side is how much more or less in what, or that no difference was found.

    `rows` are those of a comparison's record.
    """
    found = {row.get("metric"): row for row in rows if row.get("ratio") is not None}
    main = [(metric, found[metric.name]) for metric in main_metrics() if metric.name in found]
    if not main:
        return "No figures of both sides"
    settled = [(metric, row) for metric, row in main if is_resolved(row)]
    if not settled:
        return f"No difference found: {noise_of([row for _, row in main])}"
    parts = [
        f"{metric.label} {row['ratio']:.3f} times ({row['low']:.3f} to {row['high']:.3f})"
        for metric, row in settled[:_MOST]
    ]
    more = len(settled) - _MOST
    parts += [f"and {more} more figures differ"] if more > 0 else []
    rest = [metric.label for metric, row in main if not is_resolved(row)]
    none = f"; no difference found in {', '.join(rest)}" if rest else ""
    return f"Side b against a: {', '.join(parts)}{none}"


def noise_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what the machine could resolve: noise as a share, above 100 % as a factor."""
    known = sorted(row["resolution"] for row in rows if row.get("resolution") is not None)
    if not known:
        spans = [row for row in rows if row.get("low") is not None]
        return "the intervals hold 1" if spans else "one pair has no interval (raise ab.pairs)"
    least, most = (_noise(share) for share in (known[0], known[-1]))
    return f"noise is {most}" if least == most else f"noise is {least} to {most}"


def _noise(share: float) -> str:
    return f"a factor of {number(1 + share)}" if share >= 1 else f"{number(100 * share)} %"
