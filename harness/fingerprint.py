"""What makes two points one measurement, as a hash: settings, files, code, card, versions."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.describe import config_hash
from harness.plain import plain
from harness.schema import RunConfig

__all__ = ["fingerprint", "input_hashes"]


def fingerprint(config: RunConfig, environment: Mapping[str, Any]) -> str:
    """Return a hash that is equal for points whose results may stand for each other.

    It covers the resolved configuration without what changes no result (as in config_hash), the
    content of prompts and traces, names, sizes and times of the files in model.path, commit and
    uncommitted changes, card and driver, processor, versions, and the switches of the engine.

    Args:
        config: of the point.
        environment: of the machine, as environment.collect returns it.
    """
    gpu = environment.get("gpu") or {}
    facts = {
        "config": config_hash(config.to_dict()),
        "files": dict(_files(config)),
        "git": environment.get("git"),
        "gpu": {key: gpu.get(key) for key in ("name", "memory_bytes")},
        "cpu": (environment.get("cpu") or {}).get("name"),
        **{key: environment.get(key) for key in ("driver", "cuda", "python", "packages")},
        "switches": environment.get("switches"),
    }
    text = json.dumps(plain(facts), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def input_hashes(config: RunConfig) -> dict[str, str | None]:
    """Return the SHA-256 of each file of prompts and trace by its setting; None of absent ones."""
    paths = {name: Path(file).expanduser() for name, file in config.scenario.files().items()}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
        for name, path in paths.items()
    }


def _files(config: RunConfig) -> Iterator[tuple[str, object]]:
    """Yield what names the content of every file that the point reads."""
    yield from input_hashes(config).items()
    if config.model.path is not None:
        folder = Path(config.model.path).expanduser()
        files = sorted(path for path in folder.glob("*") if path.is_file())
        stats = [(path.name, path.stat()) for path in files]
        yield "model", [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
