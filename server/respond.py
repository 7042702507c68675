"""One request to the engine as a response: streamed or whole, dropped when its client leaves."""

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.engine_link import Answers, EngineLink
from server.errors import APIError
from server.metrics import Metrics, RequestTimes
from server.shapes import Chunk, Shape
from server.wire import Accepted, Submit, Token

PING_S: Final = 15.0
"""Seconds of silence after which a stream gets a comment."""
WATCH_S: Final = 5.0
"""Seconds between two looks at whether a client takes its answer."""
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
        limits: The n and max_tokens that were asked for.
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
        limits: tuple[int, int | None],
        prompts: Any | None,
        is_stream: bool,
        with_usage: bool,
        write_timeout_s: float,
    ) -> None:
        super().__init__()
        self._link, self._makes, self._shape, self._metrics = link, makes, shape, metrics
        self._limits, self._is_stream, self._with_usage = limits, is_stream, with_usage
        self._write_timeout_s, self._prompts = write_timeout_s, prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer.

        Raises:
            APIError: The request was refused, and nothing was sent.
        """
        times = RequestTimes(arrival_s=monotonic())
        answers = self._link.submit(self._makes)
        line = _Line(send)
        work = asyncio.create_task(self._answer(answers, times, line))
        gone = asyncio.create_task(_left(receive))
        watch = asyncio.create_task(line.watch(self._write_timeout_s, pings=self._is_stream))
        try:
            await asyncio.wait({work, gone, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_left = not work.done()
            for task in (work, gone, watch):
                task.cancel()
            await asyncio.gather(work, gone, watch, return_exceptions=True)
            self._link.drop(answers)
            times.end_s = monotonic()
            reasons = ["abort"] if is_left else self._shape.finish_reasons()
            if self._shape.num_prompt_tokens:  # it was not refused
                self._metrics.note_request(times, self._shape, reasons, self._limits)
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

    async def _answer(self, answers: Answers, times: RequestTimes, line: "_Line") -> None:
        if self._is_stream:
            await self._stream(answers, times, line)
        else:
            await self._whole(answers, times, line)

    async def _whole(self, answers: Answers, times: RequestTimes, line: "_Line") -> None:
        self._begin(await answers.start())
        while found := await answers.next():
            self._note(times, found)
            for place, tokens in found:
                self._shape.feed(place, tokens)
        body = to_json(self._shape.whole())
        await line.begin(
            [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
            ]
        )
        await line.send(body, more=False)

    async def _stream(self, answers: Answers, times: RequestTimes, line: "_Line") -> None:
        accepted = await answers.start()
        await line.begin(STREAM_HEADERS)
        await line.send(_events(self._begin(accepted)))
        try:
            while found := await answers.next():
                self._note(times, found)
                chunks = [x for place, tokens in found for x in self._shape.feed(place, tokens)]
                await line.send(_events(chunks))
            if self._with_usage:
                await line.send(_events([self._shape.usage_chunk()]))
        except APIError as error:
            await line.send(_events([error.body()]))
        await line.send(b"data: [DONE]\n\n", more=False)

    def _begin(self, accepted: Sequence[Accepted]) -> list[Chunk]:
        """Return the chunks before any token; count the prompts before a client sees an answer."""
        chunks = self._shape.begin(accepted)
        self._metrics.note_prompt(self._shape.num_prompt_tokens)
        return chunks

    def _note(self, times: RequestTimes, found: list[tuple[int, list[Token]]]) -> None:
        tokens = [token for _, mine in found for token in mine]
        times.note(monotonic(), tokens)
        self._metrics.note_tokens(len(tokens))


class _Line:
    """The way of one response to its client; `watch` sees when that takes nothing of it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._since_s = monotonic()
        self._is_sending = self._is_open = False

    async def begin(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head of a response."""
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._is_open = True

    async def send(self, body: bytes, *, more: bool = True) -> None:
        """Send a part of it; waits while the client takes none."""
        if more and not body:
            return
        self._since_s, self._is_sending = monotonic(), True
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._is_sending = False

    async def watch(self, timeout_s: float, *, pings: bool) -> None:
        """Return when a part waits for the client for too long; until then keep a stream alive."""
        while True:
            await asyncio.sleep(min(WATCH_S, timeout_s / 2))
            silent_s = monotonic() - self._since_s
            if self._is_sending:
                if silent_s >= timeout_s:
                    return
            elif pings and self._is_open and silent_s >= PING_S:
                await self.send(b": ping\n\n")


def _events(chunks: list[Chunk]) -> bytes:
    # Many clients end a line, or cut a character in two, where text beyond ASCII stands as it is.
    return b"".join([b"data: %b\n\n" % to_json(chunk, ensure_ascii=True) for chunk in chunks])


async def _left(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
