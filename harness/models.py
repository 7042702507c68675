"""`python -m harness.models`: fetch checkpoints ahead of a run, pack them, show the folder."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from catalogue.checkpoint import ModelUnavailableError
from catalogue.entry import Model
from catalogue.files import facts_folder, kept_folder, tightfit_home
from catalogue.models import fetch, find
from engine.errors import ConfigError, EngineError
from engine.sealed import GIB
from harness.console import EXIT_BAD_CONFIG, EXIT_NOT_ALL_OK, EXIT_OK, say, show

if TYPE_CHECKING:
    from engine.pack import PackedCheckpoint


def main(arguments: Sequence[str] | None = None, prog: str = "python -m harness.models") -> int:
    """Carry out one command; return 0, 3 when a model cannot be had, 2 for a wrong name."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    ahead = commands.add_parser("fetch", help=f"fetch into {tightfit_home()} what is not there")
    ahead.add_argument(
        "names", nargs="+", metavar="NAME", help="a file name in conf/model, or a hub's OWNER/NAME"
    )
    ahead.add_argument(
        "--config-dir", type=Path, help="a folder of yours, whose model/ has files too"
    )
    packed = commands.add_parser(
        "pack", help=f"keep a model's weights in lossless codes in {kept_folder()}, for later loads"
    )
    packed.add_argument("name", metavar="NAME", help="as for fetch, or a folder")
    packed.add_argument("--config-dir", type=Path, help="as for fetch")
    packed.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="what packs"
    )
    commands.add_parser("home", help="print the folder of models, runs and database")
    chosen = parser.parse_args(arguments)
    if chosen.command == "home":
        sys.stdout.write(f"{tightfit_home()}\n")
        return EXIT_OK
    try:
        if chosen.command == "pack":
            show(_pack(find(chosen.name, chosen.config_dir), chosen.device))
            return EXIT_OK
        for model in [find(name, chosen.config_dir) for name in chosen.names]:
            folder = fetch(model, report=say)
            where = "random weights, nothing to fetch" if folder is None else folder
            sys.stdout.write(f"{model.name}: {where}\n")
    except ConfigError as error:
        say(str(error))
        return EXIT_BAD_CONFIG
    except (ModelUnavailableError, EngineError) as error:
        say(str(error))
        return EXIT_NOT_ALL_OK
    except OSError as error:
        if chosen.command != "pack":
            raise
        say(
            f"pack {chosen.name}: reading it or writing {kept_folder()} failed ({error}). Free "
            "room there, or set TIGHTFIT_HOME to a folder that can be written."
        )
        return EXIT_NOT_ALL_OK
    return EXIT_OK


def _pack(model: Model, device: str) -> list[str]:
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
    return [f"{model.name}: {packed.folder}", *_lines(packed)]


def _lines(packed: "PackedCheckpoint") -> list[str]:
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
