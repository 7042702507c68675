"""Cards: what vendors state of them (sources: conf/gpu), and what a plan must know of one.

And what becomes there of settings that are left open: dtype, length and budget.
"""

from dataclasses import dataclass
from typing import Final

from engine.asked.config import EngineConfig, GPUConfig
from engine.errors import CapacityError, ConfigError
from engine.model.spec import ModelSpec
from engine.plan.sizes import MAX_LOAD_THREADS
from engine.sealed import GIB


@dataclass(frozen=True)
class Sheet:
    """What a vendor states of a card."""

    link_gb_s: float
    """One direction."""
    hbm_gb_s: float
    bf16_tflops: float
    """Dense; of cards without bfloat16 that of float16."""


CARDS: Final = {
    "NVIDIA A10": Sheet(32.0, 600.0, 125.0),
    "NVIDIA A100-SXM4-40GB": Sheet(32.0, 1555.0, 312.0),
    "NVIDIA A100-SXM4-80GB": Sheet(32.0, 2039.0, 312.0),
    "NVIDIA B200": Sheet(64.0, 8000.0, 2250.0),
    "NVIDIA GeForce RTX 2060": Sheet(16.0, 336.0, 25.8),
    "NVIDIA GeForce RTX 2070": Sheet(16.0, 448.0, 29.9),
    "NVIDIA GeForce RTX 2080": Sheet(16.0, 448.0, 40.3),
    "NVIDIA GeForce RTX 2080 Ti": Sheet(16.0, 616.0, 53.8),
    "NVIDIA GeForce RTX 3050": Sheet(16.0, 224.0, 18.2),
    "NVIDIA GeForce RTX 3060": Sheet(32.0, 360.0, 25.5),
    "NVIDIA GeForce RTX 3060 Laptop GPU": Sheet(32.0, 336.0, 26.2),
    "NVIDIA GeForce RTX 3060 Ti": Sheet(32.0, 448.0, 32.4),
    "NVIDIA GeForce RTX 3070": Sheet(32.0, 448.0, 40.6),
    "NVIDIA GeForce RTX 3070 Laptop GPU": Sheet(32.0, 448.0, 33.2),
    "NVIDIA GeForce RTX 3070 Ti": Sheet(32.0, 608.0, 43.5),
    "NVIDIA GeForce RTX 3080": Sheet(32.0, 760.0, 59.5),
    "NVIDIA GeForce RTX 3080 Laptop GPU": Sheet(32.0, 448.0, 42.0),
    "NVIDIA GeForce RTX 3080 Ti": Sheet(32.0, 912.0, 68.2),
    "NVIDIA GeForce RTX 3090": Sheet(32.0, 936.0, 71.0),
    "NVIDIA GeForce RTX 4050 Laptop GPU": Sheet(16.0, 192.0, 24.3),
    "NVIDIA GeForce RTX 4060": Sheet(16.0, 272.0, 30.2),
    "NVIDIA GeForce RTX 4060 Laptop GPU": Sheet(16.0, 256.0, 29.1),
    "NVIDIA GeForce RTX 4060 Ti": Sheet(16.0, 288.0, 44.1),
    "NVIDIA GeForce RTX 4070": Sheet(32.0, 504.0, 58.3),
    "NVIDIA GeForce RTX 4070 Laptop GPU": Sheet(16.0, 256.0, 40.1),
    "NVIDIA GeForce RTX 4070 SUPER": Sheet(32.0, 504.0, 71.0),
    "NVIDIA GeForce RTX 4070 Ti": Sheet(32.0, 504.0, 80.2),
    "NVIDIA GeForce RTX 4070 Ti SUPER": Sheet(32.0, 672.0, 88.2),
    "NVIDIA GeForce RTX 4080": Sheet(32.0, 716.8, 97.5),
    "NVIDIA GeForce RTX 4080 Laptop GPU": Sheet(32.0, 432.0, 67.7),
    "NVIDIA GeForce RTX 4080 SUPER": Sheet(32.0, 736.0, 104.4),
    "NVIDIA GeForce RTX 4090": Sheet(32.0, 1008.0, 165.2),
    "NVIDIA GeForce RTX 4090 Laptop GPU": Sheet(32.0, 576.0, 79.4),
    "NVIDIA GeForce RTX 5060": Sheet(32.0, 448.0, 38.4),
    "NVIDIA GeForce RTX 5060 Ti": Sheet(32.0, 448.0, 47.4),
    "NVIDIA GeForce RTX 5070": Sheet(64.0, 672.0, 61.7),
    "NVIDIA GeForce RTX 5070 Laptop GPU": Sheet(32.0, 384.0, 43.3),
    "NVIDIA GeForce RTX 5070 Ti": Sheet(64.0, 896.0, 87.9),
    "NVIDIA GeForce RTX 5080": Sheet(64.0, 960.0, 112.6),
    "NVIDIA GeForce RTX 5080 Laptop GPU": Sheet(64.0, 896.0, 70.3),
    "NVIDIA GeForce RTX 5090": Sheet(64.0, 1792.0, 209.5),
    "NVIDIA GeForce RTX 5090 Laptop GPU": Sheet(64.0, 896.0, 90.7),
    "NVIDIA H100 80GB HBM3": Sheet(64.0, 3350.0, 989.0),
    "NVIDIA H200": Sheet(64.0, 4800.0, 989.0),
    "NVIDIA L4": Sheet(32.0, 300.0, 121.0),
    "NVIDIA L40S": Sheet(32.0, 864.0, 362.05),
    "NVIDIA RTX 4000 Ada Generation": Sheet(32.0, 360.0, 81.9),
    "NVIDIA RTX 6000 Ada Generation": Sheet(32.0, 960.0, 364.2),
    "NVIDIA RTX A4500": Sheet(32.0, 640.0, 94.6),
    "NVIDIA RTX A6000": Sheet(32.0, 768.0, 154.8),
    "Tesla T4": Sheet(16.0, 320.0, 65.0),
    "Tesla V100-SXM2-16GB": Sheet(16.0, 900.0, 125.0),
    "Tesla V100-SXM2-32GB": Sheet(16.0, 900.0, 125.0),
}
UNKNOWN_CARD: Final = Sheet(32.0, 500.0, 60.0)
"""A card of which nothing is known: PCIe 4 x16, GDDR6, some tensor cores."""
UNKNOWN_HOST_BYTES: Final = 2**50
"""Host memory of a machine that is not here: no limit."""


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What a plan must know of a machine."""

    kind: str
    """cuda | cpu."""
    name: str
    total_bytes: int
    """Memory of the card (CPU: what may serve as an emulated card)."""
    free_bytes: int
    """What is free of it now."""
    host_available_bytes: int
    """Host memory that can be taken: the least of free memory and cgroup limit."""
    can_pin: bool = True
    can_uva: bool = True
    reason: str = ""
    """Why pinning or in-place reads are not possible."""
    compute_capability: tuple[int, int] | None = None
    """Major and minor version of a CUDA device; None where there is none, or it is not known."""
    pin_limit_bytes: int | None = None
    """Host memory that may be pinned where a limit on locked memory binds the driver."""
    num_threads: int = MAX_LOAD_THREADS
    holders: tuple[str, ...] = ()
    """Other processes with memory of the card, in words."""

    @classmethod
    def of_card(cls, gpu: GPUConfig) -> "DeviceFacts":
        """Return a card that is not here, with all memory free, beside any host memory."""
        total = int((gpu.memory_gib or 0) * GIB)
        version = gpu.compute_capability
        name = f"a card of {gpu.memory_gib or 0:g} GiB" if gpu.name == "auto" else gpu.name
        return cls(
            kind="cuda",
            name=name,
            total_bytes=total,
            free_bytes=total,
            host_available_bytes=UNKNOWN_HOST_BYTES,
            compute_capability=None if version is None else divmod(round(version * 10), 10),
        )

    @property
    def emulated(self) -> bool:
        """Whether the GPU tier is host memory standing in for a card."""
        return self.kind == "cpu"


BFLOAT16_CAPABILITY = (8, 0)
"""Compute capability from which on cards compute with bfloat16."""
TORCH_CAPABILITY = (7, 5)
"""The least that torch's builds for CUDA 13 have kernels for."""


