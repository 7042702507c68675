import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.observe.statistics import drift, interval, is_settled, student_t

TABLE = [
    # Two-sided 90, 95 and 99 %, as printed in tables.
    (1, 6.314, 12.706, 63.657),
    (2, 2.920, 4.303, 9.925),
    (3, 2.353, 3.182, 5.841),
    (4, 2.132, 2.776, 4.604),
    (5, 2.015, 2.571, 4.032),
    (9, 1.833, 2.262, 3.250),
    (10, 1.812, 2.228, 3.169),
    (29, 1.699, 2.045, 2.756),
    (30, 1.697, 2.042, 2.750),
    (120, 1.658, 1.980, 2.617),
]


@pytest.mark.parametrize(("freedom", "ninety", "ninety_five", "ninety_nine"), TABLE)
def test_quantiles_are_those_of_the_tables(freedom, ninety, ninety_five, ninety_nine):
    found = [student_t(confidence, freedom) for confidence in (0.90, 0.95, 0.99)]
    assert found == pytest.approx([ninety, ninety_five, ninety_nine], abs=6e-4)


def test_closed_forms_of_one_and_two_degrees_of_freedom():
    for confidence in (0.1, 0.5, 0.95, 0.999):
        assert student_t(confidence, 1) == pytest.approx(math.tan(confidence * math.pi / 2))
        # The share within +-t is t / sqrt(2 + t^2).
        expected = confidence * math.sqrt(2 / (1 - confidence**2))
        assert student_t(confidence, 2) == pytest.approx(expected)


@given(st.integers(1, 300), st.floats(0.01, 0.99))
def test_more_freedom_means_a_narrower_interval_never_below_the_normal_s(freedom, confidence):
    t = student_t(confidence, freedom)
    assert student_t(confidence, freedom + 1) < t
    assert t > statistics.NormalDist().inv_cdf((1 + confidence) / 2)


def test_many_degrees_of_freedom_are_nearly_normal():
    assert student_t(0.95, 5000) == pytest.approx(1.960, abs=1e-3)


@pytest.mark.parametrize(("confidence", "freedom"), [(0, 3), (1, 3), (0.95, 0)])
def test_quantiles_out_of_bounds_are_refused(confidence, freedom):
    with pytest.raises(ValueError, match="student_t: expected"):
        student_t(confidence, freedom)


def test_an_interval_worked_by_hand():
    """Mean 4, deviation sqrt((4 + 0 + 4) / 2) = 2, half width 4.303 x 2 / sqrt(3)."""
    found = interval([2.0, 4.0, 6.0])
    assert (found.count, found.mean, found.std) == (3, 4.0, 2.0)
    assert found.half_width == pytest.approx(4.968, abs=1e-3)
    assert (found.low, found.high) == pytest.approx((4 - found.half_width, 4 + found.half_width))


def test_one_value_has_no_interval():
    assert interval([1.0]) is None
    assert interval([]) is None


def test_intervals_hold_the_mean_as_often_as_they_say():
    draw = random.Random(3)
    found = [interval([draw.gauss(10, 2) for _ in range(5)]) for _ in range(2000)]
    share = sum(each.low <= 10 <= each.high for each in found) / len(found)
    assert share == pytest.approx(0.95, abs=0.015)


def test_a_series_is_settled_when_its_interval_is_narrow():
    assert not is_settled([10.0, 10.0], 0.5)  # two are too few
    assert is_settled([10.0, 10.0, 10.0], 0.01)
    values = [9.0, 10.0, 11.0]  # half width 4.303 / sqrt(3) = 2.484
    assert is_settled(values, 0.249)
    assert not is_settled(values, 0.248)
    assert is_settled([-value for value in values], 0.249)


def test_a_drift_is_the_change_from_the_first_to_the_last_third():
    values = [10.0, 10.1] * 5 + [99.0] * 10 + [12.0, 12.1] * 5
    found = drift(values)
    assert (found.first, found.last) == pytest.approx((10.05, 12.05))
    assert found.share == pytest.approx(2 / 10.05)
    assert found.is_drift


def test_a_small_change_is_no_drift():
    assert not drift([10.0, 10.1] * 5 + [10.0] * 10 + [10.9, 11.0] * 5).is_drift  # 9 %


def test_a_change_within_the_noise_is_no_drift():
    values = [0.0, 20.0] * 5 + [10.0] * 10 + [2.0, 24.0] * 5  # means 10 and 13
    found = drift(values)
    assert found.share == pytest.approx(0.3)
    assert found.noise > 3
    assert not found.is_drift


def test_few_values_or_a_first_mean_of_zero_tell_nothing():
    assert drift([1.0] * 29) is None
    nothing = drift([0.0] * 20 + [1.0] * 10)
    assert nothing.share is None
    assert not nothing.is_drift


def test_noise_alone_seldom_looks_like_a_drift():
    draw = random.Random(4)
    found = [drift([draw.gauss(10, 5) for _ in range(60)]).is_drift for _ in range(1000)]
    assert sum(found) / len(found) < 0.02
