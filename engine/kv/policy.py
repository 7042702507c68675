"""KVPolicy: whether content of KV blocks is remembered, by which name, and what moving it costs."""

from dataclasses import dataclass
from typing import Literal

from engine.errors import EngineError
from engine.host_kv import SwapRates


@dataclass(frozen=True, kw_only=True)
class KVPolicy:
    """What the scheduler is told about content of blocks."""

    identity: tuple[str, ...] = ()
    """What the values in a block depend on beside tokens, as `BlockHasher` takes it."""
    prefix_caching: bool = False
    """Whether sequences find what others computed; if not, a sequence finds its own alone."""
    swap_rates: SwapRates | None = None
    """What the plan expects of the link; None: a preempted sequence's blocks are moved if there is
    a host tier."""
    recompute_token_s: float = 0.0
    """What the plan expects a token to take that is computed again, seconds."""


def swap_or_recompute(
    store_bytes: int, load_bytes: int, rates: SwapRates, recompute_s: float
) -> Literal["swap", "recompute"]:
    """Return how a preempted sequence goes on for less; by moving where both cost the same.

    Args:
        store_bytes: To be written to the host tier now; blocks with a copy there cost nothing.
        load_bytes: To be read back when the sequence goes on.
        rates: What the plan expects of the link.
        recompute_s: To compute the same tokens again, seconds.

    Raises:
        EngineError: A rate is not positive, or a size or a time is negative.
    """
    if min(rates.store_bytes_s, rates.load_bytes_s) <= 0 or not 0 <= rates.overlap <= 1:
        raise EngineError(
            f"swap rates: expected positive bytes per second and an overlap of 0 to 1, got {rates}."
        )
    if min(store_bytes, load_bytes, recompute_s) < 0:
        raise EngineError(
            f"swap: expected sizes and a time of at least 0, got {store_bytes} bytes to store, "
            f"{load_bytes} to load and {recompute_s} s."
        )
    moving_s = store_bytes / rates.store_bytes_s + load_bytes / rates.load_bytes_s
    return "swap" if moving_s * (1 - rates.overlap) <= recompute_s else "recompute"
