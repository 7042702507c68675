"""Attention with a window: exact beyond it, and nothing that lies wholly before it is read."""

import pytest
import torch

from kernels.ops import attention
from kernels.ops.checks import KernelArgumentError
from kernels.ref import attention as ref
from kernels.sizes import DECODE_SPLIT_TOKENS
from tests.kernels.cases import dense_attention, flat, fused_heads, paged_cache
from tests.kernels.tolerances import ATTENTION, assert_close

SPLIT = DECODE_SPLIT_TOKENS
NO_BLOCK = 2**30

# query heads, KV heads, head size, block size, window, (queries, sequence length) of each sequence
CASES = [
    (4, 2, 32, 16, 24, [(1, 1), (5, 23), (40, 170), (3, SPLIT + 40)]),
    (9, 3, 64, 16, 1, [(70, 75), (1, 9), (0, 0)]),
    (2, 1, 256, 8, 33, [(3, 2 * SPLIT + 5), (64, 64)]),
    (3, 1, 22, 32, SPLIT, [(2, SPLIT), (9, SPLIT + 1), (1, 3 * SPLIT)]),
    (38, 1, 24, 128, 100, [(7, 130)]),
    (4, 4, 16, 8, 10_000, [(20, 90)]),
]
DTYPES = [torch.float32, torch.bfloat16]
CASES_AND_DTYPES = [
    (CASES[0], torch.float32),
    *[pytest.param(case, torch.float32, marks=pytest.mark.slow) for case in CASES[1:]],
    (CASES[1], torch.bfloat16),
    *[
        pytest.param(case, torch.bfloat16, marks=pytest.mark.slow)
        for case in (CASES[0], *CASES[2:])
    ],
]


def draw(case, dtype, rng, *, num_queries=None):
    """Arguments of prefill; what no query of a sequence may read is poisoned."""
    heads, kv_heads, head_size, block_size, window, sequences = case
    sequences = [(min(num_queries or n, n), length) for n, length in sequences]
    lengths = [length for _, length in sequences]
    cache = paged_cache(lengths, kv_heads, head_size, block_size, dtype, rng)
    for row, (queries, length) in enumerate(sequences):
        gone = max(0, length - queries + 1 - window)
        whole = gone // block_size
        blocks = cache.block_tables[row, :whole].long()
        cache.k_cache[blocks], cache.v_cache[blocks] = torch.nan, torch.nan
        if gone % block_size:
            edge = int(cache.block_tables[row, whole])
            cache.v_cache[edge, :, : gone % block_size] = torch.nan
        cache.block_tables[row, :whole] = NO_BLOCK
    starts = torch.tensor([0, *[queries for queries, _ in sequences]]).cumsum(0)
    q, _, _ = fused_heads(int(starts[-1]), heads, kv_heads, head_size, dtype, rng)
    starts = starts.to(torch.int32).to(rng.device)
    arguments = (q, cache.k_cache, cache.v_cache, cache.block_tables, starts, cache.seq_lens)
    return cache, (*arguments, head_size**-0.5)


def prefill_kernel(*arguments, window):
    from kernels.triton import prefill_attention

    longest = int(arguments[4].diff().max())
    return flat(prefill_attention.paged_prefill_attention)(
        *arguments, max_query_len=longest, window=window
    )


def decode_kernel(*arguments, window, max_seq_len=4 * SPLIT):
    from kernels.triton import decode_attention

    return flat(decode_attention.paged_decode_attention)(
        *arguments, max_seq_len=max_seq_len, window=window
    )


PREFILLS = {"kernel": prefill_kernel, "twin": flat(ref.paged_prefill_attention)}
DECODES = {"kernel": decode_kernel, "twin": flat(ref.paged_decode_attention)}


def expected_rows(case, cache, q, starts, window):
    """By the definition, each query alone over the keys that it sees."""
    rows = []
    for index, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        queries = q[starts[index] : starts[index + 1]]
        for place, query in enumerate(queries):
            stop = len(keys) - len(queries) + place + 1
            seen = slice(max(0, stop - window), stop)
            rows.append(dense_attention(query[None], keys[seen], values[seen], case[2] ** -0.5))
    return torch.cat(rows)


@pytest.mark.thorough_but("torch.bfloat16")
@pytest.mark.parametrize("name", PREFILLS)
@pytest.mark.parametrize(("case", "dtype"), CASES_AND_DTYPES, ids=str)
def test_prefill_is_the_definition(case, name, dtype, rng):
    cache, arguments = draw(case, dtype, rng)
    out = PREFILLS[name](*arguments, window=case[4])
    expected = expected_rows(case, cache, arguments[0], arguments[4].tolist(), case[4])
    assert_close(out, expected.to(dtype), ATTENTION)


@pytest.mark.parametrize("name", DECODES)
@pytest.mark.parametrize(("case", "dtype"), CASES_AND_DTYPES, ids=str)
def test_decode_is_the_definition(case, name, dtype, rng):
    case = (*case[:5], [item for item in case[5] if item[1]])
    cache, arguments = draw(case, dtype, rng, num_queries=1)
    q, k_cache, v_cache, tables, _, lens, scale = arguments
    out = DECODES[name](q, k_cache, v_cache, tables, lens, scale, window=case[4])
    expected = expected_rows(case, cache, q, list(range(len(q) + 1)), case[4])
    assert_close(out, expected.to(dtype), ATTENTION)


