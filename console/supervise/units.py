"""Servers as units of systemd, those that `tightfit service install` wrote and no others."""

import argparse
import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
from sqlalchemy import select
from sqlalchemy.orm import Session

from console.registry.checks import FieldError
from console.registry.database import Database
from console.registry.models import find_profile
from console.registry.tables import Model, Service
from console.service.cli import installed, units_folder
from console.service.systemd import Runner, ServiceError, Systemd, UnitState, run_command
from console.service.units import CONSOLE, Scope, serves, words_of
from console.supervise.figures import Figures, effective_of, holds_of
from console.supervise.jobs import JobError
from console.supervise.log import MOST_LINES
from console.supervise.services import Asked, asked_of
from server.settings import ServerSettings

Plain = dict[str, Any]
SCOPES: Final[tuple[Scope, ...]] = ("user", "system")
LOOK_S: Final = 5.0
"""Seconds between two looks at systemd."""
SHORT_LOOK_S: Final = 0.5
"""The same while a job waits."""
LOG_LINES: Final = 200
"""Lines of the journal that a look at the log reads."""
STATES: Final[Mapping[str | None, str]] = {
    "active": "ready",
    "reloading": "ready",
    "activating": "loading",
    "deactivating": "stopping",
    "failed": "failed",
}
"""What systemd calls a unit's state -> what pages do; others are stopped."""


@dataclass(frozen=True, kw_only=True)
class Installed:
    """A unit that serves a profile, as its file says."""

    scope: Scope
    unit: str
    profile: str
    """MODEL or MODEL/PROFILE."""
    host: str = ServerSettings.host
    port: int = ServerSettings.port
    home: Path | None = None
    """TIGHTFIT_HOME, where its registry is; None: the file does not say."""
    max_model_len: str | None = None
    """Where its command has that flag, which counts more than the profile."""

    @property
    def name(self) -> str:
        """As pages call it."""
        stem = self.unit.removesuffix(".service")
        return stem if self.scope == "user" else f"{stem} (system)"

    @property
    def url(self) -> str | None:
        """Where its server answers, asked from this machine; None: on a free port."""
        if self.port == 0:
            return None
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


def read_unit(scope: Scope, unit: str, text: str) -> Installed | None:
    """Return what a unit's file says; None where it serves no profile, or is none of ours.

    Raises:
        ValueError: its port is no number.
        argparse.ArgumentError: a flag has no value.
    """
    profile = serves(text)
    if profile is None or unit == CONSOLE:
        return None
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    flags.add_argument("--host", default=ServerSettings.host)
    flags.add_argument("--port", default=str(ServerSettings.port))
    flags.add_argument("--max-model-len")
    given, _ = flags.parse_known_args(words_of(text, "ExecStart"))
    variables = dict(word.partition("=")[::2] for word in words_of(text, "Environment"))
    home = variables.get("TIGHTFIT_HOME")
    return Installed(
        scope=scope,
        unit=unit,
        profile=profile,
        host=given.host,
        port=int(given.port),
        home=None if home is None else Path(home),
        max_model_len=given.max_model_len,
    )


def find_units() -> list[Installed]:
    """Return the units that serve a profile; from their files."""
    found: list[Installed] = []
    for scope in SCOPES:
        for unit in installed(scope):
            with contextlib.suppress(OSError, ValueError, argparse.ArgumentError):
                text = (units_folder(scope) / unit).read_text(encoding="utf-8")
                if (read := read_unit(scope, unit, text)) is not None:
                    found.append(read)
    return found


