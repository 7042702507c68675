"""Repeats of a part: means over them with Student-t intervals, and an early end when settled."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Final

from harness.config.schema import RequestSet
from harness.config.serve import ServeScenario
from harness.observe.statistics import Quantile, interval, is_settled
from harness.work.drive import Outcome, StepTotals
from harness.work.times import floor_note, pool_metrics

SETTLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "throughput": "throughput/output_tok_s",
        "latency": "latency/e2e_ms/mean",
        "serve": "serve/e2e_ms/mean",
    }
)
"""Part -> the metric whose interval ends a series early."""
_POSITION: Final = "window_"
"""Beginning of the names of samples that are times of one repeat, which have no sum."""


Repeated = RequestSet | ServeScenario
"""Parts of the scenario that may be measured several times."""


def measure_repeats(
    measure: Callable[[int], tuple[Outcome, StepTotals]], asked: Repeated, t: Quantile
) -> tuple[Outcome, StepTotals]:
    """Measure a part several times; return means with their intervals, and the sums over steps.

    One repeat is returned as it is. `measure` gets the number of the repeat, from 0. With
    stop_share a series ends when the 95 % interval of the part's metric in SETTLES reaches at most
    that share of its mean to either side, without only where the time of one was over.
    """
    found: list[Outcome] = []
    totals = StepTotals()
    while len(found) < asked.repeats:
        outcome, steps = measure(len(found))
        found.append(outcome)
        for item in fields(StepTotals):
            setattr(totals, item.name, getattr(totals, item.name) + getattr(steps, item.name))
        if outcome.is_cut:
            break
        values = _values(found, SETTLES[asked.part])
        if asked.stop_share is not None and is_settled(values, asked.stop_share, t):
            break
    return (found[0] if asked.repeats == 1 else merge(found, asked, t)), totals


def merge(found: Sequence[Outcome], asked: Repeated, t: Quantile) -> Outcome:
    """Return one outcome of several: means, deviations and intervals, and all samples.

    The statistics of a quantity of requests are those of all requests of all repeats; its interval
    is that of the repeats' means. A metric that a repeat did not measure is left out of its mean;
    that repeat has a reason.
    """
    pools = {
        base: [value for outcome in found for value in outcome.pools.get(base, ())]
        for base in found[0].pools
    }
    metrics: dict[str, float | None] = {}
    for name in found[0].metrics:
        if name.rpartition("/")[0] not in pools:
            metrics |= _of_repeats(name, _values(found, name), t)
    metrics |= pool_metrics(pools)
    for base in pools:
        spread = _of_repeats(base, _values(found, f"{base}/mean"), t)
        metrics |= {
            f"{base}/repeat_std": spread[f"{base}/std"],
            f"{base}/ci95_low": spread[f"{base}/ci95_low"],
            f"{base}/ci95_high": spread[f"{base}/ci95_high"],
        }
    return Outcome(
        metrics=metrics,
        pools=pools,
        repeats=[dict(outcome.metrics) for outcome in found],
        samples=_samples(found),
        num_measured=min(outcome.num_measured for outcome in found),
        num_unlisted_tokens=sum(outcome.num_unlisted_tokens for outcome in found),
        reasons=list(dict.fromkeys(reason for outcome in found for reason in outcome.reasons)),
        notes=_notes(found, pools, asked.part, asked.repeats),
        is_cut=found[-1].is_cut,
    )


def _of_repeats(name: str, values: Sequence[float], t: Quantile) -> dict[str, float | None]:
    known = interval(values, t)
    single = values[0] if values else None
    return {
        name: single if known is None else known.mean,
        f"{name}/std": None if known is None else known.std,
        f"{name}/ci95_low": None if known is None else known.low,
        f"{name}/ci95_high": None if known is None else known.high,
    }


def _notes(
    found: Sequence[Outcome], pools: Mapping[str, Sequence[float]], part: str, repeats: int
) -> list[str]:
    """Return the repeats' notes, that on percentiles for the requests of all of them."""
    ends = f"{part}/e2e_ms"
    notes = []
    for outcome in found:
        own = floor_note(len(outcome.pools[ends]), part) if ends in outcome.pools else None
        notes += [note for note in outcome.notes if note != own]
    whole = floor_note(len(pools[ends]), part) if ends in pools else None
    if whole is not None:
        notes.append(whole)
    why = "cut short" if found[-1].is_cut else "settled early"
    ended = "" if len(found) == repeats else f" of {repeats}, {why}"
    what = "means over" if not pools else "statistics of all requests, intervals of the means of"
    return [*dict.fromkeys(notes), f"{part}: {what} {len(found)} repeats{ended}."]


def _values(found: Sequence[Outcome], name: str) -> list[float]:
    values = (outcome.metrics.get(name) for outcome in found)
    return [value for value in values if value is not None]


def _samples(found: Sequence[Outcome]) -> Any:
    """Return every request with the number of its repeat, and sums of the counts."""
    if isinstance(found[0].samples, list):
        return _numbered([outcome.samples for outcome in found])
    merged: dict[str, Any] = {}
    for name in found[0].samples:
        if name == "requests" or name.startswith(_POSITION):
            continue
        values = [outcome.samples[name] for outcome in found]
        known = [value for value in values if value is not None]
        merged[name] = sum(known) if known else None
    merged["requests"] = _numbered([outcome.samples["requests"] for outcome in found])
    return merged


def _numbered(rows: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    return [{"repeat": number, **row} for number, found in enumerate(rows) for row in found]
