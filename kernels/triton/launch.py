"""Launching a kernel without Triton's look at every argument of every call."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from triton.runtime import driver

_ALIGNMENT = 16
"""Triton compiles a variant for pointers at multiples of so many bytes."""
_address = torch.Tensor.data_ptr
_dtype = operator.attrgetter("dtype")


class Launcher:
    """Launches one kernel with the same constants, and keeps what Triton compiled for it.

    The kernel's parameters are in this order: pointers; pointers of which Triton does not
    distinguish aligned ones (do_not_specialize_on_alignment); integers that it does not distinguish
    (do_not_specialize); other numbers; constants. The first call with certain dtypes and numbers
    goes through Triton, and so does each with a pointer of the first kind that is not aligned.

    Args:
        kernel: what triton.jit returned.
        device: where it runs.
        **constants: and options of Triton.
    """

    def __init__(self, kernel: Any, device: torch.device, **constants: Any) -> None:
        self._kernel, self._device, self._constants = kernel, device, constants
        self._compiled: dict[Any, tuple[Any, ...]] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[torch.Tensor],
        indices: Sequence[torch.Tensor],
        varying: tuple[int, ...],
        numbers: tuple[float, ...],
    ) -> None:
        """Launch it on the current stream.

        Args:
            grid: programs.
            tensors: on the device, which is the current one.
            indices: likewise; they may begin anywhere.
            varying: less than 2**31 each.
            numbers: sizes and strides, of which a model has few; of the same types in every call.
        """
        pointers = [*map(_address, tensors)]
        key = (numbers, *map(_dtype, tensors))
        found = self._compiled.get(key)
        is_aligned = functools.reduce(operator.or_, pointers) % _ALIGNMENT == 0
        if found is None or not is_aligned:
            arguments = *tensors, *indices, *varying, *numbers
            kernel = self._kernel[grid](*arguments, **self._constants)
            if is_aligned and kernel is not None:  # an interpreter compiles nothing
                self._compiled[key] = self._prepared(kernel)
            return
        run, function, metadata, stream_of, unread = found
        run(
            *grid,
            stream_of(self._device.index),
            function,
            metadata,
            None,
            None,
            None,
            *pointers,
            *map(_address, indices),
            *varying,
            *numbers,
            *unread,
        )

    def _prepared(self, kernel: Any) -> tuple[Any, ...]:
        """Return what a launch takes of a kernel; constants are in its code, and not read."""
        unread = [None for each in self._kernel.params if each.is_constexpr]
        stream_of = driver.active.get_current_stream
        return kernel.run, kernel.function, kernel.packed_metadata, stream_of, unread


def power_of_2(size: int) -> int:
    """Return the next power of 2; Triton's own takes some microseconds.

    Args:
        size: at least 1.
    """
    return 1 << (size - 1).bit_length()