@pytest.mark.parametrize("name", DECODES)
def test_decode_of_padding_gives_zeros_beside_others(name, rng):
    _, arguments = draw((4, 2, 16, 8, 12, [(1, 40), (1, 5)]), torch.float32, rng)
    q, k_cache, v_cache, tables, _, lens, scale = arguments
    whole = DECODES[name](q, k_cache, v_cache, tables, lens, scale, window=12)
    lens = torch.tensor([40, 0], dtype=torch.int32, device=rng.device)
    out = DECODES[name](q, k_cache, v_cache, tables, lens, scale, window=12)
    assert torch.equal(out[0], whole[0])
    assert (out[1] == 0).all()


@pytest.mark.thorough
def test_decode_gives_the_same_bits_whatever_the_grid(monkeypatch, rng):
    from kernels.triton import decode_attention

    case = (2, 1, 16, 16, 2 * SPLIT + 9, [(1, 4 * SPLIT), (1, 3 * SPLIT + 7), (1, 2)])
    _, arguments = draw(case, torch.bfloat16, rng)
    q, k_cache, v_cache, tables, _, lens, scale = arguments
    whole = decode_kernel(q, k_cache, v_cache, tables, lens, scale, window=case[4])
    for row, length in enumerate(lens.tolist()):
        one = slice(row, row + 1)
        alone = decode_kernel(
            q[one], k_cache, v_cache, tables[one], lens[one], scale,
            window=case[4], max_seq_len=length,
        )  # fmt: skip
        assert torch.equal(alone[0], whole[row])
    monkeypatch.setattr(decode_attention, "_MAX_PROGRAMS", 1)
    again = decode_kernel(q, k_cache, v_cache, tables, lens, scale, window=case[4])
    assert torch.equal(again, whole)


@pytest.mark.thorough_but("-1")
@pytest.mark.parametrize("change", [-1, 1])
def test_a_window_off_by_one_changes_every_row_beyond_it(change, rng):
    sequences = [(30, 90), (1, 40)]
    _, arguments = draw((2, 1, 32, 16, 26, sequences), torch.float32, rng)
    right = prefill_kernel(*arguments, window=25)
    wrong = prefill_kernel(*arguments, window=25 + change)
    assert ((right - wrong).abs().amax((1, 2)) > 1e-5).all()


@pytest.mark.thorough
@pytest.mark.parametrize("name", PREFILLS)
def test_chunks_give_what_the_whole_prompt_gives(name, rng):
    _, arguments = draw((3, 1, 32, 16, 21, [(75, 75)]), torch.float32, rng)
    q, k_cache, v_cache, tables, _, lens, scale = arguments
    whole, done = PREFILLS[name](*arguments, window=21), 0
    for queries in (1, 30, 44):
        starts = torch.tensor([0, queries], dtype=torch.int32, device=rng.device)
        chunk = q[done : done + queries]
        done += queries
        lens = torch.tensor([done], dtype=torch.int32, device=rng.device)
        out = PREFILLS[name](chunk, k_cache, v_cache, tables, starts, lens, scale, window=21)
        assert_close(out, whole[done - queries : done], ATTENTION)


def test_door_passes_the_window_on():
    rng = torch.Generator().manual_seed(0)
    _, arguments = draw((4, 2, 16, 8, 7, [(1, 20), (1, 3)]), torch.float32, rng)
    q, k_cache, v_cache, tables, starts, lens, scale = arguments
    common = (q, k_cache, v_cache, tables)
    out = flat(attention.paged_decode_attention)(*common, lens, scale, max_seq_len=20, window=7)
    assert torch.equal(out, flat(ref.paged_decode_attention)(*common, lens, scale, window=7))
    out = flat(attention.paged_prefill_attention)(
        *common, starts, lens, scale, max_query_len=1, window=7
    )
    assert torch.equal(
        out, flat(ref.paged_prefill_attention)(*common, starts, lens, scale, window=7)
    )


def test_door_refuses_a_window_of_nothing():
    rng = torch.Generator().manual_seed(0)
    _, arguments = draw((4, 2, 16, 8, 7, [(1, 20)]), torch.float32, rng)
    q, k_cache, v_cache, tables, starts, lens, scale = arguments
    common = (q, k_cache, v_cache, tables)
    with pytest.raises(KernelArgumentError, match=r"decode_attention\.window: expected None"):
        flat(attention.paged_decode_attention)(*common, lens, scale, max_seq_len=20, window=0)
    with pytest.raises(KernelArgumentError, match=r"prefill_attention\.window: expected None"):
        flat(attention.paged_prefill_attention)(
            *common, starts, lens, scale, max_query_len=1, window=0
        )


# As gemma3_4b, gemma3_1b and mistral's first release have them.
REAL = [
    (8, 4, 256, 16, 1024, [(2048, 2048), (300, 5000), (1, 3000), (129, 131)]),
    (4, 1, 256, 32, 512, [(700, 900), (1, 9000)]),
    (32, 8, 128, 16, 4096, [(512, 9000), (1, 4097)]),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", REAL, ids=str)
def test_kernels_at_the_sizes_of_real_models(case, dtype, rng):
    _, arguments = draw(case, dtype, rng)
    longest = max(queries for queries, _ in case[5])
    out = flat(attention.paged_prefill_attention)(*arguments, max_query_len=longest, window=case[4])
    assert_close(out, flat(ref.paged_prefill_attention)(*arguments, window=case[4]), ATTENTION)
    _, arguments = draw(case, dtype, rng, num_queries=1)
    q, k_cache, v_cache, tables, _, lens, scale = arguments
    common = (q, k_cache, v_cache, tables, lens, scale)
    out = flat(attention.paged_decode_attention)(*common, max_seq_len=9000, window=case[4])
    assert_close(out, flat(ref.paged_decode_attention)(*common, window=case[4]), ATTENTION)
