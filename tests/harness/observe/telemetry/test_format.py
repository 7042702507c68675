"""The files: a Parquet schema that does not change by itself, and a spool that survives a kill."""

import json
import re
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.observe.spool import LineTail, one_a_second, write_parquet
from reports.record.rows import (
    COSTLY_COLUMNS,
    SLOW_COLUMNS,
    TELEMETRY_COLUMNS,
    TELEMETRY_PARQUET,
    TELEMETRY_SPOOL,
    read_spool,
    read_telemetry,
)

METHOD = Path(__file__).resolve().parents[4] / "docs" / "method.md"


def spool(folder, rows, tail=""):
    text = "".join(json.dumps(row) + "\n" for row in rows) + tail
    (folder / TELEMETRY_SPOOL).write_text(text)


def test_rows_come_back_as_they_were(tmp_path):
    rows = [
        {"clock_s": 1.5, "time": 9.0, "job": "measure", "rss_bytes": 2**40, "gpu_power_w": 7.25},
        {"clock_s": 1.6, "time": 9.1, "gpu_throttle_bits": 0},
    ]
    spool(tmp_path, rows)
    before = read_telemetry(tmp_path)
    assert write_parquet(tmp_path) is None
    assert not (tmp_path / TELEMETRY_SPOOL).exists()
    assert read_telemetry(tmp_path) == before
    assert before["gpu_power_w"] == [7.25, None]
    assert before["gpu_throttle_bits"] == [None, 0]
    assert list(before) == list(TELEMETRY_COLUMNS)


def test_many_rows_are_written_in_parts(tmp_path):
    spool(tmp_path, [{"clock_s": k / 10} for k in range(13_000)])
    assert write_parquet(tmp_path) is None
    assert read_telemetry(tmp_path)["clock_s"] == [k / 10 for k in range(13_000)]


def test_a_line_that_a_kill_cut_short_is_passed_over(tmp_path):
    spool(tmp_path, [{"clock_s": 1.0}, {"clock_s": 2.0}], tail='{"clock_s": 3.')
    assert read_spool(tmp_path / TELEMETRY_SPOOL)["clock_s"] == [1.0, 2.0]
    assert write_parquet(tmp_path) is None
    assert read_telemetry(tmp_path)["clock_s"] == [1.0, 2.0]


def test_a_field_that_comes_late_is_no_trouble(tmp_path):
    spool(tmp_path, [{"clock_s": 1.0}, {"clock_s": 2.0, "gpu_power_w": 300, "new": 1}])
    assert write_parquet(tmp_path) is None
    assert read_telemetry(tmp_path)["gpu_power_w"] == [None, 300]


def test_no_telemetry_is_none(tmp_path):
    assert read_telemetry(tmp_path) is None
    assert "wrote no row" in write_parquet(tmp_path)


def test_without_pyarrow_the_spool_stays(tmp_path, monkeypatch):
    spool(tmp_path, [{"clock_s": 1.0}])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert "Install pyarrow" in write_parquet(tmp_path)
    assert not (tmp_path / TELEMETRY_PARQUET).exists()
    assert read_telemetry(tmp_path)["clock_s"] == [1.0]


def test_a_row_of_another_type_leaves_the_spool(tmp_path):
    spool(tmp_path, [{"clock_s": "soon"}])
    assert "was not written" in write_parquet(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [TELEMETRY_SPOOL]


def test_the_schema_is_the_same_whatever_was_read(tmp_path):
    types = {"float": pa.float64(), "int": pa.int64(), "text": pa.string()}
    expected = {name: types[column.kind] for name, column in TELEMETRY_COLUMNS.items()}
    for name, rows in {"none": [{}], "some": [{"gpu_power_w": 5, "job": "measure"}]}.items():
        folder = tmp_path / name
        folder.mkdir()
        spool(folder, rows)
        assert write_parquet(folder) is None
        found = pq.read_schema(folder / TELEMETRY_PARQUET)
        assert dict(zip(found.names, found.types, strict=True)) == expected
    assert found.names == list(TELEMETRY_COLUMNS)


def test_the_columns_are_documented_in_their_order():
    text = METHOD.read_text(encoding="utf-8")
    section = text.split("## Telemetry")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*) \|$", section, flags=re.MULTILINE)
    wanted = [(name, column.kind, column.meaning) for name, column in TELEMETRY_COLUMNS.items()]
    slow = {name for name, _, meaning in rows if meaning.endswith(" (s)")}
    costly = {name for name, _, meaning in rows if meaning.endswith(" (c)")}
    assert [(n, kind, re.sub(r" \([sc]\)$", "", text)) for n, kind, text in rows] == wanted
    assert slow == SLOW_COLUMNS
    assert costly == COSTLY_COLUMNS


@pytest.mark.parametrize("pieces", [('{"time": 1}\n{"ti', 'me": 2}\n'), ('{"time": 1}\n',)])
def test_a_tail_gives_each_whole_line_once(tmp_path, pieces):
    path = tmp_path / "lines"
    tail = LineTail(path)
    found = tail.rows()
    for piece in pieces:
        with path.open("a") as file:
            file.write(piece)
        found += tail.rows()
    assert found == [{"time": k + 1} for k in range(len(pieces))]
    assert tail.rows() == []


def test_a_tail_passes_over_what_a_killed_worker_left(tmp_path):
    path = tmp_path / "lines"
    path.write_text('{"time": 1}\n{"ti{"time": 2}\n{"time": 3}\n')
    assert LineTail(path).rows() == [{"time": 1}, {"time": 3}]


def test_one_row_a_second_goes_to_the_tracker():
    rows = [{"time": 50 + k / 10} for k in range(35)]
    kept = one_a_second(rows[:15], 0.0) + one_a_second(rows[15:], 51.0)
    assert [row["time"] for row in kept] == [50, 51, 52, 53]
