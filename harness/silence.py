"""Notices a worker that says nothing any more."""

import time
from pathlib import Path


class Silence:
    """Whether a file was not written for too long.

    A worker writes state.json at every phase, twice a second while tokens come, and while bytes
    load; so one that does not, does nothing.

    Args:
        path: what the worker writes; it need not exist yet.
        limit_s: seconds without a write; None: any.
    """

    def __init__(self, path: Path, limit_s: float | None) -> None:
        self._path, self._limit_s = path, limit_s
        self._seen: int | None = None
        self._since_s = time.monotonic()

    def is_over(self) -> bool:
        """Return whether the limit has passed since the last write, or since the beginning."""
        if self._limit_s is None:
            return False
        try:
            written = self._path.stat().st_mtime_ns
        except OSError:
            written = None
        now_s = time.monotonic()
        if written != self._seen:
            self._seen, self._since_s = written, now_s
        return now_s - self._since_s >= self._limit_s
