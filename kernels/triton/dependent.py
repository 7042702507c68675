"""Programmatic dependent launch: a kernel starts while the one before it on its stream ends.

A kernel with OVERLAPS calls `wait` before it touches anything that an earlier kernel wrote or
reads; what lies before may read weights and do index arithmetic only. It may also read what a step
brings along: positions, slots, lengths and block tables, which are copied to the card before its
first kernel starts. That is worth it: in every layer, weights push them out of the card's cache.
A program of every kernel that is launched so waits, if only before it ends, as products with
experts beside copies do; then waiting for the one before is waiting for all before. Programs that
find nothing to do end at once: while they waited they would hold places on the card.
`release` lets the next kernel take the room that is free. A kernel that fills the card calls it at
once, so that the next one is there when its last programs end. A norm does so too: few programs
wait there, and the product behind it copies its first weights while the product before it ends. A
short kernel of more programs calls it after its own wait: otherwise programs of the next large
kernel would take their places while those of the one before still hold theirs, and lie unevenly
over the card (measured: a step takes longer than with no overlap at all).
"""

import functools

import torch
import triton
import triton.language as tl

_FIRST_CAPABILITY = (9, 0)


@triton.jit
def wait():
    """Wait for the work of every earlier kernel; return 0, which loads can be made to depend on."""
    zero = tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;",
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    return tl.multiple_of(zero, 16)


@triton.jit
def release():
    """Let the next kernel start once every program of this one has come here."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;",
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def fetch(pointer):
    """Have what lies at a pointer in the card's cache soon."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointer.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Tell whether kernels on this device may start before the one before them has ended.

    Args:
        device: where the kernel runs; a CPU interprets kernels one after the other.
    """
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY


def launch_options(device: torch.device) -> dict[str, bool]:
    """Return OVERLAPS and the mode of a launch, as keyword arguments."""
    if can_overlap(device):
        return {"OVERLAPS": True, "launch_pdl": True}
    return {"OVERLAPS": False}
