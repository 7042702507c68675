import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.config.serve import Arrivals
from harness.work.schedule import arrival_times

rates = st.floats(0.01, 1000)
seeds = st.integers(0, 2**32)


def arrivals(process, **fields):
    if process == "gamma":
        fields.setdefault("burstiness", 0.5)
    return Arrivals(process=process, **fields)


def gaps(times):
    return [after - before for before, after in pairwise(times)]


def test_constant_arrivals_are_apart_by_the_inverse_rate():
    times = arrival_times(5, arrivals("constant"), rate_per_s=4.0, seed=0)
    assert times == [0, 0.25, 0.5, 0.75, 1.0]


def test_at_once_is_at_once():
    assert arrival_times(3, arrivals("at_once"), rate_per_s=1.0, seed=0) == [0, 0, 0]


def test_a_constant_rate_after_a_ramp():
    """Rate 2 after 4 s: 4 arrivals in the ramp at t = 2 sqrt(n), then one each half second."""
    ramp = arrivals("constant", ramp_up_s=4.0)
    times = arrival_times(7, ramp, rate_per_s=2.0, seed=0)
    assert times == pytest.approx([0, 2, 2 * 2**0.5, 2 * 3**0.5, 4, 4.5, 5])


@given(st.sampled_from(["poisson", "gamma", "constant"]), rates, seeds, st.floats(0.1, 10))
def test_times_ascend_from_zero_and_come_again(process, rate, seed, ramp):
    node = arrivals(process, ramp_up_s=ramp)
    times = arrival_times(20, node, rate_per_s=rate, seed=seed)
    assert times[0] == 0
    assert times == sorted(times)
    assert times == arrival_times(20, node, rate_per_s=rate, seed=seed)
    longer = arrival_times(30, node, rate_per_s=rate, seed=seed)
    assert longer[:20] == times


@given(st.sampled_from(["poisson", "gamma", "constant"]), rates, seeds)
def test_another_rate_is_another_scale(process, rate, seed):
    node = arrivals(process)
    slow = arrival_times(10, node, rate_per_s=rate, seed=seed)
    fast = arrival_times(10, node, rate_per_s=2 * rate, seed=seed)
    assert fast == pytest.approx([time / 2 for time in slow])


@pytest.mark.parametrize(
    ("node", "deviation"),
    [
        (arrivals("poisson"), 1.0),
        (arrivals("gamma", burstiness=0.25), 2.0),
        (arrivals("gamma", burstiness=4.0), 0.5),
    ],
)
def test_gaps_have_the_mean_and_the_deviation_of_their_process(node, deviation):
    """The deviation of gaps over their mean is 1 / sqrt(burstiness)."""
    found = gaps(arrival_times(20_000, node, rate_per_s=10.0, seed=1))
    assert statistics.fmean(found) == pytest.approx(0.1, rel=0.05)
    assert statistics.stdev(found) / statistics.fmean(found) == pytest.approx(deviation, rel=0.05)


def test_another_seed_is_another_draw():
    node = arrivals("poisson")
    one, two = (arrival_times(5, node, rate_per_s=1.0, seed=seed) for seed in (1, 2))
    assert one != two


def test_a_trace_has_its_own_times():
    with pytest.raises(ValueError, match="those of the rows"):
        arrival_times(1, Arrivals(process="trace"), rate_per_s=1.0, seed=0)
