"""Figures over time, the roofline, the timeline, what was asked and used, and failed requests."""

import pytest

from reports.figures.roofline import decode_points
from reports.figures.run import FIGURES, TIME_FIGURES
from reports.figures.theme import THEMES
from reports.pages.run import asked_section, failed_section, roofline_section
from reports.pages.write import write_report
from reports.record.record import write_text_atomic
from reports.record.telemetry import COLUMNS
from tests.reports.conftest import write_run
from tests.reports.examples import GIB, gib, ok_record
from tests.reports.figures.test_run import pixels, share_near
from tests.reports.pages.test_write import read_html

LIGHT = THEMES["light"]


def rows(count=40, **columns):
    """Telemetry of `count` rows, ten a second; the middle half is latency."""
    table = {name: [None] * count for name in COLUMNS}
    table["clock_s"] = [100 + index / 10 for index in range(count)]
    quarter = count // 4
    phases = ["build"] * quarter + ["latency"] * (count - 2 * quarter) + ["close"] * quarter
    table["phase"] = phases
    for name, value in columns.items():
        table[name] = [value] * count
    return table


USUAL = {
    "gpu_used_bytes": 12 * GIB,
    "rss_bytes": 3 * GIB,
    "pinned_bytes": 8 * GIB,
    "gpu_busy_pct": 80.0,
    "pcie_rx_gb_s": 40.0,
    "gpu_power_w": 350.0,
}


@pytest.mark.parametrize("name", sorted(TIME_FIGURES))
def test_figures_over_time_are_drawn(name):
    record = ok_record()
    record.metrics["memory/gpu_budget_gib"] = 13.6
    png = TIME_FIGURES[name](record, rows(**USUAL), LIGHT)
    assert share_near(png, LIGHT.accent) > 0.0005
    assert share_near(png, LIGHT.alarm) > 0.0005
    assert png.svg().startswith(b"<?xml")
    assert b"latency" in png.svg()


@pytest.mark.parametrize("name", sorted(TIME_FIGURES))
def test_figures_over_time_are_absent_without_rows(name):
    assert TIME_FIGURES[name](ok_record(), rows(count=4), LIGHT) is None
    assert TIME_FIGURES[name](ok_record(), rows(count=0), LIGHT) is None


def test_emulated_memory_shows_the_host_alone():
    record = ok_record()
    record.environment["emulated"] = True
    both = TIME_FIGURES["memory_time"](ok_record(), rows(**USUAL), LIGHT)
    host = TIME_FIGURES["memory_time"](record, rows(**USUAL), LIGHT)
    assert pixels(host).shape[0] < pixels(both).shape[0]
    assert share_near(host, LIGHT.alarm) == 0


def test_a_run_with_telemetry_shows_it_and_one_without_has_no_heading(tmp_path):
    folder = write_run(ok_record(plan=None, samples={}, metrics={}), tmp_path / "run")
    write_report(folder)
    assert "Over time" not in read_html(folder).words
    table = rows(**USUAL)
    lines = [
        "{" + ", ".join(f'"{name}": {_json(values[index])}' for name, values in table.items()) + "}"
        for index in range(40)
    ]
    write_text_atomic(folder / "telemetry.jsonl", "\n".join(lines) + "\n")
    paths = write_report(folder)
    assert "Over time" in read_html(folder).words
    assert {"memory_time.svg", "activity.png"} <= {path.name for path in paths}


def _json(value):
    if value is None:
        return "null"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def test_roofs_are_rates_over_bytes_of_a_token():
    record = ok_record()
    record.metrics |= {"link/h2d_gb_s": 50.0, "link/hbm_copy_gb_s": 2000.0}
    record.plan["placements"] = {"resident": gib(5), "uva": gib(3), "prefetch": gib(2)}
    record.plan["bytes_per_step"] = gib(5)
    record.samples["throughput"] = {"num_decode_steps": 10, "num_decode_tokens": 200}
    record.metrics["throughput/decode_tok_s"] = 150.0
    one, many = decode_points(record)
    assert one.bound_tok_s("link") == pytest.approx(50e9 / gib(5))
    assert one.bound_tok_s("hbm") == pytest.approx(2000e9 / gib(7))
    assert many.batch == 20
    assert many.bound_tok_s("link") == pytest.approx(20 * 50e9 / gib(5))
    (table,) = roofline_section(record).tables
    assert [row[0] for row in table.rows] == [
        "one sequence, 1.00 a step",
        "throughput, 20.0 a step",
    ]


