"""Where files lie (conf/, TIGHTFIT_HOME), from any working folder; how JSON and YAML are read."""

import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import yaml

try:  # in C: ten times as fast
    from yaml import CSafeLoader as _Safe
except ImportError:
    from yaml import SafeLoader as _Safe  # type: ignore[assignment]

from engine.errors import ConfigError

CONF: Final = Path(__file__).resolve().parents[1] / "conf"
"""The configuration files."""


def tightfit_home() -> Path:
    """Return the absolute folder that holds the database, the runs and the models.

    TIGHTFIT_HOME when it is set and not empty, else `tightfit` in the user's data directory
    (XDG_DATA_HOME, else ~/.local/share). The folder is not created here.

    Raises:
        ConfigError: neither is set, and the user has no home directory.
    """
    chosen = os.environ.get("TIGHTFIT_HOME", "").strip()
    if chosen:
        return expanded(chosen).resolve()
    data = os.environ.get("XDG_DATA_HOME", "").strip()
    base = expanded(data or "~/.local/share")
    if not data and str(base).startswith("~"):
        raise ConfigError(
            f"TIGHTFIT_HOME: expected a folder, got none, and user {os.getuid()} has no home "
            "directory. Set it."
        )
    return (base / "tightfit").resolve()


def make_home(*below: str) -> Path:
    """Make tightfit_home(), or a folder below it; return it.

    Raises:
        ConfigError: it cannot be written.
    """
    folder = tightfit_home().joinpath(*below)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(
            f"TIGHTFIT_HOME: expected a folder that can be written, got {tightfit_home()} "
            f"({error.strerror}). Set TIGHTFIT_HOME to another one."
        ) from error
    return folder


def expanded(path: str | Path) -> Path:
    """Return a path with ~ and ~NAME replaced; as it is where that user has no home directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def models_folder() -> Path:
    """Return the folder of converted checkpoints, inside tightfit_home()."""
    return tightfit_home() / "models"


def kept_folder() -> Path:
    """Return the folder of weights that were packed before, inside tightfit_home()."""
    return tightfit_home() / "lossless"


def facts_folder() -> Path:
    """Return the folder of what loads found out about checkpoints, inside tightfit_home()."""
    return tightfit_home() / "facts"


def note_folders() -> dict[str, str]:
    """Return the folders in which loads note what they find out and keep weights, by keyword."""
    return {"facts_folder": str(facts_folder()), "kept_folder": str(kept_folder())}


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an absent, unreadable or broken file gives an empty one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class _Loader(_Safe):
    """Loads plain data, with the numbers of YAML 1.2 and of Hydra: 1e-6 is one.

    A key that a mapping has twice is an error, as it is for Hydra.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping's plain data."""
        seen = set[str]()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"found the key {key.value!r} twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def load_yaml(text: str) -> Any:
    """Return the plain data of a YAML document.

    Raises:
        yaml.YAMLError: it is no YAML.
    """
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def quote_texts(text: str, is_text: Callable[[str], bool]) -> str:
    """Return a YAML document with quotes around the values of text settings: 1.10 stays 1.10.

    Nothing else of it changes; what is no YAML is left for its loader to refuse.

    Args:
        text: the document.
        is_text: whether the setting at a dotted path is a text or a list of texts.
    """
    try:
        root = yaml.compose(text, Loader=_Safe)
    except yaml.YAMLError:
        return text
    found = {node.start_mark.index: node for node in _texts(root, "", is_text)}
    for start in sorted(found, reverse=True):
        value = str(found[start].value).replace("'", "''")
        text = f"{text[:start]}'{value}'{text[found[start].end_mark.index :]}"
    return text


def _texts(
    node: yaml.Node | None, path: str, is_text: Callable[[str], bool]
) -> Iterator[yaml.ScalarNode]:
    """Yield the values of text settings that have no quotes, but for null."""
    match node:
        case yaml.MappingNode():
            for key, value in node.value:
                yield from _texts(value, f"{path}.{key.value}" if path else str(key.value), is_text)
        case yaml.SequenceNode():
            for item in node.value:
                yield from _texts(item, path, is_text)
        case yaml.ScalarNode(style=style) if not style and is_text(path):
            if not node.tag.endswith(":null"):
                yield node
