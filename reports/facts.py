"""Answers about one record that figures and pages share; missing keys are None, never an error."""

from collections.abc import Mapping
from typing import Final

from reports.record.record import RunRecord
from reports.record.text import GIB, leaf, number

EMULATED: Final = "CPU emulation: not a GPU's figures"
GPU_ITEMS: Final = (
    "weights",
    "prefetch_slots",
    "staging_slots",
    "kv_cache",
    "activations",
    "logits",
    "graphs",
    "runtime",
)
HOST_ITEMS: Final = ("pinned_weights", "pageable_weights")


def dig(tree: object, path: str) -> object:
    """Return the value at a dotted path of nested mappings, None where a key is absent."""
    for key in path.split("."):
        if not isinstance(tree, Mapping):
            return None
        tree = tree.get(key)
    return tree


def dig_number(tree: object, path: str) -> float | None:
    """Return the number at a dotted path, None where there is none."""
    value = dig(tree, path)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def dig_text(tree: object, *paths: str) -> str | None:
    """Return the first text that is not empty at one of the dotted paths."""
    for path in paths:
        value = dig(tree, path)
        if isinstance(value, str) and value:
            return value
    return None


def is_emulated(record: RunRecord) -> bool:
    """Return whether the run's tiers were emulated on the CPU."""
    return True in {record.environment.get("emulated"), record.effective.get("emulated")}


def figure_note(*records: RunRecord) -> str:
    """Return the notice that stands on a figure of these records, empty where a GPU ran all."""
    return EMULATED if any(map(is_emulated, records)) else ""


def gpu_name(record: RunRecord) -> str | None:
    """Return the name of the card that the run used."""
    return dig_text(record.environment, "gpu.name", "gpu_name", "device_name")


def card_bytes(record: RunRecord) -> float | None:
    """Return the memory of the card that the run used."""
    return dig_number(record.environment, "gpu.memory_bytes")


def model_name(record: RunRecord) -> str | None:
    """Return the name of the model that the configuration chose."""
    return dig_text(record.config, "model.name", "model.source", "model")


def routing_words(record: RunRecord) -> str | None:
    """Return what chose the experts of tokens; None for a model without any, or where none says."""
    found = record.effective.get("routing")
    if not isinstance(found, Mapping):
        return None
    reuse = dig_number(found, "measured_reuse")
    measured = "" if reuse is None else f", {100 * reuse:.1f} % reuse measured"
    match found.get("kind"):
        case "router":
            return "the model's router"
        case "dummy":
            return "a random router, without locality"
        case "trace":
            digest = str(found.get("sha256"))[:12]
            return f"a trace of {found.get('trace_model')}, content {digest}{measured}"
        case "synthetic":
            return f"drawn with a reuse of {leaf(found.get('reuse'))}{measured}"
        case other:
            return f"unknown ({other})"


def system_name(record: RunRecord) -> str:
    """Return what answered the requests: native, or a peer."""
    found = dig_text(record.config, "system.kind", "system")
    return found or "native"


def offload_name(record: RunRecord) -> str | None:
    """Return what places weights: none, a backend, swap_space, or auto where that was chosen."""
    config = record.config
    planner = config.get("planner")
    planner = planner if isinstance(planner, Mapping) else {}
    if planner.get("choose") is True:
        return "auto"
    backend = dig_text(config, "offload.offload_backend")
    is_sized = "cpu_offload_gb" in (planner.get("auto_fields") or ())
    if backend != "auto" and not is_sized:
        return backend
    sizes = {
        "prefetch": dig_number(config, "offload.prefetch.offload_group_size"),
        "uva": is_sized or dig_number(config, "offload.uva.cpu_offload_gb"),
        "experts": dig_number(config, "offload.experts.expert_slots"),
        "swap_space": dig_number(config, "kv.swap_space"),
    }
    return next((name for name, size in sizes.items() if size), "none")


