"""Ways to place weights that tests go through, and the bytes that their steps must move."""

from typing import Any

from engine import LLM
from tests.tiny import greedy_params

GIB = 2**30
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
    "swap space": {"swap_space": 1},
}


def check_decode_bytes(llm: LLM, prompt: list[int]) -> None:
    """Every decode step moves what the plan says, copied or read in place."""
    plan = llm.plan
    staged = plan.stage_tokens == 1
    copied = sum(layer.offloaded.num_bytes for layer in plan.offloaded_layers)
    llm.add_request(prompt, greedy_params(4))
    while llm.has_unfinished():
        llm.step()
        step = llm.last_step
        assert step is not None
        if step.num_prefills:
            continue
        if staged:
            assert step.in_place_bytes == 0
            assert step.h2d_bytes == (copied if len(plan.offloaded_layers) > 2 else 0)
        else:
            in_place = plan.placed_bytes()["uva"] > 0
            expected = plan.bytes_per_step()
            assert step.h2d_bytes == (0 if in_place else expected)
            assert step.in_place_bytes == (expected if in_place else 0)
