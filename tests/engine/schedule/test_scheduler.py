import pytest

from engine.asked.request import Request, SampledToken, Sequence, SequenceStatus
from engine.asked.sampling import SamplingParams
from engine.errors import EngineError, RequestError
from engine.kv.pool import TieredBlockPool
from engine.kv.sequences import BlockGroups
from engine.schedule.scheduler import Scheduler, SchedulerConfig

EOS = 1


def make_groups(config, *pools, policy=None):
    """The blocks of pools, one for each group of layers."""
    return BlockGroups(pools, config.max_num_batched_tokens, policy)


def make_scheduler(*, seqs=4, tokens=16, max_len=32, block_size=4, num_blocks=16):
    config = SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=max_len,
    )
    return Scheduler(config, make_groups(config, TieredBlockPool(num_blocks, 0, block_size)))


def make_sequence(seq_id, length, *, request_id=None, index=0, **params):
    request = Request(
        request_id=request_id or f"r{seq_id}",
        prompt_token_ids=[100 + seq_id] * length,
        params=SamplingParams(**params),
    )
    return Sequence(seq_id=seq_id, request=request, index=index)


def tokens_for(plan, token_id=7):
    return {
        item.sequence.seq_id: [SampledToken(token_id, -0.5, None)]
        for item in plan.sampling
        if not item.sequence.is_finished
    }


def step(scheduler, token_id=7):
    plan = scheduler.plan_step()
    return plan, scheduler.commit(plan, tokens_for(plan, token_id), {EOS})


def shape(plan):
    """The plan as (decodes' seq_ids, prefills' (seq_id, start, num_tokens, samples))."""
    return (
        [item.sequence.seq_id for item in plan.decodes],
        [(i.sequence.seq_id, i.start, i.num_tokens, i.samples) for i in plan.prefills],
    )


def test_nothing_to_do():
    scheduler = make_scheduler()
    assert not scheduler.has_unfinished
    assert scheduler.plan_step() is None


def test_one_sequence_from_prompt_to_length():
    scheduler = make_scheduler()
    sequence = make_sequence(0, 5, max_tokens=3)
    scheduler.add(sequence)
    plan, events = step(scheduler)
    assert shape(plan) == ([], [(0, 0, 5, True)])
    assert plan.prefills[0].token_ids == [100] * 5
    assert (events[0].position, events[0].token_id, events[0].finish_reason) == (5, 7, None)
    assert (events[0].request_id, events[0].index, events[0].logprob) == ("r0", 0, -0.5)
    plan, events = step(scheduler, 8)
    assert shape(plan) == ([0], [])
    assert plan.decodes[0].token_ids == [7]
    assert (plan.decodes[0].start, plan.num_tokens, plan.step) == (5, 1, 1)
    assert len(sequence.block_table) == 2
    plan, events = step(scheduler, 9)
    assert [e.finish_reason for e in events] == ["length"]
    assert sequence.status is SequenceStatus.FINISHED
    assert (sequence.output_token_ids, sequence.cumulative_logprob) == ([7, 8, 9], -1.5)
    assert scheduler.pools[0].num_free == 16
    assert scheduler.plan_step() is None


def test_long_prompt_runs_in_chunks_behind_decodes():
    scheduler = make_scheduler(tokens=8, num_blocks=32)
    scheduler.add(make_sequence(0, 3, max_tokens=20))
    step(scheduler)
    scheduler.add(make_sequence(1, 17, max_tokens=20))
    scheduler.add(make_sequence(2, 2, max_tokens=20))
    assert shape(step(scheduler)[0]) == ([0], [(1, 0, 7, False)])
    assert shape(step(scheduler)[0]) == ([0], [(1, 7, 7, False)])
    plan, events = step(scheduler)
    assert shape(plan) == ([0], [(1, 14, 3, True), (2, 0, 2, True)])
    assert [item.sequence.seq_id for item in plan.sampling] == [0, 1, 2]
    assert [e.request_id for e in events] == ["r0", "r1", "r2"]
    assert shape(step(scheduler)[0]) == ([0, 1, 2], [])
    assert scheduler.stats.num_decode_tokens == 6
    assert scheduler.stats.num_prefill_tokens == 22


def test_prompt_of_one_token_is_a_prefill():
    scheduler = make_scheduler()
    scheduler.add(make_sequence(0, 1))
    assert shape(step(scheduler)[0]) == ([], [(0, 0, 1, True)])


def test_last_chunk_of_one_prompt_token_is_a_prefill():
    scheduler = make_scheduler(tokens=4)
    scheduler.add(make_sequence(0, 5))
    step(scheduler)
    assert shape(step(scheduler)[0]) == ([], [(0, 4, 1, True)])


def test_max_num_seqs_and_first_come_first_served():
    scheduler = make_scheduler(seqs=2)
    for seq_id in range(3):
        scheduler.add(make_sequence(seq_id, 2, max_tokens=2))
    assert shape(step(scheduler)[0]) == ([], [(0, 0, 2, True), (1, 0, 2, True)])
    assert [s.seq_id for s in scheduler.waiting] == [2]
    step(scheduler)
    assert shape(step(scheduler)[0]) == ([], [(2, 0, 2, True)])
    assert scheduler.stats.peak_running == 2


