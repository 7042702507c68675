"""Candidate: one placement with its predicted times. Pure arithmetic, no torch."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from engine.cost import Shape, decode_step_s, step_s
from engine.cost_queue import QUEUE_REQUESTS, queue_of, queue_s
from engine.placement import Assignment
from engine.rates import Rates

GIB: Final = 2**30
TIE: Final = 0.002
"""Times that differ by less count as equal; then fewer bytes in host memory decide."""
NUM_LISTED: Final = 5


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One placement; its times are predicted when they are asked for."""

    label: str
    assignment: Assignment
    shape: Shape
    host_bytes: int
    rates: Rates
    context_tokens: int
    """Of the sequence whose decode step counts."""

    @cached_property
    def decode_s(self) -> float:
        """The time of a decode step at batch 1."""
        return decode_step_s(self.shape, self.rates, 1, self.context_tokens)

    @cached_property
    def queue_s(self) -> float:
        """The time of a queue of requests."""
        prompt, output = queue_of(self.shape.max_model_len)
        return queue_s(self.shape, self.rates, QUEUE_REQUESTS, prompt, output)

    @cached_property
    def waves_s(self) -> float:
        """The same, roughly: as many at once as have room at their mean length, all alike."""
        prompt, output = queue_of(self.shape.max_model_len)
        batch = min(QUEUE_REQUESTS, self.shape.concurrency(prompt + output / 2))
        part = min(batch * prompt, self.shape.max_num_batched_tokens)
        first_s = step_s(self.shape, self.rates, prefill=part, rows=max(1, part // prompt))
        then_s = decode_step_s(self.shape, self.rates, batch, prompt + output / 2)
        wave_s = batch * prompt / part * first_s + (output - 1) * then_s
        return QUEUE_REQUESTS / batch * wave_s

    def score(self, objective: str) -> tuple[int, int]:
        """Return what is least for the best candidate."""
        seconds = self.queue_s if objective == "throughput" else self.decode_s
        return round(math.log(seconds) / TIE), self.host_bytes

    def row(self) -> dict[str, Any]:
        """Return plain data for the record."""
        prompt, output = queue_of(self.shape.max_model_len)
        return {
            "label": self.label,
            "host_gib": self.host_bytes / GIB,
            "kv_tokens": self.shape.kv_tokens,
            "decode_step_ms": self.decode_s * 1e3,
            "queue_output_tokens_s": QUEUE_REQUESTS * output / self.queue_s,
            "queue_prompt_tokens": prompt,
        }


def record_of(candidates: list[Candidate], objective: str, rates: Rates) -> dict[str, Any]:
    """Return what was chosen and why as plain data; the first candidate is the choice."""
    best = candidates[0]
    what = {
        "latency": "the shortest decode step at batch 1",
        "throughput": f"the most output tokens/s of a queue of {QUEUE_REQUESTS} requests",
        "context": "the longest sequence, then the shortest decode step at its end",
    }[objective]
    return {
        "objective": objective,
        "chosen": best.label,
        "why": f"{what} of {len(candidates)} placements that fit (predicted; {rates.source})",
        "candidates": [candidate.row() for candidate in candidates[:NUM_LISTED]],
    }
