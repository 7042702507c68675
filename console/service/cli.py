"""`tightfit service`: writes, removes, starts and shows units of systemd."""

import argparse
import json
import os
import pwd
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Final

from catalogue.files import tightfit_home
from catalogue.terminal import CommandParser, say_error
from console.registry.database import Database
from console.registry.flags import arguments_of
from console.service.systemd import Runner, ServiceError, Systemd, UnitState, run_command
from console.service.units import (
    CONSOLE,
    PREFIX,
    Place,
    Scope,
    Unit,
    console_unit,
    server_name,
    server_unit,
    serves,
)
from console.settings import ConsoleSettings
from engine.errors import ConfigError
from reports.record.record import write_text_atomic
from server.flags import parse, parse_settings

EXIT_REFUSED: Final = 1
"""systemd refused."""
EXIT_NOT_RUNNING: Final = 3
"""Of status: a unit does not run."""
ACCOUNT: Final = "tightfit"
SYSTEM_UNITS: Final = Path("/etc/systemd/system")
SYSTEM_HOME: Final = Path("/var/lib/tightfit")
PARTS: Final = ("server", "console")
VERBS: Final = {
    "install": "write the units, start them now and with the machine",
    "uninstall": "stop and remove a unit, with the last server the console too; models stay",
    "start": "start a unit, also one that failed or was started too often",
    "restart": "stop and start a unit, with the profile as it is now",
    "stop": "stop a unit until the next start",
    "status": "show all units: state, process, last error",
}


def main(arguments: Sequence[str], runner: Runner = run_command) -> int:
    """Carry out `tightfit service`; return its exit code.

    Raises:
        ConfigError: The command line is wrong, or the units cannot be written.
    """
    own, flags = _split(arguments)
    options = _parser().parse_args(own)
    options.flags = flags
    try:
        return _carry_out(options, runner)
    except ServiceError as error:
        return say_error(error, arguments, EXIT_REFUSED)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what is said to this command, and behind -- to the one that a unit runs."""
    words = list(arguments)
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="tightfit service",
        description="Run a profile's server and the console as services of systemd.",
        epilog="install --only server|console -- FLAGS passes flags on, such as --port 8001.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, text in VERBS.items():
        found = verbs.add_parser(verb, help=text, description=text)
        scope = found.add_mutually_exclusive_group()
        scope.add_argument(
            "--user", dest="scope", action="store_const", const="user", help="yours (default)"
        )
        scope.add_argument(
            "--system", dest="scope", action="store_const", const="system", help="the machine's"
        )
        found.set_defaults(scope="user")
        found.add_argument("--profile", metavar="NAME", help="as `tightfit serve` takes it")
        if verb == "status":
            found.add_argument("--json", action="store_true", help="print one document")
        else:
            found.add_argument("--only", choices=PARTS, help="not the other unit")
        if verb in {"install", "uninstall"}:
            found.add_argument("--dry-run", action="store_true", help="print, and change nothing")
        if verb == "install":
            found.add_argument("--account", metavar="NAME", help=f"of --system (default {ACCOUNT})")
            found.add_argument("--no-start", action="store_true", help="only write and enable")
    return parser


def _carry_out(options: argparse.Namespace, runner: Runner) -> int:
    scope: Scope = options.scope
    if options.verb == "status":
        return _status(options, Systemd(scope, runner))
    if options.verb == "install":
        return _install(options, Systemd(scope, runner))
    if options.flags:
        raise ConfigError(f"service: expected -- with install alone, got {options.verb}.")
    names = _names(options)
    if options.verb == "uninstall":
        return _uninstall(options, names, Systemd(scope, runner))
    for name in names:
        _check_installed(units_folder(scope) / name)
    for name in names:
        getattr(Systemd(scope, runner), options.verb)(name)
    return 0


def units_folder(scope: Scope) -> Path:
    """Return the folder of a scope's units."""
    if scope == "system":
        return SYSTEM_UNITS
    base = os.environ.get("XDG_CONFIG_HOME", "").strip() or "~/.config"
    return Path(base).expanduser() / "systemd" / "user"


def installed(scope: Scope) -> list[str]:
    """Return the names of this project's units, in order."""
    found = sorted(units_folder(scope).glob(f"{PREFIX}*.service"))
    return [path.name for path in found if serves(_text(path)) is not None]


def _names(options: argparse.Namespace) -> list[str]:
    """Return the units that a command line names."""
    if options.only == "console":
        return [CONSOLE]
    if options.profile is None:
        raise ConfigError(
            "service: expected --profile NAME (`tightfit models show MODEL` lists a model's "
            "profiles), or --only console."
        )
    name = server_name(options.profile)
    match options.verb, options.only:
        case "install", None:
            return [name, CONSOLE]
        case "uninstall", None if set(installed(options.scope)) == {name, CONSOLE}:
            return [name, CONSOLE]
        case _:
            return [name]


