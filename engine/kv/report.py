"""Use of the KV blocks of both tiers and what became of their content, as plain data."""

from dataclasses import asdict
from typing import Any

from engine.kv.groups import BlockGroups
from engine.kv.tiers import TieredBlockPool


def kv_stats(groups: BlockGroups) -> dict[str, Any]:
    """Return the figures of all groups of layers, counts in blocks unless the name says otherwise.

    `gpu`, `cpu`, `evictions`, `stores_skipped` and `pool` are sums over the groups, and `groups`
    has each one's. `prefix` counts sequences that were not preempted: tokens that need not be
    computed, by where the first group had them, and bytes of the blocks found in all groups.
    """
    pools, size = groups.pools, groups.block_size
    parts = [_of_pool(pool) for pool in pools]
    sums = {name: _sum([part[name] for part in parts]) for name in parts[0]}
    first = pools[0].stats
    return {
        "block_bytes": pools[0].block_bytes,
        **sums,
        "prefix": {
            "hits_gpu_tokens": (first.hits_gpu + first.hits_unseen_gpu) * size,
            "hits_cpu_tokens": (first.hits_cpu + first.hits_unseen_cpu) * size,
            "missed_tokens": first.misses * size,
            "hits_gpu_bytes": sum(pool.stats.hits_gpu * pool.block_bytes for pool in pools),
            "hits_cpu_bytes": sum(pool.stats.hits_cpu * pool.block_bytes for pool in pools),
        },
        "stores_skipped": sums["pool"]["stores_skipped"],
        "groups": [
            part | {"block_bytes": pool.block_bytes}
            for part, pool in zip(parts, pools, strict=True)
        ],
    }


def _of_pool(pool: TieredBlockPool) -> dict[str, dict[str, int]]:
    gpu, cpu, stats = asdict(pool.use("gpu")), asdict(pool.use("cpu")), pool.stats
    del gpu["in_transit"]
    return {
        "gpu": {"blocks": pool.num_gpu_blocks, **gpu},
        "cpu": {"blocks": pool.num_cpu_blocks, **cpu, "in_place": pool.num_in_place},
        "evictions": {
            "gpu_kept": stats.evicted_kept,
            "gpu_lost": stats.evicted_lost,
            "cpu": stats.evicted_cpu,
        },
        "pool": stats.as_dict(),
    }


def _sum(counts: list[dict[str, int]]) -> dict[str, int]:
    return {name: sum(each[name] for each in counts) for name in counts[0]}
