"""Pages as HTML: what every view says, with nothing known, and with hostile names."""

import html
import json
import re
import time
from html.parser import HTMLParser

import pytest

from console.registry.tables import TestRun
from tests.console.page.snapshots import GIB, HOSTILE, bare
from tests.slow import mostly_slow, slow


class Tags(HTMLParser):
    """The names of all elements and attributes of a page."""

    def __init__(self):
        super().__init__()
        self.names, self.attributes = set(), set()

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}


VIEWS = (
    "/",
    "/models",
    "/models/1",
    "/models/1/delete",
    "/add",
    "/tests",
    "/tests/1",
    "/tests/2",
    "/runs",
    "/logs",
    "/chat",
    "/settings",
)


@pytest.mark.thorough_but("/", "/models/1", "/tests/1")
@pytest.mark.parametrize(
    "address", [*VIEWS, "/models/2", slow("/models/2/delete"), slow("/?range=1h")]
)
def test_every_view_is_whole_escaped_and_has_nothing_inline(client, address):
    answer = client.get(address)
    assert answer.status_code == 200
    text = answer.text
    tags = Tags()
    tags.feed(text)
    assert {"img", "style"}.isdisjoint(tags.names)
    assert all(name != "style" and not name.startswith("on") for name in tags.attributes)
    assert re.findall(r"<script(?! src=\"/static/)", text) == []
    assert "script-src 'self'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert text.rstrip().endswith("</html>")


def test_a_hostile_name_is_text(client):
    assert html.escape(HOSTILE) in client.get("/models").text
    told = html.unescape(client.get("/models/2/delete").text)
    assert f"This deletes {HOSTILE}" in told


@pytest.mark.thorough_but("/")
@pytest.mark.parametrize(
    "address", mostly_slow(VIEWS, lambda each: each in {"/", "/models/1", "/tests/2", "/settings"})
)
def test_a_machine_of_which_nothing_is_known(client, scripted, address):
    scripted.told = bare(time.time())
    assert client.get(address).status_code == 200


def test_unknown_is_never_zero(client, scripted):
    scripted.told = bare(time.time())
    text = re.sub(r"(?s)<template>.*?</template>", "", client.get("/").text)
    tiles = re.findall(r'class="value[^"]*">([^<]*)<', text)
    assert set(tiles) == {"unknown"}
    assert "NVML is not installed." in text
    assert "Nothing is served" in text


def test_now_tells_what_was_asked_for_and_what_holds(client):
    text = client.get("/").text
    assert "llama31_8b is ready" in text
    for part in ("as planned", "prefetch", "4.20 GiB", "21,504"):
        assert part in text


def test_buttons_are_held_in_transitions(client, scripted):
    def buttons():
        panel = client.get("/").text.split('<article class="panel"')[1]
        found = re.findall(r"<button([^>]*)>([^<]+)</button>", panel)
        return {label: " disabled" in text.replace("disabled:", "") for text, label in found}

    assert buttons()["Start"]
    assert not buttons()["Stop"]
    assert not buttons()["Switch"]
    scripted.told["services"][0] |= {
        "state": "loading",
        "phase": "read",
        "bytes_done": GIB,
        "bytes_total": 4 * GIB,
    }
    held = buttons()
    assert held["Start"]
    assert held["Restart"]
    assert held["Switch"]
    assert not held["Stop"]
    assert "read, 1.00 GiB of 4.00 GiB" in client.get("/").text
    scripted.told["services"][0] |= {"state": "stopped"}
    held = buttons()
    assert not held["Start"]
    assert held["Stop"]
    job = {"id": 9, "service_id": 1, "action": "stop", "arguments": {}, "state": "running"}
    job |= {"phase": None, "reason": None, "created_s": time.time(), "ended_s": None}
    scripted.told["services"][0] |= {"state": "stopping"}
    scripted.told["jobs"] = [job]
    held = buttons()
    assert not held["Start"]  # it comes behind the stop
    assert held["Stop"]
    scripted.told["jobs"] = [job, job | {"id": 10, "action": "start", "state": "queued"}]
    held = buttons()
    assert held["Start"]
    assert not held["Stop"]


