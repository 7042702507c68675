"""HostKVPlan: the host tier of the KV cache as it is planned. Pure arithmetic, no torch."""

from dataclasses import asdict, dataclass
from typing import Any

from engine.kv_sizes import KVSizes


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
    """The host tier of the KV cache."""

    num_pinned: tuple[int, ...]
    """Blocks of each group of layers in pinned memory, the first ones of its host tier."""
    num_pageable: tuple[int, ...]
    """Blocks of each group behind them, in memory that is reached by staging only."""
    in_place: bool
    """Compute reads and writes pinned blocks of the first group where they are."""
    stage_blocks: int
    """Blocks of one layer that a prefill's stage buffer on the GPU holds; there are two. 0 where no
    sequence uses host blocks in place."""
    swap_rates: SwapRates | None = None
    """What moves of blocks are expected to carry; None until times are predicted."""
    recompute_token_s: float = 0.0
    """Expected time to compute one token of a prompt again, seconds."""

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks of each group."""
        return tuple(map(sum, zip(self.num_pinned, self.num_pageable, strict=True)))

    @property
    def num_in_place(self) -> int:
        """Blocks of the first group that compute reaches."""
        return self.num_pinned[0] if self.in_place else 0

    def to_dict(self, kv: KVSizes) -> dict[str, Any]:
        """Return plain data for a record."""
        return {
            "num_pinned": list(self.num_pinned),
            "num_pageable": list(self.num_pageable),
            "num_in_place": self.num_in_place,
            "pinned_bytes": kv.num_bytes(self.num_pinned),
            "pageable_bytes": kv.num_bytes(self.num_pageable),
            "tokens": self.num_blocks[0] * kv.block_size,
            "stage_blocks": self.stage_blocks,
            "swap_rates": asdict(self.swap_rates) if self.swap_rates else None,
            "recompute_token_s": self.recompute_token_s,
        }
