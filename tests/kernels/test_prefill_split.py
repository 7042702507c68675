"""Prefill attention with few queries: programs share the keys and add their results."""

import pytest
import torch

from kernels import sizes
from kernels.arguments import prefill_workspace
from kernels.ops import attention
from kernels.ops.checks import KernelArgumentError
from kernels.ref import attention as ref
from kernels.triton import tiles
from kernels.triton.tiles import prefill_tile
from tests.kernels.cases import flat, fused_heads, paged_cache
from tests.kernels.tolerances import ATTENTION, assert_close

pytestmark = pytest.mark.slow

SPLIT = 64
"""Keys of a part at least in these tests, fewer than there are elsewhere."""
MOST = sizes.PREFILL_SPLIT_MAX_QUERIES
NO_ROW = 3

# query heads, KV heads, head size, block size, window, (queries, sequence length) of each sequence
CASES = [
    (4, 2, 32, 16, None, [(20, 2 * SPLIT + 37), (3, 9), (0, 0), (1, SPLIT + 1), (9, SPLIT)]),
    (3, 1, 22, 24, None, [(1, 3 * SPLIT), (0, 40), (40, SPLIT + 40)]),
    (8, 2, 64, 16, None, [(0, 0), (0, 0), (17, 4 * SPLIT + 5)]),
    (38, 1, 24, 128, None, [(2, SPLIT + 130)]),
    (2, 1, 256, 16, None, [(40, SPLIT + 20)]),
    (1, 1, 16, 8, None, [(MOST, MOST + 3)]),
    (4, 2, 32, 16, SPLIT + 30, [(20, 3 * SPLIT + 77), (3, 9), (1, 3 * SPLIT)]),
    (2, 1, 16, 8, 1, [(70, 3 * SPLIT)]),
    (2, 1, 16, 24, 2 * SPLIT, [(40, 5 * SPLIT + 9), (5, SPLIT)]),
]


@pytest.fixture
def short_parts(monkeypatch):
    monkeypatch.setattr(sizes, "PREFILL_SPLIT_KEYS", SPLIT)


def draw(case, dtype, rng):
    heads, kv_heads, head_size, block_size, window, sequences = case
    lengths = [length for _, length in sequences]
    cache = paged_cache(lengths, kv_heads, head_size, block_size, dtype, rng)
    starts = torch.tensor([0, *[queries for queries, _ in sequences]]).cumsum(0)
    num_tokens = min(int(starts[-1]) + NO_ROW, MOST)
    q, _, _ = fused_heads(num_tokens, heads, kv_heads, head_size, dtype, rng)
    starts = starts.to(torch.int32).to(rng.device)
    arguments = (q, cache.k_cache, cache.v_cache, cache.block_tables, starts, cache.seq_lens)
    return (*arguments, head_size**-0.5), window


def kernel(*arguments, **options):
    from kernels.triton import prefill_attention

    options.setdefault("max_query_len", int(arguments[4].diff().max()))
    return flat(prefill_attention.paged_prefill_attention)(*arguments, **options)


def poisoned_workspace(q, max_seq_len, *, num_tokens=MOST):
    space = prefill_workspace(num_tokens, q.shape[1], q.shape[2], max_seq_len, q.device)
    space.partial.fill_(torch.nan)
    space.logsumexp.fill_(torch.nan)
    return space


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_matches_twin(case, short_parts, rng):
    arguments, window = draw(case, torch.float32, rng)
    stop = int(arguments[4][-1])
    expected = flat(ref.paged_prefill_attention)(*arguments, window=window)
    # The call's own number, and few: parts are then of more keys than SPLIT.
    for num_parts in (None, 2):
        out = kernel(*arguments, window=window, num_parts=num_parts)
        assert_close(out[:stop], expected[:stop], ATTENTION)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [CASES[0], CASES[6]], ids=str)
