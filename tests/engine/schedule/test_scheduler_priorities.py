"""Requests of a lower priority come first, in the queue and in the blocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.schedule.test_scheduler import make_scheduler, make_sequence, step
from tests.engine.schedule.test_scheduler_ahead import commit


def urgent(seq_id, length, priority, **params):
    sequence = make_sequence(seq_id, length, **params)
    sequence.request.priority = priority
    return sequence


def ids(sequences):
    return [s.seq_id for s in sequences]


def test_lower_ones_are_admitted_first_and_equal_ones_in_order_of_arrival():
    scheduler = make_scheduler(seqs=1)
    for seq_id, priority in enumerate([0, 2, 1, 2, -1, 1, 0]):
        scheduler.add(urgent(seq_id, 2, priority, max_tokens=1))
    assert ids(scheduler.waiting) == [4, 0, 6, 2, 5, 1, 3]
    ended = [event.request_id for _ in range(7) for event in step(scheduler)[1]]
    assert ended == ["r4", "r0", "r6", "r2", "r5", "r1", "r3"]


def test_one_that_waits_takes_nothing_from_one_that_runs():
    scheduler = make_scheduler(seqs=1)
    first, second = urgent(0, 2, 5, max_tokens=3), urgent(1, 2, 0, max_tokens=1)
    scheduler.add(first)
    step(scheduler)
    scheduler.add(second)
    step(scheduler)
    assert (ids(scheduler.running), ids(scheduler.waiting)) == ([0], [1])


def test_the_least_urgent_loses_its_blocks_first():
    scheduler = make_scheduler(num_blocks=6, tokens=32, max_len=16)
    sequences = [urgent(0, 7, 1, max_tokens=9), urgent(1, 7, 0, max_tokens=9)]
    for sequence in sequences:
        scheduler.add(sequence)
    while not scheduler.stats.num_preemptions:
        step(scheduler)
    assert (ids(scheduler.running), ids(scheduler.waiting)) == ([1], [0])


def test_a_preempted_one_waits_before_equal_ones_alone():
    scheduler = make_scheduler(num_blocks=5, tokens=32, seqs=2, max_len=16)
    for seq_id, priority in ((0, 0), (1, 1)):
        scheduler.add(urgent(seq_id, 7, priority, max_tokens=9))
    step(scheduler)
    for seq_id, priority in ((2, 1), (3, 0)):
        scheduler.add(urgent(seq_id, 7, priority, max_tokens=9))
    while not scheduler.stats.num_preemptions:
        step(scheduler)
    assert (ids(scheduler.running), ids(scheduler.waiting)) == ([0], [3, 1, 2])


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(
    loads=st.lists(
        st.tuples(st.integers(-2, 2), st.integers(1, 12), st.integers(1, 12), st.integers(0, 9)),
        min_size=1,
        max_size=9,
    ),
    num_blocks=st.integers(6, 14),
    ahead=st.booleans(),
)
def test_every_load_is_served_and_orders_are_kept(loads, num_blocks, ahead):
    scheduler = make_scheduler(num_blocks=num_blocks, max_len=24, tokens=8, seqs=4)
    coming = sorted(enumerate(loads), key=lambda load: load[1][3])
    sequences = [
        urgent(at, length, priority, max_tokens=most) for at, (priority, length, most, _) in coming
    ]
    left, times, now = list(sequences), [load[3] for _, load in coming], 0
    while left or scheduler.has_unfinished:
        while left and times[0] <= now:
            scheduler.add(left.pop(0))
            times.pop(0)
        now += 1
        plan = scheduler.plan_step()
        for queue in (scheduler.running, scheduler.waiting):
            assert [s.priority for s in queue] == sorted(s.priority for s in queue)
        if plan is None:
            continue
        behind = scheduler.plan_ahead() if ahead else None
        for each in (plan, behind):
            for item in each.scheduled if each else ():
                assert item.sequence.is_finished or item.sequence in scheduler.running
        commit(scheduler, plan)
        if behind is not None:
            commit(scheduler, behind)
        assert now < 2000
    assert all(s.finish_reason == "length" for s in sequences)
    assert scheduler.pools[0].num_free == num_blocks
