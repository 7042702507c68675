"""Experts of dummy weights by a table, and the record of them, through a whole engine."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import LLM
from engine.asked.config import EngineConfig, ModelConfig
from engine.asked.keywords import config_from_keywords
from engine.asked.offload import OffloadWarning
from engine.errors import ConfigError
from engine.model.routing import (
    TABLE_ROWS,
    ExpertSizes,
    RoutingTrace,
    first_row,
    read_trace,
    write_trace,
)
from engine.model.spec import ModelSpec
from engine.run.routing import synthetic_ids
from tests.engine.specs import moe_spec, small_spec
from tests.tiny import greedy_params, make_prompt

SIZES = ExpertSizes(layers=(1, 3), num_experts=16, top_k=3)
PROMPTS = [make_prompt(length, seed=length) for length in (3, 40, 17, 64)]


def asked(spec: ModelSpec | None = None, **keywords: Any) -> EngineConfig:
    model = ModelConfig(name="tiny", load_format="dummy", spec=spec or moe_spec())
    common = {"device": "cpu", "gpu_memory_gib": 0.05, "max_model_len": 256, "max_num_seqs": 4}
    return config_from_keywords(model, {**common, "max_num_batched_tokens": 32, **keywords})


def opened(**keywords: Any) -> LLM:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)
        return LLM.from_config(asked(**keywords))


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS, num_tokens: int = 9) -> list[list[int]]:
    params = greedy_params(num_tokens)
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params)]


Recorded = tuple[list[list[int]], RoutingTrace, dict[str, Any]]


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    """Tokens of a mixed batch with a table, the record of its experts, and what is said of it."""
    with opened(routing="synthetic:0.7", record_routing=True) as llm:
        return answers(llm), llm.routing_trace(), llm.effective()["routing"]


def test_every_token_has_the_row_of_its_sequence_and_position(recorded: Recorded) -> None:
    _, trace, _ = recorded
    table = synthetic_ids(SIZES, 0.7, seed=0, num_rows=TABLE_ROWS)
    assert trace.model == "tiny"
    assert trace.sizes == SIZES
    # The last token of an answer is sampled, and does not run.
    rows = [
        (first_row(prompt) + position) % TABLE_ROWS
        for prompt in PROMPTS
        for position in range(len(prompt) + 8)
    ]
    np.testing.assert_array_equal(trace.ids, table[rows])


def test_what_is_used_is_told(recorded: Recorded) -> None:
    facts = recorded[2]
    assert facts["kind"] == "synthetic"
    assert facts["reuse"] == 0.7
    assert facts["rows"] == TABLE_ROWS
    # Of 16 experts most are recent: where all are, there is no other to be drawn.
    assert 0.7 < facts["measured_reuse"] < 0.8
    with opened(spec=small_spec()) as llm:
        assert llm.effective()["routing"] is None


@pytest.mark.thorough
def test_tokens_depend_on_neither_batch_nor_prefix_cache(recorded: Recorded) -> None:
    """Also of a prompt that goes on from one too short to tell where in the table it begins."""
    together = recorded[0]
    with opened(routing="synthetic:0.7") as plain:
        assert [answers(plain, [prompt])[0] for prompt in PROMPTS] == together
        short, long = (PROMPTS[at] + answers(plain, [PROMPTS[at]], 30)[0] for at in (0, 3))
        expected = answers(plain, [long, short])
    assert first_row(short) != first_row(PROMPTS[0])
    with opened(routing="synthetic:0.7", enable_prefix_caching=True) as llm:
        answers(llm, [PROMPTS[3], PROMPTS[0]], 30)
        assert answers(llm, [long]) == expected[:1]
        found = llm.stats()["kv"]["prefix"]["hits_gpu_tokens"]
        assert found > 0
        assert answers(llm, [short]) == expected[1:]
        assert llm.stats()["kv"]["prefix"]["hits_gpu_tokens"] == found


@pytest.mark.thorough
def test_a_trace_is_replayed(tmp_path: Path, recorded: Recorded) -> None:
    path = tmp_path / "a [trace].parquet"
    write_trace(path, recorded[1])
    with opened(routing=f"trace:{path}", record_routing=True) as llm:
        answers(llm)
        facts, again = llm.effective()["routing"], llm.routing_trace()
        assert facts["sha256"] == read_trace(path).digest
        llm.forget_routing()
        assert not len(llm.routing_trace().ids)
    rows = [
        (first_row(prompt) + position) % len(recorded[1].ids)
        for prompt in PROMPTS
        for position in range(len(prompt) + 8)
    ]
    np.testing.assert_array_equal(again.ids, recorded[1].ids[rows])


@pytest.mark.thorough
def test_a_router_s_own_choice_is_recorded() -> None:
    with opened(record_routing=True) as llm:
        answers(llm, [PROMPTS[1]])
        ids = llm.routing_trace().ids
        assert llm.effective()["routing"] == {"kind": "dummy"}
    assert ids.shape == (48, 2, 3)
    assert all(len(set(row)) == 3 for row in ids.reshape(-1, 3).tolist())
    assert len(np.unique(ids)) > 8


def test_a_trace_of_another_model_is_refused(tmp_path: Path, recorded: Recorded) -> None:
    path = tmp_path / "trace.parquet"
    write_trace(path, recorded[1])
    with pytest.raises(ConfigError, match=r"with \[0, 1, 2, 3\] layers with experts"):
        opened(spec=moe_spec(decoder_sparse_step=1), routing=f"trace:{path}")
    with pytest.raises(ConfigError, match="expected a trace, found no file at "):
        opened(routing=f"trace:{tmp_path / 'none'}")


@pytest.mark.parametrize("spec", [small_spec(), moe_spec(mlp_only_layers=[1, 3])])
def test_a_model_without_experts_is_refused(spec: ModelSpec) -> None:
    """So is one of a family with experts whose layers are all dense."""
    for keywords, message in (
        ({"routing": "synthetic:0.5"}, "model.routing: expected null for a model without"),
        ({"record_routing": True}, "record_routing: expected a model with experts, got"),
        ({"offload_backend": "experts"}, "offload=experts: expected a model with experts, got"),
        ({"cpu_offload_gb": 1, "experts_first": True}, "experts_first: expected a model with"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM.plan_for(asked(spec, **keywords))
    assert LLM.plan_for(asked(spec)).experts is None


def test_what_is_not_recorded_is_not_returned() -> None:
    with opened() as llm, pytest.raises(ConfigError, match="expected record_routing=True"):
        llm.routing_trace()


def test_the_plan_counts_table_and_buffers() -> None:
    picks, tokens = 2 * 3, 32
    table = 4 * TABLE_ROWS * picks + (4 * picks + 8) * tokens
    for keywords, num_bytes in (
        ({}, None),
        ({"routing": "dummy"}, None),
        ({"routing": "synthetic:0.5"}, table),
        ({"record_routing": True}, 512),
        ({"routing": "synthetic:0.5", "record_routing": True}, table + 512),
    ):
        found = LLM.plan_for(asked(**keywords)).gpu_items.get("routing")
        assert found is num_bytes or abs(found - num_bytes) < 512
