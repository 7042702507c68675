"""Three kinds of layers: tokens are those of attention over masks, without blocks or windows."""

from typing import Any

import pytest
import torch

from engine import LLM
from engine.errors import EngineError
from engine.kv import sequences
from engine.kv.pool import Retain
from engine.kv.prefix import num_expired
from tests.engine.conftest import TinyModels
from tests.engine.groups import SIX, WINDOWS, Masked, with_blocks, with_windows
from tests.engine.tiers import check_empty, tiers
from tests.slow import slow
from tests.tiny import greedy, make_prompt, open_llm

pytestmark = pytest.mark.thorough_but("test_each_layer_has_its_own_window")

STEM = make_prompt(60, seed=7)
PROMPTS = [
    make_prompt(90, seed=1),
    STEM + make_prompt(20, seed=2),
    make_prompt(12, seed=3),
    STEM + make_prompt(9, seed=4),
]
LONG = make_prompt(260, seed=8)
NEW = 12


@pytest.fixture(scope="module")
def masked(tiny: TinyModels) -> Masked:
    from tests.tiny import hf_model

    return Masked(hf_model("qwen3", **SIX))


@pytest.fixture(autouse=True)
def three_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    with_windows(monkeypatch, WINDOWS)


def open_three(tiny: TinyModels, **keywords: Any) -> LLM:
    given = {"max_num_batched_tokens": 48, "max_model_len": 320, "block_size": 8, **keywords}
    return open_llm(tiny.folder("qwen3", **SIX), **given)


def of_roomy_engine(tiny: TinyModels, prompts: list[list[int]], max_tokens: int) -> Any:
    """Return the tokens where nothing is preempted, which other tests hold against a mask."""
    with open_three(tiny) as llm:
        found = greedy(llm, prompts, max_tokens)
        assert llm.stats()["preemptions"] == 0
    return found


@pytest.mark.parametrize("sizes", [slow((8, 48, 8)), (16, 11, 3), slow((128, 256, 1))], ids=str)
def test_tokens_do_not_depend_on_blocks_chunks_or_batch(
    tiny: TinyModels, masked: Masked, sizes: tuple[int, int, int]
) -> None:
    block_size, num_tokens, num_seqs = sizes
    llm = open_three(
        tiny, block_size=block_size, max_num_batched_tokens=num_tokens, max_num_seqs=num_seqs
    )
    found = llm.plan.to_dict()["kv"]
    assert [(group["layers"], group["window"]) for group in found["groups"]] == [
        (2, None),
        (2, 40),
        (2, 13),
    ]
    assert found["window"] == 40
    assert greedy(llm, PROMPTS, NEW) == masked(PROMPTS, NEW)
    stats = llm.stats()
    assert stats["num_window_blocks"] == sum(g["num_blocks"] for g in found["groups"][1:])
    assert len(stats["kv"]["groups"]) == 3
    llm.close()


@pytest.mark.parametrize("windows", [(None, 13, 40, 13, None, 40), slow((13, 40, 13, 40, 40, 13))])
def test_each_layer_has_its_own_window(
    tiny: TinyModels, masked: Masked, monkeypatch: pytest.MonkeyPatch, windows: Any
) -> None:
    """Exchanged windows change tokens; where all layers have one, two groups are left."""
    with_windows(monkeypatch, windows)
    llm = open_three(tiny)
    assert llm.plan.kv.windows == ((None, 40, 13) if None in windows else (40, 13))
    found = greedy(llm, PROMPTS, NEW)
    assert found == masked(PROMPTS, NEW, windows) != masked(PROMPTS, NEW)
    llm.close()