def resolve_dtype(
    config: EngineConfig, spec: ModelSpec, kind: str, capability: tuple[int, int] | None = None
) -> str:
    """Return the dtype in force.

    auto is the checkpoint's on a GPU, float16 for bfloat16 on one without it, float32 on a CPU.
    """
    if config.engine.dtype != "auto":
        return config.engine.dtype
    if kind == "cpu":
        return "float32"
    lacks = capability is not None and capability < BFLOAT16_CAPABILITY
    return "float16" if lacks and spec.dtype == "bfloat16" else spec.dtype


def resolve_max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    """Return the length limit in force.

    Raises:
        ConfigError: The limit exceeds the model's.
    """
    limit = spec.max_position_embeddings
    asked = limit if config.engine.max_model_len is None else config.engine.max_model_len
    if not 2 <= asked <= limit:
        raise ConfigError(
            "engine.max_model_len: expected at least 2 (one token of prompt, one of output) and at "
            f"most the model's {limit} positions, got {asked}. Change it."
        )
    return asked


def capability_notes(
    config: EngineConfig, spec: ModelSpec, dtype: str, name: str, capability: tuple[int, int] | None
) -> list[str]:
    """Say what an old card makes of the weights, and that it may not run at all.

    Args:
        config: What was asked.
        spec: Sizes of the model.
        dtype: The dtype in force.
        name: Name of the card.
        capability: Its compute capability; None: not known, or no card.
    """
    notes: list[str] = []
    if capability is None:
        return notes
    name = f"compute capability {'.'.join(map(str, capability))} ({name})"
    if dtype != spec.dtype and config.engine.dtype == "auto":
        notes.append(f"fallback: {name} has no bfloat16, so weights are {dtype}.")
    if capability < TORCH_CAPABILITY:
        notes.append(
            f"torch's builds for CUDA 13 have no kernels for {name}: with those it can be planned, "
            "not run."
        )
    return notes


