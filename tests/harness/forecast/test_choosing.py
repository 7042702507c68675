"""docs/choosing.md is what its command writes, but for what small changes of plans make of it."""

import contextlib
import io
import re

import pytest

from harness.__main__ import main
from harness.forecast.choosing import model_row
from tests.contracts.project import ROOT

NUMBER = re.compile(r"[\d.,]*\d")


def numbers(text: str) -> list[float]:
    return [float(item.replace(",", "")) for item in NUMBER.findall(text)]


@pytest.fixture(scope="module")
def written() -> str:
    """What the command prints, once for all tests."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["--choosing"]) == 0
    return printed.getvalue()


def test_the_page_is_the_one_in_docs(written: str) -> None:
    kept = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    remedy = "write it anew: python -m harness --choosing > docs/choosing.md"
    assert NUMBER.sub("", written) == NUMBER.sub("", kept), remedy
    assert numbers(written) == pytest.approx(numbers(kept), rel=0.1, abs=0.2), remedy


def test_a_row_has_a_cell_for_each_size(written: str) -> None:
    cells = model_row("olmo7b").strip("| ").split(" | ")
    assert cells[:2] == ["olmo7b", "13.6"]
    assert len(cells) == 9
    hosts = [float(cell.split(",")[0]) for cell in cells[2:6]]
    assert hosts == sorted(hosts, reverse=True)
    assert [cell.split(",")[0] for cell in cells[6:]] == ["none"] * 3
    assert "| olmo7b | 7.30 B | 8 GB |" in written
