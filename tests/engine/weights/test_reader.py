"""Reading checkpoints: any layout of shards and pieces, staged or direct, and readers that fail."""

import errno
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.asked.offload import OffloadWarning
from engine.clock import PhaseClock
from engine.device.base import HostBuffer
from engine.device.cpu import CPUDevice, LazyCopyStream
from engine.errors import CheckpointError, PinningError
from engine.model.checkpoint import StoredTensor, read_headers
from engine.model.formats import ParamSpec
from engine.weights import reader
from engine.weights.reader import CheckpointReader

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Parameters = list[tuple[ParamSpec, torch.Tensor]]


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four readers on any machine."""
    monkeypatch.setattr(reader, "num_threads", lambda: 4)


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every target for GPU memory: pieces go through buffers and the copy stream."""
    monkeypatch.setattr(reader._Piece, "on_host", property(lambda _: False))


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fail where a thread or a descriptor is left."""
    alive, files = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    yield
    assert threading.active_count() == alive
    assert len(list(Path("/proc/self/fd").iterdir())) == files


def write(
    folder: Path, sizes: list[int], num_files: int, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Write tensors of values that all differ from shard to shard; return them by name."""
    generator = torch.Generator().manual_seed(len(sizes))
    tensors = {
        f"t{at}": torch.randn(size, generator=generator).to(dtype) for at, size in enumerate(sizes)
    }
    for at in range(num_files):
        mine = dict(itertools.islice(tensors.items(), at, None, num_files))
        if mine:
            save_file(mine, folder / f"model-{at}.safetensors")
    return tensors


def targets(
    tensors: dict[str, torch.Tensor], dtype: torch.dtype, order: list[str] | None = None
) -> Parameters:
    return [
        (ParamSpec(name, tuple(tensors[name].shape)), torch.zeros_like(tensors[name], dtype=dtype))
        for name in (order or list(tensors))
    ]


def read(folder: Path, parameters: Parameters, device: CPUDevice | None = None) -> list[int]:
    """Read and return what progress was told."""
    told: list[int] = []
    clock = PhaseClock()
    CheckpointReader(device or CPUDevice(), clock, told.append).read(
        parameters, read_headers(folder)
    )
    report = clock.report()
    assert report.moved == {"read": sum(told)}
    assert sum(report.phases.values()) == pytest.approx(report.total_s, abs=1e-9)
    assert min(report.phases.values()) >= 0
    assert set(report.busy) == {"read", "convert", "copy"}
    return told


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    num_files=st.integers(1, 5),
    piece_bytes=st.integers(1, 5000),
    run_bytes=st.integers(1, 9000),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    on_host=st.booleans(),
    data=st.data(),
)
def test_any_layout_is_read_in_place(
    sizes: list[int],
    num_files: int,
    piece_bytes: int,
    run_bytes: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    on_host: bool,
    data: st.DataObject,
) -> None:
    source, target = dtypes
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        patched.setattr(reader, "PIECE_BYTES", piece_bytes)
        patched.setattr(reader, "RUN_BYTES", run_bytes)
        if not on_host:
            patched.setattr(reader._Piece, "on_host", property(lambda _: False))
        folder = Path(name)
        tensors = write(folder, sizes, num_files, source)
        parameters = targets(tensors, target, data.draw(st.permutations(list(tensors))))
        told = read(folder, parameters)
    for spec, found in parameters:
        assert torch.equal(found, tensors[spec.name].to(target)), spec.name
    assert sum(told) == sum(t.numel() * t.element_size() for t in tensors.values())


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize("waits", [True, False])
def test_a_buffer_is_not_read_into_before_its_copy_has_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """The emulated stream copies as late as it may, so a reader that does not wait reads wrong."""
    monkeypatch.setattr(reader, "PIECE_BYTES", 256)
    tensors = write(tmp_path, [5000, 300, 4000], 2)
    parameters = targets(tensors, torch.float32)
    if not waits:
        wait = LazyCopyStream.wait

        def skip(self: LazyCopyStream, event: int) -> None:
            if threading.current_thread() is threading.main_thread():
                wait(self, event)

        monkeypatch.setattr(LazyCopyStream, "wait", skip)
    read(tmp_path, parameters)
    same = [torch.equal(found, tensors[spec.name]) for spec, found in parameters]
    assert all(same) is waits


