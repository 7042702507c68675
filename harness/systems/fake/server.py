"""An asynchronous door to the fake engine on the clients' own event loop, in scripted time."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from engine.errors import EngineError, RequestError
from engine.request import TokenEvent
from harness.systems.fake.clock import ScriptedClock
from harness.systems.fake.engine import FakeLLM


class ScriptedServer:
    """Steps the engine while it has work; a request that comes during a step waits for its end.

    Args:
        llm: the engine, or a watch around it.
        clock: of the event loop and of the engine.
        max_pending: requests that may be unfinished at once.
        on_step: called after each step with its counts and its seconds.
    """

    def __init__(
        self,
        llm: FakeLLM,
        clock: ScriptedClock,
        *,
        max_pending: int,
        on_step: Callable[[Any, float], None],
    ) -> None:
        self._llm, self._clock = llm, clock
        self._max_pending, self._on_step = max_pending, on_step
        self._answers: dict[str, asyncio.Queue[TokenEvent | BaseException]] = {}
        self._stepping: asyncio.Task[None] | None = None
        self.failure: BaseException | None = None

    async def tokens(
        self, prompt: Any, params: Any = None, request_id: str | None = None
    ) -> AsyncGenerator[list[TokenEvent], None]:
        """Yield the tokens of a request as they come.

        Raises:
            RequestError: the request cannot be served, or too many are pending.
            EngineError: the engine failed.
        """
        if len(self._answers) >= self._max_pending:
            raise RequestError(f"queue: expected fewer than {self._max_pending} requests.")
        name = self._llm.add_request(prompt, params, request_id)
        answer = self._answers[name] = asyncio.Queue()
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        try:
            is_last = False
            while not is_last:
                event = await answer.get()
                if isinstance(event, BaseException):
                    raise EngineError(f"the engine failed: {event}") from event
                if event.finish_reason == "error":
                    raise RequestError(str(event.stop_reason))
                is_last = event.finish_reason is not None
                yield [event]
        finally:
            del self._answers[name]
            self._llm.abort(name)

    async def _step(self) -> None:
        try:
            while True:
                # What comes at the end of a step goes into the next one.
                await self._clock.settle()
                if not self._llm.has_unfinished():
                    return
                begin_s = self._clock()
                await asyncio.sleep(self._llm.begin_step())
                events = self._llm.end_step()
                self._on_step(self._llm.last_step, self._clock() - begin_s)
                for event in events:
                    if event.request_id in self._answers:
                        self._answers[event.request_id].put_nowait(event)
        except Exception as error:  # noqa: BLE001  the edge: carried to every client
            self.failure = error
            for answer in self._answers.values():
                answer.put_nowait(error)

    def release(self) -> FakeLLM:
        """Stop stepping and return the engine."""
        if self._stepping is not None:
            self._stepping.cancel()
        return self._llm
