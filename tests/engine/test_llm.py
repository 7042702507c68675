"""The LLM door: prompts of every form, requests that fail alone, ends, seeds, aborts, closing."""

import gc
import math
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, KVTransferConfig, OffloadConfig, SamplingParams
from engine.config import KVConfig, UVAOffloadConfig
from engine.errors import CapacityError, ConfigError, EngineError, RequestError
from tests.engine.conftest import TinyModels
from tests.tiny import VOCAB, greedy, greedy_params, make_prompt, open_llm, tokens_of, write_config

GIB = 2**30
TEXTS = ["Hello, my name is", "The capital of France is", "x"]
PROMPTS = [make_prompt(length, seed=3) for length in (1, 12, 30)]


def add_tokenizer(folder: Path) -> None:
    """Save a tokenizer of 151 tokens: printable characters, some pairs, two special tokens."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(32, 127)]
    pairs = [(a, b) for a in "aehnorst" for b in "eghinort"]
    merges = pairs[: VOCAB - 2 - len(characters)]
    words = ["<s>", "</s>", *characters, *(a + b for a, b in merges)]
    assert len(words) == VOCAB
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, list(merges)))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a tokenizer; must not be written to."""
    copy = tmp_path_factory.mktemp("text") / "llama"
    shutil.copytree(tiny.folder("llama"), copy)
    add_tokenizer(copy)
    return copy


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    """An engine that several tests use; each must leave it idle."""
    return open_llm(folder, max_model_len=200, offload_group_size=2)


@pytest.fixture(autouse=True)
def stays_idle(request: pytest.FixtureRequest, pool_is_full: Callable[[LLM], bool]) -> Any:
    """Fail a test that leaves requests or blocks behind in the shared engine."""
    yield
    if "llm" in request.fixturenames:
        assert pool_is_full(request.getfixturevalue("llm"))


# Prompts.


def test_text_prompts(llm: LLM, tiny: TinyModels) -> None:
    outputs = llm.generate(TEXTS, greedy_params(8))
    ids = [llm.tokenizer(text)["input_ids"] for text in TEXTS]  # type: ignore[misc]
    assert [output.prompt for output in outputs] == TEXTS
    assert [output.prompt_token_ids for output in outputs] == ids
    assert tokens_of(outputs) == tiny.greedy("llama", ids, 8)
    for output in outputs:
        [answer] = output.outputs
        text = llm.tokenizer.decode(answer.token_ids, skip_special_tokens=True)  # type: ignore[union-attr]
        assert answer.text == text
        assert output.finished
        assert answer.finish_reason == "length"
    [alone] = llm.generate(TEXTS[1], greedy_params(8))
    assert alone.outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_prompts_of_ids_and_mixed_ones(llm: LLM, tiny: TinyModels) -> None:
    expected = tiny.greedy("llama", PROMPTS, 5)
    assert tokens_of(llm.generate(PROMPTS[1], greedy_params(5))) == [expected[1]]
    assert tokens_of(llm.generate(tuple(PROMPTS), greedy_params(5))) == expected
    mixed = llm.generate([PROMPTS[2], TEXTS[0], PROMPTS[0]], greedy_params(5))
    assert [output.prompt for output in mixed] == [None, TEXTS[0], None]
    assert tokens_of(mixed)[::2] == [expected[2], expected[0]]
    assert llm.generate([], greedy_params(5)) == []


def test_a_prompt_is_copied(llm: LLM, tiny: TinyModels) -> None:
    prompt = list(PROMPTS[1])
    llm.add_request(prompt, greedy_params(5), "copied")
    prompt.clear()
    tokens = []
    while llm.has_unfinished():
        tokens += [event.token_id for event in llm.step()]
    assert [tokens] == tiny.greedy("llama", PROMPTS[1:2], 5)


