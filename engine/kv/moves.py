"""Copies of blocks between the tiers, from their decision to their completion."""

from collections.abc import Iterable
from dataclasses import dataclass
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
    """What a mover enqueues between two steps.

    Each move runs after all compute that was enqueued before the batch (which wrote its source,
    or read what its target held before) and after the moves that it names; those of one batch
    otherwise run in any order. The next step runs after the moves in `waits`: it writes a block
    that such a move still reads or writes.
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
        self._next_id = 0
        self._in_flight: dict[int, Move] = {}
        self._outbox: list[Move] = []
        self._not_taken: set[int] = set()
        self._waits: set[int] = set()
        self._touching: dict[int, set[int]] = {}
        self._incoming: dict[int, int] = {}

    @property
    def num_in_flight(self) -> int:
        """Moves that are not complete."""
        return len(self._in_flight)

    def is_in_flight(self, move_id: int) -> bool:
        """Return whether a move is not complete."""
        return move_id in self._in_flight

    def is_touched(self, block_id: int) -> bool:
        """Return whether a move in flight reads or writes the block."""
        return block_id in self._touching

    def incoming(self, block_id: int) -> int | None:
        """Return the move in flight that brings the block's content, if one does."""
        return self._incoming.get(block_id)

    def start(self, kind: MoveKind, src: int, dst: int) -> Move:
        """Decide a move: after what brings its source and all that touches its target."""
        touching, incoming = self._touching, self._incoming
        before = touching.get(dst)
        source = incoming.get(src)
        after: tuple[int, ...] = ()
        if before or source is not None:
            after = tuple(sorted({*(before or ()), *(() if source is None else (source,))}))
        move_id = self._next_id
        self._next_id += 1
        move = Move(move_id, kind, src, dst, after)
        self._in_flight[move_id] = move
        self._outbox.append(move)
        self._not_taken.add(move_id)
        incoming[dst] = move_id
        for block_id in (src, dst):
            if block_id in touching:
                touching[block_id].add(move_id)
            else:
                touching[block_id] = {move_id}
        return move

    def hand_out(self, block_id: int) -> None:
        """Let the next step wait for all that touches a block, which it may write."""
        self._waits.update(self._touching.get(block_id, ()))
        self._incoming.pop(block_id, None)

    def require(self, move_ids: Iterable[int]) -> None:
        """Let the next step wait for these moves, where they are not complete."""
        self._waits.update(move_id for move_id in move_ids if move_id in self._in_flight)

    def take(self) -> MoveBatch:
        """Return what was decided since the last call."""
        batch = MoveBatch(tuple(self._outbox), frozenset(self._waits))
        self._outbox, self._not_taken, self._waits = [], set(), set()
        return batch

    def finish(self, move_id: int) -> Move:
        """Forget a move that is done.

        Raises:
            EngineError: It is not in flight, or was not taken.
        """
        if move_id not in self._in_flight or move_id in self._not_taken:
            why = "was never taken" if move_id in self._not_taken else "is not in flight"
            raise EngineError(
                f"block moves: expected a move that was taken and is not complete, got {move_id}, "
                f"which {why}. Complete each move once."
            )
        move = self._in_flight.pop(move_id)
        self._waits.discard(move_id)
        if self._incoming.get(move.dst) == move_id:
            del self._incoming[move.dst]
        for block_id in (move.src, move.dst):
            touching = self._touching[block_id]
            touching.discard(move_id)
            if not touching:
                del self._touching[block_id]
        return move
