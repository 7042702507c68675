"""TieredBlockPool: one space of block ids over GPU and host memory, with a prefix cache over both.

Block ids and decisions only; the moves that it decides are executed elsewhere.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal

from engine.errors import EngineError
from engine.kv.eviction import BlockStates, PoolStats, Retain, Victims
from engine.kv.moves import MoveBatch

Tier = Literal["gpu", "cpu"]
"""Where a block lies."""
Room = Literal["gpu", "either"]
"""Where new blocks may come from; either: from the host tier what the GPU has not."""


@dataclass(frozen=True, slots=True)
class Match:
    """The longest run of leading blocks that are findable now; changes nothing."""

    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    """One block for each key, of the GPU where both tiers have it."""
    num_asked: int
    """Blocks that could have been found."""
    version: int
    """Counts changes of what is findable; while it stays, so does this."""

    def cut(self, num_blocks: int, *, missed: int) -> "Match":
        """Return the first blocks of it, with so many that were asked for beside them."""
        blocks = self.blocks[:num_blocks]
        return Match(self.keys[:num_blocks], blocks, len(blocks) + missed, self.version)


@dataclass(frozen=True, slots=True)
class Claim:
    """Blocks of a sequence that begins or goes on."""

    blocks: list[int]
    """Its block table: the blocks found."""
    pending: frozenset[int]
    """Moves in flight that bring this content; until they are complete it must not be read."""


@dataclass(frozen=True, slots=True)
class TierUse:
    """Blocks of one tier by what they are; the four add up to the tier's size."""

    owned: int
    cached: int
    """Without an owner, findable."""
    free: int
    in_transit: int
    """Host blocks without an owner that a move in flight reads or writes."""


