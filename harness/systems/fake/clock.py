"""Clocks of model=fake: one that moves only as scripted, and the machine's."""

import asyncio
import math
import selectors
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Final, Protocol, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

SPIN_S: Final = 0.0005
"""The end of a wait is spun for: a sleep may take so much longer than asked."""
DIGITS: Final = 9
"""Decimals of scripted seconds."""


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
    """Begins at 0 and moves only when it is told to, so that a script means the same at any time.

    It keeps whole nanoseconds: sums of scripted times are exact, and what is due together is due
    at one time, however the times were added up.

    Args:
        begin_s: the first time.
    """

    def __init__(self, begin_s: float = 0.0) -> None:
        self._now_s = begin_s
        self._settling: list[asyncio.Future[None]] = []

    def __call__(self) -> float:
        """Return the time."""
        return self._now_s

    def wait_until(self, time_s: float) -> None:
        """Make it `time_s`, unless it is later already."""
        self._now_s = max(self._now_s, round(time_s, DIGITS))

    async def settle(self) -> None:
        """Return when everything else that is due at this time has been done."""
        self._settling.append(asyncio.get_running_loop().create_future())
        await self._settling[-1]

    def move(self, timeout_s: float | None) -> None:
        """Wake those that settle, else let the time pass until the next timer, if there is one."""
        settling, self._settling = self._settling, []
        for future in settling:
            if not future.done():
                future.set_result(None)
        if settling or not timeout_s:
            return
        self.wait_until(self._now_s + timeout_s)
        # A timer is due once the time is beyond its own, which asyncio makes sure of by adding
        # 1 ns: after half a year that adds nothing to a time, and no timer would ever be due.
        if self._now_s + 10.0**-DIGITS == self._now_s:
            self._now_s = math.nextafter(self._now_s, math.inf)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on an event loop whose time is this clock; return its result."""
        with asyncio.Runner(loop_factory=lambda: _ScriptedLoop(self)) as runner:
            return runner.run(main)


class _Selector(selectors.SelectSelector):
    """Moves the clock where a real selector would wait."""

    def __init__(self, clock: ScriptedClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        is_idle = timeout is None or timeout > 0
        if not ready and is_idle:
            self._clock.move(timeout)
        return ready


class _ScriptedLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: ScriptedClock) -> None:
        super().__init__(_Selector(clock))
        self._scripted = clock

    def time(self) -> float:
        return self._scripted()

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return super().call_at(round(when, DIGITS), callback, *args, context=context)
