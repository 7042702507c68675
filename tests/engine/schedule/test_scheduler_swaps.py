"""What the scheduler does with a host tier, case by case."""

import pytest

from engine.asked.request import SequenceStatus
from engine.errors import EngineError
from engine.kv.sequences import GONE
from engine.plan.sizes import SwapRates
from engine.schedule import admission as rounds
from tests.engine.tiers_world import Tiers, World


def world_of(**sizes):
    return World(Tiers(**{"tokens": 64, "max_len": 64, "seqs": 8} | sizes))


def run(world, sequence=None, most=300):
    """Step, completing moves at once, until a sequence or all ended."""
    for _ in range(most):
        ended = sequence.is_finished if sequence else not world.scheduler.has_unfinished
        if ended:
            return
        world.step()
        world.complete(world.moves())
        world.check()
    raise AssertionError("no progress")


def few_recomputed(world):
    """Whether no more was lost than the last blocks, which were not full."""
    stats = world.scheduler.stats
    return stats.num_recomputed_tokens <= (world.size - 1) * stats.num_preemptions


def counts(world):
    return world.scheduler.kv_stats()


def test_a_preempted_sequence_goes_on_where_it_was():
    world = world_of(max_len=32, num_gpu=8, num_other=8, prefix_caching=False)
    world.add(length=3, max_tokens=29)
    second = world.add(length=3, max_tokens=29)
    while not second.num_preemptions:
        world.step()
    assert second.status is SequenceStatus.WAITING
    assert second.num_output_tokens == 14
    run(world)
    kv = counts(world)
    assert (kv["swaps_out"], kv["swaps_in"], kv["recomputes"], kv["preemptions"]) == (1, 1, 0, 1)
    # Four blocks were full; nothing but the tokens behind them runs again.
    assert kv["pool"]["swapped_out"] == kv["pool"]["swapped_in_loaded"] == 4
    assert world.scheduler.stats.num_recomputed_tokens == 0
    world.end()


@pytest.mark.parametrize(("token_s", "swaps"), [(0.4, 0), (0.6, 1)])
def test_the_cheaper_way_is_taken(token_s, swaps):
    rates = SwapRates(store_bytes_s=1.0, load_bytes_s=1.0)
    world = world_of(
        max_len=32, num_gpu=8, num_other=8, swap_rates=rates, recompute_token_s=token_s
    )
    world.add(length=3, max_tokens=29)
    world.add(length=3, max_tokens=29)
    run(world)
    kv = counts(world)
    assert (kv["swaps_out"], kv["recomputes"]) == (swaps, 1 - swaps)
    assert (kv["pool"]["swapped_out"] > 0) is bool(swaps)
    world.end()


def test_what_was_dropped_and_is_still_there_is_not_swapped_in():
    world = world_of(max_len=32, num_gpu=9)
    world.add(length=3, max_tokens=29)
    second = world.add(length=3, max_tokens=29)
    while not second.num_preemptions:
        world.step()
    world.scheduler.abort("0")
    run(world)
    kv = counts(world)
    assert (kv["recomputes"], kv["swaps_out"], kv["swaps_in"]) == (1, 0, 0)
    assert kv["pool"]["swapped_in_gpu"] > 0
    world.end()


@pytest.mark.parametrize("num_host", [0, 1, 2, 3])
def test_a_host_tier_with_too_few_blocks_keeps_a_part(num_host):
    world = world_of(max_len=32, num_gpu=8, num_other=num_host, prefix_caching=False)
    world.add(length=3, max_tokens=29)
    world.add(length=3, max_tokens=29)
    run(world)
    kv = counts(world)
    assert kv["preemptions"] == 1
    assert kv["recomputes"] == int(num_host == 0)
    assert kv["pool"]["swapped_in_loaded"] == num_host
    assert world.scheduler.stats.num_recomputed_tokens == 16 - 4 * num_host
    world.end()


def test_a_sequence_longer_than_the_gpu_runs_to_its_end_with_a_steady_split():
    world = world_of(num_gpu=5, num_in_place=11)
    sequence = world.add(length=30, max_tokens=34)
    world.step()
    first = list(sequence.block_table)
    assert [block < 5 for block in first] == [True] * 5 + [False] * 3
    run(world)
    kv = counts(world)
    assert world.seen["store"] == world.seen["load"] == 0
    assert (kv["preemptions"], world.scheduler.stats.num_stalls) == (0, 0)
    assert sequence.num_output_tokens == 34
    world.end()


def test_a_running_sequence_preempts_newer_ones_before_it_takes_host_blocks():
    world = world_of(num_gpu=7, num_in_place=16, max_len=48)
    old = world.add(length=9, max_tokens=30)
    new = world.add(length=9, max_tokens=30)
    while not new.num_preemptions:
        world.step()
        assert all(block < 7 for block in old.block_table)
    run(world, old)
    assert world.seen["host blocks of sequences"]
    assert new.num_preemptions == 1
    run(world)
    world.end()


