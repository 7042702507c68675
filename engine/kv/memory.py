"""The memory of KV blocks in both tiers, and the copies between them beside compute."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import torch

from engine.device.base import TORCH_DTYPES, CopyStream, Device, HostBuffer
from engine.kv.moves import Move, MoveBatch, MoveKind
from engine.model.spec import ModelSpec
from engine.plan.memory import MemoryPlan
from engine.plan.sizes import ID_SLOTS, piece_moves, staging_blocks
from kernels.arguments import HostCache
from kernels.ops import kv

Pair = tuple[int, int]
"""A block on the GPU, a block of the host tier or of its pageable part."""


class HostBlocks:
    """Blocks of the host tier, numbered from 0: pinned ones first, then pageable ones.

    Each part is one buffer, registered once. Compute reads and writes pinned blocks where they are
    if the device can (`can_uva`); pageable ones are reached by staged copies only.

    Raises:
        CapacityError: The memory cannot be had or pinned.
    """

    def __init__(
        self,
        device: Device,
        *,
        num_pinned: int,
        num_pageable: int,
        block_bytes: int,
        can_uva: bool,
    ) -> None:
        self.num_pinned, self.num_pageable = num_pinned, num_pageable
        self.block_bytes = block_bytes
        self.buffers: list[HostBuffer] = []
        self.pinned = self._blocks(device, num_pinned, pin=True)
        """uint8 [num_pinned, block_bytes] on the CPU."""
        self.pageable = self._blocks(device, num_pageable, pin=False)
        """uint8 [num_pageable, block_bytes] on the CPU."""
        self.in_place: torch.Tensor | None = None
        """The pinned part as the device sees it; None where it cannot."""
        if can_uva and num_pinned:
            self.in_place = device.in_place(self.buffers[0], self.pinned)

    @property
    def num_blocks(self) -> int:
        """Blocks of both parts."""
        return self.num_pinned + self.num_pageable

    def close(self) -> None:
        """Unregister and release; no work of the device may use the blocks any more."""
        self.pinned = self.pageable = torch.empty((0, 0), dtype=torch.uint8)
        self.in_place = None
        for buffer in self.buffers:
            buffer.close()
        self.buffers = []

    def _blocks(self, device: Device, count: int, *, pin: bool) -> torch.Tensor:
        if count == 0:
            return torch.empty((0, self.block_bytes), dtype=torch.uint8)
        buffer = device.host_buffer(count * self.block_bytes, pin=pin)
        self.buffers.append(buffer)
        return buffer.tensor.view(count, self.block_bytes)


class KVCache:
    """For each group of layers one tensor [B, L, 2, K, P, H]: a block is one run of bytes.

    B blocks and L layers of the group, keys and values, K KV heads, P tokens a block, H head size.
    Compute reads and writes the host tier too where the group is planned in place and the device
    can.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        spec: ModelSpec,
        device: Device,
        hosts: Sequence[HostBlocks] = (),
    ) -> None:
        self.tensors: list[torch.Tensor] = []
        self.blocks: list[torch.Tensor] = []
        """The tensors as uint8 [B, bytes of a block]."""
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._host_layers: dict[int, HostCache] = {}
        self._host_rows: dict[int, torch.Tensor] = {}
        self._host_bytes: dict[int, torch.Tensor] = {}
        self.layer_bytes = plan.kv.groups[0].layer_bytes
        """Bytes of one layer in a block."""
        shape = 2, spec.num_key_value_heads, plan.block_size, spec.head_dim
        for group in plan.kv.groups:
            raw = device.empty(group.num_gpu_blocks * group.block_bytes)
            tensor = raw.view(TORCH_DTYPES[plan.dtype])
            tensor = tensor.view(group.num_gpu_blocks, len(group.layers), *shape)
            self.tensors.append(tensor)
            self.blocks.append(raw.view(group.num_gpu_blocks, group.block_bytes))
            for place, layer in enumerate(group.layers):
                self._layers[layer] = tensor[:, place, 0], tensor[:, place, 1]
        for group, host in zip(plan.kv.groups, hosts, strict=True) if hosts else ():
            if not group.in_place or host.in_place is None:
                continue
            tensor = host.in_place.view(self.tensor.dtype).view(-1, *self.tensor.shape[1:])
            words = host.in_place.view(torch.int32).view(host.num_pinned, len(group.layers), -1)
            parts = host.pinned.view(host.num_pinned, len(group.layers), -1)
            for place, layer in enumerate(group.layers):
                self._host_layers[layer] = HostCache(tensor[:, place, 0], tensor[:, place, 1])
                self._host_rows[layer] = words[:, place]
                self._host_bytes[layer] = parts[:, place]

    @property
    def tensor(self) -> torch.Tensor:
        """The first group's."""
        return self.tensors[0]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views [B, K, P, H] of one layer's keys and values."""
        return self._layers[index]

    def host_layer(self, index: int) -> HostCache | None:
        """Return the same of host blocks; None where compute reaches none of that layer."""
        return self._host_layers.get(index)

    def host_rows(self, index: int) -> torch.Tensor:
        """Return one layer of all host blocks that compute reaches, int32 [C, words], strided.

        Raises:
            KeyError: It reaches none of that layer.
        """
        return self._host_rows[index]

    def host_bytes(self, index: int) -> torch.Tensor:
        """Return the same as a copy engine takes it, uint8 [C, bytes] on the CPU, strided.

        Raises:
            KeyError: Compute reaches none of that layer.
        """
        return self._host_bytes[index]

    @property
    def host_layers(self) -> list[int]:
        """Layers of whose host blocks compute reaches some, in order."""
        return sorted(self._host_layers)

    def close(self) -> None:
        """Release the memory."""
        self._layers, self.tensors, self.blocks = {}, [], []
        self._host_layers, self._host_rows, self._host_bytes = {}, {}, {}


