"""Sessions: turn prompts into requests, and token events into text and outputs."""

import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from numbers import Integral
from types import FrameType
from typing import Any

from engine.asked.request import (
    CompletionOutput,
    Constraint,
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
from engine.text.constraints import Constraints
from engine.text.tokenizer import encode

REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
WINDOW_TOKENS = 32
"""A window longer than this is cut where that changes nothing, even amid broken bytes."""
SETTLED_TOKENS = 4
"""Tokens (a byte each at least) after which a character's bytes are complete or broken for good."""


class IncrementalDetokenizer:
    """Decodes one sequence token by token and looks for stop strings in its text.

    The pieces together equal `tokenizer.decode` of all tokens without special ones (and without the
    clean-up of spaces, which rewrites text that was shown before), up to the stop string if one
    occurs. Held back are: the bytes of an unfinished character; a run of byte tokens, because one
    bad byte breaks the whole run; and text that may be the beginning of a stop string.

    Special tokens show nothing, but a stop string that is one, or has some within it, is found
    where they were generated. It is also found where plain text spells it.

    Args:
        tokenizer: A transformers tokenizer.
        stop: Strings that end the text, none empty.
        min_tokens: A stop string counts only if it ends in the text of a later token than the
            first min_tokens - 1.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: SequenceOf[str] = (),
        *,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        special = _special_tokens(tokenizer)
        self._special = special.keys()
        self._signs, stops = _signs_of(stop, special)
        self._stops = _StopFinder(stops, self._signs.values())
        self._passed: list[tuple[int, str]] = []
        """Signs of special tokens within text that is not final, each with its place in it."""
        self._min_tokens = min_tokens
        self._num_tokens = 0
        # The window: tokens from the last cut on; the first `_num_shown` of them are shown.
        self._window: list[int] = []
        self._num_shown = 0
        self._len_shown = 0

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.found

    def append(self, token_id: int) -> str:
        """Take the next token and return the text that became final with it, maybe none."""
        self._num_tokens += 1
        self._window.append(token_id)
        is_counted = self._num_tokens >= self._min_tokens
        if token_id in self._signs:
            new = self._pass_by(self._signs[token_id], is_counted=is_counted)
        else:
            new = "" if self._is_silent(token_id) else self._sign(self._advance())
        return self._stops.push(new, is_counted=is_counted)

    def finish(self) -> str:
        """Return what was held back; no more tokens follow. Empty after a stop string."""
        if self._stops.found is not None:
            return ""
        rest = _with_signs(self._decode(self._window)[self._len_shown :], self._passed)
        piece = self._stops.push(rest, is_counted=self._num_tokens >= self._min_tokens)
        return piece + self._stops.flush()

    def _pass_by(self, sign: str, *, is_counted: bool) -> str:
        """Return what is final with a special token that a stop string has within it."""
        pending = self._decode(self._window)[self._len_shown :]
        if not pending:
            return sign
        new = _with_signs(pending, [*self._passed, (len(pending), sign)])
        if is_counted and self._stops.would_end(new):
            return new  # later tokens, which could change the pending text, are beyond the stop
        # Amid the bytes of a character it goes before that: their number is not that of characters.
        self._passed.append((len(pending.rstrip(REPLACEMENT)), sign))
        return ""

    def _sign(self, new: str) -> str:
        """Return text that became final, with the signs of special tokens that were passed in it.

        Those at its end come with it: the text before them is complete.
        """
        if not self._passed:
            return new
        is_all = self._num_shown == len(self._window)
        passed = [(at, sign) for at, sign in self._passed if is_all or at <= len(new)]
        self._passed = [(at - len(new), sign) for at, sign in self._passed[len(passed) :]]
        return _with_signs(new, passed)

    def _is_silent(self, token_id: int) -> bool:
        """Whether the token shows nothing by itself: special, unknown, or in a run of bytes."""
        if token_id in self._special:
            return True
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return token is None or BYTE_TOKEN.fullmatch(token) is not None

    def _advance(self) -> str:
        """Decode the window and return what is new and final in it."""
        text = self._decode(self._window)
        final = text.rstrip(REPLACEMENT)
        new = final[self._len_shown :]
        self._len_shown = max(self._len_shown, len(final))
        if len(final) == len(text):
            if self._num_shown:
                # The rest stays as context, because a decoder may treat the first word specially.
                self._window = self._window[self._num_shown :]
                self._len_shown = len(self._decode(self._window))
            self._num_shown = len(self._window)
        elif len(self._window) > WINDOW_TOKENS:
            new += self._cut_broken(text)
        return new

    def _cut_broken(self, text: str) -> str:
        """Show broken bytes that nothing can mend any more, and drop their tokens."""
        for at in range(len(self._window) - SETTLED_TOKENS, 0, -1):
            head, tail = self._decode(self._window[:at]), self._decode(self._window[at:])
            if tail and head + tail == text and len(head) >= self._len_shown:
                new = head[self._len_shown :]
                final = tail.rstrip(REPLACEMENT)
                self._window = self._window[at:]
                self._num_shown = 0
                self._len_shown = len(final)
                return new + final
        return ""

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class _StopFinder:
    """Looks for stop strings in a stream of text and holds back what may begin one.

    `stops` are named by what they look like in the stream; `signs`, characters of the stream that
    stand for special tokens, are not shown.
    """

    def __init__(self, stops: Mapping[str, str], signs: Iterable[str]) -> None:
        self._stops = stops
        self._hidden = dict.fromkeys(map(ord, signs))
        self._held = ""
        self.found: str | None = None

    def push(self, new: str, *, is_counted: bool) -> str:
        """Take text; return what is final. Stops that end in `new` count only if `is_counted`."""
        if not self._stops:
            return new
        text = self._held + new
        if is_counted and new:
            ends = self._ends(text)
            if ends:
                # The one that is complete first ends the text, the longest of those.
                _, at, stop = min(ends)
                self._held, self.found = "", self._stops[stop]
                return self._shown(text[:at])
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return self._shown(text[: len(text) - keep])

    def would_end(self, new: str) -> bool:
        """Return whether a stop string would be complete in the text."""
        return bool(self._ends(self._held + new))

    def flush(self) -> str:
        """Return what is held back."""
        held, self._held = self._held, ""
        return self._shown(held)

    def _ends(self, text: str) -> list[tuple[int, int, str]]:
        """Stops in held text and new that end in the new part: end, place and what they are."""
        seen = len(self._held)
        places = [(stop, text.find(stop, max(0, seen - len(stop) + 1))) for stop in self._stops]
        return [(at + len(stop), at, stop) for stop, at in places if at >= 0]

    def _shown(self, text: str) -> str:
        return text.translate(self._hidden) if self._hidden else text


def _with_signs(text: str, passed: Iterable[tuple[int, str]]) -> str:
    """Return text with signs at places in it, which do not fall; beyond its end at its end."""
    parts, begin = [], 0
    for at, sign in passed:
        parts += [text[begin:at], sign]
        begin = max(begin, at)
    return "".join([*parts, text[begin:]])


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop` without being all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the texts of special tokens by id."""
    added = tokenizer.added_tokens_decoder
    found = {i: token.content for i, token in added.items() if token.special}
    for token_id in tokenizer.all_special_ids:
        if token_id not in found:
            found[token_id] = tokenizer.convert_ids_to_tokens(token_id) or ""
    return found


def _signs_of(
    stop: SequenceOf[str], special: Mapping[int, str]
) -> tuple[dict[int, str], dict[str, str]]:
    """Give special tokens that occur in stop strings a sign each: a character that no text has.

    Returns:
        The signs by token id, and the stop strings by what is looked for: each as it is, and with
        signs for special tokens if it has some.
    """
    stops, whole = {text: text for text in stop}, "".join(stop)
    texts = sorted({x for x in special.values() if x and x in whole}, key=len, reverse=True)
    if not texts:
        return {}, stops
    lone = (chr(code) for code in range(0xD800, 0xE000) if chr(code) not in whole)
    signs = dict(zip(texts, lone, strict=False))
    pattern = re.compile("|".join(map(re.escape, texts)))
    for text in stop:
        stops[pattern.sub(lambda found: signs[found[0]], text)] = text
    return {i: signs[text] for i, text in special.items() if text in signs}, stops


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
        first = self.sequences[0]
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
            num_cached_tokens=first.num_cached_tokens if first.num_output_tokens else None,
            prompt_logprobs=first.known_prompt_logprobs,
        )


