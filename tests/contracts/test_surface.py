"""Every configuration key with its type is listed in config_keys.txt: a change of it is seen."""

from pathlib import Path

from engine.sealed import describe_type, key_types, settings
from harness.config.cli_args import key_rows, settings_page
from harness.config.schema import GROUPS, RunConfig
from tests.contracts.project import ROOT

LIST = Path(__file__).with_name("config_keys.txt")


def test_keys_are_those_of_the_list() -> None:
    keys = dict(key_types(RunConfig))
    nodes = {path.rpartition(".")[0] for path in keys}
    found = [f"{path}: {describe_type(hint)}" for path, hint in keys.items() if path not in nodes]
    assert found == LIST.read_text(encoding="utf-8").splitlines(), (
        "the keys changed; if that is meant, change tests/contracts/config_keys.txt too"
    )


def test_help_names_every_root_key_and_group() -> None:
    roots = {path for path, _ in key_types(RunConfig) if "." not in path}
    rows = key_rows()
    shown = {name.split("=")[0].split(".")[0] for name in rows}
    assert shown | set(GROUPS) - {"experiment"} == roots
    assert all(rows.values())
    assert rows["timeout_s=null"].startswith("Seconds that a point may take")
    assert rows["fail_fast=false"].startswith("Stop a sweep at the first point")
    assert "uva_stage_tokens" in rows["engine.*"]


def test_the_page_of_settings_is_what_the_fields_say() -> None:
    """`python -m harness --settings > docs/settings.md` writes it anew."""
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == settings_page()
    assert "| `seed` | `0` | an integer | `seed` | Seed of dummy weights" in page
    assert "| `enforce_eager` | `false` | true or false |" in page
    assert "| `max_num_seqs` | `64` | an integer | `max_num_seqs` | Sequences that run" in page


def test_every_setting_has_a_meaning() -> None:
    """Sizes of a model are named as in its config.json, and need none."""
    without = [found.path for found in settings(RunConfig) if not found.help]
    assert [path for path in without if not path.startswith("model.spec.")] == []