def test_what_failed_tells_why(client):
    text = html.unescape(client.get("/").text)
    assert "19.20 GiB are needed" in text
    assert "3 failures of late" in text
    assert "ERROR server: CapacityError" in text


def test_the_stream_begins_with_everything(client):
    with client.stream("GET", "/events/now?range=5m") as answer:
        lines = iter(answer.iter_lines())
        assert next(lines) == "event: snapshot"
        told = json.loads(next(lines).removeprefix("data: "))
    assert abs(told["now_s"] - time.time()) < 60
    assert told["services"][1]["title"] == HOSTILE
    assert [each["value"] for each in told["tiles"]][:2] == ["3", "0"]


def test_a_comparison_has_intervals_and_tokens(client):
    text = client.get("/tests/2").text
    for part in (
        "1.286",
        "1.270 to 1.300",
        "6,400 of 6,400 requests gave equal tokens",
        "24.1",
        "unknown",
    ):
        assert part in text


@pytest.mark.thorough
def test_a_sweep_is_asked_for_and_has_a_row_for_each_profile(client, database):
    text = client.get("/tests?model=1").text
    assert '<form class="fields" data-send="/api/sweep"' in text
    assert '<option value="1" selected>llama31_8b, 2 profiles</option>' in text
    rate = "throughput/output_tok_s"
    with database.write() as session:
        metrics = {"default": {rate: 10.0, "latency/ttft_ms": 5.0}, "uva4": {rate: 12.5}}
        session.add(TestRun(id=3, model_id=1, kind="sweep", status="finished", metrics=metrics))
    assert "fastest of 2: uva4, 12.5 tok/s" in client.get("/tests").text
    rows = re.findall(
        r'<td class="text">(default|uva4)</td>(.*?)</tr>', client.get("/tests/3").text
    )
    found = {name: re.findall(r">([^<]+)</td>", cells) for name, cells in rows}
    assert found == {"default": ["10.0", "5.00"], "uva4": ["12.5", "unknown"]}


@pytest.mark.thorough
def test_runs_of_a_home_without_any(client):
    assert "No run yet" in client.get("/runs").text
    assert "Expected two ticked runs or more" in client.get("/runs/compare?run=a").text


def test_searches_are_listed_with_their_reports(client, tmp_path):
    for name in ("mine", "new"):
        folder = tmp_path / "searches" / name
        folder.mkdir(parents=True)
        asked = {"objective": f"maximize {name}/x"}
        (folder / "search.json").write_text(json.dumps(asked), encoding="utf-8")
    (tmp_path / "searches" / "mine" / "sweep.html").write_text("the trials", encoding="utf-8")
    page = client.get("/runs").text
    assert "maximize mine/x" in page
    assert "maximize new/x" in page
    assert re.findall(r'href="(/searches/[^"]*)"', page) == ["/searches/files/mine/sweep.html"]
    assert client.get("/searches/files/mine/sweep.html").text == "the trials"
    assert client.get("/searches/files/../registry.db").status_code == 404
    assert client.get("/searches/files/mine%2f..%2f..%2fregistry.db").status_code == 404


@pytest.mark.thorough_but("a/../../registry.db")
@pytest.mark.parametrize(
    "path", ["../registry.db", "..%2fregistry.db", "/etc/passwd", "a/../../registry.db", "."]
)
def test_a_file_outside_of_the_runs_is_not_there(client, path):
    answer = client.get(f"/runs/files/{path}")
    assert answer.status_code == 404


@pytest.mark.thorough
def test_a_console_that_others_reach_says_so(client, scripted):
    scripted.told["console"] = {"host": "0.0.0.0", "port": 7999, "is_loopback": False}
    assert "This console listens on 0.0.0.0" in client.get("/settings").text
