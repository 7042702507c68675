"""KVCache: keys and values of all blocks on the device, a block's layers side by side."""

import torch

from engine.device.base import Device
from engine.plan import MemoryPlan
from engine.spec import ModelSpec
from engine.weights.store import TORCH_DTYPES


class KVCache:
    """One tensor [B, L, 2, K, P, H]: a block is one contiguous run of bytes.

    B blocks, L layers, keys and values, K KV heads, P tokens a block, H head size.
    """

    def __init__(self, plan: MemoryPlan, spec: ModelSpec, device: Device) -> None:
        shape = (
            plan.num_gpu_blocks,
            spec.num_hidden_layers,
            2,
            spec.num_key_value_heads,
            plan.block_size,
            spec.head_dim,
        )
        raw = device.empty(plan.num_gpu_blocks * plan.block_bytes)
        self.tensor = raw.view(TORCH_DTYPES[plan.dtype]).view(shape)
        self._layers = [
            (self.tensor[:, layer, 0], self.tensor[:, layer, 1])
            for layer in range(spec.num_hidden_layers)
        ]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views [B, K, P, H] of one layer's keys and values."""
        return self._layers[index]

    def close(self) -> None:
        """Release the memory."""
        self._layers, self.tensor = [], torch.empty(0)
