"""Figures decode as PNG, show what they should, and are absent without data."""

import functools
import io

import numpy as np
import pytest
from PIL import Image

from reports.compare import sweep_rows
from reports.figures.comparisons import SWEEP_FIGURES, frontier
from reports.figures.run import FIGURES, PHASE_ORDER, phase_names
from reports.figures.theme import THEMES, log_ticks, part_colours, plain
from reports.record.folders import Point
from tests.reports.conftest import sweep_records
from tests.reports.examples import gib, kv_rows, latency_rows, no_fit_record, ok_record

LIGHT = THEMES["light"]


@functools.cache
def drawn(name, theme="light"):
    """Return the figure of the usual record, drawn once."""
    return FIGURES[name](ok_record(), THEMES[theme])


def pixels(png):
    with Image.open(io.BytesIO(png)) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB")).astype(int)


def rgb(colour):
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def share_near(png, colour):
    """Return the share of pixels within 12 of a colour in each channel."""
    return float((np.abs(pixels(png) - rgb(colour)).max(axis=2) <= 12).mean())


HOST = ("pinned_weights", "pinned_kv", "pageable_kv", "kv_staging", "load_staging", "tokenizer")
GPU = ("weights", "kv_cache", "activations", "logits", "graphs", "runtime", "kv_moves", "kv_stages")


@pytest.mark.parametrize(
    "names", [(*PHASE_ORDER, "other_s"), (*HOST, "process", "emulated_gpu"), GPU]
)
def test_no_two_parts_of_a_figure_have_one_colour(names):
    assert len(set(part_colours(names).values())) == len(names)


def rows_of(records, tmp_path):
    points = [
        Point(folder=tmp_path / name, record=record, problem=None if record else "broken")
        for name, record in records.items()
    ]
    return sweep_rows(points)


@pytest.mark.parametrize(
    ("name", "theme"), [*((name, "light") for name in sorted(FIGURES)), ("throughput", "dark")]
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


@pytest.mark.parametrize("name", ["throughput", "load", "memory"])
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


@pytest.mark.parametrize("name", sorted(SWEEP_FIGURES))
def test_sweep_figures(name, tmp_path):
    rows = rows_of({**sweep_records(), "11": None}, tmp_path)
    png = SWEEP_FIGURES[name](rows, LIGHT)
    assert pixels(png).shape[1] > 800
    alarm = share_near(png, LIGHT.alarm)
    assert (alarm > 0) is (name == "comparison")


def test_sweeps_without_figures_draw_nothing(tmp_path):
    rows = rows_of({"0": no_fit_record(), "1": None}, tmp_path)
    assert [draw(rows, LIGHT) for draw in SWEEP_FIGURES.values()] == [None, None]


def test_long_sweeps_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr("reports.figures.comparisons.MAX_BARS", 4)
    point = ok_record(metrics={"throughput/output_tok_s": 3.0})
    few = rows_of({str(i): point for i in range(4)}, tmp_path)
    many = rows_of({str(i): point for i in range(9)}, tmp_path)
    heights = [pixels(SWEEP_FIGURES["comparison"](rows, LIGHT)).shape[0] for rows in (few, many)]
    assert heights[0] == heights[1]


def test_frontier_holds_what_nothing_beats():
    points = [(1, 5.0, 10.0), (2, 4.0, 20.0), (3, 3.0, 15.0), (4, 5.0, 9.0)]
    assert [place for place, _, _ in frontier(points, 1)] == [2, 1]
    assert [place for place, _, _ in frontier(points, -1)] == [3, 2]


def test_the_kv_figure_has_a_panel_for_each_tier_that_is_there():
    with_host = pixels(drawn("kv"))
    alone = ok_record(samples={"kv": kv_rows(cpu_blocks=0) | {"part": "serve"}})
    still = kv_rows()
    still["rows"] = [[*row[:6], 0, 0, 0] for row in still["rows"]]
    png = FIGURES["kv"](ok_record(samples={"kv": still}), LIGHT)
    assert pixels(png).shape[0] < with_host.shape[0]  # nothing crossed the link
    assert pixels(FIGURES["kv"](alone, LIGHT)).shape[0] < with_host.shape[0]


def test_a_little_of_a_large_kv_cache_is_seen():
    png = FIGURES["kv"](ok_record(samples={"kv": kv_rows(0) | {"gpu_blocks": 2.5e6}}), LIGHT)
    held = [round(0.85 * part + 0.15 * 255) for part in rgb(LIGHT.accent)]
    assert share_near(png, "#" + "".join(f"{part:02x}" for part in held)) > 0.1


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (3, 40, [5, 10, 20]),
        (0.4, 30, [1, 3, 10, 30]),
        (80, 30_000, [100, 1000, 10_000]),
        (1, 1e12, [1, 100, 1e4, 1e6, 1e8, 1e10, 1e12]),
    ],
)
def test_ticks_of_a_logarithmic_axis_are_few_and_round(low, high, ticks):
    assert log_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize(
    "kv",
    [
        *(None, [], {"columns": ["time_s"], "rows": []}),
        kv_rows() | {"rows": kv_rows()["rows"][:1]},
        kv_rows() | {"columns": None},
        kv_rows() | {"block_bytes": 0},
        kv_rows(cpu_blocks=0) | {"gpu_blocks": 0},
    ],
)
def test_the_kv_figure_needs_rows_and_sizes(kv):
    assert FIGURES["kv"](ok_record(samples={"kv": kv}), LIGHT) is None
