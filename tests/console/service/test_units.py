"""The text of units, also as systemd itself reads it."""

import os
import re
import shutil
import subprocess
import sys
from configparser import RawConfigParser
from pathlib import Path

import pytest

from console.service import units
from console.service.units import Place, Scope, Unit, console_unit, quoted, server_unit
from engine.errors import ConfigError

ODD = 'a b/100% "own" $HOME \\ \u00fc'


def place_of(scope: Scope, home: Path) -> Place:
    return Place(scope=scope, home=home, account="root" if scope == "system" else None)


def entries(unit: Unit) -> dict[str, str]:
    """A unit's keys; of those given several times the last."""
    parser = RawConfigParser(strict=False, delimiters="=", comment_prefixes="#")
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit.text)
    return {key: value for section in parser for key, value in parser[section].items()}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("scope", ["user", "system"])
def test_systemd_takes_the_units(scope: Scope, tmp_path: Path) -> None:
    home = tmp_path / ODD
    place = place_of(scope, home)
    made = [server_unit("7b/fast", place, drain_s=30), console_unit(place, stop_s=60)]
    for unit in made:
        (tmp_path / unit.name).write_text(unit.text, encoding="utf-8")
    done = subprocess.run(
        [
            *("systemd-analyze", "verify", "--recursive-errors=no", f"--{scope}"),
            *(str(tmp_path / unit.name) for unit in made),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_the_server_is_watched_drained_and_not_started_for_ever(tmp_path: Path) -> None:
    found = entries(server_unit("7b/fast", place_of("user", tmp_path), drain_s=30))
    assert found["Type"] == "notify"
    assert found["KillMode"] == "mixed"
    assert found["Restart"] == "on-failure"
    assert found["RestartPreventExitStatus"].split() == ["2", "78"]
    assert found["LimitMEMLOCK"] == "infinity"
    assert int(found["WatchdogSec"]) > 0
    assert float(found["TimeoutStopSec"]) > 30
    console = entries(console_unit(place_of("user", tmp_path), stop_s=60))
    assert float(console["TimeoutStopSec"]) > 60
    # Three starts, each as long as it takes to fail at once, lie within the window.
    window_s, burst = int(found["StartLimitIntervalSec"]), int(found["StartLimitBurst"])
    assert burst * int(found["RestartSec"]) < window_s
    assert found["ExecStart"].endswith('"-m" "tightfit" "serve" "--profile" "7b/fast"')


def test_a_unit_of_the_system_has_its_own_account_and_writes_in_one_folder(tmp_path: Path) -> None:
    place = Place(scope="system", home=tmp_path, account="tf", modprobe="/usr/bin/nvidia-modprobe")
    unit = server_unit("7b", place, drain_s=30)
    found = entries(unit)
    assert found["User"] == "tf"
    assert found["ProtectSystem"] == "strict"
    assert found["NoNewPrivileges"] == found["PrivateTmp"] == "yes"
    assert found["ReadWritePaths"] == f'"{tmp_path}"'
    assert found["ExecStartPre"] == '-+"/usr/bin/nvidia-modprobe" "-u" "-c" "0"'
    assert f'Environment="TRITON_CACHE_DIR={tmp_path}/cache/triton"' in unit.text
    # These would hide the GPUs' device files.
    assert not {"PrivateDevices", "DevicePolicy", "ProtectClock"} & set(found)


def test_the_program_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "python_path", lambda _: "/a checkout")
    monkeypatch.setattr(sys, "executable", "/a $venv/50%/python")
    unit = server_unit("7b", place_of("user", tmp_path), drain_s=30)
    assert 'Environment="PYTHONPATH=/a checkout"' in unit.text
    assert 'ExecStart="/a $venv/50%%/python" "-P"' in unit.text


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("a b", '"a b"'),
        ("100%", '"100%%"'),
        ('"x"', '"\\"x\\""'),
        ("a\\b", '"a\\\\b"'),
        ("a;b|c", '"a;b|c"'),
    ],
)
def test_words_stand_as_they_are(word: str, text: str) -> None:
    assert quoted(word) == text


def test_dollars_of_arguments_are_no_variables(tmp_path: Path) -> None:
    unit = server_unit("7b", place_of("user", tmp_path), drain_s=30)
    assert "$" not in unit.text
    assert '"$$HOME"' in units._command(["/bin/true", "$HOME"])


def test_lines_cannot_be_smuggled_in(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="control characters"):
        server_unit("7b\nExecStartPre=/bin/sh", place_of("user", tmp_path), drain_s=30)
    with pytest.raises(ConfigError, match="control characters"):
        server_unit("7b", place_of("user", tmp_path / "a\nb"), drain_s=30)


@pytest.mark.parametrize(
    "name",
    ["ssh.service", "tightfit-.service", "tightfit-x", "tightfit-../x.service", "-H.service", ""],
)
def test_no_other_unit_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=r"expected tightfit-NAME\.service"):
        units.check_name(name)


def test_a_unit_says_what_it_serves(tmp_path: Path) -> None:
    unit = server_unit("50%/x", place_of("user", tmp_path), drain_s=30)
    assert unit.name == "tightfit-server-50--x.service"
    assert units.serves(unit.text) == unit.serves == "50%/x"
    assert units.serves("[Unit]\n") is None
    assert not re.search(r"(?<!%)%(?![%E])", unit.text)
