"""A small GGUF file, written without torch."""

from pathlib import Path

import gguf
import numpy as np

from engine.model.spec import ModelSpec
from tests.console.registry.conftest import CONFIG

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write(file: Path) -> Path:
    """Write the tiny model of conftest in float32."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(CONFIG["vocab_size"])
    for tensor in ModelSpec.from_hf_config(CONFIG).tensors():
        for part in tensor.parts:
            module, _, kind = part.name.rpartition(".")
            if module in OUTER:
                name = OUTER[module]
            else:
                _, _, layer, rest = module.split(".", 3)
                name = f"blk.{layer}.{NAMES[rest]}"
            writer.add_tensor(f"{name}.{kind}", np.zeros(part.shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
