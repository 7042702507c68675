"""Figures of served requests against values worked out by hand, from scripted times."""

from types import SimpleNamespace

import pytest

from harness.config.schema import FakeScript
from harness.config.serve import Arrivals, Lengths, Objectives, PeakSearch, Turns
from tests.harness.systems.fake.cases import figures, job, run, served

pytestmark = pytest.mark.usefixtures("clock_start_s")


def near_arrivals(rate_per_s, num, **changes):
    fields = {
        "num_requests": num,
        "arrivals": Arrivals(process="constant", rate_per_s=rate_per_s),
        "prompt": Lengths(tokens=8),
        "output": Lengths(tokens=3),
    }
    return served(**(fields | changes))


def test_serving_that_overlaps(tmp_path):
    """Arrivals at 0, 8 and 16 ms. Steps end at 20 (first), 40 (two more), 45 and 50 (all).

    Tokens: request 0 at 20, 45, 50; request 1 at 40, 45, 50; request 2 likewise.
    """
    part = near_arrivals(125, 3, slo=Objectives(ttft_ms=25, tpot_ms=10))
    result = run(tmp_path, job(part, FakeScript(prefill_ms=[20], decode_ms=[5])))
    rows = result["samples"]["serve"]["requests"]
    assert [row["ttft_ms"] for row in rows] == pytest.approx([20, 32, 24])
    assert [row["e2e_ms"] for row in rows] == pytest.approx([50, 42, 34])
    assert [row["tpot_ms"] for row in rows] == pytest.approx([15, 5, 5])
    assert [row["lag_ms"] for row in rows] == pytest.approx([0, 0, 0], abs=1e-5)
    metrics = result["metrics"]
    assert metrics["serve/itl_ms/mean"] == pytest.approx((25 + 5 * 5) / 6)
    assert metrics["serve/requested_requests_s"] == 125
    assert metrics["serve/sent_requests_s"] == pytest.approx(125)
    assert metrics["serve/wall_s"] == pytest.approx(0.05)
    assert metrics["serve/requests_s"] == pytest.approx(60)
    assert metrics["serve/output_tok_s"] == pytest.approx(180)
    assert metrics["serve/total_tok_s"] == pytest.approx((24 + 9) / 0.05)
    assert metrics["serve/good_share"] == pytest.approx(1 / 3)
    assert metrics["serve/good_requests_s"] == pytest.approx(20)
    assert metrics["serve/window_s"] == pytest.approx(0.016)
    assert metrics["serve/window_output_tok_s"] == 0  # measured, and none


def test_what_arrives_as_a_step_ends_goes_into_the_next_one(tmp_path, clock_start_s):
    """Steps of 10 ms and an arrival every 10: each gets its first token in a step of its own."""
    # After three months a float of seconds holds no whole nanoseconds, but parts by powers of 2.
    time_ms = 10.0 if clock_start_s < 1e7 else 7.8125
    part = near_arrivals(1e3 / time_ms, 50, slo=Objectives(ttft_ms=time_ms))
    result = run(tmp_path, job(part, FakeScript(prefill_ms=[time_ms], decode_ms=[7.5])))
    rows = result["samples"]["serve"]["requests"]
    assert [row["ttft_ms"] for row in rows] == pytest.approx([time_ms] * 50)
    assert result["metrics"]["serve/good_share"] == 1


@pytest.mark.parametrize("up_s", [1e3, 604_800.0, 1e7])
def test_figures_are_the_same_however_long_the_machine_has_been_up(tmp_path, monkeypatch, up_s):
    part = near_arrivals(
        125, 40, max_concurrency=2, min_duration_s=0.312, slo=Objectives(ttft_ms=30, e2e_ms=60)
    )
    script = FakeScript(prefill_ms=[13, 7], decode_ms=[3.3, 4.1])
    found = []
    for now_s in (0.0, up_s):
        machine = SimpleNamespace(perf_counter=lambda now_s=now_s: now_s)
        monkeypatch.setattr("harness.systems.fake.time", machine)
        result = run(tmp_path, job(part, script))
        (window,) = result["windows"]
        assert window["begin_s"] == pytest.approx(now_s + script.load_s, abs=1e-8)
        metrics = {k: v for k, v in result["metrics"].items() if k.startswith("serve/")}
        found.append((metrics, result["samples"]["serve"], result["reasons"]))
    assert found[0] == found[1]


def test_tokens_count_in_the_window_by_their_own_times(tmp_path):
    """Arrivals every 20 ms, tokens 9, 14 and 19 ms later; the window ends with the last arrival.

    Six tokens of the first two requests are in it, those of the third are not.
    """
    part = near_arrivals(50, 3)
    result = run(tmp_path, job(part, FakeScript(prefill_ms=[9], decode_ms=[5])))
    metrics = result["metrics"]
    assert metrics["serve/window_s"] == pytest.approx(0.04)
    assert metrics["serve/window_output_tok_s"] == pytest.approx(6 / 0.04)
    assert metrics["serve/wall_s"] == pytest.approx(0.059)
    assert metrics["serve/good_share"] is None  # no bound was set


