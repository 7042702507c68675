"""What the parts of the KV rows ask an engine: its room in both tiers, its counters."""

from typing import Final

from engine import LLM
from harness.bench.drive import prompt, run_all
from harness.measure.kv import Counts, counts

MOST_WAITS: Final = 1000
"""Short requests that are run until no block is under way."""
SHORT_TOKENS: Final = 2
"""Prompt and output of each: shorter than any block, so that the cache keeps none of it."""


def kv_counts(llm: LLM) -> Counts:
    """Return the engine's counters of the KV cache."""
    return counts(llm.stats())


def gpu_tokens(llm: LLM) -> int:
    """Return the tokens of KV that have room on the GPU."""
    return int(kv_counts(llm)["gpu.blocks"]) * llm.plan.block_size


def host_tokens(llm: LLM) -> int:
    """Return the tokens of KV that have room in the host tier."""
    return int(kv_counts(llm).get("cpu.blocks", 0)) * llm.plan.block_size


def has_host(llm: LLM) -> bool:
    """Return whether there is a host tier."""
    return host_tokens(llm) > 0


def hold_in_host(llm: LLM) -> None:
    """Take idle content off the GPU and wait until none of it is under way.

    Raises:
        RuntimeError: Blocks stay under way.
    """
    llm.evict_gpu_cache()
    for number in range(MOST_WAITS):
        run_all(llm, [prompt(llm, SHORT_TOKENS, number)], SHORT_TOKENS)
        if not kv_counts(llm).get("cpu.in_transit", 0):
            return
    raise RuntimeError(f"blocks are still under way after {MOST_WAITS} short requests.")
