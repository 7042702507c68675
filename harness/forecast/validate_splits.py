"""Twelve splits by hand that somebody who knows the model would try on one budget.

Each is a sort of split, and of that sort the one that moves the fewest bytes a step among those for
which the plan has the room that is asked for.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Final, NamedTuple

from engine.asked.config import EngineConfig
from engine.asked.offload import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from engine.model.spec import DTYPE_BYTES, ModelSpec
from engine.plan.memory import (
    Asked,
    DeviceFacts,
    MemoryPlan,
    build_plan,
    plan_fits,
    resolve_dtype,
    resolve_max_model_len,
    served,
)
from engine.plan.policy import assign
from engine.sealed import GIB

EMBED: Final = "embed_tokens"
PARTS: Final = (
    "self_attn.o_proj",
    "self_attn.qkv_proj",
    "mlp.down_proj",
    "self_attn",
    "mlp.gate_up_proj",
    "mlp",
    "",
)
"""Of a layer, by the selector; nothing: all of it."""
Plan = Callable[[str], MemoryPlan | None]
Split = tuple[str, OffloadConfig]


class _Sort(NamedTuple):
    """One sort of split and the sequences that it leaves room for."""

    options: list[Split]
    sequences: int


def hand_made(config: EngineConfig, spec: ModelSpec, facts: DeviceFacts) -> list[Split]:
    """Return 12 splits with their names; one that cannot fit moves as much as its sort can.

    Args:
        config: Budget and limits; its offload is replaced.
        spec: Sizes of the model.
        facts: Of the machine.
    """
    dtype = resolve_dtype(config, spec, facts.kind)
    asked = Asked(config, spec, facts, dtype, resolve_max_model_len(config, spec), reference=False)

    @cache
    def plan(name: str) -> MemoryPlan | None:
        offload = offloads[name]
        wanted = replace(asked, config=replace(config, offload=offload))
        found = build_plan(wanted, served(wanted, assign(spec, offload, dtype)))
        return found if plan_fits(found) else None

    total, every = spec.num_hidden_layers, config.engine.max_num_seqs
    half = max(1, every // 2)
    lumps = {count: (total, count) for count in range(1, total + 1)}
    spread = _groups(total)
    in_order = list(_uva_in_order(spec, DTYPE_BYTES[dtype]))
    parts = list(_uva_parts(spec, PARTS))
    ahead = list(_prefetch(spread, 1, PARTS))
    sorts = [
        _Sort(in_order, 1),
        _Sort(in_order, half),
        _Sort(parts, 1),
        _Sort(list(_uva_parts(spec, ("mlp",))), 1),
        _Sort(parts, half),
        _Sort(parts, every),
        _Sort(list(_prefetch(lumps, 1, ("",))), 1),
        _Sort(list(_prefetch(spread, 1, ("",))), 1),
        _Sort(list(_prefetch(spread, 2, ("",))), 1),
        _Sort(list(_prefetch(spread, 1, PARTS[:-1])), 1),
        _Sort(ahead, half),
        _Sort(ahead, every),
    ]
    offloads = {name: offload for sort in sorts for name, offload in sort.options}
    taken: list[str] = []
    for options, sequences in sorts:
        left = [name for name, _ in options if name not in taken]
        taken.append(_fewest_bytes(left, sequences, plan))
    return [(name, offloads[name]) for name in taken]


def _fewest_bytes(names: list[str], sequences: int, plan: Plan) -> str:
    """Return what moves least of those with the room, else what lacks least, else the last."""
    fitting: list[tuple[int, int, int]] = []
    for index, name in enumerate(names):
        found = plan(name)
        if found is not None:
            lacking = max(0, sequences * found.max_model_len - found.kv_tokens)
            fitting.append((lacking, found.bytes_per_step(), index))
    return names[min(fitting)[-1]] if fitting else names[-1]


def _groups(total: int) -> dict[int, tuple[int, int]]:
    """Group size and number in a group by the layers that they move, the smallest groups kept."""
    found: dict[int, tuple[int, int]] = {}
    for size in (2, 3, 4, 5, 6, 8, total):
        for num in range(1, size + 1):
            moved = sum(layer % size >= size - num for layer in range(total))
            if size <= total:
                found.setdefault(moved, (size, num))
    return dict(sorted(found.items()))


def _uva_in_order(spec: ModelSpec, dtype_bytes: int) -> Iterator[Split]:
    """Layers in order, tensor by tensor."""
    size = 0
    for layer in range(spec.num_hidden_layers):
        for tensor in spec.layer_tensors(layer):
            size += tensor.numel * dtype_bytes
            if tensor.name.split(".")[-2].endswith("_proj"):
                yield f"uva {size / GIB:.3f} GiB", _uva(size, [])


def _uva_parts(spec: ModelSpec, parts: tuple[str, ...]) -> Iterator[Split]:
    """The embedding table where it is untied, then the same part of the first layers."""
    outer = [] if spec.tie_word_embeddings else [EMBED]
    every = sum(tensor.numel for tensor in spec.tensors()) * max(DTYPE_BYTES.values())
    if outer:
        yield f"uva {EMBED}", _uva(every, outer)
    for part in parts:
        for count in range(1, spec.num_hidden_layers + 1):
            chosen = [f"layers.{i}" + (f".{part}" if part else "") for i in range(count)]
            words = [*outer, f"{part or 'all'} of {count} layers"]
            yield f"uva {' and '.join(words)}", _uva(every, [*outer, *chosen])


def _uva(num_bytes: int, params: list[str]) -> OffloadConfig:
    size = (num_bytes - 1) / GIB
    return OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=size, cpu_offload_params=params))


def _prefetch(
    groups: dict[int, tuple[int, int]], step: int, parts: tuple[str, ...]
) -> Iterator[Split]:
    for part in parts:
        for count, (size, num) in groups.items():
            if count <= step + 1:
                continue  # every layer would have a slot of its own
            name = f"prefetch {part or 'all'} of {count} layers, {size}/{num}/{step}"
            node = PrefetchOffloadConfig(
                offload_group_size=size,
                offload_num_in_group=num,
                offload_prefetch_step=step,
                offload_params=[part] if part else [],
            )
            yield name, OffloadConfig(prefetch=node)
