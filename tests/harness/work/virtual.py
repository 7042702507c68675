"""Time that passes only when nothing is left to do, and a door that answers at scripted times."""

import asyncio
import selectors
from typing import Any

from engine.asked.request import TokenEvent
from engine.errors import RequestError

BEGIN_S = 0.0
"""The first time of a VirtualLoop; clock_start_s sets another."""


class _Selector(selectors.SelectSelector):
    """Lets the clock jump to the next timer, where a real one would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = BEGIN_S

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout:
            self.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop without real waiting."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s


def run_virtually(main: Any) -> Any:
    """Run a coroutine in virtual time and return its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def now_s() -> float:
    return asyncio.get_running_loop().time()


def passed_s() -> float:
    """Seconds since the loop began."""
    return now_s() - BEGIN_S


class ScriptedDoor:
    """Gives each request its first token after `first_s` and one each `gap_s`.

    Args:
        first_s: for all, or by request id.
        gap_s: between tokens.
        places: requests that are worked on at once; others wait for them. None: all.
    """

    def __init__(self, first_s: Any = 0.5, gap_s: float = 0.125, places: int | None = None) -> None:
        self.first_s, self.gap_s = first_s, gap_s
        self.failure: BaseException | None = None
        self.refuse: set[str] = set()
        self.ends: dict[str, Any] = {}
        self.sent: list[tuple[str, float, tuple[int, ...]]] = []
        self.open: set[str] = set()
        self.most_open = 0
        self._places = asyncio.Semaphore(places or 10**6)

    async def tokens(self, prompt: Any, params: Any = None, request_id: Any = None) -> Any:
        self.sent.append((request_id, passed_s(), tuple(prompt)))
        assert params.temperature == 0
        assert params.ignore_eos
        if request_id in self.refuse:
            raise RequestError("prompt: too long. Shorten it.")
        self.open.add(request_id)
        self.most_open = max(self.most_open, len(self.open))
        try:
            async with self._places:
                async for events in self._answer(params, request_id):
                    yield events
        finally:
            self.open.discard(request_id)

    async def _answer(self, params: Any, request_id: str) -> Any:
        first_s = self.first_s
        await asyncio.sleep(first_s[request_id] if isinstance(first_s, dict) else first_s)
        finish, last = self.ends.get(request_id, ("length", params.max_tokens - 1))
        for index in range(last + 1):
            if index:
                await asyncio.sleep(self.gap_s)
            yield [
                TokenEvent(
                    request_id=request_id,
                    index=0,
                    token_id=100 + index,
                    position=index,
                    finish_reason=finish if index == last else None,
                    logprob=0.0,
                    time_s=now_s(),
                )
            ]
