"""Which block gives way to which, and the moves that save its content."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

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
        for block_id in idle:
            self._not_stored.discard(block_id)
            if retain == "drop":
                self._not_stored.add(block_id)
            elif retain == "forget":
                copy = self._states.copy_of(block_id)
                self._states.drop_key(block_id)
                if copy is not None and not self._states.owners[copy]:
                    self._states.drop_key(copy)

    def may_store(self, block_id: int) -> bool:
        """Return whether the content of a GPU block is to be stored when the block is taken."""
        return block_id not in self._not_stored

    def take_gpu(self, *, for_compute: bool) -> int:
        """Hand out a GPU block with one owner; there is one without.

        Args:
            for_compute: The next step may write it, and waits for moves that still touch it; a move
                that writes it waits for them itself.
        """
        states = self._states
        is_free = len(states.gpu_free) > 0
        block_id = (states.gpu_free if is_free else states.gpu_idle).oldest
        states.own(block_id)
        if not is_free:
            self.evict(block_id)
        if for_compute:
            states.ledger.hand_out(block_id)
        return block_id

    def take_in_place(self) -> int:
        """Hand out a host block that compute reaches, with one owner; there is one without."""
        states = self._states
        lists = (states.cpu_free[0], states.cpu_spare[0], states.cpu_only[0])
        block_id = next(chain.from_iterable(lists))
        self._clear_host(block_id)
        states.own(block_id)
        return block_id

    def take_for_store(self, protect: Collection[int] = ()) -> int | None:
        """Hand out a host block without key, with an owner until `store` begins; or None.

        Args:
            protect: Host blocks that must not give way.
        """
        states = self._states
        for blocks in states.cpu_free:
            if blocks:
                block_id = blocks.oldest
                states.own(block_id)
                return block_id
        for pair in (states.cpu_spare, states.cpu_only):
            oldest = [
                (blocks.stamp(block_id), block_id)
                for blocks in pair
                for block_id in _first_outside(blocks, protect)
            ]
            if oldest:
                block_id = min(oldest)[1]
                states.own(block_id)
                self._clear_host(block_id)
                return block_id
        return None

    def evict(self, block_id: int) -> None:
        """Take the content off a GPU block that nobody needs any more."""
        states, stats = self._states, self._stats
        is_kept = states.copy_of(block_id) is not None
        if not is_kept and self.may_store(block_id):
            host = self.take_for_store()
            if host is None:
                stats.stores_skipped += int(states.num_cpu > 0)
            else:
                self.store(block_id, host)
                is_kept = True
        if is_kept:
            stats.evicted_kept += 1
        else:
            stats.evicted_lost += 1
        self._not_stored.discard(block_id)
        states.drop_key(block_id)

    def store(self, block_id: int, host: int) -> None:
        """Copy a GPU block with a key to one of `take_for_store`; findable there at once."""
        states, key = self._states, self._states.keys[block_id]
        assert key is not None
        states.ledger.start("store", block_id, host)
        states.name_moved(host, key)
        states.disown(host)  # the move keeps it out of the lists
        self._stats.stores += 1

    def load(self, hosts: Sequence[int]) -> list[int]:
        """Copy owned host blocks with keys to new GPU blocks, which take their owners over.

        Numbers rise together where they can, so that neighbours stay neighbours.
        """
        states = self._states
        blocks = sorted([self.take_gpu(for_compute=False) for _ in hosts])
        for host, block_id in zip(hosts, blocks, strict=True):
            key = states.keys[host]
            assert key is not None
            states.ledger.start("load", host, block_id)
            states.name_moved(block_id, key)
            states.disown(host)  # the move keeps it out of the lists
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


def _first_outside(blocks: Iterable[int], protect: Collection[int]) -> Iterator[int]:
    """Yield the first block that is not protected, if there is one."""
    for block_id in blocks:
        if block_id not in protect:
            yield block_id
            return
