"""The pages of a sweep: rows, failed points, CSV, links, differing settings."""

import csv
import io

from PIL import Image

from reports.compare import differing_settings, sweep_rows
from reports.pages.sweep import sweep_csv, sweep_page
from reports.pages.write import write_sweep_report
from reports.record.folders import Point, SweepNote, load_points, write_planned
from tests.reports.conftest import sweep_records, write_run
from tests.reports.examples import no_fit_record, ok_record
from tests.reports.pages.test_write import EVIL, evil_record, read_html


def csv_rows(folder):
    return list(csv.DictReader(io.StringIO((folder / "sweep.csv").read_text(encoding="utf-8"))))


def rows_of(*records, tmp_path):
    return sweep_rows(
        [Point(folder=tmp_path / str(i), record=record) for i, record in enumerate(records)]
    )


def test_csv_has_a_row_for_each_point(sweep_dir):
    rows = csv_rows(sweep_dir)
    assert [row["status"] for row in rows] == [
        "no_fit",
        "ok",
        "ok",
        "failed",
        "unreadable",
        "unreadable",
    ]
    assert [row["folder"] for row in rows] == ["0", "1", "2", "10", "11", "12"]
    assert len({len(row) for row in rows}) == 1
    assert None not in rows[0]


def test_csv_values_are_exact_and_absent_ones_empty(sweep_dir):
    rows = csv_rows(sweep_dir)
    assert float(rows[1]["throughput/output_tok_s"]) == 402.7
    assert float(rows[2]["latency/tpot_ms/p50"]) == 148.7
    assert not rows[1]["energy/j_per_token"]
    assert not rows[0]["throughput/output_tok_s"]
    assert rows[0]["error"].startswith("CapacityError: GPU: need 15.5 GiB")
    assert rows[3]["error"] == "RuntimeError: first line"
    assert "not valid JSON" in rows[4]["error"]
    assert rows[2]["config.offload"] == "prefetch"
    assert "config.model.name" not in rows[0]


def test_csv_text_cannot_be_a_formula(tmp_path):
    rows = rows_of(ok_record(name="=1+1"), ok_record(name="-x"), tmp_path=tmp_path)
    parsed = list(csv.DictReader(io.StringIO(sweep_csv(rows, tmp_path))))
    assert [row["name"] for row in parsed] == ["'=1+1", "'-x"]


def test_sweep_page_shows_every_point_and_its_reason(sweep_dir):
    page = read_html(sweep_dir, "sweep.html")
    assert "2 of 6 points ok, 1 no_fit" in page.words
    table = {row[0]: row for row in page.rows if len(row) == 8}
    assert table["1. offload=uva"][1:5] == ["ok, valid", "402.7", "223.7", "156.8"]
    assert table["2. offload=prefetch"][1:4] == ["ok, valid", "431.2", "223.7"]
    assert table["0. offload=none"][1:3] == ["no_fit", "n/a"]
    assert table["11. 11"][1] == "unreadable"
    reasons = {row[0]: row[2] for row in page.rows if len(row) == 3 and row[1] != "ok"}
    assert reasons["0. offload=none"].startswith("CapacityError: GPU: need 15.5 GiB")
    assert reasons["10. offload=uva engine.seed=1"] == "RuntimeError: first line"
    assert "the run has not ended" in reasons["12. 12"]


def test_best_points_are_named(sweep_dir):
    words = read_html(sweep_dir, "sweep.html").words
    assert "Highest output, no winner 431.2 tok/s point 2. offload=prefetch" in words
    assert "Lowest TPOT p50, no winner 148.7 ms point 2. offload=prefetch" in words


def test_points_link_to_reports_that_exist(sweep_dir):
    page = read_html(sweep_dir, "sweep.html")
    links = [value for _, name, value in page.attributes if name == "href"]
    assert [link for link in links if link[0] != "#"] == ["1/report.html"]
    text = (sweep_dir / "sweep.md").read_text(encoding="utf-8")
    assert "| [1\\. offload=uva](1/report.html) | ok, valid | 402.7 |" in text
    assert "| 0\\. offload=none | no\\_fit | n/a |" in text


