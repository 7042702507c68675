"""What the telemetry of a timed part says against its figures, and what to change."""

from typing import Final

from harness.telemetry.window import Window, share
from reports.record.record import percentile
from reports.record.text import number

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
"""Of the rows with a busy GPU."""
POWER_SHARE: Final = 0.5
"""Of the rows with a busy GPU, from which on the power limit is worth a note."""
CLOCK_DROP: Final = 0.1
"""Below the highest SM clock of the window by this share, a clock is low."""
CLOCK_SHARE: Final = 0.1
"""Of the rows with a busy GPU that may have a low clock."""
LINK_SHARE: Final = 0.5
"""Of the rows with a busy GPU, from which on a link counts as below its maximum."""
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

    Args:
        window: of the part.
        max_gen: PCIe generation that the card and its slot can do; None: unknown.
        max_width: their PCIe lanes.
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
    if len(below) <= LINK_SHARE * len(links):
        return None
    gen, width = max(set(below), key=below.count)
    return (
        f"the PCIe link ran at generation {gen} with {width} lanes while the GPU was busy; card "
        f"and slot can do generation {max_gen} with {max_width}. Check slot, riser and BIOS "
        "settings; the figures hold for the slower link."
    )
