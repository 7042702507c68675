"""On a GPU: steps overlap with graphs and eager, a device that lags, no waits, replays alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.run.executor import DeviceExecutor
from engine.run.inputs import Upload
from tests.engine.conftest import TinyModels
from tests.engine.late import drain
from tests.engine.run.test_overlap import KINDS, PROMPTS, load, open_overlap
from tests.engine.waits import waits_fail
from tests.tiny import greedy, greedy_params, open_llm

pytestmark = pytest.mark.gpu
LAG_CYCLES = 10_000_000
"""Some milliseconds, in which the host prepares the next step."""


@pytest.fixture
def lag(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the device begin each step late."""
    execute = DeviceExecutor.execute

    def execute_late(self: DeviceExecutor, batch: Any) -> Any:
        torch.cuda._sleep(LAG_CYCLES)
        return execute(self, batch)

    monkeypatch.setattr(DeviceExecutor, "execute", execute_late)


@pytest.fixture
def late_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the inputs of each step cross the link late."""
    run = Upload.run

    def run_late(self: Upload) -> None:
        torch.cuda._sleep(LAG_CYCLES)
        run(self)

    monkeypatch.setattr(Upload, "run", run_late)


@pytest.fixture(scope="module")
def expected(text_folder: Path) -> list[Any]:
    llm = open_overlap(text_folder, device="cuda", enforce_eager=True)
    llm._engine.core.overlap = False
    found = load(llm)
    llm.close()
    return found


@pytest.mark.parametrize(
    "keywords",
    [{}, {"enforce_eager": True}, {"offload_group_size": 1}, {"cpu_offload_gb": 1}],
    ids=str,
)
def test_tokens_are_those_of_eager_steps_that_do_not_overlap(
    text_folder: Path, expected: list[Any], keywords: dict[str, Any]
) -> None:
    llm = open_overlap(text_folder, device="cuda", **keywords)
    assert load(llm) == expected
    assert llm.stats()["overlapped_steps"] > 5
    llm.close()


def test_tokens_are_the_same_where_the_device_lags(
    text_folder: Path, expected: list[Any], lag: None
) -> None:
    llm = open_overlap(text_folder, device="cuda", offload_group_size=2)
    assert load(llm) == expected
    llm.close()


def test_control_one_buffer_of_inputs_changes_tokens(tiny: TinyModels, late_uploads: None) -> None:
    for num_buffers, is_right in ((1, False), (2, True)):
        llm = open_llm(tiny.folder("llama"), device="cuda")
        for index, prompt in enumerate(PROMPTS[:3]):
            llm.add_request(prompt, greedy_params(9), str(index))
        tokens = {event.request_id: [event.token_id] for event in llm.step()}
        inputs = llm._engine.executor._batches.inputs
        inputs._hosts = inputs._hosts[:num_buffers]
        inputs._arrays = inputs._arrays[:num_buffers]
        found = list(drain(llm, tokens).values())
        llm.close()
        assert (found == tiny.greedy("llama", PROMPTS[:3], 9)) is is_right


@pytest.mark.parametrize("keywords", [{}, {"enforce_eager": True}], ids=str)
def test_steps_wait_for_nothing_but_an_event(tiny: TinyModels, keywords: dict[str, Any]) -> None:
    llm: LLM = open_llm(tiny.folder("llama"), device="cuda", **keywords)
    kinds = [kind for kind in KINDS if "stop" not in kind]
    for at, kind in enumerate(kinds):
        params = SamplingParams(**{"max_tokens": 6, **kind})
        llm.add_request(PROMPTS[at % len(PROMPTS)], params, str(at))
    with waits_fail():
        tokens = drain(llm, {})
    assert len(tokens) == len(kinds)
    llm.close()


def test_replays_alone_change_no_token(tiny: TinyModels) -> None:
    llm = open_llm(tiny.folder("llama"), device="cuda", offload_group_size=1)
    wanted = tiny.greedy("llama", PROMPTS[:2], 12)
    for index, prompt in enumerate(PROMPTS[:2]):
        llm.add_request(prompt, greedy_params(12), str(index))
    tokens: dict[str, list[int]] = {}
    replays: list[bool] = []
    while llm.has_unfinished():
        for event in llm.step():
            tokens.setdefault(event.request_id, []).append(event.token_id)
        replays += [llm.engine.executor.replay_newest(2) for _ in range(2)]
    assert list(tokens.values()) == wanted
    assert all(replays)
    assert greedy(llm, PROMPTS[:2], 12) == wanted
    llm.close()
