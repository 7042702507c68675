"""Moves go to the movers of their groups, once each, and back to the scheduler when done."""

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.device.cpu import CPUDevice
from engine.errors import EngineError
from engine.kv import memory as mover_module
from engine.kv.memory import BlockMover, HostBlocks
from engine.kv.moves import Move, MoveBatch
from engine.kv.pool import TieredBlockPool
from engine.run.core import Transfers

NONE = MoveBatch((), frozenset())


class Source:
    def __init__(self, *batches, alone=False):
        self.batches, self.done = list(batches), []
        self.nothing = (NONE,) if alone else (NONE, NONE)
        count = len(batches[0] if batches else self.nothing)
        self.pools = [SimpleNamespace(ledger=Ledger(self, n)) for n in range(count)]

    def complete_moves(self, group, move_ids):
        self.done += [(group, move_id) for move_id in move_ids]


@dataclass
class Ledger:
    source: Source
    group: int

    def decided_moves(self):
        batches = self.source.batches
        return (batches[0] if batches else self.source.nothing)[self.group]

    def note_taken(self):
        if self.group == 0:
            del self.source.batches[:1]


def moves(*given, waits=()):
    return MoveBatch(tuple(Move(*each) for each in given), frozenset(waits))


@contextmanager
def interrupt_at(number, names):
    """Raise KeyboardInterrupt where so many lines of these files or classes ran; yield a list.

    It holds something when there were so many.
    """
    came, seen = [], 0

    def trace(frame, event, _):
        nonlocal seen
        code = frame.f_code
        if names.isdisjoint((Path(code.co_filename).name, code.co_qualname.split(".")[0])):
            return None
        if event == "line":
            seen += 1
            if seen == number:
                came.append(1)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield came
    except KeyboardInterrupt:
        assert came
    finally:
        sys.settrace(before)


def mover_of(num_gpu=4, num_pinned=4, num_pageable=0):
    device = CPUDevice()
    host = HostBlocks(
        device, num_pinned=num_pinned, num_pageable=num_pageable, block_bytes=64, can_uva=True
    )
    gpu = torch.arange(num_gpu, dtype=torch.uint8).repeat_interleave(64).view(num_gpu, 64)
    return BlockMover(device, gpu, host, dma_run_bytes=1), gpu, host


def test_moves_of_each_group_run_and_are_told_once():
    (one, _, host), (two, other_gpu, other) = mover_of(), mover_of()
    other.pinned.fill_(9)
    source = Source((moves((0, "store", 1, 4)), moves((0, "load", 5, 3))), (NONE, NONE))
    transfers = Transfers(source, [one, two])
    transfers.submit()
    assert transfers.num_under_way == 2
    transfers.submit()
    transfers.drain()
    assert sorted(source.done) == [(0, 0), (1, 0)]
    assert (int(host.pinned[0, 0]), int(other_gpu[3, 0])) == (1, 9)
    assert transfers.num_under_way == 0


def test_loads_are_waited_for_before_stores():
    (one, *_), (two, *_) = mover_of(), mover_of(num_pinned=3, num_pageable=1)
    source = Source((moves((0, "store", 1, 4)), moves((0, "load", 7, 3), (1, "store", 0, 4))))
    transfers = Transfers(source, [one, two])
    transfers.submit()
    waited = []
    for group, mover in enumerate((one, two)):
        wait = mover.wait_next

        def note(group=group, wait=wait):
            waited.append(group)
            wait()

        mover.wait_next = note
    transfers.wait_next()
    assert waited == [1]
    transfers.drain()
    assert sorted(source.done) == [(0, 0), (1, 0), (1, 1)]
    one.close()
    two.close()


class CountedMark:
    def __init__(self, questions):
        self.questions = questions

    def is_done(self):
        self.questions -= 1
        return self.questions < 0


def test_pieces_are_enqueued_until_a_mark_and_one_by_each_submission(monkeypatch):
    monkeypatch.setattr(mover_module, "piece_moves", lambda *_: 1)
    mover, gpu, host = mover_of(num_gpu=6, num_pinned=6)
    host.pinned.fill_(9)
    loads = moves(*((i, "load", 6 + i, i) for i in range(6)))
    source = Source((loads,), (NONE,), (moves(waits=[0]),), alone=True)
    transfers = Transfers(source, [mover])
    transfers.submit()
    assert mover.num_queued == 5
    transfers.enqueue_until(CountedMark(1))
    assert mover.num_queued == 4
    for left in (3, 2):  # also where a step waits for what is enqueued
        transfers.submit()
        assert (mover.num_queued, transfers.num_under_way) == (left, 6)
    transfers.enqueue_until(CountedMark(9))
    assert mover.num_queued == 0
    transfers.drain()
    assert sorted(source.done) == [(0, i) for i in range(6)]
    assert gpu[:, 0].tolist() == [9] * 6


def test_a_submission_that_failed_goes_on_where_it_stopped(monkeypatch):
    mover, gpu, host = mover_of(num_gpu=2, num_pinned=2)
    host.pinned[1].fill_(7)
    # The content of block 0 goes to 2; 0 takes that of 3.
    batch = moves((0, "store", 0, 2), (1, "load", 3, 0, (0,)), waits=[1])
    source = Source((batch,), alone=True)
    transfers = Transfers(source, [mover])
    enqueue, calls = mover._enqueue, []

    def fail_at_the_second(group):
        calls.append(group)
        if len(calls) == 2:
            raise RuntimeError("tests say so")
        enqueue(group)

    monkeypatch.setattr(mover, "_enqueue", fail_at_the_second)
    with pytest.raises(RuntimeError, match="tests say so"):
        transfers.submit()
    transfers.poll()
    assert [[move.move_id for move in group] for group in calls] == [[0], [1], [1]]
    transfers.drain()
    assert sorted(source.done) == [(0, 0), (0, 1)]
    assert (int(gpu[0, 0]), int(host.pinned[0, 0])) == (7, 0)


def test_moves_without_a_host_tier_and_waits_for_nothing_are_faults():
    with pytest.raises(EngineError, match=r"none where there is no host tier, got \[1\]"):
        Transfers(Source((moves((0, "store", 1, 4)),)), []).submit()
    transfers = Transfers(Source(), [])
    transfers.submit()
    transfers.drain()
    with pytest.raises(EngineError, match="expected one under way"):
        transfers.wait_next()


class Pool(TieredBlockPool):
    """The only pool of a source."""

    @property
    def pools(self):
        return [self]

    def complete_moves(self, group, move_ids):
        self.complete(move_ids)


@pytest.mark.thorough
def test_an_interrupt_of_a_submission_loses_no_moves_wherever_it_comes():
    """At each line in turn; the next poll submits what is left."""
    number, is_cut = 0, True
    while is_cut:
        number += 1
        mover, gpu, host = mover_of()
        pool = Pool(4, 4, 16)
        table = pool.allocate(2)
        for block_id in table:
            pool.register(block_id, bytes([block_id]))
        pool.swap_out(table, [bytes([block_id]) for block_id in table])
        transfers = Transfers(pool, [mover])
        with interrupt_at(number, {"core.py", "moves.py", "pool.py", "memory.py"}) as is_cut:
            transfers.submit()
        transfers.poll()
        transfers.drain()
        assert (pool.ledger.num_in_flight, pool.use("cpu")["cached"]) == (0, 2)
        assert host.pinned[:2, 0].tolist() == gpu[:2, 0].tolist()
    assert number > 12
