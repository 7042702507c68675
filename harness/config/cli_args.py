"""The command line of `python -m harness`: options here, everything else is an override."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from engine.errors import ConfigError, closest

CFG_CHOICES = ("job", "hydra", "all")


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """What the user typed, options and overrides apart."""

    overrides: list[str] = field(default_factory=list)
    """key=value, group=option, with + or ++ before them, in the order given."""
    multirun: bool = False
    """-m: overrides with several values make a sweep."""
    help: bool = False
    version: bool = False
    settings: bool = False
    choosing: bool = False
    """Print every key with its default, type and meaning."""
    cfg: str | None = None
    """Print the composed configuration (job, hydra or all) instead of running."""
    resolve: bool = False
    """Resolve interpolations in what --cfg prints."""
    package: str | None = None
    """The part of the configuration that --cfg prints, such as scenario.latency."""
    config_dir: Path | None = None
    """A folder with configuration files of the user."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            option = message.removeprefix(prefix).split()[0]
            known = {name.strip("-"): name for name in self._option_string_actions}
            meant = closest(option.strip("-"), known)
            hint = f"Did you mean {known[meant[0]]}?" if meant else "A setting: model=glass."
            message = f"unknown option {option}. {hint}"
        raise ConfigError(f"command line: {message} See python -m harness --help.")


def _build_parser() -> _Parser:
    parser = _Parser(prog="python -m harness", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--settings", action="store_true")
    parser.add_argument("--choosing", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-c", "--cfg", choices=CFG_CHOICES)
    parser.add_argument("-p", "--package")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--config-dir", type=Path)
    return parser


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Split the arguments after `python -m harness`; options may stand anywhere.

    Raises:
        ConfigError: an unknown option, an option without effect, or an absent --config-dir.
    """
    typed = CommandLine(**vars(_build_parser().parse_intermixed_args(list(argv))))
    if typed.help:
        return typed
    if typed.cfg is None:
        for name in ("resolve", "package"):
            if getattr(typed, name):
                raise ConfigError(
                    f"command line: --{name} has an effect only with --cfg. Add --cfg job, or "
                    "remove it."
                )
    if typed.config_dir is not None and not typed.config_dir.is_dir():
        raise ConfigError(
            f"command line: expected a folder for --config-dir, found none at {typed.config_dir}."
        )
    return typed
