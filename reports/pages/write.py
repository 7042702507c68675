"""Writes reports: pages as HTML and Markdown, their figures, and tables as CSV."""

import base64
import functools
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from reports.compare import (
    check_alike,
    check_distinct,
    compare_rows,
    records_of,
    sweep_rows,
)
from reports.figures.comparisons import SWEEP_FIGURES, comparison_figure, ratio_figure, sides_figure
from reports.figures.run import FIGURES, TIME_FIGURES
from reports.figures.theme import THEMES, Drawing, Theme, adaptive
from reports.pages.ab import ab_page, is_ab
from reports.pages.compare import compare_csv, compare_page
from reports.pages.page import Link, Page, Section, commands, metrics_csv
from reports.pages.run import run_page
from reports.pages.sweep import (
    SEARCH_NAME,
    best_command,
    peers_section,
    search_section,
    sweep_csv,
    sweep_page,
)
from reports.record.folders import load_points, load_run, read_planned
from reports.record.record import write_bytes_atomic, write_text_atomic
from reports.record.rows import read_telemetry
from reports.record.text import SWEEPS

TEMPLATES: Final = Path(__file__).parent / "templates"
REPORT_NAME: Final = "report.html"
SWEEP_NAME: Final = "sweep.html"
INDEX_NAME: Final = "index.html"
SWEEP_MARK: Final = "multirun.yaml"
"""File of Hydra in the folder of a sweep, there before the sweep's own page."""
SWEEP_FILES: Final = ("multirun.yaml", "failures.md", "trials.csv")
RUN_FILES: Final = ("result.json", "config.yaml", "worker.log", "requests.parquet")
METRICS_NAME: Final = "metrics.csv"
Key = TypeVar("Key", int, str)
Draw = Callable[[Theme], Drawing | None]
"""A figure of one page in a theme; None without its data."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """One figure for wide and for narrow screens as base64 SVG, and where its PNG file lies."""

    wide: str
    narrow: str
    path: str


@dataclass(frozen=True, kw_only=True)
class Script:
    """The only script of a page, with the hash by which the page allows it."""

    text: str

    @property
    def digest(self) -> str:
        """Source expression of a content security policy."""
        return f"sha256-{_base64(hashlib.sha256(self.text.encode()).digest())}"


class Markup(str):
    """Markdown that is written as it is; all other text is escaped."""

    __slots__ = ()


def write_report(run_dir: Path, out: Path | None = None) -> list[Path]:
    """Write report.html, report.md, metrics.csv and figures/* of one run; return their paths.

    Args:
        run_dir: the folder that holds the run's result.json.
        out: where to write; the run's folder by default.

    Raises:
        RecordError: when the folder or its record cannot be read.
    """
    record, target = load_run(run_dir), out or run_dir
    draws: dict[str, Draw]
    if is_ab(record):
        runs = record.samples["ab"].get("runs") or []
        links = _links({run["folder"]: [run_dir / run["folder"]] for run in runs}, target)
        page, draws = ab_page(record, links), {"ratios": partial(sides_figure, record)}
        page = replace(page, links=_beside(run_dir, target, RUN_FILES))
    else:
        page = run_page(record, _beside(run_dir, target, RUN_FILES))
        draws = {name: partial(draw, record) for name, draw in FIGURES.items()}
        try:
            rows = read_telemetry(run_dir)
        except (ImportError, OSError, ValueError) as error:
            rows, lack = None, f"No figure shows the run over time: {error}."
            page = replace(page, banners=(*page.banners, lack))
        if rows is not None:
            draws |= {name: partial(draw, record, rows) for name, draw in TIME_FIGURES.items()}
    return _write_pages(page, draws, target, "report", {METRICS_NAME: metrics_csv(record)})


def write_sweep_report(sweep_dir: Path, out: Path | None = None) -> list[Path]:
    """Write sweep.html, sweep.md, sweep.csv and figures/*.png; return their paths.

    A point links to its own report where that report exists when this is called.

    Args:
        sweep_dir: the folder below which the run folders lie.
        out: where to write; the sweep's folder by default.

    Raises:
        RecordError: when the folder is absent or holds no run.
    """
    rows = sweep_rows(load_points(sweep_dir))
    target = out or sweep_dir
    draws: dict[str, Draw] = {name: partial(draw, rows) for name, draw in SWEEP_FIGURES.items()}
    name, trials = sweep_dir.resolve().name, search_section(sweep_dir)
    folders = {row.place: [target / row.folder.relative_to(sweep_dir), row.folder] for row in rows}
    planned = read_planned(sweep_dir)
    text = trials.text if trials else ()
    label = f"Sweep {name}" if trials is None else f"Search {name}"
    title = planned.title or label
    page = sweep_page(title, rows, _links(folders, target), text, planned.num_points)
    if title != label:
        page = replace(page, details=f"{label}, {page.details}")
    page = replace(page, links=_beside(sweep_dir, target, SWEEP_FILES))
    records = records_of(rows)
    if records:
        found = next((r for r in records if "mlflow_experiment_id" in r.effective), records[0])
        page = replace(page, commands=commands(found, planned.command, tag=SWEEPS, value=name))
    if trials is not None:
        page = replace(
            page,
            commands=(*best_command(sweep_dir), *page.commands),
            sections=(replace(trials, text=()), *page.sections),
        )
    against = peers_section(rows)
    if against is not None:
        page = replace(page, sections=(page.sections[0], against, *page.sections[1:]))
    table = {"sweep.csv": sweep_csv(rows, sweep_dir)}
    return _write_pages(page, draws, target, "sweep", table)


def write_compare_report(folders: Sequence[Path], out: Path) -> list[Path]:
    """Write compare.html, .md, .csv and figures/* of runs of the same work; return their paths.

    Args:
        folders: of the runs; the first is what the others are held against.
        out: where to write.

    Raises:
        RecordError: when a record cannot be read.
        UnlikeError: when the runs did not do the same work, or a run is given twice.
    """
    rows = compare_rows([(folder, load_run(folder)) for folder in folders])
    check_distinct(rows)
    check_alike(rows)
    links = _links({row.place: [row.folder] for row in rows}, out)
    draws: dict[str, Draw] = {
        "ratios": partial(ratio_figure, rows),
        "comparison": partial(comparison_figure, rows),
    }
    table = {"compare.csv": compare_csv(rows)}
    return _write_pages(compare_page(rows, links), draws, out, "compare", table)


def _write_pages(
    page: Page, draws: Mapping[str, Draw], target: Path, stem: str, tables: Mapping[str, str]
) -> list[Path]:
    """Draw the figures that the page names, then write PNG and SVG files, both pages and tables."""
    target.mkdir(parents=True, exist_ok=True)
    images, pictures = {}, []
    lack = _no_drawing()
    if lack is not None:
        page = replace(page, banners=(*page.banners, lack))
    for name in [name for section in page.sections for name in section.figures]:
        if name not in draws or lack is not None:
            continue
        wide = draws[name](THEMES["light"])
        narrow = draws[name](THEMES["light"].narrow)
        if wide is None or narrow is None:
            continue
        (target / "figures").mkdir(exist_ok=True)
        picture = target / "figures" / f"{name}.png"
        svg = wide.svg()
        write_bytes_atomic(picture, wide.png())
        write_bytes_atomic(picture.with_suffix(".svg"), svg)
        pictures += [picture, picture.with_suffix(".svg")]
        images[name] = Image(
            wide=_base64(adaptive(svg)),
            narrow=_base64(adaptive(narrow.svg())),
            path=f"figures/{name}.png",
        )
    page = replace(page, sections=tuple(filter(partial(_has_content, images), page.sections)))
    paths = []
    for suffix in ("html", "md"):
        path = target / f"{stem}.{suffix}"
        write_text_atomic(path, render(page, suffix, images))
        paths.append(path)
    for name, text in tables.items():
        write_text_atomic(target / name, text)
    return [*paths, *pictures, *(target / name for name in tables)]


def render(page: Page, suffix: str, images: Mapping[str, Image] | None = None) -> str:
    """Return a page as text: html or md."""
    template = _environment(is_html=suffix == "html").get_template(f"page.{suffix}.j2")
    script = Script(text=(TEMPLATES / "filter.js").read_text(encoding="utf-8"))
    return template.render(page=page, images=images or {}, themes=dict(THEMES), script=script)


def _no_drawing() -> str | None:
    """Return why no figure can be drawn, None where they can."""
    try:
        import matplotlib  # noqa: F401  the figures' own package
    except ImportError as error:
        return (
            f"This page has no figures: {error}. Install matplotlib, then `python -m reports "
            "FOLDER` draws them."
        )
    return None


def _has_content(images: Mapping[str, Image], section: Section) -> bool:
    """Return whether a section has more to show than figures without their data."""
    is_drawn = any(name in images for name in section.figures)
    return is_drawn or bool(section.tables) or not section.figures


def _beside(folder: Path, target: Path, names: Sequence[str]) -> tuple[Link, ...]:
    """Return links from a page in `target` to its sweep, all runs, and files of its folder."""
    folder = folder.resolve()
    found = [(name, folder / name) for name in names if (folder / name).is_file()]
    homes = [home for home in folder.parents[1:3] if (home / INDEX_NAME).is_file()]
    found = [("All runs", home / INDEX_NAME) for home in homes[:1]] + found
    above = {SWEEP_MARK: "Sweep", SEARCH_NAME: "Search"}
    found[:0] = [
        (label, folder.parent / SWEEP_NAME)
        for mark, label in above.items()
        if (folder.parent / mark).is_file()
    ]
    return tuple(Link(label=label, address=_relative(path, target)) for label, path in found)


def _relative(path: Path, target: Path) -> str:
    return quote(os.path.relpath(path, target.resolve()))


def _links(folders: Mapping[Key, Sequence[Path]], target: Path) -> dict[Key, str]:
    """Return the relative address of the report in the first of the folders that has one."""
    found = {
        key: [one / REPORT_NAME for one in several if (one / REPORT_NAME).is_file()]
        for key, several in folders.items()
    }
    return {
        key: quote(os.path.relpath(reports[0], target)) for key, reports in found.items() if reports
    }


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


@functools.cache
def _environment(*, is_html: bool) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=is_html,  # noqa: S701  of Markdown, finalize escapes what is HTML too
        undefined=StrictUndefined,
        finalize=None if is_html else _escape_markdown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"raw": Markup, "fence": _fence}
    return environment


def _escape_markdown(value: object) -> str:
    """Return text in which nothing is Markdown or HTML, on one line."""
    if isinstance(value, Markup):
        return value
    line = " ".join(str(value).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = re.sub(r"([\\`*_\[\]|~#])", r"\\\1", line)
    line = re.sub(r"^([-+])(?=\s|$)", r"\\\1", line)
    return re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", line)


def _fence(text: str) -> Markup:
    """Return text as a code block whose fence is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}\n{text.rstrip()}\n{fence}")
