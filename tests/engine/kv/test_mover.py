"""Moves over tensors: contents arrive, late or early, by kernel, by DMA or staged."""

import random
import threading

import pytest
import torch

from engine.device.cpu import CPUDevice
from engine.errors import CapacityError
from engine.kv import memory as mover_module
from engine.kv.memory import BlockMover, HostBlocks
from engine.kv.moves import Move, MoveBatch
from engine.plan import sizes
from tests.engine.kv.driver import WEIGHTS, Driver
from tests.engine.kv.tensor_world import BLOCK_BYTES, TensorWorld

WAYS = {
    "kernel": {"dma_run_bytes": 100 * BLOCK_BYTES},
    "mixed": {"dma_run_bytes": 2 * BLOCK_BYTES},
    "dma": {"dma_run_bytes": 1},
    "no uva": {"can_uva": False},
    "early": {"eager": True},
    "one by one": {"piece": 1},
}


def make(num_gpu=4, num_pinned=4, num_pageable=0, block_bytes=64, dma_run_bytes=10**9, uva=True):
    device = CPUDevice()
    host = HostBlocks(
        device,
        num_pinned=num_pinned,
        num_pageable=num_pageable,
        block_bytes=block_bytes,
        can_uva=uva,
    )
    gpu = device.empty(num_gpu * block_bytes).view(num_gpu, block_bytes)
    for rows, start in ((gpu, 0), (host.pinned, 100), (host.pageable, 200)):
        for place, row in enumerate(rows):
            row.fill_(start + place)
    return BlockMover(device, gpu, host, dma_run_bytes=dma_run_bytes), gpu, host


def firsts(rows):
    return [int(row[0]) for row in rows]


def batch(*moves, waits=()):
    return MoveBatch(tuple(moves), frozenset(waits))


@pytest.mark.parametrize("dma_run_bytes", [1, 10**9], ids=["dma", "kernel"])
def test_both_directions_in_one_batch(dma_run_bytes):
    mover, gpu, host = make(dma_run_bytes=dma_run_bytes)
    mover.submit(batch(Move(0, "store", 0, 5), Move(1, "load", 7, 2), Move(2, "store", 1, 4)))
    mover.wait([0, 1, 2])
    assert sorted(mover.poll()) == [0, 1, 2]
    assert (firsts(gpu), firsts(host.pinned)) == ([0, 1, 103, 3], [1, 0, 102, 103])
    assert (mover.stats.stored_bytes, mover.stats.loaded_bytes) == (128, 64)
    moved = mover.stats.dma_bytes, mover.stats.kernel_bytes
    assert moved == ((192, 0) if dma_run_bytes == 1 else (0, 192))
    mover.close()


def test_a_move_runs_after_those_that_it_names():
    mover, gpu, host = make()
    # The content of block 0 goes to 4; 0 takes that of 5, and gives it on to 6.
    mover.submit(
        batch(Move(0, "store", 0, 4), Move(1, "load", 5, 0, (0,)), Move(2, "store", 0, 6, (1,)))
    )
    mover.wait([2])
    assert (firsts(gpu), firsts(host.pinned)) == ([101, 1, 2, 3], [0, 101, 101, 103])
    mover.close()


def test_neighbours_that_stay_neighbours_are_one_copy():
    mover, gpu, host = make(num_gpu=8, num_pinned=8, dma_run_bytes=3 * 64)
    pairs = [(3, 10), (1, 8), (2, 9), (5, 12), (6, 15)]
    mover.submit(batch(*(Move(i, "store", gpu, host) for i, (gpu, host) in enumerate(pairs))))
    mover.wait(range(5))
    assert (mover.stats.dma_bytes, mover.stats.kernel_bytes, mover.stats.copies) == (192, 128, 2)
    assert firsts(host.pinned) == [1, 2, 3, 103, 5, 105, 106, 6]
    assert firsts(gpu) == list(range(8))
    mover.close()


def test_a_step_waits_for_what_it_names_and_for_nothing_else():
    mover, gpu, host = make()
    mover.submit(batch(Move(0, "load", 4, 0)))
    mover.submit(batch(Move(1, "store", 3, 7), waits=[1]))
    assert firsts(host.pinned)[3] == 3
    assert firsts(gpu)[0] == 0
    mover.submit(batch(waits=[0]))
    assert firsts(gpu)[0] == 100
    mover.close()