class Staging:
    """Copies blocks through one pinned buffer, so that no step waits for pageable memory.

    One thread works off what is submitted, in order.
    """

    def __init__(self, device: Device, gpu: torch.Tensor, pageable: torch.Tensor) -> None:
        block_bytes = gpu.shape[1]
        self._gpu, self._pageable = gpu, pageable
        self._stream = device.copy_stream()
        shape = (staging_blocks(block_bytes), block_bytes)
        self._buffer = device.upload_buffer(shape, torch.uint8)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="block-staging")

    def submit(
        self, pairs: Sequence[Pair], ready: Callable[[], object], *, load: bool
    ) -> Future[None]:
        """Copy blocks to the host, or from there (`load`); done when the content has arrived.

        `ready` is called on the thread, and returns when the copies may begin.
        """
        return self._thread.submit(self._copy, list(pairs), ready, load)

    def close(self) -> None:
        """Wait for what was submitted and end the thread."""
        self._thread.shutdown(wait=True)

    def _copy(self, pairs: list[Pair], ready: Callable[[], object], load: bool) -> None:
        ready()
        size = self._buffer.shape[0]
        for first in range(0, len(pairs), size):
            part = pairs[first : first + size]
            if load:
                for place, (_, host) in enumerate(part):
                    self._buffer[place].copy_(self._pageable[host])
            for place, (block_id, _) in enumerate(part):
                block, staged = self._gpu[block_id], self._buffer[place]
                self._stream.copy(*((block, staged) if load else (staged, block)))
            self._stream.wait(self._stream.record())
            if not load:
                for place, (_, host) in enumerate(part):
                    self._pageable[host].copy_(self._buffer[place])


@dataclass(kw_only=True)
class MoverStats:
    """Bytes moved since the mover was made, counted when they are enqueued."""

    stored_bytes: int = 0
    """From the GPU to the host."""
    loaded_bytes: int = 0
    """From the host to the GPU."""
    dma_bytes: int = 0
    """Both ways, by DMA."""
    kernel_bytes: int = 0
    """By one kernel for many blocks."""
    staged_bytes: int = 0
    """Through pinned memory to or from pageable memory."""
    copies: int = 0
    """Copies and kernels that were enqueued."""


class _StreamPoint:
    """A point on a copy stream."""

    def __init__(self, stream: CopyStream) -> None:
        self.stream = stream
        self.event: Any = stream.record()

    def is_done(self) -> bool:
        return self.stream.is_done(self.event)

    def wait(self) -> None:
        self.stream.wait(self.event)


