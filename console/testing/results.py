"""What a test's records say, as the registry keeps it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from catalogue.files import read_json
from catalogue.terminal import EXIT_INTERRUPTED
from console.registry.tables import PERFORMANCE_PARTS, Comparison, Performance
from console.testing.process import DOCUMENT_NAME, LOG_NAME, run_folders
from reports.record.judging import answer_of
from reports.record.metrics import unit
from reports.record.record import MEASURED, RESULT_NAME, RecordError, RunRecord

STATUSES: Final[Mapping[str, str]] = {
    "ok": "finished",
    "partial": "partial",
    "no_fit": "no_fit",
    "oom": "failed",
    "failed": "failed",
    "timeout": "failed",
    "skipped": "failed",
    "killed": "interrupted",
}
"""How a run ended -> how the test did."""
_ROW: Final = ("metric", "label", "better", "num_pairs", "a", "b", "ratio", "low", "high")
_TOKEN_PARTS: Final = ("latency", "throughput", "serve")
"""Where tokens are compared: requests alone first, as those that run together round otherwise."""


@dataclass(kw_only=True)
class Outcome:
    """How a test ended, and the rows that it adds."""

    status: str
    reason: str | None = None
    environment: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    performance: list[Performance] = field(default_factory=list)
    comparison: Comparison | None = None


def outcome_of(
    folder: Path, kind: str, profiles: Mapping[str, int], exit_code: int | None
) -> Outcome:
    """Return what the files of a test say once its process has ended.

    Args:
        folder: Of the test.
        kind: test | ab | sweep.
        profiles: Ids of the profiles by name, in the order in which they were asked for.
        exit_code: Of the process; None: not known.
    """
    match kind:
        case "test":
            return _of_test(folder, list(profiles.values()), exit_code)
        case "ab":
            return _of_ab(folder, list(profiles.values()), exit_code)
        case _:
            return _of_sweep(folder, profiles, exit_code)


def _of_test(folder: Path, profiles: Sequence[int], exit_code: int | None) -> Outcome:
    record = _record(folder)
    if record is None:
        return _without_record(folder, exit_code)
    return Outcome(
        status=STATUSES[record.status],
        reason=_reason(record),
        environment=record.environment,
        metrics=_known(record.metrics),
        performance=performance_of(record, profiles[0]),
    )


def _of_sweep(folder: Path, profiles: Mapping[str, int], exit_code: int | None) -> Outcome:
    runs = {run.name: _record(run) for run in run_folders(folder, "sweep")}
    records = {
        name: record
        for number, name in enumerate(profiles)
        if (record := runs.get(str(number))) is not None
    }
    if not records:
        return _without_record(folder, exit_code)
    counts = Counter(STATUSES[record.status] for record in records.values())
    reasons = [f"{name}: {text}" for name, each in records.items() if (text := _reason(each))]
    if missing := [name for name in profiles if name not in records]:
        counts["interrupted"] += len(missing)
        reasons.append(f"{', '.join(missing)}: did not run")
    return Outcome(
        status=_status_of_all(counts),
        reason="; ".join(reasons) or None,
        environment=next(iter(records.values())).environment,
        metrics={name: _known(record.metrics) for name, record in records.items()},
        performance=[
            row
            for name, record in records.items()
            for row in performance_of(record, profiles[name])
        ],
    )


def _status_of_all(counts: Mapping[str, int]) -> str:
    """Return one status of several: partial where some have figures and others have not."""
    if len(counts) == 1:
        return next(iter(counts))
    if counts.get("interrupted"):
        return "interrupted"
    return "partial" if counts.get("finished") or counts.get("partial") else "failed"


def _of_ab(folder: Path, profiles: Sequence[int], exit_code: int | None) -> Outcome:
    record = _record(folder)
    if record is None:
        return _without_record(folder, exit_code)
    sample = record.samples.get("ab") or {}
    rows = [_row(row) for row in sample.get("rows") or []]
    bad = _sides_that_failed(sample)
    status, reason = STATUSES[record.status], _reason(record)
    if bad and len(bad) < 2:  # that one side does not start is what the comparison says
        status, reason = "finished", None
    tokens = _tokens(sample)
    comparison = Comparison(
        profile_a_id=profiles[0],
        profile_b_id=profiles[1],
        rows=rows,
        tokens_equal=tokens.get("num_equal"),
        tokens_total=tokens.get("num_compared"),
        verdict="; ".join(bad) or answer_of(sample.get("rows") or []),
    )
    return Outcome(
        status=status,
        reason=reason,
        environment=record.environment,
        metrics=_known(record.metrics),
        performance=_of_sides(folder, sample, profiles),
        comparison=comparison if sample else None,
    )


def _of_sides(
    folder: Path, sample: Mapping[str, Any], profiles: Sequence[int]
) -> list[Performance]:
    """Return what the runs of both sides measured, each of them."""
    found = []
    for run in sample.get("runs") or []:
        record = _record(folder / run["folder"])
        if record is not None:
            found += performance_of(record, profiles["ab".index(run["side"])])
    return found


def _sides_that_failed(sample: Mapping[str, Any]) -> list[str]:
    """Return why a side has no figures, in words, for each that has none."""
    found = []
    for name in ("a", "b"):
        side = sample.get(name) or {}
        if side.get("status") in MEASURED:
            continue
        verb = (
            "does not fit" if side.get("status") == "no_fit" else f"ended as {side.get('status')}"
        )
        message = str((side.get("error") or {}).get("message", "")).strip().partition("\n")[0]
        found.append(f"side {name} {verb}: {message}" if message else f"side {name} {verb}")
    return found


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return one metric of both sides; an unknown ratio stays None."""
    found = {name: row.get(name) for name in _ROW}
    return found | {
        "unit": unit(str(row["metric"])),
        "noise": row.get("resolution"),
        "verdict": row.get("verdict"),
    }


