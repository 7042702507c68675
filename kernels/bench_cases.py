"""What kernels.bench times: inputs at the sizes of an 8-billion-parameter model, bfloat16.

A case's bytes are those that the operator cannot avoid moving; they exceed the card's cache, so
that a repeat finds nothing there, but for those of single prompts, whose keys may stay in it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from kernels import ops
from kernels.ref import activation, attention, block_copy, linear, norm, prefill, rotary_write_kv
from kernels.workspace import prefill_workspace

_HIDDEN = 4096
_FEED_FORWARD = 14336
_HEADS = 32
_KV_HEADS = 8
_HEAD_SIZE = 128
_BLOCK_SIZE = 16
_VOCAB = 128256
_DTYPE = torch.bfloat16
_ELEMENT_BYTES = 2


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to time.

    Attributes:
        op: the operator's name.
        shape: its sizes, for the table.
        run_op: calls the operator.
        run_twin: calls the twin on the same inputs.
        num_bytes: bytes read and written.
        num_flops: floating point operations, where they may limit; otherwise 0.
    """

    op: str
    shape: str
    run_op: Callable[[], object]
    run_twin: Callable[[], object]
    num_bytes: int
    num_flops: int = 0


def _rms_norm(device: torch.device) -> Case:
    x, weight = _randn((16384, _HIDDEN), device), _randn((_HIDDEN,), device)
    return Case(
        "rms_norm",
        "16384 x 4096",
        lambda: ops.rms_norm(x, weight, 1e-6),
        lambda: norm.rms_norm(x, weight, 1e-6),
        2 * x.nbytes,
    )


def _add_rms_norm(device: torch.device) -> Case:
    x, weight = _randn((16384, _HIDDEN), device), _randn((_HIDDEN,), device)
    residual = torch.zeros_like(x)
    return Case(
        "add_rms_norm",
        "16384 x 4096",
        lambda: ops.add_rms_norm(x, residual, weight, 1e-6),
        lambda: norm.add_rms_norm(x, residual, weight, 1e-6),
        4 * x.nbytes,
    )


def _rms_norm_add(device: torch.device) -> Case:
    x, weight = _randn((16384, _HIDDEN), device), _randn((_HIDDEN,), device)
    residual = torch.zeros_like(x)
    return Case(
        "rms_norm_add_",
        "16384 x 4096",
        lambda: ops.rms_norm_add_(x, residual, weight, 1e-6),
        lambda: norm.rms_norm_add_(x, residual, weight, 1e-6),
        3 * x.nbytes,
    )


def _rotary_write_kv(device: torch.device, kind: str) -> Case:
    q, k, v = _heads(16384, device)
    k_cache, v_cache = _cache(16384, device)
    slots = torch.randperm(16384, device=device)
    cos_sin = torch.ones((16384, _HEAD_SIZE), device=device)
    positions = torch.arange(16384, device=device)
    factors = {"no norm": None, "norm of heads": (1, 1), "norm of all": (_HEADS, _KV_HEADS)}[kind]
    weights: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if factors is not None:
        q_factor, k_factor = factors
        weights = (
            _randn((q_factor * _HEAD_SIZE,), device),
            _randn((k_factor * _HEAD_SIZE,), device),
        )
    return Case(
        "rotary_write_kv_",
        f"16384 tokens, 32 + 8 heads x 128, {kind}",
        lambda: ops.rotary_write_kv_(
            q, k, v, *weights, 1e-6, cos_sin, positions, k_cache, v_cache, slots
        ),
        lambda: rotary_write_kv.rotary_write_kv_(
            q, k, v, *weights, 1e-6, cos_sin, positions, k_cache, v_cache, slots
        ),
        2 * (q.numel() + k.numel() + v.numel()) * _ELEMENT_BYTES + cos_sin.nbytes,
    )


def _silu_mul(device: torch.device) -> Case:
    gate_up = _randn((8192, 2 * _FEED_FORWARD), device)
    return Case(
        "silu_mul",
        "8192 x 2 x 14336",
        lambda: ops.silu_mul(gate_up),
        lambda: activation.silu_mul(gate_up),
        gate_up.nbytes * 3 // 2,
    )


