"""Attention with sinks: the softmax has one more term, in however many parts."""

import pytest
import torch

from kernels import sizes
from kernels.ops import attention
from kernels.ops.checks import KernelArgumentError
from kernels.ref import attention as ref
from kernels.sizes import DECODE_SPLIT_TOKENS
from tests.kernels import test_paged_decode_part as decode_parts
from tests.kernels import test_paged_prefill_part as prefill_parts
from tests.kernels.cases import dense_attention, flat, fused_heads, paged_cache
from tests.kernels.tolerances import ATTENTION, assert_close
from tests.slow import slow

SPLIT = DECODE_SPLIT_TOKENS
HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 32, 16


def decode_kernel(*arguments, **options):
    from kernels.triton import decode_attention

    run = flat(decode_attention.paged_decode_attention)
    return run(*arguments, **options, max_seq_len=3 * SPLIT)


def prefill_kernel(*arguments, **options):
    from kernels.triton import prefill_attention

    run = flat(prefill_attention.paged_prefill_attention)
    return run(*arguments, **options, max_query_len=int(arguments[4].diff().max()))


DECODES = {"kernel": decode_kernel, "twin": flat(ref.paged_decode_attention)}
PREFILLS = {"kernel": prefill_kernel, "twin": flat(ref.paged_prefill_attention)}


def draw(sequences, dtype, rng):
    """Return a cache, the arguments of prefill, and sinks: usual ones, and far above scores."""
    lengths = [length for _, length in sequences]
    cache = paged_cache(lengths, KV_HEADS, SIZE, BLOCK, dtype, rng)
    starts = torch.tensor([0, *[queries for queries, _ in sequences]]).cumsum(0)
    q, _, _ = fused_heads(int(starts[-1]), HEADS, KV_HEADS, SIZE, dtype, rng)
    sinks = torch.tensor([0.5, -3.0, 4.0, -200.0, 300.0, 0.0], dtype=dtype, device=rng.device)
    starts = starts.to(torch.int32).to(rng.device)
    arguments = (q, cache.k_cache, cache.v_cache, cache.block_tables, starts, cache.seq_lens)
    return cache, (*arguments, SIZE**-0.5), sinks


def expected_rows(cache, q, starts, sinks, window):
    """By the definition, each query alone over the keys that it sees."""
    rows = []
    for index, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        queries = q[starts[index] : starts[index + 1]]
        for place, query in enumerate(queries):
            stop = len(keys) - len(queries) + place + 1
            seen = slice(0 if window is None else max(0, stop - window), stop)
            args = query[None], keys[seen], values[seen], SIZE**-0.5
            rows.append(dense_attention(*args, sinks=sinks))
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)], ids=str)
@pytest.mark.parametrize("window", [slow(None), 40])
@pytest.mark.parametrize("name", DECODES)
def test_decode_is_the_definition(name, window, dtype, rng):
    cache, arguments, sinks = draw([(1, SPLIT + 9), (1, 50)], dtype, rng)
    q, k_cache, v_cache, tables, _, lens, scale = arguments
    out = DECODES[name](q, k_cache, v_cache, tables, lens, scale, window=window, sinks=sinks)
    expected = expected_rows(cache, q, range(3), sinks, window)
    assert_close(out, expected.to(dtype), ATTENTION)


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)], ids=str)
@pytest.mark.parametrize("window", [None, slow(40)])
@pytest.mark.parametrize("keys_of_part", [64, slow(sizes.PREFILL_SPLIT_KEYS)])
@pytest.mark.parametrize("name", PREFILLS)
def test_prefill_is_the_definition(name, keys_of_part, window, dtype, monkeypatch, rng):
    monkeypatch.setattr(sizes, "PREFILL_SPLIT_KEYS", keys_of_part)
    cache, arguments, sinks = draw([(5, 100), (1, 1)], dtype, rng)
    out = PREFILLS[name](*arguments, window=window, sinks=sinks)
    expected = expected_rows(cache, arguments[0], arguments[4].tolist(), sinks, window)
    assert_close(out, expected.to(dtype), ATTENTION)


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODES)
def test_sinks_of_nothing_change_no_bit(name, rng):
    _, arguments, sinks = draw([(1, SPLIT + 9), (1, 50)], torch.bfloat16, rng)
    q, k_cache, v_cache, tables, starts, lens, scale = arguments
    none = torch.full_like(sinks, -torch.inf)
    for attend, given in (
        (DECODES[name], (q, k_cache, v_cache, tables, lens, scale)),
        (PREFILLS[name], (q, k_cache, v_cache, tables, starts, lens, scale)),
    ):
        assert torch.equal(attend(*given, sinks=none), attend(*given))


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODES)
def test_parts_of_the_keys_give_the_bits_of_one_pass(name, beside, rng):
    case = (4, 2, 16, 32, 5 * SPLIT, [SPLIT, 2 * SPLIT, 4 * SPLIT])
    sinks = torch.tensor([0.5, -3.0, 2.0, 300.0], device=rng.device)
    cache, q = decode_parts.draw(case, torch.float32, rng)
    arguments = q, cache.k_cache, cache.v_cache, cache.block_tables, cache.seq_lens, 0.25
    whole = decode_parts.WHOLE[name](*arguments, sinks=sinks)

    def attend(*args, **options):
        decode_parts.PARTS[name](*args, **options, sinks=sinks)

    assert torch.equal(decode_parts.in_parts(attend, case, cache, q, beside, rng), whole)
    for case in prefill_parts.CASES[0], prefill_parts.CASES[3]:
        cache, q, starts, options = prefill_parts.draw(case, torch.float32, rng)
        options |= {"sinks": sinks}
        args = cache.k_cache, cache.v_cache, cache.block_tables, starts, cache.seq_lens
        whole = prefill_parts.WHOLE[name](q, *args, **options)
        stop = int(starts[-1])
        attend = prefill_parts.PARTS[name]
        found = prefill_parts.in_parts(attend, case, cache, q, starts, options, rng)
        assert torch.equal(found[:stop], whole[:stop])


def test_sinks_of_other_heads_are_refused(rng):
    _, arguments, sinks = draw([(1, 9)], torch.float32, rng)
    q, k_cache, v_cache, tables, _, lens, scale = arguments
    run = flat(attention.paged_decode_attention)
    with pytest.raises(KernelArgumentError, match=r"sinks: expected shape \(6\), got shape \(5,\)"):
        run(q, k_cache, v_cache, tables, lens, scale, max_seq_len=9, sinks=sinks[:5])