def test_a_large_head_of_the_queue_is_not_overtaken():
    scheduler = make_scheduler(num_blocks=8, tokens=64)
    scheduler.add(make_sequence(0, 12, max_tokens=2))
    step(scheduler)
    scheduler.add(make_sequence(1, 24, max_tokens=2))
    scheduler.add(make_sequence(2, 1, max_tokens=2))
    assert shape(step(scheduler)[0]) == ([0], [])
    assert shape(step(scheduler)[0])[1] == [(1, 0, 24, True), (2, 0, 1, True)]


def test_admission_leaves_a_block_for_running_ones_that_can_grow():
    # 8 blocks: the first prompt holds 4; with room to grow it keeps a fifth, so 4 are too many.
    for max_tokens, admitted in ((20, False), (1, True)):
        scheduler = make_scheduler(num_blocks=8, tokens=64)
        scheduler.add(make_sequence(0, 16, max_tokens=max_tokens))
        scheduler.add(make_sequence(1, 16, max_tokens=1))
        plan = scheduler.plan_step()
        assert (len(plan.prefills) == 2) is admitted


def test_newest_is_preempted_and_recomputed_with_its_output():
    scheduler = make_scheduler(num_blocks=4, max_len=16, tokens=32)
    old, new = make_sequence(0, 3, max_tokens=13), make_sequence(1, 3, max_tokens=8)
    scheduler.add(old)
    scheduler.add(new)
    for token_id in range(10, 16):
        step(scheduler, token_id)
    assert [len(s.block_table) for s in (old, new)] == [2, 2]
    # Both hold 8 computed tokens in two blocks; old takes a block of new.
    plan, _ = step(scheduler, 16)
    assert shape(plan) == ([0], [])
    assert new.status is SequenceStatus.WAITING
    assert (new.num_computed, new.block_table, new.num_preemptions) == (0, [], 1)
    assert new.output_token_ids == [10, 11, 12, 13, 14, 15]
    while old.status is not SequenceStatus.FINISHED:
        assert shape(step(scheduler)[0]) == ([0], [])
    plan, events = step(scheduler, 20)
    assert shape(plan) == ([], [(1, 0, 9, True)])
    assert plan.prefills[0].token_ids == [101] * 3 + [10, 11, 12, 13, 14, 15]
    assert (events[0].position, events[0].token_id) == (9, 20)
    assert scheduler.stats.num_preemptions == 1
    assert scheduler.stats.num_recomputed_tokens == 8
    step(scheduler)
    assert not scheduler.has_unfinished
    assert scheduler.pools[0].num_free == 4


def test_preempted_goes_before_those_that_wait():
    scheduler = make_scheduler(num_blocks=4, max_len=16, tokens=32, seqs=2)
    for seq_id in range(3):
        scheduler.add(make_sequence(seq_id, 3, max_tokens=13))
    for _ in range(7):
        step(scheduler)
    assert [s.seq_id for s in scheduler.waiting] == [1, 2]


def test_newest_without_a_block_waits_in_place():
    scheduler = make_scheduler(num_blocks=4, max_len=16, tokens=32)
    old, new = make_sequence(0, 5, max_tokens=3), make_sequence(1, 7, max_tokens=8)
    scheduler.add(old)
    scheduler.add(new)
    step(scheduler)
    assert shape(step(scheduler)[0]) == ([0, 1], [])
    # Both hold two blocks; new needs a third, old none any more.
    assert shape(step(scheduler)[0]) == ([0], [])
    assert (new.status, new.num_computed) == (SequenceStatus.RUNNING, 8)
    assert (scheduler.stats.num_stalls, scheduler.stats.num_preemptions) == (1, 0)
    assert old.is_finished
    assert shape(step(scheduler)[0]) == ([1], [])


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "stop_reason"),
    [
        ({}, [7, EOS], "stop", None),
        ({"ignore_eos": True, "max_tokens": 3}, [EOS, EOS, EOS], "length", None),
        ({"stop_token_ids": [9, 5]}, [7, 5], "stop", 5),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, [EOS], "stop", EOS),
        ({"min_tokens": 2}, [EOS, EOS, EOS], "stop", None),
        ({"min_tokens": 2, "stop_token_ids": [5]}, [5, 5, 5], "stop", 5),
        ({"max_tokens": 2}, [7, EOS], "stop", None),
        ({"max_tokens": None}, [7] * 29, "length", None),
        ({"max_tokens": 100}, [7] * 29, "length", None),
    ],
)
def test_endings(params, tokens, reason, stop_reason):
    scheduler = make_scheduler()
    sequence = make_sequence(0, 3, **params)
    scheduler.add(sequence)
    events = []
    for token_id in tokens:
        assert not sequence.is_finished
        events += step(scheduler, token_id)[1]
    assert sequence.is_finished
    assert (sequence.finish_reason, sequence.stop_reason) == (reason, stop_reason)
    assert (events[-1].finish_reason, events[-1].stop_reason) == (reason, stop_reason)
    assert {e.finish_reason for e in events[:-1]} <= {None}
    assert scheduler.pools[0].num_free == 16