def test_poll_waits_for_nothing_and_returns_each_move_once():
    mover, gpu, _ = make(dma_run_bytes=1)
    mover.submit(batch(Move(0, "load", 4, 0), Move(1, "load", 6, 2)))
    seen = [mover.poll() for _ in range(4)]
    assert [len(ids) for ids in seen] == [0, 2, 0, 0]  # one copy runs at each question
    assert mover.num_under_way == 0
    assert firsts(gpu) == [100, 1, 102, 3]
    mover.wait([0, 1])
    mover.close()


def test_a_piece_is_enqueued_at_a_time_and_what_is_waited_for_before(monkeypatch):
    monkeypatch.setattr(mover_module, "piece_moves", lambda *_: 1)
    mover, gpu, _ = make()
    mover.submit(batch(*(Move(i, "load", 4 + i, i) for i in range(4))))
    assert (mover.num_queued, mover.num_under_way, mover.stats.loaded_bytes) == (3, 4, 64)
    assert mover.is_loading
    mover.submit(batch(waits=[1]))
    assert (mover.num_queued, firsts(gpu)) == (2, [100, 101, 2, 3])
    mover.enqueue_more()
    assert mover.num_queued == 1
    mover.wait_next()
    assert mover.num_queued == 0
    mover.wait([3])
    assert sorted(mover.poll()) == [0, 1, 2, 3]
    assert firsts(gpu) == [100, 101, 102, 103]
    mover.enqueue_more()
    assert mover.num_under_way == 0
    mover.close()


def test_pageable_blocks_go_through_staging():
    mover, gpu, host = make(num_pinned=1, num_pageable=3)
    mover.submit(batch(Move(0, "store", 0, 5), Move(1, "store", 1, 4), Move(2, "load", 7, 2)))
    mover.submit(batch(Move(3, "load", 5, 3, (0,)), waits=[3]))
    assert firsts(gpu) == [0, 1, firsts(host.pageable)[2], 0]
    mover.wait(range(4))
    assert sorted(mover.poll()) == [0, 1, 2, 3]
    assert mover.stats.staged_bytes == 3 * 64
    mover.close()


def test_a_staged_move_waits_for_those_that_it_names():
    mover, _, host = make(num_pinned=2, num_pageable=1)
    mover.submit(batch(Move(0, "load", 5, 0), Move(1, "store", 0, 6, (0,))))
    mover.wait([1])
    assert firsts(host.pageable) == [101]
    mover.close()


@pytest.mark.parametrize(
    "behind",
    [batch(Move(1, "load", 4, 0, (0,))), batch(waits=[0])],
    ids=["a copy on a stream", "a step"],
)
def test_what_is_behind_a_staged_move_waits_for_it(behind, monkeypatch):
    mover, _, host = make(num_pinned=1, num_pageable=1)
    asked = threading.Event()

    class Mark:
        def wait(self):
            asked.wait()

    wait = mover_module._FuturePoint.wait

    def note(point):
        asked.set()  # only now the thread begins
        wait(point)

    monkeypatch.setattr(mover_module._FuturePoint, "wait", note)
    monkeypatch.setattr(mover._device, "mark", Mark)
    mover.submit(batch(Move(0, "store", 0, 5)))
    assert mover.poll() == []
    mover.submit(behind)
    was_asked = asked.is_set()
    asked.set()
    assert was_asked
    assert firsts(host.pageable) == [0]
    mover.close()


def test_a_staged_copy_that_fails_is_told():
    mover, _, host = make(num_pinned=0, num_pageable=1)
    host.pageable.resize_(1, 7)
    mover.submit(batch(Move(0, "store", 0, 4)))
    with pytest.raises(RuntimeError, match="size"):
        mover.wait([0])


