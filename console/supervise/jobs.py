"""Jobs: what the supervisor was asked to do; one at a time for each thing that it changes."""

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from console.registry.checks import BusyError
from engine.errors import EngineError

KEPT: Final = 50
"""Jobs that have ended and are still shown."""
GIVEN_UP: Final = "it was given up for another job"
Found = TypeVar("Found")
logger = logging.getLogger("console")


@dataclass(kw_only=True, eq=False)
class Job:
    """One thing that was asked for, and how far it is."""

    id: int
    action: str
    asked: Mapping[str, Any]
    """The arguments as they were given."""
    arguments: Mapping[str, Any]
    """For people, who know names and not ids."""
    key: str
    """What it changes, such as service 1."""
    service_id: int | None = None
    state: str = "queued"
    """queued | running | done | failed | cancelled."""
    phase: str | None = None
    reason: str | None = None
    """Why it failed, or was cancelled."""
    log: list[str] = field(default_factory=list)
    """Of a failure, the last lines of the process."""
    created_s: float = field(default_factory=time.time)
    ended_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self.ended_s is None

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "id": self.id,
            "service_id": self.service_id,
            "action": self.action,
            "arguments": dict(self.arguments),
            "state": self.state,
            "phase": self.phase,
            "reason": self.reason,
            "log": list(self.log),
            "created_s": self.created_s,
            "ended_s": self.ended_s,
        }


class JobError(EngineError):
    """A job failed.

    Attributes:
        log: the last lines of the process that failed.
    """

    def __init__(self, message: str, log: list[str] | None = None) -> None:
        """Make it of a reason and the last lines of a log."""
        super().__init__(message)
        self.log = log or []


class JobCancelledError(EngineError):
    """A job ended early because a person said so."""


class Jobs:
    """All jobs; used on the event loop alone, but for `to_dicts`.

    Args:
        on_change: called after each change of a job.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._numbers = itertools.count(1)
        self._jobs: dict[int, Job] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def open_job(self, key: str) -> Job | None:
        """Return the job that changes a thing now, or will behind the one that does."""
        found = [job for job in self._jobs.values() if job.is_open and job.key == key]
        return found[-1] if found else None

    def running(self, key: str, action: str, asked: Mapping[str, Any]) -> Job | None:
        """Return the job that does just this already; None: nothing is done there.

        Raises:
            BusyError: another job changes the same thing.
        """
        job = self.open_job(key)
        if job is None or (job.action, dict(job.asked)) == (action, dict(asked)):
            return job
        raise BusyError(
            "action",
            f"{action}: expected {key} without a job, got {job.action}, which runs since "
            f"{time.time() - job.created_s:.0f} s. Wait for its end.",
        )

    def begin(
        self,
        action: str,
        asked: Mapping[str, Any],
        work: Callable[[Job], Awaitable[None]],
        *,
        key: str,
        arguments: Mapping[str, Any],
        service_id: int | None = None,
        turn: asyncio.Lock | None = None,
        behind: Job | None = None,
    ) -> Job:
        """Begin a job, once it has its turn; the same one again is the one that runs.

        Args:
            action: what is asked.
            asked: its arguments as they were given.
            work: does it.
            key: what it changes.
            arguments: for people.
            service_id: of the service that it changes.
            turn: held while it runs.
            behind: a job that changes the same thing, whose end it waits for.

        Raises:
            BusyError: another job changes the same thing.
        """
        if self.open_job(key) is not behind:
            running = self.running(key, action, asked)
            if running is not None:
                return running
        job = Job(
            id=next(self._numbers),
            action=action,
            asked=dict(asked),
            arguments=dict(arguments),
            key=key,
            service_id=service_id,
        )
        self._jobs[job.id] = job
        self._tasks[job.id] = asyncio.create_task(self._run(job, work, turn, behind))
        self._on_change()
        return job

    async def _run(
        self,
        job: Job,
        work: Callable[[Job], Awaitable[None]],
        turn: asyncio.Lock | None,
        behind: Job | None,
    ) -> None:
        try:
            if behind is not None:
                await self.wait(behind)
            async with turn or contextlib.nullcontext():
                job.state = "running"
                self._on_change()
                await work(job)
        except asyncio.CancelledError:
            job.state, job.reason = "cancelled", GIVEN_UP
        except JobCancelledError as error:
            job.state, job.reason = "cancelled", str(error)
        except EngineError as error:
            job.state, job.reason = "failed", str(error)
            job.log = error.log if isinstance(error, JobError) else []
        except Exception as error:
            logger.exception("job %d (%s) failed", job.id, job.action)
            job.state, job.reason = "failed", f"{type(error).__name__}: {error}"
        else:
            job.state = "done"
        finally:
            self._close(job)

    def _close(self, job: Job) -> None:
        job.ended_s = time.time()
        self._tasks.pop(job.id, None)
        self._forget()
        self._on_change()

    def tell(self, job: Job, phase: str | None) -> None:
        """Say what a job does now."""
        if job.phase != phase:
            job.phase = phase
            self._on_change()

    async def give_up(self, key: str) -> None:
        """End the job that changes a thing."""
        if (job := self.open_job(key)) is not None:
            await self._end(job)

    async def _end(self, job: Job) -> None:
        if (task := self._tasks.get(job.id)) is not None:
            task.cancel()
            await asyncio.wait([task])
            if job.is_open:  # it had not begun
                job.state, job.reason = "cancelled", GIVEN_UP
                self._close(job)

    async def wait(self, job: Job) -> Job:
        """Wait for the end of a job; return it."""
        if (task := self._tasks.get(job.id)) is not None:
            await asyncio.wait([task])
        return job

    async def close(self) -> None:
        """End all jobs."""
        for job in [job for job in self._jobs.values() if job.is_open]:
            await self._end(job)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return all jobs as plain data, the last first; from any thread."""
        return [job.to_dict() for job in sorted(self._jobs.values(), key=lambda job: -job.id)]

    def _forget(self) -> None:
        ended = [job.id for job in self._jobs.values() if not job.is_open]
        for number in ended[:-KEPT]:
            del self._jobs[number]


async def in_thread(work: Callable[[], Found]) -> Found:
    """Return what a function returns that may take minutes; its thread does not hold up the end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Found] = loop.create_future()

    def settle(found: Found | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(found)  # type: ignore[arg-type]

    def run() -> None:
        found, error = None, None
        try:
            found = work()
        except BaseException as raised:  # noqa: BLE001  it is raised where it is awaited
            error = raised
        call_on(loop, lambda: settle(found, error))

    threading.Thread(target=run, name="job", daemon=True).start()
    return await future


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    """Call a function on a loop, from another thread; not where the loop has ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)
