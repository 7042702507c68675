"""The table at the end of a sweep."""

from harness.config.schema import SweepContext
from harness.sweep.track import sweep_lines
from reports.record.record import RunRecord


def record(name, metrics, status="ok", valid=None):
    return RunRecord(
        run_id=name,
        name=name,
        status=status,
        valid=valid,
        overrides=["+model=a", name],
        metrics=metrics,
    )


def lines(tmp_path, *records):
    folders = [tmp_path / str(index) for index in range(len(records))]
    sweep = SweepContext(sweep_id="s", folder=tmp_path, index=0, total=len(records))
    return sweep_lines(records, folders, sweep)


def test_columns_are_those_that_some_point_has(tmp_path):
    found = lines(
        tmp_path,
        record("rate=1", {"serve/good_share": 1.0, "serve/ttft_ms/mean": 12.5}),
        record("rate=9", {"serve/good_share": None}, status="failed"),
    )
    assert found[2].split() == [
        *("point", "choices", "status", "good", "requests", "%"),
        *("TTFT", "from", "arrival", "mean", "ms", "folder"),
    ]
    assert found[3].split() == ["0", "rate=1", "ok", "100.0", "12.5", "0"]
    assert found[4].split() == ["1", "rate=9", "failed", "-", "-", "1"]


def test_a_point_that_is_not_valid_is_told(tmp_path):
    found = lines(tmp_path, record("a", {"load/total_s": 3.0}, valid=False))
    assert found[3].split() == ["0", "a", "ok,", "not", "valid", "3.00", "0"]


def test_points_of_other_scenarios_show_their_figures(tmp_path):
    found = lines(tmp_path, record("a", {"throughput/output_tok_s": 20.0, "load/total_s": 3.0}))
    assert found[2].split() == [
        *("point", "choices", "status", "output", "tok/s", "load", "s", "folder")
    ]
    assert "serve" not in found[2]
