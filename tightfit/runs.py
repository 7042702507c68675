"""Runs by their id: found in TIGHTFIT_HOME, opened in a browser, compared."""

import os
import re
import sys
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from catalogue.files import expanded, tightfit_home
from catalogue.terminal import EXIT_OK, CommandParser, columns, say, show
from engine.errors import ConfigError, did_you_mean
from engine.lines import wrapped
from reports.record.folders import each_point

if TYPE_CHECKING:
    from reports.compare import Run

LATEST: Final = "latest"
KEPT_IN: Final = ("runs", "searches")
"""Folders of TIGHTFIT_HOME that hold runs."""
PLAN: Final = "plan.csv"
"""Table of a planned sweep, which is no run."""
PAGES: Final = ("report.html", "sweep.html", "compare.html", "plan.png")
"""Pages of a run, of a sweep and of a comparison, and the figure of a planned sweep."""
OF_RUNS: Final = (
    *("result.json", "state.json"),
    *("sweep.json", "search.json", PLAN, "*/result.json", "*/state.json"),
    *("points/*/result.json", "points/*/state.json"),
)
"""Files of which a run's folder has one, and a sweep's, a search's or a study's another one."""
_SHORT: Final = 6
"""Ids of runs that a refusal names."""


def find_run(word: str) -> Path:
    """Return the folder of a run, a sweep or a search.

    Args:
        word: `latest`, an id or its beginning, either with /POINT for a point of a sweep, or a
            folder; the id of a search is its name. The id of a run is that of its folder, or
            that of its record.

    Raises:
        ConfigError: there is none, or several begin so.
    """
    runs, folders = tightfit_home() / "runs", _folders()
    if word == LATEST:
        ran = (folder for folder in folders if not (folder / PLAN).is_file())
        found = max(ran, key=_started, default=None)
        if found is None:
            raise ConfigError(
                f"run: expected runs in {runs}, found none. Start one: `tightfit run`."
            )
        return found
    if word and (folder := expanded(word)).is_dir():
        return folder.resolve()
    first, _, point = word.partition("/")
    if first == LATEST:
        first = find_run(LATEST).name
    matching = [path for path in sorted(folders) if first and path.name.startswith(first)]
    matching = [path for path in matching if path.name == first] or matching
    if len(matching) == 1 and (matching[0] / point).is_dir():
        return matching[0] / point
    if re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{6}", word):  # as records and pages have it
        kept = (item for name in KEPT_IN for item in each_point(tightfit_home() / name))
        told = [item.folder for item in kept if item.record and item.record.run_id == word]
        if told:
            return min(told)  # later ones took it over
    names = [folder.name for folder in folders]
    if len(matching) > 1:
        newest = sorted(matching, key=_started, reverse=True)
        listed = ", ".join(folder.name for folder in newest[:_SHORT])
        which = f", the newest {_SHORT} of them" if len(matching) > _SHORT else ""
        raise ConfigError(
            f"run {word}: expected one run, got {len(matching)} whose ids begin so{which}: "
            f"{listed}. Write more of the id."
        )
    raise ConfigError(
        f"run: expected {LATEST}, a folder, or the id of a run in {runs.parent}, got {word!r}."
        f"{did_you_mean(word, names)}"
    )


def run_ids() -> list[str]:
    """Return the ids of all runs, sweeps and searches of TIGHTFIT_HOME, the newest first."""
    return [folder.name for folder in sorted(_folders(), key=_started, reverse=True)]


def _folders() -> list[Path]:
    return _kept(tightfit_home())


def _kept(home: Path) -> list[Path]:
    return [path for name in KEPT_IN for path in (home / name).glob("*") if path.is_dir()]


def _started(folder: Path) -> str:
    """Return when a run or a sweep started, which its name says, or a search last went on."""
    question = folder / "search.json"
    if not question.is_file():
        return folder.name
    return f"{datetime.fromtimestamp(question.stat().st_mtime, UTC).astimezone():%Y%m%d-%H%M%S}"


def open_page(arguments: Sequence[str]) -> int:
    """`tightfit open`: print the path of a run's page, and show it where there is a display."""
    parser = CommandParser(
        prog="tightfit open", description="Open the page of a run, a sweep or all runs."
    )
    parser.add_argument(
        "run", nargs="?", help="latest, an id or a folder; without one: the page of all runs"
    )
    chosen = parser.parse_args(arguments).run
    if chosen is None:
        from reports.pages.index import write_index  # noqa: PLC0415  draws

        find_run(LATEST)  # refuses where there is none
        return _show(write_index(tightfit_home()))
    folder = find_run(chosen)
    page = _page(folder)
    if page is None and any(map(_has_runs, _kept(folder))):
        from reports.pages.index import write_index  # noqa: PLC0415  draws

        return _show(write_index(folder))
    if page is None:
        _check_has_runs(folder)
        from reports.__main__ import main  # noqa: PLC0415  draws

        say(f"{folder}: no page yet; making it.")
        if (code := main([str(folder)])) != EXIT_OK:
            return code
        page = _page(folder)
    if page is None:
        raise ConfigError(f"{folder}: expected {' or '.join(PAGES)}, found none.")
    return _show(page)


def _check_has_runs(folder: Path) -> None:
    """Raise ConfigError unless pages are drawn of a folder: those of others may be many."""
    if folder.name in KEPT_IN or not _has_runs(folder):
        raise ConfigError(
            f"run: expected the folder of a run, a sweep, a search or a study, or a TIGHTFIT_HOME "
            f"with runs, got {folder}. `tightfit open` without a folder lists the runs of "
            f"{tightfit_home()}."
        )


