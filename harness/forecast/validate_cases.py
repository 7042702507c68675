"""Engines whose times are held against their predictions: cuts of models on scaled budgets."""

import math
from dataclasses import dataclass, replace
from typing import Final

from catalogue.models import find
from engine.asked.config import EngineConfig, EngineSettings, GPUConfig, ModelConfig, PlannerConfig
from engine.asked.offload import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from engine.errors import ConfigError
from engine.model.spec import DTYPE_BYTES, ModelSpec
from engine.plan.memory import DeviceFacts
from engine.plan.planner import plan_memory
from engine.sealed import GIB
from harness.forecast.validate_splits import hand_made

UTILIZATION: Final = 0.9
SLOTS: Final = 2
"""Slots that prefetch with one step ahead, and staging, take beside the resident layers."""
MARGIN: Final = 1.01
"""A budget is this times what is needed, for the alignment of slabs."""


@dataclass(frozen=True, kw_only=True)
class EngineCase:
    """One engine to build and what it is given."""

    name: str
    """Of its placement."""
    model: str
    config: EngineConfig
    batches: tuple[int, ...]
    """Decode batches that are timed."""
    prompt_tokens: int
    num_requests: int = 0
    """Of the queue that is timed; 0: none."""
    queue_tokens: tuple[int, int] = (0, 0)
    """Prompt and output tokens of each of its requests."""
    queue_limit_s: float | None = None
    """A queue that takes longer is given up: it cannot be the best; None: it runs to its end."""
    budget: str = ""
    """What the budget is, in words."""
    shares_process: bool = False
    """Whether other engines may have run in its process before."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What the engines of one table share."""

    num_layers: int | None
    """Layers of the cut; None: the model's own."""
    batches: tuple[int, ...]
    prompt_tokens: int
    max_model_len: int
    max_num_seqs: int
    kv_sequences: int
    """Sequences of max_model_len that have room beside the weights."""
    device: str = "auto"


def read_model(name: str, num_layers: int | None = None) -> ModelSpec:
    """Return the sizes of a model of conf/model, with another number of layers where given.

    Raises:
        ConfigError: There is no such model, or its sizes are not known.
    """
    spec = find(name).spec
    if spec is None:
        raise ConfigError(f"--models: expected a model with sizes, {name!r} has none.")
    return spec if num_layers is None else replace(spec, num_hidden_layers=num_layers)


def cut_cases(model: str, scale: Scale) -> list[EngineCase]:
    """Return four engines of one model: resident, and uva, prefetch and auto on a scaled budget.

    The budget of 8 layers holds half of them; three quarters are moved, and two slots take the room
    of two.
    """
    spec = read_model(model, scale.num_layers)
    moved = max(SLOTS + 1, spec.num_hidden_layers * 3 // 4)
    small, full = budget_gib(spec, scale, moved - SLOTS), budget_gib(spec, scale, 0)
    room = scale.kv_sequences * scale.max_model_len
    splits = [
        ("resident", full, OffloadConfig(), PlannerConfig()),
        (f"uva {moved} layers", small, uva(spec, scale, moved), PlannerConfig()),
        (f"prefetch {moved} layers", small, prefetch(spec, moved, 1), PlannerConfig()),
        ("auto", small, OffloadConfig(), PlannerConfig(choose=True, kv_tokens=room)),
    ]
    return [
        _case(name, model, spec, scale, memory, offload, planner)
        for name, memory, offload, planner in splits
    ]


def full_cases(scale: Scale) -> list[EngineCase]:
    """Return four engines of full size: olmo7b in 16 GiB three ways, qwen3_4b resident."""
    spec, memory = read_model("olmo7b"), 15.9921875
    splits = [
        ("uva 8 GiB", OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=8.0)), PlannerConfig()),
        ("prefetch 5 of 8", prefetch(spec, 20, 2, group=8), PlannerConfig()),
        ("auto", OffloadConfig(), PlannerConfig(choose=True)),
    ]
    whole = replace(scale, num_layers=None)
    found = [
        _case(name, "olmo7b", spec, whole, memory, offload, planner, budget="16 GiB")
        for name, offload, planner in splits
    ]
    other = read_model("qwen3_4b")
    memory = budget_gib(other, whole, 0)
    none = (OffloadConfig(), PlannerConfig())
    return [*found, _case("resident", "qwen3_4b", other, whole, memory, *none)]


