"""Engines whose groups of KV are other than planned, and models with more kinds of layers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine import build
from engine.kv_sizes import KVGroup
from engine.spec import ModelSpec

Groups = tuple[KVGroup, ...]


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
    """Let engines have so many GPU blocks of each group; None: as planned."""

    def fewer(groups: Groups) -> list[KVGroup]:
        pairs = zip(groups, counts, strict=True)
        return [replace(g, num_gpu_blocks=n or g.num_gpu_blocks) for g, n in pairs]

    with_groups(monkeypatch, fewer)


def with_windows(monkeypatch: pytest.MonkeyPatch, windows: Sequence[int | None]) -> None:
    """Let each layer of every model attend to so many tokens, which no config.json can say."""
    monkeypatch.setattr(ModelSpec, "windows", tuple(windows))
