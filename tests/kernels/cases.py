"""Inputs of the operators, filled with poison wherever an operator has no business reading."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from kernels.arguments import AttentionCall, DecodePart, HostCache, PrefillPart


def randn(
    shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator, *, is_strided: bool = False
) -> torch.Tensor:
    """Draw a tensor; a strided one is the middle of wider rows that hold NaN elsewhere."""
    values = torch.randn(shape, dtype=torch.float32, device=rng.device, generator=rng).to(dtype)
    if not is_strided:
        return values
    wide = torch.full((*shape[:-1], shape[-1] + 24), torch.nan, dtype=dtype, device=rng.device)
    wide[..., 8 : 8 + shape[-1]] = values
    return wide[..., 8 : 8 + shape[-1]]


def fused_heads(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    rng: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw one fused projection and return its q [T, N, H], k [T, K, H] and v [T, K, H] views."""
    widths = [num_heads * head_size, num_kv_heads * head_size, num_kv_heads * head_size]
    fused = randn((num_tokens, sum(widths)), dtype, rng)
    q, k, v = fused.split(widths, dim=1)
    return (
        q.view(num_tokens, num_heads, head_size),
        k.view(num_tokens, num_kv_heads, head_size),
        v.view(num_tokens, num_kv_heads, head_size),
    )


@dataclass(frozen=True)
class PagedCache:
    """One layer's cache inside a cache of three layers, and the same keys and values densely.

    Every element that belongs to no sequence is NaN, and so is every other layer; table entries
    beyond a sequence's blocks name a block that does not exist. storage is the whole cache,
    [B, L, 2, K, P, H]; the layer is the one in the middle.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    storage: torch.Tensor


def paged_cache(
    seq_lens: list[int],
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
    rng: torch.Generator,
    *,
    num_layers: int = 3,
) -> PagedCache:
    """Draw keys and values and spread them over blocks in random order."""
    device = rng.device
    num_blocks_each = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(num_blocks_each) + 2
    shape = (num_blocks, num_layers, 2, num_kv_heads, block_size, head_size)
    cache = torch.full(shape, torch.nan, dtype=dtype, device=device)
    layer = num_layers // 2
    k_cache, v_cache = cache[:, layer, 0], cache[:, layer, 1]
    order = torch.randperm(num_blocks, generator=rng, device=device).to(torch.int32)
    width = max([1, *num_blocks_each]) + 1
    tables = torch.full((len(seq_lens), width), 2**30, dtype=torch.int32, device=device)
    keys, values, taken = [], [], 0
    for index, length in enumerate(seq_lens):
        blocks = order[taken : taken + num_blocks_each[index]]
        taken += len(blocks)
        tables[index, : len(blocks)] = blocks
        keys.append(randn((length, num_kv_heads, head_size), dtype, rng))
        values.append(randn((length, num_kv_heads, head_size), dtype, rng))
        slots = torch.arange(length, device=device)
        at = blocks.long()[slots // block_size]
        k_cache[at, :, slots % block_size] = keys[-1]
        v_cache[at, :, slots % block_size] = values[-1]
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    return PagedCache(k_cache, v_cache, tables, lens, keys, values, cache)


def in_tiers(
    cache: PagedCache, num_gpu: int, beside: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, HostCache]:
    """Return k_cache and v_cache of the first num_gpu blocks alone, and the others beside them.

    Tables stay as they are: blocks lie in random order, so both tiers hold some of any sequence.
    """
    layer = cache.storage.shape[1] // 2
    kept, other = cache.storage[:num_gpu].clone(), beside(cache.storage[num_gpu:])
    host = HostCache(other[:, layer, 0], other[:, layer, 1])
    return kept[:, layer, 0], kept[:, layer, 1], host


UNWRITTEN = 7.0
"""What rows of an output hold that no operator writes."""


def flat(operator: Callable[..., None]) -> Callable[..., torch.Tensor]:
    """Return an attention operator, its twin or its launch as a function of its records' fields.

    It returns what was written, and allocates that where no out is given.
    """
    parameters = inspect.signature(operator).parameters
    order = ["q", "k_cache", "v_cache", "block_tables", "seq_lens", "scale"]
    part = PrefillPart if "prefill" in operator.__name__ else DecodePart
    if "query_starts_S1" in parameters:
        order.insert(4, "query_starts_S1")

    def run(*arguments: Any, **options: Any) -> torch.Tensor:
        values = dict(zip(order, arguments, strict=False)) | options
        q = values["q"]
        if values.get("out") is None:
            values["out"] = torch.full(q.shape, UNWRITTEN, dtype=q.dtype, device=q.device)
        records = {}
        for name, record in {"call": AttentionCall, "part": part}.items():
            if name in parameters:
                own = [field.name for field in fields(record) if field.name in values]
                records[name] = record(**{field: values.pop(field) for field in own})
        operator(**records, **values)
        return records["call"].out

    return run


def dense_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally from the last tokens, in float64 and by the definition of softmax.

    Args:
        q: [n, N, H], the last n of L tokens.
        keys: [L, K, H].
        values: [L, K, H].
        scale: multiplies the scores.
        sinks: [N], of one more key whose value is zero.

    Returns:
        [n, N, H] float64.
    """
    num_queries, num_heads, _ = q.shape
    if num_queries == 0:
        return q.double()
    num_keys, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    all_keys = keys.double().repeat_interleave(group, dim=1)
    all_values = values.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qnh,knh->nqk", q.double(), all_keys) * scale
    query_at = torch.arange(num_keys - num_queries, num_keys, device=q.device)
    key_at = torch.arange(num_keys, device=q.device)
    most = scores.amax(-1, keepdim=True)
    exponents = torch.exp(scores - most) * (key_at[None, :] <= query_at[:, None])
    total = exponents.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.double().view(-1, 1, 1) - most)
    weights = exponents / total
    return torch.einsum("nqk,knh->qnh", weights, all_values)
