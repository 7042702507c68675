"""Predicted times of steps, prompts and loads."""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

from engine.model.formats import EMBEDDING, align
from engine.model.spec import DTYPE_BYTES, ModelSpec
from engine.plan.experts import ExpertLayer
from engine.plan.memory import MemoryPlan
from engine.plan.rates import IN_PLACE_TILE_ROWS, Rates
from engine.plan.sizes import NUM_STAGES, padded_prefill
from engine.plan.units import RESIDENT, Feed, Residence, Slots, moving
from engine.plan.weight_times import NONE_PACKED, WEIGHT_SHARE, Packed, packed_s
from kernels.sizes import DECODE_SPLIT_TOKENS, MAX_SMALL_TOKENS

LEAST_ROW_BYTES: Final = 2**16
"""Shorter rows are copied no sooner than read in place: decode steps copied 32 KiB rows at 47.5 and
64 KiB rows at 54.4 GB/s, reads in place reach 50.6 (H200, docs/performance.md, 131,072 tokens)."""
KV_SHARE: Final = 0.60
"""Decode attention and what else grows with the batch, KV bytes over the copy rate (H100)."""
ATTENTION_SHARE: Final = 0.5
"""Attention of prompts, its operations over the rate of products: 0.5 for 32 tokens and 0.4 for 200
behind 32,000 to 100,000, a prompt of 8,192 in 235 ms (llama31_8b, H200)."""
PROMPT_OVERHEAD_S: Final = 18e-6
"""Prompts of few tokens, beside their keys: attention in parts and the sum of the parts (this and
the next: a layer of llama31_8b with 16 to 56 tokens beside 8 decodes, H200)."""
PROMPT_ROW_SHARE: Final = 0.0045
"""What each token of a prompt adds to the reads of products of few rows."""
PIECE_LAUNCHES: Final = 0.4
"""Launches of one piece of host blocks that is copied ahead, over those of one layer: 0.19 ms,
measured where a layer took 0.73 (llama31_8b, H200), over the 0.48 that a layer is taken to need
since its launches became cheaper."""
PACKED_READS: Final = 3.0
"""Reads of a float32 weight that a CPU's product of several rows takes beside its operations, as it
lays the weight out anew: 2.5 to 4 for 2 to 16 rows (two cores)."""
START_S: Final = 8.0
"""Start of a process, warm-up and captures: 6.5 to 9.4 s (qwen3_4b, dummy weights, H200s)."""
CPU_START_S: Final = 4.5
"""The same without a GPU: 4.8 s with 0.25 GiB of weights to read (smollm2_135m, two cores)."""

CONTEXT_TOKENS: Final = 256
"""Context of the sequences in predicted decode steps (less where max_model_len is)."""
PREFILL_TOKENS: Final = 2048
"""Prompt of the predicted prefill (less where max_model_len is)."""


@dataclass(frozen=True)
class Moved:
    """Bytes of layers that have one residence in host memory."""

    residence: Residence
    sizes: tuple[int, ...]
    """Bytes in each layer; 0: none."""
    num_slots: int
    wraps: bool


LayerBytes = Mapping[Residence, Sequence[tuple[int, Packed]]]
"""Bytes that products read of each layer, and those of them that they restore, by residence."""


def held_bytes(plan: MemoryPlan, *, of_experts: bool) -> LayerBytes:
    """Return the bytes of each layer by residence: of experts, or of all but them."""
    found: dict[Residence, list[tuple[int, Packed]]] = {}
    for layer in plan.layers:
        slabs = [(RESIDENT, layer.resident), *((unit.residence, unit.slab) for unit in layer.units)]
        for residence, slab in slabs:
            experts = [tensor for tensor in slab.tensors if tensor.num_experts]
            size = sum(align(plan.formats.num_bytes(tensor)) for tensor in experts)
            chosen = experts
            if not of_experts:
                size = slab.num_bytes - size
                chosen = [tensor for tensor in slab.tensors if not tensor.num_experts]
            if residence not in found:
                found[residence] = [(0, NONE_PACKED)] * len(plan.layers)
            found[residence][layer.index] = size, Packed.among(chosen, plan.formats)
    return found


