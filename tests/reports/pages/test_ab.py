"""The page of a comparison: ratios, sides that failed, links to its runs."""

import pytest

from reports.figures.comparisons import sides_figure
from reports.figures.theme import THEMES
from reports.pages.ab import ab_page, is_ab
from reports.pages.write import write_report
from reports.record.folders import load_run
from reports.record.judging import answer_of
from reports.record.record import RunRecord
from tests.reports.conftest import write_run
from tests.reports.examples import ok_record
from tests.reports.pages.test_write import EVIL, read_html


def row(metric="latency/tpot_ms/mean", **changes):
    fields = {
        "metric": metric,
        "label": "time per output token of a request alone",
        "better": "lower",
        "num_pairs": 4,
        "a": 5.0,
        "b": 6.0,
        "ratio": 1.2,
        "low": 1.1,
        "high": 1.3,
        "aa_ratio": 1.0,
        "aa_low": 0.99,
        "aa_high": 1.01,
        "resolution": 0.02,
        "verdict": "b is higher",
    }
    return fields | changes


def side(**changes):
    fields = {"overrides": ["offload=none"], "status": "ok", "error": None, "num_runs": 5}
    return fields | {"first_run": {"latency/tpot_ms/mean": 5.0}} | changes


def comparison(**changes):
    sample = {
        "a": side(),
        "b": side(overrides=["offload=uva", "x=<b>"]),
        "runs": [
            {
                "folder": "runs/00-ab1-a",
                "phase": "ab",
                "pair": 1,
                "side": "a",
                "run_id": "r",
                "status": "ok",
                "valid": True,
                "started_at": None,
                "duration_s": 3.0,
                "metrics": {"latency/tpot_ms/mean": 5.0},
            }
        ],
        "rows": [row(), row("memory/host_pinned_gib", ratio=None, low=None, high=None, a=0.0)],
        "per_request": [{"quantity": "ttft_ms", "num": 3, "least": 1, "median": 1.5, "most": 2}],
        "tokens": {"latency": {"num_compared": 3, "num_equal": 3, "first_unequal": None}},
    }
    samples = {"ab": sample | changes}
    return RunRecord(run_id="r", name="ab: none against uva", status="ok", samples=samples)


def test_ratios_come_first_with_their_intervals_and_the_noise():
    page = ab_page(comparison(), {"runs/00-ab1-a": "runs/00-ab1-a/report.html"})
    (table,) = page.sections[0].tables
    assert table.rows[0] == (
        *("time per output token of a request alone (ms)", "1.200", "b is higher"),
        *("5.00", "6.00", "1.100 to 1.300", "2.00 %", "4"),
    )
    assert table.rows[1][1] == "n/a"
    assert table.rows[1][5:7] == ("n/a", "2.00 %")
    assert page.cards[0].value == "1.200"
    assert page.cards[0].note == "5.00 against 6.00 ms; b is higher"
    runs = next(section for section in page.sections if section.title == "Runs").tables[0]
    assert runs.links == {0: "runs/00-ab1-a/report.html"}


def test_a_side_that_failed_shows_its_error_and_the_other_one_s_figures():
    bad = side(status="no_fit", error={"type": "E", "message": "3 GiB over"}, first_run={})
    record = comparison(b=bad, rows=[], per_request=[], tokens={})
    titles = {section.title: section for section in ab_page(record, {}).sections}
    assert "Ratios" not in titles
    sides, first = titles["Sides"].tables
    assert sides.rows[1][2:] == ("no_fit", "5", "3 GiB over")
    assert first.rows == [("latency/tpot_ms/mean", "5.00", "ms")]
    assert sides_figure(record, THEMES["light"]) is None


@pytest.mark.thorough
def test_intervals_beyond_the_axis_and_without_noise_are_drawn():
    rows = [row(low=0.001, high=900.0, ratio=50.0, resolution=None), row(low=None, high=None)]
    for theme in (THEMES["light"], THEMES["light"].narrow):
        assert sides_figure(comparison(rows=rows), theme).png().startswith(b"\x89PNG")


def test_ratios_far_from_1_are_in_their_place_on_a_logarithmic_axis():
    rows = [row(low=6.0, high=9.0, ratio=7.8, resolution=None), row(low=0.9, high=1.0)]
    text = sides_figure(comparison(rows=rows), THEMES["light"]).svg().decode()
    for tick in ("5x", "10x", "1x"):
        assert f">{tick}<" in text


@pytest.mark.thorough
def test_the_report_of_a_folder_is_that_of_the_comparison(tmp_path):
    folder = write_run(comparison(a=side(overrides=[EVIL])), tmp_path / "ab")
    write_run(ok_record(), folder / "runs" / "00-ab1-a")
    (folder / "runs" / "00-ab1-a" / "report.html").touch()
    paths = write_report(folder)
    assert folder / "figures" / "ratios.png" in paths
    page = read_html(folder)
    assert any("00-ab1-a/report.html" in str(value) for *_, value in page.attributes)
    assert is_ab(load_run(folder))
    assert not is_ab(ok_record())


def test_no_difference_is_not_green_and_its_interval_is_the_large_figure():
    unsure = row(
        low=0.93, high=1.08, ratio=1.002, resolution=12.0, verdict="no difference resolved"
    )
    page = ab_page(comparison(rows=[unsure]), {})
    assert page.verdict.kind == "grey"
    assert page.verdict.answer == "No difference found: noise is a factor of 13.0"
    (card,) = page.cards
    assert (card.value, card.kind) == ("0.930 to 1.080", "grey")
    assert page.sections[0].tables[0].kinds == {0: "grey"}


def test_a_difference_is_said_first_with_its_interval():
    page = ab_page(comparison(rows=[row()]), {})
    assert page.verdict.answer == "Side b against a: TPOT mean 1.200 times (1.100 to 1.300)"
    assert page.cards[0].kind == "worse"
    assert page.sections[0].tables[0].kinds == {0: "worse"}
    assert answer_of(
        [row(low=None, high=None, resolution=None, verdict="one pair: no interval")]
    ) == ("No difference found: one pair has no interval (raise ab.pairs)")
