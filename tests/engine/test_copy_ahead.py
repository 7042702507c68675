"""Decodes whose host blocks are copied ahead: the tokens of each prompt alone in a resident engine.

Together with others, with prefixes in the host tier, several answers, aborts, preemption, windows,
and weights in host memory.
"""

from typing import Any

import pytest

from engine import LLM, SamplingParams, build
from engine.device.cpu import CPUDevice, LazyCopyStream
from engine.plan.sizes import CopyAhead
from tests.engine.conftest import TinyModels
from tests.engine.tiers import ALWAYS, SIZES, TOGETHER, Alone, check_empty, tiers
from tests.slow import slow
from tests.tiny import greedy, make_prompt, open_llm

LONG = make_prompt(700, seed=8)
SHORT = [make_prompt(20 + at, seed=at) for at in range(3)]
NEW = 12
LIMITS: dict[str, Any] = {
    "max_num_batched_tokens": 64,
    "max_model_len": 800,
    "max_num_seqs": 4,
    "block_size": 16,
}
GPU, PINNED = 24, 40
"""Blocks: 384 tokens fit the GPU, and so 12 of the 16 blocks of the second split of LONG do not."""


@pytest.fixture(scope="module")
def alone() -> Alone:
    return Alone(at_once=True)


def open_ahead(
    monkeypatch: pytest.MonkeyPatch,
    folder: Any,
    copy_ahead: CopyAhead = ALWAYS,
    sizes: dict[str, Any] | None = None,
    **keywords: Any,
) -> LLM:
    given = {"pinned": PINNED, "copy_ahead": copy_ahead, **(sizes or {})}
    tiers(monkeypatch, given.pop("num_gpu", GPU), **given)
    return open_llm(folder, **{**LIMITS, **keywords})


def copied(llm: LLM) -> int:
    return int(llm.stats()["kv"]["copied_ahead_bytes"])


