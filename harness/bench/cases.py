"""What is measured: engines to build and the work that each is given. Plain data."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import yaml

from engine.config import (
    EngineConfig,
    EngineSettings,
    GPUConfig,
    ModelConfig,
    OffloadConfig,
    PlannerConfig,
    PrefetchOffloadConfig,
    UVAOffloadConfig,
)
from engine.spec import ModelSpec
from harness.errors import ConfigError

CONF: Final = Path(__file__).resolve().parents[2] / "conf" / "model"
NEVER: Final = 2**31
"""A staging threshold that no step reaches."""
STAGE_TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Steps that in-place reads and staging are compared at."""


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
    steps: int = 24
    """Decode steps that are timed."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One engine and its work."""

    name: str
    title: str
    memory_gib: float
    utilization: float
    work: Work
    offload: dict[str, Any] = field(default_factory=dict)
    """Fields of OffloadConfig's two nodes, flat."""
    stage_tokens: int | None = None
    kv_tokens: int | None = None
    """Set: placements are chosen beside this KV room."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for the process that runs it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Case":
        """Read what `to_dict` wrote."""
        work: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in data["work"].items()
        }
        return cls(**data | {"work": Work(**work)})


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that all engines of a table share."""

    model: str = "olmo7b"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = 4096
    device: str = "auto"


def read_model(name: str) -> ModelSpec:
    """Return the sizes of a model of conf/model.

    Raises:
        ConfigError: There is no such model.
    """
    file = CONF / f"{name}.yaml"
    if not file.is_file():
        known = ", ".join(sorted(path.stem for path in CONF.glob("*.yaml")))
        raise ConfigError(f"--model: expected one of {known}, got {name!r}.")
    spec = yaml.safe_load(file.read_text()).get("spec")
    if not spec or None in spec.values():
        raise ConfigError(f"--model: expected a model with sizes, {name!r} has none.")
    return ModelSpec(**spec)


def engine_config(case: Case, limits: Limits) -> EngineConfig:
    """Return the configuration of a case's engine: random weights of the exact shape."""
    node = dict(case.offload)
    uva = {k: node.pop(k) for k in ("cpu_offload_gb", "cpu_offload_params") if k in node}
    settings: dict[str, Any] = {}
    if case.stage_tokens is not None:
        settings["uva_stage_tokens"] = case.stage_tokens
    planner = PlannerConfig()
    if case.kv_tokens is not None:
        planner = PlannerConfig(choose=True, kv_tokens=case.kv_tokens)
    return EngineConfig(
        model=ModelConfig(name=limits.model, load_format="dummy", spec=read_model(limits.model)),
        gpu=GPUConfig(memory_gib=case.memory_gib, device=limits.device),
        offload=OffloadConfig(uva=UVAOffloadConfig(**uva), prefetch=PrefetchOffloadConfig(**node)),
        engine=EngineSettings(
            gpu_memory_utilization=case.utilization,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            **settings,
        ),
        planner=planner,
    )


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line chose."""

    shape: Work
    """Batches and lengths that all engines share."""
    memory_gib: float
    utilization: float
    resident_gib: float
    group: int
    num: int
    step: int
    uva_gib: float
    counter_s: float
    steps: tuple[int, ...]
    """More values of prefetch_step to measure at the smallest batch."""


def cases(asked: Asked) -> list[Case]:
    """Return the engines of the table, in order; `chosen` needs the KV room of `prefetch`."""
    small: dict[str, Any] = {"memory_gib": asked.memory_gib, "utilization": asked.utilization}
    large: dict[str, Any] = {"memory_gib": asked.resident_gib, "utilization": 0.9}
    shape, first = asked.shape, replace(asked.shape, batches=asked.shape.batches[:1])
    prefetch = {
        "offload_group_size": asked.group,
        "offload_num_in_group": asked.num,
        "offload_prefetch_step": asked.step,
    }
    uva = {"cpu_offload_gb": asked.uva_gib}
    whole = replace(shape, prefills=(1, 4))
    found = [
        Case(name="resident", title="resident", work=shape, **large),
        Case(
            name="embed_in_place",
            title="resident, embedding table in place",
            work=first,
            offload={"cpu_offload_gb": 0.001, "cpu_offload_params": ["embed_tokens"]},
            **large,
        ),
        Case(
            name="prefetch",
            title=f"prefetch {asked.group}/{asked.num}/{asked.step}",
            work=replace(whole, counter_s=asked.counter_s),
            offload=prefetch,
            **small,
        ),
        Case(name="uva", title=f"uva {asked.uva_gib:g} GiB", work=whole, offload=uva, **small),
        Case(
            name="uva_in_place",
            title=f"uva {asked.uva_gib:g} GiB, never staged",
            work=replace(shape, chunks=STAGE_TOKENS),
            offload=uva,
            stage_tokens=NEVER,
            **small,
        ),
        Case(
            name="uva_staged",
            title=f"uva {asked.uva_gib:g} GiB, always staged",
            work=replace(shape, chunks=STAGE_TOKENS),
            offload=uva,
            stage_tokens=1,
            **small,
        ),
        Case(
            name="chosen",
            title="offload=auto, the KV room of prefetch",
            work=whole,
            kv_tokens=0,
            **small,
        ),
    ]
    more = [
        Case(
            name=f"prefetch_step_{step}",
            title=f"prefetch {asked.group}/{asked.num}/{step}",
            work=first,
            offload=prefetch | {"offload_prefetch_step": step},
            **small,
        )
        for step in asked.steps
    ]
    return found + more
