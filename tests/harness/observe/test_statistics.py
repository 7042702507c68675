import math
import pickle
import random
import statistics
import subprocess
import sys
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.config.schema import LatencyScenario, ThroughputScenario
from harness.observe import statistics as measured
from harness.observe.student import student_t, t_table
from tests.contracts.project import ROOT
from tests.harness.cases import scenario
from tests.harness.test_worker import job
from tests.harness.work.traffic.cases import serve

interval = partial(measured.interval, t=student_t)
is_settled = partial(measured.is_settled, t=student_t)
drift = partial(measured.drift, t=student_t)
trend = partial(measured.trend, t=student_t)
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


def test_a_worker_s_table_has_what_its_scenario_needs():
    table = t_table(5, 100)
    for freedom in range(1, 5):
        assert table(0.95, freedom) == student_t(0.95, freedom)
    for freedom in range(1, 33):
        assert table(0.99, freedom) == student_t(0.99, freedom)
    values = [1.0, 2.0, 4.0, 5.0, 7.0]
    assert measured.interval(values, table) == interval(values)
    requests = [10.0 + index % 7 for index in range(100)]
    assert measured.drift(requests, table) == drift(requests)
    assert measured.trend(requests, table) == trend(requests)
    assert t_table(1, 2).values == {0.95: (), 0.99: ()}


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


@pytest.mark.thorough
def test_a_worker_measures_drifts_and_repeats_without_scipy(tmp_path):
    """In a process of its own, with the table that its parent made."""
    code = (
        "import pickle, sys; from pathlib import Path\n"
        "from harness.worker import Work\n"
        "from tests.harness.fakes import FakeClock, Script, fake_door\n"
        "task = pickle.loads(Path(sys.argv[1]).read_bytes())\n"
        "door, _ = fake_door(Script(), FakeClock())\n"
        "result = Work(task, Path(sys.argv[2]), door, spawned_s=0.0).run()\n"
        "assert result['error'] is None, result['error']\n"
        "assert result['metrics']['throughput/output_tok_s/ci95_low'] is not None\n"
        "assert len(result['samples']['latency']) == 60\n"
        "print([name for name in sys.modules if name.partition('.')[0] == 'scipy'])\n"
    )
    sizes = {"prompt_tokens": 8, "output_tokens": 5, "repeats": 2}
    parts = scenario(
        latency=LatencyScenario(num_requests=30, **sizes),
        throughput=ThroughputScenario(num_requests=4, **sizes),
        serve=serve(num_requests=30, repeats=2),
    )
    (tmp_path / "job").write_bytes(pickle.dumps(job(scenario=parts, t=t_table(2, 30))))
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "job"), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def waits(load, num, seed):
    """Times in an M/D/1 queue that starts empty: service takes 1, arrivals are random."""
    draw, left = random.Random(seed), 0.0
    found = []
    for _ in range(num):
        left = max(0.0, left - draw.expovariate(load)) + 1
        found.append(left)
    return found


@pytest.mark.thorough_but("0.9")
@pytest.mark.parametrize("load", [0.5, 0.7, 0.9, 0.95])
def test_a_queue_at_a_steady_load_has_no_trend(load):
    queues = [waits(load, 1000, seed) for seed in range(100)]
    assert sum(trend(queue).is_drift for queue in queues) <= 1
    assert sum(drift(queue).is_drift for queue in queues) > 10  # waits are not independent


@pytest.mark.parametrize(("load", "num"), [(1.2, 1000), (1.1, 5000), (1.5, 200)])
def test_a_queue_that_is_offered_too_much_has_a_trend(load, num):
    queues = [waits(load, num, seed) for seed in range(20)]
    assert sum(trend(queue).is_drift for queue in queues) >= 18


def test_a_trend_is_read_from_blocks():
    found = trend([0.0] * 30 + [1.0] * 30 + [3.0] * 30)
    assert (found.first, found.last, found.change) == (0.0, 3.0, 3.0)
    assert not found.is_drift  # one leap of a walk
    grown = trend([float(index) for index in range(90)])
    assert grown.is_drift
    assert trend([1.0] * 29) is None
