"""The figure of experts."""

import pytest

from reports.figures.counters import experts_trace
from reports.figures.run import FIGURES
from tests.reports.examples import expert_rows, ok_record
from tests.reports.figures.pictures import LIGHT, share_near


def test_hits_and_rates_are_those_between_two_rows():
    trace = experts_trace(ok_record(samples={"experts": expert_rows(3)}))
    assert trace.part == "latency"
    assert trace.over_time() == [
        (0, 1, pytest.approx(32 / 52), pytest.approx(2**30 / 1e11)),
        (1, 2, pytest.approx(36 / 56), pytest.approx(2**30 / 1e11)),
    ]
    assert trace.by_layer() == [(1, 1.0, 0), (2, 0.0, pytest.approx(0.02)), (5, None, 0)]


@pytest.mark.thorough
def test_the_figure_has_lines_and_bars():
    drawing = FIGURES["experts"](ok_record(samples={"experts": expert_rows()}), LIGHT)
    assert share_near(drawing, LIGHT.accent) > 0.02
    assert share_near(drawing, LIGHT.second) > 0.0005


def test_moments_without_experts_have_no_share():
    rows = expert_rows()
    rows["rows"] = [[row[0], 7, 0, 0] for row in rows["rows"]]
    record = ok_record(samples={"experts": rows})
    assert {share for _, _, share, _ in experts_trace(record).over_time()} == {None}
    assert FIGURES["experts"](record, LIGHT) is not None


@pytest.mark.parametrize(
    "found",
    [
        *(None, [], {"columns": ["time_s"], "rows": []}),
        expert_rows() | {"rows": expert_rows()["rows"][:1]},
        expert_rows() | {"columns": ["time_s", "hits", "misses"]},
        expert_rows() | {"layers": None},
    ],
)
def test_the_figure_needs_rows_and_layers(found):
    assert FIGURES["experts"](ok_record(samples={"experts": found}), LIGHT) is None
