"""Text of requests and answers in the engine's process: templates, tokens, what clients see."""

import math
import re
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from engine.asked.request import NO_TOKEN, TokenEvent
from engine.asked.sampling import SamplingParams
from engine.errors import ConfigError, RequestError
from engine.text.tokenizer import chat_text
from server.wire import Chat, Prompt, PromptToken, Start, Token, TokenText

if TYPE_CHECKING:
    from engine.llm import LLM

REPLACEMENT: Final = "\ufffd"
MOST_COUNTED: Final = 4 * 2**20
"""Characters of a text whose tokens are counted: seconds of a core, and no more memory."""
SHORTENED: Final = 4
"""How many times shorter a tokenizer's normalization may make a text."""
_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Text:
    """The tokenizer and the chat template of one engine.

    `encode`, `decode` and `pieces` run on threads: they change nothing.
    """

    def __init__(self, llm: "LLM", chat_template: str | None) -> None:
        self._tokenizer: Any = llm.tokenizer
        self._max_model_len, self._vocab_size = llm.max_model_len, llm.spec.vocab_size
        if chat_template is not None and self._tokenizer is None:
            raise ConfigError(
                "chat_template: expected a model with a tokenizer, got one without. Remove it."
            )
        self._template = chat_template
        if chat_template is None and self._tokenizer is not None:
            found = self._tokenizer.chat_template
            self._template = found.get("default") if isinstance(found, dict) else found

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts may be text."""
        return self._tokenizer is not None

    @property
    def has_template(self) -> bool:
        """Whether chats are taken."""
        return self._template is not None

    @property
    def takes_tools(self) -> bool:
        """Whether the template tells the model of tools."""
        return "tools" in (self._template or "")

    @property
    def tool_parser(self) -> str:
        """The form of tool calls that the template teaches the model; none where it has none."""
        template = self._template or ""
        if "<tool_call>" in template:
            return "hermes"
        is_llama = "tools" in template and ("python_tag" in template or "ipython" in template)
        return "llama3_json" if is_llama else "none"

    def encode(
        self, prompt: Prompt, *, add_special_tokens: bool, check: Callable[[str], None]
    ) -> list[int]:
        """Return a prompt's tokens.

        Args:
            prompt: As the client sent it.
            add_special_tokens: Put the tokenizer's own around a text; a chat has its template's.
            check: Gets the text, a chat's as its template makes it, before the tokens are made.

        Raises:
            RequestError: There is no tokenizer or template, or they or `check` refuse it.
        """
        if isinstance(prompt, list):
            return prompt
        if self._tokenizer is None:
            raise RequestError(
                "prompt: expected token ids, got text: this model has no tokenizer. Send token ids "
                "to /v1/completions.",
                param="prompt",
            )
        text = self._rendered(prompt) if isinstance(prompt, Chat) else prompt
        check(text)
        add_special_tokens = add_special_tokens and not isinstance(prompt, Chat)
        try:
            found = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        except (TypeError, ValueError, UnicodeError) as error:
            raise RequestError(
                f"prompt: expected text that the tokenizer can encode, got {text[:20]!r} "
                f"({error}). Remove lone surrogates.",
                param="prompt",
            ) from error
        return list(found["input_ids"])

    def _rendered(self, chat: Chat) -> str:
        return chat_text(
            self._tokenizer,
            chat.messages,
            chat_template=self._template,
            tools=chat.tools,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            **chat.extra,
        )

    def check_length(self, text: str) -> None:
        """Raise RequestError where a text has more characters than the context holds.

        Its tokens, which would take minutes and GiB, are not made for that.
        """
        if len(text) > self._max_model_len * self._longest * SHORTENED:
            raise RequestError(
                f"This model's maximum context length is {self._max_model_len} tokens of at most "
                f"{self._longest} characters; the prompt has {len(text)} characters. Shorten it.",
                param="prompt",
                code=RequestError.CONTEXT_LENGTH,
            )

    def check_counted(self, text: str) -> None:
        """Raise RequestError where the tokens of a text would take minutes to count."""
        if len(text) > MOST_COUNTED:
            raise RequestError(
                f"prompt: expected at most {MOST_COUNTED} characters to count tokens of, got "
                f"{len(text)}. Send it in parts.",
                param="prompt",
            )

    @cached_property
    def _longest(self) -> int:
        """Characters of the vocabulary's longest token."""
        return max(map(len, self._tokenizer.get_vocab()))

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens, special ones included.

        Raises:
            RequestError: There is no tokenizer.
        """
        if self._tokenizer is None:
            raise RequestError(
                "tokens: expected a model with a tokenizer, got one without.", param="tokens"
            )
        text: str = self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        return text

    def pieces(self, token_ids: list[int]) -> list[str]:
        """Return each token's name in the vocabulary."""
        return [str(piece) for piece in self._tokenizer.convert_ids_to_tokens(token_ids)]

    def with_room(self, ids: list[int], params: SamplingParams, *, clamp: bool) -> SamplingParams:
        """Return the parameters of a request whose tokens fit behind its prompt.

        Args:
            ids: The prompt.
            params: As asked; without max_tokens it gets all that the prompt leaves.
            clamp: Lower max_tokens to what the prompt leaves.

        Raises:
            RequestError: They do not.
        """
        limit, asked = self._max_model_len, params.max_tokens
        room = limit - len(ids)
        if room < 1:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens, of which one is to be "
                f"generated; the prompt has {len(ids)} tokens. Shorten it.",
                param="prompt",
                code=RequestError.CONTEXT_LENGTH,
            )
        if asked is not None and asked > room and not clamp:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens; the prompt has "
                f"{len(ids)} tokens and max_tokens={asked} asks for {len(ids) + asked} in all. "
                f"Lower max_tokens to {room}, or shorten the prompt.",
                param="max_tokens",
                code=RequestError.CONTEXT_LENGTH,
            )
        if asked is None or asked > room:
            params = params.copied()
            params.max_tokens = room
        return params

    def check_ids(self, token_ids: list[int]) -> None:
        """Raise RequestError where a token id is outside the vocabulary."""
        outside = [token for token in token_ids if not 0 <= token < self._vocab_size]
        if outside:
            raise RequestError(
                f"tokens: expected ids from 0 to {self._vocab_size - 1}, got {outside[0]}.",
                param="tokens",
            )

    def token(self, event: TokenEvent, arrival_s: float, *, with_logprobs: bool) -> Token:
        """Return an event, of a prompt that arrived then on the engine's clock, for clients."""
        own: TokenText | None = None
        top: tuple[TokenText, ...] = ()
        if with_logprobs and event.token_id != NO_TOKEN:
            own = self._token_text(event.token_id, event.logprob)
            top = self._top(event.top_logprobs)
        return Token(
            event.index,
            event.token_id,
            event.text,
            event.logprob,
            own,
            top,
            event.finish_reason,
            event.stop_reason,
            _start(event, arrival_s) if event.index == 0 else None,
        )

    def prompt_tokens(
        self, ids: list[int], logprobs: list[dict[int, float] | None]
    ) -> tuple[PromptToken, ...]:
        """Return the tokens of a prompt with their log-probabilities, for clients."""
        return tuple(map(self._prompt_token, ids, logprobs))

    def _prompt_token(self, token_id: int, found: dict[int, float] | None) -> PromptToken:
        logprob = math.nan if found is None else found[token_id]
        return PromptToken(self._token_text(token_id, logprob), self._top(found))

    def _top(self, found: dict[int, float] | None) -> tuple[TokenText, ...]:
        ranked = sorted((found or {}).items(), key=lambda item: -item[1])
        return tuple(self._token_text(*item) for item in ranked)

    def _token_text(self, token_id: int, logprob: float) -> TokenText:
        if self._tokenizer is None:
            return TokenText(f"token_id:{token_id}", b"", logprob)
        text = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        raw = text.encode() if REPLACEMENT not in text else self._raw(token_id, text)
        return TokenText(text, raw, logprob)

    def _raw(self, token_id: int, text: str) -> bytes:
        """Return the bytes of a token that is no whole character."""
        piece = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if found := _BYTE.fullmatch(piece):
            return bytes([int(found[1], 16)])
        if all(character in self._byte_of for character in piece):
            return bytes(self._byte_of[character] for character in piece)
        return text.encode()

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """The byte that each character of a byte-level vocabulary stands for."""
        shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [byte for byte in range(256) if byte not in shown]
        return {chr(byte): byte for byte in shown} | {
            chr(256 + place): byte for place, byte in enumerate(hidden)
        }


def _start(event: TokenEvent, arrival_s: float) -> Start | None:
    begin_s, num_cached_tokens = event.begin_s, event.num_cached_tokens
    if begin_s is None or num_cached_tokens is None:
        return None
    return Start(num_cached_tokens, begin_s - arrival_s, event.time_s - begin_s)
