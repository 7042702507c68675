"""The kernels at the sizes of real models, on a GPU, against their twins."""

import contextlib

import pytest
import torch

from kernels.arguments import decode_workspace
from kernels.ops import attention, kv, linear, norm
from kernels.ref import attention as ref
from kernels.ref import kv as ref_kv
from kernels.ref import linear as ref_linear
from kernels.ref import norm as ref_norm
from tests.kernels.cases import flat, fused_heads, paged_cache, randn
from tests.kernels.tolerances import ATTENTION, ROUNDED_ONCE, ROUNDED_TWICE, assert_close

pytestmark = pytest.mark.gpu

# query heads, KV heads, head size
HEADS = [
    (32, 8, 128),
    (32, 32, 128),
    (28, 4, 128),
    (14, 2, 64),
    (9, 3, 64),
    (16, 8, 256),
    (12, 4, 96),
]
MAIN_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


@contextlib.contextmanager
def no_allocation():
    """Fail if a block allocates memory on the GPU."""
    counter = "allocation.all.allocated"
    before = torch.cuda.memory_stats()[counter]
    yield
    assert torch.cuda.memory_stats()[counter] == before


def lengths_up_to(longest, count, rng):
    drawn = torch.randint(1, longest, (count,), generator=rng, device=rng.device).tolist()
    drawn[0], drawn[-1] = longest, 0
    return drawn


def decode_arguments(heads, lengths, block_size, dtype, rng):
    num_heads, num_kv_heads, head_size = heads
    cache = paged_cache(lengths, num_kv_heads, head_size, block_size, dtype, rng, num_layers=1)
    q, _, _ = fused_heads(len(lengths), num_heads, num_kv_heads, head_size, dtype, rng)
    return (
        q,
        cache.k_cache,
        cache.v_cache,
        cache.block_tables,
        cache.seq_lens,
        head_size**-0.5,
    )


def prefill_arguments(heads, sequences, block_size, dtype, rng):
    num_heads, num_kv_heads, head_size = heads
    lengths = [length for _, length in sequences]
    cache = paged_cache(lengths, num_kv_heads, head_size, block_size, dtype, rng, num_layers=1)
    counts = torch.tensor([0, *[queries for queries, _ in sequences]], device=rng.device)
    starts = counts.cumsum(0).to(torch.int32)
    tokens = int(starts[-1])
    q, _, _ = fused_heads(tokens, num_heads, num_kv_heads, head_size, dtype, rng)
    return (
        q,
        cache.k_cache,
        cache.v_cache,
        cache.block_tables,
        starts,
        cache.seq_lens,
        head_size**-0.5,
    )


@MAIN_DTYPES
def test_decode_of_64_sequences(dtype, rng):
    arguments = decode_arguments((32, 8, 128), lengths_up_to(4096, 64, rng), 16, dtype, rng)
    out = flat(attention.paged_decode_attention)(*arguments, max_seq_len=4096)
    assert_close(out, flat(ref.paged_decode_attention)(*arguments), ATTENTION)


@MAIN_DTYPES
@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decode_of_other_shapes(heads, block_size, dtype, rng):
    arguments = decode_arguments(heads, lengths_up_to(1000, 5, rng), block_size, dtype, rng)
    out = flat(attention.paged_decode_attention)(*arguments, max_seq_len=1000)
    assert_close(out, flat(ref.paged_decode_attention)(*arguments), ATTENTION)


def test_decode_of_one_long_sequence(rng):
    arguments = decode_arguments((32, 8, 128), [100_003], 16, torch.bfloat16, rng)
    out = flat(attention.paged_decode_attention)(*arguments, max_seq_len=131_072)
    assert_close(out, flat(ref.paged_decode_attention)(*arguments), ATTENTION)


