"""Sizes of the host tier of the KV cache, and of what moves and stages its blocks; no torch.

CPU memory = blocks x layers x block bytes, where block bytes are those of one block in one layer.
"""

from dataclasses import dataclass
from typing import Final

from engine.errors import ConfigError
from engine.kv.move_sizes import ids_bytes, staging_blocks
from engine.kv_config import GIB, KVConfig
from engine.kv_sizes import KVSizes
from kernels.sizes import PREFILL_PART_KEYS, prefill_state_bytes

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
