import pytest
import torch

from kernels.arguments import decode_workspace
from kernels.ops import attention
from kernels.ops.checks import KernelArgumentError
from kernels.ref import attention as ref
from kernels.sizes import DECODE_SPLIT_TOKENS, decode_workspace_bytes
from tests.kernels.cases import dense_attention, flat, fused_heads, paged_cache
from tests.kernels.tolerances import ATTENTION, assert_close
from tests.slow import slow

SPLIT = DECODE_SPLIT_TOKENS

# query heads, KV heads, head size, block size, sequence lengths
CASES = [
    (8, 2, 64, 16, [16, 64]),
    (1, 1, 16, 8, [1]),
    (9, 3, 64, 16, [5, 0, SPLIT + 3, SPLIT]),
    (7, 1, 80, 32, [33, 1]),
    (3, 3, 96, 16, [17, 0, 0]),
    (38, 1, 24, 128, [130]),
    (2, 1, 256, 16, [70]),
    (4, 2, 32, 24, [2 * SPLIT + 1, 23, 24, 25]),
]


CASES_AND_DTYPES = [
    *[(case, torch.float32) for case in CASES if case is not CASES[2]],
    slow(CASES[2], torch.float32),
    (CASES[2], torch.bfloat16),
    *[slow(case, torch.bfloat16) for case in CASES[3:5]],
    *[slow(case, torch.float16) for case in CASES[2:5]],
]


def draw(case, dtype, rng):
    heads, kv_heads, head_size, block_size, lengths = case
    cache = paged_cache(lengths, kv_heads, head_size, block_size, dtype, rng)
    q, _, _ = fused_heads(len(lengths), heads, kv_heads, head_size, dtype, rng)
    arguments = (q, cache.k_cache, cache.v_cache, cache.block_tables, cache.seq_lens)
    return cache, (*arguments, head_size**-0.5), max(lengths)


@pytest.mark.thorough_but(
    "(8, 2, 64, 16, [16, 64])",
    "(1, 1, 16, 8, [1])",
    "(7, 1, 80, 32, [33, 1])",
    "(3, 3, 96, 16, [17, 0, 0])",
)
@pytest.mark.parametrize(("case", "dtype"), CASES_AND_DTYPES, ids=str)
def test_kernel_matches_twin(case, dtype, rng):
    from kernels.triton import decode_attention

    _, arguments, max_seq_len = draw(case, dtype, rng)
    out = flat(decode_attention.paged_decode_attention)(*arguments, max_seq_len=max_seq_len)
    assert_close(out, flat(ref.paged_decode_attention)(*arguments), ATTENTION)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_twin_matches_the_definition(case, rng):
    cache, arguments, _ = draw(case, torch.float32, rng)
    q, scale = arguments[0], arguments[-1]
    out = flat(ref.paged_decode_attention)(*arguments)
    for index, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        if len(keys) == 0:
            assert (out[index] == 0).all()
            continue
        expected = dense_attention(q[index : index + 1], keys, values, scale)[0]
        assert_close(out[index], expected.float(), ATTENTION)


def implementations():
    from kernels.triton import decode_attention

    def twin(*arguments, max_seq_len, out=None):
        return flat(ref.paged_decode_attention)(*arguments, out=out)

    return {"kernel": flat(decode_attention.paged_decode_attention), "twin": twin}


@pytest.mark.thorough_but("twin")
@pytest.mark.parametrize("name", ["kernel", "twin"])
def test_a_sequence_gets_the_same_result_in_every_batch(name, rng):
    attend = implementations()[name]
    lengths = [3, SPLIT + 40, 0, 77]
    _, arguments, _ = draw((3, 1, 32, 16, lengths), torch.bfloat16, rng)
    q, k_cache, v_cache, tables, lens, scale = arguments
    together = attend(*arguments, max_seq_len=8 * SPLIT)
    for index, length in enumerate(lengths):
        one = slice(index, index + 1)
        alone = attend(
            q[one], k_cache, v_cache, tables[one], lens[one], scale, max_seq_len=max(1, length)
        )
        assert torch.equal(alone[0], together[index])


@pytest.mark.parametrize("name", ["kernel", "twin"])
def test_out_is_written_and_returned(name, rng):
    attend = implementations()[name]
    _, arguments, longest = draw((4, 2, 16, 8, [9, 0, 20]), torch.float32, rng)
    wide = torch.full((3, 4, 40), torch.nan, device=rng.device)
    out = wide[..., 8:24]
    assert attend(*arguments, max_seq_len=longest, out=out) is out
    assert torch.equal(out, attend(*arguments, max_seq_len=longest))
    assert wide[..., :8].isnan().all()
    assert wide[..., 24:].isnan().all()


@pytest.mark.thorough
def test_workspace_of_a_larger_batch_serves_and_no_more_is_written(rng):
    from kernels.triton import decode_attention

    lengths = [SPLIT + 9, 4]
    _, arguments, longest = draw((4, 2, 16, 8, lengths), torch.float32, rng)
    expected = flat(decode_attention.paged_decode_attention)(*arguments, max_seq_len=longest)
    workspace = decode_workspace(5, 4, 16, 4 * SPLIT, rng.device)
    workspace.partial.fill_(torch.nan)
    workspace.logsumexp.fill_(torch.nan)
    out = flat(decode_attention.paged_decode_attention)(
        *arguments, max_seq_len=4 * SPLIT, workspace=workspace
    )
    assert torch.equal(out, expected)
    assert workspace.partial[2:].isnan().all()
    assert workspace.partial[0, :, 2:].isnan().all()
    assert workspace.partial[1].isnan().all()
    assert (workspace.counters == 0).all()