def test_a_folder_without_tokenizer_takes_ids_only(tiny: TinyModels) -> None:
    llm = open_llm(tiny.folder("llama"))
    assert llm.tokenizer is None
    [text, ids] = llm.generate(["text", PROMPTS[0]], greedy_params(3))
    assert "no tokenizer" in str(text.error)
    assert ids.error is None
    assert ids.outputs[0].text == ""
    [stop] = llm.generate([PROMPTS[0]], SamplingParams(stop="x"))
    assert "stop_token_ids" in str(stop.error)
    llm.close()


BAD: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "at least one token"),
    ("", {}, "at least one token"),
    (make_prompt(200), {}, "at most 199 tokens"),
    ([5, VOCAB], {}, f"got {VOCAB} at position 1"),
    ([-1], {}, "got -1"),
    ([1.5], {}, "1.5"),
    (None, {}, "NoneType"),
    ({"prompt": "x"}, {}, "dict"),
    ("\ud800", {}, "prompt"),
    ([5], {"temperature": -1}, "temperature"),
    ([5], {"top_p": 0.0}, "top_p"),
    ([5], {"n": 0}, "n:"),
    ([5], {"max_tokens": 0}, "max_tokens"),
    ([5], {"stop_token_ids": [VOCAB]}, "stop_token_ids"),
    ([5], {"stop": [""]}, "stop"),
    ([5], {"logprobs": 1000}, "logprobs"),
]


def test_requests_that_cannot_be_served_fail_alone(llm: LLM, tiny: TinyModels) -> None:
    prompts = [PROMPTS[1], *(prompt for prompt, _, _ in BAD), PROMPTS[2]]
    params = [SamplingParams(**({"temperature": 0} | changes)) for _, changes, _ in BAD]
    outputs = llm.generate(prompts, [greedy_params(5), *params, greedy_params(5)])
    assert tokens_of([outputs[0], outputs[-1]]) == tiny.greedy("llama", PROMPTS[1:], 5)
    for output, (_, _, reason) in zip(outputs[1:-1], BAD, strict=True):
        assert reason in str(output.error)
        assert output.finished
        assert [answer.finish_reason for answer in output.outputs] == ["error"]
    for prompt, changes, reason in BAD:
        with pytest.raises(RequestError, match=reason.replace(":", "")):
            llm.add_request(prompt, SamplingParams(**changes))


def test_the_longest_prompt_gets_one_token(llm: LLM) -> None:
    [output] = llm.generate([make_prompt(199)], greedy_params(5))
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"


def test_params_must_match_prompts(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="each of 2 prompts, got 3"):
        llm.generate(PROMPTS[:2], [greedy_params(1)] * 3)


def test_a_request_id_is_used_once_at_a_time(llm: LLM) -> None:
    assert llm.add_request([5], greedy_params(2), "a") == "a"
    with pytest.raises(RequestError, match="'a'"):
        llm.add_request([5], greedy_params(2), "a")
    while llm.has_unfinished():
        llm.step()
    assert llm.add_request([5], greedy_params(1), "a") == "a"
    assert [event.finish_reason for event in llm.step()] == ["length"]


# Sampling.


def test_several_answers(llm: LLM) -> None:
    [output] = llm.generate([PROMPTS[1]], SamplingParams(n=4, seed=1, max_tokens=8, temperature=2))
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]
    tokens = [tuple(answer.token_ids) for answer in output.outputs]
    assert len(set(tokens)) == 4
    [again] = llm.generate([PROMPTS[1]], SamplingParams(n=2, seed=1, max_tokens=8, temperature=2))
    assert [tuple(answer.token_ids) for answer in again.outputs] == tokens[:2]
    [same] = llm.generate([PROMPTS[1]], greedy_params(4, n=3))
    assert len({tuple(answer.token_ids) for answer in same.outputs}) == 1


def test_a_seed_decides_whatever_else_runs(llm: LLM) -> None:
    params = SamplingParams(seed=5, max_tokens=10)
    [alone] = llm.generate([PROMPTS[1]], params)
    together = llm.generate([*PROMPTS, PROMPTS[1]], [SamplingParams()] * 3 + [params])
    assert together[-1].outputs[0].token_ids == alone.outputs[0].token_ids
    other = llm.generate([PROMPTS[1]], SamplingParams(seed=6, max_tokens=10))
    assert other[0].outputs[0].token_ids != alone.outputs[0].token_ids


