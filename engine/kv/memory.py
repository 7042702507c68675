"""The memory of KV blocks: KVCache on the device, HostBlocks of the host tier."""

from collections.abc import Sequence

import torch

from engine.device.base import TORCH_DTYPES, Device, HostBuffer
from engine.model.spec import ModelSpec
from engine.plan.memory import MemoryPlan
from kernels.arguments import HostCache


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


class KVCache:
    """For each group of layers one tensor [B, L, 2, K, P, H]: a block is one run of bytes.

    B blocks and L layers of the group, keys and values, K KV heads, P tokens a block, H head size.

    Args:
        plan: Numbers and sizes of blocks.
        spec: Sizes of the model.
        device: Allocates.
        hosts: The host tier of each group, none where there is no host tier. Compute reads and
            writes it where the group is planned in place and the device can.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        spec: ModelSpec,
        device: Device,
        hosts: Sequence[HostBlocks] = (),
    ) -> None:
        self.tensors: list[torch.Tensor] = []
        self.blocks: list[torch.Tensor] = []
        """The same as uint8 [B, bytes of a block]."""
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._host_layers: dict[int, HostCache] = {}
        self._host_rows: dict[int, torch.Tensor] = {}
        self.layer_bytes = plan.kv.groups[0].layer_bytes
        """Bytes of one layer in a block."""
        shape = 2, spec.num_key_value_heads, plan.block_size, spec.head_dim
        for group in plan.kv.groups:
            raw = device.empty(group.num_gpu_blocks * group.block_bytes)
            tensor = raw.view(TORCH_DTYPES[plan.dtype])
            tensor = tensor.view(group.num_gpu_blocks, len(group.layers), *shape)
            self.tensors.append(tensor)
            self.blocks.append(raw.view(group.num_gpu_blocks, group.block_bytes))
            for place, layer in enumerate(group.layers):
                self._layers[layer] = tensor[:, place, 0], tensor[:, place, 1]
        for group, host in zip(plan.kv.groups, hosts, strict=True) if hosts else ():
            if group.in_place and host.in_place is not None:
                self._add_host_layers(host.in_place, group.layers)

    @property
    def tensor(self) -> torch.Tensor:
        """The first group's."""
        return self.tensors[0]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views [B, K, P, H] of one layer's keys and values."""
        return self._layers[index]

    def host_layer(self, index: int) -> HostCache | None:
        """Return the same of host blocks; None where compute reaches none of that layer."""
        return self._host_layers.get(index)

    def host_rows(self, index: int) -> torch.Tensor:
        """Return one layer of all host blocks that compute reaches, int32 [C, words], strided.

        Raises:
            KeyError: It reaches none of that layer.
        """
        return self._host_rows[index]

    def _add_host_layers(self, in_place: torch.Tensor, layers: Sequence[int]) -> None:
        """Cut uint8 [C, bytes of a block] into layers."""
        tensor = in_place.view(self.tensor.dtype).view(-1, *self.tensor.shape[1:])
        words = in_place.view(torch.int32).view(in_place.shape[0], len(layers), -1)
        for place, layer in enumerate(layers):
            self._host_layers[layer] = HostCache(tensor[:, place, 0], tensor[:, place, 1])
            self._host_rows[layer] = words[:, place]

    def close(self) -> None:
        """Release the memory."""
        self._layers, self.tensors, self.blocks = {}, [], []
        self._host_layers, self._host_rows = {}, {}
