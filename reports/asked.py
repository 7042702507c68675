"""What was asked for beside what was really used, and requests that failed, as sections."""

from collections import Counter
from collections.abc import Mapping
from typing import Final

from reports import facts
from reports.page import Section, Table
from reports.record.record import RunRecord
from reports.record.text import gib, leaf, number

MOST_ERRORS: Final = 10


def asked_section(record: RunRecord) -> Section | None:
    """Return the section, None for a record without a configuration."""
    if not record.config:
        return None
    rows = [
        (name, asked or "", used or "")
        for name, asked, used in (
            ("system", facts.system_name(record), _system_used(record)),
            ("model", facts.model_name(record), None),
            ("weights", _asked(record, "model.load_format"), _text(record, "load_format")),
            ("dtype", _asked(record, "engine.dtype"), _text(record, "dtype")),
            ("device", _asked(record, "gpu.name"), _text(record, "device")),
            ("GPU memory", *_memory(record)),
            ("offload", facts.offload_name(record), _placed(record)),
            ("longest sequence", _length_asked(record), _longest(record)),
            ("sequences at once", _asked(record, "engine.max_num_seqs"), _peak(record)),
            ("attention", None, _text(record, "attention")),
            ("tokens compared", _asked(record, "scenario.correctness.enabled"), _checked(record)),
        )
        if asked or used
    ]
    table = Table(columns=("", "asked", "used"), rows=rows)
    return Section(title="Asked and used", tables=(table,))


def failed_section(record: RunRecord) -> Section | None:
    """Return the errors of requests with their numbers, None where none failed."""
    rows = []
    for part in ("latency", "throughput", "serve"):
        found = record.samples.get(part)
        rows_of = facts.rows(record, part) if isinstance(found, list) else _requests(found)
        counts = Counter(str(row["error"]) for row in rows_of if row.get("error") is not None)
        total = len(rows_of)
        for text, num in counts.most_common(MOST_ERRORS):
            rows.append((part, f"{num} of {total}", text))
        hidden = len(counts) - MOST_ERRORS
        if hidden > 0:
            rows.append((part, "", f"and {hidden} other errors"))
    if not rows:
        return None
    table = Table(
        columns=("part", "requests", "error"),
        rows=rows,
        numeric=frozenset({1}),
        wide=frozenset({2}),
        kinds=dict.fromkeys(range(len(rows)), "bad"),
    )
    return Section(title="Failed requests", tables=(table,))


def _requests(samples: object) -> list[Mapping[str, object]]:
    found = facts.dig(samples, "requests")
    return [row for row in found if isinstance(row, Mapping)] if isinstance(found, list) else []


def _asked(record: RunRecord, path: str) -> str | None:
    value = facts.dig(record.config, path)
    return None if value is None else leaf(value)


def _text(record: RunRecord, key: str) -> str | None:
    value = record.effective.get(key)
    return None if value is None else leaf(value)


def _system_used(record: RunRecord) -> str | None:
    if facts.system_name(record) == "native":
        sha = facts.dig_text(record.environment, "git.sha")
        return f"this project at {sha[:12]}" if sha else "this project"
    parts = [_text(record, "system_version"), _text(record, "base_url")]
    return ", ".join(part for part in parts if part) or None


def _memory(record: RunRecord) -> tuple[str | None, str | None]:
    asked_gib = facts.dig_number(record.config, "gpu.memory_gib")
    share = facts.dig_number(record.config, "engine.gpu_memory_utilization")
    asked = "the whole card" if asked_gib is None else f"{number(asked_gib)} GiB"
    asked += f", of it {share:.0%}" if share is not None else ""
    peak = record.metrics.get("memory/gpu_peak_gib")
    return asked, None if peak is None else f"peak {number(peak)} GiB"


def _placed(record: RunRecord) -> str | None:
    sizes = facts.numbers(record.effective.get("placement_bytes"))
    parts = [f"{gib(size)} {name.replace('_', ' ')}" for name, size in sizes.items() if size]
    host = facts.dig_number(record.effective, "host_pinned_bytes")
    if not parts and host:
        parts = [f"{gib(host)} in host memory"]
    return ", ".join(parts) or None


def _length_asked(record: RunRecord) -> str:
    found = facts.dig_number(record.config, "engine.max_model_len")
    return "the model's own limit" if found is None else f"{found:,.0f} tokens"


def _longest(record: RunRecord) -> str | None:
    found = facts.dig_number(record.effective, "max_model_len")
    return None if found is None else f"{found:,.0f} tokens"


def _peak(record: RunRecord) -> str | None:
    stats = record.effective.get("stats")
    for key in ("peak_running", "largest_batch"):
        found = facts.dig_number(stats, key)
        if found is not None:
            return f"{found:,.0f} at most"
    return None


def _checked(record: RunRecord) -> str | None:
    found = record.effective.get("correctness")
    if not isinstance(found, Mapping):
        return None
    if found.get("checked") is not True:
        return "not compared"
    share = record.metrics.get("correctness/equal_share")
    tokens = facts.dig_number(found, "num_tokens")
    count = "" if tokens is None else f"{tokens:,.0f} tokens: "
    return count + ("equal" if share in {None, 1.0} else f"{100 * (share or 0.0):.0f} % equal")
