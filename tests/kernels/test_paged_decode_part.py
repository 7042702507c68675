"""Decode over parts of the keys gives what one pass gives, to the bit."""

import pytest
import torch

from kernels.arguments import HostCache, decode_workspace
from kernels.ops import attention
from kernels.ops.checks import KernelArgumentError
from kernels.ref import attention as ref
from kernels.sizes import DECODE_SPLIT_TOKENS
from tests.kernels.cases import flat, fused_heads, in_tiers, paged_cache
from tests.kernels.tolerances import ATTENTION, assert_close
from tests.slow import slow

SPLIT = DECODE_SPLIT_TOKENS
MOST = 6 * SPLIT
NO_BLOCK = 2**30

# query heads, KV heads, head size, block size, sequence length, ends of parts
CASES = [
    slow((8, 2, 64, 16, 3 * SPLIT + 1, [SPLIT, 3 * SPLIT])),
    (4, 2, 16, 32, 5 * SPLIT, [SPLIT, 2 * SPLIT, 4 * SPLIT]),
    slow((38, 1, 24, 128, 2 * SPLIT + 100, [2 * SPLIT])),
    (3, 1, 22, 8, 40, []),
]
DTYPES = [torch.float32, slow(torch.bfloat16)]


def kernel_whole(*arguments, **options):
    from kernels.triton import decode_attention

    return flat(decode_attention.paged_decode_attention)(*arguments, **options, max_seq_len=MOST)


def kernel_part(*arguments, **options):
    from kernels.triton import decode_attention

    flat(decode_attention.paged_decode_part)(*arguments, **options)


WHOLE = {"kernel": kernel_whole, "twin": flat(ref.paged_decode_attention)}
PARTS = {"kernel": kernel_part, "twin": flat(ref.paged_decode_part)}


def draw(case, dtype, rng):
    heads, kv_heads, head_size, block_size, length, _ = case
    cache = paged_cache([length], kv_heads, head_size, block_size, dtype, rng)
    q, _, _ = fused_heads(1, heads, kv_heads, head_size, dtype, rng)
    return cache, q


def in_parts(attend, case, cache, q, beside, rng, *, spoil=None):
    """Run a case's parts: host blocks of every second one in a buffer, the others read in place."""
    length, ends = case[4], [*case[5], case[4]]
    k, v, host = in_tiers(cache, max(1, len(cache.storage) // 3), beside)
    num_gpu, block_size = k.shape[0], k.shape[2]
    workspace = decode_workspace(1, q.shape[1], q.shape[2], MOST, q.device)
    workspace.partial.fill_(torch.nan)
    workspace.logsumexp.fill_(torch.nan)
    out, begin = torch.full_like(q, torch.nan), 0
    for index, end in enumerate(ends):
        table = torch.full_like(cache.block_tables, NO_BLOCK)
        columns = slice(begin // block_size, -(-end // block_size))
        table[:, columns] = cache.block_tables[:, columns]
        read = host
        if index % 2:
            is_host = (table >= num_gpu) & (table != NO_BLOCK)
            ids = (table[is_host].long() - num_gpu).cpu()
            read = HostCache(*(side.cpu()[ids].to(q.device) for side in (host.k, host.v)))
            slots = torch.arange(len(ids), device=q.device, dtype=torch.int32)
            table[is_host] = num_gpu + slots
        if spoil is not None:
            spoil(index, workspace)
        attend(
            q, k, v, table, cache.seq_lens, scale=q.shape[2] ** -0.5, host=read, begin_key=begin,
            end_key=end, is_last=end == length, workspace=workspace, out=out,
        )  # fmt: skip
        begin = end
    assert not workspace.counters.any()
    return out


def whole(attend, cache, q):
    arguments = q, cache.k_cache, cache.v_cache, cache.block_tables, cache.seq_lens
    return attend(*arguments, scale=q.shape[2] ** -0.5)


@pytest.mark.thorough_but("(3, 1, 22, 8, 40, [])")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_give_the_bits_of_one_pass(case, name, dtype, rng, beside):
    cache, q = draw(case, dtype, rng)
    expected = whole(WHOLE[name], cache, q)
    assert torch.equal(in_parts(PARTS[name], case, cache, q, beside, rng), expected)
    assert_close(expected, whole(WHOLE["twin"], cache, q), ATTENTION)


@pytest.mark.slow
@pytest.mark.parametrize("most", [slow(1), 3])
def test_programs_share_the_splits_of_a_part(most, monkeypatch, rng, beside):
    from kernels.triton import decode_attention

    cache, q = draw(CASES[1], torch.float32, rng)
    expected = whole(kernel_whole, cache, q)
    monkeypatch.setattr(decode_attention, "_MAX_PROGRAMS", 1)
    monkeypatch.setattr(decode_attention, "_MIN_HOST_PROGRAMS", most)
    assert torch.equal(in_parts(kernel_part, CASES[1], cache, q, beside, rng), expected)


@pytest.mark.thorough_but("twin")
@pytest.mark.parametrize("part", [slow(0), 1, slow(2)])
@pytest.mark.parametrize("name", PARTS)
def test_every_part_counts(name, part, rng, beside):
    cache, q = draw(CASES[1], torch.float32, rng)
    expected = whole(WHOLE[name], cache, q)

    def spoil(index, workspace):
        if index == 3:
            workspace.logsumexp[:, :, part] += 1

    got = in_parts(PARTS[name], CASES[1], cache, q, beside, rng, spoil=spoil)
    assert not torch.allclose(got, expected, atol=1e-4)


def test_arguments_are_checked(rng, beside):
    cache, q = draw(CASES[3], torch.float32, rng)
    call = {
        "scale": 1.0,
        "begin_key": 0,
        "end_key": 40,
        "is_last": True,
        "workspace": decode_workspace(1, q.shape[1], q.shape[2], SPLIT, q.device),
    }
    arguments = q, cache.k_cache, cache.v_cache, cache.block_tables, cache.seq_lens
    part = flat(attention.paged_decode_part)
    for changes, message in (
        ({"begin_key": 8}, "begin_key: expected a multiple of 256, got 8"),
        ({"end_key": 0}, "end_key: expected more than 0, got 0"),
        ({"is_last": False}, "end_key: expected a multiple of 256 in all parts but the last"),
        ({"end_key": SPLIT + 1}, "workspace: expected room for 1 x 3 heads x 2 splits"),
        ({"window": 9}, "window: expected None, got 9"),
    ):
        with pytest.raises(KernelArgumentError, match=message):
            part(*arguments, **call | changes)
    part(*arguments, **call)
