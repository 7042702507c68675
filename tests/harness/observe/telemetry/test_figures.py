"""Figures of known rows."""

import pytest

from harness.observe.link import mean_gb_s, payload_gb_s, readings
from harness.observe.window import (
    Span,
    Window,
    cost_warning,
    cpu_share,
    null_columns,
    peak_metrics,
    window_metrics,
)
from tests.harness.observe.telemetry.cases import table, window

GIB = 2**30


def test_figures_of_a_window():
    found = window_metrics(
        window(
            count=41,
            gpu_sm_clock_mhz=lambda k: 1000 + 10 * k,
            gpu_temperature_c=lambda k: 50 + k % 3,
            gpu_power_w=lambda k: 100 if k % 2 else 300,
            gpu_busy_pct=80,
            gpu_throttle_bits=lambda k: 0x40 if k == 0 else 0x4,
            cpu_s=lambda k: 7 + k / 5,
            host_cpu_s=lambda k: 900 + 5 * (k // 10),
            major_faults=lambda k: 3 + 2 * k,
            read_bytes=lambda k: k * GIB,
            host_swap_in_bytes=lambda k: k // 10 * GIB,
            host_swap_out_bytes=0,
        )
    )
    assert found["gpu/sm_clock_mhz/min"] == 1000
    assert found["gpu/sm_clock_mhz/p50"] == 1200
    assert found["gpu/sm_clock_mhz/max"] == 1400
    assert found["gpu/temperature_c"] == 52
    assert found["gpu/power_w"] == pytest.approx((21 * 300 + 20 * 100) / 41)
    assert found["gpu/throttled_share"] == pytest.approx(1 / 41)
    assert found["gpu/power_capped_share"] == pytest.approx(40 / 41)
    assert found["host/cpu_cores"] == pytest.approx(2)
    assert found["host/busy_cores"] == pytest.approx(5)
    assert found["host/major_faults"] == 80
    assert found["host/read_gib"] == 40
    assert found["host/swapped_gib"] == 4
    assert found["telemetry/rows_hz"] == pytest.approx(10)
    assert found["gpu/memory_clock_mhz"] is None
    assert found["host/disk_read_gib"] is None


def test_what_was_never_read_is_none_and_never_zero():
    found = window_metrics(window())
    assert {name for name, value in found.items() if value is not None} == {"telemetry/rows_hz"}
    nothing = window_metrics(window(count=0))
    assert set(nothing.values()) == {None}


def test_a_counter_that_went_back_says_nothing():
    assert window(cpu_s=lambda k: 100 - k).growth("cpu_s") is None
    assert window(cpu_s=lambda k: 5 if k == 3 else None).growth("cpu_s") is None


def test_a_counter_that_was_read_once_says_nothing():
    rows = {"host_swap_in_bytes": lambda k: 7 if k < 10 else 9}
    assert window(10, **rows).growth("host_swap_in_bytes") is None
    assert window(11, **rows).growth("host_swap_in_bytes") == 2
    early = Span(part="latency", job="measure", begin_s=100.5, end_s=101.9)
    assert Window(table(40, **rows), early).growth("host_swap_in_bytes") is None
    assert window(10, host_cpu_s=5.0).rate("host_cpu_s") is None


def test_peaks_are_those_of_the_worker_that_measures():
    jobs = ["reference", "measure", "measure", None]
    rows = table(
        4,
        job=lambda k: jobs[k],
        rss_bytes=lambda k: [8 * GIB, GIB, 2 * GIB, 9 * GIB][k],
        gpu_used_bytes=lambda k: [9 * GIB, 4 * GIB, None, None][k],
    )
    assert peak_metrics(rows) == {
        "memory/host_tree_peak_gib": 2,
        "memory/gpu_peak_global_gib": 4,
    }
    rows["job"] = ["load-warm-1", "load-warm-2", None, None]
    assert peak_metrics(rows)["memory/host_tree_peak_gib"] == 8
    rows["job"] = [None, "measure", "measure", None]
    assert peak_metrics(rows)["memory/gpu_baseline_gib"] == 9


def test_the_calibration_brings_the_counter_to_payload():
    # Read every five seconds, at 100, 105, ..., and repeated in between.
    rows = table(400, pcie_rx_gb_s=lambda k: 99.0 if k < 100 else 33.0 + k // 50)
    assert payload_gb_s(rows, 0.5, 109.0, 134.5) == pytest.approx(0.5 * (33 + 4))  # at 110 .. 130
    assert payload_gb_s(rows, 0.5, 109.0, 129.5) is None  # four readings are too few
    assert payload_gb_s(rows, None, 109.0, 134.5) is None
    assert payload_gb_s(table(400), 0.5, 109.0, 134.5) is None


def test_traffic_is_that_of_readings_within_the_part_each_once():
    rows = table(100, pcie_rx_gb_s=lambda k: 50.0 if k < 50 else 2.0)
    late = Window(rows, Span(part="latency", job="measure", begin_s=103.0, end_s=109.0))
    assert window_metrics(late)["link/pcie_rx_gb_s"] == 2.0  # not the one of 100, repeated to 105
    short = Window(rows, Span(part="latency", job="measure", begin_s=101.0, end_s=104.0))
    assert window_metrics(short)["link/pcie_rx_gb_s"] is None


def test_readings_across_an_edge_do_not_count():
    rows = table(
        pcie_rx_gb_s=lambda k: 100.0 * k, took_s=0.1, costly_clock_s=lambda k: 100 + k / 10
    )
    assert mean_gb_s(readings(rows), 100.15, 100.75) == pytest.approx(400)  # 2 .. 6
    assert mean_gb_s(readings(rows), 100.15, 100.65) is None  # four are too few


def test_the_cost_of_the_sampler():
    cheap = table(100, sampler_cpu_s=lambda k: k * 0.0005)
    assert cpu_share(cheap) == pytest.approx(0.005)
    assert cost_warning(cheap) is None
    dear = table(100, sampler_cpu_s=lambda k: k * 0.002)
    assert "2.0% of a core, more than 1%" in cost_warning(dear)
    assert cost_warning(table(20, sampler_cpu_s=lambda k: k * 0.002)) is None  # too short
    assert cpu_share(table(1, sampler_cpu_s=0.0)) is None


def test_null_columns_are_named():
    found = null_columns(table(3, gpu_power_w=lambda k: 5 if k == 1 else None))
    assert "gpu_energy_j" in found
    assert not {"gpu_power_w", "clock_s", "job"} & set(found)
