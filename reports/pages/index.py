"""Every run of a home as one page: a row each, newest first, with a filter; no report is drawn."""

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote

from reports import facts
from reports.pages.page import Kind, Page, Section, Table
from reports.pages.verdict import noted_state, state, status_kind
from reports.pages.write import INDEX_NAME, REPORT_NAME, SWEEP_NAME, render
from reports.record.folders import Point, each_point
from reports.record.metrics import METRICS, Metric, Metrics, metric_number, shared
from reports.record.record import RESULT_NAME, RecordError, RunRecord, write_text_atomic
from reports.record.text import ABSENT, GIB, number, shorten

RUNS: Final = "runs"
SEARCHES: Final = "searches"
FOLDERS: Final = (RUNS, SEARCHES)
"""Folders of a home below which its runs are."""
COLUMNS: Final = (
    (METRICS["throughput/output_tok_s"], METRICS["serve/output_tok_s"]),
    (METRICS["latency/tpot_ms"], METRICS["serve/tpot_ms"]),
    (METRICS["latency/ttft_ms"], METRICS["serve/ttft_ms"]),
    (METRICS["memory/gpu_peak_gib"],),
)
"""Metrics of a column; of several the first that a run has."""
_BEFORE: Final = ("run", "started", "model", "offload", "budget (GiB)", "card", "status")


@dataclass(kw_only=True)
class _Sweep:
    """What is counted of a folder with several runs."""

    num_runs: int = 0
    num_ok: int = 0
    first: str = ""
    models: set[str] = field(default_factory=set)
    keys: dict[str, None] = field(default_factory=dict)
    """What its points are named by."""


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """What a table of runs says of one."""

    cells: tuple[str, ...]
    """Name, start, model, offload, budget, card, status, and the metrics of COLUMNS."""
    kind: Kind
    run_id: str
    """Empty where there is no record."""
    state: str
    """The status, and whether figures are valid; empty where there is no record."""
    started: str
    """ISO 8601; empty where there is no record."""
    is_read: bool
    """Whether it has a record that can be read."""


def write_index(home: Path) -> Path:
    """Write HOME/index.html, the page of every run of a home; return its path.

    Records are read, reports are linked where they exist and never drawn: a thousand runs take a
    few seconds. Links are relative, so that the page works from a file and in a copy of the home.

    Raises:
        RecordError: there is no such folder.
        OSError: the page cannot be written.
    """
    if not home.is_dir():
        raise RecordError(
            f"{home}: expected a folder that holds {RUNS}, got none. Give the folder that "
            "TIGHTFIT_HOME names, or make a run first."
        )
    target = home / INDEX_NAME
    write_text_atomic(target, render(index_page(home), "html"))
    return target


def index_page(home: Path) -> Page:
    """Return the page of every run of a home, newest first.

    A run that later sweeps took over has one row, of the folder where it was measured.
    """
    points = (point for name in FOLDERS for point in each_point(home / name))
    rows, sweeps = dict[str, tuple[Path, RunRow]](), dict[Path, _Sweep]()
    for point in points:
        row = run_row(point)
        parent = point.folder.parent
        if _name(parent, home):
            _count(sweeps.setdefault(parent, _Sweep()), point)
        key = row.run_id or str(point.folder)
        if key not in rows or point.folder < rows[key][0]:
            rows[key] = (point.folder, row)
    found = []
    for folder, row in sorted(rows.values(), key=lambda item: item[1].started, reverse=True):
        cells = (*row.cells, _name(folder.parent, home))
        found.append((row.started, cells, row.kind, _address(folder, home)))
    counts = Counter(row.state or "without a readable record" for _, row in rows.values())
    sections = [_sweeps_section(sweeps, home)] if sweeps else []
    if found:
        sections.append(_runs_section(found))
    text = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    return Page(
        title="Runs",
        subtitle=text or f"No run yet below {home / RUNS}.",
        details=str(home.resolve()),
        sections=tuple(sections),
        is_filtered=bool(found),
    )


