"""From a placement to a MemoryPlan: every byte on both sides. Pure arithmetic, no torch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from typing import Any

from engine.asked.config import EngineConfig
from engine.model.formats import EMBEDDING, FORMATS, Format, TensorFormats, TensorSpec, align
from engine.model.loading import described, weight_formats
from engine.model.spec import DTYPE_BYTES, ModelSpec
from engine.plan.cards import DeviceFacts, capability_notes, gpu_budget_bytes, window_notes
from engine.plan.experts import ExpertPlan, plan_experts
from engine.plan.policy import Assignment, fall_back
from engine.plan.rates import Rates, dma_run_bytes, rates_for
from engine.plan.sizes import (
    HOST_DECODES,
    HostKVPlan,
    HostTierSizes,
    KVSizes,
    activation_bytes,
    captured_bytes,
    graph_sizes,
    host_tier_sizes,
    kv_sizes,
    load_staging_bytes,
    logits_bytes,
    pad_batch,
    prefill_sizes,
    process_bytes,
    restore_bytes,
    routing_items,
    runtime_bytes,
    tokenizer_bytes,
)
from engine.plan.units import (
    CACHED,
    RESIDENCES,
    RESIDENT,
    UVA,
    LayerPlan,
    Residence,
    Slab,
    Slots,
    Unit,
)
from engine.plan.weight_times import staged_from
from engine.sealed import GIB


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Placement of every tensor, KV blocks, and every other byte on each side."""

    dtype: str
    formats: TensorFormats = field(repr=False)
    placements: dict[str, Residence]
    layers: tuple[LayerPlan, ...]
    outer_resident: Slab
    outer_offloaded: Slab
    lookahead: int
    slots: tuple[Slots, ...]
    """What units are copied into, of each offloaded residence in use (staging included)."""
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
    """The `prefill_sizes` that run as graphs: none where layers are offloaded. Where many are
    the link takes longer than the launches; where few are more would have to be, for the room that
    graphs take, which costs every decode step (docs/performance.md, Predictions)."""
    use_graphs: bool
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
    host_kv: HostKVPlan | None = None
    """None: all KV blocks lie on the GPU."""
    prefix_caching: bool = False
    """Full blocks stay findable by their content."""
    longest_tokens: int = 0
    """The longest sequence that both tiers could hold, were it max_model_len."""
    weight_format: dict[str, Any] | None = field(default=None, repr=False)
    """What was asked and chosen, bytes by format, and what stays plain and why; None: all weights
    are as the checkpoint has them, as asked."""
    experts: ExpertPlan | None = None
    """Experts and their banks; None: a dense model."""
    quantize: str | None = None
    """What the load rounds plain weights to, in words; None: it rounds none."""
    predicted: dict[str, Any] | None = field(default=None, repr=False)
    """Times that engine.plan.planner.predict gives for this plan."""
    choice: dict[str, Any] | None = field(default=None, repr=False)
    """What the planner chose, why, and what else there was; None: it chose nothing."""
    facts: DeviceFacts = field(repr=False)

    @cached_property
    def gpu_total_bytes(self) -> int:
        """Bytes that the plan takes on the GPU."""
        return sum(self.gpu_items.values())

    @property
    def assignment(self) -> Assignment:
        """The placements and the banks, for another plan."""
        slots = () if self.experts is None else self.experts.slots
        return Assignment(self.placements, self.lookahead, bank_slots=slots)

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
        shown = ", ".join(f"{name} {value / GIB:.3f}" for name, value in parts.items() if value)
        less = "offload less"
        if parts["pinned_kv"]:
            left = max(0, limit - wanted + parts["pinned_kv"]) / GIB
            less = f"set kv.pin_limit_gib={math.floor(left * 1000) / 1000:g}, {less}"
        return (
            f"host memory: {wanted / GIB:.3f} GiB would be pinned ({shown}), but the memlock "
            f"limit leaves {limit / GIB:.3f} GiB. Raise it (ulimit -l unlimited, or --ulimit "
            f"memlock=-1 for a container), {less}, or set TIGHTFIT_DISABLE_PIN_MEMORY=1 to run "
            "from pageable memory."
        )

    @property
    def host_total_bytes(self) -> int:
        """Bytes that the plan takes in host memory."""
        return sum(self.host_items.values())

    def placed_bytes(self) -> dict[str, int]:
        """Weight bytes by placement."""
        totals = {place.name: 0 for place in RESIDENCES}
        for layer in self.layers:
            totals[RESIDENT.name] += self.formats.total_bytes(layer.resident.tensors)
            for unit in layer.units:
                totals[unit.residence.name] += self.formats.total_bytes(unit.slab.tensors)
        for slab in (self.outer_resident, self.outer_offloaded):
            for tensor in slab.tensors:
                totals[self.placements[tensor.name].name] += self.formats.num_bytes(tensor)
        return totals

    @property
    def offloaded_layers(self) -> tuple[LayerPlan, ...]:
        """Layers with units in host memory, in order."""
        return tuple(layer for layer in self.layers if layer.units)

    def units_of(self, residence: Residence) -> tuple[Unit, ...]:
        """Return the units of one residence, in the order of their layers."""
        units = (unit for layer in self.layers for unit in layer.units)
        return tuple(unit for unit in units if unit.residence is residence)

    @property
    def num_slots(self) -> int:
        """Slots on the GPU that units are copied into."""
        return sum(slots.count for slots in self.slots)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the largest unit, and so of a slot where all units have one residence."""
        return max((slots.num_bytes for slots in self.slots), default=0)

    def is_staged(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens stages uva layers."""
        return self.stage_tokens is not None and num_tokens >= self.stage_tokens

    @property
    def always_staged(self) -> bool:
        """Whether every step stages uva layers, which are then never read in place."""
        return self.is_staged(1)

    def is_captured(self, num_decodes: int) -> bool:
        """Whether decodes of so many rows run as a graph.

        They need the same units in the slots before each step. Those that stage uva layers find
        what the steps before them staged, unless every step does.
        """
        return self.use_graphs and (self.always_staged or not self.is_staged(num_decodes))

    def moved_per_step(self, num_decodes: int = 1) -> tuple[int, int]:
        """Return weight bytes that cross the link in one decode step: copied, and read in place.

        Rows of an embedding table that are gathered in place are not counted. From `stage_tokens`
        rows on, padding included, uva layers are staged.
        """
        rows = pad_batch(num_decodes) if self.graph_sizes else num_decodes
        is_staged = self.is_staged(rows)
        copied = read = 0
        for tensor in self.outer_offloaded.tensors:
            if not self.placements[tensor.name].reads_in_place:
                copied += self.formats.num_bytes(tensor)
            elif tensor.name != EMBEDDING:
                read += self.formats.num_bytes(tensor)
        for slots in self.slots:
            kind = slots.residence
            moved = kind.link_bytes(
                self.units_of(kind), self.formats, slots.count, is_staged=is_staged
            )
            copied, read = copied + moved[0], read + moved[1]
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
        """Sequences of max_model_len that run at once; those that exceed the GPU on both tiers."""
        on_gpu = self.kv.sequences(self.kv.pools, self.max_model_len)
        both = max(1.0, self.kv.sequences(self.reach, self.max_model_len))
        return min(float(self.max_num_seqs), both if on_gpu < 1 and self.holds_one else on_gpu)

    @property
    def max_kept(self) -> float:
        """Sequences of max_model_len whose KV both tiers keep, running or waiting."""
        both = tuple(group.num_gpu_blocks + group.num_host_blocks for group in self.kv.groups)
        return self.kv.sequences(both, self.max_model_len)

    def where(self) -> str:
        """Say how many bytes of weights left the GPU and by which way, and the KV tokens held."""
        placed = self.placed_bytes()
        off = {name: size for name, size in placed.items() if size and name != RESIDENT.name}
        ways = ", ".join(f"{name} {size / GIB:.3g}" for name, size in off.items())
        kv = f"{self.kv_tokens:,} tokens of KV on the GPU"
        if self.host_kv is not None:
            kv += f" and {self.kv.host_blocks[0] * self.block_size:,} in host memory"
        moved, total = sum(off.values()) / GIB, sum(placed.values()) / GIB
        weights = f"{moved:.3g} of {total:.3g} GiB of weights off the GPU"
        return f"{weights}{f' ({ways})' if ways else ''}; {kv}"

    def __repr__(self) -> str:
        return f"MemoryPlan({self.facts.name}, {self.dtype}: {self.where()})"

    def _repr_html_(self) -> str:
        """Return a table for notebooks: where weights are, KV, both memories by part."""
        cells = (f"<tr><th>{escape(x)}</th><td>{escape(y)}</td></tr>" for x, y in self._table())
        title = escape(f"Plan for {self.facts.name}, {self.dtype}")
        return f"<table><caption>{title}</caption>{''.join(cells)}</table>"

    def _table(self) -> Iterator[tuple[str, str]]:
        sides = {"weights": self.placed_bytes(), "GPU": self.gpu_items, "host": self.host_items}
        for side, items in sides.items():
            for name, num_bytes in items.items():
                if num_bytes:
                    yield f"{side}, {name}", f"{num_bytes / GIB:.3g} GiB"
        yield "GPU, budget", f"{self.gpu_budget_bytes / GIB:.3g} GiB"
        yield "KV on the GPU", f"{self.kv_tokens:,} tokens"
        if self.predicted is not None:
            yield "a token, predicted", f"{self.predicted['decode_step_ms']:.4g} ms"

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
            **({"experts": self.experts.to_dict()} if self.experts else {}),
            **({"formats": self.formats.to_dict()} if self.formats.others else {}),
            **({"weight_format": self.weight_format} if self.weight_format else {}),
            **({"quantize": self.quantize} if self.quantize else {}),
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
        return sum(x.offloaded_bytes for x in self.layers) + self.outer_offloaded.num_bytes


