"""Twins of attention over a paged cache, scores and sums in float32.

Decode goes one sequence after the other and adds the results of fixed splits of its keys. Prefill
takes tiles of keys in order, with running sums. A part of the keys takes the same splits or tiles
as the whole does, so that parts give the same bits.

Shape letters: T tokens, S sequences, M blocks per sequence, N query heads, K KV heads, G query
heads of one KV head, H head size, P tokens per block, L tokens of one sequence, n queries taken
together.
"""

import math
from dataclasses import dataclass

import torch

from kernels.arguments import (
    AttentionCall,
    DecodePart,
    PrefillPart,
    PrefillState,
    prefill_state,
)
from kernels.sizes import DECODE_SPLIT_TOKENS, PREFILL_PART_KEYS, decode_num_splits

QUERY_CHUNK_TOKENS = 128
"""Queries that are taken together; bounds the mask and skips keys that none may see."""
_TILE = PREFILL_PART_KEYS
_LOG2_E = math.log2(math.e)


def paged_decode_attention(call: AttentionCall) -> None:
    """Twin of kernels.ops.attention.paged_decode_attention."""
    for index, seq_len in enumerate(call.seq_lens.tolist()):
        if seq_len == 0:
            call.out[index] = 0
            continue
        first, splits = _first_key(seq_len - 1, call.window), []
        for begin in range(
            first // DECODE_SPLIT_TOKENS * DECODE_SPLIT_TOKENS, seq_len, DECODE_SPLIT_TOKENS
        ):
            end = min(begin + DECODE_SPLIT_TOKENS, seq_len)
            splits.append(_attend_split(call, index, max(begin, first), end))
        call.out[index] = _sum_of_splits(call, *map(torch.stack, zip(*splits, strict=True)))


def paged_decode_part(call: AttentionCall, part: DecodePart) -> None:
    """Twin of kernels.ops.attention.paged_decode_part."""
    partial, logsumexp = part.workspace.partial, part.workspace.logsumexp
    for index, seq_len in enumerate(call.seq_lens.tolist()):
        for begin in range(part.begin_key, min(part.end_key, seq_len), DECODE_SPLIT_TOKENS):
            end, split = min(begin + DECODE_SPLIT_TOKENS, seq_len), begin // DECODE_SPLIT_TOKENS
            attended, lse = _attend_split(call, index, begin, end)
            partial[index, :, split], logsumexp[index, :, split] = attended, lse
        if part.is_last:
            count = decode_num_splits(seq_len)
            parts, lse = partial[index].transpose(0, 1), logsumexp[index].t()
            call.out[index] = _sum_of_splits(
                call, parts[:count].contiguous(), lse[:count].contiguous()
            )


