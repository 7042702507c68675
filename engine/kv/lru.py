"""Lists of block ids in order of arrival, and one clock for all of them."""

from collections import OrderedDict
from itertools import count


class Clock:
    """Counts arrivals, so that lists can be compared."""

    def __init__(self) -> None:
        self._ticks = count(1)

    def tick(self) -> int:
        """Return a number greater than all before."""
        return next(self._ticks)


class BlockList(OrderedDict[int, int]):
    """Block ids and when they came, the longest in the list first; any can leave at once.

    `del blocks[block_id]` takes a block out, `blocks[block_id]` is its stamp.

    Args:
        clock: Stamps arrivals; stamps of one clock can be compared.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._tick = clock.tick

    def push(self, block_id: int) -> None:
        """Append a block that is not in the list."""
        assert block_id not in self
        self[block_id] = self._tick()

    @property
    def oldest(self) -> int:
        """The block that came first; the list is not empty."""
        return next(iter(self))