def moved_by(plan: MemoryPlan, slots: Slots) -> Moved:
    """Return the bytes of each layer that are copied into some slots."""
    sizes = [0] * len(plan.layers)
    for layer in plan.layers:
        for unit in layer.units:
            if unit.residence is slots.residence:
                sizes[layer.index] = unit.slab.num_bytes
    return Moved(slots.residence, tuple(sizes), slots.count, slots.wraps)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the times of a plan depend on beside the plan; bytes are those of its formats."""

    plan: MemoryPlan
    rates: Rates
    """Of the machine."""
    moved: tuple[Moved, ...]
    """What lies in host memory, by residence."""
    dense: LayerBytes
    """Of each layer by where it lies, without experts: what products read."""
    expert: LayerBytes
    """The same of experts, all of them; empty for a dense model."""
    head_bytes: int
    """Outside the layers, read from GPU memory by every step."""
    head_packed: Packed
    """Of what every step reads outside the layers, wherever it lies, what products restore."""
    head_in_place_bytes: int
    """Outside the layers, read in place from host memory by every step."""
    outer_copied_bytes: int
    """Outside the layers, copied on demand by every step."""
    embed_row_bytes: int
    """Read in place from host memory for each token; 0 where the table is in GPU memory."""
    layer_params: tuple[float, ...]
    """Of each layer, those that a token is multiplied with."""
    head_params: int
    q_size: int
    kv_layer_bytes: int
    """Keys and values of one token in one layer."""
    kv_limits: tuple[int, ...]
    """Most tokens that each layer attends to."""

    @property
    def is_float32(self) -> bool:
        """Whether products take float32."""
        return self.plan.dtype == "float32"

    @property
    def matrix_rate(self) -> float:
        """Operations per second of products of many rows."""
        return 1e12 * (self.rates.float32_tflops if self.is_float32 else self.rates.bf16_tflops)

    @property
    def copy_rate(self) -> float:
        """Bytes per second of copies of weights over the link."""
        return (self.rates.h2d_gb_s if self.plan.pin else self.rates.pageable_gb_s) * 1e9

    def reads(self, rows: int) -> float:
        """How many reads of its weight a product of so many rows takes as long as."""
        return PACKED_READS if self.rates.is_cpu and self.is_float32 and rows > 1 else 1.0

    @property
    def context_tokens(self) -> int:
        """Context of the sequences in predicted decode steps."""
        return min(CONTEXT_TOKENS, self.plan.max_model_len)

    @cached_property
    def known_kinds(self) -> "dict[bool, tuple[list[Kind], list[int]]]":
        """What `_kinds` found before, for steps that are staged and that are not."""
        return {}

    def beyond_gpu(self, tokens: float) -> float:
        """Return how many of so many tokens lie in host memory, in a layer of the first group."""
        in_place = self.plan.kv.groups[0].num_in_place * self.plan.block_size
        return min(in_place, max(0.0, tokens - self.plan.kv_tokens))


def shape_of(plan: MemoryPlan, spec: ModelSpec, rates: Rates) -> Shape:
    """Return what the times of a plan depend on, on a machine of such rates."""
    outer = {t.name: plan.formats.num_bytes(t) for t in spec.outer_tensors()}
    row_bytes = plan.formats[EMBEDDING].row_bytes(spec.outer_tensors()[0])
    places, formats = plan.placements, plan.formats
    read = [name for name in outer if spec.tie_word_embeddings or name != EMBEDDING]
    copied = [n for n in outer if places[n].is_offloaded and not places[n].reads_in_place]
    limits = [plan.max_model_len] * len(plan.layers)
    for group in plan.kv.groups:
        for layer in group.layers:
            limits[layer] = group.window or plan.max_model_len
    return Shape(
        plan=plan,
        rates=rates,
        moved=tuple(moved_by(plan, slots) for slots in plan.slots),
        dense=held_bytes(plan, of_experts=False),
        expert=held_bytes(plan, of_experts=True) if plan.experts else {},
        head_packed=Packed.among((t for t in spec.outer_tensors() if t.name in read), formats),
        head_bytes=sum(outer[n] for n in read if not places[n].reads_in_place),
        head_in_place_bytes=sum(outer[n] for n in read if places[n].reads_in_place),
        outer_copied_bytes=sum(outer[n] for n in copied),
        embed_row_bytes=row_bytes if places[EMBEDDING].reads_in_place else 0,
        layer_params=_layer_params(spec),
        head_params=spec.vocab_size * spec.hidden_size,
        q_size=spec.q_size,
        kv_layer_bytes=2 * spec.kv_size * DTYPE_BYTES[plan.dtype],
        kv_limits=tuple(limits),
    )


def _layer_params(spec: ModelSpec) -> tuple[float, ...]:
    """Return the parameters of each layer that a token is multiplied with."""
    share = spec.num_experts_per_tok / max(1, spec.num_experts)
    layers = map(spec.layer_tensors, range(spec.num_hidden_layers))
    return tuple(sum(t.numel * (share if t.num_experts else 1) for t in each) for each in layers)


def step_s(
    shape: Shape,
    *,
    decodes: int = 0,
    context: float = 0,
    prefill: int = 0,
    before: int = 0,
    rows: int | None = None,
) -> float:
    """Return the time of one step.

    Args:
        shape: Of plan and machine.
        decodes: Sequences that decode one token.
        context: Tokens of each.
        prefill: Tokens of prompts.
        before: Tokens of the same prompt that earlier steps computed.
        rows: Prompts among the prefill tokens; each gives one row of logits (default 1, or 0).
    """
    is_long = shape.plan.kv.groups[0].num_in_place > 0 and max(1, rows or 1) == 1
    keys = Keys(shape, decodes, context, before + prefill if prefill else 0, is_long)
    ways = [FarKeys(shape.rates.in_place_gb_s * 1e9), *copied_keys(keys)]
    return min(keys_step_s(keys, far, prefill, before, rows) for far in ways)


@dataclass(frozen=True)
class Keys:
    """Keys that one step attends to."""

    shape: Shape
    decodes: int
    context: float
    """Tokens of each decode."""
    prefilled: int
    """Tokens of a prompt once the step is done; 0: it computes none."""
    is_long: bool
    """Whether some may lie in host memory."""

    def in_layer(self, limit: int, *, is_first: bool) -> tuple[float, float, float]:
        """Return bytes of a layer: decodes' on the GPU and in host memory, and those staged."""
        tokens, far, staged = self.decodes * min(self.context, limit), 0.0, 0.0
        if self.is_long and is_first:
            far = self.shape.beyond_gpu(tokens) if self.decodes else 0.0
            staged = self.shape.beyond_gpu(min(self.prefilled, limit)) if self.prefilled else 0.0
        each = self.shape.kv_layer_bytes
        return (tokens - far) * each, far * each, staged * each