def lay_out(asked: "Asked", assignment: Assignment) -> WeightLayout:
    """Lay every tensor out: those of a layer together by their residence."""
    places, outer = assignment.placements, asked.spec.outer_tensors()
    return WeightLayout(
        tuple(asked.layer_plan(index, places) for index in range(asked.spec.num_hidden_layers)),
        Slab.of([t for t in outer if not places[t.name].is_offloaded], asked.formats),
        Slab.of([t for t in outer if places[t.name].is_offloaded], asked.formats),
    )


@dataclass(frozen=True)
class Asked:
    """What a plan is made from, resolved."""

    config: EngineConfig
    spec: ModelSpec
    facts: DeviceFacts
    dtype: str
    max_model_len: int
    reference: bool
    tensor_formats: Mapping[str, Format] = field(default_factory=dict)
    """Formats of tensors that are kept in another than that of the dtype, by name."""
    unpackable: Mapping[str, str] = field(default_factory=dict)
    """Why tensors of this checkpoint cannot be kept in codes, by name, as far as it is known."""
    own_length: int | None = None
    """The model's own length, where max_model_len was cut from it; None: it was not."""

    @cached_property
    def formats(self) -> TensorFormats:
        """The format of every tensor."""
        own = weight_formats(self.config.model.quantize, self.spec, self.dtype)
        return TensorFormats(FORMATS[self.dtype], {**own, **self.tensor_formats})

    # What no placement changes is found once, for all plans that are made from this.

    @cached_property
    def rates(self) -> Rates:
        """The rates of the machine."""
        return rates_for(self.config.gpu, self.facts, self.config.measured_rates)

    def stage_tokens(self, slabs: Sequence[Slab]) -> int | None:
        """Return from how many tokens of a step on uva layers with these slabs are staged.

        None: no step has as many.
        """
        settings = self.config.engine
        tokens = settings.uva_stage_tokens or staged_from(self.rates, slabs, self.formats)
        return tokens if tokens <= settings.max_num_batched_tokens else None

    @cached_property
    def packing_bytes(self) -> int:
        """GPU memory that a load packs tensors in."""
        return self.formats.packing_bytes(self.spec.tensors())

    @cached_property
    def kv(self) -> KVSizes:
        """What sequences and blocks take."""
        return kv_sizes(self.config, self.spec, self.dtype, self.max_model_len)

    @cached_property
    def step_bytes(self) -> tuple[int, int]:
        """GPU bytes of a step's activations, and of its logits."""
        settings, size = self.config.engine, DTYPE_BYTES[self.dtype]
        beside = size * self.formats.token_elements(self.spec.tensors())
        activations = activation_bytes(self.spec, settings, size, self.max_model_len, beside)
        return activations, logits_bytes(self.spec, settings, size, self.max_model_len)

    @cached_property
    def restore_items(self) -> dict[str, int]:
        """GPU bytes in which steps of many tokens restore weights, if any do."""
        tokens, rows = self.config.engine.max_num_batched_tokens, self.config.engine.max_num_seqs
        size = restore_bytes(self.spec, self.formats, max_tokens=tokens, max_rows=rows)
        return {"restore": size} if size else {}

    @cached_property
    def graph_sizes(self) -> tuple[int, ...]:
        """Decode batches that steps are padded to; on a CPU none."""
        return () if self.facts.emulated else graph_sizes(self.config.engine.max_num_seqs)

    @cached_property
    def _layer_plans(self) -> dict[tuple[int, tuple[Residence, ...]], LayerPlan]:
        return {}

    def layer_plan(self, index: int, places: Mapping[str, Residence]) -> LayerPlan:
        """Return a layer's tensors, laid out together by their residence."""
        tensors, known = self.spec.layer_tensors(index), self._layer_plans
        key = index, tuple(map(places.__getitem__, self.spec.layer_names[index]))
        if key not in known:
            slabs: dict[Residence, list[TensorSpec]] = {kind: [] for kind in RESIDENCES}
            for tensor, place in zip(tensors, key[1], strict=True):
                slabs[place].append(tensor)
            resident = Slab.of(slabs.pop(RESIDENT), self.formats)
            held = {kind: Slab.of(found, self.formats) for kind, found in slabs.items() if found}
            known[key] = LayerPlan(index, resident, tuple(map(Unit, held, held.values())))
        return known[key]


