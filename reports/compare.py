"""Records side by side: their labels, what differs, whether they did the same work, ratios."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reports import facts
from reports.record.folders import Point
from reports.record.metrics import Metric, found
from reports.record.record import RecordError, RunRecord
from reports.record.text import ABSENT, flatten, leaf, shorten

WORK: Final = ("scenario.", "model.")
"""Settings that say what was to be done."""
NOT_WORK: Final = (
    "scenario.name",
    "scenario.correctness.",
    "model.source.",
    "model.path",
    "model.name",
)
"""Of these, settings that change nothing that is timed; the sizes say which model it was."""
LABEL_CHARS: Final = 48
IDLE: Final = ("tracking.", "scenario.correctness.")
IDLE_ROOTS: Final = frozenset(
    {"timeout_s", "silence_s", "fail_fast", "monotone_stop", "rerun", "mode"}
)
"""Settings that no comparison needs to name."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One point of a sweep with its number and its label."""

    place: int
    label: str
    point: Point

    @property
    def record(self) -> RunRecord | None:
        """The point's record, None where it could not be read."""
        return self.point.record

    @property
    def status(self) -> str:
        """The record's status, or `unreadable`."""
        return self.record.status if self.record else "unreadable"

    @property
    def title(self) -> str:
        """Number and label, cut to one short line."""
        return f"{self.place}. {shorten(self.label, 60)}"


def sweep_rows(points: Sequence[Point]) -> list[Row]:
    """Return one row for each point, labelled by the overrides that not all points share.

    A point's number is its folder's where all folders have one, else its place, from 0.
    """
    records = [point.record for point in points if point.record]
    shared = set.intersection(*(set(record.overrides) for record in records)) if records else set()
    names = [point.folder.name for point in points]
    is_numbered = all(map(str.isdecimal, names)) and len(set(map(int, names))) == len(names)
    places = [int(name) for name in names] if is_numbered else range(len(names))
    return [
        Row(place=place, label=_label(point, shared), point=point)
        for place, point in zip(places, points, strict=True)
    ]


def differing_keys(records: Sequence[RunRecord]) -> list[str]:
    """Return the dotted configuration keys whose values are not equal in all records."""
    flat = [{key: leaf(value) for key, value in flatten(record.config)} for record in records]
    keys = dict.fromkeys(key for config in flat for key in config)
    return [key for key in keys if len({config.get(key) for config in flat}) > 1]


def _label(point: Point, shared: set[str]) -> str:
    if point.record is None:
        return point.folder.name
    own = [item.lstrip("+") for item in point.record.overrides if item not in shared]
    return " ".join(own) or point.record.name


class UnlikeError(RecordError):
    """Records that did not do the same work; the message says what differs."""


def versus_rows(points: Sequence[Point]) -> list[Row]:
    """Return a row for each run, labelled by its name, and by its run's id where labels repeat.

    Of names that list settings, those that all runs have are left out; long ones are shortened.
    """
    names = [point.record.name if point.record else point.folder.name for point in points]
    names = [shorten(name, LABEL_CHARS) for name in _distinct_parts(names)]
    rows = []
    for place, (point, name) in enumerate(zip(points, names, strict=True)):
        run_id = point.record.run_id if point.record else point.folder.name
        label = name if names.count(name) == 1 else f"{name} {run_id}"
        rows.append(Row(place=place, label=label, point=point))
    return rows


def _distinct_parts(names: Sequence[str]) -> list[str]:
    """Return names such as a=1,b=2 without the settings that all have, where something is left."""
    parts = [name.split(",") for name in names]
    shared = set(parts[0]).intersection(*parts[1:])
    if not all("=" in part for part in shared):  # a comma within a value
        return list(names)
    left = [[part for part in own if part not in shared] for own in parts]
    return [",".join(own) for own in left] if all(left) else list(names)


