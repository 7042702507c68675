"""What a checkpoint's folder says: the model's sizes, and where its tensors lie on disk; no torch.

And what a load found out about it, kept in a folder that the caller names.

Headers are read and checked against themselves and the sizes; of the data only tables that may be
tied are looked at.
"""

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from engine.errors import CheckpointError
from engine.model.families import stated_dtype, text_part_of
from engine.model.formats import EMBEDDING, FORMATS, HEAD, TensorFormats
from engine.model.gguf import GGUFTensor, config_of, files_of, is_gguf, named, read_gguf
from engine.model.quant_config import PLAIN_TYPES, SUPPORTED, quantization_notes
from engine.model.quantised import UNUSED
from engine.model.schemes import ELEMENT_BYTES, JSON
from engine.model.spec import ModelSpec
from engine.sealed import GIB

TEXT_PREFIXES = {"language_model.": "", "model.language_model.": "model."}
"""How names of the text part of a model of text and images start -> how ours do."""
FILE_DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
}
OWN_CONFIGS: Final = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files beside a config.json without quantization_config, and the method whose they are."""
COMPARED_BYTES = 1 << 22
"""Bytes read at a time of two tables that may be equal."""
LENGTH_BYTES: Final = 8
"""Bytes that hold the length of a safetensors file's header."""
CHECKED_BYTES = 1 << 22
"""Bytes that have one checksum where a tensor's are known."""


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies on disk."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    checks: tuple[int, ...] = ()
    """CRC-32 of each CHECKED_BYTES of it, the last of what is left; empty: it has none."""


@dataclass(frozen=True)
class ModelFolder:
    """The sizes of the model in a folder, and what is to be said of how they were found."""

    spec: ModelSpec
    notes: tuple[str, ...] = ()
    is_untied: bool = False
    """Whether tie_word_embeddings of the config.json is contradicted by the files."""


def read_folder(folder: Path) -> ModelFolder:
    """Return the sizes that config.json states, with what only the weights' files tell.

    They tell the dtype where config.json states none: that of most elements. Of a model that is to
    be tied they tell whether it is: where the head is stored beside the embedding and differs, it
    is used, as transformers does. Files that are not there yet are left out.

    Raises:
        CheckpointError: There is no config.json, it is of no supported model, or a file is damaged.
    """
    if is_gguf(folder):
        model = read_gguf(folder)
        return ModelFolder(ModelSpec.from_hf_config(config_of(model)))
    config = read_config(folder)
    stored: dict[str, StoredTensor] = {}
    for file in checkpoint_files(folder):
        if file.is_file():
            _add_header(file, stored)
    stored, _ = text_part(stored)
    dtype, notes = _dtype_of(stored)
    spec = ModelSpec.from_hf_config(config, dtype)
    if stated_dtype(text_part_of(config)) is not None:
        notes = []
    stored = by_our_names(stored, spec)
    if spec.quantization and stored:
        spec = _as_stored(spec, stored)
    notes += quantization_notes(text_part_of(config))
    if not (spec.tie_word_embeddings and _differ(stored)):
        return ModelFolder(spec, tuple(notes))
    notes.append(
        f"checkpoint: config.json ties the embeddings, but {HEAD} is stored too and differs: it is "
        f"used ({stored[HEAD].num_bytes / GIB:.2f} GiB more), as transformers does."
    )
    return ModelFolder(replace(spec, tie_word_embeddings=False), tuple(notes), is_untied=True)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json.

    Raises:
        CheckpointError: There is none, or it is no JSON object.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(
            f"{folder}: expected a folder with config.json, found none. Give the path of a "
            "checkpoint on this machine, or a name that `tightfit models list` shows."
        )
    content = _read_object(file)
    for name, method in OWN_CONFIGS.items():
        own = folder / name
        if "quantization_config" not in content and own.is_file():
            content["quantization_config"] = {"quant_method": method} | _read_object(own)
    return content


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(file, f"not JSON ({error})") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise _damaged(file, f"expected an object, got {kind}")
    return content


