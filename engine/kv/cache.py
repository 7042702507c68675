"""KVCache: keys and values of all blocks on the device, a block's layers side by side."""

from collections.abc import Sequence

import torch

from engine.device.base import TORCH_DTYPES, Device
from engine.kv.host_blocks import HostBlocks
from engine.plan import MemoryPlan
from engine.spec import ModelSpec
from kernels.ops import HostCache


class KVCache:
    """For each group of layers one tensor [B, L, 2, K, P, H]: a block is one run of bytes.

    B blocks and L layers of the group, keys and values, K KV heads, P tokens a block, H head size.

    Args:
        plan: Numbers and sizes of blocks.
        spec: Sizes of the model.
        device: Allocates.
        hosts: The host tier of each group, none where there is no host tier. Compute reads and
            writes that of the first group, where the device can.
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
            self.blocks.append(raw.view(num_blocks, block_bytes))
            for place, layer in enumerate(layers):
                self._layers[layer] = tensor[:, place, 0], tensor[:, place, 1]
        self.layer_bytes = plan.kv.block_bytes[0] // len(plan.kv.layers[0])
        """Bytes of one layer in a block."""
        self._host_layers: dict[int, HostCache] = {}
        self._host_rows: dict[int, torch.Tensor] = {}
        in_place = hosts[0].in_place if hosts else None
        if in_place is not None and plan.host_kv is not None and plan.host_kv.in_place:
            self._add_host_layers(in_place, plan.kv.layers[0])

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
