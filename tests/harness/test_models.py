"""`python -m harness.models`: the catalogue's models without a registry."""

from pathlib import Path

import pytest

from harness.models import main


@pytest.mark.thorough
def test_the_catalogue_is_shown_without_a_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path))
    assert main(["home"]) == 0
    assert main(["list"]) == 0
    assert main(["show", "olmo7b"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{tmp_path}\n")
    assert "allenai/OLMo-2-1124-7B-Instruct" in out
    assert "7.299 billion, 13.59 GiB" in out
    assert main(["show", "glass"]) == 0
    assert "0.00085 billion, 0.0032 GiB" in capsys.readouterr().out
    assert not (tmp_path / "registry.db").exists()


@pytest.mark.parametrize("verb", ["show", "fetch", "remove", "pack"])
def test_an_unknown_name_is_refused(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "olmo7bb"]) == 2
    assert "got 'olmo7bb'. Did you mean olmo7b?" in capsys.readouterr().err


def test_what_was_not_fetched_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path))
    assert main(["remove", "glass"]) == 2
    assert "expected files that were fetched into TIGHTFIT_HOME" in capsys.readouterr().err
