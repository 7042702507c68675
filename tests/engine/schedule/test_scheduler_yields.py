"""Steps that sample no token for a sequence, or several."""

import pytest

from engine.asked.request import SampledToken
from engine.errors import EngineError
from engine.kv.pool import TieredBlockPool
from engine.schedule.scheduler import Scheduler, SchedulerConfig
from tests.engine.schedule.test_scheduler import EOS, make_groups, make_sequence, shape

BLOCKS = 16


def make(yields, *, tokens=16, max_len=32, block_size=4):
    config = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=tokens,
        max_model_len=max_len,
        yields=yields,
    )
    return Scheduler(config, make_groups(config, TieredBlockPool(BLOCKS, 0, block_size)))


def commit(scheduler, plan, **tokens):
    """Commit tokens by name of the request, r0 and so on."""
    sampled = {int(name[1:]): [SampledToken(i, -0.5) for i in ids] for name, ids in tokens.items()}
    return scheduler.commit(plan, sampled, {EOS})


def ids(events):
    return [(e.request_id, e.token_id, e.position, e.finish_reason) for e in events]


def test_steps_of_three_tokens_none_and_one():
    scheduler = make((0, 3))
    sequence = make_sequence(0, 5, max_tokens=6)
    scheduler.add(sequence)
    plan = scheduler.plan_step()
    events = commit(scheduler, plan, r0=[7, 8, 9])
    assert ids(events) == [("r0", 7, 5, None), ("r0", 8, 6, None), ("r0", 9, 7, None)]
    assert (sequence.num_computed, sequence.num_tokens) == (5, 8)
    plan = scheduler.plan_step()
    assert shape(plan) == ([], [(0, 5, 3, True)])
    assert plan.prefills[0].token_ids == [7, 8, 9]
    assert len(sequence.block_table) == 2
    assert commit(scheduler, plan, r0=[]) == []
    assert (sequence.num_computed, len(sequence.block_table)) == (7, 2)
    plan = scheduler.plan_step()
    assert shape(plan) == ([0], [])
    assert (plan.decodes[0].start, plan.decodes[0].token_ids) == (7, [9])
    assert ids(commit(scheduler, plan, r0=[10])) == [("r0", 10, 8, None)]
    plan = scheduler.plan_step()
    assert (shape(plan), plan.decodes[0].start, len(sequence.block_table)) == (([0], []), 8, 3)
    assert commit(scheduler, plan, r0=[]) == []
    # Its block is not one of the sequence's any more: nothing of it is computed.
    assert (sequence.num_computed, len(sequence.block_table)) == (8, 2)
    assert scheduler.pools[0].num_free == BLOCKS - 2
    events = commit(scheduler, scheduler.plan_step(), r0=[11, 12])
    assert ids(events) == [("r0", 11, 9, None), ("r0", 12, 10, "length")]
    assert sequence.output_token_ids == [7, 8, 9, 10, 11, 12]
    assert scheduler.pools[0].num_free == BLOCKS


def test_a_prompt_of_which_no_token_comes_runs_its_last_token_again():
    scheduler = make((0, 1), tokens=4)
    scheduler.add(make_sequence(0, 6, max_tokens=2))
    assert commit(scheduler, scheduler.plan_step()) == []
    plan = scheduler.plan_step()
    assert shape(plan) == ([], [(0, 4, 2, True)])
    assert commit(scheduler, plan, r0=[]) == []
    plan = scheduler.plan_step()
    assert shape(plan) == ([], [(0, 5, 1, True)])
    assert ids(commit(scheduler, plan, r0=[7])) == [("r0", 7, 6, None)]


@pytest.mark.parametrize(
    ("params", "tokens", "kept", "reason"),
    [
        ({"max_tokens": 2}, [7, 8, 9], [7, 8], "length"),
        ({}, [7, EOS, 9], [7, EOS], "stop"),
        ({"ignore_eos": True}, [7, EOS, 9], [7, EOS, 9], None),
        ({"stop_token_ids": [7]}, [7, EOS, 9], [7], "stop"),
        ({"min_tokens": 2, "stop_token_ids": [7]}, [7, 7, 7], [7, 7, 7], "stop"),
        ({"max_tokens": 3}, [7, 8, EOS], [7, 8, EOS], "stop"),
    ],
)
def test_what_ends_a_sequence_cuts_the_tokens_of_the_step(params, tokens, kept, reason):
    scheduler = make((1, 3))
    sequence = make_sequence(0, 3, **{"max_tokens": 9, **params})
    scheduler.add(sequence)
    events = commit(scheduler, scheduler.plan_step(), r0=tokens)
    assert [e.token_id for e in events] == kept == sequence.output_token_ids
    assert [e.finish_reason for e in events] == [None] * (len(kept) - 1) + [reason]
    assert sequence.cumulative_logprob == -0.5 * len(kept)
    assert (scheduler.pools[0].num_free == BLOCKS) is sequence.is_finished is (reason is not None)


