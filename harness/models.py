"""`python -m harness.models`: the models of the catalogue; fetches, packs and removes them.

`tightfit models` does this and more, with a registry. This needs no database.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from catalogue.checkpoint import ModelUnavailableError
from catalogue.entry import Model
from catalogue.files import kept_folder, tightfit_home
from catalogue.models import describe, entries, fetch, find, remove, state
from catalogue.terminal import EXIT_BAD_CONFIG, EXIT_NOT_ALL_OK, EXIT_OK, columns, say, show
from engine.errors import ConfigError, EngineError
from engine.sealed import GIB
from harness.pack import main as pack

VERBS: Final = ("list", "show", "fetch", "pack", "remove", "home")


def main(arguments: Sequence[str] | None = None, prog: str = "python -m harness.models") -> int:
    """Carry out one command; return 0, 3 when a model cannot be had, 2 for a wrong name."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["pack"]:
        return pack(given[1:], f"{prog} pack")
    chosen = _parser(prog).parse_args(given)
    try:
        show(_carry_out(chosen))
    except ConfigError as error:
        say(f"error: {error}")
        return EXIT_BAD_CONFIG
    except (ModelUnavailableError, EngineError) as error:
        say(f"error: {error}")
        return EXIT_NOT_ALL_OK
    return EXIT_OK


def _carry_out(chosen: argparse.Namespace) -> Iterable[str]:
    """Return the lines that a verb prints, after what it does."""
    config_dir = getattr(chosen, "config_dir", None)
    if chosen.command == "home":
        return [str(tightfit_home())]
    if chosen.command == "list":
        return _table(config_dir)
    several = [find(name, config_dir) for name in getattr(chosen, "names", [])]
    if chosen.command == "remove":
        return [f"{model.name}: {remove(model) / GIB:.2f} GiB removed" for model in several]
    if chosen.command == "fetch":
        return [_fetched(model) for model in several]
    return _described(find(chosen.name, config_dir))


def _fetched(model: Model) -> str:
    folder = fetch(model, report=say)
    return f"{model.name}: {folder or 'random weights, nothing to fetch'}"


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Look after the models on this disk.")
    verbs = parser.add_subparsers(dest="command", metavar="VERB", required=True)
    helps = (
        "list the models of the catalogue: what is here, and how large they are",
        "print a model's sizes, source and folder",
        f"fetch models into {tightfit_home()}",
        f"keep a model's weights in lossless codes in {kept_folder()}, for later loads",
        f"remove what was fetched of models into {tightfit_home()}",
        "print the folder of models, runs and database",
    )
    made = {
        verb: verbs.add_parser(verb, help=text) for verb, text in zip(VERBS, helps, strict=True)
    }
    made["show"].add_argument("name", metavar="NAME", help=f"{_NAME}, or a folder")
    for verb in ("fetch", "remove"):
        made[verb].add_argument("names", nargs="+", metavar="NAME", help=_NAME)
    for verb in ("list", "show", "fetch", "remove"):
        made[verb].add_argument(
            "--config-dir", type=Path, help="a folder of yours, whose model/ has files too"
        )
    return parser


_NAME: Final = "a name of `list`, or a hub's OWNER/NAME"


def _table(config_dir: Path | None) -> list[str]:
    """Return a line for each model of the catalogue."""
    rows = [("model", "here", "GiB on disk", "billion weights", "source")]
    for model in entries(config_dir):
        found = state(model)
        size = f"{found.num_bytes / GIB:.2f}" if found.num_bytes else "-"
        spec = model.spec
        weights = "-" if spec is None else f"{spec.num_parameters / 1e9:.2f}"
        rows.append((model.name, found.kind, size, weights, _source(model)))
    return columns(rows, left={0, 1, 4})


def _source(model: Model) -> str:
    source = model.source
    if model.path is not None:
        return model.path
    return str(source.repo) if source.kind == "hub" else f"{source.package} {source.version}"


def _described(model: Model) -> list[str]:
    """Return what is known of a model, a line for each fact."""
    found, folder = state(model), describe(model)
    spec = folder.spec
    rows = [
        ("model", model.name),
        ("source", _source(model)),
        ("here", f"{found.kind}, {found.num_bytes / GIB:.2f} GiB" if found.num_bytes else "absent"),
        ("folder", str(found.path or "-")),
        ("family", spec.model_type),
        (
            "weights",
            f"{spec.num_parameters / 1e9:.3f} billion, {spec.weight_bytes() / GIB:.2f} GiB",
        ),
        ("layers", str(spec.num_hidden_layers)),
        ("longest sequence", f"{spec.max_position_embeddings:,} tokens"),
        ("KV of a token", f"{spec.kv_bytes_per_token() / 1024:.1f} KiB"),
    ]
    return [*columns(rows, left={0, 1}), *(f"  note: {note}" for note in folder.notes)]


if __name__ == "__main__":
    sys.exit(main())