def test_kernel_matches_twin_in_fewer_bits(case, dtype, short_parts, rng):
    arguments, window = draw(case, dtype, rng)
    stop = int(arguments[4][-1])
    expected = flat(ref.paged_prefill_attention)(*arguments, window=window)
    out = kernel(*arguments, window=window)
    assert_close(out[:stop], expected[:stop], ATTENTION)


def test_it_is_split(short_parts, rng):
    arguments, _ = draw(CASES[0], torch.float32, rng)
    space = poisoned_workspace(arguments[0], 4 * SPLIT)
    out = kernel(*arguments, workspace=space)
    whole = kernel(*arguments, num_parts=1)
    rows = space.partial[: 4 * 36 * 4].view(4, 36, 4, 32)
    # Sequence 0 has three parts and sequence 3 has two; one part leaves no partial result.
    assert not rows[:3, :20].isnan().any()
    assert rows[3].isnan().all()
    assert rows[:, 20:23].isnan().all()
    assert not rows[:2, 23].isnan().any()
    assert rows[2:, 23].isnan().all()
    assert rows[:, 24:].isnan().all()
    assert torch.equal(out[20:23], whole[20:23])
    assert torch.equal(out[24:33], whole[24:33])
    assert not torch.equal(out[:20], whole[:20])


@pytest.mark.parametrize("window", [None, SPLIT + 30])
def test_a_sequence_gets_the_same_bits_whatever_lies_beside_it(window, short_parts, rng):
    case = (3, 1, 32, 16, None, [(17, 2 * SPLIT + 9), (20, 3 * SPLIT), (0, 0), (2, 77)])
    arguments, _ = draw(case, torch.bfloat16, rng)
    q, k_cache, v_cache, tables, starts, lens, scale = arguments
    together = kernel(*arguments, window=window)
    for index, (queries, _) in enumerate(case[-1][:2]):
        one, first = slice(index, index + 1), int(starts[index])
        own_starts = torch.tensor([0, queries], dtype=torch.int32, device=rng.device)
        own = q[first : first + queries]
        alone = kernel(
            own, k_cache, v_cache, tables[one], own_starts, lens[one], scale, window=window
        )
        assert torch.equal(alone, together[first : first + queries])


def test_a_padded_step_gives_the_same_bits_twice(short_parts, rng):
    """As in a captured step: room for more sequences, queries and keys than there are."""
    sequences = [(20, 2 * SPLIT + 9), (3, SPLIT + 50)]
    arguments, _ = draw((2, 1, 16, 16, None, sequences), torch.float32, rng)
    q, k_cache, v_cache, tables, starts, lens, scale = arguments
    expected = kernel(*arguments)[:23]
    wide = torch.zeros((4, 100), dtype=torch.int32, device=rng.device)
    wide[:2, : tables.shape[1]] = tables
    padded_q = torch.full((30, 2, 16), torch.nan, device=rng.device)
    padded_q[:23] = q[:23]
    padding = torch.tensor([23, 23], dtype=torch.int32, device=rng.device)
    padded_lens = torch.cat([lens, padding * 0])
    space = poisoned_workspace(q, 6 * SPLIT)
    for _ in range(2):
        out = kernel(
            padded_q, k_cache, v_cache, wide, torch.cat([starts, padding]), padded_lens, scale,
            max_query_len=30, workspace=space,
        )  # fmt: skip
        assert torch.equal(out[:23], expected)


def test_all_padding(short_parts, rng):
    arguments, _ = draw((2, 1, 16, 16, None, [(1, SPLIT + 9)] * 4), torch.float32, rng)
    q, k_cache, v_cache, tables, starts, lens, scale = arguments
    space, out = poisoned_workspace(q, 600), torch.full_like(q, 7.0)
    kernel(
        q, k_cache, v_cache, tables, starts * 0, lens * 0, scale,
        max_query_len=16, workspace=space, out=out,
    )  # fmt: skip
    assert (out == 7).all()
    assert space.partial.isnan().all()