def _attend_split(
    call: AttentionCall, index: int, begin: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to keys begin to end - 1; return the result [N, H] and base-2 logarithms [N]."""
    num_kv_heads, head_size = call.k_cache.shape[1], call.k_cache.shape[3]
    keys, values = _rows(call, index, begin, end)
    # All query heads of one KV head attend as rows of one product: no key is repeated.
    query = call.q[index].float().reshape(num_kv_heads, -1, head_size)
    scores = (query @ keys.transpose(1, 2)) * (call.scale * _LOG2_E)
    row_max = scores.amax(2, keepdim=True)
    weights = torch.exp2(scores - row_max)
    row_sum = weights.sum(2, keepdim=True)
    attended = (weights @ values) / row_sum
    return attended.reshape(-1, head_size), (row_max + row_sum.log2()).flatten()


def _sum_of_splits(
    call: AttentionCall, partial_CNH: torch.Tensor, lse_CN: torch.Tensor
) -> torch.Tensor:
    """Add the results of splits in their order, [N, H], each by its softmax denominator."""
    if call.sinks is not None:  # one more split, of the key that is not there
        partial_CNH = torch.cat([partial_CNH, torch.zeros_like(partial_CNH[:1])])
        lse_CN = torch.cat([lse_CN, call.sinks.float()[None] * _LOG2_E])
    if partial_CNH.shape[0] == 1:
        return partial_CNH[0]
    weights = torch.exp2(lse_CN - lse_CN.amax(0))
    total, acc = torch.zeros_like(weights[0]), torch.zeros_like(partial_CNH[0])
    for attended, weight in zip(partial_CNH, weights, strict=True):
        total = total + weight
        acc = acc + attended * weight[:, None]
    return acc / total[:, None]


def paged_prefill_attention(call: AttentionCall, query_starts_S1: torch.Tensor) -> None:
    """Twin of kernels.ops.attention.paged_prefill_attention."""
    num_tokens, num_heads, head_size = call.q.shape
    state = prefill_state(num_tokens, num_heads, head_size, call.q.device)
    end_key = max(call.seq_lens.tolist(), default=0)
    paged_prefill_part(call, query_starts_S1, PrefillPart(0, end_key, is_last=True, state=state))


def paged_prefill_part(
    call: AttentionCall, query_starts_S1: torch.Tensor, part: PrefillPart
) -> None:
    """Twin of kernels.ops.attention.paged_prefill_part."""
    num_kv_heads, state = call.k_cache.shape[1], part.state
    starts = query_starts_S1.tolist()
    for index, seq_len in enumerate(call.seq_lens.tolist()):
        first, stop = starts[index], starts[index + 1]
        if first == stop:
            continue
        position = seq_len - (stop - first)
        begin = max(part.begin_key, _first_key(position, call.window))
        end = min(part.end_key, seq_len)
        keys = _Keys(begin, end, *_rows(call, index, begin, end))
        for chunk in range(first, stop, QUERY_CHUNK_TOKENS):
            rows = slice(chunk, min(chunk + QUERY_CHUNK_TOKENS, stop))
            running = _Running.load(state, rows, num_kv_heads) if part.begin_key else _Running()
            running.attend(call.q[rows], keys, position + chunk - first, call.scale, call.window)
            if part.is_last:
                call.out[rows] = running.result(call.sinks)
            else:
                running.store(state, rows)


@dataclass(frozen=True)
class _Keys:
    """Keys begin to end - 1 and their values, [K, n, H] float32."""

    begin: int
    end: int
    keys: torch.Tensor
    values: torch.Tensor


class _Running:
    """Softmax of n queries over the keys so far: sums [K, G, n], acc [K, G, n, H]."""

    def __init__(self) -> None:
        self.sums: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        """The largest score, the denominator and the weighted values; None before any key."""

    @classmethod
    def load(cls, state: PrefillState, rows: slice, num_kv_heads: int) -> "_Running":
        """Go on from rows of a state."""
        running = cls()
        running.sums = (
            _by_kv_head(state.row_max[rows].unsqueeze(2), num_kv_heads)[..., 0],
            _by_kv_head(state.row_sum[rows].unsqueeze(2), num_kv_heads)[..., 0],
            _by_kv_head(state.acc[rows], num_kv_heads),
        )
        return running

    def store(self, state: PrefillState, rows: slice) -> None:
        """Put the rows into a state."""
        if self.sums is None:
            state.row_max[rows], state.row_sum[rows], state.acc[rows] = -torch.inf, 0, 0
            return
        row_max, row_sum, acc = self.sums
        state.row_max[rows] = _by_token(row_max.unsqueeze(3))[..., 0]
        state.row_sum[rows] = _by_token(row_sum.unsqueeze(3))[..., 0]
        state.acc[rows] = _by_token(acc)

    def result(self, sinks_N: torch.Tensor | None) -> torch.Tensor:
        """Return what was attended to, [n, N, H]."""
        assert self.sums is not None
        row_max, row_sum, acc = self.sums
        if sinks_N is not None:
            sinks = sinks_N.float().view(len(row_max), -1, 1)
            row_sum = row_sum + torch.exp(sinks - row_max)
        return _by_token(acc / row_sum.unsqueeze(3))

    def attend(
        self, q_nNH: torch.Tensor, keys: _Keys, position: int, scale: float, window: int | None
    ) -> None:
        """Go over the tiles that a query may see, the first query being at `position`."""
        num_kv_heads = keys.keys.shape[0]
        query = _by_kv_head(q_nNH.float(), num_kv_heads)
        groups, num_queries, head_size = query.shape[1:]
        query = query.reshape(num_kv_heads, groups * num_queries, head_size)
        limits = torch.arange(position + 1, position + num_queries + 1, device=q_nNH.device)
        first = max(keys.begin, _first_key(position, window)) // _TILE * _TILE
        end = min(keys.end, position + num_queries)
        for tile in range(first, end, _TILE):
            begin, stop = max(tile, keys.begin), min(tile + _TILE, end)
            at = slice(begin - keys.begin, stop - keys.begin)
            scores = (query @ keys.keys[:, at].transpose(1, 2)) * scale
            scores = scores.view(num_kv_heads, groups, num_queries, stop - begin)
            if stop > position + 1 or window is not None:
                numbers = torch.arange(begin, stop, device=q_nNH.device)
                hidden = numbers >= limits[:, None]
                if window is not None:
                    hidden |= numbers < limits[:, None] - window
                scores = scores.masked_fill(hidden, -torch.inf)
            self._take(scores, keys.values[:, at], is_window=window is not None)

    def _take(self, scores: torch.Tensor, values: torch.Tensor, *, is_window: bool) -> None:
        new_max = scores.amax(3)
        if self.sums is not None:
            new_max = torch.maximum(self.sums[0], new_max)
        # A row that saw no key of a window so far: nothing is subtracted, all its weights are 0.
        base = new_max.masked_fill(new_max == -torch.inf, 0.0) if is_window else new_max
        weights = torch.exp(scores - base.unsqueeze(3))
        row_sum, acc = weights.sum(3), (weights.flatten(1, 2) @ values)
        acc = acc.view(*row_sum.shape, -1)
        if self.sums is not None:
            shrink = torch.exp(self.sums[0] - base)
            row_sum = self.sums[1] * shrink + row_sum
            acc = self.sums[2] * shrink.unsqueeze(3) + acc
        self.sums = new_max, row_sum, acc


def _by_kv_head(x_nNH: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[n, N, H] -> [K, G, n, H]."""
    num_queries, num_heads, size = x_nNH.shape
    grouped = x_nNH.reshape(num_queries, num_kv_heads, num_heads // num_kv_heads, size)
    return grouped.permute(1, 2, 0, 3)


def _by_token(x_KGnH: torch.Tensor) -> torch.Tensor:
    """[K, G, n, H] -> [n, N, H]."""
    return x_KGnH.permute(2, 0, 1, 3).flatten(1, 2)


def _first_key(position: int, window: int | None) -> int:
    """Return the first key that a query at this position sees."""
    return 0 if window is None else max(0, position + 1 - window)


def _rows(
    call: AttentionCall, index: int, begin: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read keys and values begin to end - 1 of one sequence, [K, n, H] float32."""
    table, host = call.block_tables[index], call.host
    return (
        _gather(call.k_cache, table, begin, end, None if host is None else host.k),
        _gather(call.v_cache, table, begin, end, None if host is None else host.v),
    )


def _gather(
    cache: torch.Tensor, table_M: torch.Tensor, begin: int, end: int, beside: torch.Tensor | None
) -> torch.Tensor:
    num_kv_heads, tokens_per_block, head_size = cache.shape[1:]
    if end <= begin:
        return torch.zeros((num_kv_heads, 0, head_size), device=cache.device)
    first_block, num_blocks = begin // tokens_per_block, -(-end // tokens_per_block)
    blocks = _select(cache, beside, table_M[first_block:num_blocks])
    rows = blocks.transpose(0, 1).reshape(num_kv_heads, -1, head_size)
    skipped = first_block * tokens_per_block
    return rows[:, begin - skipped : end - skipped].float()


def _select(cache: torch.Tensor, beside: torch.Tensor | None, ids_m: torch.Tensor) -> torch.Tensor:
    """Return blocks [m, K, P, H], those with a number beyond the cache from the tier beside it."""
    if beside is None:
        return cache.index_select(0, ids_m)
    is_beside = ids_m >= cache.shape[0]
    blocks = cache.new_empty((ids_m.shape[0], *cache.shape[1:]))
    blocks[~is_beside] = cache[ids_m[~is_beside].long()]
    blocks[is_beside] = beside[ids_m[is_beside].long() - cache.shape[0]]
    return blocks
