"""Weights in codes or quantised on a GPU: the whole matrix restored, or single rows of codes."""

import functools
from typing import Final

import torch

from kernels.arguments import Codes, Quantised
from kernels.cuda.driver import Kernel, launch
from kernels.cuda.loaders import CODES, Loader, args_of, loader_of

_RESTORE_WARPS: Final = 2
_RESTORED_BYTES: Final = 16 * 528
"""Shared memory of the rows that a warp writes."""
_ROWS: Final = Kernel("rows", 128)


def restore_kernel(loader: Loader, *, is_half: bool = False) -> Kernel:
    """Return the kernel that restores weights."""
    name = f"restore<{loader.expression}>"
    return Kernel(name, 32 * _RESTORE_WARPS, is_half, starts_early=False)


def restore(weight: Codes | Quantised, out: torch.Tensor) -> None:
    """Launch restore of kernels.ops.codes or kernels.ops.quantised on the current stream.

    Args:
        weight: of whole tiles.
        out: bfloat16 or float16, at a multiple of 16 bytes.
    """
    loader = CODES if isinstance(weight, Codes) else loader_of(weight)
    args = args_of(weight, "restore")
    args.out = out.data_ptr()
    shape = _launch_shape(*weight.shape, loader, is_half=out.dtype == torch.float16)
    launch(*shape, args, out.device)


@functools.cache
def _launch_shape(
    num_rows: int, num_columns: int, loader: Loader, *, is_half: bool
) -> tuple[Kernel, int, int]:
    """Return the kernel that restores a matrix, its blocks and the shared memory of each."""
    jobs = num_rows // 16 * -(-num_columns // 256)
    shared_bytes = _RESTORE_WARPS * (4 * loader.chunk_bytes(1) + _RESTORED_BYTES)
    return restore_kernel(loader, is_half=is_half), -(-jobs // _RESTORE_WARPS), shared_bytes


def rows(codes: Codes, ids_T: torch.Tensor) -> torch.Tensor:
    """Launch kernels.ops.codes.embedding on the current stream, without its scale."""
    num_columns = codes.shape[1]
    out = torch.empty((ids_T.shape[0], num_columns), dtype=torch.bfloat16, device=ids_T.device)
    ids, args = ids_T.contiguous(), args_of(codes, "rows")
    args.x, args.out = ids.data_ptr(), out.data_ptr()
    launch(_ROWS, ids.shape[0], 0, args, ids.device)
    return out
