"""Comparisons of runs of the same work: ratios, refusals, pages and files."""

import csv

import pytest

from reports.__main__ import main
from reports.compare import (
    UnlikeError,
    check_alike,
    compare_rows,
    compared_metrics,
    ratio,
    ratio_interval,
)
from reports.figures.comparisons import ratio_ticks
from reports.pages.compare import compare_page
from reports.pages.sweep import peers_section
from reports.pages.write import write_compare_report, write_sweep_report
from reports.record.metrics import METRICS
from reports.record.record import RecordError
from tests.reports.conftest import write_run
from tests.reports.examples import config, no_fit_record, ok_record
from tests.reports.pages.test_write import read_html


def peer_record(factor=2.0, **changes):
    """A run of accelerate whose times are `factor` times those of the usual record."""
    record = ok_record(name="peer", config=config(), **changes)
    record.config["system"] = {"kind": "accelerate"}
    for name, value in record.metrics.items():
        if value is not None and name.startswith("latency/"):
            record.metrics[name] = value * factor
        elif value is not None and name.startswith("throughput/"):
            record.metrics[name] = value / factor
    return record


def rows_of(tmp_path, *records):
    return compare_rows([(tmp_path / str(i), record) for i, record in enumerate(records)])


def named_settings(runs):
    """The settings that the page of a comparison says differ, with their values."""
    (section,) = [s for s in compare_page(runs, {}).sections if s.title == "What differs"]
    return {line[0]: line[1:] for table in section.tables for line in table.rows}


def test_ratios_are_to_the_first_run(tmp_path):
    base, peer = ok_record(), peer_record()
    assert ratio(base.metrics, peer.metrics, "latency/tpot_ms/p50") == pytest.approx(2)
    assert ratio(base.metrics, peer.metrics, "throughput/output_tok_s") == pytest.approx(0.5)
    assert ratio(base.metrics, peer.metrics, "no/such") is None
    peer.metrics["memory/budget_margin_gib"], base.metrics["memory/budget_margin_gib"] = -1, 2
    assert ratio(base.metrics, peer.metrics, "memory/budget_margin_gib") is None
    page = compare_page(rows_of(tmp_path, base, peer), {})
    table = page.sections[0].tables[0]
    found = {row[0]: row[1] for row in table.rows}
    assert found["output"] == "0.500"
    assert found["TPOT p50"] == "2.000"
    assert found["load"] == "1.000"
    kinds = {table.rows[place][0]: kind for place, kind in table.kinds.items()}
    assert kinds["output"] == kinds["TPOT p50"] == "worse"
    assert "load" not in kinds
    assert page.verdict.kind == "good"


def test_an_interval_of_a_ratio_holds_all_ratios_of_the_means():
    base, other = ok_record(), ok_record()
    name = "throughput/output_tok_s"
    assert ratio_interval(base.metrics, other.metrics, name) is None
    base.metrics |= {f"{name}/ci95_low": 90.0, f"{name}/ci95_high": 110.0}
    other.metrics |= {f"{name}/ci95_low": 180.0, f"{name}/ci95_high": 220.0}
    assert ratio_interval(base.metrics, other.metrics, name) == pytest.approx((180 / 110, 220 / 90))


def test_a_ratio_within_its_interval_of_one_is_neither_better_nor_worse(tmp_path):
    name = "throughput/output_tok_s"
    records = [ok_record(), ok_record(name="b")]
    for record, mean in zip(records, (100.0, 103.0), strict=True):
        record.metrics |= {name: mean, f"{name}/ci95_low": mean - 9, f"{name}/ci95_high": mean + 9}
    table = compare_page(rows_of(tmp_path, *records), {}).sections[0].tables[0]
    assert table.rows[0][0] == "output"
    assert table.rows[0][-1] == "0.862 to 1.231"
    assert 0 not in table.kinds


def test_a_latency_with_intervals_of_its_mean_is_compared_by_its_mean():
    base, other = ok_record(), ok_record()
    assert METRICS["latency/ttft_ms"].at("p50") in compared_metrics([base.metrics, other.metrics])
    for record, mean in ((base, 20.0), (other, 40.0)):
        record.metrics |= {"latency/ttft_ms/mean": mean}
        record.metrics |= {"latency/ttft_ms/ci95_low": mean - 4, "latency/ttft_ms/ci95_high": 50.0}
    assert METRICS["latency/ttft_ms"].at("mean") in compared_metrics([base.metrics, other.metrics])
    assert ratio_interval(base.metrics, other.metrics, "latency/ttft_ms/mean") == pytest.approx(
        (36 / 50, 50 / 16)
    )
    assert ratio_interval(base.metrics, other.metrics, "latency/ttft_ms/p50") is None