def test_rows_of_no_sequence_are_left(short_parts, rng):
    arguments, _ = draw(CASES[0], torch.float32, rng)
    out = torch.full_like(arguments[0], torch.nan)
    kernel(*arguments, out=out)
    assert not out[:-NO_ROW].isnan().any()
    assert out[-NO_ROW:].isnan().all()


def test_more_queries_are_not_split(short_parts, rng):
    arguments, _ = draw((2, 1, 16, 16, None, [(9, 2 * SPLIT)]), torch.float32, rng)
    wide = torch.zeros((MOST + 1, 2, 16), device=rng.device)
    wide[:9] = arguments[0][:9]
    space = poisoned_workspace(wide, 2 * SPLIT)
    out = kernel(wide, *arguments[1:], workspace=space)
    assert space.partial.isnan().all()
    assert torch.equal(out[:9], kernel(*arguments, num_parts=1)[:9])


@pytest.mark.parametrize("heads", [(1, 16), (9, 64), (32, 128), (64, 128), (8, 256), (128, 128)])
def test_partial_results_fit_what_is_planned(heads):
    split = sizes.PREFILL_SPLIT_KEYS
    for max_seq_len in (1, split, split + 1, 8192, 131_072):
        space = sizes.prefill_partial_rows(MOST, *heads, max_seq_len)
        assert space * heads[1] <= 2**22
        assert sizes.prefill_partial_rows(8192, *heads, max_seq_len) == space
        for queries in (1, 16, 17, 64, 65, MOST):
            parts = min(sizes.prefill_num_parts(queries, *heads), -(-max_seq_len // split))
            assert parts <= 1 or queries * heads[0] * parts <= space
            own = sizes.prefill_partial_rows(queries, *heads, max_seq_len)
            assert own <= space
            assert parts <= 1 or queries * heads[0] * parts <= own
    assert sizes.prefill_num_parts(MOST + 1, *heads) == 1


def test_parts_of_a_step_depend_on_what_it_is_padded_to():
    for first, last in ((1, 16), (17, 64), (65, MOST)):
        assert len({sizes.prefill_num_parts(count, 32, 128) for count in (first, last)}) == 1
    assert [sizes.prefill_num_parts(count, 32, 128) for count in (16, 64, MOST)] == [32, 16, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("few_queries", [None, 16, 17, MOST])
def test_parts_are_whole_tiles(few_queries, head_size, dtype):
    tile = prefill_tile(head_size, dtype, few_queries)
    assert sizes.PREFILL_SPLIT_KEYS % tile.keys == 0
    assert tile.rows % 8 == 0


def test_a_call_padded_to_the_most_of_its_number_has_the_same_tile():
    for first, last in ((1, 16), (17, 64), (65, MOST)):
        few, most = (prefill_tile(128, torch.bfloat16, count) for count in (first, last))
        assert few == most
        assert few.keys == prefill_tile(128, torch.bfloat16).keys


@pytest.mark.parametrize(
    ("shared_kib", "stages"), [(227, (5, 5, 3)), (163, (5, 5, 3)), (99, (3, 3, 3))]
)
def test_loads_ahead_are_as_many_as_shared_memory_holds(shared_kib, stages, monkeypatch):
    monkeypatch.setattr(tiles, "shared_bytes", lambda device: shared_kib * 1024 - 2048)
    found = [prefill_tile(128, torch.bfloat16, few) for few in (16, 64, None)]
    assert tuple(tile.stages_on(torch.device("cpu"), 128) for tile in found) == stages


def test_a_sequence_of_more_tiles_has_fewer_parts(short_parts, rng):
    """One tile of queries and two: the same number of programs fills the card."""
    found = []
    for queries in (32, 64):
        arguments, _ = draw((4, 4, 16, 16, None, [(queries, 40 * SPLIT)]), torch.float32, rng)
        space = poisoned_workspace(arguments[0], 40 * SPLIT)
        kernel(*arguments, workspace=space)
        parts = space.logsumexp[: 4 * len(arguments[0]) * 32].view(-1, len(arguments[0]), 4)
        found.append(int((~parts[:, 0, 0].isnan()).sum()))
    assert found == [32, 16]


@pytest.mark.parametrize("case", [(1, 8, 64, 9000), (MOST, 32, 128, 8192), (4, 7, 80, 1)], ids=str)
def test_workspace_has_the_bytes_that_planning_counts(case):
    space = prefill_workspace(*case, "cpu")
    assert sizes.prefill_workspace_bytes(*case) == space.partial.nbytes + space.logsumexp.nbytes


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (prefill_workspace(20, 4, 16, 4 * 256, "cpu"), r"room for 368 x 16, got \(320, 16\)"),
        (prefill_workspace(MOST, 4, 32, 4 * 256, "cpu"), r"room for 368 x 16"),
        (prefill_workspace(MOST, 4, 16, 4 * 256, "meta"), r"tensors on cpu, got meta"),
    ],
)
def test_door_refuses_a_workspace_without_room(space, message):
    rng = torch.Generator().manual_seed(0)
    arguments, _ = draw((4, 2, 16, 8, None, [(20, 30)]), torch.float32, rng)
    with pytest.raises(KernelArgumentError, match=r"prefill_attention\.workspace: .*" + message):
        flat(attention.paged_prefill_attention)(*arguments, max_query_len=20, workspace=space)


REAL = [
    (32, 8, 128, 16, None, [(32, 8224)]),
    (32, 8, 128, 16, None, [(200, 100_003), (0, 0), (40, 900), (16, 16)]),
    (28, 4, 128, 16, None, [(16, 20_000)]),
    (14, 2, 64, 16, None, [(64, 8192), (100, 700)]),
    (8, 4, 256, 16, 1024, [(64, 8192)]),
    (4, 1, 256, 32, 512, [(130, 9000), (1, 600)]),
    (32, 8, 128, 16, 4096, [(MOST, 9000)]),
]


def are_whole(case, dtype):
    """Tell whether tiles fill a card, so that no sequence's keys go into parts."""
    from kernels.triton.prefill_attention import _FILLING_WARPS

    heads, kv_heads, head_size, _, _, sequences = case
    tile = prefill_tile(head_size, dtype, MOST)
    fewest = min(queries for queries, _ in sequences if queries)
    num_tiles = kv_heads * -(-fewest * (heads // kv_heads) // tile.rows)
    return 2 * num_tiles > _FILLING_WARPS // tile.num_warps


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", REAL, ids=str)
def test_real_sizes_eager_and_in_a_graph(case, dtype, rng):
    arguments, window = draw(case, dtype, rng)
    q, lens, stop = arguments[0], arguments[5], int(arguments[4][-1])
    space, out = poisoned_workspace(q, int(lens.max())), torch.full_like(q, torch.nan)
    options = {"max_query_len": len(q), "window": window, "out": out, "workspace": space}
    flat(attention.paged_prefill_attention)(*arguments, **options)
    assert space.partial.isnan().all() == are_whole(case, dtype)
    expected = flat(ref.paged_prefill_attention)(*arguments, window=window)
    assert_close(out[:stop], expected[:stop], ATTENTION)
    eager = out[:stop].clone()
    graph, counter = torch.cuda.CUDAGraph(), "allocation.all.allocated"
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()[counter]  # a capture itself allocates
        flat(attention.paged_prefill_attention)(*arguments, **options)
        after = torch.cuda.memory_stats()[counter]
    assert after == before
    for _ in range(3):
        out.fill_(torch.nan)
        space.partial.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out[:stop], eager)
    own = {"max_query_len": int(arguments[4].diff().max()), "window": window}
    assert torch.equal(flat(attention.paged_prefill_attention)(*arguments, **own)[:stop], eager)
