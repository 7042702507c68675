"""Computed tokens that are taken back, and the blocks beyond them."""

import random

import pytest

from engine.errors import EngineError
from engine.kv.sequences import GONE
from tests.engine.schedule.test_scheduler_tiers import WEIGHTS, Driver, draw_tiers
from tests.engine.tiers_world import Tiers, World

OFTEN = {**WEIGHTS, "truncate": 8}


def running(tiers, **spec):
    """A world with one sequence that has run for some steps, and none on its way."""
    world = World(tiers)
    sequence = world.add(**{"max_tokens": 20, **spec})
    for _ in range(6):
        world.step(ahead=False)
    return world, sequence


def test_blocks_beyond_the_rest_are_free():
    world, sequence = running(Tiers(prefix_caching=False), length=10)
    pool, version = world.pools[0], sequence.table_version
    assert (sequence.num_computed, len(sequence.block_table)) == (15, 4)
    free = pool.num_free
    world.truncate(sequence, 6)
    assert (sequence.num_computed, len(sequence.block_table)) == (6, 2)
    assert pool.num_free == free + 2
    assert sequence.table_version > version
    world.check()
    world.finish()


def test_a_block_that_others_may_find_is_not_written_again():
    world, sequence = running(Tiers(), length=10)
    first = sequence.block_table[0]
    other = world.add(stem=0, length=10, max_tokens=20)
    world.step(ahead=False)
    assert other.block_table[0] == first
    world.truncate(sequence, 7)
    assert (sequence.num_computed, sequence.block_table) == (4, [first])
    world.check()
    world.finish()


@pytest.mark.parametrize(("remain", "stays"), [(14, 14), (11, 11), (10, 0)])
def test_what_a_window_has_left_behind_is_not_seen_again(remain, stays):
    tiers = Tiers(windows=(None, 4), window_host=0, prefix_caching=False)
    world, sequence = running(tiers, length=10)
    assert sequence.num_computed == 15
    assert sequence.num_gone == [0, 2]
    world.truncate(sequence, remain)
    assert sequence.num_computed == stays
    assert [table.count(GONE) for table in sequence.block_tables] == ([0, 2] if stays else [0, 0])
    world.check()
    world.finish()


def test_what_was_never_computed_cannot_remain():
    world, sequence = running(Tiers(), length=10)
    with pytest.raises(EngineError, match=r"at most 15 tokens .* got 16"):
        world.groups.truncate(sequence, 16)
    world.finish()


def test_any_load_is_served_while_tokens_are_taken_back():
    """Over both tiers, with windows and shared prefixes; all that steps read is checked."""
    truncated = 0
    for seed in range(14):
        rng = random.Random(seed)
        world = World(draw_tiers(rng.choice))
        driver = Driver(world, rng.choice)
        for name in rng.choices(list(OFTEN), list(OFTEN.values()), k=70):
            getattr(driver, name)()
            world.check()
        world.finish()
        truncated += world.seen["truncated"]
    assert truncated > 50
