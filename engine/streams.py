"""Streams: the tokens of one request on their way to a client, and the answers made of them."""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from engine.request import CompletionOutput, TokenEvent
from engine.sampling_params import SamplingParams


class Stream:
    """The way of one request's tokens from the engine's thread to the loop of its client."""

    def __init__(self, request_id: str, prompt: Any, params: SamplingParams | None) -> None:
        self.request_id, self.prompt, self.params = request_id, prompt, params
        self.open_answers = 1
        """Answers that have not ended; the engine's thread alone counts them."""
        self.prompt_token_ids: list[int] = []
        self.loop = asyncio.get_running_loop()
        """The client's."""
        self._items: deque[list[TokenEvent] | BaseException | None] = deque()
        self._wake = asyncio.Event()

    def put(self, item: list[TokenEvent] | BaseException | None) -> None:
        """Hand over tokens, an error, or None for the end; seen when the stream is woken."""
        self._items.append(item)

    async def next(self) -> tuple[list[TokenEvent], bool]:
        """Return all tokens that came since the last call, and whether they are the last.

        Raises:
            EngineError: The request failed.
        """
        while not self._items:
            self._wake.clear()
            await self._wake.wait()
        events: list[TokenEvent] = []
        while self._items:
            if isinstance(self._items[0], BaseException) and events:
                return events, False  # the error comes with the next call
            item = self._items.popleft()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                return events, True
            events += item
        return events, False

    def wake(self) -> None:
        """Let the client see what was put; to be called on its loop."""
        self._wake.set()


def wake_all(streams: Iterable[Stream]) -> list[Stream]:
    """Wake the clients of some streams, with one call for each loop; from any thread.

    Args:
        streams: to which something was put.

    Returns:
        Those whose loop is closed: nobody will read them.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[Stream]] = {}
    for stream in streams:
        by_loop.setdefault(stream.loop, []).append(stream)
    gone = []
    for loop, mine in by_loop.items():
        try:
            loop.call_soon_threadsafe(_wake_here, mine)
        except RuntimeError:
            gone += mine
    return gone


def _wake_here(streams: list[Stream]) -> None:
    for stream in streams:
        stream.wake()


@dataclass
class Answer:
    """One of the n answers, as far as its tokens are known."""

    index: int
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprob: float = 0.0
    logprobs: list[dict[int, float]] = field(default_factory=list)
    end: TokenEvent | None = None

    def add(self, event: TokenEvent) -> None:
        """Take the next token."""
        self.text.append(event.text)
        self.token_ids.append(event.token_id)
        self.logprob += event.logprob
        if event.top_logprobs is not None:
            self.logprobs.append(event.top_logprobs)
        if event.finish_reason is not None:
            self.end = event

    def output(self) -> CompletionOutput:
        """Return what the user sees of it."""
        return CompletionOutput(
            index=self.index,
            text="".join(self.text),
            token_ids=list(self.token_ids),
            cumulative_logprob=self.logprob,
            logprobs=list(self.logprobs) if self.logprobs else None,
            finish_reason=None if self.end is None else self.end.finish_reason,
            stop_reason=None if self.end is None else self.end.stop_reason,
        )
