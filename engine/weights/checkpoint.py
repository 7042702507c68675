"""What a folder of safetensors holds: headers read and checked against the model's sizes."""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from engine.errors import CheckpointError
from engine.spec import ModelSpec

TEXT_PREFIXES = {"language_model.": "", "model.language_model.": "model."}
"""How names of the text part of a model of text and images start -> how ours do."""
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


def text_part(stored: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], str]:
    """Return the tensors of the text part under their usual names, and a note of what is left out.

    A checkpoint that has text alone is returned as it is, with an empty note.
    """
    found = {
        ours + name.removeprefix(theirs): tensor
        for theirs, ours in TEXT_PREFIXES.items()
        for name, tensor in stored.items()
        if name.startswith(theirs)
    }
    if not found:
        return dict(stored), ""
    rest = {name: x for name, x in stored.items() if not name.startswith(tuple(TEXT_PREFIXES))}
    if "lm_head.weight" in rest:
        found["lm_head.weight"] = rest.pop("lm_head.weight")
    if not rest:
        return found, ""
    num_bytes = sum(tensor.num_bytes for tensor in rest.values())
    note = (
        f"checkpoint: the text part is read; {len(rest)} other tensors ({num_bytes / 2**30:.2f} "
        f"GiB) are left out, the first is {min(rest)}."
    )
    return found, note


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
