"""Pieces of a prefill: they cover all keys in order, and none stages more than a buffer holds."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineError
from engine.run.stages import PIECE_KEYS, cut_pieces, host_places, with_runs

GPU = 100
"""Blocks on the GPU."""


@given(
    hosts=st.lists(st.booleans(), min_size=1, max_size=80),
    block_size=st.sampled_from([8, 16, 32, 64, 128]),
    lack=st.integers(0, 127),
    more=st.integers(0, 20),
)
def test_pieces_cover_every_key_once(hosts, block_size, lack, more):
    num_tokens = len(hosts) * block_size - lack % block_size
    table = [GPU + 7 * place if is_host else place for place, is_host in enumerate(hosts)]
    places = host_places(table, num_tokens, block_size, GPU)
    assert places.tolist() == [place for place, is_host in enumerate(hosts) if is_host]
    stage = PIECE_KEYS // block_size + more
    pieces = cut_pieces(places, num_tokens, block_size, stage)
    ends = [piece.end_key for piece in pieces]
    assert [piece.begin_key for piece in pieces] == [0, *ends[:-1]]
    assert ends[-1] == num_tokens
    assert all(piece.begin_key % PIECE_KEYS == 0 for piece in pieces)
    for piece in pieces:
        mine = places[piece.first_host : piece.first_host + piece.num_hosts]
        blocks = range(piece.begin_key // block_size, -(-piece.end_key // block_size))
        assert mine.tolist() == [block for block in blocks if hosts[block]]
        assert piece.num_hosts <= stage
        tiers = {"host" if hosts[block] else "cache" for block in blocks}
        assert piece.tiers == ("both" if len(tiers) > 1 else min(tiers))
    # No two neighbours would fit into one but for the first, which stages nothing if it can.
    for one, two in pairwise(pieces[1:]):
        assert one.num_hosts + two.num_hosts > stage or two.end_key - one.begin_key <= PIECE_KEYS
    assert pieces[0].num_hosts == 0 or any(hosts[: PIECE_KEYS // block_size])


def test_keys_before_the_first_host_block_are_a_piece_of_their_own():
    places = np.arange(40, 64)
    pieces = cut_pieces(places, 1000, 16, 16)
    assert [(p.begin_key, p.end_key, p.num_hosts) for p in pieces] == [
        (0, 640, 0),
        (640, 896, 16),
        (896, 1000, 7),
    ]


def test_what_lies_beyond_the_tokens_is_not_counted():
    assert host_places([1, GPU, GPU + 1], 9, 8, GPU).tolist() == [1]


def test_a_buffer_that_holds_too_little_is_refused():
    with pytest.raises(EngineError, match="at least 8 blocks, got 7"):
        cut_pieces(np.arange(9), 140, 16, 7)


def test_pieces_have_runs_where_those_are_long():
    places = np.arange(40, 64)
    ids = np.array([*range(7, 15), *range(20, 28), *range(0, 14, 2), 99])
    pieces = with_runs(cut_pieces(places, 1000, 16, 16), ids, least_run=4)
    assert [piece.runs for piece in pieces] == [(), ((7, 8), (20, 8)), ()]
    pieces = with_runs(pieces, np.arange(24), least_run=4)
    assert [piece.runs for piece in pieces] == [(), ((0, 16),), ((16, 7),)]