def test_sweep_figures_lie_beside_the_page(sweep_dir):
    for name in ("comparison", "tradeoff"):
        with Image.open(sweep_dir / "figures" / f"{name}.png") as image:
            image.load()
            assert min(image.size) > 100


def test_differing_settings_are_listed(sweep_dir):
    page = read_html(sweep_dir, "sweep.html")
    records = list(sweep_records().values())
    assert list(differing_settings(records)) == [
        "offload",
        "offload.uva.cpu_offload_gb",
        "offload.prefetch.offload_group_size",
    ]
    assert ["2. offload=prefetch", "prefetch", "0", "8"] in page.rows
    assert {row[1] for row in page.rows if len(row) == 4} >= {"none", "uva"}


def test_labels_are_the_overrides_that_differ(tmp_path):
    rows = rows_of(
        ok_record(overrides=["+model=a", "offload=uva"]),
        ok_record(overrides=["+model=b", "offload=uva"]),
        tmp_path=tmp_path,
    )
    assert [row.label for row in rows] == ["model=a", "model=b"]
    alone = rows_of(ok_record(name="one"), tmp_path=tmp_path)
    assert alone[0].label == "one"


def test_points_on_different_cards_get_a_banner(tmp_path):
    other = ok_record()
    other.environment["gpu"]["name"] = "NVIDIA H100"
    page = sweep_page("s", rows_of(ok_record(), other, tmp_path=tmp_path), {})
    assert page.banners == (
        "The points ran on different GPUs (NVIDIA H100, NVIDIA H200): compare ratios, not figures",
    )
    assert "budget" not in page.subtitle
    assert sweep_page("s", rows_of(ok_record(), tmp_path=tmp_path), {}).banners == ()


def test_one_emulated_point_marks_the_sweep(tmp_path):
    emulated = ok_record()
    emulated.environment["emulated"] = True
    page = sweep_page("s", rows_of(ok_record(), emulated, tmp_path=tmp_path), {})
    assert page.banners[0] == "CPU emulation: not a GPU's figures"


def test_a_point_that_is_not_valid_is_never_the_best(tmp_path):
    wrong = ok_record(valid=False, reasons=["drift"])
    wrong.metrics["throughput/output_tok_s"] = 9999.0
    page = sweep_page("s", rows_of(ok_record(), wrong, tmp_path=tmp_path), {})
    assert page.cards[0].value == "402.7"


def test_the_kv_cache_has_columns_where_a_point_has_host_blocks(tmp_path):
    counted = {"kv/hit_share": 0.75, "kv/loaded_gib": 10.0, "kv/in_place_gib": 0.0}
    alone = ok_record(metrics=counted | {"kv/cpu_used_peak_share": None})
    page = sweep_page("s", rows_of(alone, tmp_path=tmp_path), {})
    assert not [name for name in page.sections[0].tables[0].columns if name.startswith("KV")]
    tiered = ok_record(metrics=counted | {"kv/cpu_used_peak_share": 0.5})
    page = sweep_page("s", rows_of(alone, tiered, tmp_path=tmp_path), {})
    names = page.sections[0].tables[0].columns
    assert [name.split(" (")[0] for name in names if name.startswith("KV")] == [
        "KV found",
        "KV loaded",
        "KV read in place",
    ]


def test_serving_has_columns_where_a_point_was_served(tmp_path):
    served = ok_record(metrics={"serve/peak_requests_s": 4.5, "serve/good_share": 0.96})
    faster = ok_record(metrics={"serve/peak_requests_s": 9.0, "serve/good_share": 0.95})
    page = sweep_page("s", rows_of(served, faster, tmp_path=tmp_path), {})
    columns = page.sections[0].tables[0].columns
    assert any(column.startswith("peak rate") for column in columns)
    assert not any(column.startswith("TTFT from arrival") for column in columns)
    (card,) = [card for card in page.cards if card.label == "Highest peak rate, no winner"]
    assert (card.value, card.note.startswith("point 1")) == ("9.00", True)
    plain = sweep_page("s", rows_of(ok_record(), tmp_path=tmp_path), {})
    assert not any("peak rate" in column for column in plain.sections[0].tables[0].columns)


