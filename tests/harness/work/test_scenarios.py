from functools import partial

import pytest

from harness.observe.student import student_t
from harness.work import offline as latency
from harness.work.drive import cut_reasons
from harness.work.load import measure_load, summarise_loads
from harness.work.offline import measure_throughput
from harness.work.times import RequestTimes
from tests.harness.fakes import FakeClock, FakeLLM, Script

pytestmark = pytest.mark.usefixtures("clock_start_s")


measure_latency = partial(latency.measure_latency, t=student_t)


def engine(clock, **script):
    return FakeLLM(Script(**script), clock, lambda *_: None, reference=False)


def prompts(count, length):
    return [[10 + index] * length for index in range(count)]


def test_latency_of_known_times():
    clock = FakeClock()
    llm = engine(clock, prefill_s=0.5, decode_s=0.125)
    outcome, totals = measure_latency(llm, prompts(11, 8), 5, clock=clock)
    for name, value in {
        "ttft_ms": 500.0,
        "tpot_ms": 125.0,
        "itl_ms": 125.0,
        "e2e_ms": 1000.0,
    }.items():
        for statistic in ("mean", "p50", "min", "max"):
            assert outcome.metrics[f"latency/{name}/{statistic}"] == pytest.approx(value)
        assert outcome.metrics[f"latency/{name}/std"] == pytest.approx(0, abs=1e-9)
    assert outcome.metrics["latency/ttft_ms/p90"] is None
    assert len(outcome.samples) == 11
    assert outcome.samples[0]["num_prompt_tokens"] == 8
    assert outcome.samples[0]["num_output_tokens"] == 5
    assert outcome.samples[0]["itl_ms"] == pytest.approx([125.0] * 4)
    assert outcome.reasons == []
    assert outcome.notes == []
    assert (totals.num_steps, totals.num_decode_steps) == (55, 44)


def test_latency_runs_one_request_at_a_time():
    clock = FakeClock()
    llm = engine(clock)
    seen = []
    measure_latency(llm, prompts(3, 4), 2, clock=clock, on_progress=lambda *done: seen.append(done))
    assert seen == [(0, 3, 1), (0, 3, 2), (1, 3, 3), (1, 3, 4), (2, 3, 5), (2, 3, 6), (3, 3, 6)]


def test_throughput_of_known_times():
    clock = FakeClock()
    llm = engine(clock, prefill_s=0.5, decode_s=0.125)
    outcome, totals = measure_throughput(llm, prompts(4, 8), 5, clock=clock)
    wall_s = 0.5 + 4 * 0.125
    assert outcome.metrics == {
        "throughput/requests_s": pytest.approx(4 / wall_s),
        "throughput/output_tok_s": pytest.approx(20 / wall_s),
        "throughput/total_tok_s": pytest.approx((32 + 20) / wall_s),
        "throughput/prefill_tok_s": pytest.approx(32 / 0.5),
        "throughput/decode_tok_s": pytest.approx(16 / 0.5),
        "throughput/wall_s": pytest.approx(wall_s),
        "throughput/hit_share": 0.0,
    }
    assert outcome.samples["num_completed"] == 4
    assert totals.decode_moved_bytes == 4 * 1500  # copied and read in place, prefill left out


def test_one_token_each_leaves_no_decode_rate():
    clock = FakeClock()
    outcome, _ = measure_throughput(engine(clock), prompts(4, 8), 1, clock=clock)
    assert outcome.metrics["throughput/decode_tok_s"] is None
    assert outcome.metrics["throughput/prefill_tok_s"] == pytest.approx(64)


def test_a_refused_request_is_a_reason_and_not_counted():
    clock = FakeClock()
    llm = engine(clock, refuse=["throughput-1"])
    outcome, _ = measure_throughput(llm, prompts(4, 8), 5, clock=clock)
    assert outcome.metrics["throughput/requests_s"] == pytest.approx(3.0)
    assert outcome.samples["num_failed"] == 1
    assert outcome.reasons == [
        "throughput: 1 of 4 requests failed; throughput-1: prompt: too long for this test. "
        "Shorten it."
    ]


def test_all_requests_refused_gives_no_number():
    clock = FakeClock()
    llm = engine(clock, refuse=["throughput-0"])
    outcome, _ = measure_throughput(llm, prompts(1, 8), 5, clock=clock)
    assert set(outcome.metrics.values()) == {None}


def test_latency_ends_with_its_time_and_keeps_what_ended():
    """Each request takes 1 s; at 2.5 s the third has two tokens, and is taken back."""
    clock = FakeClock()
    llm = engine(clock, prefill_s=0.375, decode_s=0.125)
    ended = []
    outcome, totals = measure_latency(
        llm, prompts(11, 8), 6, clock=clock, on_end=ended.append, limit_s=2.5
    )
    assert [(r.is_complete, r.is_cancelled, len(r.token_ids)) for r in ended] == [
        (True, False, 6),
        (True, False, 6),
        (False, True, 2),
    ]
    assert clock.passed_s == 5.5  # the load took 3 s
    assert not llm.has_unfinished()
    assert totals.num_steps == 14
    assert outcome.metrics["latency/e2e_ms/mean"] == pytest.approx(1000.0)
    assert outcome.is_cut
    assert outcome.reasons == [
        "latency: scenario.latency.max_duration_s=2.5 had passed when 2 of 11 requests had ended; "
        "the figures are of what was done until then. Raise it, or lower num_requests or "
        "output_tokens of scenario.latency."
    ]


