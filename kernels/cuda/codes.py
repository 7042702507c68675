"""Weights in codes on a GPU: the whole matrix restored, or single rows."""

from typing import Final

import torch

from kernels.arguments import Codes
from kernels.cuda.driver import Args, Kernel, launch
from kernels.cuda.products import set_codes

_RESTORE_WARPS: Final = 2
RESTORE: Final = Kernel("restore", 32 * _RESTORE_WARPS, starts_early=False)
_RESTORE_SHARED_BYTES: Final = _RESTORE_WARPS * 16 * 528
_ROWS: Final = Kernel("rows", 128)


def restore(codes: Codes, out: torch.Tensor) -> None:
    """Launch kernels.ops.codes.restore on the current stream."""
    num_rows, num_columns = codes.shape
    args = codes.launches.get("restore")
    if args is None:
        args = codes.launches["restore"] = Args(rows=num_rows, inputs=num_columns)
        set_codes(args, codes)
    args.out = out.data_ptr()
    jobs = num_rows // 16 * -(-num_columns // 256)
    launch(RESTORE, -(-jobs // _RESTORE_WARPS), _RESTORE_SHARED_BYTES, args, out.device)


def rows(codes: Codes, ids_T: torch.Tensor) -> torch.Tensor:
    """Launch kernels.ops.codes.embedding on the current stream, without its scale."""
    num_columns = codes.shape[1]
    out = torch.empty((ids_T.shape[0], num_columns), dtype=torch.bfloat16, device=ids_T.device)
    ids = ids_T.contiguous()
    args = Args(x=ids.data_ptr(), out=out.data_ptr(), inputs=num_columns)
    set_codes(args, codes)
    launch(_ROWS, ids.shape[0], 0, args, ids.device)
    return out