class UnitService:
    """One unit: asked of systemd, and of its server where that is to be found.

    Args:
        row: of the registry.
        found: what its file says.
        systemd: talks to its service manager.
        client: asks servers.
    """

    def __init__(
        self, row: Service, found: Installed, systemd: Systemd, client: httpx.AsyncClient
    ) -> None:
        self.id, self.name, self.kind, self.unit = row.id, row.name, row.kind, str(row.unit)
        self.found, self.asked = found, Asked(profile_id=row.profile_id)
        self.log = Journal(lambda: systemd.log(self.unit, LOG_LINES))
        self.state, self._since_s = "stopped", time.time()
        self.reason: str | None = None
        self.info: Plain = {}
        self.load: Plain | None = None
        self.pid: int | None = None
        self.started_s: float | None = None
        self._systemd, self._figures = systemd, Figures(client)
        self._phase: str | None = None
        self._tail: Sequence[str] = ()
        self._is_crash_loop = False

    @property
    def wanted(self) -> str:
        """What systemd was asked for last."""
        return "running" if self.is_up else "stopped"

    @property
    def is_up(self) -> bool:
        """Whether a process of it lives, or is about to be started."""
        return self.state in {"ready", "loading"}

    @property
    def phase(self) -> str:
        """What it does now."""
        return self._phase or self.state

    @property
    def base_url(self) -> str | None:
        """Where the server answers; None where it does not."""
        return self.found.url if self.state == "ready" else None

    @property
    def is_behind(self) -> bool:
        """Whether its process has another context window than its profile."""
        wanted = self.asked.settings.get("max_model_len")
        return self.is_up and self.info.get("max_model_len") != wanted

    def holds(self) -> Plain | None:
        """Return what the process holds of the machine, as it says; None: it does not say."""
        return holds_of(self.pid, self.info)

    def view(self) -> Plain:
        """Return all that pages show, as plain data."""
        is_loading, asked = self.state == "loading", self.asked
        effective = effective_of(self.info) | {"load_s": None} if self.info else None
        return {
            "id": self.id,
            "name": self.name,
            "kind": self.kind,
            "unit": self.unit,
            "model_id": asked.model_id,
            "model": asked.model,
            "profile_id": asked.profile_id,
            "profile": asked.profile,
            "port": self.found.port or None,
            "wanted": self.wanted,
            "auto_restart": True,
            "state": self.state,
            "since_s": self._since_s,
            "phase": self._phase if is_loading else None,
            "bytes_done": None,
            "bytes_total": None,
            "spent_s": time.time() - self._since_s if is_loading else None,
            "reason": self.reason,
            "log_tail": "\n".join(self._tail) or None,
            "pid": self.pid,
            "failures": [],
            "is_crash_loop": self._is_crash_loop,
            "requested": None if asked.model is None else {"model": asked.model, **asked.settings},
            "effective": effective,
            "load": self.load,
        }

    async def look(self) -> None:
        """Ask systemd how the unit is, and the server how much it serves."""
        try:
            await self.take(await asyncio.to_thread(self._systemd.state, self.unit))
        except ServiceError as error:
            self.reason = str(error)

    async def take(self, found: UnitState) -> None:
        """Take in what systemd says of it, and ask the server how much it serves."""
        self._take(found)
        if (url := self.base_url) is None:
            self.info, self.load = {}, None
            return
        self.info = self.info or await self._figures.info(url) or {}
        self.load = await self._figures.load(url)

    def _take(self, found: UnitState) -> None:
        state = STATES.get(found.active, "stopped")
        if state != self.state:
            self.state, self._since_s = state, time.time()
        if found.pid != self.pid:
            self.pid, self.info = found.pid, {}
            self.started_s = _started_s(found.pid)
            self._figures.forget()
        self._phase = found.status
        if found.sub == "auto-restart":
            self._phase = f"waiting to restart, {found.restarts or 0} restarts so far"
        self._is_crash_loop = found.result == "start-limit-hit"
        self.reason = found.error
        self._tail = (found.error,) if found.error else ()

    # What is asked of it.

    def check_startable(self) -> None:
        """Do nothing: systemd says what is wrong."""

    def check_context(self, home: Path) -> None:
        """Raise FieldError where its profile's context window is not the one that it serves.

        Args:
            home: TIGHTFIT_HOME of the console.
        """
        if self.found.home is not None and self.found.home.resolve() != home.resolve():
            raise FieldError(
                "service_id",
                f"set_context: expected a unit that reads the registry in {home}, got {self.unit}, "
                f"which reads {self.found.home}. Change the profile there.",
            )
        if self.found.max_model_len is not None:
            raise FieldError(
                "max_model_len",
                f"max_model_len: expected a unit without that flag, got {self.unit} with "
                f"--max-model-len {self.found.max_model_len}, which its profile does not change. "
                "Install it without the flag.",
            )
        if self.asked.profile_id is None:
            raise FieldError(
                "service_id",
                f"set_context: expected {self.found.profile} in the registry, found it not. Add it "
                "with `tightfit models add`.",
            )

    async def start(self) -> None:
        """Start it where it does not run; return when it serves.

        Raises:
            JobError: it failed.
            ServiceError: systemd refused.
        """
        await self.look()
        if not self.is_up:
            await asyncio.to_thread(self._systemd.start, self.unit)
            await self.look()
        # systemd ends a load without progress: the unit's TimeoutStartSec.
        while self.state not in {"ready", "failed", "stopped"}:
            await asyncio.sleep(SHORT_LOOK_S)
            await self.look()
        if self.state != "ready":
            lines, _ = await asyncio.to_thread(self.log.after, None)
            raise JobError(self.reason or f"it is {self.state}", lines[-20:])

    async def stop(self) -> None:
        """Stop it; return when it has ended."""
        await asyncio.to_thread(self._systemd.stop, self.unit)
        await self.look()

    async def end(self, why: str | None = None) -> None:
        """Stop it for a while."""
        await self.stop()
        self.reason = why or self.reason

    async def revive(self) -> None:
        """Begin to start it again."""
        await asyncio.to_thread(self._systemd.start, self.unit)

    async def reset(self) -> None:
        """Forget that it failed."""
        await asyncio.to_thread(self._systemd.forget, self.unit)
        await self.look()


