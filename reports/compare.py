"""Records side by side: their labels, what differs, whether they did the same work, ratios."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reports import facts
from reports.record.folders import Point
from reports.record.metrics import Metric, Metrics, found
from reports.record.record import MEASURED, RecordError, RunRecord
from reports.record.text import flatten, last_keys, leaf, shorten

WORK: Final = ("scenario.", "model.")
"""Settings that say what was to be done."""
NOT_WORK: Final = (
    "scenario.name",
    "scenario.correctness.",
    "model.source.",
    "model.path",
    "model.name",
    "model.quantize",
    "model.spec.quantization",
    "model.spec.dtype",
    "scenario.quality.reference",
)
"""Settings among these that change no request; the sizes say which model it was, in any format."""
UNSET: Final[tuple[object, ...]] = (None, False, 0, "", [], {})
"""Values that do nothing: those of a setting in a record from before it existed."""
ONE: Final = ("repeats", "turns.num", "scale", "decoder_sparse_step")
"""Ends of the settings that do nothing where they are 1."""
LABEL_CHARS: Final = 48
IDLE: Final = ("tracking.", "scenario.correctness.")
IDLE_ROOTS: Final = frozenset(
    {"timeout_s", "silence_s", "fail_fast", "monotone_stop", "rerun", "mode"}
)


class UnlikeError(RecordError):
    """Records that did not do the same work; the message says what differs."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One point with its number and its label; it has no record that can be read."""

    place: int
    label: str
    folder: Path
    problem: str = ""
    """Why it has no record."""

    @property
    def status(self) -> str:
        """Word for how it ended."""
        return "unreadable"

    @property
    def title(self) -> str:
        """Number and label, cut to one short line."""
        return f"{self.place}. {shorten(self.label, 60)}"

    @property
    def whole_title(self) -> str:
        """Number and label."""
        return f"{self.place}. {self.label}"

    @property
    def metrics(self) -> Metrics:
        """Figures that were measured."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Run(Row):
    """One point with its record."""

    record: RunRecord

    @property
    def status(self) -> str:
        """Status of the record."""
        return self.record.status

    @property
    def metrics(self) -> Metrics:
        """Metrics of the record."""
        return self.record.metrics


def runs_of(rows: Sequence[Row]) -> list[Run]:
    """Return the rows that have a record."""
    return [row for row in rows if isinstance(row, Run)]


def records_of(rows: Sequence[Row]) -> list[RunRecord]:
    """Return the records of the rows that have one."""
    return [run.record for run in runs_of(rows)]


def sweep_rows(points: Sequence[Point]) -> list[Row]:
    """Return one row for each point, labelled by the overrides that not all points share.

    A point's number is its folder's where all folders have one, else its place, from 0.
    """
    overrides = [set(point.record.overrides) for point in points if point.record]
    shared = set.intersection(*overrides) if overrides else set()
    names = [point.folder.name for point in points]
    is_numbered = all(map(str.isdecimal, names)) and len(set(map(int, names))) == len(names)
    places = [int(name) for name in names] if is_numbered else range(len(names))
    rows: list[Row] = []
    for place, point in zip(places, points, strict=True):
        folder, record = point.folder, point.record
        if record is None:
            problem = point.problem or ""
            rows.append(Row(place=place, label=folder.name, folder=folder, problem=problem))
            continue
        own = [item.lstrip("+") for item in record.overrides if item not in shared]
        label = " ".join(own) or record.name
        rows.append(Run(place=place, label=label, folder=folder, record=record))
    return rows


def compare_rows(runs: Sequence[tuple[Path, RunRecord]]) -> list[Run]:
    """Return a row for each run, labelled by its name, and by its run's id where labels repeat.

    Runs without figures come last, so that the first one can be what others are held against. Of
    names that list settings, those that all runs have are left out; long ones are shortened.
    """
    runs = sorted(runs, key=lambda pair: pair[1].status not in MEASURED)
    names = _distinct_parts([record.name for _, record in runs])
    names = [shorten(name, LABEL_CHARS) for name in names]
    rows = []
    for place, ((folder, record), name) in enumerate(zip(runs, names, strict=True)):
        label = name if names.count(name) == 1 else f"{name} {record.run_id}"
        rows.append(Run(place=place, label=label, folder=folder, record=record))
    return rows


def _distinct_parts(names: Sequence[str]) -> list[str]:
    """Return names such as a=1,b=2 without the settings that all have, where something is left."""
    parts = [name.split(",") for name in names]
    shared = set(parts[0]).intersection(*parts[1:])
    if not all("=" in part for part in shared):  # a comma within a value
        return list(names)
    left = [[part for part in own if part not in shared] for own in parts]
    if not all(left):
        return list(names)
    ends = [last_keys(" ".join(own)) for own in left]
    return ends if len({*ends}) == len({*names}) else [" ".join(own) for own in left]


def check_distinct(runs: Sequence[Run]) -> None:
    """Check that no run is there twice; a sweep that took one over has the same run.

    Raises:
        UnlikeError: naming the folders.
    """
    seen: dict[str, Path] = {}
    for run in runs:
        run_id = run.record.run_id
        if run_id in seen:
            raise UnlikeError(
                f"expected runs that differ, got run {run_id} twice: {seen[run_id]} and "
                f"{run.folder}. Give other runs; rerun=all measures a point again."
            )
        seen[run_id] = run.folder


def check_alike(runs: Sequence[Run]) -> None:
    """Check that all records did the same work in the parts that they share.

    Raises:
        UnlikeError: naming what differs, with the values, or that no part is shared.
    """
    differing = []
    parts = [parts_of(run.record) for run in runs]
    if all(parts) and not set.intersection(*map(set, parts)):
        had = "; ".join(
            f"{', '.join(own)} in {run.label}" for run, own in zip(runs, parts, strict=True)
        )
        raise UnlikeError(
            f"expected runs with a part of the scenario in common, got {had}. Run them with equal "
            "scenarios, or look at each report by itself."
        )
    alone = tuple(f"scenario.{part}" for part in unshared_parts([run.record for run in runs]))
    base, first = runs[0], _work(runs[0].record)
    for run in runs[1:]:
        other = _work(run.record)
        for key in dict.fromkeys([*first, *other]):
            is_alone = key in alone or key.startswith(tuple(f"{part}." for part in alone))
            if not _is_same(key, first, other) and not is_alone:
                was, now = (shorten(leaf(work.get(key)), 60) for work in (first, other))
                differing.append(f"{key}: {was} in {base.label}, {now} in {run.label}")
    if len({facts.is_emulated(run.record) for run in runs}) > 1:
        differing.append("a GPU and its emulation on a CPU")
    if differing:
        shown = "; ".join(differing[:8])
        more = f"; and {len(differing) - 8} more" if len(differing) > 8 else ""
        raise UnlikeError(
            f"expected runs of the same work, got runs that differ in {shown}{more}. Run them with "
            "equal scenarios and models, or look at each report by itself."
        )


def _is_same(key: str, first: dict[str, object], other: dict[str, object]) -> bool:
    """Return whether two runs have the same value of a setting, or one had no such setting yet."""
    if key in first and key in other:
        return first[key] == other[key]
    value = (first | other)[key]
    return value in UNSET or (key.endswith(ONE) and value == 1)


def parts_of(record: RunRecord) -> list[str]:
    """Return the parts of the scenario that a run was to measure."""
    scenario = record.config.get("scenario")
    nodes = scenario if isinstance(scenario, Mapping) else {}
    return [
        str(name)
        for name, node in nodes.items()
        if isinstance(node, Mapping) and name != "correctness"
    ]


def unshared_parts(records: Sequence[RunRecord]) -> list[str]:
    """Return the parts that some of the runs have and others have not.

    None where a record does not say which parts it was to measure.
    """
    parts = [parts_of(record) for record in records]
    if not all(parts):
        return []
    every = dict.fromkeys(part for own in parts for part in own)
    return [part for part in every if not all(part in own for own in parts)]


def _work(record: RunRecord) -> dict[str, object]:
    flat = dict(flatten(record.config))
    work = {
        key: value
        for key, value in flat.items()
        if key.startswith(WORK) and not key.startswith(NOT_WORK)
    }
    if not any(key.startswith("model.spec.") for key in work):
        work["model.name"] = flat.get("model.name")
    # A random router is that of dummy weights, asked for or not.
    if work.get("model.routing") == "dummy":
        work["model.routing"] = None
    # A file is what it holds: another one may lie at the same path, and the same one elsewhere.
    if (digest := facts.dig_text(record.effective, "routing.sha256")) is not None:
        work["model.routing"] = f"trace, content {digest}"[:27]
    for name, digest in (record.effective.get("inputs") or {}).items():
        work[f"scenario.{name}"] = f"content {digest}"[:20]
    return work


def unequal_tokens(base: RunRecord, other: RunRecord) -> dict[str, tuple[int, int]]:
    """Return part -> (requests whose tokens differ, requests that both have), where some differ."""
    found = {}
    for part in ("latency", "throughput", "serve"):
        first, second = (_hashes(record, part) for record in (base, other))
        shared = first.keys() & second.keys()
        unequal = sum(first[name] != second[name] for name in shared)
        if unequal:
            found[part] = (unequal, len(shared))
    return found


def _hashes(record: RunRecord, part: str) -> dict[str, str]:
    """Return request -> hash of its tokens, of the requests of a part that have one."""
    return {
        str(row["request_id"]): str(row["tokens_hash"])
        for row in facts.rows(record, part)
        if row.get("request_id") is not None and row.get("tokens_hash") is not None
    }


def weights_hash(record: RunRecord) -> str | None:
    """Return the hash of the weights' files, None where none is recorded."""
    return facts.dig_text(record.effective, "model.sha256")


