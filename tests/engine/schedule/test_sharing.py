"""Sequences beyond the GPU's room and short ones beside them: who runs, when, and on which blocks.

The clock is that of steps. Rates make a step of 1 s, to which each host block that it reads adds
`READ_S`.
"""

import random

import pytest

from engine.asked.request import SequenceStatus
from engine.kv import sequences
from engine.plan import host_times
from engine.plan.sizes import ReadRates, SwapRates
from tests.engine.tiers_world import Tiers, World
from tests.slow import slow

ROOM = 20
"""Blocks of 4 tokens on the GPU."""
MOVES = SwapRates(store_bytes_s=10.0, load_bytes_s=10.0)
READ_S = 0.5
TURNS = ReadRates(step_s=1.0, read_bytes_s=1 / READ_S)
TOGETHER = ReadRates(step_s=1000.0, read_bytes_s=1 / READ_S)


def world_of(**sizes):
    given = {"tokens": 32, "max_len": 320, "seqs": 16, "num_gpu": ROOM, "num_in_place": 400}
    given |= {"swap_rates": MOVES, "recompute_token_s": 1.0, "read_rates": TURNS}
    return World(Tiers(**given | sizes))


def step(world):
    """Run a step with all moves done before it; checks that it read what it should."""
    world.complete(world.moves())
    world.step()
    world.check()


def run(world, until=None, most=3000):
    for _ in range(most):
        if until() if until else not world.scheduler.has_unfinished:
            return
        step(world)
    raise AssertionError("no progress")


def long(world, times=2.0, **spec):
    return world.add(length=int(4 * ROOM * times) - 40, **{"max_tokens": 40} | spec)


def decodes(*sequences):
    return all(s.num_output_tokens >= 2 for s in sequences)


def on_gpu(sequence):
    return sum(block_id < ROOM for block_id in sequence.block_table)


def longest_gap(world, sequence, until):
    """Return the most steps between two of its tokens, until something."""
    gap = most = 0
    while not until():
        before = sequence.num_output_tokens
        step(world)
        gap = 0 if sequence.num_output_tokens > before else gap + 1
        most = max(most, gap + 1)
    return most


@pytest.mark.thorough_but("together")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("rates", [None, TURNS, TOGETHER], ids=["", "turns", "together"])
def test_a_short_request_has_its_first_token_within_two_steps(count, rates):
    world = world_of(read_rates=rates)
    longs = [long(world, max_tokens=60) for _ in range(count)]
    run(world, lambda: decodes(*longs))
    assert sum(map(on_gpu, longs)) >= ROOM - 1
    for _ in range(3):
        short = world.add(length=7, max_tokens=12)
        for _ in range(2):
            step(world)
        assert short.num_output_tokens >= 1
        assert all(block_id < ROOM for block_id in short.block_table)
    run(world)
    assert world.scheduler.stats.num_preemptions == 0
    world.end()


def test_a_short_request_waits_for_no_more_than_two_chunks_of_a_long_prompt():
    world = world_of()
    first = world.add(length=5, max_tokens=200)
    step(world)
    other = long(world, 4.0)
    while not other.num_computed:
        step(world)
    for _ in range(3):
        short = world.add(length=9, max_tokens=3)
        before = first.num_output_tokens, other.num_computed
        step(world)
        step(world)
        assert short.num_output_tokens >= 1
        assert first.num_output_tokens == before[0] + 2  # it decodes in each step
        step(world)
        assert other.num_computed >= before[1] + 32 // 2
    assert other.num_computed < other.num_prompt_tokens
    run(world)
    world.end()


def test_the_least_input_that_blocked():
    """A room of 29 blocks of 16, 145 in the host tier: two prompts of 600 and four of 6."""
    world = world_of(block_size=16, num_gpu=29, num_in_place=145, max_len=640, tokens=256)
    longs = [world.add(length=600, max_tokens=20) for _ in range(2)]
    shorts = [world.add(length=6, max_tokens=20) for _ in range(4)]
    for _ in range(2):
        step(world)
    assert all(s.num_output_tokens for s in shorts)
    run(world, lambda: all(s.is_finished for s in shorts))
    assert not any(s.is_finished for s in longs)
    run(world)
    assert world.scheduler.stats.num_preemptions == 0
    world.end()


