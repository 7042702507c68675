"""The text of systemd units: a server of one profile, and the console."""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from catalogue.processes import python_path
from engine.errors import ConfigError
from server.lifecycle import EXIT_CONFIG, EXIT_USAGE

Scope = Literal["user", "system"]
PROGRAM: Final = "tightfit"
"""The module that is the command, in a checkout as in the wheel."""
PREFIX: Final = "tightfit-"
"""Every unit's name begins so; no other unit is touched."""
CONSOLE: Final = f"{PREFIX}console.service"
MARK: Final = "X-Tightfit"
"""Key of what a unit serves; systemd ignores keys that begin with X-."""
START_S: Final = 300
"""Seconds that a start may take without progress; a load that makes progress asks for more."""
STOP_MARGIN_S: Final = 30
"""Seconds between the end of the drain and the kill."""
WATCHDOG_S: Final = 600
"""Seconds without a sign of life after which a server is ended and started again; a step of a large
model on a CPU may take minutes."""
RESTART_S: Final = 10
CRASHES: Final = 3
"""Starts within CRASH_WINDOW_S after which systemd gives up."""
CRASH_WINDOW_S: Final = 300
ENVIRONMENT_FILE: Final = "-%E/tightfit/service.env"
"""Variables such as HF_TOKEN and TIGHTFIT_API_KEY; %E is /etc, or the user's ~/.config."""
_NAME: Final = re.compile(rf"{PREFIX}[A-Za-z0-9_.-]{{1,200}}\.service")
_WORD: Final = re.compile(r'"((?:[^"\\]|\\.)*)"')
"""As `quoted` writes one."""
_HARDENED: Final = (
    "NoNewPrivileges=yes",
    "LockPersonality=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "SystemCallArchitectures=native",
    "UMask=0077",
)
_HARDENED_SYSTEM: Final = (
    "CapabilityBoundingSet=",
    "ProtectSystem=strict",
    "ProtectHome=read-only",
    "PrivateTmp=yes",
    "ProtectControlGroups=yes",
    "ProtectHostname=yes",
    "ProtectKernelLogs=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    "RestrictNamespaces=yes",
    "SystemCallErrorNumber=EPERM",
    "SystemCallFilter=~@clock @cpu-emulation @module @mount @obsolete @raw-io @reboot @swap",
    # Neither PrivateDevices nor ProtectClock, which hide /dev/nvidia*; nor
    # MemoryDenyWriteExecute, as kernels are compiled while a model loads.
)
_CACHES: Final = {
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "MPLCONFIGDIR": "matplotlib",
}
"""Where libraries write, below cache/ of TIGHTFIT_HOME: homes are read-only."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where units run."""

    scope: Scope
    home: Path
    """TIGHTFIT_HOME of the services."""
    account: str | None = None
    """Of units of the system."""
    modprobe: str | None = None
    """The program that makes the GPUs' device files, where there is one."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One file of systemd's."""

    name: str
    serves: str
    """A profile, or console."""
    text: str


def check_name(name: str) -> str:
    """Return a unit's name.

    Raises:
        ConfigError: It is none of this project's.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"unit: expected {PREFIX}NAME.service with letters, digits, '.', '_' and '-', got "
            f"{name!r}."
        )
    return name


def server_name(profile: str) -> str:
    """Return the name of the unit that serves a profile."""
    return check_name(f"{PREFIX}server-{re.sub(r'[^A-Za-z0-9_.-]', '-', profile)}.service")


def server_unit(profile: str, place: Place, flags: Sequence[str] = (), *, drain_s: float) -> Unit:
    """Return the unit of `tightfit serve --profile PROFILE`.

    Args:
        profile: As `tightfit serve` takes it.
        place: Where it runs.
        flags: Further ones.
        drain_s: Seconds that requests may go on after a stop.
    """
    return _unit(
        server_name(profile),
        f"Tightfit: server of {profile}",
        profile,
        ("serve", "--profile", profile, *flags),
        place,
        stop_s=drain_s + STOP_MARGIN_S,
    )


def console_unit(place: Place, flags: Sequence[str] = (), *, stop_s: float) -> Unit:
    """Return the unit of `tightfit console`, whose servers have `stop_s` seconds to end."""
    return _unit(
        CONSOLE,
        "Tightfit: console",
        "console",
        ("console", *flags),
        place,
        stop_s=stop_s + STOP_MARGIN_S,
    )


def serves(text: str) -> str | None:
    """Return what a unit of this project serves; None where another one wrote it."""
    found = re.search(rf"^{MARK}=(.*)$", text, re.MULTILINE)
    return None if found is None else found[1].replace("%%", "%")


def words_of(text: str, key: str) -> list[str]:
    """Return the words that a unit of this project has behind a key: a command line, or a list."""
    lines = re.findall(rf"^{key}=(.*)$", text, re.MULTILINE)
    found = [word for line in lines for word in _WORD.findall(line)]
    return [re.sub(r"\\(.)", r"\1", word).replace("%%", "%") for word in found]


def quoted(word: str) -> str:
    """Return a word as it stands in a command line or list of a unit.

    Raises:
        ConfigError: It has characters that no unit can hold.
    """
    return f'"{_plain(word).translate(_QUOTED)}"'


_QUOTED: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "%": "%%"})


def _plain(word: str) -> str:
    if not word.isprintable():
        raise ConfigError(f"unit: expected text without control characters, got {word!r}.")
    return word


def _line(word: str) -> str:
    """Return a text that is a line's whole value."""
    return _plain(word).replace("%", "%%")