def _gelu_mul(device: torch.device) -> Case:
    gate_up = _randn((8192, 2 * _FEED_FORWARD), device)
    return Case(
        "gelu_mul",
        "8192 x 2 x 14336",
        lambda: ops.gelu_mul(gate_up),
        lambda: activation.gelu_mul(gate_up),
        gate_up.nbytes * 3 // 2,
    )


def _decode(device: torch.device, num_seqs: int, seq_len: int) -> Case:
    k_cache, v_cache = _cache(num_seqs * seq_len, device)
    num_blocks = k_cache.shape[0]
    tables = torch.randperm(num_blocks, device=device).to(torch.int32).view(num_seqs, -1)
    lens = torch.full((num_seqs,), seq_len, dtype=torch.int32, device=device)
    q = _randn((num_seqs, _HEADS, _HEAD_SIZE), device)
    out = torch.empty_like(q)
    workspace = ops.decode_workspace(num_seqs, _HEADS, _HEAD_SIZE, seq_len, device)
    scale = _HEAD_SIZE**-0.5
    return Case(
        "paged_decode_attention",
        f"{num_seqs} x {seq_len} keys, 32/8 heads x 128",
        lambda: ops.paged_decode_attention(
            q,
            k_cache,
            v_cache,
            tables,
            lens,
            scale,
            max_seq_len=seq_len,
            out=out,
            workspace=workspace,
        ),
        lambda: attention.paged_decode_attention(q, k_cache, v_cache, tables, lens, scale, out=out),
        2 * num_seqs * seq_len * _KV_HEADS * _HEAD_SIZE * _ELEMENT_BYTES + 2 * q.nbytes,
    )


def _prefill(
    device: torch.device,
    num_seqs: int,
    num_queries: int,
    seq_len: int,
    num_parts: int | None = None,
) -> Case:
    """Prefill of the last queries; with a number of parts of the keys other than the operator's."""
    k_cache, v_cache = _cache(num_seqs * seq_len, device)
    num_blocks = k_cache.shape[0]
    tables = torch.randperm(num_blocks, device=device).to(torch.int32).view(num_seqs, -1)
    lens = torch.full((num_seqs,), seq_len, dtype=torch.int32, device=device)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * num_queries
    q = _randn((num_seqs * num_queries, _HEADS, _HEAD_SIZE), device)
    out = torch.empty_like(q)
    scale = _HEAD_SIZE**-0.5
    workspace = prefill_workspace(num_seqs * num_queries, _HEADS, _HEAD_SIZE, seq_len, device)
    pairs_per_seq = num_queries * (2 * seq_len - num_queries + 1) // 2

    def run() -> None:
        arguments = (q, k_cache, v_cache, tables, starts, lens, scale)
        if num_parts is None:
            ops.paged_prefill_attention(
                *arguments, max_query_len=num_queries, out=out, workspace=workspace
            )
            return
        from kernels.triton import prefill_attention  # noqa: PLC0415  needs a GPU

        prefill_attention.paged_prefill_attention(
            *arguments, max_query_len=num_queries, out=out, num_parts=num_parts
        )

    parts = "" if num_parts is None else f", {num_parts} parts"
    return Case(
        "paged_prefill_attention",
        f"{num_seqs} x {num_queries} queries of {seq_len} tokens, 32/8 heads x 128{parts}",
        run,
        lambda: prefill.paged_prefill_attention(
            q, k_cache, v_cache, tables, starts, lens, scale, out=out
        ),
        2 * num_seqs * seq_len * _KV_HEADS * _HEAD_SIZE * _ELEMENT_BYTES + 2 * q.nbytes,
        num_flops=4 * num_seqs * pairs_per_seq * _HEADS * _HEAD_SIZE,
    )


