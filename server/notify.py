"""What a service manager is told of a server: systemd's notify protocol, over its socket."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, MutableMapping
from time import monotonic
from typing import Final

from engine.errors import ConfigError
from server.lifecycle import Lifecycle, Load, State

LOOK_S: Final = 0.25
"""Seconds between two looks at the server."""
STATUS_S: Final = 1.0
"""Least seconds between two lines about a load."""
EXTEND_S: Final = 300.0
"""Seconds that a load may take from a sign of progress to the next; the first such time is
TimeoutStartSec of the unit."""
SEND_S: Final = 1.0
"""Seconds that a message may wait for room in the manager's socket."""
_MIB: Final = 2**20
logger = logging.getLogger("server")


class Notifier:
    """Sends variables to the service manager that started this process.

    Args:
        address: Path of its datagram socket; one that begins with @ is abstract.
        watchdog_s: Seconds within which it expects signs of life; None: it expects none.
    """

    def __init__(self, address: str, watchdog_s: float | None = None) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._is_heard = True
        self.watchdog_s = watchdog_s

    @classmethod
    def from_environment(cls, variables: MutableMapping[str, str]) -> "Notifier | None":
        """Return what NOTIFY_SOCKET asks for; None without it.

        Its variables are taken out: a process that this one starts does not speak for it.

        Raises:
            ConfigError: One of them cannot be understood.
        """
        address = variables.pop("NOTIFY_SOCKET", "")
        watchdog_us = variables.pop("WATCHDOG_USEC", "")
        watchdog_pid = variables.pop("WATCHDOG_PID", "")
        if not address:
            return None
        if address[0] not in "/@":
            raise ConfigError(
                "NOTIFY_SOCKET: expected a path or @ and the name of an abstract socket, got "
                f"{address!r}."
            )
        if not watchdog_us or watchdog_pid not in {"", str(os.getpid())}:
            return cls(address)
        if not watchdog_us.isdecimal() or not int(watchdog_us):
            raise ConfigError(f"WATCHDOG_USEC: expected microseconds above 0, got {watchdog_us!r}.")
        return cls(address, int(watchdog_us) / 1e6)

    def tell(self, **variables: str) -> None:
        """Send variables as one message; a manager that does not take it is logged once."""
        lines = (f"{name}={' '.join(value.split())}" for name, value in variables.items())
        message = "\n".join(lines).encode()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sending:
                sending.settimeout(SEND_S)
                sending.sendto(message, self._address)
        except OSError as error:
            if self._is_heard:
                logger.warning("NOTIFY_SOCKET: the service manager does not listen: %s", error)
            self._is_heard = False
        else:
            self._is_heard = True


class Reporter:
    """Tells the service manager of one server's states, its load and its life.

    Args:
        notifier: To the manager.
        lifecycle: Where the server stands.
        num_live_beats: Counts the engine's signs of life.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        notifier: Notifier,
        lifecycle: Lifecycle,
        num_live_beats: Callable[[], int],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._notifier, self._lifecycle = notifier, lifecycle
        self._num_live_beats, self._clock = num_live_beats, clock
        self._told_state: State = "not_loaded"
        self._told_load: Load = (None, 0, 0)
        self._status_due_s = self._alive_due_s = 0.0
        self._seen_beats = 0

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        watchdog_s = self._notifier.watchdog_s
        pause_s = LOOK_S if watchdog_s is None else min(LOOK_S, watchdog_s / 4)
        while True:
            self.look()
            await asyncio.sleep(pause_s)

    def look(self) -> None:
        """Tell what is new."""
        state, now_s = self._lifecycle.state, self._clock()
        if state != self._told_state:
            self._told_state = state
            self._tell_state()
        if state == "loading":
            self._tell_load(now_s)
        if state in {"ready", "draining"}:
            self._tell_alive(now_s)

    def _tell_state(self) -> None:
        match self._lifecycle.state:
            case "ready":
                self._notifier.tell(READY="1", STATUS="ready")
            case "draining":
                self._notifier.tell(STOPPING="1", STATUS="draining: open requests end")
            case "failed":
                self._notifier.tell(STOPPING="1", STATUS=f"failed: {self._lifecycle.reason}")
            case _:
                pass

    def _tell_load(self, now_s: float) -> None:
        load = self._lifecycle.load
        if load == self._told_load or (
            load[0] == self._told_load[0] and now_s < self._status_due_s
        ):
            return
        self._told_load, self._status_due_s = load, now_s + STATUS_S
        self._notifier.tell(
            STATUS=f"loading: {_in_words(*load)}", EXTEND_TIMEOUT_USEC=str(int(EXTEND_S * 1e6))
        )

    def _tell_alive(self, now_s: float) -> None:
        """Send a sign of life where the engine gave one since the last."""
        watchdog_s, beats = self._notifier.watchdog_s, self._num_live_beats()
        if watchdog_s is None or now_s < self._alive_due_s or beats == self._seen_beats:
            return
        self._seen_beats, self._alive_due_s = beats, now_s + watchdog_s / 2
        self._notifier.tell(WATCHDOG="1")


@contextlib.asynccontextmanager
async def reporting(reporter: Reporter | None) -> AsyncIterator[None]:
    """Have a reporter look for as long as the block lasts, and once at its end."""
    if reporter is None:
        yield
        return
    task = asyncio.create_task(reporter.run())
    try:
        yield
    finally:
        task.cancel()
        reporter.look()


def _in_words(phase: str | None, bytes_done: int, bytes_total: int) -> str:
    if not bytes_done and not bytes_total:
        return phase or "start"
    total = f" of {bytes_total / _MIB:,.0f}" if bytes_total else ""
    return f"{phase}, {bytes_done / _MIB:,.0f}{total} MiB"
