"""`python -m harness`: read the command line, then compose and run (harness.sweep.app).

Any Python 3.6 reads this file, and says which one is needed.
"""

import sys
from typing import TYPE_CHECKING

from harness.needs import require_environment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.config.cli_args import CommandLine
    from harness.sweep.document import Document


def main(argv: "Sequence[str] | None" = None) -> int:
    """Run `python -m harness` with the given arguments; return its exit code."""
    require_environment()
    from harness.point.full_disk import exit_code  # noqa: PLC0415  needs the environment

    return exit_code(_run, sys.argv[1:] if argv is None else argv)


def _run(argv: "Sequence[str]") -> int:
    from catalogue.terminal import EXIT_OK  # noqa: PLC0415
    from harness.config.cli_args import parse_command_line  # noqa: PLC0415  needs the environment

    line = parse_command_line(argv)
    printed = _printed(line)
    if printed is not None:
        sys.stdout.write(printed)
        return EXIT_OK
    if line.json:
        from harness.sweep.document import print_document  # noqa: PLC0415  only here

        return print_document(lambda document: _compose_and_run(line, document))
    return _compose_and_run(line)


def _compose_and_run(line: "CommandLine", document: "Document | None" = None) -> int:
    from harness.sweep.app import run  # noqa: PLC0415  imports Hydra, which --help does not need

    return run(line, document)


def _printed(line: "CommandLine") -> "str | None":
    """Return what an option prints instead of a run; None without one."""
    if line.help:
        from harness.config.cli_args import help_text, keys_text  # noqa: PLC0415  only here

        names = [word for word in line.overrides if "=" not in word]
        return keys_text(names, line.config_dir) if names else help_text(line.config_dir)
    if line.settings:
        from harness.config.cli_args import settings_page  # noqa: PLC0415  only here

        return settings_page()
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