class TieredBlockPool:
    """Hands out blocks of both tiers, remembers full ones by key, and decides what is copied.

    Ids 0 to num_gpu_blocks - 1 lie on the GPU, the next num_cpu_blocks in the host tier. A block
    with a key is full and never written again, so content moves freely: a key names at most one
    block of each tier. Of two equal blocks of one tier the first to be registered is findable, the
    other stays private to its owners; their tables do not change.

    Without an owner a block with a key stays findable until its block is needed: the one unused
    for longest goes first, of one sequence the tail before the head. On the GPU its content is
    then stored to the host tier, unless a copy is there. In the host tier copies of what is on
    the GPU go before anything else: so both tiers together hold as much as they can, and what
    was stored once is not stored again while there is room. A copy that was loaded stays behind
    in this sense. No owned block, and none of the request being served, ever gives way.

    Moves take time. A host block that one reads or writes is not handed out before `complete`. A
    GPU block is, and the move that brings it new content, or the next step, waits for those that
    still touch it. `decided_moves` are taken once for each step, after the compute of the step
    before has been enqueued.

    A method that raises has changed nothing.

    Args:
        num_gpu_blocks: Blocks on the GPU, at least 1.
        num_cpu_blocks: Blocks of the host tier.
        block_size: Tokens in a block, at least 1.
        num_in_place: Host blocks that compute can read and write where they are, the first ones;
            None: all. Sequences own no others.
        window: Most tokens that its layers attend to, at least 1; None: all.
        block_bytes: Bytes of a block in these layers.

    Raises:
        EngineError: A size is out of bounds.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        block_size: int,
        *,
        num_in_place: int | None = None,
        window: int | None = None,
        block_bytes: int = 1,
    ) -> None:
        in_place = num_cpu_blocks if num_in_place is None else num_in_place
        is_sized = num_gpu_blocks >= 1 and block_size >= 1 and 0 <= in_place <= num_cpu_blocks
        if not is_sized or (window is not None and window < 1):
            raise EngineError(
                "block pool: expected at least 1 GPU block of at least 1 token, 0 to "
                "num_cpu_blocks blocks in place, and a window of at least 1 token or none, got "
                f"{num_gpu_blocks} GPU blocks and {num_cpu_blocks} CPU blocks of {block_size} "
                f"tokens, {in_place} in place, window={window}."
            )
        self.num_gpu_blocks, self.num_cpu_blocks = num_gpu_blocks, num_cpu_blocks
        self.num_blocks = num_gpu_blocks + num_cpu_blocks
        self.num_in_place = in_place
        """Host blocks that compute can read and write where they are, the first ones."""
        self.block_size, self.window, self.block_bytes = block_size, window, block_bytes
        self.stats = PoolStats()
        self._states = BlockStates(num_gpu_blocks, num_cpu_blocks, in_place)
        self._victims = Victims(self._states, self.stats)

    @property
    def num_free(self) -> int:
        """GPU blocks without an owner: what `allocate` can hand out."""
        return self._states.num_available_gpu

    @property
    def num_used(self) -> int:
        """GPU blocks with an owner."""
        return self._states.num_owned_gpu

    @property
    def num_changes(self) -> int:
        """Counts GPU blocks that became owned, free or findable."""
        return self._states.num_gpu_changes

    @property
    def idle_gpu(self) -> tuple[int, ...]:
        """GPU blocks that are findable and have no owner, the next to give way first."""
        return tuple(self._states.gpu_idle)

    def num_owned_gpu(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks lie on the GPU and have an owner."""
        owners, first_host = self._states.owners, self.num_gpu_blocks
        return len([b for b in block_ids if b < first_host and owners[b]])

    def num_allocatable(self, room: Room) -> int:
        """Return how many blocks `allocate` can hand out now."""
        host = self._states.num_available_in_place if room == "either" else 0
        return self._states.num_available_gpu + host

    def use(self, tier: Tier) -> TierUse:
        """Return how a tier is used."""
        states = self._states
        if tier == "gpu":
            return TierUse(states.num_owned_gpu, len(states.gpu_idle), len(states.gpu_free), 0)
        free = sum(len(blocks) for blocks in states.cpu_free)
        cached = sum(len(blocks) for blocks in (*states.cpu_spare, *states.cpu_only))
        owned = states.num_owned_cpu
        return TierUse(owned, cached, free, self.num_cpu_blocks - owned - cached - free)

    def ref_count(self, block_id: int) -> int:
        """Return the number of owners of a block.

        Raises:
            EngineError: There is no such block.
        """
        self._states.check_id(block_id)
        return self._states.owners[block_id]

    def key_of(self, block_id: int) -> bytes | None:
        """Return the key by which a block is found, if it is.

        Raises:
            EngineError: There is no such block.
        """
        self._states.check_id(block_id)
        return self._states.keys[block_id]

    def findable(self, keys: Iterable[bytes]) -> list[bool]:
        """Return for each key whether a block of either tier has it."""
        gpu, cpu = self._states.gpu_index, self._states.cpu_index
        return [key in gpu or key in cpu for key in keys]

    def is_pending(self, move_ids: Iterable[int]) -> bool:
        """Return whether any of these moves is not complete."""
        return not self._states.ledger.are_done(move_ids)

    @property
    def num_moves(self) -> int:
        """Moves that are not complete."""
        return self._states.ledger.num_in_flight

    def allocate(self, n: int, room: Room = "gpu") -> list[int]:
        """Take `n` blocks, each with one owner, all or none; nothing is evicted in vain.

        Args:
            n: How many.
            room: With "either" those on the GPU come first.

        Raises:
            EngineError: There are not so many; ask `num_allocatable` first.
        """
        if not 0 <= n <= self.num_allocatable(room):
            raise EngineError(
                f"block pool: expected at most {self.num_allocatable(room)} blocks ({room}), got "
                f"a demand for {n}. Ask num_allocatable first."
            )
        gpu = min(n, self._states.num_available_gpu)
        # Host blocks first: what leaves the GPU must not be stored to them.
        cpu_blocks = [self._victims.take_in_place() for _ in range(n - gpu)]
        return self._victims.take_gpu(gpu, for_compute=True) + cpu_blocks

    def free(self, block_ids: Iterable[int], retain: Retain = "demote") -> None:
        """Take one owner from each block of a sequence, given in the order of its table.

        Args:
            block_ids: Of any tier; may hold moves' targets, whose content then comes for nobody.
            retain: What becomes of the content of blocks that had no other owner.

        Raises:
            EngineError: A block has fewer owners than are taken, or does not exist.
        """
        states, ids = self._states, list(block_ids)
        for block_id, times in Counter(ids).items():
            if not 0 <= block_id < self.num_blocks:
                states.check_id(block_id)
            if states.owners[block_id] < times:
                raise EngineError(
                    f"block pool: expected block {block_id} to have at least {times} owners, got "
                    f"{states.owners[block_id]}. It is freed twice."
                )
        idle = states.disown(ids)
        self._victims.set_retain(idle, retain)
        nameless = [block_id for block_id in idle if states.keys[block_id] is None]
        states.settle(*nameless)
        states.settle(*reversed(idle))  # the tail is the older

    def register(self, block_id: int, key: bytes) -> bool:
        """Make a full, computed block findable; return whether it is.

        It is not where its tier has another block of that content.

        Raises:
            EngineError: The block has no owner, or another key.
        """
        self._states.check_key(block_id, key)
        index = self._states.gpu_index if self._states.is_gpu(block_id) else self._states.cpu_index
        if key in index:
            self.stats.duplicates += int(index[key] != block_id)
            return index[key] == block_id
        self._states.set_key(block_id, key)
        return True

    def match(self, keys: Sequence[bytes], num_tokens: int) -> Match:
        """Find the longest run of leading blocks over both tiers; at least one token is left over.

        Args:
            keys: Of the sequence's full blocks in order; more than needed does no harm.
            num_tokens: Known tokens from the first of these blocks on, at least 1.
        """
        asked = min(len(keys), max(0, num_tokens - 1) // self.block_size)
        found = self._states.find(islice(keys, asked))
        version = self._states.num_key_changes
        return Match(tuple(keys[: len(found)]), tuple(found), asked, version)

    def can_claim(self, match: Match, *, in_place: int = 0) -> bool:
        """Return whether `claim` with the same arguments would succeed."""
        return self._can_claim(match, self._stay_in_place(match, in_place))

    def claim(self, match: Match, *, in_place: int = 0, resumed: bool = False) -> Claim:
        """Take the blocks found, all or none.

        Host blocks are loaded: once, for whoever asks until the content is gone.

        Args:
            match: From `match`, with nothing changed since.
            in_place: Of the host blocks found how many to use where they are, at most: the last
                that compute can reach. For a sequence that is longer than the GPU has room.
            resumed: The sequence goes on after a preemption; only the counts differ.

        Raises:
            EngineError: There are not enough blocks (ask `can_claim` first), or the match is old.
        """
        is_new = match.version == self._states.num_key_changes
        if not is_new and self._states.find(match.keys) != list(match.blocks):
            raise EngineError(
                "block pool: expected a match made just now, got one that names other blocks than "
                "would be found now. Match again."
            )
        stay = self._stay_in_place(match, in_place)
        if not self._can_claim(match, stay):
            raise EngineError(
                f"block pool: expected room for {len(match.blocks)} blocks found, got "
                f"{self.num_free} GPU blocks. Ask can_claim first."
            )
        states = self._states
        states.own(match.blocks)  # none of them may give way to the others
        first_host = states.num_gpu
        hosts = [b for b in match.blocks if b >= first_host and b not in stay]
        loaded = dict(zip(hosts, self._victims.load(hosts), strict=True))
        table = [loaded.get(block_id, block_id) for block_id in match.blocks]
        on_gpu = len(match.blocks) - len(hosts) - len(stay)
        missed = match.num_asked - len(match.blocks)
        self.stats.count_claim(on_gpu, len(hosts), len(stay), missed, resumed=resumed)
        return Claim(table, states.ledger.incoming_to(table))

    def count_unseen(self, num_blocks: int, match: Match) -> None:
        """Count blocks before a match that a sequence begins behind and never sees."""
        if match.blocks and not self._states.is_gpu(match.blocks[0]):
            self.stats.hits_unseen_cpu += num_blocks
        else:
            self.stats.hits_unseen_gpu += num_blocks

    def swap_out(self, table: Sequence[int], keys: Sequence[bytes]) -> int:
        """Take a sequence's blocks away and store what the host tier lacks; return how many remain.

        Stored from the head on, as far as there is room; the rest is dropped as it gives way.
        Until then the GPU's blocks stay findable too. Blocks with other owners stay with them. It
        goes on by `match` and `claim`; what was lost is computed again.

        Args:
            table: Its block table.
            keys: Of its full, computed blocks.

        Raises:
            EngineError: A block of the table has no owner, or another key.
        """
        states = self._states
        known, owners, first_host = states.keys, states.owners, states.num_gpu
        states.check_owned(*table)
        full = table[: len(keys)]
        new = [pair for pair in zip(full, keys, strict=True) if known[pair[0]] != pair[1]]
        for block_id, key in new:
            states.check_key(block_id, key)
        for block_id, key in new:
            self.register(block_id, key)
        lone = [b for b in table if b < first_host and owners[b] == 1 and known[b] is not None]
        copies = states.copies_of(lone)
        lacking = [b for b, copy in zip(lone, copies, strict=True) if copy is None]
        stored = self._victims.store(lacking, set(copies))
        self.stats.stores_skipped += len(lacking) - stored
        self.free(table)
        remaining = len(self._states.find(keys[: len(table)]))
        self.stats.swapped_out += remaining
        return remaining

    def num_lacking(self, block_ids: Iterable[int]) -> int:
        """Return of how many GPU blocks without other owners the host tier has no copy."""
        owners, first_host = self._states.owners, self._states.num_gpu
        lone = [b for b in block_ids if b < first_host and owners[b] == 1]
        return self._states.copies_of(lone).count(None)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Let content without an owner be found no more, in both tiers."""
        states = self._states
        for key in keys:
            for index in (states.gpu_index, states.cpu_index):
                block_id = index.get(key)
                if block_id is not None and not states.owners[block_id]:
                    states.drop_key(block_id)

    def store_ahead(self, limit: int, most: int | None = None) -> int:
        """Store what would give way next, so that taking it costs no wait; return how many.

        Call it once a step; nothing happens while `limit` GPU blocks are free or have a copy.

        Args:
            limit: GPU blocks that should be ready to be taken.
            most: Store no more of them now; None: all.
        """
        states = self._states
        ready = max(0, limit - len(states.gpu_free))
        stored = self._store_lacking(list(islice(states.gpu_idle, ready)), most)
        self.stats.stores_ahead += stored
        return stored

    def evict_idle(self) -> None:
        """Take all content without an owner off the GPU, as if its blocks were needed."""
        states = self._states
        self._victims.evict(list(states.gpu_idle))

    def reset(self, tier: Tier | None = None) -> None:
        """Forget all keys of a tier, or of both; owners keep their blocks, moves go on."""
        for name, index in (("gpu", self._states.gpu_index), ("cpu", self._states.cpu_index)):
            if tier in {None, name}:
                for block_id in list(index.values()):
                    self._states.drop_key(block_id)

    def decided_moves(self) -> MoveBatch:
        """Return what is to be copied before the next step, and what that step waits for.

        The same and more until `note_taken`.
        """
        return self._states.ledger.decided()

    def note_taken(self) -> None:
        """Note that the moves decided so far are in somebody's hands."""
        self._states.ledger.note_taken()

    def complete(self, move_ids: Collection[int]) -> None:
        """Note that moves are done on the device.

        Raises:
            EngineError: One was completed before, or never taken.
        """
        states = self._states
        moves = states.ledger.finish(move_ids)
        blocks = chain.from_iterable([(move.src, move.dst) for move in moves])
        states.settle(*[b for b in blocks if not states.owners[b]])  # others are in no list

    def _can_claim(self, match: Match, stay: frozenset[int]) -> bool:
        first_host, owners = self._states.num_gpu, self._states.owners
        loads = len([b for b in match.blocks if b >= first_host]) - len(stay)
        idle = len([b for b in match.blocks if b < first_host and not owners[b]])
        return loads + idle <= self._states.num_available_gpu

    def _stay_in_place(self, match: Match, most: int) -> frozenset[int]:
        """Return the host blocks of a match that are not loaded."""
        if most <= 0:
            return frozenset()
        states = self._states
        able = [b for b in match.blocks if not states.is_gpu(b) and states.is_in_place(b)]
        return frozenset(able[max(0, len(able) - most) :])

    def _store_lacking(self, idle: Sequence[int], most: int | None) -> int:
        """Store those of some blocks without owners that have no copy; return how many."""
        copies = list(zip(idle, self._states.copies_of(idle), strict=True))
        lacking = [b for b, copy in copies if copy is None and self._victims.may_store(b)]
        return self._victims.store(lacking[:most], {copy for _, copy in copies})
