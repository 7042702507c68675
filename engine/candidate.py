"""Candidate: one placement with its predicted times. Pure arithmetic, no torch."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from engine.cost import Shape, decode_step_s, step_s
from engine.cost_queue import QUEUE_REQUESTS, queue_of, queue_s
from engine.placement import Assignment, Placement
from engine.rates import Rates

GIB: Final = 2**30
TIE: Final = 0.002
"""Times that differ by less count as equal; then fewer bytes in host memory decide."""
NUM_LISTED: Final = 5
NOTHING: Final = "everything in GPU memory"
"""Label of the candidate that moves nothing."""
GAIN: Final = 1.1
"""How much faster a queue must be predicted to move something where nothing has to be."""


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
    why = f"{what} of {len(candidates)} placements that fit"
    if best.label == NOTHING:
        why = f"it fits, and none of {len(candidates)} placements has {GAIN - 1:.0%} more tokens/s"
    return {
        "objective": objective,
        "chosen": best.label,
        "why": f"{why} (predicted; {rates.source})",
        "candidates": [candidate.row() for candidate in candidates[:NUM_LISTED]],
    }


def label_of(
    taken: list[tuple[str, ...]],
    outer: tuple[str, ...],
    kind: Placement,
    slots: int,
    name: str,
) -> str:
    """Return what a candidate is called.

    Args:
        taken: Of each layer, the products that are in host memory.
        outer: Tensors outside the layers that are read in place.
        kind: Placement of what is taken.
        slots: That it is copied into.
        name: Of the granule.
    """
    parts = []
    if outer:
        names = ["embedding", "output head"][: len(outer)]
        parts.append(f"{' and '.join(names)} read in place")
    count = sum(1 for items in taken if items)
    if count:
        what = f"{count} layers" if name == "whole layers" else f"{name} of {count} layers"
        how = {
            Placement.PREFETCH: f"copied ahead, {slots} slots",
            Placement.UVA: "read in place",
            Placement.ON_DEMAND: "copied on demand",
        }[kind]
        used = [items for items in taken if items]
        if used[-1] != used[0]:
            names = [item.split(".")[-2] for item in used[-1]]
            what += f" (of the last: {', '.join(names)})"
        parts.append(f"{what} {how}")
    return "; ".join(parts)
