"""Penalties: logits change by the tokens that were there before, counted on the device.

The tokens of a sequence with a penalty lie in pages on the device, where the newest one may be
known to nobody else: the step before samples it. They are counted anew in each step, so that a step
that is forgotten, or a sequence that was preempted, leaves nothing to mend.

Shape letters: S rows of logits, P rows with penalties, V vocabulary, L tokens that may count.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import torch
from torch import Tensor

from engine.asked.sampling import PENALTY_PAGE_TOKENS as PAGE
from engine.run.sample_row import SampleRow, send

SENT_TOKENS = 4096
"""Tokens that are written at once."""


@dataclass(slots=True)
class _Held:
    """The pages of a sequence."""

    pages: list[int] = field(default_factory=list)
    num_written: int = 0
    """Leading tokens in them that came from the host."""


class Penalties:
    """Applies repetition_penalty, frequency_penalty and presence_penalty, in this order.

    `num_tokens` have room on the device, int32. Where a step's sequences have more, they take
    turns, and are written again; a single one that has more makes the room grow.
    """

    def __init__(self, vocab_size: int, device: torch.device, num_tokens: int) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._held: OrderedDict[int, _Held] = OrderedDict()
        """By seq_id; the one that has not run for longest comes first."""
        self._pages = torch.zeros((0, PAGE), dtype=torch.int32, device=device)
        self._free: list[int] = []
        self._allocate(-(-num_tokens // PAGE))

    def _allocate(self, num_pages: int) -> None:
        self._pages = torch.zeros((num_pages, PAGE), dtype=torch.int32, device=self._device)
        self._free = list(range(num_pages))[::-1]
        self._held.clear()

    def apply_(self, logits_SV: Tensor, rows: Sequence[SampleRow], sampled: Tensor) -> None:
        """Change the logits of those of the rows that have penalties.

        Args:
            logits_SV: [S, V] float32.
            rows: S rows, each of another sequence.
            sampled: int64 on the device: the tokens of the step before by row, for those that
                nobody else knows.

        Stream: enqueued on the current stream; waits for nothing.
        """
        for at in self._parts(rows):
            mine = [rows[place] for place in at]
            self._write(mine, sampled)
            self._change_(logits_SV, send(at, np.int64, self._device), mine)

    def _parts(self, rows: Sequence[SampleRow]) -> Iterator[list[int]]:
        """Yield places of rows with penalties and tokens that count, as many as have room."""
        part: list[int] = []
        left = num_pages = self._pages.shape[0]
        for at, row in enumerate(rows):
            need = _num_pages(row) if row.params.has_penalty else 0
            if not need:
                continue
            if part and need > left:
                yield part
                part, left = [], num_pages
            part.append(at)
            left -= need
        if part:
            yield part

    def _write(self, rows: Sequence[SampleRow], sampled: Tensor) -> None:
        """Write what the device lacks of the tokens of rows."""
        self._make_room(rows)
        places: list[int] = []
        tokens: list[int] = []
        unknown: list[tuple[int, int]] = []
        for row in rows:
            sequence, held, base = row.sequence, self._held[row.sequence.seq_id], _base(row)
            known = sequence.num_tokens - base
            places += (_place(held, at) for at in range(held.num_written, known))
            tokens += sequence.tokens(base + held.num_written, base + known)
            places_of_unknown = (_place(held, at) for at in count(known))
            unknown += zip(row.token_rows, places_of_unknown, strict=False)
            held.num_written = known
        flat = self._pages.view(-1)
        for first in range(0, len(places), SENT_TOKENS):
            some = slice(first, first + SENT_TOKENS)
            place, token = send([places[some], tokens[some]], np.int64, self._device)
            flat.index_copy_(0, place, token.int())
        if unknown:
            token_row, place = send(list(zip(*unknown, strict=True)), np.int64, self._device)
            flat.index_copy_(0, place, sampled.index_select(0, token_row).int())

    def _make_room(self, rows: Sequence[SampleRow]) -> None:
        """Give sequences the pages that they need, those of others where none is free."""
        need = [_num_pages(row) for row in rows]
        if sum(need) > self._pages.shape[0]:
            self._allocate(sum(need))
        for row in rows:
            self._held.setdefault(row.sequence.seq_id, _Held())
            self._held.move_to_end(row.sequence.seq_id)
        for row, num_pages in zip(rows, need, strict=True):
            held = self._held[row.sequence.seq_id]
            while len(held.pages) < num_pages:
                if not self._free:
                    # Those of these rows are the last ones, and have room beside each other.
                    _, oldest = self._held.popitem(last=False)
                    self._free += oldest.pages
                else:
                    held.pages.append(self._free.pop())

    def _change_(self, logits_SV: Tensor, at_P: Tensor, rows: Sequence[SampleRow]) -> None:
        """Change the logits of P rows, whose tokens are written."""
        params = [row.params for row in rows]
        values = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
        repetition, frequency, presence = send(values, np.float64, self._device).T[:, :, None]
        raw_PV = logits_SV.index_select(0, at_P)
        value_PV = raw_PV.double()
        seen_PV, counts_PV = self._count(rows)
        if seen_PV is not None:
            scaled_PV = torch.where(value_PV > 0, value_PV / repetition, value_PV * repetition)
            value_PV = torch.where(seen_PV, scaled_PV, value_PV)
            del scaled_PV
        if counts_PV is not None:
            value_PV -= frequency * counts_PV
            value_PV -= presence * (counts_PV > 0)
        limit = torch.finfo(torch.float32)
        value_PV.clamp_(limit.min, limit.max)
        changed_PV = value_PV.float().masked_fill_(raw_PV == -torch.inf, -torch.inf)
        logits_SV.index_copy_(0, at_P, changed_PV)

    def _count(self, rows: Sequence[SampleRow]) -> tuple[Tensor | None, Tensor | None]:
        """Return bool [P, V], which tokens there were, and int32 [P, V], how often in the output.

        None of what no row asks for.
        """
        size, device = self._vocab_size, self._device
        shape = len(rows), size + 1  # what does not count goes to a column of its own
        seen = counts = None
        if any(row.params.repetition_penalty != 1 for row in rows):
            seen = torch.zeros(shape, dtype=torch.bool, device=device)
        if any(_is_counted(row) for row in rows):
            counts = torch.zeros(shape, dtype=torch.int32, device=device)
        held = [self._held[row.sequence.seq_id].pages for row in rows]
        width = max(_num_pages(row) for row in rows)
        prompts = [row.sequence.num_prompt_tokens - _base(row) for row in rows]
        prompt_P, length_P = send([prompts, [_length(row) for row in rows]], np.int64, device)
        step = max(1, size // PAGE)
        for first in range(0, width, step):
            last = min(width, first + step)
            table = [(pages[first:last] + [0] * (last - first))[: last - first] for pages in held]
            chosen = send(table, np.int64, device).flatten()
            ids_PL = self._pages.index_select(0, chosen).view(len(rows), -1).long()
            at_L = torch.arange(first * PAGE, last * PAGE, device=device)
            is_beyond = at_L >= length_P[:, None]
            if seen is not None:
                seen.scatter_(1, ids_PL.masked_fill(is_beyond, size), True)
            if counts is not None:
                is_other = is_beyond | (at_L < prompt_P[:, None])
                ones = torch.ones((), dtype=torch.int32, device=device).expand_as(ids_PL)
                counts.scatter_add_(1, ids_PL.masked_fill_(is_other, size), ones)
        return (
            None if seen is None else seen[:, :size],
            None if counts is None else counts[:, :size],
        )


def _is_counted(row: SampleRow) -> bool:
    return row.params.frequency_penalty != 0 or row.params.presence_penalty != 0


def _base(row: SampleRow) -> int:
    """Return the position of the first token that may count: the prompt counts as repeated only."""
    return row.sequence.num_prompt_tokens if row.params.repetition_penalty == 1 else 0


def _length(row: SampleRow) -> int:
    """Return how many tokens may count, with those that the host does not know yet."""
    return row.sequence.num_tokens + len(row.token_rows) - _base(row)


def _num_pages(row: SampleRow) -> int:
    return -(-_length(row) // PAGE)


def _place(held: _Held, at: int) -> int:
    return held.pages[at // PAGE] * PAGE + at % PAGE
