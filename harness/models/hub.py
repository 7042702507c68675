"""Checkpoints from a model hub: looked up in the caches first, downloaded when absent."""

import fnmatch
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from harness.models.disk import GIB, check_disk
from harness.models.errors import ModelUnavailableError, unavailable
from harness.models.home import tightfit_home

logger = logging.getLogger(__name__)

_LOOKUP_TIMEOUT_S: Final = 5.0
_WANTED: Final = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt")
# Second copies of the weights in other layouts, which some repositories carry.
_UNWANTED: Final = ("*/*", "consolidated*")


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """One repository at one revision."""

    repo: str
    revision: str


def missing_files(folder: Path) -> list[str]:
    """Return what a checkpoint folder lacks: config.json, and every safetensors file it needs.

    An index that is no such thing counts as lacking.
    """
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


def ensure_hub_model(
    name: str, source: HubSource, *, report: Callable[[str], None] = logger.info
) -> Path:
    """Return the folder of a complete snapshot, downloaded into TIGHTFIT_HOME/hub when absent.

    The user's own hub cache is used where it holds the snapshot already. Only weights in
    safetensors, configuration and tokenizer files are downloaded.

    Args:
        name: the model, for messages.
        source: repository and revision.
        report: gets one line before the download.

    Raises:
        ModelUnavailableError: offline, gated, unknown, no safetensors or no room; found out
            within seconds, before anything is written.
    """
    cache = tightfit_home() / "hub"
    for folder in (_cached(source, cache), _cached(source, None)):
        if folder is not None:
            return folder
    commit, needed_bytes = _look_up(name, source)
    cache.mkdir(parents=True, exist_ok=True)
    present_bytes = _present_bytes(source, cache)
    check_disk(name, cache, max(0, needed_bytes - present_bytes))
    report(f"{name}: downloading {source.repo} ({needed_bytes / GIB:.1f} GiB) into {cache}")
    return _download(name, source, commit, cache)


def _cached(source: HubSource, cache: Path | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(
            source.repo,
            revision=source.revision,
            cache_dir=cache,
            local_files_only=True,
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
        )
    except LocalEntryNotFoundError:
        return None
    return Path(found) if not missing_files(Path(found)) else None


def _look_up(name: str, source: HubSource) -> tuple[str, int]:
    """Return the commit and the bytes of the wanted files, asking the hub once."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = HfApi().model_info(
            source.repo, revision=source.revision, files_metadata=True, timeout=_LOOKUP_TIMEOUT_S
        )
    except (HfHubHTTPError, OSError, _transport_error()) as error:
        raise _refusal(name, source, error) from None
    wanted = [file for file in info.siblings or [] if _is_wanted(file.rfilename)]
    if not any(file.rfilename.endswith(".safetensors") for file in wanted):
        raise unavailable(name, f"{source.repo}: expected weights in safetensors, found none")
    return str(info.sha), sum(file.size or 0 for file in wanted)


def _download(name: str, source: HubSource, commit: str, cache: Path) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        folder = snapshot_download(
            source.repo,
            revision=commit,
            cache_dir=cache,
            etag_timeout=_LOOKUP_TIMEOUT_S,
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
        )
    except (HfHubHTTPError, OSError, _transport_error()) as error:
        raise _refusal(name, source, error) from None
    lacking = missing_files(Path(folder))
    if lacking:
        raise unavailable(
            name, f"{source.repo}: the download lacks {', '.join(lacking)}", "run it again"
        )
    return Path(folder)


def _is_wanted(file: str) -> bool:
    return any(fnmatch.fnmatch(file, pattern) for pattern in _WANTED) and not any(
        fnmatch.fnmatch(file, pattern) for pattern in _UNWANTED
    )


def _present_bytes(source: HubSource, cache: Path) -> int:
    blobs = cache / f"models--{source.repo.replace('/', '--')}" / "blobs"
    return sum(path.stat().st_size for path in blobs.glob("*")) if blobs.is_dir() else 0


def _transport_error() -> type[Exception]:
    """Return the base class of connection failures in the HTTP client that the hub library uses."""
    from huggingface_hub import errors

    base: Any = errors.HfHubHTTPError.__mro__[1]
    return base if issubclass(base, Exception) else OSError


def _refusal(name: str, source: HubSource, error: Exception) -> ModelUnavailableError:
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    elsewhere = (
        f"run `python -m harness.models fetch {name}` where the hub can be reached and copy "
        f"{tightfit_home() / 'hub'} here"
    )
    match error:
        case GatedRepoError():
            return unavailable(
                name,
                f"{source.repo} is gated and this login has no access",
                "ask for access on its page, then log in (`hf auth login`, or HF_TOKEN)",
            )
        case RepositoryNotFoundError():
            return unavailable(
                name,
                f"{source.repo}: the hub knows no such repository, or it is private",
                "check model.source.repo and your login",
            )
        case RevisionNotFoundError():
            return unavailable(
                name,
                f"{source.repo}: the hub knows no revision {source.revision!r}",
                "check model.source.revision",
            )
        case _:
            return unavailable(
                name,
                f"{source.repo} is not on this machine and the hub cannot be reached "
                f"({type(error).__name__})",
                elsewhere,
            )
