"""The rows of one span of time, and simple questions to them."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from engine.sealed import GIB
from reports.record.record import percentile
from reports.record.rows import COSTLY_COLUMNS, SLOW_COLUMNS, TELEMETRY_COLUMNS, Table
from reports.record.text import number

BUSY_PCT: Final = 50.0
"""From this utilisation on a GPU is busy: its clock and link are not those of a rest."""
IDLE_BIT: Final = 0x1
"""NVML says so itself: the clock is low because nothing runs."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """What was timed, seconds on the clock of the rows."""

    part: str
    """latency, throughput, serve, or load."""
    job: str
    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """How long it is."""
        return self.end_s - self.begin_s


class Window:
    """The rows of a span: those of its job that were begun within it."""

    def __init__(self, table: Table, span: Span) -> None:
        self.span = span
        clock, jobs = table["clock_s"], table["job"]
        self._table = table
        self._places = [
            place
            for place, (clock_s, job) in enumerate(zip(clock, jobs, strict=True))
            if job == span.job and clock_s is not None and span.begin_s <= clock_s <= span.end_s
        ]
        self._busy = [place for place in self._places if self._is_busy(place)]

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_busy(self) -> int:
        """Rows with a busy GPU."""
        return len(self._busy)

    def values(self, column: str, *, busy: bool = False) -> list[Any]:
        """Return the values of a column that are there; `busy`: of rows with a busy GPU only."""
        cells = self._table[column]
        found = (cells[place] for place in (self._busy if busy else self._places))
        return [value for value in found if value is not None]

    def readings(self, column: str) -> list[Any]:
        """Return the values of one of COSTLY_COLUMNS that were read in the span, each once."""
        cells, clock = self._table[column], self._table["clock_s"]
        read = self._table["costly_clock_s"]
        fresh = (cells[place] for place in self._places if read[place] == clock[place])
        return [value for value in fresh if value is not None]

    def pairs(self, first: str, second: str) -> list[tuple[Any, Any]]:
        """Return two columns of the rows with a busy GPU that have both."""
        one, other = self._table[first], self._table[second]
        cells = ((one[place], other[place]) for place in self._busy)
        return [(a, b) for a, b in cells if a is not None and b is not None]

    def growth(self, column: str) -> float | None:
        """Return by how much a counter grew from the first row to the last; None if unknown.

        A counter that went back was started anew and says nothing; nor does one that was read
        only once.
        """
        found = self._ends(column)
        return None if found is None else found[0]

    def rate(self, column: str) -> float | None:
        """Return the growth of a counter per second."""
        found = self._ends(column)
        return None if found is None else found[0] / found[1]

    def _ends(self, column: str) -> tuple[float, float] | None:
        """Return growth and seconds between the first and the last reading within the span."""
        name = "slow_clock_s" if column in SLOW_COLUMNS else "clock_s"
        clock = self._table["costly_clock_s" if column in COSTLY_COLUMNS else name]
        cells = self._table[column]
        read = [
            (clock[place], cells[place])
            for place in self._places
            if cells[place] is not None
            and clock[place] is not None
            and clock[place] >= self.span.begin_s
        ]
        if not read or read[-1][0] <= read[0][0] or read[-1][1] < read[0][1]:
            return None
        return float(read[-1][1] - read[0][1]), float(read[-1][0] - read[0][0])

    def _is_busy(self, place: int) -> bool:
        """Whether the GPU worked, as far as the driver tells; without a GPU it never does."""
        busy_pct = self._table["gpu_busy_pct"][place]
        bits = self._table["gpu_throttle_bits"][place]
        if busy_pct is None:
            return bits is not None and not bits & IDLE_BIT
        return bool(busy_pct >= BUSY_PCT)


def share(flags: Iterable[bool]) -> float | None:
    """Return the share of true ones, None of nothing."""
    known = list(flags)
    return sum(known) / len(known) if known else None


THROTTLE_BITS: Final = {
    0x8: "a hardware slowdown",
    0x20: "heat, by the driver",
    0x40: "heat, by the hardware",
    0x80: "the power supply's brake",
}
"""NVML's bits of a card in trouble -> in words."""
POWER_BIT: Final = 0x4
"""The card is at its power limit: usual for large products, and part of the card."""
THROTTLED_SHARE: Final = 0.05
"""Share of the rows with a busy GPU."""
POWER_SHARE: Final = 0.5
"""Share of the rows with a busy GPU from which on the power limit is worth a note."""
CLOCK_DROP: Final = 0.1
"""Below the highest SM clock of the window by this share, a clock is low."""
CLOCK_SHARE: Final = 0.1
"""Share of the rows with a busy GPU that may have a low clock."""
SLOW_LINK_SHARE: Final = 0.5
"""Share of the rows with a busy GPU from which on a link counts as below its maximum."""
SWAPPED_BYTES: Final = 16 * 2**20
"""Swapped in and out in a window without a reason: a few idle pages move on any machine."""
LEAST_ROWS: Final = 10
"""Rows with a busy GPU below which nothing is said of clocks and link: one second."""