def test_ticks_of_ratios_have_room_and_name_1():
    assert ratio_ticks(0.5, 2.2) == [0.5, 0.8, 1, 1.25, 2]
    assert ratio_ticks(0.9, 1.3) == [0.9, 1, 1.1, 1.25]
    assert ratio_ticks(0.01, 100) == [0.01, 0.1, 1, 10, 100]


def test_files_are_compared_by_what_they_hold(tmp_path):
    records = [ok_record(name=name, config=config()) for name in "abc"]
    for record, path, digest in zip(records, "xyx", ("1" * 64, "1" * 64, "2" * 64), strict=True):
        record.config["scenario"]["latency"] = {"prompts_file": path}
        record.effective = record.effective | {"inputs": {"latency.prompts_file": digest}}
    check_alike(rows_of(tmp_path, *records[:2]))
    with pytest.raises(
        UnlikeError, match=r"latency.prompts_file: content 1+ in a, content 2+ in c"
    ):
        check_alike(rows_of(tmp_path, records[0], records[2]))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("scenario.latency.output_tokens", 64, "scenario.latency.output_tokens"),
        ("scenario.throughput.seed", 3, "scenario.throughput.seed: null in"),
        ("model.num_layers", 16, "model.num_layers: 32 in"),
        ("model.name", "other", "model.name"),
    ],
)
def test_unlike_work_is_refused_by_name(tmp_path, path, value, words):
    other = ok_record(name="b", config=config())
    node = other.config
    *above, last = path.split(".")
    for key in above:
        node = node.setdefault(key, {})
    node[last] = value
    with pytest.raises(UnlikeError, match=words):
        check_alike(rows_of(tmp_path, ok_record(), other))


def test_a_gpu_and_its_emulation_are_unlike(tmp_path):
    other = ok_record(name="b")
    other.environment = {**other.environment, "emulated": True}
    with pytest.raises(UnlikeError, match="emulation on a CPU"):
        check_alike(rows_of(tmp_path, ok_record(), other))


def test_offload_system_and_budget_may_differ_and_are_named(tmp_path):
    peer = peer_record()
    peer.config["gpu"]["memory_gib"] = 24.0
    peer.config["silence_s"] = 7200.0
    rows = rows_of(tmp_path, ok_record(), peer)
    check_alike(rows)
    keys = named_settings(rows)
    assert keys["gpu.memory_gib"] == ("16.0", "24.0")
    assert keys["system.kind"] == ("n/a", "accelerate")
    assert not any(key.startswith(("tracking", "mode", "silence_s")) for key in keys)


def test_runs_that_failed_or_were_not_checked_are_named(tmp_path):
    unchecked = ok_record(name="b", valid=None)
    page = compare_page(rows_of(tmp_path, ok_record(), unchecked), {})
    assert page.verdict.kind == "warn"
    assert page.verdict.lines[0].startswith("b: not judged")
    failed = ok_record(name="c", status="oom", error={"type": "OOM", "message": "full"})
    page = compare_page(rows_of(tmp_path, ok_record(), failed), {})
    assert page.verdict.kind == "bad"
    assert "c: oom. OOM: full" in page.verdict.lines


def test_models_of_equal_sizes_are_the_same_work_and_named(tmp_path):
    one, other = ok_record(config=config()), ok_record(config=config())
    for record, name in ((one, "first"), (other, "second")):
        record.config["model"] = {"name": name, "spec": {"hidden_size": 8}}
    rows = rows_of(tmp_path, one, other)
    check_alike(rows)
    assert list(named_settings(rows)) == ["model.name"]


def test_a_run_without_figures_leaves_no_empty_table(tmp_path):
    page = compare_page(rows_of(tmp_path, ok_record(), no_fit_record(config=config())), {})
    assert "nothing to divide" in page.sections[0].text[0]
    assert all(table.rows for section in page.sections for table in section.tables)
    assert page.verdict.kind == "bad"


