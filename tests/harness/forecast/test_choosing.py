"""docs/choosing.md is what its command writes, but for what small changes of plans make of it."""

import re
from pathlib import Path

import pytest

from harness.forecast.choosing import main, model_row
from tests.contracts.project import ROOT

NUMBER = re.compile(r"[\d.,]*\d")


def numbers(text: str) -> list[float]:
    return [float(item.replace(",", "")) for item in NUMBER.findall(text)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command writes, once for all tests."""
    file = tmp_path_factory.mktemp("page") / "choosing.md"
    assert main([str(file)]) == 0
    return file


def test_the_page_is_the_one_in_docs(file: Path) -> None:
    written, kept = (
        path.read_text(encoding="utf-8") for path in (file, ROOT / "docs" / "choosing.md")
    )
    remedy = "write it anew: python -m harness.forecast.choosing docs/choosing.md"
    assert NUMBER.sub("", written) == NUMBER.sub("", kept), remedy
    assert numbers(written) == pytest.approx(numbers(kept), rel=0.1, abs=0.2), remedy


def test_a_row_has_a_cell_for_each_size(file: Path) -> None:
    cells = model_row("olmo7b").strip("| ").split(" | ")
    assert cells[:2] == ["olmo7b", "13.6"]
    assert len(cells) == 9
    hosts = [float(cell.split(",")[0]) for cell in cells[2:6]]
    assert hosts == sorted(hosts, reverse=True)
    assert [cell.split(",")[0] for cell in cells[6:]] == ["none"] * 3
    assert "| olmo7b | 7.30 B | 8 GB |" in file.read_text(encoding="utf-8")
