"""Checkpoints from a model hub: looked up in the caches first, downloaded when absent."""

import fnmatch
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from catalogue.checkpoint import (
    GIB,
    ModelUnavailableError,
    check_disk,
    folder_bytes,
    missing_files,
    unavailable,
)
from catalogue.entry import ModelSource
from catalogue.files import make_home, tightfit_home

logger = logging.getLogger(__name__)

_LOOKUP_TIMEOUT_S: Final = 5.0
_WANTED: Final = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt")
# Second copies of the weights in other layouts, which some repositories carry.
_UNWANTED: Final = ("*/*", "consolidated*")


def ensure_hub_model(
    name: str, source: ModelSource, *, report: Callable[[str], None] = logger.info
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
    for folder in snapshots(source):
        if not missing_files(folder):
            return folder
    needed_bytes = wanted_bytes(name, source)
    cache = make_home("hub")
    check_disk(name, cache, max(0, needed_bytes - downloaded_bytes(source)))
    report(f"{name}: downloading {source.repo} ({needed_bytes / GIB:.1f} GiB) into {cache}")
    folder = _download(name, source, _WANTED)
    if lacking := missing_files(folder):
        raise unavailable(
            name, f"{source.repo}: the download lacks {', '.join(lacking)}", "run it again"
        )
    return folder


def ensure_config(name: str, source: ModelSource) -> Path:
    """Return a folder with the repository's config.json, downloaded alone when it is absent.

    Raises:
        ModelUnavailableError: it is not to be had.
    """
    for folder in snapshots(source):
        if (folder / "config.json").is_file():
            return folder
    return _download(name, source, ("config.json",))


def snapshots(source: ModelSource) -> Iterator[Path]:
    """Yield the folders of a revision that there are, whole or in part: ours, then the user's."""
    from huggingface_hub import constants

    for cache in (tightfit_home() / "hub", Path(constants.HF_HUB_CACHE)):
        repository = cache / _folder_name(source)
        try:
            commit = (repository / "refs" / str(source.revision)).read_text(encoding="utf-8")
        except OSError:
            commit = str(source.revision)  # which it may be itself
        if (folder := repository / "snapshots" / commit.strip()).is_dir():
            yield folder


def downloaded_bytes(source: ModelSource) -> int:
    """Return the bytes of a repository in TIGHTFIT_HOME/hub, those of other revisions too."""
    return folder_bytes(own_repository(source) / "blobs")


def own_repository(source: ModelSource) -> Path:
    """Return the folder of a repository in TIGHTFIT_HOME/hub, which need not be there."""
    return tightfit_home() / "hub" / _folder_name(source)


def _folder_name(source: ModelSource) -> str:
    return f"models--{str(source.repo).replace('/', '--')}"


def cached() -> list[tuple[str, str]]:
    """Return (repository, revision) of every snapshot of a model in our cache and the user's.

    A revision is a branch or tag where one points to the snapshot, else the commit.
    """
    from huggingface_hub import constants, scan_cache_dir

    found: dict[tuple[str, str], None] = {}
    for cache in (tightfit_home() / "hub", Path(constants.HF_HUB_CACHE)):
        repositories = scan_cache_dir(cache).repos if cache.is_dir() else ()
        for repository in sorted(repositories, key=lambda each: each.repo_id):
            for revision in repository.revisions if repository.repo_type == "model" else ():
                names = sorted(revision.refs) or [revision.commit_hash]
                chosen = "main" if "main" in names else names[0]
                found[repository.repo_id, chosen] = None
    return list(found)


def wanted_bytes(name: str, source: ModelSource) -> int:
    """Return the bytes of the files that a download takes, asking the hub once.

    Raises:
        ModelUnavailableError: it cannot be reached, or has no such weights.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = HfApi().model_info(
            str(source.repo),
            revision=source.revision,
            files_metadata=True,
            timeout=_LOOKUP_TIMEOUT_S,
        )
    except (HfHubHTTPError, OSError, _transport_error()) as error:
        raise _refusal(name, source, error) from None
    wanted = [file for file in info.siblings or [] if _is_wanted(file.rfilename)]
    if not any(file.rfilename.endswith(".safetensors") for file in wanted):
        raise unavailable(name, f"{source.repo}: expected weights in safetensors, found none")
    return sum(file.size or 0 for file in wanted)


def _download(name: str, source: ModelSource, wanted: tuple[str, ...]) -> Path:
    """Download by the revision's own name, under which the cache finds it again offline."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        folder = snapshot_download(
            str(source.repo),
            revision=source.revision,
            cache_dir=tightfit_home() / "hub",
            etag_timeout=_LOOKUP_TIMEOUT_S,
            allow_patterns=list(wanted),
            ignore_patterns=list(_UNWANTED),
        )
    except (HfHubHTTPError, OSError, _transport_error()) as error:
        raise _refusal(name, source, error) from None
    return Path(folder)


def _is_wanted(file: str) -> bool:
    return any(fnmatch.fnmatch(file, pattern) for pattern in _WANTED) and not any(
        fnmatch.fnmatch(file, pattern) for pattern in _UNWANTED
    )


def _transport_error() -> type[Exception]:
    """Return the base class of connection failures in the HTTP client that the hub library uses."""
    from huggingface_hub import errors

    base: Any = errors.HfHubHTTPError.__mro__[1]
    return base if issubclass(base, Exception) else OSError


def _refusal(name: str, source: ModelSource, error: Exception) -> ModelUnavailableError:
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    elsewhere = (
        f"run `tightfit models fetch {source.repo}` where the hub can be reached and copy "
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
