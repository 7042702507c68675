"""Model sizes, machines and configurations for tests that plan; no torch."""

import warnings
from dataclasses import replace
from typing import Any

import yaml
from hypothesis import strategies as st

from catalogue.files import CONF
from engine.asked.config import EngineConfig, EngineSettings, GPUConfig, ModelConfig
from engine.asked.kv import KVConfig
from engine.asked.offload import (
    OffloadConfig,
    OffloadWarning,
    PrefetchOffloadConfig,
    UVAOffloadConfig,
)
from engine.errors import CapacityError
from engine.model.formats import align
from engine.model.spec import DTYPE_BYTES, ModelSpec
from engine.plan.cards import DeviceFacts
from engine.plan.memory import MemoryPlan
from engine.plan.planner import plan_memory
from engine.plan.rates import Rates
from engine.plan.times import Shape

GIB, MIB = 2**30, 2**20

OLMO_7B = ModelSpec(
    model_type="olmo2",
    vocab_size=100352,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    max_position_embeddings=4096,
    rope_theta=500000.0,
)
H200 = DeviceFacts(
    kind="cuda",
    name="H200",
    total_bytes=143771 * MIB,
    free_bytes=143000 * MIB,
    host_available_bytes=120 * GIB,
)
CPU = DeviceFacts(
    kind="cpu",
    name="CPU emulation",
    total_bytes=32 * GIB,
    free_bytes=64 * GIB,
    host_available_bytes=64 * GIB,
)


def small_spec(**changes: Any) -> ModelSpec:
    """Return a Llama of 8 layers whose tensors are multiples of the alignment in float32."""
    sizes: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
    }
    return ModelSpec(**(sizes | changes))


def uva(gib: float, *params: str, backend: str = "auto") -> OffloadConfig:
    """Return an uva configuration."""
    node = UVAOffloadConfig(cpu_offload_gb=gib, cpu_offload_params=list(params))
    return OffloadConfig(offload_backend=backend, uva=node)


def prefetch(group: int, num: int = 1, step: int = 1, *params: str) -> OffloadConfig:
    """Return a prefetch configuration."""
    return OffloadConfig(
        prefetch=PrefetchOffloadConfig(
            offload_group_size=group,
            offload_num_in_group=num,
            offload_prefetch_step=step,
            offload_params=list(params),
        )
    )