@dataclass(frozen=True)
class FarKeys:
    """How decodes get at keys in host memory."""

    bytes_s: float
    beside_s: float = 0.0
    """Time of a layer's that passes beside the layer before, at most."""
    launches: float = 0.0
    """What the host launches for a layer, over the launches of its other kernels; they are
    included, as such a step has no graph."""


def keys_step_s(
    keys: Keys, far: FarKeys, prefill: int = 0, before: int = 0, rows: int | None = None
) -> float:
    """Return the time of one step that gets at keys in host memory in one way."""
    shape, decodes = keys.shape, keys.decodes
    plan, sequences = shape.plan, decodes + (rows or min(1, prefill))
    graphed, padded, tokens = plan.is_captured(decodes), prefill, decodes + prefill
    if prefill:
        found = padded_prefill(plan.captured_prefills, decodes, prefill, rows or 1)
        graphed = found is not None
        padded, tokens = (found[1], sum(found)) if found else (prefill, tokens)
    step = _Step(keys, far, prefill, padded, before, max(1, rows or 1), tokens, sequences)
    is_staged = plan.is_staged(tokens)
    kinds, of_layers = _kinds(shape, is_staged=is_staged)
    known = [_layer_s(step, kind) for kind in kinds]
    times = [known[kind] for kind in of_layers]
    compute, kv_link_s = [seconds for seconds, _ in times], sum(held for _, held in times)
    after = _outside_s(shape, tokens, sequences)
    launch_s = (int(not graphed) + far.launches) * shape.rates.eager_layer_overhead_s
    seconds = _run(
        shape, compute, after, is_staged=is_staged, kv_link_s=kv_link_s, launch_s=launch_s
    )
    return seconds + shape.rates.step_overhead_s


