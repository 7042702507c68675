"""Time one operator or all of them on a GPU: `python -m kernels.bench [op]`.

For each operator: milliseconds of one call replayed from a CUDA graph, the bytes it has to read and
write per second, that rate as a share of this card's measured copy rate, and its twin's time, run
eagerly. Speed is measured here and in no test.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels import bench_cases

_COPY_BYTES = 2**30
_WARMUPS = 3
_KERNEL_REPEATS = 30
_TWIN_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Timing:
    """One line of the table.

    Attributes:
        name: the operator and its shape.
        kernel_ms: median milliseconds of the operator.
        twin_ms: median milliseconds of the twin.
        gb_per_s: bytes moved per second, in units of 10^9.
        copy_share: gb_per_s divided by the copy rate.
        tflop_per_s: floating point operations per second in units of 10^12; None where the bytes
            are what limits.
    """

    name: str
    kernel_ms: float
    twin_ms: float
    gb_per_s: float
    copy_share: float
    tflop_per_s: float | None


def measure_copy_rate(device: torch.device) -> float:
    """Return the rate of a copy within the card's memory, bytes read plus written, in GB/s.

    Args:
        device: the card.
    """
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    milliseconds = median_ms(lambda: target.copy_(source), _KERNEL_REPEATS)
    return 2 * _COPY_BYTES / milliseconds / 1e6


def captured(run: Callable[[], object]) -> Callable[[], None]:
    """Capture a call in a CUDA graph after warming it up, and return the graph's replay.

    Args:
        run: what enqueues work on the current stream.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARMUPS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def median_ms(run: Callable[[], object], repeats: int) -> float:
    """Return the median milliseconds of a call, from one pair of events a call.

    Args:
        run: what enqueues work on the current stream.
        repeats: calls that are timed, after one that is not.
    """
    run()
    pairs = []
    for _ in range(repeats):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    pairs[-1][1].synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in pairs))


def time_case(case: bench_cases.Case, copy_gb_per_s: float) -> Timing:
    """Time one case.

    Args:
        case: what to run.
        copy_gb_per_s: the copy rate of the same card.

    Returns:
        Medians and the rates that follow from them.
    """
    replay = captured(case.run_op)
    kernel_ms = median_ms(replay, _KERNEL_REPEATS)
    twin_ms = median_ms(case.run_twin, _TWIN_REPEATS)
    gb_per_s = case.num_bytes / kernel_ms / 1e6
    return Timing(
        name=f"{case.op} {case.shape}",
        kernel_ms=kernel_ms,
        twin_ms=twin_ms,
        gb_per_s=gb_per_s,
        copy_share=gb_per_s / copy_gb_per_s,
        tflop_per_s=case.num_flops / kernel_ms / 1e9 if case.num_flops else None,
    )


def render(timing: Timing) -> str:
    """Return one line of the table.

    Args:
        timing: what was measured.
    """
    tflop_per_s = "" if timing.tflop_per_s is None else f"{timing.tflop_per_s:.1f}"
    return (
        f"{timing.name:<70} {timing.kernel_ms:>9.4f} {timing.gb_per_s:>8.0f} "
        f"{timing.copy_share:>6.2f} {tflop_per_s:>8} {timing.twin_ms:>10.3f}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code, 2 where there is no GPU.

    Args:
        arguments: the command line without the program's name; None takes sys.argv.
    """
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    parser.add_argument("op", nargs="?", choices=sorted(bench_cases.BUILDERS), help="default: all")
    chosen = parser.parse_args(arguments).op
    if not torch.cuda.is_available():
        sys.stderr.write(
            "kernels.bench: expected a CUDA device, got none. Run it on a machine with a GPU.\n"
        )
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    copy_gb_per_s = measure_copy_rate(device)
    sys.stdout.write(
        f"{torch.cuda.get_device_name(device)}, copy within its memory {copy_gb_per_s:.0f} GB/s\n"
        f"{'operator':<70} {'ms':>9} {'GB/s':>8} {'share':>6} {'TFLOP/s':>8} {'twin ms':>10}\n"
    )
    for op in [chosen] if chosen else sorted(bench_cases.BUILDERS):
        for build in bench_cases.BUILDERS[op]:
            timing = time_case(build(device), copy_gb_per_s)
            sys.stdout.write(render(timing) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
