"""Figures decode as PNG, show what they should, and are absent without data."""

import numpy as np
import pytest

from reports.figures.comparisons import SWEEP_FIGURES
from reports.figures.run import FIGURES, TIME_FIGURES, phase_names
from reports.figures.theme import THEMES, plain
from reports.pages.write import write_report
from reports.record.record import write_text_atomic
from reports.record.rows import TELEMETRY_COLUMNS
from tests.reports.conftest import write_run
from tests.reports.examples import GIB, gib, latency_rows, no_fit_record, ok_record
from tests.reports.figures.pictures import LIGHT, drawn, pixels, rgb, share_near
from tests.reports.figures.test_comparisons import rows_of
from tests.reports.pages.test_write import read_html
from tests.slow import mostly_slow, slow

pytestmark = pytest.mark.thorough_but("test_figures_over_time_are_drawn")


@pytest.mark.thorough_but("memory-light", "throughput-dark")
@pytest.mark.parametrize(
    ("name", "theme"),
    [
        *(
            (name, "light") if name in {"memory", "latency"} else slow(name, "light")
            for name in FIGURES
        ),
        ("throughput", "dark"),
    ],
)
def test_figures_of_a_run_are_pngs_on_the_themes_ground(name, theme):
    image = pixels(drawn(name, theme))
    height, width, _ = image.shape
    assert width > 800
    assert height > 200
    assert list(image[-1, -1]) == rgb(THEMES[theme].background)
    assert len(np.unique(image @ [1 << 16, 1 << 8, 1])) > 20


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_figures_without_data_are_absent(name):
    empty = ok_record(plan=None, metrics={}, samples={})
    assert FIGURES[name](empty, LIGHT) is None
    nulls = ok_record(
        plan={"gpu": {"items": {}}, "host": None},
        metrics={"throughput/output_tok_s": None},
        samples={"latency": [{"ttft_ms": None, "itl_ms": []}], "load": [{"start": "cold"}]},
    )
    assert FIGURES[name](nulls, LIGHT) is None


def test_only_what_is_over_the_budget_is_in_the_alarm_colour():
    alarm = LIGHT.alarm
    assert share_near(FIGURES["memory"](no_fit_record(), LIGHT), alarm) > 0.005
    assert share_near(drawn("memory"), alarm) == 0


def test_memory_part_widths_are_proportional():
    parts = {"weights": gib(6), "kv_cache": gib(3)}
    plan = {"gpu": {"budget_bytes": gib(10), "items": parts}}
    png = FIGURES["memory"](ok_record(plan=plan, metrics={}), LIGHT)
    image = pixels(png)
    widths = []
    for colour in ("#4269d0", "#e0a30c"):
        near = np.abs(image - rgb(colour)).max(axis=2) <= 12
        widths.append(int(near.sum(axis=1).max()))
    assert widths[0] / widths[1] == pytest.approx(2, rel=0.05)


def test_a_small_model_fills_the_axis_of_a_large_budget():
    parts = {"weights": 3 * 2**20, "kv_cache": 2**20}
    plan = {
        "gpu": {"budget_bytes": gib(9), "items": parts},
        "host": {"limit_bytes": gib(20), "items": {"process": gib(1)}},
    }
    png = FIGURES["memory"](ok_record(plan=plan, metrics={}), LIGHT)
    assert share_near(png, "#4269d0") > 0.05


def test_link_bound_is_drawn_only_where_it_is_known_and_not_emulated():
    second = LIGHT.second
    assert share_near(drawn("latency"), second) > 0
    record = ok_record()
    record.environment["emulated"] = True
    assert share_near(FIGURES["latency"](record, LIGHT), second) == 0


@pytest.mark.parametrize("name", [slow("throughput"), slow("load"), "memory"])
def test_emulated_figures_say_so(name):
    emulated = ok_record()
    emulated.environment["emulated"] = True
    top = [pixels(png)[35:62] for png in (drawn(name), FIGURES[name](emulated, LIGHT))]
    is_ink = [(strip.max(axis=2) < 60).mean() for strip in top]
    assert is_ink[1] > is_ink[0] + 0.01


def test_one_sample_and_failed_requests_draw():
    one = ok_record(samples={"latency": latency_rows(1)})
    pixels(FIGURES["latency"](one, LIGHT))
    failed = [{**row, "error": "refused"} for row in latency_rows(2)]
    assert FIGURES["latency"](ok_record(samples={"latency": failed}), LIGHT) is None


def test_rates_far_apart_get_a_logarithmic_axis():
    near = ok_record(metrics={"throughput/prefill_tok_s": 900, "throughput/decode_tok_s": 90})
    far = ok_record(metrics={"throughput/prefill_tok_s": 90000, "throughput/decode_tok_s": 90})
    accent = LIGHT.accent
    bars, dots = (share_near(FIGURES["throughput"](r, LIGHT), accent) for r in (near, far))
    assert bars > 5 * dots > 0


@pytest.mark.slow
def test_names_of_any_kind_can_be_drawn(tmp_path):
    name = "a$b$ \u6f22\u5b57 \x07 new\nline <b> \\frac{1} " + "x" * 300
    record = ok_record(name=name, overrides=[f"offload={name}"])
    record.environment["gpu"]["name"] = name
    record.plan["gpu"]["items"][name] = gib(0.3)
    record.samples["load"][0]["start"] = name
    record.samples["load"][0]["phases"][name] = 1.0
    for draw in FIGURES.values():
        pixels(draw(record, LIGHT))
    rows = rows_of({"a": record, "b": ok_record()}, tmp_path)
    for draw in SWEEP_FIGURES.values():
        pixels(draw(rows, LIGHT))
    assert plain("a$b\n\u6f22\x07") == r"a\$b ??"


def test_phases_are_ordered_as_they_happen():
    assert phase_names([{"copy": 1.0, "zz": 1.0}, {"read_s": 1.0, "first_token": 1.0}]) == [
        "read_s",
        "copy",
        "first_token",
        "zz",
    ]


def rows(count=40, **columns):
    """Telemetry of `count` rows, ten a second; the middle half is latency."""
    table = {name: [None] * count for name in TELEMETRY_COLUMNS}
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


@pytest.mark.parametrize("name", mostly_slow(TIME_FIGURES, "memory_time".__eq__))
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
