"""Blocks of one group of layers over GPU and host memory: what each is, and which gives way.

Block ids and decisions only, with a prefix cache over both tiers; the moves that are decided are
executed elsewhere.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import chain, count, islice
from typing import Literal

from engine.errors import EngineError
from engine.kv.moves import MoveKind, MoveLedger

Tier = Literal["gpu", "cpu"]
"""Where a block lies."""
Room = Literal["gpu", "either"]
"""Where new blocks may come from; either: from the host tier what the GPU has not."""
Retain = Literal["demote", "drop", "forget"]
"""What becomes of content without an owner: findable, and stored when its GPU block is taken;
findable until its GPU block is taken; gone at once in both tiers."""


@dataclass(kw_only=True)
class PoolStats:
    """Counts of blocks since the pool was made."""

    hits_gpu: int = 0
    """Found on the GPU, those included that a move already brings."""
    hits_loaded: int = 0
    """Found in the host tier and brought to the GPU."""
    hits_in_place: int = 0
    """Found in the host tier and read there."""
    hits_unseen_gpu: int = 0
    """Blocks of prefixes behind which a sequence begins that no later token sees, so that they need
    not be there; the first block that is seen was found on the GPU, or there is none."""
    hits_unseen_cpu: int = 0
    """Blocks of the same kind, where the block that is seen was found in the host tier."""
    misses: int = 0
    """Asked for and not found."""
    swapped_in_gpu: int = 0
    """Blocks of sequences that go on after a preemption, still on the GPU."""
    swapped_in_loaded: int = 0
    """Blocks of such sequences that were brought back to the GPU."""
    swapped_in_in_place: int = 0
    """Blocks of such sequences that are read in the host tier."""
    lost: int = 0
    """Blocks of such sequences that were not found, so are computed again."""
    demoted: int = 0
    """Blocks of running sequences that their owners use in the host tier from then on."""
    promoted: int = 0
    """Blocks of running sequences that their owners use on the GPU from then on."""
    swapped_out: int = 0
    """Blocks of preempted sequences, findable when those had lost them."""
    stores: int = 0
    """Moves to the host tier."""
    loads: int = 0
    """Moves from it."""
    stores_ahead: int = 0
    """Stores made before their block was needed."""
    stores_skipped: int = 0
    """Contents that were to be stored and found no host block."""
    evicted_kept: int = 0
    """GPU contents that gave way and stay in the host tier."""
    evicted_lost: int = 0
    """GPU contents that gave way and are gone."""
    evicted_spare: int = 0
    """Host contents that gave way and are on the GPU too."""
    evicted_cpu: int = 0
    """Host contents that gave way and are gone."""

    def count_claim(
        self, on_gpu: int, loaded: int, in_place: int, missed: int, *, resumed: bool
    ) -> None:
        """Count the blocks of one claim."""
        if resumed:
            self.swapped_in_gpu += on_gpu
            self.swapped_in_loaded += loaded
            self.swapped_in_in_place += in_place
            self.lost += missed
        else:
            self.hits_gpu += on_gpu
            self.hits_loaded += loaded
            self.hits_in_place += in_place
            self.misses += missed

    @property
    def hits_cpu(self) -> int:
        """Found in the host tier."""
        return self.hits_loaded + self.hits_in_place

    @property
    def spared_gpu(self) -> int:
        """Blocks that need not be computed, by what was found on the GPU."""
        return self.hits_gpu + self.hits_unseen_gpu

    @property
    def spared_cpu(self) -> int:
        """Blocks that need not be computed, by what was found in the host tier."""
        return self.hits_cpu + self.hits_unseen_cpu


BlockList = OrderedDict[int, int]
"""Block ids, the longest in the list first, with stamps of a clock that lists share."""


class BlockStates:
    """Owners, keys and lists of all blocks, kept in agreement.

    Invariants, between calls:
        - A block without an owner is in exactly one list, but for host blocks that a move in
          flight touches: those are in none. A block with an owner is in none.
        - A key names at most one block of each tier, and `gpu_index` and `cpu_index` name exactly
          the blocks whose `keys` entry is set.
        - A host block is in a `spare` list if its key names a GPU block too, in an `only` list
          if not.
    """

    def __init__(self, num_gpu: int, num_cpu: int, num_in_place: int) -> None:
        self.num_gpu, self.num_gpu_and_in_place = num_gpu, num_gpu + num_in_place
        self.ledger = MoveLedger()
        self.owners = [0] * (num_gpu + num_cpu)
        self.keys: list[bytes | None] = [None] * (num_gpu + num_cpu)
        self.gpu_index: dict[bytes, int] = {}
        self.cpu_index: dict[bytes, int] = {}
        self.num_owned_gpu = self.num_owned_cpu = 0
        self.num_gpu_changes = 0
        self._clock = count()
        self.gpu_free, self.gpu_idle = BlockList(), BlockList()
        # Of the host tier: blocks that compute reaches, then the others.
        self.cpu_free = (BlockList(), BlockList())
        self.cpu_spare = (BlockList(), BlockList())
        self.cpu_only = (BlockList(), BlockList())
        self._where: list[BlockList | None] = [None] * (num_gpu + num_cpu)
        self.settle(*range(num_gpu + num_cpu))

    def copies_of(self, gpu_ids: Iterable[int]) -> list[int | None]:
        """Return for each GPU block the host block with the same key, if there is one."""
        keys, cpu = self.keys, self.cpu_index
        return [None if (key := keys[block_id]) is None else cpu.get(key) for block_id in gpu_ids]

    def own(self, block_ids: Iterable[int]) -> None:
        """Give each block one more owner; the first takes it out of its list."""
        owners, lists, num_gpu = self.owners, self._where, self.num_gpu
        gpu = cpu = 0
        for block_id in block_ids:
            owners[block_id] += 1
            if owners[block_id] > 1:
                continue
            where = lists[block_id]
            if where is not None:
                del where[block_id]
                lists[block_id] = None
            if block_id < num_gpu:
                gpu += 1
            else:
                cpu += 1
        self.num_owned_gpu += gpu
        self.num_gpu_changes += gpu
        self.num_owned_cpu += cpu

    def disown(self, block_ids: Iterable[int]) -> list[int]:
        """Take one owner from each block; return those that lost the last: `settle` them."""
        owners, idle, num_gpu = self.owners, [], self.num_gpu
        for block_id in block_ids:
            owners[block_id] = left = owners[block_id] - 1
            if not left:
                idle.append(block_id)
        gpu = len([block_id for block_id in idle if block_id < num_gpu])
        self.num_owned_gpu -= gpu
        self.num_owned_cpu -= len(idle) - gpu
        return idle

    def move(self, kind: MoveKind, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Begin to copy blocks with keys to owned, keyless ones of the other tier, found at once.

        Sources have an owner or lie on the GPU. Host blocks lose an owner: the move keeps them out
        of the lists.
        """
        self.ledger.start(kind, sources, targets)
        keys = self.keys
        index = self.cpu_index if kind == "store" else self.gpu_index
        for source, target in zip(sources, targets, strict=True):
            key = keys[source]
            assert key is not None
            keys[target] = key
            index[key] = target
        self.disown(targets if kind == "store" else sources)

    def set_key(self, block_id: int, new: bytes | None) -> None:
        """Name a block by a key that none of its tier has; None: let it be found no more."""
        key = self.keys[block_id] if new is None else new
        if key is None:
            return
        index, others = self.gpu_index, self.cpu_index
        if block_id >= self.num_gpu:
            index, others = others, index
        self.keys[block_id] = new
        if new is None:
            del index[key]
        else:
            index[key] = block_id
        self.settle(block_id)
        copy = others.get(key)
        if copy is not None:
            self.settle(copy)

    def settle(self, *block_ids: int) -> None:
        """Put blocks into the lists where they belong; in the right one they keep their age."""
        # A long sequence has hundreds, and those beside it wait for their tokens meanwhile.
        lists, num_gpu, owners, keys = self._where, self.num_gpu, self.owners, self.keys
        free, idle, clock, changes = self.gpu_free, self.gpu_idle, self._clock, 0
        for block_id in block_ids:
            where, home = lists[block_id], None
            if block_id >= num_gpu:
                home = self._host_home(block_id)
            elif not owners[block_id]:
                home = free if keys[block_id] is None else idle
            if home is where:
                continue
            changes += block_id < num_gpu
            if where is not None:
                del where[block_id]
            if home is not None:
                home[block_id] = next(clock)
            lists[block_id] = home
        self.num_gpu_changes += changes

    def check_owned(self, block_ids: Iterable[int]) -> None:
        """Raise EngineError unless all blocks exist and have an owner."""
        owners, count = self.owners, len(self.owners)
        for block_id in block_ids:
            if not 0 <= block_id < count:
                raise EngineError(
                    f"block pool: expected a block id from 0 to {count - 1}, got {block_id}."
                )
            if not owners[block_id]:
                raise EngineError(
                    f"block pool: expected a block with an owner, got block {block_id}, which is "
                    "free."
                )

    def check_key(self, block_id: int, key: bytes) -> None:
        """Raise EngineError unless a block has an owner, and this key or none."""
        self.check_owned((block_id,))
        known = self.keys[block_id]
        if known is not None and known != key:
            raise EngineError(
                f"block pool: expected block {block_id} to keep its key, got another one. Only a "
                "block's owner may name it, once, when it is full."
            )

    def _host_home(self, block_id: int) -> BlockList | None:
        key = self.keys[block_id]
        if self.owners[block_id] or self.ledger.is_touched(block_id):
            return None
        part = 0 if block_id < self.num_gpu_and_in_place else 1
        if key is None:
            return self.cpu_free[part]
        return (self.cpu_spare if key in self.gpu_index else self.cpu_only)[part]


