"""`python -m harness`: read the command line, then compose and run (harness.sweep.app).

Any Python 3.6 reads this file, and says which one is needed.
"""

import sys
from typing import TYPE_CHECKING

from harness.needs import require_environment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.config.cli_args import CommandLine


def main(argv: "Sequence[str] | None" = None) -> int:
    """Run `python -m harness` with the given arguments; return its exit code."""
    require_environment()
    from harness.point.full_disk import exit_code  # noqa: PLC0415  needs the environment

    return exit_code(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: "Sequence[str]") -> int:
    from catalogue.terminal import EXIT_OK  # noqa: PLC0415
    from harness.config.cli_args import parse_command_line  # noqa: PLC0415  needs the environment

    line = parse_command_line(argv)
    printed = _printed(line)
    if printed is not None:
        sys.stdout.write(printed)
        return EXIT_OK
    if line.json:
        return _run_for_json(line)
    from harness.sweep.app import run  # noqa: PLC0415  imports Hydra, which --help does not need

    return run(line)


def _run_for_json(line: "CommandLine") -> int:
    """Run what a command line asks for, then print one document; all that is said is on stderr.

    Its `kind` is run, sweep, plan or error.
    """
    from contextlib import redirect_stdout  # noqa: PLC0415  only here

    from catalogue.terminal import EXIT_BAD_CONFIG  # noqa: PLC0415
    from engine.errors import ConfigError  # noqa: PLC0415
    from harness.sweep.app import run  # noqa: PLC0415
    from harness.sweep.document import Document, print_document  # noqa: PLC0415

    document: Document = {}
    try:
        with redirect_stdout(sys.stderr):
            code = run(line, document)
    except ConfigError as error:
        print_document({"kind": "error", "exit_code": EXIT_BAD_CONFIG, "message": str(error)})
        raise
    print_document({**document, "exit_code": code})
    return code


def _printed(line: "CommandLine") -> "str | None":
    """Return what an option prints instead of a run; None without one."""
    if line.help or line.settings:
        from harness.config.cli_args import help_text, settings_page  # noqa: PLC0415  only here

        return help_text(line.config_dir) if line.help else settings_page()
    if line.choosing:
        from harness.forecast.choosing import page  # noqa: PLC0415  only here

        return page()
    if line.version:
        from catalogue.terminal import version_line  # noqa: PLC0415  only here

        return version_line()
    return None


if __name__ == "__main__":
    require_environment()
    from harness.point.streams import outlive_readers

    outlive_readers()
    sys.exit(main())
