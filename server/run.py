"""The life of a server: its port, its two processes, signals, and how it ends."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Final

import uvloop

from engine.errors import ConfigError, EngineError
from server.app import Server, make_app
from server.engine_link import EngineLink
from server.errors import APIError
from server.flags import Asked, as_flags, parse
from server.guard import Guard
from server.lifecycle import EXIT_CONFIG, Lifecycle
from server.listen import (
    LAST_WORDS_S,
    exit_code_of,
    front_of,
    listen,
    log_to_stderr,
    raise_file_limit,
    url_of,
)
from server.notify import Notifier, Reporter, reporting
from server.wire import Load

CLOSE_S: Final = 5.0
"""Seconds that the engine's process has to end by itself."""
FAILED_S: Final = 5.0
"""Seconds that a server whose engine has failed tells so before it ends."""
logger = logging.getLogger("server")


def main(arguments: Sequence[str]) -> int:
    """Serve what a command line asks for; return the exit code."""
    log_to_stderr("server")
    notifier = None
    try:
        notifier = Notifier.from_environment(os.environ)
        asked = parse(arguments)
        keys = asked.server.keys()
        template = _template(asked.server.chat_template)
        listening = listen(asked.server)
    except EngineError as error:
        return _refused(error, notifier)
    raise_file_limit()
    with listening:
        return uvloop.run(Life(asked, keys, template, listening, notifier).run())


def _refused(error: EngineError, notifier: Notifier | None) -> int:
    message = as_flags(str(error))
    logger.error("%s", message)
    if notifier is not None:
        notifier.tell(STATUS=f"refused: {message}")
    return exit_code_of(error)


def _template(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: expected a text file, got {file} ({error}).") from error


class Life:
    """One server from its first second to its exit code."""

    def __init__(
        self,
        asked: Asked,
        keys: Sequence[str],
        template: str | None,
        listening: socket.socket,
        notifier: Notifier | None,
    ) -> None:
        self._asked, self._template, self._listening = asked, template, listening
        settings = asked.server
        self._lifecycle = Lifecycle()
        self._link = link = EngineLink(self._lifecycle, on_plan=_log_plan)
        self._reporter = (
            None
            if notifier is None
            else Reporter(notifier, self._lifecycle, lambda: link.num_live_beats)
        )
        names = list(settings.served_model_name) or [asked.model]
        server = Server(settings, names, self._link, self._lifecycle)
        self._guard: Guard = make_app(server, settings, keys)
        self._front = front_of(self._guard, settings)
        self._num_signals = 0
        self._signalled = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal or a failure; return the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        serving = asyncio.create_task(self._front.serve(sockets=[self._listening]))
        url = url_of(self._listening)
        logger.info("listening on %s, loading %s", url, self._asked.model)
        settings = self._asked.server
        load = Load(
            model=self._asked.model,
            keywords=self._asked.keywords,
            max_pending=2**20,  # the front bounds the queue
            chat_template=self._template,
            generation_config=settings.generation_config,
        )
        await self._link.open(load)
        try:
            async with reporting(self._reporter):
                code = await self._live(url)
                if code == 0 or self._num_signals:
                    await self._drain(settings.drain_s)
        finally:
            await self._link.close(CLOSE_S)
            self._front.should_exit = True
            await serving
        return code

    def _on_signal(self) -> None:
        self._num_signals += 1
        self._signalled.set()

    async def _live(self, url: str) -> int:
        """Wait for a signal (0), or for a failure (its exit code)."""
        lifecycle, signalled = self._lifecycle, asyncio.create_task(self._signalled.wait())
        while not signalled.done():
            lifecycle.changed.clear()
            if lifecycle.state == "ready":
                logger.info("ready: serving %s at %s/v1", self._asked.model, url)
            if lifecycle.state == "failed":
                return await self._end_failed()
            changed = asyncio.create_task(lifecycle.changed.wait())
            await asyncio.wait({changed, signalled}, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
        return 0

    async def _end_failed(self) -> int:
        logger.error("%s", self._lifecycle.reason)
        if self._link.ready is None:
            failure = self._link.failure
            return EXIT_CONFIG if failure is not None and failure.is_permanent else 1
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._signalled.wait(), FAILED_S)
        return 1

    async def _drain(self, limit_s: float) -> None:
        """Let requests end, for a while; then end them."""
        self._lifecycle.enter("draining")
        seen, end_s = self._num_signals, monotonic() + limit_s
        if self._guard.num_open:
            logger.info("draining: %d requests, for %g s at most", self._guard.num_open, limit_s)
        while self._guard.num_open and monotonic() < end_s and self._num_signals == seen:
            if self._lifecycle.state == "failed":
                break
            await asyncio.sleep(0.02)
        self._link.cut_short(APIError(503, "the server is shutting down.", code="draining"))
        end_s = monotonic() + LAST_WORDS_S
        while self._guard.num_open and monotonic() < end_s:
            await asyncio.sleep(0.02)


def _log_plan(lines: Sequence[str]) -> None:
    for line in lines:
        logger.info("%s", line)
