"""Pages and figures of a finished folder, made by `python -m reports` in a process of its own."""

import subprocess
import sys
from pathlib import Path
from typing import Final

REPORT_TIMEOUT_S: Final = 180


def build_report(folder: Path) -> list[str]:
    """Make the report of a run's or a sweep's folder; return warnings, one at most.

    The record is complete without it: a machine without the drawing packages, or a report that
    fails, costs no run.
    """
    again = f"python -m reports {folder}"
    root = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(
            [sys.executable, "-m", "reports", str(folder)],
            cwd=root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # of a path that the locale spells otherwise
            timeout=REPORT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"report: not made: {error}. Later: {again}"]
    if done.returncode == 0:
        return []
    lines = done.stderr.strip().splitlines()
    reason = lines[-1].rstrip(".") if lines else "no message"
    return [f"report: not made: {reason}. Later: {again}"]
