"""Attention sinks: what a head's softmax gives to no key."""

import triton
import triton.language as tl


@triton.jit
def sink_weights(sinks, heads, is_head, row_max):
    """Return what heads add to their softmax denominators, which are relative to row_max.

    row_max is of base-2 logarithms. Where a sink is far above it, nothing is left of a result
    already when it is divided by the bound.
    """
    sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32)
    return tl.exp2(tl.minimum(sink * 1.4426950408889634 - row_max, 126.0))
