"""Places that cannot be written are told before anything runs."""

import os
from pathlib import Path

import pytest

from engine.errors import ConfigError
from harness.__main__ import main
from harness.config.schema import TrackingConfig
from harness.point.full_disk import require_writable, require_writable_stores


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