class _FuturePoint:
    """The end of a staged copy; its errors are raised where it is asked for."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def is_done(self) -> bool:
        return self._future.done() and self._future.result() is None

    def wait(self) -> None:
        self._future.result()


_Point = _StreamPoint | _FuturePoint


class _IdSlots:
    """Lists of block numbers on the device, reused when the kernel that reads them is done."""

    def __init__(self, device: Device, stream: CopyStream, most: int) -> None:
        shape = (ID_SLOTS, 2, most)
        self._host = device.upload_buffer(shape, torch.int64)
        self._array = self._host.numpy()
        raw = device.empty(self._host.numel() * 8)
        self._device = raw.view(torch.int64).view(shape)
        self._stream = stream
        self._users: list[_StreamPoint | None] = [None] * ID_SLOTS
        self._next = 0

    def launch(
        self, dst: torch.Tensor, src: torch.Tensor, dst_ids: Sequence[int], src_ids: Sequence[int]
    ) -> None:
        """Enqueue the copy of blocks; waits for the slot's last user if that is still under way."""
        slot, count = self._next, len(dst_ids)
        self._next = (slot + 1) % ID_SLOTS
        user = self._users[slot]
        if user is not None and not user.is_done():
            user.wait()
        host, ids = self._host[slot], self._device[slot]
        self._array[slot, 0, :count] = dst_ids
        self._array[slot, 1, :count] = src_ids
        self._stream.copy(ids, host)
        self._stream.run(partial(kv.copy_blocks, dst, src, ids[0, :count], ids[1, :count]))
        self._users[slot] = _StreamPoint(self._stream)