def test_a_long_sequence_runs_beside_short_ones():
    world = world_of(num_gpu=6, num_in_place=16, max_len=48)
    first = world.add(length=4, max_tokens=10)
    long = world.add(length=30, max_tokens=10)
    late = world.add(length=2, max_tokens=2)
    world.step()
    assert world.scheduler.running == [first, late, long]
    run(world)
    assert not any(s.num_preemptions for s in (first, long, late))
    world.end()


def test_a_prefix_in_the_host_tier_is_loaded_once_and_others_run_meanwhile():
    world = world_of(num_gpu=32, num_other=32, seqs=6)
    run(world, world.add(stem=0, length=40, max_tokens=1))
    world.scheduler.evict_gpu_cache()
    world.submit()
    world.complete(world.moves())
    other = world.add(length=4, max_tokens=20)
    world.step()
    sharers = [world.add(stem=0, length=44, own=4, max_tokens=3) for _ in range(4)]
    before = other.num_output_tokens
    for _ in range(5):
        world.step()
        world.check()
    assert {s.status for s in sharers} == {SequenceStatus.LOADING}
    assert other.num_output_tokens == before + 5
    assert len({tuple(s.block_table) for s in sharers}) == 1
    assert world.seen["load"] == 10
    loads = world.moves()
    world.complete(loads[:-1])
    world.step()
    assert {s.status for s in sharers} == {SequenceStatus.LOADING}
    world.complete(loads[-1:])
    run(world)
    assert world.seen["load"] == 10
    prefix = counts(world)["prefix"]
    assert prefix["hits_cpu_tokens"] == 40
    assert prefix["hits_gpu_tokens"] == 3 * 40
    world.end()


def test_nothing_else_to_run_is_told():
    world = world_of(num_gpu=32, num_other=32)
    run(world, world.add(stem=0, length=40, max_tokens=1))
    world.scheduler.evict_gpu_cache()
    world.submit()
    world.complete(world.moves())
    sequence = world.add(stem=0, length=41, max_tokens=2)
    assert not world.step()
    assert world.scheduler.has_unfinished
    assert sequence.status is SequenceStatus.LOADING
    world.scheduler.abort(sequence.request.request_id)
    world.end()


def test_blocks_that_compute_cannot_reach_are_loaded_as_far_as_the_gpu_has_room():
    """Of a long prefix in host blocks that need loading, the GPU takes what it can."""
    world = world_of(num_gpu=4, num_in_place=12, num_other=16, max_len=64)
    run(world, world.add(stem=0, length=56, max_tokens=1))
    for _ in range(3):  # what lies in place gives way; what was stored elsewhere stays
        run(world, world.add(length=60, max_tokens=1))
    again = world.add(stem=0, length=60, max_tokens=4)
    run(world, again)
    assert again.num_output_tokens == 4
    world.end()


def test_without_prefix_caching_nothing_is_shared():
    world = world_of(num_gpu=32, num_other=32, prefix_caching=False)
    run(world, world.add(stem=0, length=20, max_tokens=4))
    run(world, world.add(stem=0, length=20, max_tokens=4))
    assert set(counts(world)["prefix"].values()) == {0}
    assert counts(world)["gpu"]["cached"] == 0
    world.end()


def test_salts_part_what_would_be_shared():
    world = world_of(num_gpu=32)
    for salt, hit in ((None, 0), ("a", 0), (None, 16), ("a", 32), ("b", 32), ("\ud800", 32)):
        run(world, world.add(stem=0, length=20, max_tokens=1, salt=salt))
        assert counts(world)["prefix"]["hits_gpu_tokens"] == hit
    world.end()


@pytest.mark.parametrize("windows", [(8,), (None, 8), (None, 8, 4)], ids=str)
def test_layers_with_a_window_are_swapped(windows):
    world = world_of(windows=windows, num_other=32, window_host=16, tokens=8, extra=1)
    for _ in range(3):
        world.add(length=3, max_tokens=40)
    run(world)
    kv = counts(world)
    assert kv["swaps_out"] == kv["swaps_in"] > 0
    assert kv["pool"]["lost"] == 0
    assert few_recomputed(world)
    world.end()


@pytest.mark.parametrize("windows", [(8,), (None, 8), (None, 8, 4)], ids=str)
def test_layers_with_a_window_find_a_prefix_by_its_end(windows):
    world = world_of(windows=windows, num_other=32, window_host=16, tokens=8, extra=3)
    run(world, world.add(stem=0, length=40, max_tokens=2))
    world.scheduler.evict_gpu_cache()
    again = world.add(stem=0, length=42, own=2, max_tokens=2)
    world.step()
    assert again.status is SequenceStatus.LOADING
    # Ten blocks are there; the last ones hold what a window sees.
    seen = [{None: 10, 8: 2, 4: 1}[window] for window in windows]
    assert [[GONE] * (10 - count) for count in seen] == [
        table[: 10 - count] for table, count in zip(again.block_tables, seen, strict=True)
    ]
    assert {len(table) for table in again.block_tables} == {10}
    assert world.seen["load"] == sum(seen)
    run(world)
    # Tokens are those that nothing computed again, bytes (1 a block) those of blocks found.
    found = {"hits_gpu_tokens": 0, "hits_cpu_tokens": 40, "missed_tokens": 40 - 4}
    found |= {"hits_gpu_bytes": 0, "hits_cpu_bytes": sum(seen)}
    assert counts(world)["prefix"] == found
    world.end()


