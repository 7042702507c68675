"""Answers of an OpenAI-compatible server, part by part: tokens, their times, and how they ended."""

import json
from dataclasses import dataclass, field
from typing import Any, Final

from engine.asked.request import FinishReason, Request
from engine.errors import RequestError
from harness.config.schema import SystemConfig
from harness.systems.base import UNKNOWN_TOKEN


class Bodies:
    """Bodies of requests to one server.

    Args:
        system: what the server takes.
        model: the name that it knows the model by.
        tokenizer: decodes prompts where text is sent; None: there is none.
    """

    def __init__(self, system: SystemConfig, model: str, tokenizer: Any) -> None:
        self._system, self._model, self._tokenizer = system, model, tokenizer

    @property
    def path(self) -> str:
        """Where they are posted to, below the base address."""
        return "/chat/completions" if self._system.api == "chat" else "/completions"

    def of(self, request: Request) -> dict[str, Any]:
        """Return the body of one request.

        Raises:
            RequestError: text is sent and there is no tokenizer.
        """
        body: dict[str, Any] = {
            "model": self._model,
            **self._prompt(request.prompt_token_ids),
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

    def _prompt(self, ids: list[int]) -> dict[str, Any]:
        if self._system.api == "chat":
            return {"messages": [{"role": "user", "content": self._text(ids)}]}
        return {"prompt": self._text(ids) if self._system.prompts == "text" else ids}

    def _text(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            raise RequestError(
                "system: expected a tokenizer in the model's folder for prompts as text, found "
                "none. Set system.api=completions and system.prompts=token_ids."
            )
        return str(self._tokenizer.decode(ids))


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

        Raises:
            ServerError: it is an error, no JSON object, or not of the published form.
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
            reason = choice.get("finish_reason")
            if reason is not None:
                self.finish_reason = "length" if reason == "length" else _reason(reason)

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

        Raises:
            ServerError: it ended early, or without a token.
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
    if part.get("error"):
        raise ServerError(f"the server sent an error: {part['error']}")
    return part


def _whole(value: Any, before: int | None) -> int | None:
    """Return a count of the server's; `before` where it tells none."""
    return before if value is None else int(value)


def _reason(reason: str) -> FinishReason:
    if reason == "stop":
        return "stop"
    raise ServerError(f"the server ended the answer with {reason!r}")


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
