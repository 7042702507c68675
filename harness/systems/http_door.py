"""The asynchronous door of a server: clients await tokens while the client's thread receives."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from engine.errors import RequestError
from engine.request import TokenEvent
from engine.sampling_params import SamplingParams


class HTTPDoor:
    """Sends each request when a client asks, without a step in between.

    Args:
        llm: a harness.systems.http_engine.HTTPEngine.
        max_pending: requests that may be unfinished at once.
        on_step: not called: a server does not tell its steps.
    """

    def __init__(
        self, llm: Any, /, *, max_pending: int, on_step: Callable[[Any, float], None]
    ) -> None:
        del on_step
        self._llm, self._max_pending, self._pending = llm, max_pending, 0

    @property
    def failure(self) -> BaseException | None:
        """Why the server is given up."""
        failure: BaseException | None = self._llm.failure
        return failure

    async def tokens(
        self, prompt: Any, params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[list[TokenEvent], None]:
        """Yield the tokens of a request as they come; leaving closes its connection.

        Raises:
            RequestError: The server refused it or broke off, or too many are pending.
        """
        if self._pending >= self._max_pending:
            raise RequestError(f"queue: expected fewer than {self._max_pending} requests.")
        queue: asyncio.Queue[list[TokenEvent]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(events: list[TokenEvent]) -> None:
            with contextlib.suppress(RuntimeError):  # the client's loop has ended
                loop.call_soon_threadsafe(queue.put_nowait, events)

        name = request_id or "http"
        running = self._llm.send(prompt, params or SamplingParams(), name, put)
        self._pending += 1
        try:
            while True:
                events = await queue.get()
                if events[-1].finish_reason == "error":
                    raise RequestError(str(events[-1].stop_reason))
                yield events
                if events[-1].finish_reason is not None:
                    return
        finally:
            self._pending -= 1
            running.cancel()

    def release(self) -> Any:
        """Return the engine."""
        return self._llm
