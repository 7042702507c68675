"""Write one checkpoint folder in the layout that transformers and the engine read.

NumPy only: a conversion needs no torch.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.plain import read_json

PROVENANCE_FILE = "provenance.json"
WEIGHTS_FILE = "model.safetensors"

FloatArray = npt.NDArray[np.float32]
Stored = npt.NDArray[np.float32] | npt.NDArray[np.uint16]


def half_split_rows(weight: FloatArray, num_heads: int) -> FloatArray:
    """Reorder q or k rows from adjacent rotary pairs to the two-halves layout of Llama checkpoints.

    Args:
        weight: [num_heads * head_size, hidden]; rows 2i and 2i+1 of a head rotate together.
        num_heads: query heads for q, KV heads for k.

    Returns:
        The same rows with pair i of a head at positions i and i + head_size / 2.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, hidden))


def bf16_bits(values: FloatArray) -> npt.NDArray[np.uint16]:
    """Round finite float32 values to bfloat16, ties to even, and return the 16-bit patterns."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def write_weights(folder: Path, tensors: Mapping[str, Stored]) -> None:
    """Write model.safetensors: float32 arrays as F32, uint16 arrays as bfloat16 patterns.

    The format is an 8-byte little-endian header size, a JSON header padded to 8 bytes, the data.
    The safetensors package itself writes bfloat16 only from a torch tensor.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in sorted(tensors.items()):
        start, end = end, end + array.nbytes
        dtype = "BF16" if array.dtype == np.uint16 else "F32"
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with (folder / WEIGHTS_FILE).open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for _, array in sorted(tensors.items()):
            stream.write(np.ascontiguousarray(array).data)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as indented JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def llama_config(  # one keyword for each field of the file
    *,
    dtype: str,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    max_position_embeddings: int,
    rope_theta: float,
    rms_norm_eps: float,
    special_ids: Mapping[str, int | None],
) -> dict[str, Any]:
    """Return the config.json of a LlamaForCausalLM with tied embeddings and no biases.

    Args:
        dtype: "bfloat16" or "float32", the dtype of the stored weights.
        special_ids: bos_token_id, eos_token_id and pad_token_id; None where the model has none.
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width of the feed-forward part.
        num_hidden_layers: decoder layers.
        num_attention_heads: query heads.
        num_key_value_heads: KV heads.
        max_position_embeddings: context in tokens.
        rope_theta: base of the rotary angles.
        rms_norm_eps: epsilon of every RMSNorm.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": dtype,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "head_dim": hidden_size // num_attention_heads,
        "max_position_embeddings": max_position_embeddings,
        "rope_theta": rope_theta,
        "rms_norm_eps": rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **special_ids,
    }


def sha256_of(path: Path) -> str:
    """Return the hex SHA-256 of a file, read in 1 MiB pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def write_provenance(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write provenance.json: `facts`, and the size in bytes of every other file of the folder."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    write_json(folder / PROVENANCE_FILE, {**facts, "files_bytes": sizes})


def is_intact(folder: Path, facts: Mapping[str, Any]) -> bool:
    """Return whether the folder was made from the same source and its files have their sizes."""
    found = read_json(folder / PROVENANCE_FILE)
    if not found or any(found.get(key) != value for key, value in facts.items()):
        return False
    sizes = found.get("files_bytes")
    if not isinstance(sizes, dict) or not sizes:
        return False
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == size
        for name, size in sizes.items()
    )
