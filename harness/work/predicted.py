"""What the plan predicted of a scenario, beside what was measured, and what no link can carry."""

from collections.abc import Mapping
from typing import Any, Final

from engine.plan.queue import queue_s
from engine.plan.times import Rates, decode_step_s, first_token_s, shape_of
from engine.sealed import GIB
from harness.config.schema import RequestSet, ScenarioConfig
from harness.work.drive import StepTotals
from reports.record.metrics import PREDICTED

LINK_TOLERANCE: Final = 0.05
"""Share by which a run may exceed the link's probed rate before it is not believed."""
LINK_RATES: Final = (
    "link/h2d_gb_s",
    "link/in_place_gb_s",
    "link/h2d_after_gb_s",
    "link/in_place_after_gb_s",
)


def predicted_times(plan: Any, spec: Any, scenario: ScenarioConfig) -> dict[str, float | None]:
    """Return what the plan predicts of the parts with requests of one length, by metric.

    Args:
        plan: the memory plan in force; its rates are used.
        spec: sizes of the model.
        scenario: what is measured.
    """
    found: dict[str, float | None] = {"predicted/gpu_peak_gib": plan.gpu_total_bytes / GIB}
    shape, rates = shape_of(plan, spec), Rates(**plan.predicted["rates"])
    if (one := scenario.latency) is not None and _has_one_length(one):
        context = one.prompt_tokens + one.output_tokens / 2
        found["predicted/tpot_ms"] = decode_step_s(shape, rates, 1, context) * 1e3
        found["predicted/ttft_ms"] = first_token_s(shape, rates, one.prompt_tokens) * 1e3
    if (many := scenario.throughput) is not None and _has_one_length(many):
        total_s = queue_s(shape, rates, many.num_requests, many.prompt_tokens, many.output_tokens)
        found["predicted/output_tok_s"] = many.num_requests * many.output_tokens / total_s
    return found


def _has_one_length(part: RequestSet) -> bool:
    return part.prompts_file is None


def differences(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return by how much each prediction exceeds what was measured, %."""
    found: dict[str, float | None] = {}
    for quantity, base in PREDICTED.items():
        predicted = metrics.get(f"predicted/{quantity}")
        measured = measured_of(metrics, base)
        if predicted is not None and measured:
            found[f"predicted/{quantity}_difference_pct"] = 100 * (predicted / measured - 1)
    return found


def measured_of(metrics: Mapping[str, float | None], base: str) -> float | None:
    """Return a measured metric: its median, else its mean, else itself."""
    names = (f"{base}/p50", f"{base}/mean", base)
    return next((value for name in names if (value := metrics.get(name)) is not None), None)


def link_reasons(timed: Mapping[str, StepTotals], metrics: Mapping[str, float | None]) -> list[str]:
    """Return a reason for each part whose decode moved more bytes a second than the link carries.

    Args:
        timed: sums over the steps by part.
        metrics: with the rates of the probes.
    """
    rates = [rate for name in LINK_RATES if (rate := metrics.get(name))]
    if not rates:
        return []
    found = []
    for part, totals in timed.items():
        moved, seconds = totals.decode_moved_bytes, totals.decode_s
        if moved <= max(rates) * 1e9 * seconds * (1 + LINK_TOLERANCE):
            continue
        count = totals.num_decode_steps
        found.append(
            f"{part}: {moved / count:,.0f} bytes from host to device per decode step in "
            f"{seconds / count * 1e3:.3g} ms are {moved / seconds / 1e9:.1f} GB/s, but the link "
            f"carried at most {max(rates):.1f} GB/s when it was probed. The bytes, the clock or "
            "the probe are wrong: these rates are not to be used."
        )
    return found
