"""What blocks of sequences hold: their keys, what is found of them, and what is kept of them."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Literal

from engine.kv.hashing import BlockHasher, KeyChain
from engine.kv.policy import KVPolicy, swap_or_recompute
from engine.kv.pool_types import Match, Retain
from engine.kv.tiers import TieredBlockPool
from engine.kv.window import num_expired, usable_prefix
from engine.request import Sequence

PREPARE_TOKENS = 4096
"""Tokens whose keys are made at a time ahead of need."""


@dataclass(frozen=True, slots=True)
class Found:
    """Leading blocks behind which a sequence can begin; good until a pool changes."""

    num_blocks: int
    """How many."""
    num_gone: tuple[int, ...]
    """Of those how many have expired, for each group of layers; they are not in the matches."""
    matches: tuple[Match, ...]


class BlockContent:
    """Names full blocks, finds them again for sequences that begin or go on, and lets them go.

    With prefix caching a key depends on tokens and salt, and full blocks are named as they are
    computed. Without, keys are a sequence's own: its blocks are named when they are swapped out,
    and its content is forgotten when it ends. Each pool has keys of its own, so that groups of
    layers need no different ones.

    Args:
        pools: One for each group of layers.
        windows: Most tokens that each group attends to; None: all.
        policy: Whether to share, and what moving costs.
    """

    def __init__(
        self,
        pools: tuple[TieredBlockPool, ...],
        windows: tuple[int | None, ...],
        policy: KVPolicy,
    ) -> None:
        self._pools, self._windows, self.policy = pools, windows, policy
        self.block_size = pools[0].block_size
        self.has_host = all(pool.num_cpu_blocks > 0 for pool in pools)
        """Whether every group has a host tier, so that a whole sequence can be kept there."""
        self.retain: Literal["demote", "forget"] = "demote" if policy.prefix_caching else "forget"
        """What becomes of blocks that a sequence has no use for any more."""
        self._hasher = BlockHasher(policy.identity, self.block_size)
        self._chains: dict[int, KeyChain] = {}

    def find(self, sequence: Sequence, limit: int | None = None) -> Found:
        """Find the leading blocks behind which a sequence can begin, at most `limit`."""
        num_tokens = sequence.num_tokens
        keys = self._keys(sequence, num_tokens) if self._may_find(sequence) else []
        asked = min(len(keys), (num_tokens - 1) // self.block_size)
        count = asked if limit is None else min(asked, limit)
        matches = []
        for pool, window in self._groups:
            if window is None:
                matches.append(pool.match(keys[:count], count * self.block_size + 1))
                count = len(matches[-1].blocks)
            else:
                findable = pool.findable(keys[:count])
                count = usable_prefix(findable, window, self.block_size)
        gone = tuple(
            num_expired(count * self.block_size, w, self.block_size) for w in self._windows
        )
        for group, (pool, window) in enumerate(self._groups):
            first = gone[group]
            if window is not None:
                num_tokens = (count - first) * self.block_size + 1
                matches.insert(group, pool.match(keys[first:count], num_tokens))
            matches[group] = matches[group].cut(count - first, missed=asked - count)
        return Found(count, gone, tuple(matches))

    def num_unnamed(self, sequence: Sequence) -> int:
        """Return of how many full blocks of a sequence that waits the keys are still to be made."""
        if not self.policy.prefix_caching:
            return 0
        chain = self._chains.get(sequence.seq_id)
        known = 0 if chain is None else len(chain.keys)
        return sequence.num_tokens // self.block_size - known

    def prepare(self, sequence: Sequence) -> None:
        """Make the next keys of a sequence's known tokens, so that no step has to.

        Those of PREPARE_TOKENS tokens, as all of a very long prompt take longer than a step.
        """
        named = self.block_size * len(self._keys(sequence, 0))
        self._keys(sequence, min(sequence.num_tokens, named + PREPARE_TOKENS))

    def num_shared(self, found: Found) -> tuple[int, ...]:
        """Return for each group how many of the blocks found take no room, as they have owners."""
        matches = zip(self._pools, found.matches, strict=True)
        return tuple(pool.num_owned_gpu(match.blocks) for pool, match in matches)

    def can_claim(self, found: Found, in_place: int) -> bool:
        """Return whether `claim` with the same arguments would succeed."""
        return all(
            pool.can_claim(match, in_place=0 if group else in_place)
            for group, (pool, match) in enumerate(zip(self._pools, found.matches, strict=True))
        )

    def claim(self, sequence: Sequence, found: Found, in_place: int, fill: int) -> None:
        """Give a sequence the blocks found; it begins behind them once what is loaded is there.

        Args:
            sequence: Has no blocks.
            found: From `find`, with nothing changed since.
            in_place: Of host blocks of the first group how many to use where they are, at most.
            fill: Stands for expired blocks in block tables.
        """
        pending = []
        resumed = sequence.num_preemptions > 0
        for group, (pool, match) in enumerate(zip(self._pools, found.matches, strict=True)):
            claim = pool.claim(match, in_place=0 if group else in_place, resumed=resumed)
            if not resumed:
                pool.count_unseen(found.num_gone[group], match)
            table = sequence.block_tables[group]
            table.extend([fill] * found.num_gone[group])
            table.extend(claim.blocks)
            pending.append(claim.pending)
        sequence.num_gone = found.num_gone[-1]
        sequence.num_computed = found.num_blocks * self.block_size
        sequence.num_named = found.num_blocks
        sequence.pending = tuple(pending)

    def is_pending(self, sequence: Sequence) -> bool:
        """Return whether content that a sequence begins behind is still on its way."""
        return any(
            pool.is_pending(moves)
            for pool, moves in zip(self._pools, sequence.pending, strict=False)
        )

    def name(self, sequence: Sequence) -> None:
        """Make blocks findable that became full with a sequence's num_computed."""
        full = sequence.num_computed // self.block_size
        if not self.policy.prefix_caching or full <= sequence.num_named:
            return
        keys = self._keys(sequence, sequence.num_computed)
        for pool, table, gone in self._tables(sequence):
            for place in range(max(gone, sequence.num_named), full):
                pool.register(table[place], keys[place])
        sequence.num_named = full

    def expire(
        self, sequence: Sequence, pool: TieredBlockPool, table: SequenceOf[int], end: int
    ) -> None:
        """Give back a table's blocks from the first that is not gone to `end`.

        Others may begin behind a part of the prompt; behind a part of the output that is unlikely,
        so that its blocks are not stored when they are taken.
        """
        if not self.policy.prefix_caching:
            pool.free(table[sequence.num_gone : end], "forget")
            return
        edge = max(sequence.num_gone, min(end, sequence.num_prompt_tokens // self.block_size))
        pool.free(table[sequence.num_gone : edge], "demote")
        pool.free(table[edge:end], "drop")

    def would_swap(self, sequence: Sequence) -> bool:
        """Return whether a sequence's content would go to the host tier if it were preempted."""
        full, rates = sequence.num_computed // self.block_size, self.policy.swap_rates
        if not full or not self.has_host:
            return False
        if rates is None:
            return True
        store_bytes = load_bytes = 0
        parts = zip(self._tables(sequence), self.policy.block_bytes, strict=False)
        for (pool, table, gone), block_bytes in parts:
            store_bytes += pool.num_lacking(table[gone:full]) * block_bytes
            load_bytes += (full - gone) * block_bytes
        recompute_s = full * self.block_size * self.policy.recompute_token_s
        return swap_or_recompute(store_bytes, load_bytes, rates, recompute_s) == "swap"

    def preempt(self, sequence: Sequence) -> Literal["swap", "recompute"]:
        """Take a sequence's blocks away and return how it goes on; its tables stay as they are.

        Swapped content is stored as far as there is room; what is lost is computed again.
        """
        full = sequence.num_computed // self.block_size
        parts = self._tables(sequence)
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

    @property
    def _groups(self) -> list[tuple[TieredBlockPool, int | None]]:
        return list(zip(self._pools, self._windows, strict=True))

    def _tables(self, sequence: Sequence) -> list[tuple[TieredBlockPool, list[int], int]]:
        """Return each group's pool, a sequence's block table there, and where its blocks begin."""
        tables = zip(self._groups, sequence.block_tables, strict=False)
        return [
            (pool, table, 0 if window is None else sequence.num_gone)
            for (pool, window), table in tables
        ]

    def _may_find(self, sequence: Sequence) -> bool:
        return self.policy.prefix_caching or sequence.seq_id in self._chains

    def _keys(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """Return the keys of the full blocks of at least so many leading tokens."""
        chain = self._chains.get(sequence.seq_id)
        if chain is None:
            salt = sequence.params.cache_salt
            if not self.policy.prefix_caching:
                salt = f"sequence {sequence.seq_id}"
            elif salt is not None:
                salt = f"request {salt}"
            chain = self._chains[sequence.seq_id] = KeyChain(self._hasher, salt)
        return chain.extend(sequence.tokens, num_tokens)
