"""Time operators on a GPU: `python -m kernels.bench [NAME ...]`, all of them by default.

Inputs have the sizes of an 8-billion-parameter model in bfloat16. For each case: milliseconds of
one call replayed from a CUDA graph, the bytes that it cannot avoid moving a second, and that rate
as a share of this card's copy rate, read plus written, or of the rate at which a kernel reads
pinned host memory in place. Operators are timed beside their PyTorch twin, run eagerly. Others:

- tiered: decode attention of one sequence whose other blocks lie in host memory, by where in the
  sequence they lie, over the GPU's part alone plus the host's bytes at their rate; its results are
  compared bit by bit with those of one tier, and the exit code is 1 where they differ.
- tier_cost: what a host tier costs where every block is on the GPU.
- gather: one layer of host blocks into a buffer and back, by programs.
- experts: claims of experts of which none is missing, and copies of missing ones from pinned memory
  by programs, of a model with 128 experts of 2048 times 768.
- linear_codes, linear_silu_mul_codes: products with weights in codes over the same with plain ones;
  restore, pack: such weights as a whole. Bytes are those that are stored; results are compared bit
  by bit, and the exit code is 1 where they differ.
- linear_quantised, linear_silu_mul_quantised, restore_quantised: the same with quantised weights of
  a 7B model, in some kinds.

Speed is measured here and in no test.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch

from kernels.arguments import (
    CODES_PARTS,
    QUANTISED_ARRAYS,
    AttentionCall,
    Codes,
    DecodeWorkspace,
    ExpertArrays,
    ExpertCache,
    HostCache,
    PrefillPart,
    Quantised,
    decode_workspace,
    empty_codes,
    expert_cache,
    prefill_state,
    prefill_workspace,
)
from kernels.ops import attention, codes, kv, linear, norm, quantised
from kernels.ops import expert_cache as expert_ops
from kernels.ref import attention as ref_attention
from kernels.ref import kv as ref_kv
from kernels.ref import linear as ref_linear
from kernels.ref import norm as ref_norm
from kernels.sizes import expert_cache_bytes

HIDDEN, FEED_FORWARD, VOCAB = 4096, 14336, 128256
HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 32, 8, 128, 16
DTYPE, SCALE = torch.bfloat16, HEAD_SIZE**-0.5
TOKEN_BYTES: Final = 2 * KV_HEADS * HEAD_SIZE * 2
"""Keys and values of a token in one layer."""
GPU_TOKENS: Final = 42_000
"""Tokens of a sequence over two tiers that lie on the GPU."""
COPY_BYTES: Final = 2**30
PROBE_BYTES: Final = 2**28
WARMUPS, REPEATS, TWIN_REPEATS, ROUNDS = 3, 30, 3, 10
Run = Callable[[], object]
Weight = torch.Tensor | Codes | Quantised
Product = Callable[[torch.Tensor, Weight], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to time.

    Attributes:
        name: what runs, with its sizes.
        run: enqueues it, once for each of num_layers layers.
        num_bytes: bytes read and written, of one layer; they exceed the card's cache, so that a
            repeat finds nothing there, but for those of single prompts.
        twin: calls the twin on the same inputs.
        num_flops: floating point operations, where they may limit; otherwise 0.
        kind: which rate num_bytes are held against, "copy" or "in place".
        num_layers: layers that a call goes over.
        beside: what, with host_bytes at the in-place rate, a layer is held against.
        host_bytes: bytes read in host memory, of one layer.
        check: tells whether the result has the bits of the reference.
        is_captured: whether calls are replayed from a graph; False: one waits for the card.
    """

    name: str
    run: Run
    num_bytes: int
    twin: Run | None = None
    num_flops: int = 0
    kind: str = "copy"
    num_layers: int = 1
    beside: "Case | None" = None
    host_bytes: int = 0
    check: Callable[[], bool] | None = None
    is_captured: bool = True


@dataclass(frozen=True, slots=True)
class Timing:
    """One line of the table; figures without a meaning for the case are None."""

    name: str
    kernel_ms: float
    gb_per_s: float
    share: float
    tflop_per_s: float | None = None
    twin_ms: float | None = None
    ratio: float | None = None
    """Ratio of kernel_ms to what the case is held against."""
    is_equal: bool | None = None


class _HostArray:
    """Pinned host memory, described to torch as memory of the card."""

    def __init__(self, pinned: torch.Tensor) -> None:
        self.pinned = pinned
        self.__cuda_array_interface__ = {
            "shape": (pinned.numel() * pinned.element_size(),),
            "typestr": "|u1",
            "data": (pinned.data_ptr(), False),
            "version": 3,
        }


def host_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate zeros in pinned host memory; return a CUDA tensor over them, which keeps them."""
    pinned = torch.zeros(shape, dtype=dtype, pin_memory=True)
    return torch.as_tensor(_HostArray(pinned), device="cuda").view(dtype).view(shape)


def captured(run: Run) -> Run:
    """Capture a call in a CUDA graph after warming it up, and return the graph's replay."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUPS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def median_ms(run: Run, repeats: int = REPEATS) -> float:
    """Return the median milliseconds of a call, from one pair of events a call, after one more."""
    run()
    pairs = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    pairs[-1][1].synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in pairs))