def test_points_that_are_not_valid_are_in_the_verdict(tmp_path):
    rows = rows_of(ok_record(), ok_record(valid=False), tmp_path=tmp_path)
    verdict = sweep_page("s", rows, {}).verdict
    assert (verdict.kind, verdict.answer) == ("warn", "2 of 2 points ok, 1 of them not valid")
    rows = rows_of(ok_record(), ok_record(valid=False), no_fit_record(), tmp_path=tmp_path)
    verdict = sweep_page("s", rows, {}).verdict
    assert verdict.answer == "2 of 3 points ok, 1 of them not valid, 1 no_fit"


def test_a_sweep_in_which_nothing_ended_ok_is_a_page(tmp_path):
    folder = tmp_path / "sweep"
    write_run(no_fit_record(), folder / "0")
    (folder / "1").mkdir()
    (folder / "1" / "result.json").write_text("[]", encoding="utf-8")
    names = [path.name for path in write_sweep_report(folder)]
    assert names == ["sweep.html", "sweep.md", "sweep.csv"]
    assert "0 of 2 points ok" in read_html(folder, "sweep.html").words
    assert [row["status"] for row in csv_rows(folder)] == ["no_fit", "unreadable"]


def test_names_are_escaped_and_links_quoted(tmp_path):
    folder = tmp_path / "sweep"
    record = evil_record()
    record.metrics = {"throughput/output_tok_s": 2.0}
    write_run(record, folder / 'a "b" & c')
    (folder / 'a "b" & c' / "report.html").write_text("", encoding="utf-8")
    write_run(no_fit_record(), folder / "z")
    write_sweep_report(folder)
    html = (folder / "sweep.html").read_text(encoding="utf-8")
    assert "<img src=x" not in html
    page = read_html(folder, "sweep.html")
    links = [value for _, name, value in page.attributes if name == "href"]
    assert [link for link in links if link[0] != "#"] == ["a%20%22b%22%20%26%20c/report.html"]
    assert EVIL in page.words
    assert "<img" not in (folder / "sweep.md").read_text(encoding="utf-8")


def test_rows_of_a_folder_follow_its_points(sweep_dir):
    rows = sweep_rows(load_points(sweep_dir))
    assert [row.place for row in rows] == [0, 1, 2, 10, 11, 12]
    assert [row.status for row in rows][-1] == "unreadable"


def test_points_in_named_folders_are_counted_from_0(tmp_path):
    points = [Point(folder=tmp_path / name, record=ok_record()) for name in ("a", "7")]
    assert [row.place for row in sweep_rows(points)] == [0, 1]


def test_points_that_never_began_count(tmp_path, monkeypatch):
    monkeypatch.setattr("reports.pages.write.SWEEP_FIGURES", {})  # they are not looked at
    folder = tmp_path / "sweep"
    write_run(ok_record(), folder / "0")
    title = "tiny: offload x seed, 6 points"
    command = "tightfit sweep offload=none,uva"
    write_planned(folder, SweepNote(num_points=6, command=command, title=title))
    write_sweep_report(folder)
    assert "1 of 6 points ok, 5 not begun" in (folder / "sweep.md").read_text(encoding="utf-8")
    html = (folder / "sweep.html").read_text(encoding="utf-8")
    assert "tightfit sweep offload=none,uva</code>" in html
    text = (folder / "sweep.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {title}\n")
    assert "Sweep sweep, 6 points" in text
    (folder / "sweep.json").write_text("[", encoding="utf-8")
    write_sweep_report(folder)
    assert (folder / "sweep.md").read_text(encoding="utf-8").startswith("# Sweep sweep\n")
    assert "1 of 1 point ok" in (folder / "sweep.md").read_text(encoding="utf-8")