class _Step(NamedTuple):
    """What a step computes."""

    keys: Keys
    far: FarKeys
    prompt_tokens: int
    prefill: int
    """The same, padded."""
    before: int
    prompts: int
    """At least 1."""
    tokens: int
    """In all, padded."""
    sequences: int
    """With rows of logits."""


def _layer_s(step: _Step, kind: "Kind") -> tuple[float, float]:
    """Return the time of a layer, and of it what KV and experts in host memory hold the link."""
    from_gpu, in_place, limit, is_first, params, experts = kind
    shape, tokens, far = step.keys.shape, step.tokens, step.far
    rates, matrix_rate = shape.rates, shape.matrix_rate
    flops, seen = 2.0 * tokens * params, step.before + step.prefill / (2 * step.prompts)
    hbm_rate, place_rate = rates.hbm_gb_s * 1e9, rates.in_place_gb_s * 1e9
    many_rate = place_rate
    if tokens > MAX_SMALL_TOKENS and not rates.is_cpu:
        many_rate = rates.in_place_many_gb_s * 1e9
    attention_s = 4.0 * shape.q_size * step.prompt_tokens * min(seen, limit) / matrix_rate
    attention_s /= 1.0 if rates.is_cpu else ATTENTION_SHARE
    near_bytes, far_bytes, staged_bytes = step.keys.in_layer(limit, is_first=is_first)
    far_s, staged_s = far_bytes / far.bytes_s, staged_bytes / place_rate
    read = shape.reads(tokens) * from_gpu.plain / (WEIGHT_SHARE * hbm_rate)
    is_small = tokens <= MAX_SMALL_TOKENS and not rates.is_cpu
    if is_small and step.prompt_tokens:
        read *= 1 + PROMPT_ROW_SHARE * step.prefill
        keys_s = step.prompts * min(seen, limit) * shape.kv_layer_bytes / hbm_rate
        attention_s = PROMPT_OVERHEAD_S + max(attention_s, keys_s)
    if in_place.plain:
        tiles = math.ceil(tokens / IN_PLACE_TILE_ROWS)
        read += shape.reads(tokens) * in_place.plain * tiles / many_rate
    restored_s, read_s = packed_s(rates, tokens, from_gpu.packed, in_place.packed)
    missed_s = 0.0
    if experts is not None:
        before_s, routed_s, missed_s = _experts_s(step, experts)
        restored_s, read_s = restored_s + before_s, read_s + routed_s
    # Products of few rows read while they compute; those of libraries hide little of their reads.
    both: Callable[[float, float], float] = max if is_small else operator.add
    seconds = both(read + read_s, flops / matrix_rate) + attention_s
    seconds += near_bytes / (KV_SHARE * hbm_rate) + restored_s + rates.layer_overhead_s
    seconds += step.sequences * rates.sequence_overhead_s + missed_s
    seconds += far_s - min(far_s, seconds, far.beside_s)
    # Staged beside attention.
    return seconds + max(0.0, staged_s - attention_s), far_s + staged_s + missed_s


def copied_keys(keys: Keys) -> Iterator[FarKeys]:
    """Yield how decodes copy host blocks ahead, in pieces, some beside the layer before, if so."""
    plan, rates = keys.shape.plan, keys.shape.rates
    host, first = plan.host_kv, plan.kv.groups[0]
    far_bytes = keys.in_layer(first.window or plan.max_model_len, is_first=True)[1]
    run_bytes = copied_run_bytes(keys.shape)
    if not far_bytes or keys.prefilled or host is None or run_bytes is None:
        return
    if far_bytes >= run_bytes:
        stage_bytes = host.stage_blocks * first.layer_bytes
        bytes_s, num_pieces = rates.rows_gb_s * 1e9, math.ceil(far_bytes / stage_bytes)
        launches = plan.use_graphs + num_pieces * PIECE_LAUNCHES
        yield FarKeys(bytes_s, min(far_bytes, NUM_STAGES * stage_bytes) / bytes_s, launches)