def budget_title(record: RunRecord) -> str | None:
    """Return `budget 14.4 GiB (0.9 of 16.0) on NVIDIA H200`, or the card alone without a budget.

    A budget is what the engine may use: memory x gpu_memory_utilization. None where neither is
    known.
    """
    card, whole = gpu_name(record), card_bytes(record)
    asked_gib = dig_number(record.config, "gpu.memory_gib")
    share = dig_number(record.config, "engine.gpu_memory_utilization")
    planned = dig_number(record.plan, "gpu.budget_bytes")
    if asked_gib is not None and share is not None:
        size = f"budget {number(asked_gib * share)} GiB ({share:g} of {number(asked_gib)})"
    elif planned is not None:
        size = f"budget {number(planned / GIB)} GiB"
    else:
        size = "" if asked_gib is None else f"{number(asked_gib)} GiB"
    if is_emulated(record):
        return f"{size}, emulated on the CPU" if size else "emulated on the CPU"
    if asked_gib is None or (whole is not None and asked_gib * GIB >= 0.98 * whole):
        return card if whole is None or card is None else f"{card}, {number(whole / GIB)} GiB"
    return size + (f" on {card}" if card else "")


def items(plan: Mapping[str, object] | None, side: str) -> dict[str, float]:
    """Return name -> bytes of a plan's `gpu` or `host` items, the known names first."""
    found = dig(plan, f"{side}.items")
    if not isinstance(found, Mapping):
        return {}
    known = GPU_ITEMS if side == "gpu" else HOST_ITEMS
    names = [name for name in known if name in found]
    names += [name for name in found if name not in known]
    sizes = numbers(found)
    return {name: sizes[name] for name in map(str, names) if name in sizes}


def total_bytes(plan: Mapping[str, object] | None, side: str) -> float | None:
    """Return a plan's total on one side: as recorded, else the sum of its items."""
    total = dig_number(plan, f"{side}.total_bytes")
    if total is not None:
        return total
    parts = items(plan, side)
    return sum(parts.values()) if parts else None


def over_budget_bytes(plan: Mapping[str, object] | None) -> float:
    """Return by how much a plan's GPU total is over its budget, 0 where it fits."""
    total, budget = total_bytes(plan, "gpu"), dig_number(plan, "gpu.budget_bytes")
    if total is None or budget is None:
        return 0.0
    return max(0.0, total - budget)


def link_bound_ms(record: RunRecord) -> float | None:
    """Return the step time in ms that the measured link allows, None where it is unknown."""
    step_bytes = record.metrics.get("offload/bytes_per_step")
    if step_bytes is None:
        step_bytes = dig_number(record.plan, "bytes_per_step")
    link_gb_s = record.metrics.get("link/h2d_gb_s")
    if not step_bytes or not link_gb_s or is_emulated(record):
        return None
    return step_bytes / link_gb_s / 1e6


def numbers(found: object) -> dict[str, float]:
    """Return the entries of a mapping that are numbers, empty where it is no mapping."""
    if not isinstance(found, Mapping):
        return {}
    return {
        str(key): float(value)
        for key, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def rows(record: RunRecord, part: str) -> list[Mapping[str, object]]:
    """Return the sample rows of a part: a list of objects, or what it holds as `requests`."""
    samples = record.samples.get(part)
    found = samples.get("requests") if isinstance(samples, Mapping) else samples
    return [row for row in found if isinstance(row, Mapping)] if isinstance(found, list) else []


def complete_rows(record: RunRecord) -> list[Mapping[str, object]]:
    """Return the latency rows of the requests that did not fail."""
    return [row for row in rows(record, "latency") if row.get("error") is None]


def latency_values(record: RunRecord, key: str) -> list[float]:
    """Return one latency column of the requests that did not fail, `itl_ms` pooled."""
    values: list[float] = []
    for row in complete_rows(record):
        found = row.get(key)
        cells = found if isinstance(found, list) else [found]
        values += [
            cell for cell in cells if isinstance(cell, int | float) and not isinstance(cell, bool)
        ]
    return values
