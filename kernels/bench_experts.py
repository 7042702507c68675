"""Cases of the benchmark: both products of layers with experts."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final

import torch

from kernels.arguments import Codes, Quantised
from kernels.bench_timing import COPY_BYTES, DTYPE, Case, randn
from kernels.bench_weights import QUANTISED_KINDS, quantised_bytes, stored_bytes
from kernels.ops import codes, experts

Weight = torch.Tensor | Codes | Quantised
_EXPERT_SIZES: Final = {"30B-A3B": (128, 8, 2048, 768), "8x7B": (8, 2, 4096, 14336)}
"""Experts of a layer, those of each token, hidden and feed-forward sizes."""


def expert_products(device: torch.device) -> Iterator[Case]:
    """Yield products of layers with experts, routed uniformly; bytes are those of routed experts.

    Layers follow each other, so that none finds its weights in the card's cache.
    """
    for model, (num_experts, top_k, hidden, ffn) in _EXPERT_SIZES.items():
        num_layers = max(2, COPY_BYTES // (3 * num_experts * hidden * ffn))
        layers = [
            (
                randn((num_experts * 2 * ffn, hidden), device),
                randn((num_experts * hidden, ffn), device),
            )
            for _ in range(num_layers)
        ]
        kinds: dict[str, Callable[[torch.Tensor], Weight]] = {"plain": _as_is}
        if model == "30B-A3B":
            kinds |= {"lossless": codes.pack, "int4": _in_int4}
        for kind, make in kinds.items():
            weights = [tuple(map(make, each)) for each in layers]
            total = sum(map(_weight_bytes, weights[0]))
            for num_tokens in (1, 4, 16, 64, 512, 2048):
                draws = torch.rand((num_tokens, num_experts), device=device)
                ids = draws.argsort(1)[:, :top_k].int().contiguous()
                share = len(set(ids.view(-1).tolist())) / num_experts
                x = randn((num_tokens, hidden), device)
                out = torch.empty((num_tokens, top_k, hidden), dtype=DTYPE, device=device)
                yield Case(
                    f"experts {model} {kind}, {num_tokens} tokens",
                    partial(_run_experts, x, weights, ids, out),
                    round(total * share),
                    num_flops=6 * num_tokens * top_k * hidden * ffn,
                    num_layers=num_layers,
                )


def _as_is(weight: torch.Tensor) -> Weight:
    return weight


def _in_int4(weight: torch.Tensor) -> Weight:
    """Return random values of the shape."""
    rows, columns = weight.shape
    return QUANTISED_KINDS["int4 of 128"].draw(rows, columns, weight.device)


def _weight_bytes(weight: Weight) -> int:
    if isinstance(weight, torch.Tensor):
        return weight.nbytes
    return stored_bytes(weight) if isinstance(weight, Codes) else quantised_bytes(weight)


def _run_experts(
    x: torch.Tensor, weights: Iterable[tuple[Weight, ...]], ids: torch.Tensor, out: torch.Tensor
) -> None:
    for w13, w2 in weights:
        experts.experts_products(x, w13, w2, ids, out)
