"""Pack the weights of a checkpoint ahead of a load, a few tensors at a time."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch

from engine.clock import PhaseClock
from engine.device.base import Device
from engine.device.cuda import open_device
from engine.errors import CapacityError, ConfigError, UnpackableError
from engine.model.checkpoint import (
    StoredTensor,
    copy_folder,
    find_tensors,
    read_folder,
    read_unpackable,
    write_unpackable,
)
from engine.model.formats import TensorFormats, TensorSpec
from engine.model.lossless import DTYPE, lossless_formats, why_plain
from engine.model.spec import ModelSpec
from engine.sealed import GIB
from engine.weights.kept import (
    DAMAGED,
    CopyWriter,
    KeptCopy,
    Packed,
    alone,
    require_room,
    source_identity,
)
from engine.weights.reader import CheckpointReader, batches, pack

GROUP_BYTES: Final = 256 * 2**20
"""Host memory of the tensors that are packed at a time, unless one takes more."""

Progress = Callable[[int, int], None]
"""Called with the bytes of the checkpoint that are packed, and those of all that is to be."""


@dataclass(frozen=True)
class PackedCheckpoint:
    """What is kept of a checkpoint, packed."""

    folder: Path
    num_bytes: int
    """Bytes of the packed tensors."""
    plain_bytes: int
    """Bytes of the same tensors in the checkpoint's dtype."""
    escapes: dict[str, tuple[int, int]]
    """How many weights of each packed tensor are kept whole, and how many it has."""
    plain: dict[str, list[tuple[str, int]]]
    """Tensors that stay plain and their bytes, by the reason why."""
    num_made: int
    """How many were packed now; the others were there, whole."""
    note: str
    """Which files were of no use, and why."""


def pack_checkpoint(
    checkpoint: Path,
    kept_folder: Path,
    facts_folder: Path,
    *,
    device: str = "auto",
    progress: Progress = lambda *_: None,
) -> PackedCheckpoint:
    """Write the packed weights of a checkpoint, as a load with model.keep_lossless=true does.

    What is there already is read and held against its checksums; what lacks is packed.

    Args:
        checkpoint: The folder of config.json and its files.
        kept_folder: Folder of all packed weights.
        facts_folder: Where tensors are noted whose values cannot be packed.
        device: auto (CUDA if there is one, else the CPU) | cuda | cpu.
        progress: Called as tensors are packed.

    Raises:
        ConfigError: The checkpoint's dtype is another one, or none of its tensors gains.
        CheckpointError: It is absent or damaged.
        BusyError: Another process writes the same copy.
        CapacityError: The GPU has no room to pack in.
        OSError: The copy cannot be written; the disk has no room for it, for example.
    """
    spec = read_folder(checkpoint).spec
    if spec.dtype != DTYPE:
        raise ConfigError(
            f"{checkpoint}: expected weights in {DTYPE}, got {spec.dtype}, which codes do not "
            "hold: there is nothing to gain. Load it as it is (engine.weight_format=checkpoint)."
        )
    known = read_unpackable(str(facts_folder), str(checkpoint))
    formats = lossless_formats(spec, plain=known)
    tensors = [tensor for tensor, _ in formats.packed(spec.tensors())]
    if not tensors:
        raise ConfigError(
            f"{checkpoint}: expected a matrix that takes less in codes, got none in this "
            f"{spec.model_type} model. Load it as it is (engine.weight_format=checkpoint)."
        )
    folder, opened = copy_folder(kept_folder, checkpoint), open_device(device)
    with closing(opened), alone(folder), _told_if_full(opened, formats.packing_bytes(tensors)):
        copy = KeptCopy(folder, source_identity(checkpoint))
        _verify(copy, formats, tensors, opened)
        copy.remove_useless()
        lacking = [tensor for tensor in tensors if not copy.holds(tensor, formats)]
        stored, _ = find_tensors(checkpoint, spec, formats)
        made, unpackable = _add(copy, formats, lacking, stored, opened, progress)
    if unpackable:
        write_unpackable(str(facts_folder), str(checkpoint), known | unpackable)
    return _described(spec, formats, copy, made, known | unpackable)


