"""Constraints: which tokens may come next, so that an output has the form that was asked for.

llguidance compiles a form to a matcher, which takes the tokens of one output and says what may
follow. It is imported when the first request asks for one.
"""

import json
import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from engine.asked.sampling import StructuredOutput, refusal

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLTokenizer

WHITESPACE = r"[ \t\n\r]{0,20}"
"""Whitespace between the parts of JSON; bounded, else a model may write nothing else."""
MOST_COMPILED = 16
"""Forms that stay compiled."""


class Constraint:
    """Follows one output.

    Attributes:
        error: Why it cannot go on, None while it can.
    """

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher
        self.error: str | None = None

    def accept(self, token_id: int) -> bool:
        """Take the output's next token; return whether nothing can follow it."""
        if not self._matcher.consume_token(token_id):
            self._fail()
        return self.error is None and self._matcher.is_stopped()

    def mask(self) -> "np.ndarray | None":
        """Return which tokens may come next; None where that cannot be said (`error`).

        int32, a bit for each token of the vocabulary, the lowest first.
        """
        import numpy as np  # noqa: PLC0415  what plans requests does without

        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        if self._matcher.is_error():
            self._fail()
        return None if self.error else words

    def _fail(self) -> None:
        reason = " ".join(self._matcher.get_error().split())[:300]
        self.error = self.error or (
            f"structured: expected a form that can be followed, got {reason}. Simplify it."
        )


class CompiledForm:
    """A form as llguidance follows it; it stays compiled while something refers to this."""

    __slots__ = ("__weakref__", "matcher")

    def __init__(self, matcher: "LLMatcher") -> None:
        self.matcher = matcher


class Constraints:
    """Makes constraints for the requests of an engine; any thread may use it.

    The first one takes about a second, for what is derived of the vocabulary; a new form takes
    milliseconds, a very complex one a second. A form that was compiled before is only copied.
    """

    def __init__(
        self, tokenizer: Any | None, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = eos_token_ids
        self._vocabulary: LLTokenizer | None = None
        self._opening = threading.Lock()
        self._compiled: OrderedDict[str, CompiledForm] = OrderedDict()
        """The forms used last, which stay."""
        self._known = weakref.WeakValueDictionary[str, CompiledForm]()
        """All that are compiled, also those that a request which waits refers to."""
        self._looking = threading.Lock()

    def make(self, form: StructuredOutput, count: int) -> list[Constraint]:
        """Return constraints of as many outputs.

        Raises:
            RequestError: The form is not valid, or the model has no tokenizer that can be used.
        """
        found = self.compiled(form)
        with self._looking:
            return [Constraint(found.matcher.deep_copy()) for _ in range(count)]

    def compiled(self, form: StructuredOutput) -> CompiledForm:
        """Return a form compiled; while the caller keeps it, `make` does not compile it again.

        Raises:
            RequestError: The form is not valid, or the model has no tokenizer that can be used.
        """
        form.check()
        grammar = _grammar(form)
        with self._looking:
            found = self._known.get(grammar)
        if found is None:
            found = CompiledForm(self._compile(grammar))
        with self._looking:
            self._known[grammar] = self._compiled[grammar] = found
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > MOST_COMPILED:
                self._compiled.popitem(last=False)
        return found

    def _compile(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._open(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())[:500]
            raise refusal(f"expected a form that can be enforced, got one with an error: {reason}")
        return matcher

    def _open(self) -> "LLTokenizer":
        """Return what llguidance knows of the vocabulary."""
        with self._opening:
            if self._vocabulary is not None:
                return self._vocabulary
            if self._tokenizer is None:
                raise refusal("expected none: this model has no tokenizer. Remove it.")
            from llguidance.hf import from_tokenizer

            size = max(self._vocab_size, len(self._tokenizer))
            ends = sorted(self._eos_token_ids) or None
            try:
                self._vocabulary = from_tokenizer(self._tokenizer, n_vocab=size, eos_token=ends)
            except ValueError as error:
                raise refusal(
                    f"expected none: llguidance cannot use this model's tokenizer ({error}). "
                    "Remove it."
                ) from error
            return self._vocabulary


def _grammar(form: StructuredOutput) -> str:
    """Return a form as llguidance takes it.

    Raises:
        RequestError: It is too deep, or no JSON.
    """
    from llguidance import LLMatcher

    if form.regex is not None:
        return LLMatcher.grammar_from_regex(form.regex)
    if form.grammar is not None:
        return LLMatcher.grammar_from_lark(form.grammar)
    if form.choice is not None:
        texts = (json.dumps(text, ensure_ascii=False) for text in form.choice)
        # As one word of the lexer: as rules, a few thousand are too many for the parser.
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(texts)}")
    schema = {"type": "object"} if form.json_object else form.copied().json_schema
    if isinstance(schema, str):  # llguidance would put a bad one into a text of its own
        try:
            is_object = isinstance(json.loads(schema), dict)
        except (ValueError, RecursionError) as error:
            raise refusal(f"json_schema: expected JSON, got an error: {error}") from error
        if not is_object:
            raise refusal(f"json_schema: expected an object, got {schema[:50]}.")
    assert schema is not None
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})
