"""Model sizes, machines and configurations for tests that plan; no torch."""

import warnings
from typing import Any

from hypothesis import strategies as st

from engine.config import (
    EngineConfig,
    EngineSettings,
    GPUConfig,
    KVConfig,
    ModelConfig,
    OffloadConfig,
    PrefetchOffloadConfig,
    UVAOffloadConfig,
)
from engine.offload_config import OffloadWarning
from engine.plan import DeviceFacts
from engine.spec import ModelSpec

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
    """Return a configuration with dummy weights; warnings about ignored fields are dropped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)
        return EngineConfig(
            model=ModelConfig(name="test", load_format="dummy", spec=spec),
            gpu=GPUConfig(memory_gib=memory_gib),
            offload=offload or OffloadConfig(),
            kv=KVConfig(**(kv or {})),
            engine=EngineSettings(**settings),
        )


@st.composite
def model_specs(draw: st.DrawFn) -> ModelSpec:
    """Sizes of any family, from some kilobytes to some gigabytes."""
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    return ModelSpec(
        model_type=draw(st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "olmo2"])),
        vocab_size=draw(st.integers(10, 150_000)),
        hidden_size=draw(st.integers(8, 4096)),
        intermediate_size=draw(st.integers(8, 12_000)),
        num_hidden_layers=draw(st.integers(1, 40)),
        num_attention_heads=kv_heads * draw(st.integers(1, 4)),
        num_key_value_heads=kv_heads,
        head_dim=2 * draw(st.integers(8, 128)),
        max_position_embeddings=draw(st.integers(2, 8192)),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"])),
    )
