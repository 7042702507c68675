"""Engines with a host tier of KV blocks, of exact sizes, and what their requests must give."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, build
from engine.device.cuda import open_device
from engine.plan.memory import MemoryPlan
from engine.plan.planner import plan_memory
from engine.plan.sizes import CopyAhead, HostKVPlan, ReadRates, SwapRates, TierCosts
from tests.tiny import greedy, open_llm

SIZES: dict[str, Any] = {
    "vocab_size": 151,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "initializer_range": 0.3,
}
"""Of models that are smaller than those of tests.tiny."""
ALWAYS = CopyAhead(step_bytes=0, run_bytes=0)
"""Whatever fits a stage buffer is copied ahead."""
SWAP = SwapRates(store_bytes_s=1e15, load_bytes_s=1e15)
"""A link with which moving blocks is always cheaper than computing them again."""

TURNS = ReadRates(step_s=1.0, read_bytes_s=1.0)
"""Host blocks cost so much that long sequences take turns."""
TOGETHER = ReadRates(step_s=1.0, read_bytes_s=1e15)
"""Host blocks cost so little that they decode together."""


def tiers(
    monkeypatch: pytest.MonkeyPatch,
    num_gpu: int,
    *,
    num_window: int | Sequence[int] | None = None,
    pinned: int = 0,
    pageable: int = 0,
    in_place: bool = True,
    stage_blocks: int = 16,
    prefix_caching: bool = True,
    recompute_token_s: float = 1.0,
    read_rates: ReadRates | None = None,
    copy_ahead: CopyAhead | None = None,
) -> None:
    """Let engines that are built from now on have so many blocks.

    Args:
        monkeypatch: Puts it back.
        num_gpu: Blocks of the first group on the GPU.
        num_window: Of each group behind it; None: as planned.
        pinned: Pinned host blocks of each group.
        pageable: Pageable ones.
        in_place: Sequences may use pinned blocks of the first group where they are.
        stage_blocks: Host blocks that a staging buffer holds; 128 tokens need room.
        prefix_caching: Full blocks are found by other sequences.
        recompute_token_s: What a token costs that is computed again; moving costs nothing.
        read_rates: What decodes over both tiers cost; None: host blocks cost nothing.
        copy_ahead: When decodes' host blocks are copied; None: they are read in place.
    """

    def plan(*args: Any, **keywords: Any) -> MemoryPlan:
        found = plan_memory(*args, **keywords)
        others = found.kv.pools[1:]
        if isinstance(num_window, int):
            others = (num_window,) * len(others)
        elif num_window is not None:
            others = tuple(num_window)
        kv, host, can_pin = found.kv.with_pools((num_gpu, *others)), None, found.facts.can_pin
        if pinned or pageable:
            kv = kv.with_host(
                pinned if can_pin else 0,
                pageable + (0 if can_pin else pinned),
                in_place=in_place and found.facts.can_uva and pinned > 0,
            )
            host = HostKVPlan(
                stage_blocks=stage_blocks,
                dma_run_bytes=2**21,
                costs=TierCosts(
                    swap_rates=SWAP, recompute_token_s=recompute_token_s, read_rates=read_rates
                ),
                copy_ahead=copy_ahead,
            )
        return replace(found, kv=kv, host_kv=host, prefix_caching=prefix_caching)

    monkeypatch.setattr(build, "plan_memory", plan)


class Alone:
    """Tokens of prompts in a resident engine without tiers, by model.

    They run alone, or at once where batches give the same bits, which saves most of the steps.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self._at_once = at_once
        self._tokens: dict[tuple[Path, tuple[int, ...]], list[int]] = {}

    def __call__(
        self, folder: Path, prompts: Sequence[Sequence[int]], max_tokens: int, **keywords: Any
    ) -> list[list[int]]:
        """Return the first `max_tokens` tokens of each prompt."""
        keys = [(folder, tuple(prompt)) for prompt in prompts]
        missing = [key for key in keys if len(self._tokens.get(key, [])) < max_tokens]
        if missing:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(build, "plan_memory", plan_memory)
                patch.setattr(build, "open_device", open_device)
                given = {"gpu_memory_gib": 0.25, "max_model_len": 1000, **keywords}
                llm = open_llm(folder, **given)
            assert llm.plan.host_kv is None
            assert not llm.plan.prefix_caching
            for keys_together in [missing] if self._at_once else [[key] for key in missing]:
                found = greedy(llm, [prompt for _, prompt in keys_together], max_tokens)
                self._tokens |= zip(keys_together, found, strict=True)
            assert llm.stats()["preemptions"] == 0
            llm.close()
        return [self._tokens[key][:max_tokens] for key in keys]


def check_empty(llm: LLM) -> None:
    """No block has an owner, no move is under way, and all blocks are accounted for."""
    assert llm._engine is not None
    core = llm._engine.core
    core.transfers.drain()
    assert not llm.has_unfinished()
    assert core.transfers.num_under_way == 0
    for pool in core.pools:
        assert pool.ledger.num_in_flight == 0
        gpu, cpu = pool.use("gpu"), pool.use("cpu")
        assert (gpu["owned"], cpu["owned"], cpu["in_transit"]) == (0, 0, 0)
        assert gpu["cached"] + gpu["free"] == pool.num_gpu_blocks
        assert cpu["cached"] + cpu["free"] == pool.num_cpu_blocks
    llm.reset_cache()
    for pool in core.pools:
        assert pool.use("gpu")["free"] == pool.num_gpu_blocks
        assert pool.use("cpu")["free"] == pool.num_cpu_blocks
