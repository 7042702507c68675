"""Choose one token for each row of logits, on the device that holds them.

Shape letters: S rows, V vocabulary, D rows that draw, K alternatives returned, P rows with
penalties, L tokens that may count.

A draw depends on nothing but the row's logits and its key: one uniform number comes from a hash of
(seed, request, index, position), and the inverse of the cumulative distribution is taken over the
tokens sorted from most to least probable, the lower id first among equals. Weights are integers
(2^40 for the most probable token), so that their sums do not depend on the order of addition and
thereby not on the batch; a token 2^40 times less probable than the first is never drawn.
"""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from engine.asked.request import NoToken, SampledToken, Sequence
from engine.asked.sampling import (
    MAX_BIASES,
    MAX_LOGPROBS,
    SAMPLER_GREEDY_ELEMENTS,
    SAMPLER_SORT_ELEMENTS,
    SamplingParams,
)
from engine.asked.sampling import PENALTY_PAGE_TOKENS as PAGE
from engine.errors import EngineError
from kernels.ops.logits import most_probable

NO_ROWS = range(0)
SENT_BYTES: Final = 2**16
"""Most bytes that CUDA takes from pageable memory without waiting for the device."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What is known of the sequence that a row of logits belongs to."""

    sequence: Sequence
    params: SamplingParams
    """The sequence's own."""
    engine_seed: int
    """Keys the draws of requests without a seed, with their number in order of arrival."""
    eos_ids: Collection[int]
    """The model's end-of-sequence tokens."""
    position: int
    """Place of the new token in prompt and output, from 0."""
    num_output_tokens: int
    """Tokens of the output so far, with those that are sampled but not known to the host yet."""
    token_rows: range = NO_ROWS
    """The rows of these in the step before, which samples them."""
    mask: np.ndarray | None = None
    """int32, a bit for each token that its constraint allows, the lowest first; None: there is no
    constraint, or it failed."""

    @classmethod
    def of(
        cls,
        sequence: Sequence,
        engine_seed: int,
        eos_ids: Collection[int],
        *,
        token_rows: range = NO_ROWS,
    ) -> "SampleRow":
        """Make the row of a sequence's next token; find out what its constraint allows, if any.

        The tokens before it that the host does not know yet are in `token_rows` of the step before.
        """
        constraint = sequence.constraint
        mask = None if constraint is None else constraint.mask()
        unknown = len(token_rows)
        counts = sequence.num_tokens + unknown, sequence.num_output_tokens + unknown
        return cls(sequence, sequence.params, engine_seed, eos_ids, *counts, token_rows, mask)

    def uniform(self) -> float:
        """Return the number in [0, 1) that decides the token."""
        index, arrival = self.sequence.index, self.sequence.request.arrival
        if self.params.seed is None:
            text = f"{self.engine_seed}|{index}|{self.position}|i{arrival}"
        else:
            text = f"{self.params.seed + index}|0|{self.position}|i0"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53

    @property
    def banned_ids(self) -> set[int]:
        """Tokens that would end the output before min_tokens."""
        params = self.params
        if self.num_output_tokens >= params.min_tokens:
            return set()
        banned = set(params.stop_token_ids or ())
        return banned if params.ignore_eos else banned.union(self.eos_ids)


def send(values: Any, dtype: type[np.generic], device: torch.device) -> Tensor:
    """Copy host numbers to a device without waiting for it, SENT_BYTES at a time.

    Stream: enqueued on the current stream.
    """
    host = torch.from_numpy(np.array(values, dtype=dtype))
    if host.nbytes <= SENT_BYTES:
        return host.to(device, non_blocking=True)
    sent, size = torch.empty_like(host, device=device), SENT_BYTES // host.itemsize
    for first in range(0, host.numel(), size):
        part = slice(first, first + size)
        sent.view(-1)[part].copy_(host.view(-1)[part], non_blocking=True)
    return sent


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

    The tokens of a sequence with a penalty lie in pages on the device, where the newest one may be
    known to nobody else: the step before samples it. They are counted anew in each step, so that a
    step that is forgotten, or a sequence that was preempted, leaves nothing to mend.

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

    def apply_(self, logits_SV: Tensor, rows: SequenceOf[SampleRow], sampled: Tensor) -> None:
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

    def _parts(self, rows: SequenceOf[SampleRow]) -> Iterator[list[int]]:
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

    def _write(self, rows: SequenceOf[SampleRow], sampled: Tensor) -> None:
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

    def _make_room(self, rows: SequenceOf[SampleRow]) -> None:
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

    def _change_(self, logits_SV: Tensor, at_P: Tensor, rows: SequenceOf[SampleRow]) -> None:
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

    def _count(self, rows: SequenceOf[SampleRow]) -> tuple[Tensor | None, Tensor | None]:
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


