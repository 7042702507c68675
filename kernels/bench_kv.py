"""Time the operators of a cache over two tiers on a GPU: `python -m kernels.bench_kv`.

One layer of an 8-billion-parameter model: 32 query heads, 8 KV heads of 128, bfloat16, blocks of 16
tokens; 42,000 tokens of a sequence have room on the GPU. Parts, all of them by default:

- decode: attention with all blocks on the GPU, by tile; share of the card's copy rate, read plus
  written, as kernels.bench measures it.
- tiered: attention of one sequence whose other blocks lie in pinned host memory, by tile and by
  where in the sequence they lie; share of the rate of a kernel that reads host memory in place, and
  time over the sum of the GPU's part alone and the host's bytes at that rate.
- cost: what a host tier costs where every block is on the GPU.
- gather: one layer of host blocks into a buffer and back, by programs.
- prefill: parts of the keys against one pass.

Results of two tiers and of parts are compared with those of one tier and one pass, bit by bit;
the exit code is 1 where they differ.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kernels import bench_kv_cases as cases
from kernels.bench import captured, measure_copy_rate, median_ms
from kernels.bench_kv_base import KVCase, host_tensor

_REPEATS = 12
_PROBE_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class Row:
    """One line.

    Attributes:
        part: of the five.
        name: what ran.
        variant: how.
        ms: median milliseconds of one layer.
        gb_per_s: bytes of the row's kind per second, in units of 10^9.
        share: gb_per_s over the rate of that kind.
        ratio: ms over what the row is held against; None where it is held against a rate only.
        is_equal: whether the result has the bits of the reference; None where there is none.
    """

    part: str
    name: str
    variant: str
    ms: float
    gb_per_s: float
    share: float
    ratio: float | None = None
    is_equal: bool | None = None


@dataclass(frozen=True, slots=True)
class Rates:
    """What the card carries, in GB/s.

    Attributes:
        copy: within its memory, read plus written.
        in_place: a kernel that reads pinned host memory.
        link: a copy from pinned host memory.
    """

    copy: float
    in_place: float
    link: float


def measure_rates(device: torch.device) -> Rates:
    """Return the three rates that shares refer to.

    Args:
        device: the card.
    """
    pinned, view = host_tensor((_PROBE_BYTES // 4,), torch.int32)
    target = torch.empty_like(view)
    in_place = median_ms(lambda: torch.add(view, 0, out=target), _REPEATS)
    link = median_ms(lambda: target.copy_(pinned, non_blocking=True), _REPEATS)
    scale = _PROBE_BYTES / 1e6
    return Rates(measure_copy_rate(device), scale / in_place, scale / link)


def _time(case: KVCase) -> float:
    return median_ms(captured(case.run), _REPEATS) / case.num_layers


def _time_part(part: str, device: torch.device, rates: Rates) -> list[Row]:
    rows = []
    for case in cases.PARTS[part](device):
        ms = _time(case)
        rate = {"copy": rates.copy, "in place": rates.in_place}[case.kind]
        gb_per_s = case.num_bytes / ms / 1e6
        ratio = None
        if case.beside is not None:
            ratio = ms / (_time(case.beside) + case.num_host_bytes / rates.in_place / 1e6)
        is_equal = None if case.check is None else case.check()
        rows.append(
            Row(part, case.name, case.variant, ms, gb_per_s, gb_per_s / rate, ratio, is_equal)
        )
        sys.stdout.write(render(rows[-1]) + "\n")
        sys.stdout.flush()
    torch.cuda.empty_cache()
    return rows


def render(row: Row) -> str:
    """Return one line of the table.

    Args:
        row: what was measured.
    """
    ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
    equal = {None: "", True: "equal", False: "DIFFERS"}[row.is_equal]
    return (
        f"{row.part:<8} {row.name:<46} {row.variant:<32} {row.ms:>9.4f} {row.gb_per_s:>8.1f} "
        f"{row.share:>6.3f} {ratio:>6} {equal:>7}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code, 2 where there is no GPU, 1 where bits differ.

    Args:
        arguments: the command line without the program's name; None takes sys.argv.
    """
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench_kv",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(cases.PARTS)}; default: all")
    parser.add_argument("--json", type=Path, help="also write rates and rows to this file")
    chosen = parser.parse_args(arguments)
    for part in chosen.parts:
        if part not in cases.PARTS:
            parser.error(f"parts: expected any of {sorted(cases.PARTS)}, got {part!r}")
    if not torch.cuda.is_available():
        sys.stderr.write(
            "kernels.bench_kv: expected a CUDA device, got none. Run it on a machine with a GPU.\n"
        )
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    rates = measure_rates(device)
    sys.stdout.write(
        f"{torch.cuda.get_device_name(device)}: copy {rates.copy:.0f} GB/s, "
        f"host memory in place {rates.in_place:.1f}, link {rates.link:.1f}\n"
        f"{'part':<8} {'what':<46} {'variant':<32} {'ms':>9} {'GB/s':>8} {'share':>6} "
        f"{'ratio':>6} {'bits':>7}\n"
    )
    rows = [row for part in chosen.parts or cases.PARTS for row in _time_part(part, device, rates)]
    if chosen.json is not None:
        document = {
            "device": torch.cuda.get_device_name(device),
            "rates_gb_s": asdict(rates),
            "rows": [asdict(row) for row in rows],
        }
        chosen.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row.is_equal is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
