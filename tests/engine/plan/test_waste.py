"""Settings that take memory for nothing are said with figures, and only those."""

from dataclasses import replace
from typing import Any

import pytest

from engine.asked.config import PlannerConfig
from engine.asked.offload import OffloadConfig
from engine.plan.planner import plan_memory
from tests.engine.specs import H200, OLMO_7B, configuration, prefetch, uva


def notes(
    offload: OffloadConfig | None = None, memory_gib: float = 15.99, **settings: Any
) -> list[str]:
    settings = {"max_model_len": 4096} | settings
    config = configuration(OLMO_7B, memory_gib=memory_gib, offload=offload, **settings)
    found = plan_memory(config, OLMO_7B, H200).notes
    return [text for text in found if "taken whole" not in text]


def test_offload_room_beyond_the_weights_has_no_use() -> None:
    [note] = [text for text in notes(uva(100)) if "cpu_offload_gb" in text]
    assert note.startswith("offload.uva.cpu_offload_gb=100 is more than the ")
    assert note.endswith(" GiB of weights that can be moved, so the rest has no effect. Lower it.")
    assert not [text for text in notes(uva(8)) if "can be moved" in text]
    [note] = notes(uva(100), memory_gib=100)
    assert note.startswith("offload=uva is not needed: everything fits the GPU budget of ")
    assert " GiB, and offload.uva.cpu_offload_gb=100 is more than the 12." in note


def test_slots_that_make_no_step_shorter_are_named_with_what_fewer_would_free() -> None:
    [note] = notes(prefetch(8, 6, 6))
    assert "offload_prefetch_step=6 holds 7 slots; 1 would leave 1.8" in note
    assert "GiB more for the KV cache" in note
    assert notes(prefetch(8, 6, 1)) == []
    fewer = notes(prefetch(8, 6, 6), memory_gib=100, max_num_seqs=512)
    assert [text.split(":")[0] for text in fewer] == ["offload=prefetch is not needed"]


def test_slots_for_all_offloaded_layers_are_said_once_and_without_a_time() -> None:
    [note] = notes(prefetch(16, 1, 2), memory_gib=100, max_num_seqs=512)
    assert note.startswith("offload=prefetch is not needed: everything fits")
    assert "Slots hold all of the 2 offloaded layers, so nothing is streamed" in note
    assert " ms" not in note


@pytest.mark.parametrize(("most", "is_said"), [(150, False), (256, True)])
def test_sequences_beyond_the_blocks_never_run(most: int, is_said: bool) -> None:
    settings = {"max_num_seqs": most, "max_model_len": 128}
    found = notes(uva(4), memory_gib=15.2, **settings)
    config = configuration(OLMO_7B, memory_gib=15.2, offload=uva(4), **settings)
    plan = plan_memory(config, OLMO_7B, H200)
    assert (plan.num_gpu_blocks < most) is is_said
    said = [text for text in found if "sequences run at once" in text]
    assert len(said) == is_said
    if said:
        assert f"the KV cache has {plan.num_gpu_blocks} blocks" in said[0]


def test_a_budget_that_stays_empty_beside_an_offload_is_said() -> None:
    settings = {"max_num_seqs": 1, "max_model_len": 512}
    [note] = notes(uva(10), memory_gib=15.99, **settings)
    assert "GiB of the GPU budget stay unused" in note
    config = configuration(OLMO_7B, memory_gib=15.5, **settings)
    config = replace(config, planner=PlannerConfig(choose=True))
    assert plan_memory(config, OLMO_7B, H200).notes == ()


def test_plain_settings_say_nothing() -> None:
    assert notes(uva(8)) == []
    assert notes(memory_gib=40) == []


def tier_notes(kv: dict[str, Any], **settings: Any) -> list[str]:
    config = configuration(OLMO_7B, memory_gib=20, kv=kv, **settings)
    return [text for text in plan_memory(config, OLMO_7B, H200).notes if "kv." in text]


def test_a_host_tier_that_sequences_cannot_fill_is_said_unless_prefixes_are_kept() -> None:
    few: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 4096}
    [note] = tier_notes({"cpu_gib": 16}, **few)
    assert note.startswith("kv.cpu_gib: the host tier has 2048 blocks, of which ")
    assert "max_num_seqs=2 sequences of 4096 tokens take 512" in note
    assert "GiB of host memory stay unused" in note
    [note] = tier_notes({"num_cpu_blocks": 2048}, **few)
    assert note.startswith("kv.num_cpu_blocks: ")
    assert tier_notes({"cpu_gib": 16, "enable_prefix_caching": True}, **few) == []
    assert tier_notes({"cpu_gib": 16}, max_num_seqs=64, max_model_len=4096) == []


def test_a_pin_limit_beyond_the_tier_is_said() -> None:
    kv = {"cpu_gib": 4, "enable_prefix_caching": True}
    assert tier_notes(kv | {"pin_limit_gib": 10}) == [
        "kv.pin_limit_gib=10 caps nothing: the host tier has 4.00 GiB."
    ]
    assert "1 are page" in tier_notes(kv | {"pin_limit_gib": 3.996})[0]
