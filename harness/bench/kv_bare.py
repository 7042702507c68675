"""KV rows that need no engine: moves of blocks, and decode attention alone."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from engine.probe_moves import probe_moves
from harness.bench.cases import Limits, read_model
from kernels.bench import measure_copy_rate, time_case
from kernels.bench_cases import BUILDERS

BLOCK_TOKENS: Final = 16
ATTENTION: Final = "paged_decode_attention"
ATTENTION_SHAPE: Final = "32 x 4096 keys"
"""Begins the shape of the case that is timed."""


def measure_moves(limits: Limits) -> dict[str, Any]:
    """Time moves of blocks of the model, 16 tokens each."""
    spec = read_model(limits.model, limits.num_layers)
    block_bytes = BLOCK_TOKENS * spec.kv_bytes_per_token(spec.dtype)
    return {"block_bytes": block_bytes} | probe_moves(block_bytes, limits.device)


def measure_attention(limits: Limits) -> dict[str, Any]:
    """Time decode attention of one layer, all its blocks on the GPU."""
    if limits.device == "cpu":
        return {"no_room": "operators are timed on a GPU only"}
    device = torch.device("cuda", torch.cuda.current_device())
    copy_gb_s = measure_copy_rate(device)
    for build in BUILDERS[ATTENTION]:
        case = build(device)
        if case.shape.startswith(ATTENTION_SHAPE):
            timing = time_case(case, copy_gb_s)
            return {
                "shape": case.shape,
                "ms": timing.kernel_ms,
                "gb_s": timing.gb_per_s,
                "copy_gb_s": copy_gb_s,
            }
    return {"no_room": f"kernels.bench has no case of {ATTENTION_SHAPE}"}


BARE_PARTS: Final[Mapping[str, Callable[[Limits], dict[str, Any]]]] = MappingProxyType(
    {"moves": measure_moves, "attention": measure_attention}
)
"""By the name in a case's parts."""
