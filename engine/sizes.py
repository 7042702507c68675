"""Bytes on the GPU beside weights and KV: activations, logits, sampling, graphs, runtime."""

import math

from engine.config import EngineSettings
from engine.sampling_params import sampler_workspace_bytes
from engine.spec import ModelSpec
from kernels.sizes import decode_workspace_bytes

MIB = 2**20


def pad_batch(size: int) -> int:
    """Round a decode batch up to the sizes that are captured: 1, 2, 4, then multiples of 8."""
    if size <= 4:
        return 1 << (size - 1).bit_length()
    return -(-size // 8) * 8


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the decode batch sizes that are captured."""
    return tuple(sorted({pad_batch(size) for size in range(1, max_num_seqs + 1)}))


def activation_bytes(
    spec: ModelSpec, settings: EngineSettings, dtype_bytes: int, max_model_len: int
) -> int:
    """Bytes of one step of max_num_batched_tokens tokens: hidden states, products, workspace."""
    tokens = settings.max_num_batched_tokens
    attention = 2 * (spec.q_size + 2 * spec.kv_size) + 2 * spec.q_size
    mlp = 3 * spec.intermediate_size
    widest = max(attention, mlp) + 5 * spec.hidden_size
    rows = pad_batch(settings.max_num_seqs)
    workspace = decode_workspace_bytes(rows, spec.num_attention_heads, spec.head_dim, max_model_len)
    tables = rows * math.ceil(max_model_len / 8) * 4 + tokens * 32
    rotary = max_model_len * spec.head_dim * 4
    return tokens * widest * dtype_bytes + workspace + tables + rotary


def logits_bytes(spec: ModelSpec, settings: EngineSettings, dtype_bytes: int) -> int:
    """Bytes of logits of every sequence in both dtypes, and of sampling."""
    logits = pad_batch(settings.max_num_seqs) * spec.vocab_size
    sampling = min(sampler_workspace_bytes(spec.vocab_size), logits * 80)
    return logits * (dtype_bytes + 4) + sampling


def graph_bytes(spec: ModelSpec, sizes: tuple[int, ...], dtype_bytes: int) -> int:
    """Bytes that captured graphs hold: kernel nodes of each, one pool of activations."""
    if not sizes:
        return 0
    widest = max(3 * spec.intermediate_size, 4 * spec.q_size) + 5 * spec.hidden_size
    pool = sizes[-1] * (widest * dtype_bytes + spec.vocab_size * (dtype_bytes + 4))
    return 2 * pool + len(sizes) * spec.num_hidden_layers * MIB // 8


def runtime_bytes(kind: str) -> int:
    """Bytes that the CUDA context, libraries and allocator slack take; none on a CPU."""
    return 0 if kind == "cpu" else 704 * MIB
