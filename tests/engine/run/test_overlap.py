"""Steps launched before the one before them is collected: the same tokens, and no others."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.clock import StepStats
from engine.device import cpu
from engine.run import core
from engine.run.executor import DeviceExecutor
from engine.run.inputs import StepShape, Upload
from engine.weights.store import WeightStore
from tests.engine.conftest import TinyModels
from tests.engine.faults import or_poison
from tests.engine.groups import with_blocks
from tests.engine.late import drain, make_late
from tests.slow import slow
from tests.tiny import greedy, greedy_params, make_prompt, open_llm, tokens_of

PROMPTS = [make_prompt(length, seed=5) for length in (1, 12, 30, 7, 18)]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "max_tokens": 1},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0.8, "top_p": 0.9, "seed": 4},
    {"top_k": 5, "n": 2},
    {"min_p": 0.1, "logprobs": 0},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "top_k": 20},
    {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"presence_penalty": -2, "repetition_penalty": 1.2, "seed": 7, "n": 2},
    {"logit_bias": {5: 4, 9: 100, 11: -100}, "min_tokens": 3, "frequency_penalty": 2},
    {"temperature": 1.5, "min_tokens": 6, "stop_token_ids": list(range(0, 151, 3))},
    {"temperature": 1.5, "stop_token_ids": list(range(0, 151, 5))},
    {"temperature": 0, "stop": ["e", " a", "t"]},
    {"temperature": 1.2, "stop": ["o"], "min_tokens": 3},
]


def open_overlap(folder: Path, **keywords: Any) -> LLM:
    given = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "max_model_len": 64, **keywords}
    return open_llm(folder, block_size=8, **given)


def load(llm: LLM) -> list[Any]:
    """What every kind of sampling gives: tokens, text, reasons and log-probabilities."""
    params = [SamplingParams(**{"max_tokens": 14, **kind}) for kind in KINDS]
    prompts = [PROMPTS[at % len(PROMPTS)] for at in range(len(params))]
    found: list[Any] = []
    for output in llm.generate(prompts, params):
        assert output.error is None
        for x in output.outputs:
            tops = None if x.logprobs is None else [list(top) for top in x.logprobs]
            found.append((x.token_ids, x.text, x.finish_reason, x.stop_reason, tops, x.ranks))
            found.append(pytest.approx(x.cumulative_logprob, abs=1e-4))
    return found


@pytest.fixture(scope="module")
def expected(text_folder: Path) -> list[Any]:
    """What the load gives where no step overlaps another."""
    llm = open_overlap(text_folder)
    llm._engine.core.overlap = False
    found = load(llm)
    assert llm.stats()["overlapped_steps"] == 0
    reasons = {answer[2] for answer in found[::2]}
    assert reasons == {"length", "stop"}
    llm.close()
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("num_blocks", "late"), [(None, False), (9, True), slow(None, True), slow(9, False)]
)
def test_every_kind_of_sampling_gives_the_tokens_of_steps_that_do_not_overlap(
    text_folder: Path,
    expected: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    pool_is_full: Callable[[LLM], bool],
    late: bool,
    num_blocks: int | None,
) -> None:
    if num_blocks is not None:
        with_blocks(monkeypatch, num_blocks)
    llm = open_overlap(text_folder, offload_group_size=2)
    work = make_late(llm, monkeypatch) if late else None
    assert load(llm) == expected
    stats = llm.stats()
    assert 5 < stats["overlapped_steps"] < stats["steps"]
    assert (stats["preemptions"] > 0) is (num_blocks is not None)
    assert pool_is_full(llm)
    if work is not None:
        assert work.most == 6  # of two steps: inputs, layers, sampling
    llm.close()


@pytest.mark.thorough_but("late")
@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
def test_greedy_requests_overlap_in_all_steps_but_the_first(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    llm = open_llm(tiny.folder("llama"), offload_group_size=1)
    if late:
        make_late(llm, monkeypatch)
    for count in (1, 3, 5):
        before = llm.stats()
        found = greedy(llm, PROMPTS[:count], 9)
        assert found == tiny.greedy("llama", PROMPTS[:count], 9)
        after = llm.stats()
        assert after["steps"] - before["steps"] == 9
        assert after["overlapped_steps"] - before["overlapped_steps"] == 8
    llm.close()


# Faults put in on purpose.


def overlapped_tokens(llm: LLM) -> list[list[int]]:
    found = greedy(llm, PROMPTS[:3], 9)
    llm.close()
    return found


def stale_ids(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """The newest token that the host knows runs again."""
    inputs = llm._engine.executor._batches.inputs
    scheduler = llm._engine.core.scheduler

    def set_stale(place: int, token_row: int) -> None:
        inputs.ids.host[place] = scheduler.running[place].last_token_id

    monkeypatch.setattr(inputs, "set_unknown", set_stale)


def ids_not_read(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    run = Upload.run
    monkeypatch.setattr(Upload, "run", lambda self: run(replace(self, tokens=None)))


def wrong_rows(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    run = Upload.run
    monkeypatch.setattr(
        Upload, "run", lambda self: run(replace(self, token_rows=self.token_rows.flip(0)))
    )


def tokens_overwritten(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """Tokens of the step before that are read once another has sampled."""
    sampler = llm._engine.core.executor.sampler
    enqueue = sampler.enqueue

    def enqueue_and_wipe(*args: Any) -> Any:
        pending = enqueue(*args)
        sampler.tokens.zero_()
        return pending

    monkeypatch.setattr(sampler, "enqueue", enqueue_and_wipe)


def one_host_table(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    sampler = llm._engine.core.executor.sampler
    sampler._hosts = sampler._targets = sampler._hosts[:1]


@pytest.mark.thorough_but("stale_ids", "tokens_overwritten")
@pytest.mark.parametrize(
    "fault", [stale_ids, ids_not_read, wrong_rows, tokens_overwritten, one_host_table]
)
def test_control_a_fault_changes_tokens(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]
) -> None:
    llm = open_llm(tiny.folder("llama"))
    fault(monkeypatch, llm)
    assert overlapped_tokens(llm) != tiny.greedy("llama", PROMPTS[:3], 9)


def test_control_one_buffer_of_inputs_changes_tokens_where_the_device_is_late(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    for num_buffers, is_right in ((1, False), (2, True)):
        llm = open_llm(tiny.folder("llama"))
        with monkeypatch.context() as patched:
            make_late(llm, patched)
            for index, prompt in enumerate(PROMPTS[:3]):
                llm.add_request(prompt, greedy_params(9), str(index))
            tokens = {event.request_id: [event.token_id] for event in llm.step()}
            inputs = llm._engine.executor._batches.inputs
            inputs._hosts = inputs._hosts[:num_buffers]
            inputs._arrays = inputs._arrays[:num_buffers]
            found = or_poison(lambda: list(drain(llm, tokens).values()))  # noqa: B023
            llm.close()
        assert (found == tiny.greedy("llama", PROMPTS[:3], 9)) is is_right


# What is counted.


class Clock:
    """A clock that stands still but for what tests say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        for module in (core, cpu):
            monkeypatch.setattr(module, "perf_counter", lambda: self.now_s)


