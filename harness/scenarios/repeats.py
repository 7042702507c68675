"""Repeats of a part: means over them with Student-t intervals, and an early end when settled."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Final

from harness.measure.statistics import interval, is_settled
from harness.scenarios.drive import StepTotals
from harness.scenarios.outcome import Outcome

SETTLES: Final = "throughput/output_tok_s"
"""The metric whose interval ends a series early."""


def measure_repeats(
    measure: Callable[[int], tuple[Outcome, StepTotals]],
    *,
    repeats: int,
    stop_share: float | None,
) -> tuple[Outcome, StepTotals]:
    """Measure a part several times; return means with their intervals, and the sums over steps.

    One repeat is returned as it is.

    Args:
        measure: measures once; gets the number of the repeat, from 0.
        repeats: at most how many.
        stop_share: end when the 95 % interval of SETTLES reaches at most this share of its mean
            to either side; None: never early.
    """
    found: list[Outcome] = []
    totals = StepTotals()
    while len(found) < repeats:
        outcome, steps = measure(len(found))
        found.append(outcome)
        for item in fields(StepTotals):
            setattr(totals, item.name, getattr(totals, item.name) + getattr(steps, item.name))
        if stop_share is not None and is_settled(_values(found, SETTLES), stop_share):
            break
    return (found[0] if repeats == 1 else merge(found, repeats)), totals


def merge(found: Sequence[Outcome], repeats: int) -> Outcome:
    """Return one outcome of several: means, deviations and intervals, and all samples.

    A metric that a repeat did not measure is left out of its mean; that repeat has a reason.

    Args:
        found: one of each repeat that ran.
        repeats: how many were asked for.
    """
    metrics: dict[str, float | None] = {}
    for name in found[0].metrics:
        values = _values(found, name)
        known = interval(values)
        single = values[0] if values else None
        metrics |= {
            name: single if known is None else known.mean,
            f"{name}/std": None if known is None else known.std,
            f"{name}/ci95_low": None if known is None else known.low,
            f"{name}/ci95_high": None if known is None else known.high,
        }
    notes = list(dict.fromkeys(note for outcome in found for note in outcome.notes))
    ended = "" if len(found) == repeats else f" of {repeats}, settled early"
    notes.append(f"throughput: means over {len(found)} repeats{ended}.")
    return Outcome(
        metrics=metrics,
        samples=_samples(found),
        num_complete=min(outcome.num_complete for outcome in found),
        reasons=list(dict.fromkeys(reason for outcome in found for reason in outcome.reasons)),
        notes=notes,
    )


def _values(found: Sequence[Outcome], name: str) -> list[float]:
    values = (outcome.metrics.get(name) for outcome in found)
    return [value for value in values if value is not None]


def _samples(found: Sequence[Outcome]) -> dict[str, Any]:
    """Return sums of the counts, the metrics of each repeat, and every request."""
    merged: dict[str, Any] = {}
    for name in found[0].samples:
        if name == "requests":
            continue
        values = [outcome.samples[name] for outcome in found]
        known = [value for value in values if value is not None]
        merged[name] = sum(known) if known else None
    merged["repeats"] = [dict(outcome.metrics) for outcome in found]
    merged["requests"] = [
        {"repeat": number, **row}
        for number, outcome in enumerate(found)
        for row in outcome.samples["requests"]
    ]
    return merged
