"""`python -m reports FOLDER [--out DIR]`: rebuilds the reports of a run, a sweep or its plan.

`python -m reports compare RUN RUN...` holds runs of the same work against each other.
`python -m reports index HOME` lists every run of a home on one page.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from reports.figures.comparisons import PLAN_CSV, write_plan_figure
from reports.pages.index import write_index
from reports.pages.write import REPORT_NAME, write_compare_report, write_report, write_sweep_report
from reports.record.folders import is_run_folder, load_points
from reports.record.record import RESULT_NAME, RecordError

EXIT_NO_PACKAGE = 1
EXIT_BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the reports and print their paths.

    Returns:
        The exit code: 0, 1 where a package for drawing is missing, 2 on bad input.
    """
    typed = list(sys.argv[1:] if arguments is None else arguments)
    if typed[:1] == ["compare"]:
        return _guarded(lambda: _compare(typed[1:]))
    if typed[:1] == ["index"]:
        return _guarded(lambda: _index(typed[1:]))
    parser = argparse.ArgumentParser(
        prog="python -m reports",
        description="Rebuild the report of a run, or of a sweep and all its points. "
        "`compare RUN RUN...` compares runs of the same work with the first of them. "
        "`index HOME` lists every run of a home on one page.",
    )
    parser.add_argument("folder", type=Path, help="the folder of a run or of a sweep")
    parser.add_argument("--out", type=Path, help="where to write (default: beside the records)")
    parser.add_argument(
        "--force",
        action="store_true",
        help="in a sweep, also rebuild the points whose report is newer than their record",
    )
    options = parser.parse_args(typed)
    return _guarded(lambda: _rebuild(options.folder, options.out, is_forced=options.force))


def _rebuild(folder: Path, out: Path | None, *, is_forced: bool) -> int:
    if is_run_folder(folder):
        _print_paths(write_report(folder, out))
        return 0
    if (folder / PLAN_CSV).is_file():
        sys.stdout.write(f"{write_plan_figure(folder, out)}\n")
        return 0
    return _sweep(folder, out, is_forced=is_forced)


def _index(typed: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m reports index", description="List every run of a home on one page."
    )
    parser.add_argument("home", type=Path, help="the folder that holds runs (TIGHTFIT_HOME)")
    _print_paths([write_index(parser.parse_args(typed).home)])
    return 0


def _compare(typed: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m reports compare",
        description="Compare runs of the same work with the first of them.",
    )
    parser.add_argument("run", type=Path, nargs="+", help="the folder of a run; the first: base")
    parser.add_argument(
        "--out", type=Path, default=Path("comparison"), help="where to write (default: comparison)"
    )
    options = parser.parse_args(typed)
    if len(options.run) < 2:
        raise RecordError(
            "compare: expected at least two runs, got one. Name the folder of another one."
        )
    paths = write_compare_report(options.run, options.out)
    (text,) = [path for path in paths if path.suffix == ".md"]
    sys.stdout.write(text.read_text(encoding="utf-8"))
    _print_paths(paths)
    return 0


def _guarded(work: Callable[[], int]) -> int:
    """Return the exit code of `work`, or that of an error, which is printed."""
    try:
        return work()
    except (RecordError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_BAD_INPUT
    except ImportError as error:
        sys.stderr.write(
            f"error: {error}. Install the missing package, or copy the folder to a machine that "
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
        sys.stderr.write(f"warning: {problem}\n")
    return EXIT_BAD_INPUT if problems else 0


def _is_current(report: Path, result: Path) -> bool:
    """Return whether a report exists that was written after its record."""
    return report.is_file() and report.stat().st_mtime_ns >= result.stat().st_mtime_ns


def _print_paths(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.suffix not in {".png", ".svg"}:
            sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    sys.exit(main())
