"""`python -m harness.models`: put checkpoints on this machine ahead of a run, show the folder."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from catalogue.checkpoint import ModelUnavailableError
from catalogue.files import tightfit_home
from catalogue.models import fetch, find
from engine.errors import ConfigError
from harness.console import EXIT_BAD_CONFIG, EXIT_NOT_ALL_OK, EXIT_OK, say


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out one command; return 0, 3 when a model cannot be had, 2 for a wrong name."""
    parser = argparse.ArgumentParser(prog="python -m harness.models", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    ahead = commands.add_parser("fetch", help=f"fetch into {tightfit_home()} what is not there")
    ahead.add_argument(
        "names", nargs="+", metavar="NAME", help="a file name in conf/model, or a hub's OWNER/NAME"
    )
    ahead.add_argument(
        "--config-dir", type=Path, help="a folder of yours, whose model/ has files too"
    )
    commands.add_parser("home", help="print the folder of models, runs and database")
    chosen = parser.parse_args(arguments)
    if chosen.command == "home":
        sys.stdout.write(f"{tightfit_home()}\n")
        return EXIT_OK
    try:
        for model in [find(name, chosen.config_dir) for name in chosen.names]:
            folder = fetch(model, report=say)
            where = "random weights, nothing to fetch" if folder is None else folder
            sys.stdout.write(f"{model.name}: {where}\n")
    except ModelUnavailableError as error:
        say(str(error))
        return EXIT_NOT_ALL_OK
    except ConfigError as error:
        say(str(error))
        return EXIT_BAD_CONFIG
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
