"""The worker's side of the live view: state.json (replaced) and samples.jsonl (appended)."""

import json
import os
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from harness.observe.host import process_memory
from harness.point.process import SAMPLES_NAME
from reports.record.record import STATE_NAME

INTERVAL_S: Final = 0.5


class StateWriter:
    """Says what a worker does now.

    Timed loops call `running`, which hands its lines to a thread twice a second: a write from the
    loop itself took 20 to 40 ms between two tokens on the machine where this was first measured.
    A write that failed there (no room, no folder) raises its OSError from a later call, or `close`.
    """

    def __init__(self, run_dir: Path, job: str) -> None:
        self._path = run_dir / STATE_NAME
        self._temporary = run_dir / f".{STATE_NAME}.{os.getpid()}.tmp"
        self._samples = run_dir / SAMPLES_NAME
        self._due_s = 0.0
        self._num_tokens: int | None = None
        self._tokens_before = (0, time.monotonic())
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="state")
        self._pending: deque[Future[None]] = deque()
        self._state: dict[str, Any] = {
            "pid": os.getpid(),
            "job": job,
            "phase": "start",
            "started_at": time.time(),
        }
        self._write()

    @property
    def phase(self) -> str:
        """What the worker does now."""
        return str(self._state["phase"])

    def enter(self, phase: str, num_tokens: int | None = None) -> None:
        """Begin a phase; `num_tokens` of output are expected in it, None: it is not known."""
        self._num_tokens = num_tokens
        self._state |= {"phase": phase, "progress": None}
        self._tokens_before = (0, time.monotonic())
        self._write()
        self._wait()

    def note_budget(self, num_bytes: int | None) -> None:
        """Say how much GPU memory the engine may use; None: it is not known."""
        self._state["gpu_budget_bytes"] = num_bytes
        self._write()

    def note_pinned(self, num_bytes: int | None) -> None:
        """Say what the engine's ledger of registered memory holds; None without an engine."""
        self._state["pinned_bytes"] = num_bytes
        self._write()

    def note_kv(self, kv: Mapping[str, Any] | None) -> None:
        """Say what the engine's KV cache holds, as the plan has it; None: it is not known."""
        self._state["kv"] = kv
        self._write()

    def loading(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        """Report bytes of a phase of the load; the engine's `progress` callback."""
        is_new = self.phase != f"load:{phase}"
        now = time.monotonic()
        if not is_new and now < self._due_s and done_bytes < total_bytes:
            return
        progress = {"done_bytes": done_bytes, "total_bytes": total_bytes}
        self._state |= {"phase": f"load:{phase}", "progress": progress}
        self._write()

    def running(self, num_done: int, num_requests: int, num_tokens: int) -> None:
        """Report requests and output tokens of a scenario."""
        now = time.monotonic()
        if now < self._due_s and num_done < num_requests:
            return
        before, then = self._tokens_before
        rate = (num_tokens - before) / (now - then) if now > then else None
        self._tokens_before = (num_tokens, now)
        progress = {
            "requests_done": num_done,
            "requests_total": num_requests,
            "output_tokens": num_tokens,
            "output_tokens_total": self._num_tokens,
            "tokens_s": rate,
        }
        self._state["progress"] = progress
        self._write(
            {"time": time.time(), "job": self._state["job"], "phase": self.phase, **progress}
        )

    def close(self) -> None:
        """Return when the last report is in its file; nothing can be reported afterwards."""
        self._writer.shutdown()
        self._wait()

    def _write(self, sample: dict[str, Any] | None = None) -> None:
        """Hand the state, and a sample to append, to the writing thread; wait for nothing."""
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()
        self._due_s = time.monotonic() + INTERVAL_S
        self._pending.append(self._writer.submit(self._put, dict(self._state), sample))

    def _wait(self) -> None:
        """Wait until everything is written; raise what a write raised."""
        while self._pending:
            self._pending.popleft().result()

    def _put(self, state: dict[str, Any], sample: dict[str, Any] | None) -> None:
        """Replace state.json in one rename; not flushed to the disk, which would take long."""
        state |= {"updated_at": time.time(), "memory": process_memory()}
        self._temporary.write_text(json.dumps(state), encoding="utf-8")
        self._temporary.replace(self._path)
        if sample is not None:
            with self._samples.open("a", encoding="utf-8") as file:
                file.write(json.dumps(sample) + "\n")
