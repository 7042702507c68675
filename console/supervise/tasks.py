"""Jobs on models: downloads, removals and tests; tests run one after another."""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from sqlalchemy import select, update

from console.registry.checks import BusyError
from console.registry.database import Database
from console.registry.holdings import Holdings
from console.registry.models import Models
from console.registry.stale import interrupt_stale, is_alive
from console.registry.tables import Model, Profile, Service, TestRun
from console.service.systemd import ServiceError
from console.service.units import PROGRAM
from console.supervise.child import Child
from console.supervise.jobs import Job, JobCancelledError, JobError, Jobs, call_on, in_thread
from console.supervise.log import Log, last_words
from console.supervise.services import Limits, OwnService
from console.supervise.units import UnitService
from console.testing.tests import Ask, Tests
from engine.sealed import GIB

FETCH: Final = (sys.executable, "-P", "-m", PROGRAM, "models", "fetch")
_ENDED_WELL: Final = ("finished", "partial")
Given = Mapping[str, Any]
Served = OwnService | UnitService
Begin = Callable[[str, Given], Awaitable[Job]]
logger = logging.getLogger("console")


class Tasks:
    """Begins jobs on models; used on one event loop.

    Args:
        database: the registry.
        jobs: where the jobs are.
        home: TIGHTFIT_HOME.
        limits: how long things may take.
        services: returns what is served, which a test may stop.
        tests: runs tests.
        fetch: command that downloads the model whose name follows.
    """

    def __init__(
        self,
        database: Database,
        jobs: Jobs,
        *,
        home: Path,
        limits: Limits,
        services: Callable[[], Sequence[Served]],
        tests: Tests,
        fetch: Sequence[str] = FETCH,
    ) -> None:
        self._database, self._jobs, self._limits = database, jobs, limits
        self._home, self._services = home, services
        self._models, self._holdings = Models(database), Holdings(database)
        self._tests, self._fetch = tests, tuple(fetch)
        self._turn = asyncio.Lock()
        self._open: set[int] = set()
        """Tests that have not ended."""

    def actions(self) -> dict[str, tuple[Mapping[str, type], Begin]]:
        """Return for each action the types of its arguments, and what begins it."""
        sizes = {"num_requests": int, "stop_service": bool}
        return {
            "download": ({"model_id": int}, self._download),
            "delete": ({"model_id": int, "keep_files": bool}, self._delete),
            "test": (sizes | {"profile_id": int}, self._test),
            "ab": (sizes | {"profile_a_id": int, "profile_b_id": int}, self._test),
            "sweep": (sizes | {"model_id": int}, self._test),
            "cancel_test": ({"test_id": int}, self._cancel),
        }

    def check_free(self, action: str) -> None:
        """Raise BusyError while a test is open: a server beside it would change its figures."""
        if self._open:
            raise BusyError(
                "action",
                f"{action}: expected no test, got test {min(self._open)}, which has not ended. "
                "Cancel it, or wait for its end.",
            )

    async def recover(self) -> str | None:
        """Follow and queue the tests that an earlier console left.

        Return why what is served stays stopped; None: no test runs that it was stopped for.
        """
        left = await asyncio.to_thread(self._tests.recover)
        await asyncio.to_thread(interrupt_stale, self._database)
        why = None
        for test_id in (*left.running, *left.queued):
            row = await asyncio.to_thread(self._row, TestRun, test_id, "test")
            is_running = row.status == "running"
            if is_running and row.settings.get("stop_service"):
                why = _held_by(test_id)
            model = await asyncio.to_thread(self._row, Model, row.model_id, "model")
            self._queue(row.kind, {"test_id": test_id}, row, model.name, is_running=is_running)
        return why

    async def revive_held(self) -> None:
        """Start what an earlier console stopped for a test that has ended since."""
        held = await asyncio.to_thread(self._held)
        over = [each for each in self._services() if held.get(each.id, 0) not in {0, *self._open}]
        await self._revive(over)

    def _held(self) -> dict[int, int]:
        """Return the tests for which services were stopped, by the service's id."""
        chosen = select(Service).where(Service.held_by_test_id.is_not(None))
        with self._database.read() as session:
            return {row.id: row.held_by_test_id or 0 for row in session.scalars(chosen)}

    def _hold(self, service_id: int, test_id: int | None) -> None:
        with self._database.write() as session:
            where = update(Service).where(Service.id == service_id)
            session.execute(where.values(held_by_test_id=test_id))

    # Downloads and removals.

    async def _download(self, action: str, asked: Given) -> Job:
        row = await asyncio.to_thread(self._row, Model, asked["model_id"], "model")
        if row.state == "downloading" and is_alive(row.pid, row.pid_started_s):
            self._jobs.running(_key(row), action, asked)
            if self._jobs.open_job(_key(row)) is None:
                raise BusyError("model", f"model {row.name}: process {row.pid} downloads it.")

        async def work(job: Job) -> None:
            if row.state not in {"missing", "failed"}:
                return  # it is here
            await self._run_download(job, row.id, row.name)

        return self._begin(action, asked, work, row)

    async def _run_download(self, job: Job, model_id: int, name: str) -> None:
        log = await asyncio.to_thread(Log, self._home / "console" / "logs" / "downloads.log")
        stirred, loop = asyncio.Event(), asyncio.get_running_loop()
        environ = {"TIGHTFIT_HOME": str(self._home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        command = [*self._fetch, name]
        child = Child(command, log, lambda: call_on(loop, stirred.set), environ=environ)
        try:
            await asyncio.to_thread(child.start)
            await self._follow_download(job, model_id, child, stirred)
        finally:
            await asyncio.shield(asyncio.to_thread(self._end_download, child, log))
        if child.exit_code != 0:
            lines = child.lines()
            raise JobError(last_words(lines) or f"exit code {child.exit_code}", lines)

    async def _follow_download(
        self, job: Job, model_id: int, child: Child, stirred: asyncio.Event
    ) -> None:
        seen, loop = None, asyncio.get_running_loop()
        moved_s = loop.time()
        while child.exit_code is None:
            row = await asyncio.to_thread(self._row, Model, model_id, "model")
            found = (row.done_bytes, len(child.lines()))
            if found != seen:
                seen, moved_s = found, loop.time()
            self._jobs.tell(job, _far(row.done_bytes, row.total_bytes))
            if loop.time() - moved_s > self._limits.patience_s:
                raise JobError(
                    f"the download made no progress for {self._limits.patience_s:g} s. What has "
                    "come stays: download it again.",
                    child.lines(),
                )
            stirred.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stirred.wait(), self._limits.look_s)

    def _end_download(self, child: Child, log: Log) -> None:
        if child.exit_code is None:
            child.kill()
            interrupt_stale(self._database)
        log.close()

    async def _delete(self, action: str, asked: Given) -> Job:
        row = await asyncio.to_thread(self._row, Model, asked["model_id"], "model")
        if (running := self._jobs.running(_key(row), action, asked)) is not None:
            return running
        keep = asked["keep_files"]
        await asyncio.to_thread(self._holdings.removal, row.id, keep_files=keep)

        async def work(_: Job) -> None:
            await in_thread(lambda: self._holdings.remove(row.id, keep_files=keep))

        return self._begin(action, asked, work, row)

    def _begin(
        self, action: str, asked: Given, work: Callable[[Job], Awaitable[None]], row: Model
    ) -> Job:
        return self._jobs.begin(action, asked, work, key=_key(row), arguments={"model": row.name})

    # Tests.

    async def _test(self, action: str, asked: Given) -> Job:
        ids = [
            asked[name] for name in ("profile_id", "profile_a_id", "profile_b_id") if name in asked
        ]
        profiles = [await asyncio.to_thread(self._row, Profile, each, "profile") for each in ids]
        model_id = profiles[0].model_id if profiles else asked["model_id"]
        model = await asyncio.to_thread(self._row, Model, model_id, "model")
        ask = Ask(
            kind=action,
            profiles=[profile.name for profile in profiles],
            num_requests=asked["num_requests"],
            stop_service=asked["stop_service"],
        )
        row = await asyncio.to_thread(self._tests.queue, model_id, ask)
        return self._queue(action, asked, row, model.name, is_running=False)

    def _queue(
        self, action: str, asked: Given, row: TestRun, model: str, *, is_running: bool
    ) -> Job:
        self._open.add(row.id)

        async def work(job: Job) -> None:
            try:
                await self._run_test(job, row, is_running=is_running)
            finally:
                self._open.discard(row.id)

        return self._jobs.begin(
            action,
            asked,
            work,
            key=f"test {row.id}",
            arguments={"model": model, "test": row.id},
            turn=self._turn,
        )

    async def _run_test(self, job: Job, row: TestRun, *, is_running: bool) -> None:
        loop = asyncio.get_running_loop()

        def tell(found: Mapping[str, Any]) -> None:
            call_on(loop, lambda: self._jobs.tell(job, _standing(found)))

        stopped: list[Served] = []
        left: list[str] = []
        run = self._tests.follow if is_running else self._tests.run
        # A console that ends leaves a test alone; the next one follows it.
        try:
            if row.settings.get("stop_service"):
                self._jobs.tell(job, "stopping what is served")
                await self._end_served(row, stopped)
            found = await in_thread(lambda: run(row.id, tell))
        finally:
            if asyncio.current_task().cancelling() == 0:  # type: ignore[union-attr]
                left = await self._revive(stopped)
        if left:
            raise JobError(f"{found.status}, but not started again: {'; '.join(left)}")
        if found.status == "cancelled":
            raise JobCancelledError(found.reason or "a person ended it")
        if found.status not in _ENDED_WELL:
            raise JobError(found.reason or found.status)

    async def _end_served(self, row: TestRun, stopped: list[Served]) -> None:
        """Stop what is served, and note it; a test for which that is refused does not begin."""
        held = await asyncio.to_thread(self._held)
        for service in self._services():
            if service.wanted != "running" and held.get(service.id) != row.id:
                continue
            await asyncio.to_thread(self._hold, service.id, row.id)  # outlives this process
            try:
                await service.end(_held_by(row.id))
            except ServiceError as error:
                await asyncio.to_thread(self._hold, service.id, None)
                await in_thread(lambda: self._tests.cancel(row.id))
                raise JobError(f"{service.name} was not stopped: {error}") from error
            stopped.append(service)

    async def _revive(self, services: Sequence[Served]) -> list[str]:
        """Start services again; return why some were not."""
        left = []
        for service in services:
            try:
                await service.revive()
            except ServiceError as error:
                logger.warning("%s was not started again: %s", service.name, error)
                left.append(f"{service.name}: {error}")
            await asyncio.to_thread(self._hold, service.id, None)
        return left

    async def _cancel(self, action: str, asked: Given) -> Job:
        row = await asyncio.to_thread(self._row, TestRun, asked["test_id"], "test")

        async def work(_: Job) -> None:
            await in_thread(lambda: self._tests.cancel(row.id))

        return self._jobs.begin(
            action, asked, work, key=f"end of test {row.id}", arguments={"test": row.id}
        )

    def _row(self, table: Any, row_id: int, name: str) -> Any:
        with self._database.read() as session:
            row = session.get(table, row_id)
        if row is None:
            raise LookupError(f"{name}: expected the id of one that there is, got {row_id}.")
        return row


def _key(row: Model) -> str:
    return f"model {row.name}"


def _far(done_bytes: int | None, total_bytes: int | None) -> str:
    """Return how much of a download has come."""
    if not done_bytes:
        return "downloading"
    of = f" of {total_bytes / GIB:.2f}" if total_bytes else ""
    return f"{done_bytes / GIB:.2f}{of} GiB"


def _standing(found: Mapping[str, Any]) -> str:
    """Return the phase of a test, and how far it is where its phase has an end."""
    if found["total"] is None:
        return str(found["phase"])
    return f"{found['phase']}, {found['done']} of {found['total']} {found['unit']}"


def _held_by(test_id: int) -> str:
    """Return why a service is stopped for a test."""
    return f"test {test_id} runs"
