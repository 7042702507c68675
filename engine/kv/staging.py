"""Staging: moves between the GPU and pageable host memory, on a thread of their own."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from engine.device.base import Device
from engine.kv.move_sizes import staging_blocks

Pair = tuple[int, int]
"""A block on the GPU, a block of the pageable part."""


class Staging:
    """Copies blocks through one pinned buffer, so that no step waits for pageable memory.

    One thread works off what is submitted, in order.

    Args:
        device: Its copy stream and pinned memory are used.
        gpu: uint8 [G, block_bytes] on the device.
        pageable: uint8 [n, block_bytes] on the CPU.
    """

    def __init__(self, device: Device, gpu: torch.Tensor, pageable: torch.Tensor) -> None:
        block_bytes = gpu.shape[1]
        self._gpu, self._pageable = gpu, pageable
        self._stream = device.copy_stream()
        shape = (staging_blocks(block_bytes), block_bytes)
        self._buffer = device.upload_buffer(shape, torch.uint8)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="block-staging")

    def submit(
        self, pairs: Sequence[Pair], ready: Callable[[], object], *, load: bool
    ) -> Future[None]:
        """Copy blocks to the host, or from there.

        Args:
            pairs: What to copy.
            ready: Called on the thread; returns when the copies may begin.
            load: To the GPU.

        Returns:
            Done when the content has arrived.
        """
        return self._thread.submit(self._copy, list(pairs), ready, load)

    def close(self) -> None:
        """Wait for what was submitted and end the thread."""
        self._thread.shutdown(wait=True)

    def _copy(self, pairs: list[Pair], ready: Callable[[], object], load: bool) -> None:
        ready()
        size = self._buffer.shape[0]
        for first in range(0, len(pairs), size):
            part = pairs[first : first + size]
            if load:
                for place, (_, host) in enumerate(part):
                    self._buffer[place].copy_(self._pageable[host])
            for place, (block_id, _) in enumerate(part):
                block, staged = self._gpu[block_id], self._buffer[place]
                self._stream.copy(*((block, staged) if load else (staged, block)))
            self._stream.wait(self._stream.record())
            if not load:
                for place, (_, host) in enumerate(part):
                    self._pageable[host].copy_(self._buffer[place])
