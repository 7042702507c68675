"""Host blocks of KV on their way to attention: buffers on the GPU that they are copied into."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from engine.device.base import CopyStream, Device
from engine.kv.memory import KVCache
from engine.model.spec import ModelSpec
from engine.plan.memory import MemoryPlan
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

NUM_BUFFERS = 2
"""Buffers that pieces of a sequence's keys are copied into."""


class StageBuffers:
    """Buffers on the GPU that host blocks of one layer are copied into, used in turn.

    The host blocks of one layer and one piece of the keys at a time go into one of two buffers,
    beside the attention to the piece before.
    """

    def __init__(self, plan: MemoryPlan, device: Device, cache: KVCache) -> None:
        assert plan.host_kv is not None
        size, shape = plan.host_kv.stage_blocks, cache.tensor.shape[2:]
        self.cache, self.size = cache, size
        """The cache, and the blocks that a buffer holds."""
        self.rows = [
            device.empty(size * cache.layer_bytes).view(size, -1) for _ in range(NUM_BUFFERS)
        ]
        """uint8 [size, bytes of a layer] each."""
        views = [raw.view(cache.tensor.dtype).view(size, *shape) for raw in self.rows]
        self.hosts = [HostCache(view[:, 0], view[:, 1]) for view in views]
        """The buffers as attention reads them."""
        self.stream: CopyStream = device.copy_stream()
        self._turn = 0

    def fill(self, enqueue: Callable[[int], object]) -> tuple[int, Any]:
        """Copy a piece's host blocks; return into which buffer, and the event behind the copy.

        Behind all that is enqueued on the current stream: it wrote the newest of the blocks, and
        reads the buffer no more, because the piece before this one is enqueued later.
        `enqueue` puts the copies on `stream`; its argument is the buffer.
        """
        self._turn = (self._turn + 1) % NUM_BUFFERS
        self.stream.after_compute()
        enqueue(self._turn)
        return self._turn, self.stream.record()


class PrefillStages:
    """Prefills over blocks of both tiers; host blocks are copied to the GPU in pieces."""

    def __init__(
        self, plan: MemoryPlan, spec: ModelSpec, device: Device, buffers: StageBuffers
    ) -> None:
        size = buffers.size
        self._buffers = buffers
        self._words = [rows.view(torch.int32) for rows in buffers.rows]
        self._slots = device.empty(2 * size * 8).view(torch.int64)
        """Slots of blocks in order, from any slot on."""
        self._slots.copy_(torch.arange(2 * size) % size)
        rows = plan.max_num_batched_tokens, spec.num_attention_heads, spec.head_dim
        device.count_working(prefill_state_bytes(*rows))
        self._state = prefill_state(*rows, device.torch_device)
        self.staged_bytes = 0
        """Bytes copied from the host tier so far."""

    def attend(self, layer: int, call: AttentionCall, staged: StagedPrefill) -> None:
        """Attend from a sequence's queries to its keys in both tiers, its own already written.

        Stream: enqueued on the current stream; copies run beside it and are joined.
        """
        calls = [replace(call, host=host) for host in self._buffers.hosts]
        ready = [self._fill(layer, staged, staged.pieces[0])]
        for at, piece in enumerate(staged.pieces):
            is_last = at + 1 == len(staged.pieces)
            if not is_last:
                ready.append(self._fill(layer, staged, staged.pieces[at + 1]))
            buffer, event = ready[at]
            if event is not None:
                self._buffers.stream.compute_after(event)
            attention.paged_prefill_part(
                calls[buffer],
                staged.starts,
                PrefillPart(piece.begin_key, piece.end_key, is_last=is_last, state=self._state),
                max_query_len=staged.stop - staged.first,
            )

    def _fill(self, layer: int, staged: StagedPrefill, piece: PrefillPiece) -> tuple[int, Any]:
        if not piece.num_hosts:
            return 0, None
        buffers = self._buffers
        start, stop = piece.first_host, piece.first_host + piece.num_hosts
        slot = start % buffers.size
        targets, sources = self._slots[slot : slot + piece.num_hosts], staged.host_ids[start:stop]
        rows = buffers.cache.host_rows(layer)

        def enqueue(buffer: int) -> None:
            work = partial(kv.copy_blocks, self._words[buffer], rows, targets, sources)
            buffers.stream.run(work)

        self.staged_bytes += piece.num_hosts * buffers.cache.layer_bytes
        return buffers.fill(enqueue)


class DecodeStages:
    """Decodes over blocks of both tiers, whose host blocks a copy engine copies a piece ahead.

    Pieces of one layer follow those of the layer before without a pause: the first piece of a layer
    is under way while the layer before still computes. So at most one piece lies before weights
    that are copied ahead.
    """

    def __init__(self, layers: Sequence[int], buffers: StageBuffers) -> None:
        self._buffers, self._layers = buffers, layers
        self._left: Iterator[tuple[int, tuple[Run, ...]]] = iter(())
        """The layer and the runs of pieces whose copies are not enqueued yet."""
        self._ready: deque[tuple[int, Any]] = deque()

    def begin_step(self, ahead: Sequence[AheadDecode]) -> None:
        """Start the first copy of a step, which stages no prefills.

        Stream: behind what is enqueued on the current stream.
        """
        pieces = [piece for decode in ahead for piece in decode.pieces if piece.runs]
        self._left = ((layer, piece.runs) for layer in self._layers for piece in pieces)
        self._ready.clear()
        self._fill_next()

    def attend(self, call: AttentionCall, decode: AheadDecode, workspace: DecodeWorkspace) -> None:
        """Attend from a sequence's query to its keys in both tiers, its own already written.

        Calls are for layers and decodes in the order of `begin_step`. `call` has the decode's row,
        and the host tier as it is read in place.

        Stream: enqueued on the current stream; copies run beside it and are joined.
        """
        last, calls = decode.pieces[-1], [replace(call, host=x) for x in self._buffers.hosts]
        for piece in decode.pieces:
            part = DecodePart(
                piece.begin_key, piece.end_key, is_last=piece is last, workspace=workspace
            )
            if not piece.runs:
                attention.paged_decode_part(call, part)
                continue
            buffer, event = self._ready.popleft()
            self._fill_next()
            self._buffers.stream.compute_after(event)
            attention.paged_decode_part(calls[buffer], part)

    def _fill_next(self) -> None:
        following = next(self._left, None)
        if following is None:
            return
        layer, runs = following
        source = self._buffers.cache.host_bytes(layer)

        def enqueue(buffer: int) -> None:
            rows, at = self._buffers.rows[buffer], 0
            for first, count in runs:
                part = slice(first, first + count)
                self._buffers.stream.copy_rows(rows[at : at + count], source[part])
                at += count

        self._ready.append(self._buffers.fill(enqueue))
