"""Fill weights in their planned place: every thread reads, converts, uploads; or with noise."""

import hashlib
import math
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch

from engine.asked.offload import warn_caller
from engine.clock import PhaseClock
from engine.device.base import TORCH_DTYPES, CopyStream, Device, HostBuffer, chunks, worker_pool
from engine.device.machine import num_threads
from engine.errors import CheckpointError, PinningError, UnpackableError
from engine.model.checkpoint import CHECKED_BYTES, StoredTensor
from engine.model.formats import (
    ALIGNMENT,
    DUMMY_POOL_SIZE,
    DUMMY_STD,
    PACK_BATCH_BYTES,
    Packing,
    ParamSpec,
    TensorFormats,
    TensorSpec,
    UnpackedFormat,
    align,
)
from engine.model.schemes import JSON
from engine.plan.sizes import BUFFERS_PER_THREAD, PIECE_BYTES, RUN_BYTES
from engine.weights import layouts
from engine.weights.store import OPERATORS

PROGRESS_S = 0.05
"""Time between two reports of progress."""
KINDS = ("read", "convert", "copy")
"""Kinds of work of one thread."""


@dataclass(frozen=True)
class _Piece:
    """A run of bytes of one tensor and where it goes."""

    name: str
    source: StoredTensor
    offset: int
    num_bytes: int
    target: torch.Tensor
    """Flat, of the target's dtype."""

    @property
    def file(self) -> Path:
        return self.source.file

    @property
    def position(self) -> int:
        return self.source.start + self.offset

    @property
    def check(self) -> int | None:
        """The checksum that its bytes must have, where one is known."""
        checks = self.source.checks
        return checks[self.offset // CHECKED_BYTES] if checks else None

    @property
    def on_host(self) -> bool:
        return self.target.device.type == "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """Element type in the file."""
        return _dtype(self.source)

    @property
    def converts(self) -> bool:
        return self.target.dtype != self.dtype

    @property
    def is_direct(self) -> bool:
        """Whether it can be read into its place."""
        return self.on_host and not self.converts


def _dtype(source: StoredTensor) -> torch.dtype:
    found = getattr(torch, source.dtype)
    assert isinstance(found, torch.dtype)
    return found


def _pieces(
    parameters: Iterable[tuple[ParamSpec, torch.Tensor]],
    stored: Mapping[str, StoredTensor],
    piece_bytes: int,
) -> Iterator[_Piece]:
    """Cut parameters so that a piece, and beside it what it is converted to, fit a buffer."""
    for spec, target in parameters:
        source, flat = stored[spec.name], target.view(-1)
        dtype = _dtype(source)
        width = dtype.itemsize
        room = width if flat.dtype == dtype else width + flat.dtype.itemsize
        step = CHECKED_BYTES if source.checks else max(1, piece_bytes // room) * width
        size = flat.numel() * width
        if spec.dtype == JSON:
            size = min(size, source.num_bytes)
        for start, stop in chunks(size, step):
            begin, part = spec.first * width + start, flat[start // width : stop // width]
            yield _Piece(spec.name, source, begin, stop - start, part)


def _runs(pieces: Iterable[_Piece], run_bytes: int) -> Iterator[list[_Piece]]:
    """Yield what one thread reads at a time: each file in its own order, the files in turn."""
    by_file: dict[Path, list[list[_Piece]]] = {}
    room = 0
    for piece in sorted(pieces, key=attrgetter("file", "position")):
        runs = by_file.setdefault(piece.file, [])
        if not runs or room <= 0:
            runs.append([])
            room = run_bytes
        runs[-1].append(piece)
        room -= piece.num_bytes
    for in_turn in zip_longest(*by_file.values()):
        yield from (run for run in in_turn if run is not None)


@dataclass(frozen=True)
class _Shared:
    """What the threads of one load share."""

    stream: CopyStream
    """Where copies to the GPU are enqueued."""
    runs: deque[list[_Piece]]
    order: threading.Lock = field(default_factory=threading.Lock)
    """Held while a copy and its event are enqueued."""
    stop: threading.Event = field(default_factory=threading.Event)


class _OneThread:
    """What one thread holds: its own descriptors, whose readahead no other disturbs, and buffers.

    Args:
        shared: With the other threads.
        buffers: uint8 host tensors that pieces are read into, used in turn.
    """

    def __init__(self, shared: _Shared, buffers: list[torch.Tensor]) -> None:
        self._shared, self._stream = shared, shared.stream
        self._buffers: deque[tuple[torch.Tensor, Any]] = deque((raw, None) for raw in buffers)
        self._files: dict[Path, int] = {}
        self._stack = ExitStack()
        self.placed_bytes = 0
        self.damaged: set[str] = set()
        """Tensors that have checksums, and bytes that differ from them or cannot be read."""
        self.spent_s = dict.fromkeys(KINDS, 0.0)

    def work(self) -> None:
        """Bring run after run until there are none."""
        shared = self._shared
        try:
            while shared.runs and not shared.stop.is_set():
                try:
                    run = shared.runs.popleft()
                except IndexError:  # another thread took the last
                    return
                for piece in run:
                    if shared.stop.is_set():
                        return
                    self._bring(piece)
        except BaseException:
            shared.stop.set()
            raise
        finally:
            self._stack.close()

    def _bring(self, piece: _Piece) -> None:
        """Read a piece and put it into its place, or enqueue that."""
        try:
            if piece.is_direct:
                self._read(piece, piece.target.view(torch.uint8))
            else:
                self._bring_through_buffer(piece)
            self.placed_bytes += piece.num_bytes
        except OSError as error:
            raise CheckpointError(
                f"{piece.file}: reading {piece.num_bytes} bytes at {piece.position} failed "
                f"({error.strerror}). Check the disk, or fetch the file again."
            ) from error

    def _bring_through_buffer(self, piece: _Piece) -> None:
        raw, event = self._buffers.popleft()
        if event is not None:
            with self._spend("copy"):
                self._stream.wait(event)
        self._read(piece, raw)
        values = raw[: piece.num_bytes].view(piece.dtype)
        if piece.on_host:
            with self._spend("convert"):
                piece.target.copy_(values)
            self._buffers.append((raw, None))
            return
        if piece.converts:
            with self._spend("convert"):
                size = piece.target.numel() * piece.target.element_size()
                values = raw[raw.numel() - size :].view(piece.target.dtype).copy_(values)
        with self._spend("copy"), self._shared.order:
            self._stream.copy(piece.target, values)
            event = self._stream.record()
        self._buffers.append((raw, event))

    def _read(self, piece: _Piece, raw: torch.Tensor) -> None:
        part = raw[: piece.num_bytes]
        with self._spend("read"):
            if piece.check is None:
                _read_into(self._open(piece.file), piece.file, piece.position, part)
                return
            try:
                _read_into(self._open(piece.file), piece.file, piece.position, part)
                is_whole = piece.check == zlib.crc32(part.numpy())  # type: ignore[arg-type]
            except (OSError, CheckpointError):
                is_whole = False
            if not is_whole:
                self.damaged.add(piece.name)

    def _open(self, path: Path) -> int:
        found = self._files.get(path)
        if found is None:
            found = self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._stack.callback(os.close, found)
            os.posix_fadvise(found, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return found

    @contextmanager
    def _spend(self, kind: str) -> Iterator[None]:
        begin_s = perf_counter()
        yield
        self.spent_s[kind] += perf_counter() - begin_s


def _read_into(descriptor: int, file: Path, position: int, raw: torch.Tensor) -> None:
    """Fill a uint8 host tensor from a file."""
    view, done = memoryview(raw.numpy()), 0  # type: ignore[arg-type]
    while done < len(view):
        got = os.preadv(descriptor, [view[done:]], position + done)
        if got == 0:
            raise CheckpointError(f"{file}: ended early. Fetch it again.")
        done += got


Fill = Callable[[Iterable[tuple[ParamSpec, torch.Tensor]]], object]
"""Brings values into tensors, which later work of the compute stream may read."""


class _Block(NamedTuple):
    """Rows of a tensor that are packed at a time."""

    tensor: TensorSpec
    start: int
    stop: int


T = TypeVar("T")


def batches(items: Iterable[tuple[T, int]], most_bytes: int) -> Iterator[list[T]]:
    """Yield items in order, each given with its bytes: as many at a time as have room, or one."""
    batch: list[T] = []
    room = most_bytes
    for item, num_bytes in items:
        if batch and num_bytes > room:
            yield batch
            batch, room = [], most_bytes
        batch.append(item)
        room -= num_bytes
    if batch:
        yield batch


def pack(
    formats: TensorFormats,
    packed: Iterable[tuple[TensorSpec, Mapping[str, torch.Tensor]]],
    fill: Fill,
    device: Device,
    clock: PhaseClock,
) -> dict[str, int]:
    """Make the packed tensors: some rows are brought to the GPU and packed there, then others.

    Args:
        formats: Formats of the model.
        packed: Which, with the arrays to write, on any device.
        fill: Called with rows of parameters.
        device: What packs.
        clock: Receives the phase convert.

    Returns:
        By tensor, how many elements are kept whole.

    Raises:
        UnpackableError: Some have values that their format cannot keep; names them all. The others
            are made.
    """
    arrays = dict(packed)
    packings: dict[str, Packing] = {
        tensor.name: form.packing(tensor, arrays[tensor], OPERATORS)
        for tensor, form in formats.packed(arrays)
    }
    if not packings:
        return {}
    size = formats.batch_bytes(arrays)
    with device.scratch(size, formats.packing_bytes(arrays) - size) as raw:
        scratch = raw.view(TORCH_DTYPES[formats.default.name])
        blocks = (
            (_Block(tensor, start, stop), formats.block_bytes(tensor, form))
            for tensor, form in formats.packed(arrays)
            for start, stop in chunks(tensor.shape[0], form.block_rows(tensor))
        )
        for batch in batches(blocks, size):
            rows, at = [], 0
            for tensor, start, stop in batch:
                shape = stop - start, *tensor.shape[1:]
                rows.append(scratch[at : at + math.prod(shape)].view(shape))
                at += math.prod(shape)
            fill(
                (part, target[start:stop])
                for block, target in zip(batch, rows, strict=True)
                for part, start, stop in block.tensor.row_parts(block.start, block.stop)
            )
            with clock.phase("convert"):
                for block, values in zip(batch, rows, strict=True):
                    packings[block.tensor.name].add(values)
        with clock.phase("convert"):
            reasons = {name: reason for name, x in packings.items() if (reason := x.finish())}
            device.synchronize()
    escapes = {name: x.num_escapes for name, x in packings.items() if name not in reasons}
    if reasons:
        raise UnpackableError(reasons, escapes)
    return escapes


def unpack(
    unpacked: Iterable[tuple[TensorSpec, UnpackedFormat, Mapping[str, torch.Tensor]]],
    fill: Fill,
    device: Device,
    clock: PhaseClock,
) -> None:
    """Make tensors of other arrays of a checkpoint, which are brought to the GPU for it.

    Args:
        unpacked: Which, with their formats and the arrays to write, on any device.
        fill: Called with those arrays.
        device: What makes them.
        clock: Receives the phase convert.

    Raises:
        CheckpointError: The arrays of a tensor contradict each other.
    """
    todo = [(source, views) for tensor, form, views in unpacked for source in form.sources(tensor)]
    if not todo:
        return
    most = max(source.num_bytes for source, _ in todo)
    size = max(most, min(PACK_BATCH_BYTES, sum(source.num_bytes for source, _ in todo)))
    with device.scratch(size, max(source.scratch_bytes for source, _ in todo)) as raw:
        for batch in batches(((each, each[0].num_bytes) for each in todo), size):
            arrays, at = [], 0
            for source, _ in batch:
                found = {}
                for suffix, part in source.parameters:
                    stored = source.dtype_of(part)
                    dtype = torch.uint8 if stored == JSON else getattr(torch, stored)
                    num_bytes = part.numel * dtype.itemsize
                    found[suffix] = raw[at : at + num_bytes].view(dtype).view(part.shape)
                    if stored == JSON:  # fewer bytes may be read than there are
                        found[suffix].zero_()
                    at += align(num_bytes)
                arrays.append(found)
            fill(
                (part, found[suffix])
                for (source, _), found in zip(batch, arrays, strict=True)
                for suffix, part in source.parameters
            )
            with clock.phase("convert"):
                for (source, views), found in zip(batch, arrays, strict=True):
                    layouts.make(source, found, views)
                device.synchronize()


class CheckpointReader:
    """Reads in threads, each of which converts and uploads what it has read; closed after the last.

    Args:
        device: The device in whose memory targets may lie.
        clock: Receives the phases read, convert and copy, busy times and bytes.
        progress: Called, by the caller's thread, with bytes that are in place or on their way.
        pin: Whether buffers on the way to the GPU may be pinned.
    """

    def __init__(
        self,
        device: Device,
        clock: PhaseClock,
        progress: Callable[[int], None],
        *,
        pin: bool = True,
    ) -> None:
        self._device, self._clock, self._progress, self._pin = device, clock, progress, pin
        self._buffer: HostBuffer | None = None

    def read(
        self,
        parameters: Iterable[tuple[ParamSpec, torch.Tensor]],
        stored: Mapping[str, StoredTensor],
    ) -> set[str]:
        """Fill every parameter; all of them are in place when this returns.

        Returns:
            Names of parameters whose bytes differ from their checksums or cannot be read.

        Raises:
            CheckpointError: A file cannot be read to its end.
        """
        piece_bytes = max(1, PIECE_BYTES // ALIGNMENT) * ALIGNMENT
        pieces = list(_pieces(parameters, stored, piece_bytes))
        num_bytes = sum(piece.num_bytes for piece in pieces)
        stored_bytes = sum(each.num_bytes for each in stored.values())
        most = max(1, min(num_threads(), -(-stored_bytes // RUN_BYTES)))
        # A part of a model is shared out among the threads too.
        runs = deque(_runs(pieces, min(RUN_BYTES, -(-num_bytes // most))))
        count = max(1, min(num_threads(), len(runs)))
        begin = perf_counter()
        with self._clock.phase("read"), ExitStack() as stack:
            staging = torch.empty(0, dtype=torch.uint8)
            if not all(piece.is_direct for piece in pieces):
                on_host = all(piece.on_host for piece in pieces)
                staging = self._staging(
                    count * BUFFERS_PER_THREAD * piece_bytes, pin=self._pin and not on_host
                )
            stream = self._device.copy_stream()
            stream.after_compute()
            buffers = [staging[start:stop] for start, stop in chunks(staging.numel(), piece_bytes)]
            shared = _Shared(stream, runs)
            hands = [_OneThread(shared, buffers[at::count]) for at in range(count)]
            stack.callback(lambda: stream.wait(stream.record()))  # before the buffers go
            self._run(shared, hands)
            self._account(hands, perf_counter() - begin)
            with self._clock.phase("copy"):
                stream.wait(stream.record())
        self._clock.add_bytes("read", num_bytes)
        return {name for hand in hands for name in hand.damaged}

    def close(self) -> None:
        """Release the buffers."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def _staging(self, num_bytes: int, *, pin: bool) -> torch.Tensor:
        """Buffers that pieces are read into where they cannot be read into place, kept for more."""
        held = self._buffer
        if held is not None and held.tensor.numel() >= num_bytes and (held.pinned or not pin):
            return held.tensor[:num_bytes]
        self.close()
        try:
            self._buffer = self._device.host_buffer(num_bytes, pin=pin)
        except PinningError as error:
            warn_caller(f"fallback: weights are copied to the GPU from pageable memory. {error}")
            self._pin = False
            self._buffer = self._device.host_buffer(num_bytes, pin=False)
        return self._buffer.tensor

    def _run(self, shared: _Shared, hands: list[_OneThread]) -> None:
        """Let every thread take runs until there are none; raise what one of them raised."""
        with worker_pool(len(hands)) as pool:
            futures = [pool.submit(hand.work) for hand in hands]
            told, running = 0, set(futures)
            try:
                while running:
                    # Not after every piece: each wake-up would take the GIL from the readers.
                    _, running = wait(running, timeout=PROGRESS_S)
                    placed = sum(hand.placed_bytes for hand in hands)
                    if placed > told:
                        self._progress(placed - told)
                    told = placed
            finally:
                shared.stop.set()  # where the caller's progress failed, or was interrupted
        for future in futures:
            future.result()

    def _account(self, hands: list[_OneThread], wall_s: float) -> None:
        """Divide the time of the open phase by what the threads did in it."""
        read_s, convert_s, copy_s = (sum(hand.spent_s[kind] for hand in hands) for kind in KINDS)
        self._clock.add_busy("read", read_s)
        self._clock.add_busy("convert", convert_s)
        self._clock.add_busy("copy", copy_s)
        if total_s := read_s + convert_s + copy_s:
            self._clock.part("convert", wall_s * convert_s / total_s)
            self._clock.part("copy", wall_s * copy_s / total_s)


class DummyWeights:
    """Noise: of norms with `norm` added, of biases and weights alone.

    Values are read cyclically from one pool of normal draws at an offset hashed from seed and name.
    Host memory is filled by threads; work for a GPU is enqueued on the current stream.

    Args:
        seed: Changes every value.
        progress: Called with bytes that are in place or enqueued.
        norm: Mean of the weights of norms.
        embedding_scale: What the embedding is multiplied by when it is read; its noise is divided
            by it, because a tied table would otherwise repeat the last token for ever.
    """

    def __init__(
        self,
        seed: int,
        progress: Callable[[int], None],
        norm: float = 1.0,
        embedding_scale: float = 1.0,
    ) -> None:
        self._seed, self._progress = seed, progress
        generator = torch.Generator().manual_seed(seed)
        base = torch.randn(DUMMY_POOL_SIZE, generator=generator, dtype=torch.float32) * DUMMY_STD
        self._values = {"norm": base + norm, "embedding": base / embedding_scale, "other": base}
        self._pools: dict[tuple[torch.device, torch.dtype, str], torch.Tensor] = {}

    def fill(self, parameters: Iterable[tuple[ParamSpec, torch.Tensor]]) -> None:
        """Fill every parameter.

        Args:
            parameters: Name and shape with the tensor to fill, on any device.
        """
        pending: list[tuple[Future[torch.Tensor], int]] = []
        with worker_pool() as workers:
            for spec, target in parameters:
                pool, start = self._pool(spec.name, target), _dummy_offset(spec, self._seed)
                for part, values in _spread(target.view(-1), pool, start):
                    num_bytes = part.numel() * part.element_size()
                    if part.device.type == "cpu":
                        pending.append((workers.submit(part.copy_, values), num_bytes))
                    else:
                        part.copy_(values)
                        self._progress(num_bytes)
            for future, num_bytes in pending:
                future.result()
                self._progress(num_bytes)

    def fill_arrays(
        self,
        name: str,
        dummies: Iterable[tuple[str, float | str]],
        views: Mapping[str, torch.Tensor],
    ) -> None:
        """Fill the arrays of a quantised tensor.

        Args:
            name: Name of the tensor.
            dummies: What each array is, as its format says.
            views: The arrays, on any device.
        """
        for view, value in dummies:
            target = views[view]
            if value == "noise":
                self.fill([(ParamSpec(name, tuple(target.shape)), target)])
                continue
            if value == "bytes":
                self._draw(f"{name}.{view}", target, self._bytes(target.device))
            elif value == "float8":
                draws = target.view(torch.float8_e4m3fn)
                self._draw(name, draws, self._pool(name, draws))
            elif isinstance(value, str) and value in layouts.TABLES:
                target.copy_(torch.tensor(layouts.TABLES[value]))
            elif value == "order":
                target.copy_(torch.arange(target.numel()))
            else:
                target.fill_(float(value))
            self._progress(target.nbytes)

    def _draw(self, name: str, target: torch.Tensor, pool: torch.Tensor) -> None:
        """Fill an array with the draws of a pool."""
        start = _dummy_offset(ParamSpec(name, ()), self._seed)
        for part, values in _spread(target.view(-1), pool, start):
            part.copy_(values)

    def _bytes(self, device: torch.device) -> torch.Tensor:
        """Return random bytes on a device."""
        key = device, torch.uint8, "bytes"
        if key not in self._pools:
            generator = torch.Generator().manual_seed(self._seed)
            drawn = torch.randint(0, 256, (DUMMY_POOL_SIZE,), generator=generator)
            self._pools[key] = drawn.to(torch.uint8).to(device)
        return self._pools[key]

    def _pool(self, name: str, target: torch.Tensor) -> torch.Tensor:
        """Return the draws in the dtype and on the device of a target."""
        key = target.device, target.dtype, _dummy_kind(name)
        if key not in self._pools:
            self._pools[key] = self._values[key[2]].to(target.dtype).to(target.device)
        return self._pools[key]


def _dummy_kind(name: str) -> str:
    if name.endswith("norm.weight"):
        return "norm"
    return "embedding" if name.endswith("embed_tokens.weight") else "other"


def _dummy_offset(spec: ParamSpec, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{spec.name}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") + spec.first) % DUMMY_POOL_SIZE


def _spread(
    flat: torch.Tensor, pool: torch.Tensor, offset: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield parts of a tensor with their values: the pool from `offset` on, then over again."""
    done, start = 0, offset
    while done < flat.numel():
        size = min(DUMMY_POOL_SIZE - start, flat.numel() - done)
        yield flat[done : done + size], pool[start : start + size]
        done, start = done + size, 0