def copied_run_bytes(shape: Shape) -> int | None:
    """Return the bytes of a run of host blocks whose copy takes as long as reading it in place.

    None: no copy is sooner, no stage buffer holds a split of keys, or the layers have a window,
    with which keys are not attended to part by part.
    """
    plan, rates = shape.plan, shape.rates
    gain_s, first = 1e-9 / rates.in_place_gb_s - 1e-9 / rates.rows_gb_s, plan.kv.groups[0]
    if rates.is_cpu or gain_s <= 0 or not first.num_in_place or plan.host_kv is None:
        return None
    if first.window is not None:
        return None
    is_split_held = plan.host_kv.stage_blocks * plan.block_size >= DECODE_SPLIT_TOKENS
    if first.layer_bytes < LEAST_ROW_BYTES or not is_split_held:
        return None
    return math.ceil(rates.rows_overhead_s / gain_s)


def _run(
    shape: Shape,
    compute: list[float],
    after_s: float,
    *,
    is_staged: bool,
    kv_link_s: float,
    launch_s: float,
) -> float:
    """Layers, copies and launches together; copies ahead of several residences share a ring."""
    rates, alone = shape.rates, [0.0] * len(compute)
    ahead: list[tuple[Moved, list[float]]] = []
    for found in shape.moved:
        feed = found.residence.feed(is_staged=is_staged)
        if feed is Feed.DIRECT:
            continue
        link, more = shape.copy_rate, rates.copy_overhead_s
        copies = [size / link + more if size else 0.0 for size in found.sizes]
        if feed is Feed.AHEAD:
            ahead.append((found, copies))
            continue
        if not shape.plan.pin:  # the host waits for each copy, and launches nothing meanwhile
            compute, launch_s = [max(seconds, launch_s) for seconds in compute], 0.0
        compute = list(map(operator.add, compute, copies))
    if not ahead:
        return ring_s(compute, alone, 1, wrap=False, after_s=after_s, launch_s=launch_s)
    streamed = sum(sum(moving(list(filter(None, c)), m.num_slots)) for m, c in ahead)
    if rates.is_cpu:
        return sum(compute) + streamed + after_s
    copies = [sum(seconds) for seconds in zip(*(copies for _, copies in ahead), strict=True)]
    slots = min(found.num_slots for found, _ in ahead)
    wrap = all(found.wraps for found, _ in ahead)
    seconds = ring_s(compute, copies, slots, wrap=wrap, after_s=after_s, launch_s=launch_s)
    # The link carries all of it, one after the other.
    shared = shape.head_in_place_bytes / (rates.in_place_gb_s * 1e9) + kv_link_s
    return max(seconds, streamed + shared) if shared else seconds


class Read(NamedTuple):
    """Bytes that the products of a layer read from one memory."""

    plain: int
    packed: Packed


class ExpertReads(NamedTuple):
    """What a layer's products read of its experts, were it all of them."""

    here: Read
    """From GPU memory, slots among it."""
    there: Read
    """In place from host memory."""
    layer: ExpertLayer


class Kind(NamedTuple):
    """What layers that take equally long have in common."""

    from_gpu: Read
    in_place: Read
    limit: int
    """Most tokens that it attends to."""
    is_first: bool
    """It is of the first group of KV."""
    params: float
    """That a token is multiplied with."""
    experts: ExpertReads | None
    """None: it has none. The other fields are without them."""


def _kinds(shape: Shape, *, is_staged: bool) -> tuple[list[Kind], list[int]]:
    """Return the layers that differ, and which of them each layer is like."""
    if is_staged not in shape.known_kinds:
        first, layers = set(shape.plan.kv.groups[0].layers), range(len(shape.plan.layers))
        dense = _read_bytes(shape, shape.dense, is_staged=is_staged)
        routed = _read_bytes(shape, shape.expert, is_staged=is_staged) if shape.expert else None
        found = {} if shape.plan.experts is None else shape.plan.experts.by_index
        kinds = [
            Kind(
                *dense[index],
                shape.kv_limits[index],
                index in first,
                shape.layer_params[index],
                None
                if routed is None or index not in found
                else ExpertReads(*routed[index], replace(found[index], index=0)),
            )
            for index in layers
        ]
        known = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        shape.known_kinds[is_staged] = list(known), [known[kind] for kind in kinds]
    return shape.known_kinds[is_staged]


