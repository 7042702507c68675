"""The pages of one run: values, definitions, escaping, what a page may load."""

import base64
import re
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from PIL import Image

from reports.pages.write import write_report
from reports.record.record import RecordError
from tests.reports.conftest import write_run
from tests.reports.examples import no_fit_record, ok_record

VOID = {"meta", "img", "input", "br", "wbr"}


class Reader(HTMLParser):
    """Collects text, tags and attributes, and checks that tags close in order."""

    def __init__(self, html):
        super().__init__()
        self.stack, self.text, self.attributes, self.rows = [], [], [], []
        self.goes_on = False
        self.feed(html)
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.goes_on = tag == "wbr"
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if {"style", "script"} & set(self.stack):
            return
        if self.goes_on:  # a place where a line may break is no end of a word
            self.text[-1] += data
        else:
            self.text.append(data)
        self.goes_on = False
        if "td" in self.stack:
            self.rows[-1][-1] += data

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())

    def row(self, first):
        (found,) = [row for row in self.rows if row and row[0] == first]
        return found


def read_html(folder, name="report.html"):
    return Reader((folder / name).read_text(encoding="utf-8"))


def test_summary_numbers_are_in_the_page(ok_dir):
    words = read_html(ok_dir).words
    for text in ("402.7 tok/s", "223.7 ms", "156.8 ms", "9.10 s", "12.9 GiB", "98.5 %"):
        assert text in words
    assert words.index("402.7 tok/s") < words.index("ok, valid") < words.index("Memory: budget")
    assert "olmo7b, offload uva, budget 13.6 GiB (0.85 of 16.0) on NVIDIA H200" in words


def test_metrics_stand_beside_their_definition(ok_dir):
    page = read_html(ok_dir)
    values, definitions = (row[1] for row in page.rows if row[:1] == ["throughput/output_tok_s"])
    assert values == "402.7 tok/s"
    assert definitions == "sum(output tokens) / (t(last token) - t(first submit))"
    assert ("td", "title", definitions) in page.attributes
    assert ["energy/j_per_token", "n/a"] in page.rows
    assert page.row("TTFT (ms)")[1:4] == ["221.7", "223.7", "n/a"]
    assert page.row("kv cache") == ["kv cache", "6.20 GiB", "45.6 %"]
    assert page.row("engine.gpu_memory_utilization") == ["engine.gpu_memory_utilization", "0.85"]


def test_page_loads_nothing_from_outside(ok_dir):
    page = read_html(ok_dir)
    sources = [value for _, name, value in page.attributes if name in {"src", "srcset"}]
    assert len(sources) == 16
    for source in sources:
        head, data = source.split(",", 1)
        assert head == "data:image/svg+xml;base64"
        svg = ElementTree.fromstring(base64.b64decode(data))
        drawn = [item for item in svg.iter() if item.tag.endswith("}text")]
        assert drawn
        loaded = [
            value for item in svg.iter() for key, value in item.attrib.items() if "href" in key
        ]
        assert all(value.startswith("#") for value in loaded)
    links = [value for _, name, value in page.attributes if name == "href"]
    ids = {value for _, name, value in page.attributes if name == "id"}
    assert {link[1:] for link in links if link.startswith("#")} <= ids
    assert [link for link in links if not link.startswith("#")] == ["result.json"]
    html = (ok_dir / "report.html").read_text(encoding="utf-8")
    assert "http://" not in html
    assert "https://" not in html
    assert "<script" not in html
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html


def test_figures_lie_beside_the_markdown(ok_dir):
    text = (ok_dir / "report.md").read_text(encoding="utf-8")
    links = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert links == [
        "figures/latency.png",
        "figures/timeline.png",
        "figures/throughput.png",
        "figures/memory.png",
        "figures/kv.png",
        "figures/experts.png",
        "figures/load.png",
        "figures/roofline.png",
    ]
    for link in links:
        with Image.open(ok_dir / link) as image:
            image.load()
            assert min(image.size) > 100


def test_markdown_tables_are_whole(ok_dir):
    text = (ok_dir / "report.md").read_text(encoding="utf-8")
    assert r"| throughput/output\_tok\_s | 402.7 tok/s | sum(output tokens) / (t(last" in text
    blocks = re.findall(r"(?:^\|.*\|$\n)+", text, flags=re.MULTILINE)
    assert len(blocks) >= 9
    for block in blocks:
        lines = block.splitlines()
        assert len(lines) >= 3
        assert re.fullmatch(r"\|(-+:?\|)+", lines[1])
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1


@pytest.mark.thorough
def test_pages_of_a_refused_run(no_fit_dir):
    page = read_html(no_fit_dir)
    words = page.words
    assert "no_fit: the plan does not fit" in words
    assert "need 15.5 GiB, have 13.6 GiB" in words
    assert "Set uva.cpu_offload_gb=2 or more." in words
    assert ["total", "15.5 GiB", "114.0 %"] in page.rows
    assert "CPU emulation" not in words
    assert {path.name for path in (no_fit_dir / "figures").iterdir()} == {
        "memory.png",
        "memory.svg",
    }
    text = (no_fit_dir / "report.md").read_text(encoding="utf-8")
    assert "**Does not fit: 1.90 GiB of GPU memory short**" in text
    assert r"no\_fit: the plan does not fit, so nothing was loaded" in text


