"""Turn tokens into text as they come, without showing anything that later tokens could change."""

import re
from collections.abc import Sequence
from typing import Protocol

from engine.errors import EngineError

REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
WINDOW_TOKENS = 32
"""A window longer than this is cut where that changes nothing, even amid broken bytes."""
SETTLED_TOKENS = 4
"""Tokens (a byte each at least) after which a character's bytes are complete or broken for good."""


class SpecialToken(Protocol):
    """An added token of a tokenizer."""

    special: bool


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    @property
    def added_tokens_decoder(self) -> dict[int, SpecialToken]:
        """Added tokens by id."""

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the named special tokens."""

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        """Return the vocabulary's entry of an id."""

    def decode(
        self,
        token_ids: list[int],
        skip_special_tokens: bool,
        *,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        """Return the text of tokens."""


class IncrementalDetokenizer:
    """Decodes one sequence token by token and looks for stop strings in its text.

    The pieces together equal `tokenizer.decode` of all tokens without special ones (and without the
    clean-up of spaces, which rewrites text that was shown before), up to the stop string if one
    occurs. Held back are: the bytes of an unfinished character; a run of byte tokens, because one
    bad byte breaks the whole run; and text that may be the beginning of a stop string.

    Args:
        tokenizer: A transformers tokenizer.
        stop: Strings that end the text, none empty.
        min_tokens: A stop string counts only if it ends in the text of a later token than the
            first min_tokens - 1.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = _StopFinder(stop)
        self._special = _special_ids(tokenizer)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._pieces: list[str] = []
        # The window: tokens from the last cut on; the first `_num_shown` of them are shown.
        self._window: list[int] = []
        self._num_shown = 0
        self._len_shown = 0
        self._is_finished = False

    @property
    def text(self) -> str:
        """All text that is final."""
        return "".join(self._pieces)

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.found

    def append(self, token_id: int) -> str:
        """Take the next token and return the text that became final with it, maybe none.

        Raises:
            EngineError: The text ended before.
        """
        self._check_open()
        self._num_tokens += 1
        self._window.append(token_id)
        new = "" if self._is_silent(token_id) else self._advance()
        piece = self._stops.push(new, is_counted=self._num_tokens >= self._min_tokens)
        self._pieces.append(piece)
        return piece

    def finish(self) -> str:
        """Return what was held back; no more tokens follow. Empty after a stop string.

        Raises:
            EngineError: `finish` was called before.
        """
        if self._is_finished:
            raise EngineError("detokenizer: finish was called twice.")
        self._is_finished = True
        if self._stops.found is not None:
            return ""
        rest = self._decode(self._window)[self._len_shown :]
        piece = self._stops.push(rest, is_counted=self._num_tokens >= self._min_tokens)
        piece += self._stops.flush()
        self._pieces.append(piece)
        return piece

    def _check_open(self) -> None:
        if self._is_finished or self._stops.found is not None:
            raise EngineError(
                "detokenizer: expected no token after the end of the text (finish, or a stop "
                "string), got one more."
            )

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
            self._cut(self._num_shown)
            self._num_shown = len(self._window)
        elif len(self._window) > WINDOW_TOKENS:
            new += self._cut_broken(text)
        return new

    def _cut(self, at: int) -> None:
        """Drop the window's first `at` tokens; all of its text is shown.

        Those after them stay as context, because a decoder may treat the first word specially.
        """
        if at:
            self._window = self._window[at:]
            self._len_shown = len(self._decode(self._window))

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
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


class _StopFinder:
    """Looks for stop strings in a stream of text and holds back what may begin one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.found: str | None = None

    def push(self, new: str, *, is_counted: bool) -> str:
        """Take text; return what is final. Stops that end in `new` count only if `is_counted`."""
        if not self._stop:
            return new
        seen = len(self._held)
        text = self._held + new
        if is_counted and new:
            ends = [(at + len(stop), at, stop) for stop, at in self._matches(text, seen)]
            if ends:
                # The one that is complete first ends the text, the longest of those.
                _, at, self.found = min(ends)
                self._held = ""
                return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return what is held back."""
        held, self._held = self._held, ""
        return held

    def _matches(self, text: str, seen: int) -> list[tuple[str, int]]:
        """Stops that occur in the text and end after its first `seen` characters, with places."""
        places = [(stop, text.find(stop, max(0, seen - len(stop) + 1))) for stop in self._stop]
        return [(stop, at) for stop, at in places if at >= 0]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop` without being all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder
    return frozenset(i for i, token in added.items() if token.special).union(
        tokenizer.all_special_ids
    )
