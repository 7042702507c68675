"""Read safetensors straight into their planned place, in pieces, with threads reading ahead."""

import json
import math
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from engine.clock import PhaseClock
from engine.device.base import Device
from engine.device.host import chunks, num_threads
from engine.errors import CheckpointError
from engine.plan import LOAD_STAGING_BYTES
from engine.spec import ModelSpec, ParamSpec

PIECE_BYTES = 8 * 2**20
FILE_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
}


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies on disk."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the folder's safetensors files by name.

    Raises:
        CheckpointError: No file, a missing shard, a damaged header or an unsupported dtype.
    """
    found: dict[str, StoredTensor] = {}
    for file in _files(folder):
        if not file.is_file():
            raise CheckpointError(
                f"{folder}: expected the shard {file.name}, found none. Fetch it."
            )
        found.update(_read_header(file))
    return found


def _files(folder: Path) -> list[Path]:
    """The files of an index, else model.safetensors, else every safetensors file."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            return [folder / name for name in names]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{index}: expected a weight_map of file names, got {error!r}. Fetch it again."
            ) from error
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder}: expected *.safetensors files, found none. Convert the checkpoint to "
            "safetensors, or use load_format=dummy for random weights."
        )
    return files


def _read_header(file: Path) -> dict[str, StoredTensor]:
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > size:
                raise ValueError("header longer than the file")
            header = json.loads(stream.read(length))
        found = {
            name: _stored(file, size, 8 + length, name, entry)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file}: not a safetensors file ({error!r}). Fetch it again."
        ) from error
    _check_apart(file, found)
    return found


def _check_apart(file: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Refuse a file in which two tensors share bytes, which the format does not allow."""
    in_order = sorted(stored.items(), key=lambda item: (item[1].start, item[1].num_bytes))
    for (first, one), (second, other) in pairwise(in_order):
        if one.start + one.num_bytes > other.start:
            raise CheckpointError(
                f"{file}: {first} and {second} share bytes of the file. Fetch it again."
            )


def _stored(
    file: Path, file_bytes: int, data_start: int, name: str, entry: Mapping[str, Any]
) -> StoredTensor:
    """Check one entry of a header against itself and the file's size."""
    if entry["dtype"] not in FILE_DTYPES:
        raise CheckpointError(
            f"{file}: {name} has dtype {entry['dtype']}, expected one of {', '.join(FILE_DTYPES)}. "
            "Quantised checkpoints are not supported."
        )
    dtype, shape = FILE_DTYPES[entry["dtype"]], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise ValueError(f"{name}: expected whole numbers in shape and data_offsets")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{file}: {name} of shape {list(shape)} in {entry['dtype']} takes "
            f"{math.prod(shape) * dtype.itemsize} bytes, the header says {begin} to {end}. "
            "Fetch it again."
        )
    if data_start + end > file_bytes:
        raise CheckpointError(
            f"{file}: {name} ends at byte {data_start + end}, the file has {file_bytes}. "
            "It is cut short; fetch it again."
        )
    return StoredTensor(file, dtype, shape, data_start + begin, end - begin)


def check_checkpoint(stored: Mapping[str, StoredTensor], spec: ModelSpec, folder: Path) -> None:
    """Compare names and shapes with the model's sizes.

    Raises:
        CheckpointError: A tensor is missing, has another shape, or is unknown.
    """
    wanted = {part.name: part for tensor in spec.tensors() for part in tensor.parts}
    missing = sorted(set(wanted) - set(stored))
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]}. "
            "Does config.json belong to these files?"
        )
    for name, part in wanted.items():
        if stored[name].shape != part.shape:
            raise CheckpointError(
                f"{folder}: {name} has shape {list(stored[name].shape)}, config.json says "
                f"{list(part.shape)}."
            )
    ignored = {"lm_head.weight"} if spec.tie_word_embeddings else set()
    extra = sorted(
        name
        for name in set(stored) - set(wanted) - ignored
        if not name.endswith("rotary_emb.inv_freq")
    )
    if extra:
        raise CheckpointError(
            f"{folder}: {len(extra)} tensors do not belong to a {spec.model_type} model, the first "
            f"is {extra[0]}."
        )


