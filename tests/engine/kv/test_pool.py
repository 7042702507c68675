"""The pool of two tiers, case by case."""

import pytest

from engine.errors import EngineError
from engine.kv.pool import TieredBlockPool
from engine.kv.prefix import num_expired, usable_prefix
from tests.engine.kv.world import P, Track, World, take


def names(world, tokens, salt=None):
    """For each full block of the tokens: the block ids that hold it, GPU first."""
    keys = Track(list(tokens), salt).keys
    ids = range(world.pool.num_blocks)
    return [[b for b in ids if world.pool.states.keys[b] == key] for key in keys]


def test_sizes_are_checked():
    for sizes in ((0, 0, 4), (1, 0, 0), (1, -1, 4)):
        with pytest.raises(EngineError, match="at least 1 GPU block"):
            TieredBlockPool(*sizes)
    with pytest.raises(EngineError, match="3 in place"):
        TieredBlockPool(1, 2, 4, num_in_place=3)
    with pytest.raises(EngineError, match="window=0"):
        TieredBlockPool(1, 0, 4, window=0)


def test_without_keys_it_is_the_pool_of_one_tier():
    pool = TieredBlockPool(5, 0, 16)
    assert pool.allocate(3) == [0, 1, 2]
    pool.free([2, 0])
    assert pool.allocate(4) == [3, 4, 2, 0]
    assert (pool.num_free, pool.num_used) == (0, 5)
    with pytest.raises(EngineError, match="freed twice"):
        pool.free([1, 1])
    assert pool.states.owners[1] == 1
    with pytest.raises(EngineError, match="at most 0 blocks"):
        pool.allocate(1)
    with pytest.raises(EngineError, match=r"from 0 to 4, got 5"):
        pool.free([5])
    assert not take(pool)


def test_a_prefix_is_found_but_never_the_whole_prompt():
    world = World(6, 0)
    world.stop(world.run([1, 2, 3, 4]))
    for length, blocks in ((1, 0), (2, 0), (3, 1), (4, 1), (5, 2)):
        track = Track([1, 2, 3, 4, 5][:length])
        assert len(world.find(track.keys, length)) == blocks
    assert world.find(Track([1, 2, 3, 4, 5], "other").keys, 5) == []


def test_layers_with_a_window_need_only_the_end_of_a_prefix():
    world = World(4, 4)
    track = world.run(range(8))
    keys = list(track.keys)
    world.stop(track, "drop")
    world.pool.allocate(1)  # the tail is gone
    assert world.pool.findable(keys) == [True, True, True, False]
    count = usable_prefix([world.pool.findable(keys)], [3], P)
    assert count == 3
    found = world.find(keys[num_expired(count * P, 3, P) : count], 2 * P + 1)
    assert len(found) == 1


def test_the_tail_gives_way_before_the_head_and_the_older_before_the_newer():
    world = World(4, 0)
    first, second = world.run([1, 1, 2, 2]), world.run([3, 3, 4, 4])
    a, b, c, d = first.table + second.table
    world.stop(second)
    world.stop(first)
    assert world.pool.allocate(4) == [d, c, b, a]


def test_what_is_used_again_is_younger():
    world = World(4, 0)
    first, second = world.run([1, 1, 2, 2]), world.run([3, 3, 4, 4])
    a, b, c, d = first.table + second.table
    world.stop(first)
    world.stop(second)
    world.stop(world.run([1, 1, 2, 9]))  # finds a; its own block takes b's place
    assert names(world, [1, 1, 2, 2]) == [[a], []]
    assert world.pool.allocate(4) == [d, c, b, a]


def test_nothing_is_evicted_in_vain():
    world = World(4, 1)
    world.run([9, 9])
    world.stop(world.run([1, 1, 2, 2, 3]))
    found = world.find(Track([1, 1, 2, 2, 7]).keys, 5)
    with pytest.raises(EngineError, match="at most 3 blocks"):
        world.pool.allocate(4)
    world.pool.claim(found)  # the third is another block without an owner
    with pytest.raises(EngineError, match="at most 1 blocks"):
        world.pool.allocate(2)
    assert [len(ids) for ids in names(world, [1, 1, 2, 2])] == [1, 1]
    assert not take(world.pool)
    world.pool.allocate(1)


