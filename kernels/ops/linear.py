"""Products with weights: of tokens, with a gate behind them, and rows of an embedding table.

Shape letters: T tokens, D hidden, F feed-forward, V vocabulary.
"""

from typing import Any

import torch

from kernels.arguments import DecodeWorkspace
from kernels.ops.checks import (
    KernelArgumentError,
    check_dims,
    check_float,
    check_stride,
    check_tensor,
)
from kernels.ref import linear as ref
from kernels.sizes import MAX_SMALL_TOKENS

# Triton is imported by the first call on a GPU: machines without one need not have it.
# ruff: noqa: PLC0415


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    workspace: DecodeWorkspace | None = None,
) -> torch.Tensor:
    """Return x @ weight.T + bias.

    On a GPU a product of at most MAX_SMALL_TOKENS bfloat16 or float16 tokens runs in a kernel that
    reads the weight once; which kernel runs, and so the result, follows from the number of tokens,
    the sizes and the dtype, never from where the weight lies. There a token's result depends on no
    other token, and is the same in every batch of 1 to 16 tokens, of 17 to 32 and of 33 to 64.
    Where the weight fills tiles of 16 rows (of gates, of ups) and 64 inputs, on a card of compute
    capability 8.0 or more, the kernel is that of weights in codes, with the same bits.
    Sums are float32, and their order is fixed: the same call gives the same bits.

    Args:
        x: [..., in], stride 1 in the last dimension where few tokens run on a GPU.
        weight: [out, in], dtype of x; on a GPU also a CUDA tensor over pinned host memory.
        bias: [out], dtype of x, or None.
        workspace: from decode_workspace; its counters are used. Allocated if None. Read by no other
            call until this one is done. The CPU needs none.

    Returns:
        A new tensor [..., out], dtype of x.
    """
    _check_linear("linear", x, weight, bias)
    if not _is_small(x, weight):
        return ref.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    if _fills_tiles(rows, weight):
        from kernels.cuda import products

        return products.linear(rows, weight, bias).view(*x.shape[:-1], -1)
    from kernels.triton import small_linear

    counters = None if workspace is None else workspace.counters
    return small_linear.linear(rows, weight, bias, counters).view(*x.shape[:-1], -1)


def linear_gated_mul(
    x: torch.Tensor,
    weight_2FD: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_gelu: bool = False,
) -> torch.Tensor:
    """Return gated_mul(linear(x, weight, bias)), in one kernel where linear has its own.

    The product is rounded before the activation, as linear rounds it. What linear says of batches
    and of the weight's place holds here too.

    Args:
        x: [..., D], as linear's.
        weight_2FD: F rows of gate and then F of up, as linear's.
        bias: [2F], dtype of x, or None.
        is_gelu: as gated_mul's.

    Returns:
        A new tensor [..., F], dtype of x.
    """
    name = "linear_gated_mul"
    _check_linear(name, x, weight_2FD, bias)
    if weight_2FD.shape[0] % 2:
        got = f"{weight_2FD.shape[0]}"
        raise KernelArgumentError(f"{name}.weight", "an even number of rows", got)
    if not _is_small(x, weight_2FD):
        product = ref.linear(x, weight_2FD, bias)
        gated = gated_mul(product.reshape(-1, product.shape[-1]), is_gelu=is_gelu)
        return gated.view(*x.shape[:-1], gated.shape[-1])
    rows = x.reshape(-1, x.shape[-1])
    if _fills_tiles(rows, weight_2FD, is_gated=True):
        from kernels.cuda import products

        gated = products.linear(rows, weight_2FD, bias, is_gated=True, is_gelu=is_gelu)
    else:
        from kernels.triton import small_linear

        gated = small_linear.linear_gated_mul(rows, weight_2FD, bias, is_gelu=is_gelu)
    return gated.view(*x.shape[:-1], -1)


