"""`tightfit models pack`: keeps a model's weights in lossless codes, for later loads."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from catalogue.checkpoint import ModelUnavailableError
from catalogue.entry import Model
from catalogue.files import facts_folder, kept_folder
from catalogue.models import fetch, find
from catalogue.terminal import EXIT_BAD_CONFIG, EXIT_NOT_ALL_OK, EXIT_OK, say, show
from engine.errors import ConfigError, EngineError
from engine.sealed import GIB

if TYPE_CHECKING:
    from engine.pack import PackedCheckpoint


def main(arguments: Sequence[str] | None = None, prog: str = "python -m harness.pack") -> int:
    """Pack a model; return 0, 3 when it cannot be had or packed, 2 for a wrong name."""
    chosen = _parser(prog).parse_args(arguments)
    try:
        show(_pack(find(chosen.name, chosen.config_dir), chosen.device))
    except ConfigError as error:
        say(f"error: {error}")
        return EXIT_BAD_CONFIG
    except (ModelUnavailableError, EngineError) as error:
        say(f"error: {error}")
        return EXIT_NOT_ALL_OK
    except OSError as error:
        say(
            f"pack {chosen.name}: reading it or writing {kept_folder()} failed ({error}). Free "
            "room there, or set TIGHTFIT_HOME to a folder that can be written."
        )
        return EXIT_NOT_ALL_OK
    return EXIT_OK


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
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
