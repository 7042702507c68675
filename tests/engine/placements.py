"""Ways to place weights, what engines must do in each of them, and a resident engine's tokens."""

from typing import Any

import pytest

from engine import LLM, build
from engine.device.cpu import CPUDevice
from engine.plan.units import CACHED, RESIDENCES
from tests.engine.conftest import TinyModels
from tests.tiny import greedy, greedy_params, make_prompt, open_llm

GIB = 2**30
OF_ANY = tuple(kind for kind in RESIDENCES if kind is not CACHED)
"""Residences of any tensor; experts alone are cached."""
OFFLOADS: dict[str, dict[str, Any]] = {
    "uva of some tensors": {"cpu_offload_gb": 20_000 / GIB},
    "uva of some, staged": {"cpu_offload_gb": 50_000 / GIB, "uva_stage_tokens": 1},
    "uva of all": {"cpu_offload_gb": 1},
    "uva of all, staged": {"cpu_offload_gb": 1, "uva_stage_tokens": 1},
    "uva of all, prefills staged": {"cpu_offload_gb": 1, "uva_stage_tokens": 9},
    "uva of products": {"cpu_offload_gb": 1, "cpu_offload_params": ["mlp.down_proj", "q_proj"]},
    "uva of products, staged": {
        "cpu_offload_gb": 1,
        "cpu_offload_params": ["down_proj", "o_proj"],
        "uva_stage_tokens": 1,
    },
    "uva of norms": {"cpu_offload_gb": 1, "cpu_offload_params": ["norm", "self_attn"]},
    "prefetch": {"offload_group_size": 2},
    "prefetch of products": {"offload_group_size": 1, "offload_params": ["gate_proj", "o_proj"]},
    "prefetch, three slots": {"offload_group_size": 1, "offload_prefetch_step": 2},
    "prefetch of one layer": {"offload_group_size": 5},
    "swap space": {"swap_space": 0.001},
}


def check_decode_bytes(llm: LLM, prompt: list[int]) -> None:
    """Every decode step moves what the plan says, copied or read in place."""
    plan = llm.plan
    staged = plan.stage_tokens == 1
    copied = sum(layer.offloaded_bytes for layer in plan.offloaded_layers)
    llm.add_request(prompt, greedy_params(4))
    while llm.has_unfinished():
        llm.step()
        step = llm.last_step
        assert step is not None
        if step.num_prefill_tokens:
            continue
        assert (step.h2d_bytes, step.in_place_bytes) == plan.moved_per_step(step.num_decode_tokens)
        if staged:
            assert step.in_place_bytes == 0
            assert step.h2d_bytes == (copied if len(plan.offloaded_layers) > 2 else 0)
        else:
            in_place = plan.placed_bytes()["uva"] > 0
            expected = plan.bytes_per_step()
            assert step.h2d_bytes == (0 if in_place else expected)
            assert step.in_place_bytes == (expected if in_place else 0)


SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.25,
}
PROMPTS = [make_prompt(length, vocab=61) for length in (1, 5, 19, 34)]
MAX_TOKENS = 5
FEW_TOKENS = {"max_num_batched_tokens": 32, "max_model_len": 64, "gpu_memory_gib": 0.0625}


def copies(monkeypatch: pytest.MonkeyPatch, *, eager: bool) -> None:
    """Let CPU engines run copies as early, or as late, as they may."""
    monkeypatch.setattr(build, "open_device", lambda _: CPUDevice(eager_copies=eager))


class Residents:
    """Tokens of the resident engine by number of layers and family."""

    def __init__(self, tiny: TinyModels) -> None:
        self._tiny = tiny
        self._tokens: dict[tuple[str, int], list[list[int]]] = {}

    def folder(self, layers: int, family: str = "llama") -> Any:
        return self._tiny.folder(family, num_hidden_layers=layers, **SMALL)

    def tokens(self, layers: int, family: str = "llama") -> list[list[int]]:
        key = (family, layers)
        if key not in self._tokens:
            llm = open_llm(self.folder(layers, family), **FEW_TOKENS)
            assert llm.plan.placed_bytes() == {
                "resident": llm.spec.weight_bytes("float32"),
                "uva": 0,
                "cached": 0,
                "prefetch": 0,
                "on_demand": 0,
            }
            self._tokens[key] = greedy(llm, PROMPTS, MAX_TOKENS)
            llm.close()
        return self._tokens[key]

    def open(self, layers: int, family: str = "llama", **keywords: Any) -> LLM:
        return open_llm(self.folder(layers, family), **(FEW_TOKENS | keywords))


def check_equal(residents: Residents, llm: LLM, layers: int, family: str = "llama") -> None:
    """Compare tokens of prompts together, then of one more alone, and check the plan's bytes."""
    expected = residents.tokens(layers, family)
    assert greedy(llm, PROMPTS, MAX_TOKENS) == expected
    check_decode_bytes(llm, PROMPTS[2])
    assert greedy(llm, PROMPTS[1:2], MAX_TOKENS) == expected[1:2]