def _runs_section(found: list[tuple[str, tuple[str, ...], Kind, str]]) -> Section:
    first = len(_BEFORE)
    headings = tuple(metrics[0].heading for metrics in COLUMNS)
    table = Table(
        columns=(*_BEFORE, *headings, "sweep"),
        rows=[line for _, line, _, _ in found],
        numeric=frozenset({4, *range(first, first + len(COLUMNS))}),
        links={place: address for place, (_, _, _, address) in enumerate(found)},
        kinds={place: kind for place, (_, _, kind, _) in enumerate(found) if kind != "good"},
    )
    return Section(title="All runs", tables=(table,))


def _sweeps_section(sweeps: Mapping[Path, _Sweep], home: Path) -> Section:
    order = sorted(sweeps.items(), key=lambda item: item[1].first, reverse=True)
    table = Table(
        columns=("sweep", "of", "first run", "model", "runs", "ok"),
        rows=[
            (
                _name(folder, home),
                " x ".join(one.keys),
                _moment(one.first),
                ", ".join(sorted(one.models)),
                str(one.num_runs),
                str(one.num_ok),
            )
            for folder, one in order
        ],
        numeric=frozenset({4, 5}),
        links={place: _sweep_address(folder, home) for place, (folder, _) in enumerate(order)},
    )
    return Section(title="Sweeps and searches", tables=(table,))


def run_row(point: Point) -> RunRow:
    """Return the row of a run."""
    record = point.record
    if record is None:
        problem = (point.problem or "").removeprefix(f"{point.folder / RESULT_NAME}: ")
        values = [ABSENT] * len(COLUMNS)
        cells = (point.folder.name, *[""] * 5, shorten(problem, 80), *values)
        return RunRow(cells=cells, kind="bad", run_id="", state="", started="", is_read=False)
    asked_gib = facts.dig_number(record.config, "gpu.memory_gib")
    planned = facts.dig_number(record.plan, "gpu.budget_bytes")
    budget_gib = planned / GIB if asked_gib is None and planned is not None else asked_gib
    before = (
        record.name,
        _moment(record.started_at or ""),
        facts.model_name(record) or "",
        _how(record),
        number(budget_gib),
        "CPU emulation" if facts.is_emulated(record) else facts.gpu_name(record) or "",
        noted_state(record),
    )
    values = [_value(metrics, record.metrics) for metrics in COLUMNS]
    return RunRow(
        cells=(*before, *values),
        kind=status_kind(record),
        run_id=record.run_id,
        state=state(record),
        started=record.started_at or "",
        is_read=True,
    )


def _how(record: RunRecord) -> str:
    """Return the offload, of a peer behind its name."""
    system = facts.system_name(record)
    return " ".join(
        filter(None, ("" if system == "native" else system, facts.offload_name(record)))
    )


def _value(metrics: tuple[Metric, ...], run: Metrics) -> str:
    """Return the first of the metrics that a run has: its median, else its mean."""
    for metric in (shared(metric, [run]) for metric in metrics):
        if run.get(metric.name) is not None:
            return metric_number(metric.name, run[metric.name])
    return ABSENT


def _count(sweep: _Sweep, point: Point) -> None:
    sweep.num_runs += 1
    if point.record is None:
        return
    sweep.num_ok += point.record.status == "ok"
    sweep.keys |= dict.fromkeys(re.findall(r"(?:^|,)([\w.]+)=", point.record.name))
    sweep.models |= {name for name in [facts.model_name(point.record)] if name}
    started = point.record.started_at or ""
    sweep.first = min(filter(None, (sweep.first, started)), default="")


def _moment(started_at: str) -> str:
    """Return `2026-11-29 10:14` of an ISO 8601 time."""
    return started_at[:16].replace("T", " ")


def _address(folder: Path, home: Path) -> str:
    """Return the relative address of a run's report, of its folder where it has none."""
    report = folder / REPORT_NAME
    return _relative(report if report.is_file() else folder, home)


def _sweep_address(folder: Path, home: Path) -> str:
    report = folder / SWEEP_NAME
    return _relative(report if report.is_file() else folder, home)


def _name(folder: Path, home: Path) -> str:
    """Return the name of a sweep or a search; empty for a folder that holds them."""
    return "/".join(folder.relative_to(home).parts[1:])


def _relative(path: Path, home: Path) -> str:
    return quote(os.path.relpath(path, home))
