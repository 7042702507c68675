"""Choose one token for each row of logits, on the device that holds them.

Shape letters: S rows, V vocabulary, D rows that draw, K alternatives returned.

A draw depends on nothing but the row's logits and its key: one uniform number comes from a hash of
(seed, request, index, position), and the inverse of the cumulative distribution is taken over the
tokens sorted from most to least probable, the lower id first among equals. Weights are integers
(2^40 for the most probable token), so that their sums do not depend on the order of addition and
thereby not on the batch; a token 2^40 times less probable than the first is never drawn.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.asked.request import NoToken, SampledToken
from engine.asked.sampling import (
    MAX_BIASES,
    MAX_LOGPROBS,
    SAMPLER_GREEDY_ELEMENTS,
    SAMPLER_SORT_ELEMENTS,
)
from engine.errors import EngineError
from engine.run.penalties import Penalties
from engine.run.sample_row import SampleRow, send

WEIGHT_BITS = 40
MASK_WORDS = 2**14
"""Words of masks, of 32 tokens each, that are taken apart at once."""
MAX_SELECT = 1024
"""Up to this many largest logits are selected rather than sorted out."""


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Tokens that are being chosen; `Sampler.collect` reads them."""

    rows: Sequence[SampleRow]
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

    def enqueue(self, logits_SV: Tensor, rows: Sequence[SampleRow]) -> PendingTokens:
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

    def score(self, logits_SV: Tensor, token_ids: Sequence[int], width: int) -> Tensor:
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
                largest_D = raw_DV.max(dim=-1).values
                log_sums_D = _log_sums(raw_DV, largest_D)
                picked_D = raw_DV.gather(1, tokens_D[:, None])[:, 0] - largest_D
                logprobs_D = picked_D.double() - log_sums_D
                ranks = _ranks(raw_DV, tokens_D, largest_D, log_sums_D, width)
                parts.append(torch.cat([logprobs_D[:, None], ranks], dim=1))
        return torch.cat(parts)

    def _enqueue(
        self, logits_SV: Tensor, rows: Sequence[SampleRow], width: int | None, table: Tensor
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
        rows: Sequence[SampleRow],
        width: int | None,
        *,
        is_changed: bool,
    ) -> Tensor:
        """Return [S, 2 or 3 + 2 K] float64.

        Token, log-probability; its rank, K tokens, K log-probabilities. If `is_changed`, logits of
        some row may have to be.
        """
        largest_S, tokens_S = raw_SV.max(dim=-1)
        log_sums_S = _log_sums(raw_SV, largest_S)
        work_SV = self._adjust(raw_SV, rows) if is_changed else raw_SV
        if work_SV is not raw_SV:
            tokens_S = work_SV.argmax(dim=-1)
        drawing = [at for at, row in enumerate(rows) if not row.params.is_greedy]
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

    def _adjust(self, raw_SV: Tensor, rows: Sequence[SampleRow]) -> Tensor:
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

    def _mask_(self, work_SV: Tensor, at: list[int], rows: Sequence[SampleRow]) -> None:
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

    def _banned(self, rows: Sequence[SampleRow]) -> list[tuple[int, int]]:
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

    def _draw(self, work_DV: Tensor, rows: Sequence[SampleRow]) -> Tensor:
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
        rows: Sequence[SampleRow],
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


def _log_sums(raw_SV: Tensor, largest_S: Tensor) -> Tensor:
    """Return [S] float64, log(sum(exp(logit - largest))) of each row; NaN for unusable rows.

    The exponentials are summed in float32, pairwise: an error of some 2^-22 of the sum.
    """
    return (raw_SV - largest_S[:, None]).exp_().sum(dim=-1).double().log_()


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
