"""A service of our own: a server as a child, in the state that was asked for, or why not."""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.orm import Session

from console.registry.checks import FieldError
from console.registry.database import Database
from console.registry.stale import is_alive
from console.registry.tables import Model, Profile, Service
from console.supervise.child import Child, arguments_of, holds_command, kill_tree
from console.supervise.jobs import JobError
from console.supervise.log import Log, last_words
from server.lifecycle import EXIT_CONFIG, EXIT_USAGE
from server.settings import API_KEY_VARIABLE, ServerSettings

Plain = dict[str, Any]
RATE_S: Final = 5.0
"""Seconds over which tokens per second are counted."""
logger = logging.getLogger("console")
_GAUGES: Final = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_usage": "vllm:kv_cache_usage_perc",
    "link_share": "tightfit:link_share",
    "host_blocks": "tightfit:kv_host_blocks",
    "host_blocks_used": "tightfit:kv_host_blocks_used",
    "preemptions": "vllm:num_preemptions_total",
}
"""Figure of the load -> metric of the server."""
_COUNTERS: Final = {
    "prefill_tokens_s": "tightfit:prefill_tokens_total",
    "decode_tokens_s": "tightfit:decode_tokens_total",
}
"""Rate -> the metric that counts for it."""
_METRICS: Final = (*_GAUGES.values(), *_COUNTERS.values())
_COUNTS: Final = frozenset({"running", "waiting", "host_blocks", "host_blocks_used", "preemptions"})


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long things may take, seconds."""

    look_s: float = 1.0
    """Between two looks at a server."""
    answer_s: float = 2.0
    """That a server has to answer a look."""
    patience_s: float = 300.0
    """That a load may go without progress: another phase, or more bytes."""
    silent_s: float = 60.0
    """That a server which was ready may leave looks without an answer."""
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
        arguments=arguments_of(model, profile.settings),
        refusal=_lacking(model, profile),
    )


def _lacking(model: Model, profile: Profile) -> str | None:
    """Return why a model cannot be served."""
    is_here = model.path is not None and model.state not in {"missing", "downloading"}
    if is_here or profile.settings.get("load_format") == "dummy":
        return None
    return (
        f"model: expected one whose weights are on this machine, got {model.name}, which is "
        f"{model.state}{f' ({model.reason})' if model.reason else ''}. Download it first."
    )


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
        self._storing = asyncio.Lock()
        self._ending = asyncio.Event()
        self._stirred = asyncio.Event()
        self._ready = asyncio.Event()
        self._running: Asked | None = None
        """What the process was started with."""
        self._load: Plain | None = None
        self._counts: deque[tuple[float, dict[str, float]]] = deque()
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

    def holds(self) -> Plain | None:
        """Return what the process holds of the machine, as it says; None: it does not say."""
        memory = self.info.get("memory") or {}
        if self.pid is None or not memory:
            return None
        items = memory.get("gpu_items") or {}
        return {
            "pid": self.pid,
            "gpu_uuid": memory.get("gpu_uuid"),
            "weights_bytes": items.get("weights"),
            "kv_bytes": items.get("kv_cache"),
            "budget_bytes": memory.get("gpu_budget_bytes"),
            "pinned_bytes": memory.get("host_pinned_bytes"),
        }

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
            "spent_s": time.time() - self._since_s if is_loading else None,
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
        if state not in {"ready", "stopping"}:
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

    async def resume(self) -> None:
        """Find out what is true when the console starts, and start what ran."""
        await asyncio.to_thread(self._end_left, self._row_pid, self._row_pid_started_s)
        await self._store(pid=None, pid_started_s=None)
        if self._was_failed:
            self._tail = (self._was_tail or "").splitlines()
            self._enter("failed", self._was_reason)
            return
        if self.wanted == "stopped":
            self._enter("stopped")
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

    async def end(self) -> None:
        """End the process, and leave what is wanted as it is."""
        life, child = self._life, self._child
        if life is None:
            self._enter("stopped")
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
        """Forget failures: a service that failed is stopped, and can start by itself again."""
        self._failures.clear()
        if self.state == "failed":
            self._enter("stopped")
        await self._store_state()

    async def set_auto_restart(self, auto_restart: bool) -> None:
        """Say whether it is started again when it fails, and with the console."""
        await self._store(auto_restart=auto_restart)
        self.auto_restart = auto_restart
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
            state, reason = "failed", f"{type(error).__name__}: {error}"
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
            self._failures = [*self._recent(), time.time()]
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
        return "stopped", None

    def _recent(self) -> list[float]:
        """Return when it failed of late."""
        since_s = time.time() - self._limits.crash_window_s
        return [each for each in self._failures if each > since_s]

    async def _run(self) -> Failure | None:
        """Run one process to its end; return why it failed, None where it ended as asked."""
        self.asked = await asyncio.to_thread(self._read_asked)
        asked = self._running = self.asked
        if asked.refusal is not None:
            return Failure(reason=asked.refusal, is_permanent=True)
        loop = asyncio.get_running_loop()
        command = [*self._site.command, *asked.arguments, "--port", str(self.port)]

        def stir() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._stirred.set)

        child = Child(command, self.log, stir)
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
            name = signal.Signals(-code).name
            reason = f"signal {name} ended it"
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
        self._counts.clear()

    async def _look(self, child: Child) -> str | None:
        """Ask a server how it is; return why it is to be ended, None where it is well."""
        now_s = self._site.clock()
        health = None if child.url is None else await self._get(f"{child.url}/health")
        if self._ending.is_set():
            return None
        if health is not None:
            self._answered_s = now_s
            self._take_health(health)
        elif self.state == "ready" and now_s - self._answered_s > self._limits.silent_s:
            return f"it gave no answer for {self._limits.silent_s:g} s"
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

    def _take_health(self, health: Plain) -> None:
        match health.get("state"):
            case "failed":
                self._told_reason = health.get("reason")
            case "draining":
                self._enter("stopping", "it was asked to end from outside")
            case "loading" | "not_loaded" if self.state == "loading":
                found = (health.get("phase"), health.get("bytes_done"), health.get("bytes_total"))
                if found != (self._phase, self._bytes_done, self._bytes_total):
                    self._phase, self._bytes_done, self._bytes_total = found
                    self._progressed_s = self._site.clock()
                    self._site.on_change()

    async def _become_ready(self, child: Child) -> None:
        load_s = time.time() - self._since_s
        info = await self._get(f"{child.url}/info")
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
        text = await self._fetch(f"{child.url}/metrics")
        if text is not None and self.state == "ready":
            self._load = self._load_of(text)
        self._site.on_change()

    def _load_of(self, text: str) -> Plain:
        values, now_s = metric_values(text), time.time()
        found: Plain = {"time_s": now_s}
        for name, metric in _GAUGES.items():
            value = values.get(metric)
            found[name] = int(value) if value is not None and name in _COUNTS else value
        self._counts.append((now_s, values))
        while len(self._counts) > 2 and now_s - self._counts[1][0] > RATE_S:
            self._counts.popleft()
        first_s, first = self._counts[0]
        for name, metric in _COUNTERS.items():
            spent_s, total, before = now_s - first_s, values.get(metric), first.get(metric)
            is_known = total is not None and before is not None and spent_s > 0
            found[name] = max(0.0, total - before) / spent_s if is_known else None  # type: ignore[operator]
        return found

    async def _get(self, url: str) -> Plain | None:
        text = await self._fetch(url)
        if text is None:
            return None
        try:
            found = httpx.Response(200, text=text).json()
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    async def _fetch(self, url: str) -> str | None:
        """Return what a server answers; None where it does not."""
        key = os.environ.get(API_KEY_VARIABLE, "").strip()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            answer = await self._site.client.get(url, headers=headers)
        except httpx.HTTPError:
            return None
        return answer.text if answer.status_code in {200, 503} else None

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


def metric_values(text: str) -> dict[str, float]:
    """Return the sums of the metrics that are shown, from Prometheus' text format."""
    lines = [line for line in text.splitlines() if line.startswith(_METRICS)]
    found: dict[str, float] = {}
    for family in text_string_to_metric_families("\n".join([*lines, ""])):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def effective_of(info: Plain) -> Plain:
    """Return the settings in force, as a server's /info has them; what it does not say is None."""
    memory, placed = info.get("memory") or {}, info.get("placement_bytes")
    host, blocks = memory.get("host_items"), info.get("num_gpu_blocks")
    kv_host = None if host is None else host.get("pinned_kv", 0) + host.get("pageable_kv", 0)
    off = None if placed is None else sum(placed.values()) - placed.get("resident", 0)
    return {
        "model": info.get("model"),
        "dtype": info.get("dtype"),
        "offload": info.get("backend"),
        "offload_bytes": off,
        "max_model_len": info.get("max_model_len"),
        "max_num_seqs": info.get("max_num_seqs"),
        "kv_tokens": None if blocks is None else blocks * info["block_size"],
        "kv_host_bytes": kv_host,
        "budget_bytes": memory.get("gpu_budget_bytes"),
    }
