"""What the runs of a comparison say: status, ratios, tokens, and what speaks against them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from harness.ab.compare import (
    COMPARED,
    Ratio,
    compare,
    compare_tokens,
    part_rows,
    per_request,
    run_metrics,
)
from harness.ab.order import AGAINST_ITSELF, Step, pairs_of, side_records
from harness.ab.order import COMPARED as AB
from harness.ab_config import SIDES, AbConfig
from harness.columns import columns
from harness.summary import verdict_text
from reports.record.record import RunRecord
from reports.record.text import number

Done = Sequence[tuple[Step, RunRecord]]
STATUS_ORDER: Final = ("killed", "timeout", "failed", "oom", "no_fit", "skipped", "ok")
"""Of a comparison: the first that a side has."""
TOKEN_PARTS: Final = ("latency", "throughput", "serve")
_MOST_REASONS: Final = 12
_HEADER: Final = ("", "a", "b", "b / a", "95 % interval", "a / a +-", "")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that the record of a comparison says."""

    status: str
    error: dict[str, Any] | None
    valid: bool | None
    reasons: list[str]
    notes: list[str]
    metrics: dict[str, float | None]
    sample: dict[str, Any]


def comparison(
    ab: AbConfig, done: Done, folders: Sequence[str], *, is_interrupted: bool = False
) -> Comparison:
    """Return what the runs say.

    Args:
        ab: what was asked.
        done: the runs in order.
        folders: of each, below the comparison's.
        is_interrupted: Ctrl-C ended it.
    """
    pairs, noise = pairs_of(done, AB), pairs_of(done, AGAINST_ITSELF)
    ratios = compare(_metrics(pairs), _metrics(noise))
    tokens = {
        part: found
        for part in TOKEN_PARTS
        if (found := compare_tokens(_rows(pairs, part)))["num_compared"]
    }
    unequal = _unequal_alone(tokens)
    peers = _systems(done)
    # Another system rounds otherwise; the engine under another placement does not.
    reasons = [*_run_reasons(done), *(unequal if len(peers) < 2 else [])]
    status, error = _status(done, is_interrupted=is_interrupted)
    judged = [record.valid for _, record in done if record.status == "ok"]
    valid = False if reasons else (True if judged and all(judged) else None)
    return Comparison(
        status=status,
        error=error,
        valid=valid if pairs else None,
        reasons=reasons[:_MOST_REASONS],
        notes=[*_notes(ab, pairs, tokens), *(unequal if len(peers) > 1 else [])],
        metrics=dict(_ratio_metrics(ratios)),
        sample={
            "a": _side(done, "a", ab.a),
            "b": _side(done, "b", ab.b),
            "runs": [
                {
                    "folder": folder,
                    "phase": step.phase,
                    "pair": step.pair,
                    "side": step.side,
                    "run_id": record.run_id,
                    "status": record.status,
                    "valid": record.valid,
                    "started_at": record.started_at,
                    "duration_s": record.duration_s,
                    "metrics": {
                        name: value
                        for name, value in run_metrics(record).items()
                        if name in COMPARED
                    },
                }
                for (step, record), folder in zip(done, folders, strict=True)
            ],
            "rows": [ratio.to_row() for ratio in ratios],
            "per_request": per_request(_rows(pairs, "latency")),
            "tokens": tokens,
        },
    )


def _metrics(
    pairs: Sequence[tuple[RunRecord, RunRecord]],
) -> list[tuple[dict[str, float | None], dict[str, float | None]]]:
    return [(run_metrics(first), run_metrics(second)) for first, second in pairs]


def _rows(
    pairs: Sequence[tuple[RunRecord, RunRecord]], part: str
) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    return [(part_rows(first, part), part_rows(second, part)) for first, second in pairs]


def _side(done: Done, side: str, own: Sequence[str]) -> dict[str, Any]:
    """Return how a side ended, with the figures of its first good run."""
    records = side_records(done)[side]
    bad = next((record for record in records if record.status != "ok"), None)
    good = next((record for record in records if record.status == "ok"), None)
    found = run_metrics(good) if good is not None else {}
    return {
        "overrides": list(own),
        "status": bad.status if bad is not None else "ok" if good is not None else "skipped",
        "error": bad.error if bad is not None else None,
        "num_runs": len(records),
        "first_run": {name: found.get(name) for name in COMPARED if found.get(name) is not None},
    }


def _status(done: Done, *, is_interrupted: bool) -> tuple[str, dict[str, Any] | None]:
    if is_interrupted:
        return "killed", {
            "type": "Interrupted",
            "message": "the harness was interrupted; the runs before it are compared.",
            "phase": None,
            "traceback": None,
        }
    found = {record.status: (step, record) for step, record in reversed(done)}
    status = next((status for status in STATUS_ORDER if status in found), "failed")
    if status == "ok":
        return status, None
    step, record = found[status]
    error = record.error or {"type": "Unknown", "message": "it has no error"}
    return status, {
        "type": error["type"],
        "message": f"side {step.side}: {error['message']}",
        "phase": error.get("phase"),
        "traceback": None,
    }


