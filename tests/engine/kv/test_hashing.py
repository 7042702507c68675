import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EngineError
from engine.kv.prefix import DIGEST_BYTES, BlockHasher, KeyChain

TOKENS = st.lists(st.integers(0, 200_000), min_size=0, max_size=24)


def keys_of(tokens, *, identity=("m", "bf16"), block_size=4, salt=None):
    chain = KeyChain(BlockHasher(identity, block_size), salt)
    return list(chain.extend(lambda a, b: tokens[a:b], len(tokens)))


def test_only_full_blocks_have_keys():
    assert [len(keys_of([7] * n)) for n in (0, 3, 4, 5, 8)] == [0, 0, 1, 1, 2]
    assert all(len(key) == DIGEST_BYTES for key in keys_of([7] * 8))
    with pytest.raises(EngineError, match="block_size of at least 1, got 0"):
        BlockHasher(("m",), 0)


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

    chain = KeyChain(BlockHasher(("m", "bf16"), 4))
    for cut in sorted(min(cut, len(tokens)) for cut in cuts):
        chain.extend(read, cut)
    assert chain.extend(read, len(tokens)) == keys_of(tokens)
    places = [place for start, stop in asked for place in range(start, stop)]
    assert places == list(range(len(tokens) // 4 * 4))  # each block once


def test_every_process_makes_the_same_keys():
    code = (
        "from engine.kv.prefix import *\n"
        "chain = KeyChain(BlockHasher(('m', 'bf16'), 4), 'salt')\n"
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
