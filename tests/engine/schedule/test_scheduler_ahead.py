"""Steps planned behind an uncommitted one."""

import pytest

from engine.asked.request import SequenceStatus
from engine.errors import EngineError
from tests.engine.schedule.test_scheduler import (
    EOS,
    make_scheduler,
    make_sequence,
    shape,
    step,
    tokens_for,
)


def commit(scheduler, plan, token_id=7):
    return scheduler.commit(plan, tokens_for(plan, token_id), {EOS})


def test_a_decode_runs_behind_its_prefill_with_a_token_of_the_device():
    scheduler = make_scheduler()
    first, second = make_sequence(0, 3, max_tokens=3), make_sequence(1, 4, max_tokens=3)
    scheduler.add(first)
    scheduler.add(second)
    now = scheduler.plan_step()
    ahead = scheduler.plan_ahead()
    assert shape(now) == ([], [(0, 0, 3, True), (1, 0, 4, True)])
    assert shape(ahead) == ([0, 1], [])
    assert [(i.start, i.token_rows, i.samples) for i in ahead.decodes] == [
        (3, range(1), True),
        (4, range(1, 2), True),
    ]
    assert (now.step, ahead.step) == (0, 1)
    assert scheduler.planned == [now, ahead]
    assert (first.num_computed, first.num_tokens) == (0, 3)
    assert [len(s.block_table) for s in (first, second)] == [1, 2]
    with pytest.raises(EngineError, match=r"position 3 of sequence 0.*on the device"):
        _ = ahead.decodes[0].token_ids
    commit(scheduler, now, 8)
    third = scheduler.plan_ahead()
    assert [(i.start, *i.token_rows) for i in third.decodes] == [(4, 0), (5, 1)]
    commit(scheduler, ahead, 9)
    assert scheduler.plan_ahead() is None
    events = commit(scheduler, third, 10)
    assert [e.finish_reason for e in events] == ["length", "length"]
    assert first.output_token_ids == second.output_token_ids == [8, 9, 10]
    assert scheduler.pools[0].num_free == 16
    assert scheduler.stats.num_decode_tokens == 4


def test_chunks_of_a_prompt_are_known_to_the_host():
    scheduler = make_scheduler(tokens=4)
    scheduler.add(make_sequence(0, 10, max_tokens=2))
    plan = scheduler.plan_step()
    shapes = [shape(plan)]
    for _ in range(3):
        ahead = scheduler.plan_ahead()
        shapes.append(shape(ahead))
        assert not plan.scheduled[0].token_rows
        commit(scheduler, plan)
        plan = ahead
    assert shapes == [
        ([], [(0, 0, 4, False)]),
        ([], [(0, 4, 4, False)]),
        ([], [(0, 8, 2, True)]),
        ([0], []),
    ]
    assert plan.decodes[0].token_rows == range(1)


def test_rows_are_those_of_the_sampling_sequences():
    scheduler = make_scheduler(tokens=8, num_blocks=32)
    scheduler.add(make_sequence(0, 3, max_tokens=20))
    step(scheduler)
    scheduler.add(make_sequence(1, 8, max_tokens=20))
    scheduler.add(make_sequence(2, 2, max_tokens=20))
    now = scheduler.plan_step()
    assert shape(now) == ([0], [(1, 0, 7, False)])
    ahead = scheduler.plan_ahead()
    assert shape(ahead) == ([0], [(1, 7, 1, True), (2, 0, 2, True)])
    assert [[*item.token_rows] for item in ahead.scheduled] == [[0], [], []]
    commit(scheduler, now)
    third = scheduler.plan_ahead()
    assert [(i.sequence.seq_id, *i.token_rows) for i in third.decodes] == [(0, 0), (1, 1), (2, 2)]


@pytest.mark.parametrize("params", [{"max_tokens": 1}, {"max_tokens": None}])
def test_a_sequence_that_certainly_ends_is_left_out(params):
    scheduler = make_scheduler(max_len=8)
    length = 3 if params["max_tokens"] else 7
    ending, going = make_sequence(0, length, **params), make_sequence(1, 2, max_tokens=5)
    scheduler.add(ending)
    scheduler.add(going)
    now = scheduler.plan_step()
    ahead = scheduler.plan_ahead()
    assert [i.sequence.seq_id for i in ahead.scheduled] == [1]
    commit(scheduler, now)
    assert ending.is_finished
    assert scheduler.running == [going]


