"""Sizes of the host tier of the KV cache, and of what moves and stages its blocks; no torch.

CPU memory = blocks x layers x block bytes, where block bytes are those of one block in one layer.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Final

from engine.asked.kv import KVConfig
from engine.errors import ConfigError
from engine.model.spec import ModelSpec
from engine.sealed import GIB
from kernels.sizes import PREFILL_PART_KEYS, prefill_state_bytes

NO_LIMIT: Final = 2**60


def num_held(max_tokens: int, window: int | None, step_tokens: int, block_size: int) -> int:
    """Return the most blocks that a sequence holds while a step runs, expired ones given back.

    Args:
        max_tokens: The sequence's greatest length.
        window: Tokens that a token sees, itself included, at least 1; None: all.
        step_tokens: Most tokens of the sequence in one step.
        block_size: Tokens in a block, at least 1.
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
    """In order."""
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
    """Most tokens of a step."""
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
        """Return the same groups with so many host blocks each.

        Args:
            num_pinned: In pinned memory.
            num_pageable: Behind them.
            in_place: Sequences use pinned blocks of the first group where they are.
        """
        groups = tuple(
            replace(
                group,
                num_pinned=num_pinned,
                num_pageable=num_pageable,
                in_place=in_place and not number,
            )
            for number, group in enumerate(self.groups)
        )
        return replace(self, groups=groups)

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
        """Return the blocks of each group that bytes are shared out to.

        First one sequence of max_model_len gets its blocks; then all groups get equally many
        more, so that short sequences lack none, until those behind the first have `most`.

        Args:
            room: Bytes.
            in_place: Of that sequence's blocks in the first group, how many can lie elsewhere.
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
        """Return the longest sequence that so many bytes hold, in whole blocks.

        Args:
            room: Bytes on the GPU.
            in_place: Blocks of the first group that can lie elsewhere, beside at least one here.
            limit: No longer than this; None: than max_model_len where there is a window.
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

    def sequences(self, pools: tuple[int, ...], num_tokens: int) -> float:
        """Return how many sequences of so many tokens the blocks hold."""
        found = []
        for count, need, window in zip(pools, self.blocks(num_tokens), self.windows, strict=True):
            is_whole = window is None
            found.append(count * self.block_size / num_tokens if is_whole else count / need)
        return min(found)

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


def kv_sizes(
    spec: ModelSpec,
    dtype: str,
    *,
    windows: Sequence[int | None],
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    step_tokens: int,
    keeps_idle: bool,
) -> KVSizes:
    """Return the sizes of a model's KV cache.

    Args:
        spec: Sizes of the model.
        dtype: Of keys and values.
        windows: The window in force in each layer; None: it attends to all.
        block_size: Tokens in a block.
        max_model_len: Longest sequence.
        max_num_seqs: Sequences that run at once.
        step_tokens: Most tokens of a step.
        keeps_idle: Whether blocks that no sequence uses hold prefixes.
    """
    layer_bytes = spec.kv_bytes_per_token(dtype) // spec.num_hidden_layers * block_size
    layers: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        layers.setdefault(window, []).append(layer)
    wider_first = sorted(layers, key=lambda window: NO_LIMIT if window is None else window)[::-1]
    return KVSizes(
        groups=tuple(
            KVGroup(
                layers=tuple(layers[window]),
                window=window,
                block_bytes=len(layers[window]) * layer_bytes,
            )
            for window in wider_first
        ),
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        step_tokens=step_tokens,
        keeps_idle=keeps_idle,
    )


