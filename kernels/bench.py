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
- experts_products: both products of layers with experts, plain and stored in fewer bytes; bytes are
  those of the experts that are routed to, the same for every call.
- linear_codes, linear_silu_mul_codes: products with weights in codes over the same with plain ones;
  restore, pack: such weights as a whole. Bytes are those that are stored; results are compared bit
  by bit, and the exit code is 1 where they differ.
- linear_quantised, linear_silu_mul_quantised, restore_quantised: the same with quantised weights of
  a 7B model, in some kinds.

Speed is measured here and in no test.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch

from kernels.arguments import (
    AttentionCall,
    DecodeWorkspace,
    HostCache,
    PrefillPart,
    decode_workspace,
    prefill_state,
    prefill_workspace,
)
from kernels.bench_experts import expert_products
from kernels.bench_timing import (
    BLOCK,
    DTYPE,
    FEED_FORWARD,
    GPU_TOKENS,
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    KV_HEADS,
    SCALE,
    TOKEN_BYTES,
    VOCAB,
    Case,
    full,
    host_tensor,
    measure_rates,
    num_copies,
    operator_of,
    paged,
    randn,
    render,
    time_case,
    workspace_of,
)
from kernels.bench_weights import WEIGHT_CASES
from kernels.expert_arguments import ExpertArrays, ExpertCache, expert_cache
from kernels.ops import attention, kv, linear, logits, norm
from kernels.ops import expert_cache as expert_ops
from kernels.ref import attention as ref_attention
from kernels.ref import kv as ref_kv
from kernels.ref import linear as ref_linear
from kernels.ref import logits as ref_logits
from kernels.ref import norm as ref_norm
from kernels.sizes import expert_cache_bytes


def _norms(op: str, num_moved: int, device: torch.device) -> Iterator[Case]:
    x, weight = randn((16384, HIDDEN), device), randn((HIDDEN,), device)
    arguments = (x, weight) if op == "rms_norm" else (x, torch.zeros_like(x), weight)
    run, twin = (partial(getattr(module, op), *arguments, 1e-6) for module in (norm, ref_norm))
    yield Case(f"{op} 16384 x 4096", run, num_moved * x.nbytes, twin)


def _activations(op: str, device: torch.device) -> Iterator[Case]:
    gate_up = randn((8192, 2 * FEED_FORWARD), device)
    run, twin = (partial(operator_of(module, op), gate_up) for module in (linear, ref_linear))
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
                workspace=workspace_of(num_seqs, seq_len, device),
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
        run, twin = (partial(operator_of(module, op), x, weight) for module in (linear, ref_linear))
        yield Case(
            f"{op} {num_tokens} x 4096 by 4096 x 2 x {FEED_FORWARD}",
            run,
            x.nbytes + weight.nbytes + 2 * num_tokens * FEED_FORWARD,
            twin,
            num_flops=2 * num_tokens * weight.numel(),
        )


def _most_probable(device: torch.device) -> Iterator[Case]:
    for num_rows, size in ((1, 32000), (64, 32000), (16, 151936)):
        rows = torch.randn((num_rows, size), device=device)
        run, twin = (partial(module.most_probable, rows) for module in (logits, ref_logits))
        yield Case(f"most_probable {num_rows} x {size}", run, rows.nbytes, twin)


OPERATORS: Final[Mapping[str, Callable[[torch.device], Iterator[Case]]]] = {
    "rms_norm": partial(_norms, "rms_norm", 2),
    "add_rms_norm": partial(_norms, "add_rms_norm", 4),
    "rms_norm_add_": partial(_norms, "rms_norm_add_", 3),
    "most_probable": _most_probable,
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
        return cls(gpu, host, table, q, workspace_of(1, num_tokens, device))

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
            workspace=workspace_of(num_seqs, seq_len, device),
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
        counts = torch.zeros(2, dtype=torch.int64, device=device)
        return expert_cache(_EXPERTS, _EXPERT_SLOTS, memory, counts)

    for num_tokens in (1, 4):
        ids = torch.arange(_ROUTED * num_tokens, dtype=torch.int32, device=device)
        run = partial(expert_ops.claim, ids.view(num_tokens, _ROUTED), 0, empty_cache())
        yield Case(f"claim, {num_tokens} tokens", run, ids.nbytes)
    caches = [empty_cache() for _ in range(_EXPERTS // _ROUTED)]
    for kind, sizes in _EXPERT_BYTES.items():
        host = [host_tensor((_EXPERTS, size), torch.uint8) for size in sizes]
        bank = [torch.zeros((_EXPERT_SLOTS, n), dtype=torch.uint8, device=device) for n in sizes]
        arrays = ExpertArrays.of(host, bank, len(host) - 1)

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


CASES: Final[Mapping[str, Callable[[torch.device], Iterator[Case]]]] = {
    **OPERATORS,
    "tiered": _tiered,
    "tier_cost": _tier_cost,
    "gather": _gather,
    "experts": _experts,
    "experts_products": expert_products,
    **WEIGHT_CASES,
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