@pytest.mark.thorough
def test_programs_share_splits_when_the_grid_is_capped(monkeypatch, rng):
    from kernels.triton import decode_attention

    _, arguments, longest = draw((2, 1, 16, 16, [2 * SPLIT + 1, 9]), torch.float32, rng)
    expected = flat(decode_attention.paged_decode_attention)(*arguments, max_seq_len=longest)
    monkeypatch.setattr(decode_attention, "_MAX_PROGRAMS", 1)
    assert torch.equal(
        flat(decode_attention.paged_decode_attention)(*arguments, max_seq_len=longest), expected
    )


def test_a_stale_table_changes_the_result(rng):
    from kernels.triton import decode_attention

    cache, arguments, longest = draw((4, 2, 16, 8, [20, 20]), torch.float32, rng)
    expected = flat(ref.paged_decode_attention)(*arguments)
    cache.block_tables[0, 1] = cache.block_tables[1, 1]
    out = flat(decode_attention.paged_decode_attention)(*arguments, max_seq_len=longest)
    assert not torch.allclose(out[0], expected[0], atol=1e-3)
    assert_close(out[1], expected[1], ATTENTION)


def test_no_sequences(rng):
    _, arguments, _ = draw((4, 2, 16, 8, [1]), torch.float32, rng)
    q, k_cache, v_cache, tables, lens, scale = arguments
    for attend in implementations().values():
        out = attend(q[:0], k_cache, v_cache, tables[:0], lens[:0], scale, max_seq_len=1)
        assert out.shape == (0, 4, 16)


@pytest.mark.parametrize(
    "case", [(1, 8, 64, 1), (16, 32, 128, 4096), (3, 7, 80, SPLIT + 1)], ids=str
)
def test_workspace_has_the_bytes_that_planning_counts(case):
    workspace = decode_workspace(*case, "cpu")
    tensors = (workspace.partial, workspace.logsumexp, workspace.counters)
    assert decode_workspace_bytes(*case) == sum(tensor.nbytes for tensor in tensors)


def arguments_of_zeros():
    return {
        "q": torch.zeros(2, 4, 16),
        "k_cache": torch.zeros(3, 2, 8, 16),
        "v_cache": torch.zeros(3, 2, 8, 16),
        "block_tables": torch.zeros(2, 2, dtype=torch.int32),
        "seq_lens": torch.ones(2, dtype=torch.int32),
        "scale": 1.0,
        "max_seq_len": 16,
    }


def test_door_runs_the_twin_on_the_cpu():
    rng = torch.Generator().manual_seed(0)
    _, arguments, longest = draw((4, 2, 16, 8, [20, 3]), torch.float32, rng)
    out = flat(attention.paged_decode_attention)(*arguments, max_seq_len=longest)
    assert torch.equal(out, flat(ref.paged_decode_attention)(*arguments))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 64)}, r"\.q: expected shape \[T, N, H\]"),
        ({"q": torch.zeros(2, 3, 16)}, r"\.q: expected a multiple of 2 query heads"),
        ({"q": torch.zeros(2, 4, 8)}, r"\.q: expected a head size \(H\) of 16 to 256, got 8"),
        ({"q": torch.zeros(2, 4, 16).half()}, r"\.k_cache: expected torch\.float16"),
        ({"q": torch.zeros(2, 4, 16).int()}, r"\.q: expected float32, bfloat16 or float16"),
        ({"q": torch.zeros(3, 4, 16)}, r"\.seq_lens: expected 3 lengths, got 2"),
        ({"v_cache": torch.zeros(3, 2, 4, 16)}, r"\.v_cache: expected shape \(3, 2, 8, 16\)"),
        ({"k_cache": torch.zeros(3, 2, 16)}, r"\.k_cache: expected shape \[B, K, P, H\]"),
        ({"block_tables": torch.zeros(2, 2).long()}, r"\.block_tables: expected torch\.int32"),
        ({"seq_lens": torch.ones(2).long()}, r"\.seq_lens: expected torch\.int32"),
        ({"out": torch.zeros(2, 4, 8)}, r"\.out: expected shape \(2, 4, 16\)"),
        (
            {"max_seq_len": SPLIT + 1, "workspace": decode_workspace(2, 4, 16, 1, "cpu")},
            r"\.workspace: expected room for 2 x 4 heads x 2 splits x 16",
        ),
        ({"workspace": decode_workspace(2, 8, 16, 16, "cpu")}, r"\.workspace: expected room"),
        ({"workspace": decode_workspace(1, 4, 16, 16, "cpu")}, r"\.workspace: expected room"),
    ],
)
def test_door_refuses(change, message):
    with pytest.raises(KernelArgumentError, match=r"paged_decode_attention" + message):
        flat(attention.paged_decode_attention)(**(arguments_of_zeros() | change))
