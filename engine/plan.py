"""MemoryPlan: every byte on both sides before anything is allocated. Pure arithmetic, no torch."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from engine.config import GPUConfig
from engine.host_kv import HostKVPlan
from engine.kv_sizes import KVSizes
from engine.placement import Assignment, Placement
from engine.sizes import MAX_LOAD_THREADS, pad_batch
from engine.spec import DTYPE_BYTES, ModelSpec, TensorSpec

__all__ = [
    "ALIGNMENT",
    "UNKNOWN_HOST_BYTES",
    "DeviceFacts",
    "HostKVPlan",
    "LayerPlan",
    "MemoryPlan",
    "Slab",
    "WeightLayout",
    "align",
    "lay_out",
]

UNKNOWN_HOST_BYTES = 2**50
"""Host memory of a machine that is not here: no limit."""
ALIGNMENT = 256
"""Every tensor of a slab starts at a multiple of this, bytes."""


def align(num_bytes: int) -> int:
    """Round up to the alignment of tensors in a slab."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What a plan must know of a machine."""

    kind: str
    """cuda | cpu."""
    name: str
    total_bytes: int
    """Memory of the card (CPU: what may serve as an emulated card)."""
    free_bytes: int
    """Of it, free now."""
    host_available_bytes: int
    """Host memory that can be taken: the least of free memory and cgroup limit."""
    can_pin: bool = True
    can_uva: bool = True
    reason: str = ""
    """Why pinning or in-place reads are not possible."""
    pin_limit_bytes: int | None = None
    """Host memory that may be pinned where a limit on locked memory binds the driver."""
    num_threads: int = MAX_LOAD_THREADS
    """That read weights."""
    holders: tuple[str, ...] = ()
    """Other processes with memory of the card, in words."""

    @classmethod
    def of_card(cls, gpu: GPUConfig) -> "DeviceFacts":
        """Return a card that is not here, free of others' memory, in a machine of any host memory.

        Args:
            gpu: its memory_gib is set.
        """
        total = int((gpu.memory_gib or 0) * 2**30)
        return cls(
            kind="cuda",
            name=gpu.name,
            total_bytes=total,
            free_bytes=total,
            host_available_bytes=UNKNOWN_HOST_BYTES,
        )

    @property
    def emulated(self) -> bool:
        """Whether the GPU tier is host memory standing in for a card."""
        return self.kind == "cpu"


