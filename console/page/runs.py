"""The view Runs: every run below HOME/runs, found anew for each page at little cost.

Folders are named by the time of their run, so their names alone give the order; a record is read
when the page with its row is asked for, and kept while its file does not change.
"""

import asyncio
import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from catalogue.files import read_json
from catalogue.processes import module_command, python_path
from console.page.texts import UNKNOWN
from reports.pages.index import COLUMNS, RUNS, SEARCHES, run_row
from reports.pages.sweep import SEARCH_NAME
from reports.pages.write import REPORT_NAME, SWEEP_NAME
from reports.record.folders import Point
from reports.record.record import RESULT_NAME, STATE_NAME, RecordError, RunRecord
from reports.record.text import ABSENT

COMPARE_NAME: Final = "compare.html"
PAGE: Final = 50
"""Rows of a page."""
MOST_ROWS: Final = 2000
"""Rows that are kept."""
SETTLED_NS: Final = 60 * 10**9
"""What lies in a folder that did not change for so long is kept."""
SEPARATOR: Final = "~"
"""In the id of a run, between the folder of a sweep and that of its point."""


class CompareError(Exception):
    """Runs that cannot be held against each other."""


@dataclass(frozen=True)
class Page:
    """A part of a list."""

    rows: list[dict[str, Any]]
    start: int
    total: int


class Runs:
    """The runs of a home; safe to use from several threads.

    Args:
        home: the folder that holds `runs`.
    """

    def __init__(self, home: Path) -> None:
        self.root = home / RUNS
        self._points: dict[str, tuple[int, tuple[str, ...]]] = {}
        self._rows: OrderedDict[str, tuple[int, dict[str, Any]]] = OrderedDict()

    def page(self, start: int = 0, words: str = "") -> Page:
        """Return the rows from a place on, the newest first.

        Args:
            start: how many are before them.
            words: part of a run's folder; empty: all.
        """
        ids = [each for each in self._ids() if words.lower() in each.lower()]
        return Page([self._row(each) for each in ids[start : start + PAGE]], start, len(ids))

    def folder(self, run_id: str) -> Path | None:
        """Return the folder of a run that there is; None: there is none of this id."""
        return self._folder(run_id) if run_id in self._ids() else None

    def _ids(self) -> list[str]:
        try:
            with os.scandir(self.root) as entries:
                names = sorted(
                    (each.name for each in entries if each.is_dir(follow_symlinks=False)),
                    reverse=True,
                )
        except FileNotFoundError:
            return []
        for gone in self._points.keys() - set(names):
            self._points.pop(gone, None)
        return [each for name in names for each in self._ids_of(name)]

    def _ids_of(self, name: str) -> tuple[str, ...]:
        """Return the run of a folder, or those of the points of a sweep."""
        folder = self.root / name
        try:
            changed_ns = folder.stat().st_mtime_ns
            known = self._points.get(name)
            if known is not None and known[0] == changed_ns:
                return known[1]
            ids = _points_of(folder)
        except OSError:
            return ()
        # The folder of a point is made a moment before its files.
        if time.time_ns() - changed_ns > SETTLED_NS:
            self._points[name] = (changed_ns, ids)
        return ids

    def _folder(self, run_id: str) -> Path:
        return self.root.joinpath(*run_id.split(SEPARATOR))

    def _row(self, run_id: str) -> dict[str, Any]:
        folder = self._folder(run_id)
        result = folder / RESULT_NAME
        changed_ns = result.stat().st_mtime_ns if result.is_file() else 0
        known = self._rows.get(run_id)
        if known is not None and changed_ns and known[0] == changed_ns:
            return known[1]
        row = _row(run_id, folder)
        self._rows[run_id] = (changed_ns, row)
        while len(self._rows) > MOST_ROWS:
            self._rows.popitem(last=False)
        return row


def _points_of(folder: Path) -> tuple[str, ...]:
    found = []
    for path, subfolders, files in os.walk(folder):
        if RESULT_NAME in files or STATE_NAME in files:
            subfolders.clear()
            found.append(SEPARATOR.join((folder.name, *Path(path).relative_to(folder).parts)))
    return tuple(sorted(found, key=lambda each: [part.zfill(8) for part in each.split(SEPARATOR)]))


def _row(run_id: str, folder: Path) -> dict[str, Any]:
    """Return what the table shows of a run."""
    row = run_row(_point(folder))
    report = folder / REPORT_NAME
    name, started, model, offload, _, _, status, *figures = row.cells
    return {
        "id": run_id,
        "name": run_id.replace(SEPARATOR, "/"),
        "title": name,
        "started": started,
        "model": model,
        "offload": offload,
        "status": status,
        "kind": row.kind,
        "figures": [UNKNOWN if value == ABSENT else value for value in figures],
        "address": file_address(run_id, REPORT_NAME) if report.is_file() else None,
        "is_read": row.is_read,
    }


def _point(folder: Path) -> Point:
    try:
        return Point(folder=folder, record=RunRecord.read(folder / RESULT_NAME))
    except (RecordError, OSError) as error:
        problem = "has not ended" if not (folder / RESULT_NAME).is_file() else str(error)
        return Point(folder=folder, record=None, problem=problem)


def file_address(run_id: str, name: str, kind: str = RUNS) -> str:
    """Return the address of a file of a run, or of a search."""
    return f"/{kind}/files/{quote(run_id.replace(SEPARATOR, '/'))}/{quote(name)}"


def searches(root: Path) -> list[dict[str, Any]]:
    """Return what the table shows of the newest searches below a folder: name, goal, report."""
    names = [path.parent for path in root.glob(f"*/{SEARCH_NAME}")]
    newest = sorted(names, key=lambda folder: folder.stat().st_mtime, reverse=True)
    return [
        {
            "name": folder.name,
            "goal": read_json(folder / SEARCH_NAME).get("objective", UNKNOWN),
            "trials": sum((each / RESULT_NAME).is_file() for each in folder.iterdir()),
            "address": file_address(folder.name, SWEEP_NAME, SEARCHES)
            if (folder / SWEEP_NAME).is_file()
            else None,
        }
        for folder in newest[:PAGE]
    ]


def columns() -> list[str]:
    """Return the headings of the figures."""
    return [metrics[0].heading for metrics in COLUMNS]


async def compare(folders: Sequence[Path], target: Path) -> Path:
    """Write the page that holds runs against the first of them; return its path.

    Args:
        folders: of the runs.
        target: folder of all such pages.

    Raises:
        CompareError: the runs are not of the same work, or drawing failed.
    """
    key = hashlib.sha256("\n".join(map(str, folders)).encode()).hexdigest()[:24]
    report = target / key / COMPARE_NAME
    newest_ns = max((folder / RESULT_NAME).stat().st_mtime_ns for folder in folders)
    if report.is_file() and report.stat().st_mtime_ns > newest_ns:
        return report
    child = await asyncio.create_subprocess_exec(
        *(*module_command("reports"), "compare", *map(str, folders)),
        *("--out", str(report.parent)),
        env={**os.environ, "PYTHONPATH": python_path(os.environ.get("PYTHONPATH", ""))},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await child.communicate()
    if child.returncode != 0 or not report.is_file():
        lines = said.decode(errors="replace").strip().splitlines()
        raise CompareError(
            lines[-1].removeprefix("reports: ") if lines else "The runs could not be compared."
        )
    return report