def measure_rates(device: torch.device, *, in_place: bool = True) -> dict[str, float]:
    """Return GB/s of copies within the card's memory, and of reads of pinned host memory in place.

    Args:
        device: the card.
        in_place: measure the second one too.
    """
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rates = {"copy": 2 * COPY_BYTES / median_ms(lambda: target.copy_(source)) / 1e6}
    if in_place:
        view, out = host_tensor((PROBE_BYTES // 4,), torch.int32), target.view(torch.int32)
        read_ms = median_ms(lambda: torch.add(view, 0, out=out[: len(view)]))
        rates["in place"] = PROBE_BYTES / read_ms / 1e6
    return rates


def time_case(case: Case, rates: Mapping[str, float]) -> Timing:
    """Time one case against rates of the same card."""
    run = captured(case.run) if case.is_captured else case.run
    kernel_ms = median_ms(run) / case.num_layers
    gb_per_s = case.num_bytes / kernel_ms / 1e6
    ratio = None
    if case.beside is not None:
        near_ms = median_ms(captured(case.beside.run)) / case.beside.num_layers
        far_ms = case.host_bytes / rates["in place"] / 1e6 if case.host_bytes else 0.0
        ratio = kernel_ms / (near_ms + far_ms)
    return Timing(
        name=case.name,
        kernel_ms=kernel_ms,
        gb_per_s=gb_per_s,
        share=gb_per_s / rates[case.kind],
        tflop_per_s=case.num_flops / kernel_ms / 1e9 if case.num_flops else None,
        twin_ms=None if case.twin is None else median_ms(case.twin, TWIN_REPEATS),
        ratio=ratio,
        is_equal=None if case.check is None else case.check(),
    )


def render(timing: Timing) -> str:
    """Return one line of the table."""

    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    bits = {None: "", True: "equal", False: "DIFFERS"}[timing.is_equal]
    return (
        f"{timing.name:<84} {timing.kernel_ms:>9.4f} {timing.gb_per_s:>8.1f} {timing.share:>6.3f} "
        f"{shown(timing.tflop_per_s, '.1f'):>8} {shown(timing.twin_ms, '.3f'):>9} "
        f"{shown(timing.ratio, '.3f'):>6} {bits:>7}"
    ).rstrip()


def randn(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Draw a tensor of DTYPE."""
    return torch.randn(shape, dtype=DTYPE, device=device)


def paged(num_seqs: int, seq_len: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one layer's keys and values [B, 2, K, P, H], and tables [S, M] of sequences."""
    blocks = num_seqs * seq_len // BLOCK
    cache = randn((blocks, 2, KV_HEADS, BLOCK, HEAD_SIZE), device)
    tables = torch.randperm(blocks, device=device).to(torch.int32).view(num_seqs, -1)
    return cache, tables


def full(num_seqs: int, seq_len: int, device: torch.device) -> torch.Tensor:
    """Return the lengths of sequences that are equally long."""
    return torch.full((num_seqs,), seq_len, dtype=torch.int32, device=device)


def _workspace(num_seqs: int, seq_len: int, device: torch.device) -> DecodeWorkspace:
    return decode_workspace(num_seqs, HEADS, HEAD_SIZE, seq_len + BLOCK, device)


def _norms(op: str, num_moved: int, device: torch.device) -> Iterator[Case]:
    x, weight = randn((16384, HIDDEN), device), randn((HIDDEN,), device)
    arguments = (x, weight) if op == "rms_norm" else (x, torch.zeros_like(x), weight)
    run, twin = (partial(getattr(module, op), *arguments, 1e-6) for module in (norm, ref_norm))
    yield Case(f"{op} 16384 x 4096", run, num_moved * x.nbytes, twin)


def _activations(op: str, device: torch.device) -> Iterator[Case]:
    gate_up = randn((8192, 2 * FEED_FORWARD), device)
    run, twin = (partial(getattr(module, op), gate_up) for module in (linear, ref_linear))
    yield Case(f"{op} 8192 x 2 x 14336", run, gate_up.nbytes * 3 // 2, twin)


def _fused_heads(num_tokens: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Draw a fused projection; return it and its views q [T, N, H], k [T, K, H], v [T, K, H]."""
    fused = randn((num_tokens, HEADS + 2 * KV_HEADS, HEAD_SIZE), device)
    return fused, fused[:, :HEADS], fused[:, HEADS:-KV_HEADS], fused[:, -KV_HEADS:]


def _rotary(device: torch.device) -> Iterator[Case]:
    fused, q, k, v = _fused_heads(16384, device)
    cache, _ = paged(1, 16384, device)
    slots = torch.randperm(16384, device=device)
    cos_sin = torch.ones((16384, HEAD_SIZE), device=device)
    tail = (cos_sin, torch.arange(16384, device=device), cache[:, 0], cache[:, 1], slots)
    kinds = {"no norm": None, "norm of heads": (1, 1), "norm of all": (HEADS, KV_HEADS)}
    for kind, factors in kinds.items():
        sizes = [None, None] if factors is None else [HEAD_SIZE * factor for factor in factors]
        weights = [None if size is None else randn((size,), device) for size in sizes]
        run, twin = (
            partial(module.rotary_write_kv_, q, k, v, *weights, 1e-6, *tail)
            for module in (kv, ref_kv)
        )
        name = f"rotary_write_kv_ 16384 tokens, 32 + 8 heads x 128, {kind}"
        yield Case(name, run, 2 * fused.nbytes + cos_sin.nbytes, twin)


def _decode(device: torch.device) -> Iterator[Case]:
    for num_seqs, seq_len in ((32, 4096), (1, 4096), (64, 512)):
        cache, tables = paged(num_seqs, seq_len, device)
        q = randn((num_seqs, HEADS, HEAD_SIZE), device)
        call = AttentionCall(
            *(q, cache[:, 0], cache[:, 1], tables, full(num_seqs, seq_len, device), SCALE),
            out=torch.empty_like(q),
        )
        yield Case(
            f"paged_decode_attention {num_seqs} x {seq_len} keys, 32/8 heads x 128",
            partial(
                attention.paged_decode_attention,
                call,
                max_seq_len=seq_len,
                workspace=_workspace(num_seqs, seq_len, device),
            ),
            num_seqs * seq_len * TOKEN_BYTES + 2 * q.nbytes,
            partial(ref_attention.paged_decode_attention, call),
        )


_PREFILLS: Final = (
    *((4, 2048, 2048, None), (1, 512, 4096, None)),
    *((1, 32, 8192, parts) for parts in (None, 1, 8, 32)),
    *((1, 256, 32_768, parts) for parts in (None, 1, 2, 8)),
    *((1, 32, 128, None), (1, 32, 128, 1)),
)
"""Sequences, queries and tokens of each, and parts of the keys; None: the operator's own choice."""


def _prefill(device: torch.device) -> Iterator[Case]:
    from kernels.triton import prefill_attention  # noqa: PLC0415  needs a GPU

    for num_seqs, num_queries, seq_len, num_parts in _PREFILLS:
        cache, tables = paged(num_seqs, seq_len, device)
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * num_queries
        q = randn((num_seqs * num_queries, HEADS, HEAD_SIZE), device)
        lens = full(num_seqs, seq_len, device)
        call = AttentionCall(
            *(q, cache[:, 0], cache[:, 1], tables, lens, SCALE), out=torch.empty_like(q)
        )
        run = partial(
            attention.paged_prefill_attention,
            *(call, starts),
            max_query_len=num_queries,
            workspace=prefill_workspace(len(q), HEADS, HEAD_SIZE, seq_len, device),
        )
        if num_parts is not None:
            run = partial(
                prefill_attention.paged_prefill_attention,
                *(call, starts),
                max_query_len=num_queries,
                num_parts=num_parts,
            )
        pairs = num_seqs * num_queries * (2 * seq_len - num_queries + 1) // 2
        words = f"{num_seqs} x {num_queries} queries of {seq_len} tokens, 32/8 heads x 128"
        yield Case(
            f"paged_prefill_attention {words}{f', {num_parts} parts' if num_parts else ''}",
            run,
            num_seqs * seq_len * TOKEN_BYTES + 2 * q.nbytes,
            partial(ref_attention.paged_prefill_attention, call, starts),
            num_flops=4 * pairs * HEADS * HEAD_SIZE,
        )


def _prefill_part(device: torch.device) -> Iterator[Case]:
    num_queries, seq_len, part_keys = 2048, 8192, 2048
    cache, tables = paged(1, seq_len, device)
    # The first half of the keys is staged, the other in the cache; both are read where they are.
    tables[:, : len(cache) // 2] += len(cache)
    starts = torch.tensor([0, num_queries], dtype=torch.int32, device=device)
    q = randn((num_queries, HEADS, HEAD_SIZE), device)
    state = prefill_state(num_queries, HEADS, HEAD_SIZE, device)
    lens, num_parts = full(1, seq_len, device), seq_len // part_keys
    call = AttentionCall(
        *(q, cache[:, 0], cache[:, 1], tables, lens, SCALE),
        out=torch.empty_like(q),
        host=HostCache(cache[:, 0], cache[:, 1]),
    )

    def run(attend: Callable[..., None], **options: int) -> None:
        for begin in range(0, seq_len, part_keys):
            end = begin + part_keys
            part = PrefillPart(begin, end, is_last=end == seq_len, state=state)
            attend(call, starts, part, **options)

    state_bytes = state.row_max.nbytes + state.row_sum.nbytes + state.acc.nbytes
    yield Case(
        f"paged_prefill_part {num_queries} queries of {seq_len} tokens in {num_parts} parts",
        lambda: run(attention.paged_prefill_part, max_query_len=num_queries),
        seq_len * TOKEN_BYTES + (num_parts + 1) * q.nbytes + 2 * (num_parts - 1) * state_bytes,
        lambda: run(ref_attention.paged_prefill_part),
        num_flops=2 * num_queries * (2 * seq_len - num_queries + 1) * HEADS * HEAD_SIZE,
    )


def _copy_blocks(device: torch.device) -> Iterator[Case]:
    src = torch.zeros((1024, 2**16), dtype=torch.int32, device=device)
    ids = torch.randperm(1024, device=device)
    arguments = (torch.empty_like(src), src, ids, ids)
    run, twin = (partial(module.copy_blocks, *arguments) for module in (kv, ref_kv))
    yield Case("copy_blocks 1024 x 256 KiB", run, 2 * src.nbytes, twin)


def _embedding(device: torch.device) -> Iterator[Case]:
    table, ids = randn((VOCAB, HIDDEN), device), torch.randint(0, VOCAB, (16384,), device=device)
    run, twin = (partial(module.embedding, ids, table) for module in (linear, ref_linear))
    yield Case("embedding 16384 of 128256 rows x 4096", run, 4 * len(ids) * HIDDEN, twin)


_PRODUCTS: Final = (
    *((1, 4096, 6144), (1, 4096, 4096), (1, 14336, 4096), (16, 4096, 6144)),
    *((16, 14336, 4096), (64, 4096, 6144), (64, 14336, 4096), (2048, 4096, 28672)),
)


def num_copies(size_in: int, size_out: int) -> int:
    """Return how many weights of a size exceed the card's cache: each is read once a call."""
    return max(1, -(-(2**28) // (2 * size_in * size_out)))


def _linear(device: torch.device) -> Iterator[Case]:
    workspace = decode_workspace(1, 1, HEAD_SIZE, 1, device)

    def run(x: torch.Tensor, weights: torch.Tensor) -> None:
        for weight in weights:
            linear.linear(x, weight, workspace=workspace)

    def twin(x: torch.Tensor, weights: torch.Tensor) -> None:
        for weight in weights:
            ref_linear.linear(x, weight)

    for num_tokens, size_in, size_out in _PRODUCTS:
        copies = num_copies(size_in, size_out)
        x, weights = (
            randn((num_tokens, size_in), device),
            randn((copies, size_out, size_in), device),
        )
        yield Case(
            f"linear {copies} of {num_tokens} x {size_in} by {size_in} x {size_out}",
            partial(run, x, weights),
            weights.nbytes + copies * (x.nbytes + 2 * num_tokens * size_out),
            partial(twin, x, weights),
            num_flops=2 * num_tokens * weights.numel(),
        )


def _gated(op: str, batches: tuple[int, ...], device: torch.device) -> Iterator[Case]:
    weight = randn((2 * FEED_FORWARD, HIDDEN), device)
    for num_tokens in batches:
        x = randn((num_tokens, HIDDEN), device)
        run, twin = (partial(getattr(module, op), x, weight) for module in (linear, ref_linear))
        yield Case(
            f"{op} {num_tokens} x 4096 by 4096 x 2 x {FEED_FORWARD}",
            run,
            x.nbytes + weight.nbytes + 2 * num_tokens * FEED_FORWARD,
            twin,
            num_flops=2 * num_tokens * weight.numel(),
        )


OPERATORS: Final[Mapping[str, Callable[[torch.device], Iterator[Case]]]] = {
    "rms_norm": partial(_norms, "rms_norm", 2),
    "add_rms_norm": partial(_norms, "add_rms_norm", 4),
    "rms_norm_add_": partial(_norms, "rms_norm_add_", 3),
    "rotary_write_kv_": _rotary,
    "silu_mul": partial(_activations, "silu_mul"),
    "gelu_mul": partial(_activations, "gelu_mul"),
    "paged_decode_attention": _decode,
    "paged_prefill_attention": _prefill,
    "paged_prefill_part": _prefill_part,
    "copy_blocks": _copy_blocks,
    "embedding": _embedding,
    "linear": _linear,
    "linear_silu_mul": partial(_gated, "linear_silu_mul", (1, 16, 64)),
    "linear_gelu_mul": partial(_gated, "linear_gelu_mul", (1,)),
}
"""Operator -> the cases that are timed for it."""


@dataclass(frozen=True)
class TieredSequence:
    """One sequence of several layers: blocks of the GPU, then those of host memory.

    gpu and host are [B, L, 2, K, P, H]; the table has the GPU's blocks first.
    """

    gpu: torch.Tensor
    host: torch.Tensor
    table: torch.Tensor
    q: torch.Tensor
    workspace: DecodeWorkspace

    @classmethod
    def draw(
        cls, num_tokens: int, gpu_tokens: int, num_layers: int, device: torch.device
    ) -> "TieredSequence":
        """Draw one of so many tokens, of which gpu_tokens lie on the GPU."""
        shape = (num_layers, 2, KV_HEADS, BLOCK, HEAD_SIZE)
        num_gpu = gpu_tokens // BLOCK
        num_host = -(-num_tokens // BLOCK) - num_gpu
        host = host_tensor((num_host, *shape), DTYPE)
        host.copy_(randn(host.shape, device))
        order = [torch.randperm(num, device=device) for num in (num_gpu, num_host)]
        table = torch.cat([order[0], num_gpu + order[1]]).to(torch.int32)[None]
        q = randn((1, HEADS, HEAD_SIZE), device)
        gpu = randn((num_gpu, *shape), device)
        return cls(gpu, host, table, q, _workspace(1, num_tokens, device))

    def attend(self, table: torch.Tensor, lens: torch.Tensor, out: torch.Tensor) -> None:
        """Attend in all layers; the last layer's result stays in out."""
        for layer in range(self.gpu.shape[1]):
            call = AttentionCall(
                *(self.q, self.gpu[:, layer, 0], self.gpu[:, layer, 1], table, lens, SCALE),
                out=out,
                host=HostCache(self.host[:, layer, 0], self.host[:, layer, 1]),
            )
            attention.paged_decode_attention(
                call, max_seq_len=table.shape[1] * BLOCK, workspace=self.workspace
            )

    def has_bits_of_one_tier(self, table: torch.Tensor) -> bool:
        """Tell whether the last layer's result is that of all blocks on the GPU."""
        one_tier = torch.cat([self.gpu[:, -1], self.host[:, -1]])
        out, expected = torch.empty_like(self.q), torch.empty_like(self.q)
        lens = full(1, table.shape[1] * BLOCK, table.device)
        self.attend(table, lens, out)
        call = AttentionCall(
            self.q, one_tier[:, 0], one_tier[:, 1], table, lens, SCALE, out=expected
        )
        attention.paged_decode_attention(
            call, max_seq_len=table.shape[1] * BLOCK, workspace=self.workspace
        )
        return torch.equal(out, expected)


def _tiered(device: torch.device) -> Iterator[Case]:
    for num_tokens, num_layers in ((55_000, 4), (130_000, 2)):
        sequence = TieredSequence.draw(num_tokens, GPU_TOKENS, num_layers, device)
        table, near = sequence.table, len(sequence.gpu) * BLOCK
        length = table.shape[1] * BLOCK
        host_bytes = (length - near) * TOKEN_BYTES
        mixed = table[:, torch.randperm(table.shape[1], device=device)]
        out = torch.empty_like(sequence.q)
        run = partial(sequence.attend, table, full(1, near, device), out)
        alone = Case("", run, host_bytes, num_layers=num_layers)
        for where, at in {"end": table, "start": table.flip(1), "mixed": mixed}.items():
            yield Case(
                f"decode, 1 x {num_tokens} keys, host's at the {where}",
                partial(sequence.attend, at, full(1, length, device), out),
                host_bytes,
                kind="in place",
                num_layers=num_layers,
                beside=alone,
                host_bytes=host_bytes,
                check=partial(sequence.has_bits_of_one_tier, at),
            )


def _tier_cost(device: torch.device) -> Iterator[Case]:
    """All blocks on the GPU; a tier beside them that holds none of the sequences' blocks."""
    for num_seqs, seq_len in ((32, 4096), (1, 4096), (256, 512)):
        cache, tables = paged(num_seqs, seq_len, device)
        blocks = host_tensor((16, *cache.shape[1:]), DTYPE)
        q = randn((num_seqs, HEADS, HEAD_SIZE), device)
        call = AttentionCall(
            *(q, cache[:, 0], cache[:, 1], tables, full(num_seqs, seq_len, device), SCALE),
            out=torch.empty_like(q),
        )
        attend = partial(
            attention.paged_decode_attention,
            max_seq_len=seq_len,
            workspace=_workspace(num_seqs, seq_len, device),
        )
        num_bytes = num_seqs * seq_len * TOKEN_BYTES + 2 * q.nbytes
        case = Case(
            f"decode attention, {num_seqs} x {seq_len} keys, one tier",
            partial(attend, call),
            num_bytes,
        )
        yield case
        run = partial(attend, replace(call, host=HostCache(blocks[:, 0], blocks[:, 1])))
        yield replace(case, name=case.name.replace("one", "two"), run=run, beside=case)


def _gather(device: torch.device) -> Iterator[Case]:
    from kernels.triton.block_copy import copy_blocks  # noqa: PLC0415  needs Triton

    num_layers, words = 4, BLOCK * TOKEN_BYTES // 4
    host = host_tensor((1024, num_layers, words), torch.int32)
    stage = torch.zeros((512, words), dtype=torch.int32, device=device)
    slots, ids = torch.arange(512, device=device), torch.randperm(1024, device=device)[:512]

    def copy(*, is_store: bool, programs: int) -> None:
        for layer in range(num_layers):
            pair = (host[:, layer], stage, ids, slots)
            if not is_store:
                pair = (stage, host[:, layer], slots, ids)
            copy_blocks(*pair, max_programs=programs)

    for is_store in (False, True):
        for programs in (16, 32, 64, 128):
            name = f"one layer of 512 blocks {'to' if is_store else 'from'} the host, {programs}"
            run = partial(copy, is_store=is_store, programs=programs)
            yield Case(
                f"{name} programs", run, stage.nbytes, kind="in place", num_layers=num_layers
            )


_EXPERTS, _EXPERT_SLOTS, _ROUTED = 128, 42, 8
_EXPERT_BYTES: Final = {
    "bfloat16": (2 * 2048 * 768 * 2, 2048 * 768 * 2),
    "4 bits": (2 * 2048 * 768 // 2, 2 * 768 * 16 * 2, 2 * 768 * 16, 2048 * 768 // 2, 2048 * 6 * 3),
}
"""Bytes of one expert in each array."""


def _experts(device: torch.device) -> Iterator[Case]:
    from kernels.triton.expert_cache import gather  # noqa: PLC0415  needs Triton

    def empty_cache() -> ExpertCache:
        size = expert_cache_bytes(_EXPERTS, _EXPERT_SLOTS)
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        return expert_cache(_EXPERTS, _EXPERT_SLOTS, memory)

    for num_tokens in (1, 4):
        ids = torch.arange(_ROUTED * num_tokens, dtype=torch.int32, device=device)
        run = partial(expert_ops.claim, ids.view(num_tokens, _ROUTED), 0, empty_cache())
        yield Case(f"claim, {num_tokens} tokens", run, ids.nbytes)
    caches = [empty_cache() for _ in range(_EXPERTS // _ROUTED)]
    for kind, sizes in _EXPERT_BYTES.items():
        host = [host_tensor((_EXPERTS, size), torch.uint8) for size in sizes]
        bank = [torch.zeros((_EXPERT_SLOTS, n), dtype=torch.uint8, device=device) for n in sizes]
        arrays = ExpertArrays.of(host, bank)

        def copy(programs: int, arrays: ExpertArrays = arrays) -> None:
            for cache in caches:
                gather(arrays, cache, num_programs=programs)

        for missing in (1, 2, 8):
            for at, cache in enumerate(caches):  # each call copies others: none is in a cache
                experts = torch.arange(missing) + _ROUTED * at
                pairs = torch.stack([experts, torch.arange(missing) * 5], 1)
                cache.missing[:missing] = pairs.to(cache.missing)
                cache.num_missing.fill_(missing)
            for programs in (32, 64, 128):
                yield Case(
                    f"{missing} experts, {kind}, {programs} programs",
                    partial(copy, programs),
                    missing * sum(sizes),
                    kind="in place",
                    num_layers=len(caches),
                )


_CODES_TOKENS: Final = (1, 16, 32, 64)
_CODES_SIZES: Final = ((4096, 6144), (4096, 4096), (14336, 4096), (4096, 28672))
"""Inputs and rows of weights in codes."""


def stored_bytes(packed: Codes) -> int:
    """Return the bytes of a weight in codes, those of its tables among them."""
    return sum(getattr(packed, part).nbytes for part in CODES_PARTS)


def _multiply(x: torch.Tensor, weights: Iterable[Weight], product: Product) -> None:
    for weight in weights:
        product(x, weight)


def _code_products(
    op: str, sizes: tuple[tuple[int, int], ...], device: torch.device
) -> Iterator[Case]:
    """Products with weights in codes, over those with the same weights plain."""
    plain, coded = getattr(linear, op), getattr(codes, op)
    if op == "linear":
        plain = partial(plain, workspace=decode_workspace(1, 1, HEAD_SIZE, 1, device))

    def has_plain_bits(x: torch.Tensor, weights: torch.Tensor, packed: list[Codes]) -> bool:
        pairs = zip(weights, packed, strict=True)
        return all(torch.equal(coded(x, one), plain(x, weight)) for weight, one in pairs)

    for size_in, size_out in sizes:
        copies = num_copies(size_in, size_out)
        weights = randn((copies, size_out, size_in), device)
        packed = [codes.pack(weight) for weight in weights]
        for num_tokens in _CODES_TOKENS:
            x = randn((num_tokens, size_in), device)
            out_bytes = plain(x, weights[0]).nbytes
            yield Case(
                f"{op} in codes, {copies} of {num_tokens} x {size_in} by {size_in} x {size_out}",
                partial(_multiply, x, packed, coded),
                sum(map(stored_bytes, packed)) + copies * (x.nbytes + out_bytes),
                num_flops=2 * num_tokens * weights.numel(),
                beside=Case("", partial(_multiply, x, weights, plain), 0),
                check=partial(has_plain_bits, x, weights, packed),
            )


def restore_case(size_in: int, size_out: int, device: torch.device) -> Case:
    """Return the case of num_copies weights in codes that are written as bfloat16.

    A call writes them ROUNDS times, one after the other, as the prefill of a model does.
    """
    copies = num_copies(size_in, size_out)
    weights = randn((copies, size_out, size_in), device)
    packed, out = [codes.pack(weight) for weight in weights], torch.empty_like(weights)

    def run() -> None:
        for _ in range(ROUNDS):
            for one, place in zip(packed, out, strict=True):
                codes.restore(one, place)

    def has_the_weights() -> bool:
        out.zero_()
        run()
        return torch.equal(out.view(torch.int16), weights.view(torch.int16))

    return Case(
        f"restore {copies} of {size_in} x {size_out}",
        run,
        sum(map(stored_bytes, packed)) + out.nbytes,
        num_layers=ROUNDS,
        check=has_the_weights,
    )


def _restore(device: torch.device) -> Iterator[Case]:
    for size_in, size_out in _CODES_SIZES:
        yield restore_case(size_in, size_out, device)


def _pack(device: torch.device) -> Iterator[Case]:
    """Weights of bfloat16, written in codes."""
    for size_in, size_out in _CODES_SIZES:
        weight = randn((size_out, size_in), device)
        packed = empty_codes(size_out, size_in, device)
        yield Case(
            f"pack {size_in} x {size_out}",
            partial(codes.pack_into, weight, packed),
            weight.nbytes + stored_bytes(packed),
            check=partial(_restores, packed, weight),
            is_captured=False,
        )


def _restores(packed: Codes, weight: torch.Tensor) -> bool:
    """Tell whether codes are those of a weight."""
    return torch.equal(codes.restore(packed).view(torch.int16), weight.view(torch.int16))


_QUANTISED_TOKENS: Final = (1, 16, 64)
_QUANTISED_SIZES: Final = ((4096, 12288), (4096, 4096), (11008, 4096), (4096, 22016))
"""Inputs and rows of quantised weights."""


@dataclass(frozen=True, slots=True)
class QuantisedKind:
    """What a quantised weight has, as kernels.arguments.Quantised says.

    Attributes:
        kind: of its values.
        dtype: in which it multiplies.
        group: columns of a scale; 0: all.
        scale_dtype: of scales.
        offset: of values without zeros.
        has: other arrays.
        subgroup: columns of a subscale.
    """

    kind: str
    dtype: torch.dtype
    group: int
    scale_dtype: torch.dtype
    offset: int = 0
    has: tuple[str, ...] = ()
    subgroup: int = 0

    def draw(self, num_rows: int, num_columns: int, device: torch.device) -> Quantised:
        """Draw a weight of about 1 / sqrt(num_columns)."""
        bits = {"uint4": 4, "uint5": 5, "uint6": 6, "table4": 4}.get(self.kind, 8)
        group, subgroup = self.group or num_columns, self.subgroup or num_columns
        groups = num_rows, num_columns // group
        size = {"float8_e4m3fn": 100.0, "table4": 1.0}.get(self.kind, 2.0 ** (bits - 2))
        size *= num_columns**0.5 * (16 if "subscale" in self.has else 1)

        def draw(shape: tuple[int, ...], high: int = 256) -> torch.Tensor:
            return torch.randint(0, high, shape, dtype=torch.uint8, device=device)

        values = draw((num_rows, num_columns * (8 if bits == 8 else 4) // 8))
        if self.kind == "float8_e4m3fn":
            values[values & 127 == 127] = 0
        scale = ((torch.rand(groups, device=device) + 0.5) / size).to(self.scale_dtype)
        others = {
            "high": draw((num_rows, num_columns * (bits - 4) // 8)) if bits in {5, 6} else None,
            "zero": draw(groups, 2**bits),
            "low": scale * 7,
            "subscale": draw((num_rows, num_columns // subgroup), 32).view(torch.int8),
            "sublow": draw((num_rows, num_columns // subgroup), 32),
            "table": torch.linspace(-1, 1, 16, device=device) if self.kind == "table4" else None,
        }
        absent = {"zero", "low", "subscale", "sublow"} - set(self.has)
        return Quantised(
            kind=self.kind,
            dtype=self.dtype,
            num_rows=num_rows,
            num_columns=num_columns,
            group=group,
            subgroup=subgroup,
            values=values,
            scale=scale,
            offset=self.offset,
            **{name: None if name in absent else each for name, each in others.items()},
        )


_HALF, _BF16, _FLOAT = torch.float16, torch.bfloat16, torch.float32
_LOWS: Final = ("low", "subscale", "sublow")
QUANTISED_KINDS: Final[Mapping[str, QuantisedKind]] = {
    "int4 of 128, float16": QuantisedKind("uint4", _HALF, 128, _HALF, has=("zero",)),
    "int4 of 128": QuantisedKind("uint4", _BF16, 128, _HALF, has=("zero",)),
    "int8 of rows": QuantisedKind("uint8", _BF16, 0, _BF16, 128),
    "fp8 of blocks": QuantisedKind("float8_e4m3fn", _BF16, 128, _FLOAT),
    "Q4_K": QuantisedKind("uint4", _BF16, 256, _HALF, 0, _LOWS, 32),
    "Q6_K": QuantisedKind("uint6", _BF16, 256, _HALF, 32, ("subscale",), 16),
    "Q8_0": QuantisedKind("uint8", _BF16, 32, _HALF, 128),
    "nf4": QuantisedKind("table4", _BF16, 64, _FLOAT),
}
"""What is timed, by its name in the table."""


def quantised_bytes(weight: Quantised) -> int:
    """Return the bytes of a quantised weight, those of its scales among them."""
    arrays = (getattr(weight, name) for name in QUANTISED_ARRAYS)
    return sum(0 if each is None else each.nbytes for each in arrays)


def _quantised_copies(
    kind: QuantisedKind, size_in: int, size_out: int, device: torch.device
) -> list[Quantised]:
    """Draw weights that exceed the card's cache together."""
    first = kind.draw(size_out, size_in, device)
    others = range(1, -(-(2**28) // quantised_bytes(first)))
    return [first, *(kind.draw(size_out, size_in, device) for _ in others)]


def _quantised_products(
    op: str, sizes: tuple[tuple[int, int], ...], device: torch.device
) -> Iterator[Case]:
    """Products with quantised weights, over those with the same weights restored."""
    plain, small = getattr(linear, op), getattr(quantised, op)
    if op == "linear":
        workspace = decode_workspace(1, 1, HEAD_SIZE, 1, device)
        plain, small = (partial(each, workspace=workspace) for each in (plain, small))

    def has_plain_bits(
        x: torch.Tensor, weights: list[Quantised], restored: list[torch.Tensor]
    ) -> bool:
        pairs = zip(weights, restored, strict=True)
        return all(torch.equal(small(x, one), plain(x, whole)) for one, whole in pairs)

    for size_in, size_out in sizes:
        for name, kind in QUANTISED_KINDS.items():
            weights = _quantised_copies(kind, size_in, size_out, device)
            restored = [quantised.restore(weight) for weight in weights]
            for num_tokens in _QUANTISED_TOKENS:
                x = randn((num_tokens, size_in), device).to(kind.dtype)
                out_bytes = plain(x, restored[0]).nbytes
                yield Case(
                    f"{op} {name}, {len(weights)} of {num_tokens} x {size_in} by {size_out}",
                    partial(_multiply, x, weights, small),
                    sum(map(quantised_bytes, weights)) + len(weights) * (x.nbytes + out_bytes),
                    num_flops=2 * num_tokens * len(weights) * size_in * size_out,
                    beside=Case("", partial(_multiply, x, restored, plain), 0),
                    check=partial(has_plain_bits, x, weights, restored),
                )


def _restore_each(weights: list[Quantised], out: list[torch.Tensor]) -> None:
    for weight, place in zip(weights, out, strict=True):
        quantised.restore(weight, place)


def _restore_quantised(device: torch.device) -> Iterator[Case]:
    """Quantised weights that are written as plain ones."""
    size_in, size_out = _QUANTISED_SIZES[0]
    for name, kind in QUANTISED_KINDS.items():
        weights = _quantised_copies(kind, size_in, size_out, device)
        out = [torch.empty((size_out, size_in), dtype=kind.dtype, device=device) for _ in weights]
        yield Case(
            f"restore {name}, {len(weights)} of {size_in} x {size_out}",
            partial(_restore_each, weights, out),
            sum(map(quantised_bytes, weights)) + sum(each.nbytes for each in out),
        )


CASES: Final[Mapping[str, Callable[[torch.device], Iterator[Case]]]] = {
    **OPERATORS,
    "tiered": _tiered,
    "tier_cost": _tier_cost,
    "gather": _gather,
    "experts": _experts,
    "linear_codes": partial(_code_products, "linear", _CODES_SIZES[:3]),
    "linear_silu_mul_codes": partial(_code_products, "linear_silu_mul", _CODES_SIZES[3:]),
    "restore": _restore,
    "pack": _pack,
    "linear_quantised": partial(_quantised_products, "linear", _QUANTISED_SIZES[:3]),
    "linear_silu_mul_quantised": partial(
        _quantised_products, "linear_silu_mul", _QUANTISED_SIZES[3:]
    ),
    "restore_quantised": _restore_quantised,
}
"""Name on the command line -> what is timed."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code, 2 where there is no GPU, 1 where bits differ.

    Args:
        arguments: the command line without the program's name; None takes sys.argv.
    """
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--json", type=Path, help="also write rates and rows to this file")
    chosen = parser.parse_args(arguments)
    for name in chosen.names:
        if name not in CASES:
            parser.error(f"names: expected any of {', '.join(CASES)}, got {name!r}")
    if not torch.cuda.is_available():
        sys.stderr.write(
            "kernels.bench: expected a CUDA device, got none. Run it on a machine with a GPU.\n"
        )
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    card, rates = torch.cuda.get_device_name(device), measure_rates(device)
    sys.stdout.write(
        f"{card}: copy {rates['copy']:.0f} GB/s, host memory in place {rates['in place']:.1f}\n"
        f"{'what':<84} {'ms':>9} {'GB/s':>8} {'share':>6} {'TFLOP/s':>8} {'twin ms':>9} "
        f"{'ratio':>6} {'bits':>7}\n"
    )
    rows = []
    for name in chosen.names or CASES:
        for case in CASES[name](device):
            rows.append(time_case(case, rates))
            sys.stdout.write(render(rows[-1]) + "\n")
            sys.stdout.flush()
        torch.cuda.empty_cache()
    if chosen.json is not None:
        document = {"device": card, "rates_gb_s": rates, "rows": [asdict(row) for row in rows]}
        chosen.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row.is_equal is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
