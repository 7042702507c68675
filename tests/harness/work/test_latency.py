import pytest

from harness.work.times import RequestTimes, floor_note, latency_pools, pool_metrics


def request(*times_s, submit_s=10.0, **changes):
    fields = {
        "request_id": "r",
        "num_prompt_tokens": 4,
        "submit_s": submit_s,
        "token_ids": list(range(len(times_s))),
        "token_times_s": list(times_s),
        "finish_reason": "length",
    }
    return RequestTimes(**(fields | changes))


def test_times_of_one_request():
    times = request(10.5, 10.75, 11.5)
    assert times.ttft_ms == 500
    assert times.e2e_ms == 1500
    assert times.tpot_ms == 500  # (1500 - 500) / 2
    assert times.itl_ms == [250, 750]  # the time to the first token is not a gap


def test_one_token_has_no_tpot_and_no_gap():
    times = request(10.5)
    assert times.tpot_ms is None
    assert times.itl_ms == []
    assert times.e2e_ms == times.ttft_ms == 500


def test_no_token_has_no_times():
    times = request()
    assert (times.ttft_ms, times.tpot_ms, times.e2e_ms) == (None, None, None)
    assert not times.is_complete


def test_metrics_pool_gaps_and_leave_out_what_failed():
    slow, fast = request(10.5, 11.5), request(10.1, 10.2, 10.3, 10.4)
    failed = request(99.0, error="refused", finish_reason=None)
    metrics = pool_metrics(latency_pools([slow, fast, failed]))
    assert metrics["latency/ttft_ms/mean"] == pytest.approx(300)
    assert metrics["latency/tpot_ms/mean"] == pytest.approx((1000 + 100) / 2)
    assert metrics["latency/itl_ms/mean"] == pytest.approx((1000 + 3 * 100) / 4)
    assert metrics["latency/e2e_ms/max"] == pytest.approx(1500)
    assert metrics["latency/ttft_ms/p50"] is None  # needs 11


def test_tpot_statistics_are_none_when_every_request_has_one_token():
    metrics = pool_metrics(latency_pools([request(10.5) for _ in range(20)]))
    assert metrics["latency/ttft_ms/p50"] == 500
    assert {metrics[f"latency/tpot_ms/{name}"] for name in ("mean", "p50", "min", "std")} == {None}
    assert metrics["latency/itl_ms/mean"] is None


@pytest.mark.parametrize(
    ("count", "asked", "names"),
    [(10, 662, ["p50", "p90", "p95", "p99"]), (60, 64, ["p90"]), (661, 662, ["p99"])],
)
def test_floor_note_names_the_percentiles_that_failed_requests_cost(count, asked, names):
    note = floor_note(count, asked)
    assert [name for name in ("p50", "p90", "p95", "p99") if f"{name} needs" in note] == names
    assert f"{count} of {asked} requests completed" in note


@pytest.mark.parametrize(("count", "asked"), [(662, 662), (11, 11), (63, 63), (65, 70)])
def test_percentiles_that_were_not_asked_for_are_no_news(count, asked):
    assert floor_note(count, asked) is None
