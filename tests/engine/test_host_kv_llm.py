"""The door to a host tier: keywords give engines whose tokens are those of a resident one."""

from typing import Any

import pytest

from engine import KVTransferConfig
from engine.plan.memory import MemoryPlan
from tests.engine.conftest import TinyModels
from tests.slow import slow
from tests.tiny import greedy, make_prompt, open_llm

pytestmark = pytest.mark.thorough

GIB = 2**30
LONG = [make_prompt(900, seed=5)]
MANY = [make_prompt(length, seed=length) for length in (60, 70, 80, 90)]


def limits(**changes: Any) -> dict[str, Any]:
    return {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 1000,
        "block_size": 8,
        **changes,
    }


@pytest.fixture(scope="module")
def roomy(tiny: TinyModels) -> tuple[MemoryPlan, Any]:
    """The plan of an engine that holds all, and its tokens."""
    llm = open_llm(tiny.folder("llama", max_position_embeddings=1024), **limits())
    plan, found = llm.plan, (greedy(llm, LONG, 8), greedy(llm, MANY, 8))
    llm.close()
    return plan, found


@pytest.mark.parametrize(
    "keywords",
    [
        slow({"num_cpu_blocks": 100}),
        slow({"num_cpu_blocks": 100, "enable_prefix_caching": True}),
        {
            "kv_transfer_config": KVTransferConfig(
                kv_connector="OffloadingConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"num_cpu_blocks": 50, "block_size": 16},
            )
        },
    ],
    ids=["blocks", "prefix caching", "published"],
)
def test_a_sequence_beyond_the_gpu_gives_the_same_tokens(
    tiny: TinyModels, roomy: tuple[MemoryPlan, Any], keywords: dict[str, Any]
) -> None:
    model = tiny.folder("llama", max_position_embeddings=1024)
    plan, expected = roomy
    tier = open_llm(model, **limits(), **keywords)
    fixed = tier.plan.gpu_total_bytes - tier.plan.gpu_items["kv_cache"]
    tier.close()
    room = 90 * plan.block_bytes  # of 125, and stages
    budget = {"gpu_memory_gib": (fixed + room) / GIB, "gpu_memory_utilization": 1.0}
    llm = open_llm(model, **limits(), **keywords, **budget)
    assert llm.plan.host_kv is not None
    assert llm.plan.kv.groups[0].num_in_place == 100
    assert llm.plan.kv_tokens < 900 < llm.plan.longest_tokens
    assert (greedy(llm, LONG, 8), greedy(llm, MANY, 8)) == expected
    llm.close()
