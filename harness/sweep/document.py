"""`--json`: what a command found as one JSON document on stdout; what is said goes to stderr."""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from catalogue.terminal import show
from harness.folders import plain
from harness.point.full_disk import code_of, full_disk_ends
from reports.record.record import RunRecord

Document = dict[str, Any]


def print_document(command: Callable[[Document], int]) -> int:
    """Run a command and print the document that it fills, also if an error or Ctrl-C ends it.

    What the command prints goes to stderr. Returns its exit code; its error is raised again.
    """
    document: Document = {}
    try:
        with full_disk_ends(), redirect_stdout(sys.stderr):
            code = command(document)
    except BaseException as error:
        message = str(error) or type(error).__name__
        _write(document | {"kind": "error", "exit_code": code_of(error), "message": message})
        raise
    _write(document | {"exit_code": code})
    return code


def _write(document: Document) -> None:
    show([json.dumps(plain(document), indent=2)])


def of_runs(ended: Sequence[tuple[Path, RunRecord]], sweep: Path | None) -> Document:
    """Return the document of a run, or of a sweep's points, by their folders and records."""
    points = [
        {"folder": str(folder), "record": json.loads(record.to_json())} for folder, record in ended
    ]
    if sweep is None:
        return {"kind": "run", **(points[0] if points else {})}
    return {"kind": "sweep", "folder": str(sweep), "points": points}