def compared_metrics(runs: Sequence[Metrics]) -> list[Metric]:
    """Return the metrics that at least two runs have; for samples their median or mean."""
    least = min(2, len(runs))
    metrics = found("compare", runs)
    return [m for m in metrics if sum(run.get(m.name) is not None for run in runs) >= least]


def comparable_metrics(runs: Sequence[Run]) -> list[Metric]:
    """Return the metrics by which runs can be held against each other.

    Those of parts that some of the runs were not to measure are left out, and with other parts
    also the energy, which is of the last of them.
    """
    alone = unshared_parts([run.record for run in runs])
    left_out = (*alone, "energy") if alone else ()
    metrics = compared_metrics([run.metrics for run in runs])
    return [metric for metric in metrics if metric.name.split("/")[0] not in left_out]


def differing_settings(records: Sequence[RunRecord]) -> dict[str, list[str | None]]:
    """Return the settings that are not equal in all records: key -> value in each, None: absent."""
    flat = [_flat(record) for record in records]
    keys = dict.fromkeys(key for config in flat for key in config)
    values = {key: [config.get(key) for config in flat] for key in keys}
    return {key: found for key, found in values.items() if len(set(found)) > 1}


def _flat(record: RunRecord) -> dict[str, str | None]:
    """Return every setting as text, the offload under the name that was typed."""
    found: dict[str, str | None] = {"offload": facts.offload_name(record)}
    found |= {key: leaf(value) for key, value in flatten(record.config)}
    found.pop("offload.offload_backend", None)  # auto where offload=none
    return found


def is_idle(setting: str) -> bool:
    """Return whether no comparison needs to name a setting."""
    return setting.startswith(IDLE) or setting in IDLE_ROOTS
