"""Prefill over parts of the keys gives what one pass gives, to the bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.arguments import HostCache, prefill_state
from kernels.ops import attention
from kernels.ops.checks import KernelArgumentError
from kernels.ref import attention as ref
from kernels.sizes import PREFILL_PART_KEYS, prefill_state_bytes
from tests.kernels.cases import flat, in_tiers, paged_cache, randn
from tests.kernels.tolerances import ATTENTION, assert_close

pytestmark = pytest.mark.slow

PART = PREFILL_PART_KEYS
NO_BLOCK = 2**30
NO_ROW = 3

# query heads, KV heads, head size, block size, window, (queries, sequence length), ends of parts
CASES = [
    (4, 2, 16, 8, None, [(20, 300)], [PART, 2 * PART, 384]),
    (3, 1, 22, 24, None, [(140, 150), (0, 0), (5, 260), (1, 9)], [PART, 300]),
    (8, 2, 64, 16, None, [(33, 290)], [2 * PART, 290]),
    (4, 2, 32, 16, 50, [(40, 300), (3, 100)], [PART, 2 * PART, 300]),
    (2, 1, 256, 128, 130, [(10, 270)], [PART, 2 * PART, 270]),
    (9, 3, 16, 8, 1, [(140, 270)], [PART, 2 * PART, 270]),
    (4, 2, 16, 8, None, [(20, 100)], [100]),
]
DTYPES = [torch.float32, torch.bfloat16]


def draw(case, dtype, rng):
    heads, kv_heads, head_size, block_size, window, sequences, _ = case
    lengths = [length for _, length in sequences]
    cache = paged_cache(lengths, kv_heads, head_size, block_size, dtype, rng)
    starts = torch.tensor([0, *[queries for queries, _ in sequences]]).cumsum(0)
    q = randn((int(starts[-1]) + NO_ROW, heads, head_size), dtype, rng)
    starts = starts.to(torch.int32).to(rng.device)
    options = {"window": window, "scale": head_size**-0.5}
    return cache, q, starts, options


def kernel_whole(*arguments, **options):
    from kernels.triton import prefill_attention

    longest = int(arguments[4].diff().max())
    return flat(prefill_attention.paged_prefill_attention)(
        *arguments, **options, max_query_len=longest, num_parts=1
    )


def kernel_part(*arguments, **options):
    from kernels.triton import prefill_attention

    longest = int(arguments[4].diff().max())
    flat(prefill_attention.paged_prefill_part)(*arguments, **options, max_query_len=longest)


WHOLE = {"kernel": kernel_whole, "twin": flat(ref.paged_prefill_attention)}
PARTS = {"kernel": kernel_part, "twin": flat(ref.paged_prefill_part)}


def staged(tables, num_gpu, host, begin, end, rng):
    """Copy the host blocks of keys begin to end - 1 to a stage.

    Returns:
        The stage, the part's tables, and where their blocks lie.
    """
    block_size = host.k.shape[2]
    part = torch.full_like(tables, NO_BLOCK)
    columns = slice(begin // block_size, -(-end // block_size))
    part[:, columns] = tables[:, columns]
    is_host = (part >= num_gpu) & (part != NO_BLOCK)
    tiers = "both" if is_host.any() else "cache"
    if not (part < num_gpu).any():
        tiers = "host"
    ids = part[is_host].long() - num_gpu
    slots = torch.randperm(len(ids) + 2, generator=rng, device=rng.device)[: len(ids)]
    shape = (len(ids) + 2, 2, *host.k.shape[1:])
    stage = torch.full(shape, torch.nan, dtype=host.k.dtype, device=rng.device)
    stage[slots, 0], stage[slots, 1] = host.k[ids], host.v[ids]
    part[is_host] = (num_gpu + slots).to(torch.int32)
    return HostCache(stage[:, 0], stage[:, 1]), part, tiers


def in_parts(attend, case, cache, q, starts, options, rng, *, share=0.5, spoil=None):
    """Run a case's parts with the blocks beyond a share of the cache staged for each."""
    num_gpu = max(1, round(share * len(cache.storage)))
    k, v, host = in_tiers(cache, num_gpu, torch.clone)
    state = prefill_state(len(q) + 1, *q.shape[1:], rng.device)
    for tensor in (state.row_max, state.row_sum, state.acc):
        tensor.fill_(torch.nan)
    out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=q.device)
    tables, begin = cache.block_tables, 0
    tables = torch.where(tables < len(cache.storage), tables, torch.tensor(NO_BLOCK))
    for end in case[-1]:
        stage, part, tiers = staged(tables, num_gpu, host, begin, end, rng)
        if spoil is not None:
            spoil(begin, state, stage)
        attend(
            q, k, v, part, starts, cache.seq_lens, **options, host=stage, begin_key=begin,
            end_key=end, state=state, is_last=end == case[-1][-1], tiers=tiers, out=out,
        )  # fmt: skip
        begin = end
    assert out[int(starts[-1]) :].isnan().all()
    return out[: int(starts[-1])]


