"""From profiles to what `tightfit serve` is given."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import server.run
from console.registry.checks import FieldError
from console.registry.database import Database
from console.registry.flags import arguments_of, flags_of, source_of
from console.registry.models import Models
from console.registry.tables import Model
from server.flags import engine_settings, parse
from server.lifecycle import EXIT_CONFIG
from tests.console.registry.conftest import checkpoint
from tightfit.cli import run


@pytest.mark.parametrize(
    ("settings", "keywords"),
    [
        ({"offload": "uva", "cpu_offload_gb": 4.5}, {"offload_backend": "uva"}),
        ({"offload": "auto", "max_num_seqs": 8}, {"choose": True}),
        ({"enforce_eager": True, "enable_prefix_caching": False}, {}),
        ({"max_model_len": 4096, "gpu_memory_utilization": 0.85, "seed": None}, {}),
        ({"kv_cpu_gib": 2.0, "load_format": "dummy"}, {"cpu_gib": 2.0}),
    ],
)
def test_flags_say_what_the_settings_do(settings: dict[str, Any], keywords: dict[str, Any]) -> None:
    asked = parse(["model", *flags_of(settings)])
    given = {name: value for name, value in engine_settings(settings).items() if value is not None}
    plain = {name: given[name] for name in given.keys() - {"offload", "kv_cpu_gib"}}
    assert asked.keywords == plain | keywords


def test_a_value_is_never_another_flag() -> None:
    asked = parse(["model", *flags_of({"chat_template": "--port=1", "port": 7})])
    assert (asked.server.chat_template, asked.server.port) == ("--port=1", 7)


def test_a_profile_is_named_by_its_model(database: Database, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "a folder [1]")
    models = Models(database)
    models.add(str(folder), name="small", settings={"max_num_seqs": 3, "max_model_len": 64})
    models.set_profile("small", "less", {"max_num_seqs": 2})
    for name, number in (("small", 3), ("small/less", 2)):
        asked = parse(arguments_of(name, database))
        assert asked.model == str(folder)
        assert asked.server.served_model_name == ["small"]
        assert asked.keywords["max_num_seqs"] == number


@pytest.mark.thorough_but("other")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "other",
            r"a model of the registry \(small\), got 'other'\. `tightfit models add NAME",
        ),
        ("small/other", "profile: expected one of default, got 'other'"),
        ("small/", "expected MODEL or MODEL/PROFILE, got 'small/'"),
        ("", "expected MODEL or MODEL/PROFILE, got ''"),
    ],
)
def test_a_profile_that_is_not_there_is_refused(
    name: str, words: str, database: Database, tmp_path: Path
) -> None:
    Models(database).add(str(checkpoint(tmp_path / "x")), name="small")
    with pytest.raises(FieldError, match=words):
        arguments_of(name, database)


def test_a_revision_is_not_served_as_another() -> None:
    model = Model(name="m", source="org/m", kind="hub", revision="abc", path=None, state="missing")
    with pytest.raises(FieldError, match="expected the files of m, found none"):
        source_of(model)
    model.revision = None
    assert source_of(model) == "org/m"
    assert source_of(Model(name="m", source="glass", kind="hub", path=None)) == "glass"


def test_serve_takes_a_profile_and_flags_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path / "home"))
    given: list[str] = []

    def main(arguments: list[str]) -> int:
        given[:] = arguments
        return 0

    monkeypatch.setattr(server.run, "main", main)
    folder = checkpoint(tmp_path / "x")
    with closing(Database.open()) as database:
        Models(database).add(str(folder), name="small", settings={"max_num_seqs": 3})
    assert run(["serve", "--profile", "small", "--port", "9000", "--max-num-seqs", "5"]) == 0
    asked = parse(given)
    assert (asked.model, asked.server.port) == (str(folder), 9000)
    assert asked.keywords["max_num_seqs"] == 5
    assert run(["serve", "--profile", "other"]) == EXIT_CONFIG
    assert "expected a model of the registry" in capsys.readouterr().err
    assert run(["serve", "small", "--port", "1"]) == 0
    assert given == ["small", "--port", "1"]
