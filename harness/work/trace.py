"""Recorded traces: Azure's CSV and Mooncake's JSON lines. A malformed row is named and refused."""

import csv
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from catalogue.files import expanded
from harness.config.serve import MOST_PROMPT_TOKENS, MOST_REQUESTS, NODE, TraceSource
from harness.work.prompts import (
    PromptError,
    TextError,
    parse_lines,
    parse_object,
    read_text,
    shown,
    told,
)

AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_BLOCK_TOKENS: Final = 512
"""Tokens that one entry of hash_ids stands for."""
_MOST_MS: Final = 1e14
_MOST_TOKENS: Final = 10**9


class TraceError(PromptError):
    """A trace that cannot be used; the message names the lines and what to change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRow:
    """One request of a trace, before any scaling."""

    line: int
    """In the file, from 1."""
    time_s: float
    """From the first request of the trace."""
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    """Blocks of 512 prompt tokens; equal numbers are equal tokens. Empty: a prompt of its own."""


def read_trace(source: TraceSource, num_requests: int | None) -> list[TraceRow]:
    """Return the first rows of a trace in order of time; every row of the file is checked.

    TraceError names the lines that are malformed.
    """
    path = expanded(str(source.path))
    try:
        text = read_text(path)
    except TextError as error:
        raise TraceError(f"trace {path}: {error}") from error
    problems: list[str] = []
    if source.kind == "azure":
        found = _azure(text, problems)
    else:
        found = parse_lines(text.split("\n"), _mooncake_row, problems)
    rows = sorted(found, key=lambda row: row.time_s)
    if problems:
        raise TraceError(f"trace {path} ({source.kind}): {told(problems)}")
    if not rows:
        raise TraceError(f"trace {path} ({source.kind}): expected rows, got none.")
    if len(rows) < (num_requests or 1):
        raise TraceError(
            f"trace {path}: expected at least {num_requests} rows, got {len(rows)}. Lower "
            f"{NODE}.num_requests, or add rows."
        )
    rows = rows[:num_requests]
    built = sum(scaled_tokens(row.prompt_tokens, source.length_scale) for row in rows)
    if len(rows) > MOST_REQUESTS or built > MOST_PROMPT_TOKENS:
        raise TraceError(
            f"trace {path}: expected at most {MOST_REQUESTS:,} requests and "
            f"{MOST_PROMPT_TOKENS:,} prompt tokens in all, got {len(rows):,} and {built:,}. Lower "
            f"{NODE}.num_requests or {NODE}.trace.length_scale."
        )
    first_s = rows[0].time_s
    return [replace(row, time_s=row.time_s - first_s) for row in rows]


def check_lengths(
    rows: Sequence[TraceRow], source: TraceSource, *, limit_tokens: int, limit_name: str
) -> None:
    """Raise TraceError, before anything loads, where requests are longer than the model takes.

    `limit_name` is what sets the longest prompt plus output.
    """
    totals = [
        scaled_tokens(row.prompt_tokens, source.length_scale)
        + scaled_tokens(row.output_tokens, source.length_scale)
        for row in rows
    ]
    long = [at for at, total in enumerate(totals) if total > limit_tokens]
    if not long:
        return
    first = rows[long[0]]
    most = max(row.prompt_tokens + row.output_tokens for row in rows)
    fitting = math.floor(1e4 * (limit_tokens - 1) / most) / 1e4
    raise TraceError(
        f"trace {source.path}: {len(long)} of {len(rows)} rows ask for more than "
        f"{limit_tokens} tokens of prompt and output ({limit_name}), the first in line "
        f"{first.line}: {totals[long[0]]}. Lower {NODE}.trace.length_scale to at most {fitting:g}, "
        "or remove these lines."
    )


def _azure(text: str, problems: list[str]) -> list[TraceRow]:
    lines = text.splitlines()
    header = lines[0] if lines else ""
    try:
        names = _cells(header)
    except TextError:
        names = []
    if sorted(names) != sorted(AZURE_COLUMNS):
        problems.append(
            f"line 1: expected the columns {', '.join(AZURE_COLUMNS)}, got {shown(header)}."
        )
        return []
    at = [names.index(name) for name in AZURE_COLUMNS]

    def parse(line: int, content: str) -> TraceRow:
        cells = _cells(content)
        if len(cells) != len(names):
            raise TextError(f"expected {len(names)} columns, got {len(cells)}")
        when, context, generated = (cells[index] for index in at)
        return TraceRow(
            line=line,
            time_s=_date(when),
            prompt_tokens=_written_tokens("ContextTokens", context),
            output_tokens=_written_tokens("GeneratedTokens", generated),
        )

    return parse_lines(lines[1:], parse, problems, first=2)


def _cells(content: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([content]), [])]
    except csv.Error as error:
        raise TextError(f"not CSV ({error})") from error


def _date(text: str) -> float:
    """Return a date and time as seconds since 1970; without a time zone it is taken as UTC."""
    try:
        when = datetime.fromisoformat(text if ":" in text else "")  # a date alone has no time
    except ValueError as error:
        raise TextError(f"TIMESTAMP: expected a date and time, got {shown(text)}") from error
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def _written_tokens(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 12:
        raise TextError(f"{name}: expected a whole number from 1, got {shown(text)}")
    return _tokens(name, int(text))


def _tokens(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= _MOST_TOKENS:
        raise TextError(f"{name}: expected a whole number from 1, got {shown(value)}")
    return int(value)


def _mooncake_row(line: int, content: str) -> TraceRow:
    row = parse_object(content)
    for name in ("timestamp", "input_length", "output_length"):
        if name not in row:
            raise TextError(f"{name}: expected a value, got none")
    when = row["timestamp"]
    if type(when) not in {int, float} or not 0 <= when <= _MOST_MS:
        raise TextError(f"timestamp: expected milliseconds from 0, got {shown(when)}")
    hashes = row.get("hash_ids", [])
    if not isinstance(hashes, list) or any(type(item) is not int for item in hashes):
        raise TextError("hash_ids: expected a list of whole numbers")
    prompt_tokens = _tokens("input_length", row["input_length"])
    most = math.ceil(prompt_tokens / MOONCAKE_BLOCK_TOKENS)
    if len(hashes) > most:
        raise TextError(
            f"hash_ids: expected at most {most} for {prompt_tokens} tokens, one for each "
            f"{MOONCAKE_BLOCK_TOKENS}, got {len(hashes)}"
        )
    return TraceRow(
        line=line,
        time_s=when / 1e3,
        prompt_tokens=prompt_tokens,
        output_tokens=_tokens("output_length", row["output_length"]),
        hash_ids=tuple(hashes),
    )


def scaled_tokens(tokens: int, scale: float) -> int:
    """Return a length times a factor, rounded, at least 1."""
    return max(1, round(tokens * scale))


def block_lengths(num_tokens: int, num_blocks: int, scale: float) -> list[int]:
    """Return how many tokens of a scaled prompt come from each of its blocks, in order.

    The blocks of a scaled prompt are scaled alike, so that equal beginnings stay equal; the last
    one that is needed is cut.
    """
    edges = [round(index * MOONCAKE_BLOCK_TOKENS * scale) for index in range(num_blocks + 1)]
    cut = [min(edge, num_tokens) for edge in edges]
    return [after - before for before, after in itertools.pairwise(cut)]
