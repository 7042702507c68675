"""Bytes beside weights and KV: tensors of a step, graphs, runtime; buffers of a load, tokenizer."""

import math
from collections.abc import Collection

from engine.asked.config import EngineSettings
from engine.asked.sampling import sampler_workspace_bytes
from engine.model.spec import ModelSpec
from kernels.sizes import MAX_SMALL_TOKENS, decode_workspace_bytes, prefill_workspace_bytes

MIB = 2**20
HOST_DECODES = 8
"""Largest decode batch that is captured once more for blocks in the host tier: only sequences that
exceed the GPU's room own such blocks, and few of them run at once."""
WORKSPACE_BYTES = 32 * MIB
"""Workspace of cuBLAS for each stream that calls it (Hopper)."""
PREFILL_SEQUENCES = 4
"""Prompts whose parts a captured step holds at most."""
PREFILL_TOKENS = (16, 64, 256)
"""Tokens of prompts that captured steps are padded to."""
MAX_LOAD_THREADS = 16
"""That read weights, at most."""
PIECE_BYTES = 8 * MIB
"""Most bytes of one read. With 16 threads, 14.6 GB in page cache came onto an H200 at 23 GB/s; with
pieces of 4 MiB at 13, of 2 MiB at 7."""
RUN_BYTES = 32 * MIB
"""What a thread reads of one file before it takes what is next, so that reads are sequential."""
BUFFERS_PER_THREAD = 2
"""One is read into while the other is copied to the GPU."""