def test_of_equal_blocks_the_first_is_findable_and_the_other_private():
    world = World(4, 0)
    first, second = Track([1, 1, 2]), Track([1, 1, 2])
    world.start(first)
    world.start(second)
    world.launch((first, 3), (second, 3))
    assert names(world, [1, 1]) == [[first.table[0]]]
    assert world.pool.states.keys[second.table[0]] is None
    world.stop(second)
    assert world.pool.use("gpu")["free"] == 2
    with pytest.raises(EngineError, match="keep its key"):
        world.pool.register(first.table[0], b"other")


def test_a_host_tier_smaller_than_the_gpu_adds_its_whole_size():
    world = World(6, 2)
    prompts = [[n] * P for n in range(8)]
    for prompt in prompts:
        world.stop(world.run(prompt))
    world.complete_all()
    assert all(names(world, prompt)[0] for prompt in prompts)
    assert world.pool.use("cpu")["cached"] == 2
    world.stop(world.run([8] * P))  # the ninth: the oldest content of the host tier goes
    assert [len(names(world, [n] * P)[0]) for n in range(9)] == [0] + [1] * 8
    assert world.pool.stats.evicted_cpu == 1


def test_eviction_stores_before_the_next_owner_writes():
    world = World(1, 1)
    world.stop(world.run([1, 1]))
    world.run([2, 2])
    assert world.pool.stats.stores == 1
    assert world.memory[1] == [(None, 1), (None, 1, 1)]


def test_negative_control_a_step_that_does_not_wait_spoils_the_store():
    world = World(1, 1, obey_waits=False)
    world.stop(world.run([1, 1]))
    world.run([2, 2])
    world.complete_all()
    assert world.memory[1] == [(None, 2), (None, 2, 2)]


def test_negative_control_a_read_before_its_load_is_caught():
    world = World(2, 2)
    world.stop(world.run([1, 1, 2]))
    world.pool.evict_idle()
    world.launch()
    track = Track([1, 1, 2])
    world.start(track)
    with pytest.raises(AssertionError, match="position 0"):
        world.launch((track, 1))


def test_a_prefix_is_loaded_once_for_all_who_ask():
    world = World(8, 4)
    world.stop(world.run([1, 1, 2, 2, 3]))
    world.pool.evict_idle()
    world.complete_all()
    tracks = [Track([1, 1, 2, 2, n]) for n in range(4)]
    claims = [world.start(track) for track in tracks]
    assert len({tuple(claim.blocks[:2]) for claim in claims}) == 1
    assert len(claims[0].pending) == 2
    assert {claim.pending for claim in claims} == {claims[0].pending}
    batch = world.launch()
    assert [move.kind for move in batch.moves] == ["load", "load"]
    assert not batch.waits  # other sequences run meanwhile
    stats = world.pool.stats
    assert (stats.hits_loaded, stats.hits_gpu, stats.loads) == (2, 6, 2)
    for move in batch.moves:
        assert world.pool.ledger.is_pending(claims[3].pending)
        world.complete(move.move_id)
    assert not world.pool.ledger.is_pending(claims[3].pending)
    world.launch(*((track, 1) for track in tracks))


def test_what_was_loaded_is_not_stored_again():
    world = World(2, 4)
    for _ in range(3):
        for prompt in ([1, 1, 1], [2, 2, 2]):
            world.stop(world.run(prompt))
            world.complete_all()
    assert world.pool.stats.stores == 2
    assert world.pool.stats.loads >= 3


