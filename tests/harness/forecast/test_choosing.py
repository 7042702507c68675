"""docs/choosing.md is what its command writes, but for what small changes of plans make of it."""

import re

import pytest

from harness.__main__ import main
from harness.forecast import choosing
from harness.forecast.choosing import card_row, model_row
from tests.contracts.project import ROOT
from tests.slow import slow

NUMBER = re.compile(r"[\d.,]*\d")


def numbers(text: str) -> list[float]:
    return [float(item.replace(",", "")) for item in NUMBER.findall(text)]


@pytest.mark.thorough
@pytest.mark.parametrize("models", [["olmo7b"], slow(None)], ids=["few", "all"])
def test_the_page_is_the_one_in_docs(
    models: list[str] | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    if models is not None:
        others = set(choosing.model_names()) - set(models)
        monkeypatch.setattr(choosing, "model_names", lambda: models)
        lines = kept.splitlines(keepends=True)
        kept = "".join(x for x in lines if not x.startswith(tuple(f"| {n} |" for n in others)))
    assert main(["--choosing"]) == 0
    written = capsys.readouterr().out
    remedy = "write it anew: python -m harness --choosing > docs/choosing.md"
    assert NUMBER.sub("", written) == NUMBER.sub("", kept), remedy
    assert numbers(written) == pytest.approx(numbers(kept), rel=0.1, abs=0.2), remedy
    assert "| olmo7b | 7.30 B | 8 GB |" in written


def test_a_row_says_what_stays_on_each_card() -> None:
    cells = dict(zip(choosing.CARDS, card_row("olmo7b")[1:], strict=True))
    assert re.fullmatch(r"lossless \d+\.\d, 4-bit \d+\.\d", cells["rtx4080_16gb"])
    for name in ("a100_80gb", "l4_24gb", "rtx4090_24gb"):
        found = re.fullmatch(r"plain (\d+\.\d), lossless (\d+\.\d)", cells[name])
        assert found is not None
        assert float(found[1]) < float(found[2])
    assert re.fullmatch(r"3\.\d GiB off \d+\.\d, 4-bit \d+\.\d", cells["rtx3060_12gb"])


@pytest.mark.slow
def test_a_row_has_a_cell_for_each_size() -> None:
    cells = model_row("olmo7b")
    assert cells[:2] == ["olmo7b", "13.6"]
    assert len(cells) == 9
    hosts = [float(cell.split(",")[0]) for cell in cells[2:6]]
    assert hosts == sorted(hosts, reverse=True)
    assert [cell.split(",")[0] for cell in cells[6:]] == ["none"] * 3