def kernels_of(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_gated: bool,
    max_tokens: int,
    has_experts: bool = False,
) -> set[Any]:
    """Return the CUDA kernels that products with a weight launch, to be compiled before.

    Args:
        shape: [N, K] of the weight.
        dtype: of the weight and the tokens.
        device: where they run; on a CPU there are none.
        is_gated: whether rows are gates and then as many ups.
        max_tokens: of a product.
        has_experts: whether the weight is a matrix of experts; N is of one.
    """
    if device.type != "cuda":
        return set()
    from kernels.cuda import experts, products

    kernels_of = (experts if has_experts else products).kernels_of
    found: set[Any] = kernels_of(shape, dtype, device, is_gated=is_gated, max_tokens=max_tokens)
    return found


def gated_mul(gate_up_T2F: torch.Tensor, *, is_gelu: bool = False) -> torch.Tensor:
    """Return act(gate) * up of a fused projection, rounding once.

    Args:
        gate_up_T2F: [T, 2F], F columns of gate and then F of up, stride 1 in the last dimension.
        is_gelu: act is gelu, approximated by tanh; else silu.

    Returns:
        A new contiguous tensor [T, F], dtype of the argument.
    """
    _check_gate_up("gated_mul", gate_up_T2F)
    if gate_up_T2F.is_cuda:
        from kernels.triton import activation

        return activation.gated_mul(gate_up_T2F, is_gelu=is_gelu)
    return ref.gated_mul(gate_up_T2F, is_gelu=is_gelu)


def embedding(
    ids_T: torch.Tensor, table_VD: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Return the table's rows for these ids, times a scale if there is one.

    Args:
        ids_T: int64, 0 to V - 1.
        table_VD: on a GPU also a CUDA tensor over pinned host memory, of which only the rows asked
            for cross the link.
        scale: rounded to the dtype of the table before it multiplies.

    Returns:
        A new tensor [T, D], dtype of the table.
    """
    check_dims("embedding.table", table_VD, "VD")
    check_float("embedding.table", table_VD)
    check_tensor("embedding.ids", ids_T, (None,), torch.int64, table_VD.device)
    return ref.embedding(ids_T, table_VD, scale)


def _fills_tiles(rows: torch.Tensor, weight: torch.Tensor, *, is_gated: bool = False) -> bool:
    """Tell whether few tokens take the kernel that plain weights and codes share."""
    from kernels.cuda import products

    return products.can_run(rows, weight, is_gated=is_gated)


def _is_small(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Tell whether a product runs in the kernel for few tokens."""
    if not x.is_cuda or x.dtype == torch.float32 or weight.numel() == 0:
        return False
    num_tokens = x.numel() // x.shape[-1]
    return 0 < num_tokens <= MAX_SMALL_TOKENS and x.stride(-1) == weight.stride(-1) == 1


def _check_linear(
    name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Raise unless the arguments of a product agree with each other.

    Raises:
        KernelArgumentError: naming the first argument that does not fit.
    """
    check_float(f"{name}.x", x)
    if x.dim() == 0:
        raise KernelArgumentError(f"{name}.x", "one dimension or more", "none")
    rows = weight.shape[0] if weight.dim() == 2 else None
    shape = (rows, x.shape[-1])
    check_tensor(f"{name}.weight", weight, shape, x.dtype, x.device, last_contiguous=False)
    if bias is not None:
        check_tensor(f"{name}.bias", bias, (weight.shape[0],), x.dtype, x.device)


def _check_gate_up(name: str, gate_up_T2F: torch.Tensor) -> None:
    """Raise unless a tensor can be split into gates and ups.

    Raises:
        KernelArgumentError: naming what does not fit.
    """
    what = f"{name}.gate_up"
    check_float(what, gate_up_T2F)
    check_dims(what, gate_up_T2F, "TF")
    width = gate_up_T2F.shape[1]
    if width % 2:
        raise KernelArgumentError(what, "an even number of columns", f"{width}")
    check_stride(what, gate_up_T2F)
