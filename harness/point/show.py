"""What the user reads at the end of a point: figures, status, files, and how to look at them."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from catalogue.processes import module_command, python_path
from catalogue.terminal import columns
from engine.lines import indented, labelled, wrapped
from engine.sealed import GIB
from harness.config.command import command_with
from harness.config.schema import SweepContext
from reports.record.judging import predicts_another_card
from reports.record.metrics import (
    PREDICTED,
    found,
    interval,
    metric_parts,
    metric_text,
    shown,
)
from reports.record.record import MEASURED, RunRecord
from reports.record.text import duration, number

_COLUMNS: Final = ("KV cache", "blocks", "tokens", "GiB")


def weight_lines(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield what format the weights of a plan have, where one was asked for."""
    if plan.get("quantize"):
        yield f"  weights: {plan['quantize']}"
    found = plan.get("weight_format")
    if not found:
        return
    stored = sum(each["bytes"] for each in found["formats"].values()) / GIB
    share = f"{stored:.2f} GiB, {found['ratio']:.3f} of plain"
    yield from indented([f"weights: {found['chosen']} ({share}; {found['why']})"])


def capacity_lines(kv: Mapping[str, Any]) -> list[str]:
    """Return the table as lines of text."""
    length = kv["max_model_len"]
    found = f"longest sequence: {kv['longest_tokens']:,} tokens (max_model_len {length:,})"
    found += f"; {kv['max_concurrency']:.1f} sequences of {length:,} tokens run at once"
    if kv["host"] is not None:
        found += f", {kv['max_kept']:.1f} are kept"
    return [*columns([_COLUMNS, *_rows(kv)]), *indented([found])]


