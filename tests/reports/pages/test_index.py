"""The page of all runs: what it lists, its links, its script."""

import base64
import hashlib
import re
import shutil
from pathlib import Path
from urllib.parse import unquote

import pytest

from reports.__main__ import main
from reports.pages.index import write_index
from reports.record.record import RecordError
from tests.console.browser import browsing
from tests.reports.conftest import write_run
from tests.reports.examples import config, no_fit_record, ok_record
from tests.reports.pages.test_write import EVIL, read_html


def light_record(**changes):
    return ok_record(samples={}, plan=None, **changes)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Two runs, a sweep of two points, a run that has not ended and one that is broken."""
    home = tmp_path_factory.mktemp("a home [x]")
    runs = home / "runs"
    early = light_record(name="early", run_id="a", started_at="2026-11-27T08:00:00+00:00")
    write_run(early, runs / "1 [a]")
    (runs / "1 [a]" / "report.html").touch()
    late = light_record(
        name=EVIL, run_id="b", started_at="2026-11-28T09:30:00+00:00", config=config()
    )
    late.config["system"] = {"kind": "accelerate"}
    late.valid = False
    write_run(late, runs / "2")
    write_run(light_record(name="offload=uva"), runs / "sweep" / "0")
    write_run(no_fit_record(name="offload=none"), runs / "sweep" / "1")
    (runs / "sweep" / "sweep.html").touch()
    write_run(light_record(name="offload=uva"), runs / "sweep2" / "0")  # taken over
    noted = light_record(name="noted", run_id="c", started_at="2026-11-27T07:00:00+00:00")
    noted.effective["warnings"] = ["something"]
    write_run(noted, runs / "5")
    write_run(light_record(name="trial", run_id="d"), home / "searches" / "mine" / "7")
    (runs / "3").mkdir()
    (runs / "3" / "state.json").write_text("{}")
    (runs / "4").mkdir()
    (runs / "4" / "result.json").write_text("{")
    assert write_index(home) == home / "index.html"
    return home


def run_rows(home):
    page = read_html(home, "index.html")
    return {row[0]: row for row in page.rows if len(row) == 12}


def test_every_run_has_a_row_newest_first(home):
    rows = run_rows(home)
    assert list(rows)[:2] == [EVIL, "offload=uva"]
    assert set(rows) == {EVIL, "offload=uva", "offload=none", "early", "noted", "trial", "3", "4"}
    assert rows["trial"][-1] == "mine"
    assert rows["noted"][6] == "ok, valid, 1 warning"
    assert rows["offload=uva"][1:] == [
        *("2026-11-27 10:15", "olmo7b", "uva", "16.0", "NVIDIA H200", "ok, valid"),
        *("402.7", "156.8", "223.7", "12.9", "sweep"),
    ]
    assert rows[EVIL][3] == "accelerate uva"
    assert rows[EVIL][6] == "ok, not valid"
    assert rows["offload=none"][6:8] == ["no_fit", "n/a"]
    assert "no result.json: the run has" in rows["3"][6]
    assert "not valid JSON" in rows["4"][6]


def test_a_run_that_was_taken_over_is_listed_and_counted_once(home):
    page = read_html(home, "index.html")
    rows = [row for row in page.rows if row]
    assert [row[-1] for row in rows if row[0] == "offload=uva"] == ["sweep"]
    assert "4 ok, valid" in page.words
    assert sorted(row for row in rows if row[0] in {"sweep", "sweep2"})[:2] == [
        ["sweep", "offload", "2026-11-27 10:15", "olmo7b", "2", "1"],
        ["sweep2", "offload", "2026-11-27 10:15", "olmo7b", "1", "1"],
    ]


def test_links_are_relative_and_lead_somewhere_also_in_a_copy(home, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(home, copy)
    page = read_html(copy, "index.html")
    links = [value for _, name, value in page.attributes if name == "href" and value[0] != "#"]
    assert "runs/1%20%5Ba%5D/report.html" in links
    assert "runs/sweep/sweep.html" in links
    for link in links:
        assert not Path(unquote(link)).is_absolute()
        assert (copy / unquote(link)).exists()


def test_the_only_script_is_the_one_that_the_page_allows(home):
    html = (home / "index.html").read_text(encoding="utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = re.findall(r'content="(default-src[^"]*)"', html)
    assert f"script-src &#39;sha256-{digest}&#39;" in policy or f"'sha256-{digest}'" in policy
    assert "<img src=x" not in html
    assert "://" not in html.replace(script, "")


@pytest.mark.thorough
def test_a_run_links_back_to_the_page_of_all_runs(home):
    folder = home / "runs" / "sweep" / "0"
    (folder.parent / "multirun.yaml").touch()
    assert main([str(folder)]) == 0
    page = read_html(folder)
    links = {value for _, name, value in page.attributes if name == "href"}
    assert {"../sweep.html", "../../../index.html", "result.json"} <= links


def test_a_home_without_runs_has_a_page_and_no_home_is_refused(tmp_path, capsys):
    assert main(["index", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'index.html'}\n"
    assert "No run yet below" in read_html(tmp_path, "index.html").words
    with pytest.raises(RecordError, match="expected a folder that holds runs, got none"):
        write_index(tmp_path / "none")


@pytest.mark.browser
def test_every_column_is_shown_at_1280_px(tmp_path):
    for point, name in enumerate(("offload=none,engine.max_num_seqs=8", "offload=uva,kv=cpu")):
        record = light_record(name=name, run_id=str(point), config=config())
        record.config["model"]["name"] = "smollm2_135m"
        record.effective["warnings"] = ["something"]
        write_run(record, tmp_path / "runs" / "20261130-152753-742286-59f6ad" / str(point))
    with browsing() as browser:
        browser.resize(1280)
        browser.open(write_index(tmp_path).as_uri())
        hidden = "[...document.querySelectorAll('.scroll')].map(e => e.scrollWidth - e.clientWidth)"
        assert browser.run(f"return {hidden}") == [0, 0]
