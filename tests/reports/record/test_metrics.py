"""The metric table: lookups, statistics, units."""

import pytest

from reports.record.metrics import (
    METRICS,
    TOTAL,
    definition,
    found,
    metric_of,
    metric_text,
    shared,
    unit,
)

GIB = 2**30


def test_definitions_are_found_by_prefix():
    assert definition("latency/ttft_ms/p50") == METRICS["latency/ttft_ms"].definition
    assert definition("load/busy/read_s") == METRICS["load/busy"].definition
    assert definition("load/nosuch_s") is None
    assert definition("load/cold_nosuch_s") is None
    assert definition("nosuch/thing") is None
    assert "(E2E - TTFT) / (output tokens - 1)" in definition("latency/tpot_ms/mean")


def test_every_metric_has_a_definition_of_one_line():
    for metric in (*METRICS.values(), TOTAL):
        assert metric.definition, metric.name
        assert "\n" not in metric.definition, metric.name


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("throughput/output_tok_s", 402.7, "402.7 tok/s"),
        ("throughput/requests_s", 3.15, "3.15 requests/s"),
        ("latency/ttft_ms/p50", 223.66, "223.7 ms"),
        ("load/total_s", 15.01, "15.0 s"),
        ("load/busy/read_s", 2.0, "2.00 s"),
        ("memory/gpu_peak_gib", 12.94, "12.9 GiB"),
        ("link/h2d_gb_s", 55.5, "55.5 GB/s"),
        ("link/share", 0.985, "98.5 %"),
        ("offload/bytes_per_step", 8 * GIB, "8.00 GiB/step"),
        ("energy/j_per_token", 1.5, "1.50 J/token"),
        ("energy/j_per_token", None, "n/a"),
        ("other/count", 3, "3.00"),
        ("memory/gpu_peak_gib", 0.01, "10.2 MiB"),
        ("offload/bytes_per_step", 2**20, "1.00 MiB/step"),
        ("load/plan_s", 0.00104, "1.04 ms"),
        ("load/convert_s", 0.0, "0 s"),
    ],
)
def test_metrics_carry_their_unit(name, value, text):
    assert metric_text(name, value) == text


def test_unit_of_a_name_without_one_is_empty():
    assert not unit("other/count")


def test_a_statistic_is_one_that_all_runs_have():
    tpot = METRICS["latency/tpot_ms"]
    mean = {"latency/tpot_ms/mean": 5.0}
    median = mean | {"latency/tpot_ms/p50": 4.0}
    interval = median | {"latency/tpot_ms/ci95_low": 4.5}
    assert shared(tpot, [median]).name == "latency/tpot_ms/p50"
    assert shared(tpot, [median, mean, {}]).name == "latency/tpot_ms/mean"
    assert shared(tpot, [interval]).name == "latency/tpot_ms/mean"
    assert shared(METRICS["load/total_s"], []).name == "load/total_s"


def test_a_metric_is_found_where_a_run_has_it_and_what_it_needs():
    counted = {"kv/loaded_gib": 1.0, "throughput/output_tok_s": None}
    assert found("sweep", [counted]) == []
    blocks = counted | {"kv/cpu_used_peak_share": 0.5}
    assert [metric.label for metric in found("sweep", [{}, blocks])] == ["KV loaded"]


def test_a_cold_load_has_the_words_of_a_warm_one():
    cold = metric_of("load/cold_read_s")
    assert cold.definition.endswith("dropped from the page cache first")
    assert METRICS["load/cold_total_s"] == metric_of("load/cold_total_s")
    assert "cold starts" in METRICS["load/cold_total_s"].definition
    assert metric_of("load/cold_unknown_s") is None
