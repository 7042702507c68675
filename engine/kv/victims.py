"""Which block gives way to which, and the moves that save its content."""

from collections.abc import Collection, Iterable, Sequence
from heapq import merge
from itertools import chain, islice

from engine.kv.pool_types import PoolStats, Retain
from engine.kv.states import BlockStates


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