class TieredBlockPool:
    """Hands out blocks of both tiers, remembers full ones by key, and decides what is copied.

    Ids 0 to num_gpu_blocks - 1 lie on the GPU, the next num_cpu_blocks in the host tier. Compute
    can read and write the first num_in_place of those (None: all) where they are; sequences own no
    others. Blocks have block_size tokens, and block_bytes bytes in the layers of this group, which
    attend to `window` tokens at most (None: all).

    A block with a key is full and never written again, so content moves freely: a key names at
    most one block of each tier. Of two equal blocks of one tier the first to be registered is
    findable, the other stays private to its owners; their tables do not change.

    Without an owner a block with a key stays findable until its block is needed: the one unused
    for longest goes first, of one sequence the tail before the head. On the GPU its content is
    then stored to the host tier, unless a copy is there. In the host tier copies of what is on
    the GPU go before anything else: so both tiers together hold as much as they can, and what
    was stored once is not stored again while there is room. A copy that was loaded stays behind
    in this sense. No owned block, and none of the request being served, ever gives way.

    Moves take time. A host block that one reads or writes is not handed out before `complete`. A
    GPU block is, and the move that brings it new content, or the next step, waits for those that
    still touch it. The moves decided in `ledger` are taken once for each step, after the compute of
    the step before has been enqueued.

    A method that raises has changed nothing.

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
        self.num_blocks, self.num_in_place = num_gpu_blocks + num_cpu_blocks, in_place
        self.block_size, self.window, self.block_bytes = block_size, window, block_bytes
        self.stats = PoolStats()
        self.states = BlockStates(num_gpu_blocks, num_cpu_blocks, in_place)
        self.ledger = self.states.ledger
        self._not_stored: set[int] = set()
        """GPU blocks whose content is not stored when they are taken."""

    @property
    def num_free(self) -> int:
        """GPU blocks without an owner: what `allocate` can hand out."""
        return len(self.states.gpu_free) + len(self.states.gpu_idle)

    @property
    def num_used(self) -> int:
        """GPU blocks with an owner."""
        return self.states.num_owned_gpu

    @property
    def num_free_in_place(self) -> int:
        """Host blocks without an owner that compute reaches and no move touches."""
        return sum(map(len, self._in_place_lists()))

    def num_owned_gpu(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks lie on the GPU and have an owner."""
        owners, first_host = self.states.owners, self.num_gpu_blocks
        return len([b for b in block_ids if b < first_host and owners[b]])

    def num_owned_host(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks lie in the host tier and have an owner."""
        owners, first_host = self.states.owners, self.num_gpu_blocks
        return len([b for b in block_ids if b >= first_host and owners[b]])

    def num_too_many(self, found: Sequence[int], keep: int) -> int:
        """Return for how many of the blocks found the GPU has no room now beside `keep` others."""
        return max(0, self._num_taken(found) - max(0, self.num_free - keep))

    def num_allocatable(self, room: Room, keep: int = 0) -> int:
        """Return how many blocks `allocate` can hand out now."""
        host = self.num_free_in_place if room == "either" else 0
        return max(0, self.num_free - keep) + host

    def use(self, tier: Tier) -> dict[str, int]:
        """Return a tier's blocks by what they are: owned, cached (findable, no owner), free.

        Of the host tier in_transit, too: without an owner, read or written by moves in flight.
        """
        states = self.states
        if tier == "gpu":
            cached, free = len(states.gpu_idle), len(states.gpu_free)
            return {"owned": states.num_owned_gpu, "cached": cached, "free": free}
        free = sum(map(len, states.cpu_free))
        cached = sum(map(len, (*states.cpu_spare, *states.cpu_only)))
        known = {"owned": states.num_owned_cpu, "cached": cached, "free": free}
        return known | {"in_transit": self.num_cpu_blocks - sum(known.values())}

    def findable(self, keys: Iterable[bytes]) -> list[bool]:
        """Return for each key whether a block of either tier has it."""
        gpu, cpu = self.states.gpu_index, self.states.cpu_index
        return [key in gpu or key in cpu for key in keys]

    def allocate(self, n: int, room: Room = "gpu", keep: int = 0) -> list[int]:
        """Take `n` blocks with one owner each, those on the GPU first; nothing is evicted in vain.

        `keep` blocks of the GPU are left to others.

        Raises:
            EngineError: There are not so many; ask `num_allocatable` first.
        """
        most = self.num_allocatable(room, keep)
        if not 0 <= n <= most:
            raise EngineError(
                f"block pool: expected at most {most} blocks ({room}), got a demand for {n}. Ask "
                "num_allocatable first."
            )
        num_gpu = min(n, max(0, self.num_free - keep))
        # Host blocks first: what leaves the GPU must not be stored to them.
        host = self._take_host(islice(chain(*self._in_place_lists()), n - num_gpu))
        gpu = self._take_gpu(num_gpu)
        self.ledger.hand_out(gpu)
        return gpu + host

    def free(self, block_ids: Iterable[int], retain: Retain = "demote") -> None:
        """Take one owner from each block of a sequence, given in the order of its table.

        They may be moves' targets, whose content then comes for nobody. `retain` says what becomes
        of the content of blocks that had no other owner.

        Raises:
            EngineError: A block has fewer owners than are taken, or does not exist.
        """
        states, ids = self.states, list(block_ids)
        owners, keys, num_blocks = states.owners, states.keys, self.num_blocks
        for block_id, times in Counter(ids).items():
            if not 0 <= block_id < num_blocks:
                states.check_owned((block_id,))
            if owners[block_id] < times:
                raise EngineError(
                    f"block pool: expected block {block_id} to have at least {times} owners, got "
                    f"{owners[block_id]}. It is freed twice."
                )
        idle = states.disown(ids)
        if retain == "drop":
            self._not_stored.update(idle)
        else:
            self._not_stored.difference_update(idle)
        if retain == "forget":
            self.forget([key for b in idle if (key := keys[b]) is not None])
        states.settle(*[b for b in idle if keys[b] is None])
        states.settle(*reversed(idle))  # the tail is the older

    def register(self, block_id: int, key: bytes) -> None:
        """Make a full, computed block findable unless its tier has another of that content.

        Raises:
            EngineError: The block has no owner, or another key.
        """
        states = self.states
        states.check_key(block_id, key)
        index = states.gpu_index if block_id < self.num_gpu_blocks else states.cpu_index
        if key not in index:
            states.set_key(block_id, key)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest run of leading keys that are findable in either tier.

        One for each key, of the GPU where both tiers have it.
        """
        gpu, cpu, found = self.states.gpu_index, self.states.cpu_index, []
        for key in keys:
            block_id = gpu.get(key)
            if block_id is None:
                block_id = cpu.get(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def can_claim(self, found: Sequence[int], *, in_place: int = 0) -> bool:
        """Return whether `claim` with the same arguments would succeed."""
        num_staying = len(self._stay_in_place(found, in_place))
        return self._num_taken(found) - num_staying <= self.num_free

    def claim(
        self,
        found: Sequence[int],
        *,
        num_missed: int = 0,
        in_place: int = 0,
        resumed: bool = False,
        num_unseen: int = 0,
    ) -> tuple[list[int], frozenset[int]]:
        """Take the blocks found, all or none, for a sequence that begins or goes on.

        Host blocks are loaded: once, for whoever asks until the content is gone.

        Args:
            found: From `find`, with nothing changed since.
            num_missed: Blocks that could have been found behind them.
            in_place: How many of the host blocks found to use where they are, at most: the last
                that compute can reach. For a sequence that is longer than the GPU has room.
            resumed: The sequence goes on after a preemption; only the counts differ.
            num_unseen: Blocks before them that the sequence begins behind and never sees.

        Returns:
            The begin of its block table, and the moves in flight that bring content of it: until
            they are complete it must not be read.

        Raises:
            EngineError: There are not enough blocks; ask `can_claim` first.
        """
        states, stats = self.states, self.stats
        if not self.can_claim(found, in_place=in_place):
            raise EngineError(
                f"block pool: expected room for {len(found)} blocks found, got {self.num_free} GPU "
                "blocks. Ask can_claim first."
            )
        stay = self._stay_in_place(found, in_place)
        states.own(found)  # none of them may give way to the others
        hosts = [b for b in found if b >= self.num_gpu_blocks and b not in stay]
        targets = sorted(self._take_gpu(len(hosts)))  # so that neighbours stay neighbours
        states.move("load", hosts, targets)
        stats.loads += len(hosts)
        loaded = dict(zip(hosts, targets, strict=True))
        table = [loaded.get(block_id, block_id) for block_id in found]
        on_gpu = len(found) - len(hosts) - len(stay)
        stats.count_claim(on_gpu, len(hosts), len(stay), num_missed, resumed=resumed)
        if not resumed and found and found[0] >= self.num_gpu_blocks:
            stats.hits_unseen_cpu += num_unseen
        elif not resumed:
            stats.hits_unseen_gpu += num_unseen
        return table, self.ledger.incoming_to(table)

    def demote(self, block_ids: Iterable[int]) -> dict[int, int]:
        """Let the owners of GPU blocks use host blocks in place instead, as far as there are any.

        The owners put the new numbers into their tables, and read none before the moves that bring
        its content are complete. The GPU blocks are free.

        Args:
            block_ids: Blocks with owners and keys.

        Returns:
            The new block of each that was replaced.
        """
        states, end = self.states, self.num_gpu_blocks + self.num_in_place
        asked = list(block_ids)
        copies = zip(asked, states.copies_of(asked), strict=True)
        found = {old: copy for old, copy in copies if copy is not None and copy < end}
        states.own(found.values())  # none of the copies may give way to the others
        lacking = [b for b in asked if b not in found][: self.num_free_in_place]
        for copy in states.copies_of(lacking):
            if copy is not None:  # where compute does not reach it
                states.set_key(copy, None)
        targets = sorted(self._take_host(islice(chain(*self._in_place_lists()), len(lacking))))
        sources = sorted(lacking)
        states.own(targets)  # the move takes one owner
        states.move("store", sources, targets)
        self.stats.stores += len(targets)
        found.update(zip(sources, targets, strict=True))
        for old, new in found.items():
            count = states.owners[old]
            states.own([new] * (count - 1))
            states.set_key(old, None)
            states.settle(*states.disown([old] * count))
        self.stats.demoted += len(found)
        return found

    def copy(self, block_ids: Iterable[int]) -> None:
        """Store copies of GPU blocks with owners and keys, with which `demote` needs no moves."""
        self._store(list(block_ids))

    def promote(self, block_ids: Iterable[int]) -> dict[int, int]:
        """Let the owners of host blocks use GPU blocks instead, as far as there are any.

        As `demote`; the host blocks stay as copies, as long as there is room.
        """
        states = self.states
        found: dict[int, int] = {}
        lacking = []
        for block_id in block_ids:
            key = states.keys[block_id]
            assert key is not None
            near = states.gpu_index.get(key)
            if near is None:
                lacking.append(block_id)
            else:
                found[block_id] = near
                states.own([near])
        sources = sorted(lacking[: self.num_free])
        loaded = dict(zip(sources, sorted(self._take_gpu(len(sources))), strict=True))
        for old, new in (*found.items(), *loaded.items()):
            states.own([new] * (states.owners[old] - 1))
        states.settle(*states.disown([old for old in found for _ in range(states.owners[old])]))
        states.disown([old for old in sources for _ in range(states.owners[old] - 1)])
        states.move("load", list(loaded), list(loaded.values()))
        self.stats.loads += len(loaded)
        self.stats.promoted += len(found) + len(loaded)
        return found | loaded

    def swap_out(self, table: Sequence[int], keys: Sequence[bytes]) -> int:
        """Take a sequence's blocks away and store what the host tier lacks; return how many remain.

        Stored from the head on, as far as there is room; the rest is dropped as it gives way.
        Until then the GPU's blocks stay findable too. Blocks with other owners stay with them. It
        goes on by `find` and `claim`; what was lost is computed again.

        Args:
            table: Its block table.
            keys: Keys of its full, computed blocks.

        Raises:
            EngineError: A block of the table has no owner, or another key.
        """
        states, known = self.states, self.states.keys
        states.check_owned(table)
        full = table[: len(keys)]
        new = [pair for pair in zip(full, keys, strict=True) if known[pair[0]] != pair[1]]
        for block_id, key in new:
            states.check_key(block_id, key)
        for block_id, key in new:
            self.register(block_id, key)
        lone = [b for b in self._lone(table) if known[b] is not None]
        self._not_stored.difference_update(lone)
        self.stats.stores_skipped += self._store(lone)[1]
        self.free(table)
        remaining = len(self.find(keys[: len(table)]))
        self.stats.swapped_out += remaining
        return remaining

    def num_lacking(self, block_ids: Iterable[int]) -> int:
        """Return of how many GPU blocks without other owners the host tier has no copy."""
        return self.states.copies_of(self._lone(block_ids)).count(None)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Let content without an owner be found no more, in both tiers."""
        states = self.states
        for key in keys:
            for index in (states.gpu_index, states.cpu_index):
                block_id = index.get(key)
                if block_id is not None and not states.owners[block_id]:
                    states.set_key(block_id, None)

    def store_ahead(self, limit: int, most: int | None = None) -> int:
        """Store what would give way next, so that taking it costs no wait; return how many.

        Call it once a step; nothing happens while `limit` GPU blocks are free or have a copy.

        Args:
            limit: GPU blocks that should be ready to be taken.
            most: Store no more of them now; None: all.
        """
        ready = max(0, limit - len(self.states.gpu_free))
        stored, _ = self._store(list(islice(self.states.gpu_idle, ready)), most)
        self.stats.stores_ahead += stored
        return stored

    def evict_idle(self) -> None:
        """Take all content without an owner off the GPU, as if its blocks were needed."""
        self._evict(list(self.states.gpu_idle))

    def reset(self, tier: Tier | None = None) -> None:
        """Forget all keys of a tier, or of both; owners keep their blocks, moves go on."""
        for name, index in (("gpu", self.states.gpu_index), ("cpu", self.states.cpu_index)):
            if tier in {None, name}:
                for block_id in list(index.values()):
                    self.states.set_key(block_id, None)

    def complete(self, move_ids: Collection[int]) -> None:
        """Note that moves are done on the device.

        Raises:
            EngineError: One was completed before, or never taken.
        """
        moves = self.ledger.finish(move_ids)
        blocks = chain.from_iterable([(move.src, move.dst) for move in moves])
        # Others are in no list.
        self.states.settle(*[b for b in blocks if not self.states.owners[b]])

    def _in_place_lists(self) -> tuple[BlockList, ...]:
        """Return host blocks without an owner that compute reaches, the next to give way first."""
        return self.states.cpu_free[0], self.states.cpu_spare[0], self.states.cpu_only[0]

    def _num_taken(self, found: Sequence[int]) -> int:
        """Return how many GPU blocks without an owner the blocks found take, all on the GPU."""
        first_host, owners = self.num_gpu_blocks, self.states.owners
        return len([b for b in found if b >= first_host or not owners[b]])

    def _lone(self, block_ids: Iterable[int]) -> list[int]:
        """Return the GPU blocks that have one owner."""
        owners, first_host = self.states.owners, self.num_gpu_blocks
        return [b for b in block_ids if b < first_host and owners[b] == 1]

    def _stay_in_place(self, found: Sequence[int], most: int) -> frozenset[int]:
        """Return the host blocks found that are not loaded."""
        if most <= 0:
            return frozenset()
        end = self.num_gpu_blocks + self.num_in_place
        return frozenset([b for b in found if self.num_gpu_blocks <= b < end][-most:])

    def _take_gpu(self, n: int) -> list[int]:
        """Hand out GPU blocks, free ones first; there are so many without an owner."""
        states, num_free = self.states, len(self.states.gpu_free)
        taken = list(islice(chain(states.gpu_free, states.gpu_idle), n))
        states.own(taken)
        if n > num_free:
            self._evict(taken[num_free:])
        return taken

    def _take_host(self, block_ids: Iterable[int]) -> list[int]:
        """Hand out these host blocks, which have no owner; what they held is gone."""
        states, taken = self.states, list(block_ids)
        states.own(taken)
        for block_id in taken:
            if states.keys[block_id] is not None:
                is_spare = states.keys[block_id] in states.gpu_index
                self.stats.evicted_spare += is_spare
                self.stats.evicted_cpu += not is_spare
                states.set_key(block_id, None)
        return taken

    def _evict(self, block_ids: Sequence[int]) -> None:
        """Take the content off GPU blocks that nobody needs any more, the oldest first.

        Those without a copy are stored, as far as host blocks can be had for them.
        """
        states, stats = self.states, self.stats
        _, skipped = self._store(block_ids)
        if self.num_cpu_blocks:
            stats.stores_skipped += skipped
        lost = states.copies_of(block_ids).count(None)
        stats.evicted_lost += lost
        stats.evicted_kept += len(block_ids) - lost
        self._not_stored.difference_update(block_ids)
        for block_id in block_ids:
            states.set_key(block_id, None)

    def _store(self, block_ids: Sequence[int], most: int | None = None) -> tuple[int, int]:
        """Copy the first of some GPU blocks with keys that are to be stored and have no copy yet.

        They are findable in the host tier at once, and none of the copies there gives way to them.
        Free host blocks are taken first, then the oldest copies of what is on the GPU, then the
        oldest content.

        Returns:
            How many, at most `most`, and of how many there was no host block for.
        """
        states = self.states
        copies = states.copies_of(block_ids)
        lacking = [
            block_id
            for block_id, copy in zip(block_ids, copies, strict=True)
            if copy is None and block_id not in self._not_stored
        ][:most]
        n, hosts, protect = len(lacking), list[int](), set(copies)
        if n:
            hosts += islice(chain(*states.cpu_free), n)
        for pair in (states.cpu_spare, states.cpu_only):
            if len(hosts) < n:
                parts = ((item for item in part.items() if item[0] not in protect) for part in pair)
                oldest = merge(*parts, key=lambda item: item[1])
                hosts += [block_id for block_id, _ in islice(oldest, n - len(hosts))]
        self._take_host(hosts)
        # Numbers rise together where they can, so that neighbours stay neighbours.
        states.move("store", sorted(lacking[: len(hosts)]), sorted(hosts))
        self.stats.stores += len(hosts)
        return len(hosts), n - len(hosts)
