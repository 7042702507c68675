"""kv.swap_space: layers that do not fit go to it first, KV blocks take the rest. No torch."""

import math
from dataclasses import replace

from engine.accounting import (
    GIB,
    Asked,
    asked_kv_sizes,
    build_plan,
    has_kv_room,
    served,
    takes_swap_space,
)
from engine.choose import largest
from engine.placement import Assignment, assign, assign_spread
from engine.plan import lay_out


def with_swap_space(asked: Asked, size_gib: float) -> Asked:
    """The same question with another kv.swap_space."""
    kv = replace(asked.config.kv, swap_space=size_gib)
    return replace(asked, config=replace(asked.config, kv=kv))


def least_swap_space(asked: Asked) -> float | None:
    """Return the least swap_space with which there is room, to 0.01 GiB; None: there is none."""

    def is_short(hundredths: int) -> bool:
        size = hundredths / 100
        return spread_that_fits(with_swap_space(asked, size), int(size * GIB)) is None

    kv_bytes = asked_kv_sizes(asked).sequence_bytes(asked.max_model_len)
    most = math.ceil(100 * (asked.spec.weight_bytes(asked.dtype) + kv_bytes) / GIB)
    short = largest(1, most, is_short)
    return None if short == most else ((short or 0) + 1) / 100


def assign_as_set(asked: Asked) -> Assignment | None:
    """Return what the offload settings place; None: kv.swap_space is to take more than it holds."""
    if not takes_swap_space(asked):
        return assign(asked.spec, asked.config.offload, asked.dtype)
    count = spread_that_fits(asked, int(asked.config.kv.swap_space * GIB))
    return None if count is None else assign_spread(asked.spec, count)


def spread_that_fits(asked: Asked, room: int) -> int | None:
    """Return the fewest layers, spread evenly over the host, with which there is room for KV.

    Args:
        asked: What is asked.
        room: Of weights in host memory, bytes.
    """
    layer_bytes = spread_bytes(asked, 1)
    for count in range(asked.spec.num_hidden_layers + 1):
        if count * layer_bytes > room:
            return None
        plan = build_plan(asked, served(asked, assign_spread(asked.spec, count)))
        if has_kv_room(plan):
            return count
    return None


def spread_bytes(asked: Asked, count: int) -> int:
    """Return the bytes of so many whole layers in host memory."""
    return count * lay_out(asked.spec, assign_spread(asked.spec, 1), asked.dtype).offloaded_bytes
