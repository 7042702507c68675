"""What became of a worker: exceptions, exit codes and signals -> status and error of a record."""

import errno
import signal
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from catalogue.checkpoint import ModelUnavailableError
from engine.errors import CapacityError, EngineError
from harness.correctness import WrongTokensError
from harness.full_disk import is_full
from harness.process import Exit
from harness.prompts import PromptError

ErrorFacts = dict[str, Any]
"""Keys type, message, phase, traceback, as in the record."""

CLEAN_ERRORS: Final = (EngineError, ModelUnavailableError, PromptError, WrongTokensError)
"""Their message says it all; no traceback is kept."""
_OOM_TYPES: Final = {"OutOfMemoryError", "MemoryError"}
_OOM_TEXTS: Final = ("out of memory", "can't allocate memory", "cannot allocate memory")
_MESSAGE_CHARS: Final = 4000
_TAIL_LINES: Final = 40


def classify_exception(error: BaseException, phase: str) -> tuple[str, ErrorFacts]:
    """Return status and error of a run that `error` ended in `phase`."""
    status = "failed"
    if isinstance(error, CapacityError):
        status = "no_fit"
    elif _is_out_of_memory(error):
        status = "oom"
    is_clean = isinstance(error, CLEAN_ERRORS) or is_full(error)
    lines = None if is_clean else "".join(traceback.format_exception(error))
    message = str(error) or f"{type(error).__name__} without a message"
    kind = getattr(error, "kind", None)
    facts = {
        "type": kind if isinstance(kind, str) else type(error).__name__,
        "message": message[:_MESSAGE_CHARS],
        "phase": phase,
        "traceback": lines,
    }
    return status, facts


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ in _OOM_TYPES:
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(part in text for part in _OOM_TEXTS)


def classify_exit(
    ended: Exit,
    *,
    job: str,
    state: Mapping[str, Any],
    num_oom_kills: int,
    timeout_s: float | None,
    silence_s: float | None,
    log: Path,
) -> tuple[str, ErrorFacts]:
    """Return status and error of a worker that ended without a result.

    Args:
        ended: how it ended.
        job: what it was for.
        state: its last state.json.
        num_oom_kills: kills that the kernel's out-of-memory counters rose by meanwhile.
        timeout_s: the point's limit.
        silence_s: the limit of a worker that says nothing.
        log: the worker's output.
    """
    phase = str(state.get("phase") or "start")
    where = f"worker {job} in phase {phase}"
    status, kind = "failed", "WorkerExit"
    if ended.is_silent:
        status, kind = "timeout", "Silence"
        message = (
            f"{where}: nothing was done for silence_s={silence_s:g} s, so it was stopped; the "
            f"stacks of its threads are in {log}. Raise silence_s if a step or a pause may take "
            "so long."
        )
    elif ended.timed_out:
        status, kind = "timeout", "Timeout"
        message = (
            f"{where}: the point took longer than timeout_s={timeout_s:g} s and was stopped. Raise "
            "timeout_s, or ask for fewer requests or tokens in scenario."
        )
    elif ended.returncode == -signal.SIGKILL and num_oom_kills > 0:
        status, kind = "oom", "HostOutOfMemory"
        message = (
            f"{where}: killed by the kernel for lack of host memory{_rss(state)}. Offload less, or "
            "raise the memory of this machine or container."
        )
    elif ended.returncode < 0:
        status, kind = "killed", _signal_name(-ended.returncode)
        message = f"{where}: ended by signal {kind}{_rss(state)}. See {log}."
    else:
        message = f"{where}: exit code {ended.returncode} and no result. See {log}."
    return status, {
        "type": kind,
        "message": message,
        "phase": phase,
        "traceback": _tail(log) if status != "oom" else None,
    }


def _rss(state: Mapping[str, Any]) -> str:
    peak = (state.get("memory") or {}).get("rss_peak_bytes")
    if not peak:
        return ""
    return (
        f" (its resident set had reached {peak / 2**30:.2f} GiB when it last told; "
        "memory/host_rss_peak_gib has what telemetry saw)"
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(log: Path) -> str | None:
    """Return the last lines of the worker's output: stacks of a hang or a crash end up there."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    start = max((i for i, line in enumerate(lines) if line.startswith("--- ")), default=-1)
    return "\n".join(lines[start + 1 :][-_TAIL_LINES:]) or None
