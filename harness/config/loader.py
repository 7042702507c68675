"""Hydra's loader, which reads each file once and merges equal choices once."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import (
    CachingConfigRepository,
    ConfigRepository,
    IConfigRepository,
)
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig

from harness.config.source import TextSource

_NUM_MERGED: Final = 64

_Key = tuple[Any, ...]


class _Files(ConfigRepository):
    """Configurations by name; those read before are kept while their file stays as it was."""

    def __init__(
        self, config_search_path: ConfigSearchPath, kept: dict[_Key, ConfigResult]
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
            found = super().load_config(config_path)
            if found is None:
                return None
            self._kept[key] = found
        return copy.copy(self._kept[key])

    def key(self, config_path: str) -> _Key | None:
        """Return what identifies a configuration and its version; None: it is not kept."""
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is None or source.scheme() == "file":
            return None
        stamp = source.stamp(config_path) if isinstance(source, TextSource) else None
        return source.scheme(), source.path, source.provider, config_path, stamp


class Loader(ConfigLoaderImpl):
    """A loader for many compositions.

    Args:
        config_search_path: where configurations are.
    """

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = _Files(config_search_path, {})
        self._merged: dict[tuple[_Key, ...], DictConfig] = {}

    def _compose_config_from_defaults_list(
        self, defaults: list[ResultDefault], repo: IConfigRepository
    ) -> DictConfig:
        key = _key(defaults, repo)
        if key is None:
            return super()._compose_config_from_defaults_list(defaults, repo)
        if key not in self._merged:
            while len(self._merged) >= _NUM_MERGED:
                del self._merged[next(iter(self._merged))]
            self._merged[key] = super()._compose_config_from_defaults_list(defaults, repo)
        return copy.deepcopy(self._merged[key])

    def _load_single_config(self, default: ResultDefault, repo: IConfigRepository) -> ConfigResult:
        found = super()._load_single_config(default, repo)
        # Merging moves nodes out of what it is given, and the file's content is kept.
        return replace(found, config=copy.deepcopy(found.config))


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
