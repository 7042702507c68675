import pytest
import torch

from kernels.ops import attention
from kernels.ops.checks import KernelArgumentError
from kernels.ref import attention as ref
from tests.kernels.cases import dense_attention, flat, fused_heads, paged_cache
from tests.kernels.tolerances import ATTENTION, assert_close

# query heads, KV heads, head size, block size, (queries, sequence length) of each sequence
CASES = [
    (8, 2, 64, 16, [(16, 16), (64, 64)]),
    (1, 1, 16, 8, [(1, 1)]),
    (9, 3, 64, 16, [(5, 5), (0, 0), (1, 150), (40, 170)]),
    (7, 1, 80, 32, [(33, 70), (0, 12)]),
    (2, 2, 96, 16, [(17, 17), (130, 131)]),
    (38, 1, 24, 128, [(7, 130)]),
    (2, 1, 256, 16, [(70, 75)]),
    (4, 2, 32, 24, [(1, 1), (23, 24), (65, 128)]),
]
LARGE = [CASES[0], CASES[2], CASES[4], CASES[5], CASES[6]]
"""Take long; the others have groups of heads, empty sequences and odd sizes too."""
CASES_AND_DTYPES = [
    *[(case, torch.float32) for case in CASES if case not in LARGE],
    *[pytest.param(case, torch.float32, marks=pytest.mark.slow) for case in LARGE],
    *[pytest.param(case, torch.bfloat16, marks=pytest.mark.slow) for case in CASES[2:4]],
    (CASES[4], torch.bfloat16),
    *[pytest.param(case, torch.float16, marks=pytest.mark.slow) for case in CASES[2:5]],
]
PADDING_ROWS = 3


def draw(case, dtype, rng):
    heads, kv_heads, head_size, block_size, sequences = case
    lengths = [length for _, length in sequences]
    cache = paged_cache(lengths, kv_heads, head_size, block_size, dtype, rng)
    starts = [0]
    for queries, _ in sequences:
        starts.append(starts[-1] + queries)
    q, _, _ = fused_heads(starts[-1] + PADDING_ROWS, heads, kv_heads, head_size, dtype, rng)
    query_starts = torch.tensor(starts, dtype=torch.int32, device=rng.device)
    arguments = (
        q,
        cache.k_cache,
        cache.v_cache,
        cache.block_tables,
        query_starts,
        cache.seq_lens,
        head_size**-0.5,
    )
    return cache, arguments, starts


def kernel(*arguments, out=None):
    from kernels.triton import prefill_attention

    starts = arguments[4]
    return flat(prefill_attention.paged_prefill_attention)(
        *arguments, max_query_len=int(starts.diff().max()), out=out
    )


IMPLEMENTATIONS = {"kernel": kernel, "twin": flat(ref.paged_prefill_attention)}


@pytest.mark.thorough_but("(1, 1, 16, 8, [(1, 1)])", "(2, 2, 96, 16, [(17, 17), (130, 131)])")
@pytest.mark.parametrize(("case", "dtype"), CASES_AND_DTYPES, ids=str)
def test_kernel_matches_twin(case, dtype, rng):
    _, arguments, starts = draw(case, dtype, rng)
    out, expected = kernel(*arguments), flat(ref.paged_prefill_attention)(*arguments)
    assert_close(out[: starts[-1]], expected[: starts[-1]], ATTENTION)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_twin_matches_the_definition(case, rng):
    cache, arguments, starts = draw(case, torch.float32, rng)
    q, scale = arguments[0], arguments[-1]
    out = flat(ref.paged_prefill_attention)(*arguments)
    for index, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        rows = slice(starts[index], starts[index + 1])
        expected = dense_attention(q[rows], keys, values, scale)
        assert_close(out[rows], expected.float(), ATTENTION)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_one_query_attends_as_decode_does(name, rng):
    _, arguments, _ = draw((6, 2, 32, 16, [(1, 90), (1, 3)]), torch.float32, rng)
    q, k_cache, v_cache, tables, _, lens, scale = arguments
    out = IMPLEMENTATIONS[name](*arguments)
    expected = flat(ref.paged_decode_attention)(q[:2], k_cache, v_cache, tables, lens, scale)
    assert_close(out[:2], expected, ATTENTION)


@pytest.mark.thorough_but("twin")
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_chunks_give_what_the_whole_prompt_gives(name, rng):
    attend = IMPLEMENTATIONS[name]
    _, arguments, _ = draw((3, 1, 32, 16, [(75, 75)]), torch.float32, rng)
    q, k_cache, v_cache, tables, _, lens, scale = arguments
    whole = attend(*arguments)
    done = 0
    for queries in (1, 30, 44):
        starts = torch.tensor([0, queries], dtype=torch.int32, device=rng.device)
        chunk = q[done : done + queries]
        done += queries
        lens = torch.tensor([done], dtype=torch.int32, device=rng.device)
        out = attend(chunk, k_cache, v_cache, tables, starts, lens, scale)
        assert_close(out, whole[done - queries : done], ATTENTION)


