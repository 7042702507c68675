"""The LLM door: closing, memory, load reports, counts, events."""

import gc
import math
import os
import shutil
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import LLM
from engine.errors import CapacityError, EngineError
from tests.engine.conftest import TinyModels
from tests.tiny import greedy, greedy_params, make_config, make_prompt, open_llm

GIB = 2**30
TEXTS = ["Hello, my name is", "The capital of France is", "x"]
PROMPTS = [make_prompt(length, seed=3) for length in (1, 12, 30)]


# Life of an engine.


def test_a_closed_engine_says_so(tiny: TinyModels) -> None:
    llm = open_llm(tiny.folder("llama"))
    llm.add_request(PROMPTS[1], greedy_params(5))
    llm.step()
    llm.close()
    llm.close()
    uses: list[Callable[[], Any]] = [
        lambda: llm.generate(PROMPTS, greedy_params(1)),
        llm.__enter__,
        lambda: llm.add_request([5]),
        llm.step,
        llm.has_unfinished,
        lambda: llm.abort("a"),
        llm.stats,
        llm.memory,
        llm.effective,
        lambda: llm.plan,
        lambda: llm.spec,
        lambda: llm.tokenizer,
        lambda: llm.last_step,
        lambda: llm.load_report,
        lambda: llm.max_model_len,
    ]
    for use in uses:
        with pytest.raises(EngineError, match="was closed"):
            use()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of fork, in 3.12
def test_a_forked_child_is_refused(tiny: TinyModels) -> None:
    """It lacks the engine's threads, and would wait for them."""
    llm = open_llm(tiny.folder("llama"))
    before = greedy(llm, PROMPTS, 3)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a child that waits
        try:
            llm.generate(PROMPTS, greedy_params(3))
        except EngineError as error:
            own = f"expected process {os.getppid()}, which built the engine, got {os.getpid()}, "
            is_said = own in str(error) and str(error).endswith("Build the engine after the fork.")
            os._exit(0 if is_said else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert greedy(llm, PROMPTS, 3) == before
    llm.close()


@pytest.mark.thorough_but("True")
@pytest.mark.parametrize("close", [False, True])
def test_memory_goes_with_the_engine(tiny: TinyModels, close: bool) -> None:
    llm = open_llm(tiny.folder("llama"), cpu_offload_gb=1)
    greedy(llm, PROMPTS, 2)
    parts = [weakref.ref(part) for part in (llm._engine.store, llm._engine.cache, llm._engine)]
    tensors = [weakref.ref(llm._engine.cache.tensor), weakref.ref(llm._engine.store._host_buffer)]
    if close:
        llm.close()
    else:
        del llm
    gc.collect()
    assert [part() for part in (*parts, *tensors)] == [None] * 5
    again = open_llm(tiny.folder("llama"), cpu_offload_gb=1)
    assert greedy(again, PROMPTS, 5) == tiny.greedy("llama", PROMPTS, 5)
    again.close()


def test_a_plan_alone_reads_no_weights(tiny: TinyModels, tmp_path: Path) -> None:
    folder = tiny.folder("llama")
    keywords: dict[str, Any] = {"offload_group_size": 2}
    llm = open_llm(folder, **keywords)
    shutil.copy(folder / "config.json", tmp_path)
    plan = LLM.plan_for(make_config(tmp_path, **keywords))
    assert plan.placements == llm.plan.placements
    assert plan.gpu_items == llm.plan.gpu_items
    assert plan.host_items == llm.plan.host_items
    llm.close()
    with pytest.raises(CapacityError, match="MiB short") as caught:
        LLM.plan_for(make_config(tmp_path, gpu_memory_gib=1e-4))
    assert caught.value.plan is not None
    assert caught.value.plan["gpu"]


def test_phases_of_the_load_sum_to_its_time(tiny: TinyModels) -> None:
    for keywords in ({}, {"dtype": "bfloat16"}, {"load_format": "dummy"}):
        llm = open_llm(tiny.folder("llama"), offload_group_size=2, **keywords)
        report = llm.load_report
        assert sum(report.phases.values()) == pytest.approx(report.total_s, rel=1e-6)
        assert all(seconds >= 0 for seconds in report.phases.values())
        wanted = {"plan", "touch", "pin", "warm_up", "allocate"}
        wanted |= {"convert"} if keywords else {"read"}
        assert wanted <= report.phases.keys()
        slab = llm.memory()["host_pinned_bytes"]
        source = report.moved["convert" if keywords.get("load_format") else "read"]
        assert report.moved == {
            "touch": slab,
            "pin": slab,
            ("convert" if keywords.get("load_format") else "read"): source,
        }
        assert source == sum(part.numel for part, _ in llm._engine.store.parameters()) * 4
        llm.close()


def test_counts_of_steps(tiny: TinyModels, pool_is_full: Callable[[LLM], bool]) -> None:
    llm = open_llm(tiny.folder("llama"), cpu_offload_gb=1)
    start = llm.stats()
    assert pool_is_full(llm)
    llm.add_request(PROMPTS[2], greedy_params(3))
    llm.step()
    step = llm.last_step
    assert step is not None
    assert (step.num_prefill_tokens, step.num_decode_tokens) == (30, 0)
    assert llm.stats()["free_blocks"] == llm.stats()["num_blocks"] - 2
    llm.step()
    step = llm.last_step
    assert (step.num_prefill_tokens, step.num_decode_tokens) == (0, 1)
    assert step.duration_s > 0
    assert not step.used_graph
    llm.step()
    stats = llm.stats()
    assert stats["steps"] == start["steps"] + 3
    assert (stats["prefill_tokens"], stats["decode_tokens"], stats["finished"]) == (30, 2, 1)
    assert stats["in_place_bytes"] - start["in_place_bytes"] == 3 * llm.plan.bytes_per_step()
    assert pool_is_full(llm)
    assert llm.step() == []
    llm.close()


def test_events_carry_positions_and_times(llm: LLM) -> None:
    llm.add_request(PROMPTS[1], greedy_params(4), "timed")
    events = []
    while llm.has_unfinished():
        events += llm.step()
    assert [event.position for event in events] == [12, 13, 14, 15]
    assert [event.finish_reason for event in events] == [None, None, None, "length"]
    times = [event.time_s for event in events]
    assert times == sorted(times)
    assert all(math.isfinite(time) for time in times)


def test_a_second_thread_is_refused(llm: LLM, tiny: TinyModels) -> None:
    refused: list[str] = []
    step = llm._engine.core.step

    def use() -> None:
        calls = (
            llm.step,
            lambda: llm.add_request([5]),
            lambda: llm.abort("x"),
            llm.reset_cache,
            llm.evict_gpu_cache,
            llm.close,
        )
        for call in calls:
            with pytest.raises(EngineError, match="a second one") as error:
                call()
            refused.append(str(error.value))

    def step_beside_another() -> Any:
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm._engine.core, "step", step_beside_another)
        found = greedy(llm, PROMPTS[1:2], 2)
    assert found == [tokens[:2] for tokens in tiny.greedy("llama", PROMPTS[1:2], 2)]
    assert len(refused) >= 12


