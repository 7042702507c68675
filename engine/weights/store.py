"""WeightStore: realises a MemoryPlan and hands out one layer's tensors, ready to compute."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from engine.device.base import Device, HostBuffer
from engine.model.formats import EMBEDDING, ParamSpec, TensorSpec
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
        self._device = device
        self._resident_buffer, self._host_buffer = self._allocate()
        resident, host = self._resident_buffer, self._host_buffer.tensor
        self._raw: dict[str, torch.Tensor] = {}
        """Bytes of every tensor by name."""
        self._layer_sources: dict[int, torch.Tensor] = {}
        self._layer_bytes: dict[int, int] = {}
        at_gpu = at_host = 0
        for layer in plan.layers:
            self._raw |= _cut(plan, layer.resident, resident, at_gpu)
            self._raw |= _cut(plan, layer.offloaded, host, at_host)
            self._layer_sources[layer.index] = host[at_host : at_host + layer.offloaded.num_bytes]
            self._layer_bytes[layer.index] = plan.formats.total_bytes(layer.offloaded.tensors)
            at_gpu += layer.resident.num_bytes
            at_host += layer.offloaded.num_bytes
        self._raw |= _cut(plan, plan.outer_resident, resident, at_gpu)
        self._raw |= _cut(plan, plan.outer_offloaded, host, at_host)
        self._slots = [device.empty(plan.slot_bytes) for _ in range(plan.num_slots)]
        self._outer_slot = device.empty(plan.outer_slot_bytes) if plan.outer_slot_bytes else None
        self._order = {layer.index: k for k, layer in enumerate(plan.offloaded_layers)}
        self._feed = self._build_feed()
        self._is_uva = any(x.placement is Placement.UVA for x in plan.offloaded_layers)
        self._uses_feed = False
        self._direct = [self._direct_operands(layer) for layer in plan.layers]
        self._slotted = [self._slotted_operands(layer) for layer in plan.layers]
        self._outer = self._outer_operands()
        self._scratch = self._scratch_operands()
        self._outer_copied_bytes = 0
        self.in_place_bytes = 0
        """Weight bytes that steps read in place from host memory so far."""

    def _allocate(self) -> tuple[torch.Tensor, HostBuffer]:
        layers = self.plan.layers
        gpu = sum(x.resident.num_bytes for x in layers) + self.plan.outer_resident.num_bytes
        host = sum(x.offloaded.num_bytes for x in layers) + self.plan.outer_offloaded.num_bytes
        buffer = self._device.host_buffer(host, pin=self.plan.pin and host > 0)
        return self._device.empty(gpu), buffer

    def _views(self, tensor: TensorSpec, raw: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the arrays that a tensor's bytes are."""
        found = {}
        for view in self.plan.formats[tensor.name].views(tensor):
            dtype: torch.dtype = getattr(torch, view.dtype)
            size = math.prod(view.shape) * dtype.itemsize
            array = raw[view.offset : view.offset + size].view(dtype).view(view.shape)
            found[view.name] = array
        return found

    def _operand(self, tensor: TensorSpec, raw: torch.Tensor) -> Any:
        return self.plan.formats[tensor.name].operand(self._views(tensor, raw))

    def _stored(self, tensor: TensorSpec) -> Any:
        """Return what products take of a tensor that lies in GPU memory."""
        return self._operand(tensor, self._raw[tensor.name])

    def _in_place(self, tensor: TensorSpec) -> Any:
        """Return what products take of a tensor that is read in host memory."""
        views = self._views(tensor, self._raw[tensor.name])
        reached = {n: self._device.in_place(self._host_buffer, v) for n, v in views.items()}
        return self.plan.formats[tensor.name].operand(reached)

    def _build_feed(self) -> LayerFeed | None:
        layers = self.plan.offloaded_layers
        if not layers or not self._slots:
            return None
        sources = [self._layer_sources[layer.index] for layer in layers]
        if layers[0].placement is Placement.ON_DEMAND:
            return OnDemandSlot(self._slots[0], sources)
        wrap = layers[0].placement is Placement.PREFETCH
        return SlotRing(self._device.copy_stream(), self._slots, sources, wrap=wrap)

    def _direct_operands(self, layer: LayerPlan) -> dict[str, Any] | None:
        """Tensors of a layer that needs no copy: resident, or read in place."""
        if layer.offloaded.num_bytes and layer.placement is not Placement.UVA:
            return None
        found = {_short(t.name): self._stored(t) for t in layer.resident.tensors}
        return found | {_short(t.name): self._in_place(t) for t in layer.offloaded.tensors}

    def _slotted_operands(self, layer: LayerPlan) -> list[dict[str, Any]]:
        """Tensors of an offloaded layer for each slot that it may be copied into."""
        if layer.index not in self._order or not self._slots:
            return []
        resident = {_short(t.name): self._stored(t) for t in layer.resident.tensors}
        found = []
        for slot in self._slots:
            raws = _cut(self.plan, layer.offloaded, slot, 0)
            copied = {
                _short(t.name): self._operand(t, raws[t.name]) for t in layer.offloaded.tensors
            }
            found.append(resident | copied)
        return found

    def _outer_operands(self) -> dict[str, Any]:
        found = {t.name: self._stored(t) for t in self.plan.outer_resident.tensors}
        for tensor in self.plan.outer_offloaded.tensors:
            if self.plan.placements[tensor.name] is Placement.UVA:
                found[tensor.name] = self._in_place(tensor)
        return found

    def _scratch_operands(self) -> dict[str, tuple[torch.Tensor, Any]]:
        """Of tensors outside the layers that are copied on demand: where to, and what it is."""
        if self._outer_slot is None:
            return {}
        found = {}
        for tensor in self.plan.outer_offloaded.tensors:
            target = self._outer_slot[: self._raw[tensor.name].numel()]
            if self.plan.placements[tensor.name] is Placement.ON_DEMAND:
                found[tensor.name] = target, self._operand(tensor, target)
        return found

    def parameters(self) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
        """Yield checkpoint parameters with the contiguous tensor that each is read into.

        All of them but those of packed tensors.
        """
        for tensor in self._tensor_specs():
            form = self.plan.formats[tensor.name]
            if not form.is_packed:
                yield from form.targets(tensor, self._views(tensor, self._raw[tensor.name]))

    def packed(self) -> Iterator[tuple[TensorSpec, dict[str, torch.Tensor]]]:
        """Yield the tensors that are made of whole parameters, with the arrays to write."""
        for tensor in self._tensor_specs():
            if self.plan.formats[tensor.name].is_packed:
                yield tensor, self._views(tensor, self._raw[tensor.name])

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

    def acquire(self, layer: int) -> Mapping[str, Any]:
        """Return a layer's tensors by short name; the compute stream may read them.

        Each is what the products of its format take. Valid until `release`. Names are those of the
        checkpoint without `model.layers.N.`, joined products as `self_attn.qkv_proj` and
        `mlp.gate_up_proj`.
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

    def outer(self, name: str) -> Any:
        """Return a tensor outside the layers, copied on demand where it lies off the GPU."""
        found = self._outer.get(name)
        if found is None:
            target, found = self._scratch[name]
            target.copy_(self._raw[name], non_blocking=True)
            self._outer_copied_bytes += target.numel()
        elif self.plan.placements[name] is Placement.UVA and name != EMBEDDING:
            self.in_place_bytes += self._raw[name].numel()
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
        self._direct, self._slotted, self._outer, self._scratch, self._raw = [], [], {}, {}, {}
        self._layer_sources, self._feed, self._slots, self._outer_slot = {}, None, [], None
        self._resident_buffer = torch.empty(0)
        self._host_buffer.close()


def _cut(plan: MemoryPlan, slab: Slab, memory: torch.Tensor, base: int) -> dict[str, torch.Tensor]:
    """Return the bytes of each tensor of a slab that begins at `base`."""
    found = {}
    for tensor, offset in zip(slab.tensors, slab.offsets, strict=True):
        start = base + offset
        found[tensor.name] = memory[start : start + plan.formats.num_bytes(tensor)]
    return found


def _short(name: str) -> str:
    """Drop `model.layers.N.`."""
    return name.split(".", 3)[3]
