"""PrefillStages: prefills over blocks of both tiers; host blocks are copied to the GPU in pieces.

Of each layer the host blocks of one piece of the keys at a time go into one of two buffers, beside
the attention to the piece before.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from engine.device.base import Device
from engine.kv.memory import KVCache
from engine.model.spec import ModelSpec
from engine.plan.memory import MemoryPlan
from engine.run.batch import PrefillPiece, StagedPrefill
from kernels.arguments import AttentionCall, HostCache, PrefillPart, prefill_state
from kernels.ops import attention, kv
from kernels.sizes import prefill_state_bytes

NUM_BUFFERS = 2


class PrefillStages:
    """Two buffers of one layer's blocks, the state between two pieces, and a copy stream.

    Args:
        plan: Has sequences whose blocks lie in both tiers.
        spec: Sizes of the model.
        device: Allocates, and copies.
        cache: What is attended to.
    """

    def __init__(self, plan: MemoryPlan, spec: ModelSpec, device: Device, cache: KVCache) -> None:
        assert plan.host_kv is not None
        size, shape = plan.host_kv.stage_blocks, cache.tensor.shape[2:]
        num_bytes = size * cache.layer_bytes
        raws = [device.empty(num_bytes) for _ in range(NUM_BUFFERS)]
        views = [raw.view(cache.tensor.dtype).view(size, *shape) for raw in raws]
        self._words = [raw.view(torch.int32).view(size, -1) for raw in raws]
        self._hosts = [HostCache(view[:, 0], view[:, 1]) for view in views]
        self._slots = device.empty(2 * size * 8).view(torch.int64)
        """Slots of blocks in order, from any slot on."""
        self._slots.copy_(torch.arange(2 * size) % size)
        rows = plan.max_num_batched_tokens, spec.num_attention_heads, spec.head_dim
        device.count_working(prefill_state_bytes(*rows))
        self._state = prefill_state(*rows, device.torch_device)
        self._cache, self._size = cache, size
        self._stream = device.copy_stream()
        self._turn = 0
        self.staged_bytes = 0
        """Bytes copied from the host tier so far."""

    def attend(self, layer: int, call: AttentionCall, staged: StagedPrefill) -> None:
        """Attend from a sequence's queries to its keys in both tiers.

        Args:
            layer: Whose keys and values; those of the queries' own tokens are written.
            call: The sequence's queries, table and length.
            staged: Where its keys are.

        Stream: enqueued on the current stream; copies run beside it and are joined.
        """
        calls = [replace(call, host=host) for host in self._hosts]
        ready = [self._fill(layer, staged, staged.pieces[0])]
        for at, piece in enumerate(staged.pieces):
            is_last = at + 1 == len(staged.pieces)
            if not is_last:
                ready.append(self._fill(layer, staged, staged.pieces[at + 1]))
            buffer, event = ready[at]
            if event is not None:
                self._stream.compute_after(event)
            attention.paged_prefill_part(
                calls[buffer],
                staged.starts,
                PrefillPart(piece.begin_key, piece.end_key, is_last=is_last, state=self._state),
                max_query_len=staged.stop - staged.first,
            )

    def _fill(self, layer: int, staged: StagedPrefill, piece: PrefillPiece) -> tuple[int, Any]:
        """Copy a piece's host blocks; return in which buffer, and the event behind the copy.

        Behind all that is enqueued on the current stream: it wrote the newest of the blocks, and
        reads the buffer no more, because the piece before this one is enqueued later.
        """
        if not piece.num_hosts:
            return self._turn, None
        self._turn = (self._turn + 1) % NUM_BUFFERS
        start, stop = piece.first_host, piece.first_host + piece.num_hosts
        slot = start % self._size
        self._stream.after_compute()
        self._stream.run(
            partial(
                kv.copy_blocks,
                self._words[self._turn],
                self._cache.host_rows(layer),
                self._slots[slot : slot + piece.num_hosts],
                staged.host_ids[start:stop],
            )
        )
        self.staged_bytes += piece.num_hosts * self._cache.layer_bytes
        return self._turn, self._stream.record()
