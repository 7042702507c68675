"""A server of one's own: started on a free port, ready when it says so, ended with who needs it."""

import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

from catalogue.processes import module_command, python_path

_LAST_LINES: Final = 5


class OwnServer:
    """The process of a server.

    Args:
        arguments: of `python -m server`; the address is in what it writes to stderr.
        is_apart: it has a session of its own, which Ctrl-C does not reach.
    """

    def __init__(self, arguments: Sequence[str], *, is_apart: bool = False) -> None:
        self._process = subprocess.Popen(
            [*module_command("server"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=is_apart,
            env={**os.environ, "PYTHONPATH": python_path(os.environ.get("PYTHONPATH", ""))},
        )
        self._reader: threading.Thread | None = None
        self.last_lines = deque[str](maxlen=_LAST_LINES)
        """What it wrote last, until it was ready."""

    def wait_ready(self) -> str | None:
        """Return its address once it serves; None: it ended instead."""
        stream, url = self._process.stderr, ""
        assert stream is not None
        for line in stream:
            self.last_lines.append(line.rstrip())
            if line.startswith("listening on "):
                url = line.split()[2].rstrip(",")
            if line.startswith("ready: "):
                # What it writes later is read and dropped, so that it never waits for a reader.
                self._reader = threading.Thread(target=deque, args=(stream, 0), daemon=True)
                self._reader.start()
                return url
        return None

    def end(self, seconds: float) -> None:
        """End it, by force where it does not end by itself within so many seconds."""
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._process.kill()
        self._process.wait()
        if self._reader is not None:
            # Its engine holds the other end of stderr; one that is stopped would keep it open.
            self._reader.join(seconds)
        if self._reader is None or not self._reader.is_alive():
            assert self._process.stderr is not None
            self._process.stderr.close()
