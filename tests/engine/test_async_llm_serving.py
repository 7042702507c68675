"""AsyncLLM as a server uses it: what ends requests, what refuses them, and what metrics read."""

import asyncio
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import AsyncLLM, SamplingParams, StructuredOutput
from engine.asked.request import NoToken
from engine.errors import EngineError, FailedRequestError, QueueFullError, RequestError
from engine.run.core import LinkUse
from engine.run.sampler import Sampler
from engine.text.constraints import Constraint
from tests.engine.test_async_llm import Gated, collect, to_the_end
from tests.engine.test_structured import byte_folder
from tests.tiny import greedy_params, make_prompt, open_llm

__all__ = ["byte_folder"]
pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("when", ["queued", "prefill", "decode"])
def test_an_abort_ends_a_request_within_a_step(text_folder: Path, when: str) -> None:
    """Steps are taken by hand: what ends when is what is asked."""
    llm = open_llm(
        text_folder, max_model_len=200, max_num_seqs=1, max_num_batched_tokens=16, block_size=8
    )
    scheduler = llm.engine.core.scheduler
    if when == "queued":
        llm.add_request(make_prompt(5), greedy_params(90), "other")
        llm.step()
    params = SamplingParams(n=2, temperature=0, max_tokens=90, ignore_eos=True)
    llm.add_request(make_prompt(60 if when == "prefill" else 12), params, "gone")
    for _ in range(1 if when == "prefill" else 3):
        llm.step()
    mine = [s for s in scheduler.running if s.request.request_id == "gone"]
    assert bool(mine) is (when != "queued")
    if when == "prefill":
        assert 0 < mine[0].num_computed < 60
    llm.abort("gone")
    left = {s.request.request_id for s in (*scheduler.running, *scheduler.waiting)}
    assert left == ({"other"} if when == "queued" else set())
    assert {event.request_id for event in llm.step()} <= {"other"}
    llm.abort("other")
    while llm.has_unfinished():
        llm.step()
    taken = llm.snapshot()
    assert (taken.running, taken.waiting, taken.gpu_kv_blocks_used) == (0, 0, 0)
    assert taken.aborted == (3 if when == "queued" else 2)
    llm.close()


def test_clients_that_leave_end_their_requests(llm: Any) -> None:
    async def main() -> None:
        door = AsyncLLM(llm)
        streams = [door.tokens(make_prompt(20, seed=at), greedy_params(150)) for at in range(9)]
        tasks = [asyncio.create_task(to_the_end(stream)) for stream in streams]
        await anext(door.tokens(make_prompt(3), greedy_params(1)))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await collect(door, make_prompt(3), greedy_params(1))
        taken = door.snapshot()
        assert (taken.running, taken.waiting, taken.gpu_kv_blocks_used) == (0, 0, 0)
        assert door.num_pending == 0
        door.release()
        llm.step()  # drops a step whose sequences all ended

    asyncio.run(main())


def test_a_full_queue_has_an_error_of_its_own() -> None:
    async def main() -> None:
        engine = Gated(tickets=0)
        async with AsyncLLM(engine, max_pending=1) as door:  # type: ignore[arg-type]
            task = asyncio.create_task(collect(door, [1]))
            await asyncio.sleep(0)
            for form in (None, StructuredOutput(regex="a")):
                with pytest.raises(QueueFullError, match="max_pending=1"):
                    await collect(door, [2], SamplingParams(structured=form))
            engine.let_go(3)
            await task

    asyncio.run(main())


REFUSED: list[tuple[Any, dict[str, Any], str, str | None]] = [
    ([], {}, "prompt", None),
    ([1] * 200, {}, "prompt", RequestError.CONTEXT_LENGTH),
    ([1, 10**9], {}, "prompt", None),
    ("bad \ud800", {}, "prompt", None),
    ([1], {"logit_bias": {151: 1.0}}, "logit_bias", None),
    ([1], {"stop_token_ids": [151]}, "stop_token_ids", None),
    ([1], {"structured": StructuredOutput(regex="[")}, "structured", None),
    ([1], {"min_tokens": 3, "stop_token_ids": list(range(151))}, "min_tokens", None),
]


@pytest.mark.parametrize(("prompt", "given", "param", "code"), REFUSED)
def test_errors_name_what_is_at_fault(
    llm: Any, prompt: Any, given: dict[str, Any], param: str, code: str | None
) -> None:
    async def main() -> None:
        door = AsyncLLM(llm)
        with pytest.raises(RequestError, match=param) as caught:
            await collect(door, prompt, SamplingParams(**given))
        assert (caught.value.param, caught.value.code) == (param, code)
        assert not isinstance(caught.value, QueueFullError | FailedRequestError)
        assert len((await collect(door, [1], greedy_params(2))).outputs[0].token_ids) == 2
        door.release()

    asyncio.run(main())


