"""`python -m harness.models`: put checkpoints on this machine ahead of a run, show the folder."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from harness.errors import EXIT_BAD_CONFIG, EXIT_NOT_ALL_OK, EXIT_OK, did_you_mean
from harness.folders import CONF
from harness.models.home import tightfit_home
from harness.models.resolve import ModelUnavailableError, ensure_model

MODELS = CONF / "model"


def load_source(name: str, *folders: Path) -> dict[str, Any]:
    """Return the `source` node of NAME.yaml, or the folder in its `path`.

    Args:
        name: a model of one of the folders.
        folders: of model files; the first that has the model counts.

    Raises:
        ValueError: no such model, or its file has neither.
    """
    paths = [folder / f"{name}.yaml" for folder in folders]
    path = next(filter(Path.is_file, paths), None)
    if path is None:
        known = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
        raise ValueError(
            f"model: expected one of {', '.join(known)}, got {name!r}.{did_you_mean(name, known)}"
        )
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: expected YAML: {error}") from error
    source = content.get("source") if isinstance(content, dict) else None
    if isinstance(source, dict):
        return source
    folder = content.get("path") if isinstance(content, dict) else None
    if isinstance(folder, str):
        return {"kind": "folder", "path": folder}
    raise ValueError(f"{path.name}: expected a node `source`, found none.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out one command; return 0, 3 when a model cannot be had, 2 for a wrong name."""
    parser = argparse.ArgumentParser(prog="python -m harness.models", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("fetch", help=f"fetch into {tightfit_home()} what is not there")
    fetch.add_argument("names", nargs="+", metavar="NAME", help="a file name in conf/model")
    fetch.add_argument(
        "--config-dir", type=Path, help="a folder of yours, whose model/ has files too"
    )
    commands.add_parser("home", help="print the folder of models, runs and database")
    chosen = parser.parse_args(arguments)
    if chosen.command == "home":
        print(tightfit_home())
        return EXIT_OK
    folders = [MODELS] if chosen.config_dir is None else [chosen.config_dir / "model", MODELS]
    try:
        sources = {name: load_source(name, *folders) for name in chosen.names}
        for name, source in sources.items():
            print(f"{name}: {ensure_model(name, source, report=_say)}")
    except ModelUnavailableError as error:
        _say(str(error))
        return EXIT_NOT_ALL_OK
    except ValueError as error:
        _say(str(error))
        return EXIT_BAD_CONFIG
    return EXIT_OK


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