def configuration(
    spec: ModelSpec,
    *,
    memory_gib: float | None = None,
    offload: OffloadConfig | None = None,
    kv: dict[str, Any] | None = None,
    **settings: Any,
) -> EngineConfig:
    """Return a configuration with dummy weights; warnings about ignored fields are dropped.

    Weights are plain, also where the planner chooses, unless weight_format is given.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)
        return EngineConfig(
            model=ModelConfig(name="test", load_format="dummy", spec=spec),
            gpu=GPUConfig(memory_gib=memory_gib),
            offload=offload or OffloadConfig(),
            kv=KVConfig(**(kv or {})),
            engine=EngineSettings(**({"weight_format": "checkpoint"} | settings)),
        )


def advised(error: CapacityError | None) -> list[str]:
    """Return the settings with which a refusal says that it fits, those of each way joined."""
    assert error is not None
    assert error.plan is not None
    ways: Any = error.plan["ways"]
    return [" ".join(way["settings"]) for way in ways]


@st.composite
def model_specs(draw: st.DrawFn) -> ModelSpec:
    """Sizes of any family, from some kilobytes to some gigabytes."""
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    layers = draw(st.integers(1, 40))
    window = draw(st.none() | st.integers(1, 2000))
    kinds = st.sampled_from(["sliding_attention", "full_attention"])
    types = [] if window is None else draw(st.lists(kinds, min_size=layers, max_size=layers))
    return ModelSpec(
        sliding_window=window,
        layer_types=types if "sliding_attention" in types else [],
        model_type=draw(
            st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma3_text"])
        ),
        vocab_size=draw(st.integers(10, 150_000)),
        hidden_size=draw(st.integers(8, 4096)),
        intermediate_size=draw(st.integers(8, 12_000)),
        num_hidden_layers=layers,
        num_attention_heads=kv_heads * draw(st.integers(1, 4)),
        num_key_value_heads=kv_heads,
        head_dim=2 * draw(st.integers(8, 128)),
        max_position_embeddings=draw(st.integers(2, 8192)),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"])),
    )


NO_PIN = {"can_pin": False, "can_uva": False, "reason": "tests say so"}
NO_UVA = {"can_uva": False, "reason": "tests say so"}


def moe_spec(**changes: Any) -> ModelSpec:
    """Four layers of which the second and the fourth have experts."""
    sizes = {
        "model_type": "qwen3_moe",
        "vocab_size": 151,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1200,
        "num_experts": 16,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
    }
    return ModelSpec(**(sizes | changes))


def plan_small(facts: DeviceFacts = CPU, **changes: Any) -> MemoryPlan:
    """Plan the small model with little beside weights and KV cache."""
    asked: dict[str, Any] = {
        "memory_gib": 0.03,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 64,
        "dtype": "float32",
        **changes,
    }
    return plan_memory(configuration(asked.pop("spec", small_spec()), **asked), small_spec(), facts)


def plan_olmo(memory_gib: float = 15.99, **changes: Any) -> MemoryPlan:
    asked = {"memory_gib": memory_gib, "gpu_memory_utilization": 0.9, **changes}
    return plan_memory(configuration(OLMO_7B, **asked), OLMO_7B, H200)


def check_plan(plan: MemoryPlan, spec: ModelSpec) -> None:
    """Every tensor has a place, every byte is counted once, and all of it fits."""
    assert set(plan.placements) == {tensor.name for tensor in spec.tensors()}
    slabs = [
        slab
        for layer in plan.layers
        for slab in (layer.resident, *(unit.slab for unit in layer.units))
    ]
    slabs += [plan.outer_resident, plan.outer_offloaded]
    names = [tensor.name for slab in slabs for tensor in slab.tensors]
    assert sorted(names) == sorted(plan.placements)
    size = DTYPE_BYTES[plan.dtype]
    for slab in slabs:
        end = 0
        for tensor, offset in zip(slab.tensors, slab.offsets, strict=True):
            assert offset == end
            end = align(offset + tensor.numel * size)
        assert slab.num_bytes == end
    assert sum(plan.placed_bytes().values()) == spec.weight_bytes(plan.dtype)
    assert plan.gpu_total_bytes == sum(plan.gpu_items.values()) <= plan.gpu_budget_bytes
    assert plan.host_total_bytes == sum(plan.host_items.values()) <= plan.host_limit_bytes
    assert plan.holds_one
    assert plan.max_concurrency >= 1
    assert plan.gpu_items["kv_cache"] == plan.kv.num_bytes(plan.kv.pools)
    layers = [layer for group in plan.kv.groups for layer in group.layers]
    assert sorted(layers) == list(range(spec.num_hidden_layers))
    resident = sum(layer.resident.num_bytes for layer in plan.layers)
    assert plan.gpu_items["weights"] == resident + plan.outer_resident.num_bytes
    slots = plan.num_slots * plan.slot_bytes + plan.outer_slot_bytes
    assert plan.gpu_items["prefetch_slots"] + plan.gpu_items["staging_slots"] == slots
    offloaded = sum(layer.offloaded_bytes for layer in plan.layers)
    name = "pinned_weights" if plan.pin else "pageable_weights"
    assert plan.host_items[name] == offloaded + plan.outer_offloaded.num_bytes
    assert plan.slot_bytes == max((x.offloaded_bytes for x in plan.layers), default=0) or (
        plan.num_slots == 0
    )


def llama() -> ModelSpec:
    text = (CONF / "model" / "llama31_8b.yaml").read_text(encoding="utf-8")
    return ModelSpec(**yaml.safe_load(text)["spec"])


def plan_llama(
    length: int, facts: DeviceFacts = H200, kv: dict[str, Any] | None = None, **changes: Any
) -> MemoryPlan:
    """llama31_8b in bf16 with 24 GB at 0.9."""
    asked: dict[str, Any] = {
        "memory_gib": 24,
        "gpu_memory_utilization": 0.9,
        "max_model_len": length,
        "max_num_seqs": 8,
        **changes,
    }
    plan = plan_memory(configuration(llama(), kv=kv, **asked), llama(), facts)
    check_plan(plan, llama())
    return plan


def planned(shape: Shape, **values: Any) -> Shape:
    """Return a shape with other values in its plan."""
    return replace(shape, plan=replace(shape.plan, **values))


def at(shape: Shape, rates: Rates) -> Shape:
    """Return a shape on a machine of other rates."""
    return replace(shape, rates=rates)
