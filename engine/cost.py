"""Predicted times of a plan: decode steps, prefill, first token, load.

The model: a layer takes the longer of its bytes over the memory's rate and its operations over the
matrix rate, or both where it has more rows than MAX_SMALL_TOKENS, and a fixed overhead; copies of
offloaded layers run beside, in the order of the slot ring; what is read in place is waited for.
Without graphs the host launches one layer after another, ahead of the device.
Constants: engine.rates. Pure arithmetic, no torch.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

from engine.cost_ring import ring_s
from engine.kv_sizes import KVSizes
from engine.placement import Placement
from engine.plan import MemoryPlan
from engine.rates import (
    CPU_START_S,
    IN_PLACE_TILE_ROWS,
    KV_SHARE,
    PACKED_READS,
    START_S,
    WEIGHT_SHARE,
    Rates,
)
from engine.sizes import padded_prefill
from engine.spec import DTYPE_BYTES, ModelSpec
from kernels.sizes import MAX_SMALL_TOKENS

CONTEXT_TOKENS: Final = 256
"""Context of the sequences in predicted decode steps (less where max_model_len is)."""
PREFILL_TOKENS: Final = 2048
"""Prompt of the predicted prefill (less where max_model_len is)."""
EMBED: Final = "model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the times of a plan depend on; bytes are those of the plan's dtype."""

    resident_bytes: tuple[int, ...]
    """Of each layer, in GPU memory."""
    offloaded_bytes: tuple[int, ...]
    """Of each layer, in host memory."""
    placement: Placement
    """Of the offloaded layers."""
    num_slots: int
    stage_tokens: int | None
    head_bytes: int
    """Outside the layers, read from GPU memory by every step."""
    head_in_place_bytes: int
    """Outside the layers, read in place from host memory by every step."""
    outer_copied_bytes: int
    """Outside the layers, copied on demand by every step."""
    embed_row_bytes: int
    """Read in place from host memory for each token; 0 where the table is in GPU memory."""
    layer_params: int
    head_params: int
    q_size: int
    kv_layer_bytes: int
    """Keys and values of one token in one layer."""
    kv_limits: tuple[int, ...]
    """Most tokens that each layer attends to."""
    is_float32: bool
    is_pinned: bool
    uses_graphs: bool
    captured_prefills: tuple[tuple[int, int], ...]
    """Steps with prompts that run as graphs: most decodes and most tokens of prompts of each."""
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int
    kv: KVSizes
    in_place_layers: tuple[bool, ...] = ()
    """Which layers are of the first group."""
    pinned_kv_bytes: int = 0
    reads_files: bool = True
    """Weights come from files."""

    @property
    def total_offloaded_bytes(self) -> int:
        """Bytes of offloaded layers."""
        return sum(self.offloaded_bytes)

    def concurrency(self, tokens: float) -> int:
        """Sequences of that many tokens that run at once, at least 1."""
        need = self.kv.blocks(max(1, math.ceil(tokens)))
        held = min(count // each for count, each in zip(self.kv.pools, need, strict=True))
        return max(1, min(self.max_num_seqs, held))

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV that the GPU holds, in layers of the first group."""
        return self.kv.pools[0] * self.block_size

    @property
    def in_place_blocks(self) -> int:
        """Blocks of the first group in host memory, where one sequence reads and writes them."""
        return self.kv.groups[0].num_in_place

    def beyond_gpu(self, tokens: float) -> float:
        """Of so many tokens of one layer of the first group, those that lie in host memory."""
        return min(self.in_place_blocks * self.block_size, max(0.0, tokens - self.kv_tokens))


def shape_of(plan: MemoryPlan, spec: ModelSpec) -> Shape:
    """Return what the times of a plan depend on."""
    size = DTYPE_BYTES[plan.dtype]
    kinds = {layer.placement for layer in plan.offloaded_layers}
    outer = {t.name: t.numel * size for t in spec.outer_tensors()}
    places = plan.placements
    read = [name for name in outer if spec.tie_word_embeddings or name != EMBED]
    return Shape(
        resident_bytes=tuple(layer.resident.num_bytes for layer in plan.layers),
        offloaded_bytes=tuple(layer.offloaded.num_bytes for layer in plan.layers),
        placement=kinds.pop() if kinds else Placement.RESIDENT,
        num_slots=plan.num_slots,
        stage_tokens=plan.stage_tokens,
        head_bytes=sum(outer[n] for n in read if places[n] is not Placement.UVA),
        head_in_place_bytes=sum(outer[n] for n in read if places[n] is Placement.UVA),
        outer_copied_bytes=sum(outer[n] for n in outer if places[n] is Placement.ON_DEMAND),
        embed_row_bytes=spec.hidden_size * size if places[EMBED] is Placement.UVA else 0,
        layer_params=sum(t.numel for t in spec.layer_tensors(0)),
        head_params=spec.vocab_size * spec.hidden_size,
        q_size=spec.q_size,
        kv_layer_bytes=2 * spec.kv_size * size,
        kv_limits=_kv_limits(plan),
        is_float32=size == 4,
        is_pinned=plan.pin,
        uses_graphs=plan.use_graphs,
        captured_prefills=plan.captured_prefills,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_num_seqs=plan.max_num_seqs,
        max_model_len=plan.max_model_len,
        block_size=plan.block_size,
        kv=plan.kv,
        in_place_layers=_in_first_group(plan),
        pinned_kv_bytes=plan.host_items.get("pinned_kv", 0),
        reads_files=plan.reads_files,
    )


def _in_first_group(plan: MemoryPlan) -> tuple[bool, ...]:
    first = set(plan.kv.groups[0].layers)
    return tuple(layer.index in first for layer in plan.layers)


def _kv_limits(plan: MemoryPlan) -> tuple[int, ...]:
    limits = [plan.max_model_len] * len(plan.layers)
    for group in plan.kv.groups:
        for layer in group.layers:
            limits[layer] = group.window or plan.max_model_len
    return tuple(limits)


def step_s(
    shape: Shape,
    rates: Rates,
    *,
    decodes: int = 0,
    context: float = 0,
    prefill: int = 0,
    before: int = 0,
    rows: int | None = None,
) -> float:
    """Return the time of one step.

    Args:
        shape: Of the plan.
        rates: Of the machine.
        decodes: Sequences that decode one token.
        context: Tokens of each.
        prefill: Tokens of prompts.
        before: Tokens of the same prompt that earlier steps computed.
        rows: Prompts among the prefill tokens; each gives one row of logits (default 1, or 0).
    """
    graphed, tokens, sequences = (
        shape.uses_graphs,
        decodes + prefill,
        decodes + (rows or min(1, prefill)),
    )
    if prefill:
        padded = padded_prefill(shape.captured_prefills, decodes, prefill, rows or 1)
        graphed = padded is not None
        prefill, tokens = (padded[1], sum(padded)) if padded else (prefill, tokens)
    flops = 2.0 * tokens * shape.layer_params
    matrix_rate = _matrix_rate(shape, rates)
    seen = before + prefill / (2 * max(1, rows or 1))
    hbm_rate, place_rate = rates.hbm_gb_s * 1e9, rates.in_place_gb_s * 1e9
    in_place = _reads_in_place(shape, tokens)
    tiles, reads = math.ceil(tokens / IN_PLACE_TILE_ROWS), _reads(shape, rates, tokens)
    is_long = shape.in_place_blocks > 0 and max(1, rows or 1) == 1
    # Products of few rows read while they compute; those of libraries hide little of their reads.
    is_small = tokens <= MAX_SMALL_TOKENS and not rates.is_cpu
    both: Callable[[float, float], float] = max if is_small else operator.add

    @cache
    def layer_s(resident: int, offloaded: int, limit: int, is_first: bool) -> tuple[float, float]:
        """The time of a layer, and of it what KV in host memory holds the link."""
        attention_s = 4.0 * shape.q_size * prefill * min(seen, limit) / matrix_rate
        kv_tokens = decodes * min(context, limit)
        far = staged = 0.0
        if is_long and is_first:
            far = shape.beyond_gpu(kv_tokens) if decodes else 0.0
            staged = shape.beyond_gpu(min(before + prefill, limit)) if prefill else 0.0
        kv_s = (kv_tokens - far) * shape.kv_layer_bytes / (KV_SHARE * hbm_rate)
        far_s, staged_s = (count * shape.kv_layer_bytes / place_rate for count in (far, staged))
        from_gpu = resident if in_place else resident + offloaded
        read = reads * from_gpu / (WEIGHT_SHARE * hbm_rate)
        read += reads * offloaded * tiles / place_rate if in_place else 0.0
        seconds = both(read, flops / matrix_rate + attention_s) + kv_s + rates.layer_overhead_s
        seconds += sequences * rates.sequence_overhead_s
        seconds += far_s + max(0.0, staged_s - attention_s)  # staged beside attention
        return seconds, far_s + staged_s

    kinds = zip(
        shape.resident_bytes,
        shape.offloaded_bytes,
        shape.kv_limits,
        shape.in_place_layers,
        strict=True,
    )
    times = [layer_s(*kind) for kind in kinds]
    compute, kv_link_s = [seconds for seconds, _ in times], sum(held for _, held in times)
    after = _outside_s(shape, rates, tokens, sequences)
    launch_s = 0.0 if graphed else rates.eager_layer_overhead_s
    seconds = _run(
        shape, rates, compute, after, in_place=in_place, kv_link_s=kv_link_s, launch_s=launch_s
    )
    return seconds + rates.step_overhead_s


def _run(
    shape: Shape,
    rates: Rates,
    compute: list[float],
    after_s: float,
    *,
    in_place: bool,
    kv_link_s: float,
    launch_s: float,
) -> float:
    """Layers, copies and launches together."""
    alone = [0.0] * len(compute)
    if in_place or shape.placement is Placement.RESIDENT:
        return ring_s(compute, alone, 1, wrap=False, after_s=after_s, launch_s=launch_s)
    link = (rates.h2d_gb_s if shape.is_pinned else rates.pageable_gb_s) * 1e9
    sizes, overhead = shape.offloaded_bytes, rates.copy_overhead_s
    copies = [size / link + overhead if size else 0.0 for size in sizes]
    if shape.placement is Placement.ON_DEMAND:
        if not shape.is_pinned:  # the host waits for each copy, and launches nothing meanwhile
            compute, launch_s = [max(seconds, launch_s) for seconds in compute], 0.0
        one_stream = list(map(operator.add, compute, copies))
        return ring_s(one_stream, alone, 1, wrap=False, after_s=after_s, launch_s=launch_s)
    wrap, slots = shape.placement is Placement.PREFETCH, shape.num_slots
    moved = [seconds for seconds in copies if seconds]
    # A layer that has a slot to itself stays there.
    streamed = sum(s for k, s in enumerate(moved) if k % slots + slots < len(moved))
    if rates.is_cpu:
        return sum(compute) + streamed + after_s
    seconds = ring_s(compute, copies, slots, wrap=wrap, after_s=after_s, launch_s=launch_s)
    # The link carries all of it, one after the other.
    shared = shape.head_in_place_bytes / (rates.in_place_gb_s * 1e9) + kv_link_s
    return max(seconds, streamed + shared) if shared else seconds


def _reads_in_place(shape: Shape, tokens: int) -> bool:
    staged = shape.stage_tokens is not None and tokens >= shape.stage_tokens
    return shape.placement is Placement.UVA and not staged


def _reads(shape: Shape, rates: Rates, rows: int) -> float:
    """How many reads of its weight a product of so many rows takes as long as."""
    return PACKED_READS if rates.is_cpu and shape.is_float32 and rows > 1 else 1.0


def _matrix_rate(shape: Shape, rates: Rates) -> float:
    return 1e12 * (rates.float32_tflops if shape.is_float32 else rates.bf16_tflops)


def _outside_s(shape: Shape, rates: Rates, tokens: int, rows: int) -> float:
    """Embedding and logits."""
    reads = _reads(shape, rates, rows)
    read = reads * shape.head_bytes / (WEIGHT_SHARE * rates.hbm_gb_s * 1e9)
    link = (rates.h2d_gb_s if shape.is_pinned else rates.pageable_gb_s) * 1e9
    embed = shape.embed_row_bytes * tokens / (rates.in_place_gb_s * 1e9)
    head = reads * shape.head_in_place_bytes / (rates.in_place_gb_s * 1e9)
    flops = 2.0 * rows * shape.head_params / _matrix_rate(shape, rates)
    return max(read + head, flops) + embed + shape.outer_copied_bytes / link


def decode_step_s(shape: Shape, rates: Rates, batch: int, context: float) -> float:
    """Return the time of a step in which `batch` sequences of `context` tokens decode one token."""
    return step_s(shape, rates, decodes=batch, context=context)


def prefill_s(shape: Shape, rates: Rates, tokens: int, prompts: int = 1) -> float:
    """Return the time until `prompts` prompts of `tokens` tokens each are computed.

    A step takes max_num_batched_tokens tokens, one of each prompt that is complete among them.
    """
    seconds, complete, at = 0.0, 0, 0
    while complete < prompts:
        room = max(1, shape.max_num_batched_tokens - complete)
        rows, part, before = 0, 0, at
        while room and complete + rows < prompts:
            taken = min(room, tokens - at)
            part, room, at = part + taken, room - taken, at + taken
            if at == tokens:
                rows, at = rows + 1, 0
        seconds += step_s(
            shape,
            rates,
            decodes=complete,
            context=tokens,
            prefill=part,
            before=before if part < tokens else 0,
            rows=max(1, rows),
        )
        complete += rows
    return seconds


def first_token_s(shape: Shape, rates: Rates, tokens: int) -> float:
    """Return the time until the first token of a prompt that comes alone is there.

    It is collected once the next step is launched, which on a CPU is to run it.
    """
    seconds = prefill_s(shape, rates, tokens)
    return seconds + (decode_step_s(shape, rates, 1, tokens) if rates.is_cpu else 0.0)


def load_s(shape: Shape, rates: Rates) -> float:
    """Return the time from the start of a process until all weights are in their places."""
    layers = sum(shape.resident_bytes) + shape.total_offloaded_bytes
    total = layers + shape.head_bytes + shape.head_in_place_bytes
    pinned = shape.total_offloaded_bytes + shape.head_in_place_bytes if shape.is_pinned else 0
    pinned += shape.pinned_kv_bytes
    read_s = total / (rates.file_read_gb_s * 1e9) if shape.reads_files else 0.0
    start_s = CPU_START_S if rates.is_cpu else START_S
    return start_s + read_s + pinned / (rates.pin_gb_s * 1e9)