def test_finish_from_outside():
    scheduler = make_scheduler()
    first, second = make_sequence(0, 3, max_tokens=1), make_sequence(1, 3)
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    assert first.finish_reason == "length"
    scheduler.finish(first, "stop", "xy")
    assert (first.finish_reason, first.stop_reason) == ("stop", "xy")
    scheduler.finish(second, "stop", "ab")
    assert second.is_finished
    assert scheduler.pools[0].num_free == 16
    assert scheduler.stats.num_finished == 2
    with pytest.raises(EngineError, match="was added"):
        scheduler.finish(make_sequence(5, 1), "stop")


def test_blocks_are_given_back_before_the_next_step_is_planned():
    """Not by the commit, whose tokens others wait for; at once where no step may follow."""
    scheduler = make_scheduler()
    short, long = make_sequence(0, 7, max_tokens=1), make_sequence(1, 3, max_tokens=3)
    scheduler.add(short)
    scheduler.add(long)
    step(scheduler)
    assert short.is_finished
    assert scheduler.pools[0].num_used == len(short.block_table) + len(long.block_table) == 3
    assert scheduler.plan_step() is not None
    assert short.block_tables == []
    assert scheduler.pools[0].num_used == len(long.block_table) == 1
    scheduler.abort("r1")
    assert scheduler.pools[0].num_free == 16


def test_abort_ends_all_sequences_of_a_request_wherever_they_are():
    scheduler = make_scheduler(seqs=2)
    sequences = [make_sequence(i, 3, request_id="a", index=i) for i in range(3)]
    other = make_sequence(3, 3)
    for sequence in [*sequences, other]:
        scheduler.add(sequence)
    step(scheduler)
    assert scheduler.abort("a") == sequences
    assert {s.finish_reason for s in sequences} == {"abort"}
    assert scheduler.abort("a") == []
    assert scheduler.abort("nobody") == []
    assert shape(step(scheduler)[0]) == ([], [(3, 0, 3, True)])
    assert scheduler.pools[0].num_used == len(other.block_table) == 1
    assert scheduler.stats.num_aborted == 3


def test_abort_between_plan_and_commit():
    scheduler = make_scheduler()
    gone, stays = make_sequence(0, 3), make_sequence(1, 3)
    scheduler.add(gone)
    scheduler.add(stays)
    plan = scheduler.plan_step()
    sampled = tokens_for(plan)
    scheduler.abort("r0")
    events = scheduler.commit(plan, sampled, {EOS})
    assert [e.request_id for e in events] == ["r1"]
    assert gone.output_token_ids == []


def test_logprobs_are_kept():
    scheduler = make_scheduler()
    sequence = make_sequence(0, 3, logprobs=1)
    scheduler.add(sequence)
    plan = scheduler.plan_step()
    top = {7: -0.5, 3: -0.25}
    events = scheduler.commit(plan, {0: [SampledToken(7, -0.5, top)]}, ())
    assert sequence.logprobs == [top]
    assert events[0].top_logprobs == top


def test_commit_wants_the_plan_in_force_and_exactly_its_tokens():
    scheduler = make_scheduler()
    scheduler.add(make_sequence(0, 3))
    plan = scheduler.plan_step()
    with pytest.raises(EngineError, match="committed or discarded"):
        scheduler.plan_step()
    with pytest.raises(
        EngineError, match=r"expected tokens for sequences \[0\].*got them for \[\]"
    ):
        scheduler.commit(plan, {}, ())
    token = [SampledToken(7, 0.0)]
    with pytest.raises(EngineError, match=r"\[0, 4\]"):
        scheduler.commit(plan, {0: token, 4: token}, ())
    scheduler.commit(plan, {0: token}, ())
    with pytest.raises(EngineError, match="plan in force"):
        scheduler.commit(plan, {0: token}, ())


def test_discarded_plan_is_planned_again():
    scheduler = make_scheduler()
    scheduler.add(make_sequence(0, 3))
    plan = scheduler.plan_step()
    scheduler.discard(plan)
    again = scheduler.plan_step()
    assert shape(again) == shape(plan)
    assert len(again.prefills[0].sequence.block_table) == 1
    with pytest.raises(EngineError, match="plan in force"):
        scheduler.discard(plan)


def test_add_refuses():
    scheduler = make_scheduler(max_len=16)
    with pytest.raises(RequestError, match=r"1 to 15 tokens.*got 16"):
        scheduler.add(make_sequence(0, 16))
    sequence = make_sequence(1, 15)
    scheduler.add(sequence)
    with pytest.raises(EngineError, match="twice"):
        scheduler.add(sequence)
    step(scheduler)
    with pytest.raises(EngineError, match="new sequence"):
        scheduler.add(sequence)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_len": 1}, "max_model_len"),
        ({"num_blocks": 7}, r"max_model_len=32 tokens, got 7 free blocks of 4 tokens = 28"),
    ],
)
def test_limits_that_no_sequence_fits_are_refused(changes, words):
    with pytest.raises(EngineError, match=words):
        make_scheduler(**changes)