def test_no_roofline_of_an_emulation_or_a_peer_without_a_plan():
    emulated = ok_record()
    emulated.environment["emulated"] = True
    assert roofline_section(emulated) is None
    assert roofline_section(ok_record(plan={"max_model_len": 5})) is None


def test_resident_weights_have_no_link_roof():
    record = ok_record()
    record.plan |= {"bytes_per_step": 0, "placements": {"resident": gib(5)}}
    record.metrics |= {"link/hbm_copy_gb_s": 2000.0}
    assert all(point.bound_tok_s("link") is None for point in decode_points(record))
    assert FIGURES["roofline"](record, LIGHT) is not None


def served(**changes):
    return {
        "scheduled_s": 1.0,
        "ttft_ms": 100.0,
        "e2e_ms": 900.0,
        "error": None,
        **changes,
    }


def test_the_timeline_shows_arrivals_and_marks_failures():
    record = ok_record()
    alone = FIGURES["timeline"](record, LIGHT)
    assert share_near(alone, LIGHT.alarm) == 0
    record.samples["serve"] = {
        "requests": [served(), served(scheduled_s=2.0, ttft_ms=None, e2e_ms=None, error="full")]
    }
    assert share_near(FIGURES["timeline"](record, LIGHT), LIGHT.alarm) > 0


def test_failed_requests_are_counted_by_error():
    record = ok_record()
    assert failed_section(record) is None
    record.samples["serve"] = {"requests": [served(), *[served(error="queue full")] * 3]}
    record.samples["latency"][0]["error"] = "too long"
    (table,) = failed_section(record).tables
    assert table.rows == [
        ("latency", "1 of 20", "too long"),
        ("serve", "3 of 4", "queue full"),
    ]


def test_asked_stands_beside_used():
    record = ok_record()
    record.effective |= {
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "placement_bytes": {"resident": gib(5), "uva": gib(8), "prefetch": 0},
        "correctness": {"checked": True, "num_tokens": 32},
        "stats": {"peak_running": 7},
    }
    found = {row[0]: row[1:] for row in asked_section(record).tables[0].rows}
    assert found["system"] == ("native", "this project")
    assert found["dtype"] == ("bfloat16", "bfloat16")
    assert found["GPU memory"] == ("16.0 GiB, of it 85%", "peak 12.9 GiB")
    assert found["offload"] == ("uva", "5.00 GiB resident, 8.00 GiB uva")
    assert found["sequences at once"] == ("64", "7 at most")
    assert found["longest sequence"] == ("the model's own limit", "4,096 tokens")
    assert found["tokens compared"][1] == "32 tokens: equal"


def test_a_peer_names_its_versions_and_how_far_its_tokens_agree():
    record = ok_record()
    record.config["system"] = {"kind": "accelerate"}
    record.effective |= {
        "system_version": "transformers 5.17, accelerate 1.15",
        "correctness": {"checked": True, "num_tokens": 32},
    }
    record.metrics["correctness/equal_share"] = 0.75
    found = {row[0]: row[1:] for row in asked_section(record).tables[0].rows}
    assert found["system"] == ("accelerate", "transformers 5.17, accelerate 1.15")
    assert found["tokens compared"][1] == "32 tokens: 75 % equal"
    record.effective["correctness"] = {"checked": False}
    found = {row[0]: row[1:] for row in asked_section(record).tables[0].rows}
    assert found["tokens compared"][1] == "not compared"
