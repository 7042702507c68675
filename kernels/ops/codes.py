"""Products with weights in codes of 12 bits, which are restored to the bit; how codes are made.

kernels.arguments.Codes says what codes are. Shape letters: T tokens, N rows, K columns.
"""

from typing import Any

import torch

from kernels.arguments import Codes, DecodeWorkspace, Escapes
from kernels.ops import linear as plain
from kernels.ops.checks import KernelArgumentError, check_dims, check_tensor
from kernels.ref import codes as ref
from kernels.sizes import MAX_SMALL_TOKENS, has_codes

# The CUDA kernels are imported by the first call on a GPU: machines without one need not have them.
# ruff: noqa: PLC0415


def pack(weight: torch.Tensor) -> Codes:
    """Return a matrix in codes.

    Args:
        weight: [N, K] bfloat16, stride 1 in the last dimension; N a multiple of 16, K of 64.

    Returns:
        New tensors on the device of the weight. Waits for a GPU, as pack_into does.

    Raises:
        TooManyEscapesError: saying how many weights the table would have to hold.
    """
    _check_weight("pack", weight)
    return ref.pack(weight)


def pack_into(weight: torch.Tensor, codes: Codes) -> Escapes:
    """Write a matrix in codes.

    Beside its arguments it takes at most kernels.sizes.pack_scratch_bytes of memory, and waits for
    a GPU once every kernels.sizes.pack_chunk_rows.

    Args:
        weight: as pack's.
        codes: of the shape of the weight, contiguous, on its device; written. Its table may be
            larger or smaller than pack's.

    Returns:
        How many escapes the matrix has. Where they do not fit the table's capacity, what is written
        is of no use.
    """
    _check_weight("pack_into", weight)
    _check_device("pack_into", codes, weight.device)
    if codes.shape != weight.shape:
        raise KernelArgumentError("pack_into.codes", f"{tuple(weight.shape)}", f"{codes.shape}")
    return ref.pack_into(weight, codes)