def _command(words: Sequence[str]) -> str:
    """Return a command line; `$` is a variable's sign but in the program's own path."""
    program, *rest = map(quoted, words)
    return " ".join([program, *(word.replace("$", "$$") for word in rest)])


def _unit(
    name: str,
    title: str,
    mark: str,
    words: Sequence[str],
    place: Place,
    *,
    stop_s: float,
) -> Unit:
    sections = {
        "Unit": _about(title, mark),
        "Service": _service(name.removesuffix(".service"), words, place, stop_s),
        "Install": [
            f"WantedBy={'multi-user' if place.scope == 'system' else 'default'}.target",
        ],
    }
    text = "\n\n".join("\n".join([f"[{key}]", *lines]) for key, lines in sections.items())
    return Unit(name=name, serves=mark, text=f"{text}\n")


def _about(title: str, mark: str) -> list[str]:
    return [
        f"Description={_line(title)}",
        f"{MARK}={_line(mark)}",
        "After=network.target nvidia-persistenced.service",
        f"StartLimitIntervalSec={CRASH_WINDOW_S}",
        f"StartLimitBurst={CRASHES}",
    ]


def _service(short: str, words: Sequence[str], place: Place, stop_s: float) -> list[str]:
    return [
        "Type=notify",
        "NotifyAccess=main",
        *_before(place),
        f"ExecStart={_command([sys.executable, '-P', '-m', PROGRAM, *words])}",
        *_environment(place),
        f"TimeoutStartSec={START_S}",
        f"TimeoutStopSec={stop_s:g}",
        f"WatchdogSec={WATCHDOG_S}",
        "KillMode=mixed",
        "Restart=on-failure",
        f"RestartSec={RESTART_S}",
        f"RestartPreventExitStatus={EXIT_USAGE} {EXIT_CONFIG}",
        "LimitMEMLOCK=infinity",
        "LimitNOFILE=65536",
        "StandardOutput=journal",
        "StandardError=journal",
        f"SyslogIdentifier={short}",
        *_limits(place),
    ]


def _before(place: Place) -> Iterator[str]:
    # Device files of a GPU appear when the first program asks for them, which needs privileges.
    if place.scope == "system" and place.modprobe is not None:
        yield f"ExecStartPre=-+{_command([place.modprobe, '-u', '-c', '0'])}"


def _environment(place: Place) -> Iterator[str]:
    variables = {"TIGHTFIT_HOME": str(place.home), "PYTHONUNBUFFERED": "1"}
    if path := python_path(""):
        variables["PYTHONPATH"] = path
    if place.scope == "system":
        caches = place.home / "cache"
        variables |= {name: str(caches / folder) for name, folder in _CACHES.items()}
    for name, value in variables.items():
        yield f"Environment={quoted(f'{name}={value}')}"
    yield f"EnvironmentFile={ENVIRONMENT_FILE}"


def _limits(place: Place) -> Iterator[str]:
    if place.scope == "system":
        yield f"User={place.account}"
        yield from _HARDENED_SYSTEM
        yield f"ReadWritePaths={quoted(str(place.home))}"
    yield from _HARDENED
