"""Every configuration key with its type is listed in config_keys.txt: a change of it is seen."""

from pathlib import Path

from harness.help import GROUP_TITLES, ROOT_KEYS
from harness.keys import GROUPS, describe_type, key_types
from harness.schema import RunConfig

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
    shown = {name.split("=")[0].split(".")[0] for name in ROOT_KEYS}
    assert shown | set(GROUPS) - {"experiment"} == roots
    assert set(GROUP_TITLES) == set(GROUPS)


def test_defaults_in_help_are_the_schema_s() -> None:
    for text in ROOT_KEYS:
        name, equals, value = text.partition("=")
        if equals:
            default = RunConfig.__dataclass_fields__[name].default
            assert value == {None: "null", False: "false", True: "true"}.get(default, str(default))