def throttled_share(window: Window) -> float | None:
    """Return the share of the rows with a busy GPU in which the card was slowed down."""
    mask = sum(THROTTLE_BITS)
    return share(bool(bits & mask) for bits in window.values("gpu_throttle_bits", busy=True))


def power_capped_share(window: Window) -> float | None:
    """Return the share of the rows with a busy GPU at the power limit."""
    return share(bool(bits & POWER_BIT) for bits in window.values("gpu_throttle_bits", busy=True))


def reasons(window: Window, *, max_gen: int | None, max_width: int | None) -> list[str]:
    """Return why the figures of a part may not be used, each with what to change.

    `max_gen` and `max_width` are the PCIe generation and lanes that card and slot can do; None:
    unknown.
    """
    found = [_foreign(window), _swapping(window)]
    if window.num_busy >= LEAST_ROWS:
        found += [_throttled(window), _clock(window), _link(window, max_gen, max_width)]
    return [f"{window.span.part}: {text}" for text in found if text is not None]


def notes(window: Window) -> list[str]:
    """Return what a reader should know of a part although its figures stand."""
    part = window.span.part
    capped = power_capped_share(window)
    if window.num_busy >= LEAST_ROWS and capped is not None and capped > POWER_SHARE:
        return [
            f"{part}: the card was at its power limit in {capped:.0%} of the busy time, so its "
            "clock was below the highest. Figures hold for this limit (nvidia-smi -q -d POWER)."
        ]
    return []


def _throttled(window: Window) -> str | None:
    found = throttled_share(window)
    if found is None or found <= THROTTLED_SHARE:
        return None
    seen = window.values("gpu_throttle_bits", busy=True)
    causes = [text for bit, text in THROTTLE_BITS.items() if any(bits & bit for bits in seen)]
    hottest = window.values("gpu_temperature_c")
    heat = f", up to {number(max(hottest))} C" if hottest else ""
    return (
        f"the GPU was slowed down in {found:.0%} of the busy time ({', '.join(causes)}{heat}). "
        "Improve its cooling or power supply, or lower its power limit so that the clock is steady "
        "(nvidia-smi -pl)."
    )


def _clock(window: Window) -> str | None:
    """A clock that falls for no reason that the card names; at the power limit it names one."""
    values = window.values("gpu_sm_clock_mhz", busy=True)
    known = window.pairs("gpu_sm_clock_mhz", "gpu_throttle_bits")
    named = THROTTLE_BITS.keys() | {POWER_BIT}
    free = [clock for clock, bits in known if not bits & sum(named)] if known else values
    if len(free) < LEAST_ROWS:
        return None
    highest = max(values)
    low = [clock for clock in free if clock < (1 - CLOCK_DROP) * highest]
    if len(low) <= CLOCK_SHARE * len(free):
        return None
    return (
        f"the SM clock was more than {CLOCK_DROP:.0%} below its highest of {number(highest)} MHz "
        f"in {len(low) / len(free):.0%} of the busy time, down to {number(min(low))} MHz. Lock the "
        f"clock (nvidia-smi -lgc), or warm up longer; median {number(percentile(free, 50))} MHz."
    )


def _foreign(window: Window) -> str | None:
    found = num_foreign(window)
    if not found:
        return None
    are = "process" if found == 1 else "processes"
    return (
        f"{found} other {are} computed on this GPU, and took time, memory and link from it. End "
        "them (nvidia-smi lists them), or choose another GPU with CUDA_VISIBLE_DEVICES."
    )


def num_foreign(window: Window) -> int | None:
    """Return the most processes at once that computed on the GPU and are not ours.

    In containers the driver may number processes otherwise than /proc. Where it never showed one
    of ours, one of those it showed is taken for the worker.
    """
    listed: list[int] = window.values("gpu_num_processes")
    own: list[int] = window.values("gpu_num_own_processes")
    if not listed:
        return None
    if any(own):
        return max(total - mine for total, mine in zip(listed, own, strict=True))
    return max(0, max(listed) - 1)


def _swapping(window: Window) -> str | None:
    moved = [
        grown
        for name in ("host_swap_in_bytes", "host_swap_out_bytes")
        if (grown := window.growth(name)) is not None
    ]
    if not moved or sum(moved) < SWAPPED_BYTES:
        return None
    own = window.values("swapped_bytes")
    of_worker = f"; {max(own) / 2**20:.0f} MiB of the worker were out" if any(own) else ""
    return (
        f"the machine swapped {sum(moved) / 2**20:.0f} MiB in and out{of_worker}. Free memory, "
        "offload less, or switch swap off (swapoff -a)."
    )


def _link(window: Window, max_gen: int | None, max_width: int | None) -> str | None:
    links = window.pairs("pcie_gen", "pcie_width")
    if not links or not max_gen or not max_width:
        return None
    below = [link for link in links if link[0] < max_gen or link[1] < max_width]
    if len(below) <= SLOW_LINK_SHARE * len(links):
        return None
    gen, width = max(set(below), key=below.count)
    return (
        f"the PCIe link ran at generation {gen} with {width} lanes while the GPU was busy; card "
        f"and slot can do generation {max_gen} with {max_width}. Check slot, riser and BIOS "
        "settings; the figures hold for the slower link."
    )