@dataclass(frozen=True)
class _Piece:
    """A run of bytes of one tensor and where it goes."""

    source: StoredTensor
    offset: int
    num_bytes: int
    target: torch.Tensor
    """Flat, of the target's dtype."""

    @property
    def is_direct(self) -> bool:
        return self.target.device.type == "cpu" and self.target.dtype == self.source.dtype


def _pieces(
    parameters: Iterable[tuple[ParamSpec, torch.Tensor]], stored: Mapping[str, StoredTensor]
) -> Iterator[_Piece]:
    for spec, target in parameters:
        source, flat = stored[spec.name], target.view(-1)
        width = source.dtype.itemsize
        for start, stop in chunks(source.num_bytes, PIECE_BYTES):
            yield _Piece(source, start, stop - start, flat[start // width : stop // width])


class CheckpointReader:
    """Reads pieces ahead in threads; the caller's thread converts and copies them in order.

    Args:
        device: Whose memory targets may lie in.
        clock: Receives the phases read, convert and copy, and the busy time of reading.
        progress: Called with the bytes of each piece when it is in place.
    """

    def __init__(self, device: Device, clock: PhaseClock, progress: Callable[[int], None]) -> None:
        self._device, self._clock, self._progress = device, clock, progress
        self._files: dict[Path, int] = {}
        self._free: deque[torch.Tensor] = deque()
        self._copying: deque[torch.Tensor] = deque()
        self._reading: deque[tuple[_Piece, torch.Tensor, Future[None]]] = deque()

    def read(
        self,
        parameters: Iterable[tuple[ParamSpec, torch.Tensor]],
        stored: Mapping[str, StoredTensor],
    ) -> None:
        """Fill every parameter; all of them are in place when this returns."""
        pieces = list(_pieces(parameters, stored))
        threads = num_threads()
        if not all(piece.is_direct for piece in pieces):
            for _ in range(min(threads + 2, LOAD_STAGING_BYTES // PIECE_BYTES)):
                self._free.append(self._device.upload_buffer((PIECE_BYTES,), torch.uint8))
        with ExitStack() as stack:
            for file in {piece.source.file for piece in pieces}:
                self._files[file] = os.open(file, os.O_RDONLY)
                stack.callback(os.close, self._files[file])
            pool = stack.enter_context(ThreadPoolExecutor(threads))
            for piece in pieces:
                raw = self._buffer(piece)
                self._reading.append((piece, raw, pool.submit(self._fetch, piece, raw)))
                if len(self._reading) > 2 * threads:
                    self._place_oldest()
            while self._reading:
                self._place_oldest()
            self._recycle()

    def _buffer(self, piece: _Piece) -> torch.Tensor:
        """Return where a piece is read to: its place, or a staging buffer."""
        if piece.is_direct:
            return piece.target.view(torch.uint8)
        while not self._free:
            if self._reading:
                self._place_oldest()
            self._recycle()
        return self._free.popleft()

    def _fetch(self, piece: _Piece, raw: torch.Tensor) -> None:
        """Read a piece, in a reader thread."""
        begin = perf_counter()
        view, done = memoryview(raw.numpy())[: piece.num_bytes], 0  # type: ignore[arg-type]
        at = piece.source.start + piece.offset
        while done < piece.num_bytes:
            got = os.preadv(self._files[piece.source.file], [view[done:]], at + done)
            if got == 0:
                raise CheckpointError(f"{piece.source.file}: ended early. Fetch it again.")
            done += got
        self._clock.add_busy("read", perf_counter() - begin)

    def _place_oldest(self) -> None:
        """Wait for the oldest piece and put it in its place."""
        piece, raw, future = self._reading.popleft()
        with self._clock.phase("read"):
            future.result()
        if not piece.is_direct:
            values = raw[: piece.num_bytes].view(piece.source.dtype)
            if values.dtype != piece.target.dtype:
                with self._clock.phase("convert"):
                    values = values.to(piece.target.dtype)
            with self._clock.phase("copy"):
                piece.target.copy_(values, non_blocking=True)
            self._copying.append(raw)
        self._progress(piece.num_bytes)

    def _recycle(self) -> None:
        """Wait for the copies in flight and free their buffers."""
        if self._copying:
            with self._clock.phase("copy"):
                self._device.synchronize()
            self._free.extend(self._copying)
            self._copying.clear()
