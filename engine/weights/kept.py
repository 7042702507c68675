"""Codes of packed tensors in files of their own, so that a later load need not pack again.

A checkpoint has one folder of such files, named after where it lies. Each file is a safetensors
file: the arrays of some tensors, `<tensor>.<array>`, and in its metadata their formats, parameters
and checksums, a version, and the identity of the checkpoint that they were made of. A file is
written under another name and renamed, by one process at a time; none is changed afterwards.
Nothing is synced to the disk: what a failure of power leaves is found by size and checksum.
"""

import errno
import fcntl
import hashlib
import json
import math
import operator
import os
import secrets
import shutil
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from engine.device.base import chunks, worker_pool
from engine.errors import EngineError
from engine.model.checkpoint import (
    CHECKED_BYTES,
    StoredTensor,
    checkpoint_files,
    checkpoint_identity,
    parse_header,
)
from engine.model.formats import Format, ParamSpec, TensorFormats, TensorSpec, align
from engine.sealed import GIB

VERSION: Final = "1"
"""Version of the metadata; files of another one are made anew."""
DAMAGED: Final = "is damaged (checksums differ)"
SPARE_BYTES: Final = 256 * 2**20
"""Left free on the disk."""
_DTYPES: Final = {"int32": "I32", "int16": "I16", "uint8": "U8"}
"""Names of torch -> names of safetensors."""
_MOST: Final = 2**32 - 1
_SUFFIX, _PARTIAL, _LOCK = ".safetensors", ".partial", "lock"

Packed = tuple[TensorSpec, Mapping[str, torch.Tensor]]
"""A tensor with its arrays."""


class BusyError(EngineError):
    """Another process writes the copy of the same checkpoint."""


def source_identity(checkpoint: Path) -> str:
    """Return a hash that tells whether a checkpoint's safetensors files are as they were.

    It covers the name of each file, the size, the header (names, dtypes, shapes and places of
    tensors), the last 64 KiB, and the time of the last change in nanoseconds. Other values are not
    read: who changes them and sets the time back is not noticed.

    Raises:
        OSError: A file cannot be read.
        CheckpointError: The index of the files is damaged.
    """
    times = [file.stat().st_mtime_ns for file in checkpoint_files(checkpoint)]
    return hashlib.sha256(f"{checkpoint_identity(checkpoint)} {times}".encode()).hexdigest()


@dataclass(frozen=True)
class KeptTensor:
    """One tensor in a file of a copy."""

    format: str
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    """Names and shapes of its parameters."""
    escapes: int
    views: Mapping[str, StoredTensor]
    """Where its arrays lie."""

    def is_of(self, tensor: TensorSpec, form: Format) -> bool:
        """Whether it is this tensor, of the same parameters in the same format."""
        arrays = {view.name: (view.shape, view.dtype) for view in form.views(tensor)}
        return (
            self.format == form.name
            and self.parts == _parts(tensor)
            and arrays == {name: (x.shape, x.dtype) for name, x in self.views.items()}
        )


