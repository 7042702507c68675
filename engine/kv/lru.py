"""Lists of block ids in order of arrival, and one clock for all of them."""

from collections import OrderedDict
from collections.abc import Iterator


class Clock:
    """Counts arrivals, so that lists can be compared."""

    def __init__(self) -> None:
        self._now = 0

    def tick(self) -> int:
        """Return a number greater than all before."""
        self._now += 1
        return self._now


class BlockList:
    """Block ids, the longest in the list first; any can leave in constant time.

    Args:
        clock: Stamps arrivals; stamps of one clock can be compared.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stamps: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stamps)

    def __iter__(self) -> Iterator[int]:
        """Iterate from the oldest on."""
        return iter(self._stamps)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._stamps

    def push(self, block_id: int) -> None:
        """Append a block that is not in the list."""
        assert block_id not in self._stamps
        self._stamps[block_id] = self._clock.tick()

    def remove(self, block_id: int) -> None:
        """Take a block out of the list."""
        del self._stamps[block_id]

    @property
    def oldest(self) -> int:
        """The block that came first; the list is not empty."""
        return next(iter(self._stamps))

    def stamp(self, block_id: int) -> int:
        """Return when a block of the list came."""
        return self._stamps[block_id]
