"""Copies of blocks between the tiers, from their decision to their completion."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Literal, NamedTuple

from engine.errors import EngineError

MoveKind = Literal["store", "load"]
"""From the GPU to the host tier, or back."""


class Move(NamedTuple):
    """One block to copy."""

    move_id: int
    """Counts up; a move depends on earlier ones only."""
    kind: MoveKind
    src: int
    """Block that is read; it keeps its content until the move is complete."""
    dst: int
    """Block that is written; its content counts from then on."""
    after: tuple[int, ...] = ()
    """Moves that must be done before this one begins; those that are complete already are done."""


@dataclass(frozen=True, slots=True)
class MoveBatch:
    """What a mover takes between two steps.

    Each move runs, whenever it is enqueued, after all compute that was enqueued before the batch
    was taken (which wrote its source, or read what its target held before) and after the moves that
    it names; those of one batch otherwise run in any order. The next step runs after the moves in
    `waits`: it writes a block that such a move still reads or writes.
    """

    moves: tuple[Move, ...]
    waits: frozenset[int]
    """Moves of this batch or earlier ones."""

    def __bool__(self) -> bool:
        return bool(self.moves or self.waits)


class MoveLedger:
    """Moves from their decision to their completion.

    Invariants: a block is the target of at most one move that is still to count; every move in
    flight is in `touching` of both its blocks.
    """

    def __init__(self) -> None:
        self._next_id = self._first_not_taken = 0
        self._in_flight: dict[int, Move] = {}
        self._outbox: list[Move] = []
        self._waits: set[int] = set()
        self._touching: dict[int, tuple[int, ...]] = {}
        self._incoming: dict[int, int] = {}

    @property
    def num_in_flight(self) -> int:
        """Moves that are not complete."""
        return len(self._in_flight)

    def is_pending(self, move_ids: Iterable[int]) -> bool:
        """Return whether any of these moves is not complete."""
        return not self._in_flight.keys().isdisjoint(move_ids)

    def is_touched(self, block_id: int) -> bool:
        """Return whether a move in flight reads or writes the block."""
        return block_id in self._touching

    def incoming_to(self, block_ids: Iterable[int]) -> frozenset[int]:
        """Return the moves in flight that bring content of these blocks."""
        return frozenset(map(self._incoming.get, block_ids)) - {None}  # type: ignore[return-value]

    def start(self, kind: MoveKind, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Decide moves: each after what brings its source and all that touches its target.

        No target is a source.
        """
        touching, incoming = self._touching, self._incoming
        ids = range(self._next_id, self._next_id + len(sources))
        self._next_id = ids.stop
        after: Iterable[tuple[int, ...]] = repeat((), len(ids))
        alone = list(zip(ids))
        is_first = touching.keys().isdisjoint
        if is_first(sources) and is_first(targets):  # as ever so often, and many at once
            touching.update(zip(sources, alone, strict=True))
            touching.update(zip(targets, alone, strict=True))
        else:
            after = [
                self._touch(src, dst, own)
                for src, dst, own in zip(sources, targets, alone, strict=True)
            ]
        incoming.update(zip(targets, ids, strict=True))
        fields = zip(ids, repeat(kind, len(ids)), sources, targets, after, strict=True)
        moves: list[Move] = list(map(partial(tuple.__new__, Move), fields))  # as _make, sooner
        self._in_flight.update(zip(ids, moves, strict=True))
        self._outbox += moves

    def _touch(self, src: int, dst: int, move_id: tuple[int]) -> tuple[int, ...]:
        """Note that a move touches its blocks; return the moves that it runs after."""
        touching, source = self._touching, self._incoming.get(src)
        before = touching.get(dst, ())
        touching[dst] = before + move_id
        touching[src] = touching.get(src, ()) + move_id
        return before if source is None else tuple(sorted({*before, source}))

    def hand_out(self, block_ids: Iterable[int]) -> None:
        """Let the next step wait for all that touches these blocks, which it may write."""
        for block_id in block_ids:
            if block_id in self._touching:
                self._waits.update(self._touching[block_id])
            self._incoming.pop(block_id, None)

    def decided_moves(self) -> MoveBatch:
        """Return what is to be copied before the next step, and what that step waits for.

        The same and more until `note_taken`.
        """
        return MoveBatch(tuple(self._outbox), frozenset(self._waits))

    def note_taken(self) -> None:
        """Note that the moves decided so far are in somebody's hands."""
        self._outbox, self._waits, self._first_not_taken = [], set(), self._next_id

    def finish(self, move_ids: Collection[int]) -> list[Move]:
        """Forget moves that are done, all or none.

        Raises:
            EngineError: One is not in flight, was not taken, or is named twice.
        """
        seen: set[int] = set()
        for move_id in move_ids:
            is_known = move_id in self._in_flight and move_id not in seen
            if not is_known or move_id >= self._first_not_taken:
                why = "was never taken" if is_known else "is not in flight"
                raise EngineError(
                    "block moves: expected a move that was taken and is not complete, got "
                    f"{move_id}, which {why}. Complete each move once."
                )
            seen.add(move_id)
        touching, incoming, found = self._touching, self._incoming, []
        self._waits.difference_update(move_ids)
        for move_id in move_ids:
            move = self._in_flight.pop(move_id)
            found.append(move)
            if incoming.get(move.dst) == move_id:
                del incoming[move.dst]
            for block_id in (move.src, move.dst):
                others = touching[block_id]
                if len(others) == 1:
                    del touching[block_id]
                else:
                    touching[block_id] = tuple(other for other in others if other != move_id)
        return found
