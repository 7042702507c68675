"""Engines whose groups of KV are other than planned, and models with more kinds of layers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine import build
from engine.model.spec import ModelSpec
from engine.plan.sizes import KVGroup
from tests.engine.tiers import SIZES

Groups = tuple[KVGroup, ...]
WINDOWS = (None, 40, 13, 40, None, 13)
"""Of six layers, three kinds."""
SIX = {**SIZES, "num_hidden_layers": 6}


def with_groups(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Groups], Iterable[KVGroup]]
) -> None:
    """Let engines that are built from now on have other groups of layers than planned."""
    plan_memory = vars(build)["plan_memory"]  # as another patch may have left it

    def plan(*args: Any, **keywords: Any) -> Any:
        found = plan_memory(*args, **keywords)
        return replace(found, kv=replace(found.kv, groups=tuple(change(found.kv.groups))))

    monkeypatch.setattr(build, "plan_memory", plan)


def with_blocks(monkeypatch: pytest.MonkeyPatch, *counts: int | None) -> None:
    """Let engines have so many GPU blocks of each group; None, or not given: as planned."""

    def fewer(groups: Groups) -> list[KVGroup]:
        pairs = zip(groups, (*counts, *[None] * (len(groups) - len(counts))), strict=True)
        return [replace(g, num_gpu_blocks=n or g.num_gpu_blocks) for g, n in pairs]

    with_groups(monkeypatch, fewer)


def with_windows(monkeypatch: pytest.MonkeyPatch, windows: Sequence[int | None]) -> None:
    """Let each layer of every model attend to so many tokens, which no config.json can say."""
    monkeypatch.setattr(ModelSpec, "windows", tuple(windows))


class Masked:
    """A transformers model whose layers attend to what a mask each lets them; it keeps no cache."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._windows: tuple[int | None, ...] = ()
        self._tokens: dict[Any, list[int]] = {}
        for index, layer in enumerate(model.model.layers):

            def masked(_: Any, args: Any, keywords: Any, index: int = index) -> Any:
                return args, keywords | {"attention_mask": self._masks[self._windows[index]]}

            layer.self_attn.register_forward_pre_hook(masked, with_kwargs=True)

    def __call__(
        self, prompts: Iterable[list[int]], max_tokens: int, windows: Any = WINDOWS
    ) -> list[list[int]]:
        """Return the greedy tokens of each prompt."""
        self._windows = windows
        return [self._greedy(prompt, max_tokens) for prompt in prompts]

    def _greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        key = self._windows, max_tokens, tuple(prompt)
        if key not in self._tokens:
            ids = list(prompt)
            for _ in range(max_tokens):
                position = torch.arange(len(ids))
                back = position[:, None] - position
                self._masks = {
                    window: ((back >= 0) & (back < (window or len(ids))))[None, None]
                    for window in set(self._windows)
                }
                with torch.no_grad():
                    logits = self._model(torch.tensor([ids]), use_cache=False).logits
                ids.append(int(logits[0, -1].argmax()))
            self._tokens[key] = ids[len(prompt) :]
        return self._tokens[key]
