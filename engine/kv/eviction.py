"""What every block is at the moment, and which one is evicted for another."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import chain, count, islice
from typing import Literal

from engine.errors import EngineError
from engine.kv.moves import MoveKind, MoveLedger

Retain = Literal["demote", "drop", "forget"]
"""What becomes of content without an owner: findable, and stored when its GPU block is taken;
findable until its GPU block is taken; gone at once in both tiers."""


class BlockList(OrderedDict[int, int]):
    """Block ids and when they came, the longest in the list first; any can leave at once.

    `del blocks[block_id]` takes a block out, `blocks[block_id]` is its stamp.

    Args:
        clock: Stamps arrivals; stamps of one clock can be compared.
    """

    def __init__(self, clock: Iterator[int]) -> None:
        super().__init__()
        self._clock = clock

    def push(self, block_id: int) -> None:
        """Append a block that is not in the list."""
        assert block_id not in self
        self[block_id] = next(self._clock)


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
    """The same, where that block was found in the host tier."""
    misses: int = 0
    """Asked for and not found."""
    swapped_in_gpu: int = 0
    """Blocks of sequences that go on after a preemption, still on the GPU."""
    swapped_in_loaded: int = 0
    """The same, brought back."""
    swapped_in_in_place: int = 0
    """The same, read in the host tier."""
    lost: int = 0
    """The same, not found, so computed again."""
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
    duplicates: int = 0
    """Blocks whose content was findable in the same tier when they became full; not findable
    themselves."""

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


class BlockStates:
    """Owners, keys and lists of all blocks, kept in agreement.

    Invariants, between calls:
        - A block without an owner is in exactly one list, but for host blocks that a move in
          flight touches: those are in none. A block with an owner is in none.
        - A key names at most one block of each tier, and `gpu_index` and `cpu_index` name exactly
          the blocks whose `keys` entry is set.
        - A host block is in a `spare` list if its key names a GPU block too, in an `only` list
          if not.

    Args:
        num_gpu: Blocks on the GPU.
        num_cpu: Blocks of the host tier.
        num_in_place: Of those, how many compute can reach.
    """

    def __init__(self, num_gpu: int, num_cpu: int, num_in_place: int) -> None:
        self.num_gpu, self.num_cpu, self.num_in_place = num_gpu, num_cpu, num_in_place
        self.ledger = MoveLedger()
        self.owners = [0] * (num_gpu + num_cpu)
        self.keys: list[bytes | None] = [None] * (num_gpu + num_cpu)
        self.gpu_index: dict[bytes, int] = {}
        self.cpu_index: dict[bytes, int] = {}
        self.num_owned_gpu = self.num_owned_cpu = 0
        self.num_gpu_changes = self.num_key_changes = 0
        clock = count()
        self.gpu_free, self.gpu_idle = BlockList(clock), BlockList(clock)
        # Of the host tier: blocks that compute reaches, then the others.
        self.cpu_free = (BlockList(clock), BlockList(clock))
        self.cpu_spare = (BlockList(clock), BlockList(clock))
        self.cpu_only = (BlockList(clock), BlockList(clock))
        self._where: list[BlockList | None] = [None] * (num_gpu + num_cpu)
        self.settle(*range(num_gpu + num_cpu))

    def is_gpu(self, block_id: int) -> bool:
        """Return whether a block lies on the GPU."""
        return block_id < self.num_gpu

    def is_in_place(self, block_id: int) -> bool:
        """Return whether compute can read and write a block where it is."""
        return block_id < self.num_gpu + self.num_in_place

    @property
    def num_available_gpu(self) -> int:
        """GPU blocks that can be handed out."""
        return len(self.gpu_free) + len(self.gpu_idle)

    @property
    def num_available_in_place(self) -> int:
        """Host blocks that can be handed out to compute."""
        return len(self.cpu_free[0]) + len(self.cpu_spare[0]) + len(self.cpu_only[0])

    def copy_of(self, block_id: int) -> int | None:
        """Return the block of the other tier with the same key, if there is one."""
        key = self.keys[block_id]
        if key is None:
            return None
        return (self.cpu_index if block_id < self.num_gpu else self.gpu_index).get(key)

    def copies_of(self, gpu_ids: Iterable[int]) -> list[int | None]:
        """Return for each GPU block the host block with the same key, if there is one."""
        keys, cpu = self.keys, self.cpu_index
        return [None if (key := keys[block_id]) is None else cpu.get(key) for block_id in gpu_ids]

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest run of leading keys that are findable."""
        gpu, cpu, found = self.gpu_index, self.cpu_index, []
        for key in keys:
            block_id = gpu.get(key)
            if block_id is None:
                block_id = cpu.get(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

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
        owners, idle = self.owners, []
        for block_id in block_ids:
            owners[block_id] -= 1
            if not owners[block_id]:
                idle.append(block_id)
        gpu = len([block_id for block_id in idle if block_id < self.num_gpu])
        self.num_owned_gpu -= gpu
        self.num_owned_cpu -= len(idle) - gpu
        return idle

    def move(self, kind: MoveKind, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Begin to copy blocks with keys to owned blocks of the other tier, found there at once.

        The host blocks lose an owner: the move keeps them out of the lists.

        Args:
            kind: From the GPU to the host tier, or back.
            sources: They have an owner or lie on the GPU.
            targets: Without keys.
        """
        self.ledger.start(kind, sources, targets)
        keys = self.keys
        index = self.cpu_index if kind == "store" else self.gpu_index
        for source, target in zip(sources, targets, strict=True):
            key = keys[source]
            assert key is not None
            keys[target] = key
            index[key] = target
        self.num_key_changes += 1
        self.disown(targets if kind == "store" else sources)

    def set_key(self, block_id: int, key: bytes) -> None:
        """Let a key name a block; none of its tier has that key."""
        self.num_key_changes += 1
        self.keys[block_id] = key
        (self.gpu_index if self.is_gpu(block_id) else self.cpu_index)[key] = block_id
        self.settle(block_id)
        copy = self.copy_of(block_id)
        if copy is not None:
            self.settle(copy)

    def drop_key(self, block_id: int) -> None:
        """Let a block be found no more."""
        key = self.keys[block_id]
        if key is None:
            return
        copy = self.copy_of(block_id)
        self.num_key_changes += 1
        self.keys[block_id] = None
        del (self.gpu_index if self.is_gpu(block_id) else self.cpu_index)[key]
        self.settle(block_id)
        if copy is not None:
            self.settle(copy)

    def settle(self, *block_ids: int) -> None:
        """Put blocks into the lists where they belong; in the right one they keep their age."""
        lists, num_gpu, home_of = self._where, self.num_gpu, self._home
        for block_id in block_ids:
            home, where = home_of(block_id), lists[block_id]
            if home is where:
                continue
            if block_id < num_gpu:
                self.num_gpu_changes += 1
            if where is not None:
                del where[block_id]
            if home is not None:
                home.push(block_id)
            lists[block_id] = home

    def check_id(self, block_id: int) -> None:
        """Raise EngineError if there is no such block."""
        if not 0 <= block_id < len(self.owners):
            raise EngineError(
                f"block pool: expected a block id from 0 to {len(self.owners) - 1}, got {block_id}."
            )

    def check_owned(self, *block_ids: int) -> None:
        """Raise EngineError unless blocks have an owner each."""
        owners, count = self.owners, len(self.owners)
        for block_id in block_ids:
            if not 0 <= block_id < count:
                self.check_id(block_id)
            if not owners[block_id]:
                raise EngineError(
                    f"block pool: expected a block with an owner, got block {block_id}, which is "
                    "free."
                )

    def check_key(self, block_id: int, key: bytes) -> None:
        """Raise EngineError unless a block has an owner, and this key or none."""
        self.check_owned(block_id)
        known = self.keys[block_id]
        if known is not None and known != key:
            raise EngineError(
                f"block pool: expected block {block_id} to keep its key, got another one. Only a "
                "block's owner may name it, once, when it is full."
            )

    def _home(self, block_id: int) -> BlockList | None:
        if self.owners[block_id]:
            return None
        key = self.keys[block_id]
        if block_id < self.num_gpu:
            return self.gpu_free if key is None else self.gpu_idle
        if self.ledger.is_touched(block_id):
            return None
        part = 0 if block_id < self.num_gpu + self.num_in_place else 1
        if key is None:
            return self.cpu_free[part]
        return (self.cpu_spare if key in self.gpu_index else self.cpu_only)[part]


class Victims:
    """Takes blocks for new content.

    A free block goes first. Then on the GPU the block unused for longest, whose content is stored
    unless the host tier has it; in the host tier the oldest copy of what is on the GPU, then the
    content unused for longest.

    Args:
        states: All blocks.
        stats: Where evictions and moves are counted.
    """

    def __init__(self, states: BlockStates, stats: PoolStats) -> None:
        self._states, self._stats = states, stats
        self._not_stored: set[int] = set()

    def set_retain(self, idle: Iterable[int], retain: Retain) -> None:
        """Note what becomes of the content of blocks that have no owner any more."""
        if retain == "drop":
            self._not_stored.update(idle)
            return
        self._not_stored.difference_update(idle)
        if retain == "forget":
            for block_id in idle:
                copy = self._states.copy_of(block_id)
                self._states.drop_key(block_id)
                if copy is not None and not self._states.owners[copy]:
                    self._states.drop_key(copy)

    def may_store(self, block_id: int) -> bool:
        """Return whether the content of a GPU block is to be stored when the block is taken."""
        return block_id not in self._not_stored

    def take_gpu(self, n: int, *, for_compute: bool) -> list[int]:
        """Hand out GPU blocks with one owner each; there are so many without.

        Args:
            n: How many.
            for_compute: The next step may write them, and waits for moves that still touch them; a
                move that writes one waits for them itself.
        """
        states = self._states
        taken = list(islice(chain(states.gpu_free, states.gpu_idle), n))
        num_free = min(n, len(states.gpu_free))
        states.own(taken)
        self.evict(taken[num_free:])
        if for_compute:
            states.ledger.hand_out(taken)
        return taken

    def take_in_place(self) -> int:
        """Hand out a host block that compute reaches, with one owner; there is one without."""
        states = self._states
        lists = (states.cpu_free[0], states.cpu_spare[0], states.cpu_only[0])
        block_id = next(chain.from_iterable(lists))
        self._clear_host(block_id)
        states.own((block_id,))
        return block_id

    def evict(self, block_ids: Sequence[int]) -> None:
        """Take the content off GPU blocks that nobody needs any more, the oldest first.

        Those without a copy are stored, as far as host blocks can be had for them.
        """
        states, stats = self._states, self._stats
        copies = states.copies_of(block_ids)
        lacking = [
            block_id
            for block_id, copy in zip(block_ids, copies, strict=True)
            if copy is None and self.may_store(block_id)
        ]
        stored = self.store(lacking, set(copies))
        if states.num_cpu:
            stats.stores_skipped += len(lacking) - stored
        lost = states.copies_of(block_ids).count(None)
        stats.evicted_lost += lost
        stats.evicted_kept += len(block_ids) - lost
        self._not_stored.difference_update(block_ids)
        for block_id in block_ids:
            states.drop_key(block_id)

    def store(self, block_ids: Sequence[int], protect: Collection[int | None]) -> int:
        """Copy the first of some GPU blocks with keys, as many as host blocks can be had for.

        Their content is findable in the host tier at once.

        Args:
            block_ids: Without a copy there.
            protect: Host blocks that must not give way.

        Returns:
            How many.
        """
        hosts = self._take_for_store(len(block_ids), protect)
        # Numbers rise together where they can, so that neighbours stay neighbours.
        self._states.move("store", sorted(block_ids[: len(hosts)]), sorted(hosts))
        self._stats.stores += len(hosts)
        return len(hosts)

    def _take_for_store(self, n: int, protect: Collection[int | None]) -> list[int]:
        """Take up to n host blocks, without keys, with an owner each until the move begins.

        Free ones first, then the oldest copies of what is on the GPU, then the oldest content.
        """
        states = self._states
        if not n:
            return []
        taken = list(islice(chain(*states.cpu_free), n))
        for pair in (states.cpu_spare, states.cpu_only):
            if len(taken) == n:
                break
            parts = ((item for item in part.items() if item[0] not in protect) for part in pair)
            oldest = merge(*parts, key=lambda item: item[1])
            taken += [block_id for block_id, _ in islice(oldest, n - len(taken))]
        states.own(taken)
        for block_id in taken:
            self._clear_host(block_id)
        return taken

    def load(self, hosts: Sequence[int]) -> list[int]:
        """Copy owned host blocks with keys to new GPU blocks, which take their owners over.

        Numbers rise together where they can, so that neighbours stay neighbours.
        """
        blocks = sorted(self.take_gpu(len(hosts), for_compute=False))
        self._states.move("load", hosts, blocks)
        self._stats.loads += len(blocks)
        return blocks

    def _clear_host(self, block_id: int) -> None:
        if self._states.keys[block_id] is None:
            return
        if self._states.copy_of(block_id) is None:
            self._stats.evicted_cpu += 1
        else:
            self._stats.evicted_spare += 1
        self._states.drop_key(block_id)
