"""The plan of the engine of model=fake: scripted bytes, placed as the offload settings say."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.asked.config import EngineConfig
from engine.errors import CapacityError
from engine.sealed import GIB
from harness.config.schema import FakeScript


@dataclass(frozen=True, kw_only=True)
class FakePlan:
    """What lies where, in bytes."""

    budget_bytes: int
    resident_bytes: int
    """Weights on the GPU."""
    offloaded_bytes: int
    """Weights in host memory."""
    kv_bytes: int
    is_read_in_place: bool
    """Offloaded weights are read where they are, else copied."""
    block_size: int = 16
    """Tokens in a block of KV."""

    @property
    def gpu_total_bytes(self) -> int:
        """What the GPU holds."""
        return self.resident_bytes + self.kv_bytes

    def moved_per_step(self, num_decodes: int = 1) -> tuple[int, int]:
        """Return bytes copied and bytes read in place by a step, whatever its tokens."""
        del num_decodes
        return (0, self.offloaded_bytes) if self.is_read_in_place else (self.offloaded_bytes, 0)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan for the record, with the keys of the engine's own."""
        gpu: Mapping[str, int] = {"weights": self.resident_bytes, "kv_cache": self.kv_bytes}
        return {
            "gpu": {
                "budget_bytes": self.budget_bytes,
                "items": dict(gpu),
                "total_bytes": self.gpu_total_bytes,
                "free_bytes": self.budget_bytes - self.gpu_total_bytes,
            },
            "host": {
                "items": {"pinned_weights": self.offloaded_bytes},
                "total_bytes": self.offloaded_bytes,
            },
            "bytes_per_step": self.offloaded_bytes,
        }


def plan_fake(script: FakeScript, config: EngineConfig) -> FakePlan:
    """Place the scripted bytes.

    Args:
        script: with the sizes.
        config: with the budget and the offload; offload=auto moves what is over the budget.

    Raises:
        CapacityError: the GPU's part does not fit.
    """
    card_gib = script.gpu_gib if config.gpu.memory_gib is None else config.gpu.memory_gib
    budget = round(card_gib * config.engine.gpu_memory_utilization * GIB)
    weights, kv = round(script.weights_gib * GIB), round(script.kv_gib * GIB)
    moved = min(weights, _offloaded(config, weights, over=max(0, weights + kv - budget)))
    plan = FakePlan(
        budget_bytes=budget,
        resident_bytes=weights - moved,
        offloaded_bytes=moved,
        kv_bytes=kv,
        is_read_in_place=config.planner.choose or config.offload.backend == "uva",
    )
    over = plan.gpu_total_bytes - budget
    if over > 0:
        raise CapacityError(
            f"GPU: need {plan.gpu_total_bytes / GIB:.2f} GiB, have {budget / GIB:.2f} GiB "
            f"({over / GIB:.2f} GiB over). Offload more, or raise gpu.memory_gib.",
            plan.to_dict(),
        )
    return plan


def _offloaded(config: EngineConfig, weights: int, *, over: int) -> int:
    if config.planner.choose:
        return over
    offload = config.offload
    match offload.backend:
        case "uva":
            return round(offload.uva.cpu_offload_gb * GIB) or weights
        case "prefetch":
            node = offload.prefetch
            return weights * node.offload_num_in_group // node.offload_group_size
        case _:
            return 0
