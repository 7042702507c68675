import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from engine.errors import EngineError, RequestError
from engine.kv.blocks import BlockPool
from engine.request import Request, SampledToken, Sequence, SequenceStatus
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler, SchedulerConfig

EOS = 1


def make_scheduler(*, seqs=4, tokens=16, max_len=32, block_size=4, num_blocks=16):
    pool = BlockPool(num_blocks, block_size)
    config = SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=max_len,
        block_size=block_size,
    )
    return Scheduler(config, pool)


def make_sequence(seq_id, length, *, request_id=None, index=0, **params):
    request = Request(
        request_id=request_id or f"r{seq_id}",
        prompt_token_ids=[100 + seq_id] * length,
        params=SamplingParams(**params),
    )
    return Sequence(seq_id=seq_id, request=request, index=index)


def tokens_for(plan, token_id=7):
    return {
        item.sequence.seq_id: SampledToken(token_id, -0.5, None)
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
    assert scheduler.pool.num_free == 16
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
    assert scheduler.pool.num_free == 4


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
    assert scheduler.pool.num_free == 16


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
    assert scheduler.pool.num_free == 16
    assert scheduler.stats.num_finished == 2
    with pytest.raises(EngineError, match="was added"):
        scheduler.finish(make_sequence(5, 1), "stop")


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
    assert scheduler.pool.num_free == 16
    assert shape(step(scheduler)[0]) == ([], [(3, 0, 3, True)])
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
    events = scheduler.commit(plan, {0: SampledToken(7, -0.5, top)}, ())
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
    token = SampledToken(7, 0.0)
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
        ({"seqs": 0}, "max_num_seqs"),
        ({"tokens": 3}, "at least max_num_seqs=4, got 3"),
        ({"max_len": 1}, "max_model_len"),
        ({"num_blocks": 7}, r"max_model_len=32 tokens, got 7 free blocks of 4 tokens = 28"),
    ],
)
def test_contradicting_limits_are_refused(changes, words):
    with pytest.raises(EngineError, match=words):
        make_scheduler(**changes)


def test_block_size_must_be_the_pools():
    config = SchedulerConfig(
        max_num_seqs=1, max_num_batched_tokens=8, max_model_len=8, block_size=8
    )
    with pytest.raises(EngineError, match="pool's 4, got 8"):
        Scheduler(config, BlockPool(8, 4))


