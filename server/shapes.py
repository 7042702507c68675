"""Answers in OpenAI's shapes: the chunks of a stream and the whole, from the same tokens."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from server.tools import Call, ToolParser, parser_of
from server.wire import Accepted, PromptToken, Token, TokenText

Chunk = dict[str, Any]


class Shape(Protocol):
    """Collects the tokens of one client's request."""

    num_prompt_tokens: int
    num_tokens: int
    """Of all answers."""

    def begin(self, accepted: Sequence[Accepted]) -> list[Chunk]:
        """Return the chunks that come before any token."""

    def feed(self, place: int, tokens: list[Token]) -> list[Chunk]:
        """Take new tokens of a prompt's answers; return their chunks."""

    def usage_chunk(self) -> Chunk:
        """Return the chunk that tells the usage and no choice."""

    def whole(self) -> dict[str, Any]:
        """Return the answer of a request that is no stream."""

    def finish_reasons(self) -> list[str]:
        """Return why each answer ended."""

    def texts(self) -> list[str]:
        """Return each answer's text so far."""


@dataclass
class _Choice:
    """One answer in the making."""

    index: int
    parser: ToolParser
    texts: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    """Kept where the whole answer needs them."""
    place: int = 0
    """Of its prompt among the request's."""
    has_echoed: bool = False
    """Whether the log-probabilities of its prompt were told."""
    begin: int = 0
    """Characters of its prompt, where that is echoed."""
    num_characters: int = 0
    """Of these and its tokens' own texts, where the next token begins."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprob: float = 0.0
    num_tokens: int = 0


class _Collected:
    """What both shapes do: numbers, usage, the frame of a chunk."""

    kind = ""
    chunk_kind = ""
    prefix = ""

    def __init__(
        self,
        model: str,
        num_prompts: int,
        n: int,
        *,
        with_usage: bool,
        running_usage: bool,
        with_ids: bool,
        with_logprobs: bool,
    ) -> None:
        self._with_usage, self._running_usage = with_usage, running_usage
        self._with_ids, self._with_logprobs = with_ids, with_logprobs
        self._n = n
        self.num_prompt_tokens = self.num_cached_tokens = self.num_tokens = 0
        self._base: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid4().hex}",
            "object": self.chunk_kind,
            "created": int(time.time()),
            "model": model,
        }
        self.choices = [self._choice(index) for index in range(num_prompts * n)]

    def _choice(self, index: int) -> _Choice:
        return _Choice(index, parser_of("none"), place=index // self._n)

    def _frame(self, choices: list[Chunk], usage: dict[str, Any] | None = None) -> Chunk:
        chunk = {**self._base, "choices": choices}
        if usage is not None or self._with_usage or self._running_usage:
            running = self._usage() if self._running_usage else None
            chunk["usage"] = usage if usage is not None else running
        return chunk

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    def usage_chunk(self) -> Chunk:
        """Return the chunk that tells the usage and no choice."""
        return self._frame([], self._usage())

    def finish_reasons(self) -> list[str]:
        """Return why each answer ended."""
        return [choice.finish_reason or "abort" for choice in self.choices]

    def texts(self) -> list[str]:
        """Return each answer's text so far."""
        return ["".join(choice.texts) for choice in self.choices]

    def _take(self, place: int, tokens: list[Token]) -> dict[int, list[Token]]:
        """Note tokens of a prompt; return them by choice."""
        self.num_tokens += len(tokens)
        grouped: dict[int, list[Token]] = {}
        for token in tokens:
            index = place * self._n + token.number
            grouped.setdefault(index, []).append(token)
            choice = self.choices[index]
            choice.num_tokens += 1
            choice.logprob += token.logprob
            if token.start is not None:
                self.num_cached_tokens += token.start.num_cached_tokens
            if self._with_ids or self._with_logprobs:
                choice.tokens.append(token)
            if token.finish_reason is not None:
                choice.finish_reason, choice.stop_reason = token.finish_reason, token.stop_reason
        return grouped


