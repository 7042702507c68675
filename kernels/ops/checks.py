"""Checks that operators share: comparisons of shape, dtype, device and stride, nothing else.

No check reads a tensor's values, so none waits for the device.
"""

import torch

from kernels.arguments import HostCache

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Element types that every operator accepts."""


class KernelArgumentError(ValueError):
    """An operator was called with an argument that it cannot take.

    Attributes:
        what: the operator's argument, as "operator.argument".
        expected: the rule that the argument breaks.
        got: what the caller passed.
    """

    def __init__(self, what: str, expected: str, got: str) -> None:
        operator = what.partition(".")[0]
        super().__init__(f"{what}: expected {expected}, got {got}. See {operator} in kernels.ops.")
        self.what = what
        self.expected = expected
        self.got = got


def check_tensor(
    name: str,
    x: torch.Tensor,
    shape: tuple[int | None, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    last_contiguous: bool = True,
) -> None:
    """Raise unless a tensor has this shape, dtype and device.

    Args:
        name: the argument's name for the message, as "operator.argument".
        x: the tensor.
        shape: one entry a dimension; None stands for any length.
        dtype: the element type.
        device: where the tensor must lie.
        last_contiguous: also ask for stride 1 in the last dimension.

    Raises:
        KernelArgumentError: naming the first rule that the tensor breaks.
    """
    if x.shape != shape:
        _check_shape(name, x, shape)
    if x.dtype != dtype:
        raise KernelArgumentError(name, str(dtype), str(x.dtype))
    if x.device != device:
        raise KernelArgumentError(name, f"a tensor on {device}", f"one on {x.device}")
    if last_contiguous:
        check_stride(name, x)


def check_stride(name: str, x: torch.Tensor) -> None:
    """Raise unless a tensor has stride 1 in the last dimension.

    Args:
        name: the argument's name for the message, as "operator.argument".
        x: the tensor.

    Raises:
        KernelArgumentError: if another stride is seen.
    """
    # To ask whether all is contiguous takes a fraction of what it takes to ask for a stride.
    if not x.is_contiguous() and x.stride(-1) != 1 and x.shape[-1] > 1:
        raise KernelArgumentError(
            name, "stride 1 in the last dimension", f"strides {tuple(x.stride())}"
        )


def check_float(name: str, x: torch.Tensor) -> None:
    """Raise unless a tensor holds one of the float types of the operators.

    Args:
        name: the argument's name for the message, as "operator.argument".
        x: the tensor.

    Raises:
        KernelArgumentError: if the dtype is another one.
    """
    if x.dtype not in FLOAT_DTYPES:
        raise KernelArgumentError(name, "float32, bfloat16 or float16", str(x.dtype))


def check_dims(name: str, x: torch.Tensor, dims: str) -> None:
    """Raise unless a tensor has as many dimensions as there are shape letters.

    Args:
        name: the argument's name for the message, as "operator.argument".
        x: the tensor.
        dims: one shape letter a dimension, for example "TNH".

    Raises:
        KernelArgumentError: if the number of dimensions differs.
    """
    if x.dim() != len(dims):
        raise KernelArgumentError(name, f"shape [{', '.join(dims)}]", f"shape {tuple(x.shape)}")


def check_host(what: str, host: HostCache, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Raise unless blocks beside a cache are like the cache's own.

    Args:
        what: the argument's name for the message, as "operator.argument".
        host: the blocks beside it.
        k_cache: [B, K, P, H].
        v_cache: [B, K, P, H].

    Raises:
        KernelArgumentError: if sizes, dtype, device or the strides within a block differ.
    """
    shape = (host.k.shape[0], *k_cache.shape[1:])
    for part, blocks, cache in (("k", host.k, k_cache), ("v", host.v, v_cache)):
        check_tensor(f"{what}.{part}", blocks, shape, cache.dtype, cache.device)
        if blocks.stride()[1:] != cache.stride()[1:]:
            expected = f"the strides of the cache within a block, {cache.stride()[1:]}"
            raise KernelArgumentError(f"{what}.{part}", expected, f"{blocks.stride()[1:]}")


def _check_shape(name: str, x: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    agrees = len(x.shape) == len(shape) and all(
        want is None or want == have for want, have in zip(shape, x.shape, strict=True)
    )
    if not agrees:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise KernelArgumentError(name, f"shape ({wanted})", f"shape {tuple(x.shape)}")