def test_one_place_at_the_engine_is_waited_for_from_the_arrival_on(tmp_path):
    """Each takes 19 ms, one arrives every 10: the waits are 0, 9 and 18 ms."""
    part = near_arrivals(100, 3, max_concurrency=1)
    result = run(tmp_path, job(part, FakeScript(prefill_ms=[9], decode_ms=[5])))
    rows = result["samples"]["serve"]["requests"]
    assert [row["lag_ms"] for row in rows] == pytest.approx([0, 9, 18], abs=1e-5)
    assert [row["ttft_ms"] for row in rows] == pytest.approx([9, 18, 27])


def test_accounts_of_served_requests_balance(tmp_path):
    """Of eight every fourth is refused; from the drain's end on the rest is cancelled.

    Each request takes 10 ms and then 400 ms a token; the drain ends 500 ms after the last arrival.
    """
    part = near_arrivals(1, 8, drain_s=0.5, slo=Objectives(ttft_ms=100))
    result = run(tmp_path, job(part, FakeScript(prefill_ms=[10], decode_ms=[400], refuse_every=4)))
    samples = result["samples"]["serve"]
    accounts = [samples[f"num_{n}"] for n in ("planned", "completed", "failed", "cancelled")]
    assert accounts == [8, 6, 2, 0]
    assert result["metrics"]["serve/good_share"] == pytest.approx(6 / 8)
    short = near_arrivals(1, 3, drain_s=0.5, slo=Objectives(ttft_ms=100))
    result = run(tmp_path, job(short, FakeScript(prefill_ms=[10], decode_ms=[400])))
    samples = result["samples"]["serve"]
    accounts = [samples[f"num_{n}"] for n in ("planned", "completed", "failed", "cancelled")]
    assert accounts == [3, 2, 0, 1]
    assert result["metrics"]["serve/good_share"] == pytest.approx(2 / 3)
    assert "were cancelled" in result["reasons"][0]


@pytest.mark.thorough
def test_the_highest_rate_that_keeps_the_slo_is_the_one_worked_out(tmp_path):
    """One place of 19 ms carries 52.6 a second; above it request k waits k x (19 ms - 1 / rate).

    In 10 s with 95 % good ones at most 100 ms late, less 9 ms of its own, up to 53.1 pass.
    """
    part = near_arrivals(
        None,
        4,
        max_concurrency=1,
        slo=Objectives(ttft_ms=100),
        search=PeakSearch(
            low_per_s=45,
            high_per_s=60,
            good_share=0.95,
            tolerance=0.01,
            max_trials=12,
            duration_s=10,
        ),
    )
    result = run(tmp_path, job(part, FakeScript(prefill_ms=[9], decode_ms=[5])))
    assert 1 / 0.019 * 0.99 < result["metrics"]["serve/peak_requests_s"] < 53.2
    trials = result["samples"]["serve"]["trials"]
    assert [trial["has_passed"] for trial in trials[:2]] == [True, False]
    assert all(trial["has_passed"] == (trial["rate_per_s"] < 53.2) for trial in trials)


def test_repeats_of_serving_draw_anew_and_sum_their_accounts(tmp_path):
    part = near_arrivals(125, 3, repeats=3, arrivals=Arrivals(process="poisson", rate_per_s=125))
    result = run(tmp_path, job(part, FakeScript()))
    samples = result["samples"]["serve"]
    assert (samples["num_planned"], samples["num_completed"]) == (9, 9)
    assert "window_begin_s" not in samples
    times = {}
    for row in samples["requests"]:
        times.setdefault(row["repeat"], []).append(row["scheduled_s"])
    assert len(set(map(tuple, times.values()))) == 3
    rates = [one["serve/output_tok_s"] for one in result["samples"]["repeats"]["serve"]]
    assert result["metrics"]["serve/output_tok_s"] == pytest.approx(sum(rates) / 3)
    assert result["metrics"]["serve/output_tok_s/ci95_low"] < min(rates)
    assert figures(result, "serve", "e2e_ms")["repeat_std"] is not None
    assert len({row["tokens_hash"] for row in samples["requests"]}) == 9


def test_short_answers_are_a_reason(tmp_path):
    result = run(tmp_path, job(near_arrivals(10, 3), FakeScript(stop_after=2)))
    assert "3 requests ended before their planned length; serve-0 after 2 of 3" in " ".join(
        result["reasons"]
    )


def test_in_real_time_serving_goes_through_the_engine_s_own_thread(tmp_path):
    part = near_arrivals(200, 4)
    script = FakeScript(clock="real", load_s=0, prefill_ms=[2], decode_ms=[1])
    result = run(tmp_path, job(part, script))
    samples = result["samples"]["serve"]
    assert (samples["num_planned"], samples["num_completed"]) == (4, 4)
    assert all(row["ttft_ms"] >= 2 for row in samples["requests"])
    assert all(row["tpot_ms"] >= 1 for row in samples["requests"])