def test_latency_ends_no_sooner_than_with_one_request():
    clock = FakeClock()
    outcome, _ = measure_latency(engine(clock), prompts(3, 8), 5, clock=clock, limit_s=0.01)
    assert (len(outcome.samples), outcome.num_measured, clock.passed_s) == (1, 1, 4.0)
    assert "when 1 of 3 requests had ended" in outcome.reasons[0]


def test_throughput_counts_the_tokens_until_its_time_is_over():
    """A prefill of 0.5 s, then a token of each of four every 0.125 s: at 1 s there are 5 each."""
    clock = FakeClock()
    outcome, _ = measure_throughput(engine(clock), prompts(4, 8), 50, clock=clock, limit_s=1.0)
    assert outcome.metrics["throughput/output_tok_s"] == pytest.approx(20 / 1.0)
    assert outcome.metrics["throughput/prefill_tok_s"] == pytest.approx(32 / 0.5)
    assert outcome.metrics["throughput/decode_tok_s"] == pytest.approx(16 / 0.5)
    assert outcome.metrics["throughput/requests_s"] is None
    names = ("num_requests", "num_completed", "num_failed", "num_cancelled")
    assert [outcome.samples[name] for name in names] == [4, 0, 0, 4]
    assert outcome.num_measured == 4
    (reason,) = outcome.reasons
    assert "max_duration_s=1 had passed when 0 of 4 requests had ended" in reason


def test_a_warm_up_that_was_cut_short_says_so():
    requests = [RequestTimes(request_id="a", num_prompt_tokens=1, submit_s=0.0)]
    (reason,) = cut_reasons("latency warm-up", requests, 2, 5.0)
    assert "latency warm-up: scenario.latency.max_duration_s=5 had passed when 1 of 2" in reason
    assert "it was shorter than asked" in reason


@pytest.mark.parametrize("measure", [measure_latency, measure_throughput])
def test_a_limit_that_is_not_reached_changes_nothing(measure):
    found = []
    for limit_s in (None, 100.0):
        clock = FakeClock()
        outcome, _ = measure(engine(clock), prompts(4, 8), 5, clock=clock, limit_s=limit_s)
        found.append((outcome.metrics, outcome.reasons, outcome.is_cut))
    assert found[0] == found[1]
    assert found[0][2] is False


def test_a_request_that_the_engine_drops_is_a_failure():
    dropped = RequestTimes(
        request_id="a", num_prompt_tokens=1, submit_s=0.0, token_times_s=[1.0], token_ids=[1]
    )
    assert not dropped.is_complete


def test_load_phases_sum_to_the_total():
    clock = FakeClock()

    def build():
        llm = engine(clock, phases={"read": 2.0, "copy": 1.0}, prefill_s=0.5)
        clock.advance(0.25)  # what the engine's own report does not name
        return llm

    row, _ = measure_load(build, spawned_s=clock() - 3.0, clock=clock)
    assert row["phases"] == pytest.approx(
        {"import": 3.0, "read": 2.0, "copy": 1.0, "build": 0.25, "first_token": 0.5}
    )
    assert row["total_s"] == pytest.approx(6.75)
    assert sum(row["phases"].values()) == pytest.approx(row["total_s"])
    assert row["busy"] == {"read": 1.5}
    assert row["moved_bytes"] == {"read": 3_000_000_000, "touch": 10**9, "pin": 10**9}


def test_load_metrics_keep_cold_and_warm_apart():
    def start(seconds, is_cold):
        return {
            "is_cold": is_cold,
            "total_s": seconds + 1,
            "phases": {"read": seconds, "pin": 1.0},
            "busy": {"read": seconds},
            "moved_bytes": {"read": 18 * 10**9, "pin": 10**9} if not is_cold else {},
        }

    outcome = summarise_loads([start(9.0, True), start(1.0, False), start(2.0, False)])
    assert outcome.metrics == pytest.approx(
        {
            "load/total_s": 2.5,
            "load/read_s": 1.5,
            "load/pin_s": 1.0,
            "load/busy/read_s": 1.5,
            "load/weights_gb_s": 13.5,
            "load/pin_gb_s": 1.0,
            "load/cold_total_s": 10.0,
            "load/cold_read_s": 9.0,
            "load/cold_pin_s": 1.0,
            "load/busy/cold_read_s": 9.0,
        }
    )
    assert len(outcome.samples) == 3


def test_cold_starts_alone_leave_no_warm_figure():
    row = {"is_cold": True, "total_s": 1.0, "phases": {"read": 1.0}, "busy": {}}
    assert "load/total_s" not in summarise_loads([row]).metrics