def test_long_ones_take_turns_on_the_gpu(monkeypatch):
    monkeypatch.setattr(host_times, "MOST_TURN", 16)
    world = world_of(max_len=200)
    longs = [long(world, 1.5, max_tokens=80) for _ in range(3)]
    run(world, lambda: decodes(*longs))
    begun = [s.num_output_tokens for s in longs]
    for _ in range(3 * 2 * 17):
        before = [s.num_output_tokens for s in longs]
        step(world)
        moved = [s for s, n in zip(longs, before, strict=True) if s.num_output_tokens > n]
        assert len(moved) <= 1
        # Who decodes has the room, but for the newest blocks of the others.
        assert all(on_gpu(s) >= ROOM - 3 for s in moved)
    gains = [s.num_output_tokens - n for s, n in zip(longs, begun, strict=True)]
    assert max(gains) - min(gains) <= 16 + 2
    run(world)
    kv = world.scheduler.kv_stats()
    assert kv["long_turns"] >= 3 * 3
    # Two turns of others, and steps that only move blocks.
    assert kv["long_waited_steps"] <= 2 * (16 + 2) + 2
    assert kv["preemptions"] == 0
    world.end()


def test_long_ones_decode_together_where_a_step_costs_most():
    world = world_of(read_rates=TOGETHER)
    longs = [long(world, max_tokens=60) for _ in range(4)]
    run(world, lambda: decodes(*longs))
    moves = world.seen["store"] + world.seen["load"]
    for _ in range(30):
        before = [s.num_output_tokens for s in longs]
        step(world)
        assert [s.num_output_tokens for s in longs] == [n + 1 for n in before]
    assert world.seen["store"] + world.seen["load"] == moves
    run(world)
    assert world.scheduler.kv_stats()["long_turns"] == 0
    world.end()


def test_what_they_share_is_best_on_the_gpu_together():
    """By the same rates: a common prefix that fills the GPU is read there by all of them."""
    world = world_of()
    spec = {"stem": 0, "length": 4 * ROOM + 8, "own": 12, "max_tokens": 60}
    longs = [world.add(**spec)]
    run(world, lambda: decodes(*longs))
    longs += [world.add(**spec) for _ in range(5)]
    run(world, lambda: decodes(*longs))
    step(world)
    before = [s.num_output_tokens for s in longs]
    for _ in range(10):
        step(world)
    assert [s.num_output_tokens for s in longs] == [n + 10 for n in before]
    assert world.scheduler.kv_stats()["long_turns"] == 0
    run(world)
    world.end()


def test_short_ones_keep_a_share_of_the_time():
    world = world_of(seqs=16)
    first = long(world, 3.0, max_tokens=40)
    run(world, lambda: decodes(first))
    shorts = [world.add(length=5, max_tokens=40) for _ in range(4)]
    run(world, lambda: decodes(*shorts))
    before, at = first.num_output_tokens, shorts[0].num_output_tokens
    run(world, lambda: shorts[0].is_finished)
    seconds_reading = (first.num_output_tokens - before) * READ_S * (len(first.block_table) - ROOM)
    steps = 40 - at
    assert first.num_output_tokens > before
    assert seconds_reading <= 0.5 * (seconds_reading + steps)
    run(world)
    world.end()


def test_no_more_steps_than_stated_lie_between_tokens_of_a_long_one(monkeypatch):
    monkeypatch.setattr(host_times, "MOST_SKIPPED", 5)
    world = world_of(read_rates=ReadRates(step_s=1e-6, read_bytes_s=1.0))
    first = long(world, 3.0, max_tokens=30)
    run(world, lambda: decodes(first))
    short = world.add(length=5, max_tokens=60)
    assert longest_gap(world, first, lambda: short.is_finished) <= 5 + 3
    assert first.num_output_tokens >= 2 + 60 // 8
    run(world)
    world.end()