@pytest.mark.parametrize("variant", ["qwen3", *map(slow, ("olmo2", "gemma3", "gpt_oss"))])
def test_a_long_sequence_alone_and_beside_others(
    tiny: TinyModels, alone: Alone, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    folder = tiny.folder(variant)
    expected = alone(folder, [LONG, *SHORT], NEW)
    llm = open_ahead(monkeypatch, folder, sizes={"num_window": 60})
    assert greedy(llm, [LONG], NEW) == expected[:1]
    step = llm.last_step
    assert step is not None
    # The second split is copied, of which 12 blocks lie in the host tier; the third is not.
    assert step.kv_copied_bytes == 8 * llm.plan.block_bytes
    total = step.kv_copied_bytes + step.kv_in_place_bytes
    assert total == (len(LONG) + NEW - 1 - GPU * 16) * llm.plan.block_bytes // 16
    assert greedy(llm, [*SHORT, LONG], NEW) == [*expected[1:], expected[0]]
    check_empty(llm)
    llm.close()


@pytest.mark.thorough
@pytest.mark.parametrize("is_eager", [False, slow(True)], ids=["late copies", "early copies"])
@pytest.mark.parametrize(
    "keywords",
    [
        {"cpu_offload_gb": 1, "uva_stage_tokens": 1},
        slow({"cpu_offload_gb": 1}),
        slow({"offload_group_size": 1, "offload_prefetch_step": 2}),
        slow({"max_num_batched_tokens": 16, "enforce_eager": True}),
    ],
    ids=["uva staged", "uva", "prefetch", "small chunks"],
)
def test_beside_weights_in_host_memory(
    tiny: TinyModels,
    alone: Alone,
    monkeypatch: pytest.MonkeyPatch,
    keywords: dict[str, Any],
    is_eager: bool,
) -> None:
    folder = tiny.folder("olmo2", **SIZES)
    expected = alone(folder, [LONG], NEW)
    monkeypatch.setattr(build, "open_device", lambda _: CPUDevice(eager_copies=is_eager))
    llm = open_ahead(monkeypatch, folder, **keywords)
    assert greedy(llm, [LONG], NEW) == expected
    assert copied(llm) > 0
    check_empty(llm)
    llm.close()


@pytest.mark.thorough
def test_prefixes_preemption_and_aborts(
    tiny: TinyModels, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.folder("llama", **SIZES)
    prompts = [LONG, LONG[:500] + make_prompt(150, seed=3), *SHORT]
    expected = alone(folder, prompts, NEW)
    llm = open_ahead(monkeypatch, folder)
    for turn in range(3):
        # The first turn computes all, the next ones find it on the GPU and in the host tier.
        before = copied(llm)
        assert greedy(llm, prompts, NEW) == expected
        assert copied(llm) > before
        request_id = llm.add_request(LONG, SamplingParams(temperature=0, max_tokens=NEW))
        while llm.last_step is None or not llm.last_step.kv_copied_bytes:
            llm.step()
        llm.step()
        llm.abort(request_id)
        if turn:
            llm.evict_gpu_cache()
    assert llm.stats()["kv"]["prefix"]["hits_cpu_tokens"] > 0
    check_empty(llm)
    llm.close()


@pytest.mark.thorough
def test_several_answers_of_one_prompt(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.folder("llama", **SIZES)
    params = SamplingParams(n=3, temperature=0.9, top_k=30, seed=3, max_tokens=20, ignore_eos=True)
    found = []
    for sizes in ({"num_gpu": 200, "pinned": 0, "prefix_caching": False}, {"pinned": 60}):
        llm = open_ahead(monkeypatch, folder, sizes=sizes)
        [output] = llm.generate([LONG[:600]], params)
        found.append([answer.token_ids for answer in output.outputs])
        assert (copied(llm) > 0) is (len(found) == 2)
        check_empty(llm)
        llm.close()
    assert found[0] == found[1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("copy_ahead", "stage_blocks"),
    [
        (CopyAhead(step_bytes=2**40, run_bytes=0), 16),
        (CopyAhead(step_bytes=0, run_bytes=2**40), 16),
        (ALWAYS, 11),
    ],
    ids=["few bytes", "short runs", "small buffers"],
)
def test_what_is_not_worth_a_copy_is_read_in_place(
    tiny: TinyModels,
    alone: Alone,
    monkeypatch: pytest.MonkeyPatch,
    copy_ahead: CopyAhead,
    stage_blocks: int,
) -> None:
    folder = tiny.folder("llama", **SIZES)
    expected = alone(folder, [LONG], NEW)
    sizes = {"num_gpu": 20, "stage_blocks": stage_blocks}
    llm = open_ahead(monkeypatch, folder, copy_ahead, sizes)
    assert greedy(llm, [LONG], NEW) == expected
    assert copied(llm) == 0
    assert llm.stats()["kv"]["in_place_bytes"] > 0
    llm.close()


@pytest.mark.thorough
def test_few_bytes_each_are_copied_beside_prompts_only(
    tiny: TinyModels, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two read more in a step than what one alone would copy, but not in the mean."""
    folder = tiny.folder("llama", **SIZES)
    prompts = [LONG, LONG[::-1]]
    expected = alone(folder, prompts, NEW)
    given = {"pinned": 90, "read_rates": TOGETHER}
    token_bytes = 2 * 3 * 16 * 4
    llm = open_ahead(
        monkeypatch, folder, CopyAhead(step_bytes=700 * token_bytes, run_bytes=0), given
    )
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        llm.add_request(prompt, params, str(number))
    found: list[list[int]] = [[], []]
    beside = steps = 0
    while llm.has_unfinished():
        for event in llm.step():
            found[int(event.request_id)].append(event.token_id)
        step = llm.last_step
        if step is None or llm.stats()["steps"] == steps:
            continue
        steps = llm.stats()["steps"]
        if step.num_prefill_tokens:
            beside += step.kv_copied_bytes
        elif step.num_decode_tokens == 2:
            assert (step.kv_copied_bytes, step.kv_in_place_bytes > 900 * token_bytes) == (0, True)
    assert found == expected
    assert beside > 0
    llm.close()


@pytest.mark.thorough
def test_snapshots_and_stats_count_what_was_copied(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.folder("llama", **SIZES)
    llm = open_ahead(monkeypatch, folder)
    llm.add_request(LONG, SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True))
    moved = {"kv_copied_bytes": 0, "kv_in_place_bytes": 0}
    steps = 0
    while llm.has_unfinished():
        llm.step()
        step = llm.last_step
        if step is not None and llm.stats()["steps"] > steps:
            steps = llm.stats()["steps"]
            moved = {name: count + getattr(step, name) for name, count in moved.items()}
    stats = llm.stats()["kv"]
    assert stats["copied_ahead_bytes"] == moved["kv_copied_bytes"] > 0
    assert stats["in_place_bytes"] == moved["kv_in_place_bytes"] > 0
    total = sum(moved.values()) + stats["staged_prefill_bytes"] + stats["moved"]["loaded_bytes"]
    assert llm.snapshot().link_kv_bytes == total
    llm.close()


def test_copies_that_a_failed_step_left_are_done_before_the_next_fills_its_inputs(
    tiny: TinyModels, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read the numbers of their blocks there."""
    folder = tiny.folder("llama", **SIZES)
    expected = alone(folder, [LONG], NEW)
    llm = open_ahead(monkeypatch, folder)
    assert llm._engine is not None
    stages = llm._engine.executor._decoder.stages
    assert stages is not None
    prefill, stream, left = stages.prefill, stages._stream, []
    assert isinstance(stream, LazyCopyStream)

    def fail_once(layer: int, *args: Any) -> None:
        if stages._ready and layer and not left:
            left.append(stream._enqueued - stream._done)
            raise RuntimeError("tests say so")
        prefill(layer, *args)

    monkeypatch.setattr(stages, "prefill", fail_once)
    with pytest.raises(RuntimeError, match="tests say so"):
        greedy(llm, [LONG], NEW)
    assert left[0] > 0
    assert stream._enqueued == stream._done
    assert greedy(llm, [LONG], NEW) == expected
    check_empty(llm)
    llm.close()
