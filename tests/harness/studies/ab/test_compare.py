"""Ratios of pairs with their intervals, worked out by hand."""

import math

import pytest

from harness.studies.ab import (
    compare,
    geometric,
    per_request,
    resolved_share,
    result_lines,
    run_metrics,
    token_agreement,
    verdict_of,
)
from reports.record.record import RunRecord

T_3 = 3.182446305
"""Student's t of 3 degrees of freedom, 95 %."""


def test_a_ratio_is_the_geometric_mean_of_the_pairs():
    """Ratios 1/2 and 2: the mean of their logarithms is 0."""
    ratio, low, high = geometric([(2, 1), (1, 2)])
    assert ratio == pytest.approx(1)
    assert low * high == pytest.approx(1)
    assert math.log(high) == pytest.approx(12.7062047 * math.log(2))  # t of 1, sd / sqrt(2)


def test_the_interval_of_four_pairs():
    logs = [0.1, 0.2, 0.3, 0.4]
    ratio, low, high = geometric([(1, math.exp(value)) for value in logs])
    half = T_3 * math.sqrt(0.05 / 3) / 2
    assert ratio == pytest.approx(math.exp(0.25))
    assert low == pytest.approx(math.exp(0.25 - half))
    assert high == pytest.approx(math.exp(0.25 + half))


def test_one_pair_has_no_interval_and_a_zero_no_ratio():
    assert geometric([(2, 3)]) == (1.5, None, None)
    assert geometric([(0, 3), (1, 3)]) == (None, None, None)
    assert geometric([]) == (None, None, None)


def test_what_the_machine_resolves_follows_from_a_against_itself():
    """Logarithms +-0.1 about no difference; of four pairs half as much remains."""
    noise = [(1, math.exp(0.1)), (1, math.exp(-0.1)), (1, math.exp(0.1))]
    assert resolved_share(noise, 4) == pytest.approx(math.expm1(T_3 * 0.1 / 2))
    assert resolved_share([(1, 1), (2, 2)], 4) == 0
    assert resolved_share([(1, 2)], 4) is None
    assert resolved_share([(0, 0), (0, 0)], 4) is None


@pytest.mark.parametrize(
    ("ratio", "low", "high", "resolution", "words"),
    [
        (0.8, 0.7, 0.9, 0.05, "b is lower"),
        (1.2, 1.1, 1.3, None, "b is higher"),
        (1.2, 0.9, 1.6, 0.01, "no difference resolved"),
        (1.02, 1.01, 1.03, 0.05, "within this machine's noise"),
        (1 / 1.04, 0.95, 0.97, 0.05, "within this machine's noise"),
        (1.2, None, None, 0.01, "one pair: no interval"),
        (None, None, None, 0.01, "no ratio: a side is 0"),
    ],
)
def test_verdicts(ratio, low, high, resolution, words):
    assert verdict_of(ratio, low, high, resolution) == words


def test_metrics_that_a_side_lacks_are_left_out_pair_by_pair():
    full = {"throughput/output_tok_s": 100.0, "memory/gpu_peak_gib": 3.0}
    pairs = [(full, {"throughput/output_tok_s": 50.0}), (full, full | {"load/total_s": 1.0})]
    rows = {row.metric: row for row in compare(pairs, [])}
    assert list(rows) == ["throughput/output_tok_s", "memory/gpu_peak_gib"]
    rate = rows["throughput/output_tok_s"]
    assert (rate.num_pairs, rate.a, rate.b) == (2, 100, 75)
    assert rate.ratio == pytest.approx(math.sqrt(0.5))
    assert rate.better == "higher"
    assert rows["memory/gpu_peak_gib"].num_pairs == 1


def test_the_peak_of_a_search_and_good_requests_are_compared():
    ours = {"serve/peak_requests_s": 8.0, "serve/good_requests_s": 6.0, "energy/j_per_token": 2.0}
    theirs = {name: value / 2 for name, value in ours.items()}
    rows = {row.metric: row for row in compare([(ours, theirs)], [])}
    assert {name: row.ratio for name, row in rows.items()} == pytest.approx(
        dict.fromkeys(ours, 0.5)
    )
    assert [row.better for row in rows.values()] == ["higher", "higher", "lower"]


def record(**changes):
    return RunRecord(run_id="r", name="n", status="ok", **changes)


def test_total_time_is_load_and_all_timed_requests():
    found = record(
        metrics={"load/total_s": 2.0, "throughput/wall_s": 0.5},
        samples={"latency": [{"e2e_ms": 100}, {"e2e_ms": None}, {"e2e_ms": 150}]},
    )
    assert run_metrics(found)["total_s"] == pytest.approx(2.75)
    assert run_metrics(record())["total_s"] is None
    rows = [{"e2e_ms": 100.0}, {"e2e_ms": 150.0}]
    repeated = [{"repeat": number, **row} for number in range(3) for row in rows]
    found = record(metrics={"load/total_s": 2.0}, samples={"latency": repeated})
    assert run_metrics(found)["total_s"] == pytest.approx(2.25)  # of one repeat


def row(name, *, repeat=None, error=None, tokens="x", **times):
    return {
        "request_id": name,
        "repeat": repeat,
        "error": error,
        "tokens_hash": tokens,
        **times,
    }


def test_requests_are_matched_one_by_one():
    ours = [row("l-0", ttft_ms=10), row("l-1", ttft_ms=20), row("l-2", ttft_ms=5)]
    theirs = [row("l-1", ttft_ms=30), row("l-0", ttft_ms=20), row("l-2", error="x", ttft_ms=1)]
    (found,) = per_request([(ours, theirs)])
    assert found == {"quantity": "ttft_ms", "num": 2, "least": 1.5, "median": 1.75, "most": 2.0}


def test_tokens_are_compared_request_by_request():
    ours = [row("l-0"), row("l-1"), row("l-0", repeat=1, tokens="y")]
    theirs = [row("l-0"), row("l-1", tokens="z"), row("l-0", repeat=1, tokens="y")]
    assert token_agreement([(ours, theirs)]) == {
        "num_compared": 3,
        "num_equal": 2,
        "first_unequal": "l-1",
    }


def test_the_lines_of_a_comparison_have_digits_notes_and_the_page(tmp_path):
    row = {
        "metric": "latency/ttft_ms/mean",
        "a": 0.0244,
        "b": 0.0247,
        "ratio": 1.0123,
        "low": 1.01,
        "high": 1.015,
        "resolution": 8.2,
        "verdict": "no difference resolved",
    }
    side = {"overrides": [], "status": "ok", "first_run": {}}
    (tmp_path / "report.html").touch()
    record = RunRecord(
        run_id="r",
        name="ab",
        status="ok",
        effective={"notes": ["one pair"]},
        samples={"ab": {"a": side, "b": side, "rows": [row], "tokens": {}}},
    )
    text = "\n".join(result_lines(record, tmp_path))
    words = " ".join(text.split())
    assert " TTFT mean 0.0244 0.0247 1.012 " in words
    assert " 820.0 % no difference (ms) resolved" in words
    assert "  note: one pair" in text
    assert f"  report      {tmp_path / 'report.html'}" in text
