"""The folder that everything is kept in."""

from pathlib import Path

import pytest

from catalogue.files import expanded, models_folder, tightfit_home
from engine.errors import ConfigError


def test_tightfit_home_is_taken_when_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "here"))
    assert tightfit_home() == tmp_path / "here"
    assert models_folder() == tmp_path / "here" / "models"
    assert not (tmp_path / "here").exists()


def test_user_data_directory_is_the_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TIGHTFIT_HOME", " ")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert tightfit_home() == tmp_path / "tightfit"
    monkeypatch.delenv("TIGHTFIT_HOME")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tightfit_home() == tmp_path / ".local" / "share" / "tightfit"


def test_relative_home_becomes_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIGHTFIT_HOME", "store")
    assert tightfit_home() == tmp_path / "store"


def test_a_user_without_a_home_directory_is_asked_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> None:
        raise KeyError(number)

    for name in ("TIGHTFIT_HOME", "XDG_DATA_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(ConfigError, match="TIGHTFIT_HOME: expected a folder, got none, and user"):
        tightfit_home()
    assert expanded("~/prompts.jsonl") == Path("~/prompts.jsonl")


def test_a_path_of_an_unknown_user_stays_as_it_is() -> None:
    assert expanded("~nobody-of-this-name/trace.csv") == Path("~nobody-of-this-name/trace.csv")
