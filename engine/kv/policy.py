"""KVPolicy: whether content of KV blocks is remembered, by which name, and what moving it costs."""

from dataclasses import dataclass

from engine.kv.choice import SwapRates


@dataclass(frozen=True, kw_only=True)
class KVPolicy:
    """What the scheduler is told about content of blocks."""

    identity: tuple[str, ...] = ()
    """What the values in a block depend on beside tokens, as `BlockHasher` takes it."""
    prefix_caching: bool = False
    """Whether sequences find what others computed; if not, a sequence finds its own alone."""
    block_bytes: tuple[int, ...] = (1, 1)
    """Bytes of a block in each group of layers."""
    swap_rates: SwapRates | None = None
    """What the plan expects of the link; None: a preempted sequence's blocks are moved if there is
    a host tier."""
    recompute_token_s: float = 0.0
    """What the plan expects a token to take that is computed again, seconds."""
