"""One request to the engine as a response: streamed or whole, dropped when its client leaves."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.engine_link import Answers, EngineLink
from server.errors import APIError
from server.metrics import Metrics, RequestTimes
from server.shapes import Chunk, Shape
from server.wire import Submit, Token

PING_S: Final = 15.0
"""Seconds of silence after which a stream gets a comment."""
_encode = partial(json.dumps, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
STREAM_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Generated(Response):
    """The response to one request; the engine gets its prompts when it begins.

    Args:
        link: To the engine.
        makes: A prompt's message to the engine, from its request's name.
        shape: Collects the tokens.
        metrics: Told what it took.
        prompts: For the log; None: it shows none.
        is_stream: Send events as tokens come.
        with_usage: End the stream with the usage.
        write_timeout_s: Drop a client that takes nothing for so long.
    """

    def __init__(
        self,
        link: EngineLink,
        makes: Sequence[Callable[[str], Submit]],
        shape: Shape,
        metrics: Metrics,
        *,
        prompts: Any | None,
        is_stream: bool,
        with_usage: bool,
        write_timeout_s: float,
    ) -> None:
        super().__init__()
        self._link, self._makes, self._shape, self._metrics = link, makes, shape, metrics
        self._is_stream, self._with_usage = is_stream, with_usage
        self._write_timeout_s, self._prompts = write_timeout_s, prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer.

        Raises:
            APIError: The request was refused, and nothing was sent.
        """
        times = RequestTimes(arrival_s=monotonic())
        answers = self._link.submit(self._makes)
        work = asyncio.create_task(self._answer(answers, times, send))
        gone = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_left = not work.done()
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            self._link.drop(answers)
            times.end_s = monotonic()
            reasons = ["abort"] if is_left else self._shape.finish_reasons()
            if self._shape.num_prompt_tokens:  # it was not refused
                self._metrics.note_request(times, self._shape, reasons)
            scope["state"]["told"] = {
                "prompt_tokens": self._shape.num_prompt_tokens,
                "completion_tokens": self._shape.num_tokens,
                "finish_reasons": reasons,
                "ttft_s": times.ttft_s,
            }
            if self._prompts is not None:
                texts = {"prompt": self._prompts, "answer": self._shape.texts()}
                scope["state"]["told"] |= texts
        if not is_left:
            work.result()  # raises where it was refused

    async def _answer(self, answers: Answers, times: RequestTimes, send: Send) -> None:
        if self._is_stream:
            await self._stream(answers, times, send)
        else:
            await self._whole(answers, times, send)

    async def _whole(self, answers: Answers, times: RequestTimes, send: Send) -> None:
        self._shape.begin(await answers.start())
        while found := await answers.next():
            self._note(times, found)
            for place, tokens in found:
                self._shape.feed(place, tokens)
        body = _encode(self._shape.whole()).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send(send, body, more=False)

    async def _stream(self, answers: Answers, times: RequestTimes, send: Send) -> None:
        accepted = await answers.start()
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        await self._send(send, _events(self._shape.begin(accepted)))
        try:
            while found := await self._next(answers, send):
                self._note(times, found)
                chunks = [x for place, tokens in found for x in self._shape.feed(place, tokens)]
                await self._send(send, _events(chunks))
            if self._with_usage:
                await self._send(send, _events([self._shape.usage_chunk()]))
        except APIError as error:
            await self._send(send, _events([error.body()]))
        await self._send(send, b"data: [DONE]\n\n", more=False)

    def _note(self, times: RequestTimes, found: list[tuple[int, list[Token]]]) -> None:
        num_tokens = sum(len(tokens) for _, tokens in found)
        times.note(monotonic(), num_tokens)
        self._metrics.note_tokens(num_tokens)

    async def _next(self, answers: Answers, send: Send) -> list[Any]:
        """Return the next tokens, with comments while none come."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PING_S):
                    return await answers.next()
            await self._send(send, b": ping\n\n")

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        if body or not more:
            async with asyncio.timeout(self._write_timeout_s):
                await send({"type": "http.response.body", "body": body, "more_body": more})


def _events(chunks: list[Chunk]) -> bytes:
    return "".join(f"data: {_encode(chunk)}\n\n" for chunk in chunks).encode()


async def _left(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