def _read_bytes(shape: Shape, held: LayerBytes, *, is_staged: bool) -> list[tuple[Read, Read]]:
    """Return the bytes of each layer that products read from GPU memory, and in place."""
    empty = [(0, NONE_PACKED)] * len(shape.plan.layers)
    totals = {True: list(empty), False: list(empty)}
    for residence, sizes in held.items():
        is_direct = residence.feed(is_staged=is_staged) is Feed.DIRECT
        target = totals[is_direct and residence.is_offloaded]
        for layer, (size, more) in enumerate(sizes):
            if size:
                target[layer] = target[layer][0] + size, target[layer][1] + more
    here, there = (
        [Read(size - held.stored, held) for size, held in totals[is_there]]
        for is_there in (False, True)
    )
    return list(zip(here, there, strict=True))


EXPERTS_SHARES: Final = ((16, 0.95, 0.80), (64, 0.75, 0.65))
"""Tokens of a grouped product at most, its bytes of plain experts read over the copy rate of HBM,
and its rate for codes and quantised experts over that of a dense product (H200, 30B-A3B)."""
MANY_EXPERTS_SHARE: Final = 0.65
"""The former for more tokens, whose rate for codes is that of a dense product. Assumed."""
EXPERTS_OVERHEAD_S: Final = 10e-6
"""Router, choice and grouped products of one layer, beside their bytes (H200, 30B-A3B)."""
CLAIM_OVERHEAD_S: Final = 8e-6
"""Claims and copies of a layer's bank in which nothing is missing (H200, 30B-A3B)."""
PART_OVERHEAD_S: Final = 15e-6
"""Claims, copies and products of one more part of a step in a layer. Assumed."""


def _experts_s(step: _Step, experts: ExpertReads) -> tuple[float, float, float]:
    """Return seconds of experts: before the products, of their reads, and of copies on a miss."""
    shape, (here, there, layer) = step.keys.shape, experts
    plan, rates = shape.plan.experts, shape.rates
    assert plan is not None
    decodes = step.keys.decodes
    num_tokens = decodes + step.prompt_tokens  # padding is routed nowhere
    num_sequences = decodes + step.prompts * bool(step.prompt_tokens)
    distinct = plan.distinct(num_tokens)
    share = distinct / plan.num_experts
    each = max(1.0, num_tokens * plan.top_k / max(1.0, distinct))
    place_rate = rates.in_place_gb_s * 1e9
    shares = (found for most, *found in EXPERTS_SHARES if num_tokens <= most)
    plain_share, packed_share = next(shares, (MANY_EXPERTS_SHARE, 1.0))
    read_s = share * here.plain / (plain_share * rates.hbm_gb_s * 1e9)
    read_s += share * there.plain * math.ceil(each / IN_PLACE_TILE_ROWS) / place_rate
    before_s, restored_s = packed_s(
        rates, num_tokens, here.packed.share(share), there.packed.share(share)
    )
    missed_s = 0.0
    if layer.num_slots:
        missed = plan.missed(layer.num_slots, num_tokens, num_sequences)
        missed_s = missed * layer.cached_bytes / place_rate
        before_s += (plan.num_parts(layer.num_slots, num_tokens) - 1) * PART_OVERHEAD_S
        before_s += 0.0 if rates.is_cpu else CLAIM_OVERHEAD_S
    if not rates.is_cpu:
        before_s += EXPERTS_OVERHEAD_S
    return before_s, read_s + restored_s / packed_share, missed_s


def _outside_s(shape: Shape, tokens: int, rows: int) -> float:
    """Embedding and logits."""
    rates, reads, packed = shape.rates, shape.reads(rows), shape.head_packed
    is_here = packed.stored <= shape.head_bytes
    restored_s, read_s = packed_s(rates, rows, *((packed,) if is_here else (NONE_PACKED, packed)))
    here, there = shape.head_bytes, shape.head_in_place_bytes
    here, there = (here - packed.stored, there) if is_here else (here, there - packed.stored)
    read = reads * here / (WEIGHT_SHARE * rates.hbm_gb_s * 1e9) + read_s
    embed = shape.embed_row_bytes * tokens / (rates.in_place_gb_s * 1e9)
    head = reads * there / (rates.in_place_gb_s * 1e9)
    flops = 2.0 * rows * shape.head_params / shape.matrix_rate
    return max(read + head, flops) + restored_s + embed + shape.outer_copied_bytes / shape.copy_rate