@pytest.mark.parametrize(
    ("counts", "offload"),
    [
        ((None, None, 9), {}),
        slow((22, None, None), {"offload_group_size": 2}),
        slow((22, None, None), {}),
        slow((None, 18, None), {}),
        slow((None, 18, None), {"offload_group_size": 2}),
        slow((None, None, 9), {"offload_group_size": 2}),
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_preemption(
    tiny: TinyModels,
    monkeypatch: pytest.MonkeyPatch,
    counts: tuple[int | None, ...],
    offload: dict[str, Any],
) -> None:
    prompts = [make_prompt(length, seed=2) for length in (5, 6, 8, 9)]
    expected = of_roomy_engine(tiny, prompts, 45)
    with_blocks(monkeypatch, *counts)
    llm = open_three(tiny, max_model_len=100, max_num_batched_tokens=40, **offload)
    assert greedy(llm, prompts, 45) == expected
    assert llm.stats()["preemptions"] > 0
    assert llm.stats()["overlapped_steps"] > 0
    check_empty(llm)
    llm.close()


def test_prefixes_swaps_and_a_sequence_longer_than_the_gpu(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, long = (of_roomy_engine(tiny, prompts, NEW) for prompts in (PROMPTS, [LONG]))
    many = [make_prompt(5 + at, seed=at) for at in range(8)]
    expected_of_many = of_roomy_engine(tiny, many, 30)
    tiers(monkeypatch, 24, num_window=(24, 18), pinned=40, pageable=3)
    llm = open_three(tiny)

    def found(prompts: list[list[int]]) -> dict[str, int]:
        before = llm.stats()["kv"]["prefix"]
        assert greedy(llm, prompts, NEW) == expected[: len(prompts)]
        after = llm.stats()["kv"]["prefix"]
        return {name: after[name] - before[name] for name in after}

    assert found(PROMPTS)["missed_tokens"] > 0
    llm.evict_gpu_cache()
    cold = found(PROMPTS[:2])
    assert (cold["hits_cpu_tokens"], cold["hits_gpu_tokens"]) > (0, 0)
    assert found(PROMPTS[:2])["hits_gpu_tokens"] > 0
    # Of a prompt of 90 tokens 11 blocks are read, and those that windows of 40 and 13 see.
    block = llm.plan.kv.block_bytes
    llm.reset_cache()
    found(PROMPTS[:1])
    assert found(PROMPTS[:1])["hits_gpu_bytes"] == 11 * block[0] + 5 * block[1] + 2 * block[2]
    assert greedy(llm, [LONG], NEW) == long
    stats = llm.stats()["kv"]
    assert stats["in_place_bytes"] > 0
    assert stats["staged_prefill_bytes"] > 0
    assert greedy(llm, many, 30) == expected_of_many
    stats = llm.stats()["kv"]
    assert stats["swaps_out"] > 0
    assert stats["moved"]["staged_bytes"] > 0
    assert len(stats["groups"]) == 3
    check_empty(llm)
    llm.close()


def test_blocks_behind_each_window_are_given_back_and_not_read(
    tiny: TinyModels, masked: Masked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is given back is poisoned; the negative control misses a block of every window."""
    llm = open_three(tiny)
    engine = llm._engine
    assert engine is not None
    given_back = [0, 0, 0]
    for group, (pool, tensor) in enumerate(
        zip(engine.core.pools, engine.cache.tensors, strict=True)
    ):

        def poisoned(
            blocks: list[int],
            retain: Retain = "demote",
            group: int = group,
            free: Any = pool.free,
            tensor: torch.Tensor = tensor,
        ) -> None:
            free(blocks, retain)
            tensor[list(blocks)] = torch.nan
            given_back[group] += len(blocks)

        monkeypatch.setattr(pool, "free", poisoned)
    assert greedy(llm, [LONG], NEW) == masked([LONG], NEW)
    assert given_back == [34, 34, 34]
    monkeypatch.setattr(sequences, "num_expired", lambda *a: num_expired(*a) + (a[1] is not None))
    said = "expected finite logits|index out of range"  # poison, or a block that is gone
    with pytest.raises((EngineError, IndexError), match=said):
        greedy(llm, [LONG], NEW)
    llm.close()
