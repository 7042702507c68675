"""A server with OpenAI's completions interface, behind the harness's door."""

import asyncio
import contextlib
import json
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, Final

import aiohttp
from anyio.from_thread import start_blocking_portal

from engine.asked.config import EngineConfig
from engine.asked.request import FinishReason, Request, TokenEvent, check_request
from engine.asked.sampling import SamplingParams
from engine.clock import PhaseClock
from engine.errors import ConfigError, EngineError, RequestError
from engine.text.tokenizer import encode, load_tokenizer
from harness.config.schema import SystemConfig
from harness.systems.base import (
    UNKNOWN_TOKEN,
    PeerPlan,
    model_spec,
    nothing,
)
from harness.systems.door import BuildEngine, EngineDoor, Progress
from harness.systems.events import Events

_CHAT_TEXTS: Final = ("content", "reasoning_content", "reasoning")
"""Where a part of a chat has text; one with a role alone has none."""
PIECE_TOKENS: Final = 8
"""An answer of fewer tokens may arrive at once from a fast server."""


class ServerError(RequestError):
    """What a server sent instead of an answer."""


@dataclass(kw_only=True)
class StreamedAnswer:
    """One answer of `/completions` or `/chat/completions` with stream=true.

    Tokens are counted by `token_ids` where the server sends them, else by `logprobs`, else every
    part with text counts as one. Where the usage that the server sends at the end says more, the
    missing ones are added at the time of the last part.
    """

    token_ids: list[int] = field(default_factory=list)
    """UNKNOWN_TOKEN where the server tells none."""
    times_s: list[float] = field(default_factory=list)
    """When the part that brought each token arrived."""
    num_parts: int = 0
    """Parts that brought tokens."""
    finish_reason: FinishReason | None = None
    prompt_tokens: int | None = None
    """What the server counted."""
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the server says it found in its prefix cache."""
    is_over: bool = False

    def feed(self, content: str, now_s: float) -> None:
        """Take the content of one event; what comes after the last one is left.

        ServerError where it is an error, no JSON object, or not of the published form.
        """
        if self.is_over:
            return
        if content == "[DONE]":
            self.is_over = True
            return
        part = _parse(content)
        try:
            self._take(part, now_s)
        except (AttributeError, TypeError, ValueError) as error:
            raise ServerError(
                f"the server sent a part of another form than the published one: {content[:200]!r}"
            ) from error

    def _take(self, part: dict[str, Any], now_s: float) -> None:
        usage = part.get("usage") or {}
        self.prompt_tokens = _whole(usage.get("prompt_tokens"), self.prompt_tokens)
        self.completion_tokens = _whole(usage.get("completion_tokens"), self.completion_tokens)
        details = usage.get("prompt_tokens_details") or {}
        self.cached_tokens = _whole(details.get("cached_tokens"), self.cached_tokens)
        for choice in part.get("choices") or ():
            tokens = _tokens(choice)
            self.num_parts += bool(tokens)
            self.token_ids += tokens
            self.times_s += [now_s] * len(tokens)
            reason = choice.get("finish_reason") or None  # some servers write "" for none yet
            if reason not in {None, "stop", "length"}:
                raise ServerError(f"the server ended the answer with {reason!r}")
            self.finish_reason = reason or self.finish_reason

    @property
    def num_surplus(self) -> int:
        """Tokens that were counted here beyond what the server says it generated."""
        if self.completion_tokens is None:
            return 0
        return max(0, len(self.token_ids) - self.completion_tokens)

    @property
    def is_in_one_piece(self) -> bool:
        """Whether so many tokens arrived at one moment that something held them back."""
        return len(self.times_s) >= PIECE_TOKENS and self.times_s[0] == self.times_s[-1]

    def end(self) -> int:
        """Take the end of the stream; return how many tokens the usage names beyond those seen.

        ServerError where it ended early, or without a token.
        """
        if self.finish_reason is None:
            raise ServerError(
                f"the server closed the stream after {len(self.token_ids)} tokens without a "
                "finish_reason"
            )
        missing = max(0, (self.completion_tokens or 0) - len(self.token_ids))
        if not self.token_ids:
            raise ServerError("the server ended the answer without a token")
        self.token_ids += [UNKNOWN_TOKEN] * missing
        self.times_s += [self.times_s[-1]] * missing
        return missing


def _parse(content: str) -> dict[str, Any]:
    try:
        part = json.loads(content)
    except ValueError as error:
        raise ServerError(f"the server sent no JSON: {content[:200]!r}") from error
    if not isinstance(part, dict):
        raise ServerError(f"the server sent no JSON object: {content[:200]!r}")
    words = part.get("error") or (part if part.get("object") == "error" else None)
    if words:
        raise ServerError(f"the server sent an error: {words}")
    return part


def _whole(value: Any, before: int | None) -> int | None:
    """Return a count of the server's; `before` where it tells none."""
    return before if value is None else int(value)


