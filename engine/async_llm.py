"""AsyncLLM: the asynchronous door. A thread of its own steps the engine; clients await tokens."""

import asyncio
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from engine.asked.request import (
    CompletionOutput,
    NoToken,
    RequestOutput,
    TokenEvent,
    check_request_id,
)
from engine.asked.sampling import SamplingParams
from engine.errors import EngineError, FailedRequestError, QueueFullError, RequestError
from engine.text.tokenizer import encode

if TYPE_CHECKING:
    from engine.asked.config import EngineConfig
    from engine.llm import LLM
    from engine.snapshot import Snapshot


class Stream:
    """The way of one request's tokens from the engine's thread to the loop of its client."""

    def __init__(
        self, request_id: str, prompt: Any, params: SamplingParams | None, priority: int
    ) -> None:
        self.request_id, self.prompt, self.params = request_id, prompt, params
        self.priority = priority
        self.form: object = None
        """Its compiled form, which the engine's thread finds compiled while this refers to it."""
        self.tells_start = False
        """Whether the client is told, by no tokens, that the engine took the request."""
        self.open_answers = 0
        """Answers that the engine has not ended; its thread alone counts them."""
        self.prompt_token_ids: list[int] = []
        self.loop = asyncio.get_running_loop()
        """The client's."""
        self._items: deque[list[TokenEvent] | BaseException | None] = deque()
        self.wake = asyncio.Event()
        """Set on that loop: the client looks at what was put."""

    def put(self, item: list[TokenEvent] | BaseException | None) -> None:
        """Hand over tokens, an error, or None for the end; seen when the stream is woken."""
        self._items.append(item)

    async def next(self) -> tuple[list[TokenEvent], bool]:
        """Return all tokens that came since the last call, and whether they are the last.

        Raises:
            EngineError: The request failed.
        """
        while not self._items:
            self.wake.clear()
            await self.wake.wait()
        events: list[TokenEvent] = []
        while self._items:
            if isinstance(self._items[0], BaseException) and events:
                break  # the error comes with the next call
            item = self._items.popleft()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                return events, True
            events += item
        return events, False


def _wake_here(streams: list[Stream]) -> None:
    for stream in streams:
        stream.wake.set()


def _extend(answer: CompletionOutput, event: TokenEvent) -> None:
    """Add the next token to what is known of an answer."""
    answer.text += event.text
    answer.token_ids.append(event.token_id)
    answer.cumulative_logprob = (answer.cumulative_logprob or 0.0) + event.logprob
    if event.top_logprobs is not None:
        answer.logprobs = answer.logprobs or []
        answer.logprobs.append(event.top_logprobs)
    if event.rank is not None:
        answer.ranks = answer.ranks or []
        answer.ranks.append(event.rank)
    answer.finish_reason, answer.stop_reason = event.finish_reason, event.stop_reason


MAX_PENDING: Final = 1024
"""Default for the requests that may be unfinished at once."""


Command = Callable[[], None] | None
"""What a client asks of the engine's thread; None: to stop."""


def _failure(event: TokenEvent) -> RequestError:
    """Return why a request failed while it ran; a form that cannot be followed is its own fault."""
    why, is_form = str(event.stop_reason), event.failure is NoToken.FORM
    return RequestError(why, param="structured") if is_form else FailedRequestError(why)


def _end_thread(thread: threading.Thread, commands: SimpleQueue[Command], owner: int) -> None:
    if os.getpid() == owner:
        commands.put(None)
        thread.join()


