"""What a user sends (Request), what the scheduler tracks (Sequence), and what comes back."""

import math
import operator
from array import array
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from functools import reduce
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from engine.asked.sampling import SamplingParams, check_text
from engine.errors import RequestError

if TYPE_CHECKING:
    import numpy as np

FinishReason = Literal["stop", "length", "abort", "error"]
NO_TOKEN: Final = -1
"""token_id of an event that says that a request failed."""


@dataclass(kw_only=True)
class Request:
    """One prompt and how to answer it."""

    request_id: str
    """Unique among the unfinished requests of an engine."""
    prompt: str | None = None
    """The text, where there was one."""
    prompt_token_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    arrival: int = 0
    """Number in order of arrival; keys the draws of a request without a seed."""
    priority: int = 0
    """Lower ones are served first, and lose their KV blocks last; equal ones in order of arrival.
    """


class Constraint(Protocol):
    """Follows an output that must have a form (engine/text/constraints.py)."""

    error: str | None
    """Why it cannot go on, None while it can."""

    def accept(self, token_id: int) -> bool:
        """Take the output's next token; return whether nothing can follow it."""
        ...

    def mask(self) -> "np.ndarray | None":
        """Return which tokens may come next; None where that cannot be said (`error`).

        int32, a bit for each token of the vocabulary, the lowest first.
        """
        ...