def test_engines_of_one_seed_repeat_each_other(tiny: TinyModels) -> None:
    found = []
    for seed, offload in ((0, {}), (0, {"cpu_offload_gb": 1}), (1, {})):
        llm = open_llm(tiny.folder("llama"), seed=seed, **offload)
        params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8)
        found.append(tokens_of(llm.generate([PROMPTS[1]] * 3, params)))
        llm.close()
    assert found[0] == found[1] != found[2]
    assert len({tuple(tokens) for tokens in found[0]}) == 3


def test_log_probabilities_are_those_of_transformers(llm: LLM, tiny: TinyModels) -> None:
    [output] = llm.generate([PROMPTS[2]], greedy_params(4, logprobs=3))
    [answer] = output.outputs
    ids = torch.tensor([PROMPTS[2] + answer.token_ids])
    with torch.no_grad():
        logits = tiny.model("llama")(ids).logits[0, len(PROMPTS[2]) - 1 : -1]
    expected = logits.double().log_softmax(-1)
    assert answer.logprobs is not None
    for row, token, top in zip(expected, answer.token_ids, answer.logprobs, strict=True):
        assert list(top) == row.topk(3).indices.tolist()
        assert top[token] == pytest.approx(row[token].item(), abs=1e-3)
    total = sum(row[token].item() for row, token in zip(expected, answer.token_ids, strict=True))
    assert answer.cumulative_logprob == pytest.approx(total, abs=1e-3)


# Ends.


def test_stop_strings_end_the_text_before_them(llm: LLM) -> None:
    [free] = llm.generate(TEXTS[0], greedy_params(24))
    text = free.outputs[0].text
    stop = text[6:8]
    place = text.index(stop)
    [output] = llm.generate(TEXTS[0], greedy_params(24, stop=[stop, "\n\n"]))
    [answer] = output.outputs
    assert answer.text == text[:place]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert len(answer.token_ids) < 24
    assert answer.token_ids == free.outputs[0].token_ids[: len(answer.token_ids)]
    [late] = llm.generate(TEXTS[0], greedy_params(24, stop=[stop], min_tokens=20))
    assert len(late.outputs[0].token_ids) >= 20


def test_a_stop_string_that_only_the_end_completes(llm: LLM) -> None:
    """A stop string in the text that `finish` releases still counts."""
    [free] = llm.generate(TEXTS[0], greedy_params(9))
    text = free.outputs[0].text
    [output] = llm.generate(TEXTS[0], greedy_params(9, stop=[text[-1], text[-1] + "never"]))
    assert output.outputs[0].finish_reason == "stop"
    [held] = llm.generate(TEXTS[0], greedy_params(9, stop=[text[-1] + "never"]))
    assert (held.outputs[0].text, held.outputs[0].finish_reason) == (text, "length")


