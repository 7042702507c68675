import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineError
from engine.kv.window import num_expired, num_held, usable_prefix

SIZES = st.integers(1, 5)
WINDOWS = st.none() | st.integers(1, 12)


def seen(position, window):
    """Positions that a token sees."""
    return range(0 if window is None else max(0, position - window + 1), position + 1)


@given(computed=st.integers(0, 40), window=WINDOWS, size=SIZES)
def test_expired_blocks_are_those_that_no_later_token_sees(computed, window, size):
    needed = {
        k // size for position in range(computed, computed + 60) for k in seen(position, window)
    }
    expired = num_expired(computed, window, size)
    assert not needed & set(range(expired))
    if window is not None and computed:
        # None that could go stays: the next block is seen, or not full yet.
        assert expired in needed


@given(total=st.integers(1, 40), window=WINDOWS, step=st.integers(1, 9), size=SIZES)
def test_held_blocks_bound_every_way_of_running(total, window, step, size):
    bound = num_held(total, window, step, size)
    worst = 0
    for start in range(total):
        stop = min(total, start + step)
        worst = max(worst, -(-stop // size) - num_expired(start, window, size))
    assert worst <= bound
    assert bound <= -(-total // size)


def test_held_blocks_are_no_more_than_needed():
    # A window of 8 and one token a step at offset 1: tokens 9 to 16 in blocks of 4 touch 3 blocks.
    assert num_held(100, 8, 1, 4) == 3
    assert num_held(100, None, 1, 4) == 25
    assert num_held(5, 8, 1, 4) == 2


@given(cached=st.lists(st.booleans(), max_size=16), window=WINDOWS, size=SIZES)
def test_usable_prefix_is_the_longest_whose_window_is_there(cached, window, size):
    def works(count):
        needed = {k // size for k in seen(count * size, window) if k < count * size}
        return all(cached[block] for block in needed)

    best = max(count for count in range(len(cached) + 1) if works(count))
    assert usable_prefix(cached, window, size) == best


def test_sizes_below_one_are_refused():
    with pytest.raises(EngineError, match="got 0 and 4"):
        num_expired(3, 0, 4)
    with pytest.raises(EngineError, match="got 4 and 0"):
        usable_prefix([True], 4, 0)
