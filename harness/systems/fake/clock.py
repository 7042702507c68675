"""Clocks of model=fake: one that moves only as scripted, and the machine's."""

import asyncio
import math
import selectors
import time
from collections.abc import Coroutine
from typing import Any, Final, Protocol, TypeVar

T = TypeVar("T")

SPIN_S: Final = 0.0005
"""The end of a wait is spun for: a sleep may take so much longer than asked."""


class FakeClock(Protocol):
    """Seconds, and a way to let them pass."""

    def __call__(self) -> float:
        """Return the time."""
        ...

    def wait_until(self, time_s: float) -> None:
        """Return when it is `time_s` or later."""
        ...


class RealClock:
    """The machine's clock."""

    def __call__(self) -> float:
        """Return the time."""
        return time.perf_counter()

    def wait_until(self, time_s: float) -> None:
        """Sleep, and spin for the last part, until it is `time_s`."""
        left_s = time_s - time.perf_counter()
        if left_s > SPIN_S:
            time.sleep(left_s - SPIN_S)
        while time.perf_counter() < time_s:
            pass


class ScriptedClock:
    """Begins at the machine's time and then moves only when it is told to."""

    def __init__(self) -> None:
        self.now_s = time.perf_counter()

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s

    def wait_until(self, time_s: float) -> None:
        """Make it `time_s`, unless it is later already."""
        self.now_s = max(self.now_s, time_s)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on an event loop whose time is this clock; return its result."""
        with asyncio.Runner(loop_factory=lambda: _ScriptedLoop(self)) as runner:
            return runner.run(main)


class _Selector(selectors.SelectSelector):
    """Moves the clock to the next timer where a real selector would wait for it."""

    def __init__(self, clock: ScriptedClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            # A timer is due once the time is beyond its own, which asyncio makes sure of by adding
            # 1 ns: after 97 days that adds nothing to a time, and no timer would ever be due.
            self._clock.now_s = math.nextafter(self._clock.now_s + timeout, math.inf)
        return ready


class _ScriptedLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: ScriptedClock) -> None:
        super().__init__(_Selector(clock))
        self._scripted = clock

    def time(self) -> float:
        return self._scripted.now_s
