"""Moves on a GPU: contents arrive whatever runs beside them."""

import random

import pytest
import torch

from engine.kv.memory import BlockMover, HostBlocks
from engine.kv.moves import Move, MoveBatch
from tests.engine.kv.driver import WEIGHTS, Driver
from tests.engine.kv.tensor_world import BLOCK_BYTES, TensorWorld

pytestmark = pytest.mark.gpu

SPIN_CYCLES = 20_000_000


@pytest.fixture
def cuda():
    from engine.device.cuda import CUDADevice

    device = CUDADevice()
    yield device
    device.close()


@pytest.mark.parametrize("dma_run_bytes", [1, 2 * BLOCK_BYTES, 100 * BLOCK_BYTES])
@pytest.mark.parametrize("pageable", [0, 3])
def test_any_requests_read_what_they_computed(dma_run_bytes, pageable, cuda):
    for seed in range(6):
        rng = random.Random(seed)
        world = TensorWorld(
            rng.choice((1, 3, 6)),
            rng.choice((0, 1, 4, 8)),
            pageable,
            dma_run_bytes=dma_run_bytes,
            device=cuda,
        )
        driver = Driver(world, rng.choice)
        for name in rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=60):
            getattr(driver, name)()
            driver.check()
        driver.end()


@pytest.mark.parametrize("dma_run_bytes", [1, 2**40], ids=["dma", "kernel"])
@pytest.mark.parametrize("num_pinned", [4, 0], ids=["pinned", "staged"])
def test_stores_wait_for_writers_loads_for_readers_and_steps_for_moves(
    dma_run_bytes, num_pinned, cuda
):
    words = 2**18
    host = HostBlocks(
        cuda,
        num_pinned=num_pinned,
        num_pageable=4 - num_pinned,
        block_bytes=4 * words,
        can_uva=True,
    )
    gpu = cuda.empty(4 * 4 * words).view(4, -1)
    mover = BlockMover(cuda, gpu, host, dma_run_bytes=dma_run_bytes)
    numbers = gpu.view(torch.int32)
    numbers.zero_()
    for turn in range(1, 6):
        first = 4 * turn
        torch.cuda._sleep(SPIN_CYCLES)
        numbers[0].fill_(turn)  # the store must see it
        torch.cuda._sleep(SPIN_CYCLES)
        read = numbers[1].clone()  # the load must not disturb it
        mover.submit(
            MoveBatch(
                (Move(first, "store", 0, 4), Move(first + 1, "load", 4, 1, (first,))),
                frozenset({first, first + 1}),
            )
        )
        numbers[0].fill_(-turn)  # the store must not see it
        after = numbers[1].clone()  # the load must be seen
        assert set(read.unique().tolist()) == {turn - 1}
        assert set(after.unique().tolist()) == {turn}
        mover.wait([first, first + 1])
        assert sorted(mover.poll()) == [first, first + 1]
    mover.close()
    host.close()