def restore(codes: Codes, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the matrix in bfloat16, equal to what was packed in every bit.

    Args:
        codes: of N rows and K columns; on a GPU also CUDA tensors over pinned host memory.
        out: [N, K] bfloat16, contiguous, at a multiple of 16 bytes; written. Allocated if None.

    Returns:
        The argument `out`, or a new tensor.
    """
    if out is None:
        out = codes.bytes.new_empty(codes.shape, dtype=torch.bfloat16)
    check_tensor("restore.out", out, codes.shape, torch.bfloat16, codes.bytes.device)
    if not out.is_contiguous():
        raise KernelArgumentError("restore.out", "a contiguous tensor", f"strides {out.stride()}")
    if rest := out.data_ptr() % 16:
        raise KernelArgumentError("restore.out", "memory at a multiple of 16", f"{rest} more")
    if out.is_cuda:
        from kernels.cuda import restore as cuda

        cuda.restore(codes, out)
        return out
    return ref.restore(codes, out)


def linear(
    x: torch.Tensor,
    codes: Codes,
    bias: torch.Tensor | None = None,
    *,
    workspace: DecodeWorkspace | None = None,  # noqa: ARG001
) -> torch.Tensor:
    """Return x @ weight.T + bias.

    The result is that of kernels.ops.linear over the restored weight, in every bit. On a GPU at
    most MAX_SMALL_TOKENS tokens restore it in registers; more restore it whole, into the scratch of
    the codes or a new tensor.

    Args:
        x: [..., K] bfloat16.
        codes: the weight, of N rows and K columns; on a GPU also CUDA tensors over pinned host
            memory.
        bias: [N] bfloat16, or None.
        workspace: as that of kernels.ops.linear, in whose place this operator may be called; it
            needs none.

    Returns:
        A new tensor [..., N] bfloat16.
    """
    _check_linear("linear", x, codes, bias)
    if not x.is_cuda:
        return ref.linear(x, codes, bias)
    if _is_small(x):
        from kernels.cuda import products

        rows = x.reshape(-1, x.shape[-1])
        return products.linear(rows, codes, bias).view(*x.shape[:-1], -1)
    return plain.linear(x, _restored(codes), bias)


def linear_gated_mul(
    x: torch.Tensor, codes: Codes, bias: torch.Tensor | None = None, *, is_gelu: bool = False
) -> torch.Tensor:
    """Return gated_mul(linear(x, codes, bias)), of kernels.ops.linear and this file.

    Args:
        x: as linear's.
        codes: N / 2 rows of gate, a multiple of 16, and then as many of up, as linear's.
        bias: [N] bfloat16, or None.
        is_gelu: as gated_mul's.

    Returns:
        A new tensor [..., N / 2] bfloat16.
    """
    _check_linear("linear_gated_mul", x, codes, bias, is_gated=True)
    if not x.is_cuda:
        return ref.linear_gated_mul(x, codes, bias, is_gelu=is_gelu)
    if _is_small(x):
        from kernels.cuda import products

        rows = x.reshape(-1, x.shape[-1])
        out = products.linear(rows, codes, bias, is_gated=True, is_gelu=is_gelu)
        return out.view(*x.shape[:-1], -1)
    return plain.linear_gated_mul(x, _restored(codes), bias, is_gelu=is_gelu)


def kernels_of(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_gated: bool,
    max_tokens: int,
    has_experts: bool = False,
) -> set[Any]:
    """Return the CUDA kernels that products with codes launch, as that of kernels.ops.linear.

    Args:
        shape: [N, K] of the matrix.
        dtype: bfloat16.
        device: as there.
        is_gated: as there.
        max_tokens: as there.
        has_experts: as there.
    """
    if device.type != "cuda":
        return set()
    from kernels.cuda import experts, products
    from kernels.cuda import restore as cuda
    from kernels.cuda.loaders import CODES

    kernels_of = (experts if has_experts else products).kernels_of
    found: set[Any] = kernels_of(
        shape, dtype, device, is_gated=is_gated, max_tokens=max_tokens, loader=CODES
    )
    return found | ({cuda.restore_kernel(CODES)} if max_tokens > MAX_SMALL_TOKENS else set())


def embedding(ids_T: torch.Tensor, codes: Codes, scale: float | None = None) -> torch.Tensor:
    """Return rows of a table for these ids, times a scale if there is one.

    Args:
        ids_T: int64, 0 to N - 1.
        codes: the table; of codes over pinned host memory only what these rows need is read.
        scale: rounded to bfloat16 before it multiplies.

    Returns:
        A new tensor [T, K] bfloat16.
    """
    check_tensor("embedding.ids", ids_T, (None,), torch.int64, codes.bytes.device)
    if ids_T.is_cuda and ids_T.numel():
        from kernels.cuda import restore as cuda

        rows: torch.Tensor = cuda.rows(codes, ids_T)
        return rows if scale is None else rows.mul_(torch.tensor(scale, dtype=rows.dtype).item())
    return ref.embedding(ids_T, codes, scale)


def _restored(codes: Codes) -> torch.Tensor:
    """Return the matrix of codes on a GPU, in their scratch if there is one."""
    from kernels.cuda import restore as cuda

    if codes.scratch is None:
        return restore(codes)
    cuda.restore(codes, codes.scratch)
    return codes.scratch


def _is_small(x: torch.Tensor) -> bool:
    """Tell whether a product of tokens [..., K] restores its weight in registers."""
    return 0 < x.numel() // x.shape[-1] <= MAX_SMALL_TOKENS


def _check_linear(
    name: str,
    x: torch.Tensor,
    codes: Codes,
    bias: torch.Tensor | None,
    *,
    is_gated: bool = False,
) -> None:
    """Raise unless the arguments of a product agree with each other."""
    _check_device(name, codes, x.device)
    num_rows, num_columns = codes.shape
    if is_gated and num_rows % 32:
        raise KernelArgumentError(f"{name}.codes", "a multiple of 32 rows", f"{num_rows}")
    shape = (*x.shape[:-1], num_columns)
    check_tensor(f"{name}.x", x, shape, torch.bfloat16, x.device, last_contiguous=False)
    if bias is not None:
        check_tensor(f"{name}.bias", bias, (num_rows,), torch.bfloat16, x.device)


def _check_weight(name: str, weight: torch.Tensor) -> None:
    """Raise unless a matrix can be kept in codes."""
    what = f"{name}.weight"
    check_dims(what, weight, "NK")
    check_tensor(what, weight, tuple(weight.shape), torch.bfloat16, weight.device)
    if not has_codes(*weight.shape):
        expected = "a multiple of 16 rows and of 64 columns, not 0"
        raise KernelArgumentError(what, expected, f"shape {tuple(weight.shape)}")


def _check_device(name: str, codes: Codes, device: torch.device) -> None:
    """Raise unless codes are where the other arguments are; their tensors agree by themselves."""
    if codes.bytes.device != device:
        expected, got = f"tensors on {device}", f"ones on {codes.bytes.device}"
        raise KernelArgumentError(f"{name}.codes", expected, got)