def test_a_reset_leaves_running_sequences_alone():
    world = world_of(num_gpu=32, num_other=32)
    first = world.add(stem=0, length=40, max_tokens=6)
    world.step()
    world.scheduler.reset_cache()
    run(world, first)
    run(world, world.add(stem=0, length=40, max_tokens=6))
    assert counts(world)["prefix"]["hits_gpu_tokens"] == 0
    world.end()


def test_more_sequences_than_the_gpu_holds_do_not_take_blocks_from_each_other_in_turn(monkeypatch):
    """Without turns: who lost its blocks waits until another ends."""
    monkeypatch.setattr(rounds, "ROUND_STEPS", 10_000)
    world = world_of(num_gpu=40, num_other=80, max_len=128, seqs=16)
    for _ in range(8):
        world.add(length=10, max_tokens=20)
    run(world)
    assert counts(world)["preemptions"] <= 4
    assert few_recomputed(world)
    world.end()


def test_few_sequences_that_exceed_the_gpu_end_together(monkeypatch):
    monkeypatch.setattr(rounds, "ROUND_STEPS", 8)
    world = world_of(num_gpu=64, num_other=128, max_len=256, seqs=16, block_size=4)
    sequences = [world.add(length=20, max_tokens=44) for _ in range(6)]
    while not any(s.is_finished for s in sequences):
        world.step()
        world.complete(world.moves())
        world.check()
    outputs = [s.num_output_tokens for s in sequences]
    assert min(outputs) >= 44 - 3 * 8, outputs
    stats = world.scheduler.stats
    assert stats.num_turns > 2
    run(world)
    assert counts(world)["pool"]["lost"] == 0
    assert few_recomputed(world)
    world.end()


def test_a_new_sequence_that_fits_waits_for_no_round(monkeypatch):
    monkeypatch.setattr(rounds, "ROUND_STEPS", 3)
    world = world_of(max_len=64, num_gpu=40, num_other=40)
    for _ in range(2):
        world.add(length=3, max_tokens=30)
    for _ in range(6):
        world.step()
    new = world.add(length=3, max_tokens=5)
    ahead = world.seen["ahead"]
    world.step()
    assert world.seen["ahead"] == ahead + 1  # the device need not wait for the host's decision
    assert new.status is SequenceStatus.RUNNING
    run(world)
    world.end()


def test_a_long_prompt_without_room_is_looked_at_now_and_then():
    """Only what is given back makes the scheduler look at once."""
    world = world_of(num_gpu=100, max_len=400, tokens=300)
    first = world.add(length=280, max_tokens=40)
    world.step()
    asked = []
    find = world.groups.find
    world.groups.find = lambda sequence: (
        asked.append(world.scheduler.stats.num_steps) or find(sequence)
    )
    second = world.add(length=290, max_tokens=1)
    while not first.is_finished:
        world.step()
    assert 3 <= len(asked) <= 8
    world.step()
    assert second in world.scheduler.running or second.is_finished
    run(world)
    world.end()


def test_a_fault_of_the_pools_is_told_and_no_hang(monkeypatch):
    world = world_of(num_gpu=20)
    world.add(length=4, max_tokens=2)
    monkeypatch.setattr(world.groups, "begin", lambda *_, **__: False)
    with pytest.raises(EngineError, match="0 with blocks and 1 that wait, and no move"):
        world.step()


def test_figures_of_two_groups_are_summed():
    world = world_of(windows=(None, 8), num_gpu=24, num_other=6, window_host=5)
    run(world, world.add(length=20, max_tokens=2))
    kv = counts(world)
    assert kv["cpu"]["blocks"] == 11
    assert kv["gpu"]["blocks"] == sum(pool.num_gpu_blocks for pool in world.pools)
    assert [part["cpu"]["blocks"] for part in kv["groups"]] == [6, 5]
    assert [part["block_bytes"] for part in kv["groups"]] == [1, 1]


def test_both_tiers_must_hold_one_sequence():
    with pytest.raises(EngineError, match=r"15 free blocks .*5 on the GPU, 10 in place"):
        Tiers(num_gpu=5, num_in_place=10, max_len=64).make(exact=True)


def test_answers_to_one_prompt_compute_it_once():
    world = world_of(block_size=4, num_gpu=40, tokens=16)
    world.add(length=30, max_tokens=3, n=3)
    other = world.add(length=5, max_tokens=2)
    run(world)
    assert other.is_finished
    alone = world.scheduler.stats.num_prefill_tokens - 5
    assert alone == 30 + 2 * (30 - 28)  # the rest of the prompt behind its full blocks
    world.end()


def test_answers_to_one_prompt_do_not_wait_where_they_would_find_nothing():
    for sizes, length in (({"prefix_caching": False}, 30), ({}, 4)):
        world = world_of(block_size=4, num_gpu=40, **sizes)
        world.add(length=length, max_tokens=3, n=3)
        world.scheduler.plan_step()
        assert len(world.scheduler.running) == 3
