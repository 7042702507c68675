"""Requests, aborts, swaps, resets and late moves, each with what must hold after it."""

from collections import Counter
from dataclasses import asdict

import pytest

from engine.errors import EngineError
from tests.engine.kv.world import P, Track, num_blocks

MOST_TOKENS = 20
ROOMS = ("gpu", "either")
# Prompts begin alike, so that prefixes are shared.
STEMS = ((0,) * MOST_TOKENS, (1,) * MOST_TOKENS)

WEIGHTS = {
    "add": 3,
    "start": 6,
    "step": 8,
    "grow": 2,
    "stop": 3,
    "preempt": 2,
    "demote": 1,
    "promote": 1,
    "store_ahead": 1,
    "execute": 3,
    "complete": 3,
    "evict_idle": 0.3,
    "reset": 0.2,
}
"""The operations and how often they are to be drawn."""


class Driver:
    """Sequences over a pool whose least recently used GPU blocks a plain list predicts.

    Args:
        world: Has a pool, and runs moves.
        choose: Picks one of a sequence of options.
    """

    def __init__(self, world, choose):
        self.world, self.pool = world, world.pool
        self.sizes = {"gpu": self.pool.num_gpu_blocks, "cpu": self.pool.num_cpu_blocks}
        self.in_place_ids = range(self.pool.num_gpu_blocks + self.pool.num_in_place)
        self.choose = choose
        self.tracks, self.idle, self.loading = [], [], {}
        self.free_before = 0

    def pick(self, *, holds):
        choices = [track for track in self.tracks if track.holds is holds]
        return self.choose(choices) if choices else None

    def note(self):
        self.free_before = self.pool.use("gpu")["free"]

    def taken(self, need):
        """GPU blocks were taken: the free ones, then exactly the oldest idle ones."""
        del self.idle[: max(0, need - self.free_before)]

    def freed(self, table):
        """Blocks with a key and no owner become the youngest, the tail before the head."""
        for block_id in reversed(list(dict.fromkeys(table))):
            keyed = self.pool.states.keys[block_id] is not None and block_id < self.sizes["gpu"]
            if keyed and not self.pool.states.owners[block_id]:
                self.idle.append(block_id)

    def add(self):
        if len(self.tracks) < 8:
            stem, count = self.choose(STEMS), self.choose(range(1, 13))
            salt = self.choose((None, None, None, "salt"))
            self.tracks.append(Track(list(stem[:count]), salt))

    def start(self):
        track = self.pick(holds=False)
        if track is None:
            return
        in_place = self.choose((0, 0, 1, 3))
        found = self.world.find(track.keys, len(track.tokens))
        assert len(found) * P < len(track.tokens)
        if not self.pool.can_claim(found, in_place=in_place):
            before = self.snapshot()
            with pytest.raises(EngineError, match="Ask can_claim first"):
                self.pool.claim(found, in_place=in_place)
            assert self.snapshot() == before
            return
        self.note()
        on_gpu = [block_id for block_id in found if block_id < self.sizes["gpu"]]
        self.idle = [block_id for block_id in self.idle if block_id not in on_gpu]
        resumed = self.choose((False, True))
        claim = self.world.start(track, in_place=in_place, n=0, resumed=resumed)
        self.taken(sum(b < self.sizes["gpu"] and b not in on_gpu for b in claim.blocks))
        assert len(claim.blocks) == len(found)
        assert len([b for b in claim.blocks if b >= self.sizes["gpu"]]) <= in_place
        rest = num_blocks(len(track.tokens)) - len(claim.blocks)
        self.take(track, self.choose((0, 1, rest)), self.choose(ROOMS))

    def take(self, track, count, room):
        """Add new blocks to a table, or find that there are not so many."""
        if count > self.pool.num_allocatable(room):
            before = self.snapshot()
            with pytest.raises(EngineError, match="Ask num_allocatable first"):
                self.pool.allocate(count, room)
            assert self.snapshot() == before
            return False
        self.note()
        new = self.pool.allocate(count, room)
        on_gpu = sum(block_id < self.sizes["gpu"] for block_id in new)
        assert len(new) == count
        assert on_gpu == count or room == "either"
        self.taken(on_gpu)
        track.table += new
        return True

    def step(self):
        track = self.pick(holds=True)
        if track is None:
            self.launch()
            return
        if self.pool.ledger.is_pending(track.pending):
            if self.choose((False, True)):
                return
            self.launch()
            self.world.bring(track)
            for move_id in track.pending:
                self.loading.pop(move_id, None)
        count = min(self.choose(range(1, 7)), len(track.tokens) - track.computed)
        need = max(0, num_blocks(track.computed + count) - len(track.table))
        if self.take(track, need, self.choose(ROOMS)):
            self.launch((track, count))

    def grow(self):
        track = self.pick(holds=True)
        if track is not None and len(track.tokens) < MOST_TOKENS:
            track.tokens.append(self.choose((0, 1)))

    def stop(self):
        track = self.pick(holds=True)
        if track is not None:
            table = list(track.table)
            self.world.stop(track, self.choose(("demote", "demote", "drop", "forget")))
            self.idle = [b for b in self.idle if self.pool.states.keys[b] is not None]  # forgotten
            self.freed(table)
            self.tracks.remove(track)

    def preempt(self):
        track = self.pick(holds=True)
        if track is not None:
            table, keys = list(track.table), list(track.computed_keys)
            remaining = self.world.swap_out(track)
            self.freed(table)
            assert len(self.world.find(keys, len(keys) * P + 1)) == remaining

    def demote(self):
        """All owners of some GPU blocks use host blocks instead."""
        asked = self.movable(range(self.sizes["gpu"]))
        room = self.pool.num_free_in_place
        copies = [b for b in self.pool.states.copies_of(asked) if b in self.in_place_ids]
        owned = sum(self.pool.states.owners[copy] > 0 for copy in copies)
        new = self.replace(self.pool.demote(asked))
        assert len(new) >= min(len(asked), room + owned)
        assert all(b >= self.sizes["gpu"] and b in self.in_place_ids for b in new.values())
        assert all(self.pool.states.keys[old] is None for old in new)

    def promote(self):
        """All owners of some host blocks use GPU blocks instead."""
        asked = self.movable(self.in_place_ids[self.sizes["gpu"] :])
        self.note()
        states, room, loads = self.pool.states, self.pool.num_free, self.pool.stats.loads
        found = {states.gpu_index.get(states.keys[block_id]) for block_id in asked}
        new = self.replace(self.pool.promote(asked))
        assert len(new) >= min(len(asked), room)
        self.idle = [block_id for block_id in self.idle if block_id not in found]
        self.taken(self.pool.stats.loads - loads)
        assert all(block_id < self.sizes["gpu"] for block_id in new.values())

    def movable(self, ids):
        """Some full blocks of sequences whose content is there, with keys."""
        names = {key: b for b, key in enumerate(self.pool.states.keys) if b in ids}
        waits = [t.table for t in self.tracks if self.pool.ledger.is_pending(t.pending)]
        waits = {block_id for table in waits for block_id in table}
        full = {b for t in self.tracks for b in t.table[: t.computed // P]} - waits
        asked = sorted(full & {b for key, b in names.items() if key is not None})
        return asked[: self.choose((1, 3, 99))]

    def replace(self, new):
        for track in self.tracks:
            if not new.keys().isdisjoint(track.table):
                track.table = [new.get(block_id, block_id) for block_id in track.table]
                track.pending = self.pool.ledger.incoming_to(track.table)
        return new

    def store_ahead(self):
        before, limit = self.pool.stats.stores, self.choose(range(5))
        stored = self.pool.store_ahead(limit)
        assert self.pool.stats.stores - before == stored <= limit
        if self.sizes["cpu"] > limit:
            assert self.pool.store_ahead(limit) == 0  # what is stored stays so

    def reset(self):
        tier = self.choose((None, "gpu", "cpu"))
        self.pool.reset(tier)
        if tier != "cpu":
            self.idle = []
            assert self.pool.use("gpu")["cached"] == 0
        if tier != "gpu":
            assert self.pool.use("cpu")["cached"] == 0

    def evict_idle(self):
        self.pool.evict_idle()
        self.idle = []

    def execute(self):
        if self.world.queued:
            self.world.execute(self.choose(sorted(self.world.queued)))

    def complete(self):
        taken = sorted([*self.world.queued, *self.world.executed])
        if taken:
            move_id = self.choose(taken)
            self.world.complete(move_id)
            self.loading.pop(move_id, None)
            with pytest.raises(EngineError, match="Complete each move once"):
                self.pool.complete([move_id])

    def launch(self, *parts):
        batch = self.world.launch(*parts)
        for move in batch.moves:
            assert (move.src < self.sizes["gpu"]) == (move.kind == "store")
            assert (move.dst < self.sizes["gpu"]) == (move.kind == "load")
            key = self.pool.states.keys[move.dst]
            if move.kind == "load" and key is not None:
                # Loaded once for all, unless the first target gave way meanwhile.
                assert not any(
                    named == key and dst != move.dst and self.pool.states.keys[dst] == key
                    for dst, named in self.loading.values()
                )
                self.loading[move.move_id] = move.dst, key

    def snapshot(self):
        ids = range(self.pool.num_blocks)
        owners = [(self.pool.states.owners[b], self.pool.states.keys[b]) for b in ids]
        return owners, self.pool.use("gpu"), self.pool.use("cpu"), asdict(self.pool.stats)

    def check(self):
        """Owners are the tables; every block is one thing; a key names one block of each tier."""
        owners = Counter(block_id for track in self.tracks for block_id in track.table)
        ids = range(self.pool.num_blocks)
        assert [self.pool.states.owners[b] for b in ids] == [owners[b] for b in ids]
        for track in self.tracks:
            assert len(set(track.table)) == len(track.table)
            assert all(block_id in self.in_place_ids for block_id in track.table)
        for tier, size in self.sizes.items():
            use = self.pool.use(tier)
            assert sum(use.values()) == size
            assert min(use.values()) >= 0
        assert self.pool.num_free + self.pool.num_used == self.sizes["gpu"]
        keys = [self.pool.states.keys[b] for b in ids]
        for part in (keys[: self.sizes["gpu"]], keys[self.sizes["gpu"] :]):
            named = [key for key in part if key is not None]
            assert len(set(named)) == len(named)
        assert list(self.pool.states.gpu_idle) == self.idle

    def end(self):
        """Everything ends: every count is back where it was."""
        for track in self.tracks:
            if track.holds:
                self.world.stop(track)
        self.world.complete_all()
        assert self.pool.ledger.num_in_flight == 0
        assert self.pool.use("gpu")["owned"] == self.pool.use("cpu")["owned"] == 0
        assert self.pool.use("cpu")["in_transit"] == 0
        self.pool.reset()
        assert self.pool.use("gpu")["free"] == self.sizes["gpu"]
        assert self.pool.use("cpu")["free"] == self.sizes["cpu"]
        self.world.close()
