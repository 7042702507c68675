"""Formats that weights can be planned in: which tensors are kept in codes, and why not others."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from engine.asked.config import EngineConfig
from engine.errors import ConfigError
from engine.model.formats import NO_FORMATS, Format
from engine.model.lossless import lossless_formats, why_plain
from engine.model.spec import ModelSpec
from engine.plan.cards import DeviceFacts
from engine.plan.memory import Asked, MemoryPlan
from engine.plan.policy import Assignment, spread_layers
from engine.plan.queue import QUEUE_REQUESTS
from engine.sealed import GIB
from kernels.sizes import LEAST_CAPABILITY

PLAIN: Final = "checkpoint"
LOSSLESS: Final = "lossless"
MIXED: Final = "mixed"
"""Words of plans and records for all plain, all in codes that gain, and some of both."""
NOTHING_KNOWN: Final[Mapping[str, str]] = MappingProxyType({})
"""What is known of a checkpoint in which no load found tensors that codes cannot hold."""


def ways(
    word: str,
    spec: ModelSpec,
    dtype: str,
    facts: DeviceFacts,
    unpackable: Mapping[str, str],
) -> dict[str, Mapping[str, Format]]:
    """Return the formats of tensors to plan with, by weight format; plain before lossless.

    Raises:
        ConfigError: lossless was asked for, and this model, dtype or card has no use of it.
    """
    if word == PLAIN:
        return {PLAIN: NO_FORMATS}
    capability, lack = facts.compute_capability, ""
    fitting = lossless_formats(spec, dtype).others
    if capability is not None and capability < LEAST_CAPABILITY:
        lack = (
            f"a card of compute capability {'.'.join(map(str, LEAST_CAPABILITY))} or more, got "
            f"{'.'.join(map(str, capability))} of {facts.name}"
        )
    elif dtype != "bfloat16":
        lack = f"weights that are computed with in bfloat16, got {dtype}"
        if spec.dtype == "bfloat16":
            lack += " (engine.dtype=bfloat16 keeps those of the checkpoint)"
    elif not fitting:
        lack = (
            "a matrix of a multiple of 16 rows and of 64 columns that takes less in codes, got "
            f"none in this {spec.model_type} model"
        )
    if lack and word == LOSSLESS:
        raise ConfigError(
            f"engine.weight_format=lossless: expected {lack}. Set engine.weight_format=checkpoint, "
            "or auto."
        )
    lossless = {name: each for name, each in fitting.items() if name not in unpackable}
    if word == LOSSLESS:
        return {LOSSLESS: lossless}
    return {PLAIN: NO_FORMATS} | ({} if lack or not lossless else {LOSSLESS: lossless})


def in_codes(asked: Asked) -> Asked | None:
    """Return the same question with lossless weights; None: they are of no use, or ruled out."""
    config = asked.config
    is_set = config.engine.weight_format is not None or config.model.quantize is not None
    if is_set or asked.tensor_formats or asked.reference:
        return None
    found = ways("auto", asked.spec, asked.dtype, asked.facts, asked.unpackable)
    if LOSSLESS not in found:
        return None
    config = replace(config, engine=replace(config.engine, weight_format=LOSSLESS))
    return replace(asked, config=config, tensor_formats=found[LOSSLESS])


FASTER_PLAIN: Final = "predicted to be faster so"
"""Why a mix leaves a matrix plain that codes could hold."""
SHARES: Final = 4
"""Parts of the layers that mixes are first tried with; then halves of a part around the best."""


def best_mix(
    asked: Asked, assignment: Assignment, seconds: Callable[[Asked, Assignment], float]
) -> Asked | None:
    """Return the fastest question in which some tensors are in codes and others plain.

    What leaves the GPU is in codes: the link is slower than restoring. Of what stays, so many
    layers are, at even distances, and the head or not.

    Args:
        asked: The same with all in codes that gain.
        assignment: Where tensors are.
        seconds: What the objective takes; infinite where it does not fit.

    Returns:
        The question; None: no mix fits.
    """
    spec, every = asked.spec, asked.tensor_formats
    num_layers, outer = spec.num_hidden_layers, {t.name for t in spec.outer_tensors()} & set(every)
    moved = [name for name, place in assignment.placements.items() if place.is_offloaded]
    tried: dict[tuple[int, bool], tuple[float, Asked]] = {}

    def at(key: tuple[int, bool]) -> float:
        """Try so many layers, with what is outside of them or without."""
        if key not in tried:
            taken = {
                t.name for i in spread_layers(num_layers, key[0]) for t in spec.layer_tensors(i)
            }
            mix = _in_codes_are(asked, taken.union(moved, outer if key[1] else ()))
            is_one = len(mix.tensor_formats) in {0, len(every)}
            tried[key] = math.inf if is_one else seconds(mix, assignment), mix
        return tried[key][0]

    width = -(-num_layers // SHARES)
    counts = {*range(0, num_layers, width), num_layers}
    best = min(((count, x) for count in sorted(counts) for x in {True, not outer}), key=at)
    while (width := width // 2) and at(best) < math.inf:
        low, high = max(0, best[0] - width), min(num_layers, best[0] + width)
        best = min((best, (low, best[1]), (high, best[1])), key=at)
    found_s, found = min(tried.values(), key=lambda item: item[0])
    return found if found_s < math.inf else None


def layers_alone(asked: Asked) -> Asked | None:
    """Return the question with nothing in codes but layers; None: that takes as much room.

    To restore a head for many tokens may take more room than its codes save.
    """
    spec = asked.spec
    layers = range(spec.num_hidden_layers)
    mix = _in_codes_are(asked, {t.name for index in layers for t in spec.layer_tensors(index)})
    sizes = [
        each.formats.total_bytes(spec.tensors()) + sum(each.restore_items.values())
        for each in (asked, mix)
    ]
    return mix if sizes[1] < sizes[0] else None


def _in_codes_are(asked: Asked, names: Collection[str]) -> Asked:
    """Return the question with these tensors in codes alone, of those that were."""
    formats = {name: form for name, form in asked.tensor_formats.items() if name in names}
    return replace(asked, tensor_formats=formats)


CODES_WORTH: Final = 1.02
"""How much faster weights in codes must be predicted to be where auto takes them and both fit."""


def better(plans: Mapping[str, MemoryPlan], config: EngineConfig) -> tuple[str, str]:
    """Return the weight format whose plan is better, and why.

    What was chosen of planner.auto_fields counts first, then what planner.objective says.
    """
    chosen, *more = plans
    asked = config.weight_format
    if asked != "auto":
        return chosen, "engine.weight_format sets it"
    what, unit, times = _times(plans, config.planner.objective)
    limits = {name: (plan.max_num_seqs, plan.max_model_len) for name, plan in plans.items()}
    for name in more:
        is_faster = times[chosen] >= CODES_WORTH * times[name]
        if limits[name] > limits[chosen] or (limits[name] == limits[chosen] and is_faster):
            chosen = name
    lacking = "" if PLAIN in plans else "plain weights do not fit"
    if not more:
        return chosen, lacking or "no other format fits or is of use here"
    if len(set(limits.values())) > 1 and limits[chosen] == max(limits.values()):
        return chosen, lacking or "more or longer sequences fit"
    words = {name: "plain" if name == PLAIN else name for name in plans}
    taken = ", ".join(f"{times[name]:.3g} {unit} {words[name]}" for name in plans)
    moved = ", ".join(
        f"{plan.bytes_per_step() / GIB:.2f} GiB over the link a step {words[name]}"
        for name, plan in plans.items()
        if plan.bytes_per_step()
    )
    rates = (plans[chosen].predicted or {})["rates"]["source"]
    why = "; ".join(filter(None, (lacking, f"{what} takes {taken}", moved)))
    return chosen, f"{why} (predicted; {rates})"


def _times(plans: Mapping[str, MemoryPlan], objective: str) -> tuple[str, str, dict[str, float]]:
    """Return what the objective counts, its unit, and the time of each plan."""
    found = {name: plan.predicted or {} for name, plan in plans.items()}
    if objective == "throughput":
        times = {name: each["queue"]["total_s"] for name, each in found.items()}
        return f"a queue of {QUEUE_REQUESTS} requests", "s", times
    is_long = objective == "context"
    key = "decode_step_long_ms" if is_long else "decode_step_ms"
    what = "a decode step at the end of the longest sequence" if is_long else "a decode step"
    return f"{what} at batch 1", "ms", {name: each[key] for name, each in found.items()}


def stored(asked: Asked) -> dict[str, Any]:
    """Return bytes by format as plain data, and which matrices stay plain and why."""
    formats, plain = asked.formats, asked.formats.default
    totals: dict[str, dict[str, Any]] = {}
    kept: dict[str, list[str]] = defaultdict(list)
    for tensor in asked.spec.tensors():
        each = formats[tensor.name]
        total = totals.setdefault(each.name, {"tensors": 0, "bytes": 0, "plain_bytes": 0})
        total["tensors"] += 1
        total["bytes"] += each.num_bytes(tensor)
        total["plain_bytes"] += plain.num_bytes(tensor)
        if formats.others and each is plain and len(tensor.shape) == 2:
            why = why_plain(tensor, asked.spec, asked.dtype) or asked.unpackable.get(tensor.name)
            kept[why or FASTER_PLAIN].append(tensor.name)
    for total in totals.values():
        total["ratio"] = total["bytes"] / total["plain_bytes"]
    stored, whole = (sum(t[name] for t in totals.values()) for name in ("bytes", "plain_bytes"))
    return {"formats": totals, "ratio": stored / whole, "plain_matrices": dict(kept)}
