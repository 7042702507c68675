"""A server as a child of the console: its command, its log, its end.

The child has a session of its own. The kernel ends it when the console ends, however that does.
"""

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Final

import psutil

from catalogue.processes import ending_with_us, start_child
from console.supervise.log import MOST_CHARACTERS, Log

LAST_LINES_S: Final = 1.0
"""Seconds that the last lines of a process that has ended have to come."""
KILL_S: Final = 5.0
"""Seconds that processes have to end once they were killed."""
_LISTENS: Final = re.compile(r"^listening on (https?://\S+),")
"""How `tightfit serve` says that it has its port."""


class Child:
    """One process of a server, from its start to its end.

    Args:
        command: that is started.
        log: gets its lines.
        on_change: called on other threads when it listens, and when it has ended.
        environ: added to this process's environment.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Log,
        on_change: Callable[[], None],
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.command, self._environ = list(command), environ or {}
        self._log, self._on_change = log, on_change
        self._begun, self._ended = threading.Event(), threading.Event()
        self._error: OSError | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.first_line = log.place()
        """The place in the log where its lines begin."""
        self.started_s: float | None = None
        """As the system has it, wall-clock."""
        self.url: str | None = None
        """Where it listens, once it says so: the port is its own then."""
        self.exit_code: int | None = None
        """Below 0: the signal that ended it; None: it runs."""

    def start(self) -> None:
        """Start it; blocks until it has begun.

        Raises:
            OSError: it cannot be started.
        """
        threading.Thread(target=self._live, name="child", daemon=True).start()
        self._begun.wait()
        if self._error is not None:
            raise self._error

    @property
    def pid(self) -> int:
        """The process; it has begun."""
        assert self._process is not None
        return self._process.pid

    def _live(self) -> None:
        """Start the process and wait for its end: the kernel ends it with the thread that does."""
        try:
            process = self._process = start_child(
                ending_with_us(self.command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # The console's service manager is no concern of its.
                environ={"NOTIFY_SOCKET": "", "PYTHONUNBUFFERED": "1", **self._environ},
            )
        except OSError as error:
            self._error = error
            self._begun.set()
            return
        with contextlib.suppress(psutil.Error):
            self.started_s = psutil.Process(process.pid).create_time()
        assert process.stdout is not None
        reader = threading.Thread(
            target=self._read, args=(process.stdout,), name="child log", daemon=True
        )
        reader.start()
        self._begun.set()
        code = process.wait()
        reader.join(LAST_LINES_S)  # another process may have its end of the pipe still
        self.exit_code = code
        self._ended.set()
        self._on_change()

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            while line := stream.readline(MOST_CHARACTERS):
                text = line.decode("utf-8", "replace").rstrip()
                self._log.add(text)
                if self.url is None and (found := _LISTENS.match(text)):
                    self.url = found[1]
                    self._on_change()

    def lines(self) -> list[str]:
        """Return its last lines."""
        return self._log.tail(self.first_line)

    def terminate(self) -> None:
        """Ask it to end; a second time, to end quicker."""
        if self._process is not None and self.exit_code is None:
            self._process.terminate()

    def kill(self) -> None:
        """End it at once, with all that it started; returns when they have ended."""
        if self._process is not None and not self._ended.is_set():
            kill_tree(self._process.pid)
            self._ended.wait(KILL_S)


def kill_tree(pid: int) -> None:
    """Kill a process that leads a group, the group, and all below it; wait for those below."""
    first, below = [], []
    with contextlib.suppress(psutil.Error):
        first = [psutil.Process(pid)]
        below = first[0].children(recursive=True)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for process in (*first, *below):
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(below, timeout=KILL_S)


def holds_command(pid: int, command: Sequence[str]) -> bool:
    """Return whether a process was started with a command: whether it is ours to end."""
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:
        return False
    starts = range(len(words) - len(command) + 1)
    return any(words[at : at + len(command)] == list(command) for at in starts)