def test_a_place_is_free_once_the_end_is_committed():
    scheduler = make_scheduler(seqs=2)
    for seq_id, max_tokens in enumerate((1, 5, 5)):
        scheduler.add(make_sequence(seq_id, 2, max_tokens=max_tokens))
    now = scheduler.plan_step()
    ahead = scheduler.plan_ahead()
    assert shape(ahead) == ([1], [])
    commit(scheduler, now)
    assert shape(scheduler.plan_ahead()) == ([1], [(2, 0, 2, True)])


def test_a_sequence_that_ends_unforeseen_is_ignored_behind():
    scheduler = make_scheduler()
    ended, going = make_sequence(0, 3, max_tokens=9), make_sequence(1, 3, max_tokens=9)
    scheduler.add(ended)
    scheduler.add(going)
    now = scheduler.plan_step()
    ahead = scheduler.plan_ahead()
    tokens = tokens_for(now) | {0: tokens_for(now, EOS)[0]}
    assert [e.finish_reason for e in scheduler.commit(now, tokens, {EOS})] == ["stop", None]
    assert not ahead.is_dead
    third = scheduler.plan_ahead()
    assert [(i.sequence.seq_id, *i.token_rows) for i in third.decodes] == [(1, 1)]
    both = {0: tokens_for(now)[1], **tokens_for(ahead)}
    assert [e.request_id for e in scheduler.commit(ahead, both, {EOS})] == ["r1"]
    assert ended.output_token_ids == [EOS]
    assert going.output_token_ids == [7, 7]
    scheduler.finish(going, "stop", "xy")
    assert third.is_dead
    assert scheduler.commit(third, {}, {EOS}) == []
    assert scheduler.pools[0].num_free == 16
    assert scheduler.stats.num_finished == 2


def test_no_block_is_taken_from_anyone_ahead():
    scheduler = make_scheduler(num_blocks=4, max_len=16, tokens=32)
    old, new = make_sequence(0, 3, max_tokens=13), make_sequence(1, 3, max_tokens=13)
    scheduler.add(old)
    scheduler.add(new)
    plan = scheduler.plan_step()
    planned_ahead = 0
    while (ahead := scheduler.plan_ahead()) is not None:
        commit(scheduler, plan)
        plan, planned_ahead = ahead, planned_ahead + 1
    assert planned_ahead == 5
    assert [len(s.block_table) for s in (old, new)] == [2, 2]
    assert scheduler.planned == [plan]
    assert scheduler.stats.num_preemptions == scheduler.stats.num_stalls == 0
    commit(scheduler, plan)
    assert shape(scheduler.plan_step()) == ([0], [])
    assert new.status is SequenceStatus.WAITING
    assert scheduler.stats.num_preemptions == 1


def test_aborts_between_plan_and_commit():
    scheduler = make_scheduler()
    gone, stays = make_sequence(0, 3), make_sequence(1, 3)
    scheduler.add(gone)
    scheduler.add(stays)
    now = scheduler.plan_step()
    ahead = scheduler.plan_ahead()
    scheduler.abort("r0")
    assert [e.request_id for e in commit(scheduler, now)] == ["r1"]
    assert scheduler.plan_ahead() is not None
    assert scheduler.pools[0].num_used == len(stays.block_table)
    assert [e.request_id for e in commit(scheduler, ahead)] == ["r1"]
    assert gone.output_token_ids == []
    assert scheduler.stats.num_aborted == 1


def test_plans_are_committed_in_order_and_discarded_in_reverse():
    scheduler = make_scheduler()
    with pytest.raises(EngineError, match="got 0"):
        scheduler.plan_ahead()
    scheduler.add(make_sequence(0, 3))
    now = scheduler.plan_step()
    ahead = scheduler.plan_ahead()
    with pytest.raises(EngineError, match="got 2"):
        scheduler.plan_ahead()
    with pytest.raises(EngineError, match="oldest plan in force"):
        scheduler.commit(ahead, {}, ())
    with pytest.raises(EngineError, match="newest plan in force"):
        scheduler.discard(now)
    scheduler.discard(ahead)
    again = scheduler.plan_ahead()
    assert shape(again) == shape(ahead)
    scheduler.discard(again)
    scheduler.discard(now)
    assert shape(scheduler.plan_step()) == shape(now)
