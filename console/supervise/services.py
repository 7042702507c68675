"""A service of our own: a server as a child, in the state that was asked for, or why not."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy.orm import Session

from catalogue.processes import signal_name
from console.registry.checks import FieldError
from console.registry.database import Database
from console.registry.flags import flags_of, source_of
from console.registry.stale import is_alive
from console.registry.tables import Model, Profile, Service
from console.supervise.child import Child, holds_command, kill_tree
from console.supervise.figures import Figures, effective_of, holds_of
from console.supervise.jobs import JobError, call_on
from console.supervise.log import Log, last_words
from engine.errors import ConfigError
from server.lifecycle import EXIT_CONFIG, EXIT_USAGE
from server.listen import PortTakenError, listen
from server.settings import ServerSettings

Plain = dict[str, Any]
logger = logging.getLogger("console")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long things may take, seconds."""

    look_s: float = 1.0
    """Between two looks at a server."""
    answer_s: float = 2.0
    """That a server has to answer a look."""
    patience_s: float = 300.0
    """That a load may go without progress: another phase, or more bytes."""
    unresponsive_s: float = 10.0
    """That a server which was ready may leave looks without an answer before it is shown so."""
    silent_s: float = 60.0
    """That it may leave looks without an answer before it is ended."""
    stop_s: float = ServerSettings().drain_s + 15.0
    """From SIGTERM to SIGKILL."""
    restart_s: float = 2.0
    """Between a failure and the next start."""
    crashes: int = 3
    """Failures within `crash_window_s` after which there is no further start by itself."""
    crash_window_s: float = 300.0


@dataclass(frozen=True, kw_only=True)
class Site:
    """What services share.

    Attributes:
        command: starts a server.
        client: asks servers.
        on_change: called after each change, on the event loop.
        clock: seconds that never go back, for limits.
    """

    database: Database
    folder: Path
    command: Sequence[str]
    client: httpx.AsyncClient
    limits: Limits
    on_change: Callable[[], None]
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a server ended otherwise than it was asked to."""

    reason: str
    is_permanent: bool = False
    """Whether another start would fail as well."""
    is_crash: bool = True
    """Whether a process ended: such failures count as a crash loop."""
    log: Sequence[str] = ()


@dataclass(kw_only=True)
class Asked:
    """What a service serves: its row's model and profile."""

    model_id: int | None = None
    model: str | None = None
    profile_id: int | None = None
    profile: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    """Of `tightfit serve`."""
    refusal: str | None = None
    """Why it cannot be started."""


def asked_of(session: Session, profile_id: int | None) -> Asked:
    """Read what a service with a profile serves."""
    profile = None if profile_id is None else session.get(Profile, profile_id)
    if profile is None:
        return Asked(
            refusal="profile: expected one to serve, got none. Choose a model and its profile."
        )
    model = session.get_one(Model, profile.model_id)
    return Asked(
        model_id=model.id,
        model=model.name,
        profile_id=profile.id,
        profile=profile.name,
        settings=dict(profile.settings),
        **_command_of(model, profile),
    )


def _command_of(model: Model, profile: Profile) -> Plain:
    """Return the arguments that serve a model, or why it cannot be served."""
    is_here = model.path is not None and model.state not in {"missing", "downloading"}
    if not is_here and profile.settings.get("load_format") != "dummy":
        why = f" ({model.reason})" if model.reason else ""
        return {
            "refusal": f"model: expected one whose weights are on this machine, got {model.name}, "
            f"which is {model.state}{why}. Download it, or bring its files back."
        }
    try:
        source = source_of(model)
    except FieldError as error:
        return {"refusal": str(error)}
    return {"arguments": [source, "--served-model-name", model.name, *flags_of(profile.settings)]}


def taken(port: int) -> str | None:
    """Return why a server cannot have a port, with the process that has it; None: it can."""
    try:
        listen(ServerSettings(port=port)).close()
    except PortTakenError as error:
        return f"{str(error).partition(' End that,')[0]} End that, or choose another port."
    except ConfigError as error:
        return str(error)
    return None


