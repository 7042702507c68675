"""Every test belongs to one command of the Makefile, and CI calls those that need no GPU."""

import re

from tests.contracts.project import ROOT

COMMANDS = ["test", "test-thorough", "test-slow", "test-browser", "test-gpu"]
MARKS = ("thorough", "slow", "browser", "gpu", "alone", "weights")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def _chosen(marks: set[str]) -> list[str]:
    """The commands that run a test with these marks; MARKS=browser for that of the browser."""
    recipes = re.findall(r"^(test[\w-]*): .*##.*\n((?:\t.*\n)+)", MAKEFILE, flags=re.MULTILINE)
    assert [name for name, _ in recipes] == COMMANDS
    has = {mark: mark in marks for mark in MARKS}
    lines = [(name, text) for name, recipe in recipes for text in re.findall(r'-m "(.*?)"', recipe)]
    return [name for name, text in lines if eval(text.replace("$(MARKS)", "browser"), {}, has)]


def test_a_test_is_run_by_one_command() -> None:
    for marks in (set(), {"thorough"}, {"slow"}, {"thorough", "slow"}):
        name = "test-slow" if "slow" in marks else "-".join(("test", *marks))
        assert _chosen(marks) == [name]
        assert _chosen(marks | {"browser"}) == ["test-browser"]
        assert _chosen(marks | {"gpu"}) == _chosen(marks | {"gpu", "alone"}) == ["test-gpu"]
        assert _chosen(marks | {"weights"}) == []  # by hand


def test_ci_calls_all_that_need_no_gpu_but_the_slow_ones() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    called = [line.removeprefix("make ") for line in lines if line.startswith("make ")]
    assert called == ["check", "test-thorough", "test-browser"]
    [needed] = re.findall(r"^check: (.*) ##", MAKEFILE, flags=re.MULTILINE)
    assert "test" in needed.split()
