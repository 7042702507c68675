"""The one state machine of the server (not loaded, loading, ready, draining, failed), its end."""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any, Final, Literal

EXIT_USAGE: Final = 2
"""The command line is wrong."""
EXIT_CONFIG: Final = 78
"""Another start with the same settings would fail as well (EX_CONFIG of sysexits)."""
ERROR: Final = "error: "
"""How an error begins in the log; it ends with the log, or before a line of the access log."""
State = Literal["not_loaded", "loading", "ready", "draining", "failed"]
Load = tuple[str | None, int, int]
"""What a load does now, its bytes done, and those in all; 0 where they are not known."""
_NEXT: Final[dict[State, tuple[State, ...]]] = {
    "not_loaded": ("loading", "draining", "failed"),
    "loading": ("ready", "draining", "failed"),
    "ready": ("draining", "failed"),
    "draining": ("failed",),
    "failed": (),
}


class Lifecycle:
    """Where the server stands, since when, and why.

    Args:
        clock: Seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock, self._since_s = clock, clock()
        self.state: State = "not_loaded"
        self.reason: str | None = None
        """Why it failed."""
        self.phase: str | None = None
        """What a load does now."""
        self._bytes_done = self._bytes_total = 0
        self._bytes_since_s = self._since_s
        self.changed = asyncio.Event()
        """Set at each change of the state; who waits clears it."""

    def enter(self, state: State, reason: str | None = None) -> bool:
        """Go to a state; return whether it was not already past it."""
        if state not in _NEXT[self.state]:
            return False
        self.state, self.reason, self._since_s = state, reason, self._clock()
        if state != "loading":
            self.phase = None
        self.changed.set()
        return True

    def note_load(self, phase: str, bytes_done: int, bytes_total: int) -> None:
        """Take in how far the load is."""
        if self.state != "loading":
            return
        if phase != self.phase:
            self._bytes_since_s = self._clock()
        self.phase, self._bytes_done, self._bytes_total = phase, bytes_done, bytes_total

    @property
    def load(self) -> Load:
        """How far a load is."""
        return self.phase, self._bytes_done, self._bytes_total

    def to_dict(self) -> dict[str, Any]:
        """Return what /health tells."""
        found: dict[str, Any] = {"state": self.state, "since_s": self._clock() - self._since_s}
        if self.state == "loading":
            found["phase"] = self.phase
            if self._bytes_total:
                spent_s = self._clock() - self._bytes_since_s
                found |= {
                    "bytes_done": self._bytes_done,
                    "bytes_total": self._bytes_total,
                    "bytes_per_s": self._bytes_done / spent_s if spent_s > 0 else 0.0,
                }
            elif self._bytes_done:
                found["bytes_done"] = self._bytes_done
        if self.reason is not None:
            found["reason"] = self.reason
        return found
