"""requests.parquet: figures worked out anew from it, and what a kill or a full disk leaves."""

import errno
import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from harness.config.schema import FakeScript
from harness.config.serve import Arrivals, Lengths, Objectives
from harness.work.request_log import RequestLog, write_parquet
from harness.work.times import RequestTimes
from reports.record.rows import REQUEST_COLUMNS, REQUESTS_PARQUET, REQUESTS_SPOOL, request_rows
from tests.harness.systems.fake.cases import job, latency, run, served, throughput

pytestmark = pytest.mark.usefixtures("clock_start_s")


def read_requests(folder):
    """The requests of a run's folder in the order in which they ended."""
    if (folder / REQUESTS_PARQUET).is_file():
        return pq.read_table(folder / REQUESTS_PARQUET).to_pylist()
    return list(request_rows(folder / REQUESTS_SPOOL))


def close_to(value):
    return pytest.approx(value, rel=1e-9)


def test_figures_of_serving_from_the_rows_alone(tmp_path):
    part = served(
        num_requests=40,
        arrivals=Arrivals(process="poisson", rate_per_s=30, ramp_up_s=0.3),
        prompt=Lengths(tokens=8),
        output=Lengths(distribution="uniform", low=1, high=9),
        slo=Objectives(ttft_ms=45, tpot_ms=12),
        drain_s=0.02,
    )
    script = FakeScript(prefill_ms=[20, 30], decode_ms=[5, 9, 7], refuse_every=9, break_every=7)
    metrics = run(tmp_path, job(part, script))["metrics"]
    assert write_parquet(tmp_path) is None
    rows = read_requests(tmp_path)
    assert len(rows) == 40
    assert {row["part"] for row in rows} == {"serve"}
    counted = [row for row in rows if not row["is_ramp_up"]]
    assert 0 < len(counted) < 40
    done = [row for row in counted if row["error"] is None]
    assert any(row["is_cancelled"] for row in counted)
    assert len(done) < len([row for row in counted if not row["is_cancelled"]])

    def ms(row, index):
        return 1e3 * (row["token_times_s"][index] - row["arrival_s"])

    gaps = [
        1e3 * (b - a) for row in done for a, b in itertools.pairwise(sorted(row["token_times_s"]))
    ]
    assert metrics["serve/ttft_ms/p50"] == close_to(np.percentile([ms(r, 0) for r in done], 50))
    assert metrics["serve/e2e_ms/mean"] == close_to(np.mean([ms(r, -1) for r in done]))
    assert metrics["serve/itl_ms/p50"] == close_to(np.percentile(gaps, 50))
    assert metrics["serve/itl_ms/max"] == close_to(max(gaps))
    arrivals = [row["arrival_s"] for row in counted]
    begin_s, end_s = min(arrivals), max(arrivals)
    wall_s = max(row["token_times_s"][-1] for row in done) - begin_s
    tokens = [time_s for row in rows for time_s in row["token_times_s"]]
    inside = sum(begin_s < time_s <= end_s for time_s in tokens)
    assert metrics["serve/window_output_tok_s"] == close_to(inside / (end_s - begin_s))
    assert metrics["serve/output_tok_s"] == close_to(
        sum(len(row["token_times_s"]) for row in done) / wall_s
    )
    num_good = 0
    for row in done:
        count = len(row["token_times_s"])
        tpot = (ms(row, -1) - ms(row, 0)) / (count - 1) if count > 1 else 0.0
        num_good += ms(row, 0) <= 45 and tpot <= 12
    assert metrics["serve/good_share"] == close_to(num_good / len(counted))
    assert metrics["serve/good_requests_s"] == close_to(num_good / wall_s)


@pytest.mark.parametrize(("part", "count"), [(latency(3, repeats=2), 6), (throughput(3), 3)])
def test_every_timed_request_and_no_warm_up_is_in_the_file(tmp_path, part, count):
    run(tmp_path, job(part, FakeScript(refuse_every=3)))
    assert write_parquet(tmp_path) is None
    assert not (tmp_path / REQUESTS_SPOOL).exists()
    rows = read_requests(tmp_path)
    assert list(rows[0]) == list(REQUEST_COLUMNS)
    assert len(rows) == count
    assert {row["repeat"] for row in rows} == set(range(count // 3))
    assert sum(row["error"] is not None for row in rows) == count // 3
    assert {row["sent_s"] for row in rows} == {None}


def request(name="a"):
    return RequestTimes(
        request_id=name, num_prompt_tokens=3, submit_s=math.nan, token_times_s=[1.5, 2.5]
    )


def test_a_kill_loses_no_request_that_ended_and_a_cut_line_alone(tmp_path):
    log = RequestLog(tmp_path)
    log.of("serve", 2)(request())
    log.flush()
    with (tmp_path / REQUESTS_SPOOL).open("a") as file:
        file.write('{"part": "ser')
    (row,) = read_requests(tmp_path)
    assert (row["request_id"], row["repeat"], row["arrival_s"]) == ("a", 2, None)
    assert write_parquet(tmp_path) is None
    assert read_requests(tmp_path) == [row]


def test_a_file_that_cannot_be_written_is_an_error_and_no_silent_loss(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    log = RequestLog(tmp_path)
    monkeypatch.setattr(log, "_put", refuse)
    log.of("serve", 0)(request())
    with pytest.raises(OSError, match="No space"):
        log.flush()
    log.close()


def test_without_pyarrow_the_rows_stay_and_a_warning_says_so(tmp_path, monkeypatch):
    assert write_parquet(tmp_path) is None  # nothing was timed
    log = RequestLog(tmp_path)
    log.of("latency", 0)(request())
    log.close()
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert "The rows are in requests.jsonl" in write_parquet(tmp_path)
    assert [row["request_id"] for row in read_requests(tmp_path)] == ["a"]
    assert not (tmp_path / REQUESTS_PARQUET).exists()


def test_the_documentation_names_every_column():
    text = (Path(__file__).parents[3] / "docs" / "method.md").read_text()
    for name, (kind, meaning) in REQUEST_COLUMNS.items():
        assert f"| `{name}` | {kind} | {meaning} |" in text
