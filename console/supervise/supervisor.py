"""Supervisor: what runs, what it was asked to do, and what all pages show of it."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
from filelock import FileLock, Timeout
from sqlalchemy import select

from catalogue.processes import module_command
from console.registry.checks import FieldError, check_settings, shown, spec_of
from console.registry.database import Database
from console.registry.models import Models
from console.registry.tables import Model, Profile, Service
from console.service.systemd import Runner, run_command
from console.supervise.discover import Discovery, Listener, listeners
from console.supervise.jobs import Job, Jobs
from console.supervise.log import level_of
from console.supervise.services import Asked, Limits, OwnService, Site, asked_of
from console.supervise.tasks import FETCH, Served, Tasks
from console.supervise.units import LOOK_S as UNITS_S
from console.supervise.units import Installed, Units, UnitService, find_units
from console.testing.tests import Tests
from engine.errors import ConfigError
from server.settings import ServerSettings

MAIN: Final = "main"
"""The service that there always is."""
MAIN_PORT: Final = 8000
COALESCE_S: Final = 0.2
"""Least seconds between two changes that a feed tells."""
QUIET_S: Final = 2.0
"""Seconds after which a feed tells of the machine, whose samples are changes too."""
_STARTING: Final = ("start", "restart", "switch", "set_context", "set_port")
"""Actions that start a server."""
Work = Callable[[Job], Awaitable[None]]
Given = Mapping[str, Any]
"""Arguments of an action."""
Begun = tuple[Work, Given]
"""What a job does, and its arguments for people."""
Begin = Callable[[Served, Given], Awaitable[Begun]]
logger = logging.getLogger("console")


class Machine(Protocol):
    """What the supervisor needs of the machine."""

    def snapshot(self) -> dict[str, Any]:
        """Return GPUs, memory, disks and history as plain data."""

    def tell(self, served: Sequence[Mapping[str, Any]]) -> None:
        """Take in what served processes hold."""

    def tell_load(self, load: Mapping[str, Any]) -> None:
        """Take in the load, for the history."""


class Supervisor:
    """Owns the services of a registry; one process at a time does.

    Its coroutines run on one event loop, which never waits for the disk or a process; `snapshot`,
    `log` and `base_url` may be called from any thread.

    Args:
        database: the registry.
        machine: tells of GPUs and memory.
        home: TIGHTFIT_HOME; logs lie below it.
        about: what the snapshot says of the console itself.
        command: starts a server.
        limits: how long things may take.
        clock: seconds that never go back, for limits.
        tests: runs tests.
        fetch: command that downloads the model whose name follows.
        list_listeners: returns who listens on this machine.
        list_units: returns the units that serve a profile.
        run_systemctl: runs systemctl and journalctl.
    """

    def __init__(
        self,
        database: Database,
        machine: Machine,
        *,
        home: Path,
        about: Mapping[str, Any] | None = None,
        command: Sequence[str] = (),
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
        tests: Tests | None = None,
        fetch: Sequence[str] = FETCH,
        list_listeners: Callable[[], list[Listener]] = listeners,
        list_units: Callable[[], list[Installed]] = find_units,
        run_systemctl: Runner = run_command,
    ) -> None:
        self._database, self._machine = database, machine
        self._home, self._folder = home, home / "console"
        self._command = tuple(command) or module_command("server")
        self._limits, self._clock = limits or Limits(), clock
        self._models = Models(database)
        self._jobs = Jobs(self._changed)
        self._own: dict[int, OwnService] = {}
        self._units: Units | None = None
        self._list_units, self._run_systemctl = list_units, run_systemctl
        self._tasks = Tasks(
            database,
            self._jobs,
            home=home,
            limits=self._limits,
            services=self._services,
            tests=tests or Tests(database),
            fetch=fetch,
        )
        self._discovery = Discovery(
            self._own_pids, on_change=self._changed, list_listeners=list_listeners
        )
        self._about = dict(about or {})
        self._client: httpx.AsyncClient | None = None
        self._lock: FileLock | None = None
        self._looking: list[asyncio.Task[None]] = []
        self._waiting: set[asyncio.Event] = set()
        self._is_closed = False
        self._version: int | None = None

    async def start(self) -> None:
        """Find what there is, and start the services that are wanted.

        Raises:
            ConfigError: another console has this registry.
        """
        self._lock = await asyncio.to_thread(self._take_lock)
        self._client = httpx.AsyncClient(timeout=self._limits.answer_s, trust_env=False)
        site = Site(
            database=self._database,
            folder=self._folder,
            command=self._command,
            client=self._client,
            limits=self._limits,
            on_change=self._changed,
            clock=self._clock,
        )
        rows = await asyncio.to_thread(self._read_rows)
        for row in rows:
            self._own[row.id] = await asyncio.to_thread(OwnService, row, site)
        self._units = Units(
            self._database,
            self._client,
            runner=self._run_systemctl,
            find=self._list_units,
        )
        await self._refresh()
        await _once(self._look_at_units)
        held = await self._tasks.recover()
        for service in self._own.values():
            await service.resume(held)
        await self._tasks.revive_held()
        self._discovery.start()
        looks = ((self._look, self._limits.look_s), (self._look_at_units, UNITS_S))
        self._looking = [asyncio.create_task(_repeat(*each)) for each in looks]

    async def close(self) -> None:
        """End jobs and processes; what is wanted stays for the next start."""
        self._is_closed = True
        for looking in self._looking:
            looking.cancel()
        if self._looking:
            await asyncio.wait(self._looking)
        await self._discovery.close()
        await self._jobs.close()
        await asyncio.gather(*(service.close() for service in self._own.values()))
        if self._client is not None:
            await self._client.aclose()
        if self._lock is not None:
            await asyncio.to_thread(self._lock.release)
        self._changed()

    def _take_lock(self) -> FileLock:
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._folder / ".lock", thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise ConfigError(
                f"console: expected no other console on the registry {self._database.path}, got "
                "one that runs. Use that, end it, or set TIGHTFIT_HOME to another folder."
            ) from error
        return lock

    def _read_rows(self) -> Sequence[Service]:
        with self._database.write() as session:
            chosen = select(Service).where(Service.kind == "own").order_by(Service.id)
            rows = list(session.scalars(chosen))
            if not any(row.name == MAIN for row in rows):
                rows.append(Service(name=MAIN, kind="own", port=MAIN_PORT, failures=[]))
                session.add(rows[-1])
        return rows

    # What pages read.

    def snapshot(self) -> dict[str, Any]:
        """Return all there is to show as plain data, at once; from any thread."""
        return {
            "time_s": time.time(),
            "services": [service.view() for service in self._services()],
            "jobs": self._jobs.to_dicts(),
            "machine": self._machine.snapshot(),
            "foreign": [_foreign(each) for each in self._discovery.snapshot()],
            "console": self._about,
        }

    def _own_pids(self) -> set[int]:
        """Return this process and its servers, which are no foreign ones."""
        pids = (service.pid for service in self._services())
        return {os.getpid(), *(pid for pid in pids if pid is not None)}

    def log(self, service_id: int, after: str | None = None) -> tuple[list[dict[str, str]], str]:
        """Return lines of a service's log, and where the next ones begin; from any thread.

        Args:
            service_id: of the service.
            after: as an earlier call returned it; None: all lines that are in memory.

        Raises:
            LookupError: there is no such service.
        """
        place = int(after) if after is not None and after.isascii() and after.isdigit() else None
        lines, next_place = self._service(service_id).log.after(place)
        return [{"level": level_of(line), "text": line} for line in lines], str(next_place)

    def base_url(self, service_id: int | None = None) -> str | None:
        """Return where a service answers, or without an id the first that does; None: nowhere.

        Raises:
            LookupError: there is no such service.
        """
        if service_id is not None:
            return self._service(service_id).base_url
        urls = (service.base_url for service in self._services())
        return next((url for url in urls if url is not None), None)

    async def feed(self) -> AsyncIterator[None]:
        """Yield at once, and again after changes, until the supervisor is closed."""
        event = asyncio.Event()
        self._waiting.add(event)
        try:
            while not self._is_closed:
                event.clear()
                yield
                await asyncio.sleep(COALESCE_S)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), QUIET_S - COALESCE_S)
        finally:
            self._waiting.discard(event)

    def _changed(self) -> None:
        for event in self._waiting:
            event.set()

    # What is asked.

    async def submit(self, action: str, **asked: Any) -> Job:
        """Begin what is asked, and return its job; a wish that is being fulfilled is the same job.

        Args:
            action: start, stop, restart, reset (service_id); switch (service_id, profile_id);
                set_context (service_id, max_model_len); set_port (service_id, port);
                set_auto_restart (service_id, auto_restart); download (model_id); delete (model_id,
                keep_files); test (profile_id, num_requests, stop_service); ab (profile_a_id,
                profile_b_id, num_requests, stop_service); sweep (model_id, num_requests,
                stop_service); cancel_test (test_id).
            **asked: arguments of the action.

        Raises:
            BusyError: another job changes the same thing.
            FieldError: there is no such action, or an argument is refused.
            LookupError: there is none with an id.
        """
        of_models, of_services = self._tasks.actions(), self._actions()
        if action in of_models:
            kinds, task = of_models[action]
            _check_arguments(action, asked, kinds)
            return await task(action, asked)
        if action not in of_services:
            names = ", ".join([*of_services, *of_models])
            raise FieldError("action", f"action: expected one of {names}, got {shown(action)}.")
        kinds, begin = of_services[action]
        _check_arguments(action, asked, kinds)
        if action in _STARTING:
            self._tasks.check_free(action)
        service = self._service(asked["service_id"])
        key = _key(service)
        running = self._jobs.open_job(key)
        if running is not None and action == "stop" != running.action:
            await self._jobs.give_up(key)  # who stops does not wait for the end of a load
        stopping = self._jobs.open_job(key)
        if stopping is None or stopping.action != "stop" or action == "stop":
            stopping = None
            if (running := self._jobs.running(key, action, asked)) is not None:
                return running
        work, named = await begin(service, asked)
        return self._jobs.begin(
            action,
            asked,
            work,
            key=key,
            arguments={"service": service.name, **named},
            service_id=service.id,
            behind=stopping,
        )

    async def wait(self, job: Job) -> Job:
        """Wait for the end of a job; return it."""
        return await self._jobs.wait(job)

    def _actions(self) -> dict[str, tuple[Mapping[str, type], Begin]]:
        """Return for each action the types of its arguments, and what checks and begins it."""
        service = {"service_id": int}
        return {
            "start": (service, self._start),
            "stop": (service, self._stop),
            "restart": (service, self._restart),
            "reset": (service, self._reset),
            "switch": (service | {"profile_id": int}, self._switch),
            "set_context": (service | {"max_model_len": int}, self._set_context),
            "set_port": (service | {"port": int}, self._set_port),
            "set_auto_restart": (service | {"auto_restart": bool}, self._set_auto_restart),
        }

    def _services(self) -> list[Served]:
        """Return all services, those of our own first."""
        units = {} if self._units is None else self._units.services
        return [*list(self._own.values()), *list(units.values())]

    def _service(self, service_id: int) -> Served:
        service = next((each for each in self._services() if each.id == service_id), None)
        if service is None:
            raise LookupError(f"service: expected the id of one that there is, got {service_id}.")
        return service

    async def _start(self, service: Served, _: Given) -> Begun:
        await self._refresh()
        if not service.is_up:
            service.check_startable()
        return lambda job: self._told(job, service, service.start()), {}

    async def _stop(self, service: Served, _: Given) -> Begun:
        return lambda _: service.stop(), {}

    async def _restart(self, service: Served, _: Given) -> Begun:
        await self._refresh()
        service.check_startable()
        return lambda job: self._anew(job, service), {}

    async def _anew(self, job: Job, service: Served) -> None:
        self._jobs.tell(job, "stopping")
        await service.end()
        await self._told(job, service, service.start())

    async def _told(self, job: Job, service: Served, work: Awaitable[None]) -> None:
        """Do something while a job's phase follows the service."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                self._jobs.tell(job, service.phase)
                await asyncio.wait([task], timeout=self._limits.look_s)
            await task
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            self._jobs.tell(job, service.phase)

    async def _reset(self, service: Served, _: Given) -> Begun:
        return lambda _: service.reset(), {}

    async def _set_auto_restart(self, served: Served, asked: Given) -> Begun:
        service = _own(served, "set_auto_restart", "which systemd starts again when it fails")
        is_on = asked["auto_restart"]
        return lambda _: service.set_auto_restart(is_on), {"auto_restart": is_on}

    async def _set_port(self, served: Served, asked: Given) -> Begun:
        service = _own(served, "set_port", "whose file has its port")
        port = asked["port"]
        try:
            ServerSettings(port=port)
        except ConfigError as error:
            raise FieldError("port", str(error)) from error

        async def work(job: Job) -> None:
            was = service.port
            await service.set_port(port)
            if service.is_up and port != was:
                await self._anew(job, service)

        return work, {"port": port}

    async def _switch(self, served: Served, asked: Given) -> Begun:
        service = _own(served, "switch", "whose file names its profile")
        profile_id = asked["profile_id"]
        found = await asyncio.to_thread(self._read_asked, profile_id)
        if found.refusal is not None:
            raise FieldError(found.refusal.partition(":")[0], found.refusal)

        async def work(job: Job) -> None:
            is_same = service.serving_profile_id == profile_id
            await service.serve(found)
            if service.state != "ready" or not is_same:
                await self._anew(job, service)

        return work, {"model": found.model, "profile": found.profile}

    def _read_asked(self, profile_id: int) -> Asked:
        with self._database.read() as session:
            if session.get(Profile, profile_id) is None:
                raise LookupError(
                    f"profile: expected the id of one that there is, got {profile_id}."
                )
            return asked_of(session, profile_id)

    async def _set_context(self, service: Served, asked: Given) -> Begun:
        await self._refresh()
        service.check_startable()
        if isinstance(service, UnitService):
            await asyncio.to_thread(service.check_context, self._home)
        found, length = service.asked, {"max_model_len": asked["max_model_len"]}
        profile_id, model_id = found.profile_id, found.model_id
        assert profile_id is not None
        assert model_id is not None
        await asyncio.to_thread(self._check_settings, profile_id, length)

        async def work(job: Job) -> None:
            if found.settings.get("max_model_len") != asked["max_model_len"]:
                await asyncio.to_thread(self._models.set_profile, model_id, found.profile, length)
                await self._refresh()
                await self._look_at_units()
            if service.is_behind:
                await self._anew(job, service)

        return work, length

    def _check_settings(self, profile_id: int, settings: Mapping[str, Any]) -> None:
        with self._database.read() as session:
            profile = session.get_one(Profile, profile_id)
            model = session.get_one(Model, profile.model_id)
            check_settings({**profile.settings, **settings}, spec_of(model))

    # What changes by itself.

    async def _look(self) -> None:
        """Follow the registry, and tell the machine what is served."""
        await self._refresh()
        self._machine.tell([found for each in self._services() if (found := each.holds())])
        loads = [load for each in self._services() if (load := each.load)]
        if loads:
            self._machine.tell_load(loads[0])

    async def _look_at_units(self) -> None:
        if self._units is not None:
            await self._units.look()
            self._changed()

    async def _refresh(self) -> None:
        """Read what services serve where the registry was changed, by whom it may be."""
        profiles = await asyncio.to_thread(self._read_profiles)
        for service_id, asked in (profiles or {}).items():
            self._own[service_id].asked = asked
        if profiles is not None:
            self._changed()

    def _read_profiles(self) -> dict[int, Asked] | None:
        """Return what each service serves; None where nothing was changed."""
        version = self._database.version()
        if version == self._version:
            return None
        self._version = version
        with self._database.read() as session:
            rows = session.scalars(select(Service).where(Service.id.in_(list(self._own))))
            return {row.id: asked_of(session, row.profile_id) for row in rows}


