"""WeightStore: realises a MemoryPlan and hands out one layer's tensors, ready to compute."""

import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, Final

import numpy as np
import torch

from engine.device.base import Device, HostBuffer
from engine.model.formats import (
    EMBEDDING,
    Operators,
    ParamSpec,
    ReadFormat,
    TensorSpec,
    UnpackedFormat,
    View,
)
from engine.model.spec import W13, W13_BIAS
from engine.plan.experts import COUNTER_BYTES, BankLayout, ExpertLayer, bank_tensor
from engine.plan.memory import MemoryPlan
from engine.plan.units import CACHED, RESIDENCES, LayerPlan, Residence, Slab, Slots, Unit
from engine.weights.residence import (
    ROUTED,
    CachedUnits,
    CountedExperts,
    ExpertBank,
    Held,
    HeldUnits,
    Operands,
)
from kernels.expert_arguments import ExpertArrays, ExpertCache, expert_cache
from kernels.ops import codes, linear, quantised
from kernels.sizes import expert_cache_bytes

OPERATORS: Final = Operators(linear, codes, quantised)
"""What formats have products of."""
Units = HeldUnits | CachedUnits
"""The units of one residence, in the order of their layers."""


class WeightStore:
    """Weights of one model in the places that a plan gives them.

    Allocates on construction: one GPU slab of resident weights, one host slab of exact size for
    offloaded ones, slots. Fill it through `parameters` before the first step.
    """

    def __init__(self, plan: MemoryPlan, device: Device) -> None:
        self.plan = plan
        self.expert_counters: torch.Tensor | None = None
        """int64 [L, 2] on the device: of each layer with experts hits and misses, which only grow;
        None where no expert crosses the link but with its whole layer."""
        self.expert_bytes: np.ndarray | None = None
        """int64 [L]: what crosses the host link for a miss, with `expert_counters`."""
        self._device = device
        self._resident_buffer, self._host_buffer = self._allocate()
        resident, host = self._resident_buffer, self._host_buffer.tensor
        self._raw: dict[str, torch.Tensor] = {}
        """Bytes of every tensor by name."""
        sources: dict[Residence, list[torch.Tensor]] = {kind: [] for kind in RESIDENCES}
        """The host slabs of each residence's units."""
        at_gpu = at_host = 0
        for layer in plan.layers:
            self._raw |= _cut(plan, layer.resident, resident, at_gpu)
            at_gpu += layer.resident.num_bytes
            for unit in layer.units:
                self._raw |= _cut(plan, unit.slab, host, at_host)
                source = host[at_host : at_host + unit.slab.num_bytes]
                sources[unit.residence].append(source)
                at_host += unit.slab.num_bytes
        self._raw |= _cut(plan, plan.outer_resident, resident, at_gpu)
        self._raw |= _cut(plan, plan.outer_offloaded, host, at_host)
        self._outer_slot = device.empty(plan.outer_slot_bytes) if plan.outer_slot_bytes else None
        restore_bytes = plan.gpu_items.get("restore", 0)
        self._restored = device.empty(restore_bytes) if restore_bytes else None
        """Where a step of many tokens restores one weight after the other."""
        self._count_experts()
        self._whole: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Arrays of banks that belong to no expert, and where they are in host memory."""
        self.held: dict[Residence, Units] = {
            slots.residence: self._hold(slots, sources) for slots in plan.slots
        }
        """The units of each offloaded residence."""
        if plan.units_of(CACHED):
            self.held[CACHED] = self._cache()
        self._parts = self._unit_numbers()
        self._operands = [self._layer_operands(layer) for layer in plan.layers]
        self._outer = self._outer_operands()
        self._scratch = self._scratch_operands()
        self._outer_copied_bytes = 0
        self._outer_read_bytes = 0

    def _allocate(self) -> tuple[torch.Tensor, HostBuffer]:
        layers = self.plan.layers
        gpu = sum(x.resident.num_bytes for x in layers) + self.plan.outer_resident.num_bytes
        host = sum(x.offloaded_bytes for x in layers) + self.plan.outer_offloaded.num_bytes
        buffer = self._device.host_buffer(host, pin=self.plan.pin and host > 0)
        return self._device.empty(gpu), buffer

    def _views(self, tensor: TensorSpec, raw: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the arrays that a tensor's bytes are."""
        views = self.plan.formats[tensor.name].views(tensor)
        return {view.name: _viewed(view, raw) for view in views}

    def _operand(self, tensor: TensorSpec, raw: torch.Tensor) -> Any:
        views = self._views(tensor, raw)
        return self.plan.formats[tensor.name].operand(tensor, views, OPERATORS, self._restored)

    def _stored(self, tensor: TensorSpec) -> Any:
        """Return what products take of a tensor that lies in GPU memory."""
        return self._operand(tensor, self._raw[tensor.name])

    def _in_place(self, tensor: TensorSpec) -> Any:
        """Return what products take of a tensor that is read in host memory."""
        views = self._views(tensor, self._raw[tensor.name])
        reached = {n: self._device.in_place(self._host_buffer, v) for n, v in views.items()}
        return self.plan.formats[tensor.name].operand(tensor, reached, OPERATORS, self._restored)

    def _hold(self, slots: Slots, sources: Mapping[Residence, list[torch.Tensor]]) -> HeldUnits:
        """Return the units of one residence with their slots."""
        kind = slots.residence
        memory = [self._device.empty(slots.num_bytes) for _ in range(slots.count)]
        units = [
            Held(
                source=source,
                num_bytes=self.plan.formats.total_bytes(
                    tensor for tensor in unit.slab.tensors if not tensor.num_experts
                ),
                in_place=self._read_in_place(unit) if kind.reads_in_place else None,
                copied=[self._copied(unit, slot) for slot in memory],
            )
            for unit, source in zip(self.plan.units_of(kind), sources[kind], strict=True)
        ]
        return HeldUnits(units, slots, memory, self._device)

    def _read_in_place(self, unit: Unit) -> dict[str, Any]:
        """Return what products take of a unit that is read in host memory."""
        tensors = unit.slab.tensors
        found = {_short(tensor.name): self._in_place(tensor) for tensor in tensors}
        if any(tensor.num_experts for tensor in tensors):
            layer = int(tensors[0].name.split(".")[2])
            found[ROUTED] = CountedExperts(self._expert_cache(layer, 0))
        return found

    def _count_experts(self) -> None:
        """Allocate the counters of experts that cross the link one by one."""
        experts = self.plan.experts
        if experts is None or not any(layer.crossing_bytes for layer in experts.layers):
            return
        sizes = [layer.crossing_bytes for layer in experts.layers]
        counters = self._device.empty(COUNTER_BYTES * len(sizes)).view(torch.int64).view(-1, 2)
        self.expert_counters = counters.zero_()
        self.expert_bytes = np.array(sizes, dtype=np.int64)

    def _expert_cache(self, layer: int, num_slots: int) -> ExpertCache:
        """Return the state of one layer's bank, or what only counts its experts."""
        experts = self.plan.experts
        assert experts is not None
        assert self.expert_counters is not None
        number = [each.index for each in experts.layers].index(layer)
        memory = self._device.empty(expert_cache_bytes(experts.num_experts, num_slots))
        counts = self.expert_counters[number]
        return expert_cache(experts.num_experts, num_slots, memory, counts)

    def _cache(self) -> CachedUnits:
        """Return the banks of all layers whose experts are cached."""
        experts = self.plan.experts
        assert experts is not None
        found = [self._bank(layer) for layer in experts.layers if layer.num_slots]
        return CachedUnits([bank for bank, _ in found], [operands for _, operands in found])

    def _bank(self, layer: ExpertLayer) -> tuple[ExpertBank, dict[str, Any]]:
        """Return one layer's bank, and what products take of its tensors there."""
        formats, cache = self.plan.formats, self._expert_cache(layer.index, layer.num_slots)
        units = self.plan.layers[layer.index].units
        [tensors] = [unit.slab.tensors for unit in units if unit.residence is CACHED]
        layout = BankLayout.of(tensors, formats, cache.num_experts, cache.num_slots)
        memory = self._device.empty(layout.num_bytes)
        copied: dict[bool, list[tuple[torch.Tensor, torch.Tensor]]] = {True: [], False: []}
        """Sources and targets, by whether the first product reads them."""
        held = {t.name: self._views(t, self._raw[t.name]) for t in tensors}
        placed: dict[str, dict[str, torch.Tensor]] = {name: {} for name in held}
        for array in layout.arrays:
            name, source = array.tensor.name, held[array.tensor.name][array.source.name]
            place = placed[name][array.source.name] = _viewed(array.place, memory)
            if array.is_whole:
                self._whole.append((place, source))
                continue
            reached = self._device.in_place(self._host_buffer, source)
            pair = reached.view(cache.num_experts, -1), place.view(cache.num_slots, -1)
            copied[_short(name) in (W13, W13_BIAS)].append(pair)
        operands = {}
        for tensor in tensors:
            held_there = bank_tensor(tensor, cache.num_slots)
            operands[_short(tensor.name)] = formats[tensor.name].operand(
                held_there, placed[tensor.name], OPERATORS, self._restored
            )
        # Short ones first: what products wait for is copied at the rate of the link then.
        first, later = (sorted(each, key=lambda pair: pair[1].nbytes) for each in copied.values())
        sources, targets = zip(*first, *later, strict=True)
        return ExpertBank(cache, ExpertArrays.of(sources, targets, len(first))), operands

    def loaded(self) -> None:
        """Take over what banks of experts have whole, once host memory is filled.

        Stream: enqueued on the current stream.
        """
        for place, source in self._whole:
            place.copy_(source)

    def _copied(self, unit: Unit, slot: torch.Tensor) -> dict[str, Any]:
        """Return what products take of a unit that was copied into a slot."""
        raws = _cut(self.plan, unit.slab, slot, 0)
        return {_short(t.name): self._operand(t, raws[t.name]) for t in unit.slab.tensors}

    def _unit_numbers(self) -> list[list[tuple[Units, int]]]:
        """Return of each layer its units: who holds them, and their number there."""
        counts = dict.fromkeys(self.held, 0)
        parts = []
        for layer in self.plan.layers:
            found = []
            for unit in layer.units:
                found.append((self.held[unit.residence], counts[unit.residence]))
                counts[unit.residence] += 1
            parts.append(found)
        return parts

    def _layer_operands(self, layer: LayerPlan) -> dict[tuple[int, ...], Operands]:
        """Return a layer's tensors for each combination of places that its units may be in."""
        resident = {_short(t.name): self._stored(t) for t in layer.resident.tensors}
        places = [units.places(k) for units, k in self._parts[layer.index]]
        found: dict[tuple[int, ...], Operands] = {}
        for numbers in product(*(range(len(each)) for each in places)):
            merged = dict(resident)
            for each, number in zip(places, numbers, strict=True):
                merged |= each[number]
            found[numbers] = merged
        return found

    def _outer_operands(self) -> dict[str, Any]:
        found = {t.name: self._stored(t) for t in self.plan.outer_resident.tensors}
        for tensor in self.plan.outer_offloaded.tensors:
            if self.plan.placements[tensor.name].reads_in_place:
                found[tensor.name] = self._in_place(tensor)
        return found

    def _scratch_operands(self) -> dict[str, tuple[torch.Tensor, Any]]:
        """Return where tensors outside the layers are copied on demand, and what products take."""
        if self._outer_slot is None:
            return {}
        found = {}
        for tensor in self.plan.outer_offloaded.tensors:
            target = self._outer_slot[: self._raw[tensor.name].numel()]
            if not self.plan.placements[tensor.name].reads_in_place:
                found[tensor.name] = target, self._operand(tensor, target)
        return found

    def parameters(self) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
        """Yield checkpoint parameters with the contiguous tensor that each is read into.

        All of them but those of packed tensors.
        """
        for tensor in self._tensor_specs():
            form = self.plan.formats[tensor.name]
            if isinstance(form, ReadFormat):
                yield from form.targets(tensor, self._views(tensor, self._raw[tensor.name]))

    def packed(self) -> Iterator[tuple[TensorSpec, dict[str, torch.Tensor]]]:
        """Yield the tensors that are made of their rows, with the arrays to write."""
        for tensor, _ in self.plan.formats.packed(self._tensor_specs()):
            yield tensor, self._views(tensor, self._raw[tensor.name])

    def unpacked(self) -> Iterator[tuple[TensorSpec, UnpackedFormat, dict[str, torch.Tensor]]]:
        """Yield the tensors that are made of other arrays, their formats, and those to write."""
        for tensor, form in self.plan.formats.unpacked(self._tensor_specs()):
            yield tensor, form, self._views(tensor, self._raw[tensor.name])

    def _tensor_specs(self) -> Iterator[TensorSpec]:
        for layer in self.plan.layers:
            yield from layer.resident.tensors
            yield from layer.offloaded_tensors
        yield from self.plan.outer_resident.tensors
        yield from self.plan.outer_offloaded.tensors

    def begin_step(self, num_tokens: int) -> None:
        """Decide between in-place reads and staging, and start the first copies."""
        is_staged = self.plan.is_staged(num_tokens)
        for units in self.held.values():
            units.begin_step(is_staged=is_staged)

    def acquire(self, layer: int) -> Mapping[str, Any]:
        """Return a layer's tensors by short name; the compute stream may read them.

        Each is what the products of its format take. Valid until `release`. Names are those of the
        checkpoint without `model.layers.N.`, joined products as `self_attn.qkv_proj` and
        `mlp.gate_up_proj`.
        """
        numbers = tuple([units.acquire(k) for units, k in self._parts[layer]])
        return self._operands[layer][numbers]

    def release(self, layer: int) -> None:
        """Say that the layer's last use in this step is enqueued."""
        for units, k in self._parts[layer]:
            units.release(k)

    def end_step(self) -> None:
        """Join the copies to the compute stream."""
        for units in self.held.values():
            units.end_step()

    def outer(self, name: str) -> Any:
        """Return a tensor outside the layers, copied on demand where it lies off the GPU."""
        found = self._outer.get(name)
        if found is None:
            target, found = self._scratch[name]
            target.copy_(self._raw[name], non_blocking=True)
            self._outer_copied_bytes += target.numel()
        elif self.plan.placements[name].reads_in_place and name != EMBEDDING:
            self._outer_read_bytes += self._raw[name].numel()
        return found

    @property
    def copied_bytes(self) -> int:
        """Bytes enqueued host to device since the load."""
        return self._outer_copied_bytes + sum(units.copied_bytes for units in self.held.values())

    @property
    def in_place_bytes(self) -> int:
        """Weight bytes that steps read in place from host memory so far."""
        return self._outer_read_bytes + sum(units.in_place_bytes for units in self.held.values())

    def host_bytes(self) -> tuple[int, int]:
        """Return pinned and pageable host bytes held."""
        size = self._host_buffer.tensor.numel()
        return (size, 0) if self._host_buffer.pinned else (0, size)

    def host_seconds(self) -> tuple[float, float]:
        """Return the seconds that touching and that registering host memory took."""
        return self._host_buffer.touch_s, self._host_buffer.pin_s

    def close(self) -> None:
        """Release every view, then the slabs."""
        self._operands, self._parts, self.held, self._whole = [], [], {}, []
        self.expert_counters = None
        self._outer, self._scratch, self._raw = {}, {}, {}
        self._outer_slot = self._restored = None
        self._resident_buffer = torch.empty(0)
        self._host_buffer.close()


def _cut(plan: MemoryPlan, slab: Slab, memory: torch.Tensor, base: int) -> dict[str, torch.Tensor]:
    """Return the bytes of each tensor of a slab that begins at `base`."""
    found = {}
    for tensor, offset in zip(slab.tensors, slab.offsets, strict=True):
        start = base + offset
        found[tensor.name] = memory[start : start + plan.formats.num_bytes(tensor)]
    return found


def _viewed(view: View, memory: torch.Tensor) -> torch.Tensor:
    """Return an array among bytes."""
    dtype: torch.dtype = getattr(torch, view.dtype)
    size = math.prod(view.shape) * dtype.itemsize
    return memory[view.offset : view.offset + size].view(dtype).view(view.shape)


def _short(name: str) -> str:
    """Drop `model.layers.N.`."""
    return name.split(".", 3)[3]