def fits(asked: Asked, assignment: Assignment) -> bool:
    """Whether this machine can serve it, in GPU and host memory."""
    return plan_fits(build_plan(asked, assignment))


def plan_fits(plan: MemoryPlan) -> bool:
    """Whether one sequence of max_model_len has room on the GPU, and the rest in host memory."""
    has_host = plan.host_total_bytes <= plan.host_limit_bytes and not plan.memlock_lack
    return plan.holds_one and has_host


def build_plan(asked: Asked, assignment: Assignment) -> MemoryPlan:
    """Account for every byte of what this machine makes of an assignment; KV takes what is left.

    Where only the format of uva layers is a reason to stage them, and slots leave no room for one
    sequence, they have none.
    """
    plan = _account(asked, assignment)
    if plan.stage_tokens is None or asked.config.engine.uva_stage_tokens or plan.holds_one:
        return plan
    in_place = _account(asked, assignment, by_format=False)
    if not in_place.holds_one:
        return plan
    note = (
        "fallback: uva weights are read in place, although copying them through slots is predicted "
        f"to be faster: the {plan.gpu_items['staging_slots'] / GIB:.2f} GiB of the slots leave no "
        f"room for the KV of a sequence of {plan.max_model_len} tokens."
    )
    return replace(in_place, notes=(*in_place.notes, note))


