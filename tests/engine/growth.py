"""A load whose batches grow from 1 to 17 and shrink to 2 while it runs, across captured sizes."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine import LLM
from engine.run.inputs import StepShape
from tests.engine.conftest import TinyModels
from tests.tiny import VOCAB, greedy, greedy_params, make_prompt, open_llm

LENGTHS = (5, 130, 3, 40, 1, 17, 33, 64, 9, 20, 31, 7, 25, 2, 16, 48, 11)
"""Of prompts, tokens; the second is prefilled in parts, beside a decode."""
TOKENS = (46, 46, 30, 24, 24, *[18] * 4, *[12] * 8)
WAVES = (1, 2, 2, 4, 8)
"""Requests that arrive together."""
STEPS = 6
"""From one arrival to the next."""
BATCHES = {1, 3, 5, 9, 17, 2}
"""Of decodes, at least."""
GRAPHS = [1, 2, 4, 8, 16, 24]
LAYERS = 5
ALONE = (0, 1, 8, 16)
"""Requests that also run alone."""
LIMITS: dict[str, Any] = {
    "max_num_seqs": 17,
    "max_num_batched_tokens": 96,
    "max_model_len": 192,
    "block_size": 16,
}


@dataclass
class Growth:
    """What a load gave, and how its steps were composed."""

    tokens: list[list[int]]
    batches: set[int] = field(default_factory=set)
    """Decodes of steps without a prefill."""
    num_mixed: int = 0
    """Steps with decodes and prefills."""
    num_graphs: int = 0
    num_eager: int = 0
    """Decode steps that ran eagerly."""


def make_prompts(vocab: int) -> list[list[int]]:
    return [make_prompt(length, seed=11 + at, vocab=vocab) for at, length in enumerate(LENGTHS)]


def grow(
    llm: LLM,
    prompts: list[list[int]],
    tokens: Sequence[int] = TOKENS,
    waves: Sequence[int] = WAVES,
) -> Growth:
    """Run a load; the steps are composed the same in every engine with equal limits."""
    growth = Growth([[] for _ in prompts])
    left, sent, steps = list(waves), 0, 0
    while left or llm.has_unfinished():
        if left and steps % STEPS == 0:
            for index in range(sent, sent + left[0]):
                llm.add_request(prompts[index], greedy_params(tokens[index]), str(index))
            sent += left.pop(0)
        for event in llm.step():
            growth.tokens[int(event.request_id)].append(event.token_id)
        steps += 1
        step = llm.last_step
        if step is None or not step.num_decode_tokens:
            continue
        if step.num_prefill_tokens:
            growth.num_mixed += 1
            continue
        growth.batches.add(step.num_decode_tokens)
        growth.num_graphs += step.used_graph
        growth.num_eager += not step.used_graph
    return growth


class _Some(dict[StepShape, Any]):
    """Graphs of which only a share is found."""

    def __init__(self, graphs: dict[StepShape, Any], share: float, seed: int) -> None:
        super().__init__(graphs)
        self._share, self._chance = share, random.Random(seed)

    def get(self, shape: StepShape, default: Any = None) -> Any:  # type: ignore[override]
        return super().get(shape, default) if self._chance.random() < self._share else default


@contextmanager
def some_eager(llm: LLM, share: float, seed: int = 0) -> Iterator[None]:
    """Let a share of decode steps that have a graph run eagerly instead."""
    assert llm._engine is not None
    executor = llm._engine.executor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "_graphs", _Some(executor._graphs, 1 - share, seed))
        yield


class Growths:
    """Engines on a GPU with tiny models of five layers, and what resident ones give."""

    def __init__(self, tiny: TinyModels) -> None:
        self._tiny = tiny
        self._expected: dict[str, Growth] = {}
        self.prompts = make_prompts(VOCAB)

    def open(self, family: str = "llama", **keywords: Any) -> LLM:
        folder = self._tiny.folder(family, num_hidden_layers=LAYERS)
        return open_llm(folder, **({"device": "cuda"} | LIMITS | keywords))

    def expected(self, family: str = "llama", **keywords: Any) -> Growth:
        """What an engine with everything on the GPU gives; in float32, alone and in batches."""
        key = f"{family} {sorted(keywords.items())}"
        if key not in self._expected:
            llm = self.open(family, **keywords)
            found = grow(llm, self.prompts)
            assert llm.plan.offloaded_layers == ()
            if keywords["dtype"] == "float32":
                for at in ALONE:
                    assert [found.tokens[at]] == greedy(llm, [self.prompts[at]], TOKENS[at])
            llm.close()
            check_composition(found, GRAPHS)
            self._expected[key] = found
        return self._expected[key]


def check_composition(growth: Growth, graphs: list[int]) -> None:
    """The load did what it is for: batches across captured sizes, decodes beside prefills."""
    assert growth.batches >= BATCHES
    assert growth.num_mixed > 0
    assert (growth.num_graphs > 0) is bool(graphs)
    assert (growth.num_eager > 0) is (graphs != GRAPHS)
    assert [len(tokens) for tokens in growth.tokens] == list(TOKENS)
