"""The log, port and front of a process that answers over HTTP: this server, and the console."""

import contextlib
import logging
import resource
import socket
import sys
from collections.abc import Iterator
from typing import Final

import psutil
import uvicorn
from starlette.types import ASGIApp

from catalogue.terminal import UsageError, screen_lines
from engine.errors import ConfigError, EngineError
from server.guard import ACCESS
from server.lifecycle import ERROR, EXIT_CONFIG, EXIT_USAGE
from server.protocol import protocol_of
from server.settings import ListenSettings

LAST_WORDS_S: Final = 1.0
"""Seconds that responses have to end once their requests were ended."""


class PortTakenError(EngineError):
    """Another process listens there."""


class Front(uvicorn.Server):
    """uvicorn without signal handlers of its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to whoever runs it."""
        yield


def front_of(app: ASGIApp, settings: ListenSettings) -> Front:
    """Return what serves an application within the bounds of the settings."""
    return Front(
        uvicorn.Config(
            app,
            http=protocol_of(settings.header_timeout_s),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=max(1, int(settings.idle_timeout_s)),
            timeout_graceful_shutdown=int(LAST_WORDS_S),
        )
    )


def raise_file_limit() -> None:
    """Allow as many open files as the machine does: every client takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listen(settings: ListenSettings) -> socket.socket:
    """Return a socket that listens where the settings say.

    Raises:
        PortTakenError: Another process does; the message names it.
        ConfigError: There is no such address here.
    """
    try:
        family, *_, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f"host: expected an address of this machine, got {settings.host!r} ({error})."
        ) from error
    # asyncio sends small writes at once (TCP_NODELAY) only where the protocol is named.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(2048)
    except OSError as error:
        found.close()
        if isinstance(error, PermissionError):
            raise ConfigError(
                f"port: expected one that this user may take, got {settings.port}. Take one from "
                "1024 on."
            ) from error
        holder = holder_of(settings.port)
        if holder is None and error.errno != 98:  # EADDRINUSE
            raise ConfigError(
                f"host: expected an address of this machine, got {settings.host} ({error})."
            ) from error
        raise PortTakenError(
            f"port: expected a free one, got {settings.port}, which "
            f"{holder or 'another process'} listens on. End that, or choose another --port."
        ) from error
    return found


def holder_of(port: int) -> str | None:
    """Return the process that listens on a port, for people; None where this user cannot see it."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("inet"):
            is_listening = connection.status == psutil.CONN_LISTEN
            is_there = getattr(connection.laddr, "port", None) == port
            if is_listening and is_there and connection.pid is not None:
                process = psutil.Process(connection.pid)
                command = " ".join(process.cmdline()) or process.name()
                return f"process {connection.pid} ({command[:200]})"
    return None


def url_of(listening: socket.socket) -> str:
    """Return the address that a socket listens on, as a client writes it."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def exit_code_of(error: EngineError) -> int:
    """Return how a process ends whose start was refused."""
    match error:
        case UsageError():
            return EXIT_USAGE
        case PortTakenError():
            return 1
        case _:
            return EXIT_CONFIG


class _Lines(logging.Formatter):
    """Messages as they are; an error says that it is one, for who reads the log for a reason."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's lines."""
        text = super().format(record)
        if record.levelno < logging.ERROR:
            return text
        text = f"{ERROR}{text}"
        return "\n".join(screen_lines(text, sys.stderr)) if sys.stderr.isatty() else text


def log_to_stderr(name: str) -> None:
    """Write what a logger, the access log and the front say to stderr, and nowhere else."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines("%(message)s"))
    for logger, level in (
        (name, logging.INFO),
        (ACCESS, logging.INFO),
        ("uvicorn.error", logging.ERROR),
    ):
        log = logging.getLogger(logger)
        log.handlers, log.propagate = [handler], False
        log.setLevel(level)
