"""Launchers that are there, those that are not, and what their processes need."""

from pathlib import Path

import pytest

from catalogue.processes import python_path
from engine.errors import ConfigError
from harness.config import launchers
from harness.config.launchers import (
    BASIC,
    LAUNCHERS,
    check_launcher,
    default_settings,
    keep_gpus_visible,
    make_importable,
)


@pytest.mark.parametrize(
    ("name", "extra"),
    [("joblib", "joblib"), ("submitit_slurm", "submitit"), ("ray", "ray")],
)
def test_a_launcher_that_is_not_installed_is_named_with_its_extra(name, extra, monkeypatch):
    monkeypatch.setattr(launchers, "_is_installed", lambda module: False)
    with pytest.raises(ConfigError, match=rf"pip install .*\[{extra}\]"):
        check_launcher(name)
    check_launcher(BASIC)


def test_launchers_that_are_installed_pass_and_others_are_unknown(monkeypatch):
    monkeypatch.setattr(launchers, "_is_installed", lambda module: True)
    monkeypatch.setattr(launchers.shutil, "which", lambda name: f"/bin/{name}")
    for name in LAUNCHERS:
        check_launcher(name)
    monkeypatch.setattr(launchers.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="srun"):
        check_launcher("submitit_slurm")
    with pytest.raises(ConfigError, match="Did you mean submitit_local"):
        check_launcher("submitit_loca")


def test_a_module_of_a_package_that_is_absent_is_not_installed():
    assert not launchers._is_installed("no_such_package.no_such_module")
    assert launchers._is_installed("hydra._internal.core_plugins")


def test_local_jobs_may_take_longer_than_an_hour():
    assert default_settings("submitit_local", []) == {"hydra.launcher.timeout_min": 10080}
    assert default_settings("submitit_local", ["+hydra.launcher.timeout_min=5"]) == {}
    assert default_settings("submitit_slurm", []) == default_settings(BASIC, []) == {}


def test_the_code_is_found_by_processes_that_start_elsewhere():
    environ = {"PYTHONPATH": "/a"}
    make_importable(environ)
    root, other = environ["PYTHONPATH"].split(":")
    assert other == "/a"
    assert (Path(root) / "harness" / "worker.py").is_file()
    before = dict(environ)
    make_importable(environ)
    assert environ == before
    assert python_path("/a", own=[root, "/b"]) == "/a"
    assert python_path("", own=["/b"]) == root


def test_ray_s_processes_see_the_gpus_unless_the_user_says_otherwise():
    name = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
    environ = {}
    keep_gpus_visible("joblib", environ)
    assert environ == {}
    keep_gpus_visible("ray", environ)
    assert environ == {name: "0"}
    own = {name: "1"}
    keep_gpus_visible("ray", own)
    assert own == {name: "1"}
