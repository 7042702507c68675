"""Host blocks of KV on their way to attention: buffers on the GPU that they are copied into."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from engine.device.base import CopyStream, Device
from engine.kv.memory import KVCache
from engine.model.spec import ModelSpec
from engine.plan.memory import MemoryPlan
from engine.plan.sizes import NUM_STAGES
from engine.run.pieces import AheadDecode, PrefillPiece, Run, StagedPrefill
from kernels.arguments import (
    AttentionCall,
    DecodePart,
    DecodeWorkspace,
    HostCache,
    PrefillPart,
    prefill_state,
)
from kernels.ops import attention, kv
from kernels.sizes import prefill_state_bytes


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
    step itself writes keys of one. Within a layer those of prefills come first: they take long to
    attend to, and those of decodes are copied meanwhile. At most one piece a buffer lies before
    weights that are copied ahead.
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

    def prefill(self, layer: int, call: AttentionCall, staged: StagedPrefill) -> None:
        """Attend from a sequence's queries to its keys in both tiers, its own already written.

        Calls are for layers in order, within a layer for prefills, then for decodes in the order of
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
            )
            attention.paged_prefill_part(
                replace(call, host=host),
                staged.starts,
                part,
                max_query_len=staged.stop - staged.first,
            )

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

    def _copies(
        self, staged: Sequence[StagedPrefill], ahead: Sequence[AheadDecode]
    ) -> Iterator[_Copy]:
        """Yield the copies of a step in the order in which they are taken."""
        for layer in self._cache.host_layers:
            for prefill in staged:
                for piece in prefill.pieces:
                    if piece.num_hosts:
                        is_new = piece.end_key > prefill.start
                        yield _Copy(layer, is_new, partial(self._stage, layer, prefill, piece))
            for decode in ahead:
                for runs in (piece.runs for piece in decode.pieces if piece.runs):
                    yield _Copy(layer, False, partial(self._copy_runs, layer, runs, 0))

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
