"""Pages and files of runs of the same work."""

import csv

import pytest

from reports.__main__ import main
from reports.compare import check_alike
from reports.pages.compare import compare_page
from reports.pages.write import write_compare_report
from reports.record.judging import ratio
from reports.record.record import RecordError
from tests.reports.conftest import write_run
from tests.reports.examples import config, no_fit_record, ok_record
from tests.reports.pages.test_write import read_html
from tests.reports.test_compare import peer_record, rows_of


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
    assert found["TPOT p50"] == "0.500"
    assert found["load"] == "1.000"
    assert {*table.kinds.values()} == {"grey"}  # without repeats none has an interval
    assert len(table.kinds) == len(table.rows)
    assert page.cards[1].kind == page.verdict.kind == "grey"
    assert "A grey ratio is not conclusive: it has no interval" in page.sections[0].text[0]


def test_runs_of_other_commits_are_named(tmp_path):
    records = [ok_record(), ok_record(name="b")]
    assert not compare_page(rows_of(tmp_path, *records), {}).banners
    records[1].environment = {**records[1].environment, "git": {"sha": "1" * 40, "dirty": False}}
    [banner] = compare_page(rows_of(tmp_path, *records), {}).banners
    assert "different commits" in banner
    assert "1" * 10 in banner


def test_a_ratio_within_its_interval_of_one_is_grey(tmp_path):
    name = "throughput/output_tok_s"
    records = [ok_record(), ok_record(name="b")]
    for record, mean in zip(records, (100.0, 103.0), strict=True):
        record.metrics |= {name: mean, f"{name}/ci95_low": mean - 9, f"{name}/ci95_high": mean + 9}
    table = compare_page(rows_of(tmp_path, *records), {}).sections[0].tables[0]
    assert table.rows[0][0] == "output"
    assert table.rows[0][-1] == "0.862 to 1.231"
    assert table.kinds[0] == "grey"
    page = compare_page(rows_of(tmp_path, *records), {})
    assert page.verdict.answer.startswith(
        "No winner: b has the best output 103.0 tok/s, 1.03 times"
    )
    assert page.verdict.answer.endswith("but the interval 0.862 to 1.231 includes 1")
    assert [card.kind for card in page.cards] == ["plain", "grey"]


def test_every_run_has_a_card_and_the_winner_its_interval(tmp_path):
    name = "throughput/output_tok_s"
    records = [ok_record(name=name) for name in "abc"]
    for record, mean in zip(records, (100.0, 50.0, 200.0), strict=True):
        record.metrics |= {name: mean, f"{name}/ci95_low": mean - 5, f"{name}/ci95_high": mean + 5}
    page = compare_page(rows_of(tmp_path, *records), {})
    assert page.title == "a against b against c"
    assert [(card.label, card.value, card.kind) for card in page.cards] == [
        ("a: output", "100.0", "plain"),
        ("b: output", "50.0", "worse"),
        ("c: output", "200.0", "better"),
    ]
    assert page.cards[2].note.startswith("2.00 times as good (1.857 to 2.158)")
    assert page.verdict.answer == (
        "c is best: output 200.0 tok/s, 2.00 times as good as a (1.857 to 2.158)"
    )


def test_without_repeats_there_is_no_winner(tmp_path):
    page = compare_page(rows_of(tmp_path, ok_record(), peer_record()), {})
    assert page.verdict.answer == (
        "No winner without repeats: olmo7b-uva-rtx4080_16gb has the best output 402.7 tok/s, 2.00"
        " times as good as peer, but one or both ran only once"
    )
    wrong = ok_record(name="b", valid=False)
    page = compare_page(rows_of(tmp_path, ok_record(), wrong), {})
    assert page.verdict.answer == "No winner: no two runs have a figure in common that counts"


def with_parts(*names, **changes):
    record = ok_record(config=config(), **changes)
    parts = {"load": {"warm_starts": 1}, "latency": {"seed": 0}, "throughput": {"seed": 0}}
    record.config["scenario"] |= {part: parts[part] if part in names else None for part in parts}
    for metric in list(record.metrics):
        if metric.split("/")[0] in parts and metric.split("/")[0] not in names:
            del record.metrics[metric]
    return record


def test_runs_are_compared_in_the_parts_that_they_share(tmp_path):
    one = with_parts("load", "latency", name="one")
    other = with_parts("latency", "throughput", name="other")
    rows = rows_of(tmp_path, one, other)
    check_alike(rows)
    page = compare_page(rows, {})
    names = {row[0] for row in page.sections[0].tables[0].rows}
    assert {"TTFT p50", "TPOT p50", "GPU peak"} <= names
    assert not {"output", "load", "energy per token"} & names
    assert page.verdict.lines == (
        "Not compared: load, which only one measured.",
        "Not compared: throughput, which only other measured.",
    )
    with pytest.raises(RecordError, match="a part of the scenario in common, got load in one; thr"):
        check_alike(rows_of(tmp_path, with_parts("load", name="one"), with_parts("throughput")))


def test_other_tokens_and_other_weights_are_said(tmp_path):
    records = [ok_record(name=name) for name in "ab"]
    for record, digest in zip(records, ("1" * 64, "2" * 64), strict=True):
        record.effective = record.effective | {"model": {"sha256": digest}}
        record.samples["latency"] = [
            {"request_id": f"latency-{place}", "tokens_hash": hashed, "ttft_ms": 1.0}
            for place, hashed in enumerate(("same", digest))
        ]
    page = compare_page(rows_of(tmp_path, *records), {})
    assert page.verdict.kind == "warn"
    assert page.verdict.label == "the same requests, but not the same answers or weights"
    assert page.verdict.lines == (
        "b: other tokens than a in 1 of 2 requests of latency (tokens_hash).",
        "b: other weights than a (SHA-256 222222222222..., not 111111111111...).",
    )
    records[1].effective, records[1].samples = records[0].effective, records[0].samples
    assert compare_page(rows_of(tmp_path, *records), {}).verdict.kind == "grey"


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


@pytest.mark.thorough
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
