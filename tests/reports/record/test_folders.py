"""Which folders are runs, in which order, and what unreadable ones say."""

import pytest

from reports.record.folders import is_run_folder, load_points, load_run
from reports.record.record import RecordError
from tests.reports.conftest import write_run
from tests.reports.examples import no_fit_record, ok_record


def test_one_run(tmp_path):
    folder = write_run(ok_record(), tmp_path / "a")
    assert is_run_folder(folder)
    assert load_run(folder) == ok_record()
    assert not is_run_folder(tmp_path)


def test_points_come_in_the_order_of_their_numbers(tmp_path):
    for name in ("10", "2_b", "1_a", "x", "y/0"):
        write_run(ok_record(name=name), tmp_path / name)
    assert [point.record.name for point in load_points(tmp_path)] == [
        "x",
        "y/0",
        "1_a",
        "2_b",
        "10",
    ]


def test_a_run_folder_is_one_point_whatever_lies_in_it(tmp_path):
    folder = write_run(ok_record(), tmp_path / "a")
    write_run(no_fit_record(), folder / "inner")
    assert [point.record.status for point in load_points(tmp_path)] == ["ok"]
    assert [point.folder for point in load_points(folder)] == [folder]


def test_broken_and_unfinished_points_stay_in_the_list(sweep_dir):
    points = load_points(sweep_dir)
    assert [point.folder.name for point in points] == ["0", "1", "2", "10", "11", "12"]
    assert [point.record is None for point in points] == [False] * 4 + [True] * 2
    assert "11/result.json: not valid JSON" in points[4].problem
    assert "no result.json: the run has not ended" in points[5].problem


@pytest.mark.parametrize("load", [load_run, load_points])
def test_folders_that_cannot_be_loaded(tmp_path, load):
    with pytest.raises(RecordError, match="absent: no such folder"):
        load(tmp_path / "absent")
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(RecordError, match="file: expected a folder, got a file"):
        load(tmp_path / "file")
    with pytest.raises(
        RecordError, match=r"(A run writes it when it ends|no result\.json here or in any folder)"
    ):
        load(tmp_path)