def _account(asked: Asked, assignment: Assignment, *, by_format: bool = True) -> MemoryPlan:
    """Return the plan; without `by_format`, uva layers are staged where 16-bit ones are."""
    config, spec, facts, dtype = asked.config, asked.spec, asked.facts, asked.dtype
    assignment = fall_back(
        assignment, can_pin=facts.can_pin, can_uva=facts.can_uva, reason=facts.reason
    )
    settings, size = config.engine, DTYPE_BYTES[dtype]
    layout = lay_out(asked, assignment)
    slots, outer_slot, stage = _slots(asked, layout, assignment, by_format=by_format)
    slot_bytes = {found.residence: found.count * found.num_bytes for found in slots}
    sizes, (activations, logits) = asked.graph_sizes, asked.step_bytes
    budget = gpu_budget_bytes(config, facts)
    use_graphs, prefills, captured = _captured(asked, layout)
    notes = [*assignment.notes, *_machine_notes(asked, use_graphs=use_graphs)]
    captured_pool, graph_nodes = captured_bytes(
        spec, facts.kind, sizes if use_graphs else (), captured, size
    )
    items = {
        "weights": layout.resident_bytes,
        "prefetch_slots": sum(size for kind, size in slot_bytes.items() if kind is not UVA),
        "staging_slots": slot_bytes.get(UVA, 0) + outer_slot,
        "activations": activations + captured_pool,
        "logits": logits,
        "graphs": graph_nodes,
        "runtime": runtime_bytes(facts.kind),
        **asked.restore_items,
        **routing_items(config, spec),
    }
    tier = asked_tier(asked, layout.offloaded_bytes)
    if tier.num_blocks:
        items["kv_moves"] = tier.ids_bytes
    items |= _packing(asked, items, budget)
    room = budget - sum(items.values())
    experts = _experts(asked, layout, assignment, room)
    if experts is not None and experts.bank_bytes:
        items["expert_banks"] = experts.bank_bytes
        room -= experts.bank_bytes
    kv, kv_notes = _without_spare(asked, tier.share_out(asked.kv, room))
    if kv.groups[0].in_place:
        items["kv_stages"] = tier.stage_bytes(room)
        items["graphs"] += tier.graph_bytes
    items["kv_cache"] = kv.num_bytes(kv.pools)
    host_kv = None
    if tier.num_blocks:
        host_kv = HostKVPlan(
            stage_blocks=tier.stage_blocks(room) if kv.groups[0].in_place else 0,
            dma_run_bytes=dma_run_bytes(asked.rates),
        )
    host = _host_items(asked, tier, layout.offloaded_bytes)
    if facts.emulated:
        host["emulated_gpu"] = sum(items.values())
    notes += [*kv_notes, *_tier_notes(asked, tier)]
    reserve = int(settings.host_reserve_gib * GIB)
    return MemoryPlan(
        dtype=dtype,
        formats=asked.formats,
        placements=assignment.placements,
        layers=layout.layers,
        outer_resident=layout.outer_resident,
        outer_offloaded=layout.outer_offloaded,
        lookahead=assignment.lookahead,
        slots=slots,
        outer_slot_bytes=outer_slot,
        stage_tokens=stage,
        block_size=config.kv.block_size,
        kv=kv,
        max_model_len=asked.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        graph_sizes=sizes,
        prefill_sizes=prefills,
        captured_prefills=captured,
        reads_files=config.model.load_format != "dummy",
        use_graphs=use_graphs,
        pin=facts.can_pin,
        gpu_budget_bytes=budget,
        gpu_items=items,
        host_limit_bytes=max(0, facts.host_available_bytes - reserve),
        host_items=host,
        notes=tuple(notes),
        swap_space_bytes=int(config.kv.swap_space * GIB),
        swap_weights_bytes=_swap_weights_bytes(asked, layout.offloaded_bytes),
        host_kv=host_kv,
        prefix_caching=config.kv.enable_prefix_caching,
        experts=experts,
        longest_tokens=_longest_tokens(tier, kv, room, spec.max_position_embeddings),
        quantize=described(config.model.quantize),
        facts=facts,
    )