@pytest.mark.parametrize("fault", NoToken)
def test_a_request_that_fails_while_it_runs_says_whose_fault_it_is(
    byte_folder: Path, monkeypatch: pytest.MonkeyPatch, fault: NoToken
) -> None:
    enqueue, words = Sampler.enqueue, "expected finite logits"

    def spoiled(self: Sampler, logits: torch.Tensor, rows: Any) -> Any:
        return enqueue(self, torch.full_like(logits, math.nan), rows)

    monkeypatch.setattr(Sampler, "enqueue", spoiled)
    if fault is NoToken.FORM:
        words = "tests say so"
        monkeypatch.setattr(Constraint, "mask", lambda self: setattr(self, "error", words))
    llm = open_llm(byte_folder)

    async def main() -> None:
        async with AsyncLLM(llm) as door:
            form = StructuredOutput(regex="[0-9]{3}")
            with pytest.raises(RequestError, match=words) as caught:
                await collect(door, [5], SamplingParams(structured=form))
            is_own = fault is NoToken.FORM
            assert caught.value.param == ("structured" if is_own else None)
            assert isinstance(caught.value, FailedRequestError) is not is_own

    asyncio.run(main())


def test_forms_are_compiled_beside_the_engines_thread(
    byte_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm(byte_folder)
    constraints, threads = llm._sessions.constraints, list[int]()
    compile_ = constraints._compile

    def compiled(grammar: str) -> Any:
        threads.append(threading.get_ident())
        return compile_(grammar)

    monkeypatch.setattr(constraints, "_compile", compiled)

    async def main() -> None:
        async with AsyncLLM(llm) as door:
            form = StructuredOutput(regex="[0-9]{3}x")
            params = SamplingParams(structured=form, logprobs=1, max_tokens=9)
            found = [await collect(door, [5], params) for _ in range(2)]
            assert all(x.outputs[0].text[3:] == "x" for x in found)
            assert len(found[0].outputs[0].ranks) == len(found[0].outputs[0].token_ids)
            assert len(threads) == 1
            assert threads[0] not in {door._thread.ident, threading.get_ident()}

    asyncio.run(main())


def test_a_snapshot_counts_what_was_done(text_folder: Path) -> None:
    llm = open_llm(text_folder, offload_group_size=1, enable_prefix_caching=True, block_size=8)
    before = llm.snapshot()
    assert (before.steps, before.link_bytes_per_step, before.gpu_kv_usage) == (0, 0.0, 0.0)
    for number in range(2):
        llm.add_request(make_prompt(20), greedy_params(6), str(number))
        llm.step()
        running = llm.snapshot()
        assert (running.running, running.waiting) == (1, 0)
        assert 0 < running.gpu_kv_usage < 1
        while llm.has_unfinished():
            llm.step()
    after, stats = llm.snapshot(), llm.stats()
    assert (after.running, after.waiting, after.swapped, after.gpu_kv_blocks_used) == (0, 0, 0, 0)
    assert (after.steps, after.finished) == (stats["steps"], 2)
    assert after.prefix_queried_tokens == 32
    assert (after.prefix_hit_gpu_tokens, after.prefix_hit_host_tokens) == (16, 0)
    assert after.prefill_tokens == 20 + 4
    assert after.link_weight_bytes == stats["h2d_bytes"] + stats["in_place_bytes"] > 0
    assert after.link_bytes_per_step > 0
    assert after.link_share is not None
    assert after.link_share > 0
    assert after.step_s > 0
    assert (after.host_kv_blocks, after.host_kv_blocks_used, after.link_kv_bytes) == (0, 0, 0)
    llm.close()
    with pytest.raises(EngineError, match="it was closed"):
        llm.snapshot()


def test_use_of_the_link() -> None:
    use = LinkUse.of([(100, 1.0), (300, 3.0)])
    assert (use.bytes_per_step, use.bytes_per_s) == (200.0, 100.0)
    assert (LinkUse.of([]), LinkUse.of([(5, 0.0)])) == (LinkUse(0.0, 0.0), LinkUse(5.0, 0.0))


def test_the_first_token_tells_what_the_cache_gave_and_when_its_step_began(
    text_folder: Path,
) -> None:
    llm = open_llm(text_folder, offload_group_size=1, enable_prefix_caching=True, block_size=8)
    [cold] = llm.generate([make_prompt(20)], greedy_params(3))
    [warm] = llm.generate([make_prompt(20)], greedy_params(3))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 16)
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids
    llm.add_request(make_prompt(20), greedy_params(3), "stepped")
    found = []
    while llm.has_unfinished():
        found += llm.step()
    assert [event.num_cached_tokens for event in found] == [16, None, None]
    first, *others = found
    assert first.begin_s is not None
    assert first.begin_s < first.time_s
    assert [event.begin_s for event in others] == [None, None]

    async def stream() -> list[int | None]:
        async with AsyncLLM(llm) as door:
            outputs = door.generate(make_prompt(20), greedy_params(3))
            return [output.num_cached_tokens async for output in outputs]

    assert set(asyncio.run(stream())) == {16}
