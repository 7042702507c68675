"""Tiny checkpoints and engines, made once; only tests that ask for them import torch."""

import shutil
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


@pytest.fixture(scope="session")
def residents(tiny: TinyModels) -> Any:
    """Tokens of resident engines, and offloading engines on the same checkpoints."""
    from tests.engine.placements import Residents

    return Residents(tiny)


@pytest.fixture
def pool_is_full() -> Callable[[Any], bool]:
    """Tell whether an engine holds no KV block and no unfinished request."""

    def check(llm: Any) -> bool:
        stats = llm.stats()
        windows = stats["free_window_blocks"] == stats["num_window_blocks"]
        blocks = stats["free_blocks"] == stats["num_blocks"]
        return blocks and windows and not llm.has_unfinished()

    return check


@pytest.fixture(scope="session")
def text_folder(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a tokenizer; must not be written to."""
    from tests.tiny import add_tokenizer

    copy = tmp_path_factory.mktemp("text") / "llama"
    shutil.copytree(tiny.folder("llama"), copy)
    add_tokenizer(copy)
    return copy


@pytest.fixture(scope="session")
def shared_llm(text_folder: Path) -> Any:
    """An engine of the tiny Llama with one of three layers offloaded."""
    from tests.tiny import open_llm

    return open_llm(text_folder, max_model_len=200, offload_group_size=2)


@pytest.fixture
def llm(shared_llm: Any, pool_is_full: Callable[[Any], bool]) -> Iterator[Any]:
    """An engine that many tests use; a test that leaves requests or blocks behind fails."""
    yield shared_llm
    assert pool_is_full(shared_llm)