@pytest.mark.parametrize("clock", ["scripted", "real"])
def test_an_engine_that_breaks_down_while_it_serves_fails_the_run(tmp_path, clock):
    script = FakeScript(clock=clock, load_s=0, fail="error", fail_after_steps=3, decode_ms=[1])
    result = run(tmp_path, job(near_arrivals(100, 4), script))
    assert (result["status"], result["error"]["type"]) == ("failed", "RuntimeError")
    assert result["error"]["phase"] == "serve"
    assert "serve" not in result["samples"]


def test_multi_turn_conversations_wait_for_the_answers(tmp_path):
    """A turn takes 20 + 2 x 5 ms; the second arrives 1 s after it and holds both its tokens."""
    part = near_arrivals(1, 2, turns=Turns(num=2, think_s=1.0))
    result = run(tmp_path, job(part, FakeScript()))
    first, second = result["samples"]["serve"]["requests"]
    assert second["scheduled_s"] == pytest.approx(first["scheduled_s"] + 1.03)
    assert (first["num_prompt_tokens"], second["num_prompt_tokens"]) == (8, 8 + 3 + 8)
    assert second["ttft_ms"] == pytest.approx(20)


def test_a_run_ends_when_its_time_has_passed(tmp_path):
    """Arrivals every 100 ms, each served within 30; at 450 ms five are done and five to come."""
    part = near_arrivals(10, 10, max_duration_s=0.45, slo=Objectives(ttft_ms=100), repeats=3)
    result = run(tmp_path, job(part, FakeScript(prefill_ms=[20], decode_ms=[5])))
    samples, metrics = result["samples"]["serve"], result["metrics"]
    assert (samples["num_completed"], samples["num_cancelled"]) == (5, 5)  # no further repeat
    assert samples["requests"][-1]["error"] == "max_duration_s=0.45 had passed"
    assert metrics["serve/wall_s"] == pytest.approx(0.43)
    assert metrics["serve/good_share"] == 0.5
    assert result["reasons"] == [
        "serve: 5 of 10 requests were cancelled; serve-5: max_duration_s=0.45 had passed. Raise "
        "scenario.serve.max_duration_s, or lower num_requests."
    ]


def test_requests_under_way_are_taken_back_when_the_time_has_passed(tmp_path):
    """All arrive at once; the tokens of 20, 25, ..., 95 ms are there at 99 ms, where 24 are due."""
    part = near_arrivals(
        10, 2, output=Lengths(tokens=24), arrivals=Arrivals(process="at_once"), max_duration_s=0.099
    )
    result = run(tmp_path, job(part, FakeScript(prefill_ms=[20], decode_ms=[5])))
    assert result["status"] == "failed"  # nothing completed
    rows = result["samples"]["serve"]["requests"]
    assert [row["num_output_tokens"] for row in rows] == [16, 16]
    assert all(row["error"] == "max_duration_s=0.099 had passed" for row in rows)


def test_a_warm_up_ends_when_its_time_has_passed(tmp_path):
    """Each takes 30 ms; a step of the second one ends at 55 ms, where the time is over."""
    part = near_arrivals(1000, 2, warmup_requests=5, max_duration_s=0.055)
    result = run(tmp_path, job(part, FakeScript(prefill_ms=[20], decode_ms=[5])))
    assert result["reasons"] == [
        "serve warm-up: scenario.serve.max_duration_s=0.055 had passed when 1 of 5 requests had "
        "ended; it was shorter than asked. Raise it, or lower warmup_requests or output of "
        "scenario.serve."
    ]
    assert result["metrics"]["serve/wall_s"] == pytest.approx(0.05)


def test_a_ramp_that_holds_all_arrivals_counts_none_and_is_refused(tmp_path):
    arrivals = Arrivals(process="constant", rate_per_s=10, ramp_up_s=60)
    result = run(tmp_path, job(near_arrivals(10, 40, arrivals=arrivals), FakeScript()))
    assert result["status"] == "failed"
    assert "ramp_up_s=60, got all 40 before" in result["error"]["message"]
    assert result["windows"] == []  # nothing was sent


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_request_that_breaks_keeps_its_first_token_and_says_why(tmp_path, tokens):
    """The second one gets its token at 120 ms and its error at 125, even one of one token."""
    part = near_arrivals(10, 3, output=Lengths(tokens=tokens), slo=Objectives(ttft_ms=100))
    result = run(tmp_path, job(part, FakeScript(break_every=2)))
    row = result["samples"]["serve"]["requests"][1]
    assert row["error"] == "request: scripted to break (model.fake.break_every=2)."
    assert (row["num_output_tokens"], row["ttft_ms"]) == (1, pytest.approx(20))
    assert result["metrics"]["serve/good_share"] == pytest.approx(2 / 3)
    assert result["samples"]["serve"]["num_failed"] == 1
