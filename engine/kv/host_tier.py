"""HostTier: host blocks of every group of layers, and what moves them."""

import contextlib
from dataclasses import fields

from engine.device.base import Device
from engine.kv.cache import KVCache
from engine.kv.host_blocks import HostBlocks
from engine.kv.mover import BlockMover, MoverStats
from engine.plan import MemoryPlan


class HostTier:
    """The host blocks that a plan gives, and a mover for each group once there is a cache.

    Args:
        plan: Numbers and sizes of blocks; without a host tier there are none.
        device: Allocates, and copies.

    Raises:
        CapacityError: The memory cannot be had or pinned; then nothing is kept.
    """

    def __init__(self, plan: MemoryPlan, device: Device) -> None:
        self.blocks: list[HostBlocks] = []
        self.movers: list[BlockMover] = []
        """One for each group; none before `connect`."""
        self._device = device
        if plan.host_kv is None:
            return
        try:
            for group in plan.kv.groups:
                self.blocks.append(
                    HostBlocks(
                        device,
                        num_pinned=group.num_pinned,
                        num_pageable=group.num_pageable,
                        block_bytes=group.block_bytes,
                        can_uva=plan.facts.can_uva,
                    )
                )
        except BaseException:
            self.close()
            raise

    def connect(self, cache: KVCache) -> None:
        """Make the movers between these blocks and those of a cache."""
        for group, host in enumerate(self.blocks):
            self.movers.append(BlockMover(self._device, cache.blocks[group], host))

    def warm_up(self) -> None:
        """Compile and load what moves blocks; before the first move."""
        for mover in self.movers:
            mover.warm_up()

    def moved(self) -> MoverStats:
        """Return what was moved since the load, all groups together."""
        total = MoverStats()
        for mover in self.movers:
            for item in fields(total):
                more = getattr(mover.stats, item.name)
                setattr(total, item.name, getattr(total, item.name) + more)
        return total

    def num_bytes(self) -> tuple[int, int]:
        """Return pinned and pageable bytes."""
        sizes = [blocks.num_bytes for blocks in self.blocks]
        return sum(pinned for pinned, _ in sizes), sum(pageable for _, pageable in sizes)

    def seconds(self) -> tuple[float, float]:
        """Return the seconds that touching and that registering memory took."""
        return (
            sum(blocks.touch_s for blocks in self.blocks),
            sum(blocks.pin_s for blocks in self.blocks),
        )

    def stop(self) -> None:
        """Wait for all moves, and make no more; the cache may be closed then."""
        for mover in self.movers:
            # What a move met was told where it was asked for, or is told to nobody any more.
            with contextlib.suppress(Exception):
                mover.close()
        self.movers = []

    def close(self) -> None:
        """Stop, and release the memory; no work of the device may use it any more."""
        self.stop()
        for blocks in self.blocks:
            blocks.close()
        self.blocks = []