def _install(options: argparse.Namespace, systemd: Systemd) -> int:
    if options.flags and options.only is None:
        raise ConfigError(
            f"service: expected --only server or --only console before -- {options.flags[0]}, "
            "which one of them takes."
        )
    names, folder = _names(options), units_folder(options.scope)
    place = _place(options)
    units = [
        _console(options, place) if name == CONSOLE else _server(options, place) for name in names
    ]
    if options.dry_run:
        for unit in units:
            _print([f"# {folder / unit.name}", unit.text])
        return 0
    for unit in units:
        _check_free(folder / unit.name, unit)
    if place.account is not None:
        _check_account(place.account)
    _make_home(place)
    for unit in units:
        _write(folder / unit.name, unit.text)
    systemd.reload()
    for unit in units:
        systemd.enable(unit.name)
        if not options.no_start:
            systemd.restart(unit.name)
    _print(f"installed {folder / unit.name}" for unit in units)
    scope = "" if options.scope == "user" else f" --{options.scope}"
    _print([f"how it goes:  tightfit service status{scope}"])
    if options.scope == "user":
        _print(["they end when you log out, unless you run:  loginctl enable-linger"])
    return 0


def _place(options: argparse.Namespace) -> Place:
    is_system = options.scope == "system"
    if options.account is not None and not is_system:
        raise ConfigError(
            f"service: expected --system beside --account {options.account}: units of yours run "
            "as you."
        )
    has_home = bool(os.environ.get("TIGHTFIT_HOME", "").strip())
    return Place(
        scope=options.scope,
        home=SYSTEM_HOME if is_system and not has_home else tightfit_home(),
        account=(options.account or ACCOUNT) if is_system else None,
        modprobe=shutil.which("nvidia-modprobe"),
    )


def _server(options: argparse.Namespace, place: Place) -> Unit:
    """Return a server's unit; the registry of another account is not read."""
    asked: list[str] = [options.profile]
    if options.scope == "user" and not options.dry_run:
        with closing(Database.open()) as database:
            asked = arguments_of(options.profile, database)
    settings = parse([*asked, *options.flags]).server
    return server_unit(options.profile, place, options.flags, drain_s=settings.drain_s)


def _console(options: argparse.Namespace, place: Place) -> Unit:
    settings = parse_settings(ConsoleSettings, options.flags, "tightfit console", "")
    return console_unit(place, options.flags, stop_s=settings.stop_s)


def _check_account(name: str) -> None:
    try:
        pwd.getpwnam(name)
    except KeyError:
        raise ConfigError(
            f"service: expected an account of its own, found no {name}. Make it: `sudo useradd "
            f"--system --home-dir {SYSTEM_HOME} {name}`. Or choose one with --account."
        ) from None


def _make_home(place: Place) -> None:
    """Make TIGHTFIT_HOME where it is not, as the units may write nowhere else."""
    if place.home.is_dir():
        return
    try:
        place.home.mkdir(parents=True, mode=0o750)
        if place.account is not None:
            shutil.chown(place.home, place.account)
    except OSError as error:
        raise _not_written(place.home, error) from error


def _check_free(path: Path, unit: Unit) -> None:
    """Raise ConfigError where a file is there that serves something else."""
    if path.exists() and serves(_text(path)) != unit.serves:
        raise ConfigError(
            f"service: expected no unit {path} but of {unit.serves}, got one of "
            f"{serves(_text(path)) or 'another program'}. Remove it, or rename the profile."
        )


def _check_installed(path: Path) -> None:
    if serves(_text(path)) is None:
        raise ConfigError(
            f"service: expected a unit that `tightfit service install` wrote at {path}, got "
            f"{'another one' if path.exists() else 'none'}."
        )


def _uninstall(options: argparse.Namespace, names: Sequence[str], systemd: Systemd) -> int:
    paths = [units_folder(options.scope) / name for name in names]
    for path in paths:
        _check_installed(path)
    if options.dry_run:
        _print(f"would stop and remove {path}" for path in paths)
        return 0
    for path in paths:
        systemd.stop(path.name)
        systemd.disable(path.name)
        systemd.forget(path.name)
        try:
            path.unlink()
        except OSError as error:
            raise _not_written(path, error) from error
    systemd.reload()
    _print(f"removed {path}" for path in paths)
    return 0


def _status(options: argparse.Namespace, systemd: Systemd) -> int:
    names = installed(options.scope)
    if options.profile is not None:
        name = server_name(options.profile)
        _check_installed(units_folder(options.scope) / name)
        names = [name]
    states = [systemd.state(name) for name in names]
    if options.json:
        _print([json.dumps({"units": [asdict(state) for state in states]}, indent=2)])
    elif not states:
        _print([f"no units in {units_folder(options.scope)}: tightfit service install"])
    else:
        for state in states:
            _print(_lines(state))
    return 0 if all(state.active == "active" for state in states) else EXIT_NOT_RUNNING


def _lines(state: UnitState) -> Iterable[str]:
    pid = f", process {state.pid}" if state.pid else ""
    yield f"{state.unit}: {state.active or 'unknown'} ({state.sub or 'unknown'}){pid}"
    if state.status:
        yield f"  {state.status}"
    if state.result not in {None, "success"}:
        yield f"  ended: {state.result}, exit code {state.exit_code}, restarts {state.restarts}"
    if state.error and state.error != state.status:
        yield f"  {state.error}"
    if state.active == "failed":
        words = ["tightfit", "service", "start"]
        yield f"  start it again:  {shlex.join(words)} ..."


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, text)
        path.chmod(0o644)
    except OSError as error:
        raise _not_written(path, error) from error


def _not_written(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"service: expected to write {path}, got: {error.strerror}. Units of the system need "
        "sudo; --user needs none."
    )


def _print(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
