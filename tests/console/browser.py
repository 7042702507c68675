"""A headless Chromium for tests of pages, and an application that it opens."""

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

WIDTHS = (1280, 390)
WAIT_S = 20.0


class Browser:
    """A browser with short words for what tests do."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver
        self.base = ""

    def resize(self, width: int, *, is_dark: bool = False) -> None:
        """Show pages at a width, in light or dark."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def open(self, path: str) -> None:
        """Open a page, and wait for its stream where it has one."""
        self.driver.get(self.base + path)
        self.wait(lambda: self.run("return document.readyState") == "complete")
        dots = self.all("[data-link]")
        if dots:
            self.wait(lambda: dots[0].get_attribute("data-link") == "live")

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script; return what it returns."""
        return self.driver.execute_script(script, *arguments)

    def all(self, selector: str) -> list[WebElement]:
        """Return the elements of a selector."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        """Return the first element of a selector, once there is one."""
        self.wait(lambda: self.all(selector), selector)
        return self.all(selector)[0]

    def text(self, selector: str = "main") -> str:
        """Return the text that an element shows."""
        return self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def button(self, label: str, within: str = "main") -> WebElement:
        """Return the button of a label."""
        path = f".//button[normalize-space()='{label}']"
        self.wait(lambda: self.one(within).find_elements(By.XPATH, path), label)
        return self.one(within).find_elements(By.XPATH, path)[0]

    def press(self, label: str, within: str = "main") -> None:
        """Press a button once it can be pressed."""
        self.wait(lambda: self.button(label, within).is_enabled(), f"{label} can be pressed")
        found = self.button(label, within)
        self.run("arguments[0].scrollIntoView({block: 'center'})", found)
        found.click()

    def type(self, selector: str, text: str) -> WebElement:
        """Type text in the place of what a field has."""
        field = self.one(selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", field)
        field.clear()
        field.send_keys(text)
        return field

    def wait(self, is_so: Callable[[], object], what: str = "", limit_s: float = WAIT_S) -> None:
        """Wait until something is so."""
        end_s = time.monotonic() + limit_s
        while not is_so():
            assert time.monotonic() < end_s, f"not so after {limit_s:.0f} s: {what}\n{self.text()}"
            time.sleep(0.05)

    def wait_for(self, text: str, selector: str = "main", limit_s: float = WAIT_S) -> None:
        """Wait until an element shows a text."""
        self.wait(lambda: text in self.text(selector), f"{selector} shows {text!r}", limit_s)

    def overflow(self) -> list[str]:
        """Return what is wider than the window, outside of what scrolls."""
        return self.run(
            "return [...document.querySelectorAll('main *')].filter((each) => "
            "each.getBoundingClientRect().right > document.documentElement.clientWidth + 1 && "
            "!each.closest('.scroll, .unseen')).map((each) => each.outerHTML.slice(0, 120))"
        )

    def complaints(self) -> list[str]:
        """Return what the browser's console says, since the last time."""
        found = [each["message"] for each in self.driver.get_log("browser")]
        return [each for each in found if "Failed to load resource" not in each]


@contextmanager
def browsing() -> Iterator[Browser]:
    """Give a browser; it ends with the block."""
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    assert all(programs), (
        "chromium, chromedriver: expected both. Install chromium and chromium-driver (Debian)."
    )
    options = webdriver.ChromeOptions()
    options.binary_location = str(programs[0])
    # A sandbox of Chromium's own is not possible as root, as in a container.
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(str(programs[1])))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """Serve an application from a thread; give its address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(5)