@contextmanager
def _told_if_full(device: Device, num_bytes: int) -> Iterator[None]:
    """Raise CapacityError where packing, which takes so many bytes, finds no room on the GPU."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        facts = device.facts()
        held = ", ".join(facts.holders) or "the driver names none"
        raise CapacityError(
            f"pack: expected {num_bytes / GIB:.2f} GiB of free GPU memory to pack in, got "
            f"{facts.free_bytes / GIB:.2f} of {facts.total_bytes / GIB:.2f} GiB on {facts.name}. "
            f"Stop the processes that hold the rest ({held}), or pack on the CPU (--device cpu)."
        ) from error


def _verify(
    copy: KeptCopy, formats: TensorFormats, tensors: Sequence[TensorSpec], device: Device
) -> None:
    """Read what is there, and drop files whose checksums differ."""
    damaged: set[str] = set()
    for group in _groups(formats, [x for x in tensors if copy.holds(x, formats)]):
        arrays = list(copy.arrays(group, formats))
        reader = CheckpointReader(device, PhaseClock(), lambda _: None)
        with closing(reader):
            damaged |= reader.read(
                ((part, target) for part, target, _ in arrays),
                {part.name: source for part, _, source in arrays},
            )
    copy.drop({name.rpartition(".")[0] for name in damaged}, DAMAGED)


def _add(
    copy: KeptCopy,
    formats: TensorFormats,
    lacking: Sequence[TensorSpec],
    stored: Mapping[str, StoredTensor],
    device: Device,
    progress: Progress,
) -> tuple[dict[str, int], dict[str, str]]:
    """Pack tensors into a file of the copy; return escapes of each, or why it cannot be packed."""
    if not lacking:
        return {}, {}
    require_room(copy.folder, formats.total_bytes(lacking))
    names = [part.name for x in lacking for part in formats[x.name].parameters(x)]
    total, done = sum(stored[name].num_bytes for name in names), 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    made: dict[str, int] = {}
    unpackable: dict[str, str] = {}
    clock = PhaseClock()
    reader = CheckpointReader(device, clock, advance)
    fill = partial(reader.read, stored=stored)
    with closing(reader), CopyWriter(copy.folder, copy.identity, formats, lacking) as writer:
        for group in _groups(formats, lacking):
            try:
                escapes = pack(formats, group, fill, device, clock)
            except UnpackableError as error:
                escapes = error.escapes
                unpackable |= error.reasons
            writer.add([each for each in group if each[0].name in escapes], escapes)
            made |= escapes
    return made, unpackable


def _described(
    spec: ModelSpec,
    formats: TensorFormats,
    copy: KeptCopy,
    made: Mapping[str, int],
    unpackable: Mapping[str, str],
) -> PackedCheckpoint:
    plain: dict[str, list[tuple[str, int]]] = defaultdict(list)
    packed = []
    for tensor in spec.tensors():
        why = why_plain(tensor, spec) or unpackable.get(tensor.name)
        if why:
            plain[why].append((tensor.name, formats.default.num_bytes(tensor)))
        else:
            packed.append(tensor)
    escapes = {**copy.escapes, **made}
    return PackedCheckpoint(
        folder=copy.folder,
        num_bytes=formats.total_bytes(packed),
        plain_bytes=sum(map(formats.default.num_bytes, packed)),
        escapes={tensor.name: (escapes[tensor.name], tensor.numel) for tensor in packed},
        plain=dict(plain),
        num_made=len(made),
        note=copy.note(),
    )


def _groups(formats: TensorFormats, tensors: Sequence[TensorSpec]) -> Iterator[list[Packed]]:
    """Yield some tensors at a time, with arrays in host memory."""
    for group in batches(((each, formats.num_bytes(each)) for each in tensors), GROUP_BYTES):
        yield [(tensor, _room_for(tensor, formats)) for tensor in group]


def _room_for(tensor: TensorSpec, formats: TensorFormats) -> dict[str, torch.Tensor]:
    """Return the arrays of a packed tensor, in host memory."""
    return {
        view.name: torch.empty(view.shape, dtype=getattr(torch, view.dtype))
        for view in formats[tensor.name].views(tensor)
    }
