import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineError
from engine.kv.prefix import num_expired, usable_prefix
from engine.plan.kv_memory import num_held

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


@given(data=st.data(), windows=st.lists(st.integers(1, 12), min_size=1, max_size=3), size=SIZES)
def test_usable_prefix_is_the_longest_whose_windows_are_there(data, windows, size):
    length = data.draw(st.integers(0, 16))
    there = st.lists(st.booleans(), min_size=length, max_size=length)
    cached = [data.draw(there) for _ in windows]

    def works(count):
        return all(
            here[k // size]
            for here, window in zip(cached, windows, strict=True)
            for k in seen(count * size, window)
            if k < count * size
        )

    best = max(count for count in range(length + 1) if works(count))
    assert usable_prefix(cached, windows, size) == best


def test_a_prefix_that_one_group_could_begin_behind_is_of_no_use_to_another():
    # A window of 2 finds blocks 0 and 3, one of 4 finds 0 and 1: both together 0 alone.
    assert usable_prefix([[True, False, False, True]], [2], 2) == 4
    assert usable_prefix([[True, True, False, False]], [4], 2) == 2
    both = [[True, False, False, True], [True, True, False, False]]
    assert usable_prefix(both, [2, 4], 2) == 1


def test_sizes_below_one_are_refused():
    with pytest.raises(EngineError, match="got 0 and 4"):
        num_expired(3, 0, 4)
    with pytest.raises(EngineError, match="got 4 and 0"):
        usable_prefix([[True]], [4], 0)
