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
