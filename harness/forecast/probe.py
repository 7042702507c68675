"""Measure what this machine carries, for predicted times: `python -m harness.forecast.probe`.

Takes a few seconds; nothing else should use the GPU meanwhile. The result is kept in TIGHTFIT_HOME
for this card, driver, torch and processor. mode=plan uses it where the card of the plan is here,
and runs plan with it.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

from harness.columns import columns
from harness.errors import EXIT_BAD_CONFIG, EXIT_OK
from harness.observe.gpu import Gpu, open_gpu
from harness.observe.machine_rates import read_rates, write_rates
from harness.point.process import let_threads_sleep
from reports.record.text import number

Probe = Callable[[str], dict[str, float | None]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Probe, print and keep the rates; return the exit code."""
    return probe(sys.argv[1:] if arguments is None else arguments, _probe)


def probe(arguments: Sequence[str], measure: Probe) -> int:
    """As `main`, with another way to measure."""
    parser = argparse.ArgumentParser(prog="python -m harness.forecast.probe", description=__doc__)
    add = parser.add_argument
    add("--device", default="auto", choices=("auto", "cuda", "cpu"), help="what is probed")
    add("--show", action="store_true", help="print what is kept, and measure nothing")
    options = parser.parse_args(arguments)
    gpu = None if options.device == "cpu" else open_gpu()
    if options.device == "cuda" and gpu is None:
        return _refuse("--device=cuda: expected an NVIDIA GPU, found none. Use --device=cpu.")
    before = read_rates(gpu)
    if options.show:
        if before is None:
            return _refuse("nothing is kept for this machine and driver. Run it without --show.")
        _print([f"probed {before.age()}:", *_rows(before.rates, {})])
        return EXIT_OK
    begin = time.perf_counter()
    rates = measure("cpu" if gpu is None else "cuda")
    took_s = time.perf_counter() - begin
    path = write_rates(gpu, rates)
    old = {} if before is None else before.rates
    _print([f"{_name(gpu)}, {took_s:.1f} s:", *_rows(rates, old), f"kept in {path}"])
    return EXIT_OK


def _probe(device: str) -> dict[str, float | None]:
    let_threads_sleep(os.environ)  # as in the workers that the rates are for
    from harness.observe.probe_machine import probe_rates  # noqa: PLC0415  imports torch

    return probe_rates(device)


def _name(gpu: Gpu | None) -> str:
    return "the CPU" if gpu is None else str(gpu.facts()["name"])


def _rows(rates: dict[str, float | None], before: dict[str, float | None]) -> list[str]:
    rows = []
    for name, value in rates.items():
        shown = "not measured" if value is None else number(value)
        old = before.get(name)
        rows.append((name, shown, f"(before: {number(old)})" if old else ""))
    return columns(rows, left={0, 2})


def _refuse(text: str) -> int:
    sys.stderr.write(f"error: {text}\n")
    return EXIT_BAD_CONFIG


def _print(lines: Sequence[str]) -> None:
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