@dataclass(frozen=True)
class Slab:
    """Tensors laid out one after another, aligned."""

    tensors: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, tensors: list[TensorSpec], dtype_bytes: int) -> "Slab":
        """Lay the tensors out in order."""
        offsets, total = [], 0
        for tensor in tensors:
            offsets.append(total)
            total += -(-tensor.numel * dtype_bytes // ALIGNMENT) * ALIGNMENT  # as `align`, often
        return cls(tuple(tensors), tuple(offsets), total)


@dataclass(frozen=True)
class LayerPlan:
    """One layer's resident slab and offloaded slab."""

    index: int
    resident: Slab
    offloaded: Slab
    placement: Placement
    """Of the offloaded slab; RESIDENT where it is empty."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Placement of every tensor, KV blocks, and every other byte on each side."""

    dtype: str
    placements: dict[str, Placement]
    layers: tuple[LayerPlan, ...]
    outer_resident: Slab
    outer_offloaded: Slab
    lookahead: int
    num_slots: int
    """Slots on the GPU that offloaded layers are copied into (prefetch, on demand, staging)."""
    slot_bytes: int
    outer_slot_bytes: int
    """Scratch for tensors outside the layers that are copied on demand."""
    stage_tokens: int | None
    """From this many tokens in a step on, uva layers are staged; None: never."""
    block_size: int
    kv: KVSizes
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    graph_sizes: tuple[int, ...]
    """Decode batch sizes captured as CUDA graphs; both graph and eager steps pad to them."""
    prefill_sizes: tuple[tuple[int, int], ...] = ()
    """Decode rows and tokens of prompts that steps with prompts are padded to, where they fit."""
    captured_prefills: tuple[tuple[int, int], ...] = ()
    """Those of `prefill_sizes` that run as graphs: none where layers are offloaded. Where many are
    the link takes longer than the launches; where few are more would have to be, for the room that
    graphs take, which costs every decode step (docs/performance.md, Predictions)."""
    use_graphs: bool
    """Decode runs in CUDA graphs."""
    pin: bool
    """Offloaded slabs are pinned."""
    reads_files: bool = True
    """Weights come from files; dummy ones are made in their places."""
    gpu_budget_bytes: int
    gpu_items: dict[str, int]
    host_limit_bytes: int
    host_items: dict[str, int]
    notes: tuple[str, ...] = ()
    swap_space_bytes: int = 0
    """Asked for; first for weights where no offload is set, the rest for KV blocks."""
    swap_weights_bytes: int = 0
    """Of it, what weights take."""
    host_kv: HostKVPlan | None = None
    """None: all KV blocks lie on the GPU."""
    prefix_caching: bool = False
    """Full blocks stay findable by their content."""
    longest_tokens: int = 0
    """The longest sequence that both tiers could hold, were it max_model_len."""
    predicted: dict[str, Any] | None = field(default=None, repr=False)
    """Times that engine.cost.predict gives for this plan."""
    choice: dict[str, Any] | None = field(default=None, repr=False)
    """What the planner chose, why, and what else there was; None: it chose nothing."""
    facts: DeviceFacts = field(repr=False)

    @cached_property
    def gpu_total_bytes(self) -> int:
        """Bytes that the plan takes on the GPU."""
        return sum(self.gpu_items.values())

    @property
    def allocator_bytes(self) -> int:
        """Bytes of the budget for tensors: all but the runtime and the graphs' own memory."""
        outside = self.gpu_items["runtime"] + self.gpu_items["graphs"]
        return self.gpu_budget_bytes - outside

    @property
    def memlock_lack(self) -> str:
        """What to say where more would be pinned than the memlock limit allows, else empty."""
        names = ("pinned_weights", "pinned_kv", "kv_staging")
        parts = {name: self.host_items.get(name, 0) for name in names}
        wanted, limit = sum(parts.values()) if self.pin else 0, self.facts.pin_limit_bytes
        if limit is None or wanted <= limit:
            return ""
        shown = ", ".join(f"{name} {value / 2**30:.3f}" for name, value in parts.items() if value)
        less = "offload less"
        if parts["pinned_kv"]:
            left = max(0, limit - wanted + parts["pinned_kv"]) / 2**30
            less = f"set kv.pin_limit_gib={math.floor(left * 1000) / 1000:g}, {less}"
        return (
            f"host memory: {wanted / 2**30:.3f} GiB would be pinned ({shown}), but the memlock "
            f"limit leaves {limit / 2**30:.3f} GiB. Raise it (ulimit -l unlimited, or --ulimit "
            f"memlock=-1 for a container), {less}, or set TIGHTFIT_DISABLE_PIN_MEMORY=1 to run "
            "from pageable memory."
        )

    @property
    def host_total_bytes(self) -> int:
        """Bytes that the plan takes in host memory."""
        return sum(self.host_items.values())

    def placed_bytes(self) -> dict[str, int]:
        """Weight bytes by placement."""
        size = DTYPE_BYTES[self.dtype]
        totals = {place.value: 0 for place in Placement}
        slabs = [(layer.offloaded, layer.placement) for layer in self.layers]
        slabs += [(layer.resident, Placement.RESIDENT) for layer in self.layers]
        for slab, place in slabs:
            totals[place.value] += sum(t.numel for t in slab.tensors) * size
        for slab in (self.outer_resident, self.outer_offloaded):
            for tensor in slab.tensors:
                totals[self.placements[tensor.name].value] += tensor.numel * size
        return totals

    @property
    def offloaded_layers(self) -> tuple[LayerPlan, ...]:
        """Layers with an offloaded slab, in order."""
        return tuple(layer for layer in self.layers if layer.offloaded.num_bytes)

    def moved_per_step(self, num_decodes: int = 1) -> tuple[int, int]:
        """Return weight bytes that cross the link in one decode step: copied, and read in place.

        Rows of an embedding table that are gathered in place are not counted.

        Args:
            num_decodes: Sequences that decode a token; uva layers are staged from `stage_tokens`
                rows on, padding included.
        """
        embed = "model.embed_tokens.weight"
        size = DTYPE_BYTES[self.dtype]
        rows = pad_batch(num_decodes) if self.graph_sizes else num_decodes
        is_staged = self.stage_tokens is not None and rows >= self.stage_tokens
        copied = read = 0
        for tensor in self.outer_offloaded.tensors:
            if self.placements[tensor.name] is Placement.ON_DEMAND:
                copied += tensor.numel * size
            elif tensor.name != embed:
                read += tensor.numel * size
        num_layers, slots = len(self.offloaded_layers), self.num_slots
        for k, layer in enumerate(self.offloaded_layers):
            if layer.placement is Placement.UVA and not is_staged:
                read += sum(t.numel for t in layer.offloaded.tensors) * size
            elif layer.placement is Placement.ON_DEMAND or k % slots + slots < num_layers:
                copied += layer.offloaded.num_bytes
            # A layer that has a slot to itself stays there.
        return copied, read

    def bytes_per_step(self) -> int:
        """Weight bytes that cross the link when one sequence decodes (see moved_per_step)."""
        return sum(self.moved_per_step())

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the first group of layers."""
        return self.kv.block_bytes[0]

    @property
    def num_gpu_blocks(self) -> int:
        """Blocks of the first group of layers on the GPU."""
        return self.kv.pools[0]

    @property
    def window(self) -> int | None:
        """Most tokens that layers with a window attend to; None: no layer has one that matters."""
        return max((window for window in self.kv.windows if window is not None), default=None)

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV that the GPU holds, in layers of the first group."""
        return self.num_gpu_blocks * self.block_size

    @property
    def reach(self) -> tuple[int, ...]:
        """Blocks of each group that one sequence can use, in both tiers."""
        return tuple(group.num_gpu_blocks + group.num_in_place for group in self.kv.groups)

    @property
    def holds_one(self) -> bool:
        """Whether one sequence of max_model_len has room, over both tiers."""
        need = self.kv.blocks(self.max_model_len)
        has_room = all(n >= least for n, least in zip(self.reach, need, strict=True))
        return has_room and min(self.kv.pools) > 0

    @property
    def max_concurrency(self) -> float:
        """Sequences of max_model_len that run at once; one that exceeds the GPU runs alone."""
        held = self.kv.sequences(self.kv.pools, self.max_model_len)
        on_gpu = min(float(self.max_num_seqs), held)
        return 1.0 if on_gpu < 1 and self.holds_one else on_gpu

    @property
    def max_kept(self) -> float:
        """Sequences of max_model_len whose KV both tiers keep, running or waiting."""
        both = tuple(group.num_gpu_blocks + group.num_host_blocks for group in self.kv.groups)
        return self.kv.sequences(both, self.max_model_len)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a record."""
        return {
            "dtype": self.dtype,
            "gpu": {
                "budget_bytes": self.gpu_budget_bytes,
                "items": dict(self.gpu_items),
                "total_bytes": self.gpu_total_bytes,
                "free_bytes": self.gpu_budget_bytes - self.gpu_total_bytes,
            },
            "host": {
                "limit_bytes": self.host_limit_bytes,
                "items": dict(self.host_items),
                "total_bytes": self.host_total_bytes,
            },
            "kv": {
                "num_gpu_blocks": self.num_gpu_blocks,
                "block_size": self.block_size,
                "block_bytes": self.block_bytes,
                "tokens": self.kv_tokens,
                "max_model_len": self.max_model_len,
                "window": self.window,
                "max_concurrency": self.max_concurrency,
                "max_kept": self.max_kept,
                "longest_tokens": self.longest_tokens,
                "prefix_caching": self.prefix_caching,
                "groups": self.kv.to_dict(),
                "host": self.host_kv.to_dict(self.kv) if self.host_kv else None,
            },
            "placements": self.placed_bytes(),
            "num_slots": self.num_slots,
            "slot_bytes": self.slot_bytes,
            "lookahead": self.lookahead,
            "stage_tokens": self.stage_tokens,
            "graph_sizes": list(self.graph_sizes),
            "prefill_sizes": [list(size) for size in self.prefill_sizes],
            "bytes_per_step": self.bytes_per_step(),
            "moved_per_step": dict(
                zip(("copied_bytes", "in_place_bytes"), self.moved_per_step(), strict=True)
            ),
            "offloaded_layers": [layer.index for layer in self.offloaded_layers],
            "swap_space": {
                "asked_bytes": self.swap_space_bytes,
                "weights_bytes": self.swap_weights_bytes,
                "kv_bytes": self.kv.num_bytes(self.kv.host_blocks) if self.swap_space_bytes else 0,
            },
            "predicted": self.predicted,
            "choice": self.choice,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class WeightLayout:
    """Slabs of an assignment."""

    layers: tuple[LayerPlan, ...]
    outer_resident: Slab
    outer_offloaded: Slab

    @property
    def resident_bytes(self) -> int:
        """Bytes of resident slabs."""
        return sum(x.resident.num_bytes for x in self.layers) + self.outer_resident.num_bytes

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of offloaded slabs."""
        return sum(x.offloaded.num_bytes for x in self.layers) + self.outer_offloaded.num_bytes


def lay_out(spec: ModelSpec, assignment: Assignment, dtype: str) -> WeightLayout:
    """Lay every tensor out in a resident or an offloaded slab."""
    size, places = DTYPE_BYTES[dtype], assignment.placements
    layers = []
    for index in range(spec.num_hidden_layers):
        resident: list[TensorSpec] = []
        moved: list[TensorSpec] = []
        for tensor in spec.layer_tensors(index):
            (resident if places[tensor.name] is Placement.RESIDENT else moved).append(tensor)
        place = places[moved[0].name] if moved else Placement.RESIDENT
        layers.append(LayerPlan(index, Slab.of(resident, size), Slab.of(moved, size), place))
    outer = spec.outer_tensors()
    return WeightLayout(
        tuple(layers),
        Slab.of([t for t in outer if places[t.name] is Placement.RESIDENT], size),
        Slab.of([t for t in outer if places[t.name] is not Placement.RESIDENT], size),
    )
