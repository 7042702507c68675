"""Figures of several runs: what they show, and nothing without data."""

import pytest

from reports.compare import sweep_rows
from reports.figures.comparisons import SWEEP_FIGURES, frontier, ratio_ticks
from reports.record.folders import Point
from tests.reports.conftest import sweep_records
from tests.reports.examples import no_fit_record, ok_record
from tests.reports.figures.pictures import LIGHT, pixels, share_near


def rows_of(records, tmp_path):
    points = [
        Point(folder=tmp_path / name, record=record, problem=None if record else "broken")
        for name, record in records.items()
    ]
    return sweep_rows(points)


@pytest.mark.thorough
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


@pytest.mark.thorough
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


def test_ticks_of_ratios_have_room_and_name_1():
    assert ratio_ticks(0.5, 2.2) == [0.5, 0.8, 1, 1.25, 2]
    assert ratio_ticks(0.9, 1.3) == [0.9, 1, 1.1, 1.25]
    assert ratio_ticks(0.01, 100) == [0.01, 0.1, 1, 10, 100]