MEASURE_JOB: Final = "measure"
LARGEST_SHARE: Final = 0.01
"""CPU time over time that the sampler may take."""
LEAST_SECONDS: Final = 5.0
"""Seconds of rows below which the cost of the sampler is not judged."""
_PEAKS: Final = {
    "memory/gpu_peak_global_gib": "gpu_used_bytes",
    "memory/host_rss_peak_gib": "rss_peak_bytes",
    "memory/host_tree_peak_gib": "rss_bytes",
    "memory/host_anon_gib": "anon_bytes",
    "memory/host_shmem_gib": "shmem_bytes",
}
"""Metric -> column whose highest value it is."""
Metrics = dict[str, float | None]


def peak_metrics(table: Table) -> Metrics:
    """Return the peaks of the worker that measures, of all workers where none does.

    What was never read is left out.
    """
    jobs = table["job"]
    wanted = {MEASURE_JOB} if MEASURE_JOB in jobs else {job for job in jobs if job is not None}
    found: Metrics = {}
    for metric, column in _PEAKS.items():
        cells = zip(jobs, table[column], strict=True)
        values = [value for job, value in cells if job in wanted and value is not None]
        if values:
            found[metric] = max(values) / GIB
    before = zip(jobs, table["gpu_used_bytes"], strict=True)
    baseline = next((value for job, value in before if job is None and value is not None), None)
    if baseline is not None and jobs[0] is None:
        found["memory/gpu_baseline_gib"] = baseline / GIB
    return found


def window_metrics(window: Window) -> Metrics:
    """Return the figures of a timed part; None where the machine does not tell."""
    clocks = window.values("gpu_sm_clock_mhz")
    swapped = [window.growth(name) for name in ("host_swap_in_bytes", "host_swap_out_bytes")]
    clock = window.values("clock_s")
    return {
        "gpu/sm_clock_mhz/min": min(clocks, default=None),
        "gpu/sm_clock_mhz/p50": percentile(clocks, 50),
        "gpu/sm_clock_mhz/max": max(clocks, default=None),
        "gpu/memory_clock_mhz": percentile(window.values("gpu_memory_clock_mhz"), 50),
        "gpu/temperature_c": max(window.values("gpu_temperature_c"), default=None),
        "gpu/power_w": _mean(window.values("gpu_power_w")),
        "gpu/busy_pct": _mean(window.values("gpu_busy_pct")),
        "gpu/throttled_share": throttled_share(window),
        "gpu/power_capped_share": power_capped_share(window),
        "link/pcie_rx_gb_s": _mean(window.readings("pcie_rx_gb_s")),
        "link/pcie_tx_gb_s": _mean(window.readings("pcie_tx_gb_s")),
        "host/cpu_cores": window.rate("cpu_s"),
        "host/busy_cores": window.rate("host_cpu_s"),
        "host/major_faults": window.growth("major_faults"),
        "host/read_gib": _gib(window.growth("read_bytes")),
        "host/disk_read_gib": _gib(window.growth("host_disk_read_bytes")),
        "host/swapped_gib": None if None in swapped else _gib(sum(filter(None, swapped))),
        "telemetry/rows_hz": (len(clock) - 1) / (clock[-1] - clock[0]) if len(clock) > 1 else None,
    }


def facts(table: Table, spans: Sequence[Span], file: str) -> dict[str, Any]:
    """Return what a record says of its telemetry: rows, timed parts and null columns."""
    used = cpu_share(table)
    return {
        "file": file,
        "rows": len(table["clock_s"]),
        "cpu_pct": None if used is None else 100 * used,
        "windows": list(map(asdict, spans)),
        "null_columns": null_columns(table),
    }


def null_columns(table: Table) -> list[str]:
    """Return the columns without a single value."""
    return [name for name in TELEMETRY_COLUMNS if all(value is None for value in table[name])]


def cpu_share(table: Table) -> float | None:
    """Return the sampler's CPU time over time, from its first row to its last."""
    clock, cpu = table["clock_s"], table["sampler_cpu_s"]
    if len(clock) < 2 or clock[-1] <= clock[0] or None in {cpu[0], cpu[-1]}:
        return None
    used: float = cpu[-1] - cpu[0]
    return used / float(clock[-1] - clock[0])


def cost_warning(table: Table) -> str | None:
    """Return a warning where the sampler took more of a core than it may."""
    found = cpu_share(table)
    clock = table["clock_s"]
    if found is None or found <= LARGEST_SHARE or clock[-1] - clock[0] < LEAST_SECONDS:
        return None
    return (
        f"telemetry: the sampler took {found:.1%} of a core, more than {LARGEST_SHARE:.0%}. "
        "Please report this."
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _gib(amount: float | None) -> float | None:
    return None if amount is None else amount / GIB