@dataclass(frozen=True, kw_only=True)
class SwapRates:
    """What moving a block costs."""

    store_bytes_s: float
    """From the GPU to the host tier, bytes per second."""
    load_bytes_s: float
    """Back."""
    overlap: float = 0.0
    """Share of a transfer that runs beside compute and costs the steps nothing, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class HostKVPlan:
    """What serves the host tier of the KV cache; its blocks are those of `KVSizes.groups`."""

    stage_blocks: int
    """Blocks of one layer that a prefill's stage buffer on the GPU holds; there are two. 0 where no
    sequence uses host blocks in place."""
    swap_rates: SwapRates | None = None
    """What moves of blocks are expected to carry; None until times are predicted."""
    recompute_token_s: float = 0.0
    """Expected time to compute one token of a prompt again, seconds."""

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
            "swap_rates": asdict(self.swap_rates) if self.swap_rates else None,
            "recompute_token_s": self.recompute_token_s,
        }


MOVE_PIECE_BYTES = 32 * 2**20
"""Moves are enqueued in pieces of about this size; what waits for a move waits for its piece."""
PIECE_MOVES = 1024
"""No piece holds more moves."""
DMA_RUN_BYTES = 2 * 2**20
"""From this size on, neighbouring blocks that stay neighbours are one DMA copy; what is smaller
goes together in one kernel. Measured on an H200 with copies of 54.9 GB/s one way, kernel against
DMA: 49 and 9 GB/s for blocks of 256 KiB, 51 and 40 of 1 MiB, 51 and 50 of 2 MiB, 51 and 54 of
8 MiB; both ways at once 61 and 97 of 8 MiB."""
ID_SLOTS = 64
"""Pieces of small blocks that can be under way before the host waits for the oldest."""
STAGING_BYTES = 16 * 2**20
"""Pinned memory through which blocks of pageable memory go."""

_ID_BYTES = 8


def piece_moves(block_bytes: int, num_blocks: int = PIECE_MOVES) -> int:
    """Return how many moves a piece holds at most.

    Args:
        block_bytes: Of a block over all layers.
        num_blocks: Of the smaller tier; a piece needs no more moves.
    """
    return max(1, min(PIECE_MOVES, MOVE_PIECE_BYTES // block_bytes, num_blocks))


def ids_bytes(block_bytes: int, num_blocks: int = PIECE_MOVES) -> int:
    """Return what block numbers take on the GPU, and in pinned memory once more, bytes.

    Two lists for each slot and direction; nothing where every block is large enough for DMA.

    Args:
        block_bytes: Of a block over all layers.
        num_blocks: Of the smaller tier.
    """
    if block_bytes >= DMA_RUN_BYTES:
        return 0
    return 2 * ID_SLOTS * 2 * piece_moves(block_bytes, num_blocks) * _ID_BYTES


def staging_blocks(block_bytes: int) -> int:
    """Return how many blocks the staging memory holds, at least 1."""
    return max(1, STAGING_BYTES // block_bytes)


STAGE_BYTES: Final = 32 * 2**20
"""What one stage buffer of a prefill holds of one layer at most, unless a tile of keys is more."""
STAGE_SHARE: Final = 1 / 16
"""Share of the GPU's room for KV that one stage buffer takes at most; likewise."""
NUM_STAGES: Final = 2
_SLOT_BYTES: Final = 16
"""Numbers of stage slots, twice over, bytes a block."""


def cpu_memory_bytes(num_blocks: int, num_layers: int, block_bytes: int) -> int:
    """Return the host memory of so many blocks.

    Args:
        num_blocks: Blocks of the host tier.
        num_layers: Layers of the model.
        block_bytes: Keys and values of one block in one layer.
    """
    return num_blocks * num_layers * block_bytes


def cpu_blocks(memory_bytes: int, num_layers: int, block_bytes: int) -> int:
    """Return how many blocks so much host memory holds: the inverse of `cpu_memory_bytes`."""
    return max(0, memory_bytes) // (num_layers * block_bytes)