class Sessions:
    """Tracks unfinished requests and decodes their text, with a transformers tokenizer if any."""

    def __init__(self, core: EngineCore, tokenizer: Any | None, vocab_size: int) -> None:
        self.core = core
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self.constraints = Constraints(tokenizer, vocab_size, core.eos_token_ids)
        self._open: dict[str, Session] = {}
        self.kept: list[TokenEvent] = []
        """Events that could not be returned when they came: while `generate` ran, of requests that
        are not its own, or with Ctrl-C."""
        self._arrivals, self._seq_ids = count(), count()

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None = None,
        priority: int = 0,
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
                "prompts, or a list with one for each.",
                param="sampling_params",
            )
        params = params.copied()  # the caller may use it again for other requests
        request = Request(
            request_id=self._name(request_id, arrival),
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=self._token_ids(prompt),
            params=params,
            arrival=arrival,
            priority=priority,
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
                "Use stop_token_ids.",
                param="stop",
            )
        constraints: list[Constraint | None] = [None] * params.n
        if params.structured is not None:
            constraints = [*self.constraints.make(params.structured, params.n)]
        sequences = [
            Sequence(
                seq_id=next(self._seq_ids), request=request, index=index, constraint=constraint
            )
            for index, constraint in enumerate(constraints)
        ]
        decoders: list[IncrementalDetokenizer | None] = [None] * params.n
        if self._tokenizer is not None:
            decoders = [
                IncrementalDetokenizer(self._tokenizer, stop, min_tokens=params.min_tokens)
                for _ in sequences
            ]
        session = Session(request, sequences, decoders, [""] * params.n)
        for sequence in sequences:
            self.core.scheduler.add(sequence)
        self._open[request.request_id] = session
        return session

    def _name(self, request_id: str | None, arrival: int) -> str:
        """Return the name of a request: the given one, else one of its own."""
        if request_id is not None:
            check_request_id(request_id)
        name = f"request-{arrival}" if request_id is None else request_id
        while request_id is None and name in self._open:
            name += "+"
        if name in self._open:
            raise RequestError(
                f"request_id: expected an unused one, got {name!r}. Choose another.",
                param="request_id",
            )
        return name

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return encode(self._tokenizer, prompt)
        if not isinstance(prompt, list):
            raise RequestError(
                f"prompt: expected a string or a list of token ids, got {type(prompt).__name__}.",
                param="prompt",
            )
        return list(prompt)

    def apply(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Decode new tokens, end sequences at stop strings, forget finished requests.

        Tokens of a step beyond a stop string are dropped.
        """
        counted = [event for event in events if self._decode(event)]
        # Only now: several answers of one request may end in the same step.
        for event in counted:
            session = self._open.get(event.request_id)
            if session and all(sequence.is_finished for sequence in session.sequences):
                del self._open[event.request_id]
        return counted

    def _decode(self, event: TokenEvent) -> bool:
        """Take an event; return whether it counts: no token does behind a stop string."""
        session = self._open.get(event.request_id)
        if session is None:
            return True
        decoder, index = session.detokenizers[event.index], event.index
        is_error = event.finish_reason == "error"
        if is_error:
            session.error = str(event.stop_reason)
        if decoder is None:
            return True
        if is_error:
            event.text = decoder.finish()  # it ends without a token
        elif decoder.stop_reason is not None:
            return False
        else:
            event.text = decoder.append(event.token_id)
            if event.finish_reason is not None:
                event.text += decoder.finish()
        session.texts[index] += event.text
        hit = decoder.stop_reason
        if not is_error and hit is not None and event.finish_reason != "stop":
            event.finish_reason, event.stop_reason = "stop", hit
            sequence = session.sequences[index]
            self.core.scheduler.finish(sequence, "stop", hit, length=event.position + 1)
        return True

    def abort(self, request_id: str) -> None:
        """Drop a request, and what is kept of its tokens."""
        self.kept = [event for event in self.kept if event.request_id != request_id]
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
                    try:
                        entries.append(self.add(prompt, each))
                    except RequestError as error:
                        entries.append(_failed(prompt, error))
            self._finish(entries, step, use_tqdm=use_tqdm)
        except BaseException:
            with interrupt_afterwards():
                for entry in entries:
                    if isinstance(entry, Session):
                        self.abort(entry.request.request_id)
            raise
        return [x.output() if isinstance(x, Session) else x for x in entries]

    def keep(self, events: list[TokenEvent]) -> None:
        """Keep events that could not be returned; they come before what is kept already."""
        self.kept = events + self.kept

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
        with ExitStack() as stack:
            stack.callback(self.keep, others)
            bar, failed = None, len(entries) - len(waiting)
            if use_tqdm:
                from tqdm import tqdm  # noqa: PLC0415 - only where a bar is wanted

                bar = tqdm(total=len(entries), initial=failed, desc="prompts", unit="prompt")
                stack.enter_context(bar)
            while waiting:
                with interrupt_afterwards():
                    others += [event for event in step() if event.request_id not in own]
                done = waiting - self._open.keys()
                if bar is not None:
                    bar.update(len(done))
                waiting -= done


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
        outputs=[CompletionOutput(index=0, finish_reason="error")],
        finished=True,
        error=str(error),
    )