def test_a_prompt_of_a_long_one_stops_no_decodes():
    world = world_of()
    first, short = long(world, max_tokens=60), world.add(length=5, max_tokens=60)
    run(world, lambda: decodes(first, short))
    other = long(world, 3.5)
    chunks = without = 0
    while not other.num_output_tokens:
        before = other.num_computed, first.num_output_tokens, short.num_output_tokens
        step(world)
        if other.num_computed > before[0] > 0:
            chunks += 1
            assert short.num_output_tokens > before[2]
            without = 0 if first.num_output_tokens > before[1] else without + 1
            assert without <= 1
    assert chunks > 3
    run(world)
    world.end()


def test_turns_pass_on_while_a_prompt_of_another_long_one_is_computed(monkeypatch):
    monkeypatch.setattr(host_times, "LEAST_TURN", 3)
    monkeypatch.setattr(host_times, "MOST_TURN", 3)
    world = world_of(max_len=500)
    longs = [long(world, max_tokens=90) for _ in range(2)]
    run(world, lambda: decodes(*longs))
    other = long(world, 5.0)
    while not other.num_computed:
        step(world)
    gaps, most, begun = [0, 0], 0, [s.num_output_tokens for s in longs]
    while not other.num_output_tokens:
        before = [s.num_output_tokens for s in longs]
        step(world)
        gains = [s.num_output_tokens - n for s, n in zip(longs, before, strict=True)]
        assert sum(gains) <= 1
        gaps = [0 if gain else gap + 1 for gap, gain in zip(gaps, gains, strict=True)]
        most = max(most, *gaps)
    assert all(s.num_output_tokens > n for s, n in zip(longs, begun, strict=True))
    assert most <= 3 + 1 + 2 * 2  # the other's turn, its moves, and those back
    run(world)
    world.end()


@pytest.mark.parametrize("count", [2, 4])
def test_one_whose_prompt_has_just_ended_waits_for_its_turn(count):
    world = world_of()
    longs = [long(world) for _ in range(count)]
    last, most = {}, 0
    for number in range(3000):
        if not world.scheduler.has_unfinished:
            break
        before = [s.num_output_tokens for s in longs]
        step(world)
        gained = [s for s, n in zip(longs, before, strict=True) if s.num_output_tokens > n]
        assert sum(s.num_output_tokens > 1 for s in gained) <= 1  # decodes
        for s in gained:
            most = max(most, number - last.get(s.seq_id, number))
            last[s.seq_id] = number
    found = world.scheduler.kv_stats()["long_waited_steps"]
    assert most - 2 * count <= found <= most  # calls in which all waited for moves ran no step
    assert most > (count - 1) * 16
    world.end()


def test_short_ones_pass_a_long_one_that_has_no_room_yet():
    world = world_of(num_in_place=60, read_rates=None)
    first = long(world, 3.0, max_tokens=60)
    run(world, lambda: decodes(first))
    second = long(world, 3.0, max_tokens=20)
    gone = 0
    for _ in range(400):
        world.add(length=6, max_tokens=4)  # a stream that never ends
        step(world)
        if not first.is_finished:
            assert second.status is SequenceStatus.WAITING
            gone += 1
        if second.num_output_tokens:
            break
    assert gone > 40
    assert world.scheduler.stats.num_overtaken > 20
    assert first.is_finished
    assert second.num_output_tokens
    world.scheduler.abort(second.request.request_id)
    run(world)
    world.end()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_blocks_that_several_answers_share_are_given_too(prefix_caching):
    world = world_of(prefix_caching=prefix_caching)
    world.add(length=100, max_tokens=60, n=2)
    answers = world.sequences[:2]
    run(world, lambda: decodes(*answers))
    shorts = [world.add(length=10, max_tokens=8) for _ in range(3)]
    step(world)
    step(world)
    assert all(s.num_output_tokens for s in shorts)
    assert sum(map(on_gpu, shorts)) >= 3 * 3
    run(world)
    assert world.scheduler.stats.num_preemptions == 0
    world.end()


