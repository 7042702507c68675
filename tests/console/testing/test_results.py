"""What records say, as the registry keeps it."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from console.registry.database import Database
from console.registry.results import Results
from console.testing.export import as_csv, as_json
from console.testing.results import Outcome, outcome_of
from console.testing.tests import Ask, Tests
from reports.record.record import RunRecord
from tests.console.testing.conftest import StandIn, record

ROW = {
    "metric": "throughput/output_tok_s",
    "label": "output tokens",
    "better": "higher",
    "num_pairs": 1,
    "a": 100.0,
    "b": 25.0,
    "ratio": 0.25,
    "low": None,
    "high": None,
    "aa_ratio": None,
    "aa_low": None,
    "aa_high": None,
    "resolution": None,
    "verdict": "one pair: no interval",
}


def ab_record(*, b: str = "ok", rows: list[dict[str, Any]] | None = None) -> RunRecord:
    """The record of a comparison whose side b ended so."""
    error = {"type": "CapacityError", "message": "GPU: 3 GiB short.\nMore."} if b != "ok" else None
    sample = {
        "a": {"status": "ok", "error": None},
        "b": {"status": b, "error": error},
        "runs": [
            {"folder": "runs/00-ab1-a", "side": "a"},
            {"folder": "runs/01-ab1-b", "side": "b"},
        ],
        "rows": rows or [],
        "tokens": {
            "throughput": {"num_compared": 8, "num_equal": 6},
            "latency": {"num_compared": 4, "num_equal": 4},
        },
    }
    return record(b, samples={"ab": sample}, metrics={"ab/throughput_output_tok_s_ratio": 0.25})


def outcome(folder: Path, records: dict[str, RunRecord], kind: str, **profiles: int) -> Outcome:
    for name, each in records.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        each.write(folder / name / "result.json")
    return outcome_of(folder, kind, profiles, 0)


def test_a_test_has_a_row_for_each_part(tmp_path: Path) -> None:
    found = outcome(tmp_path, {".": record()}, "test", p=7)
    assert (found.status, found.reason) == ("finished", None)
    assert {row.part: row.metrics for row in found.performance} == {
        "load": {"load/total_s": 7.5},
        "throughput": {"throughput/output_tok_s": 100.0},
        "latency": {"latency/tpot_ms/mean": 10.0},
        "memory": {"memory/gpu_peak_gib": 2.0},
    }
    assert {(row.profile_id, row.card) for row in found.performance} == {(7, "RTX 9")}


@pytest.mark.parametrize(
    ("status", "kept"),
    [
        ("partial", "partial"),
        ("no_fit", "no_fit"),
        ("oom", "failed"),
        ("timeout", "failed"),
        ("killed", "interrupted"),
    ],
)
def test_statuses_keep_their_reason(status: str, kept: str, tmp_path: Path) -> None:
    found = outcome(tmp_path, {".": record(status)}, "test", p=7)
    assert found.status == kept
    assert found.reason == f"it is {status}\nand more"
    assert bool(found.performance) == (status == "partial")


def test_figures_that_do_not_count_say_why(tmp_path: Path) -> None:
    found = outcome(tmp_path, {".": record(valid=False, reasons=["too hot"])}, "test", p=7)
    assert (found.status, found.reason) == ("finished", "too hot")
    cpu = {"gpu": None, "cpu": {"name": "Z80"}}
    [*_, row] = outcome(tmp_path / "c", {".": record(environment=cpu)}, "test", p=7).performance
    assert row.card == "CPU: Z80"


def test_an_ab_is_a_comparison_and_rows_for_each_run(tmp_path: Path) -> None:
    records = {".": ab_record(rows=[ROW]), "runs/00-ab1-a": record(), "runs/01-ab1-b": record()}
    found = outcome(tmp_path, records, "ab", a=1, b=2)
    assert found.status == "finished"
    compared = found.comparison
    assert compared is not None
    assert (compared.tokens_equal, compared.tokens_total) == (4, 4)
    [row] = compared.rows
    assert (row["a"], row["b"], row["ratio"], row["unit"]) == (100.0, 25.0, 0.25, "tok/s")
    assert (row["low"], row["high"]) == (None, None)
    assert [row.profile_id for row in found.performance] == [1] * 4 + [2] * 4


def test_a_side_that_does_not_start_is_a_result(tmp_path: Path) -> None:
    records = {
        ".": ab_record(b="no_fit"),
        "runs/00-ab1-a": record(),
        "runs/01-ab1-b": record("no_fit"),
    }
    found = outcome(tmp_path, records, "ab", a=1, b=2)
    assert (found.status, found.reason) == ("finished", None)
    assert found.comparison is not None
    assert found.comparison.verdict == "side b does not fit: GPU: 3 GiB short."
    assert found.comparison.rows == []
    assert {row.profile_id for row in found.performance} == {1}


def test_a_sweep_is_partial_where_a_profile_has_no_figures(tmp_path: Path) -> None:
    records = {"0": record(), "1": record("no_fit")}
    found = outcome(tmp_path, records, "sweep", p=1, q=2)
    assert found.status == "partial"
    assert found.reason == "q: it is no_fit\nand more"
    assert {row.profile_id for row in found.performance} == {1}
    assert outcome(tmp_path, records, "sweep", p=1, q=2, r=3).status == "interrupted"
    assert outcome(tmp_path / "n", {"0": record("no_fit")}, "sweep", p=1).status == "no_fit"


def test_without_a_record_the_refusal_or_the_log_says_why(tmp_path: Path) -> None:
    (tmp_path / "test.log").write_text("start\nno disk\n\n", encoding="utf-8")
    assert outcome_of(tmp_path, "test", {"p": 1}, 1).reason == "no disk"
    found = outcome_of(tmp_path, "ab", {"p": 1, "q": 2}, -9)
    assert found.status == "interrupted"
    assert found.reason == "the harness was ended by signal 9 without a record"
    for code, status, reason in (
        (130, "interrupted", "the harness was ended without a record"),
        (2, "failed", "x: y"),
    ):
        document = json.dumps({"kind": "error", "message": "x: y", "exit_code": code})
        (tmp_path / "test.json").write_text(document, encoding="utf-8")
        found = outcome_of(tmp_path, "sweep", {"p": 1}, None)
        assert (found.status, found.reason) == (status, reason)


@pytest.mark.thorough
def test_exports_hold_the_figures(database: Database, tests: Tests, stand_in: StandIn) -> None:
    stand_in.plays(records={".": record()})
    test = tests.run(tests.queue("toy", Ask()).id)
    found = json.loads(as_json(database, test.id))
    assert found["model"] == "toy"
    assert found["test"]["settings"]["profiles"] == {"default": {}}
    rows = list(csv.DictReader(io.StringIO(as_csv(database, test.id))))
    first = {"profile": "default", "metric": "load/total_s", "unit": "s", "value": "7.5"}
    assert first.items() <= rows[0].items()
    stand_in.plays(records={".": ab_record(rows=[ROW]), "runs/00-ab1-a": record()})
    test = tests.run(tests.queue("toy", Ask(kind="ab", profiles=["default", "uva"])).id)
    [row] = csv.DictReader(io.StringIO(as_csv(database, test.id)))
    assert (row["profile_a"], row["profile_b"]) == ("default", "uva")
    assert (row["ratio"], row["low"]) == ("0.25", "")
    assert len(Results(database).comparisons()) == 1