def _rows(kv: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    groups, host = kv["groups"], kv["host"]
    for index, group in enumerate(groups):
        name = _group_name(groups, index)
        yield _row(f"GPU{name}", group["num_blocks"], group, kv)
        if host is None:
            continue
        pinned, pageable = host["num_pinned"][index], host["num_pageable"][index]
        how = ", used in place" if index == 0 and host["num_in_place"] else ""
        if pinned:
            yield _row(f"host, pinned{how}{name}", pinned, group, kv)
        if pageable:
            yield _row(f"host, pageable{name}", pageable, group, kv)


def _group_name(groups: Sequence[Mapping[str, Any]], index: int) -> str:
    """Which layers, where they are of several kinds."""
    if len(groups) == 1:
        return ""
    group = groups[index]
    kind = "all tokens" if group["window"] is None else f"window of {group['window']}"
    return f" ({group['layers']} layers, {kind})"


def _row(
    name: str, blocks: int, group: Mapping[str, Any], kv: Mapping[str, Any]
) -> tuple[str, str, str, str]:
    size = blocks * group["block_bytes"] / GIB
    gib = f"{size:.2f}" if size >= 0.1 else f"{size:.2g}"
    return name, f"{blocks:,}", f"{blocks * kv['block_size']:,}", gib


REPORT_TIMEOUT_S: Final = 180


def build_report(folder: Path) -> list[str]:
    """Make the report of a run's or a sweep's folder; return warnings, one at most.

    The record is complete without it: a machine without the drawing packages, or a report that
    fails, costs no run.
    """
    again = f"`tightfit open {shlex.quote(str(folder))}`"
    try:
        done = subprocess.run(
            [*module_command("reports"), str(folder)],
            env={**os.environ, "PYTHONPATH": python_path(os.environ.get("PYTHONPATH", ""))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # of a path that the locale spells otherwise
            timeout=REPORT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"report: not made: {error}. Later: {again}"]
    if done.returncode == 0:
        return []
    lines = done.stderr.strip().splitlines()
    reason = lines[-1].rstrip(".") if lines else f"it ended with code {done.returncode}"
    return [f"report: not made: {reason}. Later: {again}"]


_MAX_REASONS: Final = 8
_LINE_FIGURES: Final = 4
"""Figures in the line of a point of a sweep."""
_FOR_THE_CARD: Final = " (for the card)"
"""Behind a time that was predicted for a card, where a CPU ran: their difference says nothing."""


def print_summary(
    record: RunRecord, run_dir: Path, *, view_command: str | None, sweep: SweepContext | None = None
) -> None:
    """Write how one point ended to standard output: its summary, of a point of a sweep one line."""
    lines = summary_lines(record, run_dir, view_command=view_command)
    if sweep is not None:
        lines = [point_line(record, sweep)]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def summary_lines(record: RunRecord, run_dir: Path, *, view_command: str | None) -> list[str]:
    """Return the summary as lines of text."""
    lines = ["", f"{record.name}: {record.status}{verdict_text(record)}"]
    if record.metrics and record.environment.get("emulated") is True:
        lines.append("  emulated on the CPU: these are not a GPU's figures")
    if record.error is not None:
        lines += _error_lines(record)
    lines += indented(record.reasons[:_MAX_REASONS])
    lines += _table(record)
    lines += list(_planned(record))
    effective = record.effective
    lines += indented(effective.get("fallbacks") or [])
    lines += indented(f"warning: {text}" for text in effective.get("warnings") or [])
    lines += indented(f"note: {text}" for text in effective.get("notes") or [])
    lines.append(f"  run folder  {run_dir}")
    report = run_dir / "report.html"
    if report.is_file():
        lines.append(f"  report      {report}")
    if view_command:
        lines.append(f"  compare     {view_command}")
    return lines


def point_title(sweep: SweepContext, name: str) -> str:
    """Return which point of a sweep it is: its number from 1, of how many, and what varies."""
    number = sweep.index + 1 if sweep.number is None else sweep.number
    return f"point {number} of {sweep.total} {name}"


def point_line(record: RunRecord, sweep: SweepContext) -> str:
    """Return how a point of a sweep ended, in one line: its main figures, or its error."""
    parts = [f"{point_title(sweep, record.name)}: {status_text(record)}"]
    parts += [
        f"{metric.label} {metric_text(metric.name, record.metrics[metric.name])}"
        for metric in found("sweep", [record.metrics])[:_LINE_FIGURES]
    ]
    if record.duration_s is not None:
        parts.append(f"took {duration(record.duration_s)}")
    parts += [line for line in _first_lines(record)[:1] if line]
    parts += record.reasons[:1]
    return ", ".join(parts)


def status_text(record: RunRecord) -> str:
    """Return the status and, where it was judged, whether the figures count."""
    is_bad = record.status in MEASURED and record.valid is False
    return f"{record.status}, not valid" if is_bad else record.status


def verdict_text(record: RunRecord) -> str:
    """Return what stands behind the status of a run: whether it is valid."""
    if record.status not in MEASURED:
        return ""
    return {True: ", valid", False: ", NOT valid", None: ", not checked"}[record.valid]


def _error_lines(record: RunRecord) -> list[str]:
    """Return the error; of a plan that does not fit all that it says, and what to run instead."""
    assert record.error is not None
    if record.status != "no_fit":
        return indented(f"{record.error['type']}: {line}" for line in _first_lines(record))
    first, *rows = str(record.error["message"]).splitlines() or [""]
    lines = [*wrapped(f"  {first}", indent="  "), *(f"  {row}" for row in rows)]
    ways = (record.plan or {}).get("ways") or []
    if ways:
        folder = record.effective.get("config_dir")
        command = command_with(record.overrides, ways[0]["settings"], folder)
        lines += [f"  {line}" for line in labelled("Run it", command, " \\")]
    return lines


def _first_lines(record: RunRecord) -> list[str]:
    message = str((record.error or {}).get("message", ""))
    return [line for line in message.splitlines() if line.strip()][:3] or [""]


def _planned(record: RunRecord) -> Iterable[str]:
    """What the plan predicted, and what the planner chose."""
    plan = record.plan or {}
    predicted, choice = plan.get("predicted"), plan.get("choice")
    kv = plan.get("kv") or {}
    if record.status in MEASURED and "longest_tokens" in kv:
        yield from capacity_lines(kv)
    elif record.status in MEASURED and kv.get("max_concurrency"):
        yield (
            f"  KV cache: {kv['tokens']} tokens, {kv['max_concurrency']:.1f} sequences of "
            f"{kv['max_model_len']} at once"
        )
    yield from weight_lines(plan)
    if choice:
        yield from indented([f"chosen: {choice['chosen']} ({choice['why']})"])
        yield from _refereed(choice.get("referee"))
    if predicted:
        text = (
            f"predicted: {number(predicted['decode_step_ms'])} ms a token at batch 1, prefill of "
            f"{predicted['prefill_tokens']} tokens {number(predicted['prefill_ms'])} ms "
            f"({predicted['rates']['source']})"
        )
        yield from indented([text])
    for quantity, base in PREDICTED.items():
        value = record.metrics.get(f"predicted/{quantity}")
        difference = record.metrics.get(f"predicted/{quantity}_difference_pct")
        if value is not None and difference is not None:
            measured, rates_of = value / (1 + difference / 100), _rates_of(record, quantity)
            share = "" if rates_of == _FOR_THE_CARD else f" ({difference:+.1f} %)"
            yield (
                f"  {base}: predicted{rates_of} {number(value)}, measured {number(measured)}{share}"
            )


def _rates_of(record: RunRecord, quantity: str) -> str:
    """Return what to say where a predicted time is not of rates of the machine that ran."""
    predicted = (record.plan or {}).get("predicted")
    source = "" if predicted is None else str(predicted["rates"]["source"])
    if quantity == "gpu_peak_gib":
        return ""
    if predicts_another_card(record):
        return _FOR_THE_CARD
    return " (assumed rates)" if "assumed" in source else ""


def _refereed(referee: Mapping[str, Any] | None) -> Iterable[str]:
    """What planner.referee timed."""
    if referee is None:
        return
    for row in referee["timed"]:
        step_ms = row["decode_step_ms"]
        found = "not measured" if step_ms is None else f"measured {number(step_ms)} ms"
        text = (
            f"  timed: {row['label']}, {row['batch']} at once: {found} a step; predicted "
            f"{number(row['predicted_decode_step_ms'])} ms at batch 1"
        )
        yield from indented([text])
    yield from indented([f"  referee: {referee['result']}"])


def _table(record: RunRecord) -> list[str]:
    """Return a line for each metric that has a value, under the label that pages use.

    Its words stand behind, with the interval of a mean over repeats.
    """
    wanted = [
        one
        for metric in shown("summary")
        for one in (metric, *(metric.at(statistic) for statistic in metric.statistics))
        if record.metrics.get(one.name) is not None
    ]
    rows = []
    for metric in wanted:
        value, unit = metric_parts(metric.name, record.metrics[metric.name])
        ends = interval(record.metrics, metric.name)
        more = f"{metric.words} (95 % interval {ends})" if ends else metric.words
        rows.append((metric.label or metric.words, value, unit, more if metric.label else ""))
    return columns(rows, left={0, 2, 3})
