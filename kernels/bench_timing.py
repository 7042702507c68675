"""Timing of operators on a GPU: a case, its graph, and the rates that it is held against."""

import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Final

import torch

from kernels.arguments import (
    Codes,
    DecodeWorkspace,
    Quantised,
    decode_workspace,
)

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
    """Return GB/s of copies within the card's memory, and of in-place reads of pinned memory."""
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


def workspace_of(num_seqs: int, seq_len: int, device: torch.device) -> DecodeWorkspace:
    """Return what decodes of so many sequences need beside their inputs."""
    return decode_workspace(num_seqs, HEADS, HEAD_SIZE, seq_len + BLOCK, device)


def operator_of(module: ModuleType, case: str) -> Callable[..., torch.Tensor]:
    """Return the operator of a module that a case is named after; of gates with its activation."""
    name = re.sub(r"(silu|gelu)_mul$", "gated_mul", case)
    operator: Callable[..., torch.Tensor] = getattr(module, name)
    return operator if name == case else partial(operator, is_gelu="gelu" in case)


def num_copies(size_in: int, size_out: int) -> int:
    """Return how many weights of a size exceed the card's cache: each is read once a call."""
    return max(1, -(-(2**28) // (2 * size_in * size_out)))