def _tokens(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    tokens = sample.get("tokens") or {}
    return next((tokens[part] for part in _TOKEN_PARTS if part in tokens), {})


def performance_of(record: RunRecord, profile_id: int) -> list[Performance]:
    """Return a row for each part that a run has figures of; none where it measured nothing."""
    if record.status not in MEASURED:
        return []
    known = _known(record.metrics)
    parts = {
        part: {name: value for name, value in known.items() if name.startswith(f"{part}/")}
        for part in PERFORMANCE_PARTS
    }
    return [
        Performance(profile_id=profile_id, card=card_of(record), part=part, metrics=metrics)
        for part, metrics in parts.items()
        if metrics
    ]


def card_of(record: RunRecord) -> str:
    """Return what a run computed on: the GPU's name, or the processor's."""
    gpu, cpu = record.environment.get("gpu"), record.environment.get("cpu")
    name = (gpu or cpu or {}).get("name") or "unknown"
    return str(name) if gpu else f"CPU: {name}"


def _known(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if value is not None}


def _record(folder: Path) -> RunRecord | None:
    """Return the record of a run; None where it has none that can be read."""
    try:
        return RunRecord.read(folder / RESULT_NAME)
    except RecordError:
        return None


def _reason(record: RunRecord) -> str | None:
    """Return why a run has no figures, or why they do not count."""
    if record.error is not None:
        return str(record.error["message"]).strip()
    return "; ".join(record.reasons) or None


def _without_record(folder: Path, exit_code: int | None) -> Outcome:
    """Return how a test ended that could not write its record."""
    document = read_json(folder / DOCUMENT_NAME)
    code = document.get("exit_code", exit_code)
    if code is None or code < 0 or code == EXIT_INTERRUPTED:
        how = f" by signal {-code}" if code is not None and code < 0 else ""
        return Outcome(status="interrupted", reason=f"the harness was ended{how} without a record")
    said = document.get("message") or _last_line(folder / LOG_NAME)
    return Outcome(status="failed", reason=said or f"the harness ended with code {code}")


def _last_line(path: Path) -> str | None:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.strip() for line in reversed(lines) if line.strip()), None)
