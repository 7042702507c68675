"""`python -m harness`: read the command line, then compose and run (harness.sweep.app)."""

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from harness.config.cli_args import CommandLine, parse_command_line
from harness.console import EXIT_OK
from harness.point.full_disk import exit_code
from harness.point.streams import outlive_readers


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m harness` with the given arguments; return its exit code."""
    return exit_code(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    line = parse_command_line(argv)
    printed = _printed(line)
    if printed is not None:
        sys.stdout.write(printed)
        return EXIT_OK
    from harness.sweep.app import run  # noqa: PLC0415  imports Hydra, which --help does not need

    return run(line)


def _printed(line: CommandLine) -> str | None:
    """Return what an option prints instead of a run; None without one."""
    if line.help or line.settings:
        from harness.config.cli_args import help_text, settings_page  # noqa: PLC0415  only here

        return help_text(line.config_dir) if line.help else settings_page()
    if line.choosing:
        from harness.forecast.choosing import page  # noqa: PLC0415  only here

        return page()
    return f"tightfit {_version()}\n" if line.version else None


def _version() -> str:
    try:
        return version("tightfit")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    outlive_readers()
    sys.exit(main())
