"""The same device with tensors: a mover runs the moves over the emulated GPU, late or at once."""

import hashlib
from dataclasses import replace

import torch

from engine.device.cpu import CPUDevice
from engine.kv.memory import BlockMover, HostBlocks
from tests.engine.kv.world import P, World, take

VALUE_BYTES = 32
BLOCK_BYTES = P * VALUE_BYTES


class TensorWorld(World):
    """Blocks are rows of bytes; a position holds a digest of its value.

    Args:
        num_gpu: Blocks on the GPU.
        num_pinned: Host blocks that are pinned.
        num_pageable: Host blocks that are not.
        can_uva: Whether compute reads pinned blocks in place.
        eager: Copies run as early as they may, not as late.
        dma_run_bytes: From this size on copies go by DMA.
        obey_waits: Steps wait for the moves that they should.
        piece: Moves that are enqueued at a time, where fewer than by their size.
        device: A GPU instead of the emulated one.
    """

    def __init__(
        self,
        num_gpu,
        num_pinned,
        num_pageable=0,
        *,
        can_uva=True,
        eager=False,
        dma_run_bytes=2 * BLOCK_BYTES,
        obey_waits=True,
        piece=None,
        device=None,
    ):
        device = CPUDevice(eager_copies=eager) if device is None else device
        self.host = HostBlocks(
            device,
            num_pinned=num_pinned,
            num_pageable=num_pageable,
            block_bytes=BLOCK_BYTES,
            can_uva=can_uva,
        )
        in_place = 0 if self.host.in_place is None else num_pinned
        super().__init__(num_gpu, num_pinned + num_pageable, in_place, obey_waits=obey_waits)
        self.gpu = device.empty(num_gpu * BLOCK_BYTES).view(num_gpu, BLOCK_BYTES)
        self.mover = BlockMover(device, self.gpu, self.host, dma_run_bytes=dma_run_bytes)
        self.mover._piece = self.mover._piece if piece is None else piece

    def launch(self, *parts):
        batch = take(self.pool)
        self.queued.update({move.move_id: move for move in batch.moves})
        self.mover.submit(batch if self.obey_waits else replace(batch, waits=frozenset()))
        for track, count in parts:
            self.compute(track, count)
        return batch

    def execute(self, move_id):
        self.mover.wait([move_id])
        for done in self.mover.poll():
            del self.queued[done]
            self.executed.add(done)

    def complete(self, move_id):
        if move_id in self.queued:
            self.execute(move_id)
        self.executed.remove(move_id)
        self.pool.complete([move_id])

    def row(self, block_id):
        """The bytes of a block; compute reaches no pageable one."""
        num_gpu = self.pool.num_gpu_blocks
        return self.gpu[block_id] if block_id < num_gpu else self.host.in_place[block_id - num_gpu]

    def write(self, block_id, offset, value):
        raw = torch.frombuffer(bytearray(self.encode(value)), dtype=torch.uint8)
        self.row(block_id)[offset * VALUE_BYTES : (offset + 1) * VALUE_BYTES].copy_(raw)

    def read(self, block_id, offset):
        raw = self.row(block_id)[offset * VALUE_BYTES : (offset + 1) * VALUE_BYTES]
        return bytes(raw.tolist())

    def encode(self, value):
        return hashlib.blake2b(repr(value).encode(), digest_size=VALUE_BYTES).digest()

    def close(self):
        self.mover.close()
        self.host.close()
