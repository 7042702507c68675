"""`tightfit console`: its port, the registry, the supervisor and the pages, and how it ends."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Sequence
from typing import Final

import uvloop

from catalogue.files import tightfit_home
from console.app import Console, make_app
from console.page.sources import Sources
from console.registry.database import Database
from console.settings import ConsoleSettings
from console.supervise.machine import Machine
from console.supervise.supervisor import Supervisor
from console.verdicts import Verdicts
from engine.errors import EngineError
from server.flags import as_flags, parse_settings
from server.listen import (
    exit_code_of,
    front_of,
    listen,
    log_to_stderr,
    raise_file_limit,
    url_of,
)
from server.notify import Notifier

DESCRIPTION: Final = "Show and control models, servers and tests of this machine in the browser."
logger = logging.getLogger("console")


def main(arguments: Sequence[str], prog: str = "tightfit console") -> int:
    """Run the console until a signal; return the exit code."""
    log_to_stderr("console")
    try:
        notifier = Notifier.from_environment(os.environ)
        settings = parse_settings(ConsoleSettings, arguments, prog, DESCRIPTION)
        keys = settings.keys()
        listening = listen(settings)
    except EngineError as error:
        return _refused(error)
    raise_file_limit()
    with listening:
        try:
            database = Database.open()
        except EngineError as error:
            return _refused(error)
        try:
            return uvloop.run(_live(settings, keys, listening, database, notifier))
        finally:
            database.close()


def _refused(error: EngineError) -> int:
    logger.error("%s", as_flags(str(error)))
    return exit_code_of(error)


async def _live(
    settings: ConsoleSettings,
    keys: Sequence[str],
    listening: socket.socket,
    database: Database,
    notifier: Notifier | None,
) -> int:
    """Serve until a signal, then end what was started."""
    home, url = tightfit_home(), url_of(listening)
    machine = Machine()
    about = {
        "host": settings.host,
        "port": listening.getsockname()[1],
        "url": url,
        "is_loopback": settings.is_loopback,
        "needs_key": bool(keys),
    }
    supervisor = Supervisor(database, machine, home=home, about=about)
    verdicts = Verdicts(database)
    console = Console(supervisor, database, settings, home, verdicts)
    sources = Sources(supervisor, database, home, verdicts)
    front = front_of(make_app(console, sources, settings, keys), settings)
    signals = _Signals()
    machine.start()
    serving = asyncio.create_task(front.serve(sockets=[listening]))
    alive = asyncio.create_task(_keep_alive(notifier))
    try:
        try:
            await supervisor.start()
        except EngineError as error:
            return _refused(error)
        logger.info("console at %s, registry %s", url, database.path)
        if notifier is not None:
            notifier.tell(READY="1", STATUS=f"serving {url}")
        await signals.come()
        if notifier is not None:
            notifier.tell(STOPPING="1")
        await _end(supervisor, signals, settings.stop_s)
    finally:
        alive.cancel()
        front.should_exit = True
        await serving
        await console.close()
        verdicts.close()
        machine.close()
    return 0


async def _end(supervisor: Supervisor, signals: "_Signals", limit_s: float) -> None:
    """End servers and tests; after a second signal, or too long, the kernel does with this process.

    Raises:
        Exception: what went wrong in the end of one of them.
    """
    closing = asyncio.create_task(supervisor.close())
    again = asyncio.create_task(signals.come())
    await asyncio.wait({closing, again}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if closing.done():
        closing.result()
    else:
        logger.warning("servers have not ended; they are killed")
        closing.cancel()


async def _keep_alive(notifier: Notifier | None) -> None:
    """Tell the service manager that this loop turns."""
    if notifier is None or notifier.watchdog_s is None:
        return
    while True:
        notifier.tell(WATCHDOG="1")
        await asyncio.sleep(notifier.watchdog_s / 2)


class _Signals:
    """SIGTERM and SIGINT as they come."""

    def __init__(self) -> None:
        self._came = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._came.set)

    async def come(self) -> None:
        """Wait for one that has not been waited for."""
        await self._came.wait()
        self._came.clear()