def window_notes(config: EngineConfig, spec: ModelSpec, max_model_len: int) -> list[str]:
    """Say what it means that windows are disabled."""
    if not config.kv.disable_sliding_window:
        return []
    windows = [window for window in spec.windows if window is not None]
    if not windows:
        return ["kv.disable_sliding_window: this model has no window, so nothing changes."]
    windows = [window for window in windows if window < max_model_len]
    if not windows:
        return []
    tokens = " or ".join(map(str, sorted(set(windows))))
    return [
        f"kv.disable_sliding_window: {len(windows)} of {spec.num_hidden_layers} layers "
        f"attend to the whole context instead of {tokens} tokens, which the model was not made for."
    ]


def gpu_budget_bytes(config: EngineConfig, facts: DeviceFacts) -> int:
    """Return memory_gib (or the card's) times gpu_memory_utilization.

    Raises:
        CapacityError: The budget is larger than what is free on the card.
    """
    memory = config.gpu.memory_gib
    total = facts.total_bytes if memory is None else int(memory * GIB)
    budget = int(total * config.engine.gpu_memory_utilization)
    if budget > facts.free_bytes and not facts.emulated:
        held = ", ".join(facts.holders) or "the driver names none"
        raise CapacityError(
            f"GPU budget: expected at most the {facts.free_bytes / GIB:.2f} GiB that are free of "
            f"{facts.total_bytes / GIB:.2f} GiB on {facts.name}, got {total / GIB:.2f} GiB x "
            f"gpu_memory_utilization {config.engine.gpu_memory_utilization:g} = "
            f"{budget / GIB:.2f} GiB. Lower gpu.memory_gib or engine.gpu_memory_utilization, or "
            f"stop the processes that hold the rest ({held})."
        )
    return budget
