"""Words for how a run ended: its status, its error, whether it counts, and what to change."""

import math
from types import MappingProxyType
from typing import Final

from reports import facts
from reports.pages.page import Kind, Verdict
from reports.record.record import RunRecord
from reports.record.text import GIB, gib, leaf

STATUS_TEXT: Final = MappingProxyType(
    {
        "ok": "the run ended and was measured",
        "no_fit": "the plan does not fit, so nothing was loaded",
        "oom": "memory ran out",
        "failed": "the run ended with an error",
        "timeout": "the run took longer than it was allowed",
        "killed": "the worker was ended by a signal",
        "skipped": "the point was not run",
    }
)


def verdict(record: RunRecord) -> Verdict:
    """Return the verdict of one record."""
    lines = [*_error_lines(record), *record.reasons, *_notes(record)]
    error = record.error or {}
    traceback = error.get("traceback")
    return Verdict(
        kind=status_kind(record),
        label=_label(record),
        lines=tuple(lines),
        advice=tuple(_advice(record)),
        traceback=leaf(traceback) if traceback else None,
    )


def status_kind(record: RunRecord) -> Kind:
    """Return how a status is marked: good, warn (not valid, skipped) or bad."""
    if record.status == "ok":
        return "warn" if record.valid is False else "good"
    return "warn" if record.status == "skipped" else "bad"


def validity(valid: bool | None) -> str:
    """Return `valid`, `not valid` or `not judged`."""
    return {True: "valid", False: "not valid", None: "not judged"}[valid]


def state(record: RunRecord) -> str:
    """Return the status, of a run that ended ok with whether it is valid."""
    return f"ok, {validity(record.valid)}" if record.status == "ok" else record.status


def error_line(record: RunRecord) -> str:
    """Return the error as one line, empty where there is none."""
    if record.error is None:
        return ""
    return " ".join(f"{record.error.get('type')}: {record.error.get('message')}".split())


def _label(record: RunRecord) -> str:
    return f"{state(record)}: {STATUS_TEXT[record.status]}"


def _error_lines(record: RunRecord) -> list[str]:
    if record.error is None:
        return []
    phase = record.error.get("phase")
    return [error_line(record)] + ([f"Phase: {leaf(phase)}"] if phase else [])


def _notes(record: RunRecord) -> list[str]:
    notes = []
    for key, word in (("fallbacks", "Fallback"), ("warnings", "Warning"), ("notes", "Note")):
        found = record.effective.get(key)
        notes += [f"{word}: {leaf(item)}" for item in found] if isinstance(found, list) else []
    return notes


def _advice(record: RunRecord) -> list[str]:
    match record.status:
        case "no_fit":
            return _capacity_advice(record)
        case "oom":
            return [
                "GPU: lower engine.max_num_seqs, engine.max_num_batched_tokens or"
                " engine.gpu_memory_utilization"
                f" (now {_now(record, 'engine.gpu_memory_utilization')}),"
                " or move more weights off the GPU.",
                "Host: move fewer bytes off the GPU, or give the process more memory.",
                *_capacity_advice(record),
            ]
        case "timeout":
            return [
                f"Raise timeout_s (now {_now(record, 'timeout_s')}),"
                " or choose a scenario with fewer requests."
            ]
        case "killed":
            return ["Run the point again; the records of other points are kept."]
        case "failed":
            return ["The traceback is below; the worker's log is in the run's folder."]
        case _:
            return []


def _capacity_advice(record: RunRecord) -> list[str]:
    lines = []
    over = facts.over_budget_bytes(record.plan)
    if over > 0:
        parts = facts.items(record.plan, "gpu")
        largest = max(parts, key=lambda name: parts[name], default=None)
        text = f"GPU: the plan is {gib(over)} over its budget."
        if largest is not None:
            text += f" The largest part is {largest.replace('_', ' ')}, {gib(parts[largest])}."
        lines.append(text)
        lines.append(
            f"Move at least {math.ceil(over / GIB)} GiB off the GPU (offload=uva or"
            " offload=prefetch), lower engine.max_model_len, or raise gpu.memory_gib"
            f" (now {_now(record, 'gpu.memory_gib')})."
        )
    host, limit = (
        facts.total_bytes(record.plan, "host"),
        facts.dig_number(record.plan, "host.limit_bytes"),
    )
    if host is not None and limit is not None and host > limit:
        lines.append(
            f"Host: the plan needs {gib(host)}, the limit is {gib(limit)}."
            " Move fewer bytes off the GPU, or lower engine.host_reserve_gib."
        )
    return lines


def _now(record: RunRecord, path: str) -> str:
    value = facts.dig(record.config, path)
    return "not recorded" if value is None else leaf(value)
