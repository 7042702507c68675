"""Layers with a window: greedy tokens equal transformers' beyond it, however the steps are made."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM
from engine.errors import EngineError
from engine.kv import sequences
from engine.kv.pool import Retain
from engine.kv.prefix import num_expired
from engine.plan.sizes import KVGroup
from tests.engine.conftest import TinyModels
from tests.engine.groups import Groups, with_blocks, with_groups
from tests.slow import mostly_slow, slow
from tests.tiny import COMMON, VARIANTS, greedy, hf_greedy, make_prompt, open_llm

pytestmark = pytest.mark.thorough

WINDOWS = (
    *("mistral_window", "qwen2_window", "qwen3_window", "gemma3", "gemma3_odd_sizes"),
    "gpt_oss",
)
PROMPTS = [make_prompt(length, seed=3) for length in (20, 39, 40, 41, 95, 130)]
MAX_TOKENS = 12


LIMITS = ((8, 11, 3), (32, 33, 8), (128, 70, 1))
"""Tokens of a block, tokens of a step, sequences at once; gemma3 gets all, the others one each."""


@pytest.mark.parametrize("variant", mostly_slow(WINDOWS, lambda x: x == "mistral_window"))
def test_tokens_do_not_depend_on_chunks_batch_limits_or_block_size(
    tiny: TinyModels, variant: str
) -> None:
    expected = tiny.greedy(variant, PROMPTS, MAX_TOKENS)
    one = WINDOWS.index(variant) % len(LIMITS)
    for block_size, num_tokens, num_seqs in (
        LIMITS if variant == "gemma3" else LIMITS[one : one + 1]
    ):
        llm = open_llm(
            tiny.folder(variant),
            block_size=block_size,
            max_num_batched_tokens=num_tokens,
            max_num_seqs=num_seqs,
            max_model_len=200,
        )
        assert llm.plan.window == VARIANTS[variant][1]["sliding_window"]
        assert greedy(llm, PROMPTS, MAX_TOKENS) == expected
        llm.close()


def wider(groups: Groups, *, by: int) -> list[KVGroup]:
    """Return groups whose windows hold so many tokens more."""
    return [replace(g, window=g.window and g.window + by) for g in groups]


@pytest.mark.parametrize(
    "variant",
    [
        "qwen2_window",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("mistral_window", "gemma3")),
    ],
)
def test_a_window_off_by_one_changes_tokens(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    prompts = [make_prompt(length, seed=4) for length in (60, 80, 100, 150)]
    found = []
    for change in (0, -1, 1):
        with monkeypatch.context() as patch:
            with_groups(patch, partial(wider, by=change))
            llm = open_llm(tiny.folder(variant), max_model_len=200)
        found.append(greedy(llm, prompts, 40))
        llm.close()
    assert found[0] not in found[1:]


OFFLOADS: list[dict[str, Any]] = [
    {},
    {"offload_group_size": 2},
    {"cpu_offload_gb": 1},
    {"cpu_offload_gb": 1, "uva_stage_tokens": 1},
]
POOLS: list[tuple[str, tuple[int | None, ...]]] = [
    ("gemma3", (17, None)),
    ("gemma3", (None, 17)),
    ("qwen2_window", (24, 15)),
    ("mistral_window", (13,)),
]
"""Blocks of each group; None: as planned."""


@pytest.mark.parametrize(
    ("variant", "pools", "offload"),
    [
        pytest.param(*pools, offload, marks=() if at == other == 2 else pytest.mark.slow)
        for at, pools in enumerate(POOLS)
        for other, offload in enumerate(OFFLOADS)
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_preemption_and_offload(
    tiny: TinyModels,
    monkeypatch: pytest.MonkeyPatch,
    pool_is_full: Callable[[LLM], bool],
    variant: str,
    pools: tuple[int | None, ...],
    offload: dict[str, Any],
) -> None:
    """As in a roomy engine, which other tests hold against transformers."""
    prompts = [make_prompt(length, seed=2) for length in (17, 20, 26, 30)]
    with open_llm(tiny.folder(variant), max_model_len=120) as roomy:
        expected = greedy(roomy, prompts, 70)
        assert roomy.stats()["preemptions"] == 0
    with_blocks(monkeypatch, *pools)
    llm = open_llm(
        tiny.folder(variant), max_model_len=120, block_size=8, max_num_batched_tokens=40, **offload
    )
    assert greedy(llm, prompts, 70) == expected
    assert llm.stats()["preemptions"] > 0
    assert llm.stats()["recomputed_tokens"] > 0
    assert llm.stats()["overlapped_steps"] > 0
    assert pool_is_full(llm)
    llm.close()


class Poison:
    """Fills what is given back with NaN, so that reading it again would be seen."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = llm._engine
        assert engine is not None
        self.num_blocks = 0
        pool = engine.core.pools[-1]
        free, tensor = pool.free, engine.cache.tensors[-1]

        def poisoned(blocks: list[int], retain: Retain = "demote") -> None:
            blocks = list(blocks)
            free(blocks, retain)
            tensor[blocks] = torch.nan
            self.num_blocks += len(blocks)

        monkeypatch.setattr(pool, "free", poisoned)


