"""What the scripts of the pages do, in a browser, over a scripted supervisor."""

import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from selenium.webdriver.common.keys import Keys
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse

from console.page.sources import Sources
from console.page.views import Pages
from console.registry.database import Database
from console.verdicts import Verdicts
from tests.console.browser import WIDTHS, Browser, browsing, listening
from tests.console.page.conftest import Scripted, fill
from tests.console.page.snapshots import GIB, HOSTILE, snapshot

pytestmark = pytest.mark.browser

VIEWS = (
    *("/", "/models", "/models/1", "/models/2/delete", "/add", "/tests", "/tests/1", "/tests/2"),
    *("/runs", "/logs", "/chat", "/settings"),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as found:
        yield found


@pytest.fixture
def site(browser: Browser, tmp_path) -> Iterator[SimpleNamespace]:
    """Pages over a scripted supervisor; what they send is noted and answered as a test says."""
    scripted = Scripted(snapshot(time.time()))
    database = Database.open(tmp_path / "registry.db")
    fill(database)
    asked: list[tuple[str, str, Any]] = []
    answers: dict[str, Any] = {"/api/plan": {}}
    app = FastAPI()

    @app.api_route("/api/{path:path}", methods=["GET", "POST", "PATCH", "DELETE"])
    async def api(request: Request, path: str):
        body = await request.body()
        address = f"/api/{path}"
        asked.append((request.method, address, json.loads(body) if body else None))
        answer = answers.get(address, {})
        answer = answer(asked[-1][2]) if callable(answer) else answer
        if isinstance(answer, list):
            return StreamingResponse(iter(answer), media_type="text/event-stream")
        return JSONResponse(answer, 400 if "error" in answer else 200)

    app.include_router(Pages(Sources(scripted, database, tmp_path, Verdicts(database))).router())
    with listening(app) as base:
        browser.base = base
        browser.resize(1280)
        yield SimpleNamespace(scripted=scripted, asked=asked, answers=answers)
        browser.driver.get("about:blank")
        scripted.is_open = False


@pytest.mark.parametrize("width", WIDTHS)
def test_no_view_overflows_or_complains(browser, site, width):
    for is_dark in (False, True):
        browser.resize(width, is_dark=is_dark)
        for view in VIEWS:
            browser.open(view)
            assert browser.overflow() == [], view
            assert browser.run("return document.documentElement.scrollWidth") <= width, view
    assert browser.complaints() == []


def test_a_hostile_name_stays_text_in_what_comes_later(browser, site):
    browser.open("/")
    late = f"{HOSTILE} second"
    site.scripted.told["services"].append(
        {**site.scripted.told["services"][1], "id": 3, "name": late}
    )
    browser.wait_for(late)
    assert browser.all("main img") == []
    browser.open("/models")
    assert browser.all("main img") == []
    assert HOSTILE in browser.text()


def test_typing_survives_new_values(browser, site):
    browser.open("/")
    browser.type("input[name=max_model_len]", "4096")
    site.scripted.told["services"][0]["load"]["running"] = 17
    site.scripted.told["services"][0]["requested"]["max_model_len"] = 8192
    browser.wait_for("17")
    assert browser.one("input[name=max_model_len]").get_attribute("value") == "4096"


def test_buttons_follow_the_state_and_send_json(browser, site):
    browser.open("/")
    browser.press("Restart")
    browser.wait(lambda: site.asked)
    assert site.asked[0] == ("POST", "/api/services/1/restart", {})
    site.scripted.told["services"][0]["state"] = "loading"
    site.scripted.told["services"][0] |= {
        "phase": "read",
        "bytes_done": GIB,
        "bytes_total": 4 * GIB,
    }
    browser.wait_for("1.00 GiB of 4.00 GiB")
    assert not browser.button("Restart").is_enabled()
    assert browser.button("Stop").is_enabled()


def test_a_refusal_is_told_where_it_was_pressed(browser, site):
    site.answers["/api/services/1"] = {
        "error": {"message": f"no {HOSTILE}", "param": "max_model_len"}
    }
    browser.open("/")
    browser.type("input[name=max_model_len]", "1")
    browser.press("Change")
    browser.wait_for(f"no {HOSTILE}")
    assert browser.one("input[name=max_model_len]").get_attribute("aria-invalid") == "true"


def test_old_values_are_grey_with_their_age(browser, site):
    browser.open("/")
    assert browser.all(".stale") == []
    site.scripted.told["machine"]["time_s"] = time.time() - 60
    browser.wait_for("60 s old", "h2#memory")
    assert len(browser.all(".stale")) == 1


def test_the_dot_says_when_the_console_is_gone(browser, site):
    browser.open("/")
    site.scripted.is_open = False
    site.scripted.is_gone = True
    browser.wait(lambda: browser.one("[data-link]").get_attribute("data-link") != "live")


def test_a_plan_follows_typing_and_late_answers_are_dropped(browser, site):
    def plan(body):
        longest = body["settings"].get("max_model_len")
        if longest == 1:
            time.sleep(1.0)  # answered after the next question
        return {
            "kind": "good" if longest == 12 else "bad",
            "answer": f"Fits {HOSTILE}" if longest == 12 else "Does not fit",
            "price": None,
            "why": [f"as {longest}"],
            "settings": {},
        }

    site.answers["/api/plan"] = plan
    browser.open("/add")
    browser.type("#source", "glass")
    browser.wait_for("Does not fit", "#plan")
    field = browser.type("#context", "1")
    time.sleep(0.5)
    field.send_keys("2")
    browser.wait_for(f"Fits {HOSTILE}", "#plan")
    time.sleep(1.0)
    assert "as 12" in browser.text("#plan")
    assert browser.one("#source").get_attribute("value") == "glass"
    assert len(site.asked) < 6


def test_the_slider_and_its_number_are_one(browser, site):
    browser.open("/add")
    browser.one("[data-context-slider]").send_keys(Keys.HOME)
    assert browser.one("#context").get_attribute("value") == "256"
    browser.type("#context", "8192")
    assert browser.one("[data-context-slider]").get_attribute("value") == "8192"


def test_a_delete_asks_for_the_name(browser, site):
    browser.open("/models/2/delete")
    button = browser.one("button.danger")
    assert not button.is_enabled()
    browser.type("#confirm", HOSTILE[:-1])
    assert not button.is_enabled()
    browser.one("#confirm").send_keys(HOSTILE[-1])
    assert button.is_enabled()
    button.click()
    browser.wait(lambda: site.asked)
    method, address, body = site.asked[0]
    assert (method, address, body["confirm"]) == ("DELETE", "/api/models/2", HOSTILE)


def test_a_log_is_followed_and_filtered(browser, site):
    lines = [{"level": "error", "text": f"late {HOSTILE}"}, {"level": "info", "text": "fine"}]
    site.answers["/api/logs/2"] = lambda _: {
        "lines": lines if len(site.asked) == 1 else [],
        "after": "9",
    }
    browser.open("/logs?service=2")
    browser.wait_for(f"late {HOSTILE}", "#log")
    browser.type("#q", "fine")
    assert browser.text("#log").strip() == "fine"
    browser.type("#q", "")
    browser.run(
        "document.querySelector('#level').value = 'error'; "
        "document.querySelector('#level').dispatchEvent(new Event('input'))"
    )
    assert "fine" not in browser.text("#log")
    assert "CapacityError" in browser.text("#log")


def test_a_chat_shows_its_stream_and_its_speed(browser, site):
    parts = [f"<b>{word}</b> " for word in ("one", "two", "three")]
    events = [{"choices": [{"delta": {"content": part}}]} for part in parts]
    events.append({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})
    site.answers["/api/chat"] = [f"data: {json.dumps(each)}\n\n" for each in events] + [
        "data: [DONE]\n\n"
    ]
    browser.open("/chat")
    browser.type("#message", f"say {HOSTILE}").send_keys(Keys.ENTER)
    browser.wait_for("5 + 3 tokens", "#talk")
    assert "<b>three</b>" in browser.text("#talk")
    assert HOSTILE in browser.text("#talk")
    assert browser.one("#message").get_attribute("value") == ""
    assert site.asked[0][2]["messages"] == [{"role": "user", "content": f"say {HOSTILE}"}]


def test_two_ticked_runs_are_named_in_the_address(browser, site):
    browser.open("/runs/compare?run=a&run=b")
    assert "Expected two ticked runs or more" in browser.text()


def test_keys_alone_reach_everything(browser, site):
    browser.open("/")
    browser.one("body").send_keys(Keys.TAB)
    assert browser.run("return document.activeElement.textContent") == "To the content"
    unnamed = browser.run(
        "const all = [...document.querySelectorAll('input, select, textarea, button, progress')];"
        "const isNamed = (one) => one.textContent.trim() || one.labels?.length || one.ariaLabel;"
        "return all.filter((each) => !isNamed(each)).length"
    )
    assert unnamed == 0


def test_a_field_that_was_emptied_takes_its_setting_away(browser, site):
    browser.open("/models/1")
    browser.one("details:nth-of-type(2) summary").click()
    field = browser.one("#p11-offload-gib")
    browser.wait(field.is_displayed)
    assert field.get_attribute("value") == "4"
    field.clear()
    browser.press("Save", "details:nth-of-type(2)")
    browser.wait(lambda: any(method == "PATCH" for method, _, _ in site.asked))
    ((_, address, body),) = [each for each in site.asked if each[0] == "PATCH"]
    assert address == "/api/models/1"
    assert body["profile"] == "uva4"
    assert (body["settings"]["offload"], body["settings"]["cpu_offload_gb"]) == ("uva", None)