@dataclass(frozen=True, kw_only=True)
class HostTierSizes:
    """Numbers of host blocks, and bytes of what serves them. Each group has as many blocks."""

    num_pinned: int
    num_pageable: int
    reach: int
    """Blocks of the first group that compute could use where they are."""
    layer_bytes: int
    """Keys and values of one block in one layer."""
    least_stage: int
    """Blocks of a stage buffer at least, with which a tile of keys can be staged."""
    most_stage: int
    state_bytes: int
    """State of prefills between two stages, on the GPU."""
    ids_bytes: int
    """Block numbers of moves on the GPU, and once more in pinned memory."""
    staging_bytes: int
    """Pinned memory through which blocks of pageable memory go."""
    graph_bytes: int = 0
    """Memory of graphs for decodes that read host blocks in place, on the GPU."""
    swap_bytes: int = 0
    """What is left of kv.swap_space for KV blocks."""

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
        """Return the groups with their blocks on both tiers.

        Sequences use host blocks in place where one of max_model_len does not fit the GPU.

        Args:
            kv: Sizes of blocks and sequences.
            room: Bytes on the GPU for blocks, and for `in_place_bytes` where those are needed.
        """
        pools, need = kv.fit(max(0, room)), kv.blocks(kv.max_model_len)
        in_place = self.reach > 0 and need[0] > pools[0]
        if in_place:
            pools = kv.fit(max(0, room - self.in_place_bytes(room)), self.reach)
        return kv.with_pools(pools).with_host(self.num_pinned, self.num_pageable, in_place=in_place)


NO_HOST_TIER: Final = HostTierSizes(
    num_pinned=0,
    num_pageable=0,
    reach=0,
    layer_bytes=1,
    least_stage=0,
    most_stage=0,
    state_bytes=0,
    ids_bytes=0,
    staging_bytes=0,
)


def host_tier_sizes(
    config: KVConfig,
    kv: KVSizes,
    *,
    moved_bytes: int,
    can_pin: bool,
    can_uva: bool,
    num_heads: int,
    head_dim: int,
) -> HostTierSizes:
    """Return the sizes of the host tier that is asked for.

    Args:
        config: What is asked.
        kv: Sizes of blocks and sequences.
        moved_bytes: Of swap_space, what weights take.
        can_pin: Whether memory can be pinned.
        can_uva: Whether compute reads and writes pinned memory in place.
        num_heads: Query heads.
        head_dim: Elements of a head.

    Raises:
        ConfigError: The size is given and holds not one block.
    """
    if not config.has_host_tier:
        return NO_HOST_TIER
    layers, layer_bytes = sum(len(group.layers) for group in kv.groups), kv.groups[0].layer_bytes
    count = _num_blocks(config, layers, layer_bytes, moved_bytes)
    pinned = count if can_pin else 0
    if config.pin_limit_gib is not None:
        pinned = min(pinned, cpu_blocks(int(config.pin_limit_gib * GIB), layers, layer_bytes))
    most = min(pinned, kv.blocks(kv.max_model_len)[0])
    least = -(-PREFILL_PART_KEYS // kv.block_size)
    ids = 0
    if pinned and can_uva:
        sizes = zip(kv.block_bytes, kv.most, strict=True)
        ids = sum(ids_bytes(size, min(count, most)) for size, most in sizes)
    staging = sum(staging_blocks(size) * size for size in kv.block_bytes)
    return HostTierSizes(
        num_pinned=pinned,
        num_pageable=count - pinned,
        reach=pinned if can_uva else 0,
        layer_bytes=layer_bytes,
        least_stage=min(most, least),
        most_stage=min(most, max(least, STAGE_BYTES // layer_bytes)),
        state_bytes=prefill_state_bytes(kv.step_tokens, num_heads, head_dim),
        ids_bytes=ids,
        staging_bytes=staging if count > pinned else 0,
        swap_bytes=max(0, int(config.swap_space * GIB) - moved_bytes),
    )


def _num_blocks(config: KVConfig, layers: int, layer_bytes: int, moved_bytes: int) -> int:
    if config.num_cpu_blocks is not None:
        return config.num_cpu_blocks
    if config.swap_space > 0:
        return cpu_blocks(int(config.swap_space * GIB) - moved_bytes, layers, layer_bytes)
    size = config.cpu_gib or 0.0
    count = cpu_blocks(int(size * GIB), layers, layer_bytes)
    if count == 0:
        raise ConfigError(
            f"kv.cpu_gib: expected at least one block of {config.block_size} tokens, "
            f"{layers * layer_bytes / 2**20:.3g} MiB, got {size:g} GiB. Raise it, or remove it."
        )
    return count
