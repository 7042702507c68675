"""What a load found out about a checkpoint, kept in a folder that the caller names; no torch."""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from engine.model.checkpoint import LENGTH_BYTES, checkpoint_files

VERSION: Final = 1
"""Version of what codes can hold: a note of another one counts as none."""
SAMPLE_BYTES: Final = 1 << 16
"""Read at the end of each file: checkpoints of equal shapes have equal headers and sizes."""


def checkpoint_identity(folder: Path) -> str:
    """Return a hash of the safetensors files: names, sizes, headers, and their last bytes.

    Raises:
        OSError: A file cannot be read.
        CheckpointError: The index of the files is damaged.
    """
    digest = hashlib.sha256()
    for file in checkpoint_files(folder):
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            header = stream.read(min(length, size))
            stream.seek(max(0, size - SAMPLE_BYTES))
            for part in (file.name.encode(), str(size).encode(), header, stream.read()):
                digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def copy_folder(copies: Path, checkpoint: Path) -> Path:
    """Return the folder of a checkpoint's copy in codes.

    Args:
        copies: Holds those of all checkpoints.
        checkpoint: The folder of its files.
    """
    whole = checkpoint.resolve()
    digest = hashlib.blake2b(str(whole).encode(), digest_size=6).hexdigest()
    return copies / f"{whole.name}-{digest}"


def read_unpackable(facts_folder: str | None, checkpoint: str | None) -> dict[str, str]:
    """Return why tensors of a checkpoint cannot be kept in codes, by name, as a load found.

    Args:
        facts_folder: Where loads note it; None: nowhere.
        checkpoint: The folder of its files; None: there are none.
    """
    if facts_folder is None or checkpoint is None or not Path(facts_folder).is_dir():
        return {}
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        file = _file(facts_folder, checkpoint)
        note = json.loads(file.read_text(encoding="utf-8"))
        if note["version"] == VERSION:
            return {str(name): str(reason) for name, reason in note["unpackable"].items()}
    return {}


def write_unpackable(facts_folder: str | None, checkpoint: str, reasons: Mapping[str, str]) -> None:
    """Note them; where the folder cannot be written, the next load finds them out again."""
    if facts_folder is None:
        return
    with suppress(OSError):
        file = _file(facts_folder, checkpoint)
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        note = {"version": VERSION, "checkpoint": checkpoint, "unpackable": dict(reasons)}
        text = json.dumps(note, indent=1)
        new.write_text(f"{text}\n", encoding="utf-8")
        new.replace(file)


def _file(facts_folder: str, checkpoint: str) -> Path:
    return Path(facts_folder) / f"{checkpoint_identity(Path(checkpoint))}.json"