def test_a_short_request_has_blocks_as_soon_as_those_on_their_way_have_come(monkeypatch):
    monkeypatch.setattr(host_times, "MOST_TURN", 4)
    world = world_of()
    first = long(world, max_tokens=100)
    run(world, lambda: decodes(first))
    leaves = world.add(length=30, max_tokens=2)
    run(world, lambda: leaves.is_finished)
    run(world, lambda: first.status is SequenceStatus.LOADING)
    short = world.add(length=5, max_tokens=4)
    assert not world.step()
    for _ in range(2):
        step(world)
    assert short.num_output_tokens >= 1
    run(world)
    world.end()


@pytest.mark.parametrize("with_twin", [True, False])
def test_blocks_without_a_key_are_given_too(with_twin):
    """What a reset forgot, and what another computed again since then."""
    world = world_of()
    spec = {"stem": 0, "length": 140, "own": 1, "max_tokens": 60}
    longs = [world.add(**spec)]
    run(world, lambda: decodes(*longs))
    world.scheduler.reset_cache()
    if with_twin:
        longs.append(world.add(**spec))
        run(world, lambda: decodes(*longs))
    for number in range(6):
        short = world.add(length=4 + number, max_tokens=4)
        for _ in range(2):
            step(world)
        assert short.num_output_tokens >= 1
    run(world)
    assert world.scheduler.stats.num_preemptions == 0
    world.end()


def test_a_long_one_that_begins_behind_a_prefix_leaves_short_ones_room_to_grow():
    world = world_of()
    spec = {"stem": 0, "length": 200, "max_tokens": 4}
    world.add(**spec)
    run(world)
    world.scheduler.evict_gpu_cache()
    shorts = [world.add(length=4 + at, max_tokens=12) for at in range(3)]
    run(world, lambda: decodes(*shorts))
    again = world.add(**spec, own=3)
    run(world, lambda: again.status is SequenceStatus.LOADING)
    for _ in range(4):
        before = [s.num_output_tokens for s in shorts]
        world.step()  # no move is done
        assert [s.num_output_tokens for s in shorts] == [n + 1 for n in before]
    assert again.status is SequenceStatus.LOADING
    run(world)
    assert world.scheduler.stats.num_preemptions == 0
    world.end()


def test_a_long_one_whose_prefix_is_on_the_gpu_alone_takes_no_step_of_short_ones():
    world = world_of(prefix_caching=True)
    spec = {"stem": 0, "length": 200, "max_tokens": 4}
    world.add(**spec)
    run(world)
    world.add(length=5, max_tokens=60)
    for _ in range(3):
        step(world)
    again = world.add(**spec, own=3)
    short = world.add(length=24, max_tokens=2)
    for _ in range(2):
        step(world)
    assert short.num_output_tokens >= 1
    assert again.num_computed > 0
    run(world)
    world.end()


def test_a_long_one_that_was_refused_is_not_passed_again():
    world = world_of(num_in_place=40, max_len=240)
    world.add(length=24, max_tokens=30)
    step(world)
    other = world.add(length=206, max_tokens=10)
    world.add(length=9, max_tokens=10)
    for _ in range(2):
        step(world)
    assert other.status is SequenceStatus.WAITING
    late = world.add(length=5, max_tokens=2)
    while other.status is SequenceStatus.WAITING:
        assert late.status is SequenceStatus.WAITING
        step(world)
    run(world)
    assert world.scheduler.stats.num_overtaken == 1
    world.end()


def test_short_ones_pass_a_long_one_whose_keys_are_being_made(monkeypatch):
    monkeypatch.setattr(sequences, "PREPARE_TOKENS", 4)
    world = world_of()
    first = world.add(length=5, max_tokens=60)
    step(world)
    other = long(world, 4.2)
    step(world)
    for _ in range(3):
        short = world.add(length=5, max_tokens=2)
        for _ in range(2):
            step(world)
        assert short.num_output_tokens >= 1
    assert other.status is SequenceStatus.WAITING
    run(world, lambda: other.num_computed > 0)
    assert not first.is_finished
    run(world)
    world.end()


def test_an_abort_passes_the_turn_on():
    world = world_of()
    longs = [long(world, 1.5, max_tokens=90) for _ in range(3)]
    run(world, lambda: decodes(*longs))
    for sequence in longs[:2]:
        others = [s for s in longs if not s.is_finished and s is not sequence]
        world.scheduler.abort(sequence.request.request_id)
        before = [s.num_output_tokens for s in others]
        for _ in range(4):
            step(world)
        assert [s.num_output_tokens for s in others] != before
    run(world)
    world.end()


