"""Writes the pages: report.html and report.md of a run, sweep.html, .md and .csv of a sweep."""

import base64
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from reports.compare import SWEEP_FIGURES
from reports.figures import FIGURES
from reports.load import load_points, load_run
from reports.page import Page
from reports.record import write_bytes_atomic, write_text_atomic
from reports.sweep import Row, sweep_csv, sweep_page, sweep_rows
from reports.theme import THEMES, ThemeName
from reports.view import run_page

TEMPLATES: Final = Path(__file__).parent / "templates"
REPORT_NAME: Final = "report.html"


@dataclass(frozen=True, kw_only=True)
class Image:
    """One figure in both themes as base64 PNG, and where its light PNG file lies."""

    light: str
    dark: str
    path: str


class Markup(str):
    """Markdown that is written as it is; all other text is escaped."""

    __slots__ = ()


def write_report(run_dir: Path, out: Path | None = None) -> list[Path]:
    """Write report.html, report.md and figures/*.png of one run; return their paths.

    Args:
        run_dir: the folder that holds the run's result.json.
        out: where to write; the run's folder by default.

    Raises:
        RecordError: when the folder or its record cannot be read.
    """
    record = load_run(run_dir)
    draws = {name: lambda theme, draw=draw: draw(record, theme) for name, draw in FIGURES.items()}
    return _write_pages(run_page(record), draws, out or run_dir, "report")


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
    draws = {
        name: lambda theme, draw=draw: draw(rows, theme) for name, draw in SWEEP_FIGURES.items()
    }
    page = sweep_page(f"Sweep {sweep_dir.resolve().name}", rows, _links(rows, sweep_dir, target))
    paths = _write_pages(page, draws, target, "sweep")
    table = target / "sweep.csv"
    write_text_atomic(table, sweep_csv(rows, sweep_dir))
    return [*paths, table]


def _write_pages(
    page: Page, draws: Mapping[str, Callable[[ThemeName], bytes | None]], target: Path, stem: str
) -> list[Path]:
    """Draw the figures that the page names, then write the PNG files and both pages."""
    target.mkdir(parents=True, exist_ok=True)
    images, pictures = {}, []
    for name in [name for section in page.sections for name in section.figures]:
        light = draws[name]("light")
        dark = draws[name]("dark")
        if light is None or dark is None:
            continue
        (target / "figures").mkdir(exist_ok=True)
        picture = target / "figures" / f"{name}.png"
        write_bytes_atomic(picture, light)
        pictures.append(picture)
        images[name] = Image(light=_base64(light), dark=_base64(dark), path=f"figures/{name}.png")
    paths = []
    for suffix, environment in (("html", _html_environment()), ("md", _markdown_environment())):
        template = environment.get_template(f"page.{suffix}.j2")
        path = target / f"{stem}.{suffix}"
        write_text_atomic(path, template.render(page=page, images=images, themes=dict(THEMES)))
        paths.append(path)
    return [*paths, *pictures]


def _links(rows: Sequence[Row], sweep_dir: Path, target: Path) -> dict[int, str]:
    """Return a row's place -> relative address of its report, where that file exists."""
    links = {}
    for row in rows:
        inside = row.point.folder.relative_to(sweep_dir)
        for base in (target, sweep_dir):
            report = base / inside / REPORT_NAME
            if report.is_file():
                links[row.place] = quote(os.path.relpath(report, target))
                break
    return links


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _html_environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _markdown_environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=False,  # noqa: S701 - finalize escapes Markdown and its HTML instead
        undefined=StrictUndefined,
        finalize=_escape_markdown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["raw"] = Markup
    environment.filters["fence"] = _fence
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
