"""GGUF files of tiny models, written by the gguf package, and the weights that it reads of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from tests.engine.quantised import SIZES
from tests.tiny import hf_model, save

Kind = gguf.GGMLQuantizationType
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe",
}
WIDE: dict[str, Any] = SIZES | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""Rows of whole blocks of 256."""
GEMMA_SIZES: dict[str, Any] = {
    "sliding_window_pattern": 6,
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 32,
}


def their_name(name: str, arch: str) -> str:
    """Return a parameter's name in a file."""
    module, _, kind = name.rpartition(".")
    if module in OUTER:
        return f"{OUTER[module]}.{kind}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{(NAMES | (GEMMA if arch == 'gemma3' else {}))[rest]}.{kind}"


def random_blocks(kind: Kind, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Return random bytes of a type that the package cannot write, with small float16 in them."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    scales = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}[kind]
    for at, wanted in zip(scales, (2e-4, 1.5e-3) if len(scales) == 2 else (5e-5,), strict=True):
        drawn = (wanted * (1 + rng.random(blocks.shape[:-1]))).astype(np.float16)
        blocks[..., at : at + 2] = drawn[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def rotated(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Put rows half a head apart side by side, as llama.cpp's converter does for Llama."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def write_gguf(
    folder: Path,
    variant: str,
    type_of: Callable[[str], Kind],
    *,
    shards: int = 1,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    **changes: Any,
) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """Write a tiny model as a GGUF file, and once more plain with the weights that this means.

    Args:
        folder: For both.
        variant: Of tests.tiny.
        type_of: The type of each matrix by its own name.
        shards: Files to split it into.
        change: Adds to the file.
        changes: Of the sizes.

    Returns:
        The file (of several the first), the plain folder in float32, and the weights of quantised
        matrices.
    """
    model = hf_model(variant, **(SIZES | changes))
    plain, config = save(model, folder / "plain"), model.config
    arch = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(folder / "model.gguf", arch, split_max_tensors=0)
    if shards > 1:
        count = -(-len(load_file(plain / "model.safetensors")) // shards)
        writer = gguf.GGUFWriter(folder / "model.gguf", arch, split_max_tensors=count)
    _describe(writer, config)
    if change is not None:
        change(writer)
    rng, meant = np.random.default_rng(7), {}
    tensors = _with_experts_joined(load_file(plain / "model.safetensors"))
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in tensors.items():
        turns = heads.get(name.split(".")[-2], 0) if arch == "llama" else 0
        values = rotated(tensor, turns) if turns else tensor
        if arch == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        is_router = name.endswith((".gate.weight", "shared_expert_gate.weight"))
        is_plain = tensor.dim() == 1 or is_router
        theirs, kind = their_name(name, arch), Kind.F32 if is_plain else type_of(name)
        if kind in {Kind.Q4_K, Kind.Q5_K, Kind.Q6_K}:
            data = random_blocks(kind, tuple(values.shape), rng)
        else:
            data = quantize(values.numpy(), kind)
        writer.add_tensor(theirs, data, raw_dtype=kind)
        read = torch.from_numpy(np.array(dequantize(data, kind)))
        read = _back(read, turns) if turns else read
        if arch == "gemma3" and name.endswith("norm.weight"):
            read = read - 1
        tensors[name] = read
        if kind not in {Kind.F32, Kind.F16, Kind.BF16}:
            meant |= _of_experts(name, read)
    tensors = {
        ours: x for name, found in tensors.items() for ours, x in _of_experts(name, found).items()
    }
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    [first, *_] = sorted(folder.glob("*.gguf"))
    return first, plain, meant


def _with_experts_joined(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with those of a layer's experts as one, [experts, rows, columns]."""
    found, experts = {}, dict[str, dict[int, torch.Tensor]]()
    for name, tensor in tensors.items():
        before, middle, rest = name.partition(".experts.")
        if not middle:
            found[name] = tensor
            continue
        number, _, ending = rest.partition(".")
        experts.setdefault(f"{before}.experts.{ending}", {})[int(number)] = tensor
    return found | {
        name: torch.stack([each[number] for number in sorted(each)])
        for name, each in experts.items()
    }


def _of_experts(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return one tensor for each expert again; others as they are."""
    before, middle, ending = name.partition(".experts.")
    if not middle:
        return {name: tensor}
    return {
        f"{before}.experts.{number}.{ending}": each.contiguous()
        for number, each in enumerate(tensor)
    }


def _back(rows: torch.Tensor, heads: int) -> torch.Tensor:
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape).contiguous()


def _describe(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write the keys of a model's sizes."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None)
    if head_dim:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = config.rope_parameters
    own = rope.get("full_attention", rope)
    writer.add_rope_freq_base(own["rope_theta"])
    if own["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(own["factor"])
    if (count := getattr(config, "num_local_experts", getattr(config, "num_experts", 0))) > 0:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if size := getattr(config, "moe_intermediate_size", 0):
            writer.add_expert_feed_forward_length(size)
        if size := getattr(config, "shared_expert_intermediate_size", 0):
            writer.add_expert_shared_feed_forward_length(size)
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
    if own["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _factors(own, config.head_dim))


def _factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """Return what Llama 3 divides frequencies by, as transformers computes it."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sizes = {"head_dim": head_dim, "hidden_size": head_dim, "num_attention_heads": 1}
    config = LlamaConfig(rope_parameters=rope, **sizes)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return (plain / scaled).numpy().astype(np.float32)
