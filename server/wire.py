"""Messages between the front and the engine's process, and how they cross a socket.

Both ends are this program, and the socket is a pair that no other process has. Plain data only: a
message is a tagged dataclass of numbers, texts, lists and dicts, pickled behind its length.
"""

import pickle
import struct
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from engine.asked.sampling import SamplingParams

_LENGTH: Final = struct.Struct("!I")

# From the front.


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Build the engine; the first message, sent once."""

    model: str
    keywords: dict[str, Any]
    max_pending: int
    chat_template: str | None
    """The template itself, not its file."""
    generation_config: str
    """auto | vllm: whether the checkpoint's sampling defaults count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A chat, which the checkpoint's template turns into a prompt."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    """Further variables of the template."""


Prompt = str | list[int] | Chat


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Answer a prompt; followed by Accepted and Tokens, or Refused."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    priority: int = 0
    room: bool = False
    """Lower max_tokens to what the prompt leaves, where it is more."""
    wants_text: bool = False
    """Return the prompt's text too, where it came as token ids."""
    add_special_tokens: bool = True
    form_name: str = "response_format"
    """What the client calls the form that the answer must have."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Drop a request whose client has left."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenize:
    """Return the tokens of a prompt, as Answered."""

    request_id: str
    prompt: Prompt
    add_special_tokens: bool
    with_texts: bool


@dataclass(frozen=True, slots=True)
class Detokenize:
    """Return the text of token ids, as Answered."""

    request_id: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Stop:
    """Close the engine and end the process."""


# From the engine's process.


@dataclass(frozen=True, slots=True)
class Loading:
    """How far the load is."""

    phase: str
    bytes_done: int = 0
    bytes_total: int = 0


@dataclass(frozen=True, slots=True)
class Planned:
    """What fits and what it costs, in lines for people."""

    lines: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The engine takes requests."""

    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    has_tokenizer: bool
    has_chat_template: bool
    takes_tools: bool
    """Whether the template tells the model of tools."""
    tool_parser: str
    """The parser of tool calls that goes with the chat template, or none."""
    facts: dict[str, Any]
    """Sizes and placements in force."""
    memory: dict[str, Any]
    """gpu_uuid (None: there is no GPU), gpu_budget_bytes, gpu_items and host_items (bytes by part
    of the plan), host_pinned_bytes, host_pageable_bytes."""
    sampling_defaults: dict[str, Any]
    """Parameters of requests that leave them out."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine could not be built, or failed."""

    reason: str
    is_permanent: bool
    """Whether another start with the same settings would fail as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The engine took a request."""

    request_id: str
    prompt_token_ids: list[int]
    prompt_text: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A request cannot be served, or failed."""

    request_id: str
    message: str
    param: str | None = None
    code: str | None = None
    status: int = 400
    """400: the request is at fault; 500: it failed while it ran; 503: the engine failed."""


class TokenText(NamedTuple):
    """A token with its log-probability, as clients see it."""

    text: str
    raw: bytes
    logprob: float


class Start(NamedTuple):
    """How a prompt's first answer came to its first token."""

    num_cached_tokens: int
    """Tokens of the prompt that the KV cache gave."""
    queue_s: float
    """From its arrival at the engine's process to the first step that ran it."""
    prefill_s: float
    """From then to its first token."""


class Token(NamedTuple):
    """One token of one answer; a tuple, because it crosses for every token."""

    number: int
    """Which of the n answers."""
    token_id: int
    text: str
    """Text of the answer that became final with it."""
    logprob: float
    own: TokenText | None
    """Where log-probabilities are asked for."""
    top: tuple[TokenText, ...]
    """The most probable tokens, the first ones of which were asked for, and itself."""
    finish_reason: str | None
    stop_reason: int | str | None
    start: Start | None
    """With the first token of a prompt's first answer."""
    prompt: "tuple[PromptToken, ...] | None" = None
    """With the same token, where log-probabilities of the prompt are asked for."""


class PromptToken(NamedTuple):
    """One token of a prompt."""

    own: TokenText
    """Its log-probability is NaN for the first one, which nothing precedes."""
    top: tuple[TokenText, ...]
    """The most probable tokens, and itself; empty for the first one."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of several requests, in order."""

    by_request: list[tuple[str, list[Token]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What Tokenize or Detokenize asked for."""

    request_id: str
    value: Any


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life, with the engine's counts; empty while it loads."""

    counts: dict[str, float]


def packed(message: object) -> bytes:
    """Return a message as it crosses the socket."""
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(content)) + content


def send(writer: StreamWriter, message: object) -> None:
    """Put a message into the socket's buffer; never waits."""
    writer.write(packed(message))


async def receive(reader: StreamReader) -> Any | None:
    """Return the next message; None at the end of the other process."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))  # noqa: S301  written by our other half
    except (IncompleteReadError, ConnectionError):
        return None
