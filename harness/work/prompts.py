"""Prompts in tokens: synthetic ones of a set length from a seed, or rows of a JSONL file."""

import json
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

T = TypeVar("T")

_PACKED: Final = (
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bzip2"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"PK\3\4", "zip"),
)
_SHOWN_CHARS: Final = 80
_SHOWN: Final = 5
"""Problems of a file that are told."""


class TextError(ValueError):
    """A file or a row that cannot be used; the message says why, without naming the file."""


def read_text(path: Path) -> str:
    """Return a file of text in UTF-8, with or without a byte order mark, line ends as they are.

    TextError, naming the line, where it cannot be read, is packed, or is no such text.
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
    """Return the JSON object of a line; TextError where it is none, or names a value twice."""
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


class PromptError(ValueError):
    """Prompts that cannot be had as asked; the message says what to change."""


@dataclass(frozen=True)
class PromptRow:
    """One row of a prompts file: a text, or token ids."""

    line: int
    text: str | None = None
    token_ids: tuple[int, ...] | None = None


def synthetic_prompts(
    num_prompts: int,
    num_tokens: int,
    *,
    vocab_size: int,
    seed: int,
    stream: str,
    avoid: Collection[int] = (),
) -> list[list[int]]:
    """Return distinct prompts of random token ids, the same for the same arguments.

    Ids are below `vocab_size` and not in `avoid` (special tokens); PromptError where these are too
    few. Two streams of one seed share no prompt in practice.
    """
    allowed = sorted(set(range(vocab_size)) - set(avoid))
    if num_tokens < 1 or not allowed or len(allowed) ** min(num_tokens, 64) < num_prompts:
        raise PromptError(
            f"prompts: expected room for {num_prompts} distinct prompts of {num_tokens} tokens, "
            f"got {len(allowed)} usable token ids. Raise prompt_tokens or ask for fewer requests."
        )
    draw = random.Random(f"tightfit/{stream}/{seed}")
    seen: set[tuple[int, ...]] = set()
    prompts: list[list[int]] = []
    while len(prompts) < num_prompts:
        prompt = draw.choices(allowed, k=num_tokens)
        if tuple(prompt) not in seen:
            seen.add(tuple(prompt))
            prompts.append(prompt)
    return prompts


def parse_lines(
    lines: Iterable[str], parse: Callable[[int, str], T], problems: list[str], *, first: int = 1
) -> list[T]:
    """Return the rows of the lines that are not empty; what is wrong goes to `problems`."""
    found = []
    for number, line in enumerate(lines, start=first):
        if line.strip():
            try:
                found.append(parse(number, line))
            except TextError as error:
                problems.append(f"line {number}: {error}.")
    return found


def told(problems: Sequence[str]) -> str:
    """Return the first problems, and how many more there are."""
    more = f" And {len(problems) - _SHOWN} more." if len(problems) > _SHOWN else ""
    return f"{' '.join(problems[:_SHOWN])}{more} Correct or remove these lines."


def read_prompts(path: Path, num_prompts: int) -> list[PromptRow]:
    """Return the first `num_prompts` rows of a JSONL file; every row of the file is checked.

    A row is an object with `prompt` (text) or `prompt_token_ids` (whole numbers from 0). Empty
    lines are skipped, other keys are ignored. PromptError names the lines that are malformed.
    """
    try:
        # Not splitlines(), which also ends a line at U+2028 and the like inside of a text.
        lines = read_text(path).split("\n")
    except TextError as error:
        raise PromptError(f"prompts_file {path}: {error}") from error
    problems: list[str] = []
    rows = parse_lines(lines, _parse, problems)
    if problems:
        raise PromptError(f"prompts_file {path}: {told(problems)}")
    if len(rows) < num_prompts:
        raise PromptError(
            f"prompts_file {path}: expected at least {num_prompts} rows, one for each request that "
            f"is planned, got {len(rows)}. Lower num_requests, repeats, or high_per_s of a search, "
            "or add rows."
        )
    return rows[:num_prompts]


def _parse(number: int, line: str) -> PromptRow:
    row = parse_object(line)
    if ("prompt" in row) == ("prompt_token_ids" in row):
        raise TextError("expected one of prompt and prompt_token_ids")
    if "prompt" in row:
        return PromptRow(number, text=_text(row["prompt"]))
    return PromptRow(number, token_ids=_ids(row["prompt_token_ids"]))


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TextError(f"expected a text that is not empty, got {shown(value)}")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise TextError("expected a text without lone surrogates (\\ud8..)")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    ok = isinstance(value, list) and value
    if not ok or any(type(item) is not int or item < 0 for item in value):
        raise TextError(f"expected whole numbers from 0, got {shown(value)}")
    return tuple(value)


def encode_rows(rows: Iterable[PromptRow], encoder: Any) -> list[list[int]]:
    """Return the token ids of the rows, texts through the model's tokenizer."""
    prompts = []
    for row in rows:
        if row.token_ids is not None:
            prompts.append(list(row.token_ids))
            continue
        if encoder is None:
            raise PromptError(
                f"prompts_file line {row.line}: the model has no tokenizer, so a text cannot be "
                "used. Give prompt_token_ids instead."
            )
        ids = list(encoder.encode(row.text or ""))
        if not ids:
            raise PromptError(f"prompts_file line {row.line}: the text gives no token. Remove it.")
        prompts.append(ids)
    return prompts


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids that synthetic prompts avoid: the special tokens of a tokenizer, or none."""
    return set(getattr(tokenizer, "all_special_ids", None) or ())