@pytest.mark.thorough
def test_both_tiers_full_of_long_ones_take_blocks_from_the_newest():
    """What cannot grow further loses its blocks, as everywhere; all end with their tokens."""
    world = world_of(num_in_place=62, num_other=30, max_len=320)
    longs = [long(world, 1.4, max_tokens=200) for _ in range(3)]
    world.add(length=6, max_tokens=100)
    run(world)
    assert world.scheduler.stats.num_preemptions > 0
    assert all(s.num_output_tokens == 200 for s in longs)
    world.end()


def test_without_blocks_in_place_nothing_is_long():
    world = World(Tiers(num_gpu=ROOM, num_other=40, max_len=80))
    sequence = world.add(length=79, max_tokens=1)
    assert not world.groups.is_long(sequence)
    run(world)
    world.end()


class Clocks:
    """Steps from the arrival of short requests to their first tokens, and between tokens of all."""

    def __init__(self, world):
        self.world, self.arrived, self.last, self.most_long = world, {}, {}, 0
        self.steps = self.most_first = self.most_short = 0

    def step(self):
        running = [s for s in self.world.sequences if not s.is_finished]
        before = {s.seq_id: s.num_output_tokens for s in running}
        self.world.complete(self.world.moves())
        self.steps += self.world.step()  # else all wait for moves, which no step is
        self.world.check()
        for sequence in running:
            key, is_long = sequence.seq_id, self.world.groups.is_long(sequence)
            if sequence.num_output_tokens == before[key]:
                continue
            if key in self.last:
                gap = self.steps - self.last[key]
                self.most_short = max(self.most_short, 0 if is_long else gap)
                self.most_long = max(self.most_long, gap if is_long else 0)
            elif key in self.arrived:
                self.most_first = max(self.most_first, self.steps - self.arrived[key])
            self.last[key] = self.steps

    def add_short(self, **spec):
        sequence = self.world.add(**spec)
        self.arrived[sequence.seq_id] = self.steps
        return sequence


@pytest.mark.thorough_but("0")
@pytest.mark.parametrize("seed", [0, 6, *map(slow, range(10, 150))])
def test_nobody_starves_in_any_mix(monkeypatch, seed):
    """Long and short ones come and go at random, with room for all of them on both tiers."""
    turn, skipped = 8, 3
    monkeypatch.setattr(host_times, "LEAST_TURN", 2)
    monkeypatch.setattr(host_times, "MOST_TURN", turn)
    monkeypatch.setattr(host_times, "MOST_SKIPPED", skipped)
    rng = random.Random(seed)
    rates = rng.choice((TURNS, TURNS, TOGETHER, ReadRates(step_s=1e-6, read_bytes_s=1.0)))
    caching = rng.random() < 0.7
    world = world_of(num_in_place=800, read_rates=rates, prefix_caching=caching, seqs=12)
    clocks, num_long, running = Clocks(world), rng.choice((1, 2, 4)), []
    for _ in range(400):
        running = [s for s in running if not s.is_finished]
        longs = [s for s in running if s.request.params.max_tokens > 30]
        if len(longs) < num_long and rng.random() < 0.3:
            spec = {"stem": 0, "own": 9} if rng.random() < 0.5 else {}
            running.append(long(world, rng.uniform(1.5, 3.5), max_tokens=31, **spec))
        elif len(running) - len(longs) < 3 and rng.random() < 0.3:
            running.append(
                clocks.add_short(length=rng.randrange(1, 9), max_tokens=rng.randrange(1, 9))
            )
        if running and rng.random() < 0.05:
            world.scheduler.abort(running.pop(rng.randrange(len(running))).request.request_id)
        clocks.step()
    run(world)
    assert clocks.most_first <= 2
    # A step with none of them beside moves of blocks.
    assert clocks.most_short <= 2
    assert clocks.most_long <= max(1, num_long - 1) * (turn * (skipped + 1) + 3) + skipped + 4
    world.end()
