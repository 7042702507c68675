"""Calls of systemctl and journalctl: argument lists, units of this project alone."""

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from console.service.units import Scope, check_name
from engine.errors import EngineError

TIMEOUT_S: Final = 600.0
"""Seconds that a call may take; a stop waits for the drain."""
LOG_LINES: Final = 20
_FAILED: Final = ("failed: ", "refused: ")
"""How a server's status begins where it tells why it ended (server/notify.py, run.py)."""
_PROPERTIES: Final = (
    *("LoadState", "ActiveState", "SubState", "Result", "ExecMainStatus", "MainPID"),
    *("StatusText", "NRestarts", "UnitFileState"),
)


class ServiceError(EngineError):
    """systemd refused, or is not there."""


@dataclass(frozen=True)
class Done:
    """A command that ended."""

    code: int
    output: str
    error: str


Runner = Callable[[Sequence[str]], Done]
"""Runs a command to its end."""


def run_command(command: Sequence[str]) -> Done:
    """Run a command without a shell.

    Raises:
        ServiceError: There is no such program, or it does not end.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise ServiceError(
            f"service: expected systemd, found no {command[0]}. Start `tightfit serve` by other "
            "means; `--dry-run` prints the units."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ServiceError(
            f"service: expected an end within {TIMEOUT_S:g} s of: {' '.join(command)}"
        ) from error
    return Done(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True, kw_only=True)
class UnitState:
    """What systemd says of a unit; None: it says nothing."""

    unit: str
    load: str | None
    active: str | None
    """active | activating | deactivating | inactive | failed."""
    sub: str | None
    enabled: str | None
    pid: int | None
    status: str | None
    """What the service said of itself last."""
    result: str | None
    """How it ended, such as exit-code, watchdog or oom-kill."""
    exit_code: int | None
    """Of its last end."""
    restarts: int | None
    error: str | None
    """Of a unit that failed: why, as it said itself, else the last line of its log."""


class Systemd:
    """The service manager of the system, or of the user.

    Args:
        scope: Which one.
        runner: Runs the commands.
    """

    def __init__(self, scope: Scope, runner: Runner = run_command) -> None:
        self._user = ["--user"] if scope == "user" else []
        self._runner = runner

    def reload(self) -> None:
        """Have it read the files again."""
        self._call("daemon-reload")

    def enable(self, unit: str) -> None:
        """Have a unit start with the machine, or with the user's session."""
        self._call("enable", check_name(unit))

    def disable(self, unit: str) -> None:
        """Undo `enable`."""
        self._call("disable", check_name(unit))

    def start(self, unit: str) -> None:
        """Start a unit; one that failed, or was started too often, gets a new beginning."""
        self._anew("start", unit)

    def restart(self, unit: str) -> None:
        """Stop and start a unit."""
        self._anew("restart", unit)

    def stop(self, unit: str) -> None:
        """Stop a unit; returns when it has ended."""
        self._call("stop", check_name(unit))

    def forget(self, unit: str) -> None:
        """Forget that a unit failed."""
        if self.state(unit).active == "failed":
            self._call("reset-failed", check_name(unit))

    def state(self, unit: str) -> UnitState:
        """Return what there is to know of a unit."""
        return self.states([unit])[0]

    def states(self, units: Sequence[str]) -> list[UnitState]:
        """Return what there is to know of some units, in their order, by one call.

        Raises:
            ServiceError: systemd refused, or is not there.
        """
        wanted = f"--property={','.join(_PROPERTIES)}"
        text = self._call("show", *map(check_name, units), wanted)
        parts = text.strip("\n").split("\n\n")
        if len(parts) != len(units):
            raise ServiceError(
                f"service: expected {len(units)} units from systemctl show, got {len(parts)}."
            )
        return [self._state(*each) for each in zip(units, parts, strict=True)]

    def _state(self, unit: str, text: str) -> UnitState:
        found = dict(line.partition("=")[::2] for line in text.splitlines())
        known = {name: found.get(name) or None for name in _PROPERTIES}
        has_failed = known["ActiveState"] == "failed" or known["Result"] not in {None, "success"}
        return UnitState(
            unit=unit,
            load=known["LoadState"],
            active=known["ActiveState"],
            sub=known["SubState"],
            enabled=known["UnitFileState"],
            pid=_number(known["MainPID"]) or None,
            status=known["StatusText"],
            result=known["Result"],
            exit_code=_number(known["ExecMainStatus"]),
            restarts=_number(known["NRestarts"]),
            error=self._last_error(unit, known["StatusText"]) if has_failed else None,
        )

    def log(self, unit: str, num_lines: int = LOG_LINES) -> list[str]:
        """Return the last lines that a unit wrote; none where the journal cannot be read."""
        command = ["journalctl", *self._user, "--quiet", "--no-pager", "--output=cat"]
        name = check_name(unit).removesuffix(".service")
        done = self._runner([*command, f"--identifier={name}", f"--lines={num_lines}"])
        return done.output.splitlines() if done.code == 0 else []

    def _last_error(self, unit: str, status: str | None) -> str | None:
        """Return what the service said it failed for, else its last line of no request."""
        if status is not None and status.startswith(_FAILED):
            return status
        lines = (line for line in reversed(self.log(unit)) if line.strip() and not _is_json(line))
        return next(lines, None)

    def _anew(self, verb: str, unit: str) -> None:
        self.forget(unit)
        # A load takes its time, and `state` tells how far it is.
        self._call(verb, "--no-block", check_name(unit))

    def _call(self, *words: str) -> str:
        command = ["systemctl", *self._user, *words]
        done = self._runner(command)
        if done.code:
            said = done.error.strip() or done.output.strip() or f"exit code {done.code}"
            raise ServiceError(f"service: {' '.join(command)}: {said}")
        return done.output


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