@MAIN_DTYPES
def test_decode_gives_the_same_bits_alone_in_a_batch_and_in_a_graph(dtype, rng):
    lengths = lengths_up_to(2048, 16, rng)
    q, k_cache, v_cache, tables, lens, scale = decode_arguments(
        (32, 8, 128), lengths, 16, dtype, rng
    )
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    workspace = decode_workspace(16, 32, 128, 4096, q.device)

    def step():
        flat(attention.paged_decode_attention)(
            q, k_cache, v_cache, tables, lens, scale,
            max_seq_len=4096, out=out, workspace=workspace,
        )  # fmt: skip

    step()
    with no_allocation():
        step()
    eager = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, eager)
    for index in (0, 7, 15):
        one = slice(index, index + 1)
        alone = flat(attention.paged_decode_attention)(
            q[one], k_cache, v_cache, tables[one], lens[one], scale, max_seq_len=2048
        )
        assert torch.equal(alone[0], eager[index])


@MAIN_DTYPES
def test_prefill_of_2048_tokens(dtype, rng):
    sequences = [(2048, 2048), (777, 777), (1, 1), (0, 0)]
    arguments = prefill_arguments((32, 8, 128), sequences, 16, dtype, rng)
    out = flat(attention.paged_prefill_attention)(*arguments, max_query_len=2048)
    assert_close(out, flat(ref.paged_prefill_attention)(*arguments), ATTENTION)


@MAIN_DTYPES
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_prefill_of_chunks_beside_decodes(heads, dtype, rng):
    sequences = [(300, 900), (1, 500), (64, 64), (1, 1), (129, 131)]
    arguments = prefill_arguments(heads, sequences, 16, dtype, rng)
    out = flat(attention.paged_prefill_attention)(*arguments, max_query_len=300)
    assert_close(out, flat(ref.paged_prefill_attention)(*arguments), ATTENTION)


@MAIN_DTYPES
def test_prefill_in_chunks_gives_the_bits_of_the_whole(dtype, rng):
    arguments = prefill_arguments((32, 8, 128), [(2048, 2048)], 16, dtype, rng)
    q, k_cache, v_cache, tables, _, _, scale = arguments
    whole = flat(attention.paged_prefill_attention)(*arguments, max_query_len=2048)
    for start in range(0, 2048, 512):
        starts = torch.tensor([0, 512], dtype=torch.int32, device=q.device)
        lens = torch.tensor([start + 512], dtype=torch.int32, device=q.device)
        chunk = q[start : start + 512]
        out = flat(attention.paged_prefill_attention)(
            chunk, k_cache, v_cache, tables, starts, lens, scale, max_query_len=512
        )
        assert torch.equal(out, whole[start : start + 512])


def test_prefill_with_out_given_allocates_nothing(rng):
    arguments = prefill_arguments((32, 8, 128), [(512, 512)], 16, torch.bfloat16, rng)
    out = torch.empty(arguments[0].shape, dtype=torch.bfloat16, device=rng.device)
    flat(attention.paged_prefill_attention)(*arguments, max_query_len=512, out=out)
    with no_allocation():
        flat(attention.paged_prefill_attention)(*arguments, max_query_len=512, out=out)


def test_norms(dtype, rng):
    x, residual = randn((2048, 4096), dtype, rng), randn((2048, 4096), dtype, rng)
    weight = randn((4096,), dtype, rng)
    assert_close(norm.rms_norm(x, weight, 1e-6), ref_norm.rms_norm(x, weight, 1e-6), ROUNDED_ONCE)
    twin_residual = residual.clone()
    out = norm.add_rms_norm(x, residual, weight, 1e-6)
    expected = ref_norm.add_rms_norm(x, twin_residual, weight, 1e-6)
    assert torch.equal(residual, twin_residual)
    assert_close(out, expected, ROUNDED_ONCE)


