"""Steps with prompts are padded to what graphs hold: the same tokens, eager and replayed."""

from dataclasses import replace
from typing import Any

import pytest

from engine import LLM, SamplingParams, build
from engine.device.cpu import CPUDevice
from engine.plan.memory import MemoryPlan
from engine.plan.sizes import PREFILL_SEQUENCES, graph_sizes
from tests.engine.conftest import TinyModels
from tests.engine.groups import with_blocks
from tests.engine.run.test_overlap import KINDS, PROMPTS, open_overlap
from tests.engine.specs import plan_olmo, uva
from tests.slow import mostly_slow
from tests.tiny import FAMILIES, tokens_of

SIZES = ((0, 4), (0, 16), (8, 4), (8, 16))
FEW = 26
"""KV blocks that force preemptions."""


def load(llm: LLM) -> list[Any]:
    """Tokens of every kind of sampling that needs no text."""
    kinds = [kind for kind in KINDS if "stop" not in kind]
    params = [SamplingParams(**{"max_tokens": 14, **kind}) for kind in kinds]
    return tokens_of(llm.generate([PROMPTS[at % len(PROMPTS)] for at in range(len(kinds))], params))


def padded(monkeypatch: pytest.MonkeyPatch, *, use_graphs: bool) -> None:
    """Let plans for the CPU pad and capture as those for a GPU do; a replay runs the step again."""
    plan_memory = build.plan_memory

    def plan(*args: Any, **keywords: Any) -> MemoryPlan:
        found = plan_memory(*args, **keywords)
        return replace(
            found,
            graph_sizes=graph_sizes(found.max_num_seqs),
            prefill_sizes=SIZES,
            captured_prefills=SIZES if use_graphs and not found.offloaded_layers else (),
            use_graphs=use_graphs,
        )

    monkeypatch.setattr(build, "plan_memory", plan)
    monkeypatch.setattr(CPUDevice, "new_graph", lambda _, run: run)


def count_graph_steps(llm: LLM) -> list[tuple[int, int, bool]]:
    """Prefill tokens, decodes and whether a graph ran, of each step from now on."""
    steps: list[tuple[int, int, bool]] = []
    core = llm._engine.core
    collect = core._collect

    def note(*args: Any) -> Any:
        events = collect(*args)
        step = core.last_step
        steps.append((step.num_prefill_tokens, step.num_decode_tokens, step.used_graph))
        return events

    core._collect = note
    return steps


@pytest.mark.thorough
@pytest.mark.parametrize("family", mostly_slow(FAMILIES, lambda x: x == "gemma3"))
def test_padded_steps_give_the_same_tokens(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    llm = open_overlap(tiny.folder(family))
    expected = load(llm)
    llm.close()
    for use_graphs in (False, True):
        with monkeypatch.context() as patch:
            padded(patch, use_graphs=use_graphs)
            with_blocks(patch, FEW)
            llm = open_overlap(tiny.folder(family))
            graphs = [list(size) for size in SIZES] if use_graphs else []
            assert llm.effective()["prefill_graphs"] == graphs
            steps = count_graph_steps(llm)
            assert load(llm) == expected
        replayed = [(prompt, decodes) for prompt, decodes, used in steps if used]
        assert any(prompt and decodes for prompt, decodes in replayed) is use_graphs
        assert all(prompt <= 16 for prompt, _ in replayed)
        assert any(prompt > 16 and not used for prompt, _, used in steps)
        llm.close()


def test_more_prompts_than_a_graph_holds_run_eagerly(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    padded(monkeypatch, use_graphs=True)
    llm = open_overlap(tiny.folder("llama"))
    steps = count_graph_steps(llm)
    for count in (PREFILL_SEQUENCES, PREFILL_SEQUENCES + 1):
        llm.generate([PROMPTS[0]] * count, None)
    first = [used for prompt, _, used in steps if prompt]
    assert first == [True, False]
    llm.close()


@pytest.mark.thorough
def test_offloaded_layers_pad_alike_and_capture_no_prompts(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    padded(monkeypatch, use_graphs=True)
    resident = open_overlap(tiny.folder("llama"))
    expected = load(resident)
    resident.close()
    llm = open_overlap(tiny.folder("llama"), offload_group_size=1)
    assert llm.plan.prefill_sizes == SIZES
    assert llm.effective()["prefill_graphs"] == []
    assert load(llm) == expected
    llm.close()


def test_planned_sizes_on_a_gpu() -> None:
    plan = plan_olmo(memory_gib=24, max_model_len=512, max_num_seqs=64)
    # 8 decodes and the third size are 64 rows together.
    assert plan.prefill_sizes[:8] == (
        *((0, 16), (0, 32), (0, 64), (0, 256)),
        *((8, 16), (8, 32), (8, 56), (8, 256)),
    )
    assert plan.prefill_sizes[8:] == ((64, 16), (64, 64), (64, 256))
    assert plan.captured_prefills == plan.prefill_sizes
    offloaded = plan_olmo(offload=uva(8), max_model_len=512, max_num_seqs=64)
    assert offloaded.prefill_sizes == plan.prefill_sizes
    assert offloaded.captured_prefills == ()
    for item, least in (("graphs", 11 * 32 * 2**16), ("activations", 2**25)):
        assert plan.gpu_items[item] - offloaded.gpu_items[item] >= least
    eager = plan_olmo(memory_gib=24, max_model_len=512, max_num_seqs=64, enforce_eager=True)
    assert eager.prefill_sizes == plan.prefill_sizes
    assert eager.captured_prefills == ()
    few = plan_olmo(memory_gib=24, max_model_len=512, max_num_seqs=2, max_num_batched_tokens=64)
    assert few.prefill_sizes == ((0, 16), (0, 32), (0, 64), (2, 16), (2, 32), (2, 62))