def _prefill_part(device: torch.device) -> Case:
    num_queries, seq_len, part_keys = 2048, 8192, 2048
    k_cache, v_cache = _cache(seq_len, device)
    num_blocks = k_cache.shape[0]
    # The first half of the keys is staged, the other in the cache; both are read where they are.
    stage = ops.HostCache(k_cache, v_cache)
    tables = torch.randperm(num_blocks, device=device).to(torch.int32)[None]
    tables[:, : num_blocks // 2] += num_blocks
    lens = torch.tensor([seq_len], dtype=torch.int32, device=device)
    starts = torch.tensor([0, num_queries], dtype=torch.int32, device=device)
    q = _randn((num_queries, _HEADS, _HEAD_SIZE), device)
    out = torch.empty_like(q)
    state = ops.prefill_state(num_queries, _HEADS, _HEAD_SIZE, device)
    arguments = (q, k_cache, v_cache, tables, starts, lens, _HEAD_SIZE**-0.5)

    def run(attend: Callable[..., None], **options: int) -> None:
        for begin in range(0, seq_len, part_keys):
            end = begin + part_keys
            attend(
                *arguments,
                stage=stage,
                begin_key=begin,
                end_key=end,
                state=state,
                is_last=end == seq_len,
                out=out,
                **options,
            )

    pairs = num_queries * (2 * seq_len - num_queries + 1) // 2
    state_bytes = state.row_max.nbytes + state.row_sum.nbytes + state.acc.nbytes
    return Case(
        "paged_prefill_part",
        f"{num_queries} queries of {seq_len} tokens in {seq_len // part_keys} parts",
        lambda: run(ops.paged_prefill_part, max_query_len=num_queries),
        lambda: run(prefill.paged_prefill_part),
        2 * seq_len * _KV_HEADS * _HEAD_SIZE * _ELEMENT_BYTES
        + (seq_len // part_keys + 1) * q.nbytes
        + 2 * (seq_len // part_keys - 1) * state_bytes,
        num_flops=4 * pairs * _HEADS * _HEAD_SIZE,
    )


def _embedding(device: torch.device) -> Case:
    table = _randn((_VOCAB, _HIDDEN), device)
    ids = torch.randint(0, _VOCAB, (16384,), device=device)
    return Case(
        "embedding",
        "16384 of 128256 rows x 4096",
        lambda: ops.embedding(ids, table),
        lambda: linear.embedding(ids, table),
        2 * ids.numel() * _HIDDEN * _ELEMENT_BYTES,
    )


def _linear(device: torch.device, num_tokens: int, size_in: int, size_out: int) -> Case:
    x = _randn((num_tokens, size_in), device)
    # As many weights as exceed the card's cache, each read once a call.
    weights = _randn((_copies(size_in * size_out), size_out, size_in), device)
    workspace = ops.decode_workspace(1, 1, _HEAD_SIZE, 1, device)
    out_bytes = num_tokens * size_out * _ELEMENT_BYTES
    return Case(
        "linear",
        f"{weights.shape[0]} of {num_tokens} x {size_in} by {size_in} x {size_out}",
        lambda: [ops.linear(x, weight, workspace=workspace) for weight in weights],
        lambda: [linear.linear(x, weight) for weight in weights],
        weights.nbytes + weights.shape[0] * (x.nbytes + out_bytes),
        num_flops=2 * num_tokens * weights.numel(),
    )


def _linear_silu_mul(device: torch.device, num_tokens: int) -> Case:
    x = _randn((num_tokens, _HIDDEN), device)
    weight = _randn((2 * _FEED_FORWARD, _HIDDEN), device)
    return Case(
        "linear_silu_mul",
        f"{num_tokens} x 4096 by 4096 x 2 x {_FEED_FORWARD}",
        lambda: ops.linear_silu_mul(x, weight),
        lambda: linear.linear_silu_mul(x, weight),
        x.nbytes + weight.nbytes + num_tokens * _FEED_FORWARD * _ELEMENT_BYTES,
        num_flops=2 * num_tokens * weight.numel(),
    )


def _linear_gelu_mul(device: torch.device, num_tokens: int) -> Case:
    x = _randn((num_tokens, _HIDDEN), device)
    weight = _randn((2 * _FEED_FORWARD, _HIDDEN), device)
    return Case(
        "linear_gelu_mul",
        f"{num_tokens} x 4096 by 4096 x 2 x {_FEED_FORWARD}",
        lambda: ops.linear_gelu_mul(x, weight),
        lambda: linear.linear_gelu_mul(x, weight),
        x.nbytes + weight.nbytes + num_tokens * _FEED_FORWARD * _ELEMENT_BYTES,
        num_flops=2 * num_tokens * weight.numel(),
    )


def _copies(num_elements: int) -> int:
    """Return how many weights of this size are 256 MiB or more."""
    return max(1, -(-(2**28) // (num_elements * _ELEMENT_BYTES)))


def _randn(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.randn(shape, dtype=_DTYPE, device=device)


def _heads(
    num_tokens: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw a fused projection and return its views q [T, N, H], k [T, K, H] and v [T, K, H]."""
    num_heads = _HEADS + 2 * _KV_HEADS
    fused = _randn((num_tokens, num_heads * _HEAD_SIZE), device)
    heads = fused.view(num_tokens, num_heads, _HEAD_SIZE)
    return heads[:, :_HEADS], heads[:, _HEADS:-_KV_HEADS], heads[:, -_KV_HEADS:]


def _cache(num_tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one layer's keys and values, [B, K, P, H] each, inside one tensor."""
    shape = (num_tokens // _BLOCK_SIZE, 2, _KV_HEADS, _BLOCK_SIZE, _HEAD_SIZE)
    cache = _randn(shape, device)
    return cache[:, 0], cache[:, 1]


def _copy_blocks(device: torch.device) -> Case:
    blocks, words = 1024, 2**16
    src = torch.zeros((blocks, words), dtype=torch.int32, device=device)
    dst, ids = torch.empty_like(src), torch.randperm(blocks, device=device)
    return Case(
        "copy_blocks",
        "1024 x 256 KiB",
        lambda: ops.copy_blocks(dst, src, ids, ids),
        lambda: block_copy.copy_blocks(dst, src, ids, ids),
        2 * src.nbytes,
    )


BUILDERS: dict[str, tuple[Callable[[torch.device], Case], ...]] = {
    "rms_norm": (_rms_norm,),
    "add_rms_norm": (_add_rms_norm,),
    "rms_norm_add_": (_rms_norm_add,),
    "rotary_write_kv_": (
        lambda device: _rotary_write_kv(device, "no norm"),
        lambda device: _rotary_write_kv(device, "norm of heads"),
        lambda device: _rotary_write_kv(device, "norm of all"),
    ),
    "silu_mul": (_silu_mul,),
    "gelu_mul": (_gelu_mul,),
    "paged_decode_attention": (
        lambda device: _decode(device, 32, 4096),
        lambda device: _decode(device, 1, 4096),
        lambda device: _decode(device, 64, 512),
    ),
    "paged_prefill_attention": (
        lambda device: _prefill(device, 4, 2048, 2048),
        lambda device: _prefill(device, 1, 512, 4096),
        *(
            partial(_prefill, num_seqs=1, num_queries=32, seq_len=8192, num_parts=parts)
            for parts in (None, 1, 8, 32)
        ),
        *(
            partial(_prefill, num_seqs=1, num_queries=256, seq_len=32_768, num_parts=parts)
            for parts in (None, 1, 2, 8)
        ),
        lambda device: _prefill(device, 1, 32, 128),
        lambda device: _prefill(device, 1, 32, 128, num_parts=1),
    ),
    "paged_prefill_part": (_prefill_part,),
    "copy_blocks": (_copy_blocks,),
    "embedding": (_embedding,),
    "linear": (
        lambda device: _linear(device, 1, 4096, 6144),
        lambda device: _linear(device, 1, 4096, 4096),
        lambda device: _linear(device, 1, 14336, 4096),
        lambda device: _linear(device, 16, 4096, 6144),
        lambda device: _linear(device, 16, 14336, 4096),
        lambda device: _linear(device, 64, 4096, 6144),
        lambda device: _linear(device, 64, 14336, 4096),
        lambda device: _linear(device, 2048, 4096, 28672),
    ),
    "linear_silu_mul": (
        lambda device: _linear_silu_mul(device, 1),
        lambda device: _linear_silu_mul(device, 16),
        lambda device: _linear_silu_mul(device, 64),
    ),
    "linear_gelu_mul": (lambda device: _linear_gelu_mul(device, 1),),
}
"""Operator to the cases that are timed for it."""