@pytest.mark.usefixtures("staged")
def test_buffers_that_cannot_be_pinned_are_pageable_and_that_is_said(tmp_path: Path) -> None:
    class NoPinning(CPUDevice):
        def host_buffer(self, num_bytes: int, *, pin: bool) -> HostBuffer:
            if pin:
                raise PinningError("tests say so")
            return super().host_buffer(num_bytes, pin=pin)

    tensors = write(tmp_path, [100, 200], 1)
    parameters = targets(tensors, torch.bfloat16)
    with pytest.warns(OffloadWarning, match="fallback: weights are copied.*tests say so"):
        read(tmp_path, parameters, NoPinning())
    assert all(torch.equal(found, tensors[spec.name].bfloat16()) for spec, found in parameters)


def test_files_are_read_in_order_and_in_turn() -> None:
    def piece(file: str, at: int) -> reader._Piece:
        source = StoredTensor(Path(file), "uint8", (10,), 100 * at, 10)
        return reader._Piece("w", source, 0, 10, torch.zeros(10, dtype=torch.uint8))

    mixed = [piece(file, at) for at in (3, 0, 2, 1) for file in ("b", "a")]
    mixed.append(piece("c", 7))
    found = [[(str(p.file), p.position) for p in run] for run in reader._runs(mixed, 20)]
    assert found == [
        [("a", 0), ("a", 100)],
        [("b", 0), ("b", 100)],
        [("c", 700)],
        [("a", 200), ("a", 300)],
        [("b", 200), ("b", 300)],
    ]


def test_nothing_to_read(tmp_path: Path) -> None:
    write(tmp_path, [10], 1)
    assert read(tmp_path, []) == []


# Readers that fail.


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("after", [0, 7, 40])
def test_a_disk_that_fails_midway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, on_host: bool
) -> None:
    monkeypatch.setattr(reader, "PIECE_BYTES", 256)
    if not on_host:
        monkeypatch.setattr(reader._Piece, "on_host", property(lambda _: False))
    tensors = write(tmp_path, [3000, 3000, 500], 2)
    preadv, calls = os.preadv, itertools.count()

    def fail(file: int, buffers: Any, at: int) -> int:
        if next(calls) >= after:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(file, buffers, at)

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(
        CheckpointError, match=r"model-\d\.safetensors: reading 256 bytes at \d+ .*Input/output"
    ):
        read(tmp_path, targets(tensors, torch.float32))


@pytest.mark.usefixtures("nothing_left")
def test_files_that_end_early_or_are_gone(tmp_path: Path) -> None:
    tensors = write(tmp_path, [3000, 3000, 500], 2)
    stored = read_headers(tmp_path)
    victim = tmp_path / "model-1.safetensors"
    os.truncate(victim, victim.stat().st_size - 1000)
    device, clock = CPUDevice(), PhaseClock()
    for _ in range(3):
        with pytest.raises(CheckpointError, match=r"model-1\.safetensors: ended early"):
            CheckpointReader(device, clock, lambda _: None).read(
                targets(tensors, torch.float32), stored
            )
    victim.unlink()
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors.*No such file"):
        CheckpointReader(device, clock, lambda _: None).read(
            targets(tensors, torch.float32), stored
        )


@pytest.mark.usefixtures("nothing_left")
def test_progress_that_fails_stops_the_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "PIECE_BYTES", 64)
    tensors = write(tmp_path, [20_000], 1)

    def fail(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CheckpointReader(CPUDevice(), PhaseClock(), fail).read(
            targets(tensors, torch.float32), read_headers(tmp_path)
        )
