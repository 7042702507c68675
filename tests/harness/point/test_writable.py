"""Places that cannot be written are told before anything runs."""

import os
from pathlib import Path

import pytest

from catalogue.files import make_home
from engine.errors import ConfigError
from harness.__main__ import main
from harness.config.schema import TrackingConfig
from harness.point.full_disk import require_writable, require_writable_stores
from tightfit.cli import run


@pytest.fixture
def nowhere(tmp_path):
    """A path below a file: nobody can make a folder there, whoever runs the tests."""
    file = tmp_path / "file"
    file.touch()
    return file / "below"


def test_a_folder_that_can_be_made_is_fine_and_is_not_made(tmp_path):
    require_writable("hydra.run.dir", tmp_path / "a" / "b")
    require_writable("hydra.run.dir", Path("relative"))
    require_writable_stores([TrackingConfig(), TrackingConfig(uri="http://h:1")], tmp_path / "home")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named_by_its_setting(nowhere):
    with pytest.raises(ConfigError, match=r"hydra.run.dir: expected a folder that can be written"):
        require_writable("hydra.run.dir", nowhere)
    store = TrackingConfig(uri=f"sqlite:///{nowhere}/runs.db")
    with pytest.raises(ConfigError, match=r"tracking.uri: expected a folder"):
        require_writable_stores([store], nowhere)
    require_writable_stores([TrackingConfig(backend="none")], nowhere)


def test_a_database_that_may_only_be_read_is_refused(tmp_path, monkeypatch):
    (tmp_path / "mlflow.db").touch()
    require_writable_stores([TrackingConfig()], tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="TIGHTFIT_HOME: expected a database that can be written"):
        require_writable_stores([TrackingConfig()], tmp_path)


@pytest.mark.parametrize("setting", ["hydra.run.dir='{}'", "tracking.uri='sqlite:///{}/runs.db'"])
def test_a_command_ends_before_anything_runs(setting, nowhere, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "home"))
    assert main(["+model=glass", setting.format(nowhere)]) == 2
    assert "expected a folder that can be written" in capsys.readouterr().err
    assert list((tmp_path / "home" / "runs").iterdir()) == []


@pytest.mark.parametrize(
    "command", ["run model=glass", "plan -m model=glass gpu=cpu", "models fetch glass", "ui"]
)
def test_a_home_that_cannot_be_written_is_refused_by_name(command, nowhere, monkeypatch, capsys):
    monkeypatch.setenv("TIGHTFIT_HOME", str(nowhere))
    assert run(command.split()) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"error: TIGHTFIT_HOME: expected a folder that can be written, got {nowhere}" in said


def test_a_plan_needs_no_home(nowhere, monkeypatch, capsys):
    monkeypatch.setenv("TIGHTFIT_HOME", str(nowhere))
    assert run(["plan", "model=glass", "gpu=rtx4080_16gb"]) == 0
    assert "glass fits rtx4080_16gb" in capsys.readouterr().out


def test_a_folder_of_the_home_that_may_only_be_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path))
    assert make_home("models") == tmp_path.resolve() / "models"
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match=r"\(Permission denied\). Set TIGHTFIT_HOME"):
        make_home("models")