class CompletionShape(_Collected):
    """An answer of /v1/completions.

    Args:
        best: Answers of each prompt that are kept; None: all.
        echo: The prompts as the client sent them, which begin the answers; None: no echo.
        **common: Of both shapes.
    """

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(
        self, *args: Any, best: int | None, echo: Sequence[Any] | None, **common: Any
    ) -> None:
        super().__init__(*args, **common)
        self._best, self._echo = best, echo
        self._prompts: dict[int, tuple[PromptToken, ...]] = {}
        """Tokens of the prompts that are echoed with log-probabilities, by place."""

    def begin(self, accepted: Sequence[Accepted]) -> list[Chunk]:
        """Return the prompts where they are echoed."""
        self.num_prompt_tokens = sum(len(each.prompt_token_ids) for each in accepted)
        if self._echo is None:
            return []
        chunks = []
        for choice in self.choices:
            place = choice.index // self._n
            text = self._echo[place]
            text = text if isinstance(text, str) else accepted[place].prompt_text or ""
            choice.texts.append(text)
            choice.begin = choice.num_characters = len(text)
            chunks.append(self._frame([self._part(choice, text, [])]))
        return chunks

    def feed(self, place: int, tokens: list[Token]) -> list[Chunk]:
        """Take new tokens of a prompt's answers; return their chunks."""
        chunks = []
        for token in tokens:
            if token.prompt is not None:
                self._prompts[place] = token.prompt
        for index, mine in self._take(place, tokens).items():
            choice = self.choices[index]
            text = "".join(token.text for token in mine)
            choice.texts.append(text)
            if text or self._with_ids or self._with_logprobs or choice.finish_reason is not None:
                chunks.append(self._frame([self._part(choice, text, mine)]))
        return chunks

    def _part(self, choice: _Choice, text: str, tokens: list[Token]) -> Chunk:
        part: Chunk = {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, tokens) if self._with_logprobs and tokens else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._with_ids:
            part["token_ids"] = [token.token_id for token in tokens]
        return part

    def _logprobs(self, choice: _Choice, tokens: list[Token]) -> dict[str, Any]:
        found: dict[str, Any] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        if self._echo is not None and not choice.has_echoed:
            choice.has_echoed, end = True, choice.num_characters
            choice.num_characters = 0
            for each in self._prompts.get(choice.place, ()):
                _tell(found, choice, each.own, each.top)
            choice.num_characters = end
        for token in tokens:
            assert token.own is not None
            _tell(found, choice, token.own, token.top)
        return found

    def whole(self) -> dict[str, Any]:
        """Return the answer of a request that is no stream."""
        kept = self.choices
        if self._best is not None and self._best < self._n:
            kept = []
            for begin in range(0, len(self.choices), self._n):
                mine = self.choices[begin : begin + self._n]
                mine.sort(key=lambda choice: -choice.logprob / max(1, choice.num_tokens))
                kept += mine[: self._best]
        for place, choice in enumerate(kept):
            choice.index, choice.num_characters = place, choice.begin
            choice.has_echoed = False
        choices = [self._part(choice, "".join(choice.texts), choice.tokens) for choice in kept]
        return {**self._base, "object": self.kind, "choices": choices, "usage": self._usage()}


def _tell(found: dict[str, Any], choice: _Choice, own: TokenText, top: Sequence[TokenText]) -> None:
    """Append a token to the lists of a completion's log-probabilities."""
    is_first = math.isnan(own.logprob) and not top  # of an echoed prompt
    named: dict[str, float] = {}
    for each in top:  # the most probable first; one text may be several tokens'
        named.setdefault(each.text, _finite(each.logprob))
    found["tokens"].append(own.text)
    found["token_logprobs"].append(None if is_first else _finite(own.logprob))
    found["top_logprobs"].append(None if is_first else named)
    found["text_offset"].append(choice.num_characters)
    choice.num_characters += len(own.text)


