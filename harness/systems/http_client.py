"""Requests to a server on a thread of their own, which notes when each part arrived."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, Final

from engine.errors import EngineError
from harness.systems.http_stream import EventLines, ServerError, StreamedAnswer

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
    """A session with one server; coroutines run on its own event loop.

    Args:
        base_url: such as http://localhost:8000/v1.
        api_key: sent as a bearer token; None: none is sent.
        timeout_s: longest wait for the next bytes of an answer.
    """

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float) -> None:
        self._base = base_url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout_s = timeout_s
        self._session: Any = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Start a coroutine on the client's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def get(self, path: str) -> Any:
        """Return the JSON document at a path.

        Raises:
            EngineError: the server cannot be reached or refuses.
        """
        return self.submit(self._get(path)).result()

    async def _get(self, path: str) -> Any:
        from aiohttp import ClientError  # noqa: PLC0415  an extra

        session = await self._open()
        try:
            async with session.get(f"{self._base}{path}") as response:
                if response.status != 200:
                    text = (await response.text())[:300]
                    raise EngineError(
                        f"system.base_url: {self._base}{path} answered {response.status}: {text}"
                    )
                return await response.json(content_type=None)
        except (ClientError, TimeoutError, OSError, ValueError) as error:
            raise EngineError(
                f"system.base_url: {self._base}{path} gave no answer ({_words(error)}). Start the "
                "server, or correct the address."
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
        from aiohttp import (  # noqa: PLC0415  an extra
            ClientConnectorError,
            ClientError,
            ConnectionTimeoutError,
        )

        session = await self._open()
        answer, lines, now_s = StreamedAnswer(), EventLines(), 0.0
        try:
            async with session.post(f"{self._base}{path}", json=body) as response:
                if response.status != 200:
                    text = (await response.text())[:300]
                    hint = HINTS.get(response.status, "")
                    raise ServerError(f"the server answered {response.status}: {text}{hint}")
                async for data in response.content.iter_any():
                    now_s, before = time.perf_counter(), len(answer.token_ids)
                    for content in lines.feed(data):
                        answer.feed(content, now_s)
                    if len(answer.token_ids) > before:
                        on_part(answer)
                    if answer.is_over:
                        break
                for content in lines.end():
                    answer.feed(content, now_s)
                _check_stream(response.content_type, answer)
        except (ClientConnectorError, ConnectionTimeoutError) as error:
            raise ConnectionError(_words(error)) from error
        except TimeoutError as error:
            raise ServerError(
                f"nothing came for {self._timeout_s:g} s (system.request_timeout_s)"
            ) from error
        except (ClientError, OSError) as error:
            raise ServerError(f"the connection broke: {_words(error)}") from error
        return answer

    async def _open(self) -> Any:
        if self._session is None:
            from aiohttp import ClientSession, ClientTimeout, TCPConnector  # noqa: PLC0415  an extra

            self._session = ClientSession(
                headers=self._headers,
                connector=TCPConnector(limit=0),
                timeout=ClientTimeout(
                    total=None, sock_connect=CONNECT_S, sock_read=self._timeout_s
                ),
            )
        return self._session

    def close(self) -> None:
        """End what runs and close the connections."""
        if self._loop.is_closed():
            return
        self.submit(self._close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._session is not None:
            await self._session.close()


def _check_stream(content_type: str, answer: StreamedAnswer) -> None:
    if not answer.num_parts and content_type != "text/event-stream":
        raise ServerError(
            f"the server sent {content_type} without a token, where a stream of events was asked "
            "for"
        )


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
