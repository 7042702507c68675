"""Transfers: the moves that a scheduler decides go to the movers, and what is done comes back.

No torch: the core, which drives movers, does without.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from engine.errors import EngineError
from engine.kv.moves import MoveBatch

if TYPE_CHECKING:
    from engine.kv.mover import BlockMover


class MoveSource(Protocol):
    """Decides moves, for each group of layers."""

    def decided_moves(self) -> tuple[MoveBatch, ...]:
        """Return for each group what was decided and is not taken."""

    def note_taken(self) -> None:
        """Note that all of it is taken."""

    def complete_moves(self, group: int, move_ids: Iterable[int]) -> None:
        """Note that moves are done."""


class Work(Protocol):
    """Work of the device."""

    def is_done(self) -> bool:
        """Return whether it is done, without waiting."""


class Transfers:
    """Joins the decisions about moves with their execution.

    Args:
        source: Decides.
        movers: One for each group; none where there is no host tier.
    """

    def __init__(self, source: MoveSource, movers: Sequence["BlockMover"]) -> None:
        self._source, self._movers = source, tuple(movers)
        self._is_cut_short = False

    @property
    def num_under_way(self) -> int:
        """Moves that were submitted and are not known to be done."""
        return sum(mover.num_under_way for mover in self._movers)

    def submit(self) -> None:
        """Hand on all moves decided so far, and let what follows wait for those that it must.

        Each call enqueues at least one piece of what is left to each mover, so that all are
        enqueued in the end. The source keeps them until all are submitted: where it raises, the
        next call goes on where it stopped.

        Raises:
            EngineError: Blocks were to be moved where there is no host tier.

        Stream: behind what is enqueued on the current stream, which waits.
        """
        self._is_cut_short = True
        batches = self._source.decided_moves()
        if not self._movers and any(batches):
            counts = [len(batch.moves) for batch in batches]
            raise EngineError(f"moves: expected none where there is no host tier, got {counts}.")
        for mover, batch in zip(self._movers, batches, strict=True) if self._movers else ():
            if batch:
                mover.submit(batch)
            if not batch.moves:
                mover.enqueue_more()
        self._source.note_taken()
        self._is_cut_short = False

    def enqueue_until(self, work: Work) -> None:
        """Enqueue what is left while the device works, until some work is done.

        So a load of many blocks takes host time that would be spent waiting.

        Stream: behind what was enqueued on the current stream when the moves were submitted.
        """
        for mover in self._movers:
            while mover.num_queued and not work.is_done():
                mover.enqueue_more()

    def poll(self) -> None:
        """Tell the source what is done; waits for nothing."""
        if self._is_cut_short:  # the last submission; before anything else is done about it
            self.submit()
        for group, mover in enumerate(self._movers):
            if mover.num_under_way:
                self._source.complete_moves(group, mover.poll())

    def wait_next(self) -> None:
        """Block until moves are done that were not, and tell the source.

        Raises:
            EngineError: None is under way.
        """
        if not self.num_under_way:
            raise EngineError(
                "moves: expected one under way that sequences wait for, got none. This is a fault "
                "of the scheduler."
            )
        busy = [mover for mover in self._movers if mover.num_under_way]
        for mover in [mover for mover in busy if mover.is_loading] or busy:
            mover.wait_next()
        self.poll()

    def drain(self) -> None:
        """Enqueue all moves, block until they are done, and tell the source."""
        self.submit()
        while self.num_under_way:
            self.wait_next()
