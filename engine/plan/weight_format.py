"""Formats that weights can be planned in: which tensors are kept in codes, and why not others."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from engine.errors import ConfigError
from engine.model.formats import NO_FORMATS, Format
from engine.model.lossless import lossless_formats, why_plain
from engine.model.spec import ModelSpec
from engine.plan.memory import Asked, DeviceFacts
from kernels.sizes import LEAST_CAPABILITY

NOTHING_KNOWN: Final[Mapping[str, str]] = MappingProxyType({})
"""Of a checkpoint that no load found tensors in that codes cannot hold."""


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
    if word == "checkpoint":
        return {"checkpoint": NO_FORMATS}
    capability, lack = facts.compute_capability, ""
    fitting = lossless_formats(spec, dtype).others
    if dtype != "bfloat16":
        lack = f"weights that are computed with in bfloat16, got {dtype}"
        if spec.dtype == "bfloat16":
            lack += " (engine.dtype=bfloat16 keeps those of the checkpoint)"
    elif not fitting:
        lack = (
            "a matrix of a multiple of 16 rows and of 64 columns that takes less in codes, got "
            f"none in this {spec.model_type} model"
        )
    elif capability is not None and capability < LEAST_CAPABILITY:
        lack = (
            f"a card of compute capability {'.'.join(map(str, LEAST_CAPABILITY))} or more, got "
            f"{'.'.join(map(str, capability))} of {facts.name}"
        )
    if lack and word == "lossless":
        raise ConfigError(
            f"engine.weight_format=lossless: expected {lack}. Set engine.weight_format=checkpoint, "
            "or auto."
        )
    lossless = {name: each for name, each in fitting.items() if name not in unpackable}
    if word == "lossless":
        return {"lossless": lossless}
    return {"checkpoint": NO_FORMATS} | ({} if lack or not lossless else {"lossless": lossless})


def in_codes(asked: Asked) -> Asked | None:
    """Return the same question with lossless weights; None: they are of no use, or ruled out."""
    if asked.config.engine.weight_format is not None or asked.tensor_formats or asked.reference:
        return None
    found = ways("auto", asked.spec, asked.dtype, asked.facts, asked.unpackable)
    if "lossless" not in found:
        return None
    engine = replace(asked.config.engine, weight_format="lossless")
    config = replace(asked.config, engine=engine)
    return replace(asked, config=config, tensor_formats=found["lossless"])


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
            why = why_plain(tensor, asked.spec, asked.dtype) or asked.unpackable[tensor.name]
            kept[why].append(tensor.name)
    for total in totals.values():
        total["ratio"] = total["bytes"] / total["plain_bytes"]
    stored, whole = (sum(t[name] for t in totals.values()) for name in ("bytes", "plain_bytes"))
    return {"formats": totals, "ratio": stored / whole, "plain_matrices": dict(kept)}
