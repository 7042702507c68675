"""Completion in shells: `tightfit completion bash` prints what a shell evaluates."""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from io import StringIO
from typing import Final

from catalogue.terminal import EXIT_OK, CommandParser

Run = Callable[[Sequence[str]], int]
SCRIPTS: Final[Mapping[str, str]] = {
    "bash": """\
_tightfit() {
  mapfile -t COMPREPLY < <(tightfit completion --line "${COMP_LINE:0:COMP_POINT}" bash 2>/dev/null)
  [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=./] ]] && compopt -o nospace
}
complete -o default -F _tightfit tightfit
""",
    "zsh": """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_tightfit() {
  local -a found
  local line="${(j: :)words[1,CURRENT-1]} $PREFIX"
  found=("${(@f)$(tightfit completion --line "$line" zsh 2>/dev/null)}")
  found=(${found:#})
  (( $#found )) || { _files; return }
  compadd -S '' -- ${(M)found:#*[=./]}
  compadd -- ${found:#*[=./]}
}
compdef _tightfit tightfit
""",
    "fish": """\
function __tightfit_complete
  set -l found (tightfit completion --line (commandline -cp) fish 2>/dev/null)
  set -q found[1]; or set found (__fish_complete_path (commandline -ct))
  printf '%s\\n' $found
end
complete -c tightfit -f -a '(__tightfit_complete)'
""",
}
"""A name that ends in = . or / is followed by no space. Where nothing fits, files are offered."""
HOW: Final[Mapping[str, str]] = {
    "bash": 'eval "$(tightfit completion bash)"    # in ~/.bashrc',
    "zsh": 'eval "$(tightfit completion zsh)"    # in ~/.zshrc, after compinit',
    "fish": "tightfit completion fish | source    # in ~/.config/fish/config.fish",
}


def main(arguments: Sequence[str], commands: Sequence[str], run: Run) -> int:
    """Print a shell's script, or, with --line, what may stand at the end of a command line."""
    parser = CommandParser(
        prog="tightfit completion",
        description="Print a script with which a shell completes commands and settings.",
        epilog="\n".join(HOW.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SCRIPTS)
    parser.add_argument("--line", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.line is None:
        sys.stdout.write(SCRIPTS[options.shell])
        return EXIT_OK
    found = candidates(options.line, commands, run)
    if options.shell == "bash":  # takes what stands behind = as a word of its own
        typed = options.line.split(" ")[-1]
        cut = typed.rfind("=") + 1
        found = [word[cut:] for word in found]
    sys.stdout.write("".join(f"{word}\n" for word in found))
    return EXIT_OK


def candidates(line: str, commands: Sequence[str], run: Run) -> list[str]:
    """Return what the last word of a line may become.

    Args:
        line: from the command's name to the cursor.
        commands: the subcommands.
        run: carries out a command line.
    """
    _, *words = line.split(" ")
    words = [*filter(None, words[:-1]), words[-1]] if words else [""]
    *before, last = words
    if not before:
        return [name for name in commands if name.startswith(last)]
    match before:
        case _ if last.startswith("-"):
            found = _options(before, run)
        case ["run" | "plan" | "sweep" | "ab" | "search", *typed]:
            return _settings(" ".join([*typed, last]))
        case ["models"]:
            found = list(_model_verbs())
        case ["service"]:
            found = list(_service_verbs())
        case ["models" | "serve" | "chat", *_]:
            found = _model_names()
        case ["open" | "compare", *_]:
            found = _runs()
        case ["help"]:
            found = list(commands)
        case ["completion"]:
            found = list(SCRIPTS)
        case _:
            found = []
    return [name for name in found if name.startswith(last)]


def _settings(line: str) -> list[str]:
    from harness.config.compose import complete  # noqa: PLC0415  loads Hydra

    return complete(line)


def _model_verbs() -> Sequence[str]:
    from console.registry.cli import VERBS  # noqa: PLC0415  when it is asked

    return VERBS


def _service_verbs() -> Sequence[str]:
    from console.service.cli import VERBS  # noqa: PLC0415  when it is asked

    return list(VERBS)


def _model_names() -> list[str]:
    from catalogue.models import names  # noqa: PLC0415  when it is asked

    return names()


def _options(before: Sequence[str], run: Run) -> list[str]:
    """Return the options that the help of a command names."""
    words = before[:2] if before[0] in {"models", "service"} else before[:1]
    words = ["run"] if words[0] in {"plan", "sweep", "ab"} else words
    with redirect_stdout(StringIO()) as text, suppress(SystemExit):
        run([*words, "--help"])
    return [*dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][\w-]*", text.getvalue()))]


def _runs() -> list[str]:
    from tightfit.runs import LATEST, run_ids  # noqa: PLC0415  when it is asked

    return [LATEST, *run_ids()]