def _run_reasons(done: Done) -> list[str]:
    """Return the reasons of the runs, each once, with the runs that have it."""
    found: dict[str, list[str]] = {}
    for step, record in done:
        for reason in record.reasons:
            found.setdefault(reason, []).append(step.label)
    return [f"{', '.join(labels)}: {reason}" for reason, labels in found.items()]


def _systems(done: Done) -> set[str]:
    """Return what answered the requests of the runs."""
    nodes = (record.config.get("system") or {} for _, record in done)
    return {str(node.get("kind", "native")) for node in nodes}


def _unequal_alone(tokens: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return one line where requests that ran alone gave other tokens on the two sides."""
    found = tokens.get("latency")
    if found is None or found["num_equal"] == found["num_compared"]:
        return []
    count = found["num_compared"]
    return [
        f"latency: {count - found['num_equal']} of {count} requests gave other tokens on side b "
        f"than on side a, the first {found['first_unequal']}. Compare their settings of dtype and "
        "kernels; of one engine under two placements report this."
    ]


def _notes(
    ab: AbConfig,
    pairs: Sequence[tuple[RunRecord, RunRecord]],
    tokens: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    notes = []
    if len(pairs) < ab.pairs:
        notes.append(f"ab: {len(pairs)} of {ab.pairs} pairs ran on both sides.")
    if ab.aa_pairs == 0:
        notes.append(
            "ab: side a was not run against itself (ab.aa_pairs=0), so nothing says which "
            "differences this machine can resolve."
        )
    for part, found in tokens.items():
        if part != "latency" and found["num_equal"] < found["num_compared"]:
            notes.append(
                f"{part}: {found['num_compared'] - found['num_equal']} of {found['num_compared']} "
                "requests gave other tokens on side b: requests that run together round otherwise "
                "where their steps are composed otherwise."
            )
    return notes


def metric_name(metric: str) -> str:
    """Return the name of a comparison of a metric, such as ab/latency_ttft_ms, without its end."""
    return "ab/" + metric.removesuffix("/mean").replace("/", "_")


def _ratio_metrics(ratios: Sequence[Ratio]) -> Iterator[tuple[str, float | None]]:
    for item in ratios:
        name = metric_name(item.metric)
        yield f"{name}_ratio", item.ratio
        yield f"{name}_ratio/ci95_low", item.low
        yield f"{name}_ratio/ci95_high", item.high
        yield f"{name}_noise_share", item.resolution


def result_lines(record: RunRecord, folder: Path) -> list[str]:
    """Return the comparison as lines of text.

    Args:
        record: of the comparison.
        folder: of the comparison.
    """
    sample = record.samples["ab"]
    lines = ["", f"{record.name}: {record.status}{verdict_text(record)}"]
    for side in SIDES:
        found = sample[side]
        lines.append(f"  {side} = {' '.join(found['overrides']) or 'as is'}: {found['status']}")
    if record.error is not None:
        lines.append(f"  {record.error['type']}: {record.error['message'].splitlines()[0]}")
    lines += [f"  {reason}" for reason in record.reasons]
    if not sample["rows"]:
        lines += _single_lines(sample)
    else:
        rows = [_HEADER, *(_cells(row) for row in sample["rows"])]
        lines += columns(rows, left={0, len(_HEADER) - 1})
    for part, found in sample["tokens"].items():
        lines.append(
            f"  {part}: {found['num_equal']} of {found['num_compared']} requests gave equal tokens"
        )
    lines += [f"  note: {text}" for text in record.effective.get("notes") or []]
    lines.append(f"  run folder  {folder}")
    if (folder / "report.html").is_file():
        lines.append(f"  report      {folder / 'report.html'}")
    return lines


def _cells(row: Mapping[str, Any]) -> Sequence[str]:
    """Cells of one metric of both sides."""
    return (
        row["label"],
        _text(row["a"]),
        _text(row["b"]),
        "n/a" if row["ratio"] is None else f"{row['ratio']:.3f}",
        "" if row["low"] is None else f"{row['low']:.3f} .. {row['high']:.3f}",
        "" if row["resolution"] is None else f"{number(100 * row['resolution'])} %",
        row["verdict"],
    )


def _single_lines(sample: Mapping[str, Any]) -> list[str]:
    """Figures of the side that ran where the other did not."""
    return columns(
        [
            (f"{side}: {COMPARED[name].words}", _text(value))
            for side in SIDES
            for name, value in sample[side]["first_run"].items()
        ]
    )


def _text(value: float | None) -> str:
    return "n/a" if value is None else number(value)
