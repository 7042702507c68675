"""What is measured: engines to build and the work that each is given. Plain data."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import yaml

from catalogue.files import CONF
from engine.config import (
    EngineConfig,
    EngineSettings,
    GPUConfig,
    KVConfig,
    ModelConfig,
    OffloadConfig,
    PlannerConfig,
    PrefetchOffloadConfig,
    UVAOffloadConfig,
)
from engine.spec import ModelSpec
from harness.bench.kv_work import KVWork
from harness.errors import ConfigError

NEVER: Final = 2**31
"""A staging threshold that no step reaches."""
CHUNKS: Final = (1, 8, 16, 32, 64, 128, 256)
"""Tokens of the steps that in-place reads and staging are compared at."""
FEW_LAYERS: Final = 8
"""Layers of the engines that compare settings with each other, not with a target."""
MOST_UTILIZATION: Final = 0.9
"""What a card's memory may be used up to where less does not hold the largest batch."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one engine is given."""

    batches: tuple[int, ...]
    """Decode batches."""
    prefills: tuple[int, ...] = ()
    """Prompts of `prefill_tokens` that are prefilled at once."""
    chunks: tuple[int, ...] = ()
    """Prompts of these lengths, one after another."""
    counter_s: float = 0.0
    """Decode for so long beside NVML's counter of the link."""
    prompt_tokens: int = 128
    prefill_tokens: int = 2048
    steps: int = 22
    """Decode steps that are timed."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One engine, or a sweep of one setting, and its work."""

    name: str
    title: str
    memory_gib: float
    utilizations: tuple[float, ...]
    """Tried in order: the first whose KV cache holds the work is used."""
    work: Work
    offload: dict[str, Any] = field(default_factory=dict)
    """Fields of OffloadConfig's two nodes, flat."""
    stage_tokens: int | None = None
    kv_tokens: int | None = None
    """Set: placements are chosen beside this KV room."""
    num_layers: int | None = None
    """Set: the model has so many layers instead of its own."""
    sweep: tuple[int, ...] = ()
    """Values of prefetch_step, an engine each; empty: the one of `offload`."""
    kv: dict[str, Any] = field(default_factory=dict)
    """Fields of KVConfig."""
    parts: tuple[str, ...] = ()
    """What is measured of the KV cache (harness.bench.kv_parts), in place of decodes."""
    kv_work: KVWork | None = None
    """Of these parts."""
    max_model_len: int | None = None
    """In place of that of all engines; None and with parts: the model's own."""
    max_num_seqs: int | None = None
    """In place of that of all engines."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for the process that runs it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Case":
        """Read what `to_dict` wrote, also through JSON."""
        work, flat = _tuples(data["work"]), _tuples(data)
        kv_work = flat["kv_work"] and KVWork(**_tuples(flat["kv_work"]))
        return cls(**flat | {"work": Work(**work), "kv_work": kv_work})


def _tuples(data: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What all engines of a table share."""

    model: str = "olmo7b"
    num_layers: int | None = None
    """Set: the model has so many layers instead of its own."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = 4096
    device: str = "auto"


def read_model(name: str, num_layers: int | None = None) -> ModelSpec:
    """Return the sizes of a model of conf/model, with another number of layers where given.

    Raises:
        ConfigError: There is no such model.
    """
    folder = CONF / "model"
    file = folder / f"{name}.yaml"
    if not file.is_file():
        known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
        raise ConfigError(f"--model: expected one of {known}, got {name!r}.")
    spec = yaml.safe_load(file.read_text(encoding="utf-8")).get("spec")
    if not spec or None in spec.values():
        raise ConfigError(f"--model: expected a model with sizes, {name!r} has none.")
    if num_layers is not None:
        spec["num_hidden_layers"] = num_layers
        if spec.get("layer_types"):
            spec["layer_types"] = spec["layer_types"][:num_layers]
    return ModelSpec(**spec)


def engine_config(case: Case, limits: Limits, utilization: float) -> EngineConfig:
    """Return the configuration of a case's engine: random weights of the exact shape."""
    node = dict(case.offload)
    uva = {k: node.pop(k) for k in ("cpu_offload_gb", "cpu_offload_params") if k in node}
    settings: dict[str, Any] = {}
    if case.stage_tokens is not None:
        settings["uva_stage_tokens"] = case.stage_tokens
    planner = PlannerConfig()
    if case.kv_tokens is not None:
        planner = PlannerConfig(choose=True, kv_tokens=case.kv_tokens)
    spec = read_model(limits.model, case.num_layers or limits.num_layers)
    longest = case.max_model_len or (None if case.parts else limits.max_model_len)
    return EngineConfig(
        model=ModelConfig(name=limits.model, load_format="dummy", spec=spec),
        gpu=GPUConfig(memory_gib=case.memory_gib, device=limits.device),
        offload=OffloadConfig(uva=UVAOffloadConfig(**uva), prefetch=PrefetchOffloadConfig(**node)),
        kv=KVConfig(**case.kv),
        engine=EngineSettings(
            gpu_memory_utilization=utilization,
            max_model_len=longest,
            max_num_seqs=case.max_num_seqs or limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            **settings,
        ),
        planner=planner,
    )


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line chose."""

    work: Work
    """Batches and lengths that all engines share."""
    memory_gib: float
    utilization: float
    resident_gib: float
    prefetch: tuple[tuple[int, int, int], ...]
    """Group, number and step of each prefetch engine."""
    uva_gib: tuple[float, ...]
    counter_s: float
    sweep: tuple[int, ...]
    """Values of prefetch_step; empty: from 1 to one more than the layers that are off."""
    num_layers: int


def cases(asked: Asked) -> list[Case]:
    """Return the engines of the table, in order; `chosen` needs the first prefetch engine."""
    small: dict[str, Any] = {
        "memory_gib": asked.memory_gib,
        "utilizations": _utilizations(asked.utilization),
    }
    few = small | {"num_layers": min(FEW_LAYERS, asked.num_layers)}
    one = replace(asked.work, batches=asked.work.batches[:1])
    whole = replace(asked.work, prefills=(1, 4))
    found = _resident_cases(asked)
    for index, split in enumerate(asked.prefetch):
        counter_s = 0.0 if index else asked.counter_s
        found.append(
            Case(
                name=_numbered("prefetch", index),
                title=f"prefetch {'/'.join(map(str, split))}",
                work=replace(whole, counter_s=counter_s),
                offload=_split(split),
                **small,
            )
        )
    for index, size in enumerate(asked.uva_gib):
        found.append(
            Case(
                name=_numbered("uva", index),
                title=f"uva {size:g} GiB",
                work=whole,
                offload={"cpu_offload_gb": size},
                **small,
            )
        )
    if asked.prefetch:
        auto = "offload=auto, the KV room of prefetch"
        found.append(Case(name="chosen", title=auto, work=one, kv_tokens=0, **small))
    for name, stage in (("uva_in_place", NEVER), ("uva_staged", 1)):
        found.append(
            Case(
                name=name,
                title=f"uva, {few['num_layers']} layers, "
                + ("never staged" if stage == NEVER else "always staged"),
                work=replace(asked.work, batches=(), chunks=CHUNKS),
                offload={"cpu_offload_gb": 2.0**10},
                stage_tokens=stage,
                **few,
            )
        )
    return [*found, *_sweep_cases(asked, few, one)]


def _resident_cases(asked: Asked) -> list[Case]:
    large: dict[str, Any] = {"memory_gib": asked.resident_gib, "utilizations": (0.9,)}
    work = replace(asked.work, steps=4 * asked.work.steps)  # steps are short
    return [
        Case(name="resident", title="resident", work=work, **large),
        Case(
            name="embed_in_place",
            title="resident, embedding table in place",
            work=replace(work, batches=work.batches[:1]),
            offload={"cpu_offload_gb": 0.001, "cpu_offload_params": ["embed_tokens"]},
            **large,
        ),
    ]


def _sweep_cases(asked: Asked, few: dict[str, Any], work: Work) -> list[Case]:
    """Every prefetch_step of the first split, at the smallest batch of a model of few layers."""
    if not asked.prefetch:
        return []
    group, num, _ = asked.prefetch[0]
    off = sum(index % group >= group - num for index in range(few["num_layers"]))
    if not off:
        return []
    return [
        Case(
            name="prefetch_step",
            title=f"prefetch {group}/{num}, {few['num_layers']} layers",
            work=work,
            offload=_split((group, num, 1)),
            sweep=asked.sweep or tuple(range(1, off + 2)),
            **few,
        )
    ]


def _utilizations(first: float) -> tuple[float, ...]:
    return (first, MOST_UTILIZATION) if first < MOST_UTILIZATION else (first,)


def _numbered(name: str, index: int) -> str:
    return f"{name}_{index + 1}" if index else name


def _split(split: tuple[int, int, int]) -> dict[str, Any]:
    names = ("offload_group_size", "offload_num_in_group", "offload_prefetch_step")
    return dict(zip(names, split, strict=True))