async def _repeat(look: Callable[[], Awaitable[None]], pause_s: float) -> None:
    """Look again and again; a look that fails is logged, and the next one comes."""
    while True:
        await _once(look)
        await asyncio.sleep(pause_s)


async def _once(look: Callable[[], Awaitable[None]]) -> None:
    try:
        await look()
    except Exception:
        logger.exception("a look failed")


def _own(service: Served, action: str, why: str) -> OwnService:
    """Return a service that the console runs itself.

    Args:
        service: any.
        action: what is asked of it.
        why: what forbids that for a unit.

    Raises:
        FieldError: systemd does.
    """
    if isinstance(service, OwnService):
        return service
    raise FieldError(
        "service_id",
        f"{action}: expected a service that the console runs, got the unit {service.unit}, "
        f"{why}. Change that and restart it, or install another unit with `tightfit service "
        "install`.",
    )


def _foreign(found: dict[str, Any]) -> dict[str, Any]:
    """Return a foreign server with its models in words; None: it does not say."""
    return {**found, "model": ", ".join(found["models"] or []) or None}


def _key(service: Served) -> str:
    return f"service {service.name}"


def _check_arguments(action: str, given: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    """Raise FieldError where the arguments are not those of an action."""
    for name in {*kinds} - {*given}:
        raise FieldError(name, f"{name}: expected a value for {action}, got none.")
    for name in {*given} - {*kinds}:
        raise FieldError(name, f"{name}: {action} has no such argument; it has {', '.join(kinds)}.")
    for name, kind in kinds.items():
        if type(given[name]) is not kind:
            word = "true or false" if kind is bool else "an integer"
            raise FieldError(name, f"{name}: expected {word}, got {shown(given[name])}.")