def check_distinct(rows: Sequence[Row]) -> None:
    """Check that no run is there twice; a sweep that took one over has the same run.

    Raises:
        UnlikeError: naming the folders.
    """
    seen: dict[str, Path] = {}
    for row in rows:
        run_id = row.record.run_id if row.record else ""
        if run_id in seen:
            raise UnlikeError(
                f"expected runs that differ, got run {run_id} twice: {seen[run_id]} and "
                f"{row.point.folder}. Give other runs; rerun=all measures a point again."
            )
        seen[run_id] = row.point.folder


def check_alike(rows: Sequence[Row]) -> None:
    """Check that all records did the same work.

    Raises:
        UnlikeError: naming what differs, with the values.
    """
    records = [row.record for row in rows if row.record]
    differing = []
    first = _work(records[0])
    for row, record in zip(rows[1:], records[1:], strict=True):
        other = _work(record)
        for key in dict.fromkeys([*first, *other]):
            if first.get(key) != other.get(key):
                was, now = (shorten(leaf(work.get(key)), 60) for work in (first, other))
                differing.append(f"{key}: {was} in {rows[0].label}, {now} in {row.label}")
    if len({facts.is_emulated(record) for record in records}) > 1:
        differing.append("a GPU and its emulation on a CPU")
    if differing:
        shown = "; ".join(differing[:8])
        more = f"; and {len(differing) - 8} more" if len(differing) > 8 else ""
        raise UnlikeError(
            f"expected runs of the same work, got runs that differ in {shown}{more}. Run them with "
            "equal scenarios and models, or look at each report by itself."
        )


def _work(record: RunRecord) -> dict[str, object]:
    flat = dict(flatten(record.config))
    work = {
        key: value
        for key, value in flat.items()
        if key.startswith(WORK) and not key.startswith(NOT_WORK)
    }
    if not any(key.startswith("model.spec.") for key in work):
        work["model.name"] = flat.get("model.name")
    # A file is what it holds: another one may lie at the same path, and the same one elsewhere.
    for name, digest in (record.effective.get("inputs") or {}).items():
        work[f"scenario.{name}"] = f"content {digest}"[:20]
    return work


def ratio(base: RunRecord, other: RunRecord, metric: str) -> float | None:
    """Return a metric of `other` over that of `base`, None where one is absent or below 0."""
    below, above = base.metrics.get(metric), other.metrics.get(metric)
    if below is None or above is None:
        return None
    return above / below if below > 0 <= above else None


def ratio_interval(base: RunRecord, other: RunRecord, metric: str) -> tuple[float, float] | None:
    """Return the least and the largest ratio of two means within their 95 % intervals.

    It is wider than the 95 % interval of the ratio. None where a run has no repeats.
    """
    ends = [
        record.metrics.get(f"{metric.removesuffix('/mean')}/{end}")
        for record in (base, other)
        for end in ("ci95_low", "ci95_high")
    ]
    known = [end for end in ends if end is not None and end > 0]
    if len(known) < len(ends):
        return None
    base_low, base_high, low, high = known
    return low / base_high, high / base_low


def compared_metrics(records: Sequence[RunRecord]) -> list[Metric]:
    """Return the metrics that at least two records have, of samples their median or mean."""
    runs = [record.metrics for record in records]
    least = min(2, len(runs))
    metrics = found("compare", runs)
    return [m for m in metrics if sum(run.get(m.name) is not None for run in runs) >= least]


def differing_settings(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return a line for each setting that differs and matters: its key and its value in each."""
    flat = [dict(flatten(row.record.config)) for row in rows if row.record]
    keys = [
        key
        for key in dict.fromkeys(key for config in flat for key in config)
        if not key.startswith(IDLE) and key not in IDLE_ROOTS
    ]
    return [
        (key, *(shorten(leaf(config[key]), 40) if key in config else ABSENT for config in flat))
        for key in keys
        if len({leaf(config.get(key)) for config in flat}) > 1
    ]
