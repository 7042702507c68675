"""Text files of rows: read whole or refused in words, JSON objects of a line, values as shown."""

import json
from pathlib import Path
from typing import Any, Final

_PACKED: Final = (
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bzip2"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"PK\3\4", "zip"),
)
_SHOWN_CHARS: Final = 80


class TextError(ValueError):
    """A file or a row that cannot be used; the message says why, without naming the file."""


def read_text(path: Path) -> str:
    """Return a file of text in UTF-8, with or without a byte order mark, line ends as they are.

    Raises:
        TextError: it cannot be read, is packed, or is no such text; the line is named.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TextError(f"cannot be read: {error}.") from error
    for begin, name in _PACKED:
        if data.startswith(begin):
            raise TextError(f"expected text, got a file packed with {name}. Unpack it.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TextError(
            f"expected text in UTF-8: line {line} has the byte 0x{data[error.start]:02x} "
            f"({error.reason}). Save the file in UTF-8."
        ) from error


def parse_object(line: str) -> dict[str, Any]:
    """Return the JSON object of a line.

    Raises:
        TextError: it is none, or names a value twice.
    """
    try:
        row = json.loads(line, object_pairs_hook=_distinct)
    except TextError:
        raise
    except RecursionError as error:
        raise TextError("brackets nested too deep") from error
    except ValueError as error:  # json.JSONDecodeError, or a number of too many digits
        raise TextError(f"not JSON ({error})") from error
    if not isinstance(row, dict):
        raise TextError(f"expected an object, got {type(row).__name__}")
    return row


def shown(value: object) -> str:
    """Return a value as a message shows it: its beginning where it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise TextError(f"{shown(twice)} stands there twice")
    return found