class OwnService:
    """A server that the console starts, watches and ends.

    Everything here runs on the event loop, but for `view`.
    """

    def __init__(self, row: Service, site: Site) -> None:
        self._site, self._limits = site, site.limits
        self.id, self.name, self.kind, self.port = row.id, row.name, row.kind, row.port or 0
        self.wanted, self.auto_restart = row.wanted, row.auto_restart
        self.asked = Asked(profile_id=row.profile_id)
        self._failures = list(row.failures)
        self.state, self._since_s = "stopped", time.time()
        self.reason: str | None = None
        self._tail: Sequence[str] = ()
        self._row_pid, self._row_pid_started_s = row.pid, row.pid_started_s
        self._was_failed = row.state == "failed"
        self._was_reason, self._was_tail = row.reason, row.log_tail
        self.log = Log(site.folder / "logs" / f"{row.name}.log")
        self._child: Child | None = None
        self._life: asyncio.Task[None] | None = None
        self._why: str | None = None
        """What it was ended for."""
        self._storing = asyncio.Lock()
        self._ending = asyncio.Event()
        self._stirred = asyncio.Event()
        self._ready = asyncio.Event()
        self._running: Asked | None = None
        """What the process was started with."""
        self._load: Plain | None = None
        self._figures = Figures(site.client)
        self._effective: Plain | None = None
        self.info: Plain = {}
        """What the server says of itself at /info."""
        self._phase: str | None = None
        self._bytes_done: int | None = None
        self._bytes_total: int | None = None
        self._told_reason: str | None = None
        self._answered_s = self._progressed_s = 0.0

    # What is shown.

    @property
    def is_crash_loop(self) -> bool:
        """Whether it failed too often to be started by itself again."""
        return self.state == "failed" and len(self._recent()) >= self._limits.crashes

    @property
    def is_up(self) -> bool:
        """Whether a process of it lives, or is about to be started."""
        return self._life is not None

    @property
    def base_url(self) -> str | None:
        """Where the server answers; None while it does not."""
        return self._child.url if self.state == "ready" and self._child is not None else None

    @property
    def _is_served(self) -> bool:
        """Whether the process was ready, and is not to end."""
        return self.state in {"ready", "unresponsive"}

    @property
    def pid(self) -> int | None:
        """The process; None where there is none."""
        child = self._child
        return None if child is None or child.started_s is None else child.pid

    @property
    def phase(self) -> str:
        """What it does now, in a word or two."""
        return self._phase or self.state

    @property
    def load(self) -> Plain | None:
        """How much it serves now; None while it is not ready."""
        return self._load

    @property
    def serving_profile_id(self) -> int | None:
        """The profile of the process; None where there is none."""
        return None if self._running is None else self._running.profile_id

    @property
    def serving_settings(self) -> Mapping[str, Any]:
        """The settings of the process; empty where there is none."""
        return {} if self._running is None else self._running.settings

    @property
    def is_behind(self) -> bool:
        """Whether its process has other settings than are asked for."""
        return self.is_up and self.serving_settings != self.asked.settings

    def holds(self) -> Plain | None:
        """Return what the process holds of the machine, as it says; None: it does not say."""
        return holds_of(self.pid, self.info)

    def view(self) -> Plain:
        """Return all that pages show, as plain data."""
        asked = self._running or self.asked
        is_loading = self.state == "loading"
        return {
            "id": self.id,
            "name": self.name,
            "kind": self.kind,
            "unit": None,
            "model_id": asked.model_id,
            "model": asked.model,
            "profile_id": asked.profile_id,
            "profile": asked.profile,
            "port": self.port,
            "wanted": self.wanted,
            "auto_restart": self.auto_restart,
            "state": self.state,
            "since_s": self._since_s,
            "phase": self._phase if is_loading else None,
            "bytes_done": self._bytes_done if is_loading else None,
            "bytes_total": self._bytes_total if is_loading else None,
            "spent_s": max(0.0, time.time() - self._since_s) if is_loading else None,
            "reason": self.reason,
            "log_tail": "\n".join(self._tail) or None,
            "pid": self.pid,
            "failures": self._recent(),
            "is_crash_loop": self.is_crash_loop,
            "requested": None if asked.model is None else {"model": asked.model, **asked.settings},
            "effective": self._effective,
            "load": self._load,
        }

    def _enter(self, state: str, reason: str | None = None, *, phase: str | None = None) -> None:
        if state != self.state:
            self.state, self._since_s = state, time.time()
        self.reason, self._phase = reason, phase
        self._bytes_done = self._bytes_total = None
        if state != "ready":
            self._load = None
        if state not in {"ready", "unresponsive", "stopping"}:
            self._effective, self.info = None, {}
        if state in {"ready", "stopped"}:
            self._tail = ()
        if state != "ready":
            self._ready.clear()
        self._site.on_change()

    # What is asked of it.

    def check_startable(self) -> None:
        """Raise FieldError where it has nothing that it could serve."""
        if self.asked.refusal is not None:
            raise FieldError(self.asked.refusal.partition(":")[0], self.asked.refusal)

    async def resume(self, held: str | None = None) -> None:
        """Find out what is true when the console starts, and start what ran.

        Args:
            held: why it is not started yet; `revive` does so later.
        """
        await asyncio.to_thread(self._end_left, self._row_pid, self._row_pid_started_s)
        await self._store(pid=None, pid_started_s=None)
        if self._was_failed:
            self._tail = (self._was_tail or "").splitlines()
            self._enter("failed", self._was_reason)
            return
        if self.wanted == "stopped" or held is not None:
            self._enter("stopped", held if self.wanted == "running" else None)
        elif self.auto_restart and self.asked.refusal is None:
            self._begin()
        else:
            why = self.asked.refusal or "it ended with the console, and restarts are off"
            self._enter("stopped", why)

    def _end_left(self, pid: int | None, pid_started_s: float | None) -> None:
        """End a process that an earlier console left, where it is surely its own."""
        if pid is None or not is_alive(pid, pid_started_s):
            return
        if holds_command(pid, self._site.command):
            kill_tree(pid)

    async def start(self) -> None:
        """Start it where it does not run; return when it is ready.

        Raises:
            FieldError: there is nothing to serve.
            JobError: it failed.
        """
        if self.state == "stopping" and self._life is not None:
            await asyncio.wait([self._life])
        if self.state != "ready":
            if self._life is None:
                self.check_startable()
                self._failures.clear()
                await self._store(wanted="running", failures=[])
                self.wanted = "running"
                self._begin()
            await self._ready_or_over()
        if self.state != "ready":
            raise JobError(self.reason or f"it is {self.state}", list(self._tail))

    async def _ready_or_over(self) -> None:
        ready, life = asyncio.create_task(self._ready.wait()), self._life
        try:
            waited = {ready} if life is None else {ready, life}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()

    async def stop(self) -> None:
        """Stop it, by force where it does not end in time; return when it has ended."""
        await self._store(wanted="stopped")
        self.wanted = "stopped"
        await self.end()

    async def revive(self) -> None:
        """Begin to start it again where that is wanted, and it was ended for something else."""
        if self._life is None and self.wanted == "running" and self.state == "stopped":
            self._begin()

    async def end(self, why: str | None = None) -> None:
        """End the process, and leave what is wanted as it is."""
        life, child = self._life, self._child
        self._why = why
        if life is None:
            self._enter("stopped", why)
            await self._store_state()
            return
        self._ending.set()
        self._stirred.set()
        self._enter("stopping")
        if child is not None:
            child.terminate()
        done, _ = await asyncio.wait([life], timeout=self._limits.stop_s)
        if not done:
            if (child := self._child) is not None:
                await asyncio.to_thread(child.kill)
            await asyncio.wait([life])

    async def reset(self) -> None:
        """Forget failures: a service that failed is stopped until a person starts it."""
        self._failures.clear()
        if self.state == "failed":
            await self._store(wanted="stopped")
            self.wanted = "stopped"
            self._enter("stopped")
        await self._store_state()

    async def set_auto_restart(self, auto_restart: bool) -> None:
        """Say whether it is started again when it fails, and with the console."""
        await self._store(auto_restart=auto_restart)
        self.auto_restart = auto_restart
        self._site.on_change()

    async def set_port(self, port: int) -> None:
        """Listen on another port from the next start on."""
        await self._store(port=port)
        self.port = port
        self._site.on_change()

    async def serve(self, asked: Asked) -> None:
        """Serve another profile from the next start on."""
        await self._store(model_id=asked.model_id, profile_id=asked.profile_id)
        self.asked = asked
        self._site.on_change()

    async def close(self) -> None:
        """End the process for this console; what is wanted stays."""
        if self._life is not None:
            await self.end()
        self.log.close()

    # The life of the process.

    def _begin(self) -> None:
        self._ending.clear()
        self._enter("loading", phase="start")
        self._life = asyncio.create_task(self._live())

    async def _live(self) -> None:
        """Keep a process until it is asked to end, or failed for good."""
        try:
            state, reason = await self._run_again()
        except Exception as error:
            logger.exception("service %s", self.name)
            if self._child is not None:
                await asyncio.to_thread(self._child.kill)
            state, reason = "failed", f"{type(error).__name__}: {error}"
            if self._ending.is_set():
                state, reason = "stopped", self._why
        self._life = self._child = self._running = None
        self._enter(state, reason)
        await self._store_state()

    async def _run_again(self) -> tuple[str, str | None]:
        """Run processes, one after another; return the state behind the last one, and why."""
        while not self._ending.is_set():
            failure = await self._run()
            if self._ending.is_set():
                break
            if failure is None:
                return "stopped", "it was ended from outside"
            self._tail = failure.log
            self._failures = [*self._recent(), *([time.time()] if failure.is_crash else [])]
            if failure.is_permanent or not self.auto_restart:
                return "failed", failure.reason
            if len(self._failures) >= self._limits.crashes:
                return "failed", (
                    f"{len(self._failures)} failures in {self._limits.crash_window_s:.0f} s, so it "
                    f"is not started again by itself. The last one: {failure.reason}"
                )
            self._enter("loading", failure.reason, phase="waiting to restart")
            await self._store_state()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), self._limits.restart_s)
        return "stopped", self._why

    def _recent(self) -> list[float]:
        """Return when it failed of late."""
        now_s, window_s = time.time(), self._limits.crash_window_s
        return [each for each in self._failures if abs(now_s - each) < window_s]  # it may be set

    async def _run(self) -> Failure | None:
        """Run one process to its end; return why it failed, None where it ended as asked."""
        self.asked = await asyncio.to_thread(self._read_asked)
        asked = self._running = self.asked
        if asked.refusal is not None:
            return Failure(reason=asked.refusal, is_permanent=True)
        if (refusal := await asyncio.to_thread(taken, self.port)) is not None:
            return Failure(reason=refusal, is_permanent=True, is_crash=False)
        loop = asyncio.get_running_loop()
        command = [*self._site.command, *asked.arguments, "--port", str(self.port)]
        child = Child(command, self.log, lambda: call_on(loop, self._stirred.set))
        self._reset_looks()
        self._enter("loading", self.reason, phase="start")
        try:
            await asyncio.to_thread(child.start)
        except OSError as error:
            return Failure(reason=f"it could not be started: {error}", is_permanent=True)
        self._child = child
        await self._store_state()
        if self._ending.is_set():
            child.terminate()
        problem = None
        while child.exit_code is None:
            if not self._ending.is_set() and problem is None:
                problem = await self._look(child)
                if problem is not None:
                    await asyncio.to_thread(child.kill)
            self._stirred.clear()
            if child.exit_code is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stirred.wait(), self._limits.look_s)
        self._child = None
        return self._verdict(child, problem)

    def _verdict(self, child: Child, problem: str | None) -> Failure | None:
        """Return why a process that has ended failed."""
        code, lines = child.exit_code, child.lines()
        if code == 0 or self._ending.is_set():
            return None
        said = self._told_reason or last_words(lines)
        if problem is not None:
            reason = problem
        elif code is not None and code < 0:
            name = signal_name(-code)
            reason = f"{name} ended it"
            if name == "SIGKILL":
                reason += "; the kernel does so where memory is short"
        else:
            reason = said or f"it ended with exit code {code}"
        return Failure(
            reason=reason, is_permanent=code in {EXIT_CONFIG, EXIT_USAGE}, log=tuple(lines)
        )

    # Looks at the process.

    def _reset_looks(self) -> None:
        self._answered_s = self._progressed_s = self._site.clock()
        self._bytes_done = self._bytes_total = self._told_reason = None
        self._figures.forget()

    async def _look(self, child: Child) -> str | None:
        """Ask a server how it is; return why it is to be ended, None where it is well."""
        health = None if child.url is None else await self._figures.health(child.url)
        now_s = self._site.clock()
        if self._ending.is_set():
            return None
        if health is not None:
            self._answered_s = now_s
            if self._is_served:
                self._enter_served("ready", None)
            self._take_health(health)
        elif self._is_served:
            silent_s = now_s - self._answered_s
            if silent_s > self._limits.silent_s:
                return f"it gave no answer for {self._limits.silent_s:g} s"
            self._load = None
            is_late = silent_s > self._limits.unresponsive_s
            self._enter_served(
                "unresponsive" if is_late else "ready",
                f"it has not answered for {silent_s:.0f} s",
            )
        if self.state == "loading":
            if health is not None and health.get("state") == "ready":
                await self._become_ready(child)
            elif now_s - self._progressed_s > self._limits.patience_s:
                return (
                    f"it made no progress for {self._limits.patience_s:g} s (phase {self._phase})"
                )
        if self.state == "ready" and health is not None:
            await self._take_load(child)
        return None

    def _enter_served(self, state: str, reason: str | None) -> None:
        """Say whether a server that was ready answers."""
        if (state, reason) != (self.state, self.reason):
            self._enter(state, reason)
        if state == "ready":
            self._ready.set()

    def _take_health(self, health: Plain) -> None:
        match health.get("state"):
            case "failed":
                self._told_reason = health.get("reason")
            case "draining":
                self._enter("stopping", "it was asked to end from outside")
            case "loading" | "not_loaded" if self.state == "loading":
                phase = health.get("phase") or self._phase
                found = (phase, health.get("bytes_done"), health.get("bytes_total"))
                if found != (self._phase, self._bytes_done, self._bytes_total):
                    self._phase, self._bytes_done, self._bytes_total = found
                    self._progressed_s = self._site.clock()
                    self._site.on_change()

    async def _become_ready(self, child: Child) -> None:
        load_s = time.time() - self._since_s
        info = await self._figures.info(str(child.url))
        if self._ending.is_set():
            return
        self._enter("ready")
        self.info = info or {}
        self._effective = effective_of(self.info) | {"load_s": load_s}
        await self._store_state()
        if self.state == "ready":
            self._ready.set()
        self._site.on_change()

    async def _take_load(self, child: Child) -> None:
        load = await self._figures.load(str(child.url))
        if load is not None and self.state == "ready":
            self._load = load
        self._site.on_change()

    # The row.

    def _read_asked(self) -> Asked:
        with self._site.database.read() as session:
            row = session.get(Service, self.id)
            return asked_of(session, None if row is None else row.profile_id)

    async def _store(self, **columns: Any) -> None:
        async with self._storing:  # rows say what was stored last
            await asyncio.to_thread(self._write, columns)

    async def _store_state(self) -> None:
        child = self._child
        await self._store(
            pid=None if child is None else child.pid,
            pid_started_s=None if child is None else child.started_s,
            state=self.state,
            reason=self.reason,
            log_tail="\n".join(self._tail) or None,
            failures=list(self._failures),
        )

    def _write(self, columns: Mapping[str, Any]) -> None:
        with self._site.database.write() as session:
            row = session.get(Service, self.id)
            for name, value in columns.items() if row is not None else ():
                setattr(row, name, value)
