"""What runs steps, behind the interface that EngineCore drives."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine import LLM
from engine.asked.request import Request, Sequence
from engine.asked.sampling import SamplingParams
from engine.errors import ConfigError
from engine.run.core import EngineCore
from engine.run.executor import DeviceExecutor
from engine.run.sampler import Sampler
from engine.text.sessions import Sessions
from engine.text.tokenizer import load_tokenizer
from tests.contracts.project import ROOT
from tests.engine.conftest import TinyModels
from tests.engine.scripted import EOS, open_core, run
from tests.engine.specs import small_spec
from tests.tiny import VOCAB, greedy_params, make_prompt, open_llm

SCRIPTS = {
    "a": [[10, 11, 12], [], [13], [14, 15], [16, 17, 18]],
    "b": [[20], [21, EOS, 22], [23]],
    "c": [[], [], [30, 31, 32], [33, 34, 35]],
}
WANTED = {
    "a": ([10, 11, 12, 13, 14, 15, 16], "length"),
    "b": ([20, 21, EOS], "stop"),
    "c": ([30, 31, 32, 33, 34, 35, 0], "length"),
}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("names", [["a"], ["b"], ["c"], ["a", "b", "c"]], ids="".join)
def test_steps_of_none_one_and_three_tokens(names: list[str], overlap: bool) -> None:
    core, executor = open_core((0, 3), SCRIPTS, overlap=overlap)
    events = run(core, names, max_tokens=7)
    for name in names:
        mine = [event for event in events if event.request_id == name]
        tokens, reason = WANTED[name]
        assert [event.token_id for event in mine] == tokens
        assert [event.position for event in mine] == list(range(3, 3 + len(tokens)))
        assert [event.finish_reason for event in mine] == [None] * (len(tokens) - 1) + [reason]
        assert [event.time_s for event in mine] == sorted(event.time_s for event in mine)
    assert core.overlapped_steps == 0  # all of them may get more or fewer tokens
    assert core.num_steps == len(executor.shapes)
    assert core.pools[0].num_free == core.pools[0].num_gpu_blocks


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_a_certain_number_of_tokens_a_step_overlaps(count: int, overlap: bool) -> None:
    tokens = list(range(40, 52))
    script = [tokens[at : at + count] for at in range(0, 12, count)]
    core, executor = open_core((count, count), {"a": script, "b": script}, overlap=overlap)
    events = run(core, ["a", "b"], max_tokens=11)
    for name in "ab":
        assert [e.token_id for e in events if e.request_id == name] == tokens[:11]
    steps = -(-11 // count)
    assert len(executor.shapes) == core.num_steps == steps
    assert core.overlapped_steps == (steps - 1 if overlap else 0)
    assert core.last_step is not None
    assert core.last_step.is_overlapped is overlap
    step = core.last_step
    assert (step.h2d_bytes, step.in_place_bytes) == (10, 20)
    assert (step.kv_in_place_bytes, step.kv_copied_bytes) == (30, 40)
    assert (step.expert_hits, step.expert_misses, step.expert_bytes) == (5, 2, 40)
    assert step.used_graph


@pytest.mark.thorough
def test_a_core_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from tests.engine.scripted import open_core, run\n"
        "core, _ = open_core((1, 1), {'a': [[8], [9]]})\n"
        "assert [event.token_id for event in run(core, ['a'], max_tokens=2)] == [8, 9]\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_tokens_behind_a_stop_string_are_dropped(text_folder: Path) -> None:
    tokenizer = load_tokenizer(text_folder)
    assert tokenizer is not None
    x, y, z = tokenizer.convert_tokens_to_ids(["x", "y", "z"])
    core, _ = open_core((1, 3), {"r": [[x], [y, z, x]], "s": [[x, y], [z, x, y]]})
    sessions = Sessions(core, tokenizer, VOCAB)
    added = [
        sessions.add([5, 6, 7], SamplingParams(max_tokens=most, stop=["yz", "z"]), name)
        for name, most in (("r", 9), ("s", 5))
    ]
    events = []
    while core.scheduler.has_unfinished:
        events += sessions.apply(core.step())
    for session, tokens in zip(added, ([x, y, z], [x, y, z]), strict=True):
        name = session.request.request_id
        assert [e.token_id for e in events if e.request_id == name] == tokens
        [answer] = session.output().outputs
        assert (answer.text, answer.token_ids) == ("x", tokens)
        assert (answer.finish_reason, answer.stop_reason) == ("stop", "yz")
        assert answer.cumulative_logprob == -1.5
        assert "".join(e.text for e in events if e.request_id == name) == "x"
    assert sessions._open == {}


def test_an_executor_runs_on_one_device(llm: LLM, tiny: TinyModels) -> None:
    engine = llm._engine
    assert engine is not None
    device, plan, decoder = engine.device, engine.plan, engine.executor._decoder
    sampler = Sampler(VOCAB, "cpu", max_rows=plan.max_num_seqs)
    ranks = [(device, plan)]
    executor = DeviceExecutor(ranks, decoder, sampler, seed=0, eos_token_ids=frozenset())
    core = EngineCore(plan, executor, eos_token_ids=frozenset())
    prompt = make_prompt(12, seed=5)
    request = Request(request_id="r", prompt_token_ids=prompt, params=greedy_params(6))
    sequence = Sequence(seq_id=0, request=request)
    core.scheduler.add(sequence)
    while core.scheduler.has_unfinished:
        core.step()
    assert sequence.output_token_ids == tiny.greedy("llama", [prompt], 6)[0]
    for many in ([], ranks * 2):
        with pytest.raises(ConfigError, match=f"expected one device, got {len(many)}"):
            DeviceExecutor(many, decoder, sampler, seed=0, eos_token_ids=frozenset())


@pytest.mark.parametrize("use_graphs", [True, False])
def test_without_graphs_kernels_of_few_rows_of_logits_are_there_before_requests(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, *, use_graphs: bool
) -> None:
    """With graphs each capture runs its step first."""
    llm = open_llm(tiny.folder("llama"), max_num_seqs=20, max_num_batched_tokens=64)
    executor = llm._engine.executor
    facts = replace(executor._plan.facts, kind="cuda")
    executor._plan = replace(executor._plan, facts=facts, use_graphs=use_graphs)
    ran, run = [], executor._run
    monkeypatch.setattr(executor, "_run", lambda batch: (ran.append(batch.num_logits), run(batch)))
    executor.warm_up(64)
    llm.close()
    assert set(ran) == ({1} if use_graphs else {1, 16, 24})


def test_a_model_is_whole_on_its_only_rank() -> None:
    spec = small_spec()
    assert spec.shard(rank=0, world_size=1) is spec
    for rank, world_size in ((0, 2), (1, 2), (1, 1), (-1, 1), (0, 0)):
        with pytest.raises(ConfigError, match=f"got rank {rank} of {world_size}"):
            spec.shard(rank, world_size)


@pytest.mark.parametrize(("first_eager", "expected"), [(1, [40, 32, 16]), (17, [40, 32]), (99, [])])
def test_decodes_without_a_graph_run_before_the_first_request(first_eager, expected):
    """On a GPU, where kernels for up to 16, 32 and 64 tokens differ."""
    plan = SimpleNamespace(
        facts=SimpleNamespace(emulated=False),
        max_num_batched_tokens=128,
        max_num_seqs=37,
        use_graphs=first_eager > 1,
        is_captured=lambda size: size < first_eager,
    )
    batches = SimpleNamespace(
        padding_prompts=lambda size: None,
        padding_decode=lambda size: size,
        padding_unknown=lambda reads_host: None,
        tiered=None,
    )
    executor, ran = DeviceExecutor.__new__(DeviceExecutor), []
    executor._plan, executor._batches, executor._run = plan, batches, ran.append
    executor.sampler = Sampler(VOCAB, "cpu")
    executor.warm_up(128)
    assert [batch for batch in ran if batch is not None] == expected