def test_copies_of_what_is_on_the_gpu_are_the_first_to_give_way():
    world = World(3, 2)
    world.stop(world.run([1, 1]))
    world.pool.evict_idle()
    world.stop(world.run([2, 2]))
    world.pool.evict_idle()
    world.complete_all()
    holder = world.run([2, 2, 7])  # loaded; its host block is a spare copy
    world.complete_all()
    world.stop(world.run([3, 3]))
    world.pool.evict_idle()
    world.complete_all()
    assert [len(names(world, [n, n])[0]) for n in (1, 2, 3)] == [1, 1, 1]
    assert (world.pool.stats.evicted_spare, world.pool.stats.evicted_cpu) == (1, 0)
    assert names(world, [2, 2]) == [[holder.table[0]]]


def test_a_sequence_longer_than_the_gpu_runs_and_is_found_again():
    world = World(3, 5)
    tokens = list(range(11))
    track = world.run(tokens, "either")
    assert [b < world.pool.num_gpu_blocks for b in track.table] == [True] * 3 + [False] * 3
    split = list(track.table)
    track.tokens.append(11)
    world.launch((track, 1))
    assert track.table == split
    world.stop(track)
    again = Track([*range(12), 12])
    found = world.find(again.keys, 13)
    assert len(found) == 6
    assert not world.pool.can_claim(found)  # three to load, no GPU block left
    with pytest.raises(EngineError, match="room for 6 blocks found, got 3 GPU blocks"):
        world.pool.claim(found)
    assert world.pool.can_claim(found, in_place=3)
    claim = world.start(again, "either", in_place=3)
    assert claim.blocks[:6] == split
    assert not claim.pending
    world.launch((again, 1))
    assert world.pool.stats.hits_in_place == 3


def test_host_blocks_that_compute_cannot_reach_are_never_owned():
    world = World(2, 4, num_in_place=1)
    assert world.pool.num_allocatable("either") == 3
    with pytest.raises(EngineError, match="at most 3 blocks"):
        world.pool.allocate(4, "either")
    for n in range(4):
        world.stop(world.run([n, n]))
    world.pool.evict_idle()
    world.complete_all()
    track = Track([3, 3, 4])
    world.start(track, in_place=1)
    assert all(block_id < 3 for block_id in track.table)


@pytest.mark.parametrize("num_cpu", [0, 1, 2, 9])
def test_swap_out_keeps_the_head_as_far_as_there_is_room(num_cpu):
    world = World(4, num_cpu)
    track = world.run(range(7))
    assert world.swap_out(track) == 3  # the fourth block is not full
    other = world.run([50 + n for n in range(8)])  # takes every GPU block
    world.complete_all()
    found = world.find(track.keys, 7)
    assert len(found) == min(3, num_cpu)
    world.stop(other)
    world.start(track, resumed=True)
    world.bring(track)
    world.launch((track, 7 - track.computed))
    stats = world.pool.stats
    assert (stats.swapped_out, stats.swapped_in_loaded) == (3, min(3, num_cpu))
    assert stats.lost == 3 - min(3, num_cpu)


def test_swap_out_leaves_shared_blocks_with_their_owners():
    world = World(6, 6)
    first = world.run([1, 1, 2, 2, 3])
    second = world.run([1, 1, 2, 2, 4, 4])
    world.swap_out(second)
    assert world.pool.stats.stores == 1  # its own block alone
    first.tokens.append(5)
    world.launch((first, 1))


def test_abort_during_a_load_keeps_the_content_for_the_next():
    world = World(3, 2)
    world.stop(world.run([1, 1, 2]))
    world.pool.evict_idle()
    world.complete_all()
    track = Track([1, 1, 2])
    world.start(track)
    world.launch()
    world.stop(track)
    again = Track([1, 1, 3])
    claim = world.start(again)
    assert world.pool.ledger.is_pending(claim.pending)
    assert world.pool.stats.loads == 1
    world.complete_all()
    world.launch((again, 1))


