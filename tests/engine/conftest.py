"""Tiny checkpoints, made once in a test run; torch is imported only by tests that ask for them."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def single_thread() -> Iterator[None]:
    """Run torch on one thread: tiny products are faster so, and sums keep one order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TinyModels:
    """Makes checkpoints and transformers' greedy tokens on demand, and keeps both."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._models: dict[str, tuple[Any, Path]] = {}
        self._tokens: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def model(self, variant: str, **changes: Any) -> Any:
        """Return the transformers model of a variant of tests.tiny with changed sizes."""
        return self._made(variant, changes)[0]

    def folder(self, variant: str, **changes: Any) -> Path:
        """Return the float32 checkpoint of a variant; must not be written to."""
        return self._made(variant, changes)[1]

    def greedy(
        self, variant: str, prompts: Sequence[Sequence[int]], max_tokens: int, **changes: Any
    ) -> list[list[int]]:
        """Return transformers' greedy tokens of prompts that run alone."""
        from tests.tiny import hf_greedy

        model = self.model(variant, **changes)
        found = []
        for prompt in prompts:
            key = (f"{variant} {sorted(changes.items())}", tuple(prompt))
            if len(self._tokens.get(key, [])) < max_tokens:
                self._tokens[key] = hf_greedy(model, prompt, max_tokens)
            found.append(self._tokens[key][:max_tokens])
        return found

    def _made(self, variant: str, changes: dict[str, Any]) -> tuple[Any, Path]:
        from tests.tiny import hf_model, save

        key = f"{variant} {sorted(changes.items())}"
        if key not in self._models:
            model = hf_model(variant, **changes)
            folder = save(model, self._root / f"{variant}_{len(self._models)}")
            self._models[key] = (model, folder)
        return self._models[key]


@pytest.fixture(scope="session")
def tiny(single_thread: None, tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Tiny checkpoints of every family and transformers' greedy tokens on them."""
    return TinyModels(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def pool_is_full() -> Callable[[Any], bool]:
    """Tell whether an engine holds no KV block and no unfinished request."""

    def check(llm: Any) -> bool:
        stats = llm.stats()
        return stats["free_blocks"] == stats["num_blocks"] and not llm.has_unfinished()

    return check