@pytest.mark.parametrize("norm_factors", [None, (1, 1), (32, 8)], ids=str)
def test_rotary_and_cache_write(norm_factors, dtype, rng):
    q, k, v = fused_heads(2048, 32, 8, 128, dtype, rng)
    twin_q = q.clone()
    weights = (None, None)
    if norm_factors is not None:
        weights = tuple(randn((factor * 128,), dtype, rng) for factor in norm_factors)
    positions = torch.randint(0, 4096, (2048,), device=rng.device, generator=rng)
    angles = torch.rand((4096, 64), device=rng.device, generator=rng) * 6.28
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    cache = torch.zeros((200, 4, 2, 8, 16, 128), dtype=dtype, device=rng.device)
    twin_cache = cache.clone()
    slots = torch.randperm(3200, device=rng.device, generator=rng)[:2048]
    slots[5] = -1
    for run, queries, kept in (
        (kv.rotary_write_kv_, q, cache),
        (ref_kv.rotary_write_kv_, twin_q, twin_cache),
    ):
        run(
            queries, k, v, *weights, 1e-6, cos_sin, positions,
            kept[:, 3, 0], kept[:, 3, 1], slots,
        )  # fmt: skip
    bounds = ROUNDED_ONCE if norm_factors is None else ROUNDED_TWICE
    assert_close(q, twin_q, bounds)
    assert_close(cache, twin_cache, bounds)


def test_cache_beyond_32_bit_offsets(rng):
    cache = torch.zeros((40_000, 2, 2, 8, 16, 128), dtype=torch.bfloat16, device=rng.device)
    assert cache.numel() > 2**31
    k_cache, v_cache = cache[:, 1, 0], cache[:, 1, 1]
    q, k, v = fused_heads(40, 32, 8, 128, torch.bfloat16, rng)
    slots = torch.arange(39_990 * 16, 39_990 * 16 + 40, device=rng.device)
    angles = torch.zeros((1, 128), device=rng.device)
    angles[:, :64] = 1
    positions = torch.zeros(40, dtype=torch.int64, device=rng.device)
    kv.rotary_write_kv_(q, k, v, None, None, 0.0, angles, positions, k_cache, v_cache, slots)
    assert torch.equal(k_cache[39_991, :, 3], k[19])
    tables = torch.arange(39_990, 39_993, dtype=torch.int32, device=rng.device)[None]
    lens = torch.tensor([40], dtype=torch.int32, device=rng.device)
    starts = torch.tensor([0, 40], dtype=torch.int32, device=rng.device)
    out = flat(attention.paged_prefill_attention)(
        q, k_cache, v_cache, tables, starts, lens, 0.1, max_query_len=40
    )
    expected = flat(ref.paged_prefill_attention)(q, k_cache, v_cache, tables, starts, lens, 0.1)
    assert_close(out, expected, ATTENTION)
    last = flat(attention.paged_decode_attention)(
        q[39:], k_cache, v_cache, tables, lens, 0.1, max_seq_len=64
    )
    assert_close(last, expected[39:], ATTENTION)


def test_one_compiled_variant_serves_every_batch(rng):
    from kernels.triton import decode_attention, prefill_attention

    kernels = (
        decode_attention._decode_kernel,
        prefill_attention._prefill_kernel,
        prefill_attention._sum_kernel,
    )
    q, k_cache, v_cache, tables, lens, scale = decode_arguments(
        (8, 2, 128), [300] * 9, 16, torch.bfloat16, rng
    )
    starts = torch.arange(10, dtype=torch.int32, device=rng.device)
    counts = set()
    for first, last in ((0, 9), (0, 1), (1, 9), (2, 3), (3, 9)):
        some = slice(first, last)
        own_starts = starts[first : last + 1] - first
        flat(attention.paged_decode_attention)(
            q[some], k_cache, v_cache, tables[some], lens[some], scale, max_seq_len=300 + first
        )
        flat(attention.paged_prefill_attention)(
            q[some], k_cache, v_cache, tables[some], own_starts, lens[some], scale, max_query_len=1
        )
        caches = [kernel.device_caches[rng.device.index][0] for kernel in kernels]
        counts.add(tuple(len(cache) for cache in caches))
    assert len(counts) == 1


def test_gated_mul(dtype, rng):
    gate_up = randn((2048, 2 * 14336), dtype, rng)
    assert_close(linear.gated_mul(gate_up), ref_linear.gated_mul(gate_up), ROUNDED_ONCE)