def test_a_block_whose_load_nobody_awaits_can_be_taken_meanwhile():
    world = World(1, 2)
    world.stop(world.run([1, 1]))
    world.pool.evict_idle()
    world.complete_all()
    track = Track([1, 1, 2])
    world.start(track, n=0)
    world.launch()
    world.stop(track)
    other = world.run([7, 7])  # waits for the load, then writes
    world.complete_all()
    assert world.memory[other.table[0]][1] == (None, 7, 7)
    assert len(world.find(Track([1, 1, 2]).keys, 3)) == 1


def test_reset_during_moves_leaves_every_count_right():
    world = World(2, 2)
    world.stop(world.run([1, 1, 2]))
    world.pool.evict_idle()
    world.launch()
    assert world.pool.use("cpu")["in_transit"] == 1
    world.pool.reset()
    assert (world.pool.use("cpu")["cached"], world.pool.use("gpu")["free"]) == (0, 2)
    world.complete_all()
    assert world.pool.use("cpu")["free"] == 2
    assert world.find(Track([1, 1, 2]).keys, 3) == []


def test_reset_of_the_gpu_tier_leaves_the_host_tier():
    world = World(2, 2)
    world.stop(world.run([1, 1, 2]))
    world.pool.store_ahead(2)
    world.complete_all()
    world.pool.reset("gpu")
    track = Track([1, 1, 2])
    assert len(world.start(track).blocks) == 1
    assert world.pool.stats.hits_loaded == 1


def test_store_ahead_makes_the_next_victims_free_of_waits():
    world = World(4, 4)
    for n in range(4):
        world.stop(world.run([n, n]))
    assert [world.pool.store_ahead(2, most=1) for _ in range(3)] == [1, 1, 0]
    world.complete_all()
    world.pool.allocate(2)
    assert not take(world.pool)
    world.pool.allocate(1)
    batch = world.launch()
    assert batch.waits == {move.move_id for move in batch.moves}
    assert len(batch.moves) == 1


def test_store_ahead_does_nothing_while_blocks_are_free():
    world = World(4, 4)
    world.stop(world.run([1, 1]))
    assert world.pool.store_ahead(3) == 0
    assert world.pool.store_ahead(4) == 1


def test_what_is_to_be_dropped_or_forgotten_is_not_stored():
    world = World(2, 2)
    world.stop(world.run([1, 1]), "drop")
    world.stop(world.run([2, 2]), "forget")
    assert [len(names(world, [n, n])[0]) for n in (1, 2)] == [1, 0]
    world.pool.allocate(2)
    assert not take(world.pool)
    assert world.pool.stats.evicted_lost == 1


def test_content_without_an_owner_is_forgotten_in_both_tiers():
    world = World(3, 3)
    mine, other = world.run([1, 1, 2, 2]), world.run([3, 3])
    keys = list(mine.keys) + list(other.keys)
    assert world.pool.num_lacking(mine.table) == 2
    world.stop(mine)
    world.pool.store_ahead(3)
    world.complete_all()
    assert world.pool.num_lacking(mine.table) == 0
    assert world.pool.findable(keys) == [True] * 3
    world.pool.forget(keys)
    assert world.pool.findable(keys) == [False, False, True]
    assert world.pool.use("gpu")["free"] == 2
    assert world.pool.use("cpu")["free"] == 3


def test_a_full_host_tier_in_use_skips_stores():
    world = World(2, 1)
    blocks = world.pool.allocate(3, "either")
    world.pool.free(blocks[:2])
    world.stop(world.run([1, 1, 2, 2]))
    world.pool.allocate(2)
    assert world.pool.stats.stores_skipped == world.pool.stats.evicted_lost == 2
    assert not take(world.pool)


def test_moves_are_completed_once_and_after_they_were_taken():
    world = World(1, 1)
    world.stop(world.run([1, 1]))
    world.pool.evict_idle()
    with pytest.raises(EngineError, match="was never taken"):
        world.pool.complete([0])
    (move,) = take(world.pool).moves
    world.pool.complete([move.move_id])
    with pytest.raises(EngineError, match="is not in flight"):
        world.pool.complete([move.move_id])
