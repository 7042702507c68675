import random
import statistics

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.config.serve import Lengths
from harness.work.schedule import draw_lengths


def draw(lengths, num=5000, seed=0):
    return draw_lengths(num, lengths, random.Random(seed))


def test_fixed_lengths_are_fixed():
    assert draw(Lengths(tokens=7), 3) == [7, 7, 7]


def test_uniform_lengths_reach_both_bounds():
    found = draw(Lengths(distribution="uniform", low=3, high=6))
    assert set(found) == {3, 4, 5, 6}
    assert statistics.fmean(found) == pytest.approx(4.5, abs=0.1)


@pytest.mark.parametrize("distribution", ["normal", "lognormal"])
def test_mean_and_deviation_are_those_of_the_lengths(distribution):
    lengths = Lengths(distribution=distribution, tokens=200, std=40, high=10_000)
    found = draw(lengths)
    assert statistics.fmean(found) == pytest.approx(200, rel=0.02)
    assert statistics.stdev(found) == pytest.approx(40, rel=0.05)


@example("normal", 1, 1.0, 2, 1, 0)
@given(
    st.sampled_from(["normal", "lognormal"]),
    st.integers(1, 500),
    st.floats(0.1, 1000),
    st.integers(1, 50),
    st.integers(0, 400),
    st.integers(0, 99),
)
def test_lengths_stay_within_their_bounds(distribution, mean, std, low, room, seed):
    high = low + room
    lengths = Lengths(distribution=distribution, tokens=mean, std=std, low=low, high=high)
    found = draw(lengths, 50, seed)
    assert all(low <= tokens <= high for tokens in found)
    assert all(type(tokens) is int for tokens in found)
    assert found == draw(lengths, 50, seed)
    assert statistics.fmean(draw(lengths, 200, seed)) <= lengths.mean_bound
