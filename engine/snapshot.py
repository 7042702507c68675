"""Snapshot: what an engine does now and has done so far, for metrics."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.run.core import LinkUse

if TYPE_CHECKING:
    from engine.build import Engine

GB = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """Counts of one moment; totals are those since the load.

    Blocks of KV are those of all groups of layers, and in use where a sequence has them.
    """

    running: int
    """Sequences that have KV blocks."""
    waiting: int
    """Sequences that wait for some, swapped ones included."""
    swapped: int
    """Waiting sequences whose content went to the host tier."""
    gpu_kv_blocks: int
    gpu_kv_blocks_used: int
    gpu_kv_blocks_cached: int
    """Without a sequence, with content that prompts may find."""
    host_kv_blocks: int
    host_kv_blocks_used: int
    host_kv_blocks_cached: int
    prefix_queried_tokens: int
    """Tokens of prompts that were looked up in the KV cache."""
    prefix_hit_gpu_tokens: int
    """Looked up tokens that were found on the GPU."""
    prefix_hit_host_tokens: int
    """Looked up tokens that were found in the host tier."""
    steps: int
    step_s: float
    """Seconds that steps took."""
    prefill_tokens: int
    """Tokens that ran in prefills, recomputed ones included."""
    decode_tokens: int
    preemptions: int
    swaps_out: int
    swaps_in: int
    finished: int
    """Sequences that ended, aborted and failed ones included."""
    aborted: int
    failed: int
    link_weight_bytes: int
    """Bytes of weights that crossed the host link, copied or read in place, but for experts."""
    link_expert_bytes: int
    """Bytes of experts that crossed it because a token needed them."""
    expert_hits: int
    """Experts that tokens were routed to and that lay on the GPU, each once a layer and step; 0
    where all are resident."""
    expert_misses: int
    """Experts that tokens were routed to and that crossed the link."""
    link_kv_bytes: int
    """Bytes of keys and values that crossed it to the GPU, copied or read in place."""
    link_bytes_per_step: float
    """Bytes that crossed it to the GPU in one of the last steps, their mean; without host blocks
    that prefills stage."""
    link_share: float | None
    """Share of its rate that these used while they ran; None where the rate is not known."""

    @property
    def gpu_kv_usage(self) -> float:
        """Share of the GPU's blocks that sequences have, 0 to 1."""
        return self.gpu_kv_blocks_used / self.gpu_kv_blocks if self.gpu_kv_blocks else 0.0


def take_snapshot(engine: "Engine") -> Snapshot:
    """Return an engine's counts.

    Any thread may call it while another one runs the engine: it only reads numbers, of which some
    may be of before a change and some of behind it. It takes some 20 us.
    """
    core = engine.core
    scheduler, stats, pools = core.scheduler, core.scheduler.stats, core.pools
    gpu, host = [pool.use("gpu") for pool in pools], [pool.use("cpu") for pool in pools]
    first, size = pools[0].stats, pools[0].block_size
    on_gpu, on_host = first.spared_gpu * size, first.spared_cpu * size
    use = LinkUse.of(tuple(core.recent))
    rates = (engine.plan.predicted or {}).get("rates", {})
    rate_gb_s = rates.get("h2d_gb_s")
    run, moved = engine.executor, engine.executor.moved
    kv_bytes = moved.kv_in_place_bytes + moved.kv_copied_bytes
    kv_bytes += run.staged_prefill_bytes + core.transfers.loaded_bytes
    meter = run.meter
    expert_hits, expert_misses, expert_bytes = (0, 0, 0) if meter is None else meter.totals.totals
    return Snapshot(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        swapped=scheduler.num_swapped,
        gpu_kv_blocks=sum(pool.num_gpu_blocks for pool in pools),
        gpu_kv_blocks_used=sum(each["owned"] for each in gpu),
        gpu_kv_blocks_cached=sum(each["cached"] for each in gpu),
        host_kv_blocks=sum(pool.num_cpu_blocks for pool in pools),
        host_kv_blocks_used=sum(each["owned"] for each in host),
        host_kv_blocks_cached=sum(each["cached"] for each in host),
        prefix_queried_tokens=on_gpu + on_host + first.misses * size,
        prefix_hit_gpu_tokens=on_gpu,
        prefix_hit_host_tokens=on_host,
        steps=core.num_steps,
        step_s=core.step_s,
        prefill_tokens=stats.num_prefill_tokens,
        decode_tokens=stats.num_decode_tokens,
        preemptions=stats.num_preemptions,
        swaps_out=stats.num_swaps_out,
        swaps_in=stats.num_swaps_in,
        finished=stats.num_finished,
        aborted=stats.num_aborted,
        failed=stats.num_failed,
        link_weight_bytes=moved.h2d_bytes + moved.in_place_bytes,
        link_expert_bytes=expert_bytes,
        expert_hits=expert_hits,
        expert_misses=expert_misses,
        link_kv_bytes=kv_bytes,
        link_bytes_per_step=use.bytes_per_step,
        link_share=use.bytes_per_s / (rate_gb_s * GB) if rate_gb_s else None,
    )
