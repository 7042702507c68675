"""WeightStore: realises a MemoryPlan and hands out one layer's tensors, ready to compute."""

from collections.abc import Iterator, Mapping

import torch

from engine.device.base import TORCH_DTYPES, Device, HostBuffer
from engine.model.spec import ParamSpec, TensorSpec
from engine.plan.memory import LayerPlan, MemoryPlan, Slab
from engine.plan.policy import Placement
from engine.weights.ring import LayerFeed, OnDemandSlot, SlotRing


class WeightStore:
    """Weights of one model in the places that a plan gives them.

    Allocates on construction: one GPU slab of resident weights, one host slab of exact size for
    offloaded ones, slots. Fill it through `parameters` before the first step.
    """

    def __init__(self, plan: MemoryPlan, device: Device) -> None:
        self.plan = plan
        self.dtype = TORCH_DTYPES[plan.dtype]
        self._device = device
        self._resident_buffer, self._host_buffer = self._allocate()
        resident, host = self._resident_buffer, self._host_buffer.tensor
        self._stored: dict[str, torch.Tensor] = {}
        self._layer_sources: dict[int, torch.Tensor] = {}
        self._layer_bytes: dict[int, int] = {}
        at_gpu = at_host = 0
        for layer in plan.layers:
            self._add_views(layer.resident, resident, at_gpu)
            self._add_views(layer.offloaded, host, at_host)
            self._layer_sources[layer.index] = host[at_host : at_host + layer.offloaded.num_bytes]
            elements = sum(tensor.numel for tensor in layer.offloaded.tensors)
            self._layer_bytes[layer.index] = elements * self.dtype.itemsize
            at_gpu += layer.resident.num_bytes
            at_host += layer.offloaded.num_bytes
        self._add_views(plan.outer_resident, resident, at_gpu)
        self._add_views(plan.outer_offloaded, host, at_host)
        self._slots = [device.empty(plan.slot_bytes) for _ in range(plan.num_slots)]
        self._outer_slot = device.empty(plan.outer_slot_bytes) if plan.outer_slot_bytes else None
        self._order = {layer.index: k for k, layer in enumerate(plan.offloaded_layers)}
        self._feed = self._build_feed()
        self._is_uva = any(x.placement is Placement.UVA for x in plan.offloaded_layers)
        self._uses_feed = False
        self._direct = [self._direct_views(layer) for layer in plan.layers]
        self._slotted = [self._slotted_views(layer) for layer in plan.layers]
        self._outer = self._outer_views()
        self._outer_copied_bytes = 0
        self.in_place_bytes = 0
        """Weight bytes that steps read in place from host memory so far."""

    def _allocate(self) -> tuple[torch.Tensor, HostBuffer]:
        layers = self.plan.layers
        gpu = sum(x.resident.num_bytes for x in layers) + self.plan.outer_resident.num_bytes
        host = sum(x.offloaded.num_bytes for x in layers) + self.plan.outer_offloaded.num_bytes
        buffer = self._device.host_buffer(host, pin=self.plan.pin and host > 0)
        return self._device.empty(gpu), buffer

    def _views(
        self, slab: Slab, memory: torch.Tensor, base: int
    ) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        for tensor, offset in zip(slab.tensors, slab.offsets, strict=True):
            start = base + offset
            raw = memory[start : start + tensor.numel * self.dtype.itemsize]
            yield tensor, raw.view(self.dtype).view(tensor.shape)

    def _add_views(self, slab: Slab, memory: torch.Tensor, base: int) -> None:
        for tensor, view in self._views(slab, memory, base):
            self._stored[tensor.name] = view

    def _build_feed(self) -> LayerFeed | None:
        layers = self.plan.offloaded_layers
        if not layers or not self._slots:
            return None
        sources = [self._layer_sources[layer.index] for layer in layers]
        if layers[0].placement is Placement.ON_DEMAND:
            return OnDemandSlot(self._slots[0], sources)
        wrap = layers[0].placement is Placement.PREFETCH
        return SlotRing(self._device.copy_stream(), self._slots, sources, wrap=wrap)

    def _direct_views(self, layer: LayerPlan) -> dict[str, torch.Tensor] | None:
        """Tensors of a layer that needs no copy: resident, or read in place."""
        if layer.offloaded.num_bytes and layer.placement is not Placement.UVA:
            return None
        found = {_short(t.name): self._stored[t.name] for t in layer.resident.tensors}
        for tensor in layer.offloaded.tensors:
            view = self._stored[tensor.name]
            found[_short(tensor.name)] = self._device.in_place(self._host_buffer, view)
        return found

    def _slotted_views(self, layer: LayerPlan) -> list[dict[str, torch.Tensor]]:
        """Tensors of an offloaded layer for each slot that it may be copied into."""
        if layer.index not in self._order or not self._slots:
            return []
        resident = {_short(t.name): self._stored[t.name] for t in layer.resident.tensors}
        return [
            resident | {_short(t.name): view for t, view in self._views(layer.offloaded, slot, 0)}
            for slot in self._slots
        ]

    def _outer_views(self) -> dict[str, torch.Tensor]:
        found = {t.name: self._stored[t.name] for t in self.plan.outer_resident.tensors}
        for tensor in self.plan.outer_offloaded.tensors:
            if self.plan.placements[tensor.name] is Placement.UVA:
                view = self._stored[tensor.name]
                found[tensor.name] = self._device.in_place(self._host_buffer, view)
        return found

    def parameters(self) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
        """Yield every checkpoint parameter with the contiguous tensor that it is read into."""
        for tensor in self._tensor_specs():
            stored, row = self._stored[tensor.name], 0
            for part in tensor.parts:
                yield part, stored[row : row + part.shape[0]]
                row += part.shape[0]

    def _tensor_specs(self) -> Iterator[TensorSpec]:
        for layer in self.plan.layers:
            yield from layer.resident.tensors
            yield from layer.offloaded.tensors
        yield from self.plan.outer_resident.tensors
        yield from self.plan.outer_offloaded.tensors

    def begin_step(self, num_tokens: int) -> None:
        """Decide between in-place reads and staging, and start the first copies."""
        stage = self.plan.stage_tokens
        self._uses_feed = self._feed is not None and (
            not self._is_uva or (stage is not None and num_tokens >= stage)
        )
        if self._feed is not None and self._uses_feed:
            self._feed.begin_step()

    def acquire(self, layer: int) -> Mapping[str, torch.Tensor]:
        """Return a layer's tensors by short name; the compute stream may read them.

        Valid until `release`. Names are those of the checkpoint without `model.layers.N.`, joined
        products as `self_attn.qkv_proj` and `mlp.gate_up_proj`.
        """
        k = self._order.get(layer)
        if k is not None and self._feed is not None and self._uses_feed:
            return self._slotted[layer][self._feed.acquire(k)]
        direct = self._direct[layer]
        assert direct is not None, f"layer {layer} has no direct views"
        if k is not None:
            self.in_place_bytes += self._layer_bytes[layer]
        return direct

    def release(self, layer: int) -> None:
        """Say that the layer's last use in this step is enqueued."""
        k = self._order.get(layer)
        if k is not None and self._feed is not None and self._uses_feed:
            self._feed.release(k)

    def end_step(self) -> None:
        """Join the copies to the compute stream."""
        if self._feed is not None and self._uses_feed:
            self._feed.end_step()

    def outer(self, name: str) -> torch.Tensor:
        """Return a tensor outside the layers, copied on demand where it lies off the GPU."""
        found = self._outer.get(name)
        if found is None:
            stored = self._stored[name]
            assert self._outer_slot is not None, f"{name} has no scratch"
            raw = self._outer_slot[: stored.numel() * stored.element_size()]
            found = raw.view(self.dtype).view(stored.shape)
            found.copy_(stored, non_blocking=True)
            self._outer_copied_bytes += raw.numel()
        elif self.plan.placements[name] is Placement.UVA and name != "model.embed_tokens.weight":
            self.in_place_bytes += found.numel() * found.element_size()
        return found

    @property
    def copied_bytes(self) -> int:
        """Bytes enqueued host to device since the load."""
        return self._outer_copied_bytes + (self._feed.copied_bytes if self._feed else 0)

    def host_bytes(self) -> tuple[int, int]:
        """Return pinned and pageable host bytes held."""
        size = self._host_buffer.tensor.numel()
        return (size, 0) if self._host_buffer.pinned else (0, size)

    def host_seconds(self) -> tuple[float, float]:
        """Return the seconds that touching and that registering host memory took."""
        return self._host_buffer.touch_s, self._host_buffer.pin_s

    def close(self) -> None:
        """Release every view, then the slabs."""
        self._direct, self._slotted, self._outer, self._stored = [], [], {}, {}
        self._layer_sources, self._feed, self._slots, self._outer_slot = {}, None, [], None
        self._resident_buffer = torch.empty(0)
        self._host_buffer.close()


def _short(name: str) -> str:
    """Drop `model.layers.N.`."""
    return name.split(".", 3)[3]
