"""What crossed the host link in decode: counted, planned, and as a share of what the link carries.

All of it goes from host to device: copied, or read in place by the device.
"""

from collections.abc import Mapping
from typing import Any, Final

from engine.sealed import GIB
from harness.work.drive import StepTotals, ratio


def memory_metrics(memory: Mapping[str, Any]) -> tuple[dict[str, float | None], list[str]]:
    """Return metrics of an engine's memory, and reasons not to use the run.

    Args:
        memory: as the engine tells it, bytes.
    """
    peak, budget = memory.get("gpu_peak_bytes"), memory.get("gpu_budget_bytes")
    metrics: dict[str, float | None] = {
        name: None if value is None else value / GIB
        for name, value in (
            ("memory/gpu_peak_gib", peak),
            ("memory/gpu_allocated_gib", memory.get("gpu_allocated_bytes")),
            ("memory/gpu_budget_gib", budget),
            ("memory/host_pinned_gib", memory.get("host_pinned_bytes")),
        )
    }
    if peak is None or budget is None:
        return metrics, []
    metrics["memory/budget_margin_gib"] = (budget - peak) / GIB
    if peak <= budget:
        return metrics, []
    reason = (
        f"memory: the GPU peak of {peak / GIB:.3f} GiB is over the budget of "
        f"{budget / GIB:.3f} GiB. Lower engine.gpu_memory_utilization and report this."
    )
    return metrics, [reason]


LARGEST_GAP: Final = 0.01
"""Share by which counted and planned bytes may differ."""
LARGEST_CHANGE: Final = 0.05
"""Change of the link's rate during a run that is not worth a note."""
PROBED_AFTER: Final = {
    f"{name}_gb_s": f"link/{name}_after_gb_s"
    for name in ("h2d", "d2h", "two_way", "in_place", "hbm_copy")
}
"""Rate of the probe -> metric of the probe after the scenarios."""


def transfer_metrics(
    totals: StepTotals, metrics: Mapping[str, float | None]
) -> dict[str, float | None]:
    """Return bytes per step that only decodes, by way, counted and planned, and the link's share.

    Args:
        totals: of the last timed part.
        metrics: with the rates of the probes.
    """
    count = totals.num_decode_steps
    found: dict[str, float | None] = {
        f"offload/{name}_per_step": total / count if count else None
        for name, total in (
            ("bytes", totals.decode_moved_bytes),
            ("copied_bytes", totals.decode_copied_bytes),
            ("in_place_bytes", totals.decode_read_bytes),
            ("planned_bytes", totals.planned_moved_bytes),
            ("planned_copied_bytes", totals.planned_copied_bytes),
            ("planned_in_place_bytes", totals.planned_read_bytes),
        )
    }
    used_gb_s = ratio(totals.decode_moved_bytes / 1e9, totals.decode_s) if count else None
    probed = (metrics.get("link/h2d_gb_s"), metrics.get(PROBED_AFTER["h2d_gb_s"]))
    rates = [rate for rate in probed if rate]
    mean = sum(rates) / len(rates) if rates else None
    found["link/share"] = used_gb_s / mean if used_gb_s and mean else None
    return found


def transfer_reasons(totals: StepTotals) -> list[str]:
    """Return one reason where the engine moved other bytes than its plan says."""
    counted, planned = totals.decode_moved_bytes, totals.planned_moved_bytes
    if abs(counted - planned) <= LARGEST_GAP * planned:
        return []
    count = totals.num_decode_steps
    return [
        f"offload: the engine counted {counted / count:,.0f} bytes from host to device per decode "
        f"step, its plan says {planned / count:,.0f}: they differ by more than "
        f"{LARGEST_GAP:.0%}. One of the two is wrong; report this."
    ]


def link_notes(metrics: Mapping[str, float | None]) -> list[str]:
    """Return one note where the link's rate changed between the probes before and after."""
    before, after = metrics.get("link/h2d_gb_s"), metrics.get(PROBED_AFTER["h2d_gb_s"])
    if not before or not after or abs(after - before) <= LARGEST_CHANGE * before:
        return []
    return [
        f"link: {before:.1f} GB/s host to device before the scenarios, {after:.1f} after them. "
        "Something else used the link; link/share is over the mean."
    ]
