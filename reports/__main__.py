"""`python -m reports FOLDER [--out DIR]`: rebuilds the reports of a run, a sweep or its plan."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from reports.load import is_run_folder, load_points
from reports.plan_figure import PLAN_CSV, write_plan_figure
from reports.record import RESULT_NAME, RecordError
from reports.render import REPORT_NAME, write_report, write_sweep_report

EXIT_NO_PACKAGE = 1
EXIT_BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the reports and print their paths.

    Returns:
        The exit code: 0, 1 where a package for drawing is missing, 2 on bad input.
    """
    parser = argparse.ArgumentParser(
        prog="python -m reports",
        description="Rebuild the report of a run, or of a sweep and all its points.",
    )
    parser.add_argument("folder", type=Path, help="the folder of a run or of a sweep")
    parser.add_argument("--out", type=Path, help="where to write (default: beside the records)")
    parser.add_argument(
        "--force",
        action="store_true",
        help="in a sweep, also rebuild the points whose report is newer than their record",
    )
    options = parser.parse_args(arguments)
    try:
        if is_run_folder(options.folder):
            _print_paths(write_report(options.folder, options.out))
            return 0
        if (options.folder / PLAN_CSV).is_file():
            sys.stdout.write(f"{write_plan_figure(options.folder, options.out)}\n")
            return 0
        return _sweep(options.folder, options.out, is_forced=options.force)
    except (RecordError, OSError) as error:
        sys.stderr.write(f"reports: {error}\n")
        return EXIT_BAD_INPUT
    except ImportError as error:
        sys.stderr.write(
            f"reports: {error}. Install the missing package, or copy the folder to a machine that "
            "has matplotlib and jinja2.\n"
        )
        return EXIT_NO_PACKAGE


def _sweep(folder: Path, out: Path | None, *, is_forced: bool) -> int:
    """Write each point's report and the sweep's; name the points that cannot be read."""
    problems = []
    for point in load_points(folder):
        if point.record is None:
            problems.append(f"{point.folder}: {point.problem}")
            continue
        target = point.folder if out is None else out / point.folder.relative_to(folder)
        if is_forced or not _is_current(target / REPORT_NAME, point.folder / RESULT_NAME):
            _print_paths(write_report(point.folder, target))
    _print_paths(write_sweep_report(folder, out))
    for problem in problems:
        sys.stderr.write(f"reports: {problem}\n")
    return EXIT_BAD_INPUT if problems else 0


def _is_current(report: Path, result: Path) -> bool:
    """Return whether a report exists that was written after its record."""
    return report.is_file() and report.stat().st_mtime_ns >= result.stat().st_mtime_ns


def _print_paths(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.suffix != ".png":
            sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    sys.exit(main())
