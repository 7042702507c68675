"""Host blocks of KV on their way to attention: pieces of keys, and buffers they are copied into.

Those of a piece go into one stage buffer: by a copy engine run by run of neighbours, as a copy of
many blocks reaches the link's rate and a copy of one does not. Of a prefill, every piece with host
blocks is copied, of short runs by a kernel. A decode is cut at whole splits; a piece is read where
it lies if it has no host blocks, if its runs are short, and if it holds the newest keys, which the
step itself writes.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from engine.device.base import CopyStream, Device
from engine.errors import EngineError
from engine.kv.memory import KVCache
from engine.model.spec import ModelSpec
from engine.plan.memory import MemoryPlan
from engine.plan.sizes import NUM_STAGES
from kernels.arguments import (
    AttentionCall,
    DecodePart,
    DecodeWorkspace,
    HostCache,
    PrefillPart,
    prefill_state,
)
from kernels.ops import attention, kv
from kernels.sizes import DECODE_SPLIT_TOKENS, PREFILL_PART_KEYS, prefill_state_bytes

PIECE_KEYS = PREFILL_PART_KEYS
"""Pieces begin at multiples of it."""

Run = tuple[int, int]
"""The first of neighbouring host blocks, numbered within the tier, and how many they are."""


@dataclass(frozen=True, slots=True)
class PrefillPiece:
    """Keys begin_key to end_key - 1 of a sequence, and which of its host blocks hold some."""

    begin_key: int
    end_key: int
    first_host: int
    """The first one, counted in the sequence's host blocks in order of position."""
    num_hosts: int
    is_mixed: bool
    """Whether other blocks with keys of it lie on the GPU, beside its host blocks."""
    runs: tuple[Run, ...] = ()
    """Its host blocks in order of position, cut where they are no neighbours; none: a kernel copies
    them."""

    @property
    def tiers(self) -> Literal["cache", "host", "both"]:
        """Where its blocks lie once they are copied, as `PrefillPart` has it."""
        if self.is_mixed:
            return "both"
        return "host" if self.num_hosts else "cache"


