"""The pages: a router of HTML, the scripts and styles, and the stream of values of each view."""

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from fastapi import APIRouter
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    Response,
)

from console import stream
from console.page import models, now, runs, tests, texts
from console.page.charts import RANGES
from console.page.sources import Sources
from reports.pages.index import SEARCHES
from reports.pages.write import REPORT_NAME, SWEEP_NAME

FOLDER: Final = Path(__file__).parent
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
REPORT_POLICY: Final = (
    "sandbox allow-scripts; default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'"
)
"""Of reports, which have style and script in them: they run as nobody, outside of this origin."""
HEADERS: Final[Mapping[str, str]] = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
VIEWS: Final = (
    ("Now", "/"),
    ("Models", "/models"),
    ("Add", "/add"),
    ("Tests", "/tests"),
    ("Runs", "/runs"),
    ("Logs", "/logs"),
    ("Chat", "/chat"),
    ("Settings", "/settings"),
)
STATIC: Final[Mapping[str, str]] = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
REPORT_TYPES: Final[Mapping[str, str]] = {
    ".html": "text/html; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
    ".csv": "text/csv; charset=utf-8",
    ".json": "application/json",
    ".log": "text/plain; charset=utf-8",
    ".yaml": "text/plain; charset=utf-8",
}
"""Suffixes of the files of runs that are shown."""
LEVELS: Final = ("debug", "info", "warning", "error")

Live = Callable[[], dict[str, Any]]
"""Returns the values of a view."""


