"""The command `tightfit`: a word for each thing to do, carried out by the modules below.

A subcommand is a function and its row in COMMANDS; what it needs is imported when it runs, so that
help and version start at once.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from catalogue.terminal import EXIT_BAD_CONFIG, EXIT_OK, UsageError, say, say_error, version_line
from engine.errors import EngineError, closest
from harness.needs import SERVER_PACKAGES, require_environment


@dataclass(frozen=True)
class Command:
    """A subcommand."""

    name: str
    arguments: str
    """What may stand behind its name."""
    help: str
    run: Callable[[list[str]], int]
    """Takes what stood behind its name; returns the exit code."""


def run(argv: Sequence[str]) -> int:
    """Carry out one command line; return its exit code."""
    word, *rest = argv or ["help"]
    word = {"-h": "help", "--help": "help", "--version": "version"}.get(word, word)
    command = next((each for each in COMMANDS if each.name == word), None)
    if command is None:
        return say_error(_unknown(word, rest), rest, EXIT_BAD_CONFIG)
    return command.run(rest)


def _unknown(word: str, rest: Sequence[str]) -> str:
    """Return what to say of a word that is no subcommand."""
    names = [each.name for each in COMMANDS]
    if "=" in word:
        line = shlex.join(["tightfit", "run", word, *rest])
        return f"tightfit: expected a command first, got the setting {word}. Did you mean: `{line}`"
    meant = closest(word, names)
    hint = f"Did you mean `tightfit {meant[0]}`?" if meant else "`tightfit help` lists them."
    return f"tightfit: expected one of {', '.join(names)}, got {word!r}. {hint}"


def _harness(*first: str) -> Callable[[list[str]], int]:
    def carry_out(arguments: list[str]) -> int:
        from harness.__main__ import main  # noqa: PLC0415  when it runs

        return main([*first, *arguments])

    return carry_out


def _composed(name: str, *first: str) -> Callable[[list[str]], int]:
    """Return what runs the harness with words of a command before those that are typed."""

    def carry_out(arguments: list[str]) -> int:
        if not {"-h", "--help"} & {*arguments} or len(arguments) > 1:
            return _harness(*first)(arguments)
        from harness.config.cli_args import command_text  # noqa: PLC0415  when it runs

        sys.stdout.write(command_text(name))
        return EXIT_OK

    return carry_out


def _search(arguments: list[str]) -> int:
    from harness.search import main  # noqa: PLC0415  when it runs

    return main(arguments)


def _models(arguments: list[str]) -> int:
    from console.registry.cli import main  # noqa: PLC0415  when it runs

    return main(arguments, {"pack": _pack, "test": _test})


def _pack(arguments: list[str]) -> int:
    from harness.models import pack  # noqa: PLC0415  when it runs

    return pack(arguments, "tightfit models pack")


def _test(arguments: list[str]) -> int:
    from console.testing.cli import main  # noqa: PLC0415  when it runs

    return _guarded(main, arguments)


def _serve(arguments: list[str]) -> int:
    require_environment(SERVER_PACKAGES)
    from server.lifecycle import EXIT_CONFIG  # noqa: PLC0415  when it runs
    from server.run import main  # noqa: PLC0415

    if {"-h", "--help"} & {*arguments}:
        sys.stdout.write(
            "Models that were added: `tightfit serve --profile MODEL[/PROFILE]`. All others:\n\n"
        )
    try:
        arguments = _of_profile(arguments)
    except EngineError as error:
        say(f"error: {error}")
        return EXIT_CONFIG
    return main(arguments)


def _of_profile(arguments: list[str]) -> list[str]:
    """Return the arguments of `serve`, with those of a profile in the place of --profile NAME."""
    parser = argparse.ArgumentParser(prog="tightfit serve", add_help=False, allow_abbrev=False)
    parser.add_argument("--profile", metavar="MODEL[/PROFILE]")
    known, others = parser.parse_known_args(arguments)
    if known.profile is None:
        return arguments
    from console.registry.database import Database  # noqa: PLC0415  when it runs
    from console.registry.flags import arguments_of  # noqa: PLC0415

    with closing(Database.open()) as database:
        return [*arguments_of(known.profile, database), *others]  # what is given wins


def _console(arguments: list[str]) -> int:
    require_environment(SERVER_PACKAGES)
    from console.run import main  # noqa: PLC0415  when it runs

    return main(arguments)


def _chat(arguments: list[str]) -> int:
    from server.chat import main  # noqa: PLC0415  when it runs

    return _guarded(main, arguments)


def _open(arguments: list[str]) -> int:
    from tightfit.runs import open_page  # noqa: PLC0415  when it runs

    return _guarded(open_page, arguments)


def _compare(arguments: list[str]) -> int:
    from tightfit.runs import compare  # noqa: PLC0415  when it runs

    return _guarded(compare, arguments)


def _doctor(arguments: list[str]) -> int:
    from tightfit.doctor import main  # noqa: PLC0415  when it runs

    return _guarded(main, arguments)


def _service(arguments: list[str]) -> int:
    from console.service.cli import main  # noqa: PLC0415  when it runs

    return _guarded(main, arguments)


def _ui(arguments: list[str]) -> int:
    from harness.ui import main  # noqa: PLC0415  when it runs

    return _guarded(main, arguments)


def _completion(arguments: list[str]) -> int:
    from tightfit.completion import main  # noqa: PLC0415  when it runs

    try:
        return main(arguments, [each.name for each in COMMANDS], run)
    except UsageError as error:
        return say_error(error, arguments, EXIT_BAD_CONFIG)


def _guarded(command: Callable[[Sequence[str]], int], arguments: list[str]) -> int:
    """Return the exit code of a command; a refusal is printed, and Ctrl-C is one code."""
    from harness.point.full_disk import exit_code  # noqa: PLC0415  when it runs

    return exit_code(command, arguments)


def _version(arguments: list[str]) -> int:
    if arguments and not {"-h", "--help"} & {*arguments}:
        message = f"tightfit version: expected no arguments, got {' '.join(arguments)}."
        return say_error(message, arguments, EXIT_BAD_CONFIG)
    sys.stdout.write(version_line())
    return EXIT_OK


def _help(arguments: list[str]) -> int:
    if arguments and arguments[0] not in {"help", "-h", "--help"}:
        return run([*arguments, "--help"])
    sys.stdout.write("\n".join(_help_lines()) + "\n")
    return EXIT_OK


def _help_lines() -> Iterator[str]:
    yield "usage: tightfit COMMAND ..."
    yield ""
    yield "Run language models on a GPU that is too small, and measure what it costs."
    yield ""
    width = max(len(f"{each.name} {each.arguments}") for each in COMMANDS) + 2
    for each in COMMANDS:
        yield f"  {f'{each.name} {each.arguments}':<{width}}{each.help}".rstrip()
    yield ""
    yield "SETTINGS are GROUP=FILE and KEY=VALUE, as in: model=olmo7b offload=auto"
    yield "`tightfit help COMMAND` explains a command; `tightfit help run` lists settings."


COMMANDS: Final = (
    Command("run", "[SETTINGS]", "run one point and record what was measured", _harness()),
    Command(
        "plan",
        "[SETTINGS]",
        "say what fits and how fast it will be",
        _composed("plan", "mode=plan"),
    ),
    Command(
        *("sweep", "[SETTINGS]", "run every combination of values given with commas"),
        _composed("sweep", "-m"),
    ),
    Command(
        *("ab", "[SETTINGS]", "run two settings in turns and compare them"),
        _composed("ab", "scenario=ab"),
    ),
    Command("serve", "MODEL [FLAGS]", "answer OpenAI's clients over HTTP", _serve),
    Command("service", "VERB ...", "run a server and the console as services of systemd", _service),
    Command(
        "console", "[FLAGS]", "show and control models, servers and tests in the browser", _console
    ),
    Command("chat", "[MODEL]", "talk to a server, or to a model, in the terminal", _chat),
    Command("search", "[SETTINGS]", "look for the best settings", _search),
    Command("models", "VERB ...", "add, list, set, fetch, test and remove models", _models),
    Command("open", "[latest|RUN]", "open the page of all runs, or of one, in the browser", _open),
    Command("compare", "RUN RUN ...", "compare runs of the same work", _compare),
    Command("doctor", "", "check what this machine has: GPU, link, memory, disk", _doctor),
    Command("ui", "[OPTIONS]", "show all runs in MLflow, in the browser", _ui),
    Command("completion", "SHELL", "print a completion script for bash, zsh or fish", _completion),
    Command("version", "", "print the version", _version),
    Command("help", "[COMMAND]", "print this, or the help of a command", _help),
)
"""In the order of the help."""