def test_an_end_from_outside_drops_what_came_behind_it():
    scheduler = make((1, 3))
    for seq_id, max_tokens in ((0, 9), (1, 3)):
        scheduler.add(make_sequence(seq_id, 3, max_tokens=max_tokens))
    plan = scheduler.plan_step()
    first, second = (item.sequence for item in plan.scheduled)
    commit(scheduler, plan, r0=[7, 8, 9], r1=[7, 8, 9])
    assert second.finish_reason == "length"
    for sequence in (first, second):
        scheduler.finish(sequence, "stop", "xy", length=4)
        assert sequence.output_token_ids == [7]
        assert (sequence.finish_reason, sequence.stop_reason) == ("stop", "xy")
    assert scheduler.stats.num_finished == 2
    assert scheduler.pools[0].num_free == BLOCKS


@pytest.mark.parametrize("yields", [(0, 1), (1, 2), (0, 3)])
def test_nothing_is_planned_behind_a_number_that_is_not_certain(yields):
    scheduler = make(yields)
    scheduler.add(make_sequence(0, 3, max_tokens=9))
    now = scheduler.plan_step()
    assert scheduler.plan_ahead() is None
    scheduler.add(make_sequence(1, 4, max_tokens=9))
    ahead = scheduler.plan_ahead()
    assert shape(ahead) == ([], [(1, 0, 4, True)])
    commit(scheduler, now, r0=[7])
    third = scheduler.plan_ahead()
    assert shape(third) == ([0], [])
    assert third.decodes[0].token_ids == [7]
    commit(scheduler, ahead, r1=[7])
    assert shape(scheduler.plan_ahead()) == ([1], [])


def test_a_certain_number_of_tokens_is_planned_behind():
    scheduler = make((3, 3), tokens=8)
    for seq_id, max_tokens in ((0, 9), (1, 3)):
        scheduler.add(make_sequence(seq_id, 3, max_tokens=max_tokens))
    now = scheduler.plan_step()
    ahead = scheduler.plan_ahead()
    assert shape(ahead) == ([], [(0, 3, 3, True)])  # the other one ends
    assert ahead.prefills[0].token_rows == range(3)
    with pytest.raises(EngineError, match=r"position 3 of sequence 0.*on the device"):
        _ = ahead.prefills[0].token_ids
    commit(scheduler, now, r0=[7, 8, 9], r1=[7, 8, 9])
    scheduler.add(make_sequence(2, 6, max_tokens=9))
    third = scheduler.plan_ahead()
    assert shape(third) == ([], [(0, 6, 3, True), (2, 0, 5, False)])
    commit(scheduler, ahead, r0=[7, 8, 9])
    fourth = scheduler.plan_ahead()
    assert shape(fourth) == ([], [(2, 5, 1, True)])
    commit(scheduler, third, r0=[7, 8, 9])
    assert scheduler.stats.num_finished == 2


def test_a_part_of_tokens_that_the_host_does_not_know_has_their_rows():
    scheduler = make((3, 3), tokens=4)
    for seq_id in (0, 1):
        scheduler.add(make_sequence(seq_id, 2, max_tokens=9))
    now = scheduler.plan_step()
    ahead = scheduler.plan_ahead()
    assert shape(ahead) == ([], [(0, 2, 3, True), (1, 2, 1, False)])
    assert [item.token_rows for item in ahead.prefills] == [range(3), range(3, 4)]
    commit(scheduler, now, r0=[7, 8, 9], r1=[7, 8, 9])
    third = scheduler.plan_ahead()
    assert shape(third) == ([], [(0, 5, 3, True), (1, 3, 1, False)])
    assert third.prefills[1].token_ids == [8]


@pytest.mark.parametrize("tokens", [[], [7, 8, 9, 10]])
def test_more_or_fewer_tokens_than_may_come_are_refused(tokens):
    scheduler = make((1, 3))
    scheduler.add(make_sequence(0, 3))
    plan = scheduler.plan_step()
    with pytest.raises(EngineError, match=f"expected 1 to 3 tokens .* got {len(tokens)}"):
        commit(scheduler, plan, r0=tokens)
    assert len(commit(scheduler, plan, r0=[7])) == 1
