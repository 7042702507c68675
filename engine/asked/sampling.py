"""SamplingParams: how tokens of one request are chosen, in which form, and when it ends."""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial, wraps
from numbers import Integral, Real
from typing import Any, Final

from engine.errors import RequestError, did_you_mean
from engine.sealed import is_one_of, number_fault


@dataclass(kw_only=True, frozen=True, slots=True)
class StructuredOutput:
    """The form that an output must have: exactly one field is set.

    Construction checks nothing; `check`, SamplingParams and the engine say what is wrong.
    An output that `max_tokens` or a stop string cuts short is the beginning of one in that form.
    """

    json_schema: dict[str, Any] | str | None = None
    """JSON that a schema describes, given as an object or as JSON text. A keyword that cannot be
    enforced is refused."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """Text that a regular expression (Rust's syntax, without look-around) matches as a whole."""
    choice: list[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """Text that a grammar produces, in the Lark dialect of llguidance, from the rule `start`."""

    @property
    def kinds(self) -> list[str]:
        """Names of the fields that are set."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return [name for name, value in values.items() if value is not None and value is not False]

    def copied(self) -> "StructuredOutput":
        """Return a copy that later changes of a schema do not reach: it has it as JSON text.

        Raises:
            RequestError: The schema cannot be written as JSON; `param` is structured.
        """
        if not isinstance(self.json_schema, dict):
            return self
        try:
            text = json.dumps(self.json_schema, allow_nan=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise refusal(
                f"json_schema: expected JSON, got an error: {type(error).__name__}: {error}"
            ) from error
        return replace(self, json_schema=text)

    def check(self) -> None:
        """Return if exactly one field is set, to a value of its type.

        Raises:
            RequestError: It is not so; `param` is structured.
        """
        kinds = self.kinds
        if len(kinds) != 1:
            names = ", ".join(each.name for each in fields(self))
            got = ", ".join(kinds) or "none"
            raise refusal(f"expected exactly one of {names}, got {got}. Set one.")
        [kind] = kinds
        value: Any = getattr(self, kind)
        if kind == "json_schema" and not isinstance(value, (dict, str)):
            raise refusal(f"json_schema: expected an object or JSON text, got {value!r}.")
        if kind == "json_object" and value is not True:
            raise refusal(f"json_object: expected True or False, got {value!r}.")
        if kind in {"regex", "grammar"} and not isinstance(value, str):
            raise refusal(f"{kind}: expected a string, got {value!r}.")
        if kind == "choice":
            is_list = isinstance(value, (list, tuple)) and len(value) > 0
            if not is_list or not all(isinstance(text, str) and text for text in value):
                raise refusal(f"choice: expected a list of texts, none empty, got {value!r}.")


def refusal(message: str) -> RequestError:
    """Return the error of a form that cannot be asked for."""
    return RequestError(f"structured: {message}", param="structured")


MAX_LOGPROBS = 20
MAX_N = 4096
MAX_BIASES = 1024
SAMPLER_GREEDY_ELEMENTS = 2**23
"""Logits that the sampler takes at once where it only looks for the largest."""
SAMPLER_SORT_ELEMENTS = 2**21
"""Logits that the sampler takes at once where it draws, masks or ranks."""
PENALTY_PAGE_TOKENS = 256
PENALTY_MOST_TOKENS = 2**20
"""Tokens of sequences with penalties that have room on the device; more are written each step."""


def penalty_tokens(max_num_seqs: int, max_model_len: int) -> int:
    """Return how many tokens, 4 bytes each, the sampler keeps for penalties on the logits' device.

    One of the longest sequence at least, and a page for each that is not full.
    """
    most = max(max_model_len, PENALTY_MOST_TOKENS)
    whole = min(max_num_seqs * max_model_len, most)
    return whole + max_num_seqs * PENALTY_PAGE_TOKENS


def sampler_workspace_bytes(vocab_size: int) -> int:
    """Return the most bytes that the sampler uses for a while on the logits' device."""
    greedy = max(SAMPLER_GREEDY_ELEMENTS, vocab_size) * 16
    drawing = max(SAMPLER_SORT_ELEMENTS, vocab_size) * 80
    return max(greedy, drawing)


NOT_SUPPORTED: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "allowed_token_ids": ((None,), "set logit_bias=-100 for tokens that must not come."),
    "bad_words": ((None, []), "set logit_bias=-100 for the tokens of words that must not come."),
    "best_of": ((None,), "all n answers are returned. Rank them by cumulative_logprob."),
    "detokenize": (
        (True,),
        "text is always decoded if the model has a tokenizer; this takes no engine time.",
    ),
    "do_sample": ((), "temperature=0 is greedy, other temperatures draw."),
    "early_stopping": ((False,), "there is no beam search. Draw n answers."),
    "extra_args": ((None, {}), "there is nothing that takes them."),
    "flat_logprobs": ((False,), "each token's log-probabilities are a dict."),
    "guided_choice": ((None,), "set structured=StructuredOutput(choice=...)."),
    "guided_decoding": ((None,), "set structured=StructuredOutput(...)."),
    "guided_grammar": ((None,), "set structured=StructuredOutput(grammar=...)."),
    "guided_json": ((None,), "set structured=StructuredOutput(json_schema=...)."),
    "guided_regex": ((None,), "set structured=StructuredOutput(regex=...)."),
    "include_stop_str_in_output": (
        (False,),
        "text ends before the stop string, which stop_reason names.",
    ),
    "length_penalty": ((1,), "there is no beam search. Draw n answers."),
    "logits_processors": (
        (None, []),
        "logits stay on the device. Use logit_bias, or the penalties.",
    ),
    "output_kind": ((), "generate returns whole outputs; AsyncLLM.tokens yields what is new."),
    "response_format": ((None,), "set structured=StructuredOutput(...)."),
    "skip_special_tokens": ((True,), "text never has them; token_ids do."),
    "spaces_between_special_tokens": ((True, False), "text has no special tokens."),
    "structured_outputs": ((None,), "set structured=StructuredOutput(...)."),
    "truncate_prompt_tokens": ((None,), "a prompt is taken whole or refused. Cut it before."),
    "use_beam_search": ((False,), "answers are drawn or greedy. Draw n of them."),
}
"""Names that other engines have -> values that change nothing here, and why there is no other."""


@dataclass(kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Construction refuses names and values that it does not know (RequestError); what is changed
    afterwards is checked with its request. Values are applied in this order: logit_bias,
    repetition_penalty, frequency_penalty, presence_penalty, structured and min_tokens (as masks),
    temperature, top_k, top_p (of what top_k left), min_p, then one draw. With temperature=0 the
    most probable token that the masks leave is taken and the last three do not matter.
    """

    n: int = 1
    """Independent answers to the prompt."""
    temperature: float = 1.0
    """Divides the logits; 0: always the most probable token, the lowest id among equals."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens that holds this share, (0, 1]."""
    top_k: int = 0
    """Keep this many most probable tokens; 0 or -1: all."""
    min_p: float = 0.0
    """Drop tokens less probable than this share of the most probable one, [0, 1]."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens in the prompt or the output are divided by it, others
    multiplied; above 0, 1 changes nothing."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit for each time that it is in the output, [-2, 2]."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that are in the output, [-2, 2]."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of tokens by id, each within [-100, 100]; at most 1024."""
    seed: int | None = None
    """Keys the draws, 64 bits with sign: answer i of n draws as one alone with seed + i. null: the
    engine's seed, the number of the request and i."""
    stop: str | list[str] | None = None
    """Strings that end the output; the text ends before them. Special tokens, which the text does
    not show, count as they are written."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the output, beside the model's own."""
    max_tokens: int | None = 16
    """Tokens of output at most; null: up to max_model_len."""
    min_tokens: int = 0
    """Tokens of output before an end-of-sequence token, a stop token or a stop string counts."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""
    logprobs: int | None = None
    """Return the log-probability of each token, its rank, and this many most probable ones, at most
    20, of the model's own distribution (before biases, penalties and temperature); null: none."""
    prompt_logprobs: int | None = None
    """Return the log-probability of each token of the prompt but the first, and this many most
    probable ones, at most 20; null: none. Such a prompt is computed whole: what the KV cache has of
    it is not used."""
    structured: StructuredOutput | None = None
    """The form that the output must have; null: any. Such a sequence sits out the step behind
    each of its own, as the host must know its tokens."""
    cache_salt: str | None = None
    """Requests find each other's prefixes in the KV cache only where their salts are equal."""

    def __new__(cls, *_: Any, **given: Any) -> "SamplingParams":
        """Refuse names that there are not, with the closest one, or why there is none."""
        known = cls.__dataclass_fields__
        for name, value in given.items():
            inert, why = NOT_SUPPORTED.get(name, ((), None))
            if why is not None and not is_one_of(value, inert):
                raise RequestError(f"{name}={value!r}: not supported: {why}", param=name)
            if why is None and name not in known:
                hint = did_you_mean(name, known) or f" Known: {', '.join(known)}."
                raise RequestError(f"SamplingParams: unknown parameter {name!r}.{hint}", param=name)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        self.check()

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken without a draw."""
        return self.temperature == 0

    @property
    def has_penalty(self) -> bool:
        """Whether logits depend on which tokens were there before."""
        return (
            self.repetition_penalty != 1
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
        )

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before the largest one is looked for."""
        return (  # asked for each token of each sequence
            self.repetition_penalty != 1
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
            or self.min_tokens > 0
            or self.structured is not None
            or bool(self.logit_bias)
        )

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    def copied(self) -> "SamplingParams":
        """Return a copy that later changes of this one do not reach; nothing else is checked.

        Raises:
            RequestError: A schema cannot be written as JSON.
        """
        stop, ids, bias = self.stop, self.stop_token_ids, self.logit_bias
        form: Any = self.structured
        copied = copy.copy(self)
        copied.structured = form.copied() if isinstance(form, StructuredOutput) else form
        copied.logit_bias = dict(bias) if isinstance(bias, dict) else bias
        copied.stop = list(stop) if isinstance(stop, list) else stop
        copied.stop_token_ids = list(ids) if isinstance(ids, list) else ids
        return copied

    def check(self) -> None:
        """Return if every value is usable.

        Raises:
            RequestError: A value has the wrong type, is out of bounds or contradicts another.
        """
        _check_integer("n", self.n, low=1, high=MAX_N, hint="Send several requests.")
        _check_number("temperature", self.temperature, low=0, hint="0 is greedy.")
        _check_number("top_p", self.top_p, low=0, high=1, low_open=True, hint="1 turns it off.")
        _check_integer("top_k", self.top_k, low=-1, hint="0 or -1 turns it off.")
        _check_number("min_p", self.min_p, low=0, high=1, hint="0 turns it off.")
        _check_number(
            "repetition_penalty",
            self.repetition_penalty,
            low=0,
            low_open=True,
            hint="1 turns it off.",
        )
        for name in ("frequency_penalty", "presence_penalty"):
            _check_number(name, getattr(self, name), low=-2, high=2, hint="0 turns it off.")
        self._check_bias()
        self._check_structured()
        if self.seed is not None:
            low, high = -(2**63), 2**63 - 1
            _check_integer("seed", self.seed, low=low, high=high, hint="None: the engine's seed.")
        for name in ("logprobs", "prompt_logprobs"):
            if (num := getattr(self, name)) is not None:
                _check_integer(name, num, low=0, high=MAX_LOGPROBS, hint="None returns none.")
        ignore_eos: Any = self.ignore_eos
        if not isinstance(ignore_eos, bool):
            raise RequestError(
                f"ignore_eos: expected True or False, got {ignore_eos!r}. Pass a bool.",
                param="ignore_eos",
            )
        if self.cache_salt is not None:
            check_text("cache_salt", self.cache_salt, "None shares with all that have none.")
        self._check_lengths()
        self._check_stops()

    def _check_bias(self) -> None:
        bias: Any = self.logit_bias
        if bias is None:
            return
        if not isinstance(bias, dict):
            raise RequestError(
                f"logit_bias: expected a dict of token ids to numbers, got {bias!r}. Pass one.",
                param="logit_bias",
            )
        if len(bias) > MAX_BIASES:
            raise RequestError(
                f"logit_bias: expected at most {MAX_BIASES} tokens, got {len(bias)}. Remove some.",
                param="logit_bias",
            )
        for token_id, value in bias.items():
            _check_integer("logit_bias", token_id, low=0, hint="Its keys are token ids.")
            _check_number("logit_bias", value, low=-100, high=100, hint="0 changes nothing.")

    def _check_structured(self) -> None:
        form: Any = self.structured
        if form is None:
            return
        if not isinstance(form, StructuredOutput):
            raise refusal(f"expected a StructuredOutput, got {form!r}. None: any form.")
        form.check()
        if self.ignore_eos:
            raise refusal(
                "expected ignore_eos=False beside it, got True: an output in a form ends. "
                "Remove one of the two."
            )

    def _check_lengths(self) -> None:
        _check_integer("min_tokens", self.min_tokens, low=0, hint="0 turns it off.")
        if self.max_tokens is None:
            return
        _check_integer(
            "max_tokens", self.max_tokens, low=1, hint="None goes on up to max_model_len."
        )
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens: expected at most max_tokens={self.max_tokens}, got "
                f"{self.min_tokens}. Lower min_tokens or raise max_tokens.",
                param="min_tokens",
            )

    def _check_stops(self) -> None:
        stop: Any = self.stop
        if stop is not None and not isinstance(stop, (str, list, tuple)):
            raise RequestError(
                f"stop: expected a string or a list of strings, got {stop!r}. "
                "Put the strings into a list.",
                param="stop",
            )
        texts: list[Any] = list(self.stop_strings)
        for text in texts:
            if not isinstance(text, str) or not text:
                raise RequestError(
                    f"stop: expected strings of at least one character, got {text!r}. Remove it.",
                    param="stop",
                )
        if self.stop_token_ids is None:
            return
        if not isinstance(self.stop_token_ids, (list, tuple)):
            raise RequestError(
                f"stop_token_ids: expected a list of token ids, got {self.stop_token_ids!r}. "
                "Put the ids into a list.",
                param="stop_token_ids",
            )
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, low=0, hint="Pass token ids.")


_dataclass_init = SamplingParams.__init__


@wraps(_dataclass_init)
def _init(self: SamplingParams, **given: Any) -> None:
    own = {name: value for name, value in given.items() if name not in NOT_SUPPORTED}
    _dataclass_init(self, **own)  # __new__ has refused the others that would change something


SamplingParams.__init__ = _init  # type: ignore[method-assign]


def check_text(name: str, value: object, hint: str) -> None:
    """Raise RequestError unless a value is a text, and not empty."""
    if not isinstance(value, str) or not value:
        raise RequestError(
            f"{name}: expected a string of at least one character, got {value!r}. {hint}",
            param=name,
        )


def _check_number(name: str, value: Any, **bounds: Any) -> None:
    if fault := number_fault(name, value, kinds=(Integral, Real), **bounds):
        raise RequestError(fault, param=name)


_check_integer = partial(_check_number, integer=True)
