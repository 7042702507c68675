"""Requests to a server on a thread of their own, which notes when each part arrived."""

import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, Final

import httpx
from anyio.from_thread import start_blocking_portal
from httpx_sse import EventSource

from engine.errors import EngineError
from harness.systems.http_stream import ServerError, StreamedAnswer

CONNECT_S: Final = 30.0
"""Longest wait for a connection."""
_FIELDS: Final = (
    ". A server that knows published fields alone wants system.extensions=false, one that takes no "
    "token ids system.prompts=text"
)
HINTS: Final = MappingProxyType(
    {
        400: _FIELDS,
        422: _FIELDS,
        404: ". A server that knows chats alone wants system.api=chat",
        405: ". A server that knows chats alone wants system.api=chat",
    }
)
"""Status of a refusal -> what it may be about."""
OnPart = Callable[[StreamedAnswer], None]


class HTTPClient:
    """A session with one server, on an event loop of its own.

    An event costs 63 us of CPU time, of 32 answers at once: one core takes 16,000 tokens a second.

    Args:
        base_url: such as http://localhost:8000/v1.
        api_key: sent as a bearer token; None: none is sent.
        timeout_s: longest wait for the next bytes of an answer.
    """

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float) -> None:
        self._base, self._timeout_s = base_url.rstrip("/"), timeout_s
        self._running: set[Future[Any]] = set()
        self._held = ExitStack()
        self._portal = self._held.enter_context(start_blocking_portal())
        session = httpx.AsyncClient(
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            limits=httpx.Limits(max_connections=None),
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S, pool=None),
            follow_redirects=True,
            trust_env=False,
        )
        self._session = self._held.enter_context(self._portal.wrap_async_context_manager(session))

    def submit(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> "Future[Any]":
        """Start a coroutine on the client's thread."""
        running = self._portal.start_task_soon(work)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return running

    def get(self, path: str) -> Any:
        """Return the JSON document at a path.

        Raises:
            EngineError: the server cannot be reached or refuses.
        """
        address = f"{self._base}{path}"
        try:
            response = self._portal.call(self._session.get, address)
            if response.status_code != 200:
                raise EngineError(
                    f"system.base_url: {address} answered {response.status_code}: "
                    f"{response.text[:300]}"
                )
            return response.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise EngineError(
                f"system.base_url: {address} gave no answer ({_words(error)}). Start the server, "
                "or correct the address."
            ) from error

    async def complete(self, path: str, body: dict[str, Any], on_part: OnPart) -> StreamedAnswer:
        """Send one request and return its whole answer.

        Args:
            path: below the base address.
            body: of the request.
            on_part: called when tokens came, and never after the end.

        Raises:
            ServerError: the server refused, broke off, or sent what is no answer.
            ConnectionError: it cannot be reached.
        """
        answer = StreamedAnswer()
        try:
            async with self._session.stream("POST", f"{self._base}{path}", json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")[:300]
                    hint = HINTS.get(response.status_code, "")
                    raise ServerError(f"the server answered {response.status_code}: {text}{hint}")
                await _read(response, answer, on_part)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ConnectionError(_words(error)) from error
        except httpx.TimeoutException as error:
            raise ServerError(
                f"nothing came for {self._timeout_s:g} s (system.request_timeout_s)"
            ) from error
        except httpx.HTTPError as error:
            raise ServerError(f"the connection broke: {_words(error)}") from error
        return answer

    def close(self) -> None:
        """End what runs and close the connections."""
        for running in list(self._running):
            running.cancel()
        self._held.close()


async def _read(response: httpx.Response, answer: StreamedAnswer, on_part: OnPart) -> None:
    """Feed the events of a response to an answer, each with the time at which its bytes came."""
    arrivals = _Arrivals(response.stream)
    response.stream = arrivals
    kind = response.headers.get("content-type", "").partition(";")[0]
    response.headers["content-type"] = "text/event-stream"  # some servers name it otherwise
    async for event in EventSource(response).aiter_sse():
        before = len(answer.token_ids)
        if event.data:
            answer.feed(event.data, arrivals.last_s)
        if len(answer.token_ids) > before:
            on_part(answer)
        if answer.is_over:
            break
    if not answer.num_parts and kind != "text/event-stream":
        raise ServerError(
            f"the server sent {kind} without a token, where a stream of events was asked for"
        )


class _Arrivals(httpx.AsyncByteStream):
    """The bytes of a response, and when the last ones came.

    Args:
        stream: of the response.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self.last_s = stream, 0.0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for data in self._stream:
            self.last_s = time.perf_counter()
            yield data
        yield b"\n\n"  # ends a last event that some servers leave open

    async def aclose(self) -> None:
        """Close the response."""
        await self._stream.aclose()


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
