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