def test_params_that_change_after_a_request_was_added_do_not_count(llm: LLM) -> None:
    params = greedy_params(3, stop=["never this"])
    llm.add_request(PROMPTS[1], params, "a")
    params.max_tokens, params.logprobs = 9, 50
    params.stop = 5  # type: ignore[assignment]
    events = []
    while llm.has_unfinished():
        events += llm.step()
    assert [event.finish_reason for event in events] == [None, None, "length"]


def test_a_name_that_is_made_is_one_that_is_free(llm: LLM) -> None:
    first = llm.add_request(PROMPTS[0], greedy_params(1))
    following = f"request-{int(first.split('-')[1]) + 2}"
    llm.add_request(PROMPTS[1], greedy_params(4), following)
    assert [output.error for output in llm.generate(PROMPTS, greedy_params(2))] == [None] * 3
    while llm.has_unfinished():
        llm.step()


def test_generate_keeps_tokens_of_other_requests_for_step(llm: LLM, tiny: TinyModels) -> None:
    wanted = tiny.greedy("llama", PROMPTS, 6)
    llm.add_request(PROMPTS[1], greedy_params(6), "mine")
    found = llm.step()
    assert greedy(llm, [PROMPTS[2]], 4) == [wanted[2][:4]]
    assert llm.has_unfinished()
    while llm.has_unfinished():
        found += llm.step()
    assert [event.token_id for event in found] == wanted[1]
    llm.add_request(PROMPTS[1], greedy_params(2), "mine")
    assert greedy(llm, [PROMPTS[0]], 6) == [wanted[0]]
    assert llm.has_unfinished()
    assert [event.token_id for event in llm.step()] == wanted[1][:2]
    assert not llm.has_unfinished()


def test_the_record_of_what_is_used_is_plain_data(llm: LLM) -> None:
    import json

    found = llm.effective()
    assert json.loads(json.dumps(found)) == found
    assert found["emulated"] is True
    assert found["backend"] == "prefetch"
    assert found["offloaded_layers"] == [1]
    assert sum(found["placement_bytes"].values()) == llm.spec.weight_bytes("float32")


def test_a_progress_bar_can_be_shown(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate([PROMPTS[0], []], greedy_params(2), use_tqdm=True)
    assert "2/2" in capfd.readouterr().err
