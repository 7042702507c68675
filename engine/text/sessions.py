"""Sessions: from prompts to requests, and from token events to text and outputs."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from numbers import Integral
from types import FrameType
from typing import Any

from engine.asked.request import (
    CompletionOutput,
    Request,
    RequestOutput,
    Sequence,
    TokenEvent,
    check_request,
    check_request_id,
)
from engine.asked.sampling import SamplingParams
from engine.errors import ConfigError, RequestError
from engine.run.core import EngineCore
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import encode


class _Keeper:
    """Keeps the first Ctrl-C for later and hands others on."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler, self.came = handler, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            self.handler(number, frame)
        self.came = True


@contextmanager
def interrupt_afterwards() -> Iterator[None]:
    """Let a first Ctrl-C wait for what runs meanwhile; a second one does not wait.

    The handler of before gets it. Within another it does nothing, nor outside the main thread,
    which alone is interrupted, nor where SIGINT has no handler of Python's.
    """
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(before) or isinstance(before, _Keeper):
        yield
        return
    keeper = _Keeper(before)
    signal.signal(signal.SIGINT, keeper)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if keeper.came:
            signal.raise_signal(signal.SIGINT)


Prompt = str | list[int]
"""Text, or token ids."""


@dataclass
class Session:
    """One request with its sequences and their text."""

    request: Request
    sequences: list[Sequence]
    detokenizers: list[IncrementalDetokenizer | None]
    texts: list[str]
    error: str | None = None
    """Why it failed."""

    def output(self) -> RequestOutput:
        """Return what the user sees of it."""
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=list(self.request.prompt_token_ids),
            outputs=[
                sequence.completion(text)
                for sequence, text in zip(self.sequences, self.texts, strict=True)
            ],
            finished=all(sequence.is_finished for sequence in self.sequences),
            error=self.error,
        )


