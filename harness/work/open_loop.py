"""Open loop: each request is sent at its time, whatever the engine does, and what came is noted."""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

from engine.asked.request import TokenEvent
from engine.asked.sampling import SamplingParams
from engine.errors import EngineError
from harness.config.serve import ServeScenario
from harness.work.drive import Clock, OnEnd, OnProgress
from harness.work.schedule import PlannedRequest, Schedule
from harness.work.times import CLOCK_S, ServedRequest, has_passed

Wait = Callable[[float], Awaitable[Any]]
"""Lets seconds pass; asyncio.sleep, or a test's own."""
GiveUp = Callable[[Sequence[ServedRequest], float], bool]
"""Called with all requests and the time; True ends the run."""
CUT_OFF: Final = "the run was cut off: too many requests were bad for the rate to pass"
"""Error of the requests that ran or were to come when `give_up` ended the run."""
_LOOK_S: Final = 0.25
"""Seconds between looks at whether to go on."""
_SIGN_S: Final = 600.0
"""Seconds between signs of work where no request runs: a third of the default of silence_s."""


class Door(Protocol):
    """The part of `engine.async_llm.AsyncLLM` that is used here."""

    @property
    def failure(self) -> BaseException | None:
        """What the engine raised when it failed."""

    def tokens(
        self, prompt: Any, params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[list[TokenEvent], None]:
        """Yield the tokens of a request as they come."""

    def release(self) -> Any:
        """Take no more requests; the engine may be used by others again."""


def late(config: ServeScenario) -> str:
    """Return the error of requests that ran or were to come when max_duration_s had passed."""
    return f"max_duration_s={config.max_duration_s or math.inf:g} had passed"


class OpenLoop:
    """One schedule under way; begins when it is made.

    The limits of `config` hold. `wait` lets time pass on `clock`, the clock of the tokens' times.
    `on_end` gets each request when it has ended, those that never ran at the end. `give_up` is
    looked at four times a second; what then runs or is to come is cancelled.
    """

    def __init__(
        self,
        door: Door,
        schedule: Schedule,
        config: ServeScenario,
        *,
        clock: Clock,
        wait: Wait = asyncio.sleep,
        on_progress: OnProgress | None = None,
        on_end: OnEnd | None = None,
        give_up: GiveUp | None = None,
    ) -> None:
        self._door, self._config = door, config
        self._clock, self._wait, self._on_progress = clock, wait, on_progress
        self._salt = schedule.salt
        self._slots = asyncio.Semaphore(config.max_concurrency or len(schedule.requests) or 1)
        self._conversations = _conversations(schedule)
        self._tasks: list[asyncio.Task[None]] = []  # the one that begins the others first
        self._num_open = self._num_done = self._num_tokens = 0
        self._on_end, self._told = on_end, set[str]()
        self._give_up, self._look_s = give_up, -math.inf
        self._ended: str | None = None
        self._begin_s = self._last_arrival_s = clock()
        self._end_s = self._begin_s + (config.max_duration_s or math.inf)
        self._served = {request.request_id: _not_sent(request) for request in schedule.requests}

    async def run(self) -> list[ServedRequest]:
        """Send the schedule; return what came of every request of it, in its order.

        What the engine failed of is raised.
        """
        self._tasks.append(asyncio.create_task(self._begin_all()))
        try:
            await asyncio.wait(self._tasks[:1])
            await self._drain()
        finally:
            await self._cancel_rest()
        if self._door.failure is not None:
            raise self._door.failure
        return list(self._served.values())

    async def _begin_all(self) -> None:
        """Start each conversation at its time; end when the last has begun or none is to."""
        for turns in self._conversations:
            arrival_s = self._begin_s + (turns[0].scheduled_s or 0.0)
            self._last_arrival_s = max(self._last_arrival_s, arrival_s)
            await self._wait_until(min(arrival_s, self._end_s))
            if self._is_over():
                return
            self._tasks.append(asyncio.create_task(self._converse(turns, arrival_s)))

    async def _drain(self) -> None:
        """Wait until everything ended, or until the time after the last arrival is over."""
        open_tasks = set(self._tasks)
        while open_tasks and not self._is_over():
            now_s = self._clock()
            left_s = self._last_arrival_s + self._config.drain_s - now_s
            if left_s <= CLOCK_S:
                return
            wait_s = max(0.0, min(left_s, _LOOK_S, self._end_s - now_s))
            _, open_tasks = await asyncio.wait(open_tasks, timeout=wait_s)

    def _is_over(self) -> bool:
        """Return whether nothing is worth waiting for."""
        now_s = self._clock()
        if has_passed(now_s, self._end_s):
            self._ended = late(self._config)
        elif self._give_up is not None and has_passed(now_s - self._look_s, _LOOK_S):
            self._look_s = now_s
            if self._give_up(list(self._served.values()), now_s):
                self._ended = CUT_OFF
        return self._ended is not None or self._door.failure is not None

    async def _cancel_rest(self) -> None:
        """Take back what still runs, and wait until it is noted."""
        for task in self._tasks:
            task.cancel()
        ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._ended is not None:
            for served in self._served.values():
                served.error = self._ended if served.is_cancelled else served.error
        for served in self._served.values():
            self._tell(served)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _wait_until(self, time_s: float) -> None:
        while (left_s := time_s - self._clock()) > CLOCK_S:
            await self._wait(min(left_s, _SIGN_S))
            if not self._num_open:  # a pause of the schedule, not of the engine
                self._report()

    async def _converse(self, turns: list[PlannedRequest], arrival_s: float) -> None:
        """Send the turns of a conversation, each after the answer to the one before."""
        history: list[int] = []
        for turn in turns:
            if turn.follows is not None:
                arrival_s += turn.think_s
                self._last_arrival_s = max(self._last_arrival_s, arrival_s)
                await self._wait_until(arrival_s)
            served = self._served[turn.request_id]
            prompt = history + list(turn.prompt_token_ids or ())
            served.submit_s, served.num_prompt_tokens = arrival_s, len(prompt)
            served.error = "it still waited at the client for a free place (max_concurrency)"
            async with self._slots:
                await self._send(served, prompt)
            if not served.is_complete:
                return
            history = prompt + served.token_ids
            arrival_s = served.token_times_s[-1]

    async def _send(self, served: ServedRequest, prompt: list[int]) -> None:
        """Send one request and note its tokens until it ends, fails or is cancelled."""
        params = SamplingParams(
            temperature=0.0, max_tokens=served.output_tokens, ignore_eos=True, cache_salt=self._salt
        )
        served.is_cancelled, served.error = False, None
        served.sent_s = self._clock()
        self._num_open += 1
        parts = self._door.tokens(prompt, params, served.request_id)
        try:
            async with contextlib.aclosing(parts):
                async for events in parts:
                    self._note(served, events)
        except EngineError as error:  # a RequestError too
            served.error = str(error)
            if self._door.failure is not None:
                self._tasks[0].cancel()  # whatever was to come, and however long it would take
        except asyncio.CancelledError:
            if not served.is_complete:
                served.is_cancelled = True
                served.error = f"it still ran {self._config.drain_s:g} s after the last arrival"
            raise
        if served.error is None and not served.is_complete:
            served.error = f"the engine ended it with {served.finish_reason}"
        self._num_open -= 1
        self._num_done += 1
        self._tell(served)
        self._report()

    def _tell(self, served: ServedRequest) -> None:
        if self._on_end is not None and served.request_id not in self._told:
            self._told.add(served.request_id)
            self._on_end(served)

    def _note(self, served: ServedRequest, events: list[TokenEvent]) -> None:
        for event in events:
            served.token_ids.append(event.token_id)
            served.token_times_s.append(event.time_s)
            served.finish_reason = event.finish_reason
        self._num_tokens += len(events)
        self._report()

    def _report(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self._num_done, len(self._served), self._num_tokens)


def _conversations(schedule: Schedule) -> list[list[PlannedRequest]]:
    """Return the requests by conversation, in order of the first arrival."""
    found: dict[str, list[PlannedRequest]] = {}
    for request in schedule.requests:
        turns = found.pop(request.follows, []) if request.follows is not None else []
        found[request.request_id] = [*turns, request]
    return sorted(found.values(), key=lambda turns: turns[0].scheduled_s or 0.0)


def _not_sent(request: PlannedRequest) -> ServedRequest:
    """Return the account of a request until it is sent; it stays so if it never is."""
    return ServedRequest(
        request_id=request.request_id,
        num_prompt_tokens=request.num_prompt_tokens or 0,
        submit_s=math.nan,
        output_tokens=request.output_tokens,
        is_ramp_up=request.is_ramp_up,
        is_later_turn=request.follows is not None,
        is_cancelled=True,
        error="it was not sent: an earlier turn did not complete in time",
    )