class AsyncLLM:
    """Answers prompts for clients on event loops, while one thread of its own runs the engine.

    The engine belongs to that thread until `release` or `close`; nobody else may use it. Close it
    with `await close()`, with `async with`, or give the engine back with `release`.

    Args:
        llm: The engine.
        max_pending: Requests that may be unfinished at once, waiting ones included; one more is
            refused at once (QueueFullError).
        on_step: Called on the engine's thread after each step with its StepStats and its wall
            time in seconds (from the end of the step before, where the engine was not idle in
            between); must return at once.
    """

    def __init__(
        self,
        llm: "LLM",
        *,
        max_pending: int = MAX_PENDING,
        on_step: Callable[[Any, float], None] | None = None,
    ) -> None:
        if isinstance(llm, str | os.PathLike):
            raise EngineError(
                f"AsyncLLM: expected an LLM, got {str(llm)!r}. Write AsyncLLM(LLM({str(llm)!r}))."
            )
        if type(max_pending) is not int or max_pending < 1:
            raise EngineError(f"max_pending: expected an integer >= 1, got {max_pending!r}.")
        self._llm, self._max_pending, self._on_step = llm, max_pending, on_step
        self._lock, self._owner = threading.Lock(), os.getpid()
        self._pending: dict[str, Stream] = {}
        """Requests that have not ended; others than the engine's thread hold the lock."""
        self._names = count()
        self._stopped: str | None = None
        self.failure: BaseException | None = None
        """What the engine raised when it failed; no request is served after that."""
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._touched: set[Stream] = set()
        self._busy_since_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        # A program that ends without `close` must not end amid a step.
        self._at_exit = weakref.finalize(
            self, _end_thread, self._thread, self._commands, self._owner
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._llm!r})"

    @classmethod
    def from_config(cls, config: "EngineConfig", *, max_pending: int = MAX_PENDING) -> "AsyncLLM":
        """Build an engine and its asynchronous door."""
        from engine.llm import LLM  # noqa: PLC0415  brings torch

        return cls(LLM.from_config(config), max_pending=max_pending)

    @property
    def num_pending(self) -> int:
        """Requests that the engine has not ended."""
        with self._lock:
            return len(self._pending)

    async def generate(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the whole output so far whenever it grew, `finished` with the last one.

        A client that is slower than the engine gets fewer outputs, none of them outdated. Leaving
        the iterator (cancellation, `aclose`) drops the request.

        The prompt is text or token ids; without an id a name is made. Requests of a lower
        `priority` are served first, and lose their KV blocks last.

        Raises:
            RequestError: The request cannot be served (`param` says what is at fault), or its id is
                in use.
            QueueFullError: Too many are pending; the same request may be sent later.
            FailedRequestError: It failed while it ran, through no fault of its own.
            EngineError: The engine was closed or failed while the request ran.
        """
        answers: list[CompletionOutput] = []
        num_cached_tokens: int | None = None
        prompt_logprobs: list[dict[int, float] | None] | None = None
        stream = await self._begin(prompt, params, request_id, priority)
        async with contextlib.aclosing(self._follow(stream)) as parts:
            async for events, is_last in parts:
                if not answers:
                    num = 1 if stream.params is None else stream.params.n
                    nothing = partial(CompletionOutput, cumulative_logprob=0.0)
                    answers += [nothing(index=index) for index in range(num)]
                for event in events:
                    _extend(answers[event.index], event)
                    if event.index == 0 and event.num_cached_tokens is not None:
                        num_cached_tokens = event.num_cached_tokens
                        prompt_logprobs = event.prompt_logprobs
                yield RequestOutput(
                    request_id=stream.request_id,
                    prompt=prompt if isinstance(prompt, str) else None,
                    prompt_token_ids=list(stream.prompt_token_ids),
                    outputs=[
                        replace(
                            x,
                            token_ids=x.token_ids[:],
                            logprobs=x.logprobs and x.logprobs[:],
                            ranks=x.ranks and x.ranks[:],
                        )
                        for x in answers
                    ],
                    finished=is_last,
                    num_cached_tokens=num_cached_tokens,
                    prompt_logprobs=prompt_logprobs,
                )

    async def tokens(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tell_start: bool = False,
    ) -> AsyncGenerator[list[TokenEvent], None]:
        """Yield the new tokens with the times at which they were on the host.

        Arguments, errors and cancellation are those of `generate`; this costs less.

        Args:
            prompt: As for `generate`.
            params: As for `generate`.
            request_id: As for `generate`.
            priority: As for `generate`.
            tell_start: Yield first, maybe without tokens, once the engine took the request: what
                is wrong with it was raised before.
        """
        stream = await self._begin(prompt, params, request_id, priority, tell_start=tell_start)
        async with contextlib.aclosing(self._follow(stream)) as parts:
            async for events, _ in parts:
                if events or tell_start:
                    yield events
                tell_start = False

    async def _follow(self, stream: Stream) -> AsyncGenerator[tuple[list[TokenEvent], bool], None]:
        """Yield what `Stream.next` returns; leaving drops the request."""
        is_last = False
        try:
            while not is_last:
                events, is_last = await stream.next()
                yield events, is_last
        finally:
            if not is_last:
                self._commands.put(partial(self._abort, stream.request_id, stream))

    async def _prepare(self, params: Any) -> object:
        """Return the compiled form of a request, made beside the engine's thread; None: none."""
        if not isinstance(params, SamplingParams) or params.structured is None:
            return None
        with self._lock:
            self._check_room()
        return await asyncio.to_thread(self._llm.prepare_form, params.structured)

    def _check_room(self) -> None:
        """Raise QueueFullError where one more request is too many; the lock is held."""
        if len(self._pending) >= self._max_pending:
            raise QueueFullError(
                f"queue: expected fewer than max_pending={self._max_pending} unfinished "
                f"requests, got {len(self._pending)}. Send it later, or raise max_pending."
            )

    async def _begin(
        self,
        prompt: Any,
        params: Any,
        request_id: str | None,
        priority: int,
        *,
        tell_start: bool = False,
    ) -> Stream:
        """Queue a request for the engine's thread."""
        if os.getpid() != self._owner:
            raise EngineError(
                f"AsyncLLM: expected process {self._owner}, which runs the engine's thread, got "
                f"{os.getpid()}, a fork of it without that thread. Build the engine after the fork."
            )
        form = await self._prepare(params)
        if request_id is not None:
            check_request_id(request_id)
        with self._lock:
            if self._stopped is not None:
                raise EngineError(self._stopped)
            if request_id is None:
                free = (f"async-{number}" for number in self._names)
                request_id = next(name for name in free if name not in self._pending)
            if request_id in self._pending:
                raise RequestError(
                    f"request_id: expected an unused one, got {request_id!r}. Choose another.",
                    param="request_id",
                )
            self._check_room()
            # Copies: the engine's thread reads them later.
            prompt = list(prompt) if isinstance(prompt, list) else prompt
            params = params.copied() if isinstance(params, SamplingParams) else params
            stream = Stream(request_id, prompt, params, priority)
            stream.form, stream.tells_start = form, tell_start
            self._pending[request_id] = stream
            self._commands.put(partial(self._add, stream))
        return stream

    def snapshot(self) -> "Snapshot":
        """Return the engine's counts for metrics; cheap, and it waits for nothing.

        Raises:
            EngineError: The engine was closed.
        """
        return self._llm.snapshot()

    def abort(self, request_id: str) -> None:
        """End a request; its iterator raises EngineError. Unknown and finished ids are ignored."""
        if isinstance(request_id, str):
            self._commands.put(partial(self._abort, request_id))

    def release(self) -> "LLM":
        """Stop the thread after its step and return the engine, which the caller may use again.

        Requests that still run are dropped; their iterators raise EngineError.
        """
        self._stop("AsyncLLM: it was closed. Build a new one.")
        self._commands.put(None)
        self._thread.join()
        return self._llm

    async def close(self) -> None:
        """Stop the thread after its step and free the engine's memory.

        Requests that still run are dropped; their iterators raise EngineError.
        """
        llm = await asyncio.to_thread(self.release)
        llm.close()

    async def __aenter__(self) -> "AsyncLLM":
        if self._stopped is not None:
            raise EngineError(self._stopped)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # What follows runs on the engine's thread.

    def _run(self) -> None:
        why = "AsyncLLM: it was closed before this request ended."
        try:
            while self._obey():
                self._wake()
                if self._llm.has_unfinished():
                    self._step()
                    self._wake()
        except BaseException as error:  # noqa: BLE001  the edge: carried to every client
            why = f"AsyncLLM: the engine failed: {type(error).__name__}: {error}"
            self.failure = error
            self._stop(f"{why.rstrip('.')}. Build a new one.")
        for stream in list(self._pending.values()):
            self._drop(stream, self._end(why))
        self._wake()

    def _end(self, why: str) -> EngineError:
        """Make an error of its own for one client: raising adds to it."""
        error = EngineError(why)
        error.__cause__ = self.failure
        return error

    def _stop(self, why: str) -> None:
        with self._lock:
            if self._stopped is None:
                self._stopped = why

    def _obey(self) -> bool:
        """Do what clients asked for, waiting while there is nothing to run; False: stop."""
        wait = not self._llm.has_unfinished()
        if wait:
            self._busy_since_s = None
        while True:
            try:
                command = self._commands.get(block=wait)
            except Empty:
                return True
            if command is None:
                return False
            command()
            wait = False

    def _add(self, stream: Stream) -> None:
        try:
            prompt = stream.prompt
            if isinstance(prompt, str):
                prompt = encode(self._llm.tokenizer, prompt)
            # Other engines that are driven through this door need not know priorities.
            more = {"priority": stream.priority} if stream.priority != 0 else {}
            self._llm.add_request(prompt, stream.params, stream.request_id, **more)
            stream.prompt_token_ids = list(prompt)
        except RequestError as error:
            self._retire(stream, error)
            return
        except BaseException as error:
            self._retire(stream, error)
            raise
        stream.open_answers = 1 if stream.params is None else stream.params.n
        if stream.tells_start:
            stream.put([])
            self._touched.add(stream)

    def _abort(self, request_id: str, client: Stream | None = None) -> None:
        """Drop a request that its client has left, or, without one, that somebody names."""
        stream = self._pending.get(request_id)
        if stream is not None and (client is None or client is stream):
            why = EngineError("AsyncLLM: the request was aborted.")
            self._drop(stream, why if client is None else None)

    def _step(self) -> None:
        before, begin_s = self._llm.last_step, self._busy_since_s or perf_counter()
        events = self._llm.step()
        step, self._busy_since_s = self._llm.last_step, perf_counter()
        if self._on_step is not None and step is not None and step is not before:
            self._on_step(step, self._busy_since_s - begin_s)
        grouped: dict[str, list[TokenEvent]] = {}
        for event in events:
            grouped.setdefault(event.request_id, []).append(event)
        for name, mine in grouped.items():
            stream = self._pending.get(name)
            if stream is None or not stream.open_answers:
                continue
            failures = [event for event in mine if event.finish_reason == "error"]
            tokens = [event for event in mine if event.finish_reason != "error"]
            stream.open_answers -= sum(event.finish_reason is not None for event in tokens)
            if tokens:
                stream.put(tokens)
                self._touched.add(stream)
            if failures:
                self._retire(stream, _failure(failures[0]))
            elif stream.open_answers == 0:
                self._retire(stream, None)
        if self._pending and not self._llm.has_unfinished():
            why = "AsyncLLM: the engine finished without ending this request."
            for stream in [each for each in list(self._pending.values()) if each.open_answers]:
                self._retire(stream, self._end(why))

    def _drop(self, stream: Stream, why: BaseException | None) -> None:
        """Take a request from the engine before its end."""
        if stream.open_answers:
            with contextlib.suppress(Exception):  # a failed engine may refuse; the client must hear
                self._llm.abort(stream.request_id)
        self._retire(stream, why)

    def _retire(self, stream: Stream, why: BaseException | None) -> None:
        """Forget a request and tell its client that it ended, or why it failed."""
        with self._lock:
            if self._pending.get(stream.request_id) is stream:
                del self._pending[stream.request_id]
        stream.put(why)
        self._touched.add(stream)

    def _wake(self) -> None:
        """Let clients see what was put to their streams, with one call for each loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Stream]] = {}
        for stream in self._touched:
            by_loop.setdefault(stream.loop, []).append(stream)
        self._touched = set()
        for loop, mine in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake_here, mine)
            except RuntimeError:  # the loop is closed, so nobody will read them
                for stream in mine:
                    self._abort(stream.request_id, stream)
