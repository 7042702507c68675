"""Predicted beside measured, and rates that no link carries."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.plan.rates import cpu_rates
from engine.plan.times import decode_step_s, prefill_s, shape_of
from harness.config.schema import LatencyScenario
from harness.point.show import summary_lines
from harness.work.drive import StepTotals
from harness.work.predicted import bytes_by_way, differences, link_reasons, predicted_times
from reports.pages.run import predicted_section
from reports.record.record import RunRecord
from tests.engine.specs import GIB, plan_small, small_spec
from tests.harness.cases import scenario

METRICS = {"link/h2d_gb_s": 10.0, "link/in_place_gb_s": 9.0, "link/h2d_after_gb_s": None}


def totals(num_bytes: int, seconds: float) -> StepTotals:
    half = num_bytes // 2
    return StepTotals(
        num_decode_steps=10,
        decode_s=seconds,
        decode_copied_bytes=half,
        decode_read_bytes=num_bytes - half,
    )


def test_what_is_predicted_is_the_cost_model_s() -> None:
    plan, spec, asked = plan_small(memory_gib=1), small_spec(), scenario()
    found = predicted_times(plan, spec, asked)
    shape, one = shape_of(plan, spec, cpu_rates()), asked.latency
    assert one is not None
    context = one.prompt_tokens + one.output_tokens / 2
    expected = decode_step_s(shape, 1, context) * 1e3
    assert found["predicted/tpot_ms"] == pytest.approx(expected)
    first = prefill_s(shape, one.prompt_tokens) * 1e3
    assert found["predicted/ttft_ms"] == pytest.approx(first)
    assert found["predicted/gpu_peak_gib"] == plan.gpu_total_bytes / GIB
    assert (found["predicted/output_tok_s"] or 0) > 0


def test_prompts_of_many_lengths_are_not_predicted() -> None:
    one = LatencyScenario(prompts_file="x.jsonl")
    asked = replace(scenario(), latency=one)
    found = predicted_times(plan_small(memory_gib=1), small_spec(), asked)
    assert set(found) == {"predicted/gpu_peak_gib", "predicted/output_tok_s"}


def test_a_difference_is_of_the_median_where_there_is_one() -> None:
    metrics = {
        "predicted/tpot_ms": 12.0,
        "latency/tpot_ms/p50": 10.0,
        "latency/tpot_ms/mean": 20.0,
        "predicted/ttft_ms": 5.0,
        "latency/ttft_ms/p50": None,
        "latency/ttft_ms/mean": 10.0,
        "predicted/output_tok_s": 5.0,
        "throughput/output_tok_s": 0.0,
    }
    assert differences(metrics) == {
        "predicted/tpot_ms_difference_pct": pytest.approx(20),
        "predicted/ttft_ms_difference_pct": pytest.approx(-50),
    }


@pytest.mark.parametrize(
    ("gigabytes", "is_believed"), [(5.0, True), (10.4, True), (10.6, False), (30.0, False)]
)
def test_a_rate_above_the_link_s_is_a_reason(gigabytes: float, is_believed: bool) -> None:
    timed = {
        "latency": totals(round(gigabytes * 2e9), 2.0),
        "throughput": totals(10**9, 2.0),
    }
    reasons = link_reasons(timed, METRICS)
    assert (reasons == []) is is_believed
    if reasons:
        assert reasons[0].startswith("latency: ")
        assert f"{gigabytes:.1f} GB/s, but the link carried at most 10.0 GB/s" in reasons[0]


def test_without_a_probe_or_offload_nothing_is_said() -> None:
    assert link_reasons({"latency": totals(10**12, 1.0)}, {"link/h2d_gb_s": None}) == []
    assert link_reasons({"latency": StepTotals()}, METRICS) == []


def test_what_crossed_the_link_is_told_by_what_moved_it() -> None:
    moved = replace(totals(1000, 1.0), decode_expert_bytes=7)
    assert bytes_by_way(moved, {}) == (500, 507)
    kv = {"loaded": 1.0, "copied_ahead": 2.0, "staged_prefill": 4.0, "in_place": 8.0}
    metrics = {f"kv/{name}_gib": size for name, size in kv.items()}
    assert bytes_by_way(moved, metrics) == (500 + 7 * GIB, 507 + 8 * GIB)


def test_summary_and_page_show_both() -> None:
    metrics: dict[str, float | None] = {"predicted/tpot_ms": 12.0, "latency/tpot_ms/p50": 10.0}
    metrics |= differences(metrics) | {"predicted/load_s": 3.0}
    timed = {"label": "x", "batch": 1, "predicted_decode_step_ms": 5.0}
    rows = [timed | {"decode_step_ms": 6.0}, timed | {"decode_step_ms": None}]
    plan: dict[str, Any] = {
        "kv": {"tokens": 640, "max_concurrency": 2.5, "max_model_len": 256},
        "choice": {"chosen": "x", "why": "y", "referee": {"result": "z", "timed": rows}},
        "predicted": {
            "decode_step_ms": 12.0,
            "prefill_tokens": 8,
            "prefill_ms": 1.0,
            "rates": {"source": "a sheet"},
        },
    }
    record = RunRecord(run_id="1", name="n", status="ok", metrics=metrics, plan=plan)
    lines = summary_lines(record, Path("absent"), view_command=None)
    assert "  latency/tpot_ms: predicted 12.0, measured 10.0 (+20.0 %)" in lines
    assert "  KV cache: 640 tokens, 2.5 sequences of 256 at once" in lines
    texts = [line for line in lines if line.startswith("    ")]
    assert [text.split(": ")[2].split(" a step")[0] for text in texts[:2]] == [
        "measured 6.00 ms",
        "not measured",
    ]
    assert texts[2] == "    referee: z"
    section = predicted_section(record)
    assert section is not None
    assert section.text == ("Rates: a sheet. Marked: off by more than 15 %.",)
    plan["predicted"]["rates"]["source"] = "assumed for a CPU"
    lines = summary_lines(record, Path("absent"), view_command=None)
    assert "  latency/tpot_ms: predicted (assumed rates) 12.0, measured 10.0 (+20.0 %)" in lines
    plan["predicted"]["rates"] = {"source": "sheet of a card", "is_cpu": False}
    record = replace(record, effective={"emulated": True})
    lines = summary_lines(record, Path("absent"), view_command=None)
    assert "  latency/tpot_ms: predicted (for the card) 12.0, measured 10.0" in lines
    first, second = section.tables[0].rows
    assert (first[0], first[3]) == ("latency/tpot_ms", "+20.0 %")
    assert second[0] == "load/total_s"
    assert predicted_section(RunRecord(run_id="1", name="n", status="ok")) is None
