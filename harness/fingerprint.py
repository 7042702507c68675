"""What makes two points one measurement, as a hash: settings, files, code, card, versions."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from catalogue.files import expanded
from harness.describe import config_hash
from harness.plain import plain
from harness.schema import RunConfig

__all__ = ["fingerprint", "input_hashes"]


def fingerprint(
    config: RunConfig, environment: Mapping[str, Any], inputs: Mapping[str, str | None]
) -> str:
    """Return a hash that is equal for points whose results may stand for each other.

    It covers the resolved configuration without what changes no result (as in config_hash), the
    content of prompts and traces, names, sizes and times of the files in model.path, commit and
    uncommitted changes, card and driver, processor, versions, and the switches of the engine.

    Args:
        config: of the point.
        environment: of the machine, as environment.collect returns it.
        inputs: the point's input_hashes.
    """
    gpu = environment.get("gpu") or {}
    facts = {
        "config": config_hash(config.to_dict()),
        "files": {**inputs, **_model_files(config)},
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
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:  # the point says so where it reads its prompts
        return None


def _model_files(config: RunConfig) -> dict[str, object]:
    """Return names, sizes and times of the files in model.path, nothing without one."""
    if config.model.path is None:
        return {}
    folder = expanded(config.model.path)
    files = sorted(path for path in folder.glob("*") if path.is_file())
    stats = [(path.name, path.stat()) for path in files]
    return {"model": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]}
