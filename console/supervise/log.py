"""The log of a service: its last lines in memory, all of them in files of bounded size."""

import json
import logging
import threading
from collections import deque
from collections.abc import Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

from server.lifecycle import ERROR

MOST_LINES: Final = 2000
"""In memory."""
MOST_CHARACTERS: Final = 8192
"""Of a line; the rest of a longer one is another line."""
FILE_BYTES: Final = 4 * 2**20
NUM_FILES: Final = 3
"""Older files that are kept beside the one that is written."""
TAIL: Final = 20
"""Lines that a failure shows."""
LEVELS: Final = {
    "error": ("error", "critical", "traceback", "fatal"),
    "warning": ("warn",),
    "debug": ("debug",),
}
"""Level -> words that name it in a line of a log."""


class Log:
    """The lines of one service, whichever process wrote them; shared by threads.

    Args:
        path: of the file that is written.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lines = deque(_last_lines(path), maxlen=MOST_LINES)
        self._num_seen = len(self._lines)
        self._file = _File(path, maxBytes=FILE_BYTES, backupCount=NUM_FILES, encoding="utf-8")

    def add(self, line: str) -> None:
        """Take in a line."""
        with self._lock:
            self._lines.append(line)
            self._num_seen += 1
            self._file.emit(logging.makeLogRecord({"msg": line}))

    def after(self, place: int | None) -> tuple[list[str], int]:
        """Return the lines behind a place, and the place behind them.

        Args:
            place: as an earlier call returned it; None: all that are in memory. Of lines that are
                no more in memory, none is returned.
        """
        with self._lock:
            first = self._num_seen - len(self._lines)
            skipped = 0 if place is None or place > self._num_seen else max(0, place - first)
            return list(self._lines)[skipped:], self._num_seen

    def place(self) -> int:
        """Return the place behind the last line."""
        with self._lock:
            return self._num_seen

    def tail(self, since: int = 0) -> list[str]:
        """Return the last lines, but none from before a place."""
        lines, _ = self.after(since)
        return lines[-TAIL:]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _File(RotatingFileHandler):
    """A file that is written as far as the disk has room."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        """Leave the line out: the lines in memory are there still."""


def level_of(line: str) -> str:
    """Return the level that a line of a log names near its begin; most name none: info."""
    head = line[:80].lower()
    for level, words in LEVELS.items():
        if any(word in head for word in words):
            return level
    return "info"


def last_words(lines: Sequence[str]) -> str | None:
    """Return the last error that a server told, else its last line; not its access log."""
    said = [line for line in lines if line.strip() and not _is_json(line)]
    begins = [place for place, line in enumerate(said) if line.startswith(ERROR)]
    if begins:
        return "\n".join(said[begins[-1] :]).removeprefix(ERROR)
    return said[-1] if said else None


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _last_lines(path: Path) -> list[str]:
    """Return the last lines of a file; none where there is no file."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - MOST_LINES * 100))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = text.splitlines()
    return lines[1:] if len(text) < size else lines
