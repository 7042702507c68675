"""The file formats of what a run leaves row by row: telemetry, and its requests.

`telemetry.jsonl` and `requests.jsonl` grow while a run lasts; when it ends the rows go to
`telemetry.parquet` and `requests.parquet`. A run that was killed, or a machine without pyarrow,
leaves the first. From the rows of requests every latency and rate can be worked out anew. Standard
library only, but for pyarrow where a Parquet file is read.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

TELEMETRY_PARQUET: Final = "telemetry.parquet"
TELEMETRY_SPOOL: Final = "telemetry.jsonl"

Table = dict[str, list[Any]]
"""Column -> its values in order of time; every column of TELEMETRY_COLUMNS, all of one length."""


@dataclass(frozen=True)
class Column:
    """One column; a value that was not to be had is null."""

    kind: str
    """float | int | text."""
    meaning: str


def _columns(kind: str, **meanings: str) -> dict[str, Column]:
    return {name: Column(kind, meaning) for name, meaning in meanings.items()}


TELEMETRY_COLUMNS: Final[Mapping[str, Column]] = MappingProxyType(
    _columns(
        "float",
        clock_s="CLOCK_MONOTONIC when the row was begun, the clock of token times",
        time="seconds since 1970 at the same moment",
        took_s="how long reading the row took",
        slow_clock_s="CLOCK_MONOTONIC when the columns marked (s) were read last",
        costly_clock_s="CLOCK_MONOTONIC when the columns marked (c) were read last",
        sampler_cpu_s="counter: CPU time of the sampler, from its first row on",
    )
    | _columns(
        "text",
        job="the worker's job: measure, reference, load-cold-1, ...; null between two workers",
        phase="phase of the worker, from its state.json",
    )
    | _columns(
        "int",
        num_processes="processes of the worker's tree",
        rss_bytes="resident memory, summed over the tree",
        rss_peak_bytes="highest resident memory of the worker alone so far",
        anon_bytes="of rss_bytes, anonymous memory",
        shmem_bytes="of rss_bytes, shared memory",
        locked_bytes="memory that the kernel counts as locked, summed over the tree",
        swapped_bytes="memory that is swapped out, summed over the tree",
        pinned_bytes="bytes registered with the device, from the engine's ledger once it is built",
    )
    | _columns("float", cpu_s="counter: CPU time of the tree, children that ended included")
    | _columns(
        "int",
        minor_faults="counter: page faults of the tree without a read",
        major_faults="counter: page faults of the tree that read a disk",
        read_bytes="counter: bytes that the tree read from disks",
        host_available_bytes="memory of the machine that is available without swapping",
        host_cached_bytes="page cache and buffers of the machine",
        host_swap_used_bytes="swap in use on the machine",
        host_swap_in_bytes="counter: bytes swapped in on the machine",
        host_swap_out_bytes="counter: bytes swapped out on the machine",
        host_major_faults="counter: page faults of the machine that read a disk",
        host_disk_read_bytes="counter: bytes read from the machine's disks",
    )
    | _columns("float", host_cpu_s="counter: core seconds that the machine was busy")
    | _columns("int", gpu_used_bytes="memory of the GPU in use by all processes")
    | _columns(
        "float",
        gpu_busy_pct="share of the driver's last sampling period with a kernel running, %",
        gpu_memory_busy_pct="share of that period with device memory read or written, %",
        gpu_power_w="power of the card",
        gpu_energy_j="counter: energy of the card",
        gpu_temperature_c="temperature of the GPU",
        gpu_sm_clock_mhz="clock of the SMs",
        gpu_memory_clock_mhz="clock of the memory",
    )
    | _columns(
        "int",
        gpu_throttle_bits="reasons for a reduced clock, as bits of NVML (list below)",
        gpu_num_processes="processes that compute on the GPU",
        gpu_num_own_processes="of these, those of the worker's tree",
        pcie_gen="PCIe generation of the link now",
        pcie_width="PCIe lanes of the link now",
    )
    | _columns(
        "float",
        pcie_rx_gb_s="bytes that the GPU received over about 20 ms, packet headers included",
        pcie_tx_gb_s="bytes that the GPU sent over about 20 ms, packet headers included",
    )
)
"""Name -> column, in the order of the file."""
SLOW_COLUMNS: Final = frozenset(
    name
    for name in TELEMETRY_COLUMNS
    if name.startswith("host_")
    or (name.startswith("gpu_") and name not in {"gpu_used_bytes", "gpu_power_w", "gpu_energy_j"})
    or name in {"pcie_gen", "pcie_width"}
    or name in {"num_processes", "rss_peak_bytes", "anon_bytes", "shmem_bytes", "locked_bytes"}
    or name in {"swapped_bytes", "cpu_s", "minor_faults", "major_faults", "read_bytes"}
)
COSTLY_COLUMNS: Final = frozenset({"gpu_energy_j", "pcie_rx_gb_s", "pcie_tx_gb_s"})
"""Read every few seconds, in rows whose clock_s is costly_clock_s; others repeat the value."""


def line_rows(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the row of each line of JSON; lines that a kill cut short are passed over."""
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def spool_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a spool, as `line_rows` finds them.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        yield from line_rows(file)


def read_spool(path: Path) -> Table:
    """Return the rows of a spool as columns.

    Raises:
        OSError: the file cannot be read.
    """
    table: Table = {name: [] for name in TELEMETRY_COLUMNS}
    for row in spool_rows(path):
        for name, values in table.items():
            values.append(row.get(name))
    return table


def read_telemetry(folder: Path) -> Table | None:
    """Return the telemetry of a run's folder as columns; None where there is none.

    Raises:
        ImportError: there is a Parquet file and no pyarrow.
        OSError: a file cannot be read.
        ValueError: the Parquet file is broken.
    """
    parquet, spool = folder / TELEMETRY_PARQUET, folder / TELEMETRY_SPOOL
    if parquet.is_file():
        import pyarrow.parquet as pq  # noqa: PLC0415  takes a third of a second

        found = pq.read_table(parquet).to_pydict()
        count = max((len(values) for values in found.values()), default=0)
        return {name: found.get(name) or [None] * count for name in TELEMETRY_COLUMNS}
    return read_spool(spool) if spool.is_file() else None


REQUESTS_PARQUET: Final = "requests.parquet"
REQUESTS_SPOOL: Final = "requests.jsonl"
REQUEST_COLUMNS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "part": ("text", "latency, throughput or serve"),
        "repeat": ("int", "number of the measurement, from 0"),
        "request_id": ("text", "as in result.json; in a search serve-TRIAL-NUMBER"),
        "num_prompt_tokens": ("int", "of the whole prompt, earlier turns too"),
        "arrival_s": ("float", "when it was sent, or its scheduled arrival (serve)"),
        "sent_s": ("float", "when it was handed to the engine (serve)"),
        "is_ramp_up": ("bool", "it arrived in the ramp and is not counted (serve)"),
        "is_cancelled": ("bool", "the harness took it back, or never sent it"),
        "finish_reason": ("text", "length or stop; null if it was cancelled or failed"),
        "error": ("text", "why it failed or was cancelled"),
        "token_times_s": ("floats", "when each output token was on the host"),
    }
)
"""Column -> its kind (text, int, float, bool, floats) and meaning; times on the clock of the
engine's tokens, CLOCK_MONOTONIC but for the scripted clock of model=fake."""


def request_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a spool; a line that is cut off, the last one after a kill, is left out.

    Raises:
        OSError: the file cannot be read.
    """
    for row in spool_rows(path):
        yield {name: row.get(name) for name in REQUEST_COLUMNS}