class KeptCopy:
    """What was kept of a checkpoint, as its folder has it now.

    Args:
        folder: Folder of the copy; there may be none.
        identity: Identity of the checkpoint.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self.folder, self.identity = folder, identity
        self.tensors: dict[str, KeptTensor] = {}
        self.faults: dict[Path, str] = {}
        """Why a file is of no use, by file."""
        for file in sorted(folder.glob(f"*{_SUFFIX}")):
            try:
                self.tensors |= _read_file(file, identity)
            except _UselessError as error:
                self.faults[file] = str(error)
            except FileNotFoundError:
                continue  # another process has made it anew meanwhile
            except OSError as error:
                self.faults[file] = f"cannot be read ({error.strerror})"
        self.escapes = {name: kept.escapes for name, kept in self.tensors.items()}
        """How many elements of every tensor that was here are kept whole."""

    def holds(self, tensor: TensorSpec, formats: TensorFormats) -> bool:
        """Whether a tensor is here, in its format and of the same parameters."""
        found = self.tensors.get(tensor.name)
        return found is not None and found.is_of(tensor, formats[tensor.name])

    def arrays(
        self, packed: Iterable[Packed], formats: TensorFormats
    ) -> Iterator[tuple[ParamSpec, torch.Tensor, StoredTensor]]:
        """Yield what a reader takes of the tensors that are here: array, place, source."""
        for tensor, views in packed:
            if self.holds(tensor, formats):
                for name, stored in self.tensors[tensor.name].views.items():
                    yield ParamSpec(f"{tensor.name}.{name}", stored.shape), views[name], stored

    def drop(self, tensors: Collection[str], why: str) -> None:
        """Count the files that hold these tensors as being of no use, with all they hold."""
        files = {x.file for name in tensors for x in self.tensors[name].views.values()}
        self.faults |= dict.fromkeys(files, why)
        self.tensors = {
            name: kept
            for name, kept in self.tensors.items()
            if not any(x.file in files for x in kept.views.values())
        }

    def remove_useless(self) -> None:
        """Remove the files of no use.

        Raises:
            OSError: One cannot be removed.
        """
        for file in self.faults:
            file.unlink(missing_ok=True)

    def note(self) -> str:
        """Say which files are of no use and why, in one line; empty where there are none."""
        if not self.faults:
            return ""
        each = "; ".join(f"{file.name} {why}" for file, why in sorted(self.faults.items()))
        return f"kept copy in {self.folder}: {each}. Packed anew from the checkpoint."


class _UselessError(Exception):
    """A file of a copy is not what it should be."""


def _read_file(file: Path, identity: str) -> dict[str, KeptTensor]:
    """Return what one file has; its data is not read."""
    try:
        header, start, size = parse_header(file)
        facts = header.pop("__metadata__")
        version, source, described = facts["version"], facts["source"], facts["tensors"]
        if version != VERSION:
            raise _UselessError(f"is of version {version}, not {VERSION}")
        if source != identity:
            raise _UselessError("is of another state of the checkpoint")
        found = {
            name: _kept(file, header, start, name, entry)
            for name, entry in json.loads(described).items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _UselessError(f"is damaged ({error!r})") from error
    for tensor in found.values():
        if any(view.start + view.num_bytes > size for view in tensor.views.values()):
            raise _UselessError("is damaged (cut short)")
    return found


def _kept(
    file: Path, header: Mapping[str, Any], start: int, name: str, entry: Mapping[str, Any]
) -> KeptTensor:
    dtypes = {theirs: ours for ours, theirs in _DTYPES.items()}
    views = {}
    for view, checks in entry["checks"].items():
        found = header[f"{name}.{view}"]
        begin, end = map(operator.index, found["data_offsets"])
        dtype, shape = dtypes[found["dtype"]], tuple(found["shape"])
        size = math.prod(shape) * int(getattr(torch, dtype).itemsize)
        if begin < 0 or end - begin != size or len(checks) != -(-size // CHECKED_BYTES):
            raise ValueError(f"{name}.{view}: sizes do not agree")
        views[view] = StoredTensor(file, dtype, shape, start + begin, size, tuple(checks))
    parts = tuple((str(part), tuple(shape)) for part, shape in entry["parts"])
    return KeptTensor(entry["format"], parts, operator.index(entry["escapes"]), views)


def _parts(tensor: TensorSpec) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((part.name, part.shape) for part in tensor.parts)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other processes from writing a copy; remove what one that was killed has left.

    Raises:
        BusyError: Another one writes it now.
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BusyError(f"{folder}: another process writes this copy") from error
        for file in folder.glob(f"*{_PARTIAL}"):
            file.unlink(missing_ok=True)
        yield
    finally:
        os.close(lock)


def require_room(folder: Path, num_bytes: int) -> None:
    """Raise OSError where the disk has less room than that and some spare."""
    needed, free = num_bytes + SPARE_BYTES, shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"expected {needed / GIB:.2f} GiB free at {folder}, found {free / GIB:.2f} GiB",
        )


def keep(
    copy: KeptCopy,
    formats: TensorFormats,
    packed: Iterable[Packed],
    escapes: Mapping[str, int],
) -> tuple[int, str]:
    """Write the packed tensors that a copy lacks, and remove files of no use.

    Args:
        copy: The copy as the load found it, without what was damaged.
        formats: Formats of the model.
        packed: All packed tensors of the model, on any device; work on them is done.
        escapes: How many elements of each that was packed are kept whole.

    Returns:
        The bytes written, and why nothing could be, in one line.
    """
    try:
        with alone(copy.folder):
            copy.remove_useless()
            now = KeptCopy(copy.folder, copy.identity)
            lacking = [
                (tensor, views) for tensor, views in packed if not now.holds(tensor, formats)
            ]
            if not lacking:
                return 0, ""
            tensors = [tensor for tensor, _ in lacking]
            require_room(copy.folder, formats.total_bytes(tensors))
            with CopyWriter(copy.folder, copy.identity, formats, tensors) as writer:
                writer.add(lacking, {**copy.escapes, **escapes})
            return writer.num_bytes, ""
    except BusyError:
        return 0, f"kept copy in {copy.folder}: another process is writing it; left to that one."
    except OSError as error:
        return 0, (
            f"kept copy in {copy.folder}: it could not be written ({error.strerror}). The next "
            "load packs again. Free some room there, or set model.keep_lossless=false."
        )


class CopyWriter:
    """Writes one file of a copy: whole under its name, or not at all.

    Args:
        folder: Folder of the copy, held by `alone`.
        identity: Identity of the checkpoint.
        formats: Formats of the model.
        tensors: All that may be added.
    """

    def __init__(
        self, folder: Path, identity: str, formats: TensorFormats, tensors: Iterable[TensorSpec]
    ) -> None:
        self._identity, self._formats = identity, formats
        name = secrets.token_hex(8)
        self._file, self._partial = folder / f"{name}{_SUFFIX}", folder / f"{name}{_PARTIAL}"
        self._added: dict[str, KeptTensor] = {}
        most, self._start = {}, 0
        self.num_bytes = 0
        """Bytes of the arrays that were added."""
        for tensor in tensors:
            most[tensor.name] = self._place(tensor, _MOST)
        self._start = align(8 + len(self._header(most)))
        """Where the arrays begin: the header has room for all tensors, in the longest numbers."""
        self.num_bytes = 0
        self._undo = ExitStack()

    def __enter__(self) -> "CopyWriter":
        """Begin the file."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with ExitStack() as undo:
            self._descriptor = os.open(self._partial, flags, 0o666)
            undo.callback(self._partial.unlink, missing_ok=True)
            undo.callback(os.close, self._descriptor)
            self._pool = undo.enter_context(worker_pool())
            self._undo = undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Give the file its name, unless it was not finished or has nothing."""
        with self._undo:
            if kind is None and self._added:
                header = self._header(self._added).ljust(self._start - 8)
                _write(self._descriptor, struct.pack("<Q", len(header)) + header, 0)
                self._partial.replace(self._file)

    def add(
        self,
        packed: Iterable[Packed],
        escapes: Mapping[str, int],
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Write tensors, with checksums; many pieces at once.

        Args:
            packed: With their arrays, on any device; work on them is done.
            escapes: How many elements of each are kept whole.
            progress: Called with bytes that are written.

        Raises:
            OSError: They cannot be written.
        """
        pieces: dict[Future[int], int] = {}
        checks: list[tuple[str, str, list[Future[int]]]] = []
        for tensor, views in packed:
            kept = self._added[tensor.name] = self._place(tensor, escapes[tensor.name])
            for name, stored in kept.views.items():
                flat, futures = views[name].view(-1).view(torch.uint8), []
                for start, stop in chunks(stored.num_bytes, CHECKED_BYTES):
                    at = self._start + stored.start + start
                    future = self._pool.submit(_write_piece, self._descriptor, flat[start:stop], at)
                    pieces[future] = stop - start
                    futures.append(future)
                checks.append((tensor.name, name, futures))
        try:
            for future in as_completed(pieces):
                future.result()
                progress(pieces[future])
        except BaseException:
            for future in pieces:
                future.cancel()
            raise
        for tensor_name, name, futures in checks:
            kept = self._added[tensor_name]
            found = tuple(future.result() for future in futures)
            made = {**kept.views, name: replace(kept.views[name], checks=found)}
            self._added[tensor_name] = replace(kept, views=made)

    def _place(self, tensor: TensorSpec, escapes: int) -> KeptTensor:
        """Return where a tensor lies behind all others, counted from where arrays begin."""
        form, views = self._formats[tensor.name], {}
        for view in form.views(tensor):
            size = math.prod(view.shape) * int(getattr(torch, view.dtype).itemsize)
            checks = (_MOST,) * -(-size // CHECKED_BYTES)
            at = self.num_bytes
            views[view.name] = StoredTensor(self._file, view.dtype, view.shape, at, size, checks)
            self.num_bytes += size
        return KeptTensor(form.name, _parts(tensor), escapes, views)

    def _header(self, tensors: Mapping[str, KeptTensor]) -> bytes:
        described = {
            name: {
                "format": kept.format,
                "parts": kept.parts,
                "escapes": kept.escapes,
                "checks": {view: stored.checks for view, stored in kept.views.items()},
            }
            for name, kept in tensors.items()
        }
        facts = {"version": VERSION, "source": self._identity, "tensors": json.dumps(described)}
        arrays = {
            f"{name}.{view}": {
                "dtype": _DTYPES[stored.dtype],
                "shape": stored.shape,
                "data_offsets": [stored.start, stored.start + stored.num_bytes],
            }
            for name, kept in tensors.items()
            for view, stored in kept.views.items()
        }
        return json.dumps({"__metadata__": facts, **arrays}).encode()


def _write_piece(descriptor: int, piece: torch.Tensor, position: int) -> int:
    """Write bytes that may lie on the device; return their checksum."""
    raw = memoryview(piece.cpu().numpy())  # type: ignore[arg-type]
    _write(descriptor, raw, position)
    return zlib.crc32(raw)


def _write(descriptor: int, raw: bytes | memoryview, position: int) -> None:
    done = 0
    while done < len(raw):
        done += os.pwrite(descriptor, raw[done:], position + done)
