"""Bytes beside weights: KV cache, host tier of it, tensors of a step, graphs, runtime, buffers."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Final

from engine.asked.config import EngineConfig, EngineSettings
from engine.asked.kv import KVConfig
from engine.asked.sampling import penalty_tokens, sampler_workspace_bytes
from engine.errors import ConfigError
from engine.model.formats import EMBEDDING, HEAD, TensorFormats, TensorSpec, align
from engine.model.routing import TABLE_ROWS, expert_sizes, is_replaced
from engine.model.spec import ModelSpec
from engine.sealed import GIB, MIB
from kernels.sizes import (
    MAX_SMALL_TOKENS,
    PREFILL_PART_KEYS,
    decode_workspace_bytes,
    prefill_state_bytes,
    prefill_workspace_bytes,
    restored_experts,
)

NO_LIMIT: Final = 2**60


def num_held(max_tokens: int, window: int | None, step_tokens: int, block_size: int) -> int:
    """Return the most blocks that a sequence holds while a step runs, expired ones given back.

    A token sees `window` tokens, itself included (None: all); a step has at most `step_tokens`.
    """
    whole = -(-max_tokens // block_size)
    if window is None:
        return whole
    # The first token of the step sees window - 1 earlier ones; the span may begin at any offset.
    return min(whole, -(-(window + step_tokens - 2) // block_size) + 1)


@dataclass(frozen=True, kw_only=True)
class KVGroup:
    """Layers that attend to equally many tokens; they share block ids and block tables."""

    layers: tuple[int, ...]
    window: int | None
    """Most tokens that a token sees, itself included; None: all."""
    block_bytes: int
    """Keys and values of one block in all of these layers."""
    num_gpu_blocks: int = 0
    num_pinned: int = 0
    """Host blocks in pinned memory, the first ones of the host tier."""
    num_pageable: int = 0
    """Host blocks behind them, in memory that is reached by staging only."""
    in_place: bool = False
    """Compute reads and writes the pinned ones where they are."""

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the host tier."""
        return self.num_pinned + self.num_pageable

    @property
    def num_in_place(self) -> int:
        """Host blocks that sequences own."""
        return self.num_pinned if self.in_place else 0

    @property
    def layer_bytes(self) -> int:
        """Keys and values of one block in one layer."""
        return self.block_bytes // len(self.layers)


