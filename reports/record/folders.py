"""Finds and reads the records in a run's folder, or in all run folders below a sweep's folder."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from reports.record.record import (
    RESULT_NAME,
    STATE_NAME,
    RecordError,
    RunRecord,
    write_text_atomic,
)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run folder of a sweep: its record, or the reason why there is none."""

    folder: Path
    record: RunRecord | None
    problem: str | None = None
    """Set exactly where record is None."""


PLANNED_NAME: Final = "sweep.json"
"""File in a sweep's folder with what is known before its points run."""


@dataclass(frozen=True, kw_only=True)
class SweepNote:
    """What is known of a sweep before its points run."""

    num_points: int | None = None
    """How many it has, also those that never begin; None: not known."""
    command: str = ""
    """What runs it again."""
    title: str = ""
    """What it asks, such as: smollm2_135m: offload x memory_gib, 4 points."""


def write_planned(sweep: Path, note: SweepNote) -> None:
    """Note it in a sweep's folder."""
    sweep.mkdir(parents=True, exist_ok=True)
    write_text_atomic(sweep / PLANNED_NAME, json.dumps(asdict(note)) + "\n")


def read_planned(sweep: Path) -> SweepNote:
    """Return what was noted in a sweep's folder."""
    try:
        found = json.loads((sweep / PLANNED_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    noted = found if isinstance(found, dict) else {}
    num_points = noted.get("num_points")
    return SweepNote(
        num_points=num_points if isinstance(num_points, int) else None,
        command=str(noted.get("command") or ""),
        title=str(noted.get("title") or ""),
    )


def is_run_folder(folder: Path) -> bool:
    """Return whether the folder holds a `result.json` of its own."""
    return (folder / RESULT_NAME).is_file()


def load_run(folder: Path) -> RunRecord:
    """Return the record of one run folder.

    Raises:
        RecordError: when the folder or its record is absent or cannot be read.
    """
    _require_folder(folder)
    if not is_run_folder(folder) and (points := sorted(folder.glob(f"*/{RESULT_NAME}"))):
        raise RecordError(
            f"{folder}: expected the folder of a run, got that of a sweep. Give one of its points, "
            f"such as {points[0].parent}."
        )
    if not is_run_folder(folder):
        raise RecordError(
            f"{folder}: expected {RESULT_NAME}, found none. A run writes it when it ends."
        )
    return RunRecord.read(folder / RESULT_NAME)


def load_points(folder: Path) -> list[Point]:
    """Return every run below a folder, ordered by path (numbers in names by value).

    A run folder's own subfolders are not searched. A run whose record cannot be read, or that
    left a `state.json` and no record, is a point with a problem instead of a record.

    Raises:
        RecordError: when the folder is absent or holds no run.
    """
    _require_folder(folder)
    points = list(each_point(folder))
    if not points:
        raise RecordError(
            f"{folder}: no {RESULT_NAME} here or in any folder below."
            " Give a run's folder or a sweep's folder."
        )
    return sorted(points, key=lambda point: _natural(point.folder.relative_to(folder)))


def each_point(folder: Path) -> Iterator[Point]:
    """Yield what load_points returns, in any order and one record at a time; none: nothing."""
    for path in _run_folders(folder):
        yield _load_point(path)


def _require_folder(folder: Path) -> None:
    if not folder.exists():
        raise RecordError(
            f"{folder}: no such folder. Give the folder of a run, which its summary names, or of a "
            "sweep."
        )
    if not folder.is_dir():
        raise RecordError(
            f"{folder}: expected a folder, got a file. Give the folder that holds it."
        )


def _run_folders(folder: Path) -> Iterator[Path]:
    for path, subfolders, files in os.walk(folder):
        if RESULT_NAME in files or STATE_NAME in files:
            subfolders.clear()
            yield Path(path)


def _load_point(folder: Path) -> Point:
    if not is_run_folder(folder):
        problem = f"no {RESULT_NAME}: the run has not ended, or its harness was ended."
        return Point(folder=folder, record=None, problem=problem)
    try:
        return Point(folder=folder, record=RunRecord.read(folder / RESULT_NAME))
    except RecordError as error:
        return Point(folder=folder, record=None, problem=str(error))


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a sort key in which 2_x comes before 10_x."""
    key = []
    for part in path.parts:
        digits = len(part) - len(part.lstrip("0123456789"))
        key.append((int(part[:digits] or 0), part))
    return key