class SequenceStatus(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(kw_only=True, eq=False, slots=True)
class Sequence:
    """One answer in the making: sequence `index` of the n of a request.

    The scheduler alone changes it.
    """

    seq_id: int
    """Unique in an engine."""
    request: Request
    index: int = 0
    """Which of the n answers, 0 to n - 1."""
    output_token_ids: list[int] = field(default_factory=list)
    """Tokens generated so far; kept over a preemption."""
    num_computed: int = 0
    """Leading tokens whose keys and values are in the cache."""
    begin_s: float | None = None
    """When the first step that ran it began, seconds of the engine's clock; None before."""
    num_cached_tokens: int = 0
    """Tokens of its prompt that the KV cache gave when it first began."""
    num_computed_peak: int = 0
    """The largest num_computed so far; tokens below it that run again were recomputed."""
    block_tables: list[list[int]] = field(default_factory=list)
    """KV blocks in order of position, for each group of layers; none while it has no blocks."""
    num_gone: list[int] = field(default_factory=list)
    """For each group how many leading blocks were given back behind its window."""
    table_version: int = 0
    """Counts how often all blocks were given back; while it stays, entries of the block tables do
    not change, but for those that are given back one by one behind a window."""
    num_named: int = 0
    """Leading blocks that were made findable when they became full."""
    pending: tuple[frozenset[int], ...] = ()
    """For each group of layers the moves that bring content which it begins behind."""
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for the model's own end of sequence."""
    num_preemptions: int = 0
    """How often its blocks were taken away."""
    num_turns: int = 0
    """How often of those it gave way to one that had waited."""
    token_logprobs: list[float] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    """For each output token its own and the top log-probabilities, if asked for."""
    ranks: list[int] | None = None
    """For each output token its rank, if log-probabilities are asked for."""
    prompt_logprobs: list[dict[int, float]] = field(default_factory=list)
    """For each token of the prompt but the first its own log-probability, then the top ones, as far
    as they are known; only of answer 0, if asked for. Its steps bring them."""
    constraint: Constraint | None = None
    """What its output must follow; the host must know all tokens before the next one is sampled."""

    @property
    def block_table(self) -> list[int]:
        """The block table of the first group of layers."""
        return self.block_tables[0] if self.block_tables else []

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are asked for and not all known."""
        return (
            self.params.prompt_logprobs is not None
            and self.index == 0
            and len(self.prompt_logprobs) < self.num_prompt_tokens - 1
        )

    @property
    def known_prompt_logprobs(self) -> list[dict[int, float] | None] | None:
        """What RequestOutput has of them; None: not asked for, or not all known."""
        is_asked = self.params.prompt_logprobs is not None and self.index == 0
        return (
            [None, *self.prompt_logprobs] if is_asked and not self.lacks_prompt_logprobs else None
        )

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the log-probabilities of its output tokens, added in their order."""
        return reduce(operator.add, self.token_logprobs, 0.0)

    def append(self, token: "SampledToken") -> None:
        """Take the next token of output."""
        self.output_token_ids.append(token.token_id)
        self.token_logprobs.append(token.logprob)
        if token.top_logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.append(token.top_logprobs)
        if token.rank is not None:
            if self.ranks is None:
                self.ranks = []
            self.ranks.append(token.rank)

    def cut(self, length: int) -> None:
        """Drop the tokens of output beyond `length` tokens of prompt and output."""
        keep = length - self.num_prompt_tokens
        for values in (self.output_token_ids, self.token_logprobs, self.logprobs, self.ranks):
            if values is not None:
                del values[keep:]

    def drop_blocks(self) -> None:
        """Forget all blocks and what was computed in them."""
        self.block_tables, self.num_gone = [], []
        self.num_computed = self.num_named = 0
        self.pending = ()
        self.table_version += 1

    @property
    def params(self) -> SamplingParams:
        """The request's own."""
        return self.request.params

    @property
    def priority(self) -> int:
        """The request's own; the lowest comes first."""
        return self.request.priority

    @property
    def prompt_token_ids(self) -> list[int]:
        """The request's prompt in tokens."""
        return self.request.prompt_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output, a new list."""
        return self.request.prompt_token_ids + self.output_token_ids

    @property
    def last_token_id(self) -> int:
        """The newest known token."""
        return (self.output_token_ids or self.request.prompt_token_ids)[-1]

    @property
    def is_finished(self) -> bool:
        """Whether it ended."""
        return self.status is SequenceStatus.FINISHED

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return the tokens at positions start to stop - 1 of prompt and output."""
        prompt = self.request.prompt_token_ids
        edge = len(prompt)
        if start >= edge:
            return self.output_token_ids[start - edge : stop - edge]
        return prompt[start:stop] + self.output_token_ids[: max(0, stop - edge)]

    def max_length(self, max_model_len: int) -> int:
        """Return the most tokens that prompt and output together can reach."""
        limit = self.params.max_tokens
        if limit is None:
            return max_model_len
        return min(max_model_len, self.num_prompt_tokens + limit)

    def completion(self, text: str) -> "CompletionOutput":
        """Return what the user sees of it, with `text` as its decoded output."""
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=list(self.output_token_ids),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            ranks=None if self.ranks is None else list(self.ranks),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class NoToken(Enum):
    """Why no token could be chosen."""

    LOGITS = "logits"
    """The model's logits hold NaN or +infinity, or nothing finite."""
    FORM = "form"
    """The form of the output allows no token, or cannot be followed."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token chosen by the sampler."""

    token_id: int
    logprob: float
    """Its log-probability under the model (before penalties and temperature)."""
    top_logprobs: dict[int, float] | None = None
    """Itself first, then the most probable tokens in order; None if not asked for."""
    rank: int | None = None
    """Its place among all tokens by log-probability, from 1; None if not asked for."""


@dataclass(kw_only=True, slots=True)
class TokenEvent:
    """One token of one sequence, as it became known; or, with finish_reason "error", its failure.

    No token comes with a failure: token_id is NO_TOKEN, logprob is NaN, stop_reason says why.
    """

    request_id: str
    index: int = 0
    token_id: int
    position: int
    """Its place in prompt and output, from 0."""
    finish_reason: FinishReason | None = None
    """Why the sequence ended with this token; None if it goes on."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it, if one did; of a failure why."""
    failure: NoToken | None = None
    """What was at fault of a failure."""
    logprob: float = math.nan
    """Its log-probability under the model (before penalties and temperature)."""
    top_logprobs: dict[int, float] | None = None
    """Itself first, then the most probable tokens in order; None if not asked for."""
    rank: int | None = None
    """Its place among all tokens by log-probability, from 1; None if not asked for."""
    time_s: float = math.nan
    """When the token was on the host, seconds of the engine's clock; set by the core."""
    text: str = ""
    """Text of the output that became final with it; none without a tokenizer."""
    begin_s: float | None = None
    """When the first step that ran the sequence began, with its first token; None with others."""
    num_cached_tokens: int | None = None
    """Tokens of the prompt that the KV cache gave, with the sequence's first token."""
    prompt_logprobs: list[dict[int, float] | None] | None = None
    """As in RequestOutput, with the first token of answer 0."""


@dataclass(kw_only=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    text: str = ""
    """The output decoded; empty without a tokenizer."""
    token_ids: list[int] = field(default_factory=list)
    """The output in tokens, with the token that ended it."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of its tokens under the model."""
    logprobs: list[dict[int, float]] | None = None
    """For each token its own log-probability first, then the most probable ones."""
    ranks: list[int] | None = None
    """For each token its place among all by log-probability, from 1; with `logprobs`."""
    finish_reason: FinishReason | None = None
    """stop | length | abort | error; None while it goes on."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for the model's own end of sequence."""


@dataclass(kw_only=True)
class RequestOutput:
    """What came of one request."""

    request_id: str
    prompt: str | None
    """The text, where there was one."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """The n answers; one with finish_reason error if the request was refused."""
    finished: bool
    error: str | None = None
    num_cached_tokens: int | None = None
    """Tokens of the prompt that the KV cache gave its first answer; None before that has a token.
    """
    prompt_logprobs: list[dict[int, float] | None] | None = None
    """For each token of the prompt its own log-probability first, then the most probable ones; None
    for the first token, which nothing precedes. None if not asked for, or before they are known.
    """


def finish_reason(
    sequence: Sequence, token_id: int, eos_token_ids: Collection[int], max_model_len: int
) -> tuple[FinishReason | None, int | None]:
    """Return why a sequence ends with its newest token (None: it goes on), and the stop token."""
    params = sequence.params
    # The stop token itself does not count towards min_tokens.
    if sequence.num_output_tokens > params.min_tokens:
        if token_id in eos_token_ids and not params.ignore_eos:
            return "stop", None
        if token_id in (params.stop_token_ids or ()):
            return "stop", token_id
    if sequence.num_tokens >= sequence.max_length(max_model_len):
        return "length", None
    return None, None


def check_request_id(request_id: object) -> None:
    """Raise RequestError unless a caller's name of a request is usable."""
    check_text("request_id", request_id, "None makes a name.")


def check_priority(priority: object) -> None:
    """Raise RequestError unless a request can be ordered by it."""
    if type(priority) is not int or not -(2**63) <= priority < 2**63:
        raise RequestError(
            f"priority: expected an integer of 64 bits, got {priority!r}. 0 is the usual one.",
            param="priority",
        )


def check_request(
    request: Request,
    max_model_len: int,
    vocab_size: int,
    *,
    eos_token_ids: Collection[int] = (),
) -> None:
    """Raise RequestError unless the request can be served.

    Raises:
        RequestError: The prompt is empty, too long or holds no valid token ids, or a sampling
            parameter is unusable.
    """
    request.params.check()
    check_priority(request.priority)
    _check_prompt(request.prompt_token_ids, max_model_len, vocab_size)
    stops = set(request.params.stop_token_ids or ())
    outside = sorted(token_id for token_id in stops if token_id >= vocab_size)
    if outside:
        raise RequestError(
            f"stop_token_ids: expected ids below the vocabulary's {vocab_size}, got {outside[0]}. "
            "Remove it.",
            param="stop_token_ids",
        )
    biased = [token_id for token_id in request.params.logit_bias or () if token_id >= vocab_size]
    if biased:
        raise RequestError(
            f"logit_bias: expected ids below the vocabulary's {vocab_size}, got {biased[0]}. "
            "Remove it.",
            param="logit_bias",
        )
    if not request.params.ignore_eos:
        stops.update(i for i in eos_token_ids if 0 <= i < vocab_size)
    if request.params.min_tokens > 0 and len(stops) >= vocab_size:
        raise RequestError(
            f"min_tokens={request.params.min_tokens}: expected at least one token that does not "
            f"end the output, got {len(stops)} stop tokens in a vocabulary of {vocab_size}. "
            "Remove some of stop_token_ids, or set min_tokens=0.",
            param="min_tokens",
        )


def _are_ids(token_ids: list[Any], vocab_size: int) -> bool:
    """Return whether all are plain integers of the vocabulary; some 30 ns a token."""
    if [*map(type, token_ids)].count(int) != len(token_ids):
        return False
    try:
        ids = array("I", token_ids)
    except OverflowError:
        return False
    import numpy as np  # noqa: PLC0415  planning, which counts requests, does without

    return int(np.asarray(ids).max()) < vocab_size


def _check_prompt(token_ids: Any, max_model_len: int, vocab_size: int) -> None:
    if not isinstance(token_ids, list):
        raise RequestError(
            f"prompt: expected a list of token ids, got {type(token_ids).__name__}. "
            "Pass a list of integers.",
            param="prompt",
        )
    if not token_ids:
        raise RequestError(
            "prompt: expected at least one token, got none. Pass a longer prompt.", param="prompt"
        )
    if len(token_ids) > max_model_len - 1:
        raise RequestError(
            f"prompt: expected at most {max_model_len - 1} tokens (max_model_len={max_model_len} "
            f"less one to generate), got {len(token_ids)}. Shorten the prompt or raise "
            "max_model_len.",
            param="prompt",
            code=RequestError.CONTEXT_LENGTH,
        )
    if _are_ids(token_ids, vocab_size):
        return  # a long prompt is checked a token at a time only for the message
    for position, token_id in enumerate(token_ids):
        ok = not isinstance(token_id, bool) and isinstance(token_id, Integral)
        if not ok or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"prompt: expected token ids from 0 to {vocab_size - 1} (the vocabulary), got "
                f"{token_id!r} at position {position}. Encode the prompt with this model's "
                "tokenizer.",
                param="prompt",
            )