@dataclass(frozen=True, kw_only=True)
class KVSizes:
    """Groups of layers, and what sequences take of each.

    The first group attends to most: to all where any layer does. Sequences own host blocks of
    the first group only.
    """

    groups: tuple[KVGroup, ...]
    """Ordered by how much they attend to, most first; without blocks until `with_pools`."""
    block_size: int
    max_model_len: int
    max_num_seqs: int
    step_tokens: int
    keeps_idle: bool = False
    """Blocks that no sequence uses hold prefixes: any number has a use."""

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """Most tokens that each group attends to; None: all."""
        return tuple(group.window for group in self.groups)

    @cached_property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of a block of each group."""
        return tuple(group.block_bytes for group in self.groups)

    @property
    def pools(self) -> tuple[int, ...]:
        """Blocks of each group on the GPU."""
        return tuple(group.num_gpu_blocks for group in self.groups)

    @property
    def host_blocks(self) -> tuple[int, ...]:
        """Blocks of each group in the host tier."""
        return tuple(group.num_host_blocks for group in self.groups)

    def with_pools(self, pools: Sequence[int]) -> "KVSizes":
        """Return the same groups with so many blocks each on the GPU."""
        pairs = zip(self.groups, pools, strict=True)
        return replace(self, groups=tuple(replace(g, num_gpu_blocks=n) for g, n in pairs))

    def with_host(self, num_pinned: int, num_pageable: int, *, in_place: bool) -> "KVSizes":
        """Return the same groups with so many host blocks each, pageable ones behind pinned ones.

        With `in_place` sequences use pinned blocks of the first group where they are.
        """
        first, *others = (
            replace(group, num_pinned=num_pinned, num_pageable=num_pageable, in_place=False)
            for group in self.groups
        )
        return replace(self, groups=(replace(first, in_place=in_place), *others))

    def blocks(self, num_tokens: int) -> tuple[int, ...]:
        """Return the blocks of each group that one sequence of so many tokens takes at once."""
        step = min(self.step_tokens, num_tokens)
        return tuple(num_held(num_tokens, w, step, self.block_size) for w in self.windows)

    @property
    def useful(self) -> tuple[int, ...]:
        """The most blocks of each group that max_num_seqs sequences take, two steps in force."""
        whole = num_held(self.max_model_len, None, 1, self.block_size)
        steps = -(-2 * self.step_tokens // self.block_size)
        found = []
        for window in self.windows:
            each = num_held(self.max_model_len, window, 1, self.block_size)
            more = 0 if window is None else steps
            found.append(min(self.max_num_seqs * each + more, self.max_num_seqs * whole))
        return tuple(found)

    @property
    def most(self) -> tuple[int, ...]:
        """The most blocks of each group that are planned on the GPU, where it has room for them."""
        return (NO_LIMIT,) * len(self.groups) if self.keeps_idle else self.useful

    def num_bytes(self, counts: Sequence[int]) -> int:
        """Return the bytes of so many blocks of each group."""
        return sum(n * size for n, size in zip(counts, self.block_bytes, strict=True))

    def sequence_bytes(self, num_tokens: int) -> int:
        """Return the bytes that one sequence of so many tokens takes at once."""
        return self.num_bytes(self.blocks(num_tokens))

    def fit(self, room: int, in_place: int = 0) -> tuple[int, ...]:
        """Return the blocks of each group that `room` bytes are shared out to.

        First one sequence of max_model_len gets its blocks, but for `in_place` of the first group,
        which can lie elsewhere; then all groups get equally many more, so that short sequences lack
        none, until those behind the first have `most`.
        """
        need, most = self._least(in_place), self.most
        rest = room - self.num_bytes(need)
        if rest >= 0:
            first, *others = self._share(rest, need, most)
            return min(first, most[0]), *others
        _, *others = self._share(max(0, room), (0,) * len(need), need)
        left = room - self.num_bytes((0, *others))
        return min(max(0, left // self.block_bytes[0]), need[0]), *others

    def _share(self, room: int, start: Sequence[int], most: Sequence[int]) -> list[int]:
        """Add equally many blocks to each group; `most` caps those behind the first."""
        sizes, counts, growing = self.block_bytes, list(start), set(range(len(start)))
        while True:
            more = room // sum(sizes[group] for group in growing)
            full = {group for group in growing if group and start[group] + more >= most[group]}
            if not full:
                break
            for group in full:
                counts[group] = most[group]
                room -= (most[group] - start[group]) * sizes[group]
            growing -= full
        for group in growing:
            counts[group] += more
        return counts

    def room(self, num_blocks: int, in_place: int = 0) -> int:
        """Return the least bytes with which `fit` gives the first group so many blocks."""
        need, most = self._least(in_place), self.most
        more = max(0, num_blocks - need[0])
        others = (min(n + more, limit) for n, limit in zip(need[1:], most[1:], strict=True))
        return self.num_bytes((need[0] + more, *others))

    def _least(self, in_place: int) -> tuple[int, ...]:
        """Blocks of one sequence of max_model_len that must lie on the GPU."""
        first, *others = self.blocks(self.max_model_len)
        useful = self.useful[1:]
        return max(1, first - in_place), *map(min, others, useful)

    def longest(self, room: int, in_place: int = 0, limit: int | None = None) -> int:
        """Return the longest sequence that so many bytes on the GPU hold, in whole blocks.

        Blocks of the first group, but one, can lie elsewhere, `in_place` of them. It is no longer
        than `limit`; None: than max_model_len where there is a window.
        """
        size = self.block_size
        if self.windows == (None,):
            count = max(0, room) // self.block_bytes[0]
            found = (count + in_place) * size if count else 0
            return found if limit is None else min(found, limit)

        def is_held(num_blocks: int) -> bool:
            first, *others = self.blocks(num_blocks * size)
            return self.num_bytes((max(1, first - in_place), *others)) <= room

        most = self.max_model_len if limit is None else limit
        low, high = 0, -(-most // size) + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_held(middle) else (low, middle)
        return low * size if limit is None else min(low * size, limit)

    def concurrency(self, tokens: float) -> int:
        """Sequences of that many tokens that run at once on the GPU, at least 1."""
        need = self.blocks(max(1, math.ceil(tokens)))
        held = min(count // each for count, each in zip(self.pools, need, strict=True))
        return max(1, min(self.max_num_seqs, held))

    def sequences(self, pools: tuple[int, ...], num_tokens: int) -> float:
        """Return how many sequences of so many tokens the blocks hold."""
        each = zip(pools, self.blocks(num_tokens), self.windows, strict=True)
        return min(
            count * self.block_size / num_tokens if window is None else count / need
            for count, need, window in each
        )

    def to_dict(self) -> list[dict[str, Any]]:
        """Return each group as plain data."""
        return [
            {
                "layers": len(group.layers),
                "window": group.window,
                "block_bytes": group.block_bytes,
                "num_blocks": group.num_gpu_blocks,
                "tokens": group.num_gpu_blocks * self.block_size,
            }
            for group in self.groups
        ]


def kv_sizes(config: EngineConfig, spec: ModelSpec, dtype: str, max_model_len: int) -> KVSizes:
    """Return the sizes of a model's KV cache: a window that sees all of max_model_len is none."""
    settings, size = config.engine, config.kv.block_size
    layer_bytes = spec.kv_bytes_per_token(dtype) // spec.num_hidden_layers * size
    layers: dict[int, list[int]] = {}
    for layer, window in enumerate(spec.windows):
        seen = NO_LIMIT if window is None or config.kv.disable_sliding_window else window
        layers.setdefault(NO_LIMIT if seen >= max_model_len else seen, []).append(layer)
    return KVSizes(
        groups=tuple(
            KVGroup(
                layers=tuple(layers[window]),
                window=None if window == NO_LIMIT else window,
                block_bytes=len(layers[window]) * layer_bytes,
            )
            for window in sorted(layers, reverse=True)
        ),
        block_size=size,
        max_model_len=max_model_len,
        max_num_seqs=settings.max_num_seqs,
        step_tokens=settings.max_num_batched_tokens,
        keeps_idle=config.kv.enable_prefix_caching,
    )


