"""What a record cannot have measured: one request decoding faster than its weights can arrive."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeGuard

from reports.record.record import RunRecord
from reports.record.text import GIB, gib, number

TOLERANCE: Final = 0.05
"""Share by which a run may exceed the link's rate before it is not believed."""
LINK_RATES: Final = (
    "link/h2d_gb_s",
    "link/in_place_gb_s",
    "link/h2d_after_gb_s",
    "link/in_place_after_gb_s",
)
"""Metrics with what the link carried when it was probed."""
LANE_GB_S: Final[Mapping[int, float]] = MappingProxyType(
    {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
)
"""PCIe generation -> GB/s of one lane before packet headers, which nothing exceeds."""


def impossible_rate(record: RunRecord) -> str:
    """Return why a run's single-stream rate cannot be, empty where it can or nothing is known.

    Empty, too, where the record's own reasons say so.

    Each token of a request that runs alone takes all offloaded weights over the link once, so
    tokens a second are at most the link's rate / the offloaded bytes. It holds for every system:
    bytes are those that the engine counted, else those of the plan, else those that the system
    says it keeps in host memory, else those that were asked for.
    """
    tpot_ms = record.metrics.get("latency/tpot_ms/p50") or record.metrics.get(
        "latency/tpot_ms/mean"
    )
    size, words = offloaded_bytes(record)
    rate, source = link_gb_s(record)
    if not tpot_ms or not size or not rate or record.environment.get("emulated") is True:
        return ""
    measured, bound = 1000 / tpot_ms, rate * 1e9 / size
    is_said = any(text.startswith("latency:") and "the link c" in text for text in record.reasons)
    if is_said or measured <= bound * (1 + TOLERANCE):
        return ""
    return (
        f"latency: {number(measured)} tokens/s of one request are impossible: {gib(size)} "
        f"{words} for each token, and the link carries {number(rate)} GB/s ({source}), which is "
        f"{number(bound)} tokens/s at most. The offload did not take place, or the clock or the "
        "bytes are wrong: do not use these rates."
    )


def offloaded_bytes(record: RunRecord) -> tuple[float | None, str]:
    """Return the bytes that cross the link for each token of one request, and where from."""
    placed = record.effective.get("placement_bytes")
    away = {k: v for k, v in placed.items() if k != "resident"} if _is_tree(placed) else {}
    asked_gib = _number(_dig(record.config, "offload", "uva", "cpu_offload_gb"))
    for size, words in (
        (record.metrics.get("offload/bytes_per_step"), "were counted"),
        (_number(_dig(record.plan, "bytes_per_step")), "are planned"),
        (sum(filter(None, map(_number, away.values()))) or None, "are in host memory"),
        (_number(record.effective.get("host_pinned_bytes")) or None, "are in host memory"),
        (asked_gib * GIB if asked_gib else None, "were to be in host memory"),
    ):
        if size is not None:
            return size, words
    return None, ""


def link_gb_s(record: RunRecord) -> tuple[float | None, str]:
    """Return the highest rate that the link is known to carry in GB/s, and how it is known."""
    probed = [rate for name in LINK_RATES if (rate := record.metrics.get(name))]
    if probed:
        return max(probed), "as probed"
    pcie = _dig(record.environment, "gpu", "pcie")
    facts = pcie if _is_tree(pcie) else {}
    gen, width = (
        _number(facts.get(f"max_{key}")) or _number(facts.get(key)) for key in ("gen", "width")
    )
    lane = LANE_GB_S.get(int(gen)) if gen else None
    return (lane * width, f"PCIe {gen:.0f} x{width:.0f}") if lane and width else (None, "")


def _dig(tree: object, *path: str) -> object:
    for key in path:
        tree = tree.get(key) if _is_tree(tree) else None
    return tree


def _is_tree(value: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(value, Mapping)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)
