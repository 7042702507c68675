"""Two tiers at the sizes of real models on a GPU, host blocks in pinned memory."""

import pytest
import torch

from kernels.arguments import decode_workspace
from kernels.ops import attention, kv
from kernels.ref import attention as ref
from tests.kernels.cases import flat, fused_heads, in_tiers, paged_cache, randn
from tests.kernels.test_gpu_sizes import HEADS, MAIN_DTYPES, no_allocation
from tests.kernels.test_paged_prefill_part import in_parts, kernel_part, kernel_whole, whole
from tests.kernels.test_rotary_write_kv import table
from tests.kernels.tolerances import ATTENTION, assert_close

pytestmark = pytest.mark.gpu


def decode_arguments(heads, lengths, block_size, dtype, rng):
    num_heads, num_kv_heads, head_size = heads
    cache = paged_cache(lengths, num_kv_heads, head_size, block_size, dtype, rng)
    q, _, _ = fused_heads(len(lengths), num_heads, num_kv_heads, head_size, dtype, rng)
    options = {"scale": head_size**-0.5, "max_seq_len": max(lengths)}
    return cache, q, options


@MAIN_DTYPES
@pytest.mark.parametrize("block_size", [8, 16, 128])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decode_gives_the_bits_of_one_tier(heads, block_size, dtype, rng, beside):
    cache, q, options = decode_arguments(heads, [3000, 1, 700, 256], block_size, dtype, rng)
    tables = cache.block_tables, cache.seq_lens
    one = flat(attention.paged_decode_attention)(
        q, cache.k_cache, cache.v_cache, *tables, **options
    )
    for share in (0.1, 0.7):
        k, v, host = in_tiers(cache, round(share * len(cache.storage)), beside)
        out = flat(attention.paged_decode_attention)(q, k, v, *tables, **options, host=host)
        assert torch.equal(out, one)
    twin = flat(ref.paged_decode_attention)(q, k, v, *tables, options["scale"], host=host)
    assert_close(one, twin, ATTENTION)


def test_decode_of_one_long_sequence(rng, beside):
    cache, q, options = decode_arguments((32, 8, 128), [70_001], 16, torch.bfloat16, rng)
    tables = cache.block_tables, cache.seq_lens
    one = flat(attention.paged_decode_attention)(
        q, cache.k_cache, cache.v_cache, *tables, **options
    )
    k, v, host = in_tiers(cache, 2000, beside)
    assert torch.equal(
        flat(attention.paged_decode_attention)(q, k, v, *tables, **options, host=host), one
    )


@MAIN_DTYPES
def test_a_graph_writes_tokens_and_attends_to_them_in_either_tier(dtype, rng, beside):
    """Each step writes a token of each sequence, and the same graph reads it; sequences differ."""
    lengths, steps, block_size = [130, 9, 700], 40, 16
    longest = [length + steps for length in lengths]
    cache, _, options = decode_arguments((8, 2, 128), longest, block_size, dtype, rng)
    k, v, host = in_tiers(cache, len(cache.storage) // 2, beside)
    q, new_k, new_v = fused_heads(3, 8, 2, 128, dtype, rng)
    lens, slots = cache.seq_lens.clone(), torch.empty(3, dtype=torch.int64, device=rng.device)
    out, cos_sin = torch.empty_like(q), table(128, 2048, rng.device)
    positions = torch.empty_like(slots)
    workspace = decode_workspace(3, 8, 128, options["max_seq_len"], rng.device)

    def step(keys, values, beside, target):
        rotated = q.clone()
        kv.rotary_write_kv_(
            rotated, new_k, new_v, None, None, 0.0, cos_sin, positions, keys, values, slots,
            host=beside,
        )  # fmt: skip
        flat(attention.paged_decode_attention)(
            rotated, keys, values, cache.block_tables, lens, **options, out=target,
            workspace=workspace, host=beside,
        )  # fmt: skip

    def set_step(number):
        at = torch.tensor([length + number for length in lengths], device=rng.device)
        blocks = cache.block_tables.gather(1, (at // block_size)[:, None])[:, 0]
        slots.copy_(blocks.long() * block_size + at % block_size)
        positions.copy_(at)
        lens.copy_(at + 1)
        for tensor in (q, new_k, new_v):
            tensor.copy_(randn(tuple(tensor.shape), dtype, rng))

    set_step(0)
    step(k, v, host, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(k, v, host, out)
    expected, used = torch.empty_like(out), set()
    for number in range(steps):
        set_step(number)
        graph.replay()
        step(cache.k_cache, cache.v_cache, None, expected)
        assert torch.equal(out, expected)
        used |= {bool(slot) for slot in (slots >= len(k) * block_size).tolist()}
    assert used == {False, True}


def test_decode_over_two_tiers_allocates_nothing(rng, beside):
    cache, q, options = decode_arguments((32, 8, 128), [900, 5], 16, torch.bfloat16, rng)
    k, v, host = in_tiers(cache, 20, beside)
    options["out"] = torch.empty_like(q)
    options["workspace"] = decode_workspace(2, 32, 128, 900, rng.device)
    arguments = (q, k, v, cache.block_tables, cache.seq_lens)
    flat(attention.paged_decode_attention)(*arguments, **options, host=host)
    with no_allocation():
        flat(attention.paged_decode_attention)(*arguments, **options, host=host)


@MAIN_DTYPES
@pytest.mark.parametrize("window", [None, 900])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_parts_give_the_bits_of_one_pass(heads, share, window, dtype, rng):
    num_heads, num_kv_heads, head_size = heads
    case = (*heads, 16, window, [(300, 2000), (64, 64)], [256, 1024, 1152, 2000])
    cache = paged_cache([2000, 64], num_kv_heads, head_size, 16, dtype, rng)
    q = randn((370, num_heads, head_size), dtype, rng)
    starts = torch.tensor([0, 300, 364], dtype=torch.int32, device=rng.device)
    drawn = (cache, q, starts, {"window": window, "scale": head_size**-0.5})
    out = in_parts(kernel_part, case, *drawn, rng, share=share)
    assert torch.equal(out, whole(kernel_whole, *drawn))


def test_few_compiled_variants_serve_every_part_and_either_tier(rng, beside):
    from kernels.triton import decode_attention, prefill_attention

    def variants():
        kernels = (decode_attention._decode_kernel, prefill_attention._prefill_kernel)
        return [len(kernel.device_caches[rng.device.index][0]) for kernel in kernels]

    case = (8, 2, 128, 16, None, [(40, 600)], [600])
    cache = paged_cache([600], 2, 128, 16, torch.bfloat16, rng)
    q = randn((40, 8, 128), torch.bfloat16, rng)
    starts = torch.tensor([0, 40], dtype=torch.int32, device=rng.device)
    drawn = (cache, q, starts, {"window": None, "scale": 0.1})
    counts = set()
    for share in (0.5, 1.0):  # one for parts of both tiers, one for those of either
        in_parts(kernel_part, case, *drawn, rng, share=share)
    for num_gpu, ends in ((3, [600]), (16, [128, 600]), (20, [256, 512, 600]), (1, [384, 600])):
        in_parts(kernel_part, (*case[:-1], ends), *drawn, rng, share=num_gpu / 20)
        k, v, host = in_tiers(cache, num_gpu, beside)
        tables = cache.block_tables, cache.seq_lens
        flat(attention.paged_decode_attention)(
            q[:1], k, v, *tables, 0.1, max_seq_len=600, host=host
        )
        counts.add(tuple(variants()))
    assert len(counts) == 1
