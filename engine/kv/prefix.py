"""The prefix cache: keys of full blocks, what of a prefix is of use, and what is kept."""

import hashlib
from array import array
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from sys import byteorder
from typing import Literal

from engine.plan.sizes import NO_COSTS, SwapRates, TierCosts

DIGEST_BYTES = 32
"""Length of a key; long enough that two contents with one key need not be considered."""


def root_key(identity: SequenceOf[str], block_size: int, salt: str | None = None) -> bytes:
    """Return the parent of first blocks: a digest of what values depend on beside tokens.

    `identity` says that in a fixed order: the weights (source and revision, or shape and seed), the
    dtype, whether windows are disabled. None is a salt of its own, and salts share nothing.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    parts = [*identity, str(block_size), *([] if salt is None else [salt])]
    digest.update(f"{len(identity)},{len(parts)}".encode())
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        # The length first, so that no two lists of parts give one string of bytes.
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.digest()


def block_keys(parent: bytes, token_ids: SequenceOf[int], block_size: int) -> list[bytes]:
    """Return the keys of the full blocks of tokens (below 2^32) that follow `parent`, in order.

    A key is a digest of its parent (the key of the block before, or a root) and its own token ids.
    Equal keys therefore mean equal tokens from position 0 on, computed by the same model, in the
    same dtype, under the same salt.
    """
    values = array("I", token_ids)
    if byteorder == "big":
        values.byteswap()
    raw, size = values.tobytes(), block_size * values.itemsize
    keys, digest = [], hashlib.blake2b
    for start in range(0, len(raw) - size + 1, size):
        parent = digest(parent + raw[start : start + size], digest_size=DIGEST_BYTES).digest()
        keys.append(parent)
    return keys


class KeyChain:
    """The keys of one sequence's full blocks in order, from a root; grows with the sequence."""

    def __init__(self, root: bytes, block_size: int) -> None:
        self._root, self._size = root, block_size
        self.keys: list[bytes] = []

    def extend(self, tokens: Callable[[int, int], SequenceOf[int]], num_tokens: int) -> list[bytes]:
        """Add the keys of blocks that became full with `num_tokens` tokens; return all keys.

        `tokens` returns those at positions start to stop - 1; those that were named before are not
        asked for again and must not have changed.
        """
        start, stop = len(self.keys) * self._size, num_tokens - num_tokens % self._size
        if stop > start:
            parent = self.keys[-1] if self.keys else self._root
            self.keys += block_keys(parent, tokens(start, stop), self._size)
        return self.keys


@dataclass(frozen=True, kw_only=True)
class KVPolicy:
    """What the scheduler is told about content of blocks, and what moving it costs."""

    identity: tuple[str, ...] = ()
    """What the values in a block depend on beside tokens, as `root_key` takes it."""
    prefix_caching: bool = False
    """Whether sequences find what others computed; if not, a sequence finds its own alone."""
    is_routed: bool = False
    """Whether experts are those of a table, in which a sequence's place is a salt of its blocks."""
    costs: TierCosts = NO_COSTS


def swap_or_recompute(
    store_bytes: int, load_bytes: int, rates: SwapRates, recompute_s: float
) -> Literal["swap", "recompute"]:
    """Return how a preempted sequence goes on for less; by moving where both cost the same.

    Args:
        store_bytes: To be written to the host tier now; blocks with a copy there cost nothing.
        load_bytes: To be read back when the sequence goes on.
        rates: What the plan expects of the link.
        recompute_s: To compute the same tokens again, seconds.
    """
    moving_s = store_bytes / rates.store_bytes_s + load_bytes / rates.load_bytes_s
    return "swap" if moving_s <= recompute_s else "recompute"


def num_expired(num_computed: int, window: int | None, block_size: int) -> int:
    """Return how many leading blocks no token from position `num_computed` on sees.

    A token sees the newest `window` tokens, itself included; None: all.
    """
    return 0 if window is None else max(0, num_computed - window + 1) // block_size


def usable_prefix(
    cached: SequenceOf[SequenceOf[bool]], windows: SequenceOf[int], block_size: int
) -> int:
    """Return the longest prefix, in blocks, behind which a sequence can go on.

    `cached` says for each group of layers and each leading block whether it is there; those that
    have expired in a group's window at the prefix's end need not be.
    """
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