@dataclass(frozen=True, kw_only=True)
class SwapRates:
    """What moving a block costs."""

    store_bytes_s: float
    """From the GPU to the host tier, bytes per second."""
    load_bytes_s: float


@dataclass(frozen=True, kw_only=True)
class ReadRates:
    """What decodes of sequences with blocks in the host tier cost."""

    step_s: float
    """A step of one sequence whose blocks fill the GPU, seconds."""
    read_bytes_s: float
    """Host blocks that a step reads beside that, bytes per second."""


@dataclass(frozen=True, kw_only=True)
class TierCosts:
    """What a host tier is expected to cost; the defaults are in force until times are predicted."""

    swap_rates: SwapRates | None = None
    """None: a preempted sequence's blocks are moved wherever there is a host tier."""
    recompute_token_s: float = 0.0
    """Time to compute one token of a prompt again, seconds."""
    read_rates: ReadRates | None = None
    """None: decodes read host blocks for nothing."""


NO_COSTS: Final = TierCosts()


@dataclass(frozen=True, kw_only=True)
class CopyAhead:
    """When decodes' host blocks are copied to the GPU by a copy engine instead of read in place."""

    step_bytes: int
    """Bytes of a decode in the host tier, over all layers and in the mean of a step, from which on
    they are."""
    run_bytes: int
    """Bytes of neighbouring blocks in one layer, in the mean of a piece, from which on they are."""


