"""Calls of tools in an answer's text, in the forms that Qwen's and Llama 3's templates teach."""

import json
from dataclasses import dataclass
from typing import Any, Final, Protocol

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"


@dataclass(frozen=True)
class Call:
    """One call of a tool."""

    name: str
    arguments: str
    """A JSON object."""


Piece = str | Call
"""Text of the answer, or a call."""


class ToolParser(Protocol):
    """Parts an answer's text, as it comes, into text and calls."""

    def feed(self, text: str) -> list[Piece]:
        """Return what is certain with the next text."""

    def finish(self) -> list[Piece]:
        """Return the rest."""


class PlainText:
    """No calls."""

    def feed(self, text: str) -> list[Piece]:
        """Return the text."""
        return [text] if text else []

    def finish(self) -> list[Piece]:
        """Return nothing: no text is held back."""
        return []


class Hermes:
    """Calls between <tool_call> and </tool_call>, each an object with name and arguments.

    What is no such object stays text. Blanks around calls are dropped.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_inside = False
        self._has_call = False

    def feed(self, text: str) -> list[Piece]:
        """Return text before a call, and calls that are complete."""
        self._held += text
        found: list[Piece] = []
        while True:
            sign = CLOSE if self._is_inside else OPEN
            before, is_there, after = self._held.partition(sign)
            if not is_there:
                break
            self._held = after
            found += self._call(before, OPEN, CLOSE) if self._is_inside else self._text(before)
            self._is_inside = not self._is_inside
        if not self._is_inside:
            keep = _overlap(self._held, OPEN)
            cut = len(self._held) - keep
            # Blanks may stand before a call.
            while cut and self._held[cut - 1].isspace():
                cut -= 1
            found += self._text(self._held[:cut], is_last=False)
            self._held = self._held[cut:]
        return found

    def finish(self) -> list[Piece]:
        """Return what was held back; a call that ends without its sign counts if it is whole."""
        held, self._held = self._held, ""
        if self._is_inside:
            return self._call(held, OPEN, "")
        if self._has_call and not held.strip():
            return []
        return [held] if held else []

    def _text(self, text: str, *, is_last: bool = True) -> list[Piece]:
        text = text.rstrip() if is_last else text
        if self._has_call and not text.strip():
            return []
        return [text] if text else []

    def _call(self, text: str, opened: str, closed: str) -> list[Piece]:
        try:
            call = _call_of(json.loads(text))
        except ValueError:
            call = None
        if call is None:
            return [f"{opened}{text}{closed}"]
        self._has_call = True
        return [call]


class Llama3:
    """An answer that is nothing but objects with name and parameters, parted by semicolons."""

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False

    def feed(self, text: str) -> list[Piece]:
        """Return text where the answer began with no object; hold all of it back otherwise."""
        self._held += text
        start = self._held.lstrip().removeprefix("<|python_tag|>").lstrip()
        if not self._is_text and (not start or start.startswith("{")):
            return []
        if not self._is_text and "<|python_tag|>".startswith(self._held.lstrip()):
            return []
        self._is_text = True
        held, self._held = self._held, ""
        return [held] if held else []

    def finish(self) -> list[Piece]:
        """Return the calls, or the text where it has other than calls."""
        held, self._held = self._held, ""
        rest, calls = held.strip().removeprefix("<|python_tag|>").strip(), list[Piece]()
        decoder = json.JSONDecoder()
        while rest:
            try:
                found, end = decoder.raw_decode(rest)
            except ValueError:
                return [held]
            call = _call_of(found)
            if call is None:
                return [held]
            calls.append(call)
            rest = rest[end:].lstrip().removeprefix(";").lstrip()
        return calls or ([held] if held else [])


class Forced:
    """An answer that is a list of calls and nothing else, as its form makes it."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> list[Piece]:
        """Hold the text back."""
        self._held += text
        return []

    def finish(self) -> list[Piece]:
        """Return the calls; the text where it was cut short."""
        held, self._held = self._held, ""
        try:
            found = json.loads(held)
        except ValueError:
            return [held] if held else []
        return [call for each in found if (call := _call_of(each)) is not None]


def parser_of(name: str) -> ToolParser:
    """Return a new parser of one answer: hermes, llama3_json, forced or none."""
    known: dict[str, type[ToolParser]] = {"hermes": Hermes, "llama3_json": Llama3, "forced": Forced}
    return known.get(name, PlainText)()


def _call_of(found: Any) -> Call | None:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters"))
    if isinstance(arguments, str):
        return Call(found["name"], arguments)
    if arguments is not None and not isinstance(arguments, dict):
        return None
    return Call(found["name"], json.dumps(arguments or {}, ensure_ascii=False))


def _overlap(text: str, sign: str) -> int:
    """Return the length of the longest end of `text` that begins `sign`."""
    for length in range(min(len(text), len(sign) - 1), 0, -1):
        if text.endswith(sign[:length]):
            return length
    return 0
