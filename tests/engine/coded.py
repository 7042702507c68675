"""Checkpoints whose matrices fill tiles and have escapes, engines on them, weights read back."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine import LLM
from engine.asked.request import TokenEvent
from engine.model.formats import EMBEDDING, HEAD
from engine.model.spec import ModelSpec
from kernels.arguments import Codes
from kernels.ops import codes
from tests.tiny import greedy_params, hf_model, make_prompt, open_llm, save

SIZES: dict[str, Any] = {"vocab_size": 160, "intermediate_size": 128, "num_hidden_layers": 2}
"""So that every matrix of a tiny model fills tiles of 16 rows and 64 inputs."""
ODD: dict[str, Any] = {**SIZES, "hidden_size": 192}
"""Of models with three heads of 22: MLPs and head fill tiles, attention does not."""
FITTING = {
    "llama_odd_sizes": ODD,
    "gemma3_odd_sizes": ODD | {"tie_word_embeddings": False},
    "llama": SIZES | {"num_hidden_layers": 3},
    "gemma3": SIZES | {"num_hidden_layers": 3},
}
SHORT = [make_prompt(length, seed=8) for length in (70, 3)]
SHORT_TOKENS = (4, 4)
LIMITS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_num_seqs": 9,
    "max_num_batched_tokens": 100,
    "max_model_len": 192,
}
LENGTHS = (150, 70, 65, 40, 17, 33, 9, 3, 1)
"""Of prompts, tokens; the first two are prefilled in chunks, of which some are restored for."""
TOKENS = (17, 15, 13, 12, 11, 10, 7, 6, 5)
PROMPTS = [make_prompt(length, seed=5) for length in LENGTHS]
WRONG = int(torch.tensor(300.0).bfloat16().view(torch.int16))
"""The bits of an escape that no matrix has."""


def spoil(tensor: torch.Tensor) -> None:
    """Give a matrix some weights outside any window, 150 at most, zeros of both signs too."""
    flat = tensor.view(-1)
    step = max(97, flat.numel() // 50)
    flat[::step] *= 2.0**-20
    flat[7 :: 5 * step], flat[11 :: 5 * step] = 0.0, -0.0


class Checkpoints:
    """Makes bfloat16 checkpoints and the tokens of their plain resident weights on demand."""

    def __init__(self, root: Path, **keywords: Any) -> None:
        self._root, self._keywords = root, LIMITS | keywords
        self._folders: dict[str, Path] = {}
        self._tokens: dict[str, list[list[int]]] = {}
        self._short: dict[str, list[list[int]]] = {}

    def folder(self, variant: str, **changes: Any) -> Path:
        """Return the checkpoint of a variant of tests.tiny; must not be written to."""
        key = f"{variant} {sorted(changes.items())}"
        if key not in self._folders:
            model = hf_model(variant, **(FITTING.get(variant, SIZES) | changes))
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 2:
                        spoil(parameter)
            folder = self._root / f"{variant}_{len(self._folders)}"
            self._folders[key] = save(model, folder, "bfloat16")
        return self._folders[key]

    def open(self, model: str | Path, **keywords: Any) -> LLM:
        """Build an engine of a variant or a folder; weights are lossless unless it is said."""
        folder = self.folder(model) if isinstance(model, str) else model
        return open_llm(folder, **{"weight_format": "lossless"} | self._keywords | keywords)

    def short(self, variant: str) -> list[list[int]]:
        """Return what plain weights on the GPU give for SHORT."""
        if variant not in self._short:
            llm = self.open(variant, weight_format="checkpoint")
            assert not llm.plan.formats.others
            self._short[variant], _ = run(llm, SHORT, SHORT_TOKENS)
            llm.close()
        return self._short[variant]

    def tokens(self, variant: str) -> list[list[int]]:
        """Return what they give for PROMPTS."""
        if variant not in self._tokens:
            llm = self.open(variant, weight_format="checkpoint")
            self._tokens[variant], batches = run(llm)
            assert batches >= set(range(1, 10))
            llm.close()
        return self._tokens[variant]


def run(
    llm: LLM, prompts: Sequence[list[int]] = PROMPTS, tokens: Sequence[int] = TOKENS
) -> tuple[list[list[int]], set[int]]:
    """Return the greedy tokens of prompts that begin together, and the batches of decodes."""
    found: list[list[int]] = [[] for _ in prompts]
    batches = set()
    for index, (prompt, most) in enumerate(zip(prompts, tokens, strict=True)):
        llm.add_request(prompt, greedy_params(most), str(index))
    while llm.has_unfinished():
        events: list[TokenEvent] = llm.step()
        for event in events:
            found[int(event.request_id)].append(event.token_id)
        if llm.last_step is not None:
            batches.add(llm.last_step.num_decode_tokens)
    return found, batches


def stored(folder: Path, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Return the matrices of a checkpoint, joined as the engine joins them."""
    values = load_file(folder / "model.safetensors")
    return {
        tensor.name: torch.cat([values[part.name] for part in tensor.parts])
        for tensor in spec.tensors()
        if len(tensor.shape) == 2
    }


def read_back(llm: LLM, num_tokens: int = 1) -> dict[str, torch.Tensor]:
    """Return what products of a step would read in codes, restored: where it lies, or in slots."""
    assert llm._engine is not None
    store, found = llm._engine.store, {}
    store.begin_step(num_tokens)
    for layer in range(llm.spec.num_hidden_layers):
        for short, operand in store.acquire(layer).items():
            if isinstance(operand, Codes):
                found[f"model.layers.{layer}.{short}"] = codes.restore(operand).cpu()
        store.release(layer)
    for name in (EMBEDDING, HEAD):
        if name in llm.plan.formats.others:
            found[name] = codes.restore(store.outer(name)).cpu()
    store.end_step()
    return found


def check_weights(llm: LLM, folder: Path, num_tokens: int = 1) -> None:
    """Every weight in codes has the bits of the checkpoint."""
    expected, found = stored(folder, llm.spec), read_back(llm, num_tokens)
    assert found.keys() == llm.plan.formats.others.keys()
    assert found
    for name, values in found.items():
        assert torch.equal(values.view(torch.int16), expected[name].view(torch.int16)), name


def corrupt(llm: LLM, ending: str = "mlp.down_proj.weight") -> None:
    """Make one escape of one matrix wrong."""
    assert llm._engine is not None
    views = next(v for t, v in llm._engine.store.packed() if t.name.endswith(ending))
    assert int(views["table"].count_nonzero()) > 0
    assert int(views["table"][0]) != WRONG
    views["table"][0] = WRONG


def change_checkpoint(source: Path, target: Path, change: Any) -> Path:
    """Copy a checkpoint with its matrices changed."""
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    for tensor in tensors.values():
        if tensor.dim() == 2:
            change(tensor)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target
