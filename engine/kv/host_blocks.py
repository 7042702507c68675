"""HostBlocks: the memory of the host tier, a pinned part and a pageable part of exact size."""

import torch

from engine.device.base import Device, HostBuffer


class HostBlocks:
    """Blocks of the host tier, numbered from 0: pinned ones first, then pageable ones.

    Each part is one buffer, registered once. Compute reads and writes pinned blocks where they are
    if the device can; pageable ones are reached by staged copies only.

    Args:
        device: Allocates.
        num_pinned: Blocks to pin.
        num_pageable: Further blocks.
        block_bytes: Bytes of a block over all layers.
        can_uva: Whether the device reads pinned host memory in place.

    Raises:
        CapacityError: The memory cannot be had or pinned.
    """

    def __init__(
        self,
        device: Device,
        *,
        num_pinned: int,
        num_pageable: int,
        block_bytes: int,
        can_uva: bool,
    ) -> None:
        self.num_pinned, self.num_pageable = num_pinned, num_pageable
        self.block_bytes = block_bytes
        self._buffers: list[HostBuffer] = []
        self.pinned = self._blocks(device, num_pinned, pin=True)
        """uint8 [num_pinned, block_bytes] on the CPU."""
        self.pageable = self._blocks(device, num_pageable, pin=False)
        """uint8 [num_pageable, block_bytes] on the CPU."""
        self.in_place: torch.Tensor | None = None
        """The pinned part as the device sees it; None where it cannot."""
        if can_uva and num_pinned:
            self.in_place = device.in_place(self._buffers[0], self.pinned)

    @property
    def num_blocks(self) -> int:
        """Blocks of both parts."""
        return self.num_pinned + self.num_pageable

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes of the pinned part and of the pageable one."""
        return self.pinned.numel(), self.pageable.numel()

    @property
    def touch_s(self) -> float:
        """Seconds that mapping and touching took."""
        return sum(buffer.touch_s for buffer in self._buffers)

    @property
    def pin_s(self) -> float:
        """Seconds that registration took."""
        return sum(buffer.pin_s for buffer in self._buffers)

    def close(self) -> None:
        """Unregister and release; no work of the device may use the blocks any more."""
        self.pinned = self.pageable = torch.empty((0, 0), dtype=torch.uint8)
        self.in_place = None
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []

    def _blocks(self, device: Device, count: int, *, pin: bool) -> torch.Tensor:
        if count == 0:
            return torch.empty((0, self.block_bytes), dtype=torch.uint8)
        buffer = device.host_buffer(count * self.block_bytes, pin=pin)
        self._buffers.append(buffer)
        return buffer.tensor.view(count, self.block_bytes)