@pytest.mark.thorough
def test_only_the_total_over_its_budget_is_marked(no_fit_dir):
    assert sum(a == ("tr", "class", "bad") for a in read_html(no_fit_dir).attributes) == 1


def test_emulated_runs_carry_the_banner_on_both_pages(tmp_path):
    record = ok_record(samples={}, plan=None, metrics={"load/total_s": 3.0})
    record.environment = {"emulated": True}
    folder = write_run(record, tmp_path / "run")
    write_report(folder)
    banner = "CPU emulation: not a GPU's figures"
    words = read_html(folder).words
    assert words.index(banner) < words.index(
        "offload uva, budget 13.6 GiB (0.85 of 16.0), emulated on the CPU"
    )
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert text.startswith(f"> **{banner}**\n")


EVIL = '<img src=x onerror="alert(1)">&amp;</title>|`*_[a](b)'


def evil_record():
    return ok_record(
        name=EVIL,
        run_id=EVIL,
        status="failed",
        valid=False,
        reasons=[EVIL],
        error={"type": EVIL, "message": EVIL, "phase": EVIL, "traceback": f"```\n{EVIL}\n````"},
        config={EVIL: {EVIL: EVIL}, "model": {"name": EVIL}, "gpu": {"memory_gib": 8}},
        overrides=[EVIL],
        plan=None,
        environment={"gpu": {"name": EVIL}, EVIL: [EVIL]},
        effective={"warnings": [EVIL], EVIL: EVIL},
        metrics={EVIL: 1.0, f"latency/{EVIL}": 2.0},
        samples={"load": [{"start": EVIL, "phases": {EVIL: 1.0}, "total_s": 1.0}]},
    )


def test_everything_from_outside_is_escaped(tmp_path):
    folder = write_run(evil_record(), tmp_path / "run")
    write_report(folder)
    html = (folder / "report.html").read_text(encoding="utf-8")
    page = Reader(html)
    assert "<img src=x" not in html
    assert "onerror" not in {name for _, name, _ in page.attributes}
    assert sum(name == "alt" for _, name, _ in page.attributes) == 2
    assert page.words.count(EVIL) >= 14
    text = (folder / "report.md").read_text(encoding="utf-8")
    outside, fenced = text.split("`````")[0::2], text.split("`````")[1]
    assert fenced == f"\n```\n{EVIL}\n````\n"
    assert f"tightfit run '{EVIL}'" in text
    fence = re.compile(r"^(`{3,})\n.*?^\1$", flags=re.MULTILINE | re.DOTALL)
    for part in (fence.sub("", part) for part in outside):
        assert "<img" not in part
        assert "](b)" not in part.replace(r"\](b)", "")
        assert not re.search(r"(?<!\\)`", part)


def test_traceback_is_folded(tmp_path):
    folder = write_run(
        ok_record(
            status="failed",
            error={"type": "X", "message": "m", "phase": "load", "traceback": "line 1\n  line 2"},
            plan=None,
            metrics={},
            samples={},
        ),
        tmp_path / "run",
    )
    write_report(folder)
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert "<summary>Traceback</summary><pre>line 1\n  line 2</pre>" in html
    assert "Phase: load" in html


@pytest.mark.thorough
def test_out_folder_is_made_and_the_run_folder_left_alone(tmp_path):
    folder = write_run(no_fit_record(), tmp_path / "run")
    target = tmp_path / "a" / "b"
    paths = write_report(folder, target)
    assert [path.relative_to(target).as_posix() for path in paths] == [
        "report.html",
        "report.md",
        "figures/memory.png",
        "figures/memory.svg",
        "metrics.csv",
    ]
    assert all(path.stat().st_size > 0 for path in paths)
    assert [path.name for path in folder.iterdir()] == ["result.json"]


def test_a_folder_without_a_record_is_refused(tmp_path):
    with pytest.raises(RecordError, match=r"expected result\.json, found none"):
        write_report(tmp_path)


def test_without_matplotlib_the_page_is_there_and_says_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = write_run(ok_record(), tmp_path / "run")
    paths = write_report(folder)
    assert {path.suffix for path in paths} == {".html", ".md", ".csv"}
    for name in ("report.html", "report.md"):
        text = (folder / name).read_text()
        assert "This page has no figures" in text
        assert "TTFT" in text or "first token" in text


def test_a_title_breaks_behind_its_commas_and_is_escaped(tmp_path):
    name = "offload=uva,gpu.memory_gib=8,<b>"
    record = ok_record(name=name, plan=None, metrics={}, samples={})
    folder = write_run(record, tmp_path / "run")
    write_report(folder)
    html = (folder / "report.html").read_text()
    assert "offload=<wbr>uva,<wbr>gpu.memory_gib=<wbr>8,<wbr>&lt;b&gt;</h1>" in html


def test_telemetry_that_cannot_be_read_is_named(tmp_path):
    folder = write_run(ok_record(plan=None, metrics={}, samples={}), tmp_path / "run")
    (folder / "telemetry.parquet").write_bytes(b"no table")
    write_report(folder)
    assert "No figure shows the run over time: " in read_html(folder).words