def _machine_notes(asked: Asked, *, use_graphs: bool) -> Iterator[str]:
    """Yield what to say of what this machine makes of the question."""
    config, spec, facts = asked.config, asked.spec, asked.facts
    if _captured_decodes(asked) and not use_graphs:
        yield "fallback: decode runs without graphs, which cannot copy pageable memory."
    yield from window_notes(config, spec, asked.max_model_len)
    capability = None if facts.emulated else facts.compute_capability
    yield from capability_notes(config, spec, asked.dtype, facts.name, capability)


def _captured(
    asked: Asked, layout: WeightLayout
) -> tuple[bool, tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """Return whether decodes run as graphs, what prompts are padded to, and what of it is captured.

    Graphs cannot copy pageable memory.
    """
    use_graphs = bool(_captured_decodes(asked))
    if layout.offloaded_bytes and not asked.facts.can_pin:
        use_graphs = False
    prefills: tuple[tuple[int, int], ...] = ()
    if asked.graph_sizes:
        settings = asked.config.engine
        prefills = prefill_sizes(settings.max_num_seqs, settings.max_num_batched_tokens)
    offloads = any(layer.units for layer in layout.layers)
    return use_graphs, prefills, prefills if use_graphs and not offloads else ()


def _experts(
    asked: Asked, layout: WeightLayout, assignment: Assignment, room: int
) -> ExpertPlan | None:
    """Return where experts lie; banks take what of the room KV leaves, and KV what they leave.

    KV has room for so many blocks of the first group, or one sequence of max_model_len, unless the
    least banks need it.
    """
    if not asked.spec.expert_layers:
        return None
    kv, count = asked.kv, assignment.kv_blocks
    room -= kv.room(kv.blocks(kv.max_model_len)[0] if count is None else count)
    return plan_experts(
        asked.config.model,
        asked.spec,
        asked.formats,
        layout.layers,
        assignment.bank_slots,
        room,
    )


def _without_spare(asked: Asked, kv: KVSizes) -> tuple[KVSizes, list[str]]:
    """Return the groups without blocks of an emulated GPU that no request can use, and say so.

    One sequence of max_model_len, and a block for each sequence, have room in any case.
    """
    tokens, size = asked.config.emulated_kv_tokens, asked.config.kv.block_size
    if tokens is None or not asked.facts.emulated or kv.groups[0].in_place:
        return kv, []
    most = max(-(-tokens // size), asked.config.engine.max_num_seqs)
    pairs = zip(kv.pools, kv.blocks(kv.max_model_len), strict=True)
    pools = tuple(min(there, max(most, least)) for there, least in pairs)
    if pools == kv.pools:
        return kv, []
    note = (
        f"fallback: GPU memory is emulated in RAM. The KV cache has {pools[0]} blocks, as many as "
        f"the requests can use; the budget would allow {kv.pools[0]}."
    )
    return kv.with_pools(pools), [note]


def _host_items(asked: Asked, tier: HostTierSizes, offloaded_bytes: int) -> dict[str, int]:
    """Host memory by part, but for an emulated GPU."""
    config, spec, facts = asked.config, asked.spec, asked.facts
    items = {"pinned_weights" if facts.can_pin else "pageable_weights": offloaded_bytes}
    if tier.num_blocks:
        items["pinned_kv"] = tier.num_pinned * sum(asked.kv.block_bytes)
        items["pageable_kv"] = tier.num_pageable * sum(asked.kv.block_bytes)
        items["kv_staging"] = tier.staging_bytes + tier.ids_bytes
    size = load_staging_bytes(spec.weight_bytes(), facts.num_threads)
    items["load_staging"] = 0 if config.model.load_format == "dummy" else size
    items["tokenizer"] = 0 if config.model.path is None else tokenizer_bytes(spec.vocab_size)
    items["process"] = process_bytes(facts.kind)
    return items


def _packing(asked: Asked, items: Mapping[str, int], budget: int) -> dict[str, int]:
    """Return what packing takes, if a load has no room for it where steps and KV will be."""
    later = items["activations"] + items["logits"]
    more, room = asked.packing_bytes - later, budget - sum(items.values())
    return {"packing": more} if more > max(0, room) else {}


def asked_tier(asked: Asked, offloaded_bytes: int) -> HostTierSizes:
    """Return the host tier that is asked for, beside so many bytes of weights in host memory."""
    facts, size = asked.facts, DTYPE_BYTES[asked.dtype]
    again = tuple(count for count in _captured_decodes(asked) if count <= HOST_DECODES)
    return host_tier_sizes(
        asked.config.kv,
        asked.spec,
        asked.kv,
        moved_bytes=_swap_weights_bytes(asked, offloaded_bytes),
        graph_bytes=captured_bytes(asked.spec, facts.kind, again, (), size)[1],
        dma_run_bytes=dma_run_bytes(asked.rates),
        can_pin=facts.can_pin,
        can_uva=facts.can_uva,
    )


def _captured_decodes(asked: Asked) -> tuple[int, ...]:
    """Decode batches that run as graphs where memory can be pinned; on a CPU none."""
    is_eager = asked.config.engine.enforce_eager or asked.reference
    return () if is_eager else asked.graph_sizes


def step_blocks(kv: KVSizes) -> int:
    """Return the blocks of the first group that the tokens of one step take, of one sequence."""
    return kv.blocks(min(kv.max_model_len, kv.step_tokens))[0]


def has_kv_room(plan: MemoryPlan) -> bool:
    """Whether what is chosen leaves room for KV.

    One sequence of max_model_len over both tiers, and on the GPU its tokens of one step: all that
    it has would else be read over the link.
    """
    least = min(plan.kv.blocks(plan.max_model_len)[0], step_blocks(plan.kv))
    return plan.holds_one and plan.num_gpu_blocks >= least


def takes_swap_space(asked: Asked) -> bool:
    """Whether weights that do not fit go to kv.swap_space: where nothing else places them."""
    is_placed = asked.config.offload.backend != "none" or asked.config.planner.choose
    return asked.config.kv.swap_space > 0 and not is_placed and not asked.reference


def _swap_weights_bytes(asked: Asked, offloaded_bytes: int) -> int:
    return offloaded_bytes if takes_swap_space(asked) else 0


def _tier_notes(asked: Asked, tier: HostTierSizes) -> list[str]:
    """Say where host blocks are not what one would expect of them."""
    facts, notes = asked.facts, []
    if tier.num_blocks and not facts.can_pin:
        notes.append(
            f"fallback: KV blocks in host memory are pageable ({facts.reason}): they are reached "
            "by staged copies, and no sequence exceeds the GPU's room."
        )
    elif tier.num_blocks and not facts.can_uva:
        notes.append(
            f"fallback: KV blocks in host memory are not read in place ({facts.reason}): no "
            "sequence exceeds the GPU's room."
        )
    if facts.can_pin and tier.num_pageable:
        notes.append(
            f"kv.pin_limit_gib={asked.config.kv.pin_limit_gib:g}: {tier.num_pinned} KV blocks in "
            f"host memory are pinned; {tier.num_pageable} are pageable, and reached by staged "
            "copies only."
        )
    return notes


def _longest_tokens(tier: HostTierSizes, kv: KVSizes, room: int, limit: int) -> int:
    """The longest sequence over both tiers, no longer than the model's positions."""
    on_gpu = kv.longest(room, 0, limit)
    if on_gpu == limit or not tier.reach:
        return on_gpu
    return max(on_gpu, kv.longest(room - tier.in_place_bytes(room), tier.reach, limit))


def _slots(
    asked: Asked, layout: WeightLayout, assignment: Assignment, *, by_format: bool
) -> tuple[tuple[Slots, ...], int, int | None]:
    """Return the slots of units, bytes of the outer scratch, and the staging threshold."""
    units: dict[Residence, list[Unit]] = {}
    for layer in layout.layers:
        for unit in layer.units:
            if unit.residence is not CACHED:  # whose banks are planned apart
                units.setdefault(unit.residence, []).append(unit)
    outer = [
        align(asked.formats.num_bytes(tensor))
        for tensor in layout.outer_offloaded.tensors
        if not assignment.placements[tensor.name].reads_in_place
    ]
    direct = [x.slab for kind, found in units.items() if kind.reads_in_place for x in found]
    stage = asked.stage_tokens(direct if by_format else ()) if direct else None
    slots = tuple(
        Slots(
            kind,
            kind.num_slots(len(found), lookahead=assignment.lookahead, stages=stage is not None),
            max(unit.slab.num_bytes for unit in found),
            kind.wraps(always_staged=stage == 1),
        )
        for kind, found in units.items()
    )
    return slots, max(outer, default=0), stage
