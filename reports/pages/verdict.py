"""Words for how a run ended: its status, its error, whether it counts, and what to change."""

import re
import textwrap
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from reports import facts
from reports.pages.page import Kind, Verdict
from reports.record.judging import impossible_rate
from reports.record.record import MEASURED, RunRecord
from reports.record.text import gib, leaf, number

STATUS_TEXT: Final = MappingProxyType(
    {
        "ok": "the run ended and was measured",
        "partial": "some parts were measured, others could not be",
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
    lines = [*_error_lines(record), *reasons(record), *_notes(record)]
    error = record.error or {}
    traceback = error.get("traceback")
    return Verdict(
        kind=status_kind(record),
        answer=answer(record),
        label=_label(record),
        lines=tuple(lines),
        rest=_error_rest(record),
        advice=tuple(_advice(record)),
        traceback=leaf(traceback) if traceback else None,
    )


def answer(record: RunRecord) -> str:
    """Return what was found out, in one line: the main rates, else why there are none."""
    if record.status == "no_fit":
        over = facts.over_budget_bytes(record.plan)
        return f"Does not fit: {gib(over)} of GPU memory short" if over > 0 else "Does not fit"
    rates = _rates(record) if record.status in MEASURED else []
    unneeded = _unneeded(record)
    if (record.error or {}).get("type") == "Interrupted":
        return "Interrupted before it ended"
    if not rates:
        text = STATUS_TEXT[record.status]
        return text[0].upper() + text[1:]
    found = ", ".join(rates)
    return f"{found}; {unneeded} was not needed" if unneeded else found


def _rates(record: RunRecord) -> list[str]:
    """Return the main figures in words."""
    values = record.metrics
    found = []
    for name, words in (
        ("throughput/output_tok_s", "with all requests at once"),
        ("serve/output_tok_s", "served"),
    ):
        if values.get(name) is not None:
            found.append(f"{number(values[name])} tok/s {words}")
    for name, word in (("p50", "median"), ("mean", "mean")):
        tpot_ms, ttft_ms = (values.get(f"latency/{key}/{name}") for key in ("tpot_ms", "ttft_ms"))
        if tpot_ms:
            found.append(f"{number(1000 / tpot_ms)} tok/s of one request alone ({word})")
        if ttft_ms is not None:
            found.append(f"first token after {number(ttft_ms)} ms")
        if tpot_ms or ttft_ms is not None:
            break
    peak = values.get("serve/peak_requests_s")
    if peak is not None:
        found.append(f"the SLO holds up to {number(peak)} requests/s")
    return found


def _unneeded(record: RunRecord) -> str:
    """Return the offload that the planner found needless, empty where it found none."""
    for text in map(str, _listed(record, "warnings")):
        found = re.match(r"offload=(\w+) is not needed:", text)
        if found:
            return found[1]
    return ""


def status_kind(record: RunRecord) -> Kind:
    """Return how a status is marked: good, warn (not valid, a warning, partial, skipped) or bad."""
    if record.status == "ok":
        is_plain = judged(record) is not False and num_warnings(record) == 0
        return "good" if is_plain else "warn"
    return "warn" if record.status in {"partial", "skipped"} else "bad"


def num_warnings(record: RunRecord) -> int:
    """Return how many warnings and fallbacks a record names.

    Fallbacks of an emulation do not count: it always has some, and the banner says what it is.
    """
    keys = ("warnings",) if facts.is_emulated(record) else ("warnings", "fallbacks")
    return sum(len(_listed(record, key)) for key in keys)


def _listed(record: RunRecord, key: str) -> list[object]:
    found = record.effective.get(key)
    return found if isinstance(found, list) else []


def reasons(record: RunRecord) -> list[str]:
    """Return why a run's figures are not to be used, by itself and by what no link can carry."""
    return list(filter(None, [*record.reasons, impossible_rate(record)]))


def judged(record: RunRecord) -> bool | None:
    """Return whether figures may be used: as recorded, and never where they cannot be."""
    return False if impossible_rate(record) else record.valid


def validity(valid: bool | None) -> str:
    """Return `valid`, `not valid` or `not judged`."""
    return {True: "valid", False: "not valid", None: "not judged"}[valid]


def state(record: RunRecord) -> str:
    """Return the status, of a run with figures also whether it is valid."""
    has_figures = record.status in MEASURED
    return f"{record.status}, {validity(judged(record))}" if has_figures else record.status


def noted_state(record: RunRecord) -> str:
    """Return the same with the number of warnings, which mark its row."""
    count = num_warnings(record) if record.status == "ok" else 0
    return f"{state(record)}, {count} warning{'s'[: count != 1]}" if count else state(record)


def error_line(record: RunRecord) -> str:
    """Return the first line of the error, empty where there is none."""
    if record.error is None:
        return ""
    first, _ = _message(record.error)
    return " ".join(f"{record.error.get('type')}: {first}".split())


def _error_rest(record: RunRecord) -> str:
    """Return what the error says behind its first line: rows of settings that fit, as columns."""
    return "" if record.error is None else _message(record.error)[1]


def _message(error: Mapping[str, Any]) -> tuple[str, str]:
    first, _, rest = str(error.get("message") or "").strip().partition("\n")
    return first, textwrap.dedent(rest)


def _label(record: RunRecord) -> str:
    count = num_warnings(record)
    more = f", with {count} warning{'s' if count > 1 else ''}" if count else ""
    text = STATUS_TEXT[record.status]
    is_said = answer(record).lower() == text
    return f"{state(record)}{'' if is_said else f': {text}'}{more}"


def _error_lines(record: RunRecord) -> list[str]:
    if record.error is None:
        return []
    phase = record.error.get("phase")
    return [*_parts(record), error_line(record)] + ([f"Phase: {leaf(phase)}"] if phase else [])


def _parts(record: RunRecord) -> list[str]:
    """Return which parts of a partial run have figures, and which have none."""
    error = record.error or {}
    found = [
        f"{title}: {', '.join(map(str, names))}."
        for title, key in (("Measured", "measured"), ("Not measured", "missing"))
        if isinstance(names := error.get(key), list) and names
    ]
    return [" ".join(found)] if found else []


def _notes(record: RunRecord) -> list[str]:
    notes = []
    for key, word in (("fallbacks", "Fallback"), ("warnings", "Warning"), ("notes", "Note")):
        notes += [_named(word, leaf(item)) for item in _listed(record, key)]
    return notes


def _named(word: str, text: str) -> str:
    """Return a text behind its word, unless it begins with that itself."""
    bare = text.removeprefix(f"{word.lower()}: ")
    return f"{word}: {bare}"


def _advice(record: RunRecord) -> list[str]:
    """Return what to change, where the error itself does not say so, as that of a refusal does."""
    error = record.error or {}
    is_refusal = record.status == "failed" and not error.get("traceback")
    if error.get("type") == "HostOutOfMemory" or is_refusal:
        return []
    text = {
        "oom": "GPU: lower engine.max_num_seqs, engine.max_num_batched_tokens or"
        " engine.gpu_memory_utilization"
        f" (now {_now(record, 'engine.gpu_memory_utilization')}),"
        " or move more weights off the GPU.",
        "timeout": f"Raise timeout_s (now {_now(record, 'timeout_s')}),"
        " or choose a scenario with fewer requests.",
        "killed": "Run the point again; the records of other points are kept.",
        "failed": "The traceback is below; worker.log is in the run's folder.",
    }.get(str(error.get("status") or record.status))
    if error.get("type") == "MemoryError":
        text = "Host: give the process more memory, or use less."
    return [] if text is None else [text]


def _now(record: RunRecord, path: str) -> str:
    value = facts.dig(record.config, path)
    return "not recorded" if value is None else leaf(value)
