"""Random loads on a scheduler with tiny limits, checked step by step against a model."""

from hypothesis import event, given, settings
from hypothesis import strategies as st

from engine.asked.request import Request, SampledToken, Sequence
from engine.asked.sampling import SamplingParams
from engine.kv.pool import TieredBlockPool
from engine.schedule.scheduler import Scheduler, SchedulerConfig
from tests.engine.schedule.test_scheduler import make_groups

EOS = 1


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
        config = SchedulerConfig(
            max_num_seqs=limits["seqs"],
            max_num_batched_tokens=limits["tokens"],
            max_model_len=limits["max_len"],
        )
        pool = TieredBlockPool(limits["num_blocks"], 0, limits["block_size"])
        self.scheduler = Scheduler(config, make_groups(config, pool))
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
                    item.sequence.seq_id: [SampledToken(self.token(item.sequence), -1.0)]
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
        running, waiting = tuple(self.scheduler.running), tuple(self.scheduler.waiting)
        assert len(running) <= limits["seqs"]
        assert {i.sequence.seq_id for i in items} <= {s.seq_id for s in running}
        order = [s.seq_id for s in running + waiting]
        assert order == sorted(order), "served in order of arrival"
        assert running[0] in [i.sequence for i in items], "the oldest always moves"
        tables = [b for s in running for b in s.block_table]
        assert len(set(tables)) == len(tables) == self.scheduler.pools[0].num_used
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


@settings(max_examples=60, deadline=None)
@given(load=loads())
def test_every_load_is_served(load):
    world = World(*load)
    world.play()
    scheduler, stats = world.scheduler, world.scheduler.stats
    assert scheduler.pools[0].num_free == scheduler.pools[0].num_blocks
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
