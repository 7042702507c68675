"""Random loads over groups of layers with and without a window, on a device that runs in order."""

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from engine.asked.request import Request, Sequence
from engine.errors import EngineError
from engine.kv import sequences
from engine.kv.pool import TieredBlockPool
from engine.kv.prefix import num_expired
from engine.kv.sequences import GONE
from engine.plan.sizes import num_held
from engine.schedule.scheduler import Scheduler, SchedulerConfig
from tests.engine.schedule.test_scheduler import make_groups
from tests.engine.schedule.test_scheduler_ahead_loads import Launched, World, loads


class WindowWorld(World):
    """A device with a table of slots for each group; a token reads what its window holds."""

    def __init__(self, load, windows, extra):
        super().__init__(*load)
        limits = self.limits
        config = SchedulerConfig(
            max_num_seqs=limits["seqs"],
            max_num_batched_tokens=limits["tokens"],
            max_model_len=limits["max_len"],
            yields=limits["yields"],
        )
        self.pools = []
        for window in windows:
            least = num_held(limits["max_len"], window, limits["tokens"], self.size)
            count = limits["num_blocks"] if window is None else least + extra
            self.pools.append(TieredBlockPool(count, 0, self.size, window=window))
        self.scheduler = Scheduler(config, make_groups(config, *self.pools))
        self.num_given_back = 0

    def launch(self, plan, before):
        self.check(plan, before)
        for item in plan.scheduled:
            self.tokens_on_device(item, before)
        for group, pool in enumerate(self.pools):
            for item in plan.scheduled:
                for position in range(item.start, item.stop):
                    self.memory[self.place(group, item.sequence, position)] = (
                        item.sequence.seq_id,
                        position,
                    )
            for item in plan.scheduled:
                first = 0 if pool.window is None else max(0, item.start - pool.window + 1)
                for position in range(first, item.stop):
                    held = self.memory[self.place(group, item.sequence, position)]
                    assert held == (item.sequence.seq_id, position)
        return Launched(plan, self.sample(plan))

    def place(self, group, sequence, position):
        block = sequence.block_tables[group][position // self.size]
        assert block != GONE
        return group, block, position % self.size

    def check_pool(self):
        owning, waiting = self.owning(), tuple(self.scheduler.waiting)
        for group, pool in enumerate(self.pools):
            tables = [s.block_tables[group] for s in owning]
            live = [block for table in tables for block in table if block != GONE]
            assert len(set(live)) == len(live) == pool.num_used
            for s, table in zip(owning, tables, strict=True):
                if pool.window is None:
                    assert GONE not in table
                    continue
                start = s.num_computed - s.num_computed % self.size
                gone = min(len(table), num_expired(start, pool.window, self.size))
                assert table[:gone] == [GONE] * gone
                assert GONE not in table[gone:]
                assert s.num_gone[group] == gone
                self.num_given_back = max(self.num_given_back, gone)
                # Two steps may be in force, and blocks are given back from a block's start on.
                span = 2 * self.limits["tokens"] + self.size - 1
                most = num_held(self.limits["max_len"], pool.window, span, self.size)
                assert len(table) - gone <= most
        for s in waiting:
            assert (s.block_tables, s.num_gone, s.num_computed) == ([], [], 0)
        order = [s.seq_id for s in (*self.scheduler.running, *waiting)]
        assert order == sorted(order), "served in order of arrival"


def outcome(world):
    return [(s.output_token_ids, s.finish_reason) for s in world.sequences]


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(
    load=loads(),
    windows=st.lists(st.integers(1, 12), min_size=1, max_size=3, unique=True),
    extra=st.integers(0, 8),
    is_alone=st.booleans(),
)
def test_every_load_is_served(load, windows, extra, is_alone):
    world = WindowWorld(load, windows if is_alone else [None, *windows], extra)
    world.play()
    stats = world.scheduler.stats
    event(f"given back: {world.num_given_back > 0}")
    event(f"ahead: {world.num_ahead > 0}")
    event(f"preempted: {stats.num_preemptions > 0}")
    event(f"stalled: {stats.num_stalls > 0}")
    for pool in world.pools:
        assert pool.num_free == pool.num_blocks
    assert stats.num_finished == len(world.sequences)
    for s in world.sequences:
        wanted = [world.token(s, s.num_prompt_tokens + i) for i in range(s.num_output_tokens)]
        assert s.output_token_ids == wanted


def test_a_block_given_back_too_early_is_found(monkeypatch):
    """The negative control: what a window needs is missed."""
    request = {
        "at": 0,
        "length": 18,
        "max_tokens": None,
        "n": 1,
        "eos_after": None,
        "stop_after": None,
    }
    limits = {"block_size": 2, "max_len": 20, "seqs": 1, "tokens": 6, "num_blocks": 10}
    limits["yields"] = 1, 1
    load = limits, [request], []
    WindowWorld(load, (None, 5), 0).play()
    monkeypatch.setattr(sequences, "num_expired", lambda *a: num_expired(*a) + 1)
    with pytest.raises(AssertionError):
        WindowWorld(load, (None, 5), 0).play()


def sequence_of(length):
    return Sequence(seq_id=0, request=Request(request_id="r", prompt_token_ids=[7] * length))


def make_scheduler(*groups, max_len=64, tokens=16):
    """Groups: blocks, and the window."""
    config = SchedulerConfig(
        max_num_seqs=2,
        max_num_batched_tokens=tokens,
        max_model_len=max_len,
    )
    pools = (TieredBlockPool(count, 0, 4, window=window) for count, window in groups)
    return Scheduler(config, make_groups(config, *pools))


def test_a_window_keeps_its_blocks_alone():
    scheduler = make_scheduler((16, None), (12, 8), (11, 4))
    sequence = sequence_of(40)
    scheduler.add(sequence)
    used = []
    for _ in range(2):
        plan = scheduler.plan_step()
        scheduler.commit(plan, {}, set())
        used.append([pool.num_used for pool in scheduler.pools])
    # 32 tokens are in: the next sees 25 to 31, which lie in blocks 6 and 7, or 29 to 31.
    assert sequence.num_computed == 32
    assert [len(table) for table in sequence.block_tables] == [8, 8, 8]
    assert [table.count(GONE) for table in sequence.block_tables] == sequence.num_gone == [0, 6, 7]
    assert used == [[4, 2, 1], [8, 2, 1]]
    scheduler.abort("r")
    assert [pool.num_free for pool in scheduler.pools] == [16, 12, 11]


def test_a_step_in_force_keeps_what_it_reads():
    """A step planned behind another gives nothing back before that one is committed."""
    scheduler = make_scheduler((16, None), (9, 4))
    sequence = sequence_of(48)
    scheduler.add(sequence)
    first = scheduler.plan_step()
    second = scheduler.plan_ahead()
    assert (first.prefills[0].stop, second.prefills[0].stop) == (16, 32)
    table = sequence.block_tables[1]
    assert GONE not in table
    scheduler.commit(first, {}, set())
    # Of the second step the first token sees 13 to 16.
    assert table[:3] == [GONE] * 3
    assert GONE not in table[3:]


@pytest.mark.parametrize(
    "groups",
    [
        [(16, None), (6, 8)],
        [(15, None), (7, 8)],
        [(6, 8)],
        [(16, None), (7, 8), (5, 4)],
        [(16, None), (6, 8), (6, 4)],
    ],
)
def test_pools_that_hold_no_sequence_are_refused(groups):
    with pytest.raises(EngineError, match="one sequence of max_model_len=64 tokens"):
        make_scheduler(*groups)
    enough = {None: 16, 8: 7, 4: 6}
    make_scheduler(*((enough[window], window) for _, window in groups))
