"""Which blocks layers with a sliding window need: a token sees itself and the window - 1 before it.

Pure arithmetic over positions; `window` is in tokens, None where attention sees all.
"""

from collections.abc import Sequence

from engine.errors import EngineError
from engine.kv_sizes import num_held

__all__ = ["num_expired", "num_held", "usable_prefix"]


def num_expired(num_computed: int, window: int | None, block_size: int) -> int:
    """Return how many leading blocks no later token sees.

    Args:
        num_computed: Leading tokens that are in the cache; the next one to run is at this position.
        window: Tokens that a token sees, itself included, at least 1.
        block_size: Tokens in a block.
    """
    _check(window, block_size)
    if window is None:
        return 0
    return max(0, num_computed - window + 1) // block_size


def usable_prefix(cached: Sequence[Sequence[bool]], windows: Sequence[int], block_size: int) -> int:
    """Return the longest prefix, in blocks, behind which a sequence can go on.

    Args:
        cached: For each group of layers and each leading block whether its keys and values are
            there.
        windows: Tokens that a token sees in each group, itself included. Blocks that have expired
            at the prefix's end need not be there.
        block_size: Tokens in a block.
    """
    for window in windows:
        _check(window, block_size)
    longest, missing = 0, [-1] * len(windows)
    for place, there in enumerate(zip(*cached, strict=True)):
        missing = [old if is_there else place for old, is_there in zip(missing, there, strict=True)]
        end = (place + 1) * block_size
        if all(
            last < max(0, end - window + 1) // block_size  # as num_expired
            for last, window in zip(missing, windows, strict=True)
        ):
            longest = place + 1
    return longest


def _check(window: int | None, block_size: int) -> None:
    if block_size < 1 or (window is not None and window < 1):
        raise EngineError(
            f"window: expected a window and a block_size of at least 1, got {window} and "
            f"{block_size}."
        )
