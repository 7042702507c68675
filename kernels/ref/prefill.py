"""Twins of prefill attention: tiles of keys in order, scores and running sums in float32.

A part of the keys takes the same tiles as the whole does, so that parts give the same bits.

Shape letters: T tokens, S sequences, M blocks per sequence, N query heads, K KV heads, G query
heads of one KV head, H head size, n queries taken together.
"""

from dataclasses import dataclass

import torch

from kernels.host_cache import HostCache
from kernels.ref.gather import first_key, gather
from kernels.sizes import PREFILL_PART_KEYS
from kernels.workspace import PrefillState, prefill_state

QUERY_CHUNK_TOKENS = 128
"""Queries that are taken together; bounds the mask and skips keys that none may see."""
_TILE = PREFILL_PART_KEYS


def paged_prefill_attention(
    q_TNH: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables_SM: torch.Tensor,
    query_starts_S1: torch.Tensor,
    seq_lens_S: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of kernels.ops.paged_prefill_attention."""
    if out is None:
        out = torch.zeros(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    keys = _Range(0, max(seq_lens_S.tolist(), default=0), None, is_last=True)
    num_tokens, num_heads, head_size = q_TNH.shape
    state = prefill_state(num_tokens, num_heads, head_size, q_TNH.device)
    tables = (block_tables_SM, query_starts_S1, seq_lens_S)
    _attend(q_TNH, k_cache, v_cache, tables, scale, keys, state, window, out)
    return out


def paged_prefill_part(
    q_TNH: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables_SM: torch.Tensor,
    query_starts_S1: torch.Tensor,
    seq_lens_S: torch.Tensor,
    scale: float,
    *,
    stage: HostCache,
    begin_key: int,
    end_key: int,
    state: PrefillState,
    is_last: bool,
    window: int | None = None,
    out: torch.Tensor,
) -> None:
    """Twin of kernels.ops.paged_prefill_part."""
    keys = _Range(begin_key, end_key, stage, is_last=is_last)
    tables = (block_tables_SM, query_starts_S1, seq_lens_S)
    _attend(q_TNH, k_cache, v_cache, tables, scale, keys, state, window, out)


@dataclass(frozen=True)
class _Range:
    """Which keys are attended to, and what lies beside the cache."""

    begin: int
    end: int
    stage: HostCache | None
    is_last: bool


def _attend(
    q_TNH: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    part: _Range,
    state: PrefillState,
    window: int | None,
    out: torch.Tensor,
) -> None:
    num_kv_heads, stage = k_cache.shape[1], part.stage
    starts = tables[1].tolist()
    for index, seq_len in enumerate(tables[2].tolist()):
        first, stop = starts[index], starts[index + 1]
        if first == stop:
            continue
        position = seq_len - (stop - first)
        begin = max(part.begin, first_key(position, window))
        end = min(part.end, seq_len)
        table = tables[0][index]
        k_beside, v_beside = (None, None) if stage is None else (stage.k, stage.v)
        keys = _Keys(
            begin,
            end,
            _rows(k_cache, table, begin, end, k_beside),
            _rows(v_cache, table, begin, end, v_beside),
        )
        for chunk in range(first, stop, QUERY_CHUNK_TOKENS):
            rows = slice(chunk, min(chunk + QUERY_CHUNK_TOKENS, stop))
            running = _Running.load(state, rows, num_kv_heads) if part.begin else _Running()
            running.attend(q_TNH[rows], keys, position + chunk - first, scale, window)
            if part.is_last:
                out[rows] = running.result()
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

    def result(self) -> torch.Tensor:
        """Return what was attended to, [n, N, H]."""
        assert self.sums is not None
        _, row_sum, acc = self.sums
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
        first = max(keys.begin, first_key(position, window)) // _TILE * _TILE
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


def _rows(
    cache: torch.Tensor,
    table_M: torch.Tensor,
    begin: int,
    end: int,
    beside: torch.Tensor | None,
) -> torch.Tensor:
    """Read keys or values begin to end - 1, [K, n, H] float32."""
    if end <= begin:
        return torch.zeros((cache.shape[1], 0, cache.shape[3]), device=cache.device)
    return gather(cache, table_M, begin, end, beside)[0]
