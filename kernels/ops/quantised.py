"""Products with quantised weights; kernels.arguments.Quantised says what they are.

Shape letters: T tokens, N rows, K columns.
"""

from typing import Any

import torch

from kernels.arguments import DecodeWorkspace, Joined, Quantised, Stored
from kernels.ops import linear as plain
from kernels.ops.checks import KernelArgumentError, check_tensor
from kernels.ref import linear as plain_ref
from kernels.ref import quantised as ref
from kernels.sizes import MAX_SMALL_TOKENS

# Triton is imported by the first call on a GPU: machines without one need not have it.
# ruff: noqa: PLC0415


def pack(values_NK: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return values in the order of kernels.arguments.Quantised.

    Args:
        values_NK: uint8, each less than 2 ** bits.
        bits: 4, 5, 6 or 8.

    Returns:
        Its arrays values and high; None: there are no bits above the low four, or all lie together.
    """
    return ref.pack(values_NK, bits)


def pack_groups(each_NG: torch.Tensor) -> torch.Tensor:
    """Return what belongs to groups of columns in the order of kernels.arguments.Quantised.

    Args:
        each_NG: of every row its groups; any dtype.

    Returns:
        Its array [N, G], N filled up to whole tiles with zeros.
    """
    return ref.pack_groups(each_NG)


def restore(weight: Quantised, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the matrix in its dtype.

    Args:
        weight: of N rows and K columns; on a GPU also CUDA tensors over pinned host memory.
        out: [N, K] in the dtype of the weight, contiguous; written. Allocated if None.

    Returns:
        The argument `out`, or a new tensor. Columns are in the order in which they are kept.
    """
    device = weight.values.device
    if out is None:
        out = torch.empty(weight.shape, dtype=weight.dtype, device=device)
    check_tensor("restore.out", out, weight.shape, weight.dtype, device)
    if not out.is_contiguous():
        raise KernelArgumentError("restore.out", "a contiguous tensor", f"strides {out.stride()}")
    return _restore(weight, out) if out.is_cuda else ref.restore(weight, out)


def rows(weight: Quantised, ids_T: torch.Tensor) -> torch.Tensor:
    """Return rows of the matrix.

    Args:
        weight: as restore's; of pinned host memory only what these rows need is read.
        ids_T: int64, 0 to N - 1.

    Returns:
        A new tensor [T, K] in the dtype of the weight.
    """
    check_tensor("rows.ids", ids_T, (None,), torch.int64, weight.values.device)
    if ids_T.is_cuda:
        from kernels.triton import quantised

        return quantised.rows(weight, ids_T)
    return ref.rows(weight, ids_T)


def linear(
    x: torch.Tensor,
    weight: ref.Weight,
    bias: torch.Tensor | None = None,
    *,
    workspace: DecodeWorkspace | None = None,
) -> torch.Tensor:
    """Return x @ weight.T + bias.

    On a GPU at most MAX_SMALL_TOKENS tokens in bfloat16 or float16 restore the weight in registers;
    others restore it whole, into its scratch or a new tensor, before a product of torch. Which one
    runs, and so the result, never depends on where the weight lies. Where the weight fills tiles of
    16 rows (of gates, of ups) and 64 inputs, on a card of compute capability 8.0 or more, the
    result is that of kernels.ops.linear over the restored weight, in every bit.

    Args:
        x: [..., K], in the dtype of the weight.
        weight: of N rows and K columns; on a GPU also CUDA tensors over pinned host memory.
        bias: [N], dtype of x, or None.
        workspace: as that of kernels.ops.linear.

    Returns:
        A new tensor [..., N], dtype of x.
    """
    _check_linear("linear", x, weight, bias)
    if isinstance(weight, Joined):
        product = _joined(x, weight, workspace)
        return product if bias is None else product.add_(bias)
    if isinstance(weight, torch.Tensor):
        return plain.linear(x, weight, bias, workspace=workspace)
    if not x.is_cuda:
        return ref.linear(x, weight, bias)
    if weight.columns is not None:
        x = x.index_select(-1, weight.columns)
    if not _is_small(x):
        return plain_ref.linear(x, _restored(weight), bias)
    inputs = x.reshape(-1, x.shape[-1])
    if _fills_tiles(weight):
        from kernels.cuda import products

        return products.linear(inputs, weight, bias).view(*x.shape[:-1], -1)
    from kernels.triton import quantised

    counters = None if workspace is None else workspace.counters
    return quantised.linear(inputs, weight, bias, counters).view(*x.shape[:-1], -1)


def linear_gated_mul(
    x: torch.Tensor, weight: ref.Weight, bias: torch.Tensor | None = None, *, is_gelu: bool = False
) -> torch.Tensor:
    """Return gated_mul(linear(x, weight, bias)), of kernels.ops.linear and this file.

    Args:
        x: as linear's.
        weight: N / 2 rows of gate and then as many of up, as linear's.
        bias: [N], dtype of x, or None.
        is_gelu: as gated_mul's.

    Returns:
        A new tensor [..., N / 2], dtype of x.
    """
    name = "linear_gated_mul"
    _check_linear(name, x, weight, bias)
    if weight.shape[0] % 2:
        raise KernelArgumentError(f"{name}.weight", "an even number of rows", f"{weight.shape[0]}")
    if isinstance(weight, Quantised) and x.is_cuda and _is_small(x):
        inputs = x.reshape(-1, x.shape[-1])
        if weight.columns is not None:
            inputs = inputs.index_select(-1, weight.columns)
        if _fills_tiles(weight, is_gated=True):
            from kernels.cuda import products

            found = products.linear(inputs, weight, bias, is_gated=True, is_gelu=is_gelu)
            return found.view(*x.shape[:-1], -1)
        from kernels.triton import quantised

        found = quantised.linear(inputs, weight, bias, None, is_gated=True, is_gelu=is_gelu)
        return found.view(*x.shape[:-1], -1)
    product = linear(x, weight, bias)
    found = plain.gated_mul(product.reshape(-1, product.shape[-1]), is_gelu=is_gelu)
    return found.view(*x.shape[:-1], found.shape[-1])


def embedding(ids_T: torch.Tensor, weight: Quantised, scale: float | None = None) -> torch.Tensor:
    """Return rows of a table for these ids, times a scale if there is one.

    Args:
        ids_T: int64, 0 to N - 1.
        weight: the table; of pinned host memory only what these rows need is read.
        scale: rounded to the dtype of the table before it multiplies.

    Returns:
        A new tensor [T, K] in the dtype of the weight.
    """
    found = rows(weight, ids_T)
    return found if scale is None else found.mul_(torch.tensor(scale, dtype=found.dtype).item())


def kernels_of(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_gated: bool,
    max_tokens: int,
    has_experts: bool = False,
    stored: Stored | None = None,
) -> set[Any]:
    """Return the CUDA kernels that products launch, as that of kernels.ops.linear.

    Triton compiles others when they are first run.

    Args:
        shape: [N, K] of the matrix.
        dtype: of the tokens.
        device: as there.
        is_gated: as there.
        max_tokens: as there.
        has_experts: as there.
        stored: how the matrix is kept; None: in several ways, whose kernels are not known here.
    """
    if device.type != "cuda" or stored is None or stored.scale_dtype == torch.uint8:
        return set()
    from kernels.cuda import experts, products
    from kernels.cuda import restore as cuda
    from kernels.cuda.loaders import quantised

    kernels_of = (experts if has_experts else products).kernels_of
    num_columns = shape[1]
    group, subgroup = stored.group or num_columns, stored.subgroup or num_columns
    loader = quantised(stored.kind, stored.scale_dtype, group, subgroup, stored.has)
    found: set[Any] = kernels_of(
        shape, dtype, device, is_gated=is_gated, max_tokens=max_tokens, loader=loader
    )
    if found and max_tokens > MAX_SMALL_TOKENS:
        found.add(cuda.restore_kernel(loader, is_half=dtype == torch.float16))
    return found


def _joined(x: torch.Tensor, weight: Joined, workspace: DecodeWorkspace | None) -> torch.Tensor:
    """Return the products with all parts, which few tokens write side by side."""
    if not (x.is_cuda and _is_small(x) and all(map(_can_write, weight.parts))):
        parts = [linear(x, part, workspace=workspace) for part in weight.parts]
        return torch.cat(parts, -1)
    from kernels.cuda import products

    inputs, first = x.reshape(-1, x.shape[-1]), 0
    out = inputs.new_empty((inputs.shape[0], weight.shape[0]))
    for part in weight.parts:
        place = out[:, first : first + part.shape[0]]
        first += part.shape[0]
        own = inputs
        if isinstance(part, Quantised) and part.columns is not None:
            own = inputs.index_select(-1, part.columns)
        products.linear(own, part, None, out=place)
    return out.view(*x.shape[:-1], -1)


def _can_write(part: torch.Tensor | Quantised) -> bool:
    """Tell whether a product of few tokens with a part runs in the kernel that writes columns."""
    if isinstance(part, Quantised):
        return _fills_tiles(part)
    from kernels.cuda import products

    return products.can_run(part, part, is_gated=False)


def _restored(weight: Quantised) -> torch.Tensor:
    """Return the matrix on a GPU, in its scratch if there is one."""
    if weight.scratch is None:
        return restore(weight)
    return _restore(weight, weight.scratch)


def _restore(weight: Quantised, out: torch.Tensor) -> torch.Tensor:
    """Write the matrix on a GPU into a contiguous tensor of its shape and dtype, and return it."""
    if _fills_tiles(weight) and out.data_ptr() % 16 == 0:
        from kernels.cuda import restore as cuda

        cuda.restore(weight, out)
    else:
        from kernels.triton import quantised

        quantised.restore(weight, out)
    return out


def _fills_tiles(weight: Quantised, *, is_gated: bool = False) -> bool:
    """Tell whether a matrix on a GPU takes the kernels that it shares with plain weights."""
    if weight.dtype == torch.float32 or weight.scale.dtype == torch.uint8:
        return False
    from kernels.cuda import products

    num_rows, num_columns = weight.shape
    device = weight.values.device
    return products.fills_tiles(num_rows, num_columns, device, is_gated=is_gated)


def _is_small(x: torch.Tensor) -> bool:
    """Tell whether a product of tokens [..., K] restores its weight in registers."""
    return x.dtype != torch.float32 and 0 < x.numel() // x.shape[-1] <= MAX_SMALL_TOKENS


def _check_linear(
    name: str, x: torch.Tensor, weight: ref.Weight, bias: torch.Tensor | None
) -> None:
    """Raise unless the arguments of a product agree with each other."""
    num_rows, num_columns = weight.shape
    first = weight.parts[0] if isinstance(weight, Joined) else weight
    at = first.values if isinstance(first, Quantised) else first
    check_tensor(
        f"{name}.x", x, (*x.shape[:-1], num_columns), first.dtype, at.device, last_contiguous=False
    )
    if bias is not None:
        check_tensor(f"{name}.bias", bias, (num_rows,), x.dtype, x.device)