class BlockMover:
    """Copies blocks on one stream for each direction.

    Moves are enqueued in pieces, in the order of their decision: one piece by `submit`, and those
    that a step waits for; the others by `enqueue_more`, as enqueuing the thousand blocks of a long
    prefix at once takes longer than a step. A piece runs behind all compute enqueued before the
    `submit` that took it and behind the moves that its moves name; so a store reads what was
    computed, and a load overwrites nothing that is still read. Neighbouring blocks that stay
    neighbours and are large enough together go by DMA, the others by one kernel. Nothing waits on
    the caller's thread, except that a move that names a staged one, or a step that waits for one,
    does, and that the numbers of a piece of small blocks wait for a place among 64.

    Blocks 0 to G - 1 are those of `gpu`, uint8 [G, block_bytes], contiguous, on the device; those
    of `host` follow.
    """

    def __init__(
        self,
        device: Device,
        gpu: torch.Tensor,
        host: HostBlocks,
        *,
        dma_run_bytes: int,
    ) -> None:
        self.stats = MoverStats()
        self._device, self._gpu, self._host = device, gpu, host
        self._num_gpu, self._block_bytes = gpu.shape
        self._dma_run_bytes = dma_run_bytes
        self._piece = piece_moves(self._block_bytes, min(self._num_gpu, host.num_blocks))
        kinds: tuple[MoveKind, ...] = "store", "load"
        self._streams = {kind: device.copy_stream() for kind in kinds}
        self._slots: dict[MoveKind, _IdSlots] = {}
        # Words of int32: a kernel moves nothing smaller.
        if host.in_place is not None and self._block_bytes % 4 == 0:
            self._words = gpu.view(torch.int32), host.in_place.view(torch.int32)
            if self._block_bytes < dma_run_bytes:
                self._slots = {
                    kind: _IdSlots(device, stream, self._piece)
                    for kind, stream in self._streams.items()
                }
        self._staging = Staging(device, gpu, host.pageable) if host.num_pageable else None
        self._queued: dict[int, Move] = {}
        """Moves that were submitted and not enqueued, oldest first."""
        self._points: dict[int, _Point] = {}
        """Where each enqueued move ends."""
        self._under_way: dict[str, deque[tuple[_Point, list[int]]]] = {}

    def submit(self, batch: MoveBatch) -> None:
        """Take a batch, and let the compute stream wait for the moves that it names.

        Enqueues a piece, and what must be before the named moves are. A batch whose submission
        failed may be submitted again, or one with more moves beside them, with nothing submitted or
        polled in between: what is enqueued of it stays so.

        Stream: behind what is enqueued on the current stream; what follows there waits.
        """
        new = (m for m in batch.moves if m.move_id not in self._points)
        moves = {move.move_id: move for move in new if move.move_id not in self._queued}
        for kind, stream in self._streams.items():
            if any(move.kind == kind for move in moves.values()):
                stream.after_compute()
        self._queued.update(moves)
        self._enqueue_through(batch.waits)
        if moves:
            self.enqueue_more()
        for point in self._points_of(batch.waits):
            if isinstance(point, _StreamPoint):
                point.stream.compute_after(point.event)
            else:
                point.wait()

    def enqueue_more(self) -> None:
        """Enqueue the next piece of what was submitted, if any is left.

        Stream: behind what was enqueued on the current stream when it was submitted.
        """
        for group in _levels(list(islice(self._queued.values(), self._piece))):
            self._enqueue(group)

    def poll(self) -> list[int]:
        """Return moves that were found done, each once; waits for nothing."""
        done: list[int] = []
        for queue in self._under_way.values():
            while queue and queue[0][0].is_done():
                point, ids = queue.popleft()
                # Not those that were enqueued once more after an interrupt.
                done += [move_id for move_id in ids if self._points.get(move_id) is point]
        for move_id in done:
            del self._points[move_id]
            self._queued.pop(move_id, None)
        return done

    def wait(self, move_ids: Iterable[int]) -> None:
        """Block until moves are done; `poll` then returns them. Unknown ones are done."""
        move_ids = tuple(move_ids)
        self._enqueue_through(move_ids)
        for point in self._points_of(move_ids):
            point.wait()

    def wait_next(self) -> None:
        """Block until one more piece is done, of loads where any is under way; `poll` returns it.

        All that was submitted is enqueued first. Returns at once where nothing is under way.
        """
        self._enqueue_through(self._queued)
        for name in ("load", "staged", "store"):
            queue = self._under_way.get(name)
            if queue:
                queue[0][0].wait()
                return

    def warm_up(self) -> None:
        """Copy the first block there and back by kernel, so that it is compiled and loaded.

        Before the first move: contents change.

        Stream: what follows on the current stream waits for it.
        """
        for kind in self._slots:
            self._launch(kind, [0], [0])
            stream = self._streams[kind]
            stream.compute_after(stream.record())

    @property
    def num_under_way(self) -> int:
        """Moves that `poll` has not returned."""
        return len(self._points) + len(self._queued)

    @property
    def num_queued(self) -> int:
        """Moves that were submitted and not enqueued."""
        return len(self._queued)

    @property
    def is_loading(self) -> bool:
        """Whether some of them may be loads: copies to the GPU, or staged ones."""
        queued = any(move.kind == "load" for move in self._queued.values())
        return queued or bool(self._under_way.get("load") or self._under_way.get("staged"))

    def close(self) -> None:
        """Wait for all moves that were enqueued, and end the staging thread."""
        self._queued.clear()
        try:
            self.wait(list(self._points))
        finally:
            if self._staging is not None:
                self._staging.close()
            self._points.clear()
            self._under_way.clear()

    def _enqueue_through(self, move_ids: Iterable[int]) -> None:
        """Enqueue pieces until none of these moves is left."""
        last = max((move_id for move_id in move_ids if move_id in self._queued), default=None)
        while last in self._queued:
            self.enqueue_more()

    def _points_of(self, move_ids: Iterable[int]) -> list[_Point]:
        """Return where these moves end, each point once."""
        return list(dict.fromkeys(self._points[i] for i in move_ids if i in self._points))

    def _enqueue(self, group: list[Move]) -> None:
        """Enqueue moves of one kind that do not depend on each other."""
        kind = group[0].kind
        first = self._num_gpu + self._host.num_pinned
        pinned = [move for move in group if max(move.src, move.dst) < first]
        staged = [move for move in group if max(move.src, move.dst) >= first]
        total = len(group) * self._block_bytes
        if kind == "store":
            self.stats.stored_bytes += total
        else:
            self.stats.loaded_bytes += total
        if pinned:
            self._enqueue_pinned(kind, pinned)
        if staged:
            self._enqueue_staged(kind, staged)

    def _enqueue_pinned(self, kind: MoveKind, moves: list[Move]) -> None:
        stream = self._streams[kind]
        for point in self._points_of(chain.from_iterable(move.after for move in moves)):
            if isinstance(point, _FuturePoint):
                point.wait()
            elif point.stream is not stream:
                stream.after(point.stream, point.event)
        pairs = sorted(self._pair(move) for move in moves)
        small: list[Pair] = []
        large: list[list[Pair]] = []
        for run in _runs(pairs):
            if self._slots and len(run) * self._block_bytes < self._dma_run_bytes:
                small += run
            else:
                large.append(run)
        if large:
            self._copy_runs(kind, large)
        if small:
            self._copy_small(kind, small)
        self._note(kind, _StreamPoint(stream), moves)

    def _enqueue_staged(self, kind: MoveKind, moves: list[Move]) -> None:
        assert self._staging is not None
        named = self._points_of(chain.from_iterable(move.after for move in moves))
        mark = self._device.mark()

        def ready() -> None:
            mark.wait()
            for point in named:
                point.wait()

        first = self._host.num_pinned
        pairs = [(gpu, host - first) for gpu, host in map(self._pair, moves)]
        future = self._staging.submit(pairs, ready, load=kind == "load")
        self.stats.staged_bytes += len(moves) * self._block_bytes
        self._note("staged", _FuturePoint(future), moves)

    def _copy_runs(self, kind: MoveKind, runs: list[list[Pair]]) -> None:
        copies = []
        for run in runs:
            (gpu_id, host_id), count = run[0], len(run)
            gpu = self._gpu[gpu_id : gpu_id + count]
            host = self._host.pinned[host_id : host_id + count]
            copies.append((host, gpu) if kind == "store" else (gpu, host))
            self.stats.dma_bytes += count * self._block_bytes
        self._streams[kind].copy_all(copies)
        self.stats.copies += len(copies)

    def _copy_small(self, kind: MoveKind, pairs: list[Pair]) -> None:
        self._launch(kind, [gpu for gpu, _ in pairs], [host for _, host in pairs])
        self.stats.kernel_bytes += len(pairs) * self._block_bytes
        self.stats.copies += 1

    def _launch(self, kind: MoveKind, gpu_ids: list[int], host_ids: list[int]) -> None:
        gpu, host = self._words
        if kind == "store":
            self._slots[kind].launch(host, gpu, host_ids, gpu_ids)
        else:
            self._slots[kind].launch(gpu, host, gpu_ids, host_ids)

    def _pair(self, move: Move) -> Pair:
        if move.kind == "store":
            return move.src, move.dst - self._num_gpu
        return move.dst, move.src - self._num_gpu

    def _note(self, queue: str, point: _Point, moves: list[Move]) -> None:
        ids = [move.move_id for move in moves]
        self._points.update(dict.fromkeys(ids, point))
        self._under_way.setdefault(queue, deque()).append((point, ids))
        for move_id in ids:  # at once, so that what fails after them does not enqueue them again
            del self._queued[move_id]


