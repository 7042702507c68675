"""Times at the exact edge of a bound, on clocks of machines that have been up for long or not."""

import pytest

from harness.observe.student import student_t
from harness.work.schedule import plan_requests
from harness.work.serve import judge
from harness.work.times import ServedRequest, has_passed, serving_metrics
from tests.harness.work.traffic.cases import serve

BEGINS_S = [0.0, 0.5, 100.1, 1e3, 67_123.456789, 604_800.1, 1e7]


def request(index, submit_s, *, after_s=0.02):
    """A request whose only token came `after_s` after its arrival."""
    return ServedRequest(
        request_id=f"serve-{index}",
        num_prompt_tokens=8,
        submit_s=submit_s,
        sent_s=submit_s,
        output_tokens=1,
        token_ids=[1],
        token_times_s=[submit_s + after_s],
        finish_reason="length",
    )


@pytest.mark.parametrize("begin_s", BEGINS_S)
def test_a_limit_has_passed_at_its_time_and_not_before(begin_s):
    for limit_s in (0.055, 0.3, 1.1, 60.0):
        assert has_passed((begin_s + limit_s) - begin_s, limit_s)
        assert not has_passed((begin_s + limit_s - 1e-6) - begin_s, limit_s)


@pytest.mark.parametrize("begin_s", BEGINS_S)
def test_a_run_is_as_long_as_it_is_printed(begin_s):
    def took(seconds):
        served = [request(index, begin_s + index * seconds) for index in range(2)]
        config = serve(num_requests=2, min_duration_s=0.3)
        return [
            r
            for r in judge(config, plan_requests(config), served, student_t).reasons
            if "took" in r
        ]

    assert took(0.3) == took(0.29996) == []
    assert "took 0.2999 s where min_duration_s=0.3 was asked" in took(0.2999)[0]


@pytest.mark.parametrize("begin_s", BEGINS_S)
def test_a_token_of_the_last_arrival_s_time_is_in_the_window(begin_s):
    """Arrivals 0.3 s apart, each token as the next one arrives; the third is outside."""
    served = [request(index, begin_s + index * 0.3, after_s=0.3) for index in range(3)]
    rate = serving_metrics(served, {})["serve/window_output_tok_s"]
    assert rate == pytest.approx(2 / 0.6)


@pytest.mark.parametrize("begin_s", BEGINS_S)
def test_a_request_that_takes_its_bound_is_good(begin_s):
    found = request(0, begin_s, after_s=0.3)
    assert found.meets({"ttft_ms": 300.0, "e2e_ms": 300.0})
    assert not found.meets({"ttft_ms": 299.999})
    assert not found.is_bad_by(begin_s + 0.3, {"ttft_ms": 300.0, "e2e_ms": 300.0})


def test_what_was_sent_a_rounding_early_did_not_lag():
    found = request(0, 1e7)
    found.sent_s = found.submit_s - 5e-9
    assert found.lag_ms == 0
