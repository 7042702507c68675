"""KVCache: keys and values of all blocks on the device, a block's layers side by side."""

import torch

from engine.device.base import Device
from engine.plan import MemoryPlan
from engine.spec import ModelSpec
from engine.weights.store import TORCH_DTYPES


class KVCache:
    """For each group of layers one tensor [B, L, 2, K, P, H]: a block is one run of bytes.

    B blocks and L layers of the group, keys and values, K KV heads, P tokens a block, H head size.
    """

    def __init__(self, plan: MemoryPlan, spec: ModelSpec, device: Device) -> None:
        self.tensors: list[torch.Tensor] = []
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        sizes = zip(plan.kv.layers, plan.kv_pools, plan.kv.block_bytes, strict=True)
        for layers, num_blocks, block_bytes in sizes:
            shape = (
                num_blocks,
                len(layers),
                2,
                spec.num_key_value_heads,
                plan.block_size,
                spec.head_dim,
            )
            raw = device.empty(num_blocks * block_bytes)
            tensor = raw.view(TORCH_DTYPES[plan.dtype]).view(shape)
            self.tensors.append(tensor)
            for place, layer in enumerate(layers):
                self._layers[layer] = tensor[:, place, 0], tensor[:, place, 1]

    @property
    def tensor(self) -> torch.Tensor:
        """The first group's."""
        return self.tensors[0]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views [B, K, P, H] of one layer's keys and values."""
        return self._layers[index]

    def close(self) -> None:
        """Release the memory."""
        self._layers, self.tensors = {}, []