def _levels(moves: Sequence[Move]) -> list[list[Move]]:
    """Group moves by kind, those that others wait for in earlier groups."""
    level: dict[int, int] = {}
    groups: dict[tuple[int, MoveKind], list[Move]] = {}
    for move in moves:
        behind = [level[other] for other in move.after if other in level]
        level[move.move_id] = max(behind, default=-1) + 1
        groups.setdefault((level[move.move_id], move.kind), []).append(move)
    return [groups[key] for key in sorted(groups)]


def _runs(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Cut sorted pairs into runs in which both numbers count up by one."""
    runs: list[list[Pair]] = []
    for gpu, host in pairs:
        if runs and runs[-1][-1] == (gpu - 1, host - 1):
            runs[-1].append((gpu, host))
        else:
            runs.append([(gpu, host)])
    return runs


class HostTier:
    """The host blocks that a plan gives, if any, and a mover for each group once there is a cache.

    Raises:
        CapacityError: The memory cannot be had or pinned; then nothing is kept.
    """

    def __init__(self, plan: MemoryPlan, device: Device) -> None:
        self.blocks: list[HostBlocks] = []
        self.movers: list[BlockMover] = []
        """One for each group; none before `connect`."""
        self._device, self._plan = device, plan.host_kv
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
        if self._plan is None:
            return
        run_bytes = self._plan.dma_run_bytes
        for gpu, host in zip(cache.blocks, self.blocks, strict=True):
            self.movers.append(BlockMover(self._device, gpu, host, dma_run_bytes=run_bytes))

    def warm_up(self) -> None:
        """Compile and load what moves blocks; before the first move."""
        for mover in self.movers:
            mover.warm_up()

    def moved(self) -> MoverStats:
        """Return what was moved since the load, all groups together."""
        parts = [vars(mover.stats) for mover in self.movers]
        names = vars(MoverStats())
        return MoverStats(**{name: sum(part[name] for part in parts) for name in names})

    def num_bytes(self) -> tuple[int, int]:
        """Return pinned and pageable bytes."""
        return (
            sum(blocks.pinned.numel() for blocks in self.blocks),
            sum(blocks.pageable.numel() for blocks in self.blocks),
        )

    def seconds(self) -> tuple[float, float]:
        """Return the seconds that touching and that registering memory took."""
        buffers = [buffer for blocks in self.blocks for buffer in blocks.buffers]
        return sum(buffer.touch_s for buffer in buffers), sum(buffer.pin_s for buffer in buffers)

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
