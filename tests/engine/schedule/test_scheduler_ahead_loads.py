"""Random loads with steps planned ahead, checked against a model of a device that runs in order."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
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
    """Limits, requests with what ends them, and what happens between steps."""
    block_size = draw(st.integers(1, 4))
    max_len = draw(st.integers(2, 20))
    seqs = draw(st.integers(1, 5))
    limits = {
        "block_size": block_size,
        "max_len": max_len,
        "seqs": seqs,
        "tokens": draw(st.integers(seqs, 12)),
        "num_blocks": -(-max_len // block_size) + draw(st.integers(0, 8)),
        "yields": draw(st.sampled_from([(1, 1), (1, 1), (0, 1), (0, 3), (1, 3), (2, 2), (3, 3)])),
    }
    requests = draw(
        st.lists(
            st.fixed_dictionaries(
                {
                    "at": st.integers(0, 10),
                    "length": st.integers(1, max_len - 1),
                    "max_tokens": st.none() | st.integers(1, 12),
                    "n": st.integers(1, 3),
                    "eos_after": st.none() | st.integers(1, 8),
                    "stop_after": st.none() | st.integers(1, 8),
                }
            ),
            min_size=1,
            max_size=7,
        )
    )
    happenings = st.tuples(
        st.integers(0, 25),
        st.sampled_from(["abort", "abort", "launch fails", "collect fails"]),
        st.integers(0, len(requests) - 1),
    )
    return limits, requests, draw(st.lists(happenings, max_size=5))


@dataclass
class Launched:
    plan: Any
    sampled: list[list[int]]
    """The device's tokens of each sequence that samples."""


