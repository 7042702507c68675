"""GGUF files as models: their headers under the names of a checkpoint folder; no torch.

The format is that of version 2 and 3, little-endian: metadata, tensor infos, and data at multiples
of general.alignment.
"""

import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final

from engine.errors import CheckpointError
from engine.model.families import ARCHITECTURES as FAMILIES
from engine.model.families import Architecture
from engine.model.quant_config import PLAIN_TYPES
from engine.model.quantised import any_expert
from engine.model.schemes import GGUF_TYPES

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_DAMAGES: Final = (
    *(struct.error, ValueError, KeyError, TypeError),
    *(OverflowError, MemoryError, RecursionError),
)
"""What reading a damaged header raises."""
_STRING, _ARRAY = 8, 9
_NUMBERS: Final = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
"""struct's letter of each type of a metadata value."""
_TYPE_NAMES: Final = (
    *("F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K"),
    *("Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL"),
    *("IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16"),
    *("Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "TQ1_0", "TQ2_0", "IQ4_NL_4_4", "IQ4_NL_4_8"),
    *("IQ4_NL_8_8", "MXFP4", "NVFP4", "Q1_0"),
)
"""Types of tensors by their number; later ones have none here."""
ARCHITECTURES: Final = MappingProxyType(
    {
        "llama": "llama",
        "qwen2": "qwen2",
        "qwen2moe": "qwen2_moe",
        "olmoe": "olmoe",
        "qwen3": "qwen3",
        "qwen3moe": "qwen3_moe",
        "gemma3": "gemma3_text",
    }
)
"""general.architecture -> model_type. Mistral's files say llama too, and so do Mixtral's, which
have experts."""
_MOST_BYTES: Final = 1 << 30
"""More than any string or array of a header takes."""
_SHARD: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_OUTER_NAMES: Final = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
)
_NAMES: Final = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_EXPERT_NAMES: Final = MappingProxyType(
    {
        **_NAMES,
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    }
)
_GEMMA_NAMES: Final = MappingProxyType(
    {
        **_NAMES,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
ROPE_FACTORS: Final = "rope_freqs.weight"
"""What rotary frequencies are divided by, of Llama 3.1 and later."""


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor as a file has it."""

    file: Path
    type: str
    shape: tuple[int, ...]
    """Rows before columns, elements."""
    start: int
    """Byte of the file."""
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.num_bytes // math.prod(self.shape[:-1])


@dataclass(frozen=True)
class GGUFModel:
    """What the headers of a model's files say."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]
    """By the names of the file."""

    @property
    def architecture(self) -> str:
        """The general.architecture."""
        return str(self.metadata.get("general.architecture"))

    def value(self, key: str, default: Any = None) -> Any:
        """Return a value of the architecture's own keys.

        Raises:
            CheckpointError: There is none, and no default.
        """
        found = self.metadata.get(f"{self.architecture}.{key}", default)
        if found is None:
            raise CheckpointError(
                f"{self.path}: expected the key {self.architecture}.{key}, found none. Fetch it "
                "again."
            )
        return found


def is_gguf(path: Path | str | None) -> bool:
    """Whether a model's path is that of a GGUF file."""
    return path is not None and Path(path).suffix == ".gguf"


def files_of(path: Path) -> list[Path]:
    """Return a file, or all files of a model that is split, of which it is one."""
    found = _SHARD.fullmatch(path.name)
    if found is None:
        return [path]
    total = int(found[3])
    return [path.with_name(f"{found[1]}-{n:05}-of-{total:05}.gguf") for n in range(1, total + 1)]


def read_gguf(path: Path) -> GGUFModel:
    """Read the headers of a model's files.

    Raises:
        CheckpointError: A file is absent, damaged or of another version, or has a type of tensor
            that is not supported.
    """
    metadata: dict[str, Any] = {}
    tensors: dict[str, GGUFTensor] = {}
    for file in files_of(path):
        if not file.is_file():
            raise CheckpointError(f"{file}: expected a GGUF file, found none. Fetch it.")
        own, found = _read_file(file)
        # The first file has the model's metadata, the others what splits it.
        metadata = {**own, **metadata}
        tensors = _apart(file, tensors, found.items())
    return GGUFModel(path, metadata, tensors)


def _read_file(file: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            if stream.read(4) != _MAGIC:
                raise ValueError("it does not begin with GGUF")
            version, num_tensors, num_values = struct.unpack("<IQQ", stream.read(20))
            if version not in _VERSIONS:
                raise ValueError(f"expected version {_VERSIONS}, got {version}")
            if max(num_tensors, num_values) > size:
                raise ValueError("more entries than bytes")
            metadata = {}
            for _ in range(num_values):
                key = _string(stream)
                (kind,) = struct.unpack("<I", stream.read(4))
                metadata[key] = _value(stream, kind)
            infos = [_info(stream) for _ in range(num_tensors)]
            alignment = int(metadata.get("general.alignment", 32))
            if alignment <= 0:
                raise ValueError(f"general.alignment: expected more than 0, got {alignment}")
            data = -(-stream.tell() // alignment) * alignment
    except _DAMAGES as error:
        raise CheckpointError(f"{file}: not a GGUF file ({error}). Fetch it again.") from error
    found = [(info[0], _tensor(file, size, data, *info)) for info in infos]
    return metadata, _apart(file, {}, found)


def _apart(
    file: Path, known: Mapping[str, GGUFTensor], found: Iterable[tuple[str, GGUFTensor]]
) -> dict[str, GGUFTensor]:
    """Return known tensors with those of one file, of which none may be there twice."""
    every, end, last = dict(known), 0, ""
    for name, tensor in sorted(found, key=lambda each: each[1].start):
        if name in every:
            raise CheckpointError(f"{file}: expected {name} once, found it twice. Fetch it again.")
        if tensor.start < end:
            raise CheckpointError(f"{file}: {last} and {name} share bytes. Fetch it again.")
        every[name], end, last = tensor, tensor.start + tensor.num_bytes, name
    return every


def _bytes(stream: BinaryIO, count: int) -> bytes:
    if count > _MOST_BYTES:
        raise ValueError(f"a value of {count} bytes")
    found = stream.read(count)
    if len(found) != count:
        raise ValueError("the header ends early")
    return found


def _string(stream: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", stream.read(8))
    return _bytes(stream, length).decode("utf-8")


def _value(stream: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(stream)
    if kind == _ARRAY:
        item, count = struct.unpack("<IQ", stream.read(12))
        if item in _NUMBERS:
            size = struct.calcsize(f"<{_NUMBERS[item]}")
            return list(struct.unpack(f"<{count}{_NUMBERS[item]}", _bytes(stream, count * size)))
        if count > _MOST_BYTES:
            raise ValueError(f"an array of {count}")
        return [_value(stream, item) for _ in range(count)]
    letter = _NUMBERS[kind]
    return struct.unpack(f"<{letter}", stream.read(struct.calcsize(f"<{letter}")))[0]


def _info(stream: BinaryIO) -> tuple[str, tuple[int, ...], int, int]:
    name = _string(stream)
    (num_dims,) = struct.unpack("<I", stream.read(4))
    if num_dims > 4:
        raise ValueError(f"{name}: {num_dims} dimensions")
    shape = struct.unpack(f"<{num_dims}Q", stream.read(8 * num_dims))
    kind, offset = struct.unpack("<IQ", stream.read(12))
    return name, tuple(reversed(shape)), kind, offset


def _tensor(
    file: Path, size: int, data: int, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> GGUFTensor:
    """Check one tensor against the file's size."""
    word = _TYPE_NAMES[kind] if kind < len(_TYPE_NAMES) else f"type {kind}"
    if word not in PLAIN_TYPES and word not in GGUF_TYPES:
        raise CheckpointError(
            f"{file}: {name} is stored in {word}, expected one of "
            f"{', '.join([*PLAIN_TYPES, *GGUF_TYPES])}. Use a file in one of them."
        )
    block, block_bytes = GGUF_TYPES.get(word, (1, {"F32": 4}.get(word, 2)))
    if not shape or math.prod(shape) <= 0 or shape[-1] % block:
        raise CheckpointError(
            f"{file}: {name} has shape {list(shape)}, expected rows of a multiple of {block} in "
            f"{word}. Fetch it again."
        )
    num_bytes = math.prod(shape) // block * block_bytes
    if data + offset + num_bytes > size:
        raise CheckpointError(
            f"{file}: {name} ends at byte {data + offset + num_bytes}, the file has {size}. It is "
            "cut short; fetch it again."
        )
    return GGUFTensor(file, word, shape, data + offset, num_bytes)


def named(model: GGUFModel) -> dict[str, GGUFTensor]:
    """Return the tensors under the names of a checkpoint folder.

    Raises:
        CheckpointError: A name is none of the architecture's.
    """
    kind = model_type(model)
    family = FAMILIES[kind].experts if kind else None
    names: Mapping[str, str]
    names = _GEMMA_NAMES if kind == "gemma3_text" else _EXPERT_NAMES if family else _NAMES
    experts: dict[str, str] = {}
    if family is not None:
        names = {**names, "ffn_gate_inp": family.router}
        experts = {
            "ffn_gate_exps": family.gates[0],
            "ffn_up_exps": family.gates[-1],
            "ffn_down_exps": family.down,
        }
    found: dict[str, GGUFTensor] = {}
    for name, tensor in model.tensors.items():
        if name == ROPE_FACTORS:
            continue
        ours = _OUTER_NAMES.get(name)
        if ours is None:
            match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
            if match is not None and match[2] in experts and len(tensor.shape) == 3:
                module = f"model.layers.{match[1]}.{experts[match[2]]}.{match[3]}"
                found |= {module.format(n): each for n, each in enumerate(_of_experts(tensor))}
                continue
            if match is None or match[2] not in names:
                raise CheckpointError(
                    f"{model.path}: {name} is no tensor of a {model.architecture} model that is "
                    "supported."
                )
            ours = f"model.layers.{match[1]}.{names[match[2]]}.{match[3]}"
        is_vector = name.endswith("ffn_gate_inp_shexp.weight") and len(tensor.shape) == 1
        found[ours] = replace(tensor, shape=(1, *tensor.shape)) if is_vector else tensor
    return found


def _of_experts(tensor: GGUFTensor) -> list[GGUFTensor]:
    """Return the matrix of each expert."""
    count, *shape = tensor.shape
    size = tensor.num_bytes // count
    return [
        replace(tensor, shape=tuple(shape), start=tensor.start + at * size, num_bytes=size)
        for at in range(count)
    ]


def model_type(model: GGUFModel) -> str | None:
    """Return what config.json calls the architecture; None: it is not supported."""
    if model.architecture == "llama" and model.value("expert_count", 0):
        return "mixtral"
    return ARCHITECTURES.get(model.architecture)


def config_of(model: GGUFModel) -> dict[str, Any]:
    """Return what a config.json would say.

    Raises:
        CheckpointError: The architecture is not supported, or a key is absent.
    """
    kind = model_type(model)
    if kind is None:
        raise CheckpointError(
            f"{model.path}: expected general.architecture among {', '.join(ARCHITECTURES)}, got "
            f"{model.architecture!r}. Other architectures are not supported."
        )
    value, tensors = model.value, named(model)
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is None:
        raise CheckpointError(f"{model.path}: expected token_embd.weight, found none.")
    heads, hidden = value("attention.head_count"), value("embedding_length")
    head_dim = value("attention.key_length", hidden // max(1, heads))
    if value("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{model.path}: expected keys and values of the same size.")
    if value("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"{model.path}: expected a rotation of whole heads.")
    config: dict[str, Any] = {
        "model_type": kind,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": value(
            "feed_forward_length", value("expert_feed_forward_length", 0) or None
        ),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": _shortest(value("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(value("rope.freq_base", 10000.0)),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in tensors,
        "mlp_bias": "model.layers.0.mlp.down_proj.bias" in tensors,
        "torch_dtype": _dtype(tensors),
        "quantization_config": _quantization(model, tensors, heads),
    }
    if scaling := _rope_scaling(model, head_dim, config["rope_theta"]):
        config["rope_scaling"] = scaling
    if FAMILIES[kind].experts is not None:
        config |= _experts_of(model, FAMILIES[kind])
    if kind == "gemma3_text":
        # The largest alone scales by the width of its heads without the heads' own.
        is_largest = value("block_count") == 62
        config |= {
            "sliding_window": value("attention.sliding_window"),
            "query_pre_attn_scalar": hidden // heads if is_largest else head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
        }
    for key in ("bos", "eos"):
        if (token := model.metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{key}_token_id"] = token
    return config


def _experts_of(model: GGUFModel, family: Architecture) -> dict[str, Any]:
    """Return what a config.json says of experts; llama.cpp knows which families renormalise."""
    value = model.value
    found: dict[str, Any] = {
        "num_experts": value("expert_count"),
        "num_experts_per_tok": value("expert_used_count"),
        "norm_topk_prob": value("expert_weights_norm", model.architecture == "qwen3moe"),
    }
    if family.expert_size_key == "moe_intermediate_size":
        found["moe_intermediate_size"] = value("expert_feed_forward_length")
    if family.has_shared_expert:
        found["shared_expert_intermediate_size"] = value("expert_shared_feed_forward_length")
    return found


def _shortest(value: float) -> float:
    """Return the decimal of fewest digits that is the same float32."""
    for digits in range(1, 10):
        found = float(f"{value:.{digits}g}")
        if struct.pack("<f", found) == struct.pack("<f", value):
            return found
    return value


def _dtype(tensors: Mapping[str, GGUFTensor]) -> str:
    """Return the dtype of plain matrices; bfloat16 where matrices are quantised."""
    types = {tensor.type for tensor in tensors.values() if len(tensor.shape) == 2}
    plain = types & set(PLAIN_TYPES)
    return PLAIN_TYPES[plain.pop()] if len(types) == 1 and plain else "bfloat16"


def _quantization(
    model: GGUFModel, tensors: Mapping[str, GGUFTensor], heads: int
) -> dict[str, Any]:
    """Return what `read_quantization` reads: modules by type, and how rows are ordered."""
    modules: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2:
            module = any_expert(name.removesuffix(".weight"))
            names = modules.setdefault(tensor.type, [])
            if module not in names[-1:]:  # experts of a layer follow each other
                names.append(module)
    key_heads = model.value("attention.head_count_kv", heads)
    return {
        "quant_method": "gguf",
        "modules": modules,
        # llama.cpp keeps the pairs that rotate together in rows that follow each other.
        "heads": [heads, key_heads] if model.architecture == "llama" else [0, 0],
        "norms_from_one": model.architecture == "gemma3",
    }


def _rope_scaling(model: GGUFModel, head_dim: int, theta: float) -> dict[str, Any]:
    """Return the rotary scaling that keys, or a tensor of factors, say."""
    kind = model.value("rope.scaling.type", "none")
    if ROPE_FACTORS in model.tensors:
        return _llama3(model, head_dim, theta)
    if kind == "none":
        return {}
    if kind not in {"linear", "yarn"}:
        raise CheckpointError(
            f"{model.path}: expected rope.scaling.type among none, linear and yarn, got {kind!r}. "
            "This file is not supported."
        )
    factor = _shortest(model.value("rope.scaling.factor"))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    old = model.value("rope.scaling.original_context_length")
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": old}


def _llama3(model: GGUFModel, head_dim: int, theta: float) -> dict[str, Any]:
    """Return the scaling of Llama 3 whose factors a tensor has."""
    tensor = model.tensors[ROPE_FACTORS]
    count = head_dim // 2
    if tensor.type != "F32" or tensor.shape != (count,):
        raise CheckpointError(f"{model.path}: {ROPE_FACTORS}: expected {count} in F32.")
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        found = struct.unpack(f"<{count}f", stream.read(4 * count))
    for factor in (8.0, 32.0, 4.0, 16.0):
        scaling = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        wanted = [_llama3_factor(2 * i / head_dim, theta, factor) for i in range(count)]
        if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found, wanted, strict=True)):
            return scaling
    raise CheckpointError(
        f"{model.path}: {ROPE_FACTORS} are the factors of no scaling that is known (llama3 of 8192 "
        "positions). This file is not supported."
    )


def _llama3_factor(power: float, theta: float, factor: float) -> float:
    """Return what Llama 3 divides a frequency by, with factors 1 and 4 and 8192 positions."""
    wavelength = 2 * math.pi * math.pow(theta, power)
    if wavelength < 8192 / 4:
        return 1.0
    if wavelength > 8192:
        return factor
    smooth = (8192 / wavelength - 1) / 3
    return 1 / ((1 - smooth) / factor + smooth)
