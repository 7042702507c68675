"""`--json`: what a command found as one JSON document on stdout; what is said goes to stderr."""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from catalogue.terminal import error_document, say_error, show_document
from engine.errors import ConfigError
from harness.folders import plain
from harness.point.full_disk import DiskFullError, code_of, full_disk_ends
from reports.record.record import RunRecord

Document = dict[str, Any]


def print_document(command: Callable[[Document], int]) -> int:
    """Run a command and print the document that it fills, also if an error or Ctrl-C ends it.

    What the command prints goes to stderr, as does a refusal. Returns its exit code; Ctrl-C and
    errors that are not expected are raised again.
    """
    document: Document = {}
    try:
        with full_disk_ends(), redirect_stdout(sys.stderr):
            code = command(document)
    except (ConfigError, DiskFullError) as error:
        return say_error(error, ["--json"], code_of(error), plain(document))
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt)
        message = "interrupted" if stopped else str(error) or type(error).__name__
        show_document(plain(document) | error_document(message, code_of(error)))
        raise
    show_document(plain(document | {"exit_code": code}))
    return code


def of_runs(ended: Sequence[tuple[Path, RunRecord]], sweep: Path | None) -> Document:
    """Return the document of a run, or of a sweep's points, by their folders and records."""
    points = [
        {"folder": str(folder), "record": json.loads(record.to_json())} for folder, record in ended
    ]
    if sweep is None:
        return {"kind": "run", **(points[0] if points else {})}
    return {"kind": "sweep", "folder": str(sweep), "points": points}
