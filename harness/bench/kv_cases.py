"""Engines of the rows on the KV cache."""

from dataclasses import dataclass, field
from typing import Any, Final

from harness.bench.cases import Case, Work
from harness.bench.kv_work import KVWork

GROUP: Final = "kv"
"""Name of all these cases together."""
MODEL: Final = "llama31_8b"
BATCHED_TOKENS: Final = 4096
"""Of a step: what leaves about 42,000 tokens of room beside the model on 24 GiB."""


@dataclass(frozen=True, kw_only=True)
class KVAsked:
    """What the command line chose for these rows."""

    memory_gib: float = 24.0
    utilization: float = 0.9
    host_gib: float = 16.0
    """Host blocks of every case but the one of many conversations."""
    turns_gib: float = 32.0
    offload: tuple[int, int, int] = (8, 2, 2)
    """Layers copied ahead beside a sequence beyond the GPU's room."""
    short_len: int = 16_384
    """max_model_len where no sequence is longer than the GPU's room."""
    work: KVWork = field(default_factory=KVWork)


def kv_cases(asked: KVAsked) -> list[Case]:
    """Return the cases in order.

    Args:
        asked: sizes and lengths.
    """
    common: dict[str, Any] = {
        "memory_gib": asked.memory_gib,
        "utilizations": (asked.utilization,),
        "work": Work(batches=()),
        "kv_work": asked.work,
    }
    short = common | {"max_model_len": asked.short_len, "max_num_seqs": asked.work.most_sequences}
    long = common | {"max_num_seqs": min(8, asked.work.most_sequences)}
    names = ("offload_group_size", "offload_num_in_group", "offload_prefetch_step")
    host, split = f"kv=cpu, {asked.host_gib:g} GiB", "/".join(map(str, asked.offload))
    caching: dict[str, Any] = {"enable_prefix_caching": True}
    cpu, large = (caching | {"cpu_gib": size} for size in (asked.host_gib, asked.turns_gib))
    beside = ("fits", "ttft", "itl", "shared", "parked", "rounds")
    return [
        Case(name="kv_bare", title="no engine", parts=("moves", "attention"), **common),
        Case(
            name="kv_gpu",
            title="kv=gpu",
            parts=("fits", "rounds", "shared", "turns"),
            kv=caching,
            **short,
        ),
        Case(name="kv_cpu", title=host, parts=beside, kv=cpu, **short),
        Case(name="kv_long", title=f"{host}, one sequence", parts=("long",), kv=cpu, **long),
        Case(
            name="kv_weights",
            title=f"{host}, prefetch {split}",
            parts=("streamed",),
            kv=cpu,
            offload=dict(zip(names, asked.offload, strict=True)),
            **long,
        ),
        Case(
            name="kv_turns",
            title=f"kv=cpu, {asked.turns_gib:g} GiB",
            parts=("turns",),
            kv=large,
            **short,
        ),
    ]
