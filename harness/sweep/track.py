"""The end of a sweep: its report, and its run in the tracker."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from catalogue.files import tightfit_home
from catalogue.terminal import columns
from engine.lines import indented
from harness.config.schema import SweepContext, TrackingConfig
from harness.point.describe import what_varies
from harness.point.show import build_report, status_text
from harness.studies.table import grid
from harness.tracking.base import SweepFacts
from harness.tracking.mlflow import open_tracker
from reports.record.judging import best_by_model
from reports.record.metrics import found, metric_number
from reports.record.record import RunRecord, write_text_atomic


def sweep_lines(
    records: Sequence[RunRecord],
    folders: Sequence[Path],
    sweep: SweepContext,
    view: str | None = None,
) -> list[str]:
    """Return how the sweep ended as lines of text; folders are of all points that began.

    `view` is the command that shows it in the tracker.

    A table of the points, who is best, why points have no figures, and what runs again.
    """
    lines = ["", f"sweep {sweep.sweep_id}: {len(records)} of {sweep.total} points"]
    if records:
        names = point_names(records)
        lines += _table(records, names, folders)
        lines += indented(_best(records, names))
        lines += indented(_reasons(records, names))
    lines += indented(_rest(records, sweep.total))
    lines.append(f"  sweep folder  {sweep.folder}")
    report = sweep.folder / "sweep.html"
    if report.is_file():
        lines.append(f"  report        {report}")
    if view is not None:
        lines.append(f"  compare       {view}")
    return lines


def point_names(records: Sequence[RunRecord]) -> list[str]:
    """Return what the points differ in, in full; the name of one that differs in nothing."""
    varying = what_varies([record.overrides for record in records])
    return [" ".join(own) or record.name for record, own in zip(records, varying, strict=True)]


def _table(
    records: Sequence[RunRecord], names: Sequence[str], folders: Sequence[Path]
) -> list[str]:
    header, *rows = _rows(records, names)
    lines = [header, *rows]
    if [row[0] for row in rows] != [folder.name for folder in folders]:
        lines = [[*header, "folder"]]
        lines += [[*row, folder.name] for row, folder in zip(rows, folders, strict=False)]
    return columns(lines, left={1, 2, len(header)})


def _rows(
    records: Sequence[RunRecord], names: Sequence[str], trials: Sequence[int] = ()
) -> list[list[str]]:
    """Return header and cells of the table of the points, by the numbers of a search's trials."""
    metrics = found("sweep", [record.metrics for record in records])
    rows = [
        [
            "trial" if trials else "point",
            "choices",
            "status",
            *(metric.heading for metric in metrics),
        ]
    ]
    numbers = trials or range(len(records))
    for index, record, name in zip(numbers, records, names, strict=True):
        values = [(metric.name, record.metrics.get(metric.name)) for metric in metrics]
        cells = ["-" if value is None else metric_number(key, value) for key, value in values]
        rows.append([str(index), name, status_text(record), *cells])
    return rows


def _best(records: Sequence[RunRecord], names: Sequence[str]) -> Iterator[str]:
    """Who is best in each metric that has one, a winner only where repeats say so."""
    bests = best_by_model(list(zip(names, records, strict=True)))
    bests = [best for best in bests if best.next_label is not None]
    for best in bests:
        yield f"{best.title}: {best.label}, {best.text}, {best.against}"
    remedies = " ".join(dict.fromkeys(filter(None, (best.remedy for best in bests))))
    if remedies:
        yield f"For intervals: {remedies}"


def _reasons(
    records: Sequence[RunRecord], names: Sequence[str], trials: Sequence[int] = ()
) -> Iterator[str]:
    """Why points have no figures, or figures that do not count."""
    word, numbers = ("trial", trials) if trials else ("point", range(len(records)))
    for index, record, name in zip(numbers, records, names, strict=True):
        message = str((record.error or {}).get("message", "")).strip()
        for text in filter(None, [message.split("\n")[0], *record.reasons[:1]]):
            yield f"{word} {index}, {name}: {status_text(record)}: {text}"