def grid_cases(
    model: str, scale: Scale, freed: int, num_requests: int, queue: tuple[int, int]
) -> list[EngineCase]:
    """Return auto for latency and for throughput, then 12 splits by hand, on one budget.

    Args:
        model: of conf/model.
        scale: layers, lengths and batches.
        freed: layers whose room the budget lacks.
        num_requests: of the queue.
        queue: prompt and output tokens of each.
    """
    spec = read_model(model, scale.num_layers)
    memory, words = budget_gib(spec, scale, freed), f"{freed} layers less"
    none = OffloadConfig()
    splits = [
        ("auto latency", none, PlannerConfig(choose=True)),
        ("auto throughput", none, PlannerConfig(choose=True, objective="throughput")),
    ]
    config = _config(model, spec, scale, memory, none, PlannerConfig())
    hand = hand_made(config, spec, _any_card(scale))
    splits += [(name, offload, PlannerConfig()) for name, offload in hand]
    return [
        replace(
            _case(name, model, spec, scale, memory, offload, planner, budget=words),
            num_requests=0 if name == "auto latency" else num_requests,
            queue_tokens=queue,
            shares_process=True,
        )
        for name, offload, planner in splits
    ]


def budget_gib(spec: ModelSpec, scale: Scale, freed: int) -> float:
    """Return the card's memory that holds all but `freed` layers beside KV room, GiB."""
    facts = _any_card(scale)
    config = _config("any", spec, scale, 2.0**19, OffloadConfig(), PlannerConfig())
    plan = plan_memory(config, spec, facts)
    layer = sum(t.numel for t in spec.layer_tensors(0)) * DTYPE_BYTES[plan.dtype]
    kv = scale.kv_sequences * plan.gpu_items["kv_cache"] // plan.max_num_seqs
    fixed = plan.gpu_total_bytes - plan.gpu_items["kv_cache"]
    needed = (fixed + kv - freed * layer) * MARGIN
    return math.ceil(needed / UTILIZATION / GIB * 1e4) / 1e4


def _any_card(scale: Scale) -> DeviceFacts:
    """A machine that lacks nothing."""
    return DeviceFacts(
        kind="cpu" if scale.device == "cpu" else "cuda",
        name="any",
        total_bytes=2**50,
        free_bytes=2**50,
        host_available_bytes=2**50,
    )


def uva(spec: ModelSpec, scale: Scale, num_layers: int) -> OffloadConfig:
    """Return uva of so many layers, in order."""
    dtype = "float32" if scale.device == "cpu" else spec.dtype
    size = num_layers * sum(t.numel for t in spec.layer_tensors(0)) * DTYPE_BYTES[dtype]
    return OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=(size - 1) / GIB))


def prefetch(
    spec: ModelSpec, num_layers: int, step: int, *, group: int | None = None
) -> OffloadConfig:
    """Return prefetch of so many layers of the model, the last ones of each group."""
    size = group or spec.num_hidden_layers
    return OffloadConfig(
        prefetch=PrefetchOffloadConfig(
            offload_group_size=size,
            offload_num_in_group=num_layers * size // spec.num_hidden_layers,
            offload_prefetch_step=step,
        )
    )


def _case(
    name: str,
    model: str,
    spec: ModelSpec,
    scale: Scale,
    memory_gib: float,
    offload: OffloadConfig,
    planner: PlannerConfig,
    budget: str = "",
) -> EngineCase:
    return EngineCase(
        name=name,
        model=f"{model}, {spec.num_hidden_layers} layers",
        config=_config(model, spec, scale, memory_gib, offload, planner),
        batches=scale.batches,
        prompt_tokens=scale.prompt_tokens,
        budget=budget,
    )


def _config(
    model: str,
    spec: ModelSpec,
    scale: Scale,
    memory_gib: float,
    offload: OffloadConfig,
    planner: PlannerConfig,
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(name=model, load_format="dummy", spec=spec),
        gpu=GPUConfig(name="scaled", memory_gib=memory_gib, device=scale.device),
        offload=offload,
        engine=EngineSettings(
            gpu_memory_utilization=UTILIZATION,
            max_model_len=scale.max_model_len,
            max_num_seqs=scale.max_num_seqs,
        ),
        planner=planner,
    )