def test_stop_tokens(llm: LLM, tiny: TinyModels) -> None:
    [expected] = tiny.greedy("llama", PROMPTS[1:2], 10)
    stop = next(token for token in expected[3:] if token not in expected[:3])
    place = expected.index(stop)
    [output] = llm.generate(PROMPTS[1], greedy_params(10, stop_token_ids=[stop]))
    [answer] = output.outputs
    assert answer.token_ids == expected[: place + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


def test_max_tokens_none_goes_on_to_max_model_len(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    [output] = llm.generate(PROMPTS[2], params)
    assert len(output.outputs[0].token_ids) == 200 - len(PROMPTS[2])


# Aborts and exceptions.


def test_aborted_requests_free_their_blocks(llm: LLM, tiny: TinyModels) -> None:
    for index, prompt in enumerate(PROMPTS):
        llm.add_request(prompt, greedy_params(12), f"r{index}")
    for _ in range(3):
        llm.step()
    llm.abort("r1")
    llm.abort("r1")
    llm.abort("unknown")
    tokens: dict[str, list[int]] = {}
    while llm.has_unfinished():
        for event in llm.step():
            tokens.setdefault(event.request_id, []).append(event.token_id)
    assert "r1" not in tokens
    assert tokens["r0"] == tiny.greedy("llama", PROMPTS[:1], 12)[0][-len(tokens["r0"]) :]
    llm.abort("r0")
    assert llm.step() == []


def test_an_abort_from_outside_ends_generate(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm.step
    calls = []

    def step_and_abort() -> Any:
        calls.append(1)
        if len(calls) == 3:
            for name in list(llm._sessions._open)[:1]:
                llm.abort(name)
        return step()

    monkeypatch.setattr(llm, "step", step_and_abort)
    aborted, other = llm.generate(PROMPTS[1:], greedy_params(6))
    assert aborted.outputs[0].finish_reason == "abort"
    assert len(aborted.outputs[0].token_ids) < 6
    assert other.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("where", ["execute", "prepare", "sample"])
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_generate_works_after_an_exception(
    llm: LLM, tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, where: str, kind: type
) -> None:
    core = llm._engine.core
    owner = core._sampler if where == "sample" else core.runner
    method, calls = getattr(owner, where), []

    def fail_once(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise kind("tests say so")
        return method(*args)

    with monkeypatch.context() as patched:
        patched.setattr(owner, where, fail_once)
        with pytest.raises(kind, match="tests say so"):
            llm.generate(PROMPTS, greedy_params(6))
    assert not llm.has_unfinished()
    assert greedy(llm, PROMPTS, 6) == tiny.greedy("llama", PROMPTS, 6)


def test_a_failure_amid_the_layers_leaves_the_slots_usable(
    llm: LLM, tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = llm._engine.store
    acquire = store.acquire

    def fail_at_last(layer: int) -> Any:
        if layer == 2:
            raise RuntimeError("tests say so")
        return acquire(layer)

    with monkeypatch.context() as patched:
        patched.setattr(store, "acquire", fail_at_last)
        with pytest.raises(RuntimeError, match="tests say so"):
            llm.generate(PROMPTS, greedy_params(6))
    assert greedy(llm, PROMPTS, 6) == tiny.greedy("llama", PROMPTS, 6)


def test_a_graph_finds_its_layers_after_a_failure(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph cannot repair the slots itself: it begins with layer s in slot s."""
    engine = open_llm(tiny.folder("llama"), offload_group_size=1)
    runner, store = engine._engine.runner, engine._engine.store
    held = []

    class Replay:
        def replay(self) -> None:
            held.append((list(store._feed._held), list(store._feed._pending)))

    acquire, calls = store.acquire, []

    def fail_once(layer: int) -> Any:
        calls.append(layer)
        if len(calls) == 6:
            raise RuntimeError("tests say so")
        return acquire(layer)

    engine.add_request(PROMPTS[1], greedy_params(4))
    engine.step()
    monkeypatch.setattr(store, "acquire", fail_once)
    calls += [0, 0, 0, 0]
    with pytest.raises(RuntimeError, match="tests say so"):
        engine.step()
    assert store._feed._held != [0, 1]
    runner._graphs[1] = (Replay(), 0, 0)
    engine.step()
    assert held == [([0, 1], [None, None])]
    engine.close()


def test_a_step_that_fails_can_be_repeated(
    llm: LLM, tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    for prompt in PROMPTS:
        llm.add_request(prompt, greedy_params(6))
    tokens: dict[str, list[int]] = {}
    runner = llm._engine.core.runner
    execute = runner.execute
    while llm.has_unfinished():
        with monkeypatch.context() as patched:
            patched.setattr(runner, "execute", lambda batch: execute(batch) / 0 / "no")
            with pytest.raises(TypeError):
                llm.step()
        for event in llm.step():
            tokens.setdefault(event.request_id, []).append(event.token_id)
    assert list(tokens.values()) == tiny.greedy("llama", PROMPTS, 6)


def test_bad_weights_are_reported_and_not_sampled(tiny: TinyModels) -> None:
    llm = open_llm(tiny.folder("llama"))
    llm._engine.store.outer("lm_head.weight").fill_(math.nan)
    with pytest.raises(EngineError, match="NaN"):
        llm.generate(PROMPTS, greedy_params(2))
    assert not llm.has_unfinished()
    llm.close()


# Keywords.


@pytest.mark.parametrize(
    ("keywords", "parts"),
    [
        ({"max_model_length": 10}, ["max_model_length", "Did you mean max_model_len?"]),
        ({"cpu_ofload_gb": 1}, ["Did you mean cpu_offload_gb?"]),
        ({"zzz": 1}, ["zzz", "Known:", "swap_space"]),
        ({"enable_prefix_caching": True}, ["enable_prefix_caching", "not available yet"]),
        ({"tensor_parallel_size": 2}, ["tensor_parallel_size", "got 2"]),
        ({"num_cpu_blocks": 5}, ["num_cpu_blocks", "not available yet"]),
        (
            {"kv_transfer_config": KVTransferConfig(kv_connector="OffloadingConnector")},
            ["kv_transfer_config", "OffloadingConnector", "not available yet"],
        ),
        ({"kv_transfer_config": {"kv_connector": "X"}}, ["kv_transfer_config", "'X'"]),
        ({"kv_transfer_config": "X"}, ["kv_transfer_config", "'X'"]),
        ({"block_size": 15}, ["kv.block_size", "15"]),
        ({"dtype": "int8"}, ["engine.dtype", "int8"]),
        ({"load_format": "gguf"}, ["model.load_format", "gguf"]),
        ({"gpu_memory_utilization": 1.5}, ["gpu_memory_utilization", "1.5"]),
        ({"device": "tpu"}, ["gpu.device", "tpu"]),
        ({"offload_config": OffloadConfig(), "cpu_offload_gb": 1}, ["both", "cpu_offload_gb"]),
        ({"offload_config": {"uvva": {}}}, ["offload_config", "uvva"]),
        ({"offload_config": {"uva": {"gb": 1}}}, ["offload_config", "gb"]),
        ({"offload_config": 3}, ["offload_config", "3"]),
        ({"offload_config": {"uva": 3}}, ["offload_config.uva", "3"]),
    ],
)
def test_keywords_that_are_refused(tiny: TinyModels, keywords: Any, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        LLM(str(tiny.folder("llama")), **keywords)
    assert all(part in str(error.value) for part in parts)


def test_settings_of_later_issues_are_refused_by_name() -> None:
    for name, value in (("num_cpu_blocks", 4), ("cpu_gib", 1.0), ("pin_limit_gib", 10)):
        with pytest.raises(ConfigError, match=rf"kv\.{name}.*not available yet"):
            KVConfig(**{name: value})


def test_offload_config_may_be_given_whole(tiny: TinyModels) -> None:
    node = OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=1))
    for given in (node, {"uva": {"cpu_offload_gb": 1}}):
        llm = open_llm(tiny.folder("llama"), offload_config=given)
        assert llm.effective()["backend"] == "uva"
        assert llm.plan.placed_bytes()["uva"] > 0
        llm.close()


def test_notes_of_the_plan_are_warned_of(tiny: TinyModels) -> None:
    from engine.offload_config import OffloadWarning

    with pytest.warns(OffloadWarning, match="is not needed"):
        LLM(str(tiny.folder("llama")), device="cpu", gpu_memory_gib=0.5, cpu_offload_gb=1).close()


# Refusals and the well-known script.


def test_no_room_for_kv_is_refused_with_figures(tiny: TinyModels) -> None:
    plan = open_llm(tiny.folder("llama"), max_num_seqs=1).plan
    fixed = plan.gpu_total_bytes - plan.gpu_items["kv_cache"]
    for room in (-100_000, 0, plan.block_bytes):
        with pytest.raises(CapacityError) as error:
            open_llm(
                tiny.folder("llama"),
                max_num_seqs=1,
                gpu_memory_gib=(fixed + room) / GIB,
                gpu_memory_utilization=1.0,
            )
        assert "available KV cache memory: " in str(error.value)
        assert "Fits with: " in str(error.value)
        assert error.value.plan is not None


def test_the_well_known_script(tiny: TinyModels, tmp_path: Path) -> None:
    """Too large for the budget: refused; with swap_space the same script answers."""
    shutil.copytree(tiny.folder("mistral", num_hidden_layers=7), tmp_path / "model")
    model = tmp_path / "model"
    write_config(model, sliding_window=64)
    add_tokenizer(model)
    roomy = open_llm(model, disable_sliding_window=True, max_num_seqs=4, max_model_len=64)
    plan = roomy.plan
    expected = greedy(roomy, PROMPTS, 5)
    roomy.close()
    budget = plan.gpu_total_bytes - plan.gpu_items["kv_cache"] - plan.layers[0].resident.num_bytes
    script: dict[str, Any] = {
        "device": "cpu",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "max_model_len": 64,
        "gpu_memory_gib": budget / GIB / 0.9,
        "gpu_memory_utilization": 0.9,
    }
    with pytest.raises(ConfigError, match="sliding window"):
        LLM(model=str(model), **script)
    with pytest.raises(CapacityError, match=r"available KV cache memory: -\d"):
        LLM(model=str(model), disable_sliding_window=True, **script)
    with pytest.warns(UserWarning, match=r"swap_space=10 GiB: \d of 7 layers"):
        llm = LLM(model=str(model), swap_space=10, disable_sliding_window=True, **script)
    outputs = llm.generate(TEXTS, SamplingParams(temperature=0.7, top_p=0.9))
    assert [output.error for output in outputs] == [None] * 3
    for output in outputs:
        [answer] = output.outputs
        assert answer.text
        assert 1 <= len(answer.token_ids) <= 16
    assert llm.plan.placed_bytes()["prefetch"] > 0
    assert llm.memory()["host_pinned_bytes"] > 0
    assert llm.memory()["gpu_peak_bytes"] <= llm.memory()["gpu_budget_bytes"]
    assert greedy(llm, PROMPTS, 5) == expected
    llm.close()


# Life of an engine.


def test_a_closed_engine_says_so(tiny: TinyModels) -> None:
    llm = open_llm(tiny.folder("llama"))
    llm.add_request(PROMPTS[1], greedy_params(5))
    llm.step()
    llm.close()
    llm.close()
    uses: list[Callable[[], Any]] = [
        lambda: llm.generate(PROMPTS, greedy_params(1)),
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


def test_phases_of_the_load_sum_to_its_time(tiny: TinyModels) -> None:
    for keywords in ({}, {"dtype": "bfloat16"}, {"load_format": "dummy"}):
        llm = open_llm(tiny.folder("llama"), offload_group_size=2, **keywords)
        report = llm.load_report
        assert sum(report.phases.values()) == pytest.approx(report.total_s, rel=1e-6)
        assert all(seconds >= 0 for seconds in report.phases.values())
        wanted = {"plan", "pin", "warm_up", "allocate"}
        wanted |= {"convert"} if keywords else {"read"}
        assert wanted <= report.phases.keys()
        llm.close()


def test_counts_of_steps(tiny: TinyModels, pool_is_full: Callable[[LLM], bool]) -> None:
    llm = open_llm(tiny.folder("llama"), cpu_offload_gb=1)
    start = llm.stats()
    assert pool_is_full(llm)
    llm.add_request(PROMPTS[2], greedy_params(3))
    llm.step()
    step = llm.last_step
    assert step is not None
    assert (step.num_prefill_tokens, step.num_decode_tokens, step.num_prefills) == (30, 0, 1)
    assert llm.stats()["free_blocks"] == llm.stats()["num_blocks"] - 2
    llm.step()
    step = llm.last_step
    assert (step.num_prefill_tokens, step.num_decode_tokens, step.num_decodes) == (0, 1, 1)
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
