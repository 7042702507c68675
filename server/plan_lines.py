"""What fits and what it costs, in the lines that the server prints before it loads."""

from typing import TYPE_CHECKING

from engine.sealed import GIB
from server.flags import as_flags

if TYPE_CHECKING:
    from engine.plan.memory import MemoryPlan


def plan_lines(plan: "MemoryPlan") -> list[str]:
    """Return the plan's figures: memory of both sides, room for tokens, predicted times."""
    placed = plan.placed_bytes()
    host = sum(placed.values()) - placed["resident"]
    where = f"{placed['resident'] / GIB:.2f} GiB on the GPU"
    if host:
        del placed["resident"]
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in placed.items() if size)
        where += f", {host / GIB:.2f} GiB in host memory ({parts})"
    emulated = " (emulated in host memory: there is no GPU)" if plan.facts.emulated else ""
    lines = [
        f"GPU: {plan.gpu_total_bytes / GIB:.2f} of {plan.gpu_budget_bytes / GIB:.2f} GiB, "
        f"{plan.facts.name}{emulated}; host: {plan.host_total_bytes / GIB:.2f} GiB",
        f"weights: {where}, {plan.dtype}",
        f"KV cache: {plan.kv_tokens:,} tokens on the GPU in {plan.gpu_items['kv_cache'] / GIB:.2f} "
        f"GiB{_host_kv(plan)}; longest sequence {plan.max_model_len:,} tokens",
    ]
    found = plan.predicted or {}
    if (step_ms := found.get("decode_step_ms")) is not None:
        source = (found.get("rates") or {}).get("source", "")
        lines.append(
            f"predicted: {step_ms:.1f} ms a token at batch 1, "
            f"{found.get('decode_tokens_full_s') or 0:.0f} tokens/s at batch "
            f"{found.get('full_batch')}{f' ({source})' if source else ''}"
        )
    return [*lines, *(f"note: {as_flags(note)}" for note in plan.notes)]


def _host_kv(plan: "MemoryPlan") -> str:
    size = plan.host_items.get("pinned_kv", 0) + plan.host_items.get("pageable_kv", 0)
    return f", {size / GIB:.2f} GiB in host memory" if size else ""
