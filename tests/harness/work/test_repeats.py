"""Repeats of the throughput part, and the drift of the latency part, worked out by hand."""

from types import SimpleNamespace

import pytest

from engine.errors import ConfigError
from harness.config.schema import ThroughputScenario
from harness.observe.student import student_t
from harness.work.drive import Outcome, StepTotals, measure_repeats
from harness.work.offline import drift_reasons
from harness.work.prompts import PromptRow
from harness.work.times import RequestTimes
from tests.harness.cases import scenario
from tests.harness.test_worker import job, work


def outcome(rate, **changes):
    fields = {
        "metrics": {"throughput/output_tok_s": rate, "throughput/wall_s": 2.0},
        "samples": {"num_requests": 2, "wall_s": 2.0, "requests": [{"request_id": "a"}] * 2},
        "num_measured": 2,
    }
    return Outcome(**(fields | changes))


def repeated(rates, *, repeats=None, stop_share=None, **changes):
    """The outcome of measuring these rates, and how many were measured."""
    calls = []

    def measure(number):
        calls.append(number)
        return outcome(rates[number], **changes), StepTotals(num_steps=5, decode_s=0.5)

    found, totals = measure_repeats(
        measure,
        SimpleNamespace(part="throughput", repeats=repeats or len(rates), stop_share=stop_share),
        student_t,
    )
    assert calls == list(range(len(calls)))
    assert totals.num_steps == 5 * len(calls)
    assert totals.decode_s == pytest.approx(0.5 * len(calls))
    return found, len(calls)


def test_one_repeat_is_returned_as_it_is():
    found, count = repeated([10.0])
    assert count == 1
    assert found == outcome(10.0)


def test_a_measurement_whose_time_was_over_is_the_last():
    found, count = repeated([2.0, 4.0, 6.0], is_cut=True, reasons=["time"])
    assert (count, found.is_cut, found.reasons) == (1, True, ["time"])
    assert found.metrics["throughput/output_tok_s"] == 2.0
    assert "throughput: means over 1 repeats of 3, cut short." in found.notes


def test_several_are_a_mean_with_an_interval():
    """2, 4, 6: mean 4, deviation 2, half width 4.303 x 2 / sqrt(3) = 4.968."""
    found, _ = repeated([2.0, 4.0, 6.0])
    assert found.metrics == pytest.approx(
        {
            "throughput/output_tok_s": 4.0,
            "throughput/output_tok_s/std": 2.0,
            "throughput/output_tok_s/ci95_low": -0.9683,
            "throughput/output_tok_s/ci95_high": 8.9683,
            "throughput/wall_s": 2.0,
            "throughput/wall_s/std": 0.0,
            "throughput/wall_s/ci95_low": 2.0,
            "throughput/wall_s/ci95_high": 2.0,
        },
        abs=1e-3,
    )
    assert found.samples["num_requests"] == 6
    assert found.samples["wall_s"] == 6.0
    assert [row["repeat"] for row in found.samples["requests"]] == [0, 0, 1, 1, 2, 2]
    assert [row["throughput/output_tok_s"] for row in found.repeats] == [2, 4, 6]
    assert found.notes == ["throughput: means over 3 repeats."]


def test_a_settled_series_ends_early():
    """9, 10, 11 reach 24.8 % of the mean; a fourth 10 makes it 13 %."""
    rates = [9.0, 10.0, 11.0, 10.0, 10.0]
    assert repeated(rates, stop_share=0.25)[1] == 3
    found, count = repeated(rates, stop_share=0.2)
    assert count == 4
    assert found.notes == ["throughput: means over 4 repeats of 5, settled early."]
    assert repeated(rates, stop_share=0.01)[1] == 5


def test_what_a_repeat_did_not_measure_is_not_a_zero():
    found, _ = repeated([None, 4.0, 6.0], reasons=["throughput: one failed."])
    assert found.metrics["throughput/output_tok_s"] == 5.0
    assert found.reasons == ["throughput: one failed."]
    found, _ = repeated([None, None, 6.0])
    assert found.metrics["throughput/output_tok_s"] == 6.0
    assert found.metrics["throughput/output_tok_s/ci95_low"] is None
    assert repeated([None, None])[0].metrics["throughput/output_tok_s"] is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"repeats": 0}, "throughput.repeats: expected an integer >= 1"),
        ({"repeats": 9, "stop_share": 0}, "throughput.stop_share: expected a number > 0"),
        ({"repeats": 3, "stop_share": 0.1}, "does not end before 3"),
    ],
)
def test_settings_without_effect_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        ThroughputScenario(**fields)


SIZES = {"num_requests": 4, "prompt_tokens": 8, "output_tokens": 5, "warmup_requests": 1}


@pytest.mark.thorough
def test_the_worker_repeats_with_fresh_prompts_and_ends_when_settled(tmp_path):
    part = ThroughputScenario(**SIZES, repeats=9, stop_share=0.05)
    result, factory = work(tmp_path, job(scenario=scenario(throughput=part, latency=None)))
    assert result["status"] == "ok"
    assert result["metrics"]["throughput/output_tok_s"] == pytest.approx(20)
    assert result["metrics"]["throughput/output_tok_s/std"] == pytest.approx(0, abs=1e-9)
    assert len(result["samples"]["repeats"]["throughput"]) == 3
    timed = [tuple(prompt) for name, prompt in factory.built[0].prompts if "warm-up" not in name]
    assert len(timed) == len(set(timed)) == 12


def test_a_file_gives_each_repeat_rows_of_its_own(tmp_path):
    part = ThroughputScenario(**(SIZES | {"num_requests": 2}), repeats=2, prompts_file="a.jsonl")
    rows = [PromptRow(line, token_ids=(line, 7)) for line in range(5, 9)]
    task = job(scenario=scenario(throughput=part, latency=None), prompts={"throughput": rows})
    _, factory = work(tmp_path, task)
    timed = [prompt for name, prompt in factory.built[0].prompts if "warm-up" not in name]
    assert timed == [[5, 7], [6, 7], [7, 7], [8, 7]]


def in_turn(gaps_ms):
    return [
        RequestTimes(
            request_id=f"latency-{index}",
            num_prompt_tokens=1,
            submit_s=index,
            token_ids=[1, 2],
            token_times_s=[index + 0.1, index + 0.1 + gap_ms / 1e3],
            finish_reason="length",
        )
        for index, gap_ms in enumerate(gaps_ms)
    ]


def test_a_machine_that_slows_down_is_a_reason():
    (reason,) = drift_reasons(in_turn([10.0] * 20 + [12.0] * 10), student_t)
    assert "went from 10 ms in the first third of the requests to 12 ms in the last" in reason
    assert "warmup_requests" in reason
    assert drift_reasons(in_turn([10.0] * 20 + [10.9] * 10), student_t) == []
    assert drift_reasons(in_turn([10.0] * 10 + [99.0]), student_t) == []  # too few