@pytest.mark.parametrize("variant", mostly_slow(WINDOWS, lambda x: x == "gemma3"))
def test_blocks_behind_the_window_are_given_back_and_not_read(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    prompts = [make_prompt(length, seed=5) for length in (100, 140, 90)]
    expected = tiny.greedy(variant, prompts, 30)
    llm = open_llm(tiny.folder(variant), max_model_len=200, max_num_batched_tokens=64, block_size=8)
    poison = Poison(llm, monkeypatch)
    assert greedy(llm, prompts, 30) == expected
    assert poison.num_blocks > 3 * 200 // 8 // 2
    window = VARIANTS[variant][1]["sliding_window"]
    groups_of_plan = llm.plan.to_dict()["kv"]["groups"]
    assert groups_of_plan[-1]["window"] == window
    layers = VARIANTS[variant][1].get("num_hidden_layers", COMMON["num_hidden_layers"])
    assert sum(group["layers"] for group in groups_of_plan) == layers
    # The negative control: one block more than that is missed.
    monkeypatch.setattr(sequences, "num_expired", lambda *a: num_expired(*a) + 1)
    said = "expected finite logits|index out of range"  # poison, or a block that is gone
    with pytest.raises((EngineError, IndexError), match=said):
        greedy(llm, prompts, 30)
    llm.close()


@pytest.mark.parametrize("variant", [slow("mistral_window"), slow("qwen2_window"), "gemma3"])
def test_a_disabled_window_attends_to_the_whole_context(tiny: TinyModels, variant: str) -> None:
    """As the same weights do where transformers has a window that is never left."""
    model = copy.deepcopy(tiny.model(variant))
    model.config.sliding_window = 5000
    expected = [hf_greedy(model, prompt, MAX_TOKENS) for prompt in PROMPTS]
    assert expected != tiny.greedy(variant, PROMPTS, MAX_TOKENS)
    llm = open_llm(tiny.folder(variant), disable_sliding_window=True)
    assert (llm.plan.window, llm.plan.max_model_len) == (None, COMMON["max_position_embeddings"])
    assert any("attend to the whole context instead of" in note for note in llm.plan.notes)
    assert greedy(llm, PROMPTS, MAX_TOKENS) == expected
    llm.close()


@pytest.mark.thorough_but("mistral_window")
@pytest.mark.parametrize("variant", ["mistral_window", "gemma3"])
def test_a_window_that_is_never_left_changes_nothing(tiny: TinyModels, variant: str) -> None:
    window = VARIANTS[variant][1]["sliding_window"]
    prompt = make_prompt(window - 8)
    for length in (window, window + 1):
        llm = open_llm(tiny.folder(variant), max_model_len=length)
        assert (llm.plan.window is None) == (length == window)
        assert greedy(llm, [prompt], 8) == tiny.greedy(variant, [prompt], 8)
        llm.close()


def test_the_text_part_of_a_checkpoint_of_text_and_images(tiny: TinyModels, tmp_path: Path) -> None:
    import transformers

    text = tiny.model("gemma3")
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    config = transformers.Gemma3Config(
        text_config=text.config.to_dict(), vision_config=vision, mm_tokens_per_image=4
    )
    both = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    both.model.language_model.load_state_dict(text.model.state_dict())
    both.save_pretrained(tmp_path)
    llm = open_llm(tmp_path)
    [note] = [note for note in llm.plan.notes if note.startswith("checkpoint: the text part")]
    assert "other tensors (0.00 GiB) are left out" in note
    assert greedy(llm, PROMPTS, MAX_TOKENS) == tiny.greedy("gemma3", PROMPTS, MAX_TOKENS)
    llm.close()


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_names_of_the_text_part(prefix: str) -> None:
    from engine.model.checkpoint import StoredTensor, text_part

    tensor = StoredTensor(Path("x"), "float32", (2,), 0, 8)
    names = ["norm.weight", "layers.0.mlp.up_proj.weight"]
    text = {f"model.{name}": tensor for name in names}
    assert text_part(text) == (text, "")
    both = {prefix + name: tensor for name in names} | {"vision_tower.x": tensor}
    found, note = text_part(both)
    assert found == text
    assert "1 other tensors" in note
    assert "vision_tower.x" in note
    assert text_part({prefix + name: tensor for name in names}) == (text, "")


def test_dummy_weights_of_gemma_do_not_repeat_a_token(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.weights import reader

    monkeypatch.setattr(reader, "DUMMY_STD", 0.15)
    llm = open_llm(tiny.folder("gemma3"), load_format="dummy", max_model_len=200)
    tokens = greedy(llm, PROMPTS, 30)
    llm.close()
    assert all(len(set(answer)) > 4 for answer in tokens)
    assert len({token for answer in tokens for token in answer}) > 20