@pytest.mark.thorough_but("twin")
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_sequence_gets_the_same_result_in_every_batch(name, rng):
    attend = IMPLEMENTATIONS[name]
    sequences = [(3, 9), (50, 120), (0, 0), (1, 77)]
    _, arguments, starts = draw((3, 1, 32, 16, sequences), torch.bfloat16, rng)
    q, k_cache, v_cache, tables, _, lens, scale = arguments
    together = attend(*arguments)
    for index, (queries, _) in enumerate(sequences):
        one, rows = slice(index, index + 1), slice(starts[index], starts[index + 1])
        own_starts = torch.tensor([0, queries], dtype=torch.int32, device=rng.device)
        alone = attend(q[rows], k_cache, v_cache, tables[one], own_starts, lens[one], scale)
        assert torch.equal(alone, together[rows])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_out_is_written_and_rows_of_no_sequence_are_left(name, rng):
    _, arguments, starts = draw((4, 2, 16, 8, [(5, 9), (2, 20)]), torch.float32, rng)
    wide = torch.full((starts[-1] + PADDING_ROWS, 4, 40), torch.nan, device=rng.device)
    out = wide[..., 8:24]
    assert IMPLEMENTATIONS[name](*arguments, out=out) is out
    expected = IMPLEMENTATIONS[name](*arguments)
    assert torch.equal(out[: starts[-1]], expected[: starts[-1]])
    assert out[starts[-1] :].isnan().all()
    assert wide[..., :8].isnan().all()
    assert wide[..., 24:].isnan().all()


def test_a_later_token_is_not_seen(rng):
    cache, arguments, _ = draw((4, 2, 16, 8, [(20, 20)]), torch.float32, rng)
    before = kernel(*arguments)[:20]
    last_block, offset = int(cache.block_tables[0, 2]), 19 % 8
    cache.k_cache[last_block, :, offset] += 5
    cache.v_cache[last_block, :, offset] += 5
    after = kernel(*arguments)[:20]
    assert torch.equal(after[:19], before[:19])
    assert not torch.allclose(after[19], before[19])


def test_no_tokens(rng):
    _, arguments, _ = draw((4, 2, 16, 8, [(0, 5)]), torch.float32, rng)
    for attend in IMPLEMENTATIONS.values():
        out = attend(arguments[0][:0], *arguments[1:])
        assert out.shape == (0, 4, 16)


def test_door_runs_the_twin_on_the_cpu():
    rng = torch.Generator().manual_seed(0)
    _, arguments, _ = draw((4, 2, 16, 8, [(20, 20), (3, 7)]), torch.float32, rng)
    out = flat(attention.paged_prefill_attention)(*arguments, max_query_len=20)
    assert torch.equal(out, flat(ref.paged_prefill_attention)(*arguments))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(5, 64)}, r"\.q: expected shape \[T, N, H\]"),
        ({"q": torch.zeros(5, 3, 16)}, r"\.q: expected a multiple of 2 query heads"),
        ({"q": torch.zeros(5, 4, 512)}, r"\.q: expected a head size \(H\) of 16 to 256"),
        ({"q": torch.zeros(5, 16, 4).mT}, r"\.q: expected stride 1 in the last dimension"),
        ({"query_starts_S1": torch.zeros(2).int()}, r"\.query_starts: expected shape \(3\)"),
        ({"query_starts_S1": torch.zeros(3).long()}, r"\.query_starts: expected torch\.int32"),
        ({"seq_lens": torch.ones(3).int()}, r"\.seq_lens: expected shape \(2\)"),
        ({"block_tables": torch.zeros(2).int()}, r"\.block_tables: expected shape \[S, M\]"),
        ({"out": torch.zeros(5, 4, 16).half()}, r"\.out: expected torch\.float32"),
    ],
)
def test_door_refuses(change, message):
    arguments = {
        "q": torch.zeros(5, 4, 16),
        "k_cache": torch.zeros(3, 2, 8, 16),
        "v_cache": torch.zeros(3, 2, 8, 16),
        "block_tables": torch.zeros(2, 2, dtype=torch.int32),
        "query_starts_S1": torch.tensor([0, 3, 5], dtype=torch.int32),
        "seq_lens": torch.tensor([3, 4], dtype=torch.int32),
        "scale": 1.0,
        "max_query_len": 3,
    }
    with pytest.raises(KernelArgumentError, match=r"paged_prefill_attention" + message):
        flat(attention.paged_prefill_attention)(**(arguments | change))