def _tokens(choice: dict[str, Any]) -> list[int]:
    """Return the tokens of a part, UNKNOWN_TOKEN for each without an id."""
    if choice.get("token_ids"):
        return [int(token) for token in choice["token_ids"]]
    logprobs, delta = choice.get("logprobs") or {}, choice.get("delta") or {}
    known = logprobs.get("tokens") or logprobs.get("content")  # of completions, of a chat
    if known:
        return [UNKNOWN_TOKEN] * len(known)
    texts = (choice.get("text"), *(delta.get(name) for name in _CHAT_TEXTS))
    return [UNKNOWN_TOKEN] if any(texts) else []


CONNECT_S: Final = 30.0
"""Longest wait for a connection."""
_FIELDS: Final = (
    ". A server that knows published fields alone wants system.extensions=false, one that takes no "
    "token ids system.prompts=text"
)
HINTS: Final[Mapping[int, str]] = {
    400: _FIELDS,
    422: _FIELDS,
    404: ". A server that knows chats alone wants system.api=chat",
    405: ". A server that knows chats alone wants system.api=chat",
}
"""Status of a refusal -> what it may be about."""
OnPart = Callable[[StreamedAnswer], None]


class HTTPClient:
    """A session with one server, on an event loop of its own.

    Parts of one read of a connection have the time of that read.
    `timeout_s` is the longest wait for the next bytes of an answer.
    """

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float) -> None:
        self._base, self._timeout_s = base_url.rstrip("/"), timeout_s
        self._running: set[Future[Any]] = set()
        self._held = ExitStack()
        self._portal = self._held.enter_context(start_blocking_portal())
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession = self._held.enter_context(
            self._portal.wrap_async_context_manager(self._portal.call(self._open))
        )

    async def _open(self) -> aiohttp.ClientSession:
        """Return a session of the running loop."""
        return aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_S, sock_read=self._timeout_s
            ),
            read_bufsize=2**20,
        )

    def submit(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> "Future[Any]":
        """Start a coroutine on the client's thread."""
        running = self._portal.start_task_soon(work)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return running

    def get(self, path: str) -> Any:
        """Return the JSON document at a path; EngineError without one."""
        address = f"{self._base}{path}"
        try:
            status, text = self._portal.call(self._get, address)
            if status != 200:
                raise EngineError(f"system.base_url: {address} answered {status}: {text[:300]}")
            return json.loads(text)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EngineError(
                f"system.base_url: {address} gave no answer ({_words(error)}). Start the server, "
                "or correct the address."
            ) from error

    async def _get(self, address: str) -> tuple[int, str]:
        async with self._session.get(address) as response:
            return response.status, await response.text(errors="replace")

    async def complete(self, path: str, body: dict[str, Any], on_part: OnPart) -> StreamedAnswer:
        """Send one request and return its whole answer.

        `on_part` is called when tokens came, and never after the end. ConnectionError where no
        server is reached, ServerError for anything else that is no answer.
        """
        answer = StreamedAnswer()
        with _naming_failures(self._timeout_s):
            async with self._session.post(f"{self._base}{path}", json=body) as response:
                if response.status != 200:
                    raise _refusal(response.status, await response.text(errors="replace"))
                await _read(response, answer, on_part)
        return answer

    async def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send one request and return the document that answers it; raises as `complete` does."""
        with _naming_failures(self._timeout_s):
            async with self._session.post(f"{self._base}{path}", json=body) as response:
                status, text = response.status, await response.text(errors="replace")
        if status != 200:
            raise _refusal(status, text)
        return _parse(text)

    def close(self) -> None:
        """End what runs and close the connections."""
        for running in list(self._running):
            running.cancel()
        self._held.close()


@contextlib.contextmanager
def _naming_failures(timeout_s: float) -> Iterator[None]:
    """Raise ConnectionError where no server is reached, ServerError where one falls silent."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise ConnectionError(_words(error)) from error
    except TimeoutError as error:
        raise ServerError(f"nothing came for {timeout_s:g} s (system.request_timeout_s)") from error
    except aiohttp.ClientError as error:
        raise ServerError(f"the connection broke: {_words(error)}") from error


def _refusal(status: int, text: str) -> ServerError:
    hint = HINTS.get(status, "")
    return ServerError(f"the server answered {status}: {text[:300]}{hint}")


async def _read(response: aiohttp.ClientResponse, answer: StreamedAnswer, on_part: OnPart) -> None:
    """Feed the events of a response to an answer, each with the time at which its bytes came."""
    events = Events()
    async for data in response.content.iter_any():
        now_s = time.perf_counter()
        before = len(answer.token_ids)
        for kind, content in events.feed(data):
            _take(kind, content, answer, now_s)
        if len(answer.token_ids) > before:
            on_part(answer)
        if answer.is_over:
            return
    now_s = time.perf_counter()
    for kind, content in events.feed(b"\n\n"):  # a last event that some servers leave open
        _take(kind, content, answer, now_s)
    kind = response.headers.get("content-type", "").partition(";")[0]
    if not answer.num_parts and kind != "text/event-stream":
        raise ServerError(f"the server sent {kind} without a token in place of a stream of events")


def _take(kind: str, content: str, answer: StreamedAnswer, now_s: float) -> None:
    if kind == "error":
        raise ServerError(f"the server sent an error: {content[:300]}")
    if content:
        answer.feed(content, now_s)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class HTTPDoor:
    """Sends each request when a client asks, without a step in between.

    `on_step` is not called: a server does not tell its steps.
    """

    def __init__(
        self, llm: Any, /, *, max_pending: int, on_step: Callable[[Any, float], None]
    ) -> None:
        del on_step
        self._llm, self._max_pending, self._pending = llm, max_pending, 0
        self._handed: deque[tuple[asyncio.Queue[list[TokenEvent]], list[TokenEvent]]] = deque()
        """What came on the client's thread and is not yet in its request's queue."""

    @property
    def failure(self) -> BaseException | None:
        """Why the server is given up."""
        failure: BaseException | None = self._llm.failure
        return failure

    def _hand_over(self) -> None:
        """Put what came into the queues; whatever comes meanwhile is put too, or calls again."""
        while self._handed:
            queue, events = self._handed[0]
            queue.put_nowait(events)
            self._handed.popleft()

    async def tokens(
        self, prompt: Any, params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[list[TokenEvent], None]:
        """Yield the tokens of a request as they come; leaving closes its connection."""
        if self._pending >= self._max_pending:
            raise RequestError(f"queue: expected fewer than {self._max_pending} requests.")
        queue: asyncio.Queue[list[TokenEvent]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(events: list[TokenEvent]) -> None:
            self._handed.append((queue, events))
            if len(self._handed) == 1:  # one call of the loop for all that come at once
                with contextlib.suppress(RuntimeError):  # the client's loop has ended
                    loop.call_soon_threadsafe(self._hand_over)

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


TIMEOUT_S: Final = 300.0
MOST_UNREACHED: Final = 10
"""Requests in a row that find no server before the run is given up."""
MOST_FAILED: Final = 100
"""Requests in a row that fail in any way before the run is given up."""
_WAIT_S: Final = 1.0
OnEvents = Callable[[list[TokenEvent]], None]


class HTTPEngine:
    """Sends requests to a server; its tokens are those that arrived."""

    last_step = None
    """A server does not tell its steps."""

    def __init__(self, config: EngineConfig, system: SystemConfig) -> None:
        self.spec, load = model_spec(config.model), PhaseClock()
        self.tokenizer = load_tokenizer(config.model.path)
        self._system = system
        self.failure: EngineError | None = None
        self._client = HTTPClient(
            str(system.base_url), _key(system), system.request_timeout_s or TIMEOUT_S
        )
        try:
            with load.phase("connect"):  # a server without /models is told which model to use
                listed = None if system.served_model else self._client.get("/models")
            self._model, self._listed = _served(listed, system)
        except EngineError:
            self._client.close()
            raise
        self.load_report = load.report()
        told = _length(self._listed.get("max_model_len"))
        longest = config.engine.max_model_len or told or self.spec.max_position_embeddings
        self.max_model_len = int(min(longest, told or longest))
        facts = {"system": "http", "base_url": system.base_url, "served_model": self._model}
        self.plan = PeerPlan(max_model_len=self.max_model_len, facts=facts)
        self._events: SimpleQueue[list[TokenEvent]] = SimpleQueue()
        self._open: dict[str, Any] = {}
        self._names, self._unreached, self._failed = count(), 0, 0
        self._counts = dict.fromkeys(
            (
                *("answers", "pieces", "parts", "tokens"),
                *("added_tokens", "surplus_tokens", "surplus_ids", "unknown_ids"),
            ),
            0,
        )
        self._mismatch: tuple[int, int] | None = None
        self._hit_tokens: int | None = None
        self._too_long: list[str] = []

    def add_request(
        self, prompt: list[int], params: SamplingParams, request_id: str | None = None
    ) -> str:
        """Send a request at once; its tokens come from `step`."""
        name = request_id or f"http-{next(self._names)}"
        self._open[name] = self.send(prompt, params, name, self._events.put)
        return name

    def send(
        self, prompt: list[int], params: SamplingParams, name: str, on_events: OnEvents
    ) -> Any:
        """Send a request; return what cancels it.

        `on_events` gets its tokens on the client's thread. The last token comes when the answer has
        ended, with the time at which it arrived. A request that fails gets one event with
        finish_reason error and the reason in stop_reason.
        """
        request = Request(request_id=name, prompt_token_ids=list(prompt), params=params)
        check_request(request, self.max_model_len, self.spec.vocab_size)
        body = self._body(request)
        run = self._run if params.prompt_logprobs is None else self._score
        return self._client.submit(lambda: run(request, body, on_events))

    def _body(self, request: Request) -> dict[str, Any]:
        """Return the body of one request; RequestError where text is sent without a tokenizer."""
        prompt: Any = request.prompt_token_ids
        if self._system.api == "chat" or self._system.prompts == "text":
            if self.tokenizer is None:
                raise RequestError(
                    "system: expected a tokenizer in the model's folder for prompts as text, found "
                    "none. Set system.api=completions and system.prompts=token_ids."
                )
            prompt = str(self.tokenizer.decode(self._without_added(prompt)))
        if self._system.api == "chat":
            content: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
        else:
            content = {"prompt": prompt}
        body = {
            "model": self._model,
            **content,
            "max_tokens": request.params.max_tokens,
            "temperature": request.params.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._system.extensions is not False:
            body |= {"ignore_eos": request.params.ignore_eos, "return_token_ids": True}
            if request.params.cache_salt is not None:
                body["cache_salt"] = request.params.cache_salt
        return body

    def _without_added(self, prompt: list[int]) -> list[int]:
        """Return a prompt without what the tokenizer adds to any text, as the server's adds it."""
        added = encode(self.tokenizer, "")
        return prompt[len(added) :] if added and prompt[: len(added)] == added else prompt

    async def _run(self, request: Request, body: dict[str, Any], on_events: OnEvents) -> None:
        sent = 0

        def emit(answer: StreamedAnswer, *, is_last: bool = False) -> None:
            nonlocal sent
            stop = len(answer.token_ids) - (0 if is_last else 1)
            events = [_event(request, answer, index) for index in range(sent, stop)]
            if is_last:
                events[-1].finish_reason = answer.finish_reason
            sent = max(sent, stop)
            if events:
                on_events(events)

        try:
            path = "/chat/completions" if self._system.api == "chat" else "/completions"
            answer = await self._client.complete(path, body, emit)
            missing = answer.end()
        except Exception as error:  # noqa: BLE001  the edge: a request without an end hangs the run
            on_events([self._failed_event(request, error)])
            return
        self._failed = self._unreached = 0
        self._note(request, answer, missing)
        emit(answer, is_last=True)

    async def _score(self, request: Request, body: dict[str, Any], on_events: OnEvents) -> None:
        """Ask for the log-probabilities of a prompt, which come with its echo, in no stream."""
        width = max(1, request.params.prompt_logprobs or 0)
        body = body | {"stream": False, "echo": True, "logprobs": width}
        del body["stream_options"]
        try:
            event = _scored(request, await self._client.ask("/completions", body))
        except Exception as error:  # noqa: BLE001  the edge: a request without an end hangs the run
            event = self._failed_event(request, error)
        else:
            self._failed = self._unreached = 0
        on_events([event])

    def _note(self, request: Request, answer: StreamedAnswer, missing: int) -> None:
        self._counts["answers"] += 1
        self._counts["pieces"] += answer.is_in_one_piece
        self._counts["parts"] += answer.num_parts
        self._counts["tokens"] += len(answer.token_ids)
        self._counts["added_tokens"] += missing
        kind = "surplus_tokens" if UNKNOWN_TOKEN in answer.token_ids else "surplus_ids"
        self._counts[kind] += answer.num_surplus
        self._counts["unknown_ids"] += answer.token_ids.count(UNKNOWN_TOKEN)
        num_tokens, asked = len(answer.token_ids), request.params.max_tokens
        if asked is not None and num_tokens > asked:
            self._too_long.append(f"{request.request_id} has {num_tokens} of {asked} tokens")
        own = len(request.prompt_token_ids)
        if answer.cached_tokens is not None:
            added = max(0, (answer.prompt_tokens or own) - own)  # a template's, in every prompt
            self._hit_tokens = (self._hit_tokens or 0) + max(0, answer.cached_tokens - added)
        if answer.prompt_tokens not in {None, own} and self._mismatch is None:
            self._mismatch = (own, int(answer.prompt_tokens or 0))

    def _failed_event(self, request: Request, error: Exception) -> TokenEvent:
        """Note that a request failed; return the event that ends it."""
        self._note_failure(error)
        is_told = isinstance(error, ServerError | ConnectionError)
        return TokenEvent(
            request_id=request.request_id,
            token_id=UNKNOWN_TOKEN,
            position=len(request.prompt_token_ids),
            finish_reason="error",
            stop_reason=str(error) if is_told else f"{type(error).__name__}: {error}",
            time_s=time.perf_counter(),
        )

    def _note_failure(self, error: Exception) -> None:
        self._failed += 1
        self._unreached = self._unreached + 1 if isinstance(error, ConnectionError) else 0
        if self.failure is not None:
            return
        if self._unreached >= MOST_UNREACHED:
            self.failure = EngineError(
                f"system.base_url: {self._unreached} requests in a row found no server ({error})."
            )
        elif self._failed >= MOST_FAILED:
            self.failure = EngineError(
                f"system.base_url: {self._failed} requests in a row failed, the last because "
                f"{error}. Mend the server, or correct the settings of system."
            )

    def step(self) -> list[TokenEvent]:
        """Wait for tokens and return those that arrived; nothing after a second without any."""
        if self.failure is not None:
            raise self.failure
        found: list[TokenEvent] = []
        try:
            found += self._events.get(timeout=_WAIT_S)
            while True:
                found += self._events.get_nowait()
        except Empty:
            pass
        found = [event for event in found if event.request_id in self._open]
        for event in found:
            if event.finish_reason is not None:
                del self._open[event.request_id]
        return found

    def has_unfinished(self) -> bool:
        """Return whether an answer is not at its end."""
        return bool(self._open)

    def abort(self, request_id: str) -> None:
        """Close the connection of a request."""
        running = self._open.pop(request_id, None)
        if running is not None:
            running.cancel()

    def stats(self) -> dict[str, Any]:
        """Return totals since the start, and what a reader of the figures must know."""
        counts = self._counts
        notes, reasons = [], []
        if counts["surplus_tokens"]:
            reasons.append(
                f"http: the server counted {counts['surplus_tokens']} tokens fewer than it sent "
                "parts with text, and without token ids each part is taken for a token: rates and "
                "times per token are wrong. Set system.extensions=true, or have the server send "
                "token ids or logprobs."
            )
        if self._too_long:
            reasons.append(
                f"http: {len(self._too_long)} answers have more tokens than were asked for; "
                f"{self._too_long[0]}. The server does not keep to max_tokens, or its usage is "
                "wrong: the figures are not those of the requested work. Fix the server."
            )
        if counts["pieces"] > counts["answers"] / 2:
            reasons.append(
                f"http: {counts['pieces']} of {counts['answers']} answers came in one piece, all "
                "tokens at one moment: times to the first token and per token are not known. Have "
                "the server stream, and nothing between hold its answers back (a proxy's buffer)."
            )
        if counts["surplus_ids"]:
            notes.append(
                f"http: the server counted {counts['surplus_ids']} tokens fewer than it sent ids; "
                "the ids count."
            )
        if counts["parts"] and counts["tokens"] != counts["parts"]:
            notes.append(
                f"http: {counts['tokens']} tokens came in {counts['parts']} parts, and those of "
                "one part have one time: gaps between tokens (ITL) are gaps between parts."
            )
        if counts["added_tokens"]:
            notes.append(
                f"http: {counts['added_tokens']} tokens are known from the server's usage alone "
                "and were given the time of the last part."
            )
        if self._mismatch is not None:
            own, theirs = self._mismatch
            notes.append(
                f"http: a prompt of {own} tokens was counted as {theirs} by the server: lengths "
                "are not those that were asked for."
            )
        if counts["answers"] and self._hit_tokens is None:
            notes.append(
                "http: the server does not tell how many prompt tokens it had in a prefix cache "
                "(usage.prompt_tokens_details): whether prompts were computed is not known. "
                "Restart it before a run, or have it tell them."
            )
        return {**counts, "prefix_hit_tokens": self._hit_tokens, "notes": notes, "reasons": reasons}

    def memory(self) -> dict[str, Any]:
        """Return nothing: the memory is the server's."""
        return {}

    def effective(self) -> dict[str, Any]:
        """Return what is known of the server."""
        return {
            "system": "http",
            "system_version": str(self._listed.get("owned_by") or "unknown"),
            "served_model": self._model,
            "base_url": self._system.base_url,
            "api": self._system.api or "completions",
            "prompts": "text"
            if self._system.api == "chat"
            else self._system.prompts or "token_ids",
            "extensions": self._system.extensions is not False,
            "emulated": None,
            "max_model_len": self.max_model_len,
            "fallbacks": [],
            "warnings": [],
        }

    def close(self) -> None:
        """End what runs and close the connections."""
        self._client.close()


def connect(system: SystemConfig, config: EngineConfig, *, progress: Progress) -> HTTPEngine:
    """Connect to the server of a configuration."""
    progress("connect", 0, 0)
    return HTTPEngine(config, system)


def remote_door(build: BuildEngine) -> EngineDoor:
    """Return the door to a server, of which `build` makes a client."""
    return EngineDoor(
        load_code=lambda: build,
        probe=nothing,
        predict=nothing,
        is_exact=False,
        open_async=HTTPDoor,
    )


def http_door(system: SystemConfig) -> EngineDoor:
    """Return the door to a server that runs already."""
    return remote_door(partial(connect, system))


def _key(system: SystemConfig) -> str | None:
    if system.api_key_env is None:
        return None
    key = os.environ.get(system.api_key_env)
    if not key:
        raise ConfigError(
            f"system.api_key_env: expected a key in the variable {system.api_key_env}, found none."
        )
    return key


def _served(listed: Any, system: SystemConfig) -> tuple[str, dict[str, Any]]:
    """Return the name of the model, and what the server tells of it where it was asked."""
    if system.served_model is not None:
        return system.served_model, {}
    rows = listed.get("data") if isinstance(listed, dict) else None
    models = {str(row.get("id")): row for row in rows or () if isinstance(row, dict)}
    name = next(iter(models), None)
    if name is None:
        raise ConfigError(
            "system.served_model: expected a model in the server's list, found none. Set the name "
            "that the server knows it by."
        )
    return name, models[name]


def _length(told: Any) -> int | None:
    """Return the longest sequence that a server tells of; None where that is no length."""
    return told if isinstance(told, int) and told > 0 else None


def _event(request: Request, answer: StreamedAnswer, index: int) -> TokenEvent:
    return TokenEvent(
        request_id=request.request_id,
        token_id=answer.token_ids[index],
        position=len(request.prompt_token_ids) + index,
        time_s=answer.times_s[index],
    )


def _scored(request: Request, answer: Mapping[str, Any]) -> TokenEvent:
    """Return an event with the log-probabilities of a prompt; ServerError where there are none.

    Of the most probable tokens a server tells texts: the best one stands under UNKNOWN_TOKEN.
    """
    prompt = request.prompt_token_ids
    found: list[dict[int, float] | None] = [None]
    try:
        told = answer["choices"][0]["logprobs"]
        rows = zip(told["token_logprobs"], told["top_logprobs"], strict=True)
        for token, (own, top) in list(zip(prompt, rows, strict=False))[1:]:
            found.append({token: float(own), UNKNOWN_TOKEN: max(map(float, top.values()))})
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        found = []
        cause: Exception | None = error
    else:
        cause = None
    if len(found) != len(prompt):
        raise ServerError(
            "the server sent no log-probabilities of the prompt with echo and logprobs"
        ) from cause
    return TokenEvent(
        request_id=request.request_id,
        token_id=UNKNOWN_TOKEN,
        position=len(prompt),
        finish_reason="length",
        time_s=time.perf_counter(),
        prompt_logprobs=found,
    )