class Pages:
    """The pages of a console.

    Args:
        sources: where their values come from.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._runs = runs.Runs(sources.home)
        self._searches = sources.home / SEARCHES
        self._templates = Environment(
            loader=FileSystemLoader(FOLDER / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._static = {
            path.name: path for path in (FOLDER / "static").iterdir() if path.suffix in STATIC
        }

    def router(self) -> APIRouter:
        """Return the routes."""
        router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
        routes: Mapping[str, Callable[..., Any]] = {
            "/": self.now,
            "/models": self.models,
            "/models/{model_id:int}": self.model,
            "/models/{model_id:int}/delete": self.delete,
            "/add": self.add,
            "/tests": self.tests,
            "/tests/{run_id:int}": self.test,
            "/runs": self.runs,
            "/runs/compare": self.compare,
            "/runs/files/{path:path}": self.run_file,
            "/searches/files/{path:path}": self.search_file,
            "/logs": self.logs,
            "/chat": self.chat,
            "/settings": self.settings,
            "/static/{name}": self.static,
            "/events/{view}": self.events,
        }
        for path, answer in routes.items():
            router.add_api_route(path, answer, methods=["GET"], response_model=None)
        return router

    # What is served.

    def _page(
        self, template: str, view: str, events: str | None, status: int = 200, **values: Any
    ) -> Response:
        text = self._templates.get_template(template).render(
            view=view,
            views=VIEWS,
            events=events,
            banners=self._sources.banners(),
            moment=time.strftime("%H:%M:%S"),
            offloads=models.OFFLOADS,
            formats=models.FORMATS,
            roundings=models.ROUNDINGS,
            **values,
        )
        return HTMLResponse(text, status, {**HEADERS, "Content-Security-Policy": POLICY})

    def missing(self, title: str, message: str, status: int = 404) -> Response:
        """Return a page that says what is not there."""
        return self._page("problem.html.j2", "", None, status, title=title, message=message)

    def static(self, name: str) -> Response:
        """A script, the style or the icon."""
        path = self._static.get(name)
        if path is None:
            return Response(status_code=404)
        headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
        return FileResponse(path, media_type=STATIC[path.suffix], headers=headers)

    # The views.

    def now(self, range: str = "5m") -> Response:  # noqa: A002  the name in the address
        """What runs, and what it takes."""
        name = range if range in RANGES else "5m"
        return self._page(
            "now.html.j2",
            "Now",
            f"/events/now?{urlencode({'range': name})}",
            live=self._now(name)(),
            range=name,
            ranges=[(key, label) for key, (label, _) in RANGES.items()],
        )

    def _now(self, range_name: str) -> Live:
        def live() -> dict[str, Any]:
            choices = models.profile_choices(self._sources.models())
            return now.live(self._sources.snapshot(), choices, range_name)

        return live

    def models(self, q: str = "", start: int = 0) -> Response:
        """The models that were added."""
        rows = self._sources.models()
        found = models.chosen(rows, q)
        page = self._pager("/models", q, max(start, 0), models.PAGE, len(found))
        return self._page(
            "models.html.j2",
            "Models",
            f"/events/models?{urlencode({'q': q, 'start': max(start, 0)})}",
            live=self._cards(q, max(start, 0))(),
            q=q,
            page=page,
            subtitle=self._models_line(len(rows)),
        )

    def _models_line(self, count: int) -> str:
        card = self._sources.card_name()
        return f"{count} model{'s' if count != 1 else ''}; what fits is said for {card}."

    def _cards(self, words: str, start: int) -> Live:
        def live() -> dict[str, Any]:
            found = models.chosen(self._sources.models(), words)[start : start + models.PAGE]
            latest, service = self._sources.latest(), self._sources.own_service()
            cards = [
                models.card(each, self._sources.fit(each), latest.get(each.id, ()), service)
                for each in found
            ]
            return {"models": cards}

        return live

    def model(self, model_id: int) -> Response:
        """One model with its profiles and what was measured of it."""
        model = self._sources.model(model_id)
        if model is None:
            return self.missing("No such model", "It was removed, or the address is wrong.")
        profiles = [
            {
                "id": each.id,
                "name": each.name,
                "is_default": each.is_default,
                "is_open": False,
                "settings": self._settings(each.settings),
                "settings_text": texts.settings_line(each.settings),
            }
            for each in model.profiles
        ]
        return self._page(
            "model.html.j2",
            "Models",
            None,
            model={**model.to_dict(), "kind": texts.KINDS.get(model.state)},
            facts=models.facts(model),
            profiles=profiles,
            empty=self._settings({}),
            measured=models.measured_rows(self._sources.performance(model_id), model),
        )

    @staticmethod
    def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a profile that the form has, None where they are not set."""
        return {name: settings.get(name) for name in models.SETTINGS}

    def delete(self, model_id: int) -> Response:
        """What a delete takes, and where it is confirmed."""
        model = self._sources.model(model_id)
        if model is None:
            return self.missing("No such model", "It was removed already, or the address is wrong.")
        removal = models.removal_of(model, self._sources.removal(model))
        return self._page("delete.html.j2", "Models", None, model=model, **removal)

    def add(self, source: str = "") -> Response:
        """A new model, and what serving it would take."""
        rows = models.catalogue_rows()
        return self._page(
            "add.html.j2",
            "Add",
            None,
            source=source,
            known=[each["name"] for each in rows],
            settings=self._settings({}),
            catalogue=rows,
        )

    def tests(self, model: int | None = None, before: int | None = None) -> Response:
        """What is tested, and what has been."""
        choices = models.profile_choices(self._sources.models())
        mine = [each["id"] for each in choices if model is None or each["model_id"] == model]
        live = self._tests(before)()
        last = live["past"][-1]["key"] if len(live["past"]) == tests.PAGE else None
        return self._page(
            "tests.html.j2",
            "Tests",
            "/events/tests" + ("" if before is None else f"?before={before}"),
            live=live,
            profiles=choices,
            chosen=mine[0] if mine else None,
            other=mine[1] if len(mine) > 1 else None,
            models=models.sweeps(choices),
            chosen_model=model,
            newer="/tests" if before is not None else None,
            older=None if last is None else f"/tests?before={last}",
        )

    def _tests(self, before: int | None) -> Live:
        def live() -> dict[str, Any]:
            running, past = self._sources.tests(before)
            return tests.live_list(running, past, self._sources.models_by_id())

        return live

    def test(self, run_id: int) -> Response:
        """One test and what it found."""
        run = self._sources.test(run_id)
        if run is None:
            return self.missing("No such test", "Its model was removed, or the address is wrong.")
        by_id = self._sources.models_by_id()
        found = self._sources.comparison(run_id)
        began = "not started" if run.started_s is None else f"started {texts.moment(run.started_s)}"
        return self._page(
            "test.html.j2",
            "Tests",
            f"/events/test?run_id={run_id}&status={run.status}"
            if run.status in tests.OPEN
            else None,
            live=tests.live_one(run, run.status),
            id=run_id,
            title=tests.title(run, by_id),
            subtitle=began,
            comparison=None if found is None else tests.comparison(found, by_id.get(run.model_id)),
            metrics=tests.metric_tiles(run),
            sweep=tests.sweep_table(run),
            tables=tests.tables(run),
            report=self._report_of(run.folder),
        )

    def _report_of(self, folder: str | None) -> str | None:
        """Return the address of the report in a folder of runs."""
        if folder is None or not Path(folder).is_relative_to(self._runs.root):
            return None
        for name in (REPORT_NAME, SWEEP_NAME):
            if (Path(folder) / name).is_file():
                return runs.file_address(Path(folder).relative_to(self._runs.root).as_posix(), name)
        return None

    def runs(self, q: str = "", start: int = 0, problem: str = "") -> Response:
        """Every run of the home."""
        found = self._runs.page(max(start, 0), q)
        return self._page(
            "runs.html.j2",
            "Runs",
            None,
            home=str(self._runs.root),
            q=q,
            rows=found.rows,
            searches=runs.searches(self._searches) if not (q or start) else [],
            columns=runs.columns(),
            page=self._pager("/runs", q, found.start, runs.PAGE, found.total),
            problem=problem,
        )

    async def compare(self, request: Request) -> Response:
        """Two runs against each other, by the program that compares."""
        ids = request.query_params.getlist("run")
        folders = [await asyncio.to_thread(self._runs.folder, each) for each in ids]
        found = [each for each in folders if each is not None]
        if len(ids) < 2 or len(found) != len(ids):
            message = f"Expected two ticked runs or more, got {len(found)}. Tick two, then compare."
            return await asyncio.to_thread(self.runs, problem=message)
        try:
            report = await runs.compare(found, self._sources.home / "comparisons")
        except runs.CompareError as error:
            return await asyncio.to_thread(self.runs, problem=str(error))
        return FileResponse(
            report,
            media_type=REPORT_TYPES[".html"],
            headers={**HEADERS, "Content-Security-Policy": REPORT_POLICY},
        )

    def run_file(self, path: str) -> Response:
        """A file of a run."""
        return self._file(self._runs.root, path)

    def search_file(self, path: str) -> Response:
        """A file of a search."""
        return self._file(self._searches, path)

    def _file(self, root: Path, path: str) -> Response:
        """A file that is shown: strictly inside a folder, once every link is resolved."""
        file = (root / path).resolve()
        is_inside = file.is_relative_to(root.resolve())
        if not is_inside or file.suffix not in REPORT_TYPES or not file.is_file():
            return self.missing(
                "No such file", "Runs have reports, tables and logs; this is none of them."
            )
        headers = {**HEADERS, "Content-Security-Policy": REPORT_POLICY}
        return FileResponse(file, media_type=REPORT_TYPES[file.suffix], headers=headers)

    def logs(self, service: int | None = None, q: str = "", level: str = "debug") -> Response:
        """The log of a service."""
        services = self._sources.snapshot().get("services") or []
        chosen = next(
            (each for each in services if each["id"] == service), services[0] if services else None
        )
        lines, after = ([], "0") if chosen is None else self._sources.log(chosen["id"])
        least = LEVELS.index(level) if level in LEVELS else 0
        shown = [
            each
            for each in lines
            if LEVELS.index(each["level"]) >= least and q.lower() in each["text"].lower()
        ]
        return self._page(
            "logs.html.j2",
            "Logs",
            None,
            services=services,
            service=chosen,
            lines=shown,
            after=after,
            levels=LEVELS,
            level=LEVELS[least],
            q=q,
        )

    def chat(self) -> Response:
        """A conversation with the model that runs."""
        return self._page("chat.html.j2", "Chat", "/events/chat", live=self._chat())

    def _chat(self) -> dict[str, Any]:
        services = self._sources.snapshot().get("services") or []
        ready = next((each for each in services if each["state"] == "ready"), None)
        if ready is None:
            return {"is_ready": False, "note": "No model is ready. Start one in Now or Models."}
        return {
            "is_ready": True,
            "note": f"{ready.get('model') or 'The model'} answers. Nothing of this is kept.",
        }

    def settings(self) -> Response:
        """What the console runs with."""
        return self._page("settings.html.j2", "Settings", None, groups=self._sources.settings())

    # The stream.

    def events(self, request: Request, view: str) -> Response:
        """The values of a view: all of them first, then those that change."""
        asked = request.query_params
        live = self._live(view, asked)
        if live is None:
            return Response(status_code=404)
        return stream.respond(live, self._sources.changes())

    def _live(self, view: str, asked: Mapping[str, str]) -> Live | None:
        match view:
            case "now":
                return self._now(asked.get("range", "5m") if asked.get("range") in RANGES else "5m")
            case "models":
                return self._cards(asked.get("q", ""), _whole(asked.get("start")) or 0)
            case "tests":
                return self._tests(_whole(asked.get("before")))
            case "test":
                run_id, status = _whole(asked.get("run_id")), asked.get("status", "")
                return None if run_id is None else lambda: self._one_test(run_id, status)
            case "chat":
                return self._chat
            case _:
                return None

    def _one_test(self, run_id: int, status: str) -> dict[str, Any]:
        run = self._sources.test(run_id)
        return {} if run is None else tests.live_one(run, status)

    @staticmethod
    def _pager(address: str, words: str, start: int, size: int, total: int) -> dict[str, Any]:
        def at(place: int) -> str:
            asked = {"q": words, "start": place} if words else {"start": place}
            return f"{address}?{urlencode(asked)}"

        return {
            "num_pages": -(-total // size),
            "first": min(start + 1, total),
            "last": min(start + size, total),
            "total": f"{total:,}",
            "before": at(max(0, start - size)) if start > 0 else None,
            "after": at(start + size) if start + size < total else None,
        }


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None