class Journal:
    """The lines of a unit; read when they are asked for, from any thread.

    Args:
        read: returns the last lines.
    """

    def __init__(self, read: Callable[[], list[str]]) -> None:
        self._read, self._lock = read, threading.Lock()
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._num_seen = 0

    def after(self, place: int | None) -> tuple[list[str], int]:
        """Return the lines behind a place, and the place behind them (see Log.after)."""
        with self._lock:
            new = _new_lines(list(self._lines), self._read())
            self._lines.extend(new)
            self._num_seen += len(new)
            first = self._num_seen - len(self._lines)
            skipped = 0 if place is None or place > self._num_seen else max(0, place - first)
            return list(self._lines)[skipped:], self._num_seen


def _new_lines(seen: list[str], now: list[str]) -> list[str]:
    """Return the lines of a later look that an earlier one did not end with."""
    for count in range(min(len(seen), len(now)), 0, -1):
        if seen[-count:] == now[:count]:
            return now[count:]
    return now


class Units:
    """The units that are installed, with a row of the registry each.

    Args:
        database: the registry.
        client: asks servers.
        runner: runs systemctl and journalctl.
        find: returns the units that serve a profile.
    """

    def __init__(
        self,
        database: Database,
        client: httpx.AsyncClient,
        *,
        runner: Runner = run_command,
        find: Callable[[], list[Installed]] = find_units,
    ) -> None:
        self._database, self._client, self._runner, self._find = database, client, runner, find
        self.services: dict[int, UnitService] = {}
        self._turn = asyncio.Lock()

    async def look(self) -> None:
        """Find the units, and ask systemd how they are: one call for all of a scope.

        A unit is shown once systemd has answered for it: where there is none, nothing is.
        """
        async with self._turn:
            rows = await asyncio.to_thread(self._sync)
            for gone in self.services.keys() - {row.id for row, *_ in rows}:
                del self.services[gone]
            for scope in SCOPES:
                await self._look_at(scope, [each for each in rows if each[1].scope == scope])
            await asyncio.to_thread(self._store)

    async def _look_at(self, scope: Scope, rows: list[tuple[Service, Installed, Asked]]) -> None:
        if not rows:
            return
        systemd, names = Systemd(scope, self._runner), [found.unit for _, found, _ in rows]
        try:
            states = await asyncio.to_thread(systemd.states, names)
        except ServiceError as error:
            for row, *_ in rows:
                if row.id in self.services:
                    self.services[row.id].reason = str(error)
            return
        for (row, found, asked), state in zip(rows, states, strict=True):
            service = self.services.get(row.id)
            if service is None:
                service = UnitService(row, found, systemd, self._client)
            service.found, service.asked = found, asked
            await service.take(state)
            self.services[row.id] = service

    def _sync(self) -> list[tuple[Service, Installed, Asked]]:
        """Bring the rows in line with the units' files."""
        found = {each.name: each for each in self._find()}
        chosen = select(Service).where(Service.kind == "systemd").order_by(Service.id)
        with self._database.read() as session:
            rows = {row.name: row for row in session.scalars(chosen)}
        if rows.keys() != found.keys():
            with self._database.write() as session:
                for row in session.scalars(chosen).all():
                    if row.name not in found:
                        session.delete(row)
                for name in sorted(found.keys() - rows.keys()):
                    unit = found[name].unit
                    session.add(Service(name=name, kind="systemd", unit=unit, failures=[]))
        with self._database.read() as session:
            return [
                (row, found[row.name], _asked_of(session, found[row.name].profile))
                for row in session.scalars(chosen)
                if row.name in found
            ]

    def _store(self) -> None:
        """Note processes and states where they changed, for who asks what is served."""
        with self._database.read() as session:
            rows = {row.id: row for row in session.scalars(select(Service))}
        changed = {}
        for service in list(self.services.values()):
            row = rows.get(service.id)
            columns = {
                "pid": service.pid,
                "pid_started_s": service.started_s,
                "state": service.state,
                "wanted": service.wanted,
                "model_id": service.asked.model_id,
                "profile_id": service.asked.profile_id,
            }
            if row is not None and any(getattr(row, k) != v for k, v in columns.items()):
                changed[service.id] = columns
        if changed:
            with self._database.write() as session:
                for service_id, columns in changed.items():
                    row = session.get(Service, service_id)
                    for name, value in columns.items() if row is not None else ():
                        setattr(row, name, value)


def _asked_of(session: Session, profile: str) -> Asked:
    """Return what a unit serves, MODEL or MODEL/PROFILE; a name where the registry has it not."""
    name, _, of = profile.partition("/")
    model = session.scalar(select(Model).where(Model.name == name))
    if model is None:
        return Asked(model=name, profile=of or None)
    found = (
        find_profile(model, of)
        if of
        else next((each for each in model.profiles if each.is_default), None)
    )
    return Asked(model=name, profile=of or None) if found is None else asked_of(session, found.id)


def _started_s(pid: int | None) -> float | None:
    try:
        return None if pid is None else psutil.Process(pid).create_time()
    except psutil.Error:
        return None
