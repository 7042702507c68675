"""A device made of lists: moves run late, and all that attention would read is checked."""

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.kv.pool import TieredBlockPool
from engine.kv.prefix import KeyChain, root_key

P = 2


def num_blocks(num_tokens):
    return -(-num_tokens // P)


def take(source):
    """Take what a pool or a scheduler decided to move."""
    if not isinstance(source, TieredBlockPool):
        return tuple(map(take, source.pools))
    decided = source.ledger.decided_moves()
    source.ledger.note_taken()
    return decided


class Claim(NamedTuple):
    """What a pool returns."""

    blocks: list[int]
    pending: frozenset[int]


@dataclass(eq=False)
class Track:
    """One sequence as a scheduler would see it."""

    tokens: list[int]
    salt: str | None = None
    table: list[int] = field(default_factory=list)
    computed: int = 0
    pending: frozenset[int] = frozenset()
    holds: bool = False

    def __post_init__(self):
        self.chain = KeyChain(root_key(("tiny", "float32"), P, self.salt), P)

    @property
    def keys(self):
        """Keys of full blocks of known tokens."""
        return self.chain.extend(lambda a, b: self.tokens[a:b], len(self.tokens))

    @property
    def computed_keys(self):
        return self.keys[: self.computed // P]

    def value(self, position):
        """What the cache must hold at a position."""
        return (self.salt, *self.tokens[: position + 1])


class World:
    """Runs compute at once and moves as late as they may run, or when told to."""

    def __init__(self, num_gpu, num_cpu, num_in_place=None, obey_waits=True):
        self.pool = TieredBlockPool(num_gpu, num_cpu, P, num_in_place=num_in_place)
        self.memory = [[None] * P for _ in range(num_gpu + num_cpu)]
        self.queued = {}
        self.executed = set()
        self.obey_waits = obey_waits

    def launch(self, *parts):
        """Take the moves, then run a step: (sequence, number of tokens) for each part."""
        batch = take(self.pool)
        for move in batch.moves:
            assert all(before < move.move_id for before in move.after)
            self.queued[move.move_id] = move
        if self.obey_waits:
            for move_id in sorted(batch.waits):
                self.execute(move_id)
        for track, count in parts:
            self.compute(track, count)
        return batch

    def execute(self, move_id):
        """Run a move, after those that it names."""
        if move_id in self.queued:
            move = self.queued.pop(move_id)
            for before in move.after:
                self.execute(before)
            self.memory[move.dst] = list(self.memory[move.src])
            self.executed.add(move_id)

    def write(self, block_id, offset, value):
        self.memory[block_id][offset] = value

    def read(self, block_id, offset):
        return self.memory[block_id][offset]

    def encode(self, value):
        """Return a value as `read` returns it."""
        return value

    def close(self):
        """Nothing is held."""

    def complete(self, move_id):
        self.execute(move_id)
        self.executed.discard(move_id)
        self.pool.complete([move_id])

    def complete_all(self):
        self.launch()
        for move_id in sorted([*self.queued, *self.executed]):
            self.complete(move_id)

    def bring(self, track):
        """Wait for the content that a sequence begins behind."""
        self.launch()
        for move_id in sorted(track.pending):
            if self.pool.ledger.is_pending([move_id]):
                self.complete(move_id)

    def compute(self, track, count):
        """Write the next tokens, check all that attention would read, and register full blocks."""
        for position in range(track.computed, track.computed + count):
            self.write(track.table[position // P], position % P, track.value(position))
        track.computed += count
        for position in range(track.computed):
            held = self.read(track.table[position // P], position % P)
            assert held == self.encode(track.value(position)), f"position {position}: {held}"
        for block_id, key in zip(track.table, track.computed_keys, strict=False):
            if self.pool.states.keys[block_id] is None:
                self.pool.register(block_id, key)

    def find(self, keys, num_tokens):
        """Find leading blocks of a prompt; at least one of its tokens is left over."""
        return self.pool.find(keys[: (num_tokens - 1) // P])

    def start(self, track, room="gpu", *, in_place=0, n=None, resumed=False):
        """Match, claim and take n new blocks, those for all tokens unless told otherwise."""
        found = self.find(track.keys, len(track.tokens))
        missed = (len(track.tokens) - 1) // P - len(found)
        claim = Claim(
            *self.pool.claim(found, num_missed=missed, in_place=in_place, resumed=resumed)
        )
        track.pending, track.holds, track.computed = claim.pending, True, len(claim.blocks) * P
        if n is None:
            n = num_blocks(len(track.tokens)) - len(claim.blocks)
        track.table = claim.blocks + self.pool.allocate(n, room)
        return claim

    def run(self, tokens, room="gpu", *, in_place=0, salt=None):
        """Start a sequence, wait for its moves, compute all of it."""
        track = Track(list(tokens), salt)
        self.start(track, room, in_place=in_place)
        self.bring(track)
        self.launch((track, len(tokens) - track.computed))
        return track

    def stop(self, track, retain="demote"):
        self.pool.free(track.table, retain)
        track.table, track.computed, track.pending, track.holds = [], 0, frozenset(), False

    def swap_out(self, track):
        remaining = self.pool.swap_out(track.table, track.computed_keys)
        track.table, track.computed, track.pending, track.holds = [], 0, frozenset(), False
        return remaining
