"""Files and overrides as Hydra reads them: texts kept as written, each file read once."""

import copy
import functools
import pickle
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast
from unittest.mock import patch

from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import (
    CachingConfigRepository,
    ConfigRepository,
    IConfigRepository,
)
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import InputDefault, ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult
from omegaconf import DictConfig, OmegaConf
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


class TextSource(FileConfigSource):
    """YAML files of a folder, whose text settings are as they are written."""

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
                    text, lambda key: is_text(prefix + key) or f"{prefix}{key}".startswith(_SWEPT)
                )
            )
        except YAMLError as error:
            raise ConfigError(f"YAML: {file}: {' '.join(str(error).split())}") from error
        return ConfigResult(
            config=content, path=f"{SCHEME}://{self.path}", provider=self.provider, header=header
        )

    def stamp(self, config_path: str) -> tuple[int, int]:
        """Return what changes with a file's content: its time in nanoseconds and its bytes."""
        found = self._file(config_path).stat()
        return found.st_mtime_ns, found.st_size

    def _file(self, config_path: str) -> Path:
        return Path(self.path, self._normalize_file_name(config_path))


def _package(config_path: str, package: str | None) -> str:
    """Return the dotted path that a file's settings are below, with its last dot."""
    group = ".".join(config_path.split("/")[:-1])
    path = group if package is None else package.replace("_group_", group)
    path = path.removeprefix("_global_").strip(".")
    return f"{path}." if path else ""


_NUM_MERGED: Final = 64
_Key = tuple[Any, ...]


class _Files(ConfigRepository):
    """Configurations by name; those read before are kept while their file stays as it was."""

    def __init__(
        self, config_search_path: ConfigSearchPath, kept: dict[_Key, ConfigResult | None]
    ) -> None:
        self._search_path, self._kept = config_search_path, kept
        super().__init__(config_search_path)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Files":
        """Return one with sources of its own; Hydra takes one for each composition."""
        return _Files(self._search_path, self._kept)

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Return a configuration, whose content must not be changed."""
        key = self.key(config_path)
        if key is None:
            return super().load_config(config_path)
        if key not in self._kept:
            self._kept[key] = super().load_config(config_path)
        return copy.copy(self._kept[key])

    def key(self, config_path: str) -> _Key | None:
        """Return what identifies a configuration and its version; None: it is not kept."""
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is None or source.scheme() == "file":
            return None
        stamp = source.stamp(config_path) if isinstance(source, TextSource) else None
        return source.scheme(), source.path, source.provider, config_path, stamp


class Loader(ConfigLoaderImpl):
    """A loader for many compositions."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = _Files(config_search_path, {})
        self._merged: dict[tuple[_Key, ...], bytes] = {}
        """Pickled."""
        self._options: dict[_Key, list[str]] = {}
        """Names of a group's files, by group, kind and time of its folder."""

    def load_configuration(self, *args: Any, **keywords: Any) -> DictConfig:
        """Compose a configuration, as Hydra does."""
        with _few_interpolation_maps():
            return super().load_configuration(*args, **keywords)

    def get_group_options(
        self,
        group_name: str,
        results_filter: ObjectType | None = ObjectType.CONFIG,
        config_name: str | None = None,
        overrides: list[str] | None = None,
    ) -> list[str]:
        """Return the names of a group's files; looked for again once its folder has changed."""
        if config_name is not None or overrides:
            return super().get_group_options(group_name, results_filter, config_name, overrides)
        folder = CONF / group_name
        key = (group_name, results_filter, folder.stat().st_mtime_ns if folder.is_dir() else None)
        if key not in self._options:
            self._options[key] = super().get_group_options(group_name, results_filter)
        return list(self._options[key])

    def _compose_config_from_defaults_list(
        self, defaults: list[ResultDefault], repo: IConfigRepository
    ) -> DictConfig:
        key = _key(defaults, repo)
        if key is None:
            return super()._compose_config_from_defaults_list(defaults, repo)
        if key not in self._merged:
            while len(self._merged) >= _NUM_MERGED:
                del self._merged[next(iter(self._merged))]
            merged = super()._compose_config_from_defaults_list(defaults, repo)
            self._merged[key] = _pickled(merged)
        return _unpickled(self._merged[key])

    def _load_single_config(self, default: ResultDefault, repo: IConfigRepository) -> ConfigResult:
        found = super()._load_single_config(default, repo)
        # Merging moves nodes out of what it is given, and the file's content is kept.
        return replace(found, config=copy.deepcopy(found.config))


@contextmanager
def _few_interpolation_maps() -> Iterator[None]:
    """Have Hydra map choices only where a defaults list refers to one: a quarter of a composition.

    It makes the map for every file, and reads it for an interpolation alone.
    """
    make = defaults_list._create_interpolation_map  # noqa: SLF001

    def made(overrides: Any, defaults: list[InputDefault], self_added: bool) -> DictConfig | None:
        is_read = any(default.is_interpolation() for default in defaults)
        return make(overrides, defaults, self_added) if is_read else None

    with patch.object(defaults_list, "_create_interpolation_map", made):
        yield


def copied(config: DictConfig) -> DictConfig:
    """Return a copy; by pickle it takes a third of the time of a deep copy."""
    return _unpickled(_pickled(config))


def _pickled(config: DictConfig) -> bytes:
    return pickle.dumps(config, pickle.HIGHEST_PROTOCOL)


def _unpickled(data: bytes) -> DictConfig:
    return cast("DictConfig", pickle.loads(data))  # noqa: S301  of this process


def _key(defaults: Sequence[ResultDefault], repo: IConfigRepository) -> tuple[_Key, ...] | None:
    """Return what a composition without values is made of; None: not all of it is kept."""
    if not isinstance(repo, CachingConfigRepository) or not isinstance(repo.delegate, _Files):
        return None
    found = []
    for default in defaults:
        key = repo.delegate.key(str(default.config_path))
        if key is None:
            return None
        found.append((key, default.package, default.is_self, default.primary))
    return tuple(found)


def keep_texts(override: str, parser: OverridesParser) -> str:
    """Return an override with quotes around values of text settings that Hydra would convert.

    Colons of a plain text have no backslash, which Hydra adds to the values of a sweep.
    """
    key, equals, value = override.partition("=")
    if not {*value} & {*"'\"[{"}:
        value = value.replace("\\:", ":")
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