def test_what_was_enqueued_of_a_piece_that_failed_is_not_enqueued_again(monkeypatch):
    mover, _, host = make(num_pinned=2, num_pageable=2)
    stage = mover._staging.submit

    def fail_once(*_, **__):
        monkeypatch.setattr(mover._staging, "submit", stage)
        raise RuntimeError("no thread")

    monkeypatch.setattr(mover._staging, "submit", fail_once)
    moves = batch(Move(0, "store", 0, 4), Move(1, "store", 1, 6))
    with pytest.raises(RuntimeError, match="no thread"):
        mover.submit(moves)
    assert mover.num_queued == 1
    mover.submit(moves)
    mover.wait([0, 1])
    assert sorted(mover.poll()) == [0, 1]
    assert (mover.num_under_way, firsts(host.pinned)[0], firsts(host.pageable)[0]) == (0, 0, 1)
    mover.close()


def test_many_pieces_reuse_the_lists_of_block_numbers(monkeypatch):
    monkeypatch.setattr(sizes, "MOVE_PIECE_BYTES", 2 * 64)
    monkeypatch.setattr("engine.kv.memory.ID_SLOTS", 3)
    mover, _, host = make(num_gpu=40, num_pinned=40)
    order = random.Random(0).sample(range(40), 40)
    mover.submit(batch(*(Move(i, "store", i, 40 + host) for i, host in enumerate(order))))
    mover.wait(range(40))
    assert mover.stats.copies == 20
    assert [firsts(host.pinned)[place] for place in order] == list(range(40))
    mover.close()


@pytest.mark.thorough_but("0-kernel", "3-mixed", "0-dma", "3-no uva", "0-early", "3-one by one")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pageable", [0, 3])
def test_any_requests_read_what_they_computed(way, pageable):
    for seed in range(6):
        rng = random.Random(seed)
        pinned = rng.choice((0, 1, 4, 8))
        world = TensorWorld(rng.choice((1, 3, 6)), pinned, pageable, **WAYS[way])
        driver = Driver(world, rng.choice)
        for name in rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=60):
            getattr(driver, name)()
            driver.check()
        driver.end()


@pytest.mark.parametrize(("count", "piece"), [(1, None), (3, 1)], ids=["all", "a piece"])
def test_negative_control_a_step_that_does_not_wait_spoils_the_store(count, piece):
    contents = []
    for obey in (True, False):
        world = TensorWorld(count, count, obey_waits=obey, piece=piece)
        world.stop(world.run([1, 1] * count))
        world.run([2, 2] * count)
        world.complete_all()
        values = [world.encode((None, *[1] * (2 * place + 1))) for place in range(count)]
        kept = sorted(world.read(count + place, 0) for place in range(count))
        contents.append(kept == sorted(values))
        world.close()
    assert contents == [True, False]


def test_a_mover_without_a_host_tier_does_nothing():
    mover, _, host = make(num_pinned=0)
    mover.submit(batch())
    assert (mover.poll(), host.num_blocks, host.in_place) == ([], 0, None)
    mover.close()


def test_the_host_tier_is_of_exact_size():
    _, _, host = make(num_pinned=3, num_pageable=2)
    assert host.pinned.untyped_storage().nbytes() >= 3 * 64
    assert (host.pinned.shape, host.pageable.shape) == ((3, 64), (2, 64))
    assert host.in_place.data_ptr() == host.pinned.data_ptr()
    host.close()
    assert host.pinned.numel() == 0
    device = CPUDevice()
    buffer = device.host_buffer(64, pin=False)
    with pytest.raises(CapacityError, match="pageable"):
        device.in_place(buffer, buffer.tensor)


def test_sizes_of_pieces():
    assert sizes.piece_moves(2**21) == 16
    assert sizes.piece_moves(2**30) == 1
    assert sizes.piece_moves(64) == 1024
    assert sizes.piece_moves(64, 5) == 5
    assert sizes.ids_bytes(2**21, 2**21) == 0
    assert sizes.ids_bytes(2**15, 2**16) == 2 * 64 * 2 * 1024 * 8
    assert sizes.staging_blocks(2**30) == 1
    assert sizes.staging_blocks(2**21) == 8
    device = CPUDevice()
    host = HostBlocks(device, num_pinned=1, num_pageable=0, block_bytes=2**15, can_uva=True)
    gpu = device.empty(2**15).view(1, -1)
    before = device.allocated_bytes()
    BlockMover(device, gpu, host, dma_run_bytes=2**16)
    assert device.allocated_bytes() - before == sizes.ids_bytes(2**15, 2**16, 1)
    assert torch.equal(host.pinned, torch.zeros_like(host.pinned))
