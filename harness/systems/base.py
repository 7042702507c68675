"""What peers share: device, plan, a config.json, agreement of tokens."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from engine.asked.config import EngineConfig, ModelConfig
from engine.device.gpu import open_gpu
from engine.errors import ConfigError
from engine.model.checkpoint import read_folder
from engine.model.families import FULL, WINDOW
from engine.model.spec import ModelSpec
from engine.sealed import GIB, MIB
from harness.work.kv import num_common

UNKNOWN_TOKEN: Final = -1
"""Stands for a token whose id the system does not tell."""


@dataclass(kw_only=True)
class Agreement:
    """What a comparison found."""

    facts: dict[str, Any]
    """For the record's effective.correctness."""
    metrics: dict[str, float | None] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def agree(expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]]) -> Agreement:
    """Compare tokens prompt by prompt up to the first that differs.

    After that one the two go on from different texts, so nothing more is compared. Where no prompt
    agrees in its first token, the peer has other weights or other prompts, and a reason says so.
    """
    if any(UNKNOWN_TOKEN in tokens for tokens in got):
        why = "the system does not report token ids"
        note = f"correctness: {why}, so its tokens were not compared with the reference."
        return Agreement(facts={"checked": False, "why": note}, notes=[note])
    leading = [num_common(want, have) for want, have in zip(expected, got, strict=True)]
    total, equal = sum(len(tokens) for tokens in expected), sum(leading)
    facts: dict[str, Any] = {"checked": True, "num_prompts": len(got), "num_tokens": total}
    if equal < total:
        facts["leading_equal"] = leading
    found = Agreement(facts=facts, metrics={"correctness/equal_share": equal / total})
    if not any(leading):
        found.reasons.append(
            f"correctness: for none of {len(got)} prompts the first token is the reference's. The "
            "system has other weights or was sent other prompts. Compare its model with ours."
        )
    elif equal < total:
        found.notes.append(
            f"correctness: {equal} of {total} tokens are those of the reference, counted up to the "
            "first that differs of each prompt. Other kernels round otherwise; see "
            "correctness/equal_share."
        )
    return found


@dataclass(frozen=True, kw_only=True)
class PeerPlan:
    """What is known before a peer runs, in the place of the engine's memory plan."""

    max_model_len: int
    copied_bytes: int = 0
    """Copied from host to device by every step."""
    read_bytes: int = 0
    """Read by the device in host memory in every step."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """For the record."""

    def moved_per_step(self, num_tokens: int) -> tuple[int, int]:
        """Return bytes copied and bytes read in place by a step, whatever its tokens."""
        del num_tokens
        return self.copied_bytes, self.read_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the plan for the record."""
        return {"max_model_len": self.max_model_len, **self.facts}


def nothing(*_: Any) -> dict[str, float | None]:
    """Measure no link and predict no times: both are of this project's engine."""
    return {}


CLASSES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
_OTHERWISE: Final = frozenset(
    (
        *("rope_theta", "rope_scaling", "rope_local_base_freq"),
        *("layer_types", "query_pre_attn_scalar", "quantization"),
    )
)
"""Fields of a ModelSpec that a config.json holds under other names, or not always."""


def model_spec(model: ModelConfig) -> ModelSpec:
    """Return the sizes of a model, from its folder where it has one."""
    if model.path is None:
        if model.spec is None:
            raise ConfigError(f"model {model.name!r}: expected sizes or a folder, got neither.")
        return model.spec
    return read_folder(Path(model.path)).spec


def config_json(spec: ModelSpec) -> dict[str, Any]:
    """Return the content of a config.json with these sizes."""
    found = {name: v for name, v in asdict(spec).items() if name not in _OTHERWISE}
    found["architectures"] = [CLASSES[spec.model_type]]
    full: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    full |= spec.rope_scaling
    default = spec.architecture.local_theta_default
    if default is None:
        found["rope_parameters"] = full
    else:
        local = {"rope_type": "default", "rope_theta": spec.rope_local_base_freq or default}
        found["rope_parameters"] = {FULL: full, WINDOW: local}
    if (scalar := spec.query_pre_attn_scalar) is not None:
        # transformers takes whole numbers alone here.
        found["query_pre_attn_scalar"] = int(scalar) if scalar == int(scalar) else scalar
    if spec.sliding_window is not None:
        layers = spec.num_hidden_layers
        found |= {"layer_types": spec.layer_types or [WINDOW] * layers, "use_sliding_window": True}
        found["max_window_layers"] = 0
    return found


RUNTIME_BYTES: Final = 864 * MIB
"""CUDA context and modules, outside the allocator, with room for those of any peer."""


@dataclass(frozen=True, kw_only=True)
class PeerDevice:
    """One device with a budget."""

    name: str
    kind: str
    """cuda | cpu."""
    budget_bytes: int
    runtime_bytes: int
    """Bytes of the budget outside of the allocator."""
    card_bytes: int

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the budget for tensors."""
        return self.budget_bytes - self.runtime_bytes

    @property
    def torch_name(self) -> str:
        """What torch calls it."""
        return "cuda:0" if self.kind == "cuda" else "cpu"

    def enforce(self) -> None:
        """Bound torch's allocator, so that more than the budget is an out-of-memory error."""
        if self.kind == "cuda":
            import torch  # noqa: PLC0415  takes seconds

            share = max(0.0, min(1.0, self.tensor_bytes / self.card_bytes))
            torch.cuda.empty_cache()  # of the probes: no part of the peak
            torch.cuda.set_per_process_memory_fraction(share, 0)
            torch.cuda.reset_peak_memory_stats(0)

    def peak_bytes(self) -> int | None:
        """Return the most that this process held of the card; None on a CPU."""
        if self.kind != "cuda":
            return None
        import torch  # noqa: PLC0415  takes seconds

        reserved = int(torch.cuda.memory_reserved(0))
        gpu = open_gpu(f"GPU-{str(torch.cuda.get_device_properties(0).uuid).removeprefix('GPU-')}")
        own = gpu.processes().get(os.getpid()) if gpu is not None else None
        outside = self.runtime_bytes if own is None else max(0, own - reserved)
        return int(torch.cuda.max_memory_reserved(0)) + outside


def open_peer_device(config: EngineConfig) -> PeerDevice:
    """Return the device that a configuration asks for, or refuse one that is not here."""
    import torch  # noqa: PLC0415  takes seconds

    has_cuda = torch.cuda.is_available()
    if config.gpu.device == "cuda" and not has_cuda:
        raise ConfigError("gpu.device: expected cuda, found no CUDA device. Set gpu.device=cpu.")
    is_cuda = has_cuda and config.gpu.device != "cpu"
    if is_cuda:
        facts: Any = torch.cuda.get_device_properties(0)
        name, card = str(facts.name), int(facts.total_memory)
    else:
        import psutil  # noqa: PLC0415

        name, card = "cpu", int(psutil.virtual_memory().available) // 2
    asked = config.gpu.memory_gib
    memory = card if asked is None else int(asked * GIB)
    if is_cuda and memory > card:
        raise ConfigError(
            f"gpu.memory_gib: expected at most the card's {card / GIB:.2f} GiB, got {asked}."
        )
    return PeerDevice(
        name=name,
        kind="cuda" if is_cuda else "cpu",
        budget_bytes=int(memory * config.engine.gpu_memory_utilization),
        runtime_bytes=RUNTIME_BYTES if is_cuda else 0,
        card_bytes=card,
    )
