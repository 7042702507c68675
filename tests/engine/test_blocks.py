from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import EngineError
from engine.kv.blocks import BlockPool


def test_blocks_come_in_the_order_in_which_they_became_free():
    pool = BlockPool(5, 16)
    assert pool.allocate(3) == [0, 1, 2]
    pool.free([2, 0])
    assert pool.allocate(4) == [3, 4, 2, 0]
    assert (pool.num_free, pool.num_used) == (0, 5)


def test_blocks_for_rounds_up():
    pool = BlockPool(1, 16)
    assert [pool.blocks_for(n) for n in (0, 1, 16, 17, 32, 33)] == [0, 1, 1, 2, 2, 3]


def test_allocate_is_all_or_nothing():
    pool = BlockPool(3, 4)
    pool.allocate(2)
    assert pool.can_allocate(1)
    assert not pool.can_allocate(2)
    assert not pool.can_allocate(-1)
    with pytest.raises(EngineError, match=r"at most 1 blocks \(free of 3\).*demand for 2"):
        pool.allocate(2)
    assert pool.num_free == 1
    assert pool.allocate(0) == []


def test_shared_block_is_free_after_its_last_owner():
    pool = BlockPool(2, 4)
    ids = pool.allocate(1)
    pool.share(ids)
    assert pool.ref_count(0) == 2
    pool.free(ids)
    assert (pool.ref_count(0), pool.num_free) == (1, 1)
    pool.free(ids)
    assert (pool.ref_count(0), pool.num_free) == (0, 2)


def test_double_free_raises_and_changes_nothing():
    pool = BlockPool(3, 4, tier="cpu")
    ids = pool.allocate(2)
    with pytest.raises(EngineError, match=r"\(cpu\).*block 1.*freed twice"):
        pool.free([0, 1, 1])
    assert pool.num_free == 1
    pool.free(ids)
    with pytest.raises(EngineError, match="freed twice"):
        pool.free([0])
    assert pool.num_free == 3


def test_misuse_raises():
    pool = BlockPool(3, 4)
    pool.allocate(1)
    with pytest.raises(EngineError, match="which is free"):
        pool.share([0, 2])
    assert pool.ref_count(0) == 1
    for call in (pool.free, pool.share):
        for bad in (-1, 3):
            with pytest.raises(EngineError, match=f"from 0 to 2, got {bad}"):
                call([bad])
    with pytest.raises(EngineError, match="got 3"):
        pool.ref_count(3)
    for sizes in ((0, 4), (4, 0)):
        with pytest.raises(EngineError, match="at least 1 block"):
            BlockPool(*sizes)


class Owners(RuleBasedStateMachine):
    """Owners take, share and free blocks; a plain count of owners is the model."""

    @initialize(num_blocks=st.integers(1, 12))
    def make(self, num_blocks):
        self.pool = BlockPool(num_blocks, 4)
        self.owned = []

    @rule(n=st.integers(0, 5))
    def allocate(self, n):
        if self.pool.can_allocate(n):
            ids = self.pool.allocate(n)
            assert len(set(ids)) == n
            assert not set(ids) & {block_id for other in self.owned for block_id in other}
            self.owned.append(ids)
        else:
            with pytest.raises(EngineError):
                self.pool.allocate(n)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def share(self, data):
        ids = data.draw(st.sampled_from(self.owned))
        self.pool.share(ids)
        self.owned.append(list(ids))

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data):
        place = data.draw(st.integers(0, len(self.owned) - 1))
        self.pool.free(self.owned.pop(place))

    @invariant()
    def counts_agree(self):
        counts = Counter(block_id for ids in self.owned for block_id in ids)
        for block_id in range(self.pool.num_blocks):
            assert self.pool.ref_count(block_id) == counts[block_id]
        assert self.pool.num_used == len(counts)
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks

    def teardown(self):
        for ids in self.owned:
            self.pool.free(ids)
        assert self.pool.num_free == self.pool.num_blocks
        assert sorted(self.pool.allocate(self.pool.num_blocks)) == list(range(self.pool.num_blocks))


TestOwners = Owners.TestCase
TestOwners.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(sizes=st.lists(st.integers(0, 4), max_size=20))
def test_same_calls_give_same_blocks(sizes):
    def play():
        pool, held, seen = BlockPool(10, 4), [], []
        for n in sizes:
            while not pool.can_allocate(n):
                pool.free(held.pop(0))
            held.append(pool.allocate(n))
            seen.append(held[-1])
        return seen

    assert play() == play()
