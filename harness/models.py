"""`python -m harness.models`: the models of the catalogue; fetches, packs and removes them.

`tightfit models` does this and more, with a registry. This needs no database.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from catalogue.checkpoint import ModelUnavailableError
from catalogue.entry import Model
from catalogue.files import facts_folder, kept_folder, tightfit_home
from catalogue.listing import catalogue_table, model_lines
from catalogue.models import describe, entries, fetch, find, remove
from catalogue.terminal import EXIT_BAD_CONFIG, EXIT_NOT_ALL_OK, EXIT_OK, CommandParser, say, show
from engine.errors import ConfigError, EngineError
from engine.sealed import GIB

if TYPE_CHECKING:
    from engine.pack import PackedCheckpoint

VERBS: Final = ("list", "show", "fetch", "pack", "remove", "home")


def main(arguments: Sequence[str] | None = None, prog: str = "python -m harness.models") -> int:
    """Carry out one command; return 0, 3 when a model cannot be had, 2 for a wrong name."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["pack"]:
        return pack(given[1:], f"{prog} pack")
    return _shown(lambda: _carry_out(_parser(prog).parse_args(given)))


def _shown(work: Callable[[], Iterable[str]]) -> int:
    """Print the lines of some work; return its exit code."""
    try:
        show(work())
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
        return catalogue_table(entries(config_dir))
    several = [find(name, config_dir) for name in getattr(chosen, "names", [])]
    if chosen.command == "remove":
        return [f"{model.name}: {remove(model) / GIB:.2f} GiB removed" for model in several]
    if chosen.command == "fetch":
        return [_fetched(model) for model in several]
    model = find(chosen.name, config_dir)
    return model_lines(model, describe(model))


def _fetched(model: Model) -> str:
    folder = fetch(model, report=say)
    return f"{model.name}: {folder or 'random weights, nothing to fetch'}"


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = CommandParser(prog=prog, description="Look after the models on this disk.")
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


def pack(arguments: Sequence[str], prog: str) -> int:
    """Keep a model's weights in lossless codes; return 0, 3 when it cannot be, 2 for a wrong name.

    This is `tightfit models pack`.
    """

    def packed() -> Iterable[str]:
        chosen = _pack_parser(prog).parse_args(arguments)
        return _packed(find(chosen.name, chosen.config_dir), chosen.device)

    try:
        return _shown(packed)
    except OSError as error:
        say(
            f"pack: reading the model or writing {kept_folder()} failed ({error}). Free "
            "room there, or set TIGHTFIT_HOME to a folder that can be written."
        )
        return EXIT_NOT_ALL_OK


def _pack_parser(prog: str) -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=prog,
        description=f"Keep a model's weights in lossless codes in {kept_folder()}.",
    )
    parser.add_argument("name", metavar="NAME", help="a name, a hub's OWNER/NAME, or a folder")
    parser.add_argument(
        "--config-dir", type=Path, help="a folder of yours, whose model/ has files too"
    )
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="what packs"
    )
    return parser


def _packed(model: Model, device: str) -> list[str]:
    """Pack a model's weights; return what is to be said of them."""
    from engine.pack import pack_checkpoint  # noqa: PLC0415  it loads torch

    folder = fetch(model, report=say)
    if folder is None:
        raise ConfigError(f"model {model.name}: expected weights to pack, got random ones.")
    told = -1

    def progress(done: int, total: int) -> None:
        nonlocal told
        if (tenth := 10 * done // total) > told:
            told = tenth
            say(f"{model.name}: packed {done / GIB:.2f} of {total / GIB:.2f} GiB")

    packed = pack_checkpoint(
        folder, kept_folder(), facts_folder(), device=device, progress=progress
    )
    if packed.note:
        say(packed.note)
    return [f"{model.name}: {packed.folder}", *_pack_lines(packed)]


def _pack_lines(packed: "PackedCheckpoint") -> list[str]:
    """Return what is said of packed weights: bytes, escapes, and what stays plain and why."""
    left_bytes = sum(size for tensors in packed.plain.values() for _, size in tensors)
    whole_bytes = packed.plain_bytes + left_bytes
    lines = [
        f"  {len(packed.escapes)} tensors in codes, {packed.num_made} of them packed now; "
        f"{(packed.num_bytes + left_bytes) / GIB:.3f} of {whole_bytes / GIB:.3f} GiB with what "
        f"stays plain, ratio {(packed.num_bytes + left_bytes) / whole_bytes:.4f}"
    ]
    if packed.escapes:
        shares = {name: count / of for name, (count, of) in packed.escapes.items()}
        name = max(shares, key=shares.__getitem__)
        total = sum(count for count, _ in packed.escapes.values())
        lines += [
            f"  in codes: {packed.num_bytes} bytes of {packed.plain_bytes}, ratio "
            f"{packed.num_bytes / packed.plain_bytes:.4f}",
            f"  escapes: {total}; most in {name}: {packed.escapes[name][0]}, "
            f"{shares[name]:.4%} of its weights",
        ]
    for why, tensors in packed.plain.items():
        size = sum(num_bytes for _, num_bytes in tensors)
        others = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        lines.append(f"  plain: {tensors[0][0]}{others} ({size} bytes): {why}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
