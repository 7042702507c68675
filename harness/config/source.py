"""Keep text settings as they are written, in files and on a command line: 1.10, 81e5034."""

import functools
import re
from pathlib import Path
from typing import Any, Final

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from yaml import YAMLError

from catalogue.files import CONF, quote_texts
from engine.errors import ConfigError
from engine.sealed import key_types, without_null
from harness.config.schema import RunConfig

SCHEME: Final = "tightfit"
"""Scheme of folders whose files are read by TextSource."""
_SWEPT: Final = "hydra.sweeper.params."
_FUNCTION: Final = re.compile(r"\w+\(.*\)", re.DOTALL)
_CALL: Final = re.compile(r"(choice|shuffle|sort)\((.*)\)", re.DOTALL)


@functools.cache
def _text_keys() -> frozenset[str]:
    return frozenset(
        path
        for path, hint in key_types(RunConfig)
        if without_null(hint) is str or without_null(hint) == list[str]
    )


def is_text(key: str) -> bool:
    """Return whether the setting at a dotted path is a text, or a list of texts."""
    return key in _text_keys()


class TextSource(ConfigSource):
    """YAML files of a folder."""

    @staticmethod
    def scheme() -> str:
        """Return the scheme of a search path's element."""
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a file's content, its text settings as they are written."""
        file = self._file(config_path)
        if not file.is_file():
            raise ConfigLoadError(f"Config not found : {file}")
        text = file.read_text(encoding="utf-8")
        header = self._get_header_dict(text)
        prefix = _package(config_path, header.get("package"))
        try:
            content = OmegaConf.create(
                quote_texts(
                    text,
                    lambda key: is_text(prefix + key) or f"{prefix}{key}".startswith(_SWEPT),
                )
            )
        except YAMLError as error:
            raise ConfigError(f"YAML: {file}: {' '.join(str(error).split())}") from error
        return ConfigResult(
            config=content,
            path=f"{SCHEME}://{self.path}",
            provider=self.provider,
            header=header,
        )

    def stamp(self, config_path: str) -> tuple[int, int]:
        """Return what changes with a file's content: its time in nanoseconds and its bytes."""
        found = self._file(config_path).stat()
        return found.st_mtime_ns, found.st_size

    def _file(self, config_path: str) -> Path:
        return Path(self.path, self._normalize_file_name(config_path))

    def available(self) -> bool:
        """Return whether the folder is there."""
        return self.is_group("")

    def is_group(self, config_path: str) -> bool:
        """Return whether there is such a folder below."""
        return Path(self.path, config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        """Return whether there is such a file below."""
        return self._file(config_path).is_file()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names of groups and files of a folder below."""
        found: list[str] = []
        for path in Path(self.path, config_path).iterdir():
            self._list_add_result(
                found, str(Path(config_path, path.name)), path.name, results_filter
            )
        return sorted(set(found))


class ConfPath(SearchPathPlugin):
    """Has the files of conf/ read by TextSource."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Look there before the folder that Hydra was given, which is the same."""
        search_path.prepend(provider=SCHEME, path=f"{SCHEME}://{CONF}", anchor="main")


def register_source() -> None:
    """Make both known to Hydra; may be repeated."""
    Plugins.instance().register(TextSource)
    Plugins.instance().register(ConfPath)


def _package(config_path: str, package: str | None) -> str:
    """Return the dotted path that a file's settings are below, with its last dot."""
    group = ".".join(config_path.split("/")[:-1])
    path = group if package is None else package.replace("_group_", group)
    path = path.removeprefix("_global_").strip(".")
    return f"{path}." if path else ""


def keep_texts(override: str, parser: OverridesParser) -> str:
    """Return an override with quotes around values of text settings that Hydra would convert.

    Args:
        override: as typed.
        parser: tells what a value would become.
    """
    key, equals, value = override.partition("=")
    path = key.lstrip("+~").partition("@")[0].replace("/", ".")
    return f"{key}{equals}{_keep(path, value, parser)}" if equals else override


def _keep(path: str, value: str, parser: OverridesParser) -> str:
    bare = value.strip()
    if len(parts := split(value)) > 1:
        return ",".join(_keep(path, part, parser) for part in parts)
    if call := _CALL.fullmatch(bare):
        return f"{call[1]}({_keep(path, call[2], parser)})"
    if bare.startswith("{") and bare.endswith("}"):
        items = [item.partition(":") for item in split(bare[1:-1]) if item.strip()]
        kept = (
            f"{key}{colon}{_keep(f'{path}.{key.strip()}', item, parser)}"
            for key, colon, item in items
        )
        return f"{{{','.join(kept)}}}"
    if bare.startswith("[") and bare.endswith("]"):
        inner = _keep(path, bare[1:-1], parser)
        return f"[{inner}]"
    is_call = _FUNCTION.fullmatch(bare) is not None
    if not is_text(path) or not bare or is_call or {*bare} & {*"'\"$"}:
        return value
    return quoted(bare) if _is_converted(bare, parser) else value


def _is_converted(value: str, parser: OverridesParser) -> bool:
    """Whether Hydra makes something else than a text or null of a value, or refuses it."""
    try:
        found: Any = parser.parse_override(f"x={value}").value()
    except HydraException:
        return True
    return found is not None and not isinstance(found, str)


def quoted(text: str) -> str:
    """Return a text as Hydra's parser takes it literally."""
    return QuotedString(text, Quote.single).with_quotes()


def split(text: str, separator: str = ",") -> list[str]:
    """Split at separators that are in no brackets and no quotes."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote and not parts[-1].endswith("\\") else quote
        elif char in "'\"":
            quote = char
        else:
            depth += (char in "[{(") - (char in "]})")
        if char == separator and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return parts