def host_places(table: Sequence[int], num_tokens: int, block_size: int, num_gpu: int) -> np.ndarray:
    """Return the places in a table of the first tokens' blocks in the host tier, int64 ascending.

    Blocks with numbers below `num_gpu` lie on the GPU.
    """
    count = -(-num_tokens // block_size)
    return np.flatnonzero(np.asarray(table[:count], dtype=np.int64) >= num_gpu)


def cut_pieces(
    places: np.ndarray, num_tokens: int, block_size: int, stage_blocks: int
) -> tuple[PrefillPiece, ...]:
    """Cut the keys of a sequence into pieces of at most `stage_blocks` host blocks.

    What comes before the first host block is a piece of its own, which needs no copy and runs
    beside that of the next one.

    Raises:
        EngineError: A buffer does not hold the blocks of PIECE_KEYS keys.
    """
    stops = np.arange(PIECE_KEYS, num_tokens + PIECE_KEYS, PIECE_KEYS)
    stops[-1] = num_tokens
    # Host blocks that hold a key before each stop.
    hosts = np.searchsorted(places, -(-stops // block_size))
    pieces: list[PrefillPiece] = []
    begin = 0
    while begin < num_tokens:
        first = int(np.searchsorted(places, begin // block_size))
        end = at = 0
        for most in (stage_blocks,) if pieces else (0, stage_blocks):
            at = int(np.searchsorted(hosts, first + most, side="right")) - 1
            end = int(stops[at]) if at >= 0 else 0
            if end > begin:
                break
        if end <= begin:
            raise EngineError(
                f"prefill: expected staging buffers of at least {-(-PIECE_KEYS // block_size)} "
                f"blocks, got {stage_blocks}. This is a fault of the plan."
            )
        num_hosts = int(hosts[at]) - first
        is_mixed = 0 < num_hosts < -(-end // block_size) - begin // block_size
        pieces.append(PrefillPiece(begin, end, first, num_hosts, is_mixed))
        begin = end
    return tuple(pieces)


def with_runs(
    pieces: Sequence[PrefillPiece], host_ids: np.ndarray, least_run: int
) -> tuple[PrefillPiece, ...]:
    """Return pieces with runs, where those have at least `least_run` blocks in the mean.

    `host_ids` are the sequence's host blocks in order of position, numbered within the tier.
    """
    found = []
    for piece in pieces:
        runs = _runs(host_ids[piece.first_host : piece.first_host + piece.num_hosts])
        is_long = least_run * len(runs) <= piece.num_hosts
        found.append(replace(piece, runs=runs) if is_long else piece)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class StagedPrefill:
    """The part of a sequence that has blocks in the host tier: they are copied to the GPU first."""

    first: int
    """Place of its first token among the step's."""
    stop: int
    """The one after its last."""
    start: int
    """Position of its first token: the step writes the keys from there on."""
    table: torch.Tensor
    """int32 [1, M]; blocks of the host tier are named by their place in a staging buffer, counted
    from the number of blocks on the GPU."""
    starts: torch.Tensor
    """int32 [2]: 0 and its number of tokens."""
    seq_len: torch.Tensor
    """int32 [1]."""
    host_ids: torch.Tensor
    """int64 [n]: its blocks of the host tier in order of position, numbered within the tier."""
    pieces: tuple[PrefillPiece, ...]


@dataclass(frozen=True, slots=True)
class DecodePiece:
    """Keys begin_key to end_key - 1 of a sequence."""

    begin_key: int
    end_key: int
    runs: tuple[Run, ...] = ()
    """Host blocks to copy, one run behind the other in a stage buffer; none: nothing is copied."""


@dataclass(frozen=True, slots=True)
class AheadDecode:
    """A decode some of whose host blocks are copied ahead."""

    row: int
    """Its row of the step."""
    pieces: tuple[DecodePiece, ...]

    @property
    def num_copied(self) -> int:
        """Blocks that are copied in every layer."""
        return sum(count for piece in self.pieces for _, count in piece.runs)


def cut_ahead(
    table: np.ndarray,
    num_tokens: int,
    block_size: int,
    num_gpu: int,
    *,
    stage_blocks: int,
    least_run: int,
) -> tuple[tuple[DecodePiece, ...], np.ndarray]:
    """Cut a decode's keys into pieces; return them and its table as they are read by pieces.

    Args:
        table: Blocks of the sequence, the host tier's numbered from `num_gpu` on.
        num_tokens: Its keys, the newest one included.
        block_size: Tokens of a block; divides DECODE_SPLIT_TOKENS.
        num_gpu: Blocks on the GPU.
        stage_blocks: Host blocks of a piece at most.
        least_run: Blocks of a run at least, in the mean of a piece, for it to be copied.

    Returns:
        Pieces in order, neighbours that are read in place as one; in the table, blocks that are
        copied have the numbers of their places in a stage buffer, counted from `num_gpu` on.
    """
    per_split = DECODE_SPLIT_TOKENS // block_size
    num_splits = (num_tokens - 1) // DECODE_SPLIT_TOKENS
    table = table.astype(np.int64)
    is_host = table[: num_splits * per_split] >= num_gpu
    before = np.concatenate([[0], np.cumsum(is_host.reshape(-1, per_split).sum(axis=1))])
    pieces: list[DecodePiece] = []
    begin = 0
    while begin < num_splits:
        # What comes before the first host block is a piece of its own, beside the first copy.
        most = stage_blocks if before[begin + 1] > before[begin] else 0
        end = max(begin + 1, int(np.searchsorted(before, before[begin] + most, side="right")) - 1)
        at = begin * per_split + np.flatnonzero(is_host[begin * per_split : end * per_split])
        order = at[np.argsort(table[at])]
        runs = _runs(table[order] - num_gpu)
        if not least_run * len(runs) <= len(order) <= stage_blocks:
            runs = ()
        if runs:
            table[order] = num_gpu + np.arange(len(order))
        _append(pieces, begin * DECODE_SPLIT_TOKENS, end * DECODE_SPLIT_TOKENS, runs)
        begin = end
    _append(pieces, num_splits * DECODE_SPLIT_TOKENS, num_tokens, ())
    return tuple(pieces), table


def _append(pieces: list[DecodePiece], begin_key: int, end_key: int, runs: tuple[Run, ...]) -> None:
    if pieces and not runs and not pieces[-1].runs:
        begin_key = pieces.pop().begin_key
    pieces.append(DecodePiece(begin_key, end_key, runs))


def _runs(ids: np.ndarray) -> tuple[Run, ...]:
    """Cut numbers where one is not the next."""
    starts = np.concatenate([[0], np.flatnonzero(np.diff(ids) != 1) + 1]) if ids.size else ids
    counts = np.diff(np.concatenate([starts, [ids.size]])) if ids.size else ids
    return tuple(zip(ids[starts].tolist(), counts.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class _Copy:
    """The copy of a piece's host blocks of one layer into a buffer."""

    layer: int
    is_new: bool
    """Whether the layer itself writes some of what is copied."""
    enqueue: Callable[[int], object]
    """Puts it on the copy stream; its argument is the buffer."""


class Stages:
    """Attention over blocks of both tiers whose host blocks are copied to the GPU in pieces.

    The host blocks of one layer and one piece of the keys at a time go into one of a few buffers,
    which are used in turn, while the pieces before are attended to. Pieces of a layer follow those
    of the layer before, so that the first ones are copied while that still computes, unless the
    step itself writes keys of one. Within a layer those of decodes come first: they wait for no key
    of the step, so all buffers are filled beside the layer before, and attending to them takes too
    little time to copy others meanwhile. At most one piece a buffer lies before weights that are
    copied ahead.
    """

    def __init__(self, plan: MemoryPlan, spec: ModelSpec, device: Device, cache: KVCache) -> None:
        assert plan.host_kv is not None
        size, shape = plan.host_kv.stage_blocks, cache.tensor.shape[2:]
        self._cache, self._size = cache, size
        self._rows = [
            device.empty(size * cache.layer_bytes).view(size, -1) for _ in range(NUM_STAGES)
        ]
        """uint8 [size, bytes of a layer] each."""
        self._words = [rows.view(torch.int32) for rows in self._rows]
        views = [raw.view(cache.tensor.dtype).view(size, *shape) for raw in self._rows]
        self._hosts = [HostCache(view[:, 0], view[:, 1]) for view in views]
        """The buffers as attention reads them."""
        self._slots = device.empty(2 * size * 8).view(torch.int64)
        """Slots of blocks in order, from any slot on."""
        self._slots.copy_(torch.arange(2 * size) % size)
        rows = plan.max_num_batched_tokens, spec.num_attention_heads, spec.head_dim
        device.count_working(prefill_state_bytes(*rows))
        self._state = prefill_state(*rows, device.torch_device)
        self._stream: CopyStream = device.copy_stream()
        self._left: Iterator[_Copy] = iter(())
        self._next: _Copy | None = None
        """The first copy that is not enqueued."""
        self._ready: deque[tuple[int, Any]] = deque()
        """Of those that are and were not taken, the buffer and the event behind the copy."""
        self._turn = 0
        self.staged_bytes = 0
        """Bytes copied from the host tier for prefills so far."""

    def begin_step(self, staged: Sequence[StagedPrefill], ahead: Sequence[AheadDecode]) -> None:
        """Start the first copies of a step.

        Stream: behind what is enqueued on the current stream.
        """
        self._left = self._copies(staged, ahead)
        self._next = next(self._left, None)
        self._ready.clear()
        self._fill(None)

    def settle(self) -> None:
        """Block until no copy is under way: those that a failed step left read its inputs."""
        self._stream.wait(self._stream.record())

    def prefill(self, layer: int, call: AttentionCall, staged: StagedPrefill) -> None:
        """Attend from a sequence's queries to its keys in both tiers, its own already written.

        Calls are for layers in order, within a layer for decodes, then for prefills in the order of
        `begin_step`.

        Stream: enqueued on the current stream; copies run beside it and are joined.
        """
        self._fill(layer)  # beside the first piece, which may have no host blocks
        for piece in staged.pieces:
            host = self._take(layer) if piece.num_hosts else self._hosts[0]
            part = PrefillPart(
                piece.begin_key,
                piece.end_key,
                is_last=piece is staged.pieces[-1],
                state=self._state,
                tiers=piece.tiers,
            )
            attention.paged_prefill_part(
                replace(call, host=host),
                staged.starts,
                part,
                max_query_len=staged.stop - staged.first,
            )
        self._fill(layer)  # beside what follows, into the last piece's buffer too

    def decode(
        self, layer: int, call: AttentionCall, decode: AheadDecode, workspace: DecodeWorkspace
    ) -> None:
        """Attend likewise from a sequence's query.

        `call` has the decode's row, and the host tier as it is read in place.

        Stream: enqueued on the current stream; copies run beside it and are joined.
        """
        last = decode.pieces[-1]
        for piece in decode.pieces:
            part = DecodePart(
                piece.begin_key, piece.end_key, is_last=piece is last, workspace=workspace
            )
            own = replace(call, host=self._take(layer)) if piece.runs else call
            attention.paged_decode_part(own, part)
        self._fill(layer)

    def _copies(
        self, staged: Sequence[StagedPrefill], ahead: Sequence[AheadDecode]
    ) -> Iterator[_Copy]:
        """Yield the copies of a step in the order in which they are taken."""
        for layer in self._cache.host_layers:
            for decode in ahead:
                for runs in (piece.runs for piece in decode.pieces if piece.runs):
                    yield _Copy(layer, False, partial(self._copy_runs, layer, runs, 0))
            for prefill in staged:
                for piece in prefill.pieces:
                    if piece.num_hosts:
                        is_new = piece.end_key > prefill.start
                        yield _Copy(layer, is_new, partial(self._stage, layer, prefill, piece))

    def _take(self, layer: int) -> HostCache:
        """Return the buffer of the next piece, and start copies of those behind it."""
        self._fill(layer)
        buffer, event = self._ready.popleft()
        self._stream.compute_after(event)
        return self._hosts[buffer]

    def _fill(self, layer: int | None) -> None:
        """Copy the next pieces, but for keys that a layer behind this one is to write.

        Behind all that is enqueued on the current stream: it wrote the newest of the blocks, and
        reads none of the buffers that are free.
        """
        while (copy := self._next) is not None and len(self._ready) < NUM_STAGES:
            if copy.is_new and copy.layer != layer:
                return
            self._turn = (self._turn + 1) % NUM_STAGES
            self._stream.after_compute()
            copy.enqueue(self._turn)
            self._ready.append((self._turn, self._stream.record()))
            self._next = next(self._left, None)

    def _stage(self, layer: int, prefill: StagedPrefill, piece: PrefillPiece, buffer: int) -> None:
        """Enqueue the copy of a prefill's piece, of long runs by a copy engine.

        A kernel would wait for a place among the programs of the attention beside it.
        """
        start, count = piece.first_host, piece.num_hosts
        slot = start % self._size
        self.staged_bytes += count * self._cache.layer_bytes
        if piece.runs:
            self._copy_runs(layer, piece.runs, slot, buffer)
            return
        targets, sources = self._slots[slot : slot + count], prefill.host_ids[start : start + count]
        rows = self._cache.host_rows(layer)
        self._stream.run(partial(kv.copy_blocks, self._words[buffer], rows, targets, sources))

    def _copy_runs(self, layer: int, runs: Sequence[Run], slot: int, buffer: int) -> None:
        """Enqueue copies of neighbouring blocks into slots in order, from one on, round the end."""
        rows, source = self._rows[buffer], self._cache.host_bytes(layer)
        for first, count in runs:
            before = min(count, self._size - slot)
            parts = (slot, first, before), (0, first + before, count - before)
            for target, at, num in parts if before < count else parts[:1]:
                self._stream.copy_rows(rows[target : target + num], source[at : at + num])
            slot = (slot + count) % self._size
