"""Requests through an engine for the bench: prompts, and times of steps that only decode."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

import torch

from engine import LLM, SamplingParams

SETTLE_STEPS: Final = 3
"""Decode steps that are not timed: the first of a batch, and those behind a break."""


def prompt(llm: LLM, length: int, seed: int) -> list[int]:
    """Return random token ids; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, llm.spec.vocab_size - 1, (length,), generator=generator).tolist()


def params(tokens: int) -> SamplingParams:
    """Return greedy sampling of exactly so many tokens."""
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def drain(llm: LLM) -> None:
    """Step until nothing is unfinished."""
    while llm.has_unfinished():
        llm.step()


def run_all(llm: LLM, prompts: Sequence[list[int]], tokens: int) -> float:
    """Send all prompts at once; return the seconds until the last has its tokens."""
    begin_s = perf_counter()
    for row in prompts:
        llm.add_request(row, params(tokens))
    drain(llm)
    return perf_counter() - begin_s


@dataclass
class Gaps:
    """Times between the ends of steps in which every sequence decodes."""

    seconds: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    """Keys that each sequence read in the timed steps."""
    in_a_row: int = 0
    """Such steps since the last break."""
    decoded: int = 0
    last_s: float = 0.0

    def add(self, now_s: float, wait_s: float, prompt_tokens: int) -> None:
        """Count one such step."""
        self.decoded += 1
        self.in_a_row += 1
        if self.in_a_row > SETTLE_STEPS:
            self.seconds.append(now_s - self.last_s)
            self.waits.append(wait_s)
            self.keys.append(prompt_tokens + self.decoded)
        self.last_s = now_s