def whole(attend, cache, q, starts, options):
    out = attend(
        q, cache.k_cache, cache.v_cache, cache.block_tables, starts, cache.seq_lens, **options
    )
    return out[: int(starts[-1])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_give_the_bits_of_one_pass(case, name, dtype, rng):
    drawn = draw(case, dtype, rng)
    expected = whole(WHOLE[name], *drawn)
    assert torch.equal(in_parts(PARTS[name], case, *drawn, rng), expected)
    assert_close(expected, whole(WHOLE["twin"], *drawn), ATTENTION)


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_all_blocks_may_be_staged_or_none(case, share, rng):
    drawn = draw(case, torch.float32, rng)
    seen = set()

    def attend(*arguments, **options):
        seen.add(options["tiers"])
        kernel_part(*arguments, **options)

    out = in_parts(attend, case, *drawn, rng, share=share)
    assert torch.equal(out, whole(kernel_whole, *drawn))
    assert ("cache" if share else "host") in seen


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("what", ["row_max", "row_sum", "acc", "stage"])
def test_a_spoilt_state_or_stage_changes_the_result(what, name, rng):
    drawn = draw(CASES[0], torch.float32, rng)

    def spoil(begin, state, stage):
        if begin == PART:
            for tensor in [stage.k, stage.v] if what == "stage" else [getattr(state, what)]:
                tensor.add_(1)

    right = in_parts(PARTS[name], CASES[0], *drawn, rng)
    wrong = in_parts(PARTS[name], CASES[0], *drawn, rng, spoil=spoil)
    assert not torch.allclose(wrong, right, atol=1e-3)


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 700),
    queries=st.integers(1, 300),
    block_size=st.sampled_from([8, 16, 24, 128]),
    window=st.none() | st.integers(1, 400),
    share=st.floats(0, 1),
    cuts=st.sets(st.integers(1, 5)),
    seed=st.integers(0, 99),
)
def test_twin_gives_the_same_bits_however_keys_are_cut(
    length, queries, block_size, window, share, cuts, seed
):
    rng = torch.Generator().manual_seed(seed)
    ends = [*[cut * PART for cut in sorted(cuts) if cut * PART < length], length]
    case = (2, 1, 16, block_size, window, [(min(queries, length), length)], ends)
    drawn = draw(case, torch.float32, rng)
    out = in_parts(flat(ref.paged_prefill_part), case, *drawn, rng, share=share)
    assert torch.equal(out, whole(flat(ref.paged_prefill_attention), *drawn))


@pytest.mark.parametrize("case", [(1, 8, 64), (2048, 32, 128)], ids=str)
def test_state_has_the_bytes_that_planning_counts(case):
    state = prefill_state(*case, "cpu")
    tensors = (state.row_max, state.row_sum, state.acc)
    assert prefill_state_bytes(*case) == sum(tensor.nbytes for tensor in tensors)


def test_door_runs_the_twin_on_the_cpu():
    rng = torch.Generator().manual_seed(0)
    drawn = draw(CASES[3], torch.float32, rng)

    def door(*arguments, **options):
        flat(attention.paged_prefill_part)(*arguments, **options, max_query_len=40)

    expected = whole(flat(ref.paged_prefill_attention), *drawn)
    assert torch.equal(in_parts(door, CASES[3], *drawn, rng), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(5, 64)}, r"\.q: expected shape \[T, N, H\]"),
        ({"begin_key": 64}, r"\.begin_key: expected a multiple of 128, got 64"),
        ({"begin_key": -128}, r"\.begin_key: expected a multiple of 128, got -128"),
        ({"end_key": 100, "is_last": False}, r"\.end_key: expected a multiple of 128 in all"),
        ({"begin_key": 128, "end_key": 128}, r"\.end_key: expected more than 128, got 128"),
        ({"state": prefill_state(4, 4, 16, "cpu")}, r"\.state: expected room for 5 queries"),
        ({"state": prefill_state(5, 2, 16, "cpu")}, r"\.state: expected room for 5 queries"),
        ({"state": prefill_state(5, 4, 16, "meta")}, r"\.state: expected tensors on cpu"),
        ({"query_starts_S1": torch.zeros(2).int()}, r"\.query_starts: expected shape \(3\)"),
        ({"out": torch.zeros(5, 4, 8)}, r"\.out: expected shape \(5, 4, 16\)"),
        ({"window": 0}, r"\.window: expected None or at least 1 token"),
        (
            {"host": HostCache(torch.zeros(1, 2, 8, 8), torch.zeros(1, 2, 8, 8))},
            r"\.host\.k: expected shape \(1, 2, 8, 16\)",
        ),
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
        "host": HostCache(torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8, 16)),
        "begin_key": 0,
        "end_key": 4,
        "state": prefill_state(5, 4, 16, "cpu"),
        "is_last": True,
        "max_query_len": 3,
        "out": torch.zeros(5, 4, 16),
    }
    with pytest.raises(KernelArgumentError, match=r"paged_prefill_part" + message):
        flat(attention.paged_prefill_part)(**(arguments | change))
