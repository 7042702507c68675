"""A configuration in few words: names, hash, and the flat parameters and tags of a tracker."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from harness.config.command import key_of
from harness.config.schema import RunConfig, SweepContext
from reports.record.text import flatten

NOT_IDENTITY: Final = (
    "mode",
    "plan",
    "rerun",
    "fail_fast",
    "monotone_stop",
    "timeout_s",
    "silence_s",
    "tracking",
)
"""Settings that change no result."""
_NAME_CHARS: Final = 200
_PARTS: Final = ("load", "throughput", "latency", "serve", "quality")
_SHOWN: Final = ("kv.", "offload.", "engine.", *(f"scenario.{part}." for part in _PARTS))
"""Nodes of which a tracker's parameters have every setting."""
_IF_SET: Final = ("prompts_file", "prompt", "output", "trace", "search")
"""Settings of a scenario that are left out of them where they are null."""


def config_hash(config: Mapping[str, Any]) -> str:
    """Return a hash of the settings that can change a result; the same in every process."""
    kept = {key: value for key, value in config.items() if key not in NOT_IDENTITY}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def point_name(config: RunConfig, overrides: Sequence[str], sweep: SweepContext | None) -> str:
    """Return what reports call the point: in a sweep what varies, else its choices."""
    if sweep is not None:
        varying = [item.lstrip("+") for item in overrides if item not in sweep.shared]
        if varying or sweep.label:
            return " ".join(filter(None, (sweep.label, ",".join(varying))))[:_NAME_CHARS]
    system = "" if config.system.kind == "native" else config.system.kind
    parts = (config.model.name, system, config.offload_name, config.gpu.name, config.scenario.name)
    return "-".join(part for part in parts if part)[:_NAME_CHARS]


def sweep_title(points: Sequence[tuple[RunConfig, Sequence[str]]]) -> str:
    """Return what a sweep asks in few words: its models, what varies, how many points."""
    models = " and ".join(dict.fromkeys(config.model.name for config, _ in points))
    varying = what_varies([overrides for _, overrides in points])
    keys = dict.fromkeys(key_of(item) for own in varying for item in own)
    names = " x ".join(key.replace("/", ".").rpartition(".")[2] for key in keys if key != "model")
    count = f"{len(points)} point{'s'[: len(points) != 1]}"
    return f"{models}: {', '.join(filter(None, [names, count]))}"[:_NAME_CHARS]


def what_varies(points: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the overrides of each point without those that all have, and without their +."""
    common = set.intersection(*map(set, points))
    return [[item.lstrip("+") for item in own if item not in common] for own in points]


def flat_params(config: RunConfig, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return what was chosen, flat; a file of prompts where there is one.

    Each single setting in `overrides` is there too, so that a tracker shows whatever varies.
    """
    gpu = config.gpu
    params: dict[str, Any] = {
        "model": config.model.name,
        "model.load_format": config.model.load_format,
        "system": config.system.kind,
        "gpu": gpu.name,
        "gpu.device": gpu.device,
        "gpu.memory_gib": gpu.memory_gib,
        "offload": config.offload_name,
        "scenario": config.scenario.name,
    }
    if config.model.quantize is not None:
        params["model.quantize"] = config.model.quantize
    every = {key: value for key, value in flatten(config.to_dict()) if value != {}}
    shown = {key: value for key, value in every.items() if key.startswith(_SHOWN)}
    del shown["offload.offload_backend"]  # auto where offload=none, which "offload" says
    params |= {k: v for k, v in shown.items() if v is not None or k.split(".")[-1] not in _IF_SET}
    typed = {key_of(item) for item in overrides}
    return params | {key: every[key] for key in sorted(typed & every.keys()) if key not in params}


def tags(config: RunConfig, environment: Mapping[str, Any]) -> dict[str, str]:
    """Return what a tracker filters by: hash, code, machine, versions; absent facts left out."""
    gpu = environment.get("gpu") or {}
    git = environment.get("git") or {}
    pcie = gpu.get("pcie") or {}
    found = {
        "harness.kind": "point",
        "harness.status": "running",
        "harness.config_hash": config_hash(config.to_dict()),
        "model": config.model.name,
        "system": config.system.kind,
        "offload": config.offload_name,
        "git.sha": git.get("sha"),
        "git.dirty": git.get("dirty"),
        "host": environment.get("host"),
        "gpu.name": gpu.get("name"),
        "gpu.uuid": gpu.get("uuid"),
        "driver": environment.get("driver"),
        "cuda": gpu.get("cuda_driver"),
        "torch": environment.get("torch"),
        "pcie.gen": pcie.get("gen"),
        "pcie.width": pcie.get("width"),
    }
    return {
        key: str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in found.items()
        if value is not None
    }
