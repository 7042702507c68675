"""What a run measured beside what its plan and the probes say: memory, bytes on the link, times."""

from collections.abc import Mapping
from typing import Any, Final

from engine.plan.queue import queue_s
from engine.plan.rates import Rates
from engine.plan.times import decode_step_s, prefill_s, shape_of
from engine.sealed import GIB
from harness.config.schema import ScenarioConfig
from harness.work.drive import StepTotals, ratio
from reports.record.judging import LINK_RATES, TOLERANCE
from reports.record.metrics import PREDICTED


def predicted_times(plan: Any, spec: Any, scenario: ScenarioConfig) -> dict[str, float | None]:
    """Return what the plan predicts of the parts with requests of one length, by metric."""
    found: dict[str, float | None] = {"predicted/gpu_peak_gib": plan.gpu_total_bytes / GIB}
    shape = shape_of(plan, spec, Rates(**plan.predicted["rates"]))
    if (one := scenario.latency) is not None and one.prompts_file is None:
        context = one.prompt_tokens + one.output_tokens / 2
        found["predicted/tpot_ms"] = decode_step_s(shape, 1, context) * 1e3
        found["predicted/ttft_ms"] = prefill_s(shape, one.prompt_tokens) * 1e3
    if (many := scenario.throughput) is not None and many.prompts_file is None:
        total_s = queue_s(shape, many.num_requests, many.prompt_tokens, many.output_tokens)
        found["predicted/output_tok_s"] = many.num_requests * many.output_tokens / total_s
    return found


def differences(
    metrics: Mapping[str, float | None], *, emulated: bool = False
) -> dict[str, float | None]:
    """Return by how much each prediction exceeds the median or mean that was measured, %.

    The peak of an emulated GPU is the plan's own sum, so it is held against nothing.
    """
    found: dict[str, float | None] = {}
    for quantity, base in PREDICTED.items():
        if emulated and quantity == "gpu_peak_gib":
            continue
        predicted = metrics.get(f"predicted/{quantity}")
        names = (f"{base}/p50", f"{base}/mean", base)
        measured = next((value for name in names if (value := metrics.get(name)) is not None), None)
        if predicted is not None and measured:
            found[f"predicted/{quantity}_difference_pct"] = 100 * (predicted / measured - 1)
    return found


def link_reasons(timed: Mapping[str, StepTotals], metrics: Mapping[str, float | None]) -> list[str]:
    """Return a reason for each part whose decode moved more bytes than the link can carry."""
    rates = [rate for name in LINK_RATES if (rate := metrics.get(name))]
    if not rates:
        return []
    found = []
    for part, totals in timed.items():
        moved, seconds = totals.decode_moved_bytes, totals.decode_s
        if moved <= max(rates) * 1e9 * seconds * (1 + TOLERANCE):
            continue
        count = totals.num_decode_steps
        found.append(
            f"{part}: {moved / count:,.0f} bytes from host to device per decode step in "
            f"{seconds / count * 1e3:.3g} ms are {moved / seconds / 1e9:.1f} GB/s, but the link "
            f"carried at most {max(rates):.1f} GB/s when it was probed. The bytes, the clock or "
            "the probe are wrong: these rates are not to be used."
        )
    return found


def memory_metrics(memory: Mapping[str, Any]) -> tuple[dict[str, float | None], list[str]]:
    """Return metrics of an engine's memory, and reasons not to use the run."""
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


def probed_h2d_gb_s(metrics: Mapping[str, float | None]) -> float:
    """Return the mean of the link's rates before and after the scenarios; 0 where neither is."""
    probed = (metrics.get("link/h2d_gb_s"), metrics.get(PROBED_AFTER["h2d_gb_s"]))
    rates = [rate for rate in probed if rate]
    return sum(rates) / len(rates) if rates else 0.0


def kv_link_share(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the share of the link that KV took, where both are known."""
    if "kv/h2d_gb_s" not in metrics:
        return {}
    return {"kv/link_share": ratio(metrics["kv/h2d_gb_s"] or 0.0, probed_h2d_gb_s(metrics))}


def bytes_by_way(totals: StepTotals, metrics: Mapping[str, float | None]) -> tuple[int, int]:
    """Return what a part moved from host to device: bytes copied, bytes that kernels read there.

    `metrics` has those of its KV cache. Weights and experts are those of decode steps.
    """
    copied_gib = ("kv/loaded_gib", "kv/copied_ahead_gib", "kv/staged_prefill_gib")
    copied = sum(metrics.get(name) or 0.0 for name in copied_gib) * GIB
    in_place = (metrics.get("kv/in_place_gib") or 0.0) * GIB + totals.decode_expert_bytes
    return round(copied) + totals.decode_copied_bytes, round(in_place) + totals.decode_read_bytes


def transfer_metrics(
    totals: StepTotals, metrics: Mapping[str, float | None]
) -> dict[str, float | None]:
    """Return bytes per decode step by way, counted and planned, and the link's share."""
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
    probed_gb_s = probed_h2d_gb_s(metrics)
    found["link/share"] = used_gb_s / probed_gb_s if used_gb_s and probed_gb_s else None
    return found


def expert_metrics(
    totals: StepTotals, planned: Mapping[str, Any] | None
) -> dict[str, float | None]:
    """Return what decode steps found of their experts on the GPU, and what crossed the link.

    Args:
        totals: Over steps.
        planned: What the plan says of experts; None: the model has none.

    Returns:
        Nothing where all experts lie on the GPU, or are copied there with their layers.
    """
    if not planned or not any(planned["expert_bytes"]):
        return {}
    hits, misses = totals.decode_expert_hits, totals.decode_expert_misses
    count, used = totals.num_decode_steps, hits + misses
    return {
        "experts/hit_share": hits / used if used else None,
        "experts/hits_per_step": hits / count if count else None,
        "experts/misses_per_step": misses / count if count else None,
        "experts/bytes_per_step": totals.decode_expert_bytes / count if count else None,
        "experts/planned_hit_share": planned.get("hit_share"),
        "experts/planned_bytes_per_step": planned.get("bytes_per_step"),
    }


def transfer_reasons(totals: StepTotals) -> list[str]:
    """Return one reason where the engine moved other bytes than its plan says.

    What crosses the link for experts depends on the tokens, and is held against nothing.
    """
    counted = totals.decode_copied_bytes + totals.decode_read_bytes
    planned = totals.planned_moved_bytes
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