def pad_batch(size: int) -> int:
    """Round a decode batch up to the sizes that are captured: 1, 2, 4, then multiples of 8."""
    if size <= 4:
        return 1 << (size - 1).bit_length()
    return -(-size // 8) * 8


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the decode batch sizes that are captured."""
    return tuple(sorted({pad_batch(size) for size in range(1, max_num_seqs + 1)}))


def prefill_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[tuple[int, int], ...]:
    """Return the steps with prompts that are captured: decode rows, and tokens of prompts.

    Few decode rows are not worth graphs of their own: padding costs them little. Beside a few the
    second size leaves room for them among the rows whose products only read their weight.
    """
    most = pad_batch(max_num_seqs)
    rows = sorted({0, min(8, most), min(64, most), most})
    few, some, many = PREFILL_TOKENS
    return tuple(
        (decodes, tokens)
        for decodes in rows
        for tokens in (few, some - decodes if decodes <= MAX_SMALL_TOKENS // 2 else some, many)
        if decodes + tokens <= max_num_batched_tokens
    )


def padded_prefill(
    sizes: Collection[tuple[int, int]], num_decodes: int, num_tokens: int, num_prompts: int
) -> tuple[int, int] | None:
    """Return the decode rows and tokens of prompts that a step is padded to; None: to none.

    The fewest rows in all that hold it; decode rows cost no more than tokens of prompts do.

    Args:
        sizes: What there is, as `prefill_sizes` has them.
        num_decodes: Of the step.
        num_tokens: Of prompts in it.
        num_prompts: That these tokens are of.
    """
    if num_prompts > PREFILL_SEQUENCES:
        return None
    holding = (s for s in sizes if s[0] >= num_decodes and s[1] >= num_tokens)
    return min(holding, key=lambda size: (sum(size), size), default=None)


def activation_bytes(
    spec: ModelSpec, settings: EngineSettings, dtype_bytes: int, max_model_len: int
) -> int:
    """Bytes of one step of max_num_batched_tokens tokens: hidden states, products, inputs.

    A twentieth is added for the allocator's rounding, and the largest tensor once more: where the
    place that it left in the layer before was split for smaller ones, the allocator takes another
    (105 MiB reserved and free when 112 MiB were asked for: mistral_7b, 2048 tokens, H200).
    """
    tokens, rows = settings.max_num_batched_tokens, pad_batch(settings.max_num_seqs)
    step = _step_bytes(spec, settings, dtype_bytes)
    workspace = decode_workspace_bytes(rows, spec.num_attention_heads, spec.head_dim, max_model_len)
    workspace += prefill_workspace_bytes(
        tokens, spec.num_attention_heads, spec.head_dim, max_model_len
    )
    groups = 2 if spec.layer_types else 1
    table_rows = rows + PREFILL_SEQUENCES
    inputs = groups * table_rows * math.ceil(max_model_len / 8) * 4 + tokens * 32
    tables = 1 if spec.rope_local_base_freq is None else 2
    rotary = tables * max_model_len * spec.head_dim * 4
    largest = tokens * 2 * spec.intermediate_size * dtype_bytes
    return int(1.05 * step) + workspace + inputs + rotary + largest


def _step_bytes(spec: ModelSpec, settings: EngineSettings, dtype_bytes: int) -> int:
    return settings.max_num_batched_tokens * _widest(spec) * dtype_bytes


def _widest(spec: ModelSpec) -> int:
    """Elements per token that live at once in the widest place of a layer."""
    attention = 2 * (spec.q_size + 2 * spec.kv_size) + 2 * spec.q_size
    return max(attention, 3 * spec.intermediate_size) + 4 * spec.hidden_size


def logits_bytes(spec: ModelSpec, settings: EngineSettings, dtype_bytes: int) -> int:
    """Bytes of logits of every sequence in both dtypes, and of sampling.

    Sampling begins when a step's activations are free, and takes their place: with 64 sequences and
    256 MiB of it, the allocator grew by nothing (H200).
    """
    logits = pad_batch(settings.max_num_seqs) * spec.vocab_size
    sampling = min(sampler_workspace_bytes(spec.vocab_size), logits * 80)
    beyond = max(0, sampling - _step_bytes(spec, settings, dtype_bytes))
    return logits * (dtype_bytes + 4) + beyond


def captured_bytes(
    spec: ModelSpec,
    kind: str,
    sizes: tuple[int, ...],
    prefills: tuple[tuple[int, int], ...],
    dtype_bytes: int,
) -> tuple[int, int]:
    """Bytes of captured graphs' activations and of cuBLAS workspaces; of nodes, outside torch.

    The nodes are counted as 64 KiB a layer and graph. torch keeps a workspace of cuBLAS for each
    stream that has called it: one for eager steps, and one for captures, on a
    stream of their own, where one has more rows than kernels of ours multiply.

    Args:
        spec: Sizes of the model.
        kind: Of the device; a CPU has no workspaces.
        sizes: Decode batches that are captured.
        prefills: Steps with prompts that are captured, as `prefill_sizes` has them.
        dtype_bytes: Of an element.
    """
    workspace = 0 if kind == "cpu" else WORKSPACE_BYTES
    if not sizes:
        return workspace, 0
    decode = 2 * sizes[-1] * (_widest(spec) + spec.vocab_size)
    most = max((rows + tokens for rows, tokens in prefills), default=0)
    with_prompts = int(1.1 * most * _widest(spec)) + 2 * sizes[-1] * spec.vocab_size
    pool = max(decode, with_prompts if prefills else 0) * dtype_bytes
    workspaces = 2 * workspace if max(most, sizes[-1]) > MAX_SMALL_TOKENS else workspace
    count = len(sizes) + len(prefills)
    return pool + workspaces, count * spec.num_hidden_layers * MIB // 16


def runtime_bytes(kind: str) -> int:
    """Bytes of a CUDA context and of modules, outside the allocator; none on a CPU.

    Measured with driver 580 and CUDA 13: 746 MiB on an H100, 752 to 760 with graphs on an H200.
    """
    return 0 if kind == "cpu" else 752 * MIB


def load_staging_bytes(num_bytes: int, num_threads: int) -> int:
    """Bytes of host buffers that checkpoint files are read through where not into place.

    Args:
        num_bytes: Of the files.
        num_threads: That may read.
    """
    return min(num_threads, -(-num_bytes // RUN_BYTES)) * BUFFERS_PER_THREAD * PIECE_BYTES


def tokenizer_bytes(vocab_size: int) -> int:
    """Host memory of a tokenizer and the library that reads it.

    Measured beside two: 0.08 GiB of 512 tokens, 0.12 of 49152.
    """
    return 70 * MIB + 1000 * vocab_size