@st.composite
def loads(draw):
    """Limits, requests (with the step at which each arrives) and aborts."""
    block_size = draw(st.integers(1, 5))
    max_len = draw(st.integers(2, 24))
    seqs = draw(st.integers(1, 5))
    limits = {
        "block_size": block_size,
        "max_len": max_len,
        "seqs": seqs,
        "tokens": draw(st.integers(seqs, 14)),
        "num_blocks": -(-max_len // block_size) + draw(st.integers(0, 6)),
    }
    requests = draw(
        st.lists(
            st.fixed_dictionaries(
                {
                    "at": st.integers(0, 12),
                    "length": st.integers(1, max_len - 1),
                    "max_tokens": st.none() | st.integers(1, 14),
                    "n": st.integers(1, 3),
                    "eos_after": st.none() | st.integers(1, 10),
                }
            ),
            min_size=1,
            max_size=8,
        )
    )
    aborts = draw(
        st.lists(
            st.tuples(st.integers(0, 25), st.integers(0, len(requests) - 1), st.booleans()),
            max_size=3,
        )
    )
    return limits, requests, aborts


class World:
    """Plays a load against a scheduler with a model of the cache's memory, checking each step."""

    def __init__(self, limits, requests, aborts):
        self.limits = limits
        self.scheduler = make_scheduler(**limits)
        self.requests = sorted(enumerate(requests), key=lambda pair: pair[1]["at"])
        self.aborts = aborts
        self.memory = {}
        self.computed = {}
        self.sequences = []
        self.eos_after = {}
        self.first_run = []

    def play(self):
        now = 0
        work = sum(r["n"] * 24 for _, r in self.requests)
        while self.requests or self.scheduler.has_unfinished:
            assert now < 50 + 30 * work, "no progress"
            self.arrive(now)
            self.abort(now, between=False)
            before = {s.seq_id: s.num_preemptions for s in self.sequences}
            plan = self.scheduler.plan_step()
            preempted = [s for s in self.sequences if s.num_preemptions > before[s.seq_id]]
            for s in preempted:
                self.computed[s.seq_id] = 0
                assert s in self.scheduler.waiting, "none comes back in the same step"
            if plan is not None:
                self.check(plan)
                self.run(plan)
                sampled = {
                    item.sequence.seq_id: SampledToken(self.token(item.sequence), -1.0)
                    for item in plan.sampling
                }
                self.abort(now, between=True)
                self.scheduler.commit(plan, sampled, {EOS})
            now += 1

    def arrive(self, now):
        while self.requests and self.requests[0][1]["at"] <= now:
            number, spec = self.requests.pop(0)
            request = Request(
                request_id=str(number),
                prompt_token_ids=[1000 * number + i for i in range(10, 10 + spec["length"])],
                params=SamplingParams(n=spec["n"], max_tokens=spec["max_tokens"]),
            )
            for index in range(spec["n"]):
                sequence = Sequence(seq_id=len(self.sequences), request=request, index=index)
                self.sequences.append(sequence)
                self.computed[sequence.seq_id] = 0
                self.eos_after[sequence.seq_id] = spec["eos_after"]
                self.scheduler.add(sequence)

    def abort(self, now, *, between):
        for at, number, is_between in self.aborts:
            if at == now and is_between is between:
                self.scheduler.abort(str(number))

    def token(self, sequence):
        after = self.eos_after[sequence.seq_id]
        if after is not None and sequence.num_output_tokens + 1 >= after:
            return EOS
        return 2 + sequence.num_output_tokens

    def check(self, plan):
        limits = self.limits
        items = plan.decodes + plan.prefills
        assert plan.scheduled == items
        assert 1 <= plan.num_tokens == sum(i.num_tokens for i in items) <= limits["tokens"]
        assert len({i.sequence.seq_id for i in items}) == len(items)
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert len(running) <= limits["seqs"]
        assert {i.sequence.seq_id for i in items} <= {s.seq_id for s in running}
        order = [s.seq_id for s in running + waiting]
        assert order == sorted(order), "served in order of arrival"
        assert running[0] in [i.sequence for i in items], "the oldest always moves"
        tables = [b for s in running for b in s.block_table]
        assert len(set(tables)) == len(tables) == self.scheduler.pool.num_used
        for s in waiting:
            assert (s.block_table, s.num_computed) == ([], 0)

    def run(self, plan):
        size = self.limits["block_size"]
        for item in plan.scheduled:
            s = item.sequence
            assert item.start == s.num_computed == self.computed[s.seq_id]
            assert 1 <= item.num_tokens <= s.num_tokens - item.start
            assert item.samples is (item.stop == s.num_tokens)
            assert item.token_ids == s.token_ids[item.start : item.stop]
            assert len(s.block_table) == -(-item.stop // size)
            for position in range(item.start, item.stop):
                slot = s.block_table[position // size], position % size
                self.memory[slot] = (s.seq_id, position, s.token_ids[position])
            self.computed[s.seq_id] = item.stop
        for item in plan.decodes:
            assert (item.num_tokens, item.samples) == (1, True)
            assert item.sequence.num_output_tokens > 0
        for item in plan.scheduled:
            s = item.sequence
            for position in range(item.stop):
                slot = s.block_table[position // size], position % size
                assert self.memory[slot] == (s.seq_id, position, s.token_ids[position])


@settings(max_examples=250, deadline=None)
@given(load=loads())
def test_every_load_is_served(load):
    world = World(*load)
    world.play()
    scheduler, stats = world.scheduler, world.scheduler.stats
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    assert stats.num_finished == len(world.sequences)
    event(f"preempted: {stats.num_preemptions > 0}")
    event(f"stalled: {stats.num_stalls > 0}")
    assert stats.num_preemptions == sum(s.num_preemptions for s in world.sequences)
    for s in world.sequences:
        assert s.is_finished
        after = world.eos_after[s.seq_id]
        full = s.max_length(world.limits["max_len"]) - s.num_prompt_tokens
        if s.finish_reason == "abort":
            assert s.num_output_tokens < full
            continue
        expected = full if after is None else min(after, full)
        assert s.num_output_tokens == expected
        ended = "stop" if after is not None and after <= full else "length"
        assert s.finish_reason == ended
        assert s.output_token_ids[: expected - 1] == list(range(2, 1 + expected))
