"""The command line of the bench: what is measured, on which engines, and what is refused."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from harness.bench.kv_cases import BATCHED_TOKENS, MODEL, KVAsked
from harness.errors import ConfigError

Number = TypeVar("Number", int, float)
NO_CHANGE: Final = ("output", "json", "resume", "rows")
"""Options that change nothing of what is measured in a case."""
SHAPE: Final = ("model", "model_layers", "prefill_tokens", "max_num_batched_tokens", "device")
"""Options that targets in seconds do not survive."""
KV_SHAPE: Final = ("kv_model", "kv_scale", "kv_batched_tokens", "model_layers", "device")
"""Likewise, of the rows on the KV cache."""


def _number(read: Callable[[str], Number], low: Number, *, is_open: bool = False) -> Callable:  # type: ignore[type-arg]
    """Return a reader of numbers from `low` on, or above it."""

    def parse(text: str) -> Number:
        bound = f"above {low}" if is_open else f"from {low} on"
        try:
            value = read(text)
        except ValueError:
            value = None
        if value is None or not (value > low if is_open else value >= low):
            raise argparse.ArgumentTypeError(f"expected a number {bound}, got {text!r}")
        return value

    return parse


_COUNT: Final = _number(int, 1)
_SIZE: Final = _number(float, 0.0, is_open=True)


def _share(text: str) -> float:
    value: float = _SIZE(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"expected a share of at most 1, got {text!r}")
    return value


def _numbers(text: str) -> tuple[int, ...]:
    found = tuple(int(part) for part in text.split(",") if part)
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers from 1, such as 1,16,64, got {text!r}")
    return found


def _split(text: str) -> tuple[int, ...]:
    found = tuple(int(number) for number in text.split("/"))
    if len(found) != 3:
        raise argparse.ArgumentTypeError(f"expected group/num/step, such as 8/5/2, got {text!r}")
    return found


def _splits(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(_split(part) for part in text.split(",") if part)


def _sizes(text: str) -> tuple[float, ...]:
    return tuple(_SIZE(part) for part in text.split(",") if part)


def parser(description: str) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Args:
        description: what the command does.
    """
    made = argparse.ArgumentParser(
        prog="python -m harness.bench",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = made.add_argument
    add(
        "--rows",
        default="",
        help="cases to run, comma-separated; kv: all on the KV cache; empty: all others",
    )
    add("--model", default="olmo7b", help="a model of conf/model (random weights)")
    add("--model-layers", type=_COUNT, default=None, help="layers instead of the model's own")
    add("--batches", type=_numbers, default=(1, 16, 64), help="sequences that decode at once")
    add("--prefetch", type=_splits, default=((8, 5, 2),), help="group/num/step, several by commas")
    add(
        "--prefetch-steps", type=_numbers, default=(), help="of the sweep; else 1 to layers off + 1"
    )
    add("--uva-gib", type=_sizes, default=(8.0,), help="GiB in host memory, several by commas")
    add("--memory-gib", type=_SIZE, default=15.9921875, help="memory of the small card")
    add("--utilization", type=_share, default=0.85, help="of it; 0.9 where KV needs it")
    add("--resident-gib", type=_SIZE, default=44.45, help="memory that holds all, used to 0.9")
    add("--max-model-len", type=_COUNT, default=4096, help="tokens")
    add("--max-num-seqs", type=_COUNT, default=None, help="sequences at once; else as needed")
    add("--max-num-batched-tokens", type=_COUNT, default=8192, help="tokens of a step")
    add("--prompt-tokens", type=_COUNT, default=128, help="of prompts before a decode")
    add("--prefill-tokens", type=_COUNT, default=2048, help="of prompts whose prefill is timed")
    add("--steps", type=_COUNT, default=22, help="decode steps that are timed; resident: 4 times")
    add("--counter-s", type=_number(float, 0.0), default=10.5, help="decode beside NVML's counter")
    _add_kv(made)
    add("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: all is emulated")
    add("--output", type=Path, default=None, help="document whose marked section is rewritten")
    add("--json", type=Path, default=None, help="file for all figures, after each case")
    add("--resume", action="store_true", help="keep the figures of the cases that --json has")
    return made


def _add_kv(made: argparse.ArgumentParser) -> None:
    usual = KVAsked()
    add = made.add_argument_group(
        "rows on the KV cache (--rows kv, or kv_... by name)"
    ).add_argument
    add("--kv-model", default=MODEL, help="a model of conf/model")
    add("--kv-memory-gib", type=_SIZE, default=usual.memory_gib, help="memory of the card")
    add("--kv-utilization", type=_share, default=usual.utilization, help="of it")
    add("--kv-host-gib", type=_SIZE, default=usual.host_gib, help="host blocks")
    add("--kv-turns-gib", type=_SIZE, default=usual.turns_gib, help="host blocks of kv_turns")
    add("--kv-batched-tokens", type=_COUNT, default=BATCHED_TOKENS, help="tokens of a step")
    add("--kv-short-len", type=_COUNT, default=usual.short_len, help="max_model_len of most")
    add("--kv-offload", type=_split, default=usual.offload, help="group/num/step of kv_weights")
    add("--kv-scale", type=_SIZE, default=1.0, help="factor of all lengths and counts")


def changed(options: argparse.Namespace, names: Sequence[str], description: str) -> bool:
    """Return whether any of these options is not the usual one."""
    usual = parser(description).parse_args([])
    return any(getattr(options, name) != getattr(usual, name) for name in names)


def check_files(options: argparse.Namespace) -> None:
    """Refuse files that could not be written, or read, before anything is measured.

    Raises:
        ConfigError: naming the option.
    """
    file: Path | None = options.json
    if options.resume and file is None:
        raise ConfigError("--resume: expected --json FILE with figures to go on from, got none.")
    if file is None:
        return
    if file.is_dir() or not file.parent.is_dir():
        what = "a file, got a folder" if file.is_dir() else f"a folder {file.parent}, found none"
        raise ConfigError(
            f"--json: expected {what}: {file}. Name a file in a folder that is there."
        )