def _has_runs(folder: Path) -> bool:
    """Return whether a folder is that of a run, a sweep, a search or a study, run or planned."""
    return any(any(folder.glob(pattern)) for pattern in OF_RUNS)


def _show(page: Path) -> int:
    show([str(page)])
    if has_display(os.environ, sys.platform):
        webbrowser.open(page.as_uri())
    return EXIT_OK


def _page(folder: Path) -> Path | None:
    return next((folder / name for name in PAGES if (folder / name).is_file()), None)


def has_display(environ: Mapping[str, str], platform: str) -> bool:
    """Return whether a browser can show something; on Linux a text browser would take over."""
    return platform != "linux" or bool(environ.get("DISPLAY") or environ.get("WAYLAND_DISPLAY"))


def compare(arguments: Sequence[str]) -> int:
    """`tightfit compare`: hold runs of the same work against the first of them."""
    parser = CommandParser(
        prog="tightfit compare",
        description="Compare runs of the same work with the first of them that has figures.",
    )
    parser.add_argument(
        "run",
        nargs="+",
        help="latest, an id or a folder; /POINT behind it names a point of a sweep",
    )
    parser.add_argument("--out", type=Path, default=Path("comparison"), help="folder of the page")
    parser.add_argument("--json", action="store_true", help="print one JSON document, no page")
    options = parser.parse_args(arguments)
    if not options.json:
        with _unlike_is_refused():
            show(_compared([find_run(word) for word in options.run], options.out))
        return EXIT_OK
    from harness.sweep.document import print_document  # noqa: PLC0415  only here

    def fill(document: dict[str, Any]) -> int:
        with _unlike_is_refused():
            document.update(comparison([find_run(word) for word in options.run]))
        return EXIT_OK

    return print_document(fill)


def _compared(folders: Sequence[Path], out: Path) -> list[str]:
    """Write the page of a comparison; return its verdict and figures as lines of text."""
    from reports.compare import comparable_metrics  # noqa: PLC0415  when it runs
    from reports.pages.compare import compare_page  # noqa: PLC0415
    from reports.pages.write import write_compare_report  # noqa: PLC0415  draws
    from reports.record.judging import gain  # noqa: PLC0415
    from reports.record.metrics import metric_number  # noqa: PLC0415

    rows = _rows(folders)
    write_compare_report(folders, out)
    page = compare_page(rows, {})
    table = [["", *(row.label for row in rows)]]
    for metric in comparable_metrics(rows):
        gains = [gain(metric, rows[0].metrics, row.metrics) for row in rows]
        values = [metric_number(metric.name, row.metrics.get(metric.name)) for row in rows]
        ratios = ["", *("" if value is None else f" ({value:.2f}x)" for value in gains[1:])]
        table.append([metric.heading, *map(str.__add__, values, ratios)])
    assert page.verdict is not None
    texts = [*page.banners, page.verdict.answer, page.verdict.label, *page.verdict.lines]
    return [
        *(line for text in texts if text for line in wrapped(text)),
        "",
        *columns(table),
        "",
        *wrapped(f"In brackets: how many times as good as {rows[0].label}; above 1x is better."),
        f"page  {out / 'compare.html'}",
    ]


def _rows(folders: Sequence[Path]) -> list["Run"]:
    """Return the runs of a comparison.

    Raises:
        RecordError: a record cannot be read, or the runs did not do the same work.
    """
    from reports import compare as compared  # noqa: PLC0415  when it runs
    from reports.record.folders import load_run  # noqa: PLC0415
    from reports.record.judging import believed  # noqa: PLC0415
    from reports.record.record import RecordError  # noqa: PLC0415

    if len(folders) < 2:
        raise RecordError(
            "compare: expected at least two runs, got one. Name another: `tightfit open` "
            "lists them."
        )
    rows = compared.compare_rows([(folder, believed(load_run(folder))) for folder in folders])
    compared.check_distinct(rows)
    compared.check_alike(rows)
    return rows


@contextmanager
def _unlike_is_refused() -> Iterator[None]:
    from reports.record.record import RecordError  # noqa: PLC0415  when it runs

    try:
        yield
    except RecordError as error:
        raise ConfigError(str(error)) from error


def comparison(folders: Sequence[Path]) -> dict[str, Any]:
    """Return runs side by side as plain data: their metrics, and ratios to the first.

    Raises:
        RecordError: a record cannot be read, or the runs did not do the same work.
    """
    from reports.compare import comparable_metrics, differing_settings  # noqa: PLC0415  when it runs
    from reports.record.judging import gain, gain_interval  # noqa: PLC0415

    rows = _rows(folders)
    metrics = comparable_metrics(rows)
    base = rows[0].metrics
    return {
        "kind": "comparison",
        "settings": differing_settings([row.record for row in rows]),
        "runs": [
            {
                "label": row.label,
                "folder": str(row.folder),
                "status": row.status,
                "valid": row.record.valid,
                "metrics": {
                    metric.name: {
                        "value": row.metrics.get(metric.name),
                        "unit": metric.unit,
                        "times_as_good": gain(metric, base, row.metrics),
                        "interval": gain_interval(metric, base, row.metrics),
                    }
                    for metric in metrics
                },
            }
            for row in rows
        ],
    }
