"""Keys of blocks, the cheaper way to go on, and what a window needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.prefix import (
    DIGEST_BYTES,
    KeyChain,
    num_expired,
    root_key,
    swap_or_recompute,
    usable_prefix,
)
from engine.plan.sizes import SwapRates, num_held

TOKENS = st.lists(st.integers(0, 200_000), min_size=0, max_size=24)


def keys_of(tokens, *, identity=("m", "bf16"), block_size=4, salt=None):
    chain = KeyChain(root_key(identity, block_size, salt), block_size)
    return list(chain.extend(lambda a, b: tokens[a:b], len(tokens)))


def test_only_full_blocks_have_keys():
    assert [len(keys_of([7] * n)) for n in (0, 3, 4, 5, 8)] == [0, 0, 1, 1, 2]
    assert all(len(key) == DIGEST_BYTES for key in keys_of([7] * 8))


@given(left=TOKENS, right=TOKENS)
def test_keys_are_equal_exactly_where_all_tokens_before_are(left, right):
    for n, (a, b) in enumerate(zip(keys_of(left), keys_of(right), strict=False), start=1):
        assert (a == b) == (left[: 4 * n] == right[: 4 * n])


def test_a_key_depends_on_what_came_before():
    same, other = keys_of([1, 2, 3, 4, 9, 9, 9, 9]), keys_of([5, 6, 7, 8, 9, 9, 9, 9])
    assert len({*same, *other}) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"identity": ("m2", "bf16")},
        {"identity": ("m", "f32")},
        {"identity": ("mb", "f16")},
        {"identity": ("m", "bf16", "")},
        {"identity": ("m",), "salt": "bf16"},
        {"salt": "s"},
        {"salt": ""},
    ],
    ids=str,
)
def test_other_models_dtypes_and_salts_share_nothing(change):
    tokens = list(range(12))
    assert not set(keys_of(tokens)) & set(keys_of(tokens, **change))


def test_other_block_sizes_share_nothing():
    assert not set(keys_of([3] * 16, block_size=8)) & set(keys_of([3] * 16, block_size=16))


@given(tokens=TOKENS, cuts=st.lists(st.integers(0, 24), max_size=5))
@settings(deadline=None)
def test_a_chain_that_grows_is_the_chain_made_at_once(tokens, cuts):
    asked = []

    def read(start, stop):
        asked.append((start, stop))
        return tokens[start:stop]

    chain = KeyChain(root_key(("m", "bf16"), 4), 4)
    for cut in sorted(min(cut, len(tokens)) for cut in cuts):
        chain.extend(read, cut)
    assert chain.extend(read, len(tokens)) == keys_of(tokens)
    places = [place for start, stop in asked for place in range(start, stop)]
    assert places == list(range(len(tokens) // 4 * 4))  # each block once


def test_every_process_makes_the_same_keys():
    code = (
        "from engine.kv.prefix import *\n"
        "chain = KeyChain(root_key(('m', 'bf16'), 4, 'salt'), 4)\n"
        "print(chain.extend(lambda a, b: list(range(a, b)), 9)[-1].hex())"
    )
    root = Path(__file__).parents[3]
    lines = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert lines == {keys_of(list(range(9)), salt="salt")[-1].hex()}


# Swap or compute again.

RATES = SwapRates(store_bytes_s=50.0, load_bytes_s=100.0)


@pytest.mark.parametrize(
    ("store", "load", "recompute_s", "expected"),
    [
        (100, 100, 2.9, "recompute"),
        (100, 100, 3.0, "swap"),
        (0, 100, 1.1, "swap"),
        (0, 0, 0.0, "swap"),
        (100, 0, 1.9, "recompute"),
    ],
)
def test_the_cheaper_way(store, load, recompute_s, expected):
    assert swap_or_recompute(store, load, RATES, recompute_s) == expected


# Windows.

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
