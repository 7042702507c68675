"""Measure what moves of KV blocks between the tiers carry, as an engine makes them.

As probes of the link: before an engine is built or after it is closed, never beside it.
"""

import random
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Final

from engine.device.base import Device
from engine.device.select import open_device
from engine.errors import CapacityError, PinningError
from engine.kv.host_blocks import HostBlocks
from engine.kv.mover import BlockMover
from engine.kv.moves import Move, MoveBatch, MoveKind

MOVED_BYTES: Final = 2**30
"""Of one direction."""
EMULATED_MOVED_BYTES: Final = 2**24
REPEATS: Final = 9
MOVE_RATES: Final = ("store_gb_s", "load_gb_s", "both_gb_s")
"""Names of what is probed."""


def probe_moves(block_bytes: int, device: str = "auto") -> dict[str, float | None]:
    """Return GB/s (10^9) of moves of scattered blocks: to the host tier, back, both at once.

    Each is the median of 9 batches of 1 GiB a direction (16 MiB in emulation) after two that are
    not counted, from handing in the batch until the last block has arrived. No two neighbours stay
    neighbours. All are None where memory cannot be pinned.

    Args:
        block_bytes: Of one block over all layers.
        device: auto | cuda | cpu.
    """
    opened = open_device(device)
    facts = opened.facts()
    if not facts.can_pin:
        return dict.fromkeys(MOVE_RATES)
    size = EMULATED_MOVED_BYTES if opened.kind == "cpu" else MOVED_BYTES
    count = max(2, size // block_bytes)
    try:
        host = HostBlocks(
            opened,
            num_pinned=2 * count,
            num_pageable=0,
            block_bytes=block_bytes,
            can_uva=facts.can_uva,
        )
    except (CapacityError, PinningError):
        return dict.fromkeys(MOVE_RATES)
    gpu = opened.empty(2 * count * block_bytes).view(2 * count, block_bytes)
    mover = BlockMover(opened, gpu, host)
    try:
        return _rates(opened, mover, count, block_bytes)
    finally:
        opened.synchronize()
        mover.close()
        del mover, gpu
        host.close()
        opened.close()


def _rates(
    opened: Device, mover: BlockMover, count: int, block_bytes: int
) -> dict[str, float | None]:
    ids = iter(range(2**62))
    stores, loads = _pairs(count, first=0, seed=0), _pairs(count, first=count, seed=1)

    def rate(*parts: tuple[MoveKind, Sequence[tuple[int, int]]]) -> float:
        times = []
        for _ in range(REPEATS + 2):
            moves = [
                Move(next(ids), kind, *((gpu, host) if kind == "store" else (host, gpu)))
                for pairs in zip(*(part for _, part in parts), strict=True)
                for (kind, _), (gpu, host) in zip(parts, pairs, strict=True)
            ]
            opened.synchronize()
            begin_s = perf_counter()
            mover.submit(MoveBatch(tuple(moves), frozenset()))
            mover.wait([move.move_id for move in moves])
            times.append(perf_counter() - begin_s)
            mover.poll()
        return len(parts) * count * block_bytes / median(times[2:]) / 1e9

    return {
        "store_gb_s": rate(("store", stores)),
        "load_gb_s": rate(("load", loads)),
        "both_gb_s": rate(("store", stores), ("load", loads)),
    }


def _pairs(count: int, *, first: int, seed: int) -> list[tuple[int, int]]:
    """Return scattered GPU blocks, each with a host block of the pool's numbering."""
    gpu, host = ([first + index for index in range(count)] for _ in range(2))
    draw = random.Random(seed)
    draw.shuffle(gpu)
    draw.shuffle(host)
    return [(a, 2 * count + b) for a, b in zip(gpu, host, strict=True)]
