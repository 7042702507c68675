"""Pieces of a decode whose host blocks are copied ahead."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.run.stages import AheadDecode, cut_ahead
from kernels.sizes import DECODE_SPLIT_TOKENS as SPLIT

GPU = 100
"""Blocks on the GPU."""


def cut(table, num_tokens, block_size=64, stage_blocks=8, least_run=1):
    return cut_ahead(
        np.array(table),
        num_tokens,
        block_size,
        GPU,
        stage_blocks=stage_blocks,
        least_run=least_run,
    )


def shown(pieces):
    return [(piece.begin_key, piece.end_key, piece.runs) for piece in pieces]


@given(
    order=st.permutations(range(40)),
    num_gpu=st.integers(0, 40),
    block_size=st.sampled_from([8, 16, 32, 64, 128]),
    lack=st.integers(0, 127),
    stage_blocks=st.integers(1, 40),
    least_run=st.integers(1, 5),
)
def test_every_key_is_attended_to_once_where_it_lies(
    order, num_gpu, block_size, lack, stage_blocks, least_run
):
    """Tables of any mixture; blocks from num_gpu on lie in the host tier."""
    table = [block if block < num_gpu else GPU + block for block in order]
    num_tokens = len(table) * block_size - lack % block_size
    pieces, read = cut(table, num_tokens, block_size, stage_blocks, least_run)
    ends = [piece.end_key for piece in pieces]
    assert [piece.begin_key for piece in pieces] == [0, *ends[:-1]]
    assert ends[-1] == num_tokens
    assert all(piece.begin_key % SPLIT == 0 and piece.end_key > piece.begin_key for piece in pieces)
    assert not pieces[-1].runs
    assert num_tokens - pieces[-1].begin_key >= (num_tokens - 1) % SPLIT + 1
    assert all(one.runs or two.runs for one, two in pairwise(pieces))
    for piece in pieces:
        blocks = slice(piece.begin_key // block_size, -(-piece.end_key // block_size))
        # What a buffer holds once its runs were copied one behind the other.
        buffer = [GPU + host for first, count in piece.runs for host in range(first, first + count)]
        found = [
            buffer[block - GPU] if piece.runs and block >= GPU else block
            for block in read[blocks].tolist()
        ]
        assert found == table[blocks]
        assert len(buffer) <= stage_blocks
        assert len(buffer) >= least_run * len(piece.runs)
        assert len(set(buffer)) == len(buffer)
        assert all(one[0] + one[1] < two[0] for one, two in pairwise(piece.runs))


def test_runs_are_neighbours_in_the_tier_in_whatever_order_the_sequence_has_them():
    # Four blocks a split; the first two splits lie on the GPU, the last one holds the newest key.
    hosts = [GPU + at for at in (7, 6, 5, 4, 30, 31, 9, 8)]
    pieces, read = cut([*range(8), *hosts, GPU + 50], 16 * 64 + 1)
    assert shown(pieces) == [
        (0, 512, ()),
        (512, 1024, ((4, 6), (30, 2))),
        (1024, 1025, ()),
    ]
    assert read[8:].tolist() == [GPU + at for at in (3, 2, 1, 0, 6, 7, 5, 4, 50)]
    assert AheadDecode(0, pieces).num_copied == 8


def test_short_runs_and_splits_that_no_buffer_holds_are_read_in_place():
    hosts = [GPU + at for at in (0, 2, 4, 6, 10, 11, 12, 13)]
    table = [*hosts, GPU + 50]
    pieces, read = cut(table, 8 * 64 + 1, stage_blocks=4, least_run=2)
    assert shown(pieces) == [(0, 256, ()), (256, 512, ((10, 4),)), (512, 513, ())]
    assert read.tolist() == [*hosts[:4], *range(GPU, GPU + 4), GPU + 50]
    pieces, read = cut(table, 8 * 64 + 1, stage_blocks=3)
    assert shown(pieces) == [(0, 513, ())]
    assert read.tolist() == table


@pytest.mark.parametrize("num_tokens", [1, SPLIT])
def test_a_sequence_of_one_split_is_read_in_place(num_tokens):
    table = [GPU + at for at in range(4)]
    assert shown(cut(table, num_tokens)[0]) == [(0, num_tokens, ())]