class Sessions:
    """Tracks unfinished requests and decodes their text.

    Args:
        core: The engine's core.
        tokenizer: A transformers tokenizer, or None.
        vocab_size: Size of the model's vocabulary.
    """

    def __init__(self, core: EngineCore, tokenizer: Any | None, vocab_size: int) -> None:
        self.core = core
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._open: dict[str, Session] = {}
        self._kept: list[TokenEvent] = []
        self._arrivals, self._seq_ids = count(), count()

    def add(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None = None
    ) -> Session:
        """Check and queue a prompt.

        Raises:
            RequestError: It cannot be served.
        """
        arrival = next(self._arrivals)
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params: expected SamplingParams, got {params!r}. Pass one for all "
                "prompts, or a list with one for each."
            )
        if request_id is not None:
            check_request_id(request_id)
        params = params.copied()  # the caller may use it again for other requests
        name = f"request-{arrival}" if request_id is None else request_id
        while request_id is None and name in self._open:
            name += "+"
        if name in self._open:
            raise RequestError(f"request_id: expected an unused one, got {name!r}. Choose another.")
        request = Request(
            request_id=name,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=self._token_ids(prompt),
            params=params,
            arrival=arrival,
        )
        check_request(
            request,
            self.core.scheduler.config.max_model_len,
            self._vocab_size,
            eos_token_ids=self.core.eos_token_ids,
        )
        stop = params.stop_strings
        if stop and self._tokenizer is None:
            raise RequestError(
                f"stop: expected no stop strings, got {stop!r}: this model has no tokenizer. "
                "Use stop_token_ids."
            )
        sequences = [
            Sequence(seq_id=next(self._seq_ids), request=request, index=index)
            for index in range(params.n)
        ]
        decoders: list[IncrementalDetokenizer | None] = [
            None
            if self._tokenizer is None
            else IncrementalDetokenizer(self._tokenizer, stop, min_tokens=params.min_tokens)
            for _ in sequences
        ]
        session = Session(request, sequences, decoders, ["" for _ in sequences])
        for sequence in sequences:
            self.core.scheduler.add(sequence)
        self._open[name] = session
        return session

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return encode(self._tokenizer, prompt)
        if not isinstance(prompt, list):
            raise RequestError(
                f"prompt: expected a string or a list of token ids, got {type(prompt).__name__}."
            )
        return list(prompt)

    def apply(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Decode new tokens, end sequences at stop strings, forget finished requests."""
        found = [(event, self._open.get(event.request_id)) for event in events]
        for event, session in found:
            if session is not None and event.finish_reason == "error":
                session.error = str(event.stop_reason)
                self._flush(session, event)
            elif session is not None:
                self._decode(session, event)
        # Only now: several answers of one request may end in the same step.
        for event, session in found:
            if session and all(sequence.is_finished for sequence in session.sequences):
                self._open.pop(event.request_id, None)
        return events

    def _flush(self, session: Session, event: TokenEvent) -> None:
        """Show what was held back of a sequence that ends without a token."""
        decoder = session.detokenizers[event.index]
        if decoder is not None:
            event.text = decoder.finish()
            session.texts[event.index] += event.text

    def _decode(self, session: Session, event: TokenEvent) -> None:
        decoder = session.detokenizers[event.index]
        sequence = session.sequences[event.index]
        if decoder is None:
            return
        event.text = decoder.append(event.token_id)
        if event.finish_reason is not None:
            event.text += decoder.finish()
        session.texts[event.index] += event.text
        hit = decoder.stop_reason
        if hit is not None and event.finish_reason != "stop":
            event.finish_reason, event.stop_reason = "stop", hit
            self.core.scheduler.finish(sequence, "stop", hit)

    def abort(self, request_id: str) -> None:
        """Drop a request, and what is kept of its tokens."""
        self._kept = [event for event in self._kept if event.request_id != request_id]
        if self._open.pop(request_id, None) is not None:
            self.core.scheduler.abort(request_id)

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None,
        step: Callable[[], list[TokenEvent]],
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Queue prompts, step until they are done, return their outputs in order."""
        many = _as_prompts(prompts)
        params = _as_params(sampling_params, len(many))
        entries: list[Session | RequestOutput] = []
        try:
            for prompt, each in zip(many, params, strict=True):
                with interrupt_afterwards():
                    entries.append(self._add_or_fail(prompt, each))
            self._finish(entries, step, use_tqdm=use_tqdm)
        except BaseException:
            with interrupt_afterwards():
                for entry in entries:
                    if isinstance(entry, Session):
                        self.abort(entry.request.request_id)
            raise
        return [x.output() if isinstance(x, Session) else x for x in entries]

    def _add_or_fail(self, prompt: Prompt, params: SamplingParams) -> Session | RequestOutput:
        try:
            return self.add(prompt, params)
        except RequestError as error:
            return _failed(prompt, error)

    @property
    def has_kept(self) -> bool:
        """Whether events wait for `take_kept`."""
        return bool(self._kept)

    def keep(self, events: list[TokenEvent]) -> None:
        """Keep events that could not be returned; they come before what is kept already."""
        self._kept = events + self._kept

    def take_kept(self) -> list[TokenEvent]:
        """Return events that could not be returned when they came.

        They came while `generate` ran, of requests that are not its own, or with Ctrl-C.
        """
        kept, self._kept = self._kept, []
        return kept

    def _finish(
        self,
        entries: SequenceOf[Session | RequestOutput],
        step: Callable[[], list[TokenEvent]],
        *,
        use_tqdm: bool,
    ) -> None:
        """Step until the sessions among the entries are done."""
        waiting = {x.request.request_id for x in entries if isinstance(x, Session)}
        own, others = frozenset(waiting), list[TokenEvent]()
        try:
            with _bar(len(entries), use_tqdm) as bar:
                bar.update(len(entries) - len(waiting))
                while waiting:
                    with interrupt_afterwards():
                        others += [event for event in step() if event.request_id not in own]
                    done = waiting - self._open.keys()
                    bar.update(len(done))
                    waiting -= done
        finally:
            self.keep(others)


def _as_prompts(prompts: Prompt | SequenceOf[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise ConfigError(
            "prompts: expected a string, a list of token ids, or a list of either, got "
            f"{type(prompts).__name__}. Pass the text or the token ids themselves."
        )
    many = list(prompts)
    if many and all(isinstance(item, Integral) for item in many):
        return [many]  # type: ignore[list-item]
    return many  # type: ignore[return-value]


def _as_params(
    params: SamplingParams | SequenceOf[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if isinstance(params, Mapping) or not isinstance(params, Iterable):
        raise ConfigError(
            "sampling_params: expected SamplingParams or a list of them, got "
            f"{type(params).__name__}. Write SamplingParams(...)."
        )
    many = list(params)
    if len(many) != count:
        raise ConfigError(
            f"sampling_params: expected one, or one for each of {count} prompts, got {len(many)}."
        )
    return many


def _failed(prompt: Prompt, error: RequestError) -> RequestOutput:
    return RequestOutput(
        request_id="",
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=list(prompt) if isinstance(prompt, list) else [],
        outputs=[
            CompletionOutput(
                index=0,
                text="",
                token_ids=[],
                cumulative_logprob=None,
                logprobs=None,
                finish_reason="error",
            )
        ],
        finished=True,
        error=str(error),
    )


class _NoBar:
    def __enter__(self) -> "_NoBar":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, _: int) -> None:
        """Show nothing."""


def _bar(total: int, use_tqdm: bool) -> Any:
    if not use_tqdm:
        return _NoBar()
    from tqdm import tqdm  # noqa: PLC0415 - only where a bar is wanted

    return tqdm(total=total, desc="prompts", unit="prompt")