class ChatShape(_Collected):
    """An answer of /v1/chat/completions.

    Args:
        num_top: Most probable tokens that log-probabilities name.
        tool_parser: The form of calls of tools; none.
        only_one_call: Drop calls behind the first.
        **common: Of both shapes.
    """

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(
        self, *args: Any, num_top: int, tool_parser: str, only_one_call: bool, **common: Any
    ) -> None:
        self._num_top, self._tool_parser, self._only_one = num_top, tool_parser, only_one_call
        super().__init__(*args, **common)

    def _choice(self, index: int) -> _Choice:
        return _Choice(index, parser_of(self._tool_parser))

    def begin(self, accepted: Sequence[Accepted]) -> list[Chunk]:
        """Return each answer's role."""
        self.num_prompt_tokens = sum(len(each.prompt_token_ids) for each in accepted)
        role = {"role": "assistant", "content": ""}
        return [
            self._frame([self._part(choice, role, [], is_open=True)]) for choice in self.choices
        ]

    def feed(self, place: int, tokens: list[Token]) -> list[Chunk]:
        """Take new tokens of a prompt's answers; return their chunks."""
        chunks = []
        for index, mine in self._take(place, tokens).items():
            choice = self.choices[index]
            pieces = choice.parser.feed("".join(token.text for token in mine))
            if choice.finish_reason is not None:
                pieces += choice.parser.finish()
            deltas: list[Chunk] = []
            for piece in pieces:
                if isinstance(piece, str):
                    choice.texts.append(piece)
                    deltas.append({"content": piece})
                elif not (self._only_one and choice.calls):
                    place_of_call = len(choice.calls)
                    choice.calls.append(piece)
                    deltas.append({"tool_calls": [_tool_call(piece, place_of_call)]})
            if choice.calls and choice.finish_reason == "stop":
                choice.finish_reason = "tool_calls"
            if not deltas and (self._with_ids or self._with_logprobs):
                deltas = [{}]
            for number, delta in enumerate(deltas):
                # All tokens go with the first of the chunks that they made.
                told = mine if number == 0 else []
                chunks.append(self._frame([self._part(choice, delta, told, is_open=True)]))
            if choice.finish_reason is not None:
                chunks.append(self._frame([self._part(choice, {}, [])]))
        return chunks

    def _part(
        self, choice: _Choice, delta: Chunk, tokens: list[Token], *, is_open: bool = False
    ) -> Chunk:
        part: Chunk = {
            "index": choice.index,
            "delta": delta,
            "logprobs": self._logprobs(tokens) if self._with_logprobs and tokens else None,
            "finish_reason": None if is_open else choice.finish_reason,
        }
        if not is_open:
            part["stop_reason"] = choice.stop_reason
        if self._with_ids:
            part["token_ids"] = [token.token_id for token in tokens]
        return part

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any]:
        content = []
        for token in tokens:
            assert token.own is not None
            top = [_logprob(each) for each in token.top[: self._num_top]]
            content.append(_logprob(token.own) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def whole(self) -> dict[str, Any]:
        """Return the answer of a request that is no stream."""
        choices = []
        for choice in self.choices:
            text = "".join(choice.texts)
            message: dict[str, Any] = {
                "role": "assistant",
                "content": None if choice.calls and not text else text,
                "refusal": None,
            }
            if choice.calls:
                message["tool_calls"] = [_tool_call(call) for call in choice.calls]
            part: dict[str, Any] = {
                "index": choice.index,
                "message": message,
                "logprobs": self._logprobs(choice.tokens) if self._with_logprobs else None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            if self._with_ids:
                part["token_ids"] = [token.token_id for token in choice.tokens]
            choices.append(part)
        return {**self._base, "object": self.kind, "choices": choices, "usage": self._usage()}


def _tool_call(call: Call, index: int | None = None) -> dict[str, Any]:
    found = {
        "id": f"call_{uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
    return found if index is None else {"index": index, **found}


def _logprob(token: TokenText) -> dict[str, Any]:
    return {
        "token": token.text,
        "logprob": _finite(token.logprob),
        "bytes": list(token.raw) if token.raw else None,
    }


def _finite(logprob: float) -> float:
    """Return a log-probability that JSON can write: -inf is none."""
    return max(logprob, -9999.0)
