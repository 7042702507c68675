"""BlockGroups: blocks of sequences in every group of layers, and how they are used.

Each group has a cache, a pool and a block table a sequence of its own. A table keeps its length:
position p lies in its entry p // block_size; entries whose blocks were given back are GONE, which
nothing reads. All tables of a sequence have one length.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from typing import Any, Literal

from engine.asked.request import Sequence
from engine.errors import EngineError
from engine.kv.pool import Retain, Room, TieredBlockPool
from engine.kv.prefix import (
    KeyChain,
    KVPolicy,
    num_expired,
    root_key,
    swap_or_recompute,
    usable_prefix,
)
from engine.model.routing import first_row
from engine.plan.memory import MemoryPlan
from engine.plan.sizes import NO_COSTS, NO_LIMIT, num_held

GONE = -1
AHEAD_PARTS = 8
"""Blocks are stored ahead in so many parts of what a step could take."""


LONG_PARTS = 16
"""A sequence that leaves less than such a part of the GPU's room to others is long."""
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
    """Blocks that have not expired, for each group."""
    num_missed: int
    """Blocks that could have been found behind them."""


class BlockGroups:
    """Takes, names, finds and gives back the blocks of sequences, in all groups at once.

    A sequence's blocks lie on the GPU. One that is long, or alone, may take blocks of the host tier
    as well, where a pool has such in place: those that the GPU has no room for. They stay where
    they are, but for `demote` and `promote`.

    In groups behind the first the layers have a window, and sequences own no host blocks. A step
    has at most `step_tokens` tokens.

    With prefix caching a key depends on tokens and salt, and full blocks are named as they are
    computed. Without, keys are a sequence's own: its blocks are named when they are swapped out,
    and its content is forgotten when it ends. Each pool has keys of its own, so that groups of
    layers need no different ones; only the first group may attend to all tokens.
    """

    def __init__(
        self,
        pools: SequenceOf[TieredBlockPool],
        step_tokens: int,
        policy: KVPolicy | None = None,
    ) -> None:
        self.pools = tuple(pools)
        first, *others = self.pools
        assert all(pool.window and not pool.num_in_place for pool in others)
        self.block_size = first.block_size
        self._step_tokens = step_tokens
        self._with_window = [item for item in enumerate(self.pools) if item[1].window is not None]
        self.policy = KVPolicy() if policy is None else policy
        self.has_host = all(pool.num_cpu_blocks > 0 for pool in self.pools)
        """Whether every group has a host tier, so that a whole sequence can be kept there."""
        self._retain: Retain = "demote" if self.policy.prefix_caching else "forget"
        """What becomes of blocks that a sequence has no use for any more."""
        self._drop: Retain = "drop" if self.policy.prefix_caching else "forget"
        """What becomes of them where it is unlikely that others have a use for them."""
        self._chains: dict[int, KeyChain] = {}
        self.gpu_room = first.num_free
        """Blocks of the first group that the GPU has for sequences."""
        self.long_tokens = self._long_tokens()
        """A sequence of more tokens is long: it may own host blocks."""
        self.num_given_back = 0
        """Counts times that blocks were given back, by owners or by moves that are done."""
        self._ahead = [0] * len(self.pools)

    @classmethod
    def planned(
        cls, plan: MemoryPlan, identity: tuple[str, ...] = (), *, is_routed: bool = False
    ) -> "BlockGroups":
        """Return the groups of a plan; `identity` and `is_routed` are as `KVPolicy` has them."""
        pools = [
            TieredBlockPool(
                group.num_gpu_blocks,
                group.num_host_blocks,
                plan.block_size,
                num_in_place=group.num_in_place,
                window=group.window,
                block_bytes=group.block_bytes,
            )
            for group in plan.kv.groups
        ]
        policy = KVPolicy(
            identity=identity,
            prefix_caching=plan.prefix_caching,
            is_routed=is_routed,
            costs=NO_COSTS if plan.host_kv is None else plan.host_kv.costs,
        )
        return cls(pools, plan.max_num_batched_tokens, policy)

    @property
    def num_named(self) -> int:
        """Sequences whose keys are kept."""
        return len(self._chains)

    def need(self, num_tokens: int) -> tuple[int, ...]:
        """Return the blocks of each group that a sequence of so many tokens holds in a step."""
        step, size = self._step_tokens, self.block_size
        return tuple(num_held(num_tokens, pool.window, step, size) for pool in self.pools)

    def _long_tokens(self) -> int:
        """Leave some room for others beside the longest sequence that is not long."""
        room, longest = self.gpu_room, self.pools[0].num_blocks * self.block_size
        if not self.pools[0].num_in_place or self.need(longest)[0] <= room:
            return NO_LIMIT
        return (room - room // LONG_PARTS) * self.block_size

    def is_long(self, sequence: Sequence) -> bool:
        """Return whether a sequence may own host blocks, as the GPU has hardly room for it."""
        return sequence.num_tokens > self.long_tokens

    def num_over(self, num_tokens: int) -> int:
        """Return how many blocks of so many tokens the GPU could never hold."""
        return max(0, self.need(num_tokens)[0] - self.gpu_room)

    def num_lacking(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many blocks of each group a sequence's first `num_tokens` tokens lack."""
        return max(0, -(-num_tokens // self.block_size) - len(sequence.block_tables[0]))

    def find(self, sequence: Sequence, limit: int | None = None) -> Found:
        """Find the leading blocks behind which a sequence can begin, at most `limit`."""
        num_tokens = sequence.num_tokens
        if sequence.lacks_prompt_logprobs:
            limit = 0
        may_find = self.policy.prefix_caching or sequence.seq_id in self._chains
        keys = self._keys(sequence, num_tokens) if may_find else []
        asked = min(len(keys), (num_tokens - 1) // self.block_size)
        count = asked if limit is None else min(asked, limit)
        size, whole = self.block_size, list[int]()
        if self.pools[0].window is None:
            whole = self.pools[0].find(keys[:count])
            count = len(whole)
        some = [(pool, pool.window) for pool in self.pools if pool.window is not None]
        if some:
            findable = [pool.findable(keys[:count]) for pool, _ in some]
            count = usable_prefix(findable, [window for _, window in some], size)
        gone = tuple(num_expired(count * size, pool.window, size) for pool in self.pools)
        blocks = tuple(
            whole[:count] if pool.window is None else pool.find(keys[first:count])
            for pool, first in zip(self.pools, gone, strict=True)
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

        They are those of PREPARE_TOKENS tokens: all of a very long prompt take longer than a step.
        """
        named = self.block_size * len(self._keys(sequence, 0))
        self._keys(sequence, min(sequence.num_tokens, named + PREPARE_TOKENS))

    def is_pending(self, sequence: Sequence) -> bool:
        """Return whether content that a sequence begins behind is still on its way."""
        pending = zip(self.pools, sequence.pending, strict=True) if sequence.pending else ()
        return any(pool.ledger.is_pending(moves) for pool, moves in pending)

    def can_admit(
        self,
        sequence: Sequence,
        most: int,
        found: Found,
        running: Iterable[tuple[Sequence, int, int]],
        more_tokens: int,
    ) -> bool:
        """Return whether a sequence has room on the GPU beside what running ones still need.

        One that is long has it on both tiers.

        Args:
            sequence: One that waits.
            most: Most tokens that it will compute.
            found: Blocks behind which it could begin.
            running: As for `num_spare`.
            more_tokens: For so many tokens beyond the known ones it is to have room if it can grow.
        """
        left, beyond = self._spare(running, more_tokens)
        known = sequence.num_tokens
        wanted = self.need(max(known, min(most, known + more_tokens)))
        parts = zip(self.pools, found.blocks, strict=True)
        shared = [pool.num_owned_gpu(blocks) for pool, blocks in parts]
        host = self.pools[0].num_free_in_place - beyond
        if self.is_long(sequence):
            left[0] += host
            shared[0] += self.pools[0].num_owned_host(found.blocks[0])
        else:
            left[0] += min(0, host)
        return all(n >= w - s for n, w, s in zip(left, wanted, shared, strict=True))

    def num_spare(
        self, running: Iterable[tuple[Sequence, int, int]], more_tokens: int
    ) -> list[int]:
        """Return the blocks of each group that are free on the GPU and not needed soon.

        Long sequences need none of the first group.

        Args:
            running: Sequences, their known tokens and the most that each will compute.
            more_tokens: For so many tokens beyond the known ones every sequence is to have room if
                it can grow; with 0, room for one block each.
        """
        return self._spare(running, more_tokens)[0]

    def _spare(
        self, running: Iterable[tuple[Sequence, int, int]], more_tokens: int
    ) -> tuple[list[int], int]:
        """Return `num_spare`, and the blocks of the first group that long ones need soon."""
        size, left, beyond = self.block_size, [pool.num_free for pool in self.pools], 0
        more = max(1, -(-more_tokens // size))
        for sequence, known, most in running:
            end = min(-(-most // size), -(-known // size) + more)
            parts = zip(self.need(most), sequence.block_tables, sequence.num_gone, strict=True)
            lacking = [
                max(0, min(end - len(table), held - (len(table) - gone)))
                for held, table, gone in parts
            ]
            if self.is_long(sequence):
                beyond, lacking[0] = beyond + lacking[0], 0
            left = [n - each for n, each in zip(left, lacking, strict=True)]
        return left, beyond

    def extend(self, sequence: Sequence, start: int, want: int, room: Room, keep: int = 0) -> int:
        """Give a sequence blocks for up to `want` tokens from `start` on; return for how many.

        It has blocks for those before `start`. With room "either" host blocks serve where GPU
        blocks are short, and before `keep` of those are taken.
        """
        lacking = self.num_lacking(sequence, start + want)
        if lacking == 0:
            return want
        first, *others = self.pools
        count = min(lacking, *[pool.num_free for pool in others], first.num_allocatable(room, keep))
        if not count and keep:
            return self.extend(sequence, start, want, room)
        granted = min(want, (len(sequence.block_tables[0]) + count) * self.block_size - start)
        if granted > 0:
            # In rising order, so that neighbours can be copied as one.
            sequence.block_tables[0].extend(sorted(first.allocate(count, room, keep)))
            for pool, table in zip(others, sequence.block_tables[1:], strict=True):
                table.extend(sorted(pool.allocate(count)))
        return max(0, granted)

    def num_allocatable(self, room: Room) -> int:
        """Return how many blocks every group can hand out."""
        first, *others = self.pools
        return min([first.num_allocatable(room), *[pool.num_free for pool in others]])

    def begin(self, sequence: Sequence, found: Found, *, alone: bool, keep: int = 0) -> bool:
        """Give a sequence the blocks found just now; return whether there is room for them.

        It runs once what is loaded of them is there (`is_pending`).
        One that is long or alone begins behind as many of them as there is room for; of one that is
        long what the GPU could never hold, or has no room for now beside `keep` blocks of others,
        stays in the host tier.
        """
        in_place, is_long = 0, self.is_long(sequence)
        if is_long:
            over = self.num_over(sequence.num_tokens)
            in_place = max(over, self.pools[0].num_too_many(found.blocks[0], keep))
        if not self._can_claim(found, in_place):
            if not alone and not is_long:
                return False
            found = self._most_that_fits(sequence, found, in_place)
        pending, resumed = [], sequence.num_preemptions > 0
        for pool, blocks, gone in zip(self.pools, found.blocks, found.num_gone, strict=True):
            table, moves = pool.claim(
                blocks,
                num_missed=found.num_missed,
                in_place=in_place,
                resumed=resumed,
                num_unseen=gone,
            )
            sequence.block_tables.append([GONE] * gone + table)
            pending.append(moves)
        sequence.num_gone = list(found.num_gone)
        sequence.num_computed = found.num_blocks * self.block_size
        sequence.num_named = found.num_blocks
        sequence.pending = tuple(pending)
        return True

    def _can_claim(self, found: Found, in_place: int) -> bool:
        parts = zip(self.pools, found.blocks, strict=True)
        return all(pool.can_claim(blocks, in_place=in_place) for pool, blocks in parts)

    def _most_that_fits(self, sequence: Sequence, found: Found, in_place: int) -> Found:
        """Search for the longest prefix that can be claimed; none always can."""
        best, low, high = self.find(sequence, 0), 0, found.num_blocks
        while high - low > 1:
            middle = (low + high) // 2
            shorter = self.find(sequence, middle)
            if self._can_claim(shorter, in_place):
                best, low = shorter, middle
            else:
                high = middle
        return best

    def advance(self, sequence: Sequence) -> None:
        """Make blocks findable that became full, and give back those that no token sees any more.

        To be called once num_computed has grown. Blocks are judged by the start of the last full
        block, from which a sequence goes on after a swap. Every step in force or still to be
        planned begins there or later, the one in flight included, and so reads none of them: its
        first token, at position s, sees positions s - window + 1 and up. What was given back is
        written by its next owner in a step that is planned later, and steps run in order on one
        stream, behind all that may still read it; moves run behind the steps before them.
        """
        size, full = self.block_size, sequence.num_computed // self.block_size
        if self.policy.prefix_caching and full > sequence.num_named:
            keys = self._keys(sequence, sequence.num_computed)
            for pool, table, gone in self._parts(sequence):
                for place in range(max(gone, sequence.num_named), full):
                    pool.register(table[place], keys[place])
            sequence.num_named = full
        for group, pool in self._with_window:
            table, gone = sequence.block_tables[group], sequence.num_gone[group]
            end = min(len(table), num_expired(full * size, pool.window, size))
            if end > gone:
                num_prompt = max(0, sequence.num_prompt_tokens // size - gone)
                # Others may begin behind a part of the prompt. Behind a part of the output that is
                # unlikely: its blocks are not stored when they are taken.
                pool.free(table[gone:end][:num_prompt], self._retain)
                pool.free(table[gone:end][num_prompt:], self._drop)
                table[gone:end] = [GONE] * (end - gone)
                sequence.num_gone[group] = end
                self.num_given_back += 1

    def truncate(self, sequence: Sequence, num_tokens: int) -> int:
        """Take computed tokens of a sequence back; return how many remain, at most `num_tokens`.

        Blocks beyond them are given back. Fewer remain where a findable block would be written
        again; where a window's blocks before them are gone the sequence begins anew. No step that
        is planned runs it.

        Raises:
            EngineError: It was computed less far, or its content is still on its way.
        """
        if num_tokens > sequence.num_computed or self.is_pending(sequence):
            raise EngineError(
                f"block groups: expected at most {sequence.num_computed} tokens of sequence "
                f"{sequence.seq_id} to remain computed, all of them there, got {num_tokens}."
            )
        size = self.block_size
        if num_tokens // size < sequence.num_named:
            num_tokens -= num_tokens % size
        parts = self._parts(sequence)
        if any(num_expired(num_tokens, pool.window, size) < gone for pool, _, gone in parts):
            num_tokens = 0
        keep = -(-num_tokens // size)
        for group, (pool, table, gone) in enumerate(parts):
            pool.free(table[max(gone, keep) :], self._retain)
            del table[keep:]
            sequence.num_gone[group] = min(gone, keep)
        sequence.num_named = min(sequence.num_named, num_tokens // size)
        sequence.num_computed = num_tokens
        sequence.table_version += 1
        self.num_given_back += 1
        return num_tokens

    def movable(self, sequences: SequenceOf[Sequence]) -> tuple[Counter[int], Counter[int]]:
        """Return full blocks of the first group that these sequences alone own, and how many do.

        First those on the GPU, then those in the host tier. All have a key: they get it now where
        they had none, without prefix caching or because an equal block of their tier had it.
        """
        pool, size, counts = self.pools[0], self.block_size, Counter[int]()
        for sequence in sequences:
            gone, full = sequence.num_gone[0], sequence.num_computed // size
            counts.update(sequence.block_tables[0][gone:full])
        owners, keys = pool.states.owners, pool.states.keys
        nameless = {block_id for block_id in counts if keys[block_id] is None}
        for sequence in sequences if nameless else ():
            known = self._keys(sequence, sequence.num_computed)
            for block_id, key in zip(sequence.block_tables[0], known, strict=False):
                if block_id in nameless:
                    pool.register(block_id, key)
        near, far = Counter[int](), Counter[int]()
        for block_id, count in counts.items():
            if owners[block_id] == count and keys[block_id] is not None:
                (near if block_id < pool.num_gpu_blocks else far)[block_id] = count
        return near, far

    def demote(self, sequences: SequenceOf[Sequence], block_ids: SequenceOf[int]) -> int:
        """Let sequences use host blocks instead of GPU blocks, as far as there are any.

        No step in force may run them. They run once their content is there (`is_pending`).

        Args:
            sequences: All owners of the blocks.
            block_ids: Blocks that are `movable`.

        Returns:
            How many GPU blocks are free for it.
        """
        new = self.pools[0].demote(block_ids)
        self._replace(sequences, new)
        self.num_given_back += 1
        return len(new)

    def copy(self, block_ids: SequenceOf[int]) -> None:
        """Store copies of GPU blocks that are `movable`, so that `demote` need not bring them."""
        self.pools[0].copy(block_ids)

    def promote(self, sequences: SequenceOf[Sequence], block_ids: SequenceOf[int]) -> int:
        """Let sequences use GPU blocks instead of host blocks; as `demote`, return how many."""
        new = self.pools[0].promote(block_ids)
        self._replace(sequences, new)
        return len(new)

    def _replace(self, sequences: Iterable[Sequence], new: Mapping[int, int]) -> None:
        """Put other blocks into tables."""
        for sequence in sequences:
            table = sequence.block_tables[0]
            if new.keys().isdisjoint(table):
                continue
            table[:] = [new.get(block_id, block_id) for block_id in table]
            sequence.table_version += 1
            moves = self.pools[0].ledger.incoming_to(table)
            sequence.pending = (moves, *[frozenset()] * (len(self.pools) - 1))

    def would_swap(self, sequence: Sequence) -> bool:
        """Return whether a sequence's content would go to the host tier if it were preempted."""
        full, costs = sequence.num_computed // self.block_size, self.policy.costs
        if not full or not self.has_host:
            return False
        if costs.swap_rates is None:
            return True
        store_bytes = load_bytes = 0
        for pool, table, gone in self._parts(sequence):
            store_bytes += pool.num_lacking(table[gone:full]) * pool.block_bytes
            load_bytes += (full - gone) * pool.block_bytes
        recompute_s = full * self.block_size * costs.recompute_token_s
        return swap_or_recompute(store_bytes, load_bytes, costs.swap_rates, recompute_s) == "swap"

    def preempt(self, sequence: Sequence) -> Literal["swap", "recompute"]:
        """Take all blocks of a sequence away; return how it goes on later.

        Swapped content is stored as far as there is room; what is lost is computed again.
        """
        swaps, full = self.would_swap(sequence), sequence.num_computed // self.block_size
        keys = self._keys(sequence, sequence.num_computed) if swaps else []
        for pool, table, gone in self._parts(sequence):
            if swaps:
                pool.swap_out(table[gone:], keys[gone:full])
            else:
                pool.free(table[gone:], self._drop)
        sequence.drop_blocks()
        self.num_given_back += 1
        return "swap" if swaps else "recompute"

    def release(self, sequence: Sequence, *, is_bad: bool = False) -> None:
        """Give back all blocks of a sequence that ended; if it is bad, forget what they hold."""
        if sequence.block_tables:
            for pool, table, gone in self._parts(sequence):
                pool.free(table[gone:], self._retain)
            self.num_given_back += 1
        chain = self._chains.pop(sequence.seq_id, None)
        if chain is not None and (is_bad or not self.policy.prefix_caching):
            for pool in self.pools:
                pool.forget(chain.keys)
        sequence.drop_blocks()

    def _parts(self, sequence: Sequence) -> list[tuple[TieredBlockPool, list[int], int]]:
        """Return each group's pool, a sequence's block table there, and where its blocks begin."""
        return list(zip(self.pools, sequence.block_tables, sequence.num_gone, strict=True))

    def _keys(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """Return the keys of the full blocks of at least so many leading tokens."""
        chain = self._chains.get(sequence.seq_id)
        if chain is None:
            salt = sequence.params.cache_salt
            if not self.policy.prefix_caching:
                salt = f"sequence {sequence.seq_id}"
            elif salt is not None:
                salt = f"request {salt}"
            if self.policy.is_routed:
                salt = f"row {first_row(sequence.prompt_token_ids)} {salt}"
            chain = self._chains[sequence.seq_id] = KeyChain(
                root_key(self.policy.identity, self.block_size, salt), self.block_size
            )
        return chain.extend(sequence.tokens, num_tokens)

    def store_ahead(self, num_tokens: int) -> None:
        """Store what would give way next, as far as a step could take blocks.

        As many blocks are stored as the tokens of the step that was planned take, or a part of what
        a whole step could take, so that a step of decodes is not held up.
        """
        limit = max(1, self._step_tokens // self.block_size)
        most = max(limit // AHEAD_PARTS, -(-num_tokens // self.block_size), 1)
        for group, pool in enumerate(self.pools):
            if not pool.num_cpu_blocks:
                continue
            # Looking through the blocks pays once some of those that were ready are gone.
            num_changes = pool.states.num_gpu_changes - self._ahead[group]
            is_due = num_changes >= max(1, limit // AHEAD_PARTS)
            if is_due and pool.store_ahead(limit, most) < most:
                self._ahead[group] = pool.states.num_gpu_changes

    def check(self, max_model_len: int) -> None:
        """Return if a sequence of max_model_len tokens can run to its end when it is alone.

        Raises:
            EngineError: A pool is too small.
        """
        for pool, need in zip(self.pools, self.need(max_model_len), strict=True):
            room = pool.num_allocatable("either")
            if room >= need:
                continue
            size, what = pool.block_size, f"one sequence of max_model_len={max_model_len} tokens"
            if pool.window is not None:
                what += f" (a window of {pool.window}, and a step)"
            host = room - pool.num_free
            tiers = f" ({pool.num_free} on the GPU, {host} in place in the host tier)"
            raise EngineError(
                f"KV blocks: expected room for {what}, got {room} free blocks of {size} tokens"
                f"{tiers if host else ''} = {room * size}. Lower engine.max_model_len or give the "
                "KV cache more blocks."
            )


def kv_stats(groups: BlockGroups) -> dict[str, Any]:
    """Return the figures of all groups of layers, counts in blocks unless the name says otherwise.

    `gpu`, `cpu`, `evictions`, `stores_skipped` and `pool` are sums over the groups, and `groups`
    has each one's. `prefix` counts sequences that were not preempted: tokens that need not be
    computed, by where the first group had them, and bytes of the blocks found in all groups.
    """
    pools, size, first = groups.pools, groups.block_size, groups.pools[0].stats
    parts = [_of_pool(pool) for pool in pools]
    sums = {
        name: {key: sum(part[name][key] for part in parts) for key in counts}
        for name, counts in parts[0].items()
    }
    return {
        "block_bytes": pools[0].block_bytes,
        **sums,
        "prefix": {
            "hits_gpu_tokens": first.spared_gpu * size,
            "hits_cpu_tokens": first.spared_cpu * size,
            "missed_tokens": first.misses * size,
            "hits_gpu_bytes": sum(pool.stats.hits_gpu * pool.block_bytes for pool in pools),
            "hits_cpu_bytes": sum(pool.stats.hits_cpu * pool.block_bytes for pool in pools),
        },
        "stores_skipped": sums["pool"]["stores_skipped"],
        "groups": [
            part | {"block_bytes": pool.block_bytes}
            for part, pool in zip(parts, pools, strict=True)
        ],
    }


def _of_pool(pool: TieredBlockPool) -> dict[str, dict[str, int]]:
    stats, cpu = pool.stats, pool.use("cpu")
    return {
        "gpu": {"blocks": pool.num_gpu_blocks, **pool.use("gpu")},
        "cpu": {"blocks": pool.num_cpu_blocks, **cpu, "in_place": pool.num_in_place},
        "evictions": {
            "gpu_kept": stats.evicted_kept,
            "gpu_lost": stats.evicted_lost,
            "cpu": stats.evicted_cpu,
        },
        "pool": asdict(stats),
    }