def decode_step_s(shape: Shape, batch: int, context: float) -> float:
    """Return the time of a step in which `batch` sequences of `context` tokens decode one token."""
    return step_s(shape, decodes=batch, context=context)


def prefill_s(shape: Shape, tokens: int, prompts: int = 1) -> float:
    """Return the time until `prompts` prompts of `tokens` tokens each are computed.

    A step takes max_num_batched_tokens tokens, one of each prompt that is complete among them.
    """
    seconds, complete, at = 0.0, 0, 0
    while complete < prompts:
        room = max(1, shape.plan.max_num_batched_tokens - complete)
        rows, part, before = 0, 0, at
        while room and complete + rows < prompts:
            taken = min(room, tokens - at)
            part, room, at = part + taken, room - taken, at + taken
            if at == tokens:
                rows, at = rows + 1, 0
        seconds += step_s(
            shape,
            decodes=complete,
            context=tokens,
            prefill=part,
            before=before if part < tokens else 0,
            rows=max(1, rows),
        )
        complete += rows
    return seconds


def load_s(shape: Shape) -> float:
    """Return the time from the start of a process until all weights are in their places."""
    plan, rates = shape.plan, shape.rates
    in_host, total = shape.head_in_place_bytes, shape.head_bytes
    total, packed = total + in_host, shape.head_packed
    for held in (shape.dense, shape.expert):
        for residence, layers in held.items():
            size = sum(each for each, _ in layers)
            total, packed = total + size, sum((more for _, more in layers), packed)
            in_host += size if residence.is_offloaded else 0
    total += packed.plain - packed.stored  # files are read as they are
    if plan.quantize is None:  # in which they are quantised already
        total -= packed.quantised_plain - packed.quantised
    pinned = (in_host if plan.pin else 0) + plan.host_items.get("pinned_kv", 0)
    read_s = total / (rates.file_read_gb_s * 1e9) if plan.reads_files else 0.0
    start_s = CPU_START_S if rates.is_cpu else START_S
    return start_s + read_s + pinned / (rates.pin_gb_s * 1e9)


def ring_s(
    compute_s: Sequence[float],
    copy_s: Sequence[float],
    num_slots: int,
    *,
    wrap: bool,
    after_s: float = 0.0,
    launch_s: float = 0.0,
) -> float:
    """Return the time of one step of the slot ring, exactly as engine.weights.residence runs it.

    Copies run one after another. Offloaded layer k waits for its copy; when it is done its slot is
    refilled with layer k + S, or, with `wrap`, after the last of that chain with its first. At the
    end of the step all copies are joined, so every step is like the one before.

    Args:
        compute_s: Seconds of compute of each layer.
        copy_s: Seconds of copies of each layer; 0 for those that are not offloaded.
        num_slots: S, at least 1.
        wrap: The first S layers lie in their slots when the step begins.
        after_s: Work after the last layer, beside which copies run on.
        launch_s: What the host takes to launch one layer. It runs ahead of the device from the
            beginning of the step, and the device can begin no layer that is not launched.
    """
    order = [index for index, seconds in enumerate(copy_s) if seconds > 0]
    count = len(order)
    held = list(range(min(num_slots, count)))
    ready, copied_at, now = [0.0] * len(held), 0.0, 0.0
    if not wrap:
        for slot in held:
            if slot + len(held) < count:  # else the slot has held its only layer since long
                copied_at += copy_s[order[slot]]
                ready[slot] = copied_at
    k = 0
    for index, seconds in enumerate(compute_s):
        now = max(now, (index + 1) * launch_s)
        if k == count or order[k] != index:
            now += seconds
            continue
        slot = k % len(held)
        now = max(now, ready[slot]) + seconds
        following = k + len(held)
        if following >= count:
            following = slot if wrap else k
        if held[slot] != following:
            copied_at = max(copied_at, now) + copy_s[order[following]]
            ready[slot], held[slot] = copied_at, following
        k += 1
    return max(now + after_s, copied_at)
