import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.config.serve import PeakSearch
from harness.work.serve import search_peak


def search(measure, **changes):
    fields = {"low_per_s": 1.0, "high_per_s": 16.0, "good_share": 0.9, "tolerance": 0.1}
    return search_peak(PeakSearch(**(fields | changes)), measure)


def step(edge):
    """All requests are good up to a rate, none above it."""
    return lambda rate: 1.0 if rate <= edge else 0.0


def test_rates_worked_by_hand():
    """Middles of 1 and 16: 4 passes, 8 fails, sqrt(32) = 5.657 fails, sqrt(4 x 5.657) passes."""
    peak = search(step(5.0), max_trials=6)
    rates = [trial.rate_per_s for trial in peak.trials]
    assert rates == pytest.approx([1, 16, 4, 8, 32**0.5, (4 * 32**0.5) ** 0.5])
    assert [trial.has_passed for trial in peak.trials] == [True, False, True, False, False, True]
    assert peak.rate_per_s == pytest.approx(4.757, abs=1e-3)
    assert peak.ending == "6 trials; 5.65685/s failed"


def test_the_lowest_rate_that_fails_ends_the_search():
    peak = search(lambda rate: 0.5)
    assert peak.rate_per_s is None
    assert len(peak.trials) == 1
    assert peak.trials[0].good_share == 0.5
    assert "the lowest rate, 1/s, failed" in peak.ending


def test_the_highest_rate_that_passes_is_the_answer():
    peak = search(lambda rate: 0.9)
    assert peak.rate_per_s == 16
    assert len(peak.trials) == 2
    assert "may lie above" in peak.ending


@given(st.floats(1, 15.9), st.floats(0.01, 0.5))
def test_the_answer_is_within_its_tolerance(edge, tolerance):
    peak = search(step(edge), tolerance=tolerance, max_trials=50)
    assert peak.rate_per_s <= edge
    failing = min(trial.rate_per_s for trial in peak.trials if not trial.has_passed)
    assert edge < failing <= peak.rate_per_s * (1 + tolerance)


@given(st.floats(1, 15.9), st.integers(2, 9))
def test_the_number_of_trials_is_bounded(edge, most):
    assert len(search(step(edge), tolerance=1e-9, max_trials=most).trials) <= most