WEIGHT_BITS = 40
MASK_WORDS = 2**14
"""Words of masks, of 32 tokens each, that are taken apart at once."""
MAX_SELECT = 1024
"""Up to this many largest logits are selected rather than sorted out."""


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Tokens that are being chosen; `Sampler.collect` reads them."""

    rows: SequenceOf[SampleRow]
    width: int | None
    """Alternatives returned, K; None: ranks neither."""
    table: Tensor
    """float64 [S, 2] or [S, 3 + 2 K] on the host, pinned beside a GPU where that is possible."""


class Sampler:
    """Chooses tokens by each row's own parameters.

    In this order: logit_bias, penalties, the mask of min_tokens, temperature, top_k, top_p (of the
    mass that top_k left), min_p, draw. Greedy rows take the largest logit after the mask, the
    lowest id among equals. Log-probabilities are those of the logits as they came.

    The tokens come back through two host buffers used in turn: those of a call must be collected
    before the next call but one. More rows than `max_rows` make the buffers grow. `penalty_tokens`
    of sequences with penalties are kept on the device.

    `host_tensor` allocates zeros on the host (Device.upload_buffer; None: never pinned), `reach`
    gives them as kernels write them (Device.reach), for engines whose copy engines also move KV
    blocks; None: tokens go to the host by a copy engine.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str,
        *,
        max_rows: int = 0,
        penalty_tokens: int = 0,
        host_tensor: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None,
        reach: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if not 1 <= vocab_size < 2 ** (62 - WEIGHT_BITS):
            raise EngineError(
                f"sampler: expected a vocabulary of 1 to {2 ** (62 - WEIGHT_BITS) - 1} tokens, got "
                f"{vocab_size}."
            )
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._host_tensor, self._reach = host_tensor or _pageable, reach
        self._penalties = Penalties(vocab_size, self.device, penalty_tokens)
        self._turn = 0
        self._tokens = torch.zeros(0, dtype=torch.int64)
        self._hosts = [torch.empty(0, dtype=torch.float64)] * 2
        self._targets = self._hosts
        self._grow(max_rows)

    @property
    def tokens(self) -> Tensor:
        """int64 on the device: the newest call's tokens by row, once its work has run there."""
        return self._tokens

    def _grow(self, num_rows: int) -> None:
        """Allocate for more rows; never within a step, where max_rows is kept to."""
        if num_rows <= self._tokens.shape[0]:
            return
        tokens = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        tokens[: len(self._tokens)].copy_(self._tokens)  # the step at hand may count them
        self._tokens = tokens
        shape = (num_rows * (3 + 2 * MAX_LOGPROBS),)
        self._hosts = [self._host_tensor(shape, torch.float64) for _ in range(2)]
        self._targets = self._hosts
        if self._reach is not None:
            self._targets = [self._reach(host) for host in self._hosts]

    def warm_up(self) -> None:
        """Compile the kernel of the most probable tokens.

        Stream: enqueued on the current stream; waits for nothing.
        """
        most_probable(torch.zeros((1, self.vocab_size), device=self.device))

    def enqueue(self, logits_SV: Tensor, rows: SequenceOf[SampleRow]) -> PendingTokens:
        """Start choosing a token for each row; `collect` returns them once the work is done.

        Args:
            logits_SV: [S, V] float32 on the sampler's device; not changed.
            rows: S rows.

        Raises:
            EngineError: Every token of a row is masked.

        Stream: Enqueued on the current stream, with one copy to the host at the end; waits for
            nothing, see `send`. Rows run in portions, so that the temporary memory stays within
            `sampler_workspace_bytes(V)`.
        """
        assert logits_SV.shape == (len(rows), self.vocab_size)
        assert logits_SV.dtype == torch.float32
        asked = [row.params.logprobs for row in rows if row.params.logprobs is not None]
        width = min(max(asked), self.vocab_size) if asked else None
        self._grow(len(rows))
        self._turn = (self._turn + 1) % len(self._hosts)
        shape = len(rows), 2 if width is None else 3 + 2 * width
        table, target = (
            tensors[self._turn][: shape[0] * shape[1]].view(shape)
            for tensors in (self._hosts, self._targets)
        )
        self._enqueue(logits_SV, rows, width, target)
        return PendingTokens(rows, width, table)

    def collect(self, pending: PendingTokens) -> list[SampledToken | NoToken]:
        """Return the S tokens of `enqueue`, whose work the caller has waited for."""
        return [
            _read(line, row, pending.width)
            for line, row in zip(pending.table.tolist(), pending.rows, strict=True)
        ]

    def score(self, logits_SV: Tensor, token_ids: SequenceOf[int], width: int) -> Tensor:
        """Return how probable given tokens are, float64 [S, 2 + 2 K] on the device.

        A row has the token's log-probability, its rank, K tokens and their log-probabilities.

        Args:
            logits_SV: [S, V] float32 on the sampler's device; not changed.
            token_ids: One for each row.
            width: Most probable tokens to return, K.

        Stream: Enqueued on the current stream, in portions as `enqueue` takes them.
        """
        portion = max(1, SAMPLER_SORT_ELEMENTS // self.vocab_size)
        tokens_S, parts = self._send(token_ids, np.int64), []
        with torch.inference_mode():
            for at in range(0, len(token_ids), portion):
                raw_DV, tokens_D = logits_SV[at : at + portion], tokens_S[at : at + portion]
                found_D2, largest_D = most_probable(raw_DV)
                log_sums_D = found_D2[:, 1].neg()
                picked_D = raw_DV.gather(1, tokens_D[:, None])[:, 0] - largest_D
                logprobs_D = picked_D.double() - log_sums_D
                ranks = _ranks(raw_DV, tokens_D, largest_D, log_sums_D, width)
                parts.append(torch.cat([logprobs_D[:, None], ranks], dim=1))
        return torch.cat(parts)

    def _enqueue(
        self, logits_SV: Tensor, rows: SequenceOf[SampleRow], width: int | None, table: Tensor
    ) -> None:
        if not rows:
            return
        is_changed = any(row.params.changes_logits for row in rows)
        plain = not is_changed and width is None and all(row.params.is_greedy for row in rows)
        elements = SAMPLER_GREEDY_ELEMENTS if plain else SAMPLER_SORT_ELEMENTS
        portion = max(1, elements // self.vocab_size)
        with torch.inference_mode():
            parts = [
                self._choose(
                    logits_SV[at : at + portion],
                    rows[at : at + portion],
                    width,
                    is_changed=is_changed,
                )
                for at in range(0, len(rows), portion)
            ]
            found = parts[0] if len(parts) == 1 else torch.cat(parts)
            self._tokens[: len(rows)].copy_(found[:, 0])
            if table.is_cuda:
                torch.mul(found, 1, out=table)  # a kernel; `copy_` takes a copy engine
            else:
                table.copy_(found, non_blocking=True)

    def _choose(
        self,
        raw_SV: Tensor,
        rows: SequenceOf[SampleRow],
        width: int | None,
        *,
        is_changed: bool,
    ) -> Tensor:
        """Return [S, 2 or 3 + 2 K] float64.

        Token, log-probability; its rank, K tokens, K log-probabilities. If `is_changed`, logits of
        some row may have to be.
        """
        found_S2, largest_S = most_probable(raw_SV)
        work_SV = self._adjust(raw_SV, rows) if is_changed else raw_SV
        drawing = [at for at, row in enumerate(rows) if not row.params.is_greedy]
        if work_SV is raw_SV and not drawing and width is None:
            return found_S2
        tokens_S, log_sums_S = found_S2[:, 0].long(), found_S2[:, 1].neg()
        if work_SV is not raw_SV:
            tokens_S = work_SV.argmax(dim=-1)
        if len(drawing) == len(rows):
            tokens_S = self._draw(work_SV, rows)
        elif drawing:
            at_D = self._send(drawing, np.int64)
            drawn_D = self._draw(work_SV[at_D], [rows[at] for at in drawing])
            tokens_S = tokens_S.index_copy(0, at_D, drawn_D)
        if drawing or work_SV is not raw_SV:
            picked_S = raw_SV.gather(1, tokens_S[:, None])[:, 0] - largest_S
            logprobs_S = picked_S.double() - log_sums_S
            if is_changed and any(row.mask is not None for row in rows):  # maybe nothing is left
                chosen_S = work_SV.gather(1, tokens_S[:, None])[:, 0]
                is_out_S = (chosen_S == -math.inf) & ~log_sums_S.isnan()
                logprobs_S = logprobs_S.masked_fill(is_out_S, -math.inf)
        else:
            logprobs_S = log_sums_S.neg()
        del work_SV
        columns = [tokens_S.double()[:, None], logprobs_S[:, None]]
        if width is not None:
            columns.append(self._ranked(raw_SV, tokens_S, largest_S, log_sums_S, rows, width))
        return torch.cat(columns, dim=1)

    def _adjust(self, raw_SV: Tensor, rows: SequenceOf[SampleRow]) -> Tensor:
        """Apply logit_bias, penalties and masks to a copy, if any row needs it."""
        banned, has_penalty = self._banned(rows), any(row.params.has_penalty for row in rows)
        biased = [
            (at, token_id, value)
            for at, row in enumerate(rows)
            if row.params.logit_bias
            for token_id, value in row.params.logit_bias.items()
        ]
        masked = [at for at, row in enumerate(rows) if row.mask is not None]
        if not banned and not biased and not has_penalty and not masked:
            return raw_SV
        work_SV = raw_SV.clone()
        for first in range(0, len(biased), MAX_BIASES):
            at, token_ids, values = zip(*biased[first : first + MAX_BIASES], strict=True)
            place = tuple(self._send([at, token_ids], np.int64))
            sums = work_SV[place].double() + self._send(values, np.float64)
            work_SV[place] = sums.float()
        if has_penalty:
            self._penalties.apply_(work_SV, rows, self._tokens)
        if masked:
            self._mask_(work_SV, masked, rows)
        if banned:
            place = tuple(self._send(list(zip(*banned, strict=True)), np.int64))
            # A number would be copied to the device while the host waits.
            work_SV.index_put_(place, torch.full((), -math.inf, device=self.device))
        return work_SV

    def _mask_(self, work_SV: Tensor, at: list[int], rows: SequenceOf[SampleRow]) -> None:
        """Take away what the constraints of rows at places do not allow."""
        words = [row.mask for row in rows if row.mask is not None]
        each = max(1, MASK_WORDS // len(words[0]))
        bits = torch.arange(32, dtype=torch.int32, device=self.device)
        for first in range(0, len(at), each):
            at_P = self._send(at[first : first + each], np.int64)
            words_PW = self._send(words[first : first + each], np.int32)
            is_out = (words_PW[:, :, None] >> bits).bitwise_and_(1).logical_not_()
            is_out_PV = is_out.flatten(1)[:, : self.vocab_size]
            part_PV = work_SV.index_select(0, at_P).masked_fill_(is_out_PV.bool(), -math.inf)
            work_SV.index_copy_(0, at_P, part_PV)

    def _banned(self, rows: SequenceOf[SampleRow]) -> list[tuple[int, int]]:
        """Return rows and tokens that would end the output before min_tokens."""
        banned: list[tuple[int, int]] = []
        for at, row in enumerate(rows):
            masked = [i for i in row.banned_ids if 0 <= i < self.vocab_size]
            if len(masked) == self.vocab_size:
                raise EngineError(
                    f"sampler: expected a token that does not end the output of row {at}, got "
                    f"min_tokens={row.params.min_tokens} with all {self.vocab_size} tokens masked."
                )
            banned += [(at, token_id) for token_id in masked]
        return banned

    def _draw(self, work_DV: Tensor, rows: SequenceOf[SampleRow]) -> Tensor:
        """Return [D] int64, one drawn token a row."""
        settings = [
            (
                row.params.temperature,
                row.params.top_k if 0 < row.params.top_k < self.vocab_size else self.vocab_size,
                row.params.top_p,
                row.params.min_p,
                row.uniform(),
            )
            for row in rows
        ]
        columns = self._send(settings, np.float64).T[:, :, None]
        temperature, top_k, top_p, min_p, uniform = columns.unbind(0)
        largest = max(int(row[1]) for row in settings)
        sorted_DV, ids_DV = _sort_rows(work_DV, largest)
        share_DV = sorted_DV.double()
        del sorted_DV
        share_DV -= share_DV[:, :1].clone()
        share_DV /= temperature
        share_DV.exp_()
        kept = top_k.long()
        if any(row.params.min_p > 0 for row in rows):
            enough = (share_DV >= min_p).sum(dim=-1, keepdim=True)
            # Not below 1: NaN is no share, and `collect` returns None for it.
            kept = torch.minimum(kept, enough.clamp_(min=1))
        share_DV *= 2.0**WEIGHT_BITS
        sums_DV = share_DV.long().cumsum(dim=-1)
        del share_DV
        if any(row.params.top_p < 1 for row in rows):
            mass = sums_DV.gather(1, top_k.long() - 1).double()
            # Sums below the wanted mass, and the one that reaches it.
            enough = torch.searchsorted(sums_DV, (top_p * mass).ceil().long()) + 1
            kept = torch.where(top_p < 1, torch.minimum(kept, enough), kept)
        total = sums_DV.gather(1, kept - 1)
        target = torch.minimum((uniform * total.double()).long(), total - 1)
        place = torch.searchsorted(sums_DV, target, right=True)
        return ids_DV.gather(1, place.clamp(max=ids_DV.shape[1] - 1))[:, 0]

    def _ranked(
        self,
        raw_SV: Tensor,
        tokens_S: Tensor,
        largest_S: Tensor,
        log_sums_S: Tensor,
        rows: SequenceOf[SampleRow],
        width: int,
    ) -> Tensor:
        """Return [S, 1 + 2 K] float64: the token's rank, K most probable ones, K log-probabilities.

        Zeros for rows that do not want them.
        """
        wanting = [at for at, row in enumerate(rows) if row.params.logprobs is not None]
        shape = (len(rows), 1 + 2 * width)
        table_S = torch.zeros(shape, dtype=torch.float64, device=raw_SV.device)
        if wanting:
            at = self._send(wanting, np.int64)
            tokens_D, largest_D = tokens_S.index_select(0, at), largest_S.index_select(0, at)
            raw_DV, log_sums_D = raw_SV.index_select(0, at), log_sums_S.index_select(0, at)
            table_S.index_copy_(0, at, _ranks(raw_DV, tokens_D, largest_D, log_sums_D, width))
        return table_S

    def _send(self, values: Any, dtype: type[np.generic]) -> Tensor:
        return send(values, dtype, self.device)


def _pageable(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def _ranks(
    raw_DV: Tensor, tokens_D: Tensor, largest_D: Tensor, log_sums_D: Tensor, width: int
) -> Tensor:
    """Return [D, 1 + 2 K] float64: the token's rank, K most probable ones, K log-probabilities."""
    keys_DV = _order_keys(raw_DV)
    chosen_D = keys_DV.gather(1, tokens_D[:, None])
    columns = [(keys_DV >= chosen_D).sum(dim=-1, keepdim=True).double()]
    if width:
        ids_DK = keys_DV.topk(width, dim=-1).indices
        del keys_DV
        picked_DK = raw_DV.gather(1, ids_DK)
        picked_DK -= largest_D[:, None]
        columns += [ids_DK.double(), picked_DK.double() - log_sums_D[:, None]]
    return torch.cat(columns, dim=1)


def _sort_rows(work_DV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` or more largest logits of each row, falling, and their ids.

    All three ways give the same order: by falling logit, then by rising id.
    """
    if count <= MAX_SELECT:
        ids = _order_keys(work_DV).topk(count, dim=-1).indices
        return work_DV.gather(1, ids), ids
    if work_DV.device.type == "cpu":
        # On one core of an EPYC 8 x 152,064 integers take NumPy 37 ms, torch's stable sort 183 ms.
        keys = np.sort(_order_keys(work_DV).numpy(), axis=-1)[:, ::-1]
        ids = torch.from_numpy(work_DV.shape[1] - 1 - (keys & 0xFFFFFFFF))
        return work_DV.gather(1, ids), ids
    sorted_DV, ids = work_DV.sort(dim=-1, descending=True, stable=True)
    return sorted_DV, ids


def _order_keys(raw_DV: Tensor) -> Tensor:
    """Return [D, V] int64 that sort like the logits and, among equals, by falling id."""
    # Adding zero turns -0.0 into 0.0. The bits of a float sort like an integer once those below
    # the sign are flipped for negative numbers.
    bits = (raw_DV + 0.0).view(torch.int32)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    size = raw_DV.shape[1]
    keys = bits.long() << 32
    keys += torch.arange(size - 1, -1, -1, device=raw_DV.device)
    return keys


def _read(line: list[float], row: SampleRow, width: int | None) -> SampledToken | NoToken:
    has_form = row.sequence.constraint is not None
    if has_form and (row.mask is None or line[1] == -math.inf):  # NaN where logits are unusable
        return NoToken.FORM
    if not math.isfinite(line[1]):
        return NoToken.LOGITS
    token_id, logprob, asked = int(line[0]), line[1], row.params.logprobs
    if asked is None or width is None:
        return SampledToken(token_id, logprob)
    ids, values = line[3 : 3 + min(asked, width)], line[3 + width :]
    top = {token_id: logprob}
    top |= {int(other): value for other, value in zip(ids, values, strict=False)}
    return SampledToken(token_id, logprob, top, int(line[2]))
