"""On a GPU: forms and penalties beside plain requests, with graphs and a device that lags."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import LLM, SamplingParams, StructuredOutput
from engine.run.executor import DeviceExecutor
from tests.engine.groups import with_blocks
from tests.engine.run.test_overlap_gpu import lag
from tests.engine.run.test_sampler import Sampler, make_logits, make_row, sample
from tests.engine.test_structured import byte_folder
from tests.engine.waits import waits_fail
from tests.tiny import make_prompt, open_llm

__all__ = ["byte_folder", "lag"]
pytestmark = pytest.mark.gpu

PROMPTS = [make_prompt(length, seed=9) for length in (3, 12, 30, 7)]
DIGITS = StructuredOutput(regex="[0-9]{3,12}x")
SCHEMA = StructuredOutput(
    json_schema={
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)
KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0, "structured": DIGITS},
    {"seed": 3, "frequency_penalty": 1.5, "ignore_eos": True},
    {"seed": 4, "structured": SCHEMA, "logprobs": 2, "presence_penalty": 1.0},
    {"seed": 5, "n": 2, "structured": DIGITS, "repetition_penalty": 1.2},
    {"temperature": 0, "logit_bias": {7: 5.0}, "logprobs": 0, "ignore_eos": True},
]


def open_cuda(folder: Path, **keywords: Any) -> LLM:
    given = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 128, **keywords}
    return open_llm(folder, device="cuda", block_size=8, **given)


def load(llm: LLM) -> list[Any]:
    params = [SamplingParams(**{"max_tokens": 24, **kind}) for kind in KINDS]
    prompts = [PROMPTS[at % len(PROMPTS)] for at in range(len(params))]
    outputs = llm.generate(prompts, params)
    assert [output.error for output in outputs] == [None] * len(outputs)
    assert re.fullmatch("[0-9]{3,12}x", outputs[1].outputs[0].text)
    return [(x.token_ids, x.text, x.finish_reason, x.ranks) for y in outputs for x in y.outputs]


@pytest.fixture(scope="module")
def expected(byte_folder: Path) -> list[Any]:
    """What eager steps give that do not overlap."""
    llm = open_cuda(byte_folder, enforce_eager=True)
    llm.engine.core.overlap = False
    found = load(llm)
    llm.close()
    return found


@pytest.mark.parametrize(
    "keywords", [{}, {"offload_group_size": 1}, {"cpu_offload_gb": 1}], ids=str
)
def test_forms_and_penalties_are_those_of_eager_steps(
    byte_folder: Path, expected: list[Any], keywords: dict[str, Any]
) -> None:
    llm = open_cuda(byte_folder, **keywords)
    assert load(llm) == expected
    assert llm.stats()["overlapped_steps"] > 5
    assert llm.stats()["graph_steps"] > 0
    llm.close()


def test_forms_and_penalties_where_the_device_lags(
    byte_folder: Path, expected: list[Any], lag: None
) -> None:
    llm = open_cuda(byte_folder)
    assert load(llm) == expected
    llm.close()


def test_forms_and_penalties_over_preemptions(
    byte_folder: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_blocks(monkeypatch, 17)
    llm = open_cuda(byte_folder)
    assert load(llm) == expected
    assert llm.stats()["preemptions"] > 0
    llm.close()


def test_steps_with_forms_wait_for_nothing(byte_folder: Path) -> None:
    llm = open_cuda(byte_folder)
    load(llm)  # what is compiled and cached is so by now
    for at, kind in enumerate(KINDS):
        llm.add_request(PROMPTS[at % 4], SamplingParams(**{"max_tokens": 9, **kind}), str(at))
    with waits_fail():
        while llm.has_unfinished():
            llm.step()
    llm.close()


@pytest.mark.parametrize("size", [40, 32_000, 152_064])
def test_masks_leave_what_they_allow(size: int) -> None:
    chooser = np.random.default_rng(3)
    rows, allowed = [], []
    for at in range(24):
        words = chooser.integers(0, 2**32, -(-size // 32), dtype=np.uint32)
        words &= chooser.integers(0, 2**32, words.size, dtype=np.uint32)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:size]
        row = make_row(request=at, temperature=0 if at % 3 else 1.0, structured=DIGITS)
        object.__setattr__(row, "mask", words.view(np.int32) if at % 4 else None)
        rows.append(row)
        allowed.append(bits if at % 4 else np.ones_like(bits))
    logits = make_logits(2, len(rows), size=size)
    on_cpu = sample(Sampler(size, "cpu"), logits, rows)
    on_gpu = sample(Sampler(size, "cuda"), logits.cuda(), rows)
    assert [t and t.token_id for t in on_gpu] == [t and t.token_id for t in on_cpu]
    for token, bits in zip(on_gpu, allowed, strict=True):
        assert token is not None
        assert bits[token.token_id]


def test_what_penalties_keep_is_in_the_plan(byte_folder: Path) -> None:
    llm = open_cuda(byte_folder)
    load(llm)
    memory = llm.memory()
    assert memory["gpu_peak_bytes"] <= memory["gpu_budget_bytes"]
    pages = llm.engine.executor.sampler._penalties._pages
    assert pages.numel() == 8 * 128 + 8 * 256
    llm.close()


def test_plain_steps_replay_and_sample_as_before(
    byte_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour with a penalty does not take a step's graph away."""
    llm = open_cuda(byte_folder)
    launched: list[bool] = []
    launch = DeviceExecutor.launch

    def noted(self: DeviceExecutor, plan: Any) -> Any:
        flight = launch(self, plan)
        launched.append(flight.used_graph)
        return flight

    monkeypatch.setattr(DeviceExecutor, "launch", noted)
    params = [SamplingParams(max_tokens=12, temperature=0, ignore_eos=True) for _ in range(2)]
    params[1].presence_penalty = 1.0
    llm.generate(PROMPTS[:2], params)
    assert launched.count(True) >= 10
    llm.close()
