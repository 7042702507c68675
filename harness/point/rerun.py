"""Points that ended, by their fingerprint, and how a sweep takes one over that ran before."""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from catalogue.checkpoint import file_stamps, sha256_of
from catalogue.files import expanded, read_json
from harness.config.schema import RunConfig
from harness.folders import plain
from harness.point.describe import config_hash
from reports.record.record import RESULT_NAME, RecordError, RunRecord, write_text_atomic


def fingerprint(
    config: RunConfig, environment: Mapping[str, Any], inputs: Mapping[str, str | None]
) -> str:
    """Return a hash that is equal for points whose results may stand for each other.

    It covers the resolved configuration without what changes no result (as in config_hash), the
    content of prompts and traces, names, sizes and times of the files in model.path, commit and
    uncommitted changes, card and driver, processor, versions, and the switches of the engine.
    """
    gpu, path = environment.get("gpu") or {}, config.model.path
    facts = {
        "config": config_hash(config.to_dict()),
        "files": dict(inputs) if path is None else {**inputs, "model": file_stamps(expanded(path))},
        "git": environment.get("git"),
        "gpu": {key: gpu.get(key) for key in ("name", "memory_bytes")},
        "cpu": (environment.get("cpu") or {}).get("name"),
        **{key: environment.get(key) for key in ("driver", "cuda", "python", "packages")},
        "switches": environment.get("switches"),
    }
    text = json.dumps(plain(facts), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def input_hashes(config: RunConfig) -> dict[str, str | None]:
    """Return the SHA-256 of each file of prompts and trace by its setting.

    None of a file that is absent or cannot be read.
    """
    paths = {name: expanded(file) for name, file in config.scenario.files().items()}
    return {name: _sha256(path) for name, path in paths.items()}


def _sha256(path: Path) -> str | None:
    try:
        return sha256_of(path)
    except OSError:  # the point says so where it reads its prompts
        return None


FOLDER: Final = "points"
TAKEN_FROM: Final = "taken_from"
"""Key of `effective`: the folder in which the point ran."""
_OWN: Final = ("config.yaml", "overrides.yaml", "harness.log", RESULT_NAME, ".hydra")
"""What a folder has of its own and does not take over."""
_REPORT_NAME: Final = "report.html"


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A point that ended, and where it ran."""

    folder: Path
    record: RunRecord


class FinishedPoints:
    """One small file for each point that ended; the newest of equal points counts."""

    def __init__(self, home: Path) -> None:
        self._home, self._folder = home, home / FOLDER

    def note(self, key: str, folder: Path, record: RunRecord) -> None:
        """Remember a point that ended by itself; one that was skipped or interrupted did not."""
        if record.status == "skipped" or (record.error or {}).get("type") == "Interrupted":
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        home = self._home
        facts = {
            # As seen from the home where it lies in it, so that both can move.
            "folder": str(folder.relative_to(home) if folder.is_relative_to(home) else folder),
            "run_id": record.run_id,
            "status": record.status,
            "noted_s": time.time(),
        }
        write_text_atomic(self._folder / f"{key}.json", json.dumps(facts) + "\n")

    def find(self, key: str, rerun: str, *, before_s: float | None = None) -> Finished | None:
        """Return the point that need not run again, None where it must.

        With rerun=failed a point that ended ok need not, with invalid unless it is not valid, with
        none whatever its end was. Only a point that ended before `before_s` (since 1970) counts:
        equal points of one sweep are repeats.
        """
        facts = read_json(self._folder / f"{key}.json")
        if rerun == "all" or not facts:
            return None
        if before_s is not None and not facts.get("noted_s", 0) < before_s:
            return None
        folder = self._home / str(facts.get("folder"))
        try:
            record = RunRecord.read(folder / RESULT_NAME)
        except RecordError:
            return None  # the folder is gone
        is_same = record.run_id == facts.get("run_id")
        is_good = record.status == "ok" and not (rerun == "invalid" and record.valid is False)
        stands = is_same and (is_good or rerun == "none")
        return Finished(folder=folder, record=record) if stands else None


def take_over(
    found: Finished,
    folder: Path,
    *,
    name: str,
    overrides: Sequence[str],
    config_dir: str | None = None,
) -> RunRecord:
    """Copy a finished point into a folder of this sweep; return its record there.

    The figures, the run id and the times are those of the run that measured them;
    `effective.taken_from` names its folder.
    """
    for path in sorted(found.folder.iterdir()):
        if path.name in _OWN or (folder / path.name).exists():
            continue
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            if path.is_dir():
                shutil.copytree(path, folder / path.name)
            else:
                shutil.copy2(path, folder / path.name)
    origin = found.record.effective.get(TAKEN_FROM) or str(found.folder)
    effective = found.record.effective | {TAKEN_FROM: origin}
    if config_dir != effective.get("config_dir"):
        effective["config_dir"] = config_dir
    record = replace(found.record, name=name, overrides=list(overrides), effective=effective)
    record.write(folder / RESULT_NAME)
    if (name, list(overrides)) == (found.record.name, found.record.overrides):
        with contextlib.suppress(FileNotFoundError):
            os.utime(folder / _REPORT_NAME)  # as new as the record: it is not drawn again
    return record
