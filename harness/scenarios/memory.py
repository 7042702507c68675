"""Memory of an engine after its work: metrics, and whether it kept its budget."""

from collections.abc import Mapping
from typing import Any, Final

GIB: Final = 2**30


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