def timed(llm: LLM, max_tokens: int) -> tuple[list[float], list[StepStats]]:
    """When each token of a prompt of 12 tokens came, and what its step says."""
    llm.add_request(PROMPTS[1], greedy_params(max_tokens))
    times, steps = [], []
    while llm.has_unfinished():
        [event] = llm.step()
        times.append(event.time_s)
        assert llm.last_step is not None
        steps.append(llm.last_step)
    return times, steps


@pytest.mark.parametrize("overlap", [True, False])
def test_a_token_comes_with_its_own_step_where_launching_computes(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    clock = Clock(monkeypatch)
    execute = DeviceExecutor.execute

    def execute_slowly(self: DeviceExecutor, batch: Any) -> Any:
        clock.now_s += 7.0 if batch.num_tokens > 1 else 2.0
        return execute(self, batch)

    monkeypatch.setattr(DeviceExecutor, "execute", execute_slowly)
    llm = open_llm(tiny.folder("llama"))
    llm._engine.core.overlap = overlap
    begin_s = clock.now_s
    times, steps = timed(llm, 4)
    assert [time - begin_s for time in times] == [7.0, 9.0, 11.0, 13.0]
    assert [step.duration_s for step in steps] == [7.0, 2.0, 2.0, 2.0]
    assert [step.wait_s for step in steps] == [0.0] * 4
    assert [step.is_overlapped for step in steps] == [False] + [overlap] * 3
    llm.close()


def test_a_token_comes_with_its_own_step_where_launching_is_slow(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device needs half a second for a step, the host a second to launch a layer."""
    clock = Clock(monkeypatch)

    class Mark:
        def __init__(self) -> None:
            self.end_s = clock.now_s + 0.5
            self.passed_s = 0.0

        def wait(self) -> float:
            clock.now_s = max(clock.now_s, self.end_s)
            assert self.is_done()
            return self.passed_s

        def is_done(self) -> bool:
            if not self.passed_s and clock.now_s >= self.end_s:
                self.passed_s = clock.now_s
            return self.passed_s > 0

    release = WeightStore.release

    def release_slowly(self: WeightStore, layer: int) -> None:
        clock.now_s += 1.0
        release(self, layer)

    llm = open_llm(tiny.folder("llama"))
    monkeypatch.setattr(llm._engine.device, "mark", Mark)
    monkeypatch.setattr(WeightStore, "release", release_slowly)
    begin_s = clock.now_s
    times, steps = timed(llm, 3)
    assert [time - begin_s for time in times] == [4.0, 7.0, 9.5]
    assert [step.duration_s for step in steps] == [4.0, 3.0, 2.5]
    llm.close()


@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
def test_times_of_steps_that_overlap_add_up(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    llm = open_llm(tiny.folder("llama"), cpu_offload_gb=1)
    if late:
        make_late(llm, monkeypatch)
    times, steps = timed(llm, 6)
    assert [step.is_overlapped for step in steps] == [False] + [True] * 5
    assert [step.num_decode_tokens for step in steps] == [0] + [1] * 5
    per_step = llm.plan.bytes_per_step()
    assert late or [step.in_place_bytes for step in steps] == [per_step] * 6
    for step, first, second in zip(steps[1:], times, times[1:], strict=False):
        assert step.launch_s > 0
        if late:
            assert step.duration_s == pytest.approx(second - first)
            assert 0 < step.wait_s <= step.duration_s
        else:
            assert 0 < step.duration_s <= second - first
            assert step.wait_s == 0
    llm.close()


def test_a_replay_alone_runs_the_newest_decode_again(tiny: TinyModels) -> None:
    llm = open_llm(tiny.folder("llama"))
    replays: list[int] = []

    runner = llm._engine.executor
    assert not runner.replay_newest(2)
    for prompt in PROMPTS[1:3]:
        llm.add_request(prompt, greedy_params(4))
    runner._graphs[StepShape(2)] = (lambda: replays.append(1), 100, 20)
    llm.step()
    assert llm.last_step.used_graph is False
    before = llm.stats()
    replays.clear()
    assert runner.replay_newest(2)
    assert runner.replay_newest(2)
    assert not runner.replay_newest(1)
    after = llm.stats()
    assert replays == [1, 1]
    assert after["graph_steps"] == before["graph_steps"]
    assert after["h2d_bytes"] - before["h2d_bytes"] == 200
    assert after["in_place_bytes"] - before["in_place_bytes"] == 40
    llm.add_request(PROMPTS[3], greedy_params(1))
    llm.step()
    assert not runner.replay_newest(2)
    llm.close()


@pytest.mark.thorough
def test_the_same_tokens_whatever_the_torch_seed(tiny: TinyModels) -> None:
    """Draws are keyed by position, which a token in flight counts for."""
    params = SamplingParams(temperature=1.3, max_tokens=10)
    found = []
    for seed, overlap in ((0, True), (1, False)):
        torch.manual_seed(seed)
        llm = open_llm(tiny.folder("llama"))
        llm._engine.core.overlap = overlap
        found.append(tokens_of(llm.generate(PROMPTS, params)))
        llm.close()
    assert found[0] == found[1]


@pytest.mark.thorough
@pytest.mark.parametrize(("long_step_s", "begins"), [(0.0, True), (1e9, False)])
def test_a_long_prompt_misses_a_step_only_where_steps_are_short(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, long_step_s: float, begins: bool
) -> None:
    """While others run the keys of its blocks are made beside the device's work."""
    monkeypatch.setattr(core, "LONG_STEP_S", long_step_s)
    llm = open_llm(
        tiny.folder("llama"), block_size=8, max_num_batched_tokens=1024, enable_prefix_caching=True
    )
    llm.add_request(make_prompt(4), greedy_params(8))
    llm.step()
    llm.add_request(make_prompt(64 * 8 + 1), greedy_params(1), "long")
    llm.step()
    assert llm._engine is not None
    planned = llm._engine.core.scheduler.planned[0].prefills
    assert [item.num_tokens for item in planned] == ([64 * 8 + 1] if begins else [])
    ended = [event.request_id for event in llm.step()] + [e.request_id for e in llm.step()]
    assert "long" in ended
    llm.close()
