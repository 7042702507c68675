"""Each request that ended, appended to requests.jsonl while a run lasts; Parquet at its end."""

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from harness.observe.spool import Background, replace_spool
from harness.work.times import RequestTimes, ServedRequest
from reports.record.rows import REQUEST_COLUMNS, REQUESTS_PARQUET, REQUESTS_SPOOL, request_rows

INTERVAL_S: Final = 0.5
_BATCH_ROWS: Final = 1000


class RequestLog:
    """Appends requests twice a second at most, on a thread of its own.

    A write that failed raises its OSError from a later call.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / REQUESTS_SPOOL
        self._ended: list[tuple[str, int, RequestTimes]] = []
        self._due_s = 0.0
        self._writer = Background("requests")

    def of(self, part: str, repeat: int) -> Callable[[RequestTimes], None]:
        """Return what notes requests of one measurement when they have ended."""

        def note(request: RequestTimes) -> None:
            self._ended.append((part, repeat, request))
            if time.monotonic() >= self._due_s:
                self._hand_over()

        return note

    def flush(self) -> None:
        """Return when every request that ended is in the file."""
        self._hand_over()
        self._writer.wait()

    def close(self) -> None:
        """Flush; nothing can be noted afterwards."""
        self._hand_over()
        self._writer.close()

    def _hand_over(self) -> None:
        self._due_s = time.monotonic() + INTERVAL_S
        if self._ended:
            ended, self._ended = self._ended, []
            self._writer.submit(self._put, ended)

    def _put(self, ended: Sequence[tuple[str, int, RequestTimes]]) -> None:
        lines = [json.dumps(_row(*item), allow_nan=False) + "\n" for item in ended]
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))


def _row(part: str, repeat: int, request: RequestTimes) -> dict[str, Any]:
    """Return a request as a row; what does not apply is null."""
    arrival_s = request.submit_s
    row = {
        "part": part,
        "repeat": repeat,
        "request_id": request.request_id,
        "num_prompt_tokens": request.num_prompt_tokens,
        "arrival_s": arrival_s if math.isfinite(arrival_s) else None,
        "finish_reason": request.finish_reason,
        "error": request.error,
        "token_times_s": request.token_times_s,
        "is_cancelled": request.is_cancelled,
    }
    if isinstance(request, ServedRequest):
        for name in ("sent_s", "is_ramp_up"):
            row[name] = getattr(request, name)
    return row


def write_parquet(run_dir: Path) -> str | None:
    """Turn the spool of a run into `requests.parquet` and remove it; return a warning if not.

    A run that timed no request has neither. The file appears in one rename; the spool stays until
    then, and where pyarrow is missing.
    """
    spool, target = run_dir / REQUESTS_SPOOL, run_dir / REQUESTS_PARQUET
    if not spool.is_file():
        return None
    kinds = {name: kind for name, (kind, _) in REQUEST_COLUMNS.items()}
    lack = replace_spool(spool, target, request_rows(spool), kinds, _BATCH_ROWS)
    return None if lack is None else f"requests: {lack}"
