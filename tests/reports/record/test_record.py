"""The file format and the statistics."""

import json
import math
import os
import stat

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports.record.record import (
    SAMPLE_FLOORS,
    STATUSES,
    RecordError,
    RunRecord,
    percentile,
    summarise,
)

FINITE = st.floats(min_value=-1e9, max_value=1e9, allow_nan=False)


def small_record(**changes):
    return RunRecord(**{"run_id": "r1", "name": "one", "status": "ok", **changes})


@settings(deadline=None, max_examples=60)
@given(values=st.lists(FINITE, min_size=1, max_size=40), q=st.floats(min_value=0, max_value=100))
def test_percentile_is_numpys_linear(values, q):
    expected = float(np.percentile(values, q, method="linear"))
    assert percentile(values, q) == pytest.approx(expected, rel=1e-12, abs=1e-6)


def test_percentile_by_hand():
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([10], 99) == 10.0
    assert percentile([1, 2, 3, 4, 5], 90) == pytest.approx(4.6)
    assert percentile([], 50) is None


def test_percentile_refuses_bad_input():
    with pytest.raises(ValueError, match=r"q: expected 0 to 100, got 101"):
        percentile([1.0], 101)
    with pytest.raises(ValueError, match=r"values\[1\]: expected a finite number, got nan"):
        percentile([1.0, math.nan], 50)


def test_summary_of_nothing_is_null_not_zero():
    assert summarise([]) == dict.fromkeys(
        ("mean", "p50", "p90", "p95", "p99", "min", "max", "std"), None
    )


@pytest.mark.parametrize(("q", "floor"), sorted(SAMPLE_FLOORS.items()))
def test_percentiles_follow_their_floor(q, floor):
    assert summarise([1.0] * (floor - 1))[f"p{q}"] is None
    assert summarise([1.0] * floor)[f"p{q}"] == 1.0


def test_floors_are_the_published_ones():
    assert dict(SAMPLE_FLOORS) == {50: 11, 90: 64, 95: 130, 99: 662}


def test_summary_values():
    one = summarise([3.0])
    assert (one["mean"], one["min"], one["max"], one["std"]) == (3.0, 3.0, 3.0, None)
    values = list(range(1, 101))
    summary = summarise(values)
    assert summary["mean"] == 50.5
    assert summary["p90"] == pytest.approx(np.percentile(values, 90))
    assert summary["std"] == pytest.approx(np.std(values, ddof=1))


def test_round_trip_and_key_order(tmp_path):
    record = small_record(
        error={"type": "X", "message": "m", "phase": "load", "traceback": None},
        valid=False,
        reasons=["too few samples"],
        duration_s=1.5,
        metrics={"latency/ttft_ms/p50": None, "load/total_s": 2},
        samples={"latency": [{"ttft_ms": 1.0, "itl_ms": []}]},
        config={"a": {"b": [1, None, True]}},
    )
    path = tmp_path / "result.json"
    record.write(path)
    assert RunRecord.read(path) == record
    assert next(iter(json.loads(path.read_text()))) == "schema_version"
    assert json.loads(path.read_text())["metrics"]["latency/ttft_ms/p50"] is None


def test_write_is_whole_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "result.json"
    small_record(name="first").write(path)
    with pytest.raises(RecordError, match="nan"):
        small_record(metrics={"load/total_s": math.nan}).write(path)
    assert RunRecord.read(path).name == "first"
    small_record(name="second").write(path)
    assert RunRecord.read(path).name == "second"
    assert [item.name for item in tmp_path.iterdir()] == ["result.json"]


def test_failed_rename_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    small_record(name="first").write(path)

    def refuse(*_args, **_keywords):
        raise OSError("no room")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="no room"):
        small_record(name="second").write(path)
    assert RunRecord.read(path).name == "first"
    assert [item.name for item in tmp_path.iterdir()] == ["result.json"]


def test_written_file_follows_the_umask(tmp_path):
    old = os.umask(0o022)
    try:
        small_record().write(tmp_path / "result.json")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "result.json").stat().st_mode) == 0o644


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metrics": {"load/total_s": math.nan}}, r"metrics.load/total_s: .* got nan"),
        ({"metrics": {"load/total_s": math.inf}}, r"metrics.load/total_s: .* got inf"),
        ({"metrics": {"load/total_s": True}}, r"load/total_s: expected a number or null, got True"),
        ({"metrics": {"load/total_s": "3"}}, r"expected a number or null, got '3'"),
        ({"samples": {"latency": [{"itl_ms": [math.inf]}]}}, r"samples.latency\[0\].itl_ms\[0\]"),
        ({"config": {1: 2}}, r"config: expected text keys, got 1"),
        ({"config": {"path": object()}}, r"config.path: .* got object"),
        ({"status": "fine"}, r"status: expected one of ok, partial, no_fit, .* got 'fine'"),
        ({"valid": "yes"}, r"valid: expected bool or null, got 'yes'"),
        ({"reasons": [3]}, r"expected text items, got 3"),
        ({"error": {"message": "m"}}, r"error: expected the keys type and message"),
        ({"duration_s": "1"}, r"duration_s: expected a number or null"),
        ({"schema_version": 2}, r"schema_version: expected 1, got 2"),
    ],
)
def test_bad_records_are_refused_by_name(changes, message):
    with pytest.raises(RecordError, match=message):
        small_record(**changes).to_json()


def document(**changes):
    return {**json.loads(small_record().to_json()), **changes}


@pytest.mark.parametrize("version", [0, 2, "1", None, True])
def test_unknown_schema_version_is_refused(version):
    with pytest.raises(RecordError, match="schema_version: expected 1, got"):
        RunRecord.from_json(json.dumps(document(schema_version=version)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object, got list"),
        (json.dumps({"schema_version": 1, "name": "x"}), r"missing keys \['run_id', 'status'\]"),
        (json.dumps(document(extra=1)), r"unknown keys \['extra'\]"),
        (json.dumps(document(metrics={"a": math.nan})), "found NaN; expected a number or null"),
        (json.dumps(document(samples={"a": -math.inf})), "found -Infinity"),
        (json.dumps(document(samples={"a": 1})).replace(": 1}", ": 1e999}"), "samples.a: .* inf"),
        (json.dumps(document(metrics=None)), "metrics: expected dict, got None"),
    ],
)
def test_bad_files_are_refused(text, message):
    with pytest.raises(RecordError, match=message):
        RunRecord.from_json(text)


def test_read_names_the_file(tmp_path):
    with pytest.raises(RecordError, match=r"absent/result\.json: no such file"):
        RunRecord.read(tmp_path / "absent" / "result.json")
    (tmp_path / "result.json").write_bytes(b"\xff\xfe")
    with pytest.raises(RecordError, match=r"result\.json: cannot be read"):
        RunRecord.read(tmp_path / "result.json")
    (tmp_path / "result.json").write_text("{", encoding="utf-8")
    with pytest.raises(RecordError, match=r"result\.json: not valid JSON"):
        RunRecord.read(tmp_path / "result.json")


def test_every_status_is_a_record():
    for status in STATUSES:
        assert RunRecord.from_json(small_record(status=status).to_json()).status == status
