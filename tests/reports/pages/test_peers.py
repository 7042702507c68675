"""Native points of a sweep beside those of peers."""

from reports.pages.sweep import peers_section
from reports.pages.write import write_sweep_report
from tests.reports.conftest import write_run
from tests.reports.examples import config, ok_record
from tests.reports.pages.test_write import read_html
from tests.reports.test_compare import peer_record, rows_of


def test_a_sweep_holds_native_points_against_peers(tmp_path):
    nearest, far = ok_record(name="near"), ok_record(name="far", config=config())
    far.config["gpu"]["memory_gib"] = 24.0
    far.config["engine"]["max_num_seqs"] = 8
    rows = rows_of(tmp_path, far, nearest, peer_record())
    (table,) = peers_section(rows).tables
    (row,) = table.rows
    assert row[:3] == ("1. near / 2. peer", "accelerate", "valid")
    ratios = dict(zip(table.columns[2:], row[2:], strict=True))
    assert ratios["output"] == "2.00"
    assert ratios["TPOT p50"] == "2.00"
    slow = peer_record()
    slow.valid = False
    (table,) = peers_section(rows_of(tmp_path, nearest, slow)).tables
    assert table.rows[0][2] == "accelerate not valid"
    assert table.kinds == {0: "warn"}


def test_peers_of_other_work_and_sweeps_without_peers_have_no_section(tmp_path):
    assert peers_section(rows_of(tmp_path, ok_record(), ok_record())) is None
    peer = peer_record()
    peer.config["scenario"] = {"name": "quick", "latency": {"seed": 1}}
    assert peers_section(rows_of(tmp_path, ok_record(), peer)) is None


def test_the_page_of_a_sweep_shows_its_peers(tmp_path, monkeypatch):
    monkeypatch.setattr("reports.pages.write.SWEEP_FIGURES", {})  # they are not looked at
    write_run(ok_record(), tmp_path / "sweep" / "0")
    write_run(peer_record(), tmp_path / "sweep" / "1")
    write_sweep_report(tmp_path / "sweep")
    assert "Native against peers" in read_html(tmp_path / "sweep", "sweep.html").words
