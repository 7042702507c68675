"""The prefix cache: names of full blocks, what is found by them, and what is kept."""

import hashlib
from array import array
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from sys import byteorder
from typing import Literal

from engine.asked.request import Sequence
from engine.kv.pool import Retain, TieredBlockPool
from engine.plan.sizes import SwapRates

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
    """What the scheduler is told about content of blocks."""

    identity: tuple[str, ...] = ()
    """What the values in a block depend on beside tokens, as `root_key` takes it."""
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
    """
    moving_s = store_bytes / rates.store_bytes_s + load_bytes / rates.load_bytes_s
    return "swap" if moving_s * (1 - rates.overlap) <= recompute_s else "recompute"


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


PREPARE_TOKENS = 4096
"""Tokens whose keys are made at a time ahead of need."""


@dataclass(frozen=True, slots=True)
class Found:
    """Leading blocks behind which a sequence can begin; good until a pool changes."""

    num_blocks: int
    """How many."""
    num_gone: tuple[int, ...]
    """How many of them have expired, for each group of layers."""
    blocks: tuple[list[int], ...]
    """Those that have not, for each group."""
    num_missed: int
    """Blocks that could have been found behind them."""


class BlockContent:
    """Names full blocks, finds them again for sequences that begin or go on, and lets them go.

    With prefix caching a key depends on tokens and salt, and full blocks are named as they are
    computed. Without, keys are a sequence's own: its blocks are named when they are swapped out,
    and its content is forgotten when it ends. Each pool has keys of its own, so that groups of
    layers need no different ones; only the first group may attend to all tokens.
    """

    def __init__(self, pools: tuple[TieredBlockPool, ...], policy: KVPolicy) -> None:
        self._pools, self.policy = pools, policy
        self.block_size = pools[0].block_size
        self.has_host = all(pool.num_cpu_blocks > 0 for pool in pools)
        """Whether every group has a host tier, so that a whole sequence can be kept there."""
        self.retain: Literal["demote", "forget"] = "demote" if policy.prefix_caching else "forget"
        """What becomes of blocks that a sequence has no use for any more."""
        self._chains: dict[int, KeyChain] = {}

    @property
    def num_named(self) -> int:
        """Sequences whose keys are kept."""
        return len(self._chains)

    def find(self, sequence: Sequence, limit: int | None = None) -> Found:
        """Find the leading blocks behind which a sequence can begin, at most `limit`."""
        num_tokens = sequence.num_tokens
        may_find = self.policy.prefix_caching or sequence.seq_id in self._chains
        keys = self._keys(sequence, num_tokens) if may_find else []
        asked = min(len(keys), (num_tokens - 1) // self.block_size)
        count = asked if limit is None else min(asked, limit)
        size, whole = self.block_size, list[int]()
        if self._pools[0].window is None:
            whole = self._pools[0].find(keys[:count])
            count = len(whole)
        some = [(pool, pool.window) for pool in self._pools if pool.window is not None]
        if some:
            findable = [pool.findable(keys[:count]) for pool, _ in some]
            count = usable_prefix(findable, [window for _, window in some], size)
        gone = tuple(num_expired(count * size, pool.window, size) for pool in self._pools)
        blocks = tuple(
            whole[:count] if pool.window is None else pool.find(keys[first:count])
            for pool, first in zip(self._pools, gone, strict=True)
        )
        return Found(count, gone, blocks, asked - count)

    def num_unnamed(self, sequence: Sequence) -> int:
        """Return of how many full blocks of a sequence that waits the keys are still to be made."""
        if not self.policy.prefix_caching:
            return 0
        chain = self._chains.get(sequence.seq_id)
        return sequence.num_tokens // self.block_size - (len(chain.keys) if chain else 0)

    def prepare(self, sequence: Sequence) -> None:
        """Make the next keys of a sequence's known tokens, so that no step has to.

        Those of PREPARE_TOKENS tokens, as all of a very long prompt take longer than a step.
        """
        named = self.block_size * len(self._keys(sequence, 0))
        self._keys(sequence, min(sequence.num_tokens, named + PREPARE_TOKENS))

    def can_claim(self, found: Found, in_place: int) -> bool:
        """Return whether `claim` with the same arguments would succeed."""
        parts = zip(self._pools, found.blocks, strict=True)
        return all(pool.can_claim(blocks, in_place=in_place) for pool, blocks in parts)

    def claim(self, sequence: Sequence, found: Found, in_place: int, fill: int) -> None:
        """Give a sequence without blocks those found; it begins once what is loaded is there.

        At most `in_place` host blocks are used where they are; `fill` stands for expired blocks in
        block tables. Nothing may have changed since `find`.
        """
        pending, resumed = [], sequence.num_preemptions > 0
        for pool, blocks, gone in zip(self._pools, found.blocks, found.num_gone, strict=True):
            table, moves = pool.claim(
                blocks,
                num_missed=found.num_missed,
                in_place=in_place,
                resumed=resumed,
                num_unseen=gone,
            )
            sequence.block_tables.append([fill] * gone + table)
            pending.append(moves)
        sequence.num_gone = list(found.num_gone)
        sequence.num_computed = found.num_blocks * self.block_size
        sequence.num_named = found.num_blocks
        sequence.pending = tuple(pending)

    def is_pending(self, sequence: Sequence) -> bool:
        """Return whether content that a sequence begins behind is still on its way."""
        pending = zip(self._pools, sequence.pending, strict=True) if sequence.pending else ()
        return any(pool.ledger.is_pending(moves) for pool, moves in pending)

    def name(self, sequence: Sequence) -> None:
        """Make blocks findable that became full with a sequence's num_computed."""
        full = sequence.num_computed // self.block_size
        if not self.policy.prefix_caching or full <= sequence.num_named:
            return
        keys = self._keys(sequence, sequence.num_computed)
        for pool, table, gone in self.tables(sequence):
            for place in range(max(gone, sequence.num_named), full):
                pool.register(table[place], keys[place])
        sequence.num_named = full

    def expire(self, pool: TieredBlockPool, blocks: SequenceOf[int], num_prompt: int) -> None:
        """Give back blocks of a sequence that no token sees any more.

        They come in the order of the table; the first `num_prompt` hold nothing but the prompt.
        Others may begin behind a part of it; behind a part of the output that is unlikely, so that
        its blocks are not stored when they are taken.
        """
        if not self.policy.prefix_caching:
            pool.free(blocks, "forget")
            return
        pool.free(blocks[:num_prompt], "demote")
        pool.free(blocks[num_prompt:], "drop")

    def would_swap(self, sequence: Sequence) -> bool:
        """Return whether a sequence's content would go to the host tier if it were preempted."""
        full, rates = sequence.num_computed // self.block_size, self.policy.swap_rates
        if not full or not self.has_host:
            return False
        if rates is None:
            return True
        store_bytes = load_bytes = 0
        for pool, table, gone in self.tables(sequence):
            store_bytes += pool.num_lacking(table[gone:full]) * pool.block_bytes
            load_bytes += (full - gone) * pool.block_bytes
        recompute_s = full * self.block_size * self.policy.recompute_token_s
        return swap_or_recompute(store_bytes, load_bytes, rates, recompute_s) == "swap"

    def preempt(self, sequence: Sequence) -> Literal["swap", "recompute"]:
        """Take a sequence's blocks away and return how it goes on; its tables stay as they are.

        Swapped content is stored as far as there is room; what is lost is computed again.
        """
        full = sequence.num_computed // self.block_size
        parts = self.tables(sequence)
        if not self.would_swap(sequence):
            retain: Retain = "drop" if self.policy.prefix_caching else "forget"
            for pool, table, gone in parts:
                pool.free(table[gone:], retain)
            return "recompute"
        keys = self._keys(sequence, sequence.num_computed)
        for pool, table, gone in parts:
            pool.swap_out(table[gone:], keys[gone:full])
        return "swap"

    def forget(self, sequence: Sequence, *, is_bad: bool = False) -> None:
        """Note that a sequence ended; without prefix caching, or if it is bad, its content goes."""
        chain = self._chains.pop(sequence.seq_id, None)
        if chain is not None and (is_bad or not self.policy.prefix_caching):
            for pool in self._pools:
                pool.forget(chain.keys)

    def tables(self, sequence: Sequence) -> list[tuple[TieredBlockPool, list[int], int]]:
        """Return each group's pool, a sequence's block table there, and where its blocks begin."""
        return list(zip(self._pools, sequence.block_tables, sequence.num_gone, strict=True))

    def _keys(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """Return the keys of the full blocks of at least so many leading tokens."""
        chain = self._chains.get(sequence.seq_id)
        if chain is None:
            salt = sequence.params.cache_salt
            if not self.policy.prefix_caching:
                salt = f"sequence {sequence.seq_id}"
            elif salt is not None:
                salt = f"request {salt}"
            chain = self._chains[sequence.seq_id] = KeyChain(
                root_key(self.policy.identity, self.block_size, salt), self.block_size
            )
        return chain.extend(sequence.tokens, num_tokens)