@dataclass(frozen=True, kw_only=True)
class HostKVPlan:
    """What serves the host tier of the KV cache; its blocks are those of `KVSizes.groups`."""

    stage_blocks: int
    """Blocks of one layer that a stage buffer on the GPU holds, of NUM_STAGES. 0 where no sequence
    uses host blocks in place."""
    dma_run_bytes: int
    """From this size on, neighbouring blocks that stay neighbours are one DMA copy; what is smaller
    goes together in one kernel."""
    costs: TierCosts = NO_COSTS
    copy_ahead: CopyAhead | None = None
    """None: decodes read host blocks in place, which is as fast, or no sequence has any."""

    def to_dict(self, kv: KVSizes) -> dict[str, Any]:
        """Return plain data for a record."""
        pinned = [group.num_pinned for group in kv.groups]
        pageable = [group.num_pageable for group in kv.groups]
        return {
            "num_pinned": pinned,
            "num_pageable": pageable,
            "num_in_place": kv.groups[0].num_in_place,
            "pinned_bytes": kv.num_bytes(pinned),
            "pageable_bytes": kv.num_bytes(pageable),
            "tokens": kv.host_blocks[0] * kv.block_size,
            "stage_blocks": self.stage_blocks,
            "dma_run_bytes": self.dma_run_bytes,
            **asdict(self.costs),
            "copy_ahead": self.copy_ahead and asdict(self.copy_ahead),
        }


MOVE_PIECE_BYTES = 32 * 2**20
"""Moves are enqueued in pieces of about this size; what waits for a move waits for its piece."""
PIECE_MOVES = 1024
"""No piece holds more moves."""
ID_SLOTS = 64
"""Pieces of small blocks that can be under way before the host waits for the oldest."""
STAGING_BYTES = 16 * 2**20
"""Pinned memory through which blocks of pageable memory go."""

_ID_BYTES = 8