class World:
    """Does what EngineCore does, with a device that is a table of slots."""

    def __init__(self, limits, requests, happenings):
        self.limits = limits
        self.size = limits["block_size"]
        config = SchedulerConfig(
            max_num_seqs=limits["seqs"],
            max_num_batched_tokens=limits["tokens"],
            max_model_len=limits["max_len"],
            yields=limits["yields"],
        )
        pool = TieredBlockPool(limits["num_blocks"], 0, self.size)
        self.scheduler = Scheduler(config, make_groups(config, pool))
        self.requests = sorted(enumerate(requests), key=lambda pair: pair[1]["at"])
        self.happenings = happenings
        self.memory = {}
        self.specs = {}
        self.sequences = []
        self.in_flight = None
        self.num_ahead = self.num_dead = 0
        self.chance = random.Random(limits["seqs"])

    def play(self):
        now = 0
        while self.requests or self.scheduler.has_unfinished:
            assert now < 1000, "no progress"
            self.arrive(now)
            for at, kind, number in self.happenings:
                if (at, kind) == (now, "abort"):
                    self.scheduler.abort(str(number))
                    self.check_pool()
            self.step({kind for at, kind, _ in self.happenings if at == now})
            self.check_pool()
            now += 1

    def arrive(self, now):
        while self.requests and self.requests[0][1]["at"] <= now:
            number, spec = self.requests.pop(0)
            params = SamplingParams(n=spec["n"], max_tokens=spec["max_tokens"])
            prompt = [1000 * number + i for i in range(10, 10 + spec["length"])]
            request = Request(request_id=str(number), prompt_token_ids=prompt, params=params)
            for index in range(spec["n"]):
                sequence = Sequence(seq_id=len(self.sequences), request=request, index=index)
                self.sequences.append(sequence)
                self.specs[sequence.seq_id] = spec
                self.scheduler.add(sequence)

    def step(self, happenings):
        scheduler = self.scheduler
        if self.in_flight is not None and self.in_flight.plan.is_dead:
            self.num_dead += 1
            assert self.collect() == []
        if self.in_flight is None:
            plan = scheduler.plan_step()
            if plan is None:
                return
            self.in_flight = self.launch(plan, None)
        behind = None
        ahead = scheduler.plan_ahead()
        if ahead is not None:
            self.num_ahead += 1
            behind = self.launch(ahead, self.in_flight)
        if ahead is not None and "launch fails" in happenings:
            scheduler.discard(ahead)
            behind = None
        if "collect fails" in happenings:
            for plan in reversed(scheduler.planned):
                scheduler.discard(plan)
            self.in_flight = None
            return
        for token in self.collect():
            sequence = next(
                s
                for s in self.sequences
                if (s.request.request_id, s.index) == (token.request_id, token.index)
            )
            length = token.position + 1
            stop_after = self.specs[sequence.seq_id]["stop_after"]
            is_there = length - sequence.num_prompt_tokens == stop_after
            if is_there and token.finish_reason is None:
                scheduler.finish(sequence, "stop", "xy", length=length)
        self.in_flight = behind

    def collect(self):
        flight, self.in_flight = self.in_flight, None
        sampled = {
            item.sequence.seq_id: [
                SampledToken(token, -1.0)
                for token in tokens[: self.chance.randint(*self.limits["yields"])]
            ]
            for item, tokens in zip(flight.plan.sampling, flight.sampled, strict=True)
        }
        return self.scheduler.commit(flight.plan, sampled, {EOS})

    def token(self, sequence, position):
        """What is sampled at a position."""
        number = position - sequence.num_prompt_tokens
        after = self.specs[sequence.seq_id]["eos_after"]
        return EOS if after is not None and number + 1 >= after else 2 + number

    def launch(self, plan, before):
        self.check(plan, before)
        for item in plan.scheduled:
            s = item.sequence
            tokens = self.tokens_on_device(item, before) or item.token_ids
            assert len(tokens) == item.num_tokens
            for position, token in enumerate(tokens, start=item.start):
                assert token == self.expected(s, position)
                self.memory[self.slot(s, position)] = (s.seq_id, position, token)
        for item in plan.scheduled:
            s = item.sequence
            for position in range(item.stop):
                expected = (s.seq_id, position, self.expected(s, position))
                assert self.memory[self.slot(s, position)] == expected
        return Launched(plan, self.sample(plan))

    def sample(self, plan):
        """As many tokens of each sequence as may come."""
        most = self.limits["yields"][1]
        return [[self.token(i.sequence, i.stop + n) for n in range(most)] for i in plan.sampling]

    def tokens_on_device(self, item, before):
        """What the step before has sampled in the rows of a part."""
        if not item.token_rows:
            return []
        flat = [
            (part.sequence, token)
            for part, tokens in zip(before.plan.sampling, before.sampled, strict=True)
            for token in tokens
        ]
        assert all(flat[row][0] is item.sequence for row in item.token_rows)
        return [flat[row][1] for row in item.token_rows]

    def expected(self, sequence, position):
        if position < sequence.num_prompt_tokens:
            return sequence.prompt_token_ids[position]
        return self.token(sequence, position)

    def slot(self, sequence, position):
        return sequence.block_table[position // self.size], position % self.size

    def check(self, plan, before):
        items = plan.scheduled
        assert 1 <= plan.num_tokens == sum(i.num_tokens for i in items) <= self.limits["tokens"]
        assert len(items) <= self.limits["seqs"]
        assert len({i.sequence.seq_id for i in items}) == len(items)
        assert {i.sequence.seq_id for i in items} <= {s.seq_id for s in self.scheduler.running}
        assert all(i.num_tokens == 1 and i.samples for i in plan.decodes)
        earlier = {} if before is None else {i.sequence.seq_id: i for i in before.plan.scheduled}
        for item in items:
            s = item.sequence
            part = earlier.get(s.seq_id)
            assert item.start == (s.num_computed if part is None else part.stop)
            known = s.num_tokens
            if part is not None and part.samples:
                least, most = self.limits["yields"]
                assert least == most, "nobody knows where it stands"
                known += most
            assert item.samples is (item.stop == known)
            assert item.stop <= min(known, s.max_length(self.limits["max_len"]) - 1)
            assert bool(item.token_rows) is (part is not None and part.samples)

    def owning(self):
        """Sequences that have blocks: running ones, and those that ended since the last plan."""
        ended = [s for s in self.sequences if s.is_finished and s.block_tables]
        assert not ended or self.scheduler.has_unfinished
        return [*self.scheduler.running, *ended]

    def check_pool(self):
        running, waiting = tuple(self.scheduler.running), tuple(self.scheduler.waiting)
        assert len(running) <= self.limits["seqs"]
        tables = [block for s in self.owning() for block in s.block_table]
        assert len(set(tables)) == len(tables) == self.scheduler.pools[0].num_used
        for s in waiting:
            assert (s.block_table, s.num_computed) == ([], 0)
        order = [s.seq_id for s in running + waiting]
        assert order == sorted(order), "served in order of arrival"


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(load=loads())
def test_every_load_is_served(load):
    world = World(*load)
    world.play()
    scheduler, stats = world.scheduler, world.scheduler.stats
    event(f"ahead: {world.num_ahead > 0}")
    event(f"dead step: {world.num_dead > 0}")
    event(f"preempted: {stats.num_preemptions > 0}")
    event(f"stalled: {stats.num_stalls > 0}")
    assert scheduler.pools[0].num_free == scheduler.pools[0].num_blocks
    assert stats.num_finished == len(world.sequences)
    for s in world.sequences:
        spec = world.specs[s.seq_id]
        full = s.max_length(world.limits["max_len"]) - s.num_prompt_tokens
        eos, stop = spec["eos_after"] or full + 1, spec["stop_after"] or full + 1
        length = min(full, eos, stop)
        wanted = [world.token(s, s.num_prompt_tokens + i) for i in range(length)]
        if s.finish_reason == "abort":
            assert s.output_token_ids == wanted[: s.num_output_tokens]
            continue
        assert s.output_token_ids == wanted
        ended = "length" if length == full and full != eos else "stop"
        assert s.finish_reason == ended
        assert s.stop_reason == ("xy" if stop == length < min(eos, full) else None)
