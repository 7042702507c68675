"""The life of a model in the console, in a browser: real console, real server, real harness."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from catalogue.files import models_folder
from console.registry.database import Database
from console.registry.models import Models
from console.registry.tables import Service
from console.supervise.supervisor import MAIN
from tests.console.browser import WIDTHS, Browser, browsing

pytestmark = [pytest.mark.browser, pytest.mark.timeout(500)]

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
VIEWS = (
    *("/", "/models", "/models/1", "/models/1/delete", "/add", "/tests", "/runs", "/logs"),
    *("/chat", "/settings"),
)
LOAD_S = 90.0
START_S = 60.0
ADDRESS = re.compile(r"console at (http://[^\s,]+)")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A home with glass as two models, which chat; the registry has one of them."""
    found = tmp_path_factory.mktemp("home [1]")
    for name in ("tiny", "other"):
        folder = found / "models" / name
        shutil.copytree(models_folder() / "glass", folder)
        settings = folder / "tokenizer_config.json"
        told = json.loads(settings.read_text(encoding="utf-8"))
        settings.write_text(json.dumps(told | {"chat_template": TEMPLATE}), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    database = Database.open(found / "registry.db")
    with database.write() as session:
        session.add(Service(name=MAIN, kind="own", port=port, failures=[]))
    models = Models(database)
    models.add(str(found / "models" / "other"), settings={"max_model_len": 128})
    models.set_profile("other", "two", {"max_num_seqs": 2})
    database.close()
    return found


@pytest.fixture(scope="module")
def console(home: Path) -> Iterator[str]:
    """The address of a console of its own; at its end it is asked to stop, and does."""
    command = [sys.executable, "-m", "tightfit", "console", "--port", "0"]
    environ = {**os.environ, "TIGHTFIT_HOME": str(home), "CUDA_VISIBLE_DEVICES": ""}
    log = home / "console.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stderr=stderr, env=environ)
    with process:
        try:
            end_s = time.monotonic() + START_S
            while (found := ADDRESS.search(log.read_text(encoding="utf-8"))) is None:
                told = log.read_text(encoding="utf-8")
                assert process.poll() is None, f"the console ended:\n{told}"
                assert time.monotonic() < end_s, f"no address after {START_S} s:\n{told}"
                time.sleep(0.05)
            yield found[1]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text(encoding="utf-8")
        finally:
            process.kill()


@pytest.fixture(scope="module")
def browser(console: str) -> Iterator[Browser]:
    with browsing() as found:
        found.base = console
        found.resize(1280)
        yield found


def choose(browser: Browser, selector: str, label: str) -> None:
    """Choose the option whose text begins with a label."""
    browser.one(selector)
    browser.run(
        "const field = document.querySelector(arguments[0]);"
        "field.value = [...field.options].find((each) => each.text.startsWith(arguments[1])).value;"
        "field.dispatchEvent(new Event('input', {bubbles: true}))",
        *(selector, label),
    )


def state(browser: Browser) -> str:
    """Return the step of the service that is marked."""
    return browser.text(".steps [aria-current]")


def switch(browser: Browser, profile: str, until: str) -> None:
    """Switch to a profile, and wait for a state."""
    browser.open("/")
    choose(browser, "select[name=profile_id]", f"tiny: {profile}")
    browser.press("Switch")
    browser.wait_for(f"profile {profile}", ".panel")
    browser.wait(lambda: state(browser) == until, until, LOAD_S)


def effective(browser: Browser, setting: str) -> str:
    """Return what holds of a setting."""
    rows = browser.text("table.asked").splitlines()
    return next((row.split()[-1] for row in rows if row.startswith(setting)), "not there")


def make_profile(browser: Browser, model: str, name: str, **settings: str) -> None:
    """Make a profile of a model, which has an address."""
    browser.open(model)
    browser.one("details:last-of-type summary").click()
    browser.wait(lambda: browser.one("#new-name").is_displayed())
    browser.type("#new-name", name)
    for field, value in settings.items():
        browser.type(f"#new-{field}", value)
    browser.wait(lambda: "fit" in browser.text("details:last-of-type .answer").lower(), "verdict")
    browser.press("Make", "details:last-of-type")
    browser.wait_for(f"{name}:")


def test_the_life_of_a_model(browser: Browser, home: Path):
    # Add, with its plan.
    browser.open("/")
    browser.wait_for("stopped", ".steps [aria-current]")
    browser.open("/add")
    browser.type("#source", str(home / "models" / "tiny"))
    browser.wait_for("Fits", "#plan")
    browser.press("Add")
    browser.wait_for("Profiles")
    assert browser.text("h1") == "tiny"
    model = browser.run("return location.pathname")

    # Serve, chat, logs.
    browser.open("/models")
    browser.wait_for("fits", ".card:nth-of-type(2)")
    assert browser.text(".card:nth-of-type(2) h3") == "tiny"
    browser.press("Serve", ".card:nth-of-type(2)")
    browser.wait(lambda: state(browser) == "ready", "ready", LOAD_S)
    assert "tiny is ready" in browser.text("h1")
    browser.open("/chat")
    browser.type("#most", "8")
    browser.type("#message", "hello <b>you</b>")
    browser.press("Send")
    browser.wait_for("tokens/s", "#talk", 60)
    browser.open("/logs")
    assert len(browser.all("#log div")) > 3

    # Another profile, another context.
    make_profile(browser, model, "two", sequences="2")
    switch(browser, "two", "ready")
    assert effective(browser, "sequences at once") == "2"
    browser.type("input[name=max_model_len]", "96")
    browser.press("Change")
    browser.wait(lambda: effective(browser, "longest sequence") == "96", "96 tokens", LOAD_S)

    # What cannot fit fails and says why; then it recovers.
    make_profile(browser, model, "never", utilization="0.00001")
    switch(browser, "never", "failed")
    browser.wait_for("does not fit", ".panel .error")
    browser.open("/chat")
    assert not browser.button("Send").is_enabled()
    switch(browser, "default", "ready")
    browser.press("Stop")
    browser.wait(lambda: state(browser) == "stopped", "stopped", 60)


def test_what_is_tested_has_a_history_and_a_report(browser: Browser):
    browser.open("/tests?model=1")
    browser.type("#t-requests", "1")
    browser.press("Test")
    browser.wait_for("finished", "main", 120)
    browser.one("tbody a").click()
    browser.wait_for("Figures")
    browser.open("/runs")
    browser.wait_for("ok")

    browser.open("/tests?model=1")
    choose(browser, "#a-profile", "other: default")
    choose(browser, "#b-profile", "other: two")
    browser.type("#a-requests", "1")
    browser.press("Compare")
    browser.wait_for("A/B of other")
    browser.press("Cancel")
    browser.wait_for("cancelled", "main", 100)
    browser.open("/")
    rows = [" ".join(each.text.split()) for each in browser.all("[aria-labelledby=jobs] tr")]
    assert any(row.startswith("ab other 2 cancelled") for row in rows), rows


@pytest.mark.slow
def test_two_profiles_are_compared_to_the_end_and_swept(browser: Browser):
    browser.open("/tests?model=1")
    choose(browser, "#a-profile", "other: default")
    choose(browser, "#b-profile", "other: two")
    browser.type("#a-requests", "1")
    browser.press("Compare")
    browser.wait_for("runs", "[aria-labelledby=running]", 60)
    browser.wait(lambda: "running" not in browser.text(), "the end of the A/B", 350)
    browser.one("tbody a").click()
    browser.wait_for("requests gave equal tokens")
    table = browser.text("main table")
    assert "b / a" in table
    assert " to " in table

    browser.open("/tests?model=1")
    choose(browser, "#s-model", "other, 2 profiles")
    browser.type("#s-requests", "1")
    browser.press("Sweep")
    browser.wait_for("Sweep of other")
    browser.wait_for("fastest of 2", "tbody", 120)
    browser.one("tbody a").click()
    browser.wait(lambda: len(browser.all("main tbody tr")) == 2, "a row for each profile")
    assert "unknown" not in browser.text("main table")


def test_two_tabs_show_the_same_and_what_is_typed_stays(browser: Browser):
    browser.open("/")
    driver = browser.driver
    first = driver.current_window_handle
    driver.switch_to.new_window("tab")
    second = driver.current_window_handle
    browser.open("/")
    browser.type("input[name=max_model_len]", "77")
    driver.switch_to.window(first)
    switch(browser, "default", "ready")
    driver.switch_to.window(second)
    browser.wait(lambda: state(browser) == "ready", "ready", LOAD_S)
    assert browser.one("input[name=max_model_len]").get_attribute("value") == "77"
    browser.press("Stop")
    driver.switch_to.window(first)
    browser.press("Start")  # behind the stop of the other tab
    pid = browser.text(".panel .head")
    driver.switch_to.window(second)
    browser.wait(lambda: state(browser) == "ready" and browser.text(".panel .head") != pid, "", 90)
    browser.press("Stop")
    browser.wait(lambda: state(browser) == "stopped", "stopped", 60)
    driver.close()
    driver.switch_to.window(first)
    browser.wait(lambda: state(browser) == "stopped", "stopped", 60)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_view_of_it_is_whole(browser: Browser, width: int):
    browser.resize(width)
    for view in VIEWS:
        browser.open(view)
        assert browser.overflow() == [], view
    assert browser.complaints() == []
    browser.resize(1280)


def test_a_deleted_model_is_gone_with_its_files(browser: Browser, home: Path):
    browser.open("/models/1/delete")
    assert "MiB" in browser.text(".verdict .answer")
    browser.type("#confirm", "other")
    browser.press("Delete")
    browser.wait_for("Look for new", "main", 30)
    browser.wait(lambda: "other" not in browser.text())
    assert not (home / "models" / "other").exists()
    assert (home / "models" / "tiny").exists()