def piece_moves(block_bytes: int, num_blocks: int = PIECE_MOVES) -> int:
    """Return how many moves a piece holds at most; `num_blocks` are those of the smaller tier."""
    return max(1, min(PIECE_MOVES, MOVE_PIECE_BYTES // block_bytes, num_blocks))


def ids_bytes(block_bytes: int, dma_run_bytes: int, num_blocks: int = PIECE_MOVES) -> int:
    """Return what block numbers take on the GPU, and in pinned memory once more, bytes.

    Two lists for each slot and direction; nothing where every block is large enough for DMA.
    """
    if block_bytes >= dma_run_bytes:
        return 0
    return 2 * ID_SLOTS * 2 * piece_moves(block_bytes, num_blocks) * _ID_BYTES


def staging_blocks(block_bytes: int) -> int:
    """Return how many blocks the staging memory holds, at least 1."""
    return max(1, STAGING_BYTES // block_bytes)


NUM_STAGES: Final = 4
"""Stage buffers, which pieces of a sequence's keys are copied into."""
STAGE_BYTES: Final = 64 * 2**20 // 3
"""What one of them holds of one layer at most, unless a tile of keys is more. Smaller ones
would make more pieces, each of which takes the host time to launch."""
STAGE_SHARE: Final = 1 / 8 / NUM_STAGES
"""Share of the GPU's room for KV that one of them takes at most; likewise."""
_SLOT_BYTES: Final = 16
"""Numbers of stage slots, twice over, bytes a block."""


def cpu_blocks(memory_bytes: int, num_layers: int, block_bytes: int) -> int:
    """Return how many blocks so much host memory holds; `block_bytes` are those of one layer."""
    return max(0, memory_bytes) // (num_layers * block_bytes)


@dataclass(frozen=True, kw_only=True)
class HostTierSizes:
    """Numbers of host blocks, equal for each group, and bytes of what serves them."""

    num_pinned: int = 0
    num_pageable: int = 0
    reach: int = 0
    """Blocks of the first group that compute could use where they are."""
    layer_bytes: int = 1
    """Keys and values of one block in one layer."""
    least_stage: int = 0
    """Blocks of a stage buffer at least, with which a tile of keys can be staged."""
    most_stage: int = 0
    state_bytes: int = 0
    """State of prefills between two stages, on the GPU."""
    ids_bytes: int = 0
    """Block numbers of moves on the GPU, and once more in pinned memory."""
    staging_bytes: int = 0
    """Pinned memory through which blocks of pageable memory go."""
    graph_bytes: int = 0
    """Memory of graphs for decodes that read host blocks in place, on the GPU."""

    @property
    def num_blocks(self) -> int:
        """Blocks of each group."""
        return self.num_pinned + self.num_pageable

    def stage_blocks(self, room: int) -> int:
        """Return the blocks of one stage buffer where the GPU has so many bytes for KV."""
        share = int(STAGE_SHARE * max(0, room)) // self.layer_bytes
        return max(self.least_stage, min(self.most_stage, share))

    def stage_bytes(self, room: int) -> int:
        """Return what stage buffers and the state of prefills take on the GPU."""
        blocks = self.stage_blocks(room)
        return blocks * (NUM_STAGES * self.layer_bytes + _SLOT_BYTES) + self.state_bytes

    def in_place_bytes(self, room: int) -> int:
        """Return what host blocks in place take on the GPU: `stage_bytes`, and graphs."""
        return self.stage_bytes(room) + self.graph_bytes

    def share_out(self, kv: KVSizes, room: int) -> KVSizes:
        """Return the groups with their blocks on both tiers, in `room` bytes on the GPU.

        Sequences use host blocks in place where one of max_model_len does not fit the GPU; room is
        then for `in_place_bytes` too.
        """
        pools, need = kv.fit(max(0, room)), kv.blocks(kv.max_model_len)
        in_place = self.reach > 0 and need[0] > pools[0]
        if in_place:
            pools = kv.fit(max(0, room - self.in_place_bytes(room)), self.reach)
        return kv.with_pools(pools).with_host(self.num_pinned, self.num_pageable, in_place=in_place)


def host_tier_sizes(
    config: KVConfig,
    spec: ModelSpec,
    kv: KVSizes,
    *,
    moved_bytes: int,
    graph_bytes: int,
    dma_run_bytes: int,
    can_pin: bool,
    can_uva: bool,
) -> HostTierSizes:
    """Return the sizes of the host tier; weights took `moved_bytes` of swap_space.

    Raises:
        ConfigError: The size is given and holds not one block.
    """
    if not config.has_host_tier:
        return HostTierSizes()
    layers, layer_bytes = spec.num_hidden_layers, kv.groups[0].layer_bytes

    def held(num_bytes: float) -> int:
        return cpu_blocks(int(num_bytes), layers, layer_bytes)

    size = config.cpu_gib or 0.0
    count = held(config.swap_space * GIB - moved_bytes if config.swap_space > 0 else size * GIB)
    if config.num_cpu_blocks is not None:
        count = config.num_cpu_blocks
    elif not config.swap_space and not count:
        raise ConfigError(
            f"kv.cpu_gib: expected at least one block of {config.block_size} tokens, "
            f"{layers * layer_bytes / 2**20:.3g} MiB, got {size:g} GiB. Raise it, or remove it."
        )
    pinned = count if can_pin else 0
    if config.pin_limit_gib is not None:
        pinned = min(pinned, held(config.pin_limit_gib * GIB))
    most = min(pinned, kv.blocks(kv.max_model_len)[0])
    least = -(-PREFILL_PART_KEYS // kv.block_size)
    ids = 0
    if pinned and can_uva:
        sizes = zip(kv.block_bytes, kv.most, strict=True)
        ids = sum(ids_bytes(size, dma_run_bytes, min(count, most)) for size, most in sizes)
    staging = sum(staging_blocks(size) * size for size in kv.block_bytes)
    return HostTierSizes(
        num_pinned=pinned,
        num_pageable=count - pinned,
        reach=pinned if can_uva else 0,
        layer_bytes=layer_bytes,
        least_stage=min(most, least),
        most_stage=min(most, max(least, STAGE_BYTES // layer_bytes)),
        state_bytes=prefill_state_bytes(kv.step_tokens, spec.num_attention_heads, spec.head_dim),
        ids_bytes=ids,
        staging_bytes=staging if count > pinned else 0,
        graph_bytes=graph_bytes,
    )


# Steps, graphs, runtime, buffers.


HOST_DECODES = 8
"""Largest decode batch that is captured once more for blocks in the host tier: only sequences that
exceed the GPU's room own such blocks, and few of them run at once."""
WORKSPACE_BYTES = 32 * MIB
"""Workspace of cuBLAS for each stream that calls it (Hopper)."""
PREFILL_SEQUENCES = 4
"""Prompts whose parts a captured step holds at most."""
CAPTURED_PREFILL_TOKENS = (16, 32, 64, 256)
"""Tokens of prompts that captured steps are padded to."""
MAX_LOAD_THREADS = 16
"""Most threads that read weights."""
PIECE_BYTES = 8 * MIB
"""Most bytes of one read. With 16 threads, 14.6 GB in page cache came onto an H200 at 23 GB/s; with
pieces of 4 MiB at 13, of 2 MiB at 7."""
RUN_BYTES = 32 * MIB
"""What a thread reads of one file before it takes what is next, so that reads are sequential."""
BUFFERS_PER_THREAD = 2
"""One is read into while the other is copied to the GPU."""


def pad_batch(size: int) -> int:
    """Round a decode batch up to the sizes that are captured: 1, 2, 4, then multiples of 8."""
    if size <= 4:
        return 1 << (size - 1).bit_length()
    return -(-size // 8) * 8


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the decode batch sizes that are captured."""
    return tuple(sorted({pad_batch(size) for size in range(1, max_num_seqs + 1)}))


def prefill_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[tuple[int, int], ...]:
    """Return the steps with prompts that are captured: decode rows, and tokens of prompts.

    Few decode rows are not worth graphs of their own: padding costs them little. Beside a few the
    third size leaves room for them among the rows whose products only read their weight, and the
    second is worth a graph, as fewer rows take less time there.
    """
    most = pad_batch(max_num_seqs)
    rows = sorted({0, min(8, most), min(64, most), most})
    few, some, small, many = CAPTURED_PREFILL_TOKENS
    sizes = {
        (decodes, tokens)
        for decodes in rows
        for tokens in (
            (few, some, small - decodes, many)
            if decodes <= MAX_SMALL_TOKENS // 2
            else (few, small, many)
        )
        if decodes + tokens <= max_num_batched_tokens
    }
    return tuple(sorted(sizes))


def padded_prefill(
    sizes: Collection[tuple[int, int]], num_decodes: int, num_tokens: int, num_prompts: int
) -> tuple[int, int] | None:
    """Return which of `sizes`, decode rows and tokens of prompts, a step is padded to; None: none.

    The fewest rows in all that hold it; decode rows cost no more than tokens of prompts do.
    """
    if num_prompts > PREFILL_SEQUENCES:
        return None
    holding = (s for s in sizes if s[0] >= num_decodes and s[1] >= num_tokens)
    return min(holding, key=lambda size: (sum(size), size), default=None)


def activation_bytes(
    spec: ModelSpec,
    settings: EngineSettings,
    dtype_bytes: int,
    max_model_len: int,
    beside_bytes: int = 0,
) -> int:
    """Bytes of one step of max_num_batched_tokens tokens: hidden states, products, inputs.

    A twentieth is added for the allocator's rounding, and the largest tensor once more: where the
    place that it left in the layer before was split for smaller ones, the allocator takes another
    (105 MiB reserved and free when 112 MiB were asked for: mistral_7b, 2048 tokens, H200).
    `beside_bytes` are those of a token that products allocate beside their results.
    """
    tokens, rows = settings.max_num_batched_tokens, pad_batch(settings.max_num_seqs)
    step = _step_bytes(spec, settings, dtype_bytes)
    workspace = decode_workspace_bytes(rows, spec.num_attention_heads, spec.head_dim, max_model_len)
    workspace += prefill_workspace_bytes(
        tokens, spec.num_attention_heads, spec.head_dim, max_model_len
    )
    groups = 2 if spec.layer_types else 1
    table_rows = rows + PREFILL_SEQUENCES
    inputs = groups * table_rows * math.ceil(max_model_len / 8) * 4 + tokens * 32
    tables = 1 if spec.rope_local_base_freq is None else 2
    rotary = tables * max_model_len * spec.head_dim * 4
    largest = tokens * max(2 * spec.intermediate_size, _of_experts(spec)) * dtype_bytes
    return int(1.05 * step) + workspace + inputs + rotary + largest + tokens * beside_bytes


def _step_bytes(spec: ModelSpec, settings: EngineSettings, dtype_bytes: int) -> int:
    return settings.max_num_batched_tokens * _widest(spec) * dtype_bytes


def _widest(spec: ModelSpec) -> int:
    """Elements per token that live at once in the widest place of a layer."""
    attention = 2 * (spec.q_size + 2 * spec.kv_size) + 2 * spec.q_size
    experts = _of_experts(spec) + 3 * spec.shared_expert_intermediate_size
    return max(attention, 3 * spec.intermediate_size, experts) + 4 * spec.hidden_size


def _of_experts(spec: ModelSpec) -> int:
    """Elements per token of what its experts make, and of what is between their products."""
    return spec.num_experts_per_tok * (spec.hidden_size + spec.moe_intermediate_size)


def step_tokens(settings: EngineSettings) -> int:
    """Most tokens of a step, padding included."""
    return max(settings.max_num_batched_tokens, pad_batch(settings.max_num_seqs))


def routing_items(config: EngineConfig, spec: ModelSpec) -> dict[str, int]:
    """Bytes of a table of experts, of what a step takes of it, and of what is recorded, if any."""
    sizes = expert_sizes(spec)
    if sizes is None:
        return {}
    tokens, picks, num_bytes = step_tokens(config.engine), len(sizes.layers) * sizes.top_k, 0
    if is_replaced(config.model.routing):
        num_bytes += align(4 * TABLE_ROWS * picks) + align((4 * picks + 8) * tokens)
    if config.record_routing:
        num_bytes += align(2 * tokens * picks)
    return {"routing": num_bytes} if num_bytes else {}


def restore_bytes(
    spec: ModelSpec, formats: TensorFormats, *, max_tokens: int, max_rows: int
) -> int:
    """Return the bytes in which steps of more than MAX_SMALL_TOKENS tokens restore packed weights.

    One matrix has room at a time, or some of its experts, restored before its product: to restore
    the next one beside it made their products 2 to 4 % shorter at 512 to 2048 tokens (H200), as
    both wait for memory. The head is one of them where its product can have as many rows.

    Args:
        spec: Sizes of the model.
        formats: Formats of its tensors.
        max_tokens: Most tokens of a step.
        max_rows: Most rows of logits of a step.
    """
    if not formats.others or max_tokens <= MAX_SMALL_TOKENS:
        return 0
    sizes = (
        align(_restored_bytes(tensor, formats.default.element_bytes))
        for tensor in _products(spec, with_head=max_rows > MAX_SMALL_TOKENS)
        if formats[tensor.name].is_restored
        # Experts with biases are restored as they are read (kernels.ops.experts).
        and not (tensor.num_experts and spec.architecture.has_expert_biases)
    )
    return max(sizes, default=0)


def _restored_bytes(tensor: TensorSpec, element_bytes: int) -> int:
    """Return the bytes of what is restored together of a tensor: all, or some of its experts."""
    rows, columns = tensor.shape
    if tensor.num_experts:
        each = tensor.expert_rows
        rows = each * restored_experts(tensor.num_experts, each, columns, element_bytes)
    return rows * columns * element_bytes


def _products(spec: ModelSpec, *, with_head: bool) -> Iterator[TensorSpec]:
    """Yield the matrices that a step multiplies with."""
    for layer in range(spec.num_hidden_layers):
        yield from (tensor for tensor in spec.layer_tensors(layer) if len(tensor.shape) == 2)
    head = EMBEDDING if spec.tie_word_embeddings else HEAD
    if with_head:
        yield from (tensor for tensor in spec.outer_tensors() if tensor.name == head)


def logits_bytes(
    spec: ModelSpec, settings: EngineSettings, dtype_bytes: int, max_model_len: int
) -> int:
    """Bytes of logits of every sequence in both dtypes, of sampling, and of tokens for penalties.

    Sampling begins when a step's activations are free, and takes their place: with 64 sequences and
    256 MiB of it, the allocator grew by nothing (H200).
    """
    logits = pad_batch(settings.max_num_seqs) * spec.vocab_size
    sampling = min(sampler_workspace_bytes(spec.vocab_size), logits * 80)
    beyond = max(0, sampling - _step_bytes(spec, settings, dtype_bytes))
    noted = 4 * penalty_tokens(settings.max_num_seqs, max_model_len)
    return logits * (dtype_bytes + 4) + beyond + noted


def captured_bytes(
    spec: ModelSpec,
    kind: str,
    sizes: tuple[int, ...],
    prefills: tuple[tuple[int, int], ...],
    dtype_bytes: int,
) -> tuple[int, int]:
    """Bytes of captured graphs' activations and of cuBLAS workspaces; of nodes, outside torch.

    The nodes are counted as 64 KiB a layer and graph. torch keeps a workspace of cuBLAS for each
    stream that has called it: one for eager steps, and one for captures, on a stream of their own,
    where one has more rows than kernels of ours multiply. A CPU has none.
    """
    workspace = 0 if kind == "cpu" else WORKSPACE_BYTES
    if not sizes:
        return workspace, 0
    decode = 2 * sizes[-1] * (_widest(spec) + spec.vocab_size)
    most = max((rows + tokens for rows, tokens in prefills), default=0)
    with_prompts = int(1.1 * most * _widest(spec)) + 2 * sizes[-1] * spec.vocab_size
    pool = max(decode, with_prompts if prefills else 0) * dtype_bytes
    workspaces = 2 * workspace if max(most, sizes[-1]) > MAX_SMALL_TOKENS else workspace
    count = len(sizes) + len(prefills)
    return pool + workspaces, count * spec.num_hidden_layers * MIB // 16


def runtime_bytes(kind: str) -> int:
    """Bytes of a CUDA context and of modules, outside the allocator; none on a CPU.

    Measured with driver 580 and CUDA 13: 746 MiB on an H100, 752 to 760 with graphs on an H200.
    """
    return 0 if kind == "cpu" else 752 * MIB


def process_bytes(kind: str) -> int:
    """Host memory of the process itself: interpreter, libraries, driver.

    Beside an H200 1.06 to 1.07 GiB (docs/performance.md); on a CPU 0.25 to 0.26 beside cuts of
    three models.
    """
    return int((0.26 if kind == "cpu" else 1.07) * GIB)


def load_staging_bytes(num_bytes: int, num_threads: int) -> int:
    """Bytes of host buffers that checkpoint files are read through where not into place."""
    return min(num_threads, -(-num_bytes // RUN_BYTES)) * BUFFERS_PER_THREAD * PIECE_BYTES


def tokenizer_bytes(vocab_size: int) -> int:
    """Host memory of a tokenizer and the library that reads it.

    Measured beside two: 0.08 GiB of 512 tokens, 0.12 of 49152.
    """
    return 70 * MIB + 1000 * vocab_size