def _damaged(file: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{file}: {what}. Fetch it again.")


def _dtype_of(stored: Mapping[str, StoredTensor]) -> tuple[str | None, list[str]]:
    """The dtype of most elements, and a note where there are others."""
    sizes = Counter[str]()
    for tensor in stored.values():
        if tensor.dtype in FORMATS:
            sizes[tensor.dtype] += math.prod(tensor.shape)
    if not sizes:
        return None, []
    (dtype, _), *others = sizes.most_common()
    if not others:
        return dtype, []
    rest = ", ".join(f"{count} of {name}" for name, count in others)
    return dtype, [
        f"checkpoint: config.json states no dtype; it counts as {dtype}, which most elements have "
        f"({rest})."
    ]


def _as_stored(spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> ModelSpec:
    """Return the sizes with what headers say of how weights are quantised."""
    parts = [
        p for t in spec.tensors() if len(t.shape) == 2 and t.name != EMBEDDING for p in t.parts
    ]
    dtypes = {name: tensor.dtype for name, tensor in stored.items()}
    found = spec.quantisation.as_stored(dtypes, parts)
    return replace(spec, quantization=found.to_dict())


def _differ(stored: Mapping[str, StoredTensor]) -> bool:
    """Whether embedding and head are both stored, and are not the same."""
    if not {EMBEDDING, HEAD} <= stored.keys():
        return False
    one, other = stored[EMBEDDING], stored[HEAD]
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return True
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        for done in range(0, one.num_bytes, COMPARED_BYTES):
            size = min(COMPARED_BYTES, one.num_bytes - done)
            if first.read(size) != second.read(size):
                return True
    return False


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the folder's safetensors files by name.

    Raises:
        CheckpointError: No file, a missing shard, a damaged header or an unsupported dtype.
    """
    if is_gguf(folder):
        return {name: _of_gguf(tensor) for name, tensor in named(read_gguf(folder)).items()}
    files = checkpoint_files(folder)
    if not files:
        raise CheckpointError(
            f"{folder}: expected *.safetensors files, found none. Convert the checkpoint to "
            "safetensors, or use load_format=dummy for random weights."
        )
    found: dict[str, StoredTensor] = {}
    for file in files:
        if not file.is_file():
            raise CheckpointError(
                f"{folder}: expected the shard {file.name}, found none. Fetch it."
            )
        _add_header(file, found)
    return found


def _of_gguf(tensor: GGUFTensor) -> StoredTensor:
    """Return where a tensor of a GGUF file lies; of a quantised one, rows of bytes."""
    dtype, shape = PLAIN_TYPES.get(tensor.type), tensor.shape
    if dtype is None:
        dtype, shape = "uint8", (*shape[:-1], tensor.row_bytes)
    return StoredTensor(tensor.file, dtype, shape, tensor.start, tensor.num_bytes)


def checkpoint_files(folder: Path) -> list[Path]:
    """List model.safetensors, else the files of an index, else every safetensors file."""
    if is_gguf(folder):
        return files_of(folder)
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return [folder / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(index, f"expected a weight_map of file names, got {error!r}") from error


def parse_header(file: Path) -> tuple[dict[str, Any], int, int]:
    """Return the header of a safetensors file, where its data begins, and the bytes of the file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no safetensors file.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if length > size:
            raise ValueError("header longer than the file")
        return json.loads(stream.read(length)), LENGTH_BYTES + length, size


def _add_header(file: Path, known: dict[str, StoredTensor]) -> None:
    """Add the tensors of one file to those of others, of which none may have the same."""
    for name, tensor in _read_header(file).items():
        if (other := known.setdefault(name, tensor)) is not tensor:
            raise CheckpointError(
                f"{file}: expected {name} in one file, found it in {other.file.name} too. Remove "
                "the file that does not belong to the checkpoint, or fetch it again."
            )


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        header, start, size = parse_header(file)
        found = {
            name: _stored(file, size, start, name, entry)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(file, f"not a safetensors file ({error!r})") from error
    _check_apart(file, found)
    return found


def _check_apart(file: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Refuse a file in which two tensors share bytes, which the format does not allow."""
    in_order = sorted(stored.items(), key=lambda item: (item[1].start, item[1].num_bytes))
    for (first, one), (second, other) in pairwise(in_order):
        if one.start + one.num_bytes > other.start:
            raise _damaged(file, f"{first} and {second} share bytes of the file")


def _stored(
    file: Path, file_bytes: int, data_start: int, name: str, entry: Mapping[str, Any]
) -> StoredTensor:
    """Check one entry of a header against itself and the file's size."""
    if entry["dtype"] not in FILE_DTYPES:
        raise CheckpointError(
            f"{file}: {name} has dtype {entry['dtype']}, expected one of {', '.join(FILE_DTYPES)}. "
            f"Of quantised checkpoints these are supported: {SUPPORTED}."
        )
    dtype, shape = FILE_DTYPES[entry["dtype"]], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise ValueError(f"{name}: expected whole numbers in shape and data_offsets")
    num_bytes = math.prod(shape) * ELEMENT_BYTES[dtype]
    if end - begin != num_bytes:
        what = f"{name} of shape {list(shape)} in {entry['dtype']}"
        raise _damaged(file, f"{what} takes {num_bytes} bytes, the header says {begin} to {end}")
    if data_start + end > file_bytes:
        raise CheckpointError(
            f"{file}: {name} ends at byte {data_start + end}, the file has {file_bytes}. "
            "It is cut short; fetch it again."
        )
    return StoredTensor(file, dtype, shape, data_start + begin, end - begin)


def _is_zero(tensor: StoredTensor) -> bool:
    """Whether all bytes of a tensor are zero."""
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        return not any(stream.read(tensor.num_bytes))


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
    if HEAD in rest:
        found[HEAD] = rest.pop(HEAD)
    if not rest:
        return found, ""
    num_bytes = sum(tensor.num_bytes for tensor in rest.values())
    note = (
        f"checkpoint: the text part is read; {len(rest)} other tensors ({num_bytes / GIB:.2f} "
        f"GiB) are left out, the first is {min(rest)}."
    )
    return found, note


def find_tensors(
    folder: Path, spec: ModelSpec, formats: TensorFormats
) -> tuple[dict[str, StoredTensor], str]:
    """Return where every tensor of a model lies on disk, checked, and a note on what is left out.

    Raises:
        CheckpointError: A file is absent or damaged, or does not match the model's sizes.
    """
    stored, note = text_part(read_headers(folder))
    stored = by_our_names(with_tied(stored, spec), spec)
    check_checkpoint(stored, spec, formats, folder)
    return stored, note


def with_tied(stored: Mapping[str, StoredTensor], spec: ModelSpec) -> dict[str, StoredTensor]:
    """Return the tensors with the embedding, which may be stored as the head of a tied model."""
    if spec.tie_word_embeddings and HEAD in stored and EMBEDDING not in stored:
        return {**stored, EMBEDDING: stored[HEAD]}
    return dict(stored)


_EXPERTS: Final = re.compile(
    r"(model\.layers\.\d+\.)(?:mlp|block_sparse_moe)\."
    r"(?:(gate)(?:\.weight)?|experts\.(gate_up|down)_proj(?:\.weight|(_scale))?)"
)
"""Names of a router and of experts that one tensor has: the layer, and what it is of each."""
_EXPERT: Final = re.compile(
    r"(model\.layers\.\d+\.)(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(gate|up|down)_proj\.(.+)"
)
"""Names of one expert as transformers builds it, which llm-compressor writes for Mixtral too."""


_INTERLEAVED: Final = re.compile(
    r"(model\.layers\.\d+\.mlp\.experts\.)(gate_up_proj|down_proj)"
    r"(?:_(blocks|scales|bias))?"
)
"""Names of what all experts of a layer have in one tensor where gates and ups are in turn."""


def _with_one_name_for_scales(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors with weight_scale_inv called weight_scale; none may have both."""
    for name in stored:
        if f"{name}_inv" in stored:
            raise CheckpointError(
                f"{name}: expected it or {name}_inv, which is another name of it, got both. Remove "
                "the one that does not belong to the checkpoint, or fetch it again."
            )
    return {name.removesuffix("_inv"): tensor for name, tensor in stored.items()}


def by_our_names(stored: Mapping[str, StoredTensor], spec: ModelSpec) -> dict[str, StoredTensor]:
    """Return the tensors by the names of a model's parameters, each expert's on their own.

    weight_scale_inv is another name of weight_scale. transformers keeps gates and ups of a layer in
    one tensor, [experts, gates then ups, inputs], and may save them so, under names of its own.
    """
    stored = _with_one_name_for_scales(stored)
    names = spec.architecture.experts
    if names is None:
        return stored
    found: dict[str, StoredTensor] = {}
    if names.is_interleaved:
        for name, tensor in stored.items():
            if (match := _INTERLEAVED.fullmatch(name)) and tensor.shape[0] == spec.num_experts:
                kind = match[3] or "weight"
                found |= {
                    f"{match[1]}{expert}.{match[2]}.{kind}": replace(each, shape=tensor.shape[1:])
                    for expert, each in enumerate(rows_of(tensor, spec.num_experts))
                }
            else:
                found[name] = tensor
        return found
    one = {"gate": names.gates[0], "up": names.gates[-1], "down": names.down}
    for name, tensor in stored.items():
        if match := _EXPERT.fullmatch(name):
            found[f"{match[1]}{one[match[3]].format(match[2])}.{match[4]}"] = tensor
            continue
        match = _EXPERTS.fullmatch(name)
        if match is None:
            found[name] = tensor
        elif match[2]:
            found[f"{match[1]}{names.router}.weight"] = tensor
        elif len(tensor.shape) == 3:
            parts = names.gates if match[3] == "gate_up" else (names.down,)
            found |= {
                f"{match[1]}{part.format(expert)}.weight{match[4] or ''}": each
                for expert, whole in enumerate(rows_of(tensor, tensor.shape[0]))
                for part, each in zip(parts, rows_of(whole, len(parts)), strict=True)
            }
        else:
            found[name] = tensor
    return found


def rows_of(tensor: StoredTensor, count: int) -> list[StoredTensor]:
    """Return a tensor as parts of equally many rows, or itself where they cannot be equal."""
    first, *rest = tensor.shape
    shape = tuple(rest) if first == count and rest[1:] else (first // count, *rest)
    size = tensor.num_bytes // count
    if first % count:
        return [tensor] * count  # its shape is refused
    return [
        replace(tensor, shape=shape, start=tensor.start + at * size, num_bytes=size)
        for at in range(count)
    ]


def check_checkpoint(
    stored: Mapping[str, StoredTensor], spec: ModelSpec, formats: TensorFormats, folder: Path
) -> None:
    """Compare names and shapes with the model's sizes.

    Raises:
        CheckpointError: A tensor is missing, has another shape, or is unknown.
    """
    wanted = {
        part.name: part
        for tensor in spec.tensors()
        for part in formats[tensor.name].parameters(tensor)
    }
    ignored = {HEAD} if spec.tie_word_embeddings else set()
    others = set(stored) - set(wanted) - ignored
    unused = (*UNUSED.get(spec.quantization.get("method", ""), ()), "rotary_emb.inv_freq")
    extra = sorted(name for name in others if not name.endswith(unused))
    if spec.quantization.get("method") == "gptq":  # AutoGPTQ writes biases of zeros
        extra = [name for name in extra if not (name.endswith(".bias") and _is_zero(stored[name]))]
    missing = sorted(set(wanted) - set(stored))
    if missing:
        instead = f"; there is {extra[0]}, which a {spec.model_type} model has not" if extra else ""
        raise CheckpointError(
            f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]}{instead}. "
            "Does config.json belong to these files?"
        )
    for name, part in wanted.items():
        found = stored[name]
        if part.dtype == JSON:
            if found.dtype != "uint8" or found.num_bytes > part.numel:
                raise CheckpointError(
                    f"{folder}: {name} has {found.num_bytes} bytes of {found.dtype}, expected at "
                    f"most {part.numel} of uint8."
                )
            continue
        if found.shape != part.shape and not math.prod(found.shape) == part.numel == 1:
            raise CheckpointError(
                f"{folder}: {name} has shape {list(found.shape)}, config.json says "
                f"{list(part.shape)}."
            )
        if found.dtype not in ([part.dtype] if part.dtype else FORMATS):
            raise CheckpointError(
                f"{folder}: {name} is stored in {found.dtype}, expected "
                f"{part.dtype or ', '.join(FORMATS)}. Does config.json belong to these files?"
            )
    if extra:
        raise CheckpointError(
            f"{folder}: {len(extra)} tensors do not belong to a {spec.model_type} model, the first "
            f"is {extra[0]}."
        )


NOTE_VERSION: Final = 1
"""Version of what codes can hold: a note of another one counts as none."""
SAMPLE_BYTES: Final = 1 << 16
"""Read at the end of each file: checkpoints of equal shapes have equal headers and sizes."""


def checkpoint_identity(folder: Path) -> str:
    """Return a hash of the safetensors files: names, sizes, headers, and their last bytes.

    Raises:
        OSError: A file cannot be read.
        CheckpointError: The index of the files is damaged.
    """
    digest = hashlib.sha256()
    for file in checkpoint_files(folder):
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            header = stream.read(min(length, size))
            stream.seek(max(0, size - SAMPLE_BYTES))
            for part in (file.name.encode(), str(size).encode(), header, stream.read()):
                digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def copy_folder(copies: Path, checkpoint: Path) -> Path:
    """Return the folder of a checkpoint's copy in codes."""
    whole = checkpoint.resolve()
    digest = hashlib.blake2b(str(whole).encode(), digest_size=6).hexdigest()
    return copies / f"{whole.name}-{digest}"


def read_unpackable(facts_folder: str | None, checkpoint: str | None) -> dict[str, str]:
    """Return why tensors of a checkpoint cannot be kept in codes, by name, as a load found.

    Args:
        facts_folder: Where loads note it; None: nowhere.
        checkpoint: The folder of its files; None: there are none.
    """
    if facts_folder is None or checkpoint is None or not Path(facts_folder).is_dir():
        return {}
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        file = _note_file(facts_folder, checkpoint)
        note = json.loads(file.read_text(encoding="utf-8"))
        if note["version"] == NOTE_VERSION:
            return {str(name): str(reason) for name, reason in note["unpackable"].items()}
    return {}


def write_unpackable(facts_folder: str | None, checkpoint: str, reasons: Mapping[str, str]) -> None:
    """Note them; where the folder cannot be written, the next load finds them out again."""
    if facts_folder is None:
        return
    with suppress(OSError):
        file = _note_file(facts_folder, checkpoint)
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        note = {"version": NOTE_VERSION, "checkpoint": checkpoint, "unpackable": dict(reasons)}
        text = json.dumps(note, indent=1)
        new.write_text(f"{text}\n", encoding="utf-8")
        new.replace(file)


def _note_file(facts_folder: str, checkpoint: str) -> Path:
    return Path(facts_folder) / f"{checkpoint_identity(Path(checkpoint))}.json"