def _rest(records: Sequence[RunRecord], total: int) -> Iterator[str]:
    """What the same command would run, and what it would take over, unless it has a rerun=."""
    num_ok = sum(record.status == "ok" for record in records)
    if num_ok == total:
        return
    counts = Counter(record.status for record in records if record.status != "ok")
    if total > len(records):
        counts["not begun"] = total - len(records)
    s = "s"[: num_ok != 1]
    rest = ", ".join(f"{count} {status}" for status, count in counts.items())
    yield (
        f"Without rerun=, the same command reuses {num_ok} point{s} and runs {total - num_ok} "
        f"({rest}); rerun=none reuses all that ended."
    )


ANSWERS: Final = frozenset({"ok", "partial", "no_fit", "skipped"})
"""Statuses of points that say what they cost, or why they cannot run: a sweep of these is whole."""
READING_A_SWEEP: Final = (
    "A point that does not fit is an answer too. No point wins unless it was repeated and its "
    "interval says so. `sweep.html` among the artifacts has the figures."
)
FAILURES_NAME: Final = "failures.md"


def begin_sweep(tracking: TrackingConfig, sweep: SweepContext) -> list[str]:
    """Open the sweep's run in the tracker as this process's own; return warnings.

    For points that run in other processes: the run would belong to the first of them, and to nobody
    when that ends.
    """
    tracker = open_tracker(tracking, tightfit_home())
    tracker.start_sweep(sweep)
    return tracker.warnings


def finish_sweep(
    tracking: TrackingConfig,
    sweep: SweepContext,
    records: Sequence[RunRecord],
    *,
    interrupted: bool = False,
    is_ok: bool | None = None,
    trials: Sequence[int] = (),
) -> tuple[list[str], str | None]:
    """Make the sweep's report and end its run in the tracker.

    `is_ok` says whether it found what it was for; None: every point has an answer. `trials` are the
    numbers of a search's records. Returns warnings, and the command that shows the sweep.
    """
    counts = Counter(record.status for record in records)
    if is_ok is None:
        is_ok = len(records) == sweep.total and set(counts) <= ANSWERS
    status = "ok" if is_ok else "failed"
    if interrupted:
        status = "killed"
    warnings = build_report(sweep.folder) if records else []
    try:
        _write_failures(sweep, records)
    except OSError as error:
        warnings.append(f"{FAILURES_NAME}: not written: {error}.")
    tracker = open_tracker(tracking, tightfit_home())
    note = sweep_note(records, sweep, trials) if records else ""
    tracker.finish_sweep(SweepFacts(context=sweep, status=status, counts=dict(counts), note=note))
    return warnings + tracker.warnings, tracker.view_command(sweep.sweep_id)


def sweep_note(
    records: Sequence[RunRecord], sweep: SweepContext, trials: Sequence[int] = ()
) -> str:
    """Return the description of a sweep in Markdown: table, best point, how to read it."""
    names = point_names(records)
    header, *rows = _rows(records, names, trials)
    lines = grid(header, [[cell.replace("|", "\\|") for cell in row] for row in rows])
    texts = [text.strip() for text in (*_best(records, names), *_reasons(records, names, trials))]
    lines += ["", *(f"- {text}" for text in texts), "", READING_A_SWEEP]
    return "\n".join([f"**{sweep.title or sweep.sweep_id}**", "", *lines])


def _write_failures(sweep: SweepContext, records: Sequence[RunRecord]) -> None:
    """List the points that are not ok, and those that did not run, in failures.md."""
    bad = [record for record in records if record.status != "ok"]
    lines = [f"# {len(bad)} of {len(records)} points are not ok", ""]
    for record in bad:
        error = record.error or {}
        phase = f" in phase {error['phase']}" if error.get("phase") else ""
        lines += [f"- **{record.name}**: {record.status}{phase}: {error.get('type')}", ""]
        lines += [f"      {line}" for line in str(error.get("message", "")).splitlines()]
        lines.append("")
    left = sweep.total - len(records)
    if left > 0:
        lines.append(f"{left} of {sweep.total} points did not run.")
    sweep.folder.mkdir(parents=True, exist_ok=True)
    write_text_atomic(sweep.folder / FAILURES_NAME, "\n".join(lines).rstrip() + "\n")