def test_the_folder_of_a_sweep_is_not_that_of_a_run(tmp_path, capsys):
    write_run(ok_record(), tmp_path / "sweep" / "0")
    write_run(ok_record(), tmp_path / "run")
    assert main(["compare", str(tmp_path / "run"), str(tmp_path / "sweep")]) == 2
    error = capsys.readouterr().err
    assert "got that of a sweep" in error
    assert str(tmp_path / "sweep" / "0") in error


def test_metrics_are_those_that_two_runs_have():
    names = [metric.name for metric in compared_metrics([ok_record().metrics, ok_record().metrics])]
    assert "latency/ttft_ms/p50" in names
    assert "latency/ttft_ms/mean" not in names
    alone = ok_record(metrics={"load/total_s": 1.0})
    assert compared_metrics([{}, alone.metrics]) == []


def test_equal_names_are_told_apart_by_their_run(tmp_path):
    records = [ok_record(run_id="r1"), ok_record(run_id="r2")]
    labels = [row.label for row in rows_of(tmp_path, *records)]
    assert [label.split()[-1] for label in labels] == ["r1", "r2"]


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["o=none,g=8", "o=uva,g=8"], ["o=none", "o=uva"]),
        (["o=none,g=8", "o=uva,g=16"], ["o=none,g=8", "o=uva,g=16"]),
        (["o=uva,g=8", "o=uva"], ["o=uva,g=8", "o=uva"]),
        (["v=[1,2],g=1", "v=[3,2],g=1"], ["v=[1,2],g=1", "v=[3,2],g=1"]),
    ],
)
def test_labels_leave_out_settings_that_all_runs_have(tmp_path, names, labels):
    rows = rows_of(tmp_path, *(ok_record(name=name) for name in names))
    assert [row.label for row in rows] == labels


def test_long_labels_are_shortened_and_told_apart(tmp_path):
    same = [ok_record(name="n" * 70 + middle + "n" * 70, run_id=middle) for middle in "ab"]
    first, second = (row.label for row in rows_of(tmp_path, *same))
    assert len(first) < 60
    assert (first[-2:], second[-2:]) == (" a", " b")


def test_files_of_a_comparison(tmp_path, capsys):
    peer = peer_record(run_id="other")
    folders = [write_run(ok_record(), tmp_path / "a"), write_run(peer, tmp_path / "b")]
    out = tmp_path / "out"
    assert main(["compare", *map(str, folders), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "| output | 0.500 |" in printed
    page = read_html(out, "compare.html")
    assert "accelerate" in page.words
    assert "the same work, all runs ok and valid" in page.words
    with (out / "compare.csv").open(encoding="utf-8") as file:
        rows = {row[0]: row for row in csv.reader(file)}
    assert rows["metric"][3].startswith("peer / ")
    assert float(rows["throughput/output_tok_s"][3]) == pytest.approx(0.5)
    names = {path.name for path in (out / "figures").iterdir()}
    assert {"ratios.png", "ratios.svg", "comparison.svg"} <= names


def test_command_refuses_one_run_and_unlike_runs(tmp_path, capsys):
    a = write_run(ok_record(), tmp_path / "a")
    assert main(["compare", str(a)]) == 2
    assert "at least two" in capsys.readouterr().err
    copy = write_run(ok_record(), tmp_path / "copy")
    assert main(["compare", str(a), str(copy)]) == 2
    assert f"twice: {a} and {copy}" in capsys.readouterr().err
    other = ok_record(name="b", config=config(), run_id="other")
    other.config["scenario"] = {"name": "quick", "latency": {"seed": 5}}
    b = write_run(other, tmp_path / "b")
    assert main(["compare", str(a), str(b)]) == 2
    assert "expected runs of the same work" in capsys.readouterr().err
    with pytest.raises(RecordError):
        write_compare_report([a, tmp_path / "none"], tmp_path / "out")


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
    assert ratios["TPOT p50"] == "0.50"
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


def test_the_page_of_a_sweep_shows_its_peers(tmp_path):
    write_run(ok_record(), tmp_path / "sweep" / "0")
    write_run(peer_record(), tmp_path / "sweep" / "1")
    write_sweep_report(tmp_path / "sweep")
    assert "Native against peers" in read_html(tmp_path / "sweep", "sweep.html").words
